"""Steps of our own that a process did not make, or of which it never heard: its cooldown counts them all the same.

Nobody says when they happened: the API server keeps no time of a change through `scale`. What a process saw, it saw
afterwards, so that from then on the whole cooldown is enough, and is all that is ever waited.
"""

import json
from dataclasses import replace

import pytest

from autoscaler.core.memory import memory_from_plain, memory_of, memory_to_plain, recall
from autoscaler.core.owners import Owners
from autoscaler.core.state import State
from autoscaler.core.types import FIELD_MANAGER, Outcome, Reason, ScaleReplicas
from tests.core.world import P0, START, World

OURS = {"scaled_by": FIELD_MANAGER}
UID = "uid-of-target"
BEAT = P0.interval_s
COOLDOWN_S = P0.up_cooldown_s


def pressed(replicas: int = 2) -> World:
    """Return a target under so much load that each tick wants more, after a tick that could write nothing."""
    world = World(P0, replicas)
    world.press(1.0, 1.0, 1.0)
    world.outcome = Outcome.STANDBY
    world.tick()
    return world


@pytest.mark.parametrize(
    ("by", "to", "up", "down"),
    [
        pytest.param(FIELD_MANAGER, 3, True, False, id="up-by-us"),
        pytest.param(FIELD_MANAGER, 1, False, True, id="down-by-us"),
        pytest.param(FIELD_MANAGER, 2, False, False, id="no-change"),
        pytest.param("kubectl", 3, False, False, id="up-by-a-person"),
        pytest.param("", 3, False, False, id="by-nobody-knows-whom"),
    ],
)
def test_c106_a_standby_counts_the_leaders_steps(by: str, to: int, up: bool, down: bool) -> None:
    world = pressed()
    world.scale(to)
    world.status = {"scaled_by": by}
    decision = world.tick()
    state = world.state
    assert (state.last_up_at, state.last_down_at) == (decision.at if up else None, decision.at if down else None)
    assert decision.reason is Reason.HELD_COOLDOWN or not (up or down)


def test_it_waits_for_one_cooldown_and_no_longer() -> None:
    world = pressed()
    world.scale(3)
    world.status = {**OURS, "scaled_at": START + 1e6}  # of a clock that is ahead, where a server says one at all
    seen_at = world.at
    decisions = [world.tick() for _ in range(int(COOLDOWN_S / BEAT) + 1)]
    assert {one.reason for one in decisions[:-1]} == {Reason.HELD_COOLDOWN}
    assert decisions[-1].at == seen_at + COOLDOWN_S
    assert decisions[-1].action == ScaleReplicas(seen=3, to=5, uid=UID)


def test_own_steps_count_once_and_from_their_decision() -> None:
    world = World(P0, 2)
    world.press(1.0, 1.0, 1.0)
    stepped_at = world.tick().at
    world.status = dict(OURS)
    world.run(3)
    assert (world.state.last_up_at, world.state.last_down_at, world.state.changes) == (
        stepped_at,
        None,
        ((stepped_at, 2),),
    )
    assert world.state.owners == Owners(uid=UID, replicas=4, ours=True, since=stepped_at)


def test_c106_a_write_whose_answer_was_lost_and_that_took_effect_starts_a_cooldown() -> None:
    world = World(P0, 2)
    world.press(1.0, 1.0, 1.0)
    world.outcome = Outcome.FAILED
    assert isinstance(world.tick().action, ScaleReplicas)
    world.scale(4)
    world.status = dict(OURS)
    assert world.tick().reason is Reason.HELD_COOLDOWN


def test_a_write_that_failed_starts_none() -> None:
    world = World(P0, 2)
    world.press(1.0, 1.0, 1.0)
    world.outcome = Outcome.FAILED
    world.tick()
    world.status = dict(OURS)
    assert isinstance(world.tick().action, ScaleReplicas)


def test_where_nobody_is_named_nothing_is_claimed() -> None:
    world = World(P0, 2)
    world.press(1.0, 1.0, 1.0)
    stepped_at = world.tick().at
    world.scale(3)
    world.tick()
    assert (world.state.last_up_at, world.state.last_down_at) == (stepped_at, None)


def test_a_simulated_step_is_none_of_the_target() -> None:
    world = World(P0, 2)
    world.press(1.0, 1.0, 1.0)
    world.tick(apply=False)
    assert world.state.owners == Owners(uid=UID, replicas=2, since=START)


# --- over a restart -------------------------------------------------------------------------------------------------


def died(saved: int = 2, *, at: float = START) -> State:
    """Return what a leader last saved: that there were so many replicas."""
    return State(times=(at,), owners=Owners(uid=UID, replicas=saved, since=at - 60.0))


def taken_over(world: World, before: State) -> None:
    """Have the world's process take in what the leader before it saved."""
    memory = memory_of(P0, before)
    assert memory is not None
    plain = json.loads(json.dumps(memory_to_plain(memory)))
    world.state = recall(P0, world.state, memory_from_plain(plain), world.at)


@pytest.mark.parametrize(
    ("by", "found", "held"),
    [
        pytest.param(FIELD_MANAGER, 4, True, id="a-step-that-was-not-saved"),
        pytest.param(FIELD_MANAGER, 2, False, id="no-step"),
        pytest.param("kubectl", 4, False, id="somebody-elses"),
    ],
)
@pytest.mark.parametrize("ticks", [0, 3], ids=["before-its-first-tick", "after-some"])
def test_c106_a_new_process_counts_a_step_that_was_not_saved(by: str, found: int, held: bool, ticks: int) -> None:
    world = World(P0, found, at=START + 5.0)
    world.press(1.0, 1.0, 1.0)
    world.status = {"scaled_by": by}
    world.outcome = Outcome.STANDBY
    world.run(ticks)
    taken_over(world, died())
    decision = world.tick()
    assert world.state.last_up_at == (START + 5.0 if held else None)
    assert decision.reason is Reason.HELD_COOLDOWN or not held
    assert world.state.changes == (((START + 5.0, 2),) if held and ticks else ())


def test_taking_it_in_twice_changes_nothing() -> None:
    world = World(P0, 4, at=START + 5.0)
    world.status = dict(OURS)
    world.tick()
    taken_over(world, died())
    once = world.state
    taken_over(world, died())
    assert (world.state.last_up_at, world.state.changes, world.state.owners) == (
        once.last_up_at,
        once.changes,
        once.owners,
    )
    assert once.changes == ((START + 5.0, 2),)


def test_a_memory_that_says_nothing_of_the_replicas_as_older_versions_wrote_it_says_nothing_of_steps() -> None:
    world = World(P0, 4)
    world.status = dict(OURS)
    world.tick()
    taken_over(world, replace(died(), owners=Owners()))
    assert world.state.last_up_at is None


def test_another_deployment_of_that_name_has_not_been_stepped() -> None:
    world = World(P0, 4)
    world.status = {**OURS, "uid": "another"}
    world.tick()
    taken_over(world, died())
    assert world.state.last_up_at is None
