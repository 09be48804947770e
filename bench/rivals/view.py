"""What a rival may see: scraped pages of the engines, the exporter's GPU figures, the pods, and a gateway's counts."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from autoscaler.core.histogram import quantile


class PodState(StrEnum):
    """A pod as an autoscaler sorts it."""

    READY = "ready"
    UNREADY = "unready"
    PENDING = "pending"
    FAILED = "failed"
    DELETING = "deleting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """A scraped histogram: upper bounds, the last +Inf, and the cumulative counts since the engine's start."""

    bounds: tuple[float, ...] = (math.inf,)
    counts: tuple[float, ...] = (0.0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One engine's page at its last scrape.

    Args:
        running, waiting: gauges.
        kv_usage: share of the KV cache in use.
        prompt_tokens, generation_tokens, iterations: counters since the engine's start.
        ttft, tpot: seconds to the first token, and per output token of each finished request.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    iterations: int = 0
    ttft: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)

    @property
    def in_flight(self) -> int:
        """Requests that run or wait."""
        return self.running + self.waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One pod.

    Args:
        name: unique over time.
        page: None while nothing was scraped from it.
        gpu_util: what the GPU exporter says, 0 to 1; None without a GPU or without an exporter.
    """

    name: str
    state: PodState = PodState.READY
    page: Page | None = None
    gpu_util: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """A router's own counts: requests in flight, and of all arrivals so far the number and the true tokens."""

    in_flight: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that a rival sees at one moment.

    Args:
        ordered: `spec.replicas`.
        pods: of the Deployment, those that end included.
    """

    ordered: int
    pods: tuple[Pod, ...] = ()
    gateway: Gateway = field(default_factory=Gateway)

    @property
    def active(self) -> tuple[Pod, ...]:
        """The pods that count as replicas."""
        return tuple(pod for pod in self.pods if pod.state is not PodState.DELETING)

    @property
    def ready(self) -> int:
        """How many pods are ready."""
        return sum(pod.state is PodState.READY for pod in self.pods)

    @property
    def pages(self) -> tuple[Page, ...]:
        """The pages of the pods that count as replicas: a series ends with its pod's deletion."""
        return tuple(pod.page for pod in self.active if pod.page is not None)


class Signal(StrEnum):
    """A number that a query gives over the whole target."""

    WAITING = "waiting"
    RUNNING = "running"
    IN_FLIGHT = "in_flight"
    GATEWAY_IN_FLIGHT = "gateway_in_flight"
    KV = "kv"
    KV_MEAN = "kv_mean"
    GPU_MEAN = "gpu_mean"
    SATURATION = "saturation"


KV_FULL, QUEUE_FULL = 0.8, 5.0
"""Where llm-d's endpoint picker calls an engine saturated: kvCacheUtilThreshold and queueDepthThreshold. A pool's
saturation is the mean over its engines of the nearer of the two."""


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _total(values: Sequence[float]) -> float | None:
    return math.fsum(values) if values else None


_OF_PAGES: dict[Signal, Callable[[Sequence[Page]], float | None]] = {
    Signal.WAITING: lambda pages: _total([page.waiting for page in pages]),
    Signal.RUNNING: lambda pages: _total([page.running for page in pages]),
    Signal.IN_FLIGHT: lambda pages: _total([page.in_flight for page in pages]),
    Signal.KV: lambda pages: _total([page.kv_usage for page in pages]),
    Signal.KV_MEAN: lambda pages: _mean([page.kv_usage for page in pages]),
    Signal.SATURATION: lambda pages: _mean([max(page.kv_usage / KV_FULL, page.waiting / QUEUE_FULL) for page in pages]),
}


def read(signal: Signal, view: View) -> float | None:
    """Return the signal's value now; None where a query would give an empty answer."""
    if signal is Signal.GATEWAY_IN_FLIGHT:
        return float(view.gateway.in_flight)
    if signal is Signal.GPU_MEAN:
        return _mean([pod.gpu_util for pod in view.active if pod.gpu_util is not None])
    return _OF_PAGES[signal](view.pages)


class Window:
    """Samples of the last `length_s` seconds, the oldest first. What is as old as the window has left it; the newest
    stays.
    """

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self._samples: deque[tuple[float, float]] = deque()

    def add(self, now: float, value: float) -> None:
        """Note a sample, and forget the old ones."""
        self._samples.append((now, value))
        while len(self._samples) > 1 and self._samples[0][0] <= now - self.length_s:
            self._samples.popleft()

    @property
    def values(self) -> list[float]:
        """The values in the window."""
        return [value for _, value in self._samples]

    @property
    def mean(self) -> float:
        """Their mean; 0 without any."""
        return _mean(self.values) or 0.0


class Increase:
    """What counters of many pods have grown by over a window, as `sum(increase(counter[window]))` without its
    extrapolation: from each pod's first to its last sample in the window.

    Args:
        length_s: of the window.
    """

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self._scrapes: deque[tuple[float, dict[str, tuple[float, ...]]]] = deque()

    def add(self, now: float, counters: dict[str, tuple[float, ...]]) -> None:
        """Note one scrape: each pod's counters, of the same length for all."""
        self._scrapes.append((now, counters))
        while self._scrapes[0][0] < now - self.length_s:
            self._scrapes.popleft()

    def total(self) -> tuple[float, ...]:
        """Return the growth over all pods; empty while no pod was seen twice."""
        first: dict[str, tuple[float, ...]] = {}
        last: dict[str, tuple[float, ...]] = {}
        for _, counters in self._scrapes:
            for pod, values in counters.items():
                first.setdefault(pod, values)
                last[pod] = values
        seen_twice = [pod for pod in last if last[pod] is not first[pod]]
        grown = [[after - before for before, after in zip(first[pod], last[pod], strict=True)] for pod in seen_twice]
        return tuple(map(math.fsum, zip(*grown, strict=True)))


def recent_quantile(bounds: Sequence[float], growth: Sequence[float], q: float) -> float | None:
    """Return a quantile of what was observed in a window; None without observations."""
    if not growth:
        return None
    value = quantile(bounds, growth, q).value
    return None if math.isnan(value) else value


def by_pod(pods: Iterable[Pod], counters: Callable[[Page], tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
    """Return some counters of every pod that was scraped."""
    return {pod.name: counters(pod.page) for pod in pods if pod.page is not None}
