"""Request streams from a seed: a rate over time, lengths, and the arrivals that follow."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from autoscaler.sim.engine import Request

Rate = Callable[[float], float]
"""Expected requests per second, by seconds since the start."""

MINUTE = 60.0
HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lognormal lengths in tokens.

    Args:
        prompt, output: means.
        prompt_sigma, output_sigma: standard deviations of the logarithm.
        longest_prompt, longest_output: where they are cut off.
    """

    prompt: float = 1000.0
    output: float = 250.0
    prompt_sigma: float = 0.8
    output_sigma: float = 0.7
    longest_prompt: int = 16_000
    longest_output: int = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Surge:
    """A passing multiple of the ordinary rate.

    Args:
        at, duration_s: when it has fully come, seconds since the start, and for how long.
        factor: times the ordinary rate.
        ramp_s: how long it takes to come, and to go.
    """

    at: float
    duration_s: float
    factor: float
    ramp_s: float = 0.0

    def __call__(self, at: float) -> float:
        """Return the factor at that time; 1 outside."""
        outside = max(self.at - at, at - self.at - self.duration_s)
        if outside < 0.0 or at == self.at:
            return self.factor
        return 1.0 + (self.factor - 1.0) * max(0.0, 1.0 - outside / self.ramp_s) if self.ramp_s > 0.0 else 1.0


def steady(rate: float) -> Rate:
    """Return a constant rate."""
    return lambda _: rate


def step(before: float, after: float, at: float) -> Rate:
    """Return a rate that jumps once and stays."""
    return lambda now: after if now >= at else before


def spike(base: float, surge: Surge) -> Rate:
    """Return a constant rate with one passing surge."""
    return lambda now: base * surge(now)


def chat_day(peak: float, surge: Surge | None = None, *, night: float = 0.1) -> Rate:
    """Return a day of chat traffic, from midnight on, repeating.

    Office hours with their top before noon, a dip after lunch, and a higher top in the evening, at `peak` requests per
    second; the night goes down to the share `night` of it.
    """

    def bell(hour: float, centre: float, width: float) -> float:
        away = (hour - centre + 12.0) % 24.0 - 12.0
        return math.exp(-0.5 * (away / width) ** 2)

    def rate(now: float) -> float:
        hour = now / HOUR % 24.0
        shape = 0.62 * bell(hour, 10.5, 1.9) + 0.5 * bell(hour, 15.0, 2.0) + 0.97 * bell(hour, 20.3, 2.2)
        return peak * (night + (1.0 - night) * min(1.0, shape)) * (surge(now) if surge else 1.0)

    return rate


def requests(
    rng: np.random.Generator,
    rate: Rate,
    lengths: Lengths,
    duration_s: float,
    *,
    noise: float = 0.06,
    span_s: float = MINUTE,
) -> Iterator[Request]:
    """Yield the requests of `duration_s` in order of arrival.

    A Poisson process whose rate is constant over a span and wanders around `rate` by a lognormal factor with
    standard deviation `noise` and a memory of a few spans, as real traffic does.
    """
    wander = 0.0
    for start in np.arange(0.0, duration_s, span_s):
        wander = 0.8 * wander + 0.6 * noise * float(rng.standard_normal())  # 0.8^2 + 0.6^2 = 1: stationary
        span = min(span_s, duration_s - float(start))
        count = int(rng.poisson(rate(float(start)) * span * math.exp(wander - noise * noise / 2.0)))
        arrivals = np.sort(rng.uniform(float(start), float(start) + span, count))
        prompts = _lengths(rng, lengths.prompt, lengths.prompt_sigma, lengths.longest_prompt, count)
        outputs = _lengths(rng, lengths.output, lengths.output_sigma, lengths.longest_output, count)
        yield from map(Request, arrivals.tolist(), prompts, outputs)


def _lengths(rng: np.random.Generator, mean: float, sigma: float, longest: int, count: int) -> list[int]:
    drawn = rng.lognormal(math.log(mean) - sigma * sigma / 2.0, sigma, count)
    clipped: list[int] = np.clip(np.rint(drawn), 1, longest).astype(int).tolist()
    return clipped
