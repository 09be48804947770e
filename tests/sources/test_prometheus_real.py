"""The Prometheus sources against a real server that scrapes recorded pages on loopback.

One server and one set of pages serve all tests, since a server takes six seconds to its first scrape. Each situation
has a namespace of its own.
"""

import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web

from autoscaler.clock import SystemClock
from autoscaler.core.policy import DcgmSignals, PrometheusServer, Query, VllmSignals
from autoscaler.core.signals import COLUMN
from autoscaler.core.types import WHOLE_PAGE, Engines, GapReason, Pod, Reading, TargetStatus
from autoscaler.sources.dcgm import FAMILY, build_gpus
from autoscaler.sources.exposition import SeriesCache, parse_page
from autoscaler.sources.prometheus import PrometheusDcgmSource, PrometheusVllmSource, PromQuerySource
from autoscaler.sources.vllm import VllmSource
from tests.prometheus_server import RunningPrometheus, ScrapeTarget, running_prometheus, skip_without_prometheus

skip_without_prometheus()
pytestmark = pytest.mark.asyncio(loop_scope="module")

DATA = Path(__file__).parent.parent / "data"
CLOCK = SystemClock()


def recorded(path: str) -> bytes:
    """Return a recorded page."""
    return (DATA / path).read_bytes()


LOADED = recorded("vllm/0.32.0/loaded.prom")
RUNNING = b'num_requests_running{engine="0",model_name="tiny"} '


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Pods of one namespace.

    Args:
        pages: by pod.
        scrapers: the labels that each scraper adds to the pod's.
    """

    pages: Mapping[str, bytes]
    scrapers: Sequence[Mapping[str, str]] = ({},)


SITUATIONS: Mapping[str, Situation] = {
    "serving": Situation(
        pages={
            "chat-a-1": LOADED,
            "chat-a-2": recorded("vllm/0.32.0/dp2_saturated.prom"),
            "chat-a-3": recorded("vllm/0.32.0/api_server_count2.prom"),
            "chat-a-4": recorded("vllm/0.11.0/saturated.prom"),
            "chat-a-5": recorded("vllm/0.8.5-v0-synthetic/saturated.prom"),
            "chat-a-6": recorded("vllm/0.4.3-v0-synthetic/saturated.prom"),
            "chat-a-7": recorded("vllm/0.32.0/kv_thrash.prom"),
        }
    ),
    "twice": Situation(pages={"chat-a-1": LOADED}, scrapers=({"scraper": "one"}, {"scraper": "two"})),
    "collision": Situation(
        pages={"chat-a-1": recorded("vllm/0.32.0/dp2_saturated.prom")}, scrapers=({"engine": "vllm"},)
    ),
    "underscores": Situation(pages={"chat-a-1": LOADED.replace(b"vllm:", b"vllm_")}),
    "both": Situation(
        pages={"chat-a-1": LOADED + LOADED.replace(b"vllm:", b"vllm_").replace(RUNNING + b"3.0", RUNNING + b"90.0")}
    ),
    "mute": Situation(pages={"chat-a-1": recorded("vllm/0.32.0/disable_log_stats.prom")}),
    "mortal": Situation(pages={"chat-a-1": LOADED, "chat-a-2": LOADED}),
}
EXPORTERS: Mapping[str, Mapping[str, str]] = {
    "exporters": {
        "nvidia-dcgm-exporter-a1": "dcgm/a100x8-two-pods.prom",
        "nvidia-dcgm-exporter-c3": "dcgm/l40s-timeslice-perprocess.prom",
    },
    "honored": {"nvidia-dcgm-exporter-b2": "dcgm/a100-mig-mixed.prom"},
}
"""By namespace; of two labels with one name, those of `honored` keep the page's."""


@dataclass
class FakeFleet:
    """Fakes of pods and exporters: each serves one recorded page for ever, at an address of its own and one port."""

    port: int
    addresses: dict[tuple[str, str], str] = field(default_factory=dict)
    runners: dict[str, web.AppRunner] = field(default_factory=dict)

    async def serve(self, namespace: str, pod: str, page: bytes) -> None:
        """Serve a page."""

        async def metrics(request: web.Request) -> web.Response:
            return web.Response(body=page, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

        address = f"127.0.1.{len(self.addresses) + 1}"
        app = web.Application()
        app.router.add_get("/metrics", metrics)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, address, self.port).start()
        self.addresses[namespace, pod] = address
        self.runners[address] = runner

    async def stop(self, address: str) -> None:
        """Stop serving one page."""
        await self.runners.pop(address).cleanup()

    def target(self, namespace: str, *names: str) -> TargetStatus:
        """Return a Deployment of a namespace's pods, of all or of those named."""
        pods = tuple(
            Pod(name=pod, uid=f"uid-{pod}", ip=address)
            for (space, pod), address in self.addresses.items()
            if space == namespace and (not names or pod in names)
        )
        return TargetStatus(namespace=namespace, name="chat-a", current_replicas=len(pods), pods=pods)

    def scrape_targets(self) -> list[ScrapeTarget]:
        """Return all as a server's targets, labelled as an operator's monitors do it."""
        return [
            ScrapeTarget(
                address=f"{address}:{self.port}",
                labels={"namespace": namespace, "pod": pod, "container": "main", **extra},
                honor_labels=namespace == "honored",
            )
            for (namespace, pod), address in self.addresses.items()
            for extra in (SITUATIONS[namespace].scrapers if namespace in SITUATIONS else ({},))
        ]


@dataclass(frozen=True, kw_only=True)
class World:
    """A fleet and the server that scrapes it."""

    fleet: FakeFleet
    server: RunningPrometheus

    @property
    def settings(self) -> PrometheusServer:
        """Where the server is."""
        return PrometheusServer(url=self.server.url)

    async def read_engines(self, target: TargetStatus, at: float, **settings: Any) -> tuple[Engines, Reading]:
        """Return what the source makes of the server's series at `at`."""
        source = PrometheusVllmSource(VllmSignals(scrape_interval_s=1.0, **settings), self.settings, CLOCK)
        try:
            reading = await source.read(target, at)
        finally:
            await source.close()
        assert reading.engines is not None
        return reading.engines, reading

    async def read_directly(self, target: TargetStatus) -> tuple[Engines, Reading]:
        """Return what a direct scrape gives."""
        source = VllmSource(VllmSignals(port=self.fleet.port), CLOCK)
        try:
            reading = await source.read(target, CLOCK.now())
        finally:
            await source.close()
        assert reading.engines is not None
        return reading.engines, reading

    async def ask(self, query: Query, target: TargetStatus, at: float) -> Reading:
        """Return what one query gives at `at`."""
        source = PromQuerySource([query], {"default": self.settings}, CLOCK)
        try:
            return await source.read(target, at)
        finally:
            await source.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[World]:
    """All situations, scraped at least once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        fleet = FakeFleet(port=probe.getsockname()[1])
    try:
        for namespace, situation in SITUATIONS.items():
            for pod, page in situation.pages.items():
                await fleet.serve(namespace, pod, page)
        for namespace, paths in EXPORTERS.items():
            for pod, path in paths.items():
                await fleet.serve(namespace, pod, recorded(path))
        async with running_prometheus(fleet.scrape_targets()) as server:
            await server.scraped()
            yield World(fleet=fleet, server=server)
    finally:
        for address in list(fleet.runners):
            await fleet.stop(address)


def assert_same_engines(found: Engines, expected: Engines) -> None:
    """Compare all but the time of reading, which is the scraper's."""
    assert found.keys == expected.keys
    others = np.arange(found.values.shape[1]) != COLUMN["read_at"]
    np.testing.assert_array_equal(found.values[:, others], expected.values[:, others])
    assert found.histograms.keys() == expected.histograms.keys()
    for name, groups in expected.histograms.items():
        by_bounds = {group.bounds: group for group in found.histograms[name]}
        assert by_bounds.keys() == {group.bounds for group in groups}, name
        for group in groups:
            np.testing.assert_array_equal(by_bounds[group.bounds].rows, group.rows)
            np.testing.assert_array_equal(by_bounds[group.bounds].counts, group.counts)


def column(engines: Engines, signal: str) -> list[float]:
    """Return one signal of all engines."""
    values: list[float] = engines.values[:, COLUMN[signal]].tolist()
    return values


@pytest.mark.parametrize(
    ("namespace", "engines"),
    [
        pytest.param("serving", 8, id="all-releases"),
        pytest.param("twice", 1, id="two-scrapers-of-one-pod-count-once"),
        pytest.param("collision", 2, id="own-label-under-exported-engine"),
        pytest.param("underscores", 1, id="c053-underscores-only"),
    ],
)
async def test_engines_equal_a_direct_scrape(namespace: str, engines: int, world: World) -> None:
    at = CLOCK.now()
    target = world.fleet.target(namespace)
    found, through = await world.read_engines(target, at)
    expected, direct = await world.read_directly(target)
    assert len(found.keys) == engines
    assert_same_engines(found, expected)
    assert set(through.gaps) == set(direct.gaps)
    ages = at - np.array(column(found, "read_at"))
    assert (ages >= 0.0).all(), ages
    assert (ages < 16.0).all(), ages


async def test_c053_both_spellings_are_not_added(world: World) -> None:
    engines, _ = await world.read_engines(world.fleet.target("both"), CLOCK.now())
    assert b'vllm_num_requests_running{engine="0",model_name="tiny"} 90.0' in SITUATIONS["both"].pages["chat-a-1"]
    assert column(engines, "num_requests_running") == [3.0]


async def test_c053_neither_spelling_names_what_was_tried(world: World) -> None:
    engines, reading = await world.read_engines(world.fleet.target("mute"), CLOCK.now())
    assert engines.keys == ()
    assert [(gap.signal, gap.reason, gap.pod) for gap in reading.gaps] == [(WHOLE_PAGE, GapReason.EMPTY, "chat-a-1")]
    assert "vllm:num_requests_running, vllm_num_requests_running" in reading.gaps[0].detail


async def test_c048_series_of_a_pod_that_is_gone_are_left_out(world: World) -> None:
    engines, reading = await world.read_engines(world.fleet.target("serving", "chat-a-1"), CLOCK.now())
    assert {key.pod_uid for key in engines.keys} == {"uid-chat-a-1"}
    assert {gap.pod for gap in reading.gaps} <= {"chat-a-1"}


@pytest.mark.parametrize(
    ("model_name", "engines"),
    [
        pytest.param("tiny", 1, id="its-name"),
        pytest.param("tin.", 0, id="no-pattern"),
        pytest.param('tiny"} or vector(99) #', 0, id="no-way-out-of-the-string"),
    ],
)
async def test_c052_model_name_is_a_literal(model_name: str, engines: int, world: World) -> None:
    target = world.fleet.target("serving", "chat-a-1")
    found, reading = await world.read_engines(target, CLOCK.now(), model_name=model_name)
    assert len(found.keys) == engines
    assert column(found, "kv_capacity_tokens") == [8192.0] * engines, "a series without a model's name"
    assert [gap.reason for gap in reading.gaps] == [GapReason.EMPTY] * (1 - engines)


async def test_a_dead_target_is_a_gap_and_the_others_stay(world: World) -> None:
    target = world.fleet.target("mortal")
    await world.fleet.stop(world.fleet.addresses["mortal", "chat-a-2"])
    await world.server.until('up{namespace="mortal"} == 0')
    engines, reading = await world.read_engines(target, CLOCK.now())
    assert {key.pod_uid for key in engines.keys} == {"uid-chat-a-1"}
    assert [(gap.signal, gap.reason) for gap in reading.gaps if gap.pod == "chat-a-2"] == [
        (WHOLE_PAGE, GapReason.EMPTY)
    ]


async def test_c050_an_old_scrape_is_stale_though_the_answer_is_not(world: World) -> None:
    """A server serves a sample for five minutes after the last scrape: asked 100 s ahead, it shows such an old one."""
    target = world.fleet.target("serving", "chat-a-1")
    query = Query(signal="num_requests_waiting", query='vllm:num_requests_waiting{namespace="$namespace",pod=~"$pods"}')
    now = CLOCK.now()
    fresh = await world.ask(query, target, now)
    late = await world.ask(query, target, now + 100.0)
    engines, reading = await world.read_engines(target, now + 100.0)
    assert [sample.value for sample in fresh.samples] == [0.0]
    assert now - 60.0 <= fresh.samples[0].at <= now
    assert late.samples == ()
    assert [gap.reason for gap in late.gaps] == [GapReason.STALE]
    assert engines.keys == ()
    assert [gap.reason for gap in reading.gaps] == [GapReason.STALE]


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        pytest.param("no_such_metric", GapReason.EMPTY, id="c040-empty"),
        pytest.param("0/0", GapReason.NON_FINITE, id="c041-nan"),
        pytest.param("1/0", GapReason.NON_FINITE, id="c041-inf"),
        pytest.param("-1/0", GapReason.NON_FINITE, id="c041-minus-inf"),
        pytest.param("-1", GapReason.OUT_OF_RANGE, id="absurd"),
        pytest.param("sum(", GapReason.QUERY_ERROR, id="c046-syntax"),
        pytest.param("up * on (job) up", GapReason.QUERY_ERROR, id="c046-many-to-many"),
        pytest.param('"text"', GapReason.QUERY_ERROR, id="a-string"),
        pytest.param("up[1m]", GapReason.QUERY_ERROR, id="a-range"),
        pytest.param("up", GapReason.AMBIGUOUS_RESULT, id="c044-many-rows"),
    ],
)
async def test_answers_that_are_no_reading(query: str, reason: GapReason, world: World) -> None:
    target = world.fleet.target("serving")
    reading = await world.ask(Query(signal="ttft", query=query), target, CLOCK.now())
    assert reading.samples == ()
    assert [(gap.signal, gap.reason) for gap in reading.gaps] == [("ttft", reason)]


@pytest.mark.parametrize(
    ("query", "value"),
    [
        pytest.param('sum(vllm:num_requests_running{namespace="both"})', 3.0, id="an-aggregation"),
        pytest.param('vllm:num_requests_running{namespace="serving",pod="chat-a-1"}', 3.0, id="a-selector"),
        pytest.param('scalar(count(up{namespace="serving"}))', 7.0, id="a-scalar"),
        pytest.param("sum(vllm:num_requests_running{namespace=$namespace,pod=~$pods})", 3.0, id="bare-placeholders"),
        pytest.param("count(up{namespace=$namespace,pod=~'$deployment-.*'})", 7.0, id="deployment-in-a-pattern"),
    ],
)
async def test_answers_that_are_readings(query: str, value: float, world: World) -> None:
    now = CLOCK.now()
    reading = await world.ask(
        Query(signal="num_requests_running", query=query), world.fleet.target("serving", "chat-a-1"), now
    )
    assert [(sample.value, sample.partial) for sample in reading.samples] == [(value, False)]
    assert now - 60.0 <= reading.samples[0].at <= now
    assert reading.gaps == ()


async def test_c052_dot_in_a_deployment_name_is_no_pattern(world: World) -> None:
    target = TargetStatus(namespace="serving", name="chat.a", current_replicas=1)
    query = Query(signal="num_requests_running", query='count(up{namespace="$namespace",pod=~"$deployment-.*"})')
    reading = await world.ask(query, target, CLOCK.now())
    assert [gap.reason for gap in reading.gaps] == [GapReason.EMPTY]


@pytest.mark.parametrize(
    ("namespace", "pod", "uid"),
    [
        pytest.param("llm-prod", "llama-70b-7c9f6d5b8b-4x2lq", "uid-1", id="four-whole-cards-exported-pod"),
        pytest.param("llm-prod", "llama-8b-84cbf7d69-zq7pp", "uid-1", id="mig-instance-pod"),
        pytest.param("team-a", "phi4-mini-a-7b9d8f5c6d-abcde", "", id="time-slice-with-own-share-exported-pod"),
    ],
)
async def test_devices_equal_the_exporters_pages(namespace: str, pod: str, uid: str, world: World) -> None:
    paths = [path for exporters in EXPORTERS.values() for path in exporters.values()]
    pages = [parse_page(recorded(path), SeriesCache(FAMILY.__contains__)) for path in paths]
    series = [one for page in pages for one in page.series()]
    uids = {one.labels.get("pod_uid", "") for one in series if one.labels.get("pod") == pod} - {""}
    owner = Pod(name=pod, uid=uid or uids.pop())
    expected, _ = build_gpus(series, [owner], namespace)
    target = TargetStatus(namespace=namespace, name="any", current_replicas=1, pods=(owner,))
    source = PrometheusDcgmSource(DcgmSignals(), world.settings, CLOCK)
    reading = await source.read(target, CLOCK.now())
    await source.close()
    assert expected
    assert reading.gpus == expected


async def test_devices_that_name_no_pod_of_ours(world: World) -> None:
    target = TargetStatus(
        namespace="nowhere", name="any", current_replicas=1, pods=(Pod(name="chat-a-1", uid="uid-1"),)
    )
    source = PrometheusDcgmSource(DcgmSignals(), world.settings, CLOCK)
    reading = await source.read(target, CLOCK.now())
    await source.close()
    assert reading.gpus == ()
    assert [(gap.signal, gap.reason) for gap in reading.gaps] == [(WHOLE_PAGE, GapReason.FILTER_MATCHED_NOTHING)]
