"""From a metric to replicas, as the HorizontalPodAutoscaler computes it: one pure function per kind of target.

Source: Kubernetes 1.34, pkg/controller/podautoscaler/replica_calculator.go, and its table of tests.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.rivals.view import PodState

TOLERANCE = 0.1
"""--horizontal-pod-autoscaler-tolerance."""
_OUT = frozenset({PodState.FAILED, PodState.DELETING})
_LATE = frozenset({PodState.UNREADY, PodState.PENDING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """One pod's use of a resource or its value of a metric; None where no sample came."""

    state: PodState
    value: float | None
    request: float = 1.0


def near(ratio: float, tolerance: float) -> bool:
    """Tell whether a ratio is too close to 1 to act on."""
    return abs(1.0 - ratio) <= tolerance


def utilization(current: int, pods: Sequence[Usage], target: float, tolerance: float = TOLERANCE) -> int | None:
    """Return replicas for a target share of the requests; pods that are not ready are set aside.

    Args:
        target: share, 0.8 for 80 %.
    Returns: None where no ready pod has a sample.
    """
    late = [pod for pod in pods if pod.state in _LATE]
    rest = [pod for pod in pods if pod.state not in _LATE | _OUT]
    return _replicas(current, rest, late, target, max(1.0, target), tolerance)


def plain(current: int, pods: Sequence[Usage], target: float, tolerance: float = TOLERANCE) -> int | None:
    """Return replicas for a target mean of a metric of the pods; pods that are not ready count like others."""
    rest = [Usage(state=pod.state, value=pod.value) for pod in pods if pod.state not in _OUT | {PodState.PENDING}]
    late = [Usage(state=pod.state, value=None) for pod in pods if pod.state is PodState.PENDING]
    return _replicas(current, rest, late, target, target, tolerance)


def _replicas(
    current: int, rest: Sequence[Usage], late: Sequence[Usage], target: float, full: float, tolerance: float
) -> int | None:
    """Return what the sampled pods ask for, with the others taken in the way that dampens.

    Args:
        rest, late: pods that should have a sample, and pods that are too young to count.
        full: what a pod without a sample is taken to use when the others ask for fewer, as a share of its request.
    """
    sampled = [pod for pod in rest if pod.value is not None]
    missing = [pod for pod in rest if pod.value is None]
    if not sampled:
        return None
    used = math.fsum(pod.value or 0.0 for pod in sampled)
    requested = math.fsum(pod.request for pod in sampled)
    ratio = used / requested / target
    damped = list(late) if ratio > 1.0 else []
    if not damped and not missing:
        return current if near(ratio, tolerance) else math.ceil(ratio * len(sampled))
    if ratio < 1.0:
        used += full * math.fsum(pod.request for pod in missing)
    requested += math.fsum(pod.request for pod in (*missing, *damped))
    again = used / requested / target
    if near(again, tolerance) or (ratio < 1.0) != (again < 1.0):
        return current
    replicas = math.ceil(again * (len(sampled) + len(missing) + len(damped)))
    turned = (again < 1.0 and replicas > current) or (again > 1.0 and replicas < current)
    return current if turned else replicas


def value(current: int, ready: int, total: float, target: float, tolerance: float = TOLERANCE) -> int:
    """Return replicas for a target `Value` of one metric of the whole: the ratio times the *ready* pods."""
    ratio = total / target
    if current == 0:
        return math.ceil(ratio)
    return current if near(ratio, tolerance) else math.ceil(ratio * ready)


def average(current: int, total: float, target: float, tolerance: float = TOLERANCE) -> int:
    """Return replicas for a target `AverageValue` of one metric of the whole: the total over the target."""
    if current and near(total / (target * current), tolerance):
        return current
    return math.ceil(total / target)
