"""Classic histograms: quantiles, shares, and the merging of bucket layouts. Rules as Prometheus has them."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import mul, sub
from typing import NamedTuple

import numpy as np

from autoscaler.core.types import Floats


class Quantile(NamedTuple):
    """A quantile from buckets.

    Args:
        value: NaN when there is no observation, fewer than two buckets, or no +Inf bucket.
        censored: the rank lies in the +Inf bucket, so that the true value is at least `value`.
    """

    value: float
    censored: bool = False


def rising(counts: Floats) -> list[float]:
    """Return cumulative counts as all functions here take them: where they fall, the largest so far."""
    found: list[float] = counts.tolist()
    return found if found == sorted(found) else list(accumulate(found, max))


def quantile(bounds: Sequence[float], cumulative: Sequence[float], q: float) -> Quantile:
    """Return the q-quantile by linear interpolation inside the bucket that holds rank q x N.

    Args:
        bounds: upper bounds, ascending; the last must be +Inf.
        cumulative: observations at or below each bound, rising.
    Source: Prometheus' histogram_quantile for classic histograms (2.42 and 3.x agree on these).
    """
    if len(bounds) < 2 or bounds[-1] != math.inf:
        return Quantile(value=math.nan)
    total = cumulative[-1]
    if not total > 0.0:
        return Quantile(value=math.nan)
    if q < 0.0 or q > 1.0:
        return Quantile(value=-math.inf if q < 0.0 else math.inf)
    rank = q * total
    index = bisect_left(cumulative, rank)
    if index >= len(bounds) - 1:
        return Quantile(value=bounds[-2], censored=True)
    upper = bounds[index]
    if index == 0 and upper <= 0.0:
        return Quantile(value=upper)
    lower = bounds[index - 1] if index else 0.0
    below = cumulative[index - 1] if index else 0.0
    inside = cumulative[index] - below
    if inside <= 0.0:
        return Quantile(value=lower)
    return Quantile(value=lower + (upper - lower) * (rank - below) / inside)


def share_within(bounds: Sequence[float], cumulative: Sequence[float], limit: float) -> float:
    """Return the share of observations at or below `limit`, NaN without observations.

    Exact when `limit` is a bound, else linear inside its bucket. Above the highest finite bound nothing is known of
    the +Inf bucket, so that its observations count as beyond the limit.
    """
    total = cumulative[-1]
    if not total > 0.0:
        return math.nan
    index = bisect_left(bounds, limit)
    if index < len(bounds) and bounds[index] == limit:
        return cumulative[index] / total
    below = cumulative[index - 1] if index else 0.0
    if index >= len(bounds) - 1:
        return below / total
    lower = bounds[index - 1] if index else 0.0
    inside = cumulative[index] - below
    return (below + inside * (limit - lower) / (bounds[index] - lower)) / total


def slowest(bounds: Sequence[float], cumulative: Sequence[float]) -> float:
    """Return an upper bound of the slowest observation: the first bound that holds them all, +Inf beyond the last."""
    return bounds[bisect_left(cumulative, cumulative[-1])]


def deviation(bounds: tuple[float, ...], cumulative: Sequence[float]) -> float:
    """Return the standard deviation with each observation at the middle of its bucket; NaN without observations."""
    total = cumulative[-1]
    if not total > 0.0:
        return math.nan
    counts = list(map(sub, cumulative, (0.0, *cumulative)))
    middles, squares = _middles(bounds)
    mean = sum(map(mul, middles, counts)) / total
    return math.sqrt(max(0.0, sum(map(mul, squares, counts)) / total - mean * mean))


def is_spread(bounds: tuple[float, ...], cumulative: Sequence[float], limit: float) -> bool:
    """Tell whether the deviation, as `deviation` has it, is above a limit; not without observations.

    First a bound: seen from limit / 2, what is within the limit is at most limit / 2 away, and the rest is no farther
    than the highest bucket in use.
    """
    total, half, index = cumulative[-1], limit / 2.0, bisect_right(bounds, limit)
    beyond = total - (cumulative[index - 1] if index else 0.0)
    farthest = bounds[min(bisect_left(cumulative, total), len(bounds) - 2)] - half
    if total * half * half + beyond * farthest * farthest <= total * limit * limit:
        return False
    return deviation(bounds, cumulative) > limit


@lru_cache(maxsize=64)
def _middles(bounds: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the middle of each bucket, of the last one its lower bound, and their squares."""
    edges = (0.0, *bounds[:-1])
    middles = (*((low + high) / 2.0 for low, high in pairwise(edges)), edges[-1])
    return middles, tuple(middle * middle for middle in middles)


def union(left: tuple[float, ...], right: tuple[float, ...]) -> tuple[float, ...]:
    """Return the bounds of both layouts, ascending; `left` itself when it holds them all."""
    if left == right or set(right) <= set(left):
        return left
    return tuple(sorted({*left, *right}))


def rebased(bounds: tuple[float, ...], counts: Floats, onto: tuple[float, ...]) -> Floats:
    """Return cumulative counts at the bounds `onto`, a superset of `bounds`, linear inside each own bucket.

    Summing different layouts bound by bound, as PromQL does, can be far off: a bound that one layout lacks would
    seem to hold no observation of it.
    """
    if bounds == onto:
        return counts
    finite = [0.0, *bounds[:-1]]
    values = np.interp(onto[:-1], finite, np.concatenate(([0.0], counts[:-1])))
    return np.concatenate((values, counts[-1:]))
