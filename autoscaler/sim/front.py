"""What stands before the engines: clients with their patience and their one retry, and what routes their requests."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from random import Random

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


class Front:
    """Sends requests to engines in order of time.

    Args:
        requests: in order of arrival, simulated seconds.
        slots: with a shared queue, how many requests a replica is given at once.
        chance: of the routing, and of when a retry comes.
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
        self._ledger = ledger
        self._clients = clients
        self._slots = slots
        self._chance, self._backoff = chance
        self._turn = 0
        self._again: list[tuple[float, int, Request]] = []  # when, number, the request as it was first sent
        # as sent, arrival and lengths: when it was first sent, and whether anew
        self._known: dict[tuple[float, int, int], list[tuple[float, bool]]] = {}
        self._queue: deque[Request] = deque()
        self._shared = routing is Routing.SHARED_QUEUE
        self._choose: Callable[[float, Sequence[Engine]], Engine] = {
            Routing.ROUND_ROBIN: self._round_robin,
            Routing.POWER_OF_TWO: self._power_of_two,
        }.get(routing, least_outstanding)
        self.ledger: Ledger = ledger
        if clients.retry_s is not None or self._shared:
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

    def serve(self, engines: Sequence[Engine], until: float) -> None:
        """Route what is sent by `until`; `engines`, all that take requests, are the same on the way."""
        if self._shared:
            self._serve_queue(engines, until)
            return
        while (request := self._take(until)) is not None:
            if engines:
                chosen = self._choose(request.arrival, engines)
                if not chosen.submit(request):
                    self.ended(request, math.nan, request.arrival, Fate.TOO_LONG)
            else:
                self.ended(request, math.nan, request.arrival, Fate.REFUSED)

    def _take(self, until: float) -> Request | None:
        """Return the next request sent by `until`, a retry as sent anew."""
        request = self._next
        if self._again:
            at, _, first = self._again[0]
            if request is None or at < request.arrival:
                if at > until:
                    return None
                heappop(self._again)
                return self._as_sent(first, at, again=True)
        if request is None or request.arrival > until:
            return None
        self._next = next(self._requests, None)
        self.arrived += 1
        return request

    def _as_sent(self, request: Request, at: float, *, again: bool) -> Request:
        """Return the request as it is sent at another time than the client's first attempt."""
        first, anew = self._forget(request)
        sent = request._replace(arrival=at)
        self._known.setdefault(sent[:3], []).append((first, anew or again))
        return sent

    def _forget(self, request: Request) -> tuple[float, bool]:
        """Return when it was first sent, and whether this is its second attempt."""
        known = self._known.get(request[:3])
        if known is None:
            return request.arrival, False
        first = known.pop()
        if not known:
            del self._known[request[:3]]
        return first

    # -- what becomes of a request -------------------------------------------------------------------------------

    def ended(self, request: Request, first_token: float, finish: float, fate: Fate) -> None:
        """Take note of an ended attempt; a client that may try again does so."""
        arrival, anew = self._forget(request)
        retry_s = self._clients.retry_s
        if retry_s is not None and not anew and fate in (Fate.REFUSED, Fate.KILLED):
            at = finish + retry_s * self._backoff.uniform(0.5, 1.5)
            heappush(self._again, (at, self.arrived, request._replace(arrival=arrival)))
            return
        self._ledger.add(arrival, first_token, finish, request.prompt_tokens, request.output_tokens, fate)

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

    def _serve_queue(self, engines: Sequence[Engine], until: float) -> None:
        """Hand out what waits and what arrives, each replica up to its slots, as they become free."""
        now = -math.inf
        while True:
            self._hand_out(engines, now)
            freed = min((engine.next_event for engine in engines), default=math.inf) if self._queue else math.inf
            request = self._take(min(until, freed))
            if request is not None:
                now = request.arrival
                self._queue.append(request)
            elif freed <= until:
                now = freed
                for engine in engines:
                    engine.run(now)
            else:
                break
        self._expire(until)

    def _hand_out(self, engines: Sequence[Engine], now: float) -> None:
        queue = self._queue
        if not queue:
            return
        self._expire(now)
        while queue:
            if not engines:
                return
            chosen = least_outstanding(now, engines)
            if chosen.outstanding >= self._slots:
                return
            request = queue.popleft()
            sent = self._as_sent(request, now, again=False) if request.arrival < now else request
            if not chosen.submit(sent, request.arrival + self._clients.ttft_timeout_s):
                self.ended(sent, math.nan, now, Fate.TOO_LONG)

    def _expire(self, now: float) -> None:
        """Let go of the clients in the queue that have waited too long."""
        patience_s = self._clients.ttft_timeout_s
        while self._queue and self._queue[0].arrival + patience_s <= now:
            request = self._queue.popleft()
            self.ended(request, math.nan, request.arrival + patience_s, Fate.TIMED_OUT)


class _FromFirst(Ledger):
    """The ledger as engines see it where a request may reach them later than it was first sent."""

    def __init__(self, front: Front, ledger: Ledger) -> None:
        super().__init__(ledger.bin_s)
        self._front, self._behind = front, ledger

    def add(self, arrival: float, first: float, finish: float, prompt: int, output: int, fate: Fate) -> None:
        """Take note of an ended attempt."""
        self._front.ended(Request(arrival, prompt, output), first, finish, fate)

    def add_run(self, first: float, slope: float, steps: int, batch: int) -> None:
        """Pass a run of iterations on."""
        self._behind.add_run(first, slope, steps, batch)


def least_outstanding(arrival: float, engines: Iterable[Engine]) -> Engine:
    """Return the engine with the fewest requests in flight at that time, the oldest of equals."""
    chosen: Engine | None = None
    fewest = math.inf
    for engine in engines:
        if engine.next_event <= arrival:
            engine.run(arrival)
        if engine.outstanding < fewest:
            chosen, fewest = engine, engine.outstanding
    if chosen is None:
        raise ValueError("no engine takes requests")
    return chosen


def route(request: Request, engines: Sequence[Engine]) -> bool:
    """Give the request to the engine with the fewest in flight. False when there is none, or it could never fit."""
    return bool(engines) and least_outstanding(request.arrival, engines).submit(request)
