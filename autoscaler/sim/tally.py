"""Buckets and counters of one engine, laid out as vLLM 0.32 exposes them."""

import math
from bisect import bisect_left
from itertools import accumulate

TTFT_BOUNDS: tuple[float, ...] = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BOUNDS: tuple[float, ...] = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BOUNDS: tuple[float, ...] = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
LENGTH_BOUNDS: tuple[float, ...] = (
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0, 100000.0,
)  # fmt: skip
STEP_BOUNDS: tuple[float, ...] = (
    1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0,
)  # fmt: skip
PREEMPTION_BOUNDS: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


class Tally:
    """A histogram: counts per bucket (not cumulative; the last is +Inf) and the sum of what was observed."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` over. Bounds are inclusive."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def observe_run(self, first: float, slope: float, steps: int, times: int) -> None:
        """Count first, first + slope, ..., `steps` values, each `times` over; slope >= 0."""
        last = first + slope * (steps - 1)
        self.sum += times * steps * (first + last) / 2.0
        low, high = bisect_left(self.bounds, first), bisect_left(self.bounds, last)
        counted = 0
        for index in range(low, high):
            reached = self._within(self.bounds[index], first, slope)
            self.counts[index] += (reached - counted) * times
            counted = reached
        self.counts[high] += (steps - counted) * times

    @staticmethod
    def _within(bound: float, first: float, slope: float) -> int:
        """Return how many of the run's values are at most `bound`, which lies between the first and the last."""
        reached = math.floor((bound - first) / slope) + 1
        while first + slope * reached <= bound:
            reached += 1
        while first + slope * (reached - 1) > bound:
            reached -= 1
        return reached

    def cumulative(self) -> list[int]:
        """Return the counts at or below each bound, +Inf last: what the page shows."""
        return list(accumulate(self.counts))


class Tallies:
    """Everything that one engine counts since its start.

    As in vLLM, a preemption is counted when the preempted request yields its next token, prompt tokens, cached ones
    included, when the first token is out, and an engine step only when it yields a token, by the tokens that it
    computed. The five times of a request are observed when it ends by itself; an aborted one is only counted.
    """

    __slots__ = (
        "aborted",
        "cached_prompt_tokens",
        "decode",
        "e2e",
        "finished",
        "generation_length",
        "generation_tokens",
        "inference",
        "iteration_tokens",
        "itl",
        "preemptions",
        "prefill",
        "prompt_length",
        "prompt_tokens",
        "queue",
        "request_preemptions",
        "tpot",
        "ttft",
    )

    def __init__(self) -> None:
        self.preemptions = 0
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = 0
        self.aborted = 0
        self.ttft = Tally(TTFT_BOUNDS)
        self.itl = Tally(TOKEN_BOUNDS)
        self.tpot = Tally(TOKEN_BOUNDS)
        self.e2e = Tally(REQUEST_BOUNDS)
        self.queue = Tally(REQUEST_BOUNDS)
        self.inference = Tally(REQUEST_BOUNDS)
        self.prefill = Tally(REQUEST_BOUNDS)
        self.decode = Tally(REQUEST_BOUNDS)
        self.prompt_length = Tally(LENGTH_BOUNDS)
        self.generation_length = Tally(LENGTH_BOUNDS)
        self.iteration_tokens = Tally(STEP_BOUNDS)
        self.request_preemptions = Tally(PREEMPTION_BOUNDS)
