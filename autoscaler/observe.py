"""The live snapshot stream: the only reader of a clock."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from autoscaler.core.signals import COLUMN
from autoscaler.core.state import NO_ENGINES
from autoscaler.core.types import (
    WHOLE_PAGE,
    EngineKey,
    Engines,
    Floats,
    Gap,
    GapReason,
    Gpu,
    HistogramRows,
    Reading,
    Sample,
    Snapshot,
    TargetStatus,
)
from autoscaler.errors import SourceError, TargetError
from autoscaler.ports import Clock, Source, Target

MAX_DETAIL = 200
MAX_PAUSE_S = 30.0
"""A longer pause that a server asks for comes in pieces: the error that ends each shows that the loop still lives. The
API client keeps the whole pause, so that no piece ends in a request."""


Active = Callable[[float], tuple[str, ...]]
"""Returns the labels of the schedules that are active at a time."""


def none_active(_at: float) -> tuple[str, ...]:
    """Return no schedule: the policy has none."""
    return ()


class Trouble(Protocol):
    """Is told of ticks that failed, in whole or in part, and of ticks that came late."""

    def error(self, policy: str, kind: str, error: BaseException) -> None:
        """Take note of a failure: `kind` is `target`, or `bug` for what nobody expected."""
        ...

    def overrun(self, policy: str) -> None:
        """Take note of a tick that took longer than the interval."""
        ...


async def observe(
    policy: str,
    interval_s: float,
    target: Target,
    sources: Sequence[Source],
    clock: Clock,
    trouble: Trouble,
    attempts: int | None = None,
    active: Active = none_active,
) -> AsyncGenerator[Snapshot]:
    """Yield one snapshot an interval, for ever or for so many attempts.

    Ticks never overlap: what is missed is skipped, and the next tick is on schedule. A tick whose target cannot be
    read yields nothing, and the next waits for as long as the server asks.
    """
    start = clock.now()
    number = 0
    while attempts is None or attempts > 0:
        attempts = None if attempts is None else attempts - 1
        due = start + number * interval_s
        await clock.sleep_until(due)
        snapshot: Snapshot | None = None
        pause_s = 0.0
        try:
            snapshot = await take(policy, target, sources, clock, trouble, active)
        except TargetError as error:
            trouble.error(policy, "target", error)
            pause_s = min(MAX_PAUSE_S, error.retry_after_s or 0.0)
        except Exception as error:  # noqa: BLE001 - one bad tick must not stop the next
            trouble.error(policy, "bug", error)
        if snapshot is not None:
            yield snapshot
        now = clock.now()
        if now - due > interval_s:
            trouble.overrun(policy)
        # The first start from then on, on the original grid, whose points are inexact by less than a millionth.
        number = max(number + 1, math.ceil((max(now, due + pause_s) - start) / interval_s - 1e-6))


async def take(
    policy: str,
    target: Target,
    sources: Sequence[Source],
    clock: Clock,
    trouble: Trouble,
    active: Active = none_active,
) -> Snapshot:
    """Return a snapshot of now: the target first, then every source side by side.

    A source that cannot be read is a gap. So is one that dies of a bug; `trouble` hears of it. Raises TargetError.
    """
    status = await target.read()
    at = round(clock.now(), 3)
    results = await asyncio.gather(*(source.read(status, at) for source in sources), return_exceptions=True)
    readings = []
    for source, result in zip(sources, results, strict=True):
        if isinstance(result, BaseException):
            if not isinstance(result, SourceError):
                trouble.error(policy, "bug", result)
            result = Reading(gaps=(_gap_of(source, result),))
        readings.append(result)
    at = round(clock.now(), 3)
    return merge(status, readings, at, active(at))


def _gap_of(source: Source, error: BaseException) -> Gap:
    """Return what is said of a source of which nothing could be read."""
    if isinstance(error, SourceError):
        return Gap(
            signal=WHOLE_PAGE, reason=GapReason(error.reason), source=error.source, detail=error.detail[:MAX_DETAIL]
        )
    # Only its type: nobody has looked at the text of an unexpected error for credentials.
    return Gap(signal=WHOLE_PAGE, reason=GapReason.BUG, source=source.name, detail=type(error).__name__)


def merge(status: TargetStatus, readings: Sequence[Reading], at: float, schedules: tuple[str, ...] = ()) -> Snapshot:
    """Return the readings as one snapshot. Of two sources with one engine, or one signal, the fresher counts."""
    engines = [reading.engines for reading in readings if reading.engines is not None]
    samples: dict[str, Sample] = {}
    gpus: dict[tuple[str, str, str], Gpu] = {}
    gaps: list[Gap] = []
    for reading in readings:
        gaps.extend(reading.gaps)
        for sample in reading.samples:
            known = samples.get(sample.signal)
            if known is None or sample.at >= known.at:
                samples[sample.signal] = sample
        for gpu in reading.gpus:
            gpus.setdefault((gpu.uuid, gpu.instance, gpu.pod_uid), gpu)
    filled = [part for part in engines if part.keys]
    first_gpus = next((reading.gpus for reading in readings if reading.gpus), ())
    return Snapshot(
        at=at,
        target=status,
        engines=NO_ENGINES if not filled else filled[0] if len(filled) == 1 else _fresher(filled),
        # The source's own tuple when it is the only one: the core and the recorder notice by identity that it is old.
        gpus=first_gpus if len(gpus) == len(first_gpus) else tuple(gpus.values()),
        samples=tuple(samples[name] for name in sorted(samples)),
        gaps=tuple(gaps),
        schedules=schedules,
        limits=tuple(limits for reading in readings for limits in reading.limits),
    )


def _fresher(tables: Sequence[Engines]) -> Engines:
    """Return one table of all engines; where two hold the same engine, the later reading, the first of equals."""
    best: dict[EngineKey, tuple[float, int, int]] = {}
    for number, table in enumerate(tables):
        for row, key in enumerate(table.keys):
            read_at = float(table.values[row, COLUMN["read_at"]])
            if key not in best or read_at > best[key][0]:
                best[key] = (read_at, number, row)
    keys = tuple(sorted(best))
    place = {key: row for row, key in enumerate(keys)}
    counts: dict[str, dict[tuple[float, ...], dict[int, Floats]]] = {}
    for number, table in enumerate(tables):
        for name, blocks in table.histograms.items():
            for block in blocks:
                for row, line in zip(block.rows, block.counts, strict=True):
                    key = table.keys[int(row)]
                    if best[key][1] == number:
                        counts.setdefault(name, {}).setdefault(block.bounds, {})[place[key]] = line
    return Engines(
        keys=keys,
        values=np.array([tables[number].values[row] for _, number, row in (best[key] for key in keys)]),
        histograms={
            name: tuple(_rows(bounds, lines) for bounds, lines in layouts.items()) for name, layouts in counts.items()
        },
    )


def _rows(bounds: tuple[float, ...], lines: Mapping[int, Floats]) -> HistogramRows:
    rows = sorted(lines)
    return HistogramRows(
        bounds=bounds, rows=np.array(rows, dtype=np.intp), counts=np.array([lines[row] for row in rows])
    )
