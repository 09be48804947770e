"""What a HorizontalPodAutoscaler does with proposals: one of several, windows, budgets, bounds. All of KEDA ends here.

Source: Kubernetes 1.34, pkg/controller/podautoscaler/horizontal.go; defaults of autoscaling/v2.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autoscaler.core.guards import rate_limit, stabilized
from autoscaler.core.policy import RateBudget, Select
from bench.rivals.base import Bounds
from bench.rivals.ratios import TOLERANCE

SYNC_S = 15.0
"""--horizontal-pod-autoscaler-sync-period."""


def pods(count: int, period_s: float) -> RateBudget:
    """Return a budget of pods per period."""
    return RateBudget(type="Pods", value=count, period_s=period_s)


def percent(share: int, period_s: float) -> RateBudget:
    """Return a budget in percent of the replicas at the period's start."""
    return RateBudget(type="Percent", value=share, period_s=period_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """One direction of `behavior`.

    Args:
        window_s: stabilization window.
        budgets, select: how far a change may go per period; the largest or smallest budget counts.
    """

    window_s: float = 0.0
    budgets: tuple[RateBudget, ...] = ()
    select: Select = Select.MAX


UP = Rules(window_s=0.0, budgets=(pods(4, 15), percent(100, 15)))
DOWN = Rules(window_s=300.0, budgets=(percent(100, 15),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Behavior:
    """`spec.behavior`, with the tolerance of the controller manager."""

    up: Rules = field(default_factory=lambda: UP)
    down: Rules = field(default_factory=lambda: DOWN)
    tolerance: float = TOLERANCE


class Hpa:
    """One HorizontalPodAutoscaler.

    Args:
        wishes, changes: what it remembers at the start, as (time [s], replicas) and (time [s], difference).
    """

    def __init__(
        self,
        bounds: Bounds,
        behavior: Behavior,
        *,
        wishes: Iterable[tuple[float, int]] = (),
        changes: Iterable[tuple[float, int]] = (),
    ) -> None:
        self.bounds = bounds
        self.behavior = behavior
        self._wishes = deque(wishes)
        self._changes = deque(changes)

    def settle(self, now: float, current: int, proposals: Sequence[int | None]) -> int:
        """Return the replicas after one sync; None among the proposals is a metric that failed."""
        if not self._wishes:  # a restarted controller seeds its history with what is there
            self._wishes.append((now, current))
        settled = self._sync(now, current, proposals)
        if settled != current:
            self._changes.append((now, settled - current))
        return settled

    def _sync(self, now: float, current: int, proposals: Sequence[int | None]) -> int:
        if current == 0 and self.bounds.min > 0:
            return 0  # ScalingDisabled
        if not self.bounds.min <= current <= self.bounds.max:
            return self.bounds.clip(current)
        wanted = combined(current, proposals)
        if wanted is None:
            return current
        history = [(now - at, wish, wish) for at, wish in self._wishes]
        up, down = self.behavior.up, self.behavior.down
        steady = stabilized(current, wanted, wanted, history, up.window_s, down.window_s)
        self._wishes.append((now, wanted))
        while now - self._wishes[0][0] >= max(up.window_s, down.window_s, SYNC_S):
            self._wishes.popleft()
        return self.bounds.clip(self._within_budgets(now, current, steady))

    def _within_budgets(self, now: float, current: int, wanted: int) -> int:
        rules = self.behavior.up if wanted > current else self.behavior.down
        longest = max((one.period_s for one in (*self.behavior.up.budgets, *self.behavior.down.budgets)), default=0.0)
        while self._changes and now - self._changes[0][0] >= longest:
            self._changes.popleft()
        if wanted == current or (not rules.budgets and rules.select is not Select.DISABLED):
            return wanted
        ages = [(now - at, change) for at, change in self._changes]
        limit = rate_limit(rules.budgets, rules.select, current, ages, up=wanted > current)
        return max(current, min(wanted, limit)) if wanted > current else min(current, max(wanted, limit))


def combined(current: int, proposals: Sequence[int | None]) -> int | None:
    """Return the largest proposal; None, hold, where all failed, or where one failed and the rest would shrink."""
    valid = [proposal for proposal in proposals if proposal is not None]
    if not valid or (len(valid) < len(proposals) and max(valid) < current):
        return None
    return max(valid)
