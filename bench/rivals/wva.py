"""llm-d's Workload Variant Autoscaler, saturation analyzer: one replica more or fewer, by spare capacity.

Source: workload-variant-autoscaler v0.9.0, internal/saturation/analyzer.go and docs/saturation-scaling-config.md; the
HPA on its metric as in llm-d's guide of that release.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.rivals import ratios
from bench.rivals.base import Bounds, tuned
from bench.rivals.behavior import SYNC_S, Behavior, Hpa, Rules, percent
from bench.rivals.view import View, Window

LOOK_BACK_S = 60.0
"""max_over_time(...[1m]) of both gauges."""
FEWEST_TO_SHRINK = 2
GUIDE = Behavior(
    up=Rules(window_s=120.0, budgets=(percent(100, 15),)),
    down=Rules(window_s=120.0, budgets=(percent(100, 15),)),
    tolerance=0.0,
)
"""In its favour without tolerance: with 0.1 one more than eleven is never acted on, and it waits for its wish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WvaSettings:
    """Args:
    kv_threshold, queue_threshold: where an engine counts as saturated.
    kv_spare, queue_spare: mean room below the thresholds under which a replica is added.
    optimize_s: between two analyses.
    """

    kv_threshold: float = tuned(0.80, 0.3, 0.95)
    queue_threshold: float = tuned(5.0, 1.0, 20.0)
    kv_spare: float = tuned(0.10, 0.02, 0.5)
    queue_spare: float = tuned(3.0, 0.5, 10.0)
    optimize_s: float = 60.0
    behavior: Behavior = field(default_factory=lambda: GUIDE)
    bounds: Bounds = field(default_factory=Bounds)

    def build(self) -> "Wva":
        """Return the rival."""
        return Wva(self)

    def change(self, loads: Sequence[tuple[float, float]]) -> int:
        """Return +1, -1 or 0 for the engines' (KV usage, requests waiting)."""
        free = [(kv, queue) for kv, queue in loads if kv < self.kv_threshold and queue < self.queue_threshold]
        count = len(free)
        spare_kv = sum(self.kv_threshold - kv for kv, _ in free) / count if count else 0.0
        spare_queue = sum(self.queue_threshold - queue for _, queue in free) / count if count else 0.0
        if spare_kv < self.kv_spare or spare_queue < self.queue_spare:
            return 1
        if count < FEWEST_TO_SHRINK:
            return 0
        spread = count / (count - 1)
        left_kv = self.kv_threshold - (self.kv_threshold - spare_kv) * spread
        left_queue = self.queue_threshold - (self.queue_threshold - spare_queue) * spread
        return -1 if left_kv >= self.kv_spare and left_queue >= self.queue_spare else 0


class Wva:
    """Publishes a wish once a minute; the HPA follows it. Nothing moves while replicas start or stop."""

    interval_s = SYNC_S

    def __init__(self, settings: WvaSettings) -> None:
        self.settings = settings
        self._hpa = Hpa(settings.bounds, settings.behavior)
        self._peaks: dict[str, tuple[Window, Window]] = {}
        self._target: int | None = None
        self._next = 0.0

    def desired(self, now: float, view: View) -> int:
        """Return the replicas after this sync of the HPA."""
        loads = self._loads(now, view)
        if self._target is None or now >= self._next:
            self._target = self._analyze(view, loads)
            self._next = now + self.settings.optimize_s
        wish = ratios.average(view.ordered, float(self._target), 1.0, self.settings.behavior.tolerance)
        return self._hpa.settle(now, view.ordered, [wish])

    def _analyze(self, view: View, loads: Sequence[tuple[float, float]]) -> int:
        in_motion = self._target not in (None, view.ordered)
        if in_motion or not loads or len(loads) != view.ordered:
            return self._target or view.ordered
        return self.settings.bounds.clip(len(loads) + self.settings.change(loads))

    def _loads(self, now: float, view: View) -> list[tuple[float, float]]:
        """Return each scraped engine's highest KV usage and queue of the last minute."""
        seen = {pod.name: pod.page for pod in view.active if pod.page is not None}
        self._peaks = {name: self._peaks.get(name) or (Window(LOOK_BACK_S), Window(LOOK_BACK_S)) for name in seen}
        loads = []
        for name, page in seen.items():
            kv, queue = self._peaks[name]
            kv.add(now, page.kv_usage)
            queue.add(now, page.waiting)
            loads.append((max(kv.values), max(queue.values)))
        return loads
