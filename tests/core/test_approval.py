"""Propose mode: what waits, what is approved by what, and when a proposal is withdrawn."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from autoscaler.core.memory import memory_from_plain, memory_of, memory_to_plain, recall
from autoscaler.core.policy import Approval, Fallback, Schedule
from autoscaler.core.state import State
from autoscaler.core.types import Decision, Hold, Outcome, Reason, ScaleReplicas, Standing
from tests.core.world import P0, START, World

POLICY = replace(P0, approval=Approval(required=True, expiry_s=600.0))


def standing_of(decision: Decision) -> Standing:
    standing = decision.proposal.standing
    assert standing is not None
    return standing


def pressed(replicas: int = 2, policy: object = POLICY) -> World:
    """Return a world that asks for two replicas more on every tick."""
    world = World(policy, replicas)  # type: ignore[arg-type]
    world.press(1.0, 1.0, 1.0)
    return world


def calm(world: World) -> None:
    world.press(0.5, 0.5, 0.5)


def until_proposed(world: World) -> Decision:
    """Return the first decision that waits."""
    ticks = (world.tick() for _ in range(60))
    return next(one for one in ticks if one.reason is Reason.AWAITING_APPROVAL)


def approve(world: World, name: str) -> None:
    world.status = {**world.status, "approved": name}


@pytest.mark.parametrize(
    ("standing", "expected"),
    [
        pytest.param(Standing(up=True, to=4, made_at=START, expires_at=0.0, wished_at=0.0), "up-to-4-t6jcww", id="up"),
        pytest.param(
            Standing(up=False, to=1, made_at=START + 0.999, expires_at=0.0, wished_at=0.0),
            "down-to-1-t6jcww",
            id="down",
        ),
        pytest.param(
            Standing(up=True, to=12, made_at=START + 1.0, expires_at=0.0, wished_at=0.0), "up-to-12-t6jcwx", id="later"
        ),
        pytest.param(Standing(up=True, to=2, made_at=0.5, expires_at=0.0, wished_at=0.0), "up-to-2-0", id="at zero"),
    ],
)
def test_an_id_says_what_and_when(standing: Standing, expected: str) -> None:
    assert standing.id == expected
    assert int(standing.id.rpartition("-")[2], 36) == int(standing.made_at)


def test_nothing_is_done_without_approval_and_the_decision_says_what_waits() -> None:
    world = pressed()
    decisions = world.run(8)
    assert {(type(one.action), one.reason) for one in decisions} == {(Hold, Reason.AWAITING_APPROVAL)}
    (name,) = {standing_of(one).id for one in decisions}
    assert name.startswith("up-to-4-")
    assert decisions[-1].proposal.steps[-1].detail == f"approve {name} within 495s"
    assert decisions[-1].unblocks == (f"up to 4: waits for awaiting_approval (approve {name} within 495s)",)
    assert world.state.last_up_at is None


def test_what_is_approved_is_done_once() -> None:
    world = pressed()
    approve(world, standing_of(world.tick()).id)
    done = world.tick()
    assert done.action == ScaleReplicas(seen=2, to=4, uid="uid-of-target")
    assert done.reason is Reason.UP_SCORE
    assert world.state.standing is None
    after = world.run(20)  # the annotation is still there
    assert {type(one.action) for one in after} == {Hold}
    assert [one.reason for one in after[:3]] == [Reason.HELD_COOLDOWN] * 3
    assert standing_of(after[-1]).to == 6
    assert standing_of(after[-1]).id != standing_of(done).id


def test_another_id_approves_nothing() -> None:
    world = pressed()
    for name in ("", "yes", "up-to-4", "up-to-4-0"):
        approve(world, name)
        assert world.tick().reason is Reason.AWAITING_APPROVAL


def test_a_wish_that_grows_keeps_the_proposal_and_no_more_than_it_is_done() -> None:
    world = World(replace(POLICY, scale_up=replace(P0.scale_up, max_step=None)), 2)
    world.press(0.7, 0.7, 0.7)
    first = standing_of(world.tick())
    assert first.to == 3
    world.press(1.0, 1.0, 1.0)
    grown = world.tick()
    assert (grown.proposal.steps[-1].before, standing_of(grown).id) == (4, first.id)
    approve(world, first.id)
    done = world.tick()
    assert (done.proposal.current, done.proposal.replicas) == (2, 3)
    assert [(step.rule, step.before, step.after) for step in done.proposal.steps][-1] == (
        Reason.AWAITING_APPROVAL,
        4,
        3,
    )


def test_of_what_is_approved_no_more_than_the_present_wish_is_done() -> None:
    world = World(replace(POLICY, scale_up=replace(P0.scale_up, max_step=None)), 2)
    world.press(1.0, 1.0, 1.0)
    first = standing_of(world.tick())
    world.press(0.7, 0.7, 0.7)
    world.run(12)  # until the forecaster believes it
    approve(world, first.id)
    done = world.tick()
    assert first.to > done.proposal.replicas > 2


def test_an_expired_one_is_replaced_and_its_id_approves_nothing() -> None:
    world = pressed()
    first = standing_of(world.tick())
    world.run(39)
    assert standing_of(world.tick()).id != first.id  # 600 s later
    approve(world, first.id)
    assert world.tick().reason is Reason.AWAITING_APPROVAL
    assert standing_of(world.tick()).made_at == first.expires_at


def test_it_is_withdrawn_when_the_wish_has_ended_for_a_minute() -> None:
    world = pressed()
    first = standing_of(world.tick())
    calm(world)
    quiet = world.run(8)
    assert [one.proposal.standing is not None for one in quiet] == [True] * 4 + [False] * 4
    assert {one.reason for one in quiet} & {Reason.AWAITING_APPROVAL} == set()
    approve(world, first.id)
    world.press(1.0, 1.0, 1.0)
    again = world.tick()
    assert (again.reason, again.action) == (Reason.AWAITING_APPROVAL, Hold())


def test_a_short_doubt_keeps_it_and_nothing_unwished_is_done() -> None:
    world = pressed()
    first = standing_of(world.tick())
    calm(world)
    approve(world, first.id)
    assert {type(one.action) for one in world.run(2)} == {Hold}
    world.press(1.0, 1.0, 1.0)
    assert standing_of(world.tick()).id == first.id
    assert world.writes


def test_a_wish_that_turns_round_replaces_it() -> None:
    world = World(POLICY, 4)
    world.press(0.1, 0.1, 0.1)
    down = until_proposed(world)
    assert standing_of(down).id.startswith("down-to-3-")
    world.press(1.0, 1.0, 1.0)
    up = world.tick()
    assert standing_of(up).id.startswith("up-to-6-")
    approve(world, standing_of(down).id)
    assert world.tick().action == Hold()


def test_a_step_down_waits_too() -> None:
    world = World(POLICY, 4)
    world.press(0.1, 0.1, 0.1)
    down = until_proposed(world)
    assert down.unblocks[0].startswith("down to 3: waits for awaiting_approval")
    approve(world, standing_of(down).id)
    done = world.tick()
    assert (done.reason, world.replicas) == (Reason.DOWN_SCORE, 3)


@pytest.mark.parametrize("replicas", [4, 5])
def test_what_somebody_did_meanwhile_is_not_done_again(replicas: int) -> None:
    world = pressed()
    first = standing_of(world.tick())
    world.scale(replicas)
    approve(world, first.id)
    after = world.tick()
    assert after.action == Hold()
    assert (standing_of(after).to, standing_of(after).made_at) == (replicas + 2, START + 15.0)


def test_the_way_back_into_bounds_waits_and_bounds_that_move_replace_it() -> None:
    night = Schedule(name="night", cron="0 1 * * *", duration_s=3600.0, min=5, max=6)
    world = World(replace(POLICY, replicas=replace(P0.replicas, min=3), schedules=(night,)), 1)
    calm(world)
    first = world.tick()
    assert (first.reason, standing_of(first).to) == (Reason.AWAITING_APPROVAL, 3)
    world.schedules = ("night",)
    approve(world, standing_of(first).id)
    moved = world.tick()
    assert (moved.action, standing_of(moved).to) == (Hold(), 5)
    approve(world, standing_of(moved).id)
    done = world.tick()
    assert (done.reason, done.action) == (Reason.UP_BOUNDS, ScaleReplicas(seen=1, to=5, uid="uid-of-target"))


def test_the_fallback_waits_too() -> None:
    world = World(replace(POLICY, fallback=Fallback(replicas=5, after=3)), 2)
    calm(world)
    world.run(4)
    world.silent = {one.uid for one in world.pods}
    world.samples = {}
    waits = world.run(5)[-1]
    assert (waits.reason, standing_of(waits).to) == (Reason.AWAITING_APPROVAL, 5)
    approve(world, standing_of(waits).id)
    assert world.tick().reason is Reason.UP_FALLBACK


def test_a_pin_is_a_persons_wish_and_needs_no_approval() -> None:
    world = pressed()
    world.tick()
    world.status = {"pin": 3}
    done = world.tick()
    assert (done.reason, world.replicas, world.state.standing) == (Reason.PINNED, 3, None)


def test_a_pause_withdraws_it() -> None:
    world = pressed()
    first = standing_of(world.tick())
    world.status = {"paused": "autoscaler/paused is set"}
    assert world.tick().proposal.standing is None
    world.status = {}
    assert standing_of(world.tick()).id != first.id


@pytest.mark.parametrize(
    ("outcome", "again"),
    [
        pytest.param(Outcome.SIMULATED, Reason.HELD_COOLDOWN, id="a dry run spends it as well"),
        pytest.param(Outcome.FAILED, Reason.UP_SCORE, id="a write that fails is tried again"),
        pytest.param(Outcome.STANDBY, Reason.UP_SCORE, id="a standby does not spend it"),
    ],
)
def test_what_becomes_of_it(outcome: Outcome, again: Reason) -> None:
    world = pressed()
    world.outcome = outcome
    approve(world, standing_of(world.tick()).id)
    assert world.tick().reason is Reason.UP_SCORE
    assert world.tick().reason is again


def test_without_the_key_nothing_waits() -> None:
    world = World(P0, 2)
    world.press(1.0, 1.0, 1.0)
    first = world.tick()
    assert (first.reason, first.proposal.standing) == (Reason.UP_SCORE, None)


# --- takeover -------------------------------------------------------------------------------------------------------


def taken_over(world: World, after_s: float) -> State:
    """Return the state of a fresh process that takes the world's memory in, by way of its plain form."""
    memory = memory_of(world.policy, world.state)
    assert memory is not None
    known = memory_from_plain(memory_to_plain(memory))
    return recall(world.policy, State(), known, world.at + after_s)


def test_the_next_leader_knows_what_was_proposed() -> None:
    world = pressed()
    first = standing_of(world.tick())
    world.state = taken_over(world, 0.0)
    approve(world, first.id)
    done = world.tick()
    assert (standing_of(done).id, world.replicas) == (first.id, 4)


@pytest.mark.parametrize(
    ("after_s", "made_s"),
    [pytest.param(30.0, 0.0, id="it stands"), pytest.param(1000.0, 15.0, id="it has expired: its own")],
)
def test_of_two_proposals_the_one_that_was_told_counts(after_s: float, made_s: float) -> None:
    world = pressed()
    world.tick()
    memory = memory_of(world.policy, world.state)
    assert memory is not None
    own = replace(world.state, standing=replace(standing_of(world.decide()), made_at=START + 15.0))
    known = recall(world.policy, own, memory, START + after_s)
    assert known.standing is not None
    assert known.standing.made_at == START + made_s
    assert recall(world.policy, known, memory, START + after_s).standing == known.standing


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda plain: plain | {"to": "four"}, id="a word"),
        pytest.param(lambda plain: plain | {"made_at": None}, id="no time"),
        pytest.param(lambda plain: [plain], id="a list"),
    ],
)
def test_a_damaged_one_is_refused(damage: Callable[[object], object]) -> None:
    world = pressed()
    world.tick()
    memory = memory_of(world.policy, world.state)
    assert memory is not None
    plain = memory_to_plain(memory)
    with pytest.raises(ValueError, match="is no"):
        memory_from_plain(plain | {"standing": damage(plain["standing"])})
