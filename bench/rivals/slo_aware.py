"""llm-d's SLO-aware law: KEDA with a formula over the pool's P90 latencies.

Source: llm-d main of November 2026, docs/architecture/autoscaling/slo-aware-keda.md. The guide's predictor is not
modelled: its documented fallback, measured latencies, is, in the engines' buckets instead of the picker's finer ones.
"""

import math
from dataclasses import dataclass, field
from operator import attrgetter

from bench.rivals import ratios
from bench.rivals.base import Bounds, tuned
from bench.rivals.behavior import SYNC_S, Behavior, Hpa, Rules, percent, pods
from bench.rivals.view import Increase, Page, View, Window, by_pod, recent_quantile

CAP = 2.0
"""The ratio is clamped here, so that one spike does not poison the average."""
QUANTILE = 0.9
LATENCIES = ("ttft", "tpot")
SLO_AWARE = Behavior(
    up=Rules(window_s=30.0, budgets=(percent(100, 60), pods(4, 60))),
    down=Rules(window_s=180.0, budgets=(pods(1, 120),)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloAwareSettings:
    """Args:
    ttft_s, tpot_s: the objectives.
    up, down: the hysteresis band of the P90 latency over its objective.
    smoothing_s, rate_s: windows of the average and of the histograms.
    """

    ttft_s: float = 3.0
    tpot_s: float = 0.1
    up: float = tuned(0.55, 0.3, 1.2)
    down: float = tuned(0.40, 0.1, 0.9)
    smoothing_s: float = 45.0
    rate_s: float = 60.0
    behavior: Behavior = field(default_factory=lambda: SLO_AWARE)
    bounds: Bounds = field(default_factory=Bounds)

    def build(self) -> "SloAware":
        """Return the rival."""
        return SloAware(self)


def wanted(saturation: float, ordered: int, ready: int, up: float, down: float) -> int:
    """Return the formula's replicas.

    Growth takes the replicas that still load as part of the answer already given; shrinking does not, so that a start
    under way can never look like headroom.
    """
    if saturation > up:
        credit = ready / ordered if 0 < ready < ordered else 1.0
        return ordered + math.ceil(ordered * (saturation * credit / up - 1.0) - 1e-9)
    if saturation < down:
        return ordered - math.floor(ordered * (1.0 - saturation / down) + 1e-9)
    return ordered


class SloAware:
    """Keeps the worse of two P90 latencies, as a share of its objective, inside a band."""

    interval_s = SYNC_S

    def __init__(self, settings: SloAwareSettings) -> None:
        self.settings = settings
        self._hpa = Hpa(settings.bounds, settings.behavior)
        self._smoothed = Window(settings.smoothing_s)
        self._grown = {latency: Increase(settings.rate_s) for latency in LATENCIES}

    def desired(self, now: float, view: View) -> int:
        """Return the replicas after this sync; a pool without traffic reads 0."""
        settings = self.settings
        raw = max(
            self._quantile(now, view, "ttft") / settings.ttft_s, self._quantile(now, view, "tpot") / settings.tpot_s
        )
        self._smoothed.add(now, min(raw, CAP))
        asked = wanted(self._smoothed.mean, view.ordered, view.ready, settings.up, settings.down)
        wish = ratios.average(view.ordered, float(asked), 1.0, settings.behavior.tolerance)
        return self._hpa.settle(now, view.ordered, [wish])

    def _quantile(self, now: float, view: View, latency: str) -> float:
        histogram = attrgetter(latency)

        def counts(page: Page) -> tuple[float, ...]:
            found: tuple[float, ...] = histogram(page).counts
            return found

        grown = self._grown[latency]
        grown.add(now, by_pod(view.pods, counts))
        bounds = next((histogram(pod.page).bounds for pod in view.pods if pod.page is not None), ())
        return recent_quantile(bounds, grown.total(), QUANTILE) or 0.0
