"""Virtual time for the daemon's own loop: it passes while everybody sleeps."""

import asyncio

from autoscaler.sim.fleet import Fleet


class VirtualClock:
    """`ports.Clock` in lockstep with a fleet: sleeping is what makes simulated time pass, as fast as it can.

    Time stands still while anybody who is expected to sleep is awake, so what happens between two sleeps costs no
    simulated time, however long it takes. Of several sleepers the one with the earliest moment wakes first. At the end
    `done` is set, and whoever sleeps on is not woken again: cancel them then.

    Args:
        duration_s: simulated seconds until the end.
        sleepers: how many tasks share the clock, one for each policy.
    """

    def __init__(self, fleet: Fleet, duration_s: float, sleepers: int = 1) -> None:
        self.done = asyncio.Event()
        self._fleet = fleet
        self._duration_s = duration_s
        self._expected = sleepers
        self._sleeping: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        """Return simulated epoch seconds, in whole milliseconds."""
        return round(self._fleet.epoch + self._fleet.now, 3)

    async def sleep_until(self, at: float) -> None:
        """Return once the fleet has advanced to `at`."""
        if at <= self.now():
            await asyncio.sleep(0)
            return
        sleeper = (at, asyncio.get_running_loop().create_future())
        self._sleeping.append(sleeper)
        try:
            await self._pass_time()
            await sleeper[1]
        finally:
            if sleeper in self._sleeping:
                self._sleeping.remove(sleeper)

    async def _pass_time(self) -> None:
        """Once everybody sleeps, advance to the earliest moment and wake its sleeper."""
        if len(self._sleeping) < self._expected:
            return
        earliest = min(self._sleeping, key=lambda sleeper: sleeper[0])
        wanted = round(earliest[0] - self._fleet.epoch, 3)
        self._fleet.advance(min(wanted, self._duration_s))
        await self._fleet.follow()
        if wanted >= self._duration_s:
            self.done.set()
            return
        self._sleeping.remove(earliest)
        earliest[1].set_result(None)
        await asyncio.sleep(0)
