"""Ray Serve's replica autoscaler: ongoing requests over a target, applied after it stood for a while.

Source: Ray 2, main of 2026, python/ray/serve/autoscaling_policy.py and config.py.
"""

import math
from dataclasses import dataclass, field

from bench.rivals.base import Bounds, tuned
from bench.rivals.view import Signal, View, Window, read


@dataclass(frozen=True, slots=True, kw_only=True)
class RayServeSettings:
    """Args:
    target: ongoing requests a replica.
    look_back_s: over which they are averaged.
    up_delay_s, down_delay_s: for so long every decision must point the same way.
    up_factor, down_factor: share of the difference that is applied.
    interval_s: between two decisions; Ray's control loop is faster, its metrics are not.
    """

    target: float = tuned(2.0, 1.0, 200.0, log=True)
    look_back_s: float = 30.0
    up_delay_s: float = 30.0
    down_delay_s: float = 600.0
    up_factor: float = 1.0
    down_factor: float = 1.0
    interval_s: float = 10.0
    bounds: Bounds = field(default_factory=Bounds)

    def build(self) -> "RayServe":
        """Return the rival."""
        return RayServe(self)

    def wanted(self, ongoing: float, ready: int) -> int:
        """Return the replicas for the ongoing requests, by the replicas that run."""
        ideal = ongoing / self.target
        factor = self.up_factor if ideal > ready else self.down_factor
        wanted = math.ceil(ready + factor * (ideal - ready) - 1e-9)
        return wanted - 1 if wanted == ready and math.ceil(ideal) < ready else wanted


class RayServe:
    """Waits until all decisions of a delay agree on the direction, then takes the newest."""

    def __init__(self, settings: RayServeSettings) -> None:
        self.settings = settings
        self.interval_s = settings.interval_s
        self._ongoing = Window(settings.look_back_s)
        self._direction = 0
        self._since = 0.0

    def desired(self, now: float, view: View) -> int:
        """Return the replicas after this decision; from none, one as soon as there is a request."""
        settings = self.settings
        self._ongoing.add(now, read(Signal.GATEWAY_IN_FLIGHT, view) or 0.0)
        if view.ready == 0:
            return settings.bounds.clip(max(view.ordered, 1 if self._ongoing.mean > 0.0 else 0))
        wanted = settings.bounds.clip(settings.wanted(self._ongoing.mean, view.ready))
        direction = (wanted > view.ordered) - (wanted < view.ordered)
        if direction != self._direction:
            self._direction, self._since = direction, now
        delay = settings.up_delay_s if direction > 0 else settings.down_delay_s
        if direction == 0 or now - self._since < delay:
            return settings.bounds.clip(view.ordered)
        self._direction = 0
        return max(1, wanted)
