"""Plain HorizontalPodAutoscalers: on requests that wait, and on GPU utilization."""

from dataclasses import dataclass, field

from bench.rivals import ratios
from bench.rivals.base import Bounds, tuned
from bench.rivals.behavior import SYNC_S, Behavior, Hpa
from bench.rivals.ratios import Usage
from bench.rivals.view import Signal, View, read


@dataclass(frozen=True, slots=True, kw_only=True)
class HpaQueueSettings:
    """`External` metric sum(vllm:num_requests_waiting), target AverageValue.

    Source: target 5 as in the vLLM production stack's KEDA example; behavior, tolerance and sync of Kubernetes 1.34.
    """

    target: float = tuned(5.0, 0.5, 50.0, log=True)
    behavior: Behavior = field(default_factory=Behavior)
    bounds: Bounds = field(default_factory=Bounds)

    def build(self) -> "HpaQueue":
        """Return the rival."""
        return HpaQueue(self)


class HpaQueue:
    """Replicas by the total that waits."""

    interval_s = SYNC_S

    def __init__(self, settings: HpaQueueSettings) -> None:
        self.settings = settings
        self._hpa = Hpa(settings.bounds, settings.behavior)

    def desired(self, now: float, view: View) -> int:
        """Return the replicas after this sync; without any page the metric fails and the count stays."""
        waiting = read(Signal.WAITING, view)
        wish = None
        if waiting is not None:
            wish = ratios.average(view.ordered, waiting, self.settings.target, self.settings.behavior.tolerance)
        return self._hpa.settle(now, view.ordered, [wish])


@dataclass(frozen=True, slots=True, kw_only=True)
class HpaGpuSettings:
    """`Pods` metric DCGM_FI_DEV_GPU_UTIL through an adapter, target a mean share.

    Source: 80 % is a common choice and nobody's default; behavior, tolerance and sync of Kubernetes 1.34.
    """

    target: float = tuned(0.8, 0.2, 0.99)
    behavior: Behavior = field(default_factory=Behavior)
    bounds: Bounds = field(default_factory=Bounds)

    def build(self) -> "HpaGpu":
        """Return the rival."""
        return HpaGpu(self)


class HpaGpu:
    """Replicas by the pods' mean GPU utilization, pods without a sample taken in the way that dampens."""

    interval_s = SYNC_S

    def __init__(self, settings: HpaGpuSettings) -> None:
        self.settings = settings
        self._hpa = Hpa(settings.bounds, settings.behavior)

    def desired(self, now: float, view: View) -> int:
        """Return the replicas after this sync; without any sample the metric fails and the count stays."""
        usages = [Usage(state=pod.state, value=pod.gpu_util) for pod in view.pods]
        wish = ratios.plain(view.ordered, usages, self.settings.target, self.settings.behavior.tolerance)
        return self._hpa.settle(now, view.ordered, [wish])
