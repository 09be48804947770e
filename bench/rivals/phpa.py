"""The predictive HorizontalPodAutoscaler: an HPA's count, and models of the counts so far.

Source: predictive-horizontal-pod-autoscaler 0.13, internal/controllers and docs/user-guide/models.md. The models see
what the HPA computed, so what they predict is replicas.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from bench.rivals import ratios
from bench.rivals.base import Bounds, tuned
from bench.rivals.behavior import SYNC_S
from bench.rivals.predictors import holt_winters, linear
from bench.rivals.view import Signal, View, Window, read

Model = Literal["linear", "holt", "holt-winters"]
Decision = Literal["maximum", "minimum", "mean", "median"]


def decided(predictions: Sequence[int], decision: Decision) -> int:
    """Return one count of several; a mean is rounded, an even median's half is dropped."""
    ordered = sorted(predictions)
    middle = len(ordered) // 2
    if decision == "median":
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2
    if decision == "mean":
        return round(sum(ordered) / len(ordered))
    return ordered[-1] if decision == "maximum" else ordered[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhpaSettings:
    """Args:
    signal, target: of the HPA inside, an `AverageValue`; it has no default of its own.
    model, decision: which model, and how its count and the HPA's become one.
    ahead_s, stored: of the linear model: how far it looks, over how many counts.
    alpha, beta, gamma, periods, seasons: of the smoothing; a season is `periods` counts, and so many are kept.
    every: syncs between two predictions.
    down_s: the highest count of so long is kept.
    """

    signal: Signal = Signal.IN_FLIGHT
    target: float = tuned(5.0, 0.5, 200.0, log=True)
    model: Model = "linear"
    decision: Decision = "maximum"
    ahead_s: float = tuned(10.0, 5.0, 600.0, log=True)
    stored: int = 6
    alpha: float = tuned(0.9, 0.05, 0.95)
    beta: float = tuned(0.9, 0.01, 0.95)
    gamma: float = tuned(0.9, 0.05, 0.95)
    periods: int = 6
    seasons: int = 4
    every: int = 1
    down_s: float = 300.0
    tolerance: float = ratios.TOLERANCE
    bounds: Bounds = field(default_factory=Bounds)

    def build(self) -> "Phpa":
        """Return the rival."""
        return Phpa(self)

    @property
    def kept(self) -> int:
        """Counts that the model looks at; Holt's keeps as many as Holt-Winters."""
        return self.stored if self.model == "linear" else max(self.periods * self.seasons, 10 + 2 * (self.periods // 2))

    def predicted(self, history: Sequence[tuple[float, int]], now: float) -> int | None:
        """Return the count that the model expects from (time, count); None while it has too few."""
        if self.model == "linear":
            return math.ceil(linear(history, now + self.ahead_s) - 1e-9)
        series = [float(count) for _, count in history]
        periods = self.periods if self.model == "holt-winters" else 0
        value = holt_winters(series, alpha=self.alpha, beta=self.beta, gamma=self.gamma, periods=periods)
        return None if value is None else math.ceil(value - 1e-9)


class Phpa:
    """Predicts at each sync from the counts that its HPA computed."""

    interval_s = SYNC_S

    def __init__(self, settings: PhpaSettings) -> None:
        self.settings = settings
        self._history: deque[tuple[float, int]] = deque(maxlen=settings.kept)
        self._decisions = Window(settings.down_s)
        self._syncs = 0

    def desired(self, now: float, view: View) -> int:
        """Return the replicas after this sync; without a value the count stays."""
        settings = self.settings
        total = read(settings.signal, view)
        if total is None:
            return settings.bounds.clip(view.ordered)
        computed = ratios.average(view.ordered, total, settings.target, settings.tolerance)
        self._history.append((now, computed))
        counts = [computed]
        if self._syncs % settings.every == 0:
            predicted = settings.predicted(self._history, now)
            counts += [] if predicted is None else [predicted]
        self._syncs += 1
        self._decisions.add(now, settings.bounds.clip(decided(counts, settings.decision)))
        return int(max(self._decisions.values))
