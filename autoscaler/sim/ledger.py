"""What truly happened to every request: the ground truth that no scrape shows."""

import itertools
from array import array
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from autoscaler.core.types import Floats

SHORT_ANSWER = 16
"""Answers below this many tokens are not judged by their time per output token: one prefill burst decides it."""


class Fate(IntEnum):
    """How a request ended: answered, given up by its client, taken by no replica, lost with its own, or too long."""

    DONE = 0
    TIMED_OUT = 1
    REFUSED = 2
    KILLED = 3
    TOO_LONG = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyBin:
    """The requests that arrived in [start, end), simulated seconds.

    Args:
        arrived: requests that arrived and ended, failed ones included.
        attained: of these, within both objectives and not failed.
        ttft_p99: of the answered ones [s]; None without any.
        itl_p99: of the tokens produced in that time [s], exact to a microsecond; None without any.
    """

    start: float
    end: float
    arrived: int
    attained: int
    ttft_p99: float | None
    itl_p99: float | None


class Ledger:
    """One row per ended request, in columns; and per bin of time the exact p99 of all inter-token latencies.

    Args:
        bin_s: length of a bin [s].
    """

    def __init__(self, bin_s: float = 300.0) -> None:
        self.bin_s = bin_s
        self.itl_p99: list[float | None] = []
        self._arrival = array("d")
        self._first = array("d")
        self._finish = array("d")
        self._prompt = array("q")
        self._output = array("q")
        self._fate = array("b")
        self._run_first = array("d")
        self._run_slope = array("d")
        self._run_steps = array("q")
        self._run_batch = array("q")

    def __len__(self) -> int:
        return len(self._arrival)

    def add(self, arrival: float, first: float, finish: float, prompt: int, output: int, fate: Fate) -> None:
        """Note an ended request; `first`, when its first token came, is NaN where none did."""
        self._arrival.append(arrival)
        self._first.append(first)
        self._finish.append(finish)
        self._prompt.append(prompt)
        self._output.append(output)
        self._fate.append(fate)

    def add_run(self, first: float, slope: float, steps: int, batch: int) -> None:
        """Note `steps` iterations that gave `batch` inter-token latencies each: first, first + slope, ..."""
        self._run_first.append(first)
        self._run_slope.append(slope)
        self._run_steps.append(steps)
        self._run_batch.append(batch)

    def close_bin(self) -> None:
        """End the current bin of inter-token latencies and begin the next."""
        first, slope = np.array(self._run_first), np.array(self._run_slope)
        steps, batch = np.array(self._run_steps), np.array(self._run_batch)
        self.itl_p99.append(run_quantile(first, slope, steps, batch, 0.99))
        for column in (self._run_first, self._run_slope, self._run_steps, self._run_batch):
            del column[:]

    def column(self, name: str) -> Floats:
        """Return a copy of one column: arrival, first, finish, prompt, output or fate."""
        columns = {
            "arrival": self._arrival,
            "first": self._first,
            "finish": self._finish,
            "prompt": self._prompt,
            "output": self._output,
            "fate": self._fate,
        }
        return np.array(columns[name], dtype=np.float64)

    def ttft(self) -> Floats:
        """Return each request's time to first token [s]; NaN where none came."""
        return self.column("first") - self.column("arrival")

    def tpot(self) -> Floats:
        """Return each request's mean time per output token after the first [s]; NaN below two tokens."""
        output = self.column("output")
        after = np.where(output > 1, output - 1, np.nan)
        return np.asarray((self.column("finish") - self.column("first")) / after, dtype=np.float64)

    def attained(self, ttft_s: float, tpot_s: float) -> NDArray[np.bool_]:
        """Return which requests were answered within both objectives; short answers are judged by TTFT alone."""
        answered = self.column("fate") == Fate.DONE
        slow = (self.column("output") >= SHORT_ANSWER) & (self.tpot() > tpot_s)
        return np.asarray(answered & (self.ttft() <= ttft_s) & ~slow)

    def failed(self) -> int:
        """Return how many requests failed: timed out, refused or killed."""
        return int(np.count_nonzero(self.column("fate") != Fate.DONE))

    def traffic(self, span_s: float, until: float) -> tuple[float, ...]:
        """Return the arrivals per second [1/s] of each whole span up to `until`, of the requests that have ended."""
        edges = np.arange(int(until // span_s) + 1) * span_s
        counts, _ = np.histogram(self.column("arrival"), edges) if len(edges) > 1 else (np.array([]), edges)
        return tuple((counts / span_s).tolist())

    def bins(self, ttft_s: float, tpot_s: float) -> tuple[LatencyBin, ...]:
        """Return the closed bins, by time of arrival."""
        count = len(self.itl_p99)
        arrival, ttft, attained = self.column("arrival"), self.ttft(), self.attained(ttft_s, tpot_s)
        order = np.argsort(arrival, kind="stable")
        arrival, ttft, attained = arrival[order], ttft[order], attained[order]
        edges = np.searchsorted(arrival, np.arange(count + 1) * self.bin_s)
        bins = []
        for index, (low, high) in enumerate(itertools.pairwise(edges)):
            answered = ttft[low:high][~np.isnan(ttft[low:high])]
            bins.append(
                LatencyBin(
                    start=index * self.bin_s,
                    end=(index + 1) * self.bin_s,
                    arrived=int(high - low),
                    attained=int(np.count_nonzero(attained[low:high])),
                    ttft_p99=float(np.quantile(answered, 0.99)) if answered.size else None,
                    itl_p99=self.itl_p99[index],
                )
            )
        return tuple(bins)


def run_quantile(
    first: Floats, slope: Floats, steps: NDArray[np.int64], batch: NDArray[np.int64], quantile: float
) -> float | None:
    """Return the quantile of all values in the runs, as the smallest value with enough of them at or below it.

    Run i holds first + slope * k for k < steps, each `batch` times over. None without any. Exact to a microsecond:
    the rank is bisected over the value, as a day's runs hold more values than memory should.
    """
    if not first.size:
        return None
    wanted = quantile * float(np.sum(steps * batch))
    low, high = float(first.min()), float((first + slope * (steps - 1)).max())
    steep = np.where(slope > 0.0, slope, 1.0)

    def reached(value: float) -> float:
        inside = np.where(slope > 0.0, np.floor((value - first) / steep) + 1.0, np.where(value >= first, steps, 0.0))
        return float(np.sum(np.clip(inside, 0.0, steps) * batch))

    if reached(low) >= wanted:
        return low
    while high - low > 1e-6:
        middle = (low + high) / 2.0
        low, high = (low, middle) if reached(middle) >= wanted else (middle, high)
    return high
