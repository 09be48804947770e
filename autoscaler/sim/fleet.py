"""A Deployment of simulated replicas on virtual time: pods that start, serve, drain and go, and the truth about them.

The fleet stands behind the daemon's own ports: it is a Target to read, an Actuator to scale, it owns the Clock, and it
serves each pod's page over real HTTP. What the pages say it also gives in parsed form, without HTTP.
"""

import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from autoscaler.core.types import (
    WHOLE_PAGE,
    Action,
    Drain,
    Gap,
    GapReason,
    Hold,
    Limits,
    Outcome,
    Pod,
    PodBatching,
    PodLimits,
    PodPhase,
    Reading,
    RollOut,
    Sample,
    SetBatching,
    TargetStatus,
)
from autoscaler.errors import ActuationError
from autoscaler.sim.chance import Chance
from autoscaler.sim.engine import Engine, Request
from autoscaler.sim.faults import Faults, Symptom
from autoscaler.sim.front import Clients, Front, Routing
from autoscaler.sim.ledger import LatencyBin, Ledger
from autoscaler.sim.pages import Page
from autoscaler.sim.profile import Profile
from autoscaler.sim.serve import PageServer
from autoscaler.sim.table import GAUGES, Line, Table, again, read_engine, without_gauges

HOUR, MINUTE = 3600.0, 60.0
PENDING_S = 2.0
"""Scheduling and creating the container."""
ROUTING_S = 1.5
"""From ready to the first routed request: endpoints have to travel."""
NO_FAULTS = Faults()
DRAIN_LOOK_S = 1.0
FAR = 1e12
"""Seconds, beyond any run."""
LOADING = "refused the connection"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the fleet behaves, beside its profile.

    Args:
        namespace, deployment: its name as a target.
        grace_s: a deleted pod has this long to drain; then its requests in flight fail.
        clients: what those who send the requests put up with.
        routing: who gets a request.
        slots: with a shared queue, how many requests a replica is given at once; by default its `max_num_seqs`.
        cold_start_sigma: of the lognormal time to load, around the profile's median, where the profile has none.
        probe_s: period of the readiness probe: a pod becomes ready on this grid.
        node_probability: how often a new pod finds no free node and waits for one to be provisioned.
        node_s: how long that takes, evenly between the two.
        quota: how many pods find a node at all; the others are unschedulable until one of these goes. None for any.
        scrape_s: each pod's page is read on a grid of its own with this period, as a Prometheus server would; None
            reads all of them at each tick, as the daemon does.
        bin_s: length of the bins of the exact latencies.
    """

    namespace: str = "demo"
    deployment: str = "chat"
    grace_s: float = 600.0
    clients: Clients = field(default_factory=Clients)
    routing: Routing = Routing.LEAST_OUTSTANDING
    slots: int | None = None
    cold_start_sigma: float = 0.25
    probe_s: float = 5.0
    node_probability: float = 0.0
    node_s: tuple[float, float] = (180.0, 600.0)
    quota: int | None = None
    scrape_s: float | None = None
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
        requests: that ended. attained: within both objectives. failed: all the others that got no whole answer.
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
    """One pod and its engine. Times are simulated seconds.

    Args:
        scheduled: since when it has a node; infinite while it has none.
        load_s: how long its model takes to load.
        running: its container is there. ready: its Ready condition. routed: it is sent requests.
        was_ready: it was ready before. changed: when its Ready condition last changed; NaN before it was evaluated.
        lot: its place in [0, 1), for what happens to some pods only.
        life: changes when what is planned for it no longer holds.
        line: its page as it was last read. symptom: what was wrong with reading it then.
        told: the batching limits that its engine was told, and told again after a restart. generation: of these.
    """

    number: int
    name: str
    uid: str
    ip: str
    node: str
    created: float
    load_s: float
    lot: float
    engine: Engine
    page: Page
    started_at: float
    scheduled: float = math.inf
    running: bool = False
    ready: bool = False
    routed: bool = False
    was_ready: bool = False
    changed: float = math.nan
    deleted: float = math.inf
    restarts: int = 0
    cost: int | None = None
    life: int = 0
    line: Line | None = None
    symptom: Symptom | None = None
    told: Limits | None = None
    generation: int = 0


_Event = Callable[[_Replica], None]


class Fleet:
    """The simulated Deployment: `ports.Target` and `ports.Actuator`.

    A request stays in the queue that it was given to. Without a ready replica it fails, unless its client tries again.

    Args:
        profile: model and hardware of every replica.
        requests: in order of arrival, simulated seconds.
        replicas: ready at the start.
        epoch: epoch seconds of simulated 0.
        rng: for names, cold starts and all other chance.
        faults: what goes wrong.
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
        faults: Faults = NO_FAULTS,
    ) -> None:
        self.profile = profile
        self.epoch = epoch
        self.settings = settings or Settings()
        self.faults = faults
        measured = profile.cold_start_sigma
        self._sigma = self.settings.cold_start_sigma if measured is None else measured
        self.now = 0.0
        self.spec_replicas = replicas
        self.ledger = Ledger(self.settings.bin_s)
        self.samples: list[FleetSample] = []
        self._chance = Chance(rng)
        self._uid = self._chance.uid()
        self._revision = self._chance.letters(10)
        self._front = Front(
            requests,
            self.ledger,
            clients=self.settings.clients,
            routing=self.settings.routing,
            slots=self.settings.slots or profile.max_num_seqs,
            chance=(self._chance.routing, self._chance.backoff),
        )
        self._made = 0
        self._gone_seconds = 0.0
        self._server: PageServer | None = None
        self._table = Table()
        self._status: TargetStatus | None = None
        self._events: list[tuple[float, int, _Replica, int, _Event]] = []
        self._planned = 0
        self._replicas: list[_Replica] = []
        for _ in range(replicas):
            self._add_warm()

    # -- time ----------------------------------------------------------------------------------------------------

    def advance(self, until: float) -> None:
        """Let everything happen up to `until` (simulated seconds), and note a sample of it."""
        while self.now < until:
            edge = (len(self.ledger.itl_p99) + 1) * self.settings.bin_s
            stop = min(until, edge, self._events[0][0] if self._events else math.inf, self._next_look())
            self._front.serve([one.engine for one in self._replicas if one.routed], stop)
            self.now = stop
            if stop >= edge:
                self._bring_up()
                self.ledger.close_bin()
            self._happen()
            if self.settings.quota is not None:
                self._end_drains()
        self._bring_up()
        self._end_drains()
        self._sample()

    def _next_look(self) -> float:
        """Return when to see whether a drain has ended, where another pod waits for its node."""
        if self.settings.quota is None or len(self._active()) == len(self._replicas):
            return math.inf
        return self.now + DRAIN_LOOK_S

    def _end_drains(self) -> None:
        """Remove the deleted pods that are empty."""
        for replica in [one for one in self._replicas if one.deleted <= self.now]:
            replica.engine.advance(self.now)
            self._let_go(replica)

    def _bring_up(self) -> None:
        """Bring every engine up to now."""
        for replica in self._replicas:
            replica.engine.advance(self.now)

    def finish(self) -> None:
        """Let the requests in flight end, as if nothing else happened any more; time and GPU-hours stand still.

        The fleet is at its end then.
        """
        self._front.stop()
        while True:
            self._front.serve([one.engine for one in self._replicas if one.routed], FAR)
            for replica in self._replicas:
                replica.engine.run(FAR)
            if self._front.over:
                return

    @property
    def over(self) -> bool:
        """Whether no request is still to come."""
        return self._front.over

    def _plan(self, at: float, replica: _Replica, event: _Event) -> None:
        """Let something happen to a pod, unless its life takes another turn before."""
        self._planned += 1
        heappush(self._events, (at, self._planned, replica, replica.life, event))

    def _happen(self) -> None:
        """Let happen what is due."""
        events = self._events
        while events and events[0][0] <= self.now:
            _, _, replica, life, event = heappop(events)
            if life == replica.life:
                event(replica)

    def _sample(self) -> None:
        in_flight = running = waiting = 0
        for replica in self._replicas:
            engine = replica.engine
            in_flight += engine.outstanding
            running += engine.running
            waiting += engine.waiting
        self.samples.append(
            FleetSample(
                at=self.now,
                ordered=self.spec_replicas,
                ready=sum(replica.ready for replica in self._active()),
                in_flight=in_flight + self._front.queued,
                running=running,
                waiting=waiting,
            )
        )

    # -- the life of a pod ---------------------------------------------------------------------------------------

    def _new(self) -> _Replica:
        """Return a new pod that has no node yet."""
        number, self._made = self._made, self._made + 1
        settings = self.settings
        replica = _Replica(
            number=number,
            name=f"{settings.deployment}-{self._revision}-{self._chance.letters(5)}",
            uid=self._chance.uid(),
            ip=f"127.10.{number // 250}.{number % 250 + 2}",  # .1 is where the port is reserved
            node=f"gpu-node-{number % 16 + 1}",
            created=self.now,
            load_s=self._chance.start_s(self.profile.cold_start_s, self._sigma),
            lot=self._chance.lot(),
            engine=self._engine(),
            page=Page(self.profile, 0.0),
            started_at=0.0,
        )
        self._replicas.append(replica)
        self._status = None
        return replica

    def _engine(self) -> Engine:
        return Engine(self.profile, self._front.ledger, self.settings.clients.ttft_timeout_s)

    def _add_warm(self) -> None:
        """Add a pod that has been ready since before the start; it costs from the start on."""
        replica = self._new()
        replica.scheduled = self.now
        replica.created = -HOUR
        replica.running = replica.ready = replica.routed = replica.was_ready = True
        replica.changed = -HOUR / 2
        self._start_process(replica, -HOUR)
        self._expect_life(replica)
        self._scrape_from_now_on(replica)

    def _add(self) -> None:
        """Add a pod that loads, once it has a node."""
        replica = self._new()
        wait_s = self._chance.node_s(self.settings.node_probability, self.settings.node_s)
        if wait_s:
            self._plan(self.now + wait_s, replica, self._schedule)
        else:
            self._schedule(replica)

    def _full(self) -> bool:
        quota = self.settings.quota
        return quota is not None and sum(one.scheduled < math.inf for one in self._replicas) >= quota

    def _schedule(self, replica: _Replica) -> None:
        """Give the pod a node, if it has none and there still is one."""
        if replica.scheduled < math.inf or self._full():
            return
        replica.scheduled = self.now
        self._status = None
        self._plan(self.now + PENDING_S, replica, self._run)

    def _run(self, replica: _Replica) -> None:
        """Start the container; it loads."""
        replica.running, replica.changed = True, self.now
        self._status = None
        self._load(replica, replica.load_s)

    def _load(self, replica: _Replica, load_s: float) -> None:
        """Start the process of a container that runs from now on."""
        self._start_process(replica, self.now)
        if self._chance.is_stuck(self.faults.stuck_probability):
            self._plan(self.now + self.faults.stuck_s, replica, self._restart)
            return
        probe_s = self.settings.probe_s
        self._plan(self.now + math.ceil(load_s / probe_s) * probe_s, replica, self._become_ready)

    def _start_process(self, replica: _Replica, at: float) -> None:
        replica.started_at = round(self.epoch + at + self.faults.clock_skew_s, 2)
        replica.page = Page(self.profile, replica.started_at)

    def _become_ready(self, replica: _Replica) -> None:
        replica.ready = replica.was_ready = True
        replica.changed = self.now
        self._status = None
        self._plan(self.now + ROUTING_S, replica, self._route)
        self._expect_life(replica)
        self._scrape_from_now_on(replica)

    def _route(self, replica: _Replica) -> None:
        replica.routed = True

    def _expect_life(self, replica: _Replica) -> None:
        """Decide when it will crash, if it does."""
        if self.faults.crash_mean_s < math.inf:
            self._plan(self.now + self._chance.crash_in_s(self.faults.crash_mean_s), replica, self._crash)

    def _crash(self, replica: _Replica) -> None:
        """End its process with all that is in flight; the container starts anew."""
        replica.engine.kill(self.now)
        if replica.deleted <= self.now:
            self._remove(replica)
            return
        replica.ready = replica.routed = False
        replica.changed = self.now
        self._restart(replica)

    def _restart(self, replica: _Replica) -> None:
        """Let the container start anew: its counters begin at nothing."""
        replica.life += 1
        replica.restarts += 1
        replica.engine = self._engine()
        if replica.told is not None:
            _set_limits(replica.engine, self.now, replica.told)
        self._status = None
        self._load(replica, self._chance.restart_s(self.profile.cold_start_s, self._sigma))

    def _delete(self, replica: _Replica) -> None:
        """Let the pod drain; it is gone at once when nothing is in flight."""
        replica.deleted = self.now
        replica.routed = False
        self._status = None
        self._plan(self.now + self.settings.grace_s, replica, self._kill)
        self._let_go(replica)

    def _let_go(self, replica: _Replica) -> None:
        """Remove a deleted pod once it is empty."""
        if not replica.engine.outstanding:
            self._remove(replica)

    def _kill(self, replica: _Replica) -> None:
        """End a pod whose grace is over, with all that is in flight."""
        replica.engine.advance(self.now)
        if replica.engine.outstanding:
            replica.engine.kill(self.now)
        self._remove(replica)

    def _remove(self, replica: _Replica) -> None:
        replica.life += 1
        self._replicas.remove(replica)
        self._status = None
        if replica.scheduled < math.inf:
            self._gone_seconds += max(replica.deleted, replica.engine.idle_since) - replica.scheduled
            waiting = next((one for one in self._active() if one.scheduled == math.inf), None)
            if self.settings.quota is not None and waiting is not None:
                self._schedule(waiting)

    # -- the Deployment ------------------------------------------------------------------------------------------

    def scale(self, replicas: int) -> None:
        """Set `spec.replicas`; pods are created or deleted at once, as the controllers would."""
        self.spec_replicas = replicas
        self._status = None
        active = self._active()
        for _ in range(replicas - len(active)):
            self._add()
        for replica in sorted(active, key=_deletion_rank)[: max(0, len(active) - replicas)]:
            self._delete(replica)

    def _active(self) -> list[_Replica]:
        return [replica for replica in self._replicas if replica.deleted == math.inf]

    # -- ports.Target and ports.Actuator -------------------------------------------------------------------------

    async def read(self) -> TargetStatus:
        """Return the Deployment and its pods; see `status`."""
        return self.status()

    def status(self) -> TargetStatus:
        """Return the Deployment and its pods as the API server would show them: times in whole seconds.

        The same object as long as nothing changes.
        """
        if self._status is None:
            active = self._active()
            self._status = TargetStatus(
                namespace=self.settings.namespace,
                name=self.settings.deployment,
                uid=self._uid,
                current_replicas=self.spec_replicas,
                status_replicas=len(active),
                ready_replicas=sum(replica.ready for replica in active),
                updated_replicas=len(active),
                drain=Drain(grace_s=self.settings.grace_s, drain_s=self.settings.grace_s),
                pods=tuple(self._pod(replica) for replica in self._replicas),
            )
        return self._status

    def _pod(self, replica: _Replica) -> Pod:
        running, homeless = replica.running, replica.scheduled == math.inf
        return Pod(
            name=replica.name,
            uid=replica.uid,
            phase=PodPhase.RUNNING if running else PodPhase.PENDING,
            ready=replica.ready,
            terminating=replica.deleted <= self.now,
            ip=replica.ip if running else "",
            node="" if homeless else replica.node,
            created_at=self._stamp(replica.created),
            ready_at=self._stamp(replica.changed) if running else None,
            was_ready=replica.was_ready,
            restarts=replica.restarts,
            unschedulable_at=self._stamp(replica.created) if homeless else None,
            max_num_seqs=self.profile.max_num_seqs,
            revision=self._revision,
            deletion_cost=replica.cost,
        )

    def _stamp(self, at: float) -> float:
        """Return what the cluster's clock said then, in whole seconds."""
        return float(math.floor(self.epoch + at + self.faults.clock_skew_s))

    async def apply(self, action: Action) -> Outcome:
        """Carry out an action, and let the listeners follow; see `act`."""
        outcome = self.act(action)
        await self.follow()
        return outcome

    def act(self, action: Action) -> Outcome:
        """Scale, if the Deployment still is what the action saw.

        Raises ActuationError: `conflict` when it is not, and what the faults make of it.
        """
        if isinstance(action, Hold):
            return Outcome.UNCHANGED
        if isinstance(action, SetBatching):
            return self._set_batching(action.pods)
        if isinstance(action, RollOut):
            raise ActuationError("invalid", "a simulated Deployment has no pod template")
        if action.to < 0:
            raise ActuationError("invalid", f"replicas must not be negative: {action.to}")
        trouble = self.faults.api_trouble(self._chance.api)
        if trouble is not None and not trouble.done:
            raise ActuationError(trouble.reason, trouble.detail)
        if action.seen != self.spec_replicas or action.uid not in ("", self._uid):
            raise ActuationError("conflict", f"replicas are {self.spec_replicas}, not {action.seen}")
        if action.to == self.spec_replicas:
            return Outcome.UNCHANGED
        costs = {one.uid: one.cost for one in action.costs}
        for replica in self._replicas:
            replica.cost = costs.get(replica.uid, replica.cost)
        self.scale(action.to)
        if trouble is not None:
            raise ActuationError(trouble.reason, trouble.detail)
        return Outcome.APPLIED

    def _set_batching(self, pods: tuple[PodBatching, ...]) -> Outcome:
        """Tell the ready ones of these pods their limits; UNCHANGED where none of them is."""
        wanted = {one.uid: one.limits for one in pods}
        told = [replica for replica in self._replicas if replica.ready and replica.uid in wanted]
        for replica in told:
            replica.told = wanted[replica.uid]
            replica.generation += 1
            _set_limits(replica.engine, self.now, replica.told)
        return Outcome.APPLIED if told else Outcome.UNCHANGED

    def limits(self) -> tuple[PodLimits, ...]:
        """Return the batching limits of the ready pods, as the plugin in them would say."""
        profile = self.profile
        ceiling = Limits(
            max_num_seqs=profile.max_num_seqs,
            max_num_batched_tokens=profile.max_num_batched_tokens,
            long_prefill_token_threshold=profile.max_num_batched_tokens,
        )
        return tuple(
            PodLimits(
                pod_uid=replica.uid,
                limits=Limits(**replica.engine.limits._asdict()),
                ceiling=ceiling,
                generation=replica.generation,
                applied=replica.generation,
            )
            for replica in self._replicas
            if replica.ready
        )

    async def close(self) -> None:
        """Hold nothing open: pages are served only inside `serve`."""

    # -- what the pages say --------------------------------------------------------------------------------------

    def reading(self, stale_after_s: float) -> Reading:
        """Return what the daemon would now know of the pages, in parsed form.

        Args:
            stale_after_s: what was read longer ago than this counts as missing.
        """
        at = round(self.epoch + self.now, 3)
        lines: list[Line] = []
        gaps: list[Gap] = []
        for replica in self._replicas:
            if not replica.running:
                continue
            if self.settings.scrape_s is None:
                self._scrape(replica, at)
            line = replica.line
            if line is not None and at - line.read_at <= stale_after_s:
                lines.append(line)
            if not replica.ready or replica.symptom is not None:
                gaps += _gaps(replica)
        return Reading(engines=self._table.build(lines), samples=self._samples(at), gaps=tuple(gaps))

    def _samples(self, at: float) -> tuple[Sample, ...]:
        if self.settings.routing is not Routing.SHARED_QUEUE:
            return ()
        return (Sample(signal="upstream_queue", value=float(self._front.queued), at=at, source="gateway"),)

    def _scrape(self, replica: _Replica, at: float) -> None:
        """Read the pod's page, as far as it is served and the faults let it be read; its engine must be up to now."""
        if not replica.ready:
            return
        line, symptom = replica.line, None
        if self.faults.blackouts:
            symptom = replica.symptom = self.faults.symptom(self.now, replica.lot)
        if symptom is Symptom.FROZEN and line is not None:
            replica.line = again(line, at)
        elif symptom is not Symptom.LOST:
            line = read_engine(replica.engine, replica.uid, started_at=replica.started_at, read_at=at)
            replica.line = line if symptom is not Symptom.NAN else without_gauges(line)

    def _scrape_from_now_on(self, replica: _Replica) -> None:
        """Read the pod's page whenever it is its turn, where the pages are not read at each tick."""
        period_s = self.settings.scrape_s
        if period_s is None:
            return
        phase_s = replica.lot * period_s
        turn = math.floor((self.now - phase_s) / period_s) + 1
        self._plan(turn * period_s + phase_s, replica, self._take_turn)

    def _take_turn(self, replica: _Replica) -> None:
        replica.engine.advance(self.now)
        self._scrape(replica, round(self.epoch + self.now, 3))
        self._plan(self.now + (self.settings.scrape_s or 0.0), replica, self._take_turn)

    # -- pages over HTTP -----------------------------------------------------------------------------------------

    def page(self, ip: str) -> str | None:
        """Return the page of the pod with that address; None when nothing listens there."""
        replica = next((replica for replica in self._replicas if replica.ip == ip), None)
        if replica is None or not replica.ready:
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
            await self._server.follow({replica.ip for replica in self._replicas if replica.ready})

    # -- the truth -----------------------------------------------------------------------------------------------

    def engines(self) -> tuple[Engine, ...]:
        """Return the engines of all pods, the oldest pod's first."""
        return tuple(replica.engine for replica in self._replicas)

    @property
    def gpu_hours(self) -> float:
        """GPU-hours so far: from each pod's creation to its end, or to now."""
        living = sum(self.now - replica.scheduled for replica in self._replicas if replica.scheduled < math.inf)
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


def _set_limits(engine: Engine, at: float, limits: Limits) -> None:
    """Tell an engine its limits; one that is None goes back to what it started with."""
    profile = engine.profile
    tokens, chunk = limits.max_num_batched_tokens, limits.long_prefill_token_threshold
    engine.set_limits(
        at,
        max_num_seqs=profile.max_num_seqs if limits.max_num_seqs is None else limits.max_num_seqs,
        max_num_batched_tokens=profile.max_num_batched_tokens if tokens is None else tokens,
        long_prefill_token_threshold=profile.long_prefill_token_threshold if chunk is None else chunk,
    )


def _deletion_rank(replica: _Replica) -> tuple[bool, bool, bool, int, float, int]:
    """Return what orders the victims of a scale-down: without a node first, then pending, not ready, cheap, new."""
    newest = -replica.changed if replica.ready else 0.0
    homed = replica.scheduled < math.inf
    return homed, replica.running, replica.ready, replica.cost or 0, newest, -replica.number


def _gaps(replica: _Replica) -> list[Gap]:
    """Return what is missing of a running pod's page."""
    if not replica.ready:
        missing = [(WHOLE_PAGE, GapReason.UNREACHABLE, LOADING)]
    elif replica.symptom is Symptom.LOST:
        missing = [(WHOLE_PAGE, GapReason.TIMEOUT, "")]
    elif replica.symptom is Symptom.NAN:
        missing = [(name, GapReason.NON_FINITE, "") for name in GAUGES]
    else:
        missing = []
    return [
        Gap(signal=signal, reason=reason, source="vllm", pod=replica.name, detail=detail)
        for signal, reason, detail in missing
    ]
