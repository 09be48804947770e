"""Field failures of the score, by the ids under which they were collected. Profile P0 unless said otherwise."""

import itertools
import math
from dataclasses import replace

import pytest

from autoscaler.core.facts import IMPLAUSIBLE_ZERO_POLLS
from autoscaler.core.histogram import quantile
from autoscaler.core.policy import Policy, PrometheusServer, Query, ReplicaBounds, Signals, TargetRef
from autoscaler.core.signals import ENGINE_COLUMNS, plausible
from autoscaler.core.types import WHOLE_PAGE, Gap, GapReason, Gpu, Hold, PodPhase, Reason, ScaleReplicas
from tests.core.world import P0, START, Engine, World, pod

KV = next(signal for signal in ENGINE_COLUMNS if signal.name == "kv_cache_usage")


@pytest.mark.parametrize(
    ("parts", "value", "action"),
    [
        pytest.param((0.95, 0.00, 0.20), 0.4300, None, id="full-cache-alone"),
        pytest.param((1.00, 1.00, 1.00), 1.0000, 5, id="all-full"),
        pytest.param((0.70, 0.00, 0.10), 0.3050, None, id="just-above-down"),
        pytest.param((0.50, 1.00, 0.80), 0.7500, 5, id="queue"),
    ],
)
def test_c055_nominal_vectors(parts: tuple[float, float, float], value: float, action: int | None) -> None:
    world = World(P0, 3)
    world.press(*parts)
    decision = world.decide()
    assert decision.score is not None
    assert decision.score.value == pytest.approx(value, abs=1e-6)
    if action is None:
        assert isinstance(decision.action, Hold)
    else:
        assert decision.action == ScaleReplicas(seen=3, to=action, uid="uid-of-target")


def test_c055_zero_goes_down_after_the_windows() -> None:
    world = World(P0, 3)
    world.press(0.0, 0.0, 0.0)
    decisions = world.run(30)
    assert decisions[0].score is not None
    assert decisions[0].score.value == 0.0
    assert [decision.reason for decision in decisions[:20]].count(Reason.HELD_STABILIZATION) == 20
    assert world.writes[0][0] == START + 300.0


def test_c055_parts_above_one_are_clamped_and_thresholds_are_inclusive() -> None:
    world = World(P0, 3)
    world.press(0.5, 3.0, 2.0)
    score = world.decide().score
    assert score is not None
    assert score.part("backlog").value == 1.0
    assert score.part("latency").value == 1.0
    exact = World(replace(P0, scale_up=replace(P0.scale_up, threshold=0.75)), 3)
    exact.press(0.5, 1.0, 0.8)
    assert exact.decide().reason is Reason.UP_SCORE


class TestC056OneComponentIsMissing:
    """Growth is allowed on what is known, shrinking is not."""

    def test_a_growth_on_the_known_weight(self) -> None:
        world = World(P0, 3)
        world.press(None, 1.0, 1.0)
        decision = world.decide()
        assert decision.score is not None
        assert decision.score.value == pytest.approx(1.0)
        assert decision.score.known_weight == pytest.approx(0.60)
        assert decision.score.shrink_value is None
        assert isinstance(decision.action, ScaleReplicas)

    def test_b_no_shrink(self) -> None:
        world = World(P0, 3)
        world.press(None, 0.0, 0.0)
        decisions = world.run(60)
        assert {decision.reason for decision in decisions} == {Reason.PARTIAL_NO_SHRINK}
        assert world.replicas == 3

    def test_c_too_little_is_known(self) -> None:
        world = World(P0, 3)
        world.press(0.95, None, None)
        world.set(request_rate=None, token_rate=None)
        decisions = world.run(60)
        assert {decision.reason for decision in decisions} == {Reason.INSUFFICIENT_COMPONENTS}
        assert world.replicas == 3

    def test_d_nothing_is_known(self) -> None:
        world = World(P0, 3)
        world.silent = {one.uid for one in world.pods}
        decisions = world.run(60)
        assert {decision.reason for decision in decisions} == {Reason.NO_DATA}
        assert world.replicas == 3
        assert world.state.no_score_since == START


class TestC058AllPodsFailReadiness:
    """Overload must not read as an empty fleet."""

    def overloaded(self) -> World:
        world = World(P0, 3)
        world.press(0.99, 7.5, 1.0)
        world.pods = [replace(one, ready=False) for one in world.pods]
        return world

    def test_growth_from_pods_that_were_ready(self) -> None:
        decision = self.overloaded().decide()
        assert decision.score is not None
        assert decision.score.part("backlog").value == 1.0
        assert decision.reason is Reason.UP_SCORE

    def test_no_shrink_while_ready_is_below_spec(self) -> None:
        world = self.overloaded()
        world.press(0.0, 0.0, 0.0)
        decisions = world.run(60)
        assert world.replicas == 3
        assert {decision.reason for decision in decisions} == {Reason.UNREADY_PODS}

    def test_no_shrink_while_pods_are_lost_that_had_just_become_ready(self) -> None:
        """The API does not show that these have served: whoever saw them ready has to remember it."""
        world = World(P0, 4)
        world.press(0.0, 0.0, 0.0)
        world.decide()
        lost = [replace(one, ready=False, was_ready=False, created_at=START) for one in world.pods[2:]]
        world.pods[2:] = lost
        world.silent = {one.uid for one in lost}
        decisions = world.run(60)
        assert world.replicas == 4
        assert {decision.reason for decision in decisions} == {Reason.UNREADY_PODS}

    def test_hold_when_they_cannot_be_scraped(self) -> None:
        world = self.overloaded()
        world.silent = {one.uid for one in world.pods}
        world.pods = [replace(one, was_ready=False, created_at=START - 10.0) for one in world.pods]
        world.samples = {}
        assert world.decide().reason is Reason.NO_READY_PODS


@pytest.mark.parametrize(
    ("silent", "reason"),
    [
        pytest.param(["chat-a-0"], Reason.DOWN_SCORE, id="one of four"),
        pytest.param(["chat-a-0", "chat-a-1"], Reason.PARTIAL_NO_SHRINK, id="two of four"),
        pytest.param([""], Reason.PARTIAL_NO_SHRINK, id="the whole source"),
        pytest.param(["other-0", "other-1"], Reason.DOWN_SCORE, id="pods of others"),
    ],
)
def test_pods_that_do_not_answer_now_do_not_vouch_for_a_shrink(silent: list[str], reason: Reason) -> None:
    """Their last pages are still fresh enough to grow by."""
    world = World(P0, 4)
    world.press(0.0, 0.0, 0.0)
    while isinstance(world.decide().action, Hold):
        world.tick()
    refused = [Gap(signal=WHOLE_PAGE, reason=GapReason.UNREACHABLE, source="vllm", pod=name) for name in silent]
    world.gaps = tuple(refused)
    assert world.decide().reason is reason


def test_c060_perc_in_the_name_ratio_in_the_value() -> None:
    assert plausible(KV, 0.47) == 0.47
    assert plausible(KV, 47.0) is GapReason.OUT_OF_RANGE


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param(1.0000000002, 1.0, id="noise-above"),
        pytest.param(1.0009, 1.0, id="tolerance-above"),
        pytest.param(1.02, GapReason.OUT_OF_RANGE, id="too-high"),
        pytest.param(-0.0, 0.0, id="minus-zero"),
        pytest.param(-1e-12, 0.0, id="noise-below"),
        pytest.param(-0.3875, GapReason.OUT_OF_RANGE, id="negative"),
    ],
)
def test_c061_kv_gauge_around_its_range(raw: float, expected: float | GapReason) -> None:
    found = plausible(KV, raw)
    assert found == expected
    if isinstance(found, float):
        assert math.copysign(1.0, found) == 1.0


def test_c061_zero_while_requests_run_does_not_support_a_shrink() -> None:
    world = World(P0, 3)
    world.press(0.0, 0.0, 0.0)
    world.set(running=1.0, token_rate=10.0)
    decisions = world.run(IMPLAUSIBLE_ZERO_POLLS + 40)
    memory = decisions[-1].score.part("memory") if decisions[-1].score else None
    assert memory is not None
    assert memory.value == 0.0
    assert memory.shrink_value is None
    assert memory.gap is GapReason.KV_IMPLAUSIBLE
    assert decisions[-1].reason is Reason.PARTIAL_NO_SHRINK
    assert world.replicas == 3


@pytest.mark.parametrize("order", [pytest.param(order, id=str(order)) for order in itertools.permutations(range(3))])
def test_c062_nan_does_not_depend_on_order(order: tuple[int, ...]) -> None:
    readings = [0.4, None, 0.8]
    world = World(P0, 3)
    for engine, index in zip(world.engines.values(), order, strict=True):
        engine.kv = readings[index]
        engine.running, engine.token_rate = 1.0, 10.0
    world.samples = {"ttft": 0.4}
    score = world.decide().score
    assert score is not None
    # Two of three say 0.4 and 0.8; the third is left out of the mean, never read as the largest or the smallest.
    assert score.part("memory").value == pytest.approx(0.6)


def test_c062_all_nan_is_unknown() -> None:
    assert math.isnan(quantile((1.0, math.inf), [0.0, 0.0], 0.99).value)
    world = World(P0, 3)
    world.press(None, 0.5, 0.5)
    score = world.decide().score
    assert score is not None
    assert score.part("memory").value is None


class TestC054FramebufferIsAlwaysFull:
    """vLLM preallocates: the framebuffer says nothing about load."""

    def world(self) -> World:
        world = World(P0, 4)
        gib = 1024.0**3
        world.gpus = tuple(
            Gpu(uuid=f"GPU-{one.name}", pod_uid=one.uid, memory_used=72.8 * gib, memory_free=7.2 * gib)
            for one in world.pods
        )
        return world

    def test_kv_is_the_memory_part(self) -> None:
        world = self.world()
        world.press(0.05, 0.0, 0.05)
        decisions = world.run(240)
        assert decisions[0].score is not None
        assert decisions[0].score.part("memory").value == pytest.approx(0.05)
        assert decisions[0].score.value == pytest.approx(0.0325)
        assert world.replicas == 1
        assert all(seen - to == 1 for _, seen, to in world.writes)

    def test_framebuffer_alone_neither_grows_nor_shrinks(self) -> None:
        world = self.world()
        world.press(None, 0.0, 0.05)
        decisions = world.run(60)
        assert {decision.reason for decision in decisions} == {Reason.MEMORY_COARSE}
        assert world.replicas == 4


class TestC028GatewayQueue:
    """Engines see no queue while the gateway holds hundreds."""

    def policy(self) -> Policy:
        query = Query(signal="upstream_queue", query='sum(gateway_queue_depth{model="m"})', server="main")
        servers = {"main": PrometheusServer(url="http://127.0.0.1:9090")}
        return replace(P0, signals=Signals(prometheus=servers, queries=(query,)))

    def test_upstream_queue_is_backlog(self) -> None:
        world = World(self.policy(), 2)
        world.set(waiting=0.0, running=6.0, kv=0.35, token_rate=10.0)
        world.samples = {"upstream_queue": 310.0, "ttft": 0.5}
        score = world.decide().score
        assert score is not None
        assert score.part("backlog").value == 1.0
        assert score.part("backlog").driver == "upstream queue 310"

    def test_missing_upstream_blocks_shrinking_only(self) -> None:
        world = World(self.policy(), 2)
        world.set(waiting=0.0, running=6.0, kv=0.05, token_rate=10.0)
        world.samples = {"ttft": 0.1}
        decisions = world.run(60)
        assert {decision.reason for decision in decisions} == {Reason.PARTIAL_NO_SHRINK}
        world.set(waiting=20.0, kv=0.9)
        world.samples = {"ttft": 2.0}
        assert world.decide().reason is Reason.UP_SCORE


def test_part_of_a_pod_without_data_counts_empty_for_growth_and_full_for_shrink() -> None:
    policy = Policy(name="p", target=TargetRef(deployment="d"), replicas=ReplicaBounds(max=9))
    world = World(policy, 4)
    world.set(kv=0.45, running=2.0, token_rate=20.0)
    world.silent = {world.pods[0].uid}
    score = world.decide().score
    assert score is not None
    memory = score.part("memory")
    assert memory.value == pytest.approx(0.45 * 3 / 4 / 0.9)
    assert memory.shrink_value == pytest.approx((0.45 * 3 + 1.0) / 4 / 0.9)


def test_pod_without_an_engine_row_is_pending_not_zero() -> None:
    world = World(P0, 2)
    world.pods.append(pod("late", ready=False, was_ready=False, ready_at=None, phase=PodPhase.PENDING))
    world.engines["uid-late"] = Engine(kv=None)
    world.press(0.5, 0.5, 0.5)
    score = world.decide().score
    assert score is not None
    assert score.part("memory").value == pytest.approx(0.5)
