"""The table of signals: name, unit, how pods combine, what is believable, what it means.

Sources write only signals that stand here, in base units, after `plausible` has let the value through.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from autoscaler.core.types import GapReason


class Kind(StrEnum):
    """How a reading behaves in time."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """One thing that can be read.

    Args:
        name: the name used in snapshots, policies, logs and recordings.
        kind: gauge, counter or histogram.
        unit: base unit: "ratio", "s", "tokens", "requests", "bytes", "1", "" for a plain flag.
        combine: how a whole target's value follows from its engines or devices.
        low, high: the believable range; outside it (beyond `tolerance`) a value is rejected, never clamped.
        tolerance: float noise outside the range that is pulled back to its edge.
        meaning: one line for people.
    """

    name: str
    kind: Kind
    unit: str
    combine: str
    meaning: str
    low: float = 0.0
    high: float = math.inf
    tolerance: float = 0.0


def _ratio(name: str, combine: str, meaning: str) -> Signal:
    return Signal(name=name, kind=Kind.GAUGE, unit="ratio", combine=combine, meaning=meaning, high=1.0, tolerance=1e-3)


def _gauge(name: str, unit: str, meaning: str, combine: str = "sum", high: float = 1e15) -> Signal:
    return Signal(name=name, kind=Kind.GAUGE, unit=unit, combine=combine, meaning=meaning, high=high)


def _counter(name: str, unit: str, meaning: str) -> Signal:
    return Signal(name=name, kind=Kind.COUNTER, unit=unit, combine="sum of increases", meaning=meaning, high=1e18)


ENGINE_GAUGES: tuple[Signal, ...] = (
    _gauge("read_at", "s", "when this engine's page was read, epoch", combine="none"),
    _gauge("started_at", "s", "start of the engine's process, epoch", combine="none"),
    _gauge("num_requests_running", "requests", "requests in the running batch"),
    _gauge("num_requests_waiting", "requests", "requests queued for capacity (deferred ones left out)"),
    _ratio("kv_cache_usage", "mean, weighted by capacity", "share of KV blocks held by live requests"),
    _gauge("kv_capacity_tokens", "tokens", "tokens that the KV cache can hold"),
    _gauge("asleep", "", "1 when the engine sleeps and is no capacity", combine="any", high=1.0),
    _ratio("gpu_memory_utilization", "none", "share of the card that the engine reserves at start"),
)
ENGINE_COUNTERS: tuple[Signal, ...] = (
    _counter("num_preemptions", "1", "preemptions, each a recompute"),
    _counter("prompt_tokens", "tokens", "prompt tokens of requests whose prefill ended"),
    _counter("cached_prompt_tokens", "tokens", "prompt tokens that a prefix cache supplied"),
    _counter("generation_tokens", "tokens", "tokens generated"),
    _counter("requests_finished", "requests", "requests that ended, aborted ones included"),
    _counter("iterations", "1", "engine steps"),
    _counter("itl_sum", "s", "sum of inter-token latencies"),
)
ENGINE_COLUMNS: tuple[Signal, ...] = ENGINE_GAUGES + ENGINE_COUNTERS
COLUMN: dict[str, int] = {signal.name: index for index, signal in enumerate(ENGINE_COLUMNS)}
FIRST_COUNTER: int = len(ENGINE_GAUGES)


def _histogram(name: str, meaning: str) -> Signal:
    return Signal(name=name, kind=Kind.HISTOGRAM, unit="s", combine="buckets summed by bound", meaning=meaning)


HISTOGRAMS: tuple[Signal, ...] = (
    _histogram("ttft", "time to first token, queueing included"),
    _histogram("itl", "inter-token latency, one observation a token"),
    _histogram("e2e", "end-to-end latency, observed when a request ends"),
    _histogram("queue_time", "time in the waiting queue, observed when a request ends"),
)

TARGET_SIGNALS: tuple[Signal, ...] = (
    _ratio("kv_cache_usage", "as the query says", "KV usage of the whole target"),
    _gauge("num_requests_running", "requests", "running requests of the whole target"),
    _gauge("num_requests_waiting", "requests", "waiting requests of the whole target"),
    _gauge("upstream_queue", "requests", "requests queued in front of the engines: a gateway or router"),
    _gauge("queue_wait", "s", "time a request waits before it runs", combine="as the query says", high=1e6),
    _gauge("ttft", "s", "TTFT at the policy's quantile", combine="as the query says", high=1e6),
    _gauge("itl", "s", "inter-token latency at the policy's quantile", combine="as the query says", high=1e6),
    _gauge("e2e", "s", "end-to-end latency at the policy's quantile", combine="as the query says", high=1e6),
    _ratio("within", "as the query says", "share of requests within the bound of `slo.within`"),
    _ratio("gpu_utilization", "mean over devices", "share of time that any kernel ran"),
    _ratio("gpu_memory_ratio", "max over devices", "framebuffer used / (used + free)"),
)
TARGET_SIGNAL: dict[str, Signal] = {signal.name: signal for signal in TARGET_SIGNALS}

GPU_SIGNALS: tuple[Signal, ...] = (
    _gauge("memory_used", "bytes", "framebuffer in use, reserved memory left out", combine="never summed"),
    _gauge("memory_free", "bytes", "framebuffer free", combine="never summed"),
    _ratio("gpu_utilization", "mean over devices", "engine activity; share of time that any kernel ran"),
)
GPU_SIGNAL: dict[str, Signal] = {signal.name: signal for signal in GPU_SIGNALS}


def plausible(signal: Signal, value: float) -> float | GapReason:
    """Return the value to use, or why it is not believed.

    Noise within `tolerance` of the range is pulled to its edge (1.0000000002 -> 1.0, -1e-12 -> 0.0); anything
    beyond is `OUT_OF_RANGE`, NaN and infinities are `NON_FINITE`. A rejected value is never clamped.
    """
    if not math.isfinite(value):
        return GapReason.NON_FINITE
    if value < signal.low - signal.tolerance or value > signal.high + signal.tolerance:
        return GapReason.OUT_OF_RANGE
    return min(max(value, signal.low), signal.high) + 0.0
