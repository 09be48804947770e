"""Knative's pod autoscaler: a stable and a panic window over requests in flight.

Source: Knative Serving, main of 2026, pkg/autoscaler/scaling/autoscaler.go, pkg/reconciler/autoscaling/kpa/scaler.go;
the defaults of config/core/configmaps/autoscaler.yaml.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from bench.rivals.base import Bounds, tuned
from bench.rivals.view import Signal, View, Window, read


@dataclass(frozen=True, slots=True, kw_only=True)
class KpaSettings:
    """The autoscaler's ConfigMap.

    Args:
        signal: what is averaged over the windows.
        capacity: of one replica, in the signal's unit; 100 is the default without a container concurrency.
        share: `container-concurrency-target-percentage` of it that is planned with.
        panic_threshold: panic once the panic window asks for so many times the ready replicas.
        max_up, max_down: factors of the ready replicas per decision.
        down_delay_s: a lower count counts after so long.
        activation: the first replicas from zero.
        reachable: whether traffic can reach it; otherwise it may shrink at once.
        grace_s, start_s, retention_s: of scaling to zero, where the bounds allow it.
    """

    signal: Signal = Signal.GATEWAY_IN_FLIGHT
    capacity: float = tuned(100.0, 1.0, 400.0, log=True)
    share: float = 0.7
    stable_s: float = 60.0
    panic_s: float = 6.0
    panic_threshold: float = 2.0
    max_up: float = 1000.0
    max_down: float = 2.0
    down_delay_s: float = 0.0
    activation: int = 1
    reachable: bool = True
    grace_s: float = 30.0
    start_s: float = 151.0
    retention_s: float = 0.0
    interval_s: float = 2.0
    bounds: Bounds = field(default_factory=Bounds)

    def build(self) -> "Kpa":
        """Return the rival."""
        return Kpa(self)

    @property
    def target(self) -> float:
        """Per replica."""
        return self.capacity * self.share


class Panic(NamedTuple):
    """A panic under way: when it was last justified, and the most replicas that it asked for."""

    since: float
    pods: int


class Decider:
    """From the windows' averages to replicas; remembers a panic and the counts of the delay."""

    def __init__(self, settings: KpaSettings, panic: Panic | None = None) -> None:
        self.settings = settings
        self.panic = panic
        self._recent = Window(settings.down_delay_s) if settings.down_delay_s > 0.0 else None

    def scale(self, now: float, stable: float, panic: float, ready: int) -> int:
        """Return the replicas for the averages of both windows."""
        settings = self.settings
        base = max(1, ready)
        wanted = self._limited(math.ceil(stable / settings.target), base)
        in_panic = math.ceil(panic / settings.target)
        if in_panic / base >= settings.panic_threshold:
            self.panic = Panic(now, self.panic.pods if self.panic else 0)
        elif self.panic is not None and now - self.panic.since > settings.stable_s:
            self.panic = None
        if self.panic is not None:
            most = max(wanted, self._limited(in_panic, base), self.panic.pods)
            self.panic = Panic(self.panic.since, most)
            wanted = most
        if self._recent is not None:
            self._recent.add(now, wanted)
            wanted = int(max(self._recent.values))
        return wanted

    def _limited(self, wanted: int, base: int) -> int:
        settings = self.settings
        lowest = math.floor(base / settings.max_down) if settings.reachable else 0
        limited = min(max(wanted, lowest), math.ceil(settings.max_up * base))
        return max(limited, settings.activation) if wanted > 0 and settings.activation > 1 else limited


class Phase(StrEnum):
    """What a revision is doing about traffic."""

    ACTIVE = "active"
    ACTIVATING = "activating"
    INACTIVE = "inactive"


class Verdict(NamedTuple):
    """What becomes of a wish for zero: the replicas, and `scale`, `hold` or `mark-inactive`."""

    replicas: int
    action: str


def to_zero(
    settings: KpaSettings, current: int, wanted: int, phase: Phase, for_s: float, *, probed: bool = True
) -> Verdict:
    """Return what a wish comes to that may be for zero replicas.

    Args:
        wanted: negative without metrics.
        for_s: how long it has been in that phase.
        probed: whether the way to the activator is known to be open.
    """
    if wanted != 0:
        return Verdict(current, "hold") if wanted < 0 else Verdict(wanted, "scale")
    if phase is Phase.ACTIVATING:
        return Verdict(0, "scale") if for_s > settings.start_s else Verdict(current, "hold")
    if phase is Phase.ACTIVE:
        return Verdict(1, "mark-inactive" if for_s >= settings.stable_s else "scale")
    over = for_s >= max(settings.grace_s, settings.retention_s)
    return Verdict(0, "scale") if over and probed else Verdict(current, "hold")


class Kpa:
    """Samples the signal at every tick, and decides on the averages."""

    def __init__(self, settings: KpaSettings) -> None:
        self.settings = settings
        self.interval_s = settings.interval_s
        self._decider: Decider | None = None
        self._stable = Window(settings.stable_s)
        self._panic = Window(settings.panic_s)
        self._phase, self._phase_since = Phase.ACTIVE, -math.inf

    def desired(self, now: float, view: View) -> int:
        """Return the replicas after this tick; without a sample the count stays."""
        found = read(self.settings.signal, view)
        if found is None:
            return self.settings.bounds.clip(view.ordered)
        if self._decider is None:  # a start with several replicas is taken as a panic: they stay until there is data
            self._decider = Decider(self.settings, Panic(now, view.ready) if view.ready > 1 else None)
        self._stable.add(now, found)
        self._panic.add(now, found)
        wanted = self._decider.scale(now, self._stable.mean, self._panic.mean, view.ready)
        if self.settings.bounds.min == 0:
            wanted = self._to_zero(now, view.ordered, wanted)
        return self.settings.bounds.clip(wanted)

    def _to_zero(self, now: float, current: int, wanted: int) -> int:
        if wanted > 0:
            self._phase, self._phase_since = Phase.ACTIVE, now
            return wanted
        verdict = to_zero(self.settings, current, wanted, self._phase, now - self._phase_since)
        if verdict.action == "mark-inactive":
            self._phase, self._phase_since = Phase.INACTIVE, now
        return verdict.replicas
