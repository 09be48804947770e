"""What a snapshot shows once pods and engines are joined: who serves, who loads, how much load there is."""

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoscaler.core.policy import Pending, Policy
from autoscaler.core.signals import COLUMN
from autoscaler.core.types import EngineKey, Engines, Floats, GapReason, Ints, Pod, PodPhase, Snapshot
from autoscaler.core.window import CAPACITY, READ_AT, RUNNING, USAGE, WAITING, EngineMemory, Overview

Mask = NDArray[np.bool_]

ASLEEP = COLUMN["asleep"]
STALE_IDLE_POLLS = 3
IMPLAUSIBLE_ZERO_POLLS = 20
STALLED_AFTER_S = 30.0
BROKEN_STATES = frozenset(
    {"CrashLoopBackOff", "ImagePullBackOff", "ErrImagePull", "CreateContainerConfigError", "RunContainerError"}
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Join:
    """Pods and engine rows joined; a function of the two alone, kept while neither changes.

    Args:
        serving: rows of pods that are ready, running and not terminating.
        unready: rows of running pods that were ready before and are not now.
        pod_of: for each row the index of its pod; -1 for a pod that the target does not own.
        serving_uids: of all pods that are ready, running and not terminating.
        ready_at: for each row since when its pod is ready; -Inf when that is unknown.
        ready, unready_pods, terminating, broken, live: numbers of pods.
        starting: creation times of pods on their way: never ready, not broken, not terminating.
        unschedulable: since when, for each pod without a node.
        sequences: the smallest `max_num_seqs` among the ready pods' arguments; None when none says.
        engines_per_pod: 1.0 unless pods run several data-parallel engines.
        all_serve: every row is of a serving pod.
        newest_ready_at: when the youngest of the rows' pods became ready; -Inf without rows.
    """

    pods: tuple[Pod, ...]
    keys: tuple[EngineKey, ...]
    serving: Mask
    serving_uids: frozenset[str]
    unready: Mask
    pod_of: Ints
    ready_at: Floats
    ready: int
    unready_pods: int
    terminating: int
    broken: int
    live: int
    starting: tuple[float, ...]
    unschedulable: tuple[float, ...]
    sequences: int | None
    engines_per_pod: float
    all_serve: bool
    newest_ready_at: float

    def count_pods(self, rows: Mask) -> int:
        """Return how many pods the rows belong to."""
        if self.engines_per_pod == 1.0:
            return int(np.count_nonzero(rows))
        return len(set(self.pod_of[rows].tolist()))


def is_broken(pod: Pod, pending: Pending) -> bool:
    """Tell whether the pod cannot become ready by waiting: it crashes again and again, or cannot be pulled."""
    return pod.waiting_reason in BROKEN_STATES or (not pod.ready and pod.restarts >= pending.crash_restarts)


def is_serving(pod: Pod) -> bool:
    """Tell whether the pod takes requests."""
    return pod.ready and not pod.terminating and pod.phase is PodPhase.RUNNING


def join(pods: tuple[Pod, ...], keys: tuple[EngineKey, ...], pending: Pending, seen_ready: Container[str] = ()) -> Join:
    """Return pods and engine rows joined by pod uid.

    Args:
        seen_ready: uids of pods that were ready at an earlier tick. Of a pod that is lost soon after its start the API
            does not show that it has served: to give it up as one that never started would shrink on missing data.
    """
    alive = [
        pod
        for pod in pods
        if not pod.terminating and pod.phase in (PodPhase.RUNNING, PodPhase.PENDING, PodPhase.UNKNOWN)
    ]
    broken = [pod for pod in alive if is_broken(pod, pending)]
    serving_uids = frozenset(pod.uid for pod in alive if is_serving(pod))
    lost = {pod.uid for pod in alive if not pod.ready and (pod.was_ready or pod.uid in seen_ready)}
    fallen = {pod.uid for pod in alive if pod.uid in lost and pod.phase is PodPhase.RUNNING} - {
        pod.uid for pod in broken
    }
    starting = [pod for pod in alive if not pod.ready and pod.uid not in lost and not is_broken(pod, pending)]
    place = {pod.uid: index for index, pod in enumerate(pods)}
    serving = np.array([key.pod_uid in serving_uids for key in keys], dtype=bool)
    ready_at = np.array([_ready_at(pods, place.get(key.pod_uid)) for key in keys], dtype=np.float64)
    limits = [pod.max_num_seqs for pod in alive if pod.uid in serving_uids and pod.max_num_seqs is not None]
    return Join(
        pods=pods,
        keys=keys,
        serving=serving,
        serving_uids=serving_uids,
        unready=np.array([key.pod_uid in fallen for key in keys], dtype=bool),
        pod_of=np.array([place.get(key.pod_uid, -1) for key in keys], dtype=np.intp),
        ready_at=ready_at,
        ready=len(serving_uids),
        unready_pods=len(fallen),
        terminating=sum(1 for pod in pods if pod.terminating),
        broken=len(broken),
        live=len(alive),
        starting=tuple(sorted(pod.created_at for pod in starting)),
        unschedulable=tuple(sorted(pod.unschedulable_at for pod in alive if pod.unschedulable_at is not None)),
        sequences=min(limits) if limits else None,
        engines_per_pod=len(keys) / max(1, len({key.pod_uid for key in keys})) if keys else 1.0,
        all_serve=bool(serving.all()),
        newest_ready_at=float(ready_at.max(initial=-np.inf)),
    )


def _ready_at(pods: tuple[Pod, ...], index: int | None) -> float:
    ready_at = pods[index].ready_at if index is not None else None
    return -np.inf if ready_at is None else ready_at


class Usage(NamedTuple):
    """KV usage of the fleet: as growth sees it, as shrinking sees it, and why one is missing."""

    growth: float | None = None
    shrink: float | None = None
    gap: GapReason | None = None


class Facts(NamedTuple):
    """One tick's load and supply.

    Args:
        ready: ready replicas that are awake, in replicas.
        loading: replicas ordered and on their way, inside their grace.
        overdue: pods on their way for once to twice as long as the health fuse allows.
        stuck: pods without a node for longer than allowed.
        expected, known: pods that should report, and that did, freshly.
        cold: of the known, ready for less than the warm-up.
        waiting, running: requests of the known engines; None when none is known.
        kv: see `Usage`.
        kv_tokens: KV tokens of one replica; None when unknown.
        idle: everything known, nothing running or waiting, and the request counters do not move.
        stalled: an engine has requests and generates nothing.
        asleep: ready replicas whose engines sleep.
        suspect: reasons found in the core, each with how many engines it concerns.
    """

    ready: float
    loading: int
    overdue: int
    stuck: int
    expected: int
    known: int
    cold: int
    waiting: float | None
    running: float | None
    kv: Usage
    kv_tokens: float | None
    idle: bool
    stalled: bool
    asleep: float
    unready: int = 0
    broken: int = 0
    terminating: int = 0
    live: int = 0
    sequences: int | None = None
    suspect: tuple[tuple[GapReason, int], ...] = ()

    @property
    def missing(self) -> int:
        """Pods that should report and did not."""
        return self.expected - self.known


class Rows(NamedTuple):
    """Which engine rows say what now.

    Args:
        fresh: read lately, of pods that serve, or that fell unready when none serves.
        load: of these the awake ones. asleep: the others.
        pods: how many pods the load rows belong to. whole: every row carries load.
    """

    fresh: Mask
    load: Mask
    asleep: Mask
    pods: int
    whole: bool


def load_rows(policy: Policy, engines: Engines, overview: Overview, joined: Join, at: float) -> Rows:
    """Return the rows that carry load: fresh, awake, of ready pods; of pods that fell unready when none is ready."""
    stale_after = policy.signals.vllm.stale_after_s if policy.signals.vllm is not None else 15.0
    serving, sleeps = joined.serving if joined.ready else joined.unready, engines.values[:, ASLEEP]
    if at - overview.least[READ_AT] <= stale_after and np.fmax.reduce(sleeps, initial=0.0) <= 0.0:
        whole = joined.all_serve and joined.ready > 0 and len(serving) > 0
        return Rows(serving, serving, np.zeros(len(serving), dtype=bool), joined.count_pods(serving), whole)
    fresh = serving & (at - engines.values[:, READ_AT] <= stale_after)
    load = fresh & ~(sleeps > 0.0)
    asleep, whole = fresh & (sleeps > 0.0), bool(load.all()) and len(load) > 0
    return Rows(fresh, load, asleep, joined.count_pods(load), whole)


def gather(
    policy: Policy, snapshot: Snapshot, overview: Overview, joined: Join, rows: Rows, memory: EngineMemory, flat: bool
) -> Facts:
    """Return the facts of this tick.

    Args:
        overview: of all the snapshot's engines.
        rows: as `load_rows` gives them.
        memory: after this tick, with its rows in the order of the snapshot's.
        flat: the request counters are known and did not move in the window.
    """
    engines, at = snapshot.engines, snapshot.at
    per = policy.target.pods_per_replica
    known = rows.pods
    # A pod with one engine awake of several is awake.
    asleep_pods = 0 if rows.whole else joined.count_pods(rows.load | rows.asleep) - known
    serving_pods = (joined.ready or joined.unready_pods) - asleep_pods
    ready = serving_pods / per if joined.ready else 0.0
    waiting = _total(engines, overview, rows, WAITING)
    running = _total(engines, overview, rows, RUNNING)
    cold = None
    if at - joined.newest_ready_at < policy.score.warm_up_s:
        cold = rows.load & (at - joined.ready_at < policy.score.warm_up_s)
    lost = (serving_pods - known) * joined.engines_per_pod
    kv, suspect, stalled = _kv_usage(engines, overview, memory, rows, cold, lost, at)
    grace, late_s = policy.pending.grace_s, policy.health.ready_within_s
    ages = [at - created for created in joined.starting]
    young = len([age for age in ages if age <= grace])
    ordered = snapshot.target.current_replicas * per
    # What the API server refuses to make is not on its way.
    missing_pods = 0 if snapshot.target.refused else max(0, ordered - joined.live)
    loading = max(0, min(young + missing_pods, ordered - joined.ready))
    return Facts(
        ready=ready,
        loading=-(-loading // per),
        overdue=len([age for age in ages if late_s < age < 2.0 * late_s]),
        stuck=len([since for since in joined.unschedulable if at - since > policy.pending.unschedulable_after_s]),
        expected=serving_pods,
        known=known,
        cold=joined.count_pods(cold) if cold is not None else 0,
        waiting=waiting,
        running=running,
        kv=kv,
        kv_tokens=_replica_tokens(engines, overview, joined, rows, per),
        idle=flat and known == serving_pods > 0 and waiting == 0.0 and running == 0.0,
        stalled=stalled,
        asleep=asleep_pods / per,
        unready=joined.unready_pods,
        broken=joined.broken,
        terminating=joined.terminating,
        live=joined.live,
        sequences=joined.sequences,
        suspect=suspect,
    )


def _total(engines: Engines, overview: Overview, rows: Rows, column: int) -> float | None:
    """Return the sum of what the rows that carry load say; None when none does."""
    if rows.whole and not math.isnan(overview.total[column]):
        return overview.total[column]
    said = engines.values[rows.load, column]
    known = said[~np.isnan(said)]
    return float(known.sum()) if len(known) else None


def _replica_tokens(engines: Engines, overview: Overview, joined: Join, rows: Rows, per: int) -> float | None:
    """Return the mean KV tokens of a replica over the rows that say; None when none does."""
    if rows.whole and not math.isnan(overview.total[CAPACITY]):
        return overview.total[CAPACITY] * per / rows.pods
    capacity = engines.values[:, CAPACITY]
    said = rows.load & ~np.isnan(capacity)
    pods = joined.count_pods(said)
    return float(capacity[said].sum()) * per / pods if pods else None


def _kv_usage(
    engines: Engines,
    overview: Overview,
    memory: EngineMemory,
    rows: Rows,
    cold: Mask | None,
    missing: float,
    at: float,
) -> tuple[Usage, tuple[tuple[GapReason, int], ...], bool]:
    """Return KV usage weighted by capacity, the suspicions on it, and whether an engine stalls.

    For growth, pods without data and cold pods count as they report or as empty; for shrinking, pods without data
    count as full and cold pods do not count. `missing` is the number of engines without data.
    """
    values = engines.values
    known = overview.least[CAPACITY] > 0.0 and not math.isnan(overview.resident)
    if known and memory.steady and rows.whole and cold is None and missing == 0.0:
        mean = overview.resident / overview.total[CAPACITY]
        return Usage(growth=mean, shrink=mean), (), False
    usage = values[:, USAGE]
    said = rows.load & ~np.isnan(usage)
    stalled_rows = rows.load & (at - memory.flat_since > STALLED_AFTER_S)
    waiting = values[:, WAITING]
    stalled = bool((stalled_rows & (waiting > 0.0)).any())
    idle_now, idle_long = said & (memory.idle_polls > 0), said & (memory.idle_polls >= STALE_IDLE_POLLS)
    odd_zero = said & (memory.zero_polls >= IMPLAUSIBLE_ZERO_POLLS)
    held = idle_long & (usage > 0.0)
    found = (
        (GapReason.KV_STALE_IDLE, held),
        (GapReason.KV_IMPLAUSIBLE, odd_zero),
        (GapReason.ENGINE_STALLED, stalled_rows),
    )
    suspect = tuple((reason, int(mask.sum())) for reason, mask in found if mask.any())
    if not said.any():
        return Usage(gap=GapReason.EMPTY), suspect, stalled
    weight = _weights(values[:, CAPACITY], said)
    lost = missing * float(weight[said].mean())
    # An idle engine's gauge can freeze at its last value: it holds nobody's blocks, and is not grown on.
    grow_usage = np.where(idle_now, 0.0, usage)
    grow_rows = said & ~stalled_rows
    grow_weight = float(weight[said].sum()) + lost
    growth = float((weight[grow_rows] * grow_usage[grow_rows]).sum()) / grow_weight
    shrink_usage = np.where(idle_long, 0.0, np.where(stalled_rows, 1.0, usage))
    warm = said if cold is None else said & ~cold
    gap = GapReason.KV_IMPLAUSIBLE if odd_zero.any() else None
    shrink_weight = float(weight[warm].sum()) + lost
    shrink = None
    if gap is None and shrink_weight > 0.0:
        shrink = (float((weight[warm] * shrink_usage[warm]).sum()) + lost) / shrink_weight
    return Usage(growth=growth, shrink=shrink, gap=gap), suspect, stalled


def _weights(capacity: Floats, rows: Mask) -> Floats:
    """Return each row's share of the fleet's KV tokens, unnormalised: its capacity, the mean where it is unknown."""
    known = rows & (capacity > 0.0)
    if not known.any():
        return np.ones(len(capacity))
    return np.where(known, capacity, float(capacity[known].mean()))
