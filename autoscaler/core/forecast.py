"""Forecasts: demand at the learned horizon with its margin, and, for the seed policies, the score itself."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from autoscaler.core.demand import DemandWindow
from autoscaler.core.policy import Forecaster, Policy, Prediction
from autoscaler.core.types import Forecast, Regime

NEW_BINS = 4
MIN_CHANGE = 0.5
LOWEST_RELATIVE, HIGHEST_RELATIVE = 0.04, 0.30
Point = tuple[float, float]
Line = tuple[float, float, float, float]
"""By least squares: level at the last value, slope a step, its standard error, and the residual deviation. With fewer
than three values the level is their mean and the slope's error is infinite."""


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
    ranked_errors: Sequence[float],
) -> Forecast:
    """Return the demand expected at the horizon, the margin, and the replicas to grow to and to keep.

    Each term has its own level, slope and deviation by least squares over the bins of its regime; the slope is shrunk
    by two standard errors. The margin is the larger of the residual deviation and what the 95 % quantile of the
    target's own relative forecast errors, which are given in ascending order, stands for. Spare replicas are on top.
    """
    if window.latest.gap is not None:
        return Forecast(horizon_s=horizon_s, gap=window.latest.gap, regimes=regimes)
    prediction = policy.prediction
    quantile = error_quantile(prediction, ranked_errors)
    fits = [_fit(prediction, bins, at, regime) for bins, regime in zip(window.terms, regimes, strict=True)]
    # On top of a trend a jump must not forecast less than the trend alone would: both count when a regime begins.
    likely = fits + [fit.before for fit in fits if fit.before is not None]
    ahead = horizon_s / prediction.bin_s
    views: list[tuple[float, float, float]] = []
    for fit in likely:
        top = fit.level + max(0.0, fit.slope * ahead)
        views.append((top, max(fit.sd, quantile * top / 1.645), fit.level))
    top, sigma, level = max(views, key=lambda view: view[0] + prediction.z_up * view[1])
    keep = max([top + prediction.z_keep * sigma for top, sigma, _ in views])
    return Forecast(
        horizon_s=horizon_s,
        level=level,
        top=max(views)[0],
        sigma=sigma,
        up=_whole((top + prediction.z_up * sigma) / prediction.utilization) + prediction.spare,
        keep=_whole(keep / prediction.utilization) + prediction.spare,
        changed=len(likely) > len(fits),
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
    if regime.since is not None:
        if fresh < NEW_BINS:
            return _young_fit(values, regime)
        if fresh == len(bins):
            regime = Regime(relative_sd=regime.relative_sd)
    older, line = fitted_lines(values)
    fit = _trend_fit(prediction, line, regime)
    if len(values) < NEW_BINS or not _is_change(prediction, older, values[-1]):
        return fit
    young = _young_fit(values[-1:], Regime(since=at, relative_sd=regime.relative_sd))
    return young._replace(before=fit)


def _young_fit(values: Sequence[float], regime: Regime) -> _Fit:
    """Return the fit of a regime with too few bins for a trend; its deviation is the remembered one."""
    level = max(values) if len(values) < 3 else math.fsum(values) / len(values)
    return _Fit(level, 0.0, regime.relative_sd * level, regime)


def _trend_fit(prediction: Prediction, line: Line, regime: Regime) -> _Fit:
    """Return the fit by least squares, the slope shrunk by two standard errors."""
    level, slope, slope_error, sd = line
    slope = math.copysign(max(0.0, abs(slope) - 2.0 * slope_error), slope)
    level = max(0.0, level)
    sd = max(sd, prediction.min_deviation * level)
    relative = min(max(sd / level, LOWEST_RELATIVE), HIGHEST_RELATIVE) if level > 0.0 else regime.relative_sd
    if relative != regime.relative_sd:
        regime = Regime(since=regime.since, relative_sd=relative)
    return _Fit(level, slope, sd, regime)


def _bins_since(prediction: Prediction, at: float, regime: Regime, count: int) -> int:
    """Return how many of the newest bins belong to the regime."""
    if regime.since is None:
        return count
    return min(count, 1 + int((at - regime.since) / prediction.bin_s))


def _is_change(prediction: Prediction, older: Line, newest: float) -> bool:
    """Tell whether the newest value lies above what the older ones predict, beyond chance."""
    level, slope, _, sd = older
    expected = max(0.0, level + slope)
    limit = prediction.change_sigma * max(sd, prediction.min_deviation * expected)
    return newest - expected > max(limit, MIN_CHANGE)


def fitted_lines(values: Sequence[float]) -> tuple[Line, Line]:
    """Return the lines through all values but the last, and through all of them; at least one value.

    Source: ordinary least squares on 0..n-1. Both lines come of one pass; what is summed is relative to the first
    value, so that little is lost where they cancel.
    """
    first, last = values[0], values[-1]
    total = moment = squares = 0.0
    for step, value in enumerate(values[:-1]):
        off = value - first
        total += off
        moment += step * off
        squares += off * off
    count, off = len(values), last - first
    line = _line(first, count, total + off, moment + (count - 1) * off, squares + off * off)
    return _line(first, count - 1, total, moment, squares) if count > 1 else line, line


def _line(first: float, count: int, total: float, moment: float, squares: float) -> Line:
    """Return the line through `count` values, by the sums of them, times their steps, and squared, less `first`."""
    mean, middle = total / count, (count - 1) / 2.0
    if count < 3:
        return first + mean, 0.0, math.inf, 0.0
    spread = count * (count * count - 1) / 12.0
    slope = (moment - middle * total) / spread
    variance = max(0.0, squares - mean * total - slope * slope * spread) / (count - 2)
    return first + mean + slope * middle, slope, math.sqrt(variance / spread), math.sqrt(variance)


def error_quantile(prediction: Prediction, ranked: Sequence[float]) -> float:
    """Return the margin learned from relative forecast errors: their upper quantile in [0, cap]; 0 with too few.

    Args:
        ranked: the errors, ascending; between two of them it is linear.
    """
    if len(ranked) < prediction.error_min:
        return 0.0
    place = prediction.error_quantile * (len(ranked) - 1)
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    quantile = ranked[low] + (ranked[high] - ranked[low]) * (place - low)
    return min(max(quantile, 0.0), prediction.error_cap)


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
    # `fsum`, because what `sum` makes of floats is not the same in every version of Python.
    mean_time, mean = math.fsum(times) / count, math.fsum(value for _, value in points) / count
    spread = math.fsum((time - mean_time) * (time - mean_time) for time in times)
    if spread <= 0.0:
        return last
    slope = math.fsum((time - mean_time) * value for time, (_, value) in zip(times, points, strict=True)) / spread
    return mean + slope * (horizon_s - mean_time)
