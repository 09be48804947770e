"""The engines' pages in parsed form: the rows that the product's own parser makes of them, without the text between."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from autoscaler.core.signals import COLUMN
from autoscaler.core.state import NO_ENGINES
from autoscaler.core.types import EngineKey, Engines, HistogramRows
from autoscaler.sim.engine import Engine
from autoscaler.sim.tally import REQUEST_BOUNDS, TOKEN_BOUNDS, TTFT_BOUNDS


def _placed(*histograms: tuple[str, tuple[float, ...]]) -> Iterator[tuple[str, tuple[float, ...], int, int]]:
    """Yield each histogram's name, bounds with +Inf, and where its counts begin and end among those of all."""
    start = 0
    for name, bounds in histograms:
        end = start + len(bounds) + 1
        yield name, (*bounds, math.inf), start, end
        start = end


HISTOGRAMS = tuple(
    _placed(("ttft", TTFT_BOUNDS), ("itl", TOKEN_BOUNDS), ("e2e", REQUEST_BOUNDS), ("queue_time", REQUEST_BOUNDS))
)
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage")
GPU_MEMORY_UTILIZATION = 0.9


class Line(NamedTuple):
    """What one scrape of one engine gave: values in the order of `ENGINE_COLUMNS`, and the counts of all `HISTOGRAMS`,
    not cumulative.
    """

    uid: str
    read_at: float
    values: tuple[float, ...]
    counts: list[int]


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
        tallies.ttft.counts + tallies.itl.counts + tallies.e2e.counts + tallies.queue.counts,
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
        counts = np.array([line.counts for line in ordered], dtype=np.float64)
        return Engines(
            keys=self._keys,
            values=np.array([line.values for line in ordered], dtype=np.float64),
            histograms={
                name: (HistogramRows(bounds=bounds, rows=rows, counts=counts[:, start:end].cumsum(axis=1)),)
                for name, bounds, start, end in HISTOGRAMS
            },
        )
