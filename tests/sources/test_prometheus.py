"""The sources that read through Prometheus, against made-up and recorded answers."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx
import numpy as np
import pytest

from autoscaler.core.policy import DcgmSignals, PrometheusServer, Query, VllmSignals
from autoscaler.core.signals import COLUMN
from autoscaler.core.types import WHOLE_PAGE, Attribution, Engines, GapReason, Pod, PodPhase, Reading, TargetStatus
from autoscaler.errors import SourceError
from autoscaler.sources.prometheus import PrometheusDcgmSource, PrometheusVllmSource, PromQuerySource

RECORDED = Path(__file__).parent.parent / "data" / "prometheus"
AT = 1764500000.0
SERVER = PrometheusServer(url="http://prometheus:9090")
MIB = 2.0**20
Row = tuple[Mapping[str, str], str]


class FakeClock:
    """A clock that a test sets; sleeping sets it forward."""

    def __init__(self, at: float = AT) -> None:
        self.at = at

    def now(self) -> float:
        return self.at

    async def sleep_until(self, at: float) -> None:
        self.at = max(self.at, at)


def rows(*found: Row, **more: object) -> httpx.Response:
    """Return an answer with these rows, evaluated at `AT`."""
    result = [{"metric": labels, "value": [AT, value]} for labels, value in found]
    return httpx.Response(200, json={"status": "success", "data": {"resultType": "vector", "result": result}, **more})


def recorded(name: str) -> httpx.Response:
    """Return a recorded answer."""
    response = json.loads((RECORDED / name).read_text())["response"]
    body = response["body"]
    return httpx.Response(response["status"], content=body if isinstance(body, str) else json.dumps(body))


class FakeServer:
    """Stands in for the network: answers a query by the first text that it contains, and keeps the queries."""

    def __init__(self, answers: Mapping[str, httpx.Response | Exception]) -> None:
        self.answers = dict(answers)
        self.queries: list[str] = []

    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._answer)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        form = parse_qs(request.content.decode())
        assert form["time"][0] == f"{float(form['time'][0]):.3f}"
        query = form["query"][0]
        self.queries.append(query)
        answer = next((answer for text, answer in self.answers.items() if text in query), rows())
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)


def target(*names: str, **pod: Any) -> TargetStatus:
    """Return the Deployment `serving/chat-a` with these pods, running."""
    pods = tuple(Pod(name=name, uid=f"uid-{name}", **pod) for name in names)
    return TargetStatus(namespace="serving", name="chat-a", current_replicas=6, pods=pods)


def gaps(reading: Reading) -> list[tuple[str, GapReason]]:
    """Return what is missing and why."""
    return [(gap.signal, gap.reason) for gap in reading.gaps]


# Any signal by PromQL

WAITING = Query(signal="num_requests_waiting", query="f(x)")
TTFT = Query(signal="ttft", query="histogram_quantile(0.99, sum by (le) (rate(x_bucket[1m])))")
KV = Query(signal="kv_cache_usage", query="f(kv)")


def queries(server: FakeServer, *found: Query, clock: FakeClock | None = None) -> PromQuerySource:
    """Return the source of these queries."""
    return PromQuerySource(found, {"default": SERVER}, clock or FakeClock(), server.transport())


async def ask(answer: httpx.Response | Exception, query: Query = TTFT) -> Reading:
    """Return what one query gives, its data being of just now."""
    return await queries(FakeServer({"timestamp(": rows(({}, str(AT - 1.0))), "": answer}), query).read(target("a"), AT)


async def test_a_reading() -> None:
    reading = await ask(rows(({}, "0.25")))
    assert [(s.signal, s.value, s.at, s.partial, s.source) for s in reading.samples] == [
        ("ttft", 0.25, AT, False, "prometheus")
    ]
    assert reading.gaps == ()


async def test_c040_empty_is_unknown_for_half_an_hour() -> None:
    source = queries(FakeServer({}), WAITING, KV, TTFT)
    for tick in range(120):
        reading = await source.read(target("a"), AT + 15.0 * tick)
        assert reading.samples == ()
        assert [gap.signal for gap in reading.gaps] == ["num_requests_waiting", "kv_cache_usage", "ttft"]
        assert {gap.reason for gap in reading.gaps} == {GapReason.EMPTY}


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
async def test_c041_not_finite_is_unknown(value: str) -> None:
    reading = await ask(rows(({}, value)))
    assert reading.samples == ()
    assert gaps(reading) == [("ttft", GapReason.NON_FINITE)]


async def test_c041_recorded_quantile_without_traffic() -> None:
    reading = await ask(recorded("instant_p99_no_traffic_nan.json"))
    assert gaps(reading) == [("ttft", GapReason.NON_FINITE)]


@pytest.mark.parametrize(
    ("query", "value", "reason"),
    [
        pytest.param(KV, "1.5", GapReason.OUT_OF_RANGE, id="a-ratio-above-one"),
        pytest.param(KV, "1.0005", None, id="float-noise"),
        pytest.param(TTFT, "-0.2", GapReason.OUT_OF_RANGE, id="a-negative-time"),
        pytest.param(TTFT, "9223372036854776000", GapReason.OUT_OF_RANGE, id="a-sentinel"),
        pytest.param(WAITING, "many", GapReason.NON_FINITE, id="no-number"),
    ],
)
async def test_values_that_are_not_believed(query: Query, value: str, reason: GapReason | None) -> None:
    reading = await ask(rows(({}, value)), query)
    assert [gap.reason for gap in reading.gaps] == ([reason] if reason else [])
    assert len(reading.samples) == (reason is None)


async def test_c042_warnings_make_a_sample_partial_and_their_words_are_given_once() -> None:
    server = FakeServer({"f(x)": rows(({}, "2"), warnings=["store gateway 2 unavailable"])})
    source = queries(server, WAITING)
    first, second = [await source.read(target("a"), AT + tick) for tick in range(2)]
    assert [(s.value, s.partial) for s in (*first.samples, *second.samples)] == [(2.0, True), (2.0, True)]
    assert gaps(first) == gaps(second) == [("num_requests_waiting", GapReason.PARTIAL)]
    assert [gap.detail for gap in (*first.gaps, *second.gaps)] == ["store gateway 2 unavailable", ""]


async def test_c042_infos_are_advice_and_given_once() -> None:
    source = queries(FakeServer({"f(x)": rows(({}, "2"), infos=["metric might not be a counter"])}), WAITING)
    first, second = [await source.read(target("a"), AT + tick) for tick in range(2)]
    assert [s.partial for s in (*first.samples, *second.samples)] == [False, False]
    assert [gap.detail for gap in first.gaps] == ["metric might not be a counter"]
    assert second.gaps == ()


async def test_c044_several_rows_are_ambiguous() -> None:
    same = {"job": "x", "pod": "chat-a-1"}
    reading = await ask(rows(({"cluster": "a", **same}, "3"), ({"cluster": "b", **same}, "90")))
    assert reading.samples == ()
    assert gaps(reading) == [("ttft", GapReason.AMBIGUOUS_RESULT)]
    assert reading.gaps[0].detail == '2 rows, such as {cluster="a"} and {cluster="b"}'


async def test_a_native_histogram_is_no_reading() -> None:
    reading = await ask(recorded("instant_native_histogram.json"))
    assert gaps(reading) == [("ttft", GapReason.QUERY_ERROR)]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param(recorded("error_422_many_to_many.json"), GapReason.QUERY_ERROR, id="a-422"),
        pytest.param(recorded("error_400_parse.json"), GapReason.QUERY_ERROR, id="b-400"),
        pytest.param(httpx.Response(503, text="upstream unavailable"), GapReason.TRANSIENT, id="c-503"),
        pytest.param(httpx.Response(200, html="<html>login</html>"), GapReason.BAD_BODY, id="d-html"),
        pytest.param(httpx.Response(429, headers={"Retry-After": "20"}), GapReason.TRANSIENT, id="e-429"),
        pytest.param(httpx.ConnectError("refused"), GapReason.TRANSIENT, id="refused"),
    ],
)
async def test_c046_a_failed_query_leaves_the_others_alone(
    answer: httpx.Response | Exception, reason: GapReason
) -> None:
    server = FakeServer({"f(kv)": rows(({}, "0.5")), "f(x)": answer})
    reading = await queries(server, KV, WAITING).read(target("a"), AT)
    assert [sample.signal for sample in reading.samples] == ["kv_cache_usage"]
    assert gaps(reading) == [("num_requests_waiting", reason)]


async def test_c046_a_wrong_query_is_asked_once_an_interval() -> None:
    server = FakeServer({"": recorded("error_400_parse.json")})
    source = queries(server, TTFT)
    for tick in range(5):
        await source.read(target("a"), AT + 5.0 * tick)
    assert len(server.queries) == 5


PLAIN = Query(signal="num_requests_waiting", query='vllm:num_requests_waiting{pod="chat-a-1"}')


@pytest.mark.parametrize(
    ("age_s", "stale"),
    [
        pytest.param(240.0, True, id="c050"),
        pytest.param(60.1, True, id="over"),
        pytest.param(60.0, False, id="at-limit"),
    ],
)
async def test_c050_age_is_the_datas_and_not_the_answers(age_s: float, stale: bool) -> None:
    server = FakeServer({"timestamp(": rows(({}, str(AT - age_s))), "": rows(({}, "5"))})
    reading = await queries(server, PLAIN).read(target("a"), AT)
    assert [gap.reason for gap in reading.gaps] == [GapReason.STALE] * stale
    assert [sample.at for sample in reading.samples] == [AT - age_s] * (not stale)
    assert 'min(timestamp(vllm:num_requests_waiting{pod="chat-a-1"}))' in server.queries


async def test_c050_without_an_age_there_is_no_reading() -> None:
    reading = await queries(FakeServer({"timestamp(": rows(), "": rows(({}, "5"))}), PLAIN).read(target("a"), AT)
    assert gaps(reading) == [("num_requests_waiting", GapReason.STALE)]


async def test_c052_placeholders_reach_the_server_as_literals() -> None:
    server = FakeServer({})
    query = Query(signal="ttft", query='f(x{namespace="$namespace",pod=~"$deployment-.*",app="$deployment"})')
    odd = TargetStatus(namespace='a"} or vector(99) #', name="chat.a", current_replicas=1)
    await queries(server, query).read(odd, AT)
    assert server.queries == [r'f(x{namespace="a\"} or vector(99) #",pod=~"chat\\.a-.*",app="chat.a"})']


async def test_a_query_for_pods_is_not_asked_without_any() -> None:
    """An empty pattern would match every series that has no pod label at all."""
    server = FakeServer({})
    query = Query(signal="ttft", query='x{pod=~"$pods"}')
    reading = await queries(server, query).read(target("chat-a-1", phase=PodPhase.PENDING), AT)
    assert gaps(reading) == [("ttft", GapReason.NO_READY_PODS)]
    assert server.queries == []


async def test_an_unknown_server_is_a_gap() -> None:
    reading = await queries(FakeServer({}), Query(signal="ttft", query="x", server="other")).read(target("a"), AT)
    assert gaps(reading) == [("ttft", GapReason.NOT_CONFIGURED)]


@pytest.mark.parametrize(
    ("range_", "reasons"),
    [
        pytest.param("60s", ["empty", "empty", "window_too_short?", "window_too_short?"], id="one-scrape"),
        pytest.param("5s", ["empty", "empty", "window_too_short?", "window_too_short?"], id="no-scrape"),
        pytest.param("4m", ["empty", "empty", "empty", "empty"], id="four-scrapes"),
    ],
)
async def test_c136_empties_of_a_short_window(range_: str, reasons: list[str]) -> None:
    query = Query(signal="ttft", query=f"f(rate(x[{range_}]))", scrape_interval_s=60.0)
    source = queries(FakeServer({}), query)
    found = [(await source.read(target("a"), AT + tick)).gaps[0] for tick in range(4)]
    assert [gap.reason for gap in found] == reasons
    assert all(("use at least 240s" in gap.detail) == (gap.reason == GapReason.WINDOW_TOO_SHORT) for gap in found)


async def test_c136_an_answer_between_starts_the_count_again() -> None:
    server = FakeServer({})
    source = queries(server, Query(signal="ttft", query="f(rate(x[5s]))"))
    reasons: list[str] = []
    for tick, answer in enumerate([rows(), rows(), rows(({}, "1")), rows(), rows(), rows()]):
        server.answers = {"": answer}
        reasons += [gap.reason for gap in (await source.read(target("a"), AT + tick)).gaps]
    assert reasons == ["empty", "empty", "empty", "empty", "window_too_short?"]


async def test_queries_of_one_cycle_ask_for_one_time() -> None:
    times = []

    def answer(request: httpx.Request) -> httpx.Response:
        times.append(parse_qs(request.content.decode())["time"][0])
        return rows(({}, "1"))

    source = PromQuerySource(
        (WAITING, KV, PLAIN), {"default": SERVER}, FakeClock(AT + 9.0), httpx.MockTransport(answer)
    )
    await source.read(target("a"), AT)
    await source.close()
    assert times == ["1764500000.000"] * 4


# The engines' own series


def engine_rows(pod: str, running: str, *, prefix: str = "vllm:", **labels: str) -> list[Row]:
    """Return the few series of one engine."""
    scraper = {"instance": f"{pod}:8000", "job": "vllm", "namespace": "serving", "pod": pod, **labels}
    own = {**scraper, "model_name": "tiny", "engine": "0"}
    named = {"num_requests_running": running, "num_requests_waiting": "1", "kv_cache_usage_perc": "0.5"}
    found: list[Row] = [({"__name__": prefix + name, **own}, value) for name, value in named.items()]
    return [*found, ({"__name__": "process_start_time_seconds", **scraper}, "1764400000")]


def times(series: Sequence[Row], age_s: float = 1.0) -> list[Row]:
    """Return the times of the scrapes of the same series."""
    return [
        ({name: value for name, value in labels.items() if name != "__name__"}, str(AT - age_s))
        for labels, _ in series
        if labels["__name__"].endswith("num_requests_running")
    ]


def engine_server(series: Sequence[Row], scraped: Sequence[Row] | None = None, **more: object) -> FakeServer:
    """Return a server with these series, scraped a second ago."""
    return FakeServer({"timestamp(": rows(*(times(series) if scraped is None else scraped)), "": rows(*series, **more)})


def vllm(server: FakeServer, **settings: Any) -> PrometheusVllmSource:
    """Return the source over a fake server."""
    return PrometheusVllmSource(VllmSignals(**settings), SERVER, FakeClock(), server.transport())


async def engines_of(source: PrometheusVllmSource, of: TargetStatus, at: float = AT) -> tuple[Engines, Reading]:
    """Return what the source reads."""
    reading = await source.read(of, at)
    assert reading.engines is not None
    return reading.engines, reading


def column(engines: Engines, signal: str) -> list[float]:
    """Return one signal of all engines."""
    found: list[float] = engines.values[:, COLUMN[signal]].tolist()
    return found


def reasons(reading: Reading, pod: str) -> list[GapReason]:
    """Return why the page of one pod is missing."""
    return [gap.reason for gap in reading.gaps if gap.signal == WHOLE_PAGE and gap.pod == pod]


async def test_engines() -> None:
    series = [*engine_rows("chat-a-1", "3"), *engine_rows("chat-a-2", "4")]
    engines, reading = await engines_of(vllm(engine_server(series)), target("chat-a-1", "chat-a-2"))
    assert [key.pod_uid for key in engines.keys] == ["uid-chat-a-1", "uid-chat-a-2"]
    assert column(engines, "num_requests_running") == [3.0, 4.0]
    assert column(engines, "read_at") == [AT - 1.0, AT - 1.0]
    assert column(engines, "started_at") == [1764400000.0, 1764400000.0]
    assert reasons(reading, "chat-a-1") == []


async def test_c042_pods_that_a_partial_answer_lacks_are_unknown() -> None:
    names = ("chat-a-1", "chat-a-2", "chat-a-3", "chat-a-4")
    server = engine_server(engine_rows("chat-a-1", "2"), warnings=["store gateway 2 unavailable"])
    engines, reading = await engines_of(vllm(server), target(*names))
    assert [key.pod_uid for key in engines.keys] == ["uid-chat-a-1"]
    assert [reasons(reading, name) for name in names] == [[], *([[GapReason.EMPTY]] * 3)]
    assert [gap.detail for gap in reading.gaps if gap.reason == GapReason.PARTIAL] == ["store gateway 2 unavailable"]


async def test_c048_series_of_dead_pods_are_dropped() -> None:
    series = [*engine_rows("chat-a-1", "0"), *engine_rows("chat-a-2", "40")]
    for _ in range(20):
        engines, _reading = await engines_of(vllm(engine_server(series)), target("chat-a-1"))
        assert [key.pod_uid for key in engines.keys] == ["uid-chat-a-1"]
        assert column(engines, "num_requests_running") == [0.0]


@pytest.mark.parametrize(
    ("age_s", "found"),
    [
        pytest.param(29.0, [], id="a-scrape-was-missed"),
        pytest.param(31.0, [GapReason.STALE], id="more-than-stale-after-and-a-scrape"),
        pytest.param(240.0, [GapReason.STALE], id="served-by-lookback"),
    ],
)
async def test_c050_an_old_scrape_is_stale(age_s: float, found: list[GapReason]) -> None:
    series = engine_rows("chat-a-1", "3")
    server = engine_server(series, times(series, age_s))
    engines, reading = await engines_of(vllm(server, stale_after_s=15.0, scrape_interval_s=15.0), target("chat-a-1"))
    assert reasons(reading, "chat-a-1") == found
    assert len(engines.keys) == 1 - len(found)


async def test_c052_names_reach_the_server_as_literals() -> None:
    server = engine_server([])
    source = vllm(server, model_name='org/m-7b"} or vector(99) #')
    await source.read(target("chat.a-1"), AT)
    assert len(server.queries) == 2
    for query in server.queries:
        assert r'model_name="org/m-7b\"} or vector(99) #"' in query
        assert r'namespace="serving",pod=~"chat\\.a-1"' in query
        assert r'exported_namespace="serving",exported_pod=~"chat\\.a-1"' in query


@pytest.mark.parametrize("prefix", ["vllm:", "vllm_", "ray_vllm_"])
async def test_c053_any_spelling_is_read(prefix: str) -> None:
    engines, _ = await engines_of(vllm(engine_server(engine_rows("chat-a-1", "3", prefix=prefix))), target("chat-a-1"))
    assert column(engines, "num_requests_running") == [3.0]


async def test_c053_the_colon_wins_where_both_are_there() -> None:
    series = [*engine_rows("chat-a-1", "90", prefix="vllm_"), *engine_rows("chat-a-1", "3")]
    engines, _ = await engines_of(vllm(engine_server(series, times(series)[:1])), target("chat-a-1"))
    assert column(engines, "num_requests_running") == [3.0]


async def test_c053_neither_spelling_lists_the_names_tried() -> None:
    _, reading = await engines_of(vllm(engine_server([])), target("chat-a-1"))
    assert reasons(reading, "chat-a-1") == [GapReason.EMPTY]
    assert "tried vllm:num_requests_running, vllm_num_requests_running" in reading.gaps[0].detail


async def test_recorded_series_of_two_scrapers_count_once() -> None:
    """One page scraped as text and by negotiation: two spellings under two jobs."""
    pod = "llama-70b-7c9f6d5b8b-4x2lq"
    answer = json.loads((RECORDED / "instant_vllm_names.json").read_text())["response"]["body"]
    at = answer["data"]["result"][0]["value"][0]
    waiting = [row for row in answer["data"]["result"] if row["metric"]["__name__"].endswith("waiting")]
    series = [(row["metric"], row["value"][1]) for row in answer["data"]["result"]]
    scraped = [({k: v for k, v in row["metric"].items() if k != "__name__"}, str(at - 1.0)) for row in waiting]
    of = TargetStatus(namespace="llm-prod", name="llama-70b", current_replicas=1, pods=(Pod(name=pod, uid="uid-1"),))
    engines, _ = await engines_of(vllm(engine_server(series, scraped)), of, at)
    assert len(waiting) == 2
    assert column(engines, "kv_cache_usage") == [0.6708371542274725]
    assert column(engines, "num_requests_waiting") == [float(waiting[0]["value"][1])]


@pytest.mark.parametrize(
    ("labels", "port", "running"),
    [
        pytest.param([{"job": "a"}, {"job": "b"}], 8000, 4.0, id="the-newest-of-two-scrapers"),
        pytest.param(
            [{"instance": "10.0.0.1:8000"}, {"instance": "10.0.0.1:9000"}], 8000, 3.0, id="our-port-before-the-newest"
        ),
        pytest.param([{"container": "vllm"}, {"container": "side"}], 1, 4.0, id="the-newest-container"),
    ],
)
async def test_one_scraper_of_several_counts(labels: list[dict[str, str]], port: int, running: float) -> None:
    older, newer = (engine_rows("chat-a-1", value, **own) for value, own in zip("34", labels, strict=True))
    scraped = [*times(older, 9.0), *times(newer, 1.0)]
    engines, _ = await engines_of(vllm(engine_server([*older, *newer], scraped), port=port), target("chat-a-1"))
    assert column(engines, "num_requests_running") == [running]


async def test_start_of_a_sidecars_process_is_not_the_engines() -> None:
    series = engine_rows("chat-a-1", "3", container="vllm")
    side = ({"__name__": "process_start_time_seconds", "pod": "chat-a-1", "container": "proxy"}, "1764499999")
    engines, _ = await engines_of(vllm(engine_server([side, *series, side])), target("chat-a-1"))
    assert column(engines, "started_at") == [1764400000.0]


async def test_exported_pod_comes_first() -> None:
    """A gateway was scraped: `pod` is its own, and `exported_pod` the engine's."""
    series = [
        ({**labels, "pod": "gateway-1", "exported_pod": labels["pod"], "exported_namespace": "serving"}, value)
        for labels, value in [*engine_rows("chat-a-1", "3"), *engine_rows("chat-a-2", "4")]
    ]
    engines, _ = await engines_of(vllm(engine_server(series)), target("chat-a-1", "chat-a-2", "gateway-1"))
    assert [key.pod_uid for key in engines.keys] == ["uid-chat-a-1", "uid-chat-a-2"]
    assert column(engines, "num_requests_running") == [3.0, 4.0]


async def test_label_that_collided_comes_back() -> None:
    series = [
        ({**labels, "model_name": "of-the-target", "exported_model_name": labels["model_name"]}, value)
        if "model_name" in labels
        else (labels, value)
        for labels, value in engine_rows("chat-a-1", "3")
    ]
    engines, _ = await engines_of(vllm(engine_server(series)), target("chat-a-1"))
    assert column(engines, "num_requests_running") == [3.0]
    assert len(engines.keys) == 1


async def test_running_pods_only_ready_or_not() -> None:
    of = TargetStatus(
        namespace="serving",
        name="chat-a",
        current_replicas=3,
        pods=(
            Pod(name="chat-a-1", uid="1", ready=False),
            Pod(name="chat-a-2", uid="2", phase=PodPhase.PENDING),
            Pod(name="chat-a-3", uid="3", terminating=True),
        ),
    )
    server = engine_server([])
    reading = await vllm(server).read(of, AT)
    assert 'pod=~"chat-a-1|chat-a-3"' in server.queries[0]
    assert [gap.pod for gap in reading.gaps] == ["chat-a-1", "chat-a-3"]


async def test_nothing_is_asked_without_pods() -> None:
    server = engine_server([])
    engines, reading = await engines_of(vllm(server), target())
    assert (engines.keys, reading.gaps, server.queries) == ((), (), [])


async def test_what_the_server_said_last_stands_until_it_is_stale() -> None:
    server = engine_server(engine_rows("chat-a-1", "3"))
    source = vllm(server, stale_after_s=15.0, scrape_interval_s=15.0)
    first, _ = await engines_of(source, target("chat-a-1", "chat-a-2"))
    server.answers = {"": httpx.Response(400, json={"error": "no"})}
    kept, reading = await engines_of(source, target("chat-a-1"), AT + 20.0)
    assert gaps(reading)[0] == (WHOLE_PAGE, GapReason.QUERY_ERROR)
    np.testing.assert_array_equal(kept.values, first.values)
    with pytest.raises(SourceError) as gone:
        await source.read(target("chat-a-3"), AT + 21.0)
    with pytest.raises(SourceError) as stale:
        await source.read(target("chat-a-1"), AT + 30.0)
    assert {(error.value.source, error.value.reason) for error in (gone, stale)} == {("vllm", GapReason.QUERY_ERROR)}


async def test_many_pods_are_asked_for_in_groups_and_in_smaller_ones_after_too_large_an_answer() -> None:
    names = [f"chat-a-{index:03}" for index in range(250)]
    server = engine_server([row for name in names for row in engine_rows(name, "1")])
    source = vllm(server)
    engines, _ = await engines_of(source, target(*names))
    assert len(engines.keys) == 250
    assert len(server.queries) == 2 * 3
    server.answers = {"": httpx.Response(200, content=b" " * (8 * 2**20 + 1))}
    _, reading = await engines_of(source, target(*names), AT + 5.0)
    assert gaps(reading)[0] == (WHOLE_PAGE, GapReason.BODY_TOO_LARGE)
    server.answers, server.queries = {}, []
    await source.read(target(*names), AT + 10.0)
    assert len(server.queries) == 2 * 10


# The devices' own series


def device_row(name: str, value: str, uuid: str = "GPU-1", **labels: str) -> Row:
    """Return one series of one device, as an exporter that was scraped without honor_labels gives it."""
    exporter = {"pod": "dcgm-exporter-x", "namespace": "gpu-operator", "instance": "10.0.0.9:9400"}
    return {"__name__": f"DCGM_FI_DEV_{name}", "UUID": uuid, **exporter, **labels}, value


OURS = {"exported_pod": "chat-a-1", "exported_namespace": "serving"}
CARD = [device_row("FB_USED", "75000", **OURS), device_row("FB_FREE", "6000", **OURS)]


def device_times(age_s: float = 1.0, uuid: str = "GPU-1") -> Row:
    """Return the time of a device's scrape."""
    return {"UUID": uuid, **OURS}, str(AT - age_s)


def device_server(*series: Row, scraped: Sequence[Row] = (device_times(),), **more: object) -> FakeServer:
    """Return a server with these series of devices."""
    return FakeServer({"timestamp(": rows(*scraped), "count(": rows(({}, "8")), "": rows(*series, **more)})


def dcgm(server: FakeServer, **settings: Any) -> PrometheusDcgmSource:
    """Return the source over a fake server."""
    return PrometheusDcgmSource(DcgmSignals(**settings), SERVER, FakeClock(), server.transport())


async def test_devices() -> None:
    server = device_server(*CARD)
    reading = await dcgm(server).read(target("chat-a-1"), AT)
    assert [(gpu.uuid, gpu.pod_uid, gpu.memory_used, gpu.memory_free) for gpu in reading.gpus] == [
        ("GPU-1", "uid-chat-a-1", 75000 * MIB, 6000 * MIB)
    ]
    assert reading.engines is None
    assert " and on (UUID, uuid) (" in server.queries[0]


@pytest.mark.parametrize("honored", ["false", "true"])
async def test_recorded_devices(honored: str) -> None:
    """A free card's row carries the exporter's own labels, or nothing: it is nobody's."""
    answer = json.loads((RECORDED / f"instant_fb_used_honor_labels_{honored}.json").read_text())["response"]["body"]
    series = [(row["metric"], row["value"][1]) for row in answer["data"]["result"]]
    scraped = [({"UUID": labels["UUID"]}, str(AT)) for labels, _ in series]
    names = {"llama-70b-7c9f6d5b8b-4x2lq": 4, "qwen-32b-6d4cbb9f77-r8t5w": 2}
    pods = tuple(Pod(name=name, uid=name) for name in (*names, "nvidia-dcgm-exporter-a1"))
    of = TargetStatus(namespace="llm-prod", name="any", current_replicas=3, pods=pods)
    reading = await dcgm(device_server(*series, scraped=scraped)).read(of, AT)
    owners = [gpu.pod_uid for gpu in reading.gpus]
    assert {name: owners.count(name) for name in set(owners)} == names
    assert {gpu.attribution for gpu in reading.gpus} == {Attribution.EXCLUSIVE}


async def test_devices_are_asked_for_once_an_interval_or_when_the_pods_change() -> None:
    server = device_server(*CARD)
    source = dcgm(server, interval_s=15.0)
    asked = []
    for tick in range(6):
        server.queries.clear()
        reading = await source.read(target("chat-a-1", *(["chat-a-2"] if tick == 5 else [])), AT + 5.0 * tick)
        asked.append(bool(server.queries))
        assert len(reading.gpus) == 1
    assert asked == [True, False, False, True, False, True]


async def test_devices_age_between_and_without_answers() -> None:
    server = device_server(*CARD, scraped=[device_times(50.0)])
    source = dcgm(server, interval_s=15.0, stale_after_s=60.0)
    assert len((await source.read(target("chat-a-1"), AT)).gpus) == 1
    server.answers = {"": httpx.Response(400, json={"error": "no"})}
    kept = await source.read(target("chat-a-1"), AT + 10.0)
    failing = await source.read(target("chat-a-1"), AT + 15.0)
    assert len(kept.gpus) == 1
    assert (WHOLE_PAGE, GapReason.STALE) not in gaps(kept)
    assert failing.gpus == ()
    assert gaps(failing)[:2] == [(WHOLE_PAGE, GapReason.QUERY_ERROR), (WHOLE_PAGE, GapReason.STALE)]
    assert "1 of 1 devices, scraped up to 65.0 s ago, limit 60 s" in failing.gaps[1].detail


async def test_a_stale_device_leaves_the_others() -> None:
    other = [device_row("FB_USED", "1", "GPU-2", **OURS), device_row("FB_FREE", "2", "GPU-2", **OURS)]
    server = device_server(*CARD, *other, scraped=[device_times(1.0), device_times(90.0, "GPU-2")])
    reading = await dcgm(server).read(target("chat-a-1"), AT)
    assert [gpu.uuid for gpu in reading.gpus] == ["GPU-1"]
    assert (WHOLE_PAGE, GapReason.STALE) in gaps(reading)


@pytest.mark.parametrize(
    ("count", "reason", "detail"),
    [
        pytest.param(rows(), GapReason.EMPTY, "DCGM_FI_DEV_FB_USED", id="no-exporter-is-scraped"),
        pytest.param(rows(({}, "8")), GapReason.FILTER_MATCHED_NOTHING, "there are DCGM series", id="none-of-our-pods"),
    ],
)
async def test_no_device_says_why(count: httpx.Response, reason: GapReason, detail: str) -> None:
    reading = await dcgm(FakeServer({"count(": count})).read(target("chat-a-1"), AT)
    assert gaps(reading) == [(WHOLE_PAGE, reason)]
    assert detail in reading.gaps[0].detail


async def test_c042_partial_devices_stay_marked_until_the_next_answer() -> None:
    source = dcgm(device_server(*CARD, warnings=["store 2 is down"]))
    found = [await source.read(target("chat-a-1"), AT + 5.0 * tick) for tick in range(2)]
    assert [(WHOLE_PAGE, GapReason.PARTIAL) in gaps(reading) for reading in found] == [True, True]


async def test_a_family_that_is_lost_is_noticed() -> None:
    server = device_server(*CARD)
    source = dcgm(server, interval_s=5.0)
    await source.read(target("chat-a-1"), AT)
    server.answers = device_server(CARD[0]).answers
    found = [await source.read(target("chat-a-1"), AT + 5.0 * tick) for tick in range(1, 4)]
    assert [("memory_free", GapReason.FAMILY_MISSING) in gaps(reading) for reading in found] == [False, False, True]


async def test_devices_of_no_pods_are_not_asked_for() -> None:
    server = device_server(*CARD)
    reading = await dcgm(server).read(target("chat-a-1", phase=PodPhase.PENDING), AT)
    assert (reading.gpus, reading.gaps, server.queries) == ((), (), [])


async def test_nothing_known_of_the_devices_is_a_source_error() -> None:
    with pytest.raises(SourceError) as error:
        await dcgm(FakeServer({"": httpx.Response(401)})).read(target("chat-a-1"), AT)
    assert (error.value.source, error.value.reason) == ("dcgm", GapReason.UNAUTHORIZED)


# Recorded answers

SINGLE: Mapping[str, float | GapReason] = {
    "instant_fraction_under_2s.json": 0.8324175824175826,
    "instant_native_fraction.json": 0.8856382978723404,
    "instant_native_histogram.json": GapReason.QUERY_ERROR,
    "instant_native_quantile.json": 5.851428571428577,
    "instant_p99_e2e.json": 4.8279069767441865,
    "instant_p99_no_traffic_nan.json": GapReason.NON_FINITE,
    "instant_post.json": 0.0,
    "instant_scalar.json": GapReason.NON_FINITE,
    "instant_sum_by_le_mixed_layouts.json": 10.0,
    "instant_xid_nonzero.json": 31.0,
}
"""What a query gives that answers with one row; of all other recorded answers none is a reading."""
FILES = sorted(path.name for path in RECORDED.glob("*.json") if path.name != "quantile_vectors.json")


@pytest.mark.parametrize("name", FILES)
async def test_recorded_answers_to_a_query(name: str) -> None:
    reading = await queries(FakeServer({"": recorded(name)}), TTFT).read(target("a"), AT)
    expected = SINGLE.get(name)
    if isinstance(expected, float):
        assert [sample.value for sample in reading.samples] == [expected]
    else:
        assert reading.samples == ()
        assert len(reading.gaps) == 1
        assert expected in (None, reading.gaps[0].reason)
        assert reading.gaps[0].signal == "ttft"


@pytest.mark.parametrize("source", [vllm, dcgm])
@pytest.mark.parametrize("name", FILES)
async def test_recorded_answers_about_others_tell_nothing_of_our_pods(
    name: str, source: Callable[[FakeServer], PrometheusVllmSource | PrometheusDcgmSource]
) -> None:
    response = json.loads((RECORDED / name).read_text())["response"]
    reading: Reading | None = None
    with suppress(SourceError):
        reading = await source(FakeServer({"": recorded(name)})).read(target("chat-a-1"), AT)
    kind = response["body"].get("data", {}).get("resultType") if isinstance(response["body"], dict) else None
    assert (reading is not None) == (kind in ("vector", "scalar"))
    if reading is not None:
        assert reading.gpus == ()
        assert reading.engines is None or reading.engines.keys == ()
        assert reading.gaps
