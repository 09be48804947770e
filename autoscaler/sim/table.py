"""The engines' pages in parsed form: the rows that the product's own parser makes of them, without the text between."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from autoscaler.core.signals import COLUMN
from autoscaler.core.state import NO_ENGINES
from autoscaler.core.types import EngineKey, Engines, HistogramRows
from autoscaler.sim.engine import Engine
from autoscaler.sim.tally import REQUEST_BOUNDS, TOKEN_BOUNDS, TTFT_BOUNDS

HISTOGRAMS: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("ttft", (*TTFT_BOUNDS, math.inf)),
    ("itl", (*TOKEN_BOUNDS, math.inf)),
    ("e2e", (*REQUEST_BOUNDS, math.inf)),
    ("queue_time", (*REQUEST_BOUNDS, math.inf)),
)
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage")
GPU_MEMORY_UTILIZATION = 0.9


class Line(NamedTuple):
    """What one scrape of one engine gave: values in the order of `ENGINE_COLUMNS`, and counts of histograms, not
    cumulative.
    """

    uid: str
    read_at: float
    values: tuple[float, ...]
    counts: tuple[list[int], ...]


def read_engine(engine: Engine, uid: str, *, started_at: float, read_at: float) -> Line:
    """Return what the engine's page says now.

    Args:
        started_at: start of its process, epoch seconds. read_at: now, epoch seconds.
    """
    tallies, profile = engine.tallies, engine.profile
    return Line(
        uid,
        read_at,
        (
            read_at,
            started_at,
            engine.running,
            engine.waiting,
            engine.kv_usage,
            profile.blocks * profile.block_size,
            0.0,  # awake
            GPU_MEMORY_UTILIZATION,
            tallies.preemptions,
            tallies.prompt_tokens,
            tallies.cached_prompt_tokens,
            tallies.generation_tokens,
            tallies.finished + tallies.aborted,
            sum(tallies.iteration_tokens.counts),
            tallies.itl.sum,
        ),
        (
            tallies.ttft.counts.copy(),
            tallies.itl.counts.copy(),
            tallies.e2e.counts.copy(),
            tallies.queue.counts.copy(),
        ),
    )


def again(line: Line, read_at: float) -> Line:
    """Return the same page, read at another time."""
    return line._replace(read_at=read_at, values=(read_at, *line.values[1:]))


def without_gauges(line: Line) -> Line:
    """Return the line of a page whose `GAUGES` read NaN: they are not believed."""
    values = list(line.values)
    for name in GAUGES:
        values[COLUMN[name]] = math.nan
    return line._replace(values=tuple(values))


class Table:
    """Makes the engines' table of lines. While the engines stay the same, so does the `keys` object."""

    def __init__(self) -> None:
        self._keys: tuple[EngineKey, ...] = ()

    def build(self, lines: Iterable[Line]) -> Engines:
        """Return the table of these lines, one an engine."""
        ordered = sorted(lines, key=lambda line: line.uid)
        if not ordered:
            return NO_ENGINES
        keys = tuple(EngineKey(line.uid) for line in ordered)
        if keys != self._keys:
            self._keys = keys
        rows = np.arange(len(keys))
        return Engines(
            keys=self._keys,
            values=np.array([line.values for line in ordered], dtype=np.float64),
            histograms={
                name: (
                    HistogramRows(
                        bounds=bounds,
                        rows=rows,
                        counts=np.array([line.counts[number] for line in ordered], dtype=np.float64).cumsum(axis=1),
                    ),
                )
                for number, (name, bounds) in enumerate(HISTOGRAMS)
            },
        )
