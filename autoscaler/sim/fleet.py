"""A Deployment of simulated replicas on virtual time: pods that start, serve, drain and go, and the truth about them.

The fleet stands behind the daemon's own ports: it is a Target to read, an Actuator to scale, it owns the Clock, and it
serves each pod's page over real HTTP.
"""

import asyncio
import contextlib
import math
import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autoscaler.core.types import Action, Drain, Hold, Outcome, Pod, PodPhase, TargetStatus
from autoscaler.errors import ActuationError
from autoscaler.sim.engine import Engine, Profile, Request
from autoscaler.sim.ledger import Fate, LatencyBin, Ledger
from autoscaler.sim.pages import Page
from autoscaler.sim.serve import PageServer

HOUR, MINUTE = 3600.0, 60.0
PENDING_S = 2.0
"""Scheduling and creating the container."""
PROBE_S = 5.0
"""Period of the readiness probe: a pod becomes ready on this grid."""
ROUTING_S = 1.5
"""From ready to the first routed request: endpoints have to travel."""
COLD_START_SIGMA = 0.25
_NAME_LETTERS = "bcdfghjklmnpqrstvwxz2456789"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the fleet behaves, beside its profile.

    Args:
        namespace, deployment: its name as a target.
        grace_s: a deleted pod has this long to drain; then its requests in flight fail.
        ttft_timeout_s: a client without its first token goes away after this long.
        bin_s: length of the bins of the exact latencies.
    """

    namespace: str = "demo"
    deployment: str = "chat"
    grace_s: float = 600.0
    ttft_timeout_s: float = 60.0
    bin_s: float = 300.0


class FleetSample(NamedTuple):
    """The truth at one moment: replicas ordered and ready, requests in flight, and of these running and waiting."""

    at: float
    ordered: int
    ready: int
    in_flight: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a run came to.

    Args:
        started_at: epoch seconds.
        duration_s: simulated so far.
        requests: that ended. attained: within both objectives. failed: timed out, refused or killed.
        ttft_s, tpot_s: the objectives.
        gpus: per replica.
        gpu_hours: from each pod's creation to its end.
        peak_replicas: the most that were ready at once.
        traffic: requests per second that arrived, span by span.
        bins: the exact latencies.
        traffic_span_s: the length of those spans.
    """

    started_at: float
    duration_s: float
    requests: int
    attained: int
    failed: int
    ttft_s: float
    tpot_s: float
    gpus: int
    gpu_hours: float
    peak_replicas: int
    traffic: tuple[float, ...]
    bins: tuple[LatencyBin, ...]
    traffic_span_s: float = MINUTE

    @property
    def attainment(self) -> float | None:
        """Share of the requests within both objectives; None without requests."""
        return self.attained / self.requests if self.requests else None

    @property
    def static_gpu_hours(self) -> float:
        """GPU-hours of a static fleet of `peak_replicas`."""
        return self.peak_replicas * self.gpus * self.duration_s / HOUR


@dataclass(slots=True, kw_only=True, eq=False)
class _Replica:
    """One pod and its engine. Times are simulated seconds; the future ones are already decided."""

    number: int
    name: str
    uid: str
    ip: str
    node: str
    created: float
    running: float
    ready: float
    engine: Engine
    page: Page
    deleted: float = math.inf
    cost: int | None = None

    def is_ready(self, now: float) -> bool:
        return self.ready <= now

    def takes_requests(self, now: float) -> bool:
        return self.ready + ROUTING_S <= now and self.deleted > now

    def next_change(self, now: float, grace_s: float) -> float:
        """Return the next moment at which something about the pod changes by itself."""
        times = (self.running, self.ready, self.ready + ROUTING_S, self.deleted + grace_s)
        return min((time for time in times if time > now), default=math.inf)


class Fleet:
    """The simulated Deployment: `ports.Target` and `ports.Actuator`.

    Requests go to the ready replica with the fewest in flight and stay in its queue. Without a ready replica they fail.

    Args:
        profile: model and hardware of every replica.
        requests: in order of arrival, simulated seconds.
        replicas: ready at the start.
        epoch: epoch seconds of simulated 0.
        rng: for names and cold starts.
    """

    def __init__(
        self,
        profile: Profile,
        requests: Iterable[Request],
        *,
        replicas: int,
        epoch: float,
        rng: np.random.Generator,
        settings: Settings | None = None,
    ) -> None:
        self.profile = profile
        self.epoch = epoch
        self.settings = settings or Settings()
        self.now = 0.0
        self.spec_replicas = replicas
        self.ledger = Ledger(self.settings.bin_s)
        self.samples: list[FleetSample] = []
        self._rng = rng
        self._uid = self._new_uid()
        self._revision = self._letters(10)
        self._requests = iter(requests)
        self._next = next(self._requests, None)
        self._made = 0
        self._gone_seconds = 0.0
        self._server: PageServer | None = None
        self._replicas = [self._create(warm=True) for _ in range(replicas)]

    # -- time ----------------------------------------------------------------------------------------------------

    def advance(self, until: float) -> None:
        """Let everything happen up to `until` (simulated seconds), and note a sample of it."""
        while self.now < until:
            stop = min(until, (len(self.ledger.itl_p99) + 1) * self.settings.bin_s)
            for replica in self._replicas:
                stop = min(stop, replica.next_change(self.now, self.settings.grace_s))
            self._serve_requests(stop)
            self.now = stop
            self._settle()
        self._sample()

    def _serve_requests(self, until: float) -> None:
        """Route what arrives by `until`; who takes requests does not change on the way."""
        engines = [replica.engine for replica in self._replicas if replica.takes_requests(self.now)]
        while (request := self._next) is not None and request.arrival <= until:
            self._next = next(self._requests, None)
            if not route(request, engines):
                arrival, prompt, output = request
                self.ledger.add(arrival, math.nan, arrival, prompt, output, Fate.REFUSED)

    def _settle(self) -> None:
        """Bring every engine up to now and let go of what has ended."""
        now = self.now
        for replica in self._replicas:
            replica.engine.advance(now)
        if now >= (len(self.ledger.itl_p99) + 1) * self.settings.bin_s:
            self.ledger.close_bin()
        for replica in [replica for replica in self._replicas if replica.deleted <= now]:
            self._drain(replica)

    def _drain(self, replica: _Replica) -> None:
        """Remove a deleted pod once it is empty, or its grace is over."""
        engine = replica.engine
        if engine.outstanding:
            if self.now < replica.deleted + self.settings.grace_s:
                return
            engine.kill(self.now)
        self._replicas.remove(replica)
        self._gone_seconds += max(replica.deleted, engine.idle_since) - replica.created

    def _sample(self) -> None:
        engines = self.engines()
        self.samples.append(
            FleetSample(
                at=self.now,
                ordered=self.spec_replicas,
                ready=sum(replica.is_ready(self.now) for replica in self._active()),
                in_flight=sum(engine.outstanding for engine in engines),
                running=sum(engine.running for engine in engines),
                waiting=sum(engine.waiting for engine in engines),
            )
        )

    # -- the Deployment ------------------------------------------------------------------------------------------

    def scale(self, replicas: int) -> None:
        """Set `spec.replicas`; pods are created or deleted at once, as the controllers would."""
        self.spec_replicas = replicas
        active = self._active()
        for _ in range(replicas - len(active)):
            self._replicas.append(self._create())
        for replica in sorted(active, key=self._deletion_rank)[: max(0, len(active) - replicas)]:
            replica.deleted = self.now
            self._drain(replica)

    def _deletion_rank(self, replica: _Replica) -> tuple[bool, bool, int, float, int]:
        """Return what orders the victims of a scale-down: pending first, then not ready, the cheapest, the newest."""
        running, ready = replica.running <= self.now, replica.is_ready(self.now)
        return running, ready, replica.cost or 0, -replica.ready if ready else 0.0, -replica.number

    def _active(self) -> list[_Replica]:
        return [replica for replica in self._replicas if replica.deleted == math.inf]

    def _create(self, *, warm: bool = False) -> _Replica:
        """Return a new pod; a warm one has been ready since before the start and costs from the start on."""
        number, self._made = self._made, self._made + 1
        load = float(self._rng.lognormal(math.log(self.profile.cold_start_s), COLD_START_SIGMA))
        created, running = self.now, self.now + PENDING_S
        ready = running + math.ceil(load / PROBE_S) * PROBE_S
        if warm:
            running, ready = -HOUR, -HOUR / 2
        return _Replica(
            number=number,
            name=f"{self.settings.deployment}-{self._revision}-{self._letters(5)}",
            uid=self._new_uid(),
            ip=f"127.10.{number // 250}.{number % 250 + 2}",  # .1 is where the port is reserved
            node=f"gpu-node-{number % 16 + 1}",
            created=created,
            running=running,
            ready=ready,
            engine=Engine(self.profile, self.ledger, self.settings.ttft_timeout_s),
            page=Page(self.profile, round(self.epoch + running, 2)),
        )

    def _letters(self, count: int) -> str:
        return "".join(_NAME_LETTERS[index] for index in self._rng.integers(0, len(_NAME_LETTERS), count))

    def _new_uid(self) -> str:
        return str(uuid.UUID(bytes=self._rng.bytes(16), version=4))

    # -- ports.Target and ports.Actuator -------------------------------------------------------------------------

    async def read(self) -> TargetStatus:
        """Return the Deployment and its pods as the API server would show them: times in whole seconds."""
        active = self._active()
        return TargetStatus(
            namespace=self.settings.namespace,
            name=self.settings.deployment,
            uid=self._uid,
            current_replicas=self.spec_replicas,
            status_replicas=len(active),
            ready_replicas=sum(replica.is_ready(self.now) for replica in active),
            updated_replicas=len(active),
            drain=Drain(grace_s=self.settings.grace_s, drain_s=self.settings.grace_s),
            pods=tuple(self._pod(replica) for replica in self._replicas),
        )

    def _pod(self, replica: _Replica) -> Pod:
        running, ready = replica.running <= self.now, replica.is_ready(self.now)
        evaluated = replica.ready if ready else replica.running
        return Pod(
            name=replica.name,
            uid=replica.uid,
            phase=PodPhase.RUNNING if running else PodPhase.PENDING,
            ready=ready,
            terminating=replica.deleted <= self.now,
            ip=replica.ip if running else "",
            node=replica.node,
            created_at=self._stamp(min(replica.created, replica.running)),
            ready_at=self._stamp(evaluated) if running else None,
            was_ready=ready,
            max_num_seqs=self.profile.max_num_seqs,
            revision=self._revision,
            deletion_cost=replica.cost,
        )

    def _stamp(self, at: float) -> float:
        return float(math.floor(self.epoch + at))

    async def apply(self, action: Action) -> Outcome:
        """Scale, if the Deployment still is what the action saw. Raises ActuationError, `conflict`, when it is not."""
        if isinstance(action, Hold):
            return Outcome.UNCHANGED
        if action.to < 0:
            raise ActuationError("invalid", f"replicas must not be negative: {action.to}")
        if action.seen != self.spec_replicas or action.uid not in ("", self._uid):
            raise ActuationError("conflict", f"replicas are {self.spec_replicas}, not {action.seen}")
        if action.to == self.spec_replicas:
            return Outcome.UNCHANGED
        costs = {one.uid: one.cost for one in action.costs}
        for replica in self._replicas:
            replica.cost = costs.get(replica.uid, replica.cost)
        self.scale(action.to)
        await self.follow()
        return Outcome.APPLIED

    async def close(self) -> None:
        """Hold nothing open: pages are served only inside `serve`."""

    # -- pages over HTTP -----------------------------------------------------------------------------------------

    def page(self, ip: str) -> str | None:
        """Return the page of the pod with that address; None when nothing listens there."""
        replica = next((replica for replica in self._replicas if replica.ip == ip), None)
        if replica is None or not replica.is_ready(self.now):
            return None
        return replica.page.render(replica.engine)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[int]:
        """Serve each pod's /metrics at its address, and give the port, one for all. A loading pod refuses connections.

        Raises AutoscalerError when an address of 127.10.0.0/16 cannot be listened on.
        """
        self._server = PageServer(self.page)
        try:
            port = await self._server.start()
            await self.follow()
            yield port
        finally:
            await self._server.close()
            self._server = None

    async def follow(self) -> None:
        """Open and close listeners, so that exactly the pods that have loaded are served."""
        if self._server is not None:
            await self._server.follow({replica.ip for replica in self._replicas if replica.is_ready(self.now)})

    # -- the truth -----------------------------------------------------------------------------------------------

    def engines(self) -> tuple[Engine, ...]:
        """Return the engines of all pods, the oldest pod's first."""
        return tuple(replica.engine for replica in self._replicas)

    @property
    def gpu_hours(self) -> float:
        """GPU-hours so far: from each pod's creation to its end, or to now."""
        living = sum(self.now - replica.created for replica in self._replicas)
        return (self._gone_seconds + living) * self.profile.gpus / HOUR

    def summary(self, *, ttft_s: float, tpot_s: float) -> RunSummary:
        """Return what the run came to so far, judged by these objectives."""
        return RunSummary(
            started_at=self.epoch,
            duration_s=self.now,
            requests=len(self.ledger),
            attained=int(np.count_nonzero(self.ledger.attained(ttft_s, tpot_s))),
            failed=self.ledger.failed(),
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            gpus=self.profile.gpus,
            gpu_hours=self.gpu_hours,
            peak_replicas=max((sample.ready for sample in self.samples), default=0),
            traffic=self.ledger.traffic(MINUTE, self.now),
            bins=self.ledger.bins(ttft_s, tpot_s),
        )


def route(request: Request, engines: Iterable[Engine]) -> bool:
    """Give the request to the engine with the fewest in flight, the oldest of equals. False when none takes it."""
    chosen: Engine | None = None
    arrival = request.arrival
    for engine in engines:
        if engine.next_event <= arrival:
            engine.run(arrival)
        if chosen is None or engine.outstanding < chosen.outstanding:
            chosen = engine
    return chosen is not None and chosen.submit(request)


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
