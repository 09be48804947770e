"""Frozen policy values: their defaults and their invariants. The only definition of what a policy file may say.

A field `some_name` is the key `someName`; a field that ends in `_s` holds seconds and is written as a duration under
the key without that ending (`stabilization_s` is `stabilization: 30s`). `policy_file` does the reading.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from autoscaler.core.signals import TARGET_SIGNAL

Complaint = tuple[str, object, str]
"""A broken invariant: dotted field path inside the policy, its value, and what would be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRef:
    """Which Deployment to scale.

    Args:
        pods_per_replica: pods that make one replica, where a replica is a group of pods.
    """

    deployment: str
    namespace: str = "default"
    kind: str = "Deployment"
    pods_per_replica: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaBounds:
    """How few and how many replicas there may be."""

    max: int
    min: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusServer:
    """A server that speaks the Prometheus HTTP API, and how to be let in.

    Args:
        url: base URL; a path prefix is kept. Credentials do not belong in it.
        bearer_token_file: re-read before each use, so that a rotated token is taken up.
        username, password_file: basic authentication.
        ca_file, cert_file, key_file: TLS: the server's CA, and a client certificate for mTLS.
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
        port, path, scheme: of each pod's /metrics page.
        model_name: count only series of this served model; "" counts all.
        timeout_s: for one page.
        stale_after_s: a page older than this counts as missing.
        prometheus: name of a server under `signals.prometheus`, or its URL; the same series are then read there.
        scrape_interval_s: how often that server scrapes, for judging its samples' age.
    """

    port: int = 8000
    path: str = "/metrics"
    scheme: str = "http"
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
        signal: name from the table of target signals, e.g. `upstream_queue`, `ttft`, `gpu_utilization`.
        query: must give one sample, in the signal's base unit.
        server: name under `signals.prometheus`.
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
    """Where signals come from."""

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
    """A latency objective: `quantile` of the requests (for ITL: of the tokens) take at most `seconds`."""

    seconds: float
    quantile: float = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class WithinSlo:
    """A share objective: at least `share` of the requests take at most `seconds`.

    Args:
        metric: "ttft" or "e2e".
    """

    seconds: float = 2.0
    share: float = 0.95
    metric: str = "e2e"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slos:
    """The service-level objectives. At least one of them."""

    ttft: Slo | None = field(default_factory=lambda: Slo(seconds=2.0))
    itl: Slo | None = field(default_factory=lambda: Slo(seconds=0.1))
    e2e: Slo | None = None
    within: WithinSlo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Shares of the parts in the score; they sum to 1."""

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
        source: `framebuffer` is for servers without a KV-cache gauge, and only grows.
        kv_full: KV usage that counts as 1.
        preemption_full: preemptions per finished request that count as 1; 0 leaves preemptions out.
        oom_weight: weight of the out-of-memory guard; below `critical`, since another replica empties no card.
    """

    source: MemorySource = MemorySource.KV_CACHE
    kv_full: float = 0.90
    preemption_full: float = 0.10
    oom_weight: float = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class BacklogPart:
    """Backlog B = max of the terms that are set.

    Args:
        waiting_per_replica: waiting requests per ready replica that count as 1; None leaves the term out.
        waiting_total: waiting requests of the whole target that count as 1, whatever its size.
        wait_s: queueing time that counts as 1.
        upstream: requests queued in front of the engines that count as 1; needs a query for `upstream_queue`.
        pending_pods: Pending pods, less those that we ordered, that count as 1.
        combine: "max", or "weighted" by the three shares below.
        weights: shares of (waiting, pending, wait) when combined by weight.
    """

    waiting_per_replica: float | None = 20.0
    waiting_total: float | None = None
    wait_s: float | None = 5.0
    upstream: float = 50.0
    pending_pods: float | None = None
    combine: str = "max"
    weights: tuple[float, float, float] = (0.40, 0.35, 0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyPart:
    """Latency L = max over SLOs of c((quantile / SLO - floor) / (1 - floor)).

    Args:
        floor: share of the SLO that counts as 0.
        min_observations: with fewer in the window it is widened to `max_window_s`, then the part is missing.
    """

    floor: float = 0.5
    min_observations: int = 20
    max_window_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePolicy:
    """How readings become pressure.

    Args:
        min_known_weight: less known weight than this makes no score.
        critical: a part at or above it asks for scale-up by itself; above 1 switches the rule off.
        clear: scale-down needs every part below it.
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
        type: "Pods" or "Percent" (of the replicas at the period's start).
    """

    type: str
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
        max_step: replicas an action; None for no limit of this kind.
        stabilization_s: the window whose minimum counts.
        cooldown_s: since the last up; None takes the policy's `cooldown`.
        budgets, select: rate budgets beside `max_step`.
    """

    threshold: float = 0.70
    max_step: int | None = 2
    stabilization_s: float = 30.0
    cooldown_s: float | None = None
    budgets: tuple[RateBudget, ...] = ()
    select: Select = Select.MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDown:
    """When and how fast to shrink.

    Args:
        threshold: score at or below which to shrink.
        stabilization_s: the window whose maximum counts; it must be full.
        horizon_factor: the window is at least this many horizons.
        cooldown_s: since any action; None takes the policy's `cooldown`.
        serialize_drain: no step while pods of the last one still terminate.
    """

    threshold: float = 0.40
    max_step: int | None = 1
    stabilization_s: float = 300.0
    horizon_factor: float = 1.25
    cooldown_s: float | None = None
    budgets: tuple[RateBudget, ...] = ()
    select: Select = Select.MAX
    serialize_drain: bool = False


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
        window_s, bin_s: demand is kept in `window_s / bin_s` bins.
        horizon_s: how far ahead; None learns it: p90 of ordered-to-ready plus one interval.
        initial_horizon_s, max_horizon_s: before the first observed start, and never above.
        z_up, z_keep: margins in standard deviations: to grow to, and to keep. The difference is the dead band.
        utilization: share of the fluid capacity that is planned for.
        error_quantile, error_cap, error_samples, error_min: the margin learned from the target's own forecast errors.
        change_sigma: a newest bin this many deviations above the prediction is a regime change.
        min_deviation: floor of the residual deviation, as a share of the level.
        score: forecaster of the score.
        score_window_s, score_horizon_s: of that forecaster.
        alpha: weight of the last value in `lag`: alpha x last + (1 - alpha) x predicted.
    """

    window_s: float = 600.0
    bin_s: float = 60.0
    horizon_s: float | None = None
    initial_horizon_s: float = 180.0
    max_horizon_s: float = 600.0
    z_up: float = 1.2
    z_keep: float = 2.2
    utilization: float = 0.93
    error_quantile: float = 0.95
    error_cap: float = 0.6
    error_samples: int = 240
    error_min: int = 30
    change_sigma: float = 4.8
    min_deviation: float = 0.04
    score: Forecaster = Forecaster.NONE
    score_window_s: float = 120.0
    score_horizon_s: float = 60.0
    alpha: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Coefficients of one engine iteration, t = c0 + cp P + cb B + ck K.

    Args:
        c0: base [s]. cp: per prefill token [s]. cb: per sequence [s]. ck: per resident token [s].
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
        kv_share, sequence_share: share of the KV cache, of `max_num_seqs`, that is planned for.
        max_num_seqs: of one engine, when the pod's arguments do not say.
        prior: coefficients before anything is learned; low rather than high.
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
        backlog: backlog part at or above which a growing queue is an emergency.
        hold_s: how long it must grow for the saturation path.
        factor: replicas, in multiples of the ready ones, that saturation orders.
    """

    enabled: bool = True
    backlog: float = 0.95
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
        ready_within_s: the last step's pods must be ready by then, else no further growth.
        max_unhealthy_share: share of the pods that may crash or restart.
    """

    enabled: bool = True
    ready_within_s: float = 900.0
    max_unhealthy_share: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Everything one target is scaled by.

    Args:
        name: `metadata.name`.
        interval_s: one tick.
        dry_run: decide and explain, write nothing.
        sizing: demand says how many, or the score alone.
        cooldown_s: between actions, where `scaleUp` and `scaleDown` do not say otherwise.
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

    @property
    def up_cooldown_s(self) -> float:
        """Seconds after an up before the next one."""
        return self.cooldown_s if self.scale_up.cooldown_s is None else self.scale_up.cooldown_s

    @property
    def down_cooldown_s(self) -> float:
        """Seconds after any action before a down."""
        return self.cooldown_s if self.scale_down.cooldown_s is None else self.scale_down.cooldown_s


def complaints(policy: Policy) -> Iterator[Complaint]:
    """Yield every invariant that the policy breaks: field path, value, what would be right."""
    yield from _target_complaints(policy)
    yield from _signal_complaints(policy)
    yield from _score_complaints(policy)
    yield from _speed_complaints(policy)
    yield from _prediction_complaints(policy)


def warnings(policy: Policy) -> Iterator[Complaint]:
    """Yield what is allowed but probably not meant: field path, value, advice."""
    smallest = policy.replicas.min + 1
    down, up = policy.scale_down.threshold, policy.scale_up.threshold
    if policy.sizing is Sizing.SCORE and policy.replicas.max > policy.replicas.min:
        projected = down * smallest / (smallest - 1) if smallest > 1 else 0.0
        if projected >= up:
            advice = f"from {smallest} replicas a step down projects to {projected:.2f} >= {up:g}: it would be held"
            yield "scale_down.threshold", down, advice
    if policy.scale_down.stabilization_s < 60.0:
        yield "scale_down.stabilization_s", policy.scale_down.stabilization_s, "below 60s replicas may flap"


def _target_complaints(policy: Policy) -> Iterator[Complaint]:
    low, high = policy.replicas.min, policy.replicas.max
    if policy.target.kind != "Deployment":
        yield "target.kind", policy.target.kind, "only Deployment can be scaled"
    if policy.target.pods_per_replica < 1:
        yield "target.pods_per_replica", policy.target.pods_per_replica, "must be at least 1"
    if low < 0:
        yield "replicas.min", low, "must be 0 or more"
    if high < 1:
        yield "replicas.max", high, "must be at least 1"
    if low > high:
        yield "replicas.min", low, f"must not be above replicas.max ({high})"
    if policy.interval_s < 1.0:
        yield "interval_s", policy.interval_s, "must be at least 1s"


def _signal_complaints(policy: Policy) -> Iterator[Complaint]:
    signals = policy.signals
    servers = signals.prometheus
    known = ", ".join(sorted(servers)) or "none is defined"
    if signals.vllm is None and not signals.queries:
        yield "signals", None, "nothing to read: give vllm, or queries"
    for name, used in (("vllm", signals.vllm), ("dcgm", signals.dcgm)):
        if used is not None and used.prometheus is not None and signals.server(used.prometheus) is None:
            yield f"signals.{name}.prometheus", used.prometheus, f"no such server under signals.prometheus ({known})"
    if signals.dcgm is not None and not signals.dcgm.urls and signals.dcgm.prometheus is None:
        yield "signals.dcgm", None, "give urls to scrape, or the name of a prometheus server"
    if signals.vllm is not None and not 1 <= signals.vllm.port <= 65535:
        yield "signals.vllm.port", signals.vllm.port, "must be a port, 1 to 65535"
    for index, query in enumerate(signals.queries):
        path = f"signals.queries[{index}]"
        if query.signal not in TARGET_SIGNAL:
            yield f"{path}.signal", query.signal, f"must be one of {', '.join(TARGET_SIGNAL)}"
        if signals.server(query.server) is None:
            yield f"{path}.server", query.server, f"no such server under signals.prometheus ({known})"
    for name, server in servers.items():
        if not server.url.startswith(("http://", "https://")):
            yield f"signals.prometheus.{name}.url", server.url, "must start with http:// or https://"
        if (server.cert_file is None) != (server.key_file is None):
            yield f"signals.prometheus.{name}.cert_file", server.cert_file, "certFile and keyFile go together"
        if (server.username is None) != (server.password_file is None):
            yield f"signals.prometheus.{name}.username", server.username, "username and passwordFile go together"


def _unit(path: str, value: float, *, above_zero: bool = True) -> Iterator[Complaint]:
    """Complain unless the value is a ratio, in (0, 1] or [0, 1]."""
    if 1.0 < value <= 100.0:
        yield path, value, f"must be a ratio, at most 1; did you mean {value / 100.0:.2f}?"
    elif value > 1.0 or value < 0.0 or (above_zero and value == 0.0):
        yield path, value, "must be a ratio in (0, 1]" if above_zero else "must be a ratio in [0, 1]"


def _score_complaints(policy: Policy) -> Iterator[Complaint]:
    score = policy.score
    weights = {"memory": score.weights.memory, "backlog": score.weights.backlog, "latency": score.weights.latency}
    for name, weight in weights.items():
        if weight < 0.0:
            yield f"score.weights.{name}", weight, "must not be negative"
    total = sum(weights.values())
    if abs(total - 1.0) > 1e-6:
        shown = " + ".join(f"{weight:g}" for weight in weights.values())
        yield "score.weights", shown, f"must sum to 1, not {total:g}"
    yield from _unit("score.memory.kv_full", score.memory.kv_full)
    yield from _unit("score.min_known_weight", score.min_known_weight)
    yield from _unit("score.clear", score.clear)
    if score.critical <= policy.scale_up.threshold:
        yield "score.critical", score.critical, f"must be above scaleUp.threshold ({policy.scale_up.threshold:g})"
    if not 0.0 <= score.latency.floor < 1.0:
        yield "score.latency.floor", score.latency.floor, "must be in [0, 1)"
    if score.backlog.combine not in ("max", "weighted"):
        yield "score.backlog.combine", score.backlog.combine, 'must be "max" or "weighted"'
    for name, slo in (("ttft", policy.slo.ttft), ("itl", policy.slo.itl), ("e2e", policy.slo.e2e)):
        if slo is None:
            continue
        if slo.seconds <= 0.0:
            yield f"slo.{name}.seconds", slo.seconds, "must be above 0"
        if not 0.0 < slo.quantile < 1.0:
            yield f"slo.{name}.quantile", slo.quantile, "must be between 0 and 1, such as 0.99"
    if policy.slo.within is not None:
        yield from _unit("slo.within.share", policy.slo.within.share)
        if policy.slo.within.metric not in ("ttft", "e2e"):
            yield "slo.within.metric", policy.slo.within.metric, 'must be "ttft" or "e2e"'
    if all(slo is None for slo in (policy.slo.ttft, policy.slo.itl, policy.slo.e2e, policy.slo.within)):
        yield "slo", None, "give at least one of ttft, itl, e2e, within"


def _speed_complaints(policy: Policy) -> Iterator[Complaint]:
    up, down = policy.scale_up, policy.scale_down
    yield from _unit("scale_up.threshold", up.threshold)
    yield from _unit("scale_down.threshold", down.threshold, above_zero=False)
    if down.threshold >= up.threshold:
        yield "scale_down.threshold", down.threshold, f"must be below scaleUp.threshold ({up.threshold:g})"
    directions: tuple[tuple[str, ScaleUp | ScaleDown], ...] = (("scale_up", up), ("scale_down", down))
    for name, direction in directions:
        if direction.max_step is not None and direction.max_step < 1:
            yield f"{name}.max_step", direction.max_step, "must be at least 1, or null for no limit"
        if direction.stabilization_s < 0.0:
            yield f"{name}.stabilization_s", direction.stabilization_s, "must not be negative"
        for index, budget in enumerate(direction.budgets):
            if budget.type not in ("Pods", "Percent"):
                yield f"{name}.budgets[{index}].type", budget.type, "must be Pods or Percent"
            if budget.value < 1:
                yield f"{name}.budgets[{index}].value", budget.value, "must be at least 1"
            if budget.period_s <= 0.0:
                yield f"{name}.budgets[{index}].period_s", budget.period_s, "must be above 0s"
    if policy.cooldown_s < 0.0:
        yield "cooldown_s", policy.cooldown_s, "must not be negative"


def _prediction_complaints(policy: Policy) -> Iterator[Complaint]:
    prediction, demand = policy.prediction, policy.demand
    if prediction.bin_s < policy.interval_s:
        yield "prediction.bin_s", prediction.bin_s, f"must not be below interval ({policy.interval_s:g}s)"
    elif not 3 <= prediction.window_s / prediction.bin_s <= 60:
        yield "prediction.window_s", prediction.window_s, "must hold 3 to 60 bins"
    if prediction.z_keep < prediction.z_up:
        yield "prediction.z_keep", prediction.z_keep, f"must not be below zUp ({prediction.z_up:g})"
    if not 0.0 <= prediction.alpha <= 1.0:
        yield "prediction.alpha", prediction.alpha, "must be in [0, 1]"
    yield from _unit("prediction.utilization", prediction.utilization)
    yield from _unit("demand.itl_share", demand.itl_share)
    yield from _unit("demand.kv_share", demand.kv_share)
    yield from _unit("demand.sequence_share", demand.sequence_share)
    if policy.sizing is Sizing.DEMAND and policy.slo.itl is None:
        yield "slo.itl", None, "sizing by demand needs an ITL objective; or set sizing: score"
    if policy.sizing is Sizing.DEMAND and policy.signals.vllm is None:
        yield "sizing", policy.sizing, "sizing by demand needs signals.vllm; or set sizing: score"
