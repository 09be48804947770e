"""KEDA: Prometheus triggers behind a HorizontalPodAutoscaler, with fallback and activation.

KEDA answers the HPA's queries live, so above zero replicas the HPA's sync period rules: `pollingInterval` and
`cooldownPeriod` act only from and to zero.

Source: KEDA 2.20, pkg/scalers/prometheus_scaler.go, pkg/fallback/fallback.go and
pkg/scaling/executor/scale_scaledobjects.go.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from bench.rivals import ratios
from bench.rivals.base import Bounds, tuned
from bench.rivals.behavior import SYNC_S, Behavior, Hpa
from bench.rivals.view import Signal, View, read

Kind = Literal["AverageValue", "Value"]


class ScalerError(Exception):
    """A trigger has no value to give."""


def prometheus_value(answer: Sequence[float], *, ignore_null: bool = True) -> float:
    """Return the trigger's value from the elements of a query's answer.

    Raises: ScalerError, for several elements; and for none, NaN or an infinity unless those are read as zero.
    """
    if len(answer) > 1:
        raise ScalerError(f"{len(answer)} series")
    if not answer or not math.isfinite(answer[0]):
        if ignore_null:
            return 0.0
        raise ScalerError("no usable value")
    return answer[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """What a trigger reports after it failed more than `threshold` times in a row."""

    threshold: int
    replicas: int
    behavior: Literal["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"] = "static"

    def value(self, failures: int, current: int, target: float) -> float:
        """Return the metric's value that asks for the fallback replicas.

        Raises: ScalerError, while the failures do not exceed the threshold.
        """
        if failures <= self.threshold:
            raise ScalerError(f"failed {failures} times")
        replicas = {
            "static": self.replicas,
            "currentReplicas": current,
            "currentReplicasIfHigher": max(current, self.replicas),
            "currentReplicasIfLower": min(current, self.replicas),
        }[self.behavior]
        return replicas * target


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """The executor's part of a ScaledObject: replicas that the HPA does not decide.

    Args:
        idle: `idleReplicaCount`.
        paused_in: `autoscaling.keda.sh/paused-scale-in`.
        forced: `autoscaling.keda.sh/force-activation`.
    """

    minimum: int = 0
    idle: int | None = None
    paused_in: bool = False
    forced: bool = False

    def replicas(self, current: int, *, active: bool, failed: bool = False, cooled: bool = True) -> int:
        """Return the replicas after one poll.

        Args:
            active: whether any trigger is above its activation threshold.
            failed: whether triggers failed and there is no fallback.
            cooled: whether the last activity is longer ago than `cooldownPeriod`.
        """
        if active or self.forced:
            return max(current, self.minimum, 1)
        rest = self.minimum if self.idle is None else self.idle
        leaves = self.idle is not None or self.minimum == 0
        if failed or self.paused_in or not cooled or not leaves:
            return current
        return min(current, rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """One Prometheus trigger.

    Args:
        signal: what its query gives.
        threshold: the target.
        kind: `metricType`.
    """

    signal: Signal
    threshold: float
    kind: Kind = "AverageValue"

    def total(self, view: View, *, ignore_null: bool) -> float:
        """Return what the query gives. Raises: ScalerError, where that is not a number to use."""
        found = read(self.signal, view)
        return prometheus_value([] if found is None else [found], ignore_null=ignore_null)

    def wish(self, view: View, total: float, tolerance: float) -> int:
        """Return the replicas that the HPA computes from the query's value."""
        if self.kind == "Value":
            return ratios.value(view.ordered, view.ready, total, self.threshold, tolerance)
        return ratios.average(view.ordered, total, self.threshold, tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class KedaSettings:
    """A ScaledObject whose triggers are a queue or load, and GPU utilization; None leaves one out.

    An average under `AverageValue` could never ask for more than two replicas, so utilization is a `Value`, which its
    authors mean; as in the HPA, that is times the *ready* replicas.

    Args:
        signal: what `target` is of.
        target: per replica. gpu: share, 0 to 1.
        ignore_null: `ignoreNullValues`: an empty answer is zero.
        cooldown_s: to zero, where the bounds allow it.
    """

    signal: Signal = Signal.WAITING
    target: float | None = tuned(5.0, 0.5, 200.0, log=True)
    gpu: float | None = tuned(None, 0.3, 0.99)
    ignore_null: bool = True
    fallback: Fallback | None = None
    cooldown_s: float = 300.0
    behavior: Behavior = field(default_factory=Behavior)
    bounds: Bounds = field(default_factory=Bounds)

    def triggers(self) -> tuple[Trigger, ...]:
        """Return the triggers."""
        load = [] if self.target is None else [Trigger(signal=self.signal, threshold=self.target)]
        gpu = [] if self.gpu is None else [Trigger(signal=Signal.GPU_MEAN, threshold=self.gpu, kind="Value")]
        return (*load, *gpu)

    def build(self) -> "Keda":
        """Return the rival."""
        return Keda(
            self.triggers(),
            self.bounds,
            self.behavior,
            ignore_null=self.ignore_null,
            fallback=self.fallback,
            cooldown_s=self.cooldown_s,
        )


class Keda:
    """The largest of the triggers' wishes, through an HPA; from and to zero, the executor.

    Args:
        triggers: at least one.
        bounds: with 0 at the bottom, the HPA's own minimum is 1.
    """

    interval_s = SYNC_S

    def __init__(
        self,
        triggers: Sequence[Trigger],
        bounds: Bounds,
        behavior: Behavior,
        *,
        ignore_null: bool = True,
        fallback: Fallback | None = None,
        cooldown_s: float = 300.0,
    ) -> None:
        self.triggers = tuple(triggers)
        self.ignore_null = ignore_null
        self.fallback = fallback
        self.cooldown_s = cooldown_s
        self._activation = Activation(minimum=bounds.min)
        self._hpa = Hpa(Bounds(min=max(1, bounds.min), max=bounds.max), behavior)
        self._failures = dict.fromkeys(self.triggers, 0)
        self._active_at = -math.inf

    def desired(self, now: float, view: View) -> int:
        """Return the replicas after this sync."""
        totals = [self._total(trigger, view) for trigger in self.triggers]
        failed = None in totals
        active = any(total > 0.0 for total in totals if total is not None)
        if active:
            self._active_at = now
        cooled = now - self._active_at > self.cooldown_s
        kept = self._activation.replicas(view.ordered, active=active, failed=failed, cooled=cooled)
        if 0 in (view.ordered, kept):
            return kept
        tolerance = self._hpa.behavior.tolerance
        wishes = [
            None if total is None else trigger.wish(view, total, tolerance)
            for trigger, total in zip(self.triggers, totals, strict=True)
        ]
        return self._hpa.settle(now, view.ordered, wishes)

    def _total(self, trigger: Trigger, view: View) -> float | None:
        """Return the trigger's value, or what its fallback makes of its absence; None when it failed."""
        try:
            total = trigger.total(view, ignore_null=self.ignore_null)
        except ScalerError:
            self._failures[trigger] += 1
            return self._fallen_back(trigger, view)
        self._failures[trigger] = 0
        return total

    def _fallen_back(self, trigger: Trigger, view: View) -> float | None:
        if self.fallback is None:
            return None
        try:
            return self.fallback.value(self._failures[trigger], view.ordered, trigger.threshold)
        except ScalerError:
            return None


GPU_70 = KedaSettings(target=None, gpu=0.70, bounds=Bounds(min=1, max=10))
"""GPU utilization 70 %, polled each 15 s."""
QUEUE_50_GPU_80 = KedaSettings(target=50.0, gpu=0.80, bounds=Bounds(min=4, max=20))
"""50 waiting a replica, GPU utilization 80 %; its cooldown of 300 s would act to zero only."""
QUEUE_8_GPU_75 = KedaSettings(target=8.0, gpu=0.75, bounds=Bounds(min=2, max=12))
"""As Triton guides have it: 8 waiting a replica, GPU utilization 75 %."""
IN_FLIGHT = KedaSettings(signal=Signal.IN_FLIGHT, target=5.0)
"""Requests running and waiting, 5 a replica."""
PRODUCTION_STACK = KedaSettings(target=5.0)
"""vLLM production stack 0.1.11, docs/source/use_cases/autoscaling-keda.rst: 5 waiting, poll 15 s, cooldown 360 s."""
