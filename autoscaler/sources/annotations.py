"""What a person says by annotations on the Deployment: pause, pin, up-only, down-only, and what they approve."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoscaler.core.approval import APPROVE
from autoscaler.core.types import Direction

PAUSED, PIN, DIRECTION = "autoscaler/paused", "autoscaler/pin", "autoscaler/direction"
LONGEST_ID = 64
TRUE, FALSE = frozenset({"true", "yes", "on", "1"}), frozenset({"false", "no", "off", "0", ""})


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The annotations' meaning; see the fields of `TargetStatus`."""

    paused: str = ""
    pin: int | None = None
    direction: Direction = Direction.BOTH
    approved: str = ""


def wishes_of(annotations: Mapping[str, Any]) -> Wishes:
    """Return what the annotations ask for.

    One that cannot be understood pauses the target and says so: a person wanted something, and guessing wrong writes.
    But for an approval: one of what is not proposed, or not any more, approves nothing.
    """
    paused, pin, direction = (str(annotations.get(key, "")).strip() for key in (PAUSED, PIN, DIRECTION))
    if paused.lower() in TRUE:
        return Wishes(paused=f"{PAUSED} is set")
    if paused.lower() not in FALSE:
        return Wishes(paused=f'{PAUSED} is {_shown(paused)}: say "true" or "false"')
    if pin and not (pin.isascii() and pin.isdecimal() and int(pin) > 0):
        return Wishes(paused=f"{PIN} is {_shown(pin)}: say a number of replicas, at least 1")
    if direction not in ("", *Direction):
        return Wishes(paused=f"{DIRECTION} is {_shown(direction)}: say {' or '.join(tuple(Direction)[1:])}")
    return Wishes(
        pin=int(pin) if pin else None,
        direction=Direction(direction or Direction.BOTH),
        approved=str(annotations.get(APPROVE, "")).strip()[:LONGEST_ID],
    )


def _shown(text: str) -> str:
    return repr(text[:40])
