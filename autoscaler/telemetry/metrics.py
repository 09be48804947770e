"""The metrics: their table, and the store that a scrape reads."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import accumulate
from threading import RLock

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from autoscaler.core.signals import ENGINE_COLUMNS, GPU_SIGNALS, HISTOGRAMS, TARGET_SIGNALS
from autoscaler.core.types import WHOLE_PAGE, Limits

GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: name without our prefix, type, labels, and what it says."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str

    @property
    def full_name(self) -> str:
        """The name as it is exported."""
        return f"autoscaler_{self.name}"


def _gauge(name: str, help_text: str, *labels: str) -> Family:
    return Family(name, GAUGE, ("policy", *labels), help_text)


def _counter(name: str, help_text: str, *labels: str) -> Family:
    return Family(name, COUNTER, ("policy", *labels), help_text)


FAMILIES: tuple[Family, ...] = (
    _gauge("score", "Weighted pressure over the known parts, in [0, 1]: what growth is judged by."),
    _gauge("score_shrink", "The score with pods without data counted as loaded: what shrinking is judged by."),
    _gauge("score_known_weight", "Share of the score's weight whose parts are known."),
    _gauge("score_part", "One part of the score, in [0, 1].", "part"),
    _gauge("memory_guard", "Out-of-memory guard from device memory, in [0, 1]; from 0.5 it forbids scale-down."),
    _gauge("demand_replicas", "Replicas that the newest minute's work needs, by term; the largest binds.", "term"),
    _gauge("forecast_level_replicas", "Demand now, smoothed, in replicas."),
    _gauge("forecast_top_replicas", "Demand expected at the horizon, in replicas."),
    _gauge("forecast_sigma_replicas", "Standard deviation of the forecast's margin, in replicas."),
    _gauge("forecast_up_replicas", "Replicas to grow to, margin included."),
    _gauge("forecast_keep_replicas", "Replicas not to shrink below, margin included."),
    _gauge("forecast_score", "Score expected at the horizon, where the policy has a score forecaster."),
    _gauge("forecast_horizon_seconds", "How far ahead the forecast looks."),
    _gauge("current_replicas", "Replicas that the target's spec asks for."),
    _gauge("ready_replicas", "Replicas that are ready."),
    _gauge("desired_replicas", "Replicas that the last decision wants."),
    _gauge("proposed_replicas", "Replicas that are proposed and wait for a person's approval."),
    _gauge("min_replicas", "Lower bound that holds now."),
    _gauge("max_replicas", "Upper bound that holds now."),
    _gauge("batching_limit", "Batching limits that hold for the target, where the policy moves them.", "limit"),
    _gauge("batching_left_alone_pods", "Serving pods whose batching limits cannot be moved."),
    _gauge("batching_applied", "1 while every serving pod has the batching limits of the pod template, else 0."),
    _gauge("step_time_seconds", "Learned time of an engine iteration: base, and per unit of work.", "term"),
    _gauge("step_time_rows", "Observations behind the learned iteration time."),
    _gauge("learned_horizon_seconds", "Learned time from ordered to ready, plus one interval."),
    _gauge("no_data", "1 when no score could be computed for evidence.alertAfter, else 0."),
    _gauge("rollout_unhealthy", "1 while a rollout has failed or its pods do not start, else 0."),
    _gauge("unsafe_drain", "1 while the pod template leaves less time than scaleDown.drain, else 0."),
    _gauge("write_forbidden", "1 after a write of the replicas was forbidden, until one succeeds; else 0."),
    _gauge("dry_run", "1 when decisions are only explained, 0 when they are carried out."),
    _gauge("last_tick_timestamp_seconds", "When the last completed tick's snapshot was taken, epoch."),
    _counter("ticks_total", "Completed ticks."),
    _counter("tick_errors_total", "Errors that ended or spoiled a tick.", "kind"),
    _counter("tick_overruns_total", "Ticks that took longer than the interval."),
    _counter("decisions_total", "Decisions by primary reason; the sum is ticks_total.", "reason"),
    _counter("actions_total", "Actions by direction and outcome; the sum is ticks_total.", "direction", "outcome"),
    _counter("batching_decisions_total", "What was made of the batching limits, by reason.", "reason"),
    _counter("batching_rollouts_total", "Batching limits that were written into the pod template.", "result"),
    _counter("batching_pods_total", "Pods that were told batching limits.", "result"),
    _counter("gaps_total", "Readings that were missing, stale or not believed.", "source", "signal", "reason"),
    _counter("deletion_costs_total", "Deletion costs of pods that steps down needed changed.", "result"),
    _counter("foreign_changes_total", "Changes of the target's replicas by somebody else.", "effect"),
    Family("tick_duration_seconds", HISTOGRAM, ("policy",), "From a tick's snapshot to its completed action."),
    Family("policy_reloads_total", COUNTER, ("result",), "Attempts to take up changed policy files."),
    Family("events_total", COUNTER, ("result",), "Kubernetes Events about the targets."),
    Family("leader", GAUGE, ("lease",), "1 while this process leads by the Lease and may write, 0 while it stands by."),
    Family("build_info", GAUGE, ("version",), "1; the version is in the label."),
)
_FAMILY = {family.name: family for family in FAMILIES}
DURATION_BOUNDS: tuple[float, ...] = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

OTHER = "other"
SOURCES: frozenset[str] = frozenset({"vllm", "dcgm", "nvml", "prometheus", "target", "core"})
SCORE_PARTS: tuple[str, ...] = ("memory", "backlog", "latency")
LIMITS: tuple[str, ...] = tuple(field.name for field in fields(Limits))
SIGNALS: frozenset[str] = frozenset(
    {WHOLE_PAGE, *SCORE_PARTS, "demand", "forecast"}
    | {signal.name for signal in (*ENGINE_COLUMNS, *HISTOGRAMS, *TARGET_SIGNALS, *GPU_SIGNALS)}
)
ERROR_KINDS: frozenset[str] = frozenset(
    {"target_not_found", "forbidden", "unauthorized", "unreachable", "throttled", "bad_body", "conflict", "invalid"}
    | {"bug", "target", "actuation"}
)
RELOAD_RESULTS: frozenset[str] = frozenset({"applied", "rejected"})
EVENT_RESULTS: frozenset[str] = frozenset({"written", "failed", "dropped"})
COST_RESULTS: frozenset[str] = frozenset({"written", "failed"})
ROLLOUT_RESULTS: tuple[str, str, str] = ("begun", "kept", "rolled_back")
TOLD_RESULTS: tuple[str, str] = ("taken", "failed")
# Sources x signals x reasons has thousands of corners of which a target shows a handful. What comes after this many
# is counted under `other`, so that the worst policy exports some 120 series.
MAX_GAP_SERIES = 24


def known(name: str, names: frozenset[str]) -> str:
    """Return the name where it is one of `names`, else `other`: a label takes no free text."""
    return name if name in names else OTHER


class Metrics(Collector):
    """The values of every family. A scrape in another thread sees whole updates: hold `lock` around one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.lock = RLock()
        self._values: dict[str, dict[tuple[str, ...], float]] = {family.name: {} for family in FAMILIES}
        self._buckets: dict[str, list[int]] = {}
        registry.register(self)

    def set(self, name: str, policy: str, value: float | None, *labels: str) -> None:
        """Set a gauge; None and NaN remove the series, since unknown is not zero."""
        with self.lock:
            if value is None or math.isnan(value):
                self._values[name].pop((policy, *labels), None)
            else:
                self._values[name][policy, *labels] = float(value)

    def add(self, name: str, *labels: str, amount: float = 1.0) -> None:
        """Add to a counter; an amount of 0 makes it appear."""
        with self.lock:
            series = self._values[name]
            series[labels] = series.get(labels, 0.0) + amount

    def observe(self, policy: str, seconds: float) -> None:
        """Put one duration into the policy's histogram."""
        with self.lock:
            self.add("tick_duration_seconds", policy, amount=seconds)
            counts = self._buckets.setdefault(policy, [0] * (len(DURATION_BOUNDS) + 1))
            counts[bisect_left(DURATION_BOUNDS, seconds)] += 1

    def forget(self, policy: str, names: Iterable[str] | None = None) -> None:
        """Remove the policy's series: of these families, or all."""
        with self.lock:
            for name in _FAMILY if names is None else names:
                if _FAMILY[name].labels[0] == "policy":
                    series = self._values[name]
                    for labels in [labels for labels in series if labels[0] == policy]:
                        del series[labels]
            if names is None:
                self._buckets.pop(policy, None)

    def describe(self) -> Iterator[Metric]:
        """Yield every family without its series, so that a registry refuses a second owner of a name."""
        for family in FAMILIES:
            yield _EXPORT[family.kind](family, {}, {})

    def collect(self) -> Iterator[Metric]:
        """Yield every family with its series, all of one moment."""
        with self.lock:
            values = {name: dict(series) for name, series in self._values.items()}
            buckets = {policy: list(counts) for policy, counts in self._buckets.items()}
        for family in FAMILIES:
            yield _EXPORT[family.kind](family, values[family.name], buckets)


_Series = Mapping[tuple[str, ...], float]
_Buckets = Mapping[str, list[int]]


def _export_gauge(family: Family, series: _Series, _buckets: _Buckets) -> Metric:
    metric = GaugeMetricFamily(family.full_name, family.help, labels=family.labels)
    for labels, value in sorted(series.items()):
        metric.add_metric(labels, value)
    return metric


def _export_counter(family: Family, series: _Series, _buckets: _Buckets) -> Metric:
    metric = CounterMetricFamily(family.full_name, family.help, labels=family.labels)
    for labels, value in sorted(series.items()):
        metric.add_metric(labels, value)
    return metric


def _export_histogram(family: Family, series: _Series, buckets: _Buckets) -> Metric:
    metric = HistogramMetricFamily(family.full_name, family.help, labels=family.labels)
    bounds = [*(f"{bound:g}" for bound in DURATION_BOUNDS), "+Inf"]
    for labels, total in sorted(series.items()):
        counts = buckets[labels[0]]
        metric.add_metric(labels, list(zip(bounds, accumulate(map(float, counts)), strict=True)), total)
    return metric


_EXPORT: dict[str, Callable[[Family, _Series, _Buckets], Metric]] = {
    GAUGE: _export_gauge,
    COUNTER: _export_counter,
    HISTOGRAM: _export_histogram,
}

# Gauges that say what a tick saw. A tick that fails removes them: the last value is not the present one.
SEEN: tuple[str, ...] = (
    "score",
    "score_shrink",
    "score_known_weight",
    "score_part",
    "memory_guard",
    "demand_replicas",
    "forecast_level_replicas",
    "forecast_top_replicas",
    "forecast_sigma_replicas",
    "forecast_up_replicas",
    "forecast_keep_replicas",
    "forecast_score",
    "forecast_horizon_seconds",
    "current_replicas",
    "ready_replicas",
    "desired_replicas",
    "proposed_replicas",
    "batching_limit",
    "batching_left_alone_pods",
    "batching_applied",
    "rollout_unhealthy",
    "unsafe_drain",
)
