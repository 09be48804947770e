"""Sizes found with the whole file in view: a lower bound, and the cheapest plan that can be carried out.

The plan is the best of its kind, not the best there is: it keeps a fixed distance from the work of each minute, and a
law that looks at queues may come out slightly below it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoscaler.core.types import Floats
from autoscaler.sim.profile import Profile
from bench.rivals.base import Bounds
from bench.rivals.view import View
from bench.work import request_work

HOUR = 3600.0
Counts = NDArray[np.int64]
THETAS = tuple(round(0.02 * step, 2) for step in range(5, 51))


def fluid_gpu_hours(profile: Profile, prompts: Floats, outputs: Floats) -> float:
    """Return the GPU-hours at utilization 1: all work, no iteration's fixed time, no start, no idle moment."""
    prefill, decode = request_work(profile, prompts, outputs)
    return float((prefill.sum() + decode.sum()) * profile.gpus / HOUR)


def needed(busy: Floats, theta: float, bounds: Bounds) -> Counts:
    """Return per bin the fewest replicas whose busy share stays at or under theta."""
    return np.clip(np.ceil(busy / theta - 1e-9), bounds.min, bounds.max).astype(np.int64)


def cheapest(need: Counts, *, bin_s: float, start_s: float, initial: int | None = None) -> Counts:
    """Return the plan with at least `need` in each bin that costs least: replica-seconds, and `start_s` for each start.

    Args:
        start_s: replica-seconds lost to one start: loading, and draining at its end.
        initial: replicas that are there before the first bin; as many as it needs by default.
    """
    counts = np.arange(int(need.max(initial=0)) + 1)
    started = np.maximum(counts - (need[0] if initial is None else initial), 0)
    cost = np.where(counts >= need[0], counts * bin_s + started * start_s, math.inf)
    came_from = []
    for low in need[1:]:
        kept, kept_from = _running_minimum(cost[::-1])  # from as many or more: nothing is started
        kept, kept_from = kept[::-1], len(counts) - 1 - kept_from[::-1]
        grown, grown_from = _running_minimum(cost - counts * start_s)  # from fewer, or as many
        grown = grown + counts * start_s
        came_from.append(np.where(grown < kept, grown_from, kept_from))
        cost = np.where(counts >= low, np.minimum(kept, grown) + counts * bin_s, math.inf)
    plan = [int(np.argmin(cost))]
    for previous in reversed(came_from):
        plan.append(int(previous[plan[-1]]))
    return np.array(plan[::-1], dtype=np.int64)


def _running_minimum(values: Floats) -> tuple[Floats, Counts]:
    """Return at each place the smallest value so far, and where it stands."""
    lowest = np.minimum.accumulate(values)
    fresh = np.concatenate(([True], lowest[1:] < lowest[:-1]))
    places = np.maximum.accumulate(np.where(fresh, np.arange(len(values)), 0))
    return lowest, places.astype(np.int64)


def plan_cost(plan: Sequence[int] | Counts, *, bin_s: float, start_s: float, initial: int) -> float:
    """Return a plan's replica-seconds with its starts; `initial` replicas are there already."""
    replicas = np.asarray(plan, dtype=np.float64)
    starts = np.maximum(np.diff(replicas, prepend=initial), 0.0).sum()
    return float(replicas.sum() * bin_s + starts * start_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Achievable:
    """The best plan that attains.

    Args:
        theta: its share of busy time. plan: ready replicas per bin. attainment: as simulated.
    """

    theta: float
    plan: tuple[int, ...]
    attainment: float


def achievable(
    busy: Floats,
    simulate: Callable[[tuple[int, ...]], float],
    *,
    goal: float = 0.99,
    bin_s: float = 60.0,
    start_s: float,
    bounds: Bounds,
    initial: int | None = None,
    thetas: Sequence[float] = THETAS,
) -> Achievable | None:
    """Return the plan with the largest theta whose simulated run attains the goal; None where even the smallest fails.

    Args:
        busy: replicas that the work of each bin keeps busy.
        simulate: the attainment, 0 to 1, of a plan of ready replicas. It must not rise with theta.
        start_s, initial: as in `cheapest`.
        thetas: ascending; bisected.
    """
    best = None
    low, high = 0, len(thetas)
    while low < high:
        middle = (low + high) // 2
        need = needed(busy, thetas[middle], bounds)
        plan = tuple(cheapest(need, bin_s=bin_s, start_s=start_s, initial=initial).tolist())
        attainment = simulate(plan)
        if attainment >= goal:
            best = Achievable(theta=thetas[middle], plan=plan, attainment=attainment)
            low = middle + 1
        else:
            high = middle
    return best


class Planned:
    """The rival that carries a plan out: it orders each replica early enough to be ready in its bin.

    Args:
        plan: ready replicas per bin.
        lead_s: from an order to a replica that takes requests.
    """

    def __init__(self, plan: Sequence[int], *, bin_s: float = 60.0, lead_s: float, interval_s: float = 5.0) -> None:
        self.interval_s = interval_s
        self._plan = tuple(plan)
        self._bin_s = bin_s
        self._lead_s = lead_s

    def desired(self, now: float, view: View) -> int:
        """Return the most replicas that the plan wants ready between now and now + lead."""
        last = len(self._plan) - 1
        first = min(int(now // self._bin_s), last)
        until = min(int((now + self._lead_s + self.interval_s) // self._bin_s), last)
        return max(self._plan[first : until + 1])
