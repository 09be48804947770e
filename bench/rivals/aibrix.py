"""AIBrix: its APA on KV usage, and its variant of Knative's law.

Source: AIBrix, main of 2026, pkg/controller/podautoscaler: algorithm/apa.go, algorithm/kpa.go, context/context.go;
target and tolerances as in its documentation's examples.
"""

import math
from dataclasses import dataclass, field

from bench.rivals.base import Bounds, tuned
from bench.rivals.kpa import KpaSettings
from bench.rivals.view import Signal, View, Window, read


@dataclass(frozen=True, slots=True, kw_only=True)
class AibrixKpaSettings(KpaSettings):
    """Knative's law on KV usage, with other windows and factors, and three minutes before it shrinks."""

    signal: Signal = Signal.KV
    capacity: float = tuned(0.5, 0.05, 0.95)
    share: float = 1.0
    stable_s: float = 180.0
    panic_s: float = 60.0
    max_up: float = 2.0
    max_down: float = 2.0
    down_delay_s: float = 180.0
    interval_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ApaSettings:
    """Args:
    target: mean KV usage.
    up, down: tolerances above and below it, as shares.
    window_s: over which the usage is averaged.
    max_up, max_down: factors per decision.
    down_window_s: the highest count of so long is kept: its cooldown after growth, read in its favour.
    """

    target: float = tuned(0.5, 0.05, 0.95)
    up: float = 0.1
    down: float = 0.2
    window_s: float = 30.0
    max_up: float = 2.0
    max_down: float = 2.0
    down_window_s: float = 300.0
    interval_s: float = 10.0
    bounds: Bounds = field(default_factory=Bounds)

    def build(self) -> "Apa":
        """Return the rival."""
        return Apa(self)

    def wanted(self, current: int, usage: float) -> int:
        """Return the replicas for a mean usage: the ratio outside the tolerances, within the factors."""
        ratio = usage / self.target
        wanted = math.ceil(current * ratio)
        if ratio > 1.0 + self.up:
            return min(wanted, math.ceil(self.max_up * current))
        if ratio < 1.0 - self.down:
            return max(wanted, math.floor(current / self.max_down))
        return current


class Apa:
    """Proportional to the mean KV usage."""

    def __init__(self, settings: ApaSettings) -> None:
        self.settings = settings
        self.interval_s = settings.interval_s
        self._usage = Window(settings.window_s)
        self._wishes = Window(settings.down_window_s)

    def desired(self, now: float, view: View) -> int:
        """Return the replicas after this tick; without any page the count stays."""
        usage = read(Signal.KV_MEAN, view)
        if usage is None:
            return self.settings.bounds.clip(view.ordered)
        self._usage.add(now, usage)
        wanted = self.settings.bounds.clip(self.settings.wanted(view.ordered, self._usage.mean))
        self._wishes.add(now, wanted)
        if wanted < view.ordered:
            wanted = min(view.ordered, int(max(self._wishes.values)))
        return wanted
