"""The batching limits: what holds the engines back, what is moved, kept, reverted and never tried again."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoscaler.core.batching import (
    LATE,
    Verdict,
    classify,
    goodput,
    is_blacklisted,
    judge,
    surely_preempted,
    unstartable,
    worst_met,
)
from autoscaler.core.model import MIN_ROWS, new_model
from autoscaler.core.policy import (
    Approval,
    BatchingMode,
    BatchingPolicy,
    LimitBounds,
    MemoryPart,
    MemorySource,
    Policy,
    ReplicaBounds,
    Slo,
    Slos,
    StepTime,
    TargetRef,
)
from autoscaler.core.tuning import FORGIVEN_S, LEFT_ALONE_AFTER, RETELL_S, Reverted, Trial, clipped, obeys
from autoscaler.core.types import (
    Batching,
    BatchReason,
    Bound,
    Decision,
    Gpu,
    Hold,
    Limits,
    Measured,
    Outcome,
    PodLimits,
    Reason,
    ScaleReplicas,
    SetBatching,
)
from autoscaler.core.window import SUMS, FleetRow, fleet_row
from tests.core.world import START, Engine, LoadingWorld, World, loading

CEILING = Limits(max_num_seqs=64, max_num_batched_tokens=2048, long_prefill_token_threshold=2048)
POLICY = Policy(
    name="chat",
    target=TargetRef(namespace="serving", deployment="chat"),
    replicas=ReplicaBounds(min=2, max=2),
    slo=Slos(ttft=Slo(seconds=2.0), itl=Slo(seconds=0.1)),
    batching=BatchingPolicy(mode=BatchingMode.AUTO),
)
QUIET: dict[str, Any] = {
    "kv": 0.3,
    "waiting": 0.0,
    "running": 8.0,
    "capacity": 20_480.0,
    "prompt_rate": 100.0,
    "token_rate": 800.0,
    "request_rate": 1.0,
    "step_rate": 50.0,
    "preemption_rate": 0.0,
    "itl_s": 0.02,
    "ttft_s": 0.05,
}
STORM: dict[str, Any] = {"kv": 0.97, "waiting": 20.0, "running": 30.0, "preemption_rate": 10.0, "token_rate": 900.0}
QUEUE: dict[str, Any] = {"waiting": 10.0, "running": 16.0, "kv": 0.4}
BUSY = Measured(seconds=30.0, running=30.0, waiting=5.0, peak=32.0, preemptions=0.0, finished=60.0, tokens_per_s=1000.0)


def a_world(policy: Policy = POLICY, replicas: int = 2, kind: type[World] = World, **readings: object) -> World:
    """Return a world whose pods say their limits, and whose engines read like this after a quiet minute."""
    world = kind(policy, replicas)
    world.ceiling = CEILING
    world.set(**QUIET)
    world.run(12)
    world.set(**readings)
    return world


def batching(decision: Decision) -> Batching:
    assert decision.batching is not None
    return decision.batching


def until(world: World, *reasons: BatchReason, ticks: int = 120) -> Decision:
    """Return the first decision with one of these reasons."""
    seen = []
    for _ in range(ticks):
        decision = world.tick()
        seen.append(batching(decision).reason)
        if seen[-1] in reasons:
            return decision
    raise AssertionError(f"none of {reasons} in {ticks} ticks: {Counter(seen)}")


def moved(decision: Decision) -> Limits:
    """Return the limits that the decision sets."""
    assert isinstance(decision.action, SetBatching)
    return decision.action.limits


# --- what holds the engines back ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured", "limits", "bound"),
    [
        pytest.param(None, CEILING, Bound.UNKNOWN, id="nothing measured"),
        pytest.param(BUSY, Limits(), Bound.UNKNOWN, id="limits unknown"),
        pytest.param(replace(BUSY, kv_usage=0.95, preemptions=12.0), CEILING, Bound.KV, id="preempted"),
        pytest.param(replace(BUSY, kv_usage=0.95, preemptions=11.0), CEILING, Bound.KV, id="blocks are waited for"),
        pytest.param(replace(BUSY, kv_usage=0.94, preemptions=11.0), CEILING, Bound.HEALTHY, id="few preempted"),
        pytest.param(replace(BUSY, kv_usage=0.99, waiting=0.4), CEILING, Bound.HEALTHY, id="full, and nobody waits"),
        pytest.param(
            replace(BUSY, kv_usage=0.6, preemptions=30.0), CEILING, Bound.HEALTHY, id="preempted for priority"
        ),
        pytest.param(replace(BUSY, kv_usage=None, preemptions=30.0), CEILING, Bound.HEALTHY, id="cache unknown"),
        pytest.param(replace(BUSY, itl_s=0.2, itl_mean_s=0.05), CEILING, Bound.PREFILL, id="only the tail is slow"),
        pytest.param(replace(BUSY, itl_s=0.2, itl_mean_s=0.15), CEILING, Bound.HEALTHY, id="every step is slow"),
        pytest.param(replace(BUSY, itl_s=0.1, itl_mean_s=0.05), CEILING, Bound.HEALTHY, id="the tail is in time"),
        pytest.param(BUSY, replace(CEILING, max_num_seqs=31), Bound.SEQUENCES, id="all run that may"),
        pytest.param(BUSY, replace(CEILING, max_num_seqs=32), Bound.HEALTHY, id="two more may run"),
        pytest.param(
            replace(BUSY, waiting=0.4), replace(CEILING, max_num_seqs=30), Bound.HEALTHY, id="all run, nobody waits"
        ),
        pytest.param(
            replace(BUSY, ttft_s=3.0, itl_s=0.04),
            replace(CEILING, max_num_batched_tokens=256),
            Bound.BUDGET,
            id="first tokens are late, steps short",
        ),
        pytest.param(
            replace(BUSY, ttft_s=3.0, itl_s=0.06),
            replace(CEILING, max_num_batched_tokens=256),
            Bound.HEALTHY,
            id="steps have no room",
        ),
        pytest.param(replace(BUSY, ttft_s=3.0, itl_s=0.04), CEILING, Bound.HEALTHY, id="budget is whole"),
        pytest.param(replace(BUSY, waiting=0.0), CEILING, Bound.UNDERLOADED, id="half idle"),
    ],
)
def test_what_holds_the_engines_back(measured: Measured | None, limits: Limits, bound: Bound) -> None:
    assert classify(POLICY, limits, CEILING, measured) is bound


def rows_of(*ticks: tuple[float, float, float]) -> list[FleetRow]:
    """Return the fleet's rows of ticks, each (running, finished, pods) at that tick."""
    rows, sums = [], [0.0] * len(SUMS)
    for index, (running, finished, pods) in enumerate(ticks):
        sums[SUMS["running"]] += running
        sums[SUMS["requests_finished"]] += finished
        sums[SUMS["covered"]] += pods
        rows.append(fleet_row(float(index), tuple(sums), {}))
    return rows


@pytest.mark.parametrize(
    ("ticks", "preempted"),
    [
        pytest.param([(0, 0, 1), (64, 0, 1), (40, 2, 1), (19, 3, 1)], 40.0, id="fewer run than have ended"),
        pytest.param([(0, 0, 1), (64, 0, 1), (40, 20, 1), (19, 30, 1)], 0.0, id="they have ended"),
        pytest.param([(0, 0, 1), (64, 0, 2), (30, 0, 1), (30, 0, 1)], 0.0, id="a pod was not read"),
        pytest.param([(0, 0, 1), (10, 0, 1), (64, 0, 1)], 0.0, id="more run"),
        pytest.param([(5, 0, 1)], 0.0, id="one tick"),
    ],
)
def test_preemptions_that_must_have_been(ticks: list[tuple[float, float, float]], preempted: float) -> None:
    assert surely_preempted(rows_of(*ticks)) == preempted


# --- what is kept ---------------------------------------------------------------------------------------------------


def a_trial(reason: BatchReason, **before: Any) -> Trial:
    return Trial(
        reason=reason,
        before=CEILING,
        after=replace(CEILING, max_num_seqs=20),
        at=0.0,
        settled_at=30.0,
        until=60.0,
        measured=replace(BUSY, **before),
    )


CALM = {"waiting": 0.0}
LOWER, RAISE, BUDGET = BatchReason.LOWER_PREEMPTIONS, BatchReason.RAISE_SEQUENCES, BatchReason.LOWER_BUDGET


@pytest.mark.parametrize(
    ("reason", "before", "after", "kept", "harmed"),
    [
        pytest.param(LOWER, {}, {"tokens_per_s": 1100.0}, True, False, id="more tokens"),
        pytest.param(LOWER, {}, {"tokens_per_s": 900.0}, False, True, id="fewer tokens"),
        pytest.param(
            LOWER,
            {"preemptions": 40.0},
            {"preemptions": 20.0, "tokens_per_s": 960.0},
            True,
            False,
            id="half the preemptions for no more than the tolerance",
        ),
        pytest.param(LOWER, {"preemptions": 40.0}, {"preemptions": 30.0}, False, False, id="of no use"),
        pytest.param(RAISE, {}, {}, True, False, id="no difference is enough to allow more"),
        pytest.param(RAISE, {"itl_s": 0.05}, {"itl_s": 0.2}, False, True, id="tokens come too late"),
        pytest.param(RAISE, {"itl_s": 0.05}, {"itl_s": 0.1}, True, False, id="tokens come later, in time"),
        pytest.param(RAISE, CALM, {**CALM, "ttft_s": 60.0}, True, False, id="known only afterwards"),
        pytest.param(RAISE, {"ttft_s": 9.0}, {"ttft_s": 30.0}, True, False, id="the queue was there, and grows on"),
        pytest.param(
            LOWER,
            {"waiting": 0.0, "preemptions": 40.0},
            {"waiting": 5.0, "tokens_per_s": 2000.0, "preemptions": 40.0},
            False,
            False,
            id="tokens say nothing without a queue before",
        ),
        pytest.param(
            BUDGET,
            {**CALM, "itl_s": 0.16, "ttft_s": 1.0},
            {**CALM, "itl_s": 0.09, "ttft_s": 1.9},
            True,
            False,
            id="ITL in time",
        ),
        pytest.param(
            BUDGET,
            {**CALM, "itl_s": 0.16, "ttft_s": 1.0},
            {**CALM, "itl_s": 0.09, "ttft_s": 8.0},
            False,
            True,
            id="the queue only moved",
        ),
        pytest.param(BUDGET, {"itl_s": 0.6}, {"itl_s": 0.3}, True, False, id="half the latency"),
        pytest.param(BUDGET, {"itl_s": 0.6}, {"itl_s": 0.58}, False, False, id="hardly less latency"),
    ],
)
def test_what_is_kept(
    reason: BatchReason, before: dict[str, Any], after: dict[str, Any], kept: bool, harmed: bool
) -> None:
    verdict = judge(POLICY, a_trial(reason, **before), replace(BUSY, **after))
    assert verdict == Verdict(kept=kept, harmed=harmed, words=verdict.words)


def test_a_late_token_is_worth_a_tenth() -> None:
    assert goodput(1000.0, 1.0) == 1000.0
    assert goodput(1000.0, 0.0) == pytest.approx(1000.0 * LATE)


def test_the_worst_objective_of_those_known_of_both_counts() -> None:
    before, after = replace(BUSY, itl_s=0.2, ttft_s=8.0), replace(BUSY, itl_s=0.05, ttft_s=4.0)
    assert worst_met(POLICY.slo, before, after, saturated=False) == (0.25, 0.5)
    assert worst_met(POLICY.slo, before, after, saturated=True) == (0.5, 1.0)
    assert worst_met(POLICY.slo, BUSY, after, saturated=False) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("reverted", "reason", "value", "blacklisted"),
    [
        pytest.param([(RAISE, 20, True, 1)], RAISE, 20, False, id="once"),
        pytest.param([(RAISE, 20, True, 2)], RAISE, 20, True, id="twice"),
        pytest.param([(RAISE, 20, True, 2)], RAISE, 30, True, id="farther than what did harm"),
        pytest.param([(RAISE, 20, True, 2)], RAISE, 19, False, id="less far than what did harm"),
        pytest.param([(RAISE, 20, True, 1), (RAISE, 22, True, 1)], RAISE, 22, True, id="two values"),
        pytest.param([(RAISE, 20, True, 2)], BatchReason.RAISE_BUDGET, 20, False, id="another kind of move"),
        pytest.param([(BUDGET, 512, False, 2)], BUDGET, 512, True, id="of no use"),
        pytest.param([(BUDGET, 512, False, 2)], BUDGET, 1024, True, id="less far than what was of no use"),
        pytest.param([(BUDGET, 512, False, 2)], BUDGET, 256, False, id="farther than what was of no use"),
        pytest.param([(BUDGET, 512, True, 2)], BUDGET, 256, True, id="lower than what did harm"),
    ],
)
def test_what_is_not_tried_again(
    reverted: list[tuple[BatchReason, int, bool, int]], reason: BatchReason, value: int, blacklisted: bool
) -> None:
    assert is_blacklisted([Reverted(*one, at=0.0) for one in reverted], reason, value) is blacklisted


# --- limits of one pod ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "pod", "told"),
    [
        pytest.param(Limits(max_num_seqs=99), PodLimits(pod_uid="a", ceiling=CEILING), 64, id="its ceiling"),
        pytest.param(Limits(max_num_seqs=0), PodLimits(pod_uid="a", ceiling=CEILING), 1, id="never below one"),
        pytest.param(
            Limits(max_num_seqs=2),
            PodLimits(pod_uid="a", ceiling=CEILING, floor=Limits(max_num_seqs=4)),
            4,
            id="its floor",
        ),
        pytest.param(Limits(max_num_seqs=20), PodLimits(pod_uid="a"), None, id="cannot be moved"),
        pytest.param(Limits(), PodLimits(pod_uid="a", ceiling=CEILING), None, id="nothing wanted"),
    ],
)
def test_each_pod_within_its_own(wanted: Limits, pod: PodLimits, told: int | None) -> None:
    assert clipped(wanted, pod).max_num_seqs == told
    assert obeys(replace(pod, limits=clipped(wanted, pod)), wanted)


# --- in a world -----------------------------------------------------------------------------------------------------


def test_off_is_the_default_and_says_nothing() -> None:
    world = a_world(replace(POLICY, batching=BatchingPolicy()), **STORM)
    decisions = world.run(30)
    assert {decision.batching for decision in decisions} == {None}
    assert world.state.tuning.still_since is None


def test_a_storm_is_relieved_at_once_and_kept() -> None:
    world = a_world(**STORM)
    decision = until(world, LOWER)
    # 0.9 x 20480 tokens / 1000 a request = 18.4 of the 30 that run.
    assert moved(decision).max_num_seqs in range(18, 21)
    seqs = moved(decision).max_num_seqs
    assert batching(decision).bound is Bound.KV
    assert set(world.told) == set(world.engines)
    world.set(running=float(seqs or 0), kv=0.86, preemption_rate=0.0, token_rate=1100.0)
    assert batching(until(world, BatchReason.KEPT, BatchReason.REVERTED)).reason is BatchReason.KEPT
    assert world.state.tuning.trial is None
    assert world.told == {uid: replace(CEILING, max_num_seqs=seqs) for uid in world.engines}


def test_in_a_storm_a_request_is_as_long_as_before() -> None:
    # Tokens come, and hardly a request ends: 2500 tokens a request in the window, 1213 in two minutes.
    world = a_world(**STORM | {"request_rate": 0.05, "preemption_rate": 0.0})
    world.run(3)
    world.set(preemption_rate=1.0)
    assert moved(until(world, LOWER)).max_num_seqs == 15


def test_a_storm_is_seen_before_it_is_counted() -> None:
    # vLLM counts a preemption when its request goes on: until then fewer run, and no more have ended.
    world = a_world(kv=0.97, waiting=5.0, running=60.0)
    world.run(6)
    world.set(running=25.0, waiting=40.0)
    decision = until(world, LOWER, ticks=3)
    measured = batching(decision).measured
    # Of 120 that ran 70 are gone, and two a second have ended.
    assert measured is not None
    assert measured.preemptions == pytest.approx(70.0 - 10.0)


@pytest.mark.parametrize(
    ("cp", "relieved"),
    [
        # 1 preemption a second of 0.97 x 20480 / 30 = 662 tokens; a fifth of the time is worth a queue.
        pytest.param(60e-6, False, id="4 % of the time"),
        pytest.param(620e-6, True, id="41 % of the time"),
    ],
)
def test_a_storm_that_costs_little_is_left_to_replicas(cp: float, relieved: bool) -> None:
    world = a_world(**STORM | {"preemption_rate": 1.0})
    model = new_model(StepTime(cp=cp), world.at)
    world.state = replace(world.state, model=replace(model, rows=MIN_ROWS, at=world.at + 3600.0))
    decision = until(world, LOWER, BatchReason.NEEDS_REPLICAS)
    assert (batching(decision).reason is LOWER) is relieved
    assert "% of the time to compute them anew" in batching(decision).detail


def test_what_is_of_no_use_is_taken_back_twice_and_then_left() -> None:
    world = a_world(**STORM)
    for _ in range(2):
        assert (moved(until(world, LOWER)).max_num_seqs or 0) < 30
        assert moved(until(world, BatchReason.REVERTED)) == CEILING
    assert until(world, BatchReason.BLACKLISTED)
    assert LOWER not in {batching(decision).reason for decision in world.run(60)}


def test_what_was_taken_back_is_forgotten_in_time() -> None:
    policy = replace(POLICY, batching=replace(POLICY.batching, forget_after_s=900.0))
    world = a_world(policy, **STORM)
    until(world, BatchReason.BLACKLISTED, ticks=200)
    world.at += 900.0
    until(world, LOWER, ticks=200)


def test_a_full_cache_without_preemptions_is_left_to_replicas() -> None:
    world = a_world(**{**STORM, "preemption_rate": 0.0})
    assert until(world, BatchReason.NEEDS_REPLICAS)
    assert {type(decision.action) for decision in world.run(60)} == {Hold}


def lowered(world: World, seqs: int, tokens: int = 2048) -> World:
    """Return the world with limits that were set before, by another process."""
    limits = replace(CEILING, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    world.told = {one.uid: limits for one in world.pods}
    return world


def test_more_sequences_where_there_is_room() -> None:
    world = lowered(a_world(**QUEUE), 16)
    decision = until(world, RAISE)
    # Twice as many, since the mean ITL has room; the cache, at 0.4, would hold 16 x 0.85 / 0.4 = 34.
    assert moved(decision).max_num_seqs == 32


@pytest.mark.parametrize(
    ("readings", "reason"),
    [
        pytest.param({"kv": 0.84}, BatchReason.NEEDS_REPLICAS, id="the cache has no room for a tenth more"),
        pytest.param({"kv": 0.86}, BatchReason.NEEDS_REPLICAS, id="the cache is nearly full"),
        pytest.param({"preemption_rate": 0.01}, BatchReason.NEEDS_REPLICAS, id="a single preemption"),
        pytest.param({"itl_s": 0.4}, BatchReason.NEEDS_REPLICAS, id="ITL has no room"),
        pytest.param({"waiting": 0.0}, BatchReason.STEADY, id="nobody waits"),
    ],
)
def test_no_more_sequences_without_room(readings: dict[str, float], reason: BatchReason) -> None:
    world = lowered(a_world(**{**QUEUE, **readings}), 16)
    assert until(world, reason)
    assert {batching(decision).reason for decision in world.run(60)} == {reason}


def test_at_the_ceiling_there_is_no_more() -> None:
    world = a_world(**{**QUEUE, "running": 64.0})
    assert until(world, BatchReason.AT_LIMIT)


def test_the_policys_own_bound_is_a_ceiling() -> None:
    policy = replace(POLICY, batching=replace(POLICY.batching, sequences=LimitBounds(min=8, max=20)))
    world = a_world(policy, **QUEUE)
    assert {limits.max_num_seqs for limits in world.told.values()} == {20}
    world.set(running=20.0)
    assert until(world, BatchReason.AT_LIMIT)


def test_smaller_steps_where_prompts_hold_up_tokens() -> None:
    world = a_world(running=8.0, itl_s=0.05)
    late = Late(world)
    decision = late.until(BUDGET)
    measured = batching(decision).measured
    assert measured is not None
    # A step is to take 0.09 s, and its time is made by its tokens.
    aim = 2048 * 0.09 / (measured.itl_s or 0.0)
    assert aim - 16 < (moved(decision).max_num_batched_tokens or 0) <= aim
    assert moved(decision).max_num_seqs == 64
    late.share = 0.0
    assert batching(late.until(BatchReason.KEPT, BatchReason.REVERTED)).reason is BatchReason.KEPT
    assert world.state.tuning.reverted == ()


class Late:
    """Lets a share of a world's tokens come after 0.4 s."""

    def __init__(self, world: World, share: float = 0.03) -> None:
        self.world, self.share = world, share

    def tick(self) -> Decision:
        for engine in self.world.engines.values():
            late = self.share * (engine.token_rate or 0.0) * self.world.policy.interval_s
            engine.itl[0] -= late  # of the bucket up to 0.1 s; those above are cumulative, and hold them anyway
            engine.itl_sum += late * 0.35
        return self.world.tick()

    def until(self, *reasons: BatchReason) -> Decision:
        for _ in range(120):
            decision = self.tick()
            if batching(decision).reason in reasons:
                return decision
        raise AssertionError(f"none of {reasons}")


def test_what_could_not_show_is_not_judged() -> None:
    # Nobody asks any more: no token comes after a shorter step, nor after a longer one.
    world = Late(a_world(running=8.0, itl_s=0.05))
    moved(world.until(BUDGET))
    world.world.set(running=0.0, token_rate=0.0, request_rate=0.0, prompt_rate=0.0)
    world.share = 0.0
    decision = world.until(BatchReason.KEPT, BatchReason.REVERTED)
    assert batching(decision).reason is BatchReason.KEPT
    assert "too little is known" in batching(decision).detail
    assert world.world.state.tuning.reverted == ()


def test_no_fewer_tokens_than_sequences() -> None:
    world = lowered(a_world(running=20.0, itl_s=0.05), 64, tokens=64)
    assert Late(world).until(BatchReason.AT_LIMIT)
    world = lowered(a_world(running=8.0, itl_s=0.05), 200, tokens=256)
    world.ceiling = Limits(max_num_seqs=200, max_num_batched_tokens=2048)
    decision = Late(world).until(BUDGET)
    # Where fewer sequences run than may, fewer may from now on, so that an engine would start with both.
    assert moved(decision).max_num_batched_tokens == 128
    assert (moved(decision).max_num_seqs or 0) <= 128


def test_what_was_of_no_use_is_tried_sharper() -> None:
    world = Late(a_world(running=4.0, itl_s=0.05))
    first = moved(world.until(BUDGET))
    while batching(decision := world.until(BUDGET, BatchReason.REVERTED)).reason is BUDGET:
        first = moved(decision)
    (useless,) = world.world.state.tuning.reverted
    assert (useless.value, useless.harmed) == (first.max_num_batched_tokens, False)
    assert (moved(world.until(BUDGET)).max_num_batched_tokens or 0) <= useless.value / 2


def test_larger_steps_where_prompts_wait() -> None:
    policy = replace(POLICY, slo=Slos(ttft=Slo(seconds=2.0), itl=Slo(seconds=0.5)))
    world = lowered(a_world(policy, running=8.0, ttft_s=4.0), 64, tokens=256)
    assert moved(until(world, BatchReason.RAISE_BUDGET)).max_num_batched_tokens == 512


# --- the card's memory ----------------------------------------------------------------------------------------------

MIB = 1024.0 * 1024.0


def card(world: World, free_mib: float) -> tuple[Gpu, ...]:
    """Return a card of 80 GB for the first pod, of which so much is free."""
    return (
        Gpu(
            uuid="g0",
            pod_uid=world.pods[0].uid,
            memory_used=(81_920.0 - free_mib) * MIB,
            memory_free=free_mib * MIB,
        ),
    )


def test_fewer_sequences_while_the_card_is_short_and_back_step_by_step() -> None:
    world = a_world(running=60.0)
    world.gpus = card(world, 8000.0)
    world.run(4)
    world.gpus = card(world, 300.0)  # guard 0.97: 98 % of the spare memory
    assert moved(world.tick()).max_num_seqs == 30
    assert batching(world.tick()).reason is BatchReason.OBSERVING
    world.gpus = card(world, 8000.0)
    world.set(running=30.0)
    steps: list[int | None] = []
    while steps[-1:] != [64]:
        steps.append(moved(until(world, BatchReason.RESTORE_MEMORY)).max_num_seqs)
    assert steps == [37, 46, 57, 64]
    assert world.state.tuning.held_from is None


def test_on_and_on_while_it_stays_short() -> None:
    world = a_world(running=60.0)
    world.gpus = card(world, 8000.0)
    world.run(4)
    world.gpus = card(world, 300.0)
    caps = []
    for _ in range(40):
        decision = world.tick()
        if isinstance(decision.action, SetBatching):
            caps.append(moved(decision).max_num_seqs or 0)
            world.set(running=float(caps[-1]))
    assert caps == sorted(caps, reverse=True)
    assert caps[0] == 30
    assert caps[-1] == POLICY.batching.sequences.min


@pytest.mark.parametrize(
    ("ratio", "seqs"),
    [
        pytest.param(0.90, None, id="not above the first rung"),
        pytest.param(0.93, 48, id="three quarters"),
        pytest.param(0.96, 32, id="half"),
    ],
)
def test_the_ladder_on_a_server_that_preallocates_nothing(ratio: float, seqs: int | None) -> None:
    score = replace(POLICY.score, memory=MemoryPart(source=MemorySource.FRAMEBUFFER))
    world = a_world(replace(POLICY, score=score), running=64.0)
    world.run(4)
    world.samples = {"gpu_memory_ratio": ratio}
    decision = world.tick()
    assert (moved(decision).max_num_seqs if seqs is not None else None) == seqs
    assert isinstance(decision.action, Hold) is (seqs is None)


def test_the_ladder_does_not_wait_for_replicas() -> None:
    world = a_world(replicas=3, running=60.0)  # one too many: the bounds ask for a step
    world.gpus = card(world, 8000.0)
    world.pods.append(loading("new", world.at))
    world.tick()
    world.gpus = card(world, 300.0)
    decision = world.tick()
    assert batching(decision).reason is BatchReason.LOWER_MEMORY
    assert isinstance(decision.action, SetBatching)


# --- replicas and limits --------------------------------------------------------------------------------------------


def order_one(world: World) -> None:
    """Let one more pod load."""
    world.policy = replace(world.policy, replicas=ReplicaBounds(min=3, max=3))
    world.replicas = 3
    world.pods.append(loading("new", world.at))


@pytest.mark.parametrize(
    "stir",
    [
        pytest.param(order_one, id="a pod loads"),
        pytest.param(
            lambda world: world.pods.__setitem__(1, replace(world.pods[1], terminating=True)), id="a pod drains"
        ),
        pytest.param(lambda world: world.status.update(rollout=True), id="a rollout"),
        pytest.param(
            lambda world: world.pods.__setitem__(1, replace(world.pods[1], ready=False)), id="a pod falls unready"
        ),
    ],
)
def test_nothing_is_tried_while_replicas_move(stir: Any) -> None:
    world = lowered(a_world(**QUEUE), 16)
    world.run(2)
    stir(world)
    for decision in world.run(60):
        assert isinstance(decision.action, Hold)
        assert batching(decision).reason is BatchReason.REPLICAS_MOVING


def test_what_was_being_tried_is_not_judged_once_replicas_move() -> None:
    world = lowered(a_world(**QUEUE), 16)
    until(world, RAISE)
    world.status["rollout"] = True
    world.tick()
    assert world.state.tuning.trial is None
    assert world.state.tuning.reverted == ()


def test_a_storm_is_relieved_while_replicas_load() -> None:
    world = a_world(**STORM)
    order_one(world)
    decision = until(world, LOWER)
    assert isinstance(decision.action, SetBatching)
    assert world.state.tuning.trial is None


def test_a_relief_that_nothing_has_judged_is_undone_in_time() -> None:
    world = a_world(**STORM)
    world.status["rollout"] = True
    few = moved(until(world, LOWER)).max_num_seqs or 0
    assert world.state.tuning.held_from == 64
    world.status["rollout"] = False
    world.set(**QUIET)
    caps = [few]
    while caps[-1] != 64:
        caps.append(moved(until(world, BatchReason.RESTORE_MEMORY)).max_num_seqs or 0)
    assert caps == sorted(caps)
    assert len(caps) > 3
    assert world.state.tuning.held_from is None


def test_a_relief_that_still_binds_is_not_undone() -> None:
    world = a_world(**STORM)
    world.status["rollout"] = True
    until(world, LOWER)
    world.status["rollout"] = False
    world.set(kv=0.87, waiting=20.0, running=19.0, preemption_rate=0.0)
    assert {type(decision.action) for decision in world.run(60)} == {Hold}


def test_a_new_pod_is_told_when_it_becomes_ready() -> None:
    policy = replace(POLICY, replicas=ReplicaBounds(min=2, max=4))
    world = a_world(policy, kind=LoadingWorld, **STORM)
    until(world, LOWER)
    world.pods.append(loading("late", world.at - LoadingWorld.load_s - 5.0))
    for _ in range(10):
        decision = world.tick()
        if batching(decision).reason is BatchReason.ALIGN:
            break
    assert isinstance(decision.action, SetBatching)
    assert [one.pod for one in decision.action.pods] == ["late"]
    assert decision.action.limits == world.state.tuning.wanted


def test_a_pod_that_does_not_obey_is_told_some_times_and_left_alone() -> None:
    world = a_world(**STORM)
    world.deaf = {world.pods[0].uid}
    until(world, LOWER)
    world.set(**QUIET)
    told = [decision for decision in world.run(60) if batching(decision).reason is BatchReason.ALIGN]
    assert len(told) == LEFT_ALONE_AFTER
    assert all(after.at - before.at >= RETELL_S for before, after in pairwise(told))
    (left,) = batching(world.tick()).left_alone
    assert left[0] == world.pods[0].name
    assert "did not take up" in left[1]


def test_a_pod_that_obeys_again_starts_with_a_clean_slate() -> None:
    world = a_world(**STORM)
    world.deaf = {world.pods[0].uid}
    until(world, LOWER)
    world.set(**{**QUIET, "running": 20.0, "kv": 0.8})
    until(world, BatchReason.ALIGN)
    world.deaf = set()
    until(world, BatchReason.ALIGN)
    world.run(int(FORGIVEN_S / POLICY.interval_s) + 2)
    assert world.state.tuning.told == ()


def test_pods_without_the_plugin_are_named() -> None:
    world = a_world(**STORM)
    world.refused = {world.pods[0].uid: "another scheduler"}
    decision = until(world, LOWER)
    assert isinstance(decision.action, SetBatching)
    assert [one.uid for one in decision.action.pods] == [world.pods[1].uid]
    assert batching(decision).left_alone == ((world.pods[0].name, "another scheduler"),)
    world.ceiling = None
    assert batching(world.tick()).reason is BatchReason.NO_PLUGIN
    assert batching(world.tick()).left_alone[1] == (world.pods[1].name, "does not say its limits")


def test_limits_that_another_process_set_are_taken_over() -> None:
    world = lowered(a_world(), 20)
    world.told.pop(world.pods[0].uid)
    decision = until(world, BatchReason.ALIGN)
    assert isinstance(decision.action, SetBatching)
    assert [one.uid for one in decision.action.pods] == [world.pods[0].uid]
    assert moved(decision).max_num_seqs == 20


GROWING = replace(POLICY, replicas=ReplicaBounds(min=2, max=8), cooldown_s=0.0)


def test_growth_waits_for_what_more_sequences_bring() -> None:
    world = lowered(a_world(GROWING, **{**QUEUE, "waiting": 1.0}), 16)
    until(world, RAISE)
    assert world.replicas == 2
    world.set(waiting=100.0, kv=0.99)
    held = [world.tick() for _ in range(2)]
    assert {decision.reason for decision in held} <= {Reason.LIMIT_FIRST, Reason.HELD_STABILIZATION}
    grown = next(decision for decision in world.run(30) if isinstance(decision.action, ScaleReplicas))
    assert grown.at - (world.state.tuning.moved_at or 0.0) >= GROWING.batching.limit_first_s


def test_growth_into_the_bounds_does_not_wait() -> None:
    world = lowered(a_world(GROWING, **{**QUEUE, "waiting": 1.0}), 16)
    until(world, RAISE)
    assert world.replicas == 2
    world.policy = replace(GROWING, replicas=ReplicaBounds(min=4, max=8))
    decision = world.tick()
    assert isinstance(decision.action, ScaleReplicas)
    assert decision.reason is Reason.UP_BOUNDS


# --- whose target it is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        pytest.param({"paused": "annotated"}, BatchReason.NOT_OURS, id="paused by a person"),
        pytest.param({"other_owner": "HorizontalPodAutoscaler/chat"}, BatchReason.NOT_OURS, id="another's"),
        pytest.param({"deployment_paused": True}, BatchReason.DEPLOYMENT_PAUSED, id="Deployment paused"),
    ],
)
def test_a_target_that_is_not_ours_is_left_alone(status: dict[str, Any], reason: BatchReason) -> None:
    world = a_world(**STORM)
    world.status = status
    for decision in world.run(30):
        assert batching(decision).reason is reason
        assert not isinstance(decision.action, SetBatching)


def test_a_dry_run_only_says_so() -> None:
    world = a_world(**STORM)
    decisions = world.run(60, apply=False)
    sets = [decision for decision in decisions if isinstance(decision.action, SetBatching)]
    assert len(sets) > 1
    assert world.told == {}
    assert world.state.tuning.wanted is None
    gaps = [after.at - before.at for before, after in pairwise(sets)]
    assert min(gaps) >= POLICY.batching.cooldown_s


def test_with_approval_nothing_is_moved() -> None:
    world = a_world(replace(POLICY, approval=Approval(required=True)), **STORM)
    decisions = world.run(30)
    assert not [decision for decision in decisions if isinstance(decision.action, SetBatching)]
    assert batching(decisions[-1]).reason is BatchReason.AWAITING_APPROVAL
    assert batching(decisions[-1]).detail.startswith("lower_preemptions to seqs ")


def test_a_write_that_failed_is_decided_anew() -> None:
    world = a_world(**STORM)
    world.outcome = Outcome.FAILED
    until(world, LOWER)
    assert (world.state.tuning.wanted, world.state.tuning.moved_at, world.state.tuning.trial) == (None, None, None)
    world.outcome = None
    assert batching(world.tick()).reason is LOWER


# --- whatever happens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "chunked", "longest", "wrong"),
    [
        pytest.param(Limits(max_num_seqs=512, max_num_batched_tokens=256), True, None, "256 < max_num_seqs", id="seqs"),
        pytest.param(Limits(max_num_seqs=256, max_num_batched_tokens=256), True, None, "", id="just enough"),
        pytest.param(Limits(max_num_batched_tokens=4096), False, 8192, "< max_model_len 8192", id="whole prompts"),
        pytest.param(Limits(max_num_batched_tokens=8192), False, 8192, "", id="whole prompts fit"),
        pytest.param(Limits(max_num_batched_tokens=4096), None, None, "is unknown", id="cannot be checked"),
        pytest.param(Limits(max_num_seqs=512), False, None, "", id="tokens are left alone"),
    ],
)
def test_limits_that_no_engine_starts_with(
    limits: Limits, chunked: bool | None, longest: int | None, wrong: str
) -> None:
    found = unstartable(limits, chunked_prefill=chunked, max_model_len=longest)
    assert wrong in found
    assert bool(found) is bool(wrong)


READINGS = st.fixed_dictionaries(
    {
        "kv": st.sampled_from([0.1, 0.5, 0.8, 0.88, 0.93, 0.97, 1.0]),
        "waiting": st.sampled_from([0.0, 1.0, 30.0]),
        "running": st.sampled_from([0.0, 4.0, 15.0, 30.0, 64.0]),
        "preemption_rate": st.sampled_from([0.0, 0.02, 1.0]),
        "token_rate": st.sampled_from([0.0, 300.0, 900.0, 1500.0]),
        "itl_s": st.sampled_from([0.02, 0.3]),
        "ttft_s": st.sampled_from([0.05, 1.5, 6.0]),
    }
)
EVENTS = st.sampled_from(["none", "none", "none", "load", "ready", "rollout", "settled", "deaf", "lost", "back"])
TUNED = frozenset({RAISE, BUDGET, BatchReason.RAISE_BUDGET, BatchReason.RESTORE_MEMORY, BatchReason.REVERTED})


def stir(world: World, event: str) -> None:
    """Let something happen to the pods."""
    if event == "load" and len(world.pods) < 5:
        world.pods.append(loading(f"new-{len(world.pods)}-{int(world.at)}", world.at))
        world.replicas = len(world.pods)
        world.policy = replace(world.policy, replicas=ReplicaBounds(min=world.replicas, max=world.replicas))
    elif event == "ready":
        for index, one in enumerate(world.pods):
            world.pods[index] = replace(one, ready=True, was_ready=True, ready_at=one.ready_at or world.at)
            world.engines.setdefault(one.uid, Engine(**QUIET))
    elif event in ("rollout", "settled"):
        world.status["rollout"] = event == "rollout"
    elif event in ("deaf", "back"):
        world.deaf = {world.pods[0].uid} if event == "deaf" else set()
    elif event == "lost":
        world.silent = {world.pods[0].uid} if not world.silent else set()


def moves(world: World) -> bool:
    """Tell whether a replica is on its way, or a rollout."""
    return bool(world.status.get("rollout")) or any(not one.ready or one.terminating for one in world.pods)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    spells=st.lists(st.tuples(READINGS, EVENTS, st.integers(3, 25)), min_size=3, max_size=12),
    ceiling=st.sampled_from([4, 20, 64]),
    memory=st.sampled_from([None, 8000.0, 300.0]),
)
def test_limits_stay_in_bounds_still_replicas_and_reverts_end(
    spells: list[tuple[dict[str, float], str, int]], ceiling: int, memory: float | None
) -> None:
    world = a_world(replace(POLICY, replicas=ReplicaBounds(min=2, max=2)))
    world.ceiling = Limits(max_num_seqs=ceiling, max_num_batched_tokens=512, long_prefill_token_threshold=512)
    reverts: Counter[tuple[BatchReason, int, bool]] = Counter()
    moving_at = START
    for readings, event, ticks in spells:
        world.set(**readings)
        stir(world, event)
        world.gpus = () if memory is None else card(world, memory)
        for _ in range(ticks):
            trial = world.state.tuning.trial
            moving_at = world.at if moves(world) else moving_at
            decision = world.tick()
            found, action = batching(decision), decision.action
            if not isinstance(action, SetBatching):
                continue
            for one in action.pods:
                assert 1 <= (one.limits.max_num_seqs or 0) <= ceiling
                assert 1 <= (one.limits.max_num_batched_tokens or 0) <= 512
            if found.reason in TUNED and not (trial is not None and found.reason is BatchReason.REVERTED):
                assert decision.at - moving_at >= POLICY.batching.observe_s
            if found.reason is BatchReason.REVERTED and trial is not None:
                before = {one.kind: one.times for one in world.state.tuning.reverted}
                reverts.update(before.keys())
                assert max(before.values()) <= 2
