"""The simulated Deployment: life and death of pods, routing, compare-and-set, the clock, pages over HTTP, the truth."""

import asyncio
import math
from collections.abc import Iterable
from dataclasses import replace

import aiohttp
import numpy as np
import pytest

from autoscaler.core.policy import VllmSignals
from autoscaler.core.signals import COLUMN
from autoscaler.core.types import (
    DeletionCost,
    Hold,
    Limits,
    Outcome,
    PodBatching,
    PodPhase,
    ScaleReplicas,
    SetBatching,
)
from autoscaler.errors import ActuationError
from autoscaler.sim.clock import VirtualClock
from autoscaler.sim.engine import Request
from autoscaler.sim.faults import Faults
from autoscaler.sim.fleet import Fleet, Settings
from autoscaler.sim.front import Clients
from autoscaler.sim.ledger import Fate
from autoscaler.sim.profiles import profile
from autoscaler.sim.scenario import demo_scenario
from autoscaler.sim.workload import HOUR, Lengths, requests, steady
from autoscaler.sources.vllm import VllmSource

PROFILE = replace(profile("llama-3.1-8b-l40sx1"), cold_start_s=40.0)
EPOCH = 1_768_348_800.25
SLO = {"ttft_s": 2.0, "tpot_s": 0.1}


def make(traffic: Iterable[Request] = (), replicas: int = 1, seed: int = 1, settings: Settings | None = None) -> Fleet:
    return Fleet(PROFILE, traffic, replicas=replicas, epoch=EPOCH, rng=np.random.default_rng(seed), settings=settings)


def chat(rate: float, duration_s: float, seed: int = 2, output: float = 200.0) -> Iterable[Request]:
    return requests(np.random.default_rng(seed), steady(rate), Lengths(prompt=600.0, output=output), duration_s)


async def test_a_new_pod_is_pending_then_loads_then_is_ready_on_the_probe_grid() -> None:
    fleet = make()
    fleet.advance(10.0)
    assert await fleet.apply(ScaleReplicas(seen=1, to=2)) is Outcome.APPLIED
    phases, ready_at = [], math.nan
    for second in range(11, 200):
        fleet.advance(float(second))
        status = await fleet.read()
        pod = status.pods[1]
        phases.append((pod.phase, pod.ready))
        assert (pod.ip == "") == (pod.phase is PodPhase.PENDING)
        assert (pod.ready_at is None) == (pod.phase is PodPhase.PENDING)
        assert pod.was_ready == pod.ready
        if pod.ready and math.isnan(ready_at):
            ready_at = float(second)
            assert status.ready_replicas == 2
    assert list(dict.fromkeys(phases)) == [
        (PodPhase.PENDING, False),
        (PodPhase.RUNNING, False),
        (PodPhase.RUNNING, True),
    ]
    assert (ready_at - 12.0) % 5.0 == 0.0  # running since 12 s, probed every 5 s
    assert 12.0 + 20.0 < ready_at < 12.0 + 80.0  # lognormal around 40 s
    final = (await fleet.read()).pods[1]
    assert final.created_at == math.floor(EPOCH + 10.0)  # whole seconds, as the API server writes them
    assert final.ready_at == math.floor(EPOCH + ready_at)


async def test_cold_starts_spread_around_the_median() -> None:
    fleet = make(replicas=1)
    fleet.scale(400)
    share = {}
    for second in (20, 40, 50, 65, 120):
        fleet.advance(2.0 + second)
        share[second] = ((await fleet.read()).ready_replicas - 1) / 399
    # lognormal(40 s, 0.25): 0.3, 50, 81.4 and 97.4 % have loaded by then; 400 draws spread by 2.5 points
    assert share[20] < 0.03
    assert share[40] == pytest.approx(0.5, abs=0.08)
    assert share[50] == pytest.approx(0.814, abs=0.06)
    assert share[65] == pytest.approx(0.974, abs=0.025)
    assert share[120] == 1.0


async def test_scaling_is_compare_and_set() -> None:
    fleet = make(replicas=2)
    uid = (await fleet.read()).uid
    assert await fleet.apply(Hold()) is Outcome.UNCHANGED
    assert await fleet.apply(ScaleReplicas(seen=2, to=2, uid=uid)) is Outcome.UNCHANGED
    for action in (ScaleReplicas(seen=3, to=4, uid=uid), ScaleReplicas(seen=2, to=4, uid="another")):
        with pytest.raises(ActuationError) as caught:
            await fleet.apply(action)
        assert caught.value.reason == "conflict"
    with pytest.raises(ActuationError) as caught:
        await fleet.apply(ScaleReplicas(seen=2, to=-1, uid=uid))
    assert caught.value.reason == "invalid"
    assert (await fleet.read()).current_replicas == 2
    assert await fleet.apply(ScaleReplicas(seen=2, to=3, uid=uid)) is Outcome.APPLIED
    assert (await fleet.read()).current_replicas == 3


async def test_pods_that_do_not_serve_go_first_then_the_newest() -> None:
    fleet = make(replicas=2)
    fleet.advance(10.0)
    fleet.scale(3)
    fleet.advance(300.0)
    oldest = [pod.name for pod in (await fleet.read()).pods]
    fleet.scale(4)
    fleet.advance(303.0)
    fleet.scale(5)
    loading, pending = [pod.name for pod in (await fleet.read()).pods][3:]
    left = []
    for replicas in (4, 3, 2, 1):
        fleet.scale(replicas)
        left.append([pod.name for pod in (await fleet.read()).pods])
    assert left[0] == [*oldest, loading]
    assert pending not in left[0]
    assert left[1] == oldest
    assert left[2] == oldest[:2]
    assert len(left[3]) == 1


async def test_of_ready_pods_the_cheapest_goes_and_a_refused_write_marks_none() -> None:
    fleet = make(replicas=3)
    fleet.advance(10.0)
    first, *others = (await fleet.read()).pods
    costs = (DeletionCost(pod=first.name, uid=first.uid, cost=-1),)
    with pytest.raises(ActuationError):
        await fleet.apply(ScaleReplicas(seen=4, to=2, costs=costs))
    assert [pod.deletion_cost for pod in (await fleet.read()).pods] == [None, None, None]
    assert await fleet.apply(ScaleReplicas(seen=3, to=2, costs=costs)) is Outcome.APPLIED
    assert [pod.uid for pod in (await fleet.read()).pods] == [pod.uid for pod in others]


async def test_a_deleted_pod_drains_and_nothing_fails() -> None:
    fleet = make(chat(4.0, 120.0), replicas=2)
    fleet.advance(60.0)
    fleet.scale(1)
    status = await fleet.read()
    assert (status.current_replicas, status.status_replicas, status.ready_replicas) == (1, 1, 1)
    assert [pod.terminating for pod in status.pods] == [False, True]
    assert all(pod.ready for pod in status.pods)
    in_flight = fleet.samples[-1].in_flight
    fleet.advance(90.0)
    assert [pod.terminating for pod in (await fleet.read()).pods] == [False]
    fleet.advance(200.0)
    assert in_flight > 5
    assert fleet.ledger.failed() == 0
    # two replicas to 60 s, one to 200 s, and the drain: gone when its last answer ended, not at the next tick
    seconds = fleet.gpu_hours * HOUR
    assert 260.0 < seconds < 290.0
    assert seconds % 1.0 != 0.0


async def test_when_the_grace_is_over_requests_in_flight_fail() -> None:
    fleet = make(chat(4.0, 100.0, output=600.0), replicas=2, settings=Settings(grace_s=5.0))
    fleet.advance(60.0)
    fleet.scale(1)
    fleet.advance(64.0)
    assert len((await fleet.read()).pods) == 2
    assert fleet.ledger.failed() == 0
    fleet.advance(66.0)
    assert len((await fleet.read()).pods) == 1
    killed = fleet.ledger.column("finish")[fleet.ledger.column("fate") == Fate.KILLED]
    assert len(killed) > 5
    assert set(killed) == {65.0}


async def test_without_a_ready_replica_requests_are_refused() -> None:
    fleet = make(chat(2.0, 200.0), replicas=0)
    fleet.scale(1)
    fleet.advance(20.0)
    refused = fleet.ledger.failed()
    assert refused == len(fleet.ledger) > 10
    fleet.advance(200.0)
    (pod,) = (await fleet.read()).pods
    assert pod.ready_at is not None
    last = float(fleet.ledger.column("arrival")[fleet.ledger.column("fate") == Fate.REFUSED].max())
    assert last <= pod.ready_at - EPOCH + 1.0 + 1.5 + 1.0  # whole seconds, endpoints, the next arrival
    assert len(fleet.ledger) > 2 * fleet.ledger.failed()


def test_requests_go_to_the_replica_with_the_fewest_in_flight_and_stay() -> None:
    traffic = list(chat(30.0, 30.0))
    fleet = make(traffic, replicas=1)
    fleet.advance(20.0)
    fleet.scale(2)
    fleet.advance(30.0)
    queued = fleet.samples[-1].waiting
    fleet.advance(31.0)
    assert queued > 50
    assert fleet.samples[-1].waiting > queued - 50  # the newcomer does not take over what waits
    balanced = make(chat(6.0, 60.0), replicas=3)
    balanced.advance(60.0)
    counts = [engine.tallies.ttft.cumulative()[-1] for engine in balanced.engines()]
    assert sum(counts) > 300
    assert max(counts) - min(counts) < 0.15 * sum(counts)


def test_clients_that_wait_too_long_count_as_failed() -> None:
    fleet = make(chat(30.0, 120.0), settings=Settings(clients=Clients(ttft_timeout_s=15.0)))
    fleet.advance(400.0)
    fates = fleet.ledger.column("fate")
    assert np.count_nonzero(fates == Fate.TIMED_OUT) > 500
    assert np.nanmax(fleet.ledger.ttft()) <= 15.0
    summary = fleet.summary(**SLO)
    assert summary.requests == len(fates)
    assert summary.attained + summary.failed <= summary.requests


def test_no_request_is_lost_or_made_up() -> None:
    traffic = list(chat(8.0, 300.0))
    fleet = make(traffic, replicas=2)
    for at, replicas in ((50.0, 4), (120.0, 1), (200.0, 3), (260.0, 2)):
        fleet.advance(at)
        fleet.scale(replicas)
    fleet.advance(600.0)
    assert sorted(fleet.ledger.column("arrival").tolist()) == [request.arrival for request in traffic]


def test_how_often_somebody_looks_changes_nothing() -> None:
    results = []
    for interval in (5.0, 13.0, 50.0):
        fleet = make(chat(8.0, 300.0), replicas=2)
        at = 0.0
        while at < 300.0:
            at = min(at + interval, 150.0 if at < 150.0 else 300.0)
            fleet.advance(at)
            if at == 150.0:
                fleet.scale(3)
        results.append((fleet.ledger.column("arrival"), fleet.ledger.column("finish"), fleet.gpu_hours))
    for arrival, finish, gpu_hours in results[1:]:
        order, first = np.argsort(arrival), np.argsort(results[0][0])
        np.testing.assert_allclose(finish[order], results[0][1][first], atol=1e-9)
        assert gpu_hours == results[0][2]


def test_the_summary_judges_every_request_and_bin() -> None:
    fleet = make(chat(8.0, 1200.0), replicas=1)
    fleet.advance(600.0)
    fleet.scale(2)
    fleet.advance(1200.0)
    summary = fleet.summary(**SLO)
    arrival, ttft, tpot = fleet.ledger.column("arrival"), fleet.ledger.ttft(), fleet.ledger.tpot()
    output = fleet.ledger.column("output")
    good = (ttft <= 2.0) & ((output < 16) | (tpot <= 0.1))
    assert summary.attained == np.count_nonzero(good)
    assert 0 < summary.attained < summary.requests
    assert summary.attainment == summary.attained / summary.requests
    assert [(item.start, item.end) for item in summary.bins] == [(i * 300.0, (i + 1) * 300.0) for i in range(4)]
    for item in summary.bins:
        inside = (arrival >= item.start) & (arrival < item.end)
        assert item.arrived == int(np.count_nonzero(inside))
        assert item.attained == int(np.count_nonzero(inside & good))
        assert item.ttft_p99 == pytest.approx(np.quantile(ttft[inside], 0.99))
    assert summary.peak_replicas == 2
    assert summary.static_gpu_hours == pytest.approx(2 * 1200.0 / HOUR)
    assert summary.gpu_hours == pytest.approx((1200.0 + 600.0) / HOUR)


def test_the_exact_inter_token_p99_lies_in_the_bucket_where_the_engines_see_it() -> None:
    fleet = make(chat(6.0, 600.0), replicas=2, settings=Settings(bin_s=600.0))
    fleet.advance(600.0)
    (exact,) = fleet.ledger.itl_p99
    counts = np.sum([engine.tallies.itl.cumulative() for engine in fleet.engines()], axis=0)
    bounds = [0.0, *fleet.engines()[0].tallies.itl.bounds]
    bucket = int(np.searchsorted(counts, 0.99 * counts[-1]))
    assert exact is not None
    assert bounds[bucket] < exact <= bounds[bucket + 1]


async def test_pages_are_served_at_the_pods_addresses_and_only_once_loaded() -> None:
    fleet = make(chat(4.0, 400.0), replicas=2)
    fleet.advance(50.0)
    async with fleet.serve() as port, aiohttp.ClientSession() as session:

        async def get(ip: str, path: str = "/metrics") -> tuple[int, str, str]:
            async with session.get(f"http://{ip}:{port}{path}") as response:
                return response.status, response.headers.get("Content-Type", ""), await response.text()

        first, second = (pod.ip for pod in (await fleet.read()).pods)
        assert first != second
        status, content_type, text = await get(first)
        assert (status, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert text == fleet.page(first) != fleet.page(second)
        assert (await get(first, "/health"))[0] == 200
        assert (await get(first, "/other"))[0] == 404
        await fleet.apply(ScaleReplicas(seen=2, to=3))
        fleet.advance(55.0)
        await fleet.follow()
        loading = (await fleet.read()).pods[2].ip
        assert loading.startswith("127.10.")
        with pytest.raises(aiohttp.ClientConnectorError):
            await get(loading)
        fleet.advance(200.0)
        await fleet.follow()
        assert (await get(loading))[0] == 200
        await fleet.apply(ScaleReplicas(seen=3, to=1))
        assert (await get(second))[0] == 200  # it drains
        fleet.advance(300.0)
        await fleet.follow()
        for ip in (second, loading):
            with pytest.raises(aiohttp.ClientConnectorError):
                await get(ip)
        assert (await get(first))[0] == 200
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"http://{first}:{port}/metrics")


async def test_the_daemons_own_scraper_reads_what_the_engines_have() -> None:
    fleet = make(chat(14.0, 100.0), replicas=3)
    fleet.advance(90.0)
    clock = VirtualClock(fleet, 100.0)
    async with fleet.serve() as port:
        source = VllmSource(VllmSignals(port=port), clock)
        reading = await source.read(await fleet.read(), clock.now())
        await source.close()
    assert reading.gaps == ()
    assert reading.engines is not None
    uids = [pod.uid for pod in (await fleet.read()).pods]
    assert sorted(uids) == [key.pod_uid for key in reading.engines.keys]
    for uid, engine in zip(uids, fleet.engines(), strict=True):
        row = [key.pod_uid for key in reading.engines.keys].index(uid)
        read = {name: float(reading.engines.values[row, column]) for name, column in COLUMN.items()}
        tallies = engine.tallies
        assert read["num_requests_running"] == engine.running > 0
        assert read["num_requests_waiting"] == engine.waiting
        assert read["kv_cache_usage"] == engine.kv_usage
        assert read["kv_capacity_tokens"] == PROFILE.kv_tokens // 16 * 16
        assert read["generation_tokens"] == tallies.generation_tokens
        assert read["prompt_tokens"] == tallies.prompt_tokens
        assert read["requests_finished"] == tallies.finished + tallies.aborted
        assert read["iterations"] == tallies.iteration_tokens.cumulative()[-1]
        assert read["itl_sum"] == tallies.itl.sum
        assert read["started_at"] == pytest.approx(EPOCH - HOUR)
        for name in ("ttft", "itl", "e2e"):
            (block,) = reading.engines.histograms[name]
            assert block.counts[row].tolist() == getattr(tallies, name).cumulative()


async def test_two_fleets_on_one_machine_have_ports_of_their_own() -> None:
    one, other = make(), make(seed=5)
    async with one.serve() as first, other.serve() as second:
        assert first != second


async def test_sleeping_advances_the_fleet_and_the_end_stops_the_clock() -> None:
    fleet = make(chat(2.0, 100.0))
    clock = VirtualClock(fleet, 100.0)
    assert clock.now() == EPOCH
    woken = []

    async def tick() -> None:
        for number in range(1, 100):
            await clock.sleep_until(EPOCH + 15.0 * number)
            woken.append(clock.now() - EPOCH)

    task = asyncio.create_task(tick())
    await clock.done.wait()
    assert woken == [15.0, 30.0, 45.0, 60.0, 75.0, 90.0]
    assert fleet.now == 100.0
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_several_sleepers_wake_in_order_of_time() -> None:
    clock = VirtualClock(make(), 100.0, sleepers=2)
    woken = []

    async def tick(name: str, interval: float) -> None:
        for number in range(1, 100):
            await clock.sleep_until(EPOCH + interval * number)
            woken.append((name, clock.now() - EPOCH))
            await asyncio.sleep(0.001)  # the work of a tick takes no simulated time

    tasks = [asyncio.create_task(tick("slow", 40.0)), asyncio.create_task(tick("fast", 25.0))]
    await clock.done.wait()
    assert woken == [("fast", 25.0), ("slow", 40.0), ("fast", 50.0), ("fast", 75.0), ("slow", 80.0)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_moment_that_has_passed_returns_at_once() -> None:
    fleet = make()
    fleet.advance(30.0)
    clock = VirtualClock(fleet, 100.0)
    await clock.sleep_until(EPOCH + 30.0)
    await clock.sleep_until(EPOCH)
    assert fleet.now == 30.0


def test_the_demo_starts_small_and_its_rush_needs_many() -> None:
    scenario = demo_scenario(3, duration_s=600.0)
    one, other = scenario.fleet(), scenario.fleet()
    for fleet in (one, other):
        fleet.advance(600.0)
    assert one.ledger.column("finish").tolist() == other.ledger.column("finish").tolist()
    assert one.summary(**SLO).attainment == pytest.approx(1.0, abs=0.01)
    # a replica carries about 4.5 requests/s: one is enough at night, the evening needs five, the rush about eight
    assert scenario.rate(4 * HOUR) < 4.5
    assert 4 * 4.5 < scenario.rate(20.5 * HOUR) < 5 * 4.5
    (rush,) = scenario.events
    top = max(scenario.rate(rush.at - scenario.epoch + minute * 60.0) for minute in range(30))
    assert 6 * 4.5 < top < 8 * 4.5


# --- batching limits ------------------------------------------------------------------------------------------------

FEWER = Limits(max_num_seqs=2, max_num_batched_tokens=512, long_prefill_token_threshold=0)


def tell(fleet: Fleet, limits: Limits = FEWER) -> Outcome:
    """Tell every pod that says its limits others."""
    pods = tuple(PodBatching(pod="", uid=one.pod_uid, limits=limits) for one in fleet.limits())
    return fleet.act(SetBatching(limits=limits, pods=pods))


def test_limits_are_set_and_obeyed() -> None:
    fleet = make(chat(4.0, 60.0), replicas=2)
    fleet.advance(20.0)
    assert [one.limits.max_num_seqs for one in fleet.limits()] == [PROFILE.max_num_seqs] * 2
    assert tell(fleet) is Outcome.APPLIED
    fleet.advance(60.0)
    assert max(engine.running for engine in fleet.engines()) == 2
    assert {(one.limits, one.generation, one.applied) for one in fleet.limits()} == {(FEWER, 1, 1)}
    released = fleet.act(
        SetBatching(limits=Limits(), pods=(PodBatching(pod="", uid=fleet.limits()[0].pod_uid, limits=Limits()),))
    )
    assert released is Outcome.APPLIED
    assert [one.limits.max_num_seqs for one in fleet.limits()] == [PROFILE.max_num_seqs, 2]


def test_a_restarted_engine_keeps_its_limits_and_a_new_pod_has_its_own() -> None:
    fleet = Fleet(
        PROFILE,
        (),
        replicas=1,
        epoch=EPOCH,
        rng=np.random.default_rng(1),
        faults=Faults(crash_mean_s=100.0),
    )
    tell(fleet)
    fleet.scale(2)
    fleet.advance(2000.0)
    restarted = [pod.restarts for pod in fleet.status().pods]
    assert restarted[0] > 0
    limits = {pod.uid: one.limits for pod in fleet.status().pods for one in fleet.limits() if one.pod_uid == pod.uid}
    assert all(
        limits[pod.uid].max_num_seqs == (2, 256)[index]
        for index, pod in enumerate(fleet.status().pods)
        if pod.uid in limits
    )


def test_a_pod_that_does_not_answer_is_not_told() -> None:
    fleet = make()
    nobody = SetBatching(limits=FEWER, pods=(PodBatching(pod="gone", uid="gone", limits=FEWER),))
    assert fleet.act(nobody) is Outcome.UNCHANGED
