"""Forecasts: demand at the learned horizon with its margin, and, for the seed policies, the score itself."""

import math
from collections.abc import Sequence
from functools import lru_cache
from operator import mul
from typing import NamedTuple

import numpy as np

from autoscaler.core.demand import DemandWindow
from autoscaler.core.policy import Forecaster, Policy, Prediction
from autoscaler.core.types import Forecast, Regime

NEW_BINS = 4
MIN_CHANGE = 0.5
LOWEST_RELATIVE, HIGHEST_RELATIVE = 0.04, 0.30
Point = tuple[float, float]


def learned_horizon(prediction: Prediction, starts: Sequence[float], interval_s: float) -> float:
    """Return how far ahead to look [s]: p90 of the observed starts plus one interval, capped."""
    if prediction.horizon_s is not None:
        return prediction.horizon_s
    if not starts:
        return min(prediction.initial_horizon_s, prediction.max_horizon_s)
    ordered = sorted(starts)
    # The nearest-rank quantile: with few starts it is the slowest of them.
    slow = ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)]
    return min(prediction.max_horizon_s, slow + interval_s)


def forecast_demand(
    policy: Policy,
    window: DemandWindow,
    at: float,
    horizon_s: float,
    regimes: tuple[Regime, ...],
    errors: Sequence[float],
) -> Forecast:
    """Return the demand expected at the horizon, the margin, and the replicas to grow to and to keep.

    Each term has its own level, slope and deviation by least squares over the bins of its regime; the slope is shrunk
    by two standard errors. The margin is the larger of the residual deviation and what the 95 % quantile of the
    target's own relative forecast errors stands for.
    """
    if window.latest.gap is not None:
        return Forecast(horizon_s=horizon_s, gap=window.latest.gap, regimes=regimes)
    prediction = policy.prediction
    quantile = error_quantile(prediction, errors)
    fits = [_fit(prediction, bins, at, regime) for bins, regime in zip(window.terms, regimes, strict=True)]
    # On top of a trend a jump must not forecast less than the trend alone would: both count when a regime begins.
    likely = [*fits, *(fit.before for fit in fits if fit.before is not None)]
    ahead = horizon_s / prediction.bin_s
    tops = [max(fit.level, fit.level + fit.slope * ahead) for fit in likely]
    sigmas = [max(fit.sd, quantile * top / 1.645) for fit, top in zip(likely, tops, strict=True)]
    wishes = [top + prediction.z_up * sigma for top, sigma in zip(tops, sigmas, strict=True)]
    up = max(wishes)
    keep = max(top + prediction.z_keep * sigma for top, sigma in zip(tops, sigmas, strict=True))
    widest = wishes.index(up)
    return Forecast(
        horizon_s=horizon_s,
        level=likely[widest].level,
        top=max(tops),
        sigma=sigmas[widest],
        up=_whole(up / prediction.utilization),
        keep=_whole(keep / prediction.utilization),
        changed=any(fit.before is not None for fit in fits),
        regimes=tuple(fit.regime for fit in fits),
    )


def _whole(replicas: float) -> int:
    """Return the replicas rounded up; a billionth above a whole number is float noise."""
    return math.ceil(replicas - 1e-9)


class _Fit(NamedTuple):
    """Level now, slope a bin, residual deviation, and their regime; if it begins now, the fit without it."""

    level: float
    slope: float
    sd: float
    regime: Regime
    before: "_Fit | None" = None


def _fit(prediction: Prediction, bins: Sequence[float], at: float, regime: Regime) -> _Fit:
    """Return the fit of one term. The newest bin may start a new regime."""
    fresh = _bins_since(prediction, at, regime, len(bins))
    values = [value for value in bins[len(bins) - fresh :] if value == value]
    if regime.since is not None and fresh < NEW_BINS:
        return _young_fit(values, regime)
    fit = _trend_fit(prediction, values, regime if fresh < len(bins) else Regime(relative_sd=regime.relative_sd))
    if not _is_change(prediction, values):
        return fit
    young = _young_fit(values[-1:], Regime(since=at, relative_sd=regime.relative_sd))
    return young._replace(before=fit)


def _young_fit(values: Sequence[float], regime: Regime) -> _Fit:
    """Return the fit of a regime with too few bins for a trend; its deviation is the remembered one."""
    level = max(values) if len(values) < 3 else sum(values) / len(values)
    return _Fit(level, 0.0, regime.relative_sd * level, regime)


def _trend_fit(prediction: Prediction, values: Sequence[float], regime: Regime) -> _Fit:
    """Return the fit by least squares, the slope shrunk by two standard errors."""
    level, slope, slope_error, sd = least_squares(values)
    slope = math.copysign(max(0.0, abs(slope) - 2.0 * slope_error), slope)
    level = max(0.0, level)
    sd = max(sd, prediction.min_deviation * level)
    relative = min(max(sd / level, LOWEST_RELATIVE), HIGHEST_RELATIVE) if level > 0.0 else regime.relative_sd
    return _Fit(level, slope, sd, Regime(since=regime.since, relative_sd=relative))


def _bins_since(prediction: Prediction, at: float, regime: Regime, count: int) -> int:
    """Return how many of the newest bins belong to the regime."""
    if regime.since is None:
        return count
    return min(count, 1 + int((at - regime.since) / prediction.bin_s))


def _is_change(prediction: Prediction, values: Sequence[float]) -> bool:
    """Tell whether the newest value lies above what the older ones predict, beyond chance."""
    if len(values) < NEW_BINS:
        return False
    level, slope, _, sd = least_squares(values[:-1])
    expected = max(0.0, level + slope)
    limit = prediction.change_sigma * max(sd, prediction.min_deviation * expected)
    return values[-1] - expected > max(limit, MIN_CHANGE)


def least_squares(values: Sequence[float]) -> tuple[float, float, float, float]:
    """Return level at the last value, slope a step, the slope's standard error, and the residual deviation.

    Source: ordinary least squares on 0..n-1; with fewer than three values the slope's error is infinite.
    """
    count = len(values)
    mean = sum(values) / count
    if count < 3:
        return mean, 0.0, math.inf, 0.0
    centred = _centred(count)
    spread = count * (count * count - 1) / 12.0
    off = [value - mean for value in values]
    slope = sum(map(mul, centred, off)) / spread
    variance = max(0.0, sum(map(mul, off, off)) - slope * slope * spread) / (count - 2)
    return mean + slope * centred[-1], slope, math.sqrt(variance / spread), math.sqrt(variance)


@lru_cache(maxsize=64)
def _centred(count: int) -> tuple[float, ...]:
    """Return 0..count-1, less their mean."""
    return tuple(index - (count - 1) / 2.0 for index in range(count))


def error_quantile(prediction: Prediction, errors: Sequence[float]) -> float:
    """Return the margin learned from relative forecast errors: their upper quantile in [0, cap]; 0 with too few."""
    if len(errors) < prediction.error_min:
        return 0.0
    return min(max(_quantile(tuple(errors), prediction.error_quantile), 0.0), prediction.error_cap)


@lru_cache(maxsize=64)
def _quantile(values: tuple[float, ...], q: float) -> float:
    """Return the quantile; kept, since the errors change once a minute."""
    return float(np.quantile(np.asarray(values), q))


def forecast_score(prediction: Prediction, history: Sequence[Point]) -> float | None:
    """Return the score expected at the score horizon, in [0, 1]; None without a forecaster or history.

    `trend` is least squares over the window; `lag` is the seed's lag compensation,
    alpha x last + (1 - alpha) x trend. Of equal times the later entry counts.
    """
    if prediction.score is Forecaster.NONE or not history:
        return None
    last_at = history[-1][0]
    points = {at: value for at, value in history if last_at - at <= prediction.score_window_s}
    predicted = linear_trend(list(points.items()), prediction.score_horizon_s)
    if prediction.score is Forecaster.LAG:
        predicted = prediction.alpha * history[-1][1] + (1.0 - prediction.alpha) * predicted
    return min(max(predicted, 0.0), 1.0)


def linear_trend(points: Sequence[Point], horizon_s: float) -> float:
    """Return the value expected `horizon_s` after the last point, by least squares; the last value of a single time.

    Args:
        points: (time [s], value), at least one; times relative to the last are used, as squared epochs are inexact.
    Source: ordinary least squares.
    """
    last_at, last = points[-1]
    count = len(points)
    times = [at - last_at for at, _ in points]
    mean_time, mean = sum(times) / count, sum(value for _, value in points) / count
    spread = sum((time - mean_time) ** 2 for time in times)
    if spread <= 0.0:
        return last
    slope = sum((time - mean_time) * value for time, (_, value) in zip(times, points, strict=True)) / spread
    return mean + slope * (horizon_s - mean_time)
