"""Frozen policy values: their defaults and their invariants. The only definition of what a policy file may say.

A field `some_name` is the key `someName`; a field that ends in `_s` holds seconds and is written as a duration under
the key without that ending (`stabilization_s` is `stabilization: 30s`). `policy_file` does the reading, and takes the
reference of all keys from the docstrings here.
"""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from autoscaler.core.signals import TARGET_SIGNAL
from autoscaler.core.types import Bounds

Complaint = tuple[str, object, str]
"""A broken invariant: dotted field path inside the policy, its value, and what would be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRef:
    """Which Deployment to scale.

    Args:
        deployment: its name.
        namespace: where it is.
        kind: only `Deployment` can be scaled.
        pods_per_replica: pods that make one replica, where a replica is a group of pods.
    """

    deployment: str
    namespace: str = "default"
    kind: str = "Deployment"
    pods_per_replica: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaBounds:
    """How few and how many replicas there may be.

    Args:
        max: never more; nothing but a schedule's own `max` overrules it.
        min: never fewer; the same as `max` pins the size.
    """

    max: int
    min: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A window of time in which other bounds hold; one begins at every match of its cron expression.

    Args:
        cron: minute, hour, day of month, month, day of week, e.g. `0 8 * * 1-5`.
        duration_s: how long a window lasts, in elapsed time whatever the clocks show; at most 7 days.
        timezone: of the cron expression, e.g. `Europe/Berlin`, with its changes to and from daylight saving time.
        min: instead of `replicas.min` meanwhile; null leaves it as it is.
        max: instead of `replicas.max` meanwhile; null leaves it as it is.
        lead_s: a window begins this much before the match: the time that a model takes to load.
        name: of the schedule in decisions; "" takes cron expression and time zone.
    """

    cron: str
    duration_s: float
    timezone: str = "UTC"
    min: int | None = None
    max: int | None = None
    lead_s: float = 0.0
    name: str = ""

    @property
    def label(self) -> str:
        """What decisions call it; different for each schedule of a policy."""
        return self.name or f"{self.cron} {self.timezone}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusServer:
    """A server that speaks the Prometheus HTTP API, and how to be let in.

    Args:
        url: base URL; a path prefix is kept. Credentials do not belong in it.
        bearer_token_file: re-read before each use, so that a rotated token is taken up.
        username: of basic authentication, with `password_file`.
        password_file: the password of basic authentication, re-read before each use.
        ca_file: the CA that signed the server's certificate; without it the system's.
        cert_file: client certificate for mTLS, with `key_file`.
        key_file: private key of the client certificate.
        insecure_skip_verify: do not verify the server's certificate.
        headers: extra request headers, such as a tenant's (`X-Scope-OrgID`).
        timeout_s: for one query, below the policy's interval.
    """

    url: str
    bearer_token_file: str | None = None
    username: str | None = None
    password_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    insecure_skip_verify: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSignals:
    """How the engines' pages are read.

    Args:
        port: of each pod's metrics page.
        path: of each pod's metrics page.
        scheme: of each pod's metrics page, `http` or `https`.
        model_name: count only series of this served model; "" counts all.
        timeout_s: for one page.
        stale_after_s: a page older than this counts as missing.
        prometheus: name of a server under `signals.prometheus`, or its URL; the same series are then read there.
        scrape_interval_s: how often that server scrapes, for judging its samples' age.
    """

    port: int = 8000
    path: str = "/metrics"
    scheme: Literal["http", "https"] = "http"
    model_name: str = ""
    timeout_s: float = 3.0
    stale_after_s: float = 15.0
    prometheus: str | None = None
    scrape_interval_s: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DcgmSignals:
    """How the DCGM exporters are read: their pages directly, or through a Prometheus server.

    Args:
        urls: exporter pages to scrape. `{node_ip}` or `{node}` is replaced for each node that runs a pod of the target.
        prometheus: name of a server under `signals.prometheus`, or its URL, instead of `urls`.
        interval_s: how often to read; exporters refresh every 30 s by default.
        stale_after_s: a page older than this counts as missing.
    """

    urls: tuple[str, ...] = ()
    prometheus: str | None = None
    interval_s: float = 15.0
    stale_after_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlSignals:
    """Read the cards of this machine through NVML: a single node without an exporter.

    Args:
        timeout_s: a call that takes longer marks its device as lost for this tick.
        single_pod: attribute every card to the only pod on this node, when processes cannot be mapped to pods.
    """

    timeout_s: float = 2.0
    single_pod: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One whole-target signal by PromQL.

    Args:
        signal: what the query gives, e.g. `upstream_queue`, `ttft`, `gpu_utilization`.
        query: must give one sample, in the signal's base unit.
        server: name of a server under `signals.prometheus`, or its URL.
        stale_after_s: how old the underlying sample may be.
        scrape_interval_s: how often that server scrapes; a range below twice this gives empty answers.
    """

    signal: str
    query: str
    server: str = "default"
    stale_after_s: float = 60.0
    scrape_interval_s: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """Where signals come from.

    Args:
        vllm: the engines' own pages; null reads none.
        dcgm: DCGM exporters, for the out-of-memory guard.
        nvml: the cards of this machine, without an exporter.
        prometheus: servers by name.
        queries: whole-target signals by PromQL, each beside or instead of what the engines' pages say.
    """

    vllm: VllmSignals | None = field(default_factory=VllmSignals)
    dcgm: DcgmSignals | None = None
    nvml: NvmlSignals | None = None
    prometheus: dict[str, PrometheusServer] = field(default_factory=dict)
    queries: tuple[Query, ...] = ()

    def server(self, name: str) -> PrometheusServer | None:
        """Return the server of that name, or one with defaults where `name` is a URL; None when there is none."""
        if name.startswith(("http://", "https://")):
            return PrometheusServer(url=name)
        return self.prometheus.get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """A latency objective: a quantile of the requests (for ITL: of the tokens) takes at most so many seconds.

    Args:
        seconds: the objective; a duration such as `2s` or `80ms` is understood as well.
        quantile: the share of requests or tokens that must meet it.
    """

    seconds: float
    quantile: float = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class WithinSlo:
    """A share objective: at least a share of the requests takes at most so many seconds.

    Args:
        seconds: the bound; best one that is a bucket bound of the engines' histogram.
        share: of the requests, below which the target counts as degraded.
        metric: `ttft` or `e2e`.
    """

    seconds: float = 2.0
    share: float = 0.95
    metric: Literal["ttft", "e2e"] = "e2e"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slos:
    """The service-level objectives. At least one of them; null switches one off.

    Args:
        ttft: time to first token, queueing included.
        itl: inter-token latency; sizing by demand needs it.
        e2e: time to the last token.
        within: an objective on the share of requests.
    """

    ttft: Slo | None = field(default_factory=lambda: Slo(seconds=2.0))
    itl: Slo | None = field(default_factory=lambda: Slo(seconds=0.1))
    e2e: Slo | None = None
    within: WithinSlo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Shares of the parts in the score; they sum to 1.

    Args:
        memory: of KV cache, preemptions and the out-of-memory guard.
        backlog: of queues.
        latency: of the objectives.
    """

    memory: float = 0.40
    backlog: float = 0.35
    latency: float = 0.25


class MemorySource(StrEnum):
    """What the memory part reads."""

    KV_CACHE = "kvCache"
    FRAMEBUFFER = "framebuffer"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """Memory M = max(KV, PRE, oomWeight x HR).

    Args:
        source: `kvCache`; `framebuffer` is for servers without a KV-cache gauge, and only grows.
        kv_full: KV usage that counts as 1.
        preemption_full: preemptions per finished request that count as 1; 0 leaves preemptions out.
        oom_weight: weight of the out-of-memory guard; below `score.critical`, since another replica empties no card.
    """

    source: MemorySource = MemorySource.KV_CACHE
    kv_full: float = 0.90
    preemption_full: float = 0.10
    oom_weight: float = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class BacklogPart:
    """Backlog B = max of the terms that are set.

    Args:
        waiting_per_replica: waiting requests per ready replica that count as 1; null leaves the term out.
        waiting_total: waiting requests of the whole target that count as 1, whatever its size; null leaves it out.
        wait_s: queueing time that counts as 1; null leaves the term out.
        upstream: requests queued in front of the engines that count as 1; needs a query for `upstream_queue`.
        pending_pods: Pending pods, less those that we ordered, that count as 1; null leaves the term out.
        combine: `max`, or `weighted` by `weights`.
        weights: shares of waiting requests, Pending pods and queueing time, in this order, when `weighted`; sum 1.
    """

    waiting_per_replica: float | None = 20.0
    waiting_total: float | None = None
    wait_s: float | None = 5.0
    upstream: float = 50.0
    pending_pods: float | None = None
    combine: Literal["max", "weighted"] = "max"
    weights: tuple[float, float, float] = (0.40, 0.35, 0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyPart:
    """Latency L = max over SLOs of c((quantile / SLO - floor) / (1 - floor)).

    Args:
        floor: share of the SLO that counts as 0.
        min_observations: with fewer in the window it is widened to `max_window_s`, then the part is missing.
        max_window_s: the widest window.
    """

    floor: float = 0.5
    min_observations: int = 20
    max_window_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePolicy:
    """How readings become pressure.

    Args:
        weights: shares of the three parts.
        memory: how the memory part is read.
        backlog: how the backlog part is read.
        latency: how the latency part is read.
        min_known_weight: less known weight than this makes no score.
        critical: a part at or above it asks for scale-up by itself; 2 switches the rule off.
        clear: scale-down needs every part below it; 2 switches the rule off. Where demand sizes, the mean ITL is held
            against it, and the TTFT that twice the allowed share of the requests may miss.
        window_s: over which counters and histograms are differenced.
        warm_up_s: a pod ready for less than this supports no shrinking.
    """

    weights: Weights = field(default_factory=Weights)
    memory: MemoryPart = field(default_factory=MemoryPart)
    backlog: BacklogPart = field(default_factory=BacklogPart)
    latency: LatencyPart = field(default_factory=LatencyPart)
    min_known_weight: float = 0.5
    critical: float = 0.95
    clear: float = 0.95
    window_s: float = 60.0
    warm_up_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RateBudget:
    """At most this much change per period, as in a HorizontalPodAutoscaler's behavior.

    Args:
        type: `Pods`, or `Percent` of the replicas at the period's start.
        value: how many pods, or how many percent.
        period_s: over which the change is counted.
    """

    type: Literal["Pods", "Percent"]
    value: int
    period_s: float


class Select(StrEnum):
    """Which of several budgets counts, as in a HorizontalPodAutoscaler."""

    MAX = "Max"
    MIN = "Min"
    DISABLED = "Disabled"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUp:
    """When and how fast to grow.

    Args:
        threshold: score at or above which to grow.
        max_step: replicas an action; null for no limit of this kind.
        max_step_share: or this share of the current replicas, rounded down, where that is more.
        stabilization_s: the window whose minimum counts.
        cooldown_s: since any action; null takes `spec.cooldown`.
        turn_s: since the last step down; emergency and saturation pass it.
        budgets: rate budgets beside `max_step`.
        select: which of several budgets counts: `Max` the largest, `Min` the smallest, `Disabled` no growth at all.
    """

    threshold: float = 0.70
    max_step: int | None = 2
    max_step_share: float = 0.1
    stabilization_s: float = 30.0
    cooldown_s: float | None = None
    turn_s: float = 600.0
    budgets: tuple[RateBudget, ...] = ()
    select: Select = Select.MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Victims:
    """Which pods a shrink takes. Without the right to patch pods, leave it to the cluster.

    Args:
        order: `cluster` leaves it to Kubernetes, which knows no load; `emptiest` marks the pods with the least work.
        on_failure: when a pod cannot be marked: `proceed` shrinks all the same, `hold` does not.
    """

    order: Literal["cluster", "emptiest"] = "cluster"
    on_failure: Literal["proceed", "hold"] = "proceed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDown:
    """When and how fast to shrink.

    Args:
        threshold: score at or below which to shrink.
        max_step: replicas an action; null for no limit of this kind.
        max_step_share: or this share of the current replicas, rounded down, where that is more.
        stabilization_s: the window whose maximum counts; it must be full.
        horizon_factor: the window is at least this many horizons.
        cooldown_s: since any action; null takes `spec.cooldown`.
        turn_s: since the last step up.
        budgets: rate budgets beside `max_step`.
        select: which of several budgets counts: `Max` the largest, `Min` the smallest, `Disabled` no shrinking at all.
        serialize_drain: no step while pods of the last one still terminate.
        drain_s: how long requests may take to end once preStop is over; null looks at nothing.
        require_drain: hold shrinking while the pod template leaves less time than `drain`; false only warns.
        victims: which pods go.
    """

    threshold: float = 0.40
    max_step: int | None = 1
    max_step_share: float = 0.1
    stabilization_s: float = 300.0
    horizon_factor: float = 1.25
    cooldown_s: float | None = None
    turn_s: float = 600.0
    budgets: tuple[RateBudget, ...] = ()
    select: Select = Select.MAX
    serialize_drain: bool = False
    drain_s: float | None = None
    require_drain: bool = False
    victims: Victims = field(default_factory=Victims)


class Sizing(StrEnum):
    """What says how many."""

    DEMAND = "demand"
    SCORE = "score"


class Forecaster(StrEnum):
    """How the score itself is projected; demand has its own law."""

    NONE = "none"
    TREND = "trend"
    LAG = "lag"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The sliding window and its forecast.

    Args:
        window_s: how long demand is remembered, in bins of `bin_s`.
        bin_s: over which demand is averaged.
        horizon_s: how far ahead; null learns it: p90 of ordered-to-ready plus one interval.
        initial_horizon_s: the learned horizon before the first observed start.
        max_horizon_s: the learned horizon is never above.
        z_up: margin to grow to, in standard deviations.
        z_keep: margin to keep, in standard deviations; the difference to `z_up` is the dead band.
        spare: replicas beyond those, for a surge that comes faster than a replica starts.
        utilization: share of the fluid capacity that is planned for.
        error_quantile: quantile of the target's own forecast errors that widens the margin.
        error_cap: that quantile counts as at most this share of the forecast.
        error_samples: errors remembered, one a minute.
        error_min: with fewer errors the quantile is left out.
        change_sigma: a newest bin this many deviations above the prediction is a regime change.
        min_deviation: floor of the residual deviation, as a share of the level.
        score: forecaster of the score: `none`, `trend` (least squares) or `lag`.
        score_window_s: the window of that forecaster.
        score_horizon_s: how far that forecaster looks ahead.
        alpha: weight of the last value in `lag`, alpha x last + (1 - alpha) x predicted.
    """

    window_s: float = 600.0
    bin_s: float = 60.0
    horizon_s: float | None = None
    initial_horizon_s: float = 180.0
    max_horizon_s: float = 600.0
    z_up: float = 1.2
    z_keep: float = 3.2
    spare: int = 0
    utilization: float = 0.93
    error_quantile: float = 0.95
    error_cap: float = 0.15
    error_samples: int = 240
    error_min: int = 30
    change_sigma: float = 4.8
    min_deviation: float = 0.06
    score: Forecaster = Forecaster.NONE
    score_window_s: float = 120.0
    score_horizon_s: float = 60.0
    alpha: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Coefficients of one engine iteration, t = c0 + cp P + cb B + ck K.

    Args:
        c0: of any iteration [s].
        cp: per prefill token [s].
        cb: per sequence [s].
        ck: per resident token [s].
    """

    c0: float = 0.015
    cp: float = 60e-6
    cb: float = 20e-6
    ck: float = 40e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandPolicy:
    """How work becomes replicas.

    Args:
        itl_share: share of the ITL SLO that the mean ITL may reach.
        kv_share: share of the KV cache that is planned for.
        sequence_share: share of `max_num_seqs` that is planned for.
        max_num_seqs: of one engine, when the pod's arguments do not say.
        prior: step-time coefficients before anything is learned; low rather than high.
        learn: learn the coefficients online.
        min_coverage: a bin in which fewer of the ready engines reported is dropped.
    """

    itl_share: float = 0.90
    kv_share: float = 0.95
    sequence_share: float = 0.95
    max_num_seqs: int = 256
    prior: StepTime = field(default_factory=StepTime)
    learn: bool = True
    min_coverage: float = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Emergency:
    """The paths that pass the upward cooldown.

    Args:
        enabled: false leaves the cooldown to hold always.
        backlog: backlog part at or above which a growing queue is an emergency.
        window_s: over which an emergency measures what arrives.
        hold_s: how long it must grow for the saturation path.
        factor: replicas, in multiples of the ready ones, that saturation orders.
    """

    enabled: bool = True
    backlog: float = 0.95
    window_s: float = 15.0
    hold_s: float = 15.0
    factor: float = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """What a replica that is ordered and not ready counts as.

    Args:
        grace_s: it counts as capacity on its way for this long.
        unschedulable_after_s: a pod without a node for longer stops growth.
        crash_restarts: restarts from which a pod counts as crash-looping.
    """

    grace_s: float = 600.0
    unschedulable_after_s: float = 120.0
    crash_restarts: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """How much must be known.

    Args:
        min_fresh_share: share of ready replicas that must report for a shrink.
        restart_window_s: a restart this recent makes a pod unstable: no shrink.
        alert_after_s: without any score for this long, an alert gauge is set.
    """

    min_fresh_share: float = 0.7
    restart_window_s: float = 600.0
    alert_after_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthFuse:
    """Freezes steps when the last one went wrong; it reopens by itself.

    Args:
        enabled: false switches the fuse off.
        ready_within_s: the last step's pods must be ready by then, else no further growth.
        max_unhealthy_share: share of the pods that may crash or restart.
    """

    enabled: bool = True
    ready_within_s: float = 900.0
    max_unhealthy_share: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnersPolicy:
    """When to stop writing against somebody else who writes the replicas too. One change starts the cooldown only.

    Args:
        reversions: of our writes by others, within `window`, from which on nothing is written.
        window_s: over which they are counted.
        stand_down_s: for how long nothing is written then; after it the policy goes on as before.
    """

    reversions: int = 3
    window_s: float = 600.0
    stand_down_s: float = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Approval:
    """Propose mode: a person approves each step, by the annotation `autoscaler/approve` on the Deployment.

    Args:
        required: write nothing that was not approved.
        expiry_s: a proposal is withdrawn after this long; the next one has another id.
    """

    required: bool = False
    expiry_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """The size to grow to while too little is known for a score.

    Args:
        replicas: grow to so many; never shrink to them.
        after: evaluations in a row without a score, while pods are ready.
    """

    replicas: int
    after: int = 3


class BatchingMode(StrEnum):
    """What moves the batching limits."""

    OFF = "off"
    AUTO = "auto"
    LIVE = "live"
    ROLLOUT = "rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitBounds:
    """Between what one batching limit is moved, within what each engine started with.

    Args:
        min: never lower.
        max: never higher; null for what the engine started with.
    """

    min: int
    max: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLadder:
    """Fewer sequences at once as the card fills up, before it is out of memory; back step by step once there is room.

    Args:
        soft: share of what the engine leaves free of the card, above which sequences go down to `soft_factor`.
        soft_factor: share of the sequences that run now.
        hard: the same share, above which they go down to `hard_factor`.
        hard_factor: share of the sequences that run now.
        hold_s: between two such steps down.
    """

    soft: float = 0.90
    soft_factor: float = 0.75
    hard: float = 0.95
    hard_factor: float = 0.50
    hold_s: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginAccess:
    """How the plugin inside the engines is asked.

    Args:
        token_file: holds the token that the pods have in `AUTOSCALER_PLUGIN_TOKEN_FILE`; re-read before each use.
        api_key_file: holds vLLM's own `--api-key`, where it has one; re-read before each use.
        port: of vLLM's API; null for that of `signals.vllm`.
        timeout_s: for one request, a second one after a generation that another has used included.
    """

    token_file: str | None = None
    api_key_file: str | None = None
    port: int | None = None
    timeout_s: float = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPolicy:
    """Limits that are changed in the pod template: a rolling restart of every pod.

    Args:
        per_day: rollouts begun within 24 hours, those to go back not counted; 0 begins none.
        after_s: the same has to hold the engines back for this long.
    """

    per_day: int = 2
    after_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingPolicy:
    """The second actuator: the engines' batching limits, moved between 1 and what they started with.

    Args:
        mode: `off` leaves the limits alone; `live` moves them by the plugin inside vLLM; `rollout` in the pod template;
            `auto` by the plugin, and, given `rollout`, in the template where no pod has one.
        sequences: bounds of `max_num_seqs`.
        tokens: bounds of `max_num_batched_tokens`.
        window_s: over which the engines are judged.
        observe_s: what was tried is judged after a request's lifetime plus this long, or plus another one if longer.
        max_observe_s: no lifetime counts as longer.
        cooldown_s: between moves, beside their observation.
        tolerance: change of goodput that counts as none.
        limit_first_s: after more sequences were allowed, replicas are not added for this long.
        forget_after_s: what was reverted is not tried again for this long, once it was twice.
        ladder: fewer sequences while the card's memory is short.
        plugin: how the plugin inside the engines is asked.
        rollout: how limits are changed in the pod template; null for never in mode `auto`, and with the
            defaults in mode `rollout`.
    """

    mode: BatchingMode = BatchingMode.OFF
    sequences: LimitBounds = field(default_factory=lambda: LimitBounds(min=8))
    tokens: LimitBounds = field(default_factory=lambda: LimitBounds(min=128))
    window_s: float = 30.0
    observe_s: float = 30.0
    max_observe_s: float = 300.0
    cooldown_s: float = 30.0
    tolerance: float = 0.05
    limit_first_s: float = 15.0
    forget_after_s: float = 21600.0
    ladder: MemoryLadder = field(default_factory=MemoryLadder)
    plugin: PluginAccess = field(default_factory=PluginAccess)
    rollout: RolloutPolicy | None = None

    @property
    def rolls_out(self) -> bool:
        """Whether limits may be changed in the pod template."""
        allowed = self.mode is BatchingMode.AUTO and self.rollout is not None
        return allowed or self.mode is BatchingMode.ROLLOUT


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Everything one target is scaled by.

    Args:
        name: `metadata.name`.
        target: the Deployment to scale.
        replicas: the bounds.
        interval_s: one tick.
        dry_run: decide and explain, write nothing. Without the key the policy is live, unless the daemon is in dry-run.
        signals: where signals come from.
        slo: the service-level objectives.
        score: how readings become pressure.
        sizing: `demand` says how many, or the `score` alone.
        scale_up: when and how fast to grow.
        scale_down: when and how fast to shrink.
        cooldown_s: between actions, where `scale_up` and `scale_down` do not say otherwise.
        prediction: the sliding window and its forecast.
        demand: how work becomes replicas.
        emergency: what may pass the upward cooldown.
        pending: what replicas count as that are ordered and not ready.
        evidence: how much must be known.
        health: what freezes steps when the last one went wrong.
        owners: when to stop writing against another writer of the replicas.
        schedules: windows of time in which other bounds hold. Of several at once the largest `min` and the smallest
            `max` count, and `max` more than `min`.
        approval: whether a person has to approve each step.
        fallback: the size to grow to while too little is known; null holds.
        batching: whether and how the engines' batching limits are moved.
    """

    name: str
    target: TargetRef
    replicas: ReplicaBounds
    interval_s: float = 5.0
    dry_run: bool = False
    signals: Signals = field(default_factory=Signals)
    slo: Slos = field(default_factory=Slos)
    score: ScorePolicy = field(default_factory=ScorePolicy)
    sizing: Sizing = Sizing.DEMAND
    scale_up: ScaleUp = field(default_factory=ScaleUp)
    scale_down: ScaleDown = field(default_factory=ScaleDown)
    cooldown_s: float = 120.0
    prediction: Prediction = field(default_factory=Prediction)
    demand: DemandPolicy = field(default_factory=DemandPolicy)
    emergency: Emergency = field(default_factory=Emergency)
    pending: Pending = field(default_factory=Pending)
    evidence: Evidence = field(default_factory=Evidence)
    health: HealthFuse = field(default_factory=HealthFuse)
    owners: OwnersPolicy = field(default_factory=OwnersPolicy)
    schedules: tuple[Schedule, ...] = ()
    approval: Approval = field(default_factory=Approval)
    fallback: Fallback | None = None
    batching: BatchingPolicy = field(default_factory=BatchingPolicy)

    def bounds(self, active: Collection[str] = ()) -> Bounds:
        """Return the bounds that hold while these schedules, by their labels, are active."""
        open_now = [schedule for schedule in self.schedules if schedule.label in active]
        high = min((one.max for one in open_now if one.max is not None), default=self.replicas.max)
        low = max((one.min for one in open_now if one.min is not None), default=self.replicas.min)
        return Bounds(min=min(low, high), max=high, by=tuple(one.label for one in open_now))

    @property
    def most_replicas(self) -> int:
        """The largest size that any schedule allows."""
        return max((self.replicas.max, *(one.max or 0 for one in self.schedules)))

    @property
    def least_replicas(self) -> int:
        """The smallest size that any schedule, or any two together, may ask for."""
        moved = (bound for one in self.schedules for bound in (one.min, one.max) if bound is not None)
        return min((self.replicas.min, *moved))

    @property
    def up_cooldown_s(self) -> float:
        """Seconds after any action before an up."""
        return self.cooldown_s if self.scale_up.cooldown_s is None else self.scale_up.cooldown_s

    @property
    def down_cooldown_s(self) -> float:
        """Seconds after any action before a down."""
        return self.cooldown_s if self.scale_down.cooldown_s is None else self.scale_down.cooldown_s


MAX_DURATION_S, MAX_LEAD_S = 7 * 86400.0, 86400.0

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_SERVER_NAME = re.compile(r"[A-Za-z0-9_-]+")
_URL = ("http://", "https://")

_AT_LEAST_ONE = (
    "target.pods_per_replica",
    "replicas.max",
    "score.latency.min_observations",
    "scale_up.max_step",
    "scale_down.max_step",
    "prediction.error_samples",
    "prediction.error_min",
    "demand.max_num_seqs",
    "emergency.factor",
    "pending.crash_restarts",
    "fallback.replicas",
    "fallback.after",
    "owners.reversions",
    "batching.sequences.min",
    "batching.sequences.max",
    "batching.tokens.min",
    "batching.tokens.max",
)
_ABOVE_ZERO = (
    "signals.vllm.timeout_s",
    "signals.vllm.stale_after_s",
    "signals.vllm.scrape_interval_s",
    "signals.dcgm.interval_s",
    "signals.dcgm.stale_after_s",
    "signals.nvml.timeout_s",
    "slo.ttft.seconds",
    "slo.itl.seconds",
    "slo.e2e.seconds",
    "slo.within.seconds",
    "score.backlog.waiting_per_replica",
    "score.backlog.waiting_total",
    "score.backlog.wait_s",
    "score.backlog.upstream",
    "score.backlog.pending_pods",
    "score.window_s",
    "prediction.bin_s",
    "prediction.horizon_s",
    "prediction.initial_horizon_s",
    "prediction.change_sigma",
    "prediction.score_window_s",
    "emergency.window_s",
    "demand.prior.c0",
    "approval.expiry_s",
    "batching.window_s",
    "batching.observe_s",
    "batching.max_observe_s",
    "batching.plugin.timeout_s",
)
_NOT_NEGATIVE = (
    "replicas.min",
    "score.weights.memory",
    "score.weights.backlog",
    "score.weights.latency",
    "score.warm_up_s",
    "scale_up.stabilization_s",
    "scale_up.cooldown_s",
    "scale_up.turn_s",
    "scale_down.stabilization_s",
    "scale_down.horizon_factor",
    "scale_down.cooldown_s",
    "scale_down.turn_s",
    "scale_down.drain_s",
    "cooldown_s",
    "prediction.z_up",
    "prediction.spare",
    "prediction.score_horizon_s",
    "demand.prior.cp",
    "demand.prior.cb",
    "demand.prior.ck",
    "emergency.hold_s",
    "pending.grace_s",
    "pending.unschedulable_after_s",
    "evidence.restart_window_s",
    "evidence.alert_after_s",
    "health.ready_within_s",
    "owners.window_s",
    "owners.stand_down_s",
    "batching.cooldown_s",
    "batching.limit_first_s",
    "batching.forget_after_s",
    "batching.ladder.hold_s",
    "batching.rollout.per_day",
    "batching.rollout.after_s",
)
_LIMITS: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
    (_AT_LEAST_ONE, lambda value: value >= 1, "must be at least 1"),
    (_ABOVE_ZERO, lambda value: value > 0, "must be above 0"),
    (_NOT_NEGATIVE, lambda value: value >= 0, "must not be negative"),
)
_RATIOS: dict[str, tuple[str, ...]] = {
    "(0, 1]": (
        "slo.within.share",
        "score.memory.kv_full",
        "score.min_known_weight",
        "scale_up.threshold",
        "prediction.utilization",
        "demand.itl_share",
        "demand.kv_share",
        "demand.sequence_share",
        "demand.min_coverage",
        "emergency.backlog",
        "evidence.min_fresh_share",
        "health.max_unhealthy_share",
        "batching.ladder.soft",
        "batching.ladder.soft_factor",
        "batching.ladder.hard",
        "batching.ladder.hard_factor",
    ),
    "[0, 1]": (
        "score.memory.preemption_full",
        "score.memory.oom_weight",
        "scale_up.max_step_share",
        "scale_down.threshold",
        "scale_down.max_step_share",
        "prediction.error_cap",
        "prediction.min_deviation",
        "prediction.alpha",
    ),
    "(0, 1)": ("slo.ttft.quantile", "slo.itl.quantile", "slo.e2e.quantile", "prediction.error_quantile"),
    "[0, 1)": ("score.latency.floor", "batching.tolerance"),
}


def complaints(policy: Policy) -> Iterator[Complaint]:
    """Yield every invariant that the policy breaks: field path, value, what would be right."""
    yield from _range_complaints(policy)
    yield from _name_complaints(policy)
    yield from _target_complaints(policy)
    yield from _source_complaints(policy.signals)
    yield from _query_complaints(policy.signals)
    yield from _server_complaints(policy.signals)
    yield from _slo_complaints(policy)
    yield from _score_complaints(policy)
    yield from _speed_complaints(policy)
    yield from _prediction_complaints(policy)
    yield from _schedule_complaints(policy)
    yield from _mode_complaints(policy)
    yield from _batching_complaints(policy)


def warnings(policy: Policy) -> Iterator[Complaint]:
    """Yield what is allowed but probably not meant: field path, value, advice."""
    smallest = policy.replicas.min + 1
    down, up = policy.scale_down.threshold, policy.scale_up.threshold
    if policy.sizing is Sizing.SCORE and 1 < smallest <= policy.replicas.max:
        projected = down * smallest / (smallest - 1)
        if projected >= up:
            advice = f"from {smallest} replicas a step down projects to {projected:.2f} >= {up:g}: it would be held"
            yield "scale_down.threshold", down, advice
    if policy.scale_down.stabilization_s < 60.0:
        yield "scale_down.stabilization_s", policy.scale_down.stabilization_s, "below 60s replicas may flap"
    if policy.fallback is not None and policy.fallback.replicas <= policy.replicas.min:
        advice = f"never grows: replicas.min is {policy.replicas.min}"
        yield "fallback.replicas", policy.fallback.replicas, advice
    yield from _window_warnings(policy)
    yield from _timeout_warnings(policy)


def _field(policy: Policy, path: str) -> float | None:
    """Return the number at a dotted path; None where it, or a part of the policy above it, is None."""
    value: object = policy
    for name in path.split("."):
        if value is not None:
            value = getattr(value, name)
    return value if isinstance(value, int | float) else None


def _range_complaints(policy: Policy) -> Iterator[Complaint]:
    for paths, allowed, advice in _LIMITS:
        for path in paths:
            value = _field(policy, path)
            if value is not None and not allowed(value):
                yield path, value, advice
    for interval, paths in _RATIOS.items():
        for path in paths:
            value = _field(policy, path)
            if value is not None:
                yield from _ratio_complaints(path, value, interval)


def _ratio_complaints(path: str, value: float, interval: str) -> Iterator[Complaint]:
    """Complain unless the value is in the interval, written as `(0, 1]`; 1 to 100 was meant as percent."""
    above = value > 0.0 if interval.startswith("(") else value >= 0.0
    below = value < 1.0 if interval.endswith(")") else value <= 1.0
    if 2.0 <= value <= 100.0:
        yield path, value, f"must be a ratio in {interval}, not percent; did you mean {ratio_text(value / 100.0)}?"
    elif not (above and below):
        yield path, value, f"must be a ratio in {interval}"


def ratio_text(ratio: float) -> str:
    """Return a ratio with two decimals, with more where it has more: 0.80, 0.999."""
    return f"{ratio:.2f}" if abs(ratio - round(ratio, 2)) < 1e-9 else f"{ratio:g}"


def _name_complaints(policy: Policy) -> Iterator[Complaint]:
    names = {
        "name": policy.name,
        "target.deployment": policy.target.deployment,
        "target.namespace": policy.target.namespace,
    }
    for path, name in names.items():
        if not _NAME.fullmatch(name):
            yield path, name, "must be a Kubernetes name: lower case letters, digits, - and ., up to 253 characters"


def _target_complaints(policy: Policy) -> Iterator[Complaint]:
    low, high = policy.replicas.min, policy.replicas.max
    if policy.target.kind != "Deployment":
        yield "target.kind", policy.target.kind, "only Deployment can be scaled"
    if low > high >= 1:
        yield "replicas.min", low, f"must not be above replicas.max ({high})"
    if policy.interval_s < 1.0:
        yield "interval_s", policy.interval_s, "must be at least 1s"


def _source_complaints(signals: Signals) -> Iterator[Complaint]:
    if signals.vllm is None and not signals.queries:
        yield "signals", None, "nothing to read: give vllm, or queries"
    for name, used in (("vllm", signals.vllm), ("dcgm", signals.dcgm)):
        if used is not None and used.prometheus is not None:
            yield from _reference_complaints(f"signals.{name}.prometheus", used.prometheus, signals)
    if signals.vllm is not None:
        if not 1 <= signals.vllm.port <= 65535:
            yield "signals.vllm.port", signals.vllm.port, "must be a port, 1 to 65535"
        if not signals.vllm.path.startswith("/"):
            yield "signals.vllm.path", signals.vllm.path, "must start with /"
    if signals.dcgm is not None:
        if not signals.dcgm.urls and signals.dcgm.prometheus is None:
            yield "signals.dcgm", None, "give urls to scrape, or the name of a prometheus server"
        for index, url in enumerate(signals.dcgm.urls):
            yield from _url_complaints(f"signals.dcgm.urls[{index}]", url)


def _query_complaints(signals: Signals) -> Iterator[Complaint]:
    seen: set[str] = set()
    for index, query in enumerate(signals.queries):
        path = f"signals.queries[{index}]"
        if query.signal not in TARGET_SIGNAL:
            yield f"{path}.signal", query.signal, f"must be one of {', '.join(TARGET_SIGNAL)}"
        elif query.signal in seen:
            yield f"{path}.signal", query.signal, "has a query already: one for each signal"
        seen.add(query.signal)
        if not query.query.strip():
            yield f"{path}.query", query.query, "must not be empty"
        yield from _reference_complaints(f"{path}.server", query.server, signals)
        for name, value in (("stale_after_s", query.stale_after_s), ("scrape_interval_s", query.scrape_interval_s)):
            if value <= 0.0:
                yield f"{path}.{name}", value, "must be above 0"


def _reference_complaints(path: str, server: str, signals: Signals) -> Iterator[Complaint]:
    """Complain unless this is the name of a server, or the URL of one."""
    if server.startswith(_URL):
        yield from _url_complaints(path, server)
    elif server not in signals.prometheus:
        known = ", ".join(sorted(filter(_SERVER_NAME.fullmatch, signals.prometheus))) or "none is defined"
        yield path, server, f"no such server under signals.prometheus ({known}), and not a URL"


def _server_complaints(signals: Signals) -> Iterator[Complaint]:
    for name, server in signals.prometheus.items():
        path = f"signals.prometheus.{name}"
        if not _SERVER_NAME.fullmatch(name):
            yield path, None, "a server's name is made of letters, digits, _ and -"
        yield from _url_complaints(f"{path}.url", server.url)
        if (server.cert_file is None) != (server.key_file is None):
            yield f"{path}.cert_file", server.cert_file, "certFile and keyFile go together"
        if (server.username is None) != (server.password_file is None):
            yield f"{path}.username", server.username, "username and passwordFile go together"
        if server.bearer_token_file is not None and server.username is not None:
            yield f"{path}.bearer_token_file", server.bearer_token_file, "give a bearer token or a username, not both"
        if server.timeout_s <= 0.0:
            yield f"{path}.timeout_s", server.timeout_s, "must be above 0"


def _url_complaints(path: str, url: str) -> Iterator[Complaint]:
    host = url.partition("://")[2].partition("/")[0]
    if not url.startswith(_URL) or not host:
        yield path, url, "must be a URL that starts with http:// or https:// and names a host"
    elif "@" in host:
        yield path, url, "must not hold credentials: give username and passwordFile, or bearerTokenFile"


def _slo_complaints(policy: Policy) -> Iterator[Complaint]:
    slo = policy.slo
    if all(objective is None for objective in (slo.ttft, slo.itl, slo.e2e, slo.within)):
        yield "slo", None, "give at least one of ttft, itl, e2e, within"
    if policy.sizing is Sizing.DEMAND and slo.itl is None:
        yield "slo.itl", None, "sizing by demand needs an ITL objective; or set sizing: score"
    if policy.sizing is Sizing.DEMAND and policy.signals.vllm is None:
        yield "sizing", policy.sizing, "sizing by demand needs signals.vllm; or set sizing: score"


def _score_complaints(policy: Policy) -> Iterator[Complaint]:
    score = policy.score
    weights = score.weights
    yield from _sum_complaints("score.weights", (weights.memory, weights.backlog, weights.latency))
    if score.backlog.combine == "weighted":
        yield from _sum_complaints("score.backlog.weights", score.backlog.weights)
    for name, level in (("critical", score.critical), ("clear", score.clear)):
        if not 0.0 < level <= 2.0:
            hint = f"; did you mean {ratio_text(level / 100.0)}?" if 2.0 < level <= 100.0 else ""
            yield f"score.{name}", level, f"must be a ratio in (0, 1], or 2 to switch the rule off{hint}"
    if 0.0 < score.critical <= policy.scale_up.threshold <= 1.0:
        yield "score.critical", score.critical, f"must be above scaleUp.threshold ({policy.scale_up.threshold:g})"
    if score.latency.max_window_s < score.window_s:
        advice = f"must not be below score.window ({score.window_s:g}s)"
        yield "score.latency.max_window_s", score.latency.max_window_s, advice


def _sum_complaints(path: str, shares: tuple[float, ...]) -> Iterator[Complaint]:
    """Complain unless the shares sum to 1 within 1e-6, which lets the rounding of 0.40 + 0.35 + 0.25 pass."""
    total = sum(shares)
    if not abs(total - 1.0) <= 1e-6:
        percent = f"; did you mean {' + '.join(ratio_text(share / 100.0) for share in shares)}?"
        written = " + ".join(f"{share:g}" for share in shares)
        yield path, written, f"must sum to 1, not {written} = {total:g}{percent if abs(total - 100.0) < 1e-6 else ''}"


def _speed_complaints(policy: Policy) -> Iterator[Complaint]:
    up, down = policy.scale_up, policy.scale_down
    if up.threshold <= down.threshold <= 1.0:
        yield "scale_down.threshold", down.threshold, f"must be below scaleUp.threshold ({up.threshold:g})"
    if down.require_drain and down.drain_s is None:
        yield "scale_down.require_drain", True, "needs scaleDown.drain: how long requests may take to end"
    if down.victims.order != "cluster" and policy.target.pods_per_replica > 1:
        advice = "must be cluster with target.podsPerReplica above 1: Kubernetes takes pods, not groups of them"
        yield "scale_down.victims.order", down.victims.order, advice
    for name, budgets in (("scale_up", up.budgets), ("scale_down", down.budgets)):
        for index, budget in enumerate(budgets):
            if budget.value < 1:
                yield f"{name}.budgets[{index}].value", budget.value, "must be at least 1"
            if budget.period_s <= 0.0:
                yield f"{name}.budgets[{index}].period_s", budget.period_s, "must be above 0"


def _prediction_complaints(policy: Policy) -> Iterator[Complaint]:
    prediction = policy.prediction
    if 0.0 < prediction.bin_s < policy.interval_s:
        yield "prediction.bin_s", prediction.bin_s, f"must not be below interval ({policy.interval_s:g}s)"
    elif prediction.bin_s > 0.0 and not 3 <= prediction.window_s / prediction.bin_s <= 60:
        advice = f"must hold 3 to 60 times prediction.bin ({prediction.bin_s:g}s)"
        yield "prediction.window_s", prediction.window_s, advice
    if prediction.z_keep < prediction.z_up:
        yield "prediction.z_keep", prediction.z_keep, f"must not be below prediction.zUp ({prediction.z_up:g})"
    if prediction.max_horizon_s < prediction.initial_horizon_s:
        advice = f"must not be below prediction.initialHorizon ({prediction.initial_horizon_s:g}s)"
        yield "prediction.max_horizon_s", prediction.max_horizon_s, advice
    if prediction.error_min > prediction.error_samples:
        advice = f"must not be above prediction.errorSamples ({prediction.error_samples})"
        yield "prediction.error_min", prediction.error_min, advice


def _schedule_complaints(policy: Policy) -> Iterator[Complaint]:
    """Complain about all but the cron expression and the time zone, which a library reads at the edge."""
    seen: set[str] = set()
    for index, schedule in enumerate(policy.schedules):
        path = f"schedules[{index}]"
        if schedule.label in seen:
            yield f"{path}.name", schedule.name or None, f"{schedule.label} is there already: give each its own name"
        seen.add(schedule.label)
        if not 0.0 < schedule.duration_s <= MAX_DURATION_S:
            yield f"{path}.duration_s", schedule.duration_s, "must be above 0s and at most 7d"
        if not 0.0 <= schedule.lead_s <= MAX_LEAD_S:
            yield f"{path}.lead_s", schedule.lead_s, "must be at most 1d"
        yield from _moved_bounds_complaints(path, schedule, policy.replicas)


def _mode_complaints(policy: Policy) -> Iterator[Complaint]:
    approval = policy.approval
    if approval.required and 0.0 < approval.expiry_s < 2.0 * policy.interval_s:
        yield "approval.expiry_s", approval.expiry_s, f"must be at least two intervals ({policy.interval_s:g}s)"
    if policy.fallback is not None and policy.fallback.replicas > policy.most_replicas >= 1:
        yield "fallback.replicas", policy.fallback.replicas, f"must not be above replicas.max ({policy.most_replicas})"


def _batching_complaints(policy: Policy) -> Iterator[Complaint]:
    batching = policy.batching
    for name, bounds in (("sequences", batching.sequences), ("tokens", batching.tokens)):
        if bounds.max is not None and bounds.max < bounds.min:
            yield f"batching.{name}.min", bounds.min, f"must not be above its max ({bounds.max})"
    ladder = batching.ladder
    if ladder.hard < ladder.soft:
        yield "batching.ladder.hard", ladder.hard, f"must not be below batching.ladder.soft ({ladder.soft:g})"
    if batching.plugin.port is not None and not 1 <= batching.plugin.port <= 65535:
        yield "batching.plugin.port", batching.plugin.port, "must be a port, 1 to 65535"
    if batching.mode is not BatchingMode.OFF:
        if policy.signals.vllm is None:
            yield "batching.mode", batching.mode, "needs signals.vllm: the limits are judged by the engines' pages"
        if batching.rollout is not None and batching.mode is BatchingMode.LIVE:
            yield "batching.rollout", None, "is of no use in mode live: the mode must be auto or rollout"
        if 0.0 < batching.window_s < 2.0 * policy.interval_s:
            yield "batching.window_s", batching.window_s, f"must be at least two intervals ({policy.interval_s:g}s)"


def _moved_bounds_complaints(path: str, schedule: Schedule, own: ReplicaBounds) -> Iterator[Complaint]:
    low, high = schedule.min, schedule.max
    if low is None and high is None:
        yield path, None, "moves nothing: give min, max or both"
    elif low is not None and low < 0:
        yield f"{path}.min", low, "must not be negative"
    elif high is not None and high < 1:
        yield f"{path}.max", high, "must be at least 1"
    elif low is not None and high is not None and low > high:
        yield f"{path}.min", low, f"must not be above its max ({high})"
    elif low is not None and high is None and low > own.max:
        yield f"{path}.min", low, f"must not be above replicas.max ({own.max}); give the schedule a max as well"
    elif high is not None and low is None and high < own.min:
        yield f"{path}.max", high, f"must not be below replicas.min ({own.min}); give the schedule a min as well"


_STRING = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|`[^`]*`")
_RANGE = re.compile(r"\[\s*((?:[0-9]+(?:ms|[smhdwy]))+|[0-9]+(?:\.[0-9]+)?)\s*\]")
_RANGE_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|[smhdwy]?)")
_UNIT_S = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "y": 31536000.0}


def _ranges(promql: str) -> Iterator[tuple[str, float]]:
    """Yield the range selectors of a query, as written and in seconds. Subqueries have a resolution of their own."""
    for match in _RANGE.finditer(_STRING.sub('""', promql)):
        parts = _RANGE_PART.findall(match[1])
        yield match[0], sum(float(number) * _UNIT_S[unit] for number, unit in parts)


def _window_warnings(policy: Policy) -> Iterator[Complaint]:
    """Yield the windows too short for two samples: they give empty answers, not rates."""
    vllm, window_s = policy.signals.vllm, policy.score.window_s
    if vllm is not None:
        paged = vllm.prometheus is None
        every_s, key = (
            (policy.interval_s, "interval") if paged else (vllm.scrape_interval_s, "signals.vllm.scrapeInterval")
        )
        if window_s < 2.0 * every_s:
            advice = f"shorter than two samples ({key} {every_s:g}s): rates will be missing; use {4.0 * every_s:g}s"
            yield "score.window_s", window_s, advice
    for index, query in enumerate(policy.signals.queries):
        every_s = query.scrape_interval_s
        for written, range_s in _ranges(query.query):
            if range_s < 2.0 * every_s:
                advice = f"{written} is shorter than two scrapes ({every_s:g}s): it gives empty answers"
                yield f"signals.queries[{index}].query", written, f"{advice}; use [{4.0 * every_s:g}s]"


def _timeout_warnings(policy: Policy) -> Iterator[Complaint]:
    timeouts = {f"signals.prometheus.{name}.timeout_s": s.timeout_s for name, s in policy.signals.prometheus.items()}
    if policy.signals.vllm is not None:
        timeouts["signals.vllm.timeout_s"] = policy.signals.vllm.timeout_s
    if policy.signals.nvml is not None:
        timeouts["signals.nvml.timeout_s"] = policy.signals.nvml.timeout_s
    for path, timeout_s in timeouts.items():
        if timeout_s >= policy.interval_s:
            advice = f"not below interval ({policy.interval_s:g}s): a slow answer delays the tick"
            yield path, timeout_s, advice
