"""The system clock: wall time taken once, then carried by the monotonic clock."""

import asyncio
import time


class SystemClock:
    """Epoch seconds that never step: an NTP correction moves logs elsewhere, not our cooldowns."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        """Return epoch seconds, in whole milliseconds."""
        return round(self._offset + time.monotonic(), 3)

    async def sleep_until(self, at: float) -> None:
        """Sleep until `now()` reaches `at`."""
        delay = at - self.now()
        if delay > 0:
            await asyncio.sleep(delay)
