"""What stands before the engines: clients with their patience and their one retry, and what routes their requests."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from operator import attrgetter
from random import Random
from typing import NamedTuple

from autoscaler.sim.engine import Engine, Request
from autoscaler.sim.ledger import Fate, Ledger


class Routing(StrEnum):
    """Who gets a request, of the replicas that take any."""

    LEAST_OUTSTANDING = "least-outstanding"
    ROUND_ROBIN = "round-robin"
    POWER_OF_TWO = "power-of-two"
    SHARED_QUEUE = "shared-queue"
    """A gateway keeps what no replica has a free slot for, and hands it out first come, first served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """What clients put up with.

    Args:
        ttft_timeout_s: one without its first token goes away after this long.
        total_timeout_s: one without its whole answer goes away after this long.
        retry_s: one whose request no replica took, or was lost with a replica, sends it once more after about this
            long; None for never. It has waited since its first attempt.
    """

    ttft_timeout_s: float = 60.0
    total_timeout_s: float = math.inf
    retry_s: float | None = None


Key = tuple[float, int, int]
"""What an engine knows a request by: its arrival there, prompt and answer."""


class _Attempt(NamedTuple):
    """A client's first or second try: when it was made, and the request as it was first sent."""

    at: float
    request: Request
    again: bool = False


class Front:
    """Sends requests to engines in order of time.

    Args:
        requests: in order of arrival, simulated seconds.
        slots: with a shared queue, how many requests a replica is given at once.
        chance: of the routing, and of when a retry comes.

    Attributes:
        ledger: what the engines note the end of a request in; a request counts there as its client sees it.
        serve: routes what is sent by a time [s] to engines: all that take requests, the same on the way.
        arrived: requests so far, without retries.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        ledger: Ledger,
        *,
        clients: Clients,
        routing: Routing,
        slots: int,
        chance: tuple[Random, Random],
    ) -> None:
        self.arrived = 0
        self._requests = iter(requests)
        self._next = next(self._requests, None)
        self._truth = ledger
        self._clients = clients
        self._slots = slots
        self._chance, self._backoff = chance
        self._turn = 0
        self._again: list[tuple[float, int, _Attempt]] = []
        self._in_flight: dict[Key, list[_Attempt]] = {}
        self._patience: deque[tuple[float, Key, _Attempt, Engine]] = deque()
        self._queue: deque[_Attempt] = deque()
        self._choose: Callable[[float, Sequence[Engine]], Engine] = {
            Routing.ROUND_ROBIN: self._round_robin,
            Routing.POWER_OF_TWO: self._power_of_two,
        }.get(routing, least_outstanding)
        self.serve: Callable[[Sequence[Engine], float], None] = self._serve_once
        self.ledger: Ledger = ledger
        if clients.retry_s is not None or clients.total_timeout_s < math.inf:
            self.serve = self._serve_again
        if routing is Routing.SHARED_QUEUE:
            self.serve = self._serve_queue
        if self.serve != self._serve_once:
            self.ledger = _FromFirst(self, ledger)

    @property
    def queued(self) -> int:
        """Requests that wait in the shared queue."""
        return len(self._queue)

    @property
    def over(self) -> bool:
        """Whether no request is still to be sent."""
        return self._next is None and not self._again and not self._queue

    def stop(self) -> None:
        """Send no more new requests."""
        self._next = None

    # -- sending -------------------------------------------------------------------------------------------------

    def _serve_once(self, engines: Sequence[Engine], until: float) -> None:
        """Route what is sent, each request once."""
        choose = self._choose
        while (request := self._next) is not None and request.arrival <= until:
            self._next = next(self._requests, None)
            self.arrived += 1
            arrival = request.arrival
            if not engines:
                self._note(request, math.nan, arrival, Fate.REFUSED)
            elif not choose(arrival, engines).submit(request):
                self._note(request, math.nan, arrival, Fate.TOO_LONG)

    def _serve_again(self, engines: Sequence[Engine], until: float) -> None:
        """Route what is sent, and what is sent once more."""
        while (attempt := self._take(until)) is not None:
            if engines:
                self._submit(attempt, self._choose(attempt.at, engines), attempt.at)
            else:
                self._conclude(attempt, math.nan, attempt.at, Fate.REFUSED)

    def _serve_queue(self, engines: Sequence[Engine], until: float) -> None:
        """Hand out what waits and what arrives, each replica up to its slots, as they become free."""
        now = -math.inf
        while True:
            self._expire(now)
            self._hand_out(engines, now)
            freed = min((engine.next_event for engine in engines), default=math.inf) if self._queue else math.inf
            attempt = self._take(min(until, freed))
            if attempt is not None:
                now = attempt.at
                self._queue.append(attempt)
            elif freed <= until:
                now = freed
                for engine in engines:
                    engine.run(now)
            else:
                break
        self._expire(until)

    def _hand_out(self, engines: Sequence[Engine], now: float) -> None:
        """Give what waits to the replicas with free slots."""
        while self._queue and engines:
            chosen = least_outstanding(now, engines)
            if chosen.outstanding >= self._slots:
                return
            attempt = self._queue.popleft()
            self._submit(attempt, chosen, now, attempt.at + self._clients.ttft_timeout_s)

    def _expire(self, now: float) -> None:
        """Let go of the clients in the queue that have waited too long."""
        patience_s = self._clients.ttft_timeout_s
        while self._queue and self._queue[0].at + patience_s <= now:
            attempt = self._queue.popleft()
            self._conclude(attempt, math.nan, attempt.at + patience_s, Fate.TIMED_OUT)

    def _take(self, until: float) -> _Attempt | None:
        """Return the next attempt made by `until`, and let go of who has waited too long for its answer before."""
        request = self._next
        arrival = request.arrival if request is not None else math.inf
        again = self._again[0][0] if self._again else math.inf
        self._give_up(min(arrival, again, until))
        if min(arrival, again) > until:
            return None
        if request is None or again < arrival:
            return heappop(self._again)[2]
        self._next = next(self._requests, None)
        self.arrived += 1
        return _Attempt(arrival, request)

    def _give_up(self, now: float) -> None:
        """Let clients go away whose answers are not whole in time; what they sent ends with the iteration under way."""
        while self._patience and self._patience[0][0] <= now:
            at, key, attempt, engine = self._patience.popleft()
            if attempt in self._in_flight.get(key, ()):
                engine.give_up(at, key)

    def _submit(self, attempt: _Attempt, engine: Engine, now: float, deadline: float | None = None) -> None:
        """Give an attempt to an engine."""
        sent = attempt.request._replace(arrival=now)
        key = sent[:3]
        self._in_flight.setdefault(key, []).append(attempt)
        if not engine.submit(sent, deadline):
            self.ended(key, math.nan, now, Fate.TOO_LONG)
        elif self._clients.total_timeout_s < math.inf:
            self._patience.append((attempt.at + self._clients.total_timeout_s, key, attempt, engine))

    # -- what becomes of a request -------------------------------------------------------------------------------

    def ended(self, key: Key, first_token: float, finish: float, fate: Fate) -> None:
        """Take note of the end of what an engine was given."""
        alike = self._in_flight[key]
        attempt = alike.pop()
        if not alike:
            del self._in_flight[key]
        self._conclude(attempt, first_token, finish, fate)

    def _conclude(self, attempt: _Attempt, first_token: float, finish: float, fate: Fate) -> None:
        """Note how an attempt ended; a client that may try again does so."""
        retry_s = self._clients.retry_s
        if retry_s is not None and not attempt.again and fate in (Fate.REFUSED, Fate.KILLED):
            at = finish + retry_s * self._backoff.uniform(0.5, 1.5)
            heappush(self._again, (at, self.arrived, _Attempt(at, attempt.request, again=True)))
        else:
            self._note(attempt.request, first_token, finish, fate)

    def _note(self, request: Request, first_token: float, finish: float, fate: Fate) -> None:
        self._truth.add(request.arrival, first_token, finish, request.prompt_tokens, request.output_tokens, fate)

    # -- routing -------------------------------------------------------------------------------------------------

    def _round_robin(self, _arrival: float, engines: Sequence[Engine]) -> Engine:
        self._turn += 1
        return engines[self._turn % len(engines)]

    def _power_of_two(self, arrival: float, engines: Sequence[Engine]) -> Engine:
        count = len(engines)
        if count == 1:
            return engines[0]
        one = int(self._chance.random() * count)
        other = (one + 1 + int(self._chance.random() * (count - 1))) % count
        return least_outstanding(arrival, (engines[one], engines[other]))


class _FromFirst(Ledger):
    """The ledger as engines see it where a request may reach them later than it was first sent."""

    def __init__(self, front: Front, ledger: Ledger) -> None:
        super().__init__(ledger.bin_s)
        self._front, self._behind = front, ledger

    def add(self, arrival: float, first: float, finish: float, prompt: int, output: int, fate: Fate) -> None:
        """Take note of an ended attempt."""
        self._front.ended((arrival, prompt, output), first, finish, fate)

    def add_run(self, first: float, slope: float, steps: int, batch: int) -> None:
        """Pass a run of iterations on."""
        self._behind.add_run(first, slope, steps, batch)


_outstanding = attrgetter("outstanding")


def least_outstanding(arrival: float, engines: Sequence[Engine]) -> Engine:
    """Return the engine with the fewest requests in flight at that time, the first of equals; there must be one."""
    for engine in engines:
        if engine.next_event <= arrival:
            engine.run(arrival)
    return min(engines, key=_outstanding)


def route(request: Request, engines: Sequence[Engine]) -> bool:
    """Give the request to the engine with the fewest in flight. False when there is none, or it could never fit."""
    return bool(engines) and least_outstanding(request.arrival, engines).submit(request)
