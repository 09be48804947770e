"""The live snapshot stream: the only reader of a clock."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import numpy as np

from autoscaler.core.state import NO_ENGINES
from autoscaler.core.types import (
    WHOLE_PAGE,
    Engines,
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


class Trouble(Protocol):
    """Is told of ticks that gave no snapshot, and of ticks that came late."""

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
) -> AsyncGenerator[Snapshot]:
    """Yield one snapshot an interval, for ever or for so many attempts.

    Ticks never overlap: what is missed is skipped, and the next tick is on schedule. A tick whose target cannot be
    read yields nothing; a server's Retry-After is respected.
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
            snapshot = await take(target, sources, clock)
        except TargetError as error:
            trouble.error(policy, "target", error)
            pause_s = error.retry_after_s or 0.0
        except Exception as error:  # noqa: BLE001 - one bad tick must not stop the next
            trouble.error(policy, "bug", error)
        if snapshot is not None:
            yield snapshot
        now = clock.now()
        if now - due > interval_s:
            trouble.overrun(policy)
        # The first start that lies ahead, on the original grid.
        number = max(number + 1, int((max(now, due + pause_s) - start) / interval_s) + 1)


async def take(target: Target, sources: Sequence[Source], clock: Clock) -> Snapshot:
    """Return a snapshot of now: the target first, then every source side by side."""
    status = await target.read()
    readings = await asyncio.gather(*(_read(source, status, clock) for source in sources))
    return merge(status, readings, round(clock.now(), 3))


async def _read(source: Source, status: TargetStatus, clock: Clock) -> Reading:
    try:
        return await source.read(status, round(clock.now(), 3))
    except SourceError as error:
        gap = Gap(signal=WHOLE_PAGE, reason=GapReason(error.reason), source=error.source, detail=error.detail[:200])
        return Reading(gaps=(gap,))


def merge(status: TargetStatus, readings: Sequence[Reading], at: float) -> Snapshot:
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
    )


def _fresher(tables: Sequence[Engines]) -> Engines:
    """Return one table of all engines; where two hold the same engine, the later reading."""
    best: dict[tuple[str, str], tuple[float, int, int]] = {}
    for number, table in enumerate(tables):
        for row, key in enumerate(table.keys):
            entry = (float(table.values[row, 0]), number, row)
            best[key] = max(best.get(key, entry), entry, key=lambda found: found[0])
    keys = tuple(sorted(key for table in tables for key in table.keys if best[key][1] == tables.index(table)))
    place = {key: row for row, key in enumerate(keys)}
    values = np.array([tables[best[key][1]].values[best[key][2]] for key in keys])
    histograms: dict[str, list[HistogramRows]] = {}
    for number, table in enumerate(tables):
        for name, blocks in table.histograms.items():
            for block in blocks:
                kept = [
                    (place[table.keys[int(row)]], index)
                    for index, row in enumerate(block.rows)
                    if best[table.keys[int(row)]][1] == number
                ]
                if kept:
                    rows, indices = np.array(sorted(kept), dtype=np.intp).T
                    part = HistogramRows(bounds=block.bounds, rows=rows, counts=block.counts[indices])
                    histograms.setdefault(name, []).append(part)
    return Engines(keys=keys, values=values, histograms={name: tuple(blocks) for name, blocks in histograms.items()})
