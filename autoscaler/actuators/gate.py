"""The gates that every write passes: not while another process leads, and not again and again what is forbidden."""

import asyncio
from collections.abc import Callable

from autoscaler.core.types import Action, Hold, Outcome
from autoscaler.errors import ActuationError
from autoscaler.ports import Actuator, Clock

WRITE_S = 6.0
"""The longest that one write may take: pods' marks before it, the request, and reading whether it took effect where it
got no answer.
"""

FORBIDDEN_S = 300.0
"""A write that is forbidden stays so until somebody grants the right: each attempt in vain is one in an audit log."""


class GatedActuator:
    """Passes an action on while it may be written.

    Args:
        inner: what writes.
        allowed: returns whether writing is allowed for so many seconds from now; asked right before each write.
        write_s: for so long it has to be allowed, and after it a write is given up.
    """

    def __init__(self, inner: Actuator, allowed: Callable[[float], bool], write_s: float = WRITE_S) -> None:
        self._inner = inner
        self._allowed = allowed
        self._write_s = write_s

    async def apply(self, action: Action) -> Outcome:
        """Return what became of it: STANDBY where it may not be written now.

        Raises ActuationError, also when the write was given up: its fate is unknown then.
        """
        if isinstance(action, Hold):
            return Outcome.UNCHANGED
        if not self._allowed(self._write_s):
            return Outcome.STANDBY
        try:
            async with asyncio.timeout(self._write_s):
                return await self._inner.apply(action)
        except TimeoutError as error:
            raise ActuationError("unreachable", f"no answer within {self._write_s:g} s") from error

    async def close(self) -> None:
        """Release the connections of what writes."""
        await self._inner.close()


class PatientActuator:
    """Passes an action on, unless the last one was forbidden less than five minutes ago."""

    def __init__(self, inner: Actuator, clock: Clock) -> None:
        self._inner = inner
        self._clock = clock
        self._forbidden: ActuationError | None = None
        self._again_at = 0.0

    async def apply(self, action: Action) -> Outcome:
        """Return what became of it. Raises ActuationError; in the five minutes the one that the server's answer was."""
        if isinstance(action, Hold):
            return Outcome.UNCHANGED
        if self._forbidden is not None and self._clock.now() < self._again_at:
            raise ActuationError(self._forbidden.reason, self._forbidden.detail)
        self._forbidden = None
        try:
            return await self._inner.apply(action)
        except ActuationError as error:
            if error.reason == "forbidden":
                self._forbidden, self._again_at = error, self._clock.now() + FORBIDDEN_S
            raise

    async def close(self) -> None:
        """Release the connections of what writes."""
        await self._inner.close()
