"""The values of one tick, in the order they are made: readings, snapshot, score, demand, forecast, decision."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


class GapReason(StrEnum):
    """Why a reading is missing, stale or not believed. Bounded, so that it can label a metric."""

    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    HTTP_STATUS = "http_status"
    UNAUTHORIZED = "unauthorized"
    BODY_TOO_LARGE = "body_too_large"
    BAD_BODY = "bad_body"
    PARSE_ERROR = "parse_error"
    NO_FAMILIES = "no_families"
    FAMILY_MISSING = "family_missing"
    FILTER_MATCHED_NOTHING = "filter_matched_nothing"
    EMPTY = "empty"
    AMBIGUOUS_RESULT = "ambiguous_result"
    QUERY_ERROR = "query_error"
    TRANSIENT = "transient"
    PARTIAL = "partial"
    WINDOW_TOO_SHORT = "window_too_short?"
    STALE = "stale"
    NON_FINITE = "non_finite"
    OUT_OF_RANGE = "out_of_range"
    DCGM_BLANK = "dcgm_blank"
    ZERO_TOTAL = "zero_total"
    DUPLICATE = "duplicate"
    NO_POD_LABEL = "no_pod_label"
    POD_NOT_LIVE = "pod_not_live"
    SHARED_DEVICE = "shared_device"
    NOT_SUPPORTED = "not_supported"
    NOT_LOADED = "not_loaded"
    DEVICE_LOST = "device_lost"
    NO_INF_BUCKET = "no_inf_bucket"
    NO_OBSERVATIONS = "no_observations"
    FEW_OBSERVATIONS = "few_observations"
    NOT_CONFIGURED = "not_configured"
    NO_READY_PODS = "no_ready_pods"
    NO_HISTORY = "no_history"
    NO_CAPACITY = "no_kv_capacity"
    KV_STALE_IDLE = "kv_stale_idle"
    KV_IMPLAUSIBLE = "kv_implausible"
    ENGINE_STALLED = "engine_stalled"
    MEMORY_COARSE = "memory_coarse"
    BUG = "bug"


WHOLE_PAGE = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A reading that is not there, and why: never a zero.

    Args:
        signal: name from `core.signals`, or `WHOLE_PAGE` when nothing of a source could be used.
        reason: the class of the failure.
        source: which source it came from: "vllm", "dcgm", "nvml", "prometheus", "target", "core".
        pod: name of the pod it concerns; "" for the whole target.
        detail: for people, at most 200 characters, free of credentials.
    """

    signal: str
    reason: GapReason
    source: str = ""
    pod: str = ""
    detail: str = ""


class PodPhase(StrEnum):
    """`status.phase` of a pod."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One pod that the target owns, as the API server says. Times are epoch seconds of the API server's clock.

    Args:
        uid: identity; a name can be reused.
        ready: the Ready condition is True.
        terminating: `deletionTimestamp` is set.
        created_at: `creationTimestamp`.
        ready_at: last transition of the Ready condition; None if it was never evaluated.
        was_ready: it is ready now, or its Ready condition shows that it was ready before.
        restarts: sum over containers.
        waiting_reason: of a waiting container, e.g. `CrashLoopBackOff`, `ImagePullBackOff`; "" otherwise.
        oom_killed: a container's last termination was `OOMKilled`.
        unschedulable_at: since when the scheduler finds no node; None when it does.
        max_num_seqs: from the container's arguments; None when they do not say.
        revision: `pod-template-hash` label, "" when absent.
        deletion_cost: annotation `controller.kubernetes.io/pod-deletion-cost`; None when absent or not valid, which
            Kubernetes takes for 0. Of pods that are alike, the cheapest goes first.
    """

    name: str
    uid: str
    phase: PodPhase = PodPhase.RUNNING
    ready: bool = True
    terminating: bool = False
    ip: str = ""
    node: str = ""
    created_at: float = 0.0
    ready_at: float | None = None
    was_ready: bool = False
    restarts: int = 0
    waiting_reason: str = ""
    oom_killed: bool = False
    unschedulable_at: float | None = None
    max_num_seqs: int | None = None
    revision: str = ""
    deletion_cost: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """How a pod of the template ends, in seconds: preStop, then SIGTERM, and SIGKILL when the grace period is over.

    Args:
        grace_s: `terminationGracePeriodSeconds`.
        pre_stop_s: of the longest preStop hook; None where there is one that does not say; 0 without any.
        drain_s: `--shutdown-timeout`; at 0 an engine ends its requests within 0.2 s of SIGTERM.
    """

    grace_s: float = 30.0
    pre_stop_s: float | None = 0.0
    drain_s: float = 0.0

    def __str__(self) -> str:
        sign = "<" if self.short_s > 0 else ">="
        return f"{self._grace} {sign} preStop {self._pre_stop} + --shutdown-timeout {self.drain_s:g}"

    @property
    def needed_s(self) -> float:
        """The grace period that it takes, at least."""
        return (self.pre_stop_s or 0.0) + self.drain_s

    @property
    def short_s(self) -> float:
        """How many seconds SIGKILL comes too early; 0 or less when it does not."""
        return self.needed_s - self.grace_s

    def lacks(self, required_s: float) -> str:
        """Return what requests that take so long after preStop are cut by, with its numbers; "" when by nothing.

        A preStop that does not say how long it takes is taken to wait for the requests itself.
        """
        words = []
        if self.grace_s < (self.pre_stop_s or 0.0) + required_s:
            words.append(f"{self._grace} < preStop {self._pre_stop} + drain {required_s:g}")
        if self.pre_stop_s is not None and self.drain_s < required_s:
            words.append(f"--shutdown-timeout {self.drain_s:g} < drain {required_s:g}")
        return ", ".join(words)

    @property
    def _grace(self) -> str:
        return f"terminationGracePeriodSeconds {self.grace_s:g}"

    @property
    def _pre_stop(self) -> str:
        return "of unknown length" if self.pre_stop_s is None else f"{self.pre_stop_s:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an engine's scheduler takes into one step. None is unknown; to be set, it is what the engine started with.

    Args:
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens of one step, those of prompts and one a running request.
        long_prefill_token_threshold: the largest part of one prompt in a step; 0 for no limit of its own.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int | None = None

    def __str__(self) -> str:
        words = {
            "seqs": self.max_num_seqs,
            "tokens": self.max_num_batched_tokens,
            "long prefill": self.long_prefill_token_threshold,
        }
        return ", ".join(f"{name} {value}" for name, value in words.items() if value is not None) or "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodLimits:
    """The batching limits of one pod's engines, as our plugin in them says.

    Args:
        pod_uid: whose they are.
        limits: that the engine was told last and has taken up.
        ceiling: those it started with, by which its buffers are sized; None for a limit that cannot be moved there.
        floor: the lowest ones that it takes.
        generation: of what it was told last. applied: of what it has taken up; lower while it has not yet.
        refused: why none can be moved; "" when they can.
        lacking: that is for good: there is no plugin, or one that moves nothing in this engine.
    """

    pod_uid: str
    limits: Limits = field(default_factory=Limits)
    ceiling: Limits = field(default_factory=Limits)
    floor: Limits = field(default_factory=Limits)
    generation: int = 0
    applied: int = 0
    refused: str = ""
    lacking: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """What a Deployment's pod template says of its engines' batching limits, and what keeps them from being changed.

    Args:
        revision: `pod-template-hash` of the newest ReplicaSet; "" without any.
        container: the one whose arguments say the limits.
        limits: those that are said; None for the others.
        chunked_prefill: prompts may take several steps; None where that cannot be told.
        max_model_len: None where it is not said.
        fixed: why the arguments cannot be changed; "" when they can.
        owner: who applies the template again and again, so that a change would be undone; "" for nobody.
        recreate: the strategy ends every pod before it makes a new one.
        max_surge, max_unavailable: pods more, and fewer, than the replicas while a rollout is under way.
        print: of all of the template's spec but the limits: another image or argument makes another one.
        note: the annotation `autoscaler/rollout`, see `core.note`; "" for none.
    """

    revision: str = ""
    container: str = ""
    limits: Limits = field(default_factory=Limits)
    chunked_prefill: bool | None = None
    max_model_len: int | None = None
    fixed: str = ""
    owner: str = ""
    recreate: bool = False
    max_surge: int = 0
    max_unavailable: int = 0
    print: str = ""
    note: str = ""


class Direction(StrEnum):
    """Which way a person allows a target to be scaled."""

    BOTH = "both"
    UP_ONLY = "up-only"
    DOWN_ONLY = "down-only"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStatus:
    """The Deployment and the pods that it owns.

    Args:
        current_replicas: `spec.replicas`, the base of every change.
        status_replicas, ready_replicas, updated_replicas: from the status.
        rollout: a new revision is being rolled out (status not yet at the spec's generation or revision). A paused
            Deployment rolls nothing out.
        rollout_unhealthy: the rollout has failed, or pods of the newest revision crash, or cannot pull, while it is
            under way.
        rollout_failed: it made no progress for `progressDeadlineSeconds`: the Deployment's controller has given up.
        deployment_paused: `spec.paused`: a changed template has no effect, changed replicas have.
        refused: why the API server refuses to make the pods that are missing, e.g. a quota; "" when it does not.
        drain: how its pods end; None when that was not read.
        template: what its pod template says of batching limits; None when that was not read.
        other_owner: who else writes replicas, e.g. `HorizontalPodAutoscaler/chat`; "" for nobody.
        scaled_by: the field manager that last changed `spec.replicas`; "" where the API server does not say.
        scaled_at: when it did, epoch seconds, or a later write of any field by the same manager. None for a change
            through the Deployment's scale, as ours, an HPA's and `kubectl scale` are: the API keeps no time of those.
        paused: why a person has paused this target by an annotation; "" when it is not paused.
        pin: replicas that a person has pinned the target to; None for no pin.
        direction: what a person allows.
        approved: the id of the proposal that a person has approved; "" for none.
        pods: owned by owner references, whatever their phase.
    """

    namespace: str
    name: str
    uid: str = ""
    current_replicas: int
    status_replicas: int = 0
    ready_replicas: int = 0
    updated_replicas: int = 0
    rollout: bool = False
    rollout_unhealthy: bool = False
    rollout_failed: bool = False
    deployment_paused: bool = False
    refused: str = ""
    drain: Drain | None = None
    template: Template | None = None
    other_owner: str = ""
    scaled_by: str = ""
    scaled_at: float | None = None
    paused: str = ""
    pin: int | None = None
    direction: Direction = Direction.BOTH
    approved: str = ""
    pods: tuple[Pod, ...] = ()


class EngineKey(NamedTuple):
    """Identity of one engine: a pod and, in it, the data-parallel rank."""

    pod_uid: str
    engine: str = "0"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HistogramRows:
    """One histogram of the engines that share a bucket layout.

    Args:
        bounds: upper bounds, ascending, the last is +Inf.
        rows: shape (k,), which rows of `Engines.keys` these are, ascending.
        counts: shape (k, len(bounds)), cumulative counts since each engine's start.
    """

    bounds: tuple[float, ...]
    rows: Ints
    counts: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Engines:
    """What the engines' pages said, one row an engine.

    Args:
        keys: the rows' identities, sorted.
        values: shape (len(keys), len(signals.ENGINE_COLUMNS)); NaN where a reading is missing.
        histograms: by name from `signals.HISTOGRAMS`, one entry per bucket layout; an absent name was not read.
    """

    keys: tuple[EngineKey, ...]
    values: Floats
    histograms: Mapping[str, tuple[HistogramRows, ...]] = field(default_factory=dict)


class Attribution(StrEnum):
    """How sure it is that a device's memory is the pod's."""

    EXCLUSIVE = "exclusive"
    PER_PROCESS = "per-process"
    DEVICE_ONLY = "device-only"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device, or one MIG instance of it, as one pod sees it.

    A device that several pods of the target share gives one value per pod with `shared` set.

    Args:
        uuid, instance: identity; `instance` is the MIG GPU instance id, "" for a whole card.
        pod_uid: the pod it is attributed to, "" for nobody.
        shared: more than one pod uses the device.
        memory_used, memory_free: bytes of the device; None when unknown. Reserved memory is in neither.
        pod_memory_used: bytes that the pod's own processes hold; None when it cannot be told.
        utilization: ratio in [0, 1]; None when unknown.
        xid: last Xid code, 0 for none.
    """

    uuid: str
    instance: str = ""
    pod_uid: str = ""
    attribution: Attribution = Attribution.EXCLUSIVE
    shared: bool = False
    memory_used: float | None = None
    memory_free: float | None = None
    pod_memory_used: float | None = None
    utilization: float | None = None
    xid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One reading of one whole-target signal, in base units.

    Args:
        signal: name from `signals.TARGET_SIGNALS`.
        at: when the source itself took it, epoch seconds.
        partial: the source said that its answer lacks data: good enough to grow on, not to shrink on.
        source: where it came from, e.g. `prometheus`.
    """

    signal: str
    value: float
    at: float
    partial: bool = False
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reading:
    """What one source returns for one target and tick. Empty parts mean: not this source's business."""

    engines: Engines | None = None
    gpus: tuple[Gpu, ...] = ()
    samples: tuple[Sample, ...] = ()
    gaps: tuple[Gap, ...] = ()
    limits: tuple[PodLimits, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """All that is known of one target at `at` (epoch seconds, whole milliseconds).

    Args:
        schedules: labels of the policy's schedules that are active at `at`.
        limits: batching limits, of the pods that say theirs.
    """

    at: float
    target: TargetStatus
    engines: Engines
    gpus: tuple[Gpu, ...] = ()
    samples: tuple[Sample, ...] = ()
    gaps: tuple[Gap, ...] = ()
    schedules: tuple[str, ...] = ()
    limits: tuple[PodLimits, ...] = ()


class Reason(StrEnum):
    """Why a decision is what it is. Exactly one is primary; bounded, so that it can label a metric."""

    # up
    UP_DEMAND = "up_demand"
    UP_SCORE = "up_score"
    UP_CRITICAL = "up_critical"
    UP_EMERGENCY = "up_emergency"
    UP_SATURATION = "up_saturation"
    UP_FALLBACK = "up_fallback"
    UP_BOUNDS = "up_bounds"
    # down
    DOWN_DEMAND = "down_demand"
    DOWN_SCORE = "down_score"
    DOWN_BOUNDS = "down_bounds"
    # either
    PINNED = "pinned"
    # hold
    STEADY = "steady"
    NO_DATA = "no_data"
    INSUFFICIENT_COMPONENTS = "insufficient_components"
    PARTIAL_NO_SHRINK = "partial_no_shrink"
    NO_READY_PODS = "no_ready_pods"
    GROUP_SIZE = "group_size_mismatch"
    SCALED_TO_ZERO = "scaled_to_zero_externally"
    OTHER_OWNER = "other_owner"
    WRITER_CONFLICT = "writer_conflict"
    PAUSED = "paused"
    LIMITED_DIRECTION = "limited_direction"
    AWAITING_APPROVAL = "awaiting_approval"
    PENDING_CAPACITY = "pending_capacity"
    UNSCHEDULABLE = "unschedulable"
    QUOTA = "quota"
    ROLLOUT = "rollout_in_progress"
    ROLLOUT_UNHEALTHY = "rollout_unhealthy"
    UNREADY_PODS = "unready_pods"
    UNSTABLE_PODS = "unstable_pods"
    WARMING_UP = "warming_up"
    DRAINING = "draining"
    UNSAFE_DRAIN = "unsafe_drain"
    MEMORY_GUARD = "memory_guard"
    MEMORY_COARSE = "memory_coarse"
    DEGRADED = "degraded_latency"
    WOULD_REBOUND = "would_rebound"
    HELD_HYSTERESIS = "held_hysteresis"
    HELD_STABILIZATION = "held_stabilization"
    LIMITED_STEP = "limited_step"
    LIMITED_RATE = "limited_rate"
    HELD_COOLDOWN = "held_cooldown"
    HELD_TURN = "held_turn"
    LIMIT_FIRST = "limit_first"
    HEALTH_FUSE = "health_fuse"
    LIMITED_MAX = "limited_max"
    LIMITED_MIN = "limited_min"


class Mode(StrEnum):
    """The trigger mode: what kind of situation the snapshot shows."""

    NORMAL = "normal"
    IDLE = "idle"
    QPS_SPIKE = "qps_spike"
    LONG_CONTEXT_BLOCK = "long_context_block"
    BATCH_JITTER = "batch_jitter"
    INFERENCE_BLOCKED = "inference_blocked"
    MEMORY_IMBALANCE = "memory_imbalance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One component of the score.

    Args:
        name: "memory", "backlog" or "latency".
        weight: its share, before renormalisation.
        value: in [0, 1], pods without data counted as no load: what growth is judged by. None when unknown.
        shrink_value: the same with pods without data, or still warming up, counted as loaded. None forbids shrinking.
        driver: which input binds and its reading, e.g. `kv_cache_usage 0.62`.
        gap: why the value, or only the `shrink_value`, is missing.
        clear_value: what `clear` is held against where that is not the `shrink_value`: see `score._pace`.
    """

    name: str
    weight: float
    value: float | None
    shrink_value: float | None
    driver: str = ""
    gap: GapReason | None = None
    clear_value: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The weighted pressure.

    Args:
        value: over the known weight; None when less than half of the weight is known.
        shrink_value: the same by the parts' `shrink_value`; None when any part cannot vouch for shrinking.
        known_weight: weight of the known parts.
        binds: the part that contributes most.
        memory_guard: the out-of-memory guard HR in [0, 1]; None without device memory.
        degraded: an SLO on a share of requests is missed: blocks scale-down.
    """

    value: float | None
    shrink_value: float | None
    known_weight: float
    parts: tuple[Part, ...]
    binds: str = ""
    memory_guard: float | None = None
    degraded: bool = False

    def part(self, name: str) -> Part:
        """Return the part of that name."""
        return next(part for part in self.parts if part.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The replicas that the newest minute's work needs, fractional, per binding term.

    None of the terms is known when `gap` says why.

    Args:
        itl: to keep the mean inter-token latency under its share of the SLO.
        kv: to hold the resident tokens.
        sequences: to hold the sequences.
    """

    itl: float | None = None
    kv: float | None = None
    sequences: float | None = None
    gap: GapReason | None = None

    @property
    def value(self) -> float | None:
        """The largest term."""
        terms = [term for term in (self.itl, self.kv, self.sequences) if term is not None]
        return max(terms) if terms else None

    @property
    def binds(self) -> str:
        """The name of the largest term."""
        if self.itl is None or self.kv is None or self.sequences is None:
            return ""
        return max(("itl", self.itl), ("kv", self.kv), ("sequences", self.sequences), key=lambda pair: pair[1])[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Since when one term of demand behaves as it does now.

    Args:
        since: when its last change was found, epoch seconds; None when the whole window is of one kind.
        relative_sd: its remembered deviation, as a share of its level.
    """

    since: float | None = None
    relative_sd: float = 0.04


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is expected `horizon_s` from now.

    Args:
        horizon_s: p90 of the learned time from ordered to ready, plus one interval.
        level, top: demand now and at the horizon, replicas, fractional, of the binding term; None without demand.
        sigma: the margin's standard deviation, replicas.
        up, keep: replicas wished for: grow to `up`, do not shrink below `keep`; None without demand.
        changed: a regime change was found at this tick: bins before it were forgotten.
        regimes: of the demand terms, in `Demand`'s order.
        score: the score expected at the horizon in [0, 1], by the score forecaster; None without one.
        gap: why there is no demand forecast.
    """

    horizon_s: float
    level: float | None = None
    top: float | None = None
    sigma: float | None = None
    up: int | None = None
    keep: int | None = None
    changed: bool = False
    regimes: tuple[Regime, ...] = (Regime(), Regime(), Regime())
    score: float | None = None
    gap: GapReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bounds that hold at a moment, and the labels of the schedules that move them."""

    min: int
    max: int
    by: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"min {self.min}, max {self.max}" + (f" by schedule {', '.join(self.by)}" if self.by else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One rule's effect on a proposal: the count before and after, and the rule's own words."""

    rule: Reason
    before: int
    after: int
    detail: str = ""


_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A proposal that stands until a person approves it, or it expires.

    Args:
        up: to more replicas, or to fewer.
        to: how many.
        made_at, expires_at, wished_at: when it was made, when it ends, when it was last wished for; epoch seconds.
    """

    up: bool
    to: int
    made_at: float
    expires_at: float
    wished_at: float

    @property
    def id(self) -> str:
        """What a person approves it by, e.g. `up-to-4-t6hxuo`: the count, and the second in which it was made."""
        rest, letters = int(self.made_at), ""
        while rest:
            rest, digit = divmod(rest, 36)
            letters = _DIGITS[digit] + letters
        return f"{'up' if self.up else 'down'}-to-{self.to}-{letters or '0'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A replica count on its way through the guards.

    Args:
        current: replicas now, the base of every change.
        replicas: where it stands.
        reason: the primary reason so far.
        urgent: it may pass the upward cooldown and the upward window (emergency or saturation).
        final: nothing may be written, whatever the bounds say (another owner, zero by hand).
        steps: the rules that shaped it, in order.
        wished: where it stood before any guard.
        recommended: what this tick adds to the stabilization windows: (to grow to, to keep); None adds nothing.
        standing: what waits for a person's approval, or is approved and done now; None where nothing is proposed.
    """

    current: int
    replicas: int
    reason: Reason
    urgent: bool = False
    final: bool = False
    steps: tuple[Step, ...] = ()
    wished: int | None = None
    recommended: tuple[int, int] | None = None
    standing: Standing | None = None

    def moved_to(self, replicas: int, rule: Reason, detail: str = "") -> Self:
        """Return the proposal at `replicas`, with `rule` noted; the rule is the reason if nothing is left to do."""
        if replicas == self.replicas:
            return self
        step = Step(rule=rule, before=self.replicas, after=replicas, detail=detail)
        reason = rule if replicas == self.current else self.reason
        return replace(self, replicas=replicas, reason=reason, steps=(*self.steps, step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionCost:
    """A pod's deletion cost that a shrink needs changed, provided that the pod still is `uid`.

    Args:
        cost: what to set; None removes the annotation.
        requests: running and waiting ones when it was decided; None when unknown.
    """

    pod: str
    uid: str
    cost: int | None
    requests: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleReplicas:
    """Set `spec.replicas` to `to`, provided that it still is `seen` and the Deployment still is `uid`.

    Args:
        costs: to be written before, so that Kubernetes takes the right pods.
    """

    seen: int
    to: int
    uid: str = ""
    costs: tuple[DeletionCost, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PodBatching:
    """The limits that one pod's engines are to be told, provided that the pod still is `uid`.

    Args:
        generation: of what it had been told when this was decided.
    """

    pod: str
    uid: str
    ip: str = ""
    limits: Limits
    generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SetBatching:
    """Set batching limits, each pod's within its own ceiling.

    Args:
        limits: of the target, which pods that come later are told too.
    """

    limits: Limits
    pods: tuple[PodBatching, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RollOut:
    """Set batching limits in the pod template, and a note beside them, by one write that restarts every pod.

    Provided that the arguments still say what was seen, and that the Deployment and its note still are the same.

    Args:
        container: whose arguments are changed.
        seen: the limits that they say. limits: that they are to say; the same where only the note is written.
        note: the annotation that is written. note_seen: the one that it replaces; "" for none.
        back: to limits that were there before.
    """

    uid: str
    container: str
    seen: Limits
    limits: Limits
    note: str
    note_seen: str = ""
    back: bool = False

    @property
    def restarts(self) -> bool:
        """Whether the pods are restarted: by another template than the one that is there."""
        return self.seen != self.limits

    @property
    def begins(self) -> bool:
        """Whether something new is tried."""
        return self.restarts and not self.back


Action = Hold | ScaleReplicas | SetBatching | RollOut

FIELD_MANAGER = "autoscaler"
"""The name under which our writes are entered in a Deployment's `managedFields`."""


class Bound(StrEnum):
    """What holds the engines back."""

    UNKNOWN = "unknown"
    KV = "kv_bound"
    SEQUENCES = "sequence_bound"
    PREFILL = "prefill_bound"
    BUDGET = "budget_bound"
    UNDERLOADED = "underloaded"
    HEALTHY = "healthy"


class BatchReason(StrEnum):
    """Why batching limits are moved, or are not. Bounded, so that it can label a metric."""

    # moved
    LOWER_MEMORY = "lower_memory"
    RESTORE_MEMORY = "restore_memory"
    LOWER_PREEMPTIONS = "lower_preemptions"
    RAISE_SEQUENCES = "raise_sequences"
    LOWER_BUDGET = "lower_budget"
    RAISE_BUDGET = "raise_budget"
    REVERTED = "reverted"
    ALIGN = "align"
    # not moved
    STEADY = "steady"
    KEPT = "kept"
    OBSERVING = "observing"
    COOLDOWN = "cooldown"
    REPLICAS_FIRST = "replicas_first"
    REPLICAS_MOVING = "replicas_moving"
    NEEDS_REPLICAS = "needs_replicas"
    AT_LIMIT = "at_limit"
    BLACKLISTED = "blacklisted"
    INVALID = "invalid_batch_config"
    NO_DATA = "no_data"
    NO_PLUGIN = "no_plugin"
    NOT_OURS = "not_ours"
    DEPLOYMENT_PAUSED = "deployment_paused"
    # of a rollout
    ROLLING_OUT = "rolling_out"
    ROLLED_BACK = "rolled_back"
    NOT_EXPRESSIBLE = "cannot_be_expressed"
    TEMPLATE_OWNED = "template_owned"
    NO_SURGE_ROOM = "no_surge_room"
    ROLLOUT_UNDER_WAY = "rollout_in_progress"
    ROLLOUT_BUDGET = "rollout_budget"
    AWAITING_APPROVAL = "awaiting_approval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """How the engines fared over a window. None is unknown.

    Args:
        seconds: its length.
        running, waiting: requests of one engine, on average. peak: the most that ran, an engine, at one tick.
        kv_usage: share of the KV blocks that were held, on average.
        preemptions: of the target, at least. finished: requests of the target that ended.
        recomputing: share of an engine's time that computing preempted requests anew takes, by the learned step times.
        tokens_per_s: generated by the target.
        sequence_tokens: prompt and answer of a request, on average.
        itl_s, ttft_s: at the objectives' quantiles. itl_mean_s: on average.
    """

    seconds: float
    running: float
    waiting: float
    peak: float
    preemptions: float
    finished: float
    tokens_per_s: float
    recomputing: float | None = None
    kv_usage: float | None = None
    sequence_tokens: float | None = None
    itl_s: float | None = None
    itl_mean_s: float | None = None
    ttft_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """What a tick makes of the batching limits.

    Args:
        bound: what holds the engines back.
        reason: why limits are moved, or are not.
        limits: that hold for the target. wanted: that it should have; None where nothing is to be moved.
        pods: that are to be told.
        measured: what it was judged by.
        detail: in words.
        tried: the limits are to be kept or reverted by what comes of them.
        settle_s: until they are taken to show. observe_s: over which they are judged after that.
        ended: what was tried before is judged, or cannot be judged any more.
        harmed: it did harm, and was not merely of no use.
        left_alone: names of serving pods whose limits are not moved, and why.
        roll_out: what is to be written into the pod template, where the limits are moved there.
        applied: every serving pod is of the template's newest revision; None where limits are not moved there.
        verified: the engines have shown the limits of the last rollout; None where they have shown nothing of them.
        standing: the rollout that waits for a person's approval.
    """

    bound: Bound
    reason: BatchReason
    limits: Limits = field(default_factory=Limits)
    wanted: Limits | None = None
    pods: tuple[PodBatching, ...] = ()
    measured: Measured | None = None
    detail: str = ""
    tried: bool = False
    settle_s: float = 0.0
    observe_s: float = 0.0
    ended: bool = False
    harmed: bool = False
    left_alone: tuple[tuple[str, str], ...] = ()
    roll_out: RollOut | None = None
    applied: bool | None = None
    verified: bool | None = None
    standing: Standing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignChange:
    """A change of `spec.replicas` by somebody else.

    Args:
        at: when it was seen, epoch seconds.
        before, after: the replicas.
        by: the field manager.
        written_at: when it was made, where the API server says; see `TargetStatus.scaled_at`.
        undid: the replicas before were ours.
    """

    at: float
    before: int
    after: int
    by: str
    written_at: float | None = None
    undid: bool = False

    def __str__(self) -> str:
        return f"{self.by} changed {'our ' if self.undid else ''}{self.before} to {self.after}"


class Outcome(StrEnum):
    """What became of an action. Only APPLIED and SIMULATED start a cooldown. STANDBY: another process leads."""

    APPLIED = "applied"
    SIMULATED = "simulated"
    UNCHANGED = "unchanged"
    FAILED = "failed"
    STANDBY = "standby"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One target's decision of one tick, with all that explains it.

    Args:
        reason: the one primary reason.
        mode: the trigger mode.
        action: what to do.
        unblocks: what would have to change for the next action, one line a direction; "why not now".
        change: what somebody else did to the replicas since the last tick.
        bounds: those that hold while a schedule moves them; None where they are the policy's own.
        batching: what was made of the batching limits; None where the policy leaves them alone.
    """

    at: float
    score: Score | None
    demand: Demand
    forecast: Forecast
    proposal: Proposal
    reason: Reason
    mode: Mode
    action: Action
    unblocks: tuple[str, ...] = ()
    change: ForeignChange | None = None
    bounds: Bounds | None = None
    batching: Batching | None = None
