"""What the daemon does while its requests are refused, throttled or cut, by a proxy in front of the API server."""

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cluster.manifests import Place, deployment
from tests.cluster.proxy import Proxy, running_proxy
from tests.cluster.trial import BUSY, CALM, INTERVAL_S, trial

PATIENCE_S = 6
REQUEST_S = 3.0
"""The longest that a request of the daemon's takes."""


@pytest.fixture
async def proxy(place: Place) -> AsyncIterator[Proxy]:
    """Return a proxy in front of the API server."""
    async with running_proxy(place.plane) as one:
        yield one


async def test_each_write_is_a_conflict_while_it_shrinks(place: Place, proxy: Proxy, tmp_path: Path) -> None:
    await place.create(deployment(replicas=4))
    await place.tell(await place.until_ready(4), **CALM)
    async with trial(place, tmp_path, bounds=(2, 4), connect=proxy.kubeconfig_for) as one:
        await one.until(outcome="applied", desired_replicas=3)
        with proxy.rule(method="PATCH", path="/deployments/chat/scale$", status=409) as storm:
            for _ in range(3):
                await one.until(outcome="failed", desired_replicas=2)
        failed = [line for line in one.live.of("decision") if line["outcome"] == "failed"]
        # Once anew after each conflict, and no more in one tick; another one may have begun meanwhile.
        assert 0 <= storm.hits - 2 * len(failed) <= 2
        await one.recovered(time.time())
        await one.until_steps((4, 3), (3, 2))


async def test_it_is_asked_for_patience_while_it_grows(place: Place, proxy: Proxy, tmp_path: Path) -> None:
    await place.create(deployment(replicas=1))
    await place.tell(await place.until_ready(1), **BUSY)
    async with trial(place, tmp_path, bounds=(1, 3), connect=proxy.kubeconfig_for) as one:
        await one.until(outcome="applied", desired_replicas=2)
        with proxy.rule(path="/apis/apps/", status=429, headers={"Retry-After": str(PATIENCE_S)}):
            proxy.cut()
            await one.until_failed("throttled")
            await asyncio.sleep(2 * PATIENCE_S)
        asked = [seen.at for seen in proxy.asked() if seen.status == 429]
        # Requests that were on their way when the first was refused are refused as well.
        rounds = [at for before, at in pairwise([0.0, *asked]) if at - before > REQUEST_S]
        assert len(rounds) >= 2
        assert all(later - sooner >= PATIENCE_S for sooner, later in pairwise(rounds))
        await one.recovered(max(time.time(), time.time() - time.monotonic() + asked[-1] + PATIENCE_S))
        await one.until_steps((1, 2), (2, 3))


async def test_its_watches_are_cut_again_and_again_while_it_grows(place: Place, proxy: Proxy, tmp_path: Path) -> None:
    await place.create(deployment(replicas=1))
    await place.tell(await place.until_ready(1), **BUSY)
    async with trial(place, tmp_path, bounds=(1, 4), connect=proxy.kubeconfig_for) as one:
        await one.until(outcome="applied", desired_replicas=2)
        began = time.monotonic()
        while time.monotonic() - began < 4 * INTERVAL_S:
            proxy.cut()
            await asyncio.sleep(0.2)
        lists = proxy.asked("GET", "/pods$", watch=False, since=began)
        assert 2 <= len(lists) <= time.monotonic() - began + 2, "once a second at the most"
        await one.recovered(time.time())
        await one.until_steps((1, 2), (2, 3), (3, 4))


async def test_its_watches_are_cut_and_cannot_be_opened_while_it_shrinks(
    place: Place, proxy: Proxy, tmp_path: Path
) -> None:
    await place.create(deployment(replicas=4))
    await place.tell(await place.until_ready(4), **CALM)
    async with trial(place, tmp_path, bounds=(1, 4), connect=proxy.kubeconfig_for) as one:
        await one.until(outcome="applied", desired_replicas=3)
        with proxy.rule(method="GET", watch=True, status=503):
            proxy.cut()
            await one.until_failed("unreachable")
            with one.blindness():
                await asyncio.sleep(2 * INTERVAL_S)
        await one.recovered(time.time())
        await one.until_steps((4, 3), (3, 2), (2, 1))
