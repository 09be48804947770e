"""The text format parser: equal to prometheus_client's wherever that reads a line, and never raising elsewhere."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from autoscaler.sources.exposition import MAX_LINE, Page, Series, SeriesCache, SeriesKey, make_page, parse_page

DATA = Path(__file__).parent.parent / "data" / "vllm"
PAGES = sorted(DATA.glob("*/*.prom"))


def everything(_: str) -> bool:
    return True


def parse(text: str | bytes) -> Page:
    return parse_page(text if isinstance(text, bytes) else text.encode(), SeriesCache(everything))


def rows(page: Page) -> list[tuple[str, dict[str, str], str]]:
    """Return the samples so that NaN equals NaN."""
    return [(each.name, dict(each.labels), repr(float(each.value))) for each in page.series()]


def oracle(text: str) -> list[tuple[str, dict[str, str], str]]:
    return [
        (sample.name, dict(sample.labels), repr(float(sample.value)))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_recorded_page_equals_prometheus_client(path: Path) -> None:
    page = parse(path.read_bytes())
    assert not page.bad
    assert rows(page) == oracle(path.read_text())
    assert len(page.keys) > 20


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_recorded_page_reads_the_same_when_its_lines_are_known(path: Path) -> None:
    cache = SeriesCache(everything)
    cold = parse_page(path.read_bytes(), cache)
    warm = parse_page(path.read_bytes(), cache)
    assert rows(warm) == rows(cold)
    assert all(one is other for one, other in zip(warm.keys, cold.keys, strict=True))


@pytest.mark.parametrize(
    ("line", "labels", "value"),
    [
        pytest.param('x{a="b"} 3', {"a": "b"}, 3.0, id="plain"),
        pytest.param("x 3", {}, 3.0, id="no-labels"),
        pytest.param("x{} 3", {}, 3.0, id="empty-labels"),
        pytest.param('x{a="b",} 3', {"a": "b"}, 3.0, id="trailing-comma"),
        pytest.param('x{a=""} 3', {"a": ""}, 3.0, id="empty-value"),
        pytest.param('x { a = "b" , c = "d" } 3', {"a": "b", "c": "d"}, 3.0, id="blanks-everywhere"),
        pytest.param('  x{a="b"}\t3  ', {"a": "b"}, 3.0, id="tabs-and-blanks-around"),
        pytest.param('x{a="b"}  3', {"a": "b"}, 3.0, id="two-blanks"),
        pytest.param('x{a="b"}3', {"a": "b"}, 3.0, id="no-blank"),
        pytest.param('x{a="b c"}3', {"a": "b c"}, 3.0, id="no-blank-but-one-in-the-label"),
        pytest.param('x{a="b"} 3\r', {"a": "b"}, 3.0, id="crlf"),
        pytest.param('x{a="b"} 3 1700000000000', {"a": "b"}, 3.0, id="timestamp"),
        pytest.param("x 3 1700000000000", {}, 3.0, id="timestamp-without-labels"),
        pytest.param('x{a="b"} 3 # {trace="c d"} 0.5', {"a": "b"}, 3.0, id="exemplar"),
        pytest.param(r'x{a="q\"s\\n\n}"} 3', {"a": 'q"s\\n\n}'}, 3.0, id="escapes"),
        pytest.param(r'x{a="\t"} 3', {"a": r"\t"}, 3.0, id="unknown-escape-stays"),
        pytest.param('x{a="},{,b=\\"} 1"} 3', {"a": '},{,b="} 1'}, 3.0, id="braces-and-commas"),
        pytest.param('x{a="Grüße 你好"} 3', {"a": "Grüße 你好"}, 3.0, id="utf-8"),
        pytest.param("x +Inf", {}, math.inf, id="inf"),
        pytest.param("x -Inf", {}, -math.inf, id="minus-inf"),
        pytest.param("x 1.5e-07", {}, 1.5e-07, id="exponent"),
        pytest.param("x 9223372036854775794", {}, 9223372036854775794.0, id="blank-of-dcgm"),
    ],
)
def test_line(line: str, labels: dict[str, str], value: float) -> None:
    cache = SeriesCache(everything)
    for _ in range(2):
        page = parse_page(line.encode() + b"\n", cache)
        assert list(page.series()) == [Series("x", labels, value)]
        assert page.keys == (SeriesKey("x", tuple(sorted(labels.items()))),)
        assert not page.bad


def test_nan_is_left_to_the_reader() -> None:
    assert [math.isnan(value) for value in parse("x NaN\ny nan\nz 1\n").values] == [True, True, False]


@pytest.mark.parametrize(
    "line",
    [
        pytest.param('x{a="b"}', id="no-value"),
        pytest.param("x", id="only-a-name"),
        pytest.param("x ", id="a-blank-for-a-value"),
        pytest.param('x{a="b"} three', id="no-number"),
        pytest.param("x 1_000", id="underscore"),
        pytest.param("x 0x10", id="hexadecimal"),
        pytest.param("x 1 2 3", id="three-numbers"),
        pytest.param("x 1 now", id="odd-timestamp"),
        pytest.param('x{a="b} 3', id="open-quote"),
        pytest.param('x{a="b" 3', id="open-brace"),
        pytest.param("x{a=b} 3", id="no-quotes"),
        pytest.param("x{a} 3", id="no-label-value"),
        pytest.param('x{a="b" c="d"} 3', id="no-comma"),
        pytest.param('x{a="b",a="c"} 3', id="label-twice"),
        pytest.param('x{1a="b"} 3', id="odd-label-name"),
        pytest.param(b'x{a="\xff"} 3', id="not-utf-8"),
        pytest.param('x{a="' + "b" * MAX_LINE + '"} 3', id="huge"),
    ],
)
def test_bad_line_is_counted_and_the_rest_used(line: str | bytes) -> None:
    raw = line if isinstance(line, bytes) else line.encode()
    cache = SeriesCache(everything)
    for _ in range(2):
        page = parse_page(b"before 1\n" + raw + b"\nafter 2\n" + raw + b"\n", cache)
        assert [each.name for each in page.series()] == ["before", "after"]
        assert page.bad == {"x": 2}


def test_known_line_with_a_bad_number_is_counted_too() -> None:
    cache = SeriesCache(everything)
    parse_page(b"x 1\ny 2\n", cache)
    page = parse_page(b"x one\ny 3\n", cache)
    assert (page.keys, page.values, page.bad) == ((SeriesKey("y"),), (3.0,), {"x": 1})


def test_c036_label_values_with_quotes_backslashes_braces_commas() -> None:
    page = parse(
        'vllm:num_requests_waiting{engine="0",model_name="/models/a,b}\\"x\\"\\\\y"} 7\n'
        'vllm:num_requests_running{engine="0",model_name="m"}3\n'
        'vllm:num_requests_running{engine="0" model_name="m"} 9\n'
    )
    assert list(page.series()) == [
        Series("vllm:num_requests_waiting", {"engine": "0", "model_name": '/models/a,b}"x"\\y'}, 7.0),
        Series("vllm:num_requests_running", {"engine": "0", "model_name": "m"}, 3.0),
    ]
    assert page.bad == {"vllm:num_requests_running": 1}


def test_cut_last_line_is_not_believed() -> None:
    page = parse("x 1\ny 234")
    assert rows(page) == [("x", {}, "1.0")]
    assert page.bad == {"y": 1}


def test_repeated_lines_are_all_returned() -> None:
    assert parse("x 1\nx 2\nx 1\n").values == (1.0, 2.0, 1.0)


@pytest.mark.parametrize("body", [b"", b"\n", b"\n\n \r\n", b"# only a comment\n", b"#\n"], ids=repr)
def test_page_without_samples(body: bytes) -> None:
    page = parse_page(body, SeriesCache(lambda name: name == "x"))
    assert (page.keys, page.values, page.bad) == ((), (), {})


def test_only_wanted_series_are_read_and_only_their_bad_lines_counted() -> None:
    cache = SeriesCache(lambda name: name == "x")
    body = b'# HELP x Words.\n# TYPE x gauge\nx{a="b"} 1\ny{broken 2\n{"quoted"} 3\nx_created 4\n<html>\n'
    for _ in range(2):
        page = parse_page(body, cache)
        assert (list(page.series()), page.bad) == ([Series("x", {"a": "b"}, 1.0)], {})


def test_line_without_a_blank_is_read_after_blank_and_unwanted_lines() -> None:
    cache = SeriesCache(lambda name: name == "x")
    for _ in range(2):
        page = parse_page(b'\n#\ny{a="b"}1\nx{a="b"}3\nx{a="c d"}4\n', cache)
        assert rows(page) == [("x", {"a": "b"}, "3.0"), ("x", {"a": "c d"}, "4.0")]


def test_cache_asks_about_a_name_once_per_line() -> None:
    asked: list[str] = []

    def wanted(name: str) -> bool:
        asked.append(name)
        return name == "x"

    cache = SeriesCache(wanted)
    for _ in range(3):
        parse_page(b'# TYPE x gauge\nx{a="b"} 1\ny 2\n', cache)
    assert asked == ["x", "y"]


def test_cache_forgets_lines_that_are_no_longer_seen() -> None:
    cache = SeriesCache(everything, pages=3)
    parse_page(b'x{a="old"} 1\n', cache)
    for _ in range(6):
        parse_page(b'x{a="new"} 1\n', cache)
    assert len(cache) == 1


def test_cache_keeps_the_key_objects_of_lines_in_use() -> None:
    cache = SeriesCache(everything, pages=3)
    first = parse_page(b'x{a="b"} 1\n', cache).keys[0]
    assert all(parse_page(b'x{a="b"} 1\n', cache).keys[0] is first for _ in range(20))


def test_cache_is_bounded_when_labels_change_for_ever() -> None:
    cache = SeriesCache(everything, max_lines=100)
    for page in range(50):
        parse_page(b"".join(b'x{id="%d"} 1\n' % (page * 40 + line) for line in range(40)), cache)
        assert len(cache) <= 300
    assert rows(parse_page(b'x{id="7"} 2\n', cache)) == [("x", {"id": "7"}, "2.0")]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'x{a="b"} %d 1700000000%d\ny %d 17%d\n', id="timestamps"),
        pytest.param(b'x{a="b"} %d # {trace="%d"} 1\ny %d %d\n', id="exemplars"),
    ],
)
def test_values_do_not_become_cache_lines(body: bytes) -> None:
    cache = SeriesCache(everything)
    for number in range(20):
        assert parse_page(body % ((number,) * 4), cache).values == (number, number)
    assert len(cache) == 0


def test_series_of_another_source_make_the_same_page() -> None:
    text = 'x{b="1",a="2"} 3\ny 4\n'
    page = make_page([Series("x", {"b": "1", "a": "2"}, 3.0), Series("y", {}, 4.0)])
    assert (page.keys, page.values, page.bad) == (parse(text).keys, parse(text).values, {})


NAMES = st.from_regex(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,12}", fullmatch=True)
LABELS = st.dictionaries(
    st.from_regex(r"[a-zA-Z][a-zA-Z0-9_]{0,8}", fullmatch=True),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    max_size=4,
)
NUMBERS = st.one_of(
    st.floats().map(repr), st.integers(-(10**18), 10**18).map(str), st.sampled_from(["+Inf", "-Inf", "NaN"])
)
STAMPS = st.one_of(st.just(""), st.integers(0, 10**13).map(" {}".format))


def write(name: str, labels: dict[str, str], number: str, stamp: str) -> str:
    escaped = ",".join(
        '{}="{}"'.format(key, value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"'))
        for key, value in labels.items()
    )
    return f"{name}{{{escaped}}} {number}{stamp}\n" if labels else f"{name} {number}{stamp}\n"


@given(st.lists(st.builds(write, NAMES, LABELS, NUMBERS, STAMPS), max_size=12))
def test_valid_page_equals_prometheus_client(lines: list[str]) -> None:
    text = "".join(lines)
    cache = SeriesCache(everything)
    for _ in range(2):
        page = parse_page(text.encode(), cache)
        assert rows(page) == oracle(text)
        assert not page.bad


FRAGMENTS = st.sampled_from(
    ["x", "y:z", "{", "}", '"', "\\", ",", "=", " ", "\t", "\n", "\r", "#", "1", "NaN", 'a="b"']
)


@given(st.one_of(st.binary(max_size=300), st.lists(FRAGMENTS, max_size=40).map(lambda some: "".join(some).encode())))
def test_no_body_raises_and_a_known_page_reads_the_same(body: bytes) -> None:
    cache = SeriesCache(everything)
    cold = parse_page(body, cache)
    warm = parse_page(body, cache)
    assert rows(warm) == rows(cold)
    assert warm.bad == cold.bad
    assert len(cold.keys) + sum(cold.bad.values()) <= body.count(b"\n") + 1
