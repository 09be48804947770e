"""The gates before every write: closed they let nothing through, and no write outlasts its permission."""

import asyncio

import pytest

from autoscaler.actuators.gate import FORBIDDEN_S, WRITE_S, GatedActuator, PatientActuator
from autoscaler.core.types import Action, Hold, Outcome, ScaleReplicas
from autoscaler.errors import ActuationError
from tests.fake_api import FakeClock

GROW = ScaleReplicas(seen=2, to=3)


class Pen:
    """`ports.Actuator` that remembers what it wrote. A fake: there is nothing it writes to."""

    def __init__(self, *, hangs: bool = False, error: ActuationError | None = None) -> None:
        self.written: list[Action] = []
        self.asked = 0
        self.closed = 0
        self.error = error
        self._hangs = hangs

    async def apply(self, action: Action) -> Outcome:
        """Write it down."""
        self.asked += 1
        if self._hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        self.written.append(action)
        return Outcome.APPLIED

    async def close(self) -> None:
        """Count it."""
        self.closed += 1


async def test_open_it_lets_through() -> None:
    pen = Pen()
    assert await GatedActuator(pen, lambda _for_s: True).apply(GROW) is Outcome.APPLIED
    assert pen.written == [GROW]


async def test_closed_it_lets_nothing_through() -> None:
    pen = Pen()
    assert await GatedActuator(pen, lambda _for_s: False).apply(GROW) is Outcome.STANDBY
    assert pen.written == []


@pytest.mark.parametrize("is_open", [True, False])
async def test_holding_needs_no_permission(is_open: bool) -> None:
    pen = Pen()
    assert await GatedActuator(pen, lambda _for_s: is_open).apply(Hold()) is Outcome.UNCHANGED
    assert pen.written == []


async def test_c106_a_write_that_could_end_after_the_deadline_is_not_begun() -> None:
    pen, left_s = Pen(), [WRITE_S - 0.001]
    gate = GatedActuator(pen, lambda for_s: for_s <= left_s[0])
    assert await gate.apply(GROW) is Outcome.STANDBY
    left_s[0] = WRITE_S
    assert await gate.apply(GROW) is Outcome.APPLIED
    assert pen.written == [GROW]


async def test_c106_permission_is_asked_for_anew_before_each_write() -> None:
    pen, answers = Pen(), [True, False, True]
    gate = GatedActuator(pen, lambda _for_s: answers.pop(0))
    assert [await gate.apply(GROW) for _ in range(3)] == [Outcome.APPLIED, Outcome.STANDBY, Outcome.APPLIED]


async def test_a_write_that_takes_too_long_is_given_up_and_its_fate_unknown() -> None:
    with pytest.raises(ActuationError) as raised:
        await GatedActuator(Pen(hangs=True), lambda _for_s: True, write_s=0.01).apply(GROW)
    assert (raised.value.reason, raised.value.detail) == ("unreachable", "no answer within 0.01 s")


async def test_a_refused_write_is_refused() -> None:
    with pytest.raises(ActuationError, match="conflict"):
        await GatedActuator(Pen(error=ActuationError("conflict")), lambda _for_s: True).apply(GROW)


async def test_closing_it_closes_what_writes() -> None:
    pen = Pen()
    await GatedActuator(pen, lambda _for_s: False).close()
    assert pen.closed == 1


async def test_c104_what_is_forbidden_is_tried_once_in_five_minutes() -> None:
    pen, clock = Pen(error=ActuationError("forbidden", "cannot patch")), FakeClock()
    actuator = PatientActuator(pen, clock)
    for _ in range(2):
        for _ in range(3):
            with pytest.raises(ActuationError) as caught:
                await actuator.apply(GROW)
            assert str(caught.value) == "forbidden: cannot patch"
            assert await actuator.apply(Hold()) is Outcome.UNCHANGED
            clock.at += (FORBIDDEN_S - 1.0) / 3
        clock.at += 1.0
    assert pen.asked == 2
    pen.error = None
    assert [await actuator.apply(GROW) for _ in range(2)] == [Outcome.APPLIED] * 2
    await actuator.close()
    assert pen.closed == 1


@pytest.mark.parametrize("reason", ["conflict", "throttled", "unreachable", "unauthorized", "invalid"])
async def test_any_other_refusal_may_pass_at_once(reason: str) -> None:
    pen = Pen(error=ActuationError(reason))
    actuator = PatientActuator(pen, FakeClock())
    for _ in range(2):
        with pytest.raises(ActuationError):
            await actuator.apply(GROW)
    assert pen.asked == 2
