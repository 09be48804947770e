"""Field failures of the decision, by the ids under which they were collected. Profile P0 unless said otherwise."""

from dataclasses import replace
from itertools import pairwise

import pytest

from autoscaler.core.policy import ReplicaBounds, complaints, warnings
from autoscaler.core.types import Hold, PodPhase, Reason, ScaleReplicas
from autoscaler.core.window import COUNTERS
from tests.core.world import P0, START, Engine, LoadingWorld, World, loading, pod

TARGET = "uid-of-target"


class TestC070CascadeWhilePodsLoad:
    """Loading pods are capacity on its way."""

    def test_one_order_for_one_demand(self) -> None:
        world = LoadingWorld(P0, 2)
        world.press(0.95, 0.95, 0.95)
        decisions = world.run(16)
        assert world.writes == [(START, 2, 4)]
        assert {decision.reason for decision in decisions[1:]} == {Reason.PENDING_CAPACITY}

    def test_no_cascade_while_the_grace_lasts(self) -> None:
        world = LoadingWorld(P0, 2)
        world.load_s = 1e9
        world.press(0.95, 0.95, 0.95)
        world.run(int(600 / 15))
        assert world.replicas == 4

    def test_pending_dampens_into_the_dead_band(self) -> None:
        # (0.95 x 2 + 0 x 2) / 4 = 0.475: what the two ready pods say, seen over all four that are ordered.
        world = LoadingWorld(P0, 2)
        world.press(0.95, 0.95, 0.95)
        world.tick()
        decision = world.decide()
        assert decision.score is not None
        ready_share = 2 / world.replicas
        assert P0.scale_down.threshold < (decision.score.value or 0.0) * ready_share < P0.scale_up.threshold
        assert isinstance(decision.action, Hold)


class TestC071Unschedulable:
    """No GPUs are left."""

    def world(self, since: float) -> World:
        world = World(P0, 4)
        world.replicas = 6
        world.press(0.95, 0.95, 0.95)
        stuck = {"phase": PodPhase.PENDING, "ip": "", "unschedulable_at": START - since}
        world.pods += [loading(f"new-{index}", START - since, **stuck) for index in range(2)]
        return world

    def test_growth_stops(self) -> None:
        world = self.world(180.0)
        decision = world.decide()
        assert decision.reason is Reason.UNSCHEDULABLE
        assert isinstance(decision.action, Hold)
        assert world.run(20)[-1].reason is Reason.UNSCHEDULABLE

    def test_metrics_go_on(self) -> None:
        score = self.world(180.0).decide().score
        assert score is not None
        assert score.value == pytest.approx(0.95)

    def test_a_young_pending_pod_is_only_pending(self) -> None:
        assert self.world(60.0).decide().reason is Reason.PENDING_CAPACITY


class TestC073RollingUpdateWithSurge:
    """The base is spec.replicas, whatever the status says."""

    def world(self) -> World:
        policy = replace(P0, scale_up=replace(P0.scale_up, max_step=1))
        world = World(policy, 5)
        world.replicas = 4
        world.press(0.75, 0.75, 0.75)
        world.pods.append(loading("surge", START - 5.0))
        world.status = {"status_replicas": 6, "ready_replicas": 5, "updated_replicas": 2, "rollout": True}
        return world

    def test_the_step_starts_from_spec(self) -> None:
        assert self.world().decide().action == ScaleReplicas(seen=4, to=5, uid=TARGET)

    def test_no_ratchet(self) -> None:
        world = self.world()
        decisions = [world.tick(apply=False) for _ in range(10)]
        written = {decision.action.to for decision in decisions if isinstance(decision.action, ScaleReplicas)}
        assert written == {5}

    def test_no_shrink_during_a_rollout(self) -> None:
        world = self.world()
        world.press(0.0, 0.0, 0.0)
        decisions = world.run(40)
        assert not world.writes
        assert {decision.reason for decision in decisions[20:]} == {Reason.ROLLOUT}


class TestC075NewRevisionCrashes:
    """Crash-looping pods are neither load nor capacity."""

    def world(self) -> World:
        world = World(replace(P0, replicas=ReplicaBounds(min=1, max=3)), 1)
        world.pods.append(
            loading("bad", START - 300.0, waiting_reason="CrashLoopBackOff", restarts=6, phase=PodPhase.RUNNING)
        )
        world.status = {"rollout": True, "rollout_unhealthy": True}
        return world

    def test_desired_stays_at_spec(self) -> None:
        world = self.world()
        world.press(0.1, 0.125, 0.1)
        world.run(40)
        assert world.replicas == 1

    def test_growth_is_refused_and_the_healthy_pod_still_counts(self) -> None:
        world = self.world()
        world.press(0.9, 0.9, 0.9)
        decision = world.decide()
        assert decision.reason is Reason.ROLLOUT_UNHEALTHY
        assert decision.score is not None
        assert decision.score.value == pytest.approx(0.9)

    def test_growth_is_refused_without_a_rollout_too(self) -> None:
        world = self.world()
        world.policy = replace(world.policy, health=replace(world.policy.health, enabled=True))
        world.status = {}
        world.pods[1] = replace(world.pods[1], uid="uid-other")
        world.pods.append(replace(world.pods[1], uid="uid-third"))
        world.replicas = 3
        world.policy = replace(world.policy, replicas=ReplicaBounds(min=1, max=9))
        world.press(0.95, 0.95, 0.95)
        assert world.decide().reason is Reason.HEALTH_FUSE


class TestC077TerminatingPods:
    """A draining pod is neither load nor supply."""

    def world(self, *, serialize: bool) -> World:
        policy = replace(P0, scale_down=replace(P0.scale_down, serialize_drain=serialize))
        world = World(policy, 2)
        world.press(0.1, 0.0, 0.05)
        world.pods.append(pod("draining", terminating=True))
        world.engines["uid-draining"] = Engine(kv=0.9, running=14.0, waiting=90.0, token_rate=300.0)
        return world

    def test_no_growth_because_of_it(self) -> None:
        world = self.world(serialize=False)
        decision = world.decide()
        assert decision.score is not None
        assert decision.score.value == pytest.approx(0.40 * 0.1 + 0.25 * 0.05)
        assert world.state.facts is not None
        assert world.state.facts.loading == 0
        assert world.state.facts.terminating == 1

    @pytest.mark.parametrize(
        ("serialize", "reason"),
        [pytest.param(True, Reason.DRAINING, id="held"), pytest.param(False, Reason.DOWN_SCORE, id="allowed")],
    )
    def test_the_next_step_waits_only_if_asked(self, serialize: bool, reason: Reason) -> None:
        world = self.world(serialize=serialize)
        assert world.run(21)[-1].reason is reason


class TestC078ShrinkThatWouldRebound:
    """N/(N-1) of the score must stay under the up threshold."""

    @pytest.mark.parametrize(
        ("replicas", "reason"),
        [pytest.param(2, Reason.WOULD_REBOUND, id="to-0.84"), pytest.param(8, Reason.DOWN_SCORE, id="to-0.48")],
    )
    def test_projection(self, replicas: int, reason: Reason) -> None:
        world = World(replace(P0, scale_down=replace(P0.scale_down, threshold=0.45)), replicas)
        world.press(0.42, 0.42, 0.42)
        assert world.run(21)[-1].reason is reason

    def test_validation_warns(self) -> None:
        policy = replace(P0, scale_down=replace(P0.scale_down, threshold=0.45))
        assert [path for path, _, _ in warnings(policy)] == ["scale_down.threshold"]
        assert not list(warnings(P0))
        assert not list(complaints(policy))


def test_c079_noise_around_both_thresholds() -> None:
    world = World(P0, 3)
    decisions = []
    for index in range(120):
        level = 0.72 if index % 2 == 0 else 0.28
        world.press(level, level, level)
        decisions.append(world.tick())
    assert all(to > seen for _, seen, to in world.writes)
    assert world.replicas <= 8
    assert all(later - earlier >= 60.0 for (earlier, _, _), (later, _, _) in pairwise(world.writes))
    assert all(decision.reason for decision in decisions)
    held = [decision for decision in decisions if isinstance(decision.action, Hold)]
    assert {decision.reason for decision in held} <= {
        Reason.HELD_COOLDOWN,
        Reason.HELD_STABILIZATION,
        Reason.HELD_HYSTERESIS,
        Reason.STEADY,
        Reason.LIMITED_MAX,
    }


class TestC080FreshPodsReportZeros:
    """A pod that has just become ready says nothing about the need for it."""

    def world(self, age: float) -> World:
        world = World(P0, 4)
        world.press(0.8, 0.5, 0.05)
        for one in world.pods[2:]:
            world.engines[one.uid] = Engine(kv=0.0, waiting=0.0, running=0.0)
        world.pods[2:] = [replace(one, ready_at=START - age, created_at=START - age) for one in world.pods[2:]]
        return world

    def test_zeros_do_not_support_a_shrink(self) -> None:
        score = self.world(10.0).decide().score
        assert score is not None
        memory = score.part("memory")
        assert memory.value == pytest.approx(0.4)
        assert memory.shrink_value == pytest.approx(0.8)

    def test_after_the_warm_up_they_count(self) -> None:
        score = self.world(61.0).decide().score
        assert score is not None
        assert score.part("memory").shrink_value == pytest.approx(0.4)

    def test_only_cold_pods_support_nothing(self) -> None:
        world = self.world(10.0)
        world.pods = [replace(one, ready_at=START - 10.0) for one in world.pods]
        world.press(0.0, 0.0, 0.0)
        assert world.decide().reason is Reason.WARMING_UP


class TestC081IdleFleetReturnsToMin:
    """No traffic makes NaN latency idle, when the request counters say so."""

    def test_down_to_min_at_the_cooldown_pace(self) -> None:
        world = World(P0, 7)
        decisions = world.run(int(7200 / 15))
        assert decisions[-1].score is not None
        assert decisions[-1].score.part("latency").driver == "idle"
        assert world.replicas == 1
        assert [seen - to for _, seen, to in world.writes] == [1] * 6
        assert world.writes[-1][0] - START <= 1860.0
        assert all(later - earlier >= 300.0 for (earlier, _, _), (later, _, _) in pairwise(world.writes))

    def test_missing_request_counters_hold(self) -> None:
        world = World(P0, 7)
        world.set(request_rate=None, token_rate=None)
        world.run(int(7200 / 15))
        assert world.replicas == 7


class TestC082RightAfterTheStart:
    """A young daemon knows too little to shrink."""

    def test_a_full_window_first_then_one_step(self) -> None:
        world = World(replace(P0, replicas=ReplicaBounds(min=1, max=20)), 10)
        world.press(0.02, 0.02, 0.02)
        world.run(21)
        assert world.writes == [(START + 300.0, 10, 9)]

    def test_growth_needs_no_wait(self) -> None:
        world = World(P0, 2)
        world.press(0.9, 0.9, 0.9)
        assert isinstance(world.decide().action, ScaleReplicas)

    def test_restarts_every_200_s_never_shrink(self) -> None:
        world = World(replace(P0, replicas=ReplicaBounds(min=1, max=20)), 10)
        world.press(0.02, 0.02, 0.02)
        for _ in range(10):
            world.state = type(world.state)()
            world.run(13)
        assert world.replicas == 10


class TestC084TwoAutoscalers:
    """Somebody else owns replicas."""

    def test_observe_only_then_resume(self) -> None:
        world = World(P0, 3)
        world.press(1.0, 1.0, 1.0)
        world.status = {"other_owner": "HorizontalPodAutoscaler/chat-a"}
        decisions = world.run(10)
        assert not world.writes
        assert {decision.reason for decision in decisions} == {Reason.OTHER_OWNER}
        world.status = {}
        assert isinstance(world.tick().action, ScaleReplicas)

    def test_shrinking_resumes_after_one_fresh_window(self) -> None:
        world = World(P0, 3)
        world.press(0.0, 0.0, 0.0)
        world.status = {"other_owner": "HorizontalPodAutoscaler/chat-a"}
        world.run(40)
        world.status = {}
        resumed = world.at
        world.run(25)
        assert world.writes[0][0] == resumed + 300.0

    def test_bounds_do_not_fight_the_owner(self) -> None:
        world = World(replace(P0, replicas=ReplicaBounds(min=5, max=8)), 3)
        world.status = {"other_owner": "HorizontalPodAutoscaler/chat-a"}
        assert isinstance(world.decide().action, Hold)


class TestC085ZeroByHand:
    """Zero replicas set by a person mean paused."""

    def test_paused_until_a_person_returns(self) -> None:
        world = World(P0, 2)
        world.press(1.0, 1.0, 1.0)
        world.scale(0)
        world.samples = {"upstream_queue": 500.0}
        decisions = world.run(20)
        assert not world.writes
        assert {decision.reason for decision in decisions} == {Reason.SCALED_TO_ZERO}

    def test_windows_start_afresh(self) -> None:
        world = World(P0, 3)
        world.press(0.0, 0.0, 0.0)
        world.run(18)
        world.scale(0)
        world.tick()
        world.scale(3)
        world.set(kv=0.0, waiting=0.0, running=0.0, token_rate=0.0)
        returned = world.at
        world.run(30)
        assert world.writes[0][0] >= returned + 300.0


class TestC088OutOfMemoryFlaps:
    """Zeros after a restart are no evidence of calm."""

    def test_restarts_block_shrinking_and_not_growth(self) -> None:
        world = World(P0, 3)
        world.press(0.05, 0.0, 0.05)
        world.run(30)
        writes = len(world.writes)
        for restarts in (1, 2, 3):
            world.pods[1] = replace(world.pods[1], restarts=restarts, oom_killed=True)
            engine = world.engines[world.pods[1].uid]
            engine.generated, engine.finished, engine.kv, engine.running = 0.0, 0.0, 0.0, 0.0
            decisions = world.run(13)
            assert Reason.UNSTABLE_PODS in {decision.reason for decision in decisions}
        assert len(world.writes) == writes
        world.press(0.95, 0.95, 0.95)
        assert isinstance(world.decide().action, ScaleReplicas)

    def test_counters_fall_without_negative_rates(self) -> None:
        world = World(P0, 2)
        world.press(0.3, 0.2, 0.1)
        world.run(4)
        world.engines[world.pods[1].uid].generated = 5.0
        world.tick()
        sums = [row.sums for row in world.state.rows]
        counters = [row[:COUNTERS] for row in sums]
        assert all(new >= old for before, after in pairwise(counters) for old, new in zip(before, after, strict=True))


def test_group_size_that_does_not_fit_holds() -> None:
    """C139: pods = 4 x spec for three polls and no podsPerReplica."""
    world = World(P0, 8)
    world.replicas = 2
    world.press(0.95, 0.95, 0.95)
    reasons = [decision.reason for decision in world.run(6, apply=False)]
    assert reasons[-1] is Reason.GROUP_SIZE
    folded = World(replace(P0, target=replace(P0.target, pods_per_replica=4)), 8)
    folded.replicas = 2
    folded.press(0.5, 0.5, 0.5)
    folded.run(6)
    assert folded.state.facts is not None
    assert folded.state.facts.ready == 2.0
