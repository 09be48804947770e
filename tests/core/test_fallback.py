"""The size to grow to while too little is known: when, how far, and what goes before it."""

from dataclasses import replace

import pytest

from autoscaler.core.policy import Fallback, Policy, RateBudget, Schedule, Sizing
from autoscaler.core.types import Decision, Direction, Hold, Outcome, Reason, ScaleReplicas
from tests.core.world import P0, World, loading

POLICY = replace(P0, fallback=Fallback(replicas=5, after=3))


def blinded(policy: Policy = POLICY, replicas: int = 2) -> World:
    """Return a world that has been seen for a minute, and of which nothing can be read from now on."""
    world = World(policy, replicas)
    world.press(0.5, 0.5, 0.5)
    world.run(4)
    blind(world)
    return world


def blind(world: World) -> None:
    world.silent = {one.uid for one in world.pods}
    world.samples = {}


def sizes(decisions: list[Decision]) -> list[int]:
    return [one.action.to if isinstance(one.action, ScaleReplicas) else one.proposal.current for one in decisions]


def test_after_so_many_evaluations_without_a_score_it_grows_in_one_step() -> None:
    world = blinded()
    decisions = world.run(3)
    assert [one.reason for one in decisions] == [Reason.NO_DATA, Reason.NO_DATA, Reason.UP_FALLBACK]
    assert sizes(decisions) == [2, 2, 5]
    assert decisions[2].proposal.steps == ()  # not by maxStep, which is 2


def test_without_one_it_holds() -> None:
    world = blinded(P0)
    assert {type(one.action) for one in world.run(50)} == {Hold}


def test_one_score_begins_the_count_anew() -> None:
    world = blinded()
    world.run(2)
    world.silent = set()
    world.press(0.5, 0.5, 0.5)
    assert world.tick().score is not None
    blind(world)
    assert sizes(world.run(3)) == [2, 2, 5]


@pytest.mark.parametrize("replicas", [5, 6, 8])
def test_it_never_shrinks(replicas: int) -> None:
    world = blinded(replicas=replicas)
    assert {type(one.action) for one in world.run(50)} == {Hold}


def test_when_it_can_see_again_the_law_decides() -> None:
    world = blinded()
    grown = world.run(3)[-1]
    world.silent = set()
    world.press(0.1, 0.1, 0.1)
    steps = [one for one in world.run(60) if isinstance(one.action, ScaleReplicas)]
    assert steps[0].reason is Reason.DOWN_SCORE
    assert steps[0].at - grown.at >= P0.scale_down.stabilization_s


def test_with_demand_sizing_too() -> None:
    world = blinded(replace(POLICY, sizing=Sizing.DEMAND, slo=replace(P0.slo, itl=P0.slo.ttft)))
    assert sizes(world.run(3)) == [2, 2, 5]


def test_pods_that_load_are_not_blindness_and_do_not_hold_it_up() -> None:
    world = World(POLICY, 2)
    world.pods = [loading(one.name, world.at) for one in world.pods]
    world.engines = {}
    assert {one.reason for one in world.run(20)} == {Reason.NO_READY_PODS}
    world = blinded()
    world.pods.append(loading("late", world.at))
    world.replicas = 3
    assert sizes(world.run(3)) == [3, 3, 5]


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        pytest.param({"paused": "autoscaler/paused is set"}, Reason.PAUSED, id="paused"),
        pytest.param({"other_owner": "HorizontalPodAutoscaler/chat"}, Reason.OTHER_OWNER, id="another owner"),
        pytest.param({"pin": 2}, Reason.PINNED, id="pinned"),
        pytest.param({"direction": Direction.DOWN_ONLY}, Reason.LIMITED_DIRECTION, id="down-only"),
        pytest.param({"rollout": True, "rollout_unhealthy": True}, Reason.ROLLOUT_UNHEALTHY, id="an unhealthy rollout"),
    ],
)
def test_what_goes_before_it(status: dict[str, object], reason: Reason) -> None:
    world = blinded()
    world.status = status
    decisions = world.run(10)
    assert {type(one.action) for one in decisions} == {Hold}
    assert decisions[-1].reason is reason


def test_the_count_begins_anew_after_a_pause() -> None:
    world = blinded()
    world.status = {"paused": "autoscaler/paused is set"}
    world.run(10)
    world.status = {}
    assert sizes(world.run(3)) == [2, 2, 5]


def test_it_waits_for_the_cooldown() -> None:
    world = World(POLICY, 2)
    world.press(1.0, 1.0, 1.0)
    assert sizes(world.run(1)) == [4]
    blind(world)
    assert sizes(world.run(5)) == [4, 4, 4, 5, 5]  # 60 s after the step, not after three ticks of 15 s


def test_no_budget_stops_it() -> None:
    budget = RateBudget(type="Pods", value=1, period_s=600.0)
    world = blinded(replace(POLICY, scale_up=replace(P0.scale_up, budgets=(budget,))))
    assert sizes(world.run(3)) == [2, 2, 5]


@pytest.mark.parametrize(
    ("night", "expected"), [pytest.param(3, [2, 2, 3], id="lower"), pytest.param(8, [2, 2, 5], id="higher")]
)
def test_it_stays_inside_the_bounds_that_hold(night: int, expected: list[int]) -> None:
    schedule = Schedule(name="night", cron="0 1 * * *", duration_s=3600.0, max=night)
    world = blinded(replace(POLICY, schedules=(schedule,)))
    world.schedules = ("night",)
    decisions = world.run(3)
    assert sizes(decisions) == expected
    assert decisions[-1].reason is Reason.UP_FALLBACK


def test_a_write_that_fails_is_tried_again() -> None:
    world = blinded()
    world.outcome = Outcome.FAILED
    decisions = world.run(4)
    assert [one.reason for one in decisions[2:]] == [Reason.UP_FALLBACK, Reason.UP_FALLBACK]
