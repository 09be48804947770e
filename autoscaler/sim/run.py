"""The closed loop in one process: the product's own tick on a simulated fleet, without HTTP, on virtual time."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Self

import numpy as np

from autoscaler.core.policy import BatchingMode, Policy, VllmSignals
from autoscaler.core.state import NO_ENGINES, State
from autoscaler.core.tick import Reread, Ticked, take_tick
from autoscaler.core.types import Floats, Outcome, Snapshot, TargetStatus
from autoscaler.errors import ActuationError
from autoscaler.ports import Report
from autoscaler.sim.engine import Request
from autoscaler.sim.faults import Faults
from autoscaler.sim.fleet import HOUR, Fleet, RunSummary, Settings
from autoscaler.sim.ledger import Fate, Ledger
from autoscaler.sim.profile import Profile
from autoscaler.sim.report import TickCollector, TickRow, reversals

TEN_MINUTES_S = 600.0
QUANTILES = (0.5, 0.95, 0.99)
Active = Callable[[float], tuple[str, ...]]
"""Returns the labels of the schedules that are active at a time, epoch seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The world that a policy is run in.

    Args:
        profile: model and hardware of every replica.
        replicas: ready at the start.
        duration_s: simulated time; None ends with the first tick after the last request was sent.
        epoch: epoch seconds of the start.
        seed: of names, cold starts, faults and routing; equal seeds make equal runs, in any process.
        fleet: how the fleet behaves. Its namespace and name are the policy's.
        faults: what goes wrong.
        ttft_s, tpot_s: what a request is judged by; None takes the policy's SLOs, and where it has none 2 s and 0.1 s.
    """

    profile: Profile
    replicas: int
    duration_s: float | None = None
    epoch: float = 1_768_348_800.0
    seed: int = 1
    fleet: Settings = field(default_factory=Settings)
    faults: Faults = field(default_factory=Faults)
    ttft_s: float | None = None
    tpot_s: float | None = None

    def make_fleet(self, policy: Policy, requests: Iterable[Request]) -> Fleet:
        """Return the fleet at its start: the policy's target."""
        target = policy.target
        return Fleet(
            self.profile,
            requests,
            replicas=self.replicas,
            epoch=self.epoch,
            rng=np.random.default_rng(self.seed),
            settings=replace(self.fleet, namespace=target.namespace, deployment=target.deployment),
            faults=self.faults,
        )

    def objectives(self, policy: Policy) -> tuple[float, float]:
        """Return what a request is judged by: seconds to the first token, then seconds a token."""
        ttft, itl = policy.slo.ttft, policy.slo.itl
        return (
            self.ttft_s or (ttft.seconds if ttft is not None else 2.0),
            self.tpot_s or (itl.seconds if itl is not None else 0.1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """A run in numbers.

    Args:
        attainment: share of the requests that were answered within both objectives; None without requests.
        worst_ten_minutes: the smallest share of any ten minutes, by arrival; None without requests.
        bad_ten_minutes: share of the ten minutes with less than 95 %.
        gpu_hours: from each pod's node to its end. mean_replicas: these, as replicas.
        requests: all that were sent. failed: those without a whole answer; fates: these by how they ended.
        ups, downs: actions. reversals_per_hour: actions against the direction of the one before.
        flaps: of these, those within ten minutes of it.
        ttft_s, tpot_s, e2e_s: quantiles 0.5, 0.95 and 0.99 of the answered requests; NaN without any.
    """

    attainment: float | None
    worst_ten_minutes: float | None
    bad_ten_minutes: float
    gpu_hours: float
    mean_replicas: float
    requests: int
    failed: int
    fates: dict[str, int]
    ups: int
    downs: int
    reversals_per_hour: float
    flaps: int
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    e2e_s: tuple[float, ...]

    @property
    def actions(self) -> int:
        """How often replicas were moved."""
        return self.ups + self.downs

    @classmethod
    def of(cls, summary: RunSummary, ledger: Ledger, rows: Sequence[TickRow]) -> Self:
        """Return the figures of an ended run."""
        shares = _ten_minutes(ledger, summary.ttft_s, summary.tpot_s)
        acted = [row for row in rows if row.acted]
        ups = sum((row.acted_to or 0) > row.ordered for row in acted)
        fate = ledger.column("fate")
        done = fate == Fate.DONE
        hours = summary.duration_s / HOUR
        return cls(
            attainment=summary.attainment,
            worst_ten_minutes=min(shares, default=None),
            bad_ten_minutes=sum(share < 0.95 for share in shares) / max(1, len(shares)),
            gpu_hours=summary.gpu_hours,
            mean_replicas=summary.gpu_hours / summary.gpus / hours if hours else 0.0,
            requests=summary.requests,
            failed=summary.failed,
            fates={one.name.lower(): int(np.count_nonzero(fate == one)) for one in Fate if one is not Fate.DONE},
            ups=ups,
            downs=len(acted) - ups,
            reversals_per_hour=reversals(rows) / hours if hours else 0.0,
            flaps=_flaps(acted),
            ttft_s=_quantiles(ledger.ttft()[done]),
            tpot_s=_quantiles(ledger.tpot()[done]),
            e2e_s=_quantiles((ledger.column("finish") - ledger.column("arrival"))[done]),
        )


def _quantiles(values: Floats) -> tuple[float, ...]:
    known = values[~np.isnan(values)]
    return tuple(np.quantile(known, QUANTILES).tolist()) if known.size else (math.nan,) * len(QUANTILES)


def _ten_minutes(ledger: Ledger, ttft_s: float, tpot_s: float) -> list[float]:
    """Return the share of attained requests of each ten minutes in which any arrived."""
    bins = (ledger.column("arrival") // TEN_MINUTES_S).astype(np.int64)
    arrived = np.bincount(bins)
    attained = np.bincount(bins, weights=ledger.attained(ttft_s, tpot_s))
    return [float(good / count) for good, count in zip(attained, arrived, strict=True) if count]


def _flaps(acted: Sequence[TickRow]) -> int:
    return sum(
        ((before.acted_to or 0) > before.ordered) != ((after.acted_to or 0) > after.ordered)
        and after.at - before.at <= TEN_MINUTES_S
        for before, after in pairwise(acted)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What became of a policy in a setting.

    Args:
        summary, rows: what the report is made of.
        figures: what runs are compared by.
        state: what the policy remembers at the end.
    """

    summary: RunSummary
    figures: Figures
    rows: tuple[TickRow, ...]
    state: State


def run(
    policy: Policy,
    requests: Iterable[Request],
    setting: Setting,
    *,
    progress: Callable[[float], None] | None = None,
    active: Active | None = None,
    reports: Sequence[Report] = (),
    state: State | None = None,
) -> Run:
    """Let the policy scale a fleet under these requests, in order of arrival, and return what became of both.

    What the recorder among `reports` writes replays to the same decisions.

    Args:
        progress: is told the simulated seconds after each tick.
        active: the policy's schedules; must be given when it has any.
        reports: are told of every tick.
        state: what the policy remembers at the start; nothing by default.
    Raises: ValueError for a policy with schedules without `active`.
    """
    if policy.schedules and active is None:
        raise ValueError(f"{policy.name} has schedules: `active` must tell which are active")
    fleet, collector = setting.make_fleet(policy, requests), TickCollector()
    stale_after_s = (policy.signals.vllm or VllmSignals()).stale_after_s
    batching = policy.batching.mode is not BatchingMode.OFF
    state, number, end = state or State(), 0, setting.duration_s if setting.duration_s is not None else math.inf
    while (at := number * policy.interval_s) < end:
        fleet.advance(at)
        if number and setting.duration_s is None and fleet.over:
            break
        snapshot = take_snapshot(fleet, stale_after_s, active, batching=batching)
        tick = step(policy, state, snapshot, fleet)
        state = tick.state
        for report in (collector, *reports):
            report.tick(policy.name, tick.snapshot, tick.decision, tick.outcome, 0.0)
        if progress is not None:
            progress(fleet.now)
        number += 1
    if end < math.inf:
        fleet.advance(end)
    fleet.finish()
    ttft_s, tpot_s = setting.objectives(policy)
    summary = fleet.summary(ttft_s=ttft_s, tpot_s=tpot_s)
    rows = tuple(collector.rows)
    return Run(summary=summary, figures=Figures.of(summary, fleet.ledger, rows), rows=rows, state=state)


def take_snapshot(
    fleet: Fleet, stale_after_s: float, active: Active | None = None, *, batching: bool = False
) -> Snapshot:
    """Return what the daemon would know of the fleet now.

    Args:
        batching: it asks for the batching limits too.
    """
    at = round(fleet.epoch + fleet.now, 3)
    reading = fleet.reading(stale_after_s)
    return Snapshot(
        at=at,
        target=fleet.status(),
        engines=reading.engines or NO_ENGINES,
        samples=reading.samples,
        gaps=reading.gaps,
        schedules=active(at) if active is not None else (),
        limits=fleet.limits() if batching else (),
    )


def step(policy: Policy, state: State, snapshot: Snapshot, fleet: Fleet) -> Ticked:
    """Carry out one tick on the fleet."""
    tick = take_tick(policy, state, snapshot)
    answer: Outcome | TargetStatus | None = None
    while True:
        try:
            wanted = tick.send(answer)
        except StopIteration as end:
            ticked: Ticked = end.value
            return ticked
        try:
            answer = fleet.status() if isinstance(wanted, Reread) else fleet.act(wanted)
        except ActuationError as error:
            answer = None if error.reason == "conflict" else Outcome.FAILED
