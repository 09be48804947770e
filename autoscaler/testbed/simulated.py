"""Engines for the fake kubelet that are simulated exactly, in real time, and the traffic that they share.

Load spreads over the pods that have loaded and do not end, queues build where there are too few of them, and latency
follows. Requests never leave this process: no client and no gateway is there, only when each arrives and its lengths.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable

from autoscaler.sim.engine import Engine, Request
from autoscaler.sim.front import route
from autoscaler.sim.ledger import Fate, Ledger
from autoscaler.sim.pages import Page
from autoscaler.sim.profile import Profile
from autoscaler.testbed.engine import Load

STEP_S = 0.05
TTFT_TIMEOUT_S = 60.0
OBEYED = frozenset({"hang", "health"})


class SimulatedEngine:
    """One pod's engine; a `testbed.engine.Engine`. Of a load it takes `hang` and `health`, the rest is simulated."""

    def __init__(self, traffic: "Traffic", profile: Profile, exact: Engine) -> None:
        self.model = profile.model
        self.load = Load()
        self.exact = exact
        self._traffic = traffic
        self._page = Page(profile, round(time.time(), 2))

    def change(self, **numbers: float) -> None:
        """Set `hang` or `health`. Raises TypeError for anything else."""
        if not numbers.keys() <= OBEYED:
            raise TypeError(f"{sorted(numbers.keys() - OBEYED)} cannot be set: it is simulated")
        for name, number in numbers.items():
            setattr(self.load, name, float(number))

    def page(self) -> str:
        """Return the page as it reads now."""
        self._traffic.advance()
        return self._page.render(self.exact)

    async def drain(self, usual_s: float) -> None:
        """Return once nothing is in flight."""
        self._traffic.leave(self)
        while self.exact.outstanding:
            await asyncio.sleep(STEP_S)
            self._traffic.advance()

    def close(self) -> None:
        """End; what is still in flight has failed."""
        self._traffic.forget(self)


class Traffic:
    """All the engines of one Deployment, and the requests that go to the one with the fewest in flight.

    A request stays in the queue that it was given to, and fails where no engine takes requests.

    Args:
        requests: in order of arrival, seconds since `begin`.
        bin_s: length of the bins of the exact latencies.
        now: seconds, never going back.

    Attributes:
        ledger: how each request fared.
        at: up to when everything has happened [s].
        arrived: requests so far.
    """

    def __init__(
        self,
        profile: Profile,
        requests: Iterable[Request],
        *,
        bin_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.profile = profile
        self.ledger = Ledger(bin_s)
        self.at = 0.0
        self._requests = iter(requests)
        self._next = next(self._requests, None)
        self._now = now
        self._began = math.inf
        self.arrived = 0
        self._taking: list[SimulatedEngine] = []
        self._living: list[SimulatedEngine] = []

    def begin(self) -> None:
        """Let the first second begin now."""
        self._began = self._now()

    def engine(self) -> SimulatedEngine:
        """Return a new engine that takes requests from now on."""
        self.advance()
        one = SimulatedEngine(self, self.profile, Engine(self.profile, self.ledger, TTFT_TIMEOUT_S))
        self._taking.append(one)
        self._living.append(one)
        return one

    def leave(self, engine: SimulatedEngine) -> None:
        """Give an engine no more requests."""
        self.advance()
        if engine in self._taking:
            self._taking.remove(engine)

    def forget(self, engine: SimulatedEngine) -> None:
        """Let an engine end with what it has in flight."""
        self.leave(engine)
        if engine in self._living:
            self._living.remove(engine)
            engine.exact.kill(self.at)

    async def run(self) -> None:
        """Keep up with the time, for ever."""
        while True:
            self.advance()
            await asyncio.sleep(STEP_S)

    def advance(self) -> None:
        """Let everything happen that is due by now."""
        until = max(self.at, self._now() - self._began)
        while self.at < until:
            edge = (len(self.ledger.itl_p99) + 1) * self.ledger.bin_s
            self.at = min(until, edge)
            self._route()
            for engine in self._living:
                engine.exact.advance(self.at)
            if self.at >= edge:
                self.ledger.close_bin()

    def _route(self) -> None:
        engines = [engine.exact for engine in self._taking]
        while (request := self._next) is not None and request.arrival <= self.at:
            self._next = next(self._requests, None)
            self.arrived += 1
            if not route(request, engines):
                arrival, prompt, output, _ = request
                self.ledger.add(arrival, math.nan, arrival, prompt, output, Fate.REFUSED)

    @property
    def in_flight(self) -> int:
        """Requests in queues and batches."""
        return sum(engine.exact.outstanding for engine in self._living)
