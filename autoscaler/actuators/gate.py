"""The gate that every write passes: nothing is written by a process that does not lead."""

import asyncio
from collections.abc import Callable

from autoscaler.core.types import Action, Hold, Outcome
from autoscaler.errors import ActuationError
from autoscaler.ports import Actuator

WRITE_S = 6.0
"""The longest that one write may take: the request, and reading whether it took effect where it got no answer."""


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
