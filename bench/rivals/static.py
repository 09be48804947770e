"""Static fleets, and their sizes found in hindsight."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.rivals.base import Bounds
from bench.rivals.view import View

MEAN_LOAD = 0.7
"""Share of its capacity that a fleet sized for the mean is planned to use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticSettings:
    """A fixed number of replicas."""

    replicas: int = 1
    bounds: Bounds = field(default_factory=Bounds)

    def build(self) -> "Static":
        """Return the rival."""
        return Static(self)


class Static:
    """Orders the same number always."""

    interval_s = 60.0

    def __init__(self, settings: StaticSettings) -> None:
        self.settings = settings

    def desired(self, now: float, view: View) -> int:
        """Return the fixed number."""
        return self.settings.bounds.clip(self.settings.replicas)


def peak_size(attains: Callable[[int], bool], bounds: Bounds) -> int:
    """Return the smallest static fleet that attains; the largest allowed where none does.

    Args:
        attains: whether a fleet of that size meets the objective over the whole file; more replicas never do worse.
    """
    low, high = bounds.min, bounds.max
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if attains(middle) else (middle + 1, high)
    return low


def mean_size(work_s: float, duration_s: float, bounds: Bounds) -> int:
    """Return the static fleet that the mean work fills to the planned share.

    Args:
        work_s: seconds of one busy replica that the whole file takes.
    """
    return bounds.clip(math.ceil(work_s / duration_s / MEAN_LOAD))
