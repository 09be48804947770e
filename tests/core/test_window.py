"""Counters and histograms of engines become the fleet's: resets, gaps, newcomers, layouts."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from autoscaler.core.facts import STALE_IDLE_POLLS
from autoscaler.core.policy import Slo
from autoscaler.core.types import EngineKey, GapReason, HistogramRows, Reason
from autoscaler.core.window import SUMS
from tests.core.world import BOUNDS, P0, START, Engine, World, pod


def total(world: World, name: str) -> float:
    """Return the fleet's increase since the first tick."""
    rows = world.state.rows
    return float(rows[-1].sums[SUMS[name]] - rows[0].sums[SUMS[name]])


@pytest.mark.parametrize("second", [pytest.param(False, id="alone"), pytest.param(True, id="beside-a-constant-pod")])
def test_c029_counter_falls_after_a_restart(second: bool) -> None:
    world = World(P0, 2 if second else 1)
    first = world.engines[world.pods[0].uid]
    if second:
        world.engines[world.pods[1].uid].generated = 5000.0
    for value in (1000.0, 1100.0, 20.0, 60.0):
        first.generated = value
        world.tick()
    assert total(world, "generation_tokens") == pytest.approx(160.0)
    tokens = [row.sums[SUMS["generation_tokens"]] for row in world.state.rows]
    assert all(after >= before for before, after in pairwise(tokens))


def test_restart_is_seen_by_the_start_time_even_when_no_counter_fell() -> None:
    world = World(P0, 1)
    engine = world.engines[world.pods[0].uid]
    engine.started_at, engine.generated = START - 5000.0, 100.0
    world.tick()
    engine.started_at, engine.generated = START + 5.0, 150.0
    world.tick()
    assert total(world, "generation_tokens") == pytest.approx(150.0)


def test_missed_scrape_is_no_zero_and_the_next_delta_spans_the_gap() -> None:
    world = World(P0, 2)
    world.set(token_rate=10.0, running=1.0, request_rate=1.0)
    world.run(4)
    world.silent = {world.pods[0].uid}
    world.run(3)
    during = total(world, "generation_tokens")
    world.silent = set()
    world.run(1)
    assert during == pytest.approx(2 * 10.0 * 45.0 + 10.0 * 45.0)
    assert total(world, "generation_tokens") == pytest.approx(2 * 10.0 * 15.0 * 7)
    assert world.state.rows[-1].histograms["ttft"].counts[-1] == pytest.approx(2 * 15.0 * 7)


def test_first_sight_adds_nothing_unless_the_engine_started_inside_the_window() -> None:
    world = World(P0, 1)
    world.run(2)
    world.pods += [pod("old"), pod("new")]
    world.engines["uid-old"] = Engine(generated=7000.0, started_at=START - 9000.0)
    world.engines["uid-new"] = Engine(generated=30.0, started_at=START + 20.0)
    world.run(1)
    assert total(world, "generation_tokens") == pytest.approx(30.0)


def test_gone_pod_is_dropped_and_its_namesake_is_another_engine() -> None:
    world = World(P0, 2)
    world.set(token_rate=10.0)
    world.run(3)
    before = total(world, "generation_tokens")
    gone = world.pods.pop()
    del world.engines[gone.uid]
    world.run(1)
    assert world.state.memory is not None
    assert EngineKey(gone.uid) not in world.state.memory.keys
    world.pods.append(replace(gone, uid="uid-again"))
    world.engines["uid-again"] = Engine(generated=1e6)
    world.run(1)
    assert total(world, "generation_tokens") - before == pytest.approx(10.0 * 30.0)


def test_layouts_may_differ_between_pods_and_change_between_ticks() -> None:
    world = World(P0, 2)
    world.set(request_rate=1.0, ttft_s=0.3)
    world.run(3)
    snapshot = world.snapshot()
    block = snapshot.engines.histograms["ttft"][0]
    finer = (0.2, 0.4, float("inf"))
    counts = np.array([[0.0, 45.0, 45.0]])
    split = (
        HistogramRows(bounds=BOUNDS, rows=block.rows[:1], counts=block.counts[:1]),
        HistogramRows(bounds=finer, rows=block.rows[1:], counts=counts),
    )
    engines = replace(snapshot.engines, histograms={**snapshot.engines.histograms, "ttft": split})
    world.snapshot = lambda: replace(snapshot, engines=engines)  # type: ignore[method-assign]
    world.decide()
    merged = world.state.rows[-1].histograms["ttft"]
    assert set(merged.bounds) >= {0.2, 0.4}
    assert merged.counts[-1] == pytest.approx(2 * 15.0 * 2 + 15.0)


def test_only_histograms_that_the_policy_asks_for_are_added_up() -> None:
    world = World(P0, 1)
    world.set(request_rate=2.0, ttft_s=0.3, queue_s=0.2, token_rate=10.0, running=1.0)
    world.run(3)
    assert set(world.state.rows[-1].histograms) == {"ttft", "itl"}
    asking = replace(P0.score, backlog=replace(P0.score.backlog, wait_s=5.0))
    world.policy = replace(P0, slo=replace(P0.slo, e2e=Slo(seconds=10.0)), score=asking)
    world.run(2)
    assert set(world.state.rows[-1].histograms) == {"ttft", "itl", "e2e", "queue_time"}
    # Counted on from what was remembered meanwhile: the increases of two ticks, not all since the engine's start.
    assert world.state.rows[-1].histograms["e2e"].counts[-1] == pytest.approx(2 * 15.0 * 2.0)


class TestC024FrozenGauges:
    """After all clients leave at once the KV gauge can stay at 0.99 until the next step."""

    def world(self) -> World:
        world = World(P0, 3)
        world.set(kv=0.99, running=0.0, waiting=0.0, token_rate=0.0, generated=812345.0)
        return world

    def test_no_growth_on_any_tick(self) -> None:
        policy = replace(P0, score=replace(P0.score, critical=0.95, memory=replace(P0.score.memory, kv_full=0.9)))
        world = self.world()
        world.policy = policy
        world.run(1)
        world.writes.clear()
        world.state = replace(world.state, last_up_at=None)
        world.run(39)
        assert all(to < seen for _, seen, to in world.writes)

    def test_stale_after_three_polls_then_it_shrinks(self) -> None:
        world = self.world()
        decisions = world.run(60)
        assert world.state.facts is not None
        assert dict(world.state.facts.suspect)[GapReason.KV_STALE_IDLE] == world.replicas
        early = decisions[STALE_IDLE_POLLS - 1].score
        late = decisions[STALE_IDLE_POLLS + 1].score
        assert early is not None
        assert late is not None
        assert early.part("memory").shrink_value == pytest.approx(0.99)
        assert late.part("memory").shrink_value == 0.0
        assert world.replicas < 3

    def test_trusted_again_at_once(self) -> None:
        world = self.world()
        world.run(6)
        world.set(running=4.0)
        for engine in world.engines.values():
            engine.generated += 50.0
        score = world.decide().score
        assert score is not None
        assert score.part("memory").value == pytest.approx(0.99)


class TestC031NoFinishedRequest:
    """An empty histogram delta is idle or unknown, as the counters say."""

    def world(self) -> World:
        world = World(P0, 2)
        world.run(6)
        return world

    def test_a_idle(self) -> None:
        world = self.world()
        decision = world.decide()
        assert decision.score is not None
        latency = decision.score.part("latency")
        assert (latency.value, latency.shrink_value, latency.driver) == (0.0, 0.0, "idle")

    def test_b_unknown(self) -> None:
        world = self.world()
        world.set(running=6.0, waiting=20.0, kv=0.9)
        decision = world.decide()
        assert decision.score is not None
        latency = decision.score.part("latency")
        assert (latency.value, latency.shrink_value) == (None, None)
        assert latency.gap is GapReason.NO_OBSERVATIONS
        assert decision.reason is Reason.UP_SCORE

    def test_b_blocks_shrinking(self) -> None:
        world = self.world()
        world.set(running=6.0, waiting=0.0, kv=0.01)
        assert world.decide().reason is Reason.PARTIAL_NO_SHRINK


def test_c038_sleeping_engine_is_no_capacity() -> None:
    world = World(P0, 2)
    awake, sleeping = (world.engines[one.uid] for one in world.pods)
    awake.kv, awake.waiting, awake.running = 0.9, 20.0, 8.0
    sleeping.asleep = True
    decision = world.decide()
    assert world.state.facts is not None
    assert (world.state.facts.ready, world.state.facts.waiting) == (1.0, 20.0)
    assert decision.score is not None
    assert decision.score.part("memory").value == pytest.approx(0.9)
    assert decision.score.part("backlog").value == 1.0
    assert decision.proposal.current == 2


def test_c032_censored_latency_blocks_shrinking() -> None:
    world = World(P0, 2)
    world.set(request_rate=2.0, ttft_s=30.0, running=1.0, kv=0.01, token_rate=5.0)
    world.run(6)
    score = world.decide().score
    assert score is not None
    latency = score.part("latency")
    assert latency.driver == "ttft p95 >= 10.00s"
    assert (latency.value, latency.shrink_value) == (1.0, 1.0)


def test_few_observations_are_unknown_for_growth_and_judged_by_the_slowest_for_shrinking() -> None:
    world = World(P0, 1)
    world.set(request_rate=0.01, ttft_s=0.05, running=1.0, kv=0.1, token_rate=1.0)
    world.run(10)
    score = world.decide().score
    assert score is not None
    latency = score.part("latency")
    assert latency.value is None
    assert latency.gap is GapReason.FEW_OBSERVATIONS
    assert latency.shrink_value == pytest.approx(0.05)


def test_c147_rates_use_real_elapsed_time() -> None:
    world = World(P0, 1)
    world.set(token_rate=10.0)
    for seconds in (40.0, 40.0, 40.0, 15.0):
        world.tick(seconds)
    world.tick()
    rows = world.state.rows
    rates = [
        (after.sums[SUMS["generation_tokens"]] - before.sums[SUMS["generation_tokens"]]) / (after.at - before.at)
        for before, after in pairwise(rows)
    ]
    assert rates == pytest.approx([10.0] * 4)
