"""Annotations on the Deployment, and what the core makes of them."""

from dataclasses import replace

import pytest

from autoscaler.core.approval import APPROVE
from autoscaler.core.policy import ReplicaBounds
from autoscaler.core.types import Direction, Hold, Reason, ScaleReplicas
from autoscaler.sources.annotations import DIRECTION, PAUSED, PIN, Wishes, wishes_of
from tests.core.world import P0, World


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        pytest.param({}, Wishes(), id="none"),
        pytest.param({"autoscaler/other": "x", PAUSED: "false"}, Wishes(), id="not-paused"),
        pytest.param({PAUSED: "true"}, Wishes(paused="autoscaler/paused is set"), id="paused"),
        pytest.param({PAUSED: " True ", PIN: "4"}, Wishes(paused="autoscaler/paused is set"), id="paused-before-pin"),
        pytest.param({PIN: "4"}, Wishes(pin=4), id="pin"),
        pytest.param({DIRECTION: "up-only"}, Wishes(direction=Direction.UP_ONLY), id="up-only"),
        pytest.param({APPROVE: " up-to-4-t6jcww "}, Wishes(approved="up-to-4-t6jcww"), id="approve"),
        pytest.param({APPROVE: "x" * 1000}, Wishes(approved="x" * 64), id="approve-cut"),
        pytest.param({DIRECTION: "down-only"}, Wishes(direction=Direction.DOWN_ONLY), id="down-only"),
    ],
)
def test_wishes(annotations: dict[str, str], expected: Wishes) -> None:
    assert wishes_of(annotations) == expected


@pytest.mark.parametrize(
    "annotations",
    [
        pytest.param({PAUSED: "ture"}, id="paused"),
        pytest.param({PIN: "four"}, id="pin-word"),
        pytest.param({PIN: "0"}, id="pin-zero"),
        pytest.param({PIN: "-3"}, id="pin-negative"),
        pytest.param({PIN: "２"}, id="pin-other-digits"),
        pytest.param({DIRECTION: "up"}, id="direction"),
    ],
)
def test_what_cannot_be_understood_pauses_and_says_so(annotations: dict[str, str]) -> None:
    found = wishes_of(annotations)
    ((key, value),) = annotations.items()
    assert key in found.paused
    assert value in found.paused
    assert found.pin is None


def test_paused_writes_nothing_even_outside_the_bounds() -> None:
    world = World(replace(P0, replicas=ReplicaBounds(min=5, max=8)), 3)
    world.press(1.0, 1.0, 1.0)
    world.status = {"paused": "autoscaler/paused is set"}
    decisions = world.run(30)
    assert not world.writes
    assert {decision.reason for decision in decisions} == {Reason.PAUSED}
    assert decisions[-1].unblocks == ("held by paused: autoscaler/paused is set",)
    world.status = {}
    assert isinstance(world.tick().action, ScaleReplicas)


@pytest.mark.parametrize(
    ("pin", "to"), [pytest.param(6, 6, id="inside"), pytest.param(20, 8, id="above-max"), pytest.param(3, 3, id="here")]
)
def test_pin_holds_a_number_within_the_bounds_whatever_the_load(pin: int, to: int) -> None:
    world = World(P0, 3)
    world.press(0.0, 0.0, 0.0)
    world.status = {"pin": pin}
    decisions = world.run(40)
    assert world.replicas == to
    assert {decision.reason for decision in decisions[1:]} == {Reason.PINNED if pin == to else Reason.LIMITED_MAX}


def test_pin_needs_no_data() -> None:
    world = World(P0, 3)
    world.silent = {one.uid for one in world.pods}
    world.status = {"pin": 5}
    assert world.decide().action == ScaleReplicas(seen=3, to=5, uid="uid-of-target")


def test_after_a_pin_shrinking_waits_for_a_full_window() -> None:
    world = World(P0, 3)
    world.press(0.0, 0.0, 0.0)
    world.status = {"pin": 5}
    world.run(40)
    world.status = {}
    freed = world.at
    world.run(25)
    assert world.writes[-1][:2] == (freed + 300.0, 5)


@pytest.mark.parametrize(
    ("direction", "level"),
    [pytest.param(Direction.UP_ONLY, 0.0, id="up-only"), pytest.param(Direction.DOWN_ONLY, 1.0, id="down-only")],
)
def test_direction_forbids_one_way(direction: Direction, level: float) -> None:
    world = World(P0, 3)
    world.press(level, level, level)
    world.status = {"direction": direction}
    decisions = world.run(40)
    assert not world.writes
    assert decisions[-1].reason is Reason.LIMITED_DIRECTION
    assert isinstance(decisions[-1].action, Hold)
    other = 1.0 - level
    world.press(other, other, other)
    world.run(40)
    assert world.writes
