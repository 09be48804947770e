"""PromQL as text."""

import pytest

from autoscaler.core.policy import Query
from autoscaler.core.types import Pod, PodPhase, TargetStatus
from autoscaler.sources.promql import (
    age_query,
    any_of,
    fill,
    needs_pods,
    range_problem,
    shortest_range_s,
    string_literal,
)

TARGET = TargetStatus(
    namespace="serving",
    name="chat.a",
    current_replicas=4,
    pods=(
        Pod(name="chat.a-1", uid="1"),
        Pod(name="chat.a-2", uid="2", ready=False),
        Pod(name="chat.a-3", uid="3", terminating=True),
        Pod(name="chat.a-4", uid="4", phase=PodPhase.PENDING),
    ),
)


@pytest.mark.parametrize(
    ("text", "literal"),
    [
        pytest.param("tiny", '"tiny"', id="plain"),
        pytest.param(
            'org/m-7b"} or vector(99) #', r'"org/m-7b\"} or vector(99) #"', id="c052-a-quote-cannot-end-the-string"
        ),
        pytest.param("a\\", r'"a\\"', id="a-backslash-cannot-hide-the-end"),
        pytest.param("a\nb\rc", r'"a\nb\rc"', id="line-ends"),
    ],
)
def test_c052_string_literal(text: str, literal: str) -> None:
    assert string_literal(text) == literal


@pytest.mark.parametrize(
    ("names", "literal"),
    [
        pytest.param(["chat-a-1"], '"chat-a-1"', id="one"),
        pytest.param(["chat.a-1", "chat.a-2"], r'"chat\\.a-1|chat\\.a-2"', id="c052-dots"),
        pytest.param(['a|b"c'], r'"a\\|b\"c"', id="everything"),
    ],
)
def test_c052_pattern_literal(names: list[str], literal: str) -> None:
    assert any_of(names) == literal


@pytest.mark.parametrize(
    ("query", "filled"),
    [
        pytest.param('up{namespace="$namespace"}', 'up{namespace="serving"}', id="in-quotes"),
        pytest.param("up{namespace='$namespace'}", "up{namespace='serving'}", id="in-single-quotes"),
        pytest.param("up{namespace=$namespace}", 'up{namespace="serving"}', id="without-quotes"),
        pytest.param('up{name="$deployment"}', 'up{name="chat.a"}', id="equal-takes-the-name-as-it-is"),
        pytest.param('up{pod=~"$deployment-.*"}', r'up{pod=~"chat\\.a-.*"}', id="c052-pattern-takes-it-escaped"),
        pytest.param('up{pod!~"$deployment-.*"}', r'up{pod!~"chat\\.a-.*"}', id="c052-negated-pattern"),
        pytest.param("up{pod=~ `$deployment-\\d`}", r'up{pod=~ "chat\\.a-\\d"}', id="raw-string"),
        pytest.param('up{pod=~"$pods"}', r'up{pod=~"chat\\.a-1|chat\\.a-2"}', id="live-pods-ready-or-not"),
        pytest.param('f(up, "$pods")', r'f(up, "chat\\.a-1|chat\\.a-2")', id="pods-are-always-a-pattern"),
        pytest.param("up{pod=~$pods}", r'up{pod=~"chat\\.a-1|chat\\.a-2"}', id="live-pods-without-quotes"),
        pytest.param('label_replace(up, "a", "$1", "b", "(.*)")', 'label_replace(up, "a", "$1", "b", "(.*)")', id="$1"),
        pytest.param('up{a="\\"$namespace"}', 'up{a="\\"serving"}', id="an-escaped-quote-does-not-end-the-string"),
        pytest.param('up{a="$podsy$namespaces"}', 'up{a="$podsy$namespaces"}', id="longer-names"),
        pytest.param('up # "$pods\n+ up{a="#$namespace"}', 'up \n+ up{a="#serving"}', id="comments-go"),
    ],
)
def test_c052_placeholders(query: str, filled: str) -> None:
    assert fill(query, TARGET) == filled


def test_c052_no_name_leaves_its_string() -> None:
    wicked = TargetStatus(namespace='a"} or vector(99) #', name="a'`", current_replicas=1)
    query = """up{namespace="$namespace"} + up{namespace='$namespace',a=$namespace,b='$deployment',c=`$deployment`}"""
    assert fill(query, wicked) == (
        r"""up{namespace="a\"} or vector(99) #"} + up{namespace='a"} or vector(99) #',"""
        r"""a="a\"} or vector(99) #",b='a\'`',c="a'`"}"""
    )


@pytest.mark.parametrize(
    ("query", "needed"),
    [
        pytest.param('up{pod=~"$pods"}', True, id="in-quotes"),
        pytest.param("up{pod=~$pods}", True, id="bare"),
        pytest.param('up{pod=~"$podsy",namespace="$namespace"}', False, id="another-name"),
    ],
)
def test_needs_pods(query: str, needed: bool) -> None:
    assert needs_pods(query) is needed


@pytest.mark.parametrize(
    ("expr", "aging"),
    [
        pytest.param("up", "min(timestamp(up))", id="a-name"),
        pytest.param(' vllm:x{a="b"} ', 'min(timestamp(vllm:x{a="b"}))', id="a-selector"),
        pytest.param('{__name__=~"vllm[:_]x"}', 'min(timestamp({__name__=~"vllm[:_]x"}))', id="no-name"),
        pytest.param('up{a="}) + 1"}', 'min(timestamp(up{a="}) + 1"}))', id="braces-in-a-string"),
        pytest.param('sum(up{a="b"})', 'min(timestamp(up{a="b"}))', id="a-sum"),
        pytest.param("max by (a, b) (up)", "min(timestamp(up))", id="grouped"),
        pytest.param("up offset 5m", None, id="offset"),
        pytest.param("rate(up[1m])", None, id="rate"),
        pytest.param("up + up", None, id="arithmetic"),
        pytest.param("sum(up) or vector(0)", None, id="more-than-an-aggregation"),
        pytest.param("count(up)", None, id="a-count-is-of-now"),
        pytest.param("1", None, id="a-number"),
    ],
)
def test_c050_age_query(expr: str, aging: str | None) -> None:
    assert age_query(expr) == aging


@pytest.mark.parametrize(
    ("expr", "range_s"),
    [
        pytest.param("rate(x[5m])", 300.0, id="minutes"),
        pytest.param("rate(x[1m30s]) / rate(y[ 2m ])", 90.0, id="the-shortest"),
        pytest.param("rate(x[60])", 60.0, id="a-bare-number"),
        pytest.param("rate(x[500ms])", 0.5, id="milliseconds"),
        pytest.param("max_over_time(rate(x[2m])[1h:1m])", 120.0, id="not-the-subquery"),
        pytest.param('x{a="[5s]"} # [5s]', None, id="not-in-strings-and-comments"),
        pytest.param("sum(x)", None, id="none"),
    ],
)
def test_c136_shortest_range(expr: str, range_s: float | None) -> None:
    assert shortest_range_s(expr) == range_s


@pytest.mark.parametrize(
    ("expr", "problem"),
    [
        pytest.param(
            "rate(x[1m])", "range 60s is below twice the scrape interval (60s): use at least 240s", id="one-scrape"
        ),
        pytest.param("rate(x[5s])", "range 5s is below twice the scrape interval (60s): use at least 240s", id="none"),
        pytest.param("rate(x[2m])", "", id="two-scrapes"),
        pytest.param("x", "", id="no-range"),
    ],
)
def test_c136_range_problem(expr: str, problem: str) -> None:
    assert range_problem(Query(signal="ttft", query=expr, scrape_interval_s=60.0)) == problem
