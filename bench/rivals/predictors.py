"""One step ahead: the predictors of Dynamo's planner, and those of the predictive HPA."""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from autoscaler.core.types import Floats


class Predictor(Protocol):
    """A series, one value an interval."""

    def add(self, value: float) -> None:
        """Note the newest value."""

    def next(self) -> float | None:
        """Return the next one expected; None while too little is known."""


class Constant:
    """Tomorrow is as today."""

    def __init__(self) -> None:
        self._last: float | None = None

    def add(self, value: float) -> None:
        """Note the newest value."""
        self._last = value

    def next(self) -> float | None:
        """Return the last value."""
        return self._last


class Kalman:
    """A level that drifts with a trend, filtered.

    Args:
        q_level, q_trend, r: variances of level, trend and observation; defaults as in Dynamo's planner.
        fewest: values before it predicts anything but the last one.
    """

    def __init__(self, q_level: float = 1.0, q_trend: float = 0.1, r: float = 10.0, fewest: int = 5) -> None:
        self._noise = np.diag([q_level, q_trend])
        self._r = r
        self._fewest = fewest
        self._step = np.array([[1.0, 1.0], [0.0, 1.0]])
        self._state = np.zeros(2)
        self._spread = np.eye(2) * 1e3
        self._seen = 0
        self._last: float | None = None

    def add(self, value: float) -> None:
        """Note the newest value."""
        self._last = value
        self._seen += 1
        if self._seen == 1:
            self._state = np.array([value, 0.0])
            return
        state = self._step @ self._state
        spread = self._step @ self._spread @ self._step.T + self._noise
        gain = spread[:, 0] / (spread[0, 0] + self._r)
        self._state = state + gain * (value - state[0])
        self._spread = spread - np.outer(gain, spread[0])

    def next(self) -> float | None:
        """Return the level one interval on."""
        return self._last if self._seen < self._fewest else float(self._state.sum())


def linear(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return the least-squares line through (time, value) at a time. Raises: ValueError, without points."""
    if not points:
        raise ValueError("no points")
    times = np.array([time for time, _ in points]) - at
    values = np.array([value for _, value in points])
    away = times - times.mean()
    spread = float(np.sum(away * away))
    slope = float(np.sum(away * values)) / spread if spread > 0.0 else 0.0
    return float(values.mean() - slope * times.mean())


def holt_winters(series: Sequence[float], *, alpha: float, beta: float, gamma: float, periods: int) -> float | None:
    """Return the next value by additive triple smoothing; None with fewer than 10 + 2 (periods // 2) values.

    The starting level, trend and season are those with the least squared error, as statsmodels' `estimated`: the errors
    are linear in them, so the recursion runs once for the data and once for each of them.

    Args:
        periods: length of a season; 0 leaves season out, which makes it Holt's.
    """
    if len(series) < 10 + 2 * (periods // 2):
        return None
    size = 2 + periods
    states = np.zeros((size, size + 1))  # one column from nothing but the data, one for each starting value
    states[:, 1:] = np.eye(size)
    errors = np.empty((len(series), size + 1))
    for index, observed in enumerate(series):
        data = np.zeros(size + 1)
        data[0] = observed
        season = states[2 + index % periods] if periods else np.zeros(size + 1)
        expected = states[0] + states[1]
        errors[index] = data - expected - season
        level = alpha * (data - season) + (1.0 - alpha) * expected
        states[1] = beta * (level - states[0]) + (1.0 - beta) * states[1]
        if periods:
            states[2 + index % periods] = gamma * (data - expected) + (1.0 - gamma) * season
        states[0] = level
    start = _least_squares(errors[:, 1:], -errors[:, 0])
    ahead = states[0] + states[1] + (states[2 + len(series) % periods] if periods else 0.0)
    forecast = float(ahead[0] + ahead[1:] @ start)
    return forecast if math.isfinite(forecast) else None


def _least_squares(rows: Floats, values: Floats) -> Floats:
    """Return the smallest solution: level and season may trade a constant without any effect."""
    return np.asarray(np.linalg.lstsq(rows, values, rcond=None)[0], dtype=np.float64)
