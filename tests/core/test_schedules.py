"""What active schedules do to the bounds, and that the decision says so."""

from dataclasses import replace
from itertools import pairwise

import pytest

from autoscaler.core.policy import Policy, ReplicaBounds, Schedule, TargetRef
from autoscaler.core.types import Bounds, Hold, Reason, ScaleReplicas
from tests.core.world import P0, World

DAY = Schedule(name="day", cron="0 8 * * *", duration_s=43200.0, min=4, max=8)
RUSH = Schedule(name="rush", cron="0 12 * * *", duration_s=7200.0, min=6)
NIGHT = Schedule(name="night", cron="0 20 * * *", duration_s=43200.0, max=3)
LAUNCH = Schedule(name="launch", cron="0 0 1 9 *", duration_s=86400.0, max=40)
POLICY = Policy(
    name="p",
    target=TargetRef(deployment="d"),
    replicas=ReplicaBounds(min=2, max=20),
    schedules=(DAY, RUSH, NIGHT, LAUNCH),
)


@pytest.mark.parametrize(
    ("active", "expected", "words"),
    [
        pytest.param((), Bounds(min=2, max=20), "min 2, max 20", id="none"),
        pytest.param(("day",), Bounds(min=4, max=8, by=("day",)), "min 4, max 8 by schedule day", id="one moves both"),
        pytest.param(("rush",), Bounds(min=6, max=20, by=("rush",)), "min 6, max 20 by schedule rush", id="min alone"),
        pytest.param(("launch",), Bounds(min=2, max=40, by=("launch",)), "min 2, max 40 by schedule launch", id="more"),
        pytest.param(
            ("day", "rush"),
            Bounds(min=6, max=8, by=("day", "rush")),
            "min 6, max 8 by schedule day, rush",
            id="the largest min and the smallest max",
        ),
        pytest.param(
            ("rush", "night"),
            Bounds(min=3, max=3, by=("rush", "night")),
            "min 3, max 3 by schedule rush, night",
            id="max wins",
        ),
        pytest.param(("gone",), Bounds(min=2, max=20), "min 2, max 20", id="one that the policy does not have"),
    ],
)
def test_bounds(active: tuple[str, ...], expected: Bounds, words: str) -> None:
    assert POLICY.bounds(active) == expected
    assert str(POLICY.bounds(active)) == words


def test_without_a_name_its_cron_expression_is_the_label() -> None:
    unnamed = replace(DAY, name="")
    assert unnamed.label == "0 8 * * * UTC"
    assert replace(POLICY, schedules=(unnamed,)).bounds(("0 8 * * * UTC",)).by == ("0 8 * * * UTC",)


def test_the_least_replicas_are_the_lowest_of_all_bounds() -> None:
    assert POLICY.least_replicas == 2
    assert replace(POLICY, schedules=(replace(NIGHT, max=1),)).least_replicas == 1
    assert replace(POLICY, schedules=(replace(NIGHT, min=0),)).least_replicas == 0
    assert replace(POLICY, schedules=()).least_replicas == 2


def test_the_most_replicas_are_those_of_the_highest_max() -> None:
    assert POLICY.most_replicas == 40
    assert replace(POLICY, schedules=(NIGHT,)).most_replicas == 20
    assert replace(POLICY, schedules=()).most_replicas == 20


def test_a_window_that_begins_takes_the_target_into_its_bounds_at_once() -> None:
    world = World(replace(P0, schedules=(DAY, NIGHT)), 2)
    world.press(0.1, 0.1, 0.1)
    before = world.tick()
    assert (before.action, before.bounds) == (Hold(), None)
    world.schedules = ("day",)
    begun = world.tick()
    assert begun.action == ScaleReplicas(seen=2, to=4, uid="uid-of-target")
    assert (begun.reason, begun.bounds) == (Reason.UP_BOUNDS, Bounds(min=4, max=8, by=("day",)))
    step = begun.proposal.steps[-1]
    assert (step.rule, step.detail) == (Reason.LIMITED_MIN, "min 4, max 8 by schedule day")
    world.press(0.5, 0.5, 0.5)
    assert "down: at min 4 by schedule day" in world.tick().unblocks
    world.schedules = ("night",)
    assert world.tick().action == ScaleReplicas(seen=4, to=3, uid="uid-of-target")


def test_when_it_ends_the_target_shrinks_by_its_own_rules() -> None:
    world = World(replace(P0, schedules=(DAY,)), 4)
    world.press(0.1, 0.1, 0.1)
    world.schedules = ("day",)
    inside = world.run(30)
    assert {decision.reason for decision in inside[-5:]} == {Reason.LIMITED_MIN}
    world.schedules = ()
    after = world.run(60)
    assert after[0].bounds is None
    steps = [(decision.at, decision.action.to) for decision in after if isinstance(decision.action, ScaleReplicas)]
    assert [to for _, to in steps] == [3, 2, 1]
    assert all(later[0] - earlier[0] >= P0.down_cooldown_s for earlier, later in pairwise(steps))


@pytest.mark.parametrize(
    ("active", "replicas"),
    [pytest.param((), 8, id="none"), pytest.param(("night",), 3, id="night"), pytest.param(("launch",), 20, id="more")],
)
def test_growth_ends_at_the_max_that_holds(active: tuple[str, ...], replicas: int) -> None:
    world = World(replace(P0, schedules=(NIGHT, replace(LAUNCH, max=20))), 2)
    world.schedules = active
    world.press(1.0, 1.0, 1.0)
    world.run(100)
    assert world.replicas == replicas
    last = world.tick()
    by = f" by schedule {active[0]}" if active else ""
    assert f"waits for limited_max (min 1, max {replicas}{by})" in last.unblocks[0]
