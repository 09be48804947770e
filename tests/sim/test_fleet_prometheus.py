"""A real Prometheus scraping the demo's fleet gives the snapshot that direct scraping gives, within a scrape's age."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import numpy as np
import pytest_asyncio

from autoscaler.clock import SystemClock
from autoscaler.core.policy import PrometheusServer, VllmSignals
from autoscaler.core.signals import COLUMN, FIRST_COUNTER
from autoscaler.core.types import Engines, Snapshot
from autoscaler.observe import take
from autoscaler.ports import Source
from autoscaler.sim.fleet import Fleet, Settings
from autoscaler.sim.scenario import demo_scenario
from autoscaler.sources.prometheus import PrometheusVllmSource
from autoscaler.sources.vllm import VllmSource
from tests.prometheus_server import ScrapeTarget, running_prometheus, skip_without_prometheus

skip_without_prometheus()

CLOCK = SystemClock()
STEP_S = 0.1
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage")


@pytest_asyncio.fixture
async def fleet() -> AsyncIterator[tuple[Fleet, int]]:
    """Return the demo's fleet of two replicas, in the traffic of its morning, and the port of its pages."""
    scenario = demo_scenario()
    fleet = scenario.fleet(Settings(namespace="demo", deployment="llama"))
    fleet.advance(9 * 3600.0)
    async with fleet.serve() as port:
        await fleet.follow()
        yield fleet, port


async def _pass_time(fleet: Fleet) -> None:
    """Let the fleet live in real time."""
    started, origin = CLOCK.now(), fleet.now
    while True:
        await asyncio.sleep(STEP_S)
        fleet.advance(origin + CLOCK.now() - started)


class Strict:
    """A `Trouble` that lets nothing pass."""

    def error(self, policy: str, kind: str, error: BaseException) -> None:
        """Fail."""
        raise error

    def overrun(self, policy: str) -> None:
        """Take no note: nothing is timed here."""


async def look(fleet: Fleet, source: Source) -> Snapshot:
    """Return a snapshot of now by one source."""
    return await take("demo", fleet, [source], CLOCK, Strict())


async def test_prometheus_and_direct_scraping_see_the_same_fleet(fleet: tuple[Fleet, int]) -> None:
    simulated, port = fleet
    pods = (await simulated.read()).pods
    targets = [ScrapeTarget(address=f"{pod.ip}:{port}", labels={"namespace": "demo", "pod": pod.name}) for pod in pods]
    direct = VllmSource(VllmSignals(port=port), CLOCK)
    history: list[Snapshot] = []
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_prometheus(targets))
        stack.push_async_callback(direct.close)
        settings = VllmSignals(prometheus=server.url, scrape_interval_s=1.0)
        through = PrometheusVllmSource(settings, PrometheusServer(url=server.url), CLOCK)
        stack.push_async_callback(through.close)
        await server.scraped()
        alive = asyncio.create_task(_pass_time(simulated))
        stack.callback(alive.cancel)
        for _ in range(30):
            history.append(await look(simulated, direct))
            await asyncio.sleep(STEP_S)
        found = await look(simulated, through)
        history.append(await look(simulated, direct))
    assert not found.gaps
    assert found.engines.keys == history[-1].engines.keys
    for row in range(len(found.engines.keys)):
        _compare(found.engines, row, [snapshot.engines for snapshot in history])


def _compare(found: Engines, row: int, history: list[Engines]) -> None:
    """Check one engine: its counters lie between the direct readings before and after Prometheus' scrape of it."""
    read_at = found.values[row, COLUMN["read_at"]]
    times = [engines.values[row, COLUMN["read_at"]] for engines in history]
    later = next(index for index, at in enumerate(times) if at > read_at + 0.05)
    earlier = max(index for index, at in enumerate(times) if at < read_at - STEP_S)
    assert times[-1] - read_at <= 3.0, "older than a scrape"
    before, after = history[earlier], history[later]
    slack = 1e-9
    counters = found.values[row, FIRST_COUNTER:]
    assert (counters >= before.values[row, FIRST_COUNTER:] - slack).all()
    assert (counters <= after.values[row, FIRST_COUNTER:] + slack).all()
    assert counters[COLUMN["generation_tokens"] - FIRST_COUNTER] > 0.0
    for name in ("kv_capacity_tokens", "gpu_memory_utilization", "started_at", "asleep"):
        assert found.values[row, COLUMN[name]] == after.values[row, COLUMN[name]]
    around = [engines.values[row] for engines in history[earlier : later + 1]]
    for name in GAUGES:
        readings = [values[COLUMN[name]] for values in around]
        spread = max(readings) - min(readings) + max(2.0, 0.2 * max(readings)) * (name != "kv_cache_usage") + 0.05
        assert min(readings) - spread <= found.values[row, COLUMN[name]] <= max(readings) + spread
    for name, blocks in found.histograms.items():
        (block,), (low,), (high,) = blocks, before.histograms[name], after.histograms[name]
        assert block.bounds == low.bounds
        assert np.all(block.counts[row] >= low.counts[row])
        assert np.all(block.counts[row] <= high.counts[row])
