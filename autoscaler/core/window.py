"""From engines' counters to the fleet's: differences per engine, resets included, before any sum.

The fleet's rows are cumulative since the daemon's start, so that any window is the difference of two rows.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import add, itemgetter
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from autoscaler.core.histogram import rebased, rising, union
from autoscaler.core.signals import COLUMN, ENGINE_COUNTERS, FIRST_COUNTER
from autoscaler.core.types import EngineKey, Engines, Floats, HistogramRows, Ints, Pod

Histograms = Mapping[str, tuple[HistogramRows, ...]]
COUNTERS = len(ENGINE_COUNTERS)
READ_AT, STARTED_AT = COLUMN["read_at"], COLUMN["started_at"]
RUNNING, WAITING = COLUMN["num_requests_running"], COLUMN["num_requests_waiting"]
USAGE, CAPACITY = COLUMN["kv_cache_usage"], COLUMN["kv_capacity_tokens"]
PROMPTED, GENERATED = COLUMN["prompt_tokens"], COLUMN["generation_tokens"]
SUMS: dict[str, int] = {
    **{signal.name: index for index, signal in enumerate(ENGINE_COUNTERS)},
    "first_tokens": COUNTERS,
    "itl_count": COUNTERS + 1,
    "running": COUNTERS + 2,
    "kv_tokens": COUNTERS + 3,
    "ticks": COUNTERS + 4,
    "covered": COUNTERS + 5,
    "expected": COUNTERS + 6,
    "spanned": COUNTERS + 7,
    "waiting": COUNTERS + 8,
}
"""Columns of a fleet row: increases of counters, gauges and pods summed over ticks, the pod-seconds that the increases
span, then the waiting requests as they are."""
WORK = ("generation_tokens", "waiting", "running", "kv_tokens", "covered", "expected", "ticks", "spanned")
"""The sums that demand is made of, beside prompt tokens."""
_work: Callable[[Sequence[float]], tuple[float, ...]] = itemgetter(*(SUMS[name] for name in WORK))


class FleetHistogram(NamedTuple):
    """Cumulative observations of the whole fleet since the daemon's start."""

    bounds: tuple[float, ...]
    counts: Floats


@dataclass(frozen=True, slots=True, eq=False)
class FleetRow:
    """The fleet at one tick: `sums` by `SUMS`, histograms by name.

    `work` is `at`, the prompt tokens that no prefix cache supplied, then the sums that `WORK` names.
    """

    at: float
    sums: tuple[float, ...]
    histograms: Mapping[str, FleetHistogram]
    work: tuple[float, ...]


class Observations(NamedTuple):
    """Cumulative observations between two rows, by upper bound, rising."""

    bounds: tuple[float, ...]
    counts: list[float]


class Overview(NamedTuple):
    """All engines at a glance; NaN where one of them does not say.

    Args:
        least, total: the smallest reading and the sum of each column, by `COLUMN`.
        resident: KV tokens held.
    """

    least: list[float]
    total: list[float]
    resident: float


class EngineMemory(NamedTuple):
    """The last reading of each engine, and how long its gauges have said the same.

    Args:
        keys, values: as in `Engines`; a missing reading keeps the last one known.
        histograms: by name, as in `Engines`.
        idle_polls: polls in a row with nothing running, nothing waiting and flat token counters.
        zero_polls: polls in a row with KV usage exactly 0 while requests run.
        flat_since: since when the token counters have not moved while requests run; +Inf when they move or none run.
        steady: every engine was read anew and generates, none reads an odd zero.
    """

    keys: tuple[EngineKey, ...]
    values: Floats
    histograms: Histograms
    idle_polls: Ints
    zero_polls: Ints
    flat_since: Floats
    steady: bool = False


class Increase(NamedTuple):
    """What one tick adds to the fleet.

    Args:
        counters: shape (engines, COUNTERS), increases since each engine's previous reading; NaN where unknown.
        elapsed: shape (engines,), seconds between the two readings; 0 for an engine seen for the first time.
        was_running: shape (engines,), requests running at the previous reading; NaN when there was none.
        histograms: increases by name.
    """

    counters: Floats
    elapsed: Floats
    was_running: Floats
    histograms: Mapping[str, FleetHistogram] = MappingProxyType({})


def look_over(values: Floats) -> Overview:
    """Return the overview of engines' readings."""
    return Overview(
        least=np.minimum.reduce(values, axis=0, initial=np.inf).tolist(),
        total=np.add.reduce(values, axis=0).tolist(),
        resident=float(np.add.reduce(values[:, CAPACITY] * values[:, USAGE])),
    )


def remember_engines(
    memory: EngineMemory | None,
    engines: Engines,
    overview: Overview,
    wanted: Collection[str],
    at: float,
    window_s: float,
    pods: tuple[Pod, ...],
) -> tuple[EngineMemory, EngineMemory, Increase]:
    """Return the memory to keep, its rows of this tick's engines, and what these added since their last readings.

    An engine seen for the first time adds nothing, unless it started inside the window: then all it counted is new.
    A reset of any counter or wanted histogram is one of all its series. A vanished engine is remembered while its pod
    is in `pods`.

    Args:
        wanted: names of the histograms whose increases are asked for.
    """
    previous = _aligned(memory, engines)
    change = engines.values - previous.values
    counters, elapsed, histograms = change[:, FIRST_COUNTER:], change[:, READ_AT], None
    least = _least(change)
    if _counted_on(change, least):
        histograms = _steady_increases(previous, engines, wanted)
    busy = histograms is not None and least[READ_AT] > 0.0 and least[GENERATED] > 0.0
    if histograms is None:
        counters, elapsed, histograms = _fresh_increases(previous, engines, wanted, change, at, window_s)
    increase = Increase(counters, elapsed, previous.values[:, RUNNING], histograms)
    if busy and previous.steady and overview.least[USAGE] > 0.0:
        current = _busy_memory(previous, engines)
    else:
        current = _next_memory(previous, engines, change[:, READ_AT], counters)
    return _with_absent(memory, current, pods), current, increase


def _least(change: Floats) -> list[float]:
    """Return the smallest change of each column over the engines that say it; NaN read time where one is new."""
    least: list[float] = np.minimum.reduce(change, axis=0, initial=np.inf).tolist()
    if math.isnan(sum(least[FIRST_COUNTER:], least[STARTED_AT])):
        said: list[float] = np.fmin.reduce(change, axis=0, initial=np.inf).tolist()
        said[READ_AT] = least[READ_AT]
        return said
    return least


def _counted_on(change: Floats, least: list[float]) -> bool:
    """Tell whether every engine is the same process as before, as far as is known, and none of its counters fell."""
    if math.isnan(least[READ_AT]) or min(least[FIRST_COUNTER:]) < 0.0:
        return False
    # Process start times are printed with 10 ms: a second apart is another process.
    return least[STARTED_AT] >= -1.0 and bool(np.fmax.reduce(change[:, STARTED_AT], initial=-np.inf) <= 1.0)


def _fresh_increases(
    previous: EngineMemory, engines: Engines, wanted: Collection[str], change: Floats, at: float, window_s: float
) -> tuple[Floats, Floats, dict[str, FleetHistogram]]:
    """Return increases of counters, seconds between readings, and increases of histograms, where engines may be new or
    may have started over.
    """
    counters = engines.values[:, FIRST_COUNTER:]
    delta = change[:, FIRST_COUNTER:].copy()
    new = np.isnan(previous.values[:, READ_AT])
    age = at - engines.values[:, STARTED_AT]
    young = age < window_s
    whole = (delta < 0.0).any(axis=1) | (np.abs(change[:, STARTED_AT]) > 1.0) | (new & young)
    shown = {name: blocks for name, blocks in engines.histograms.items() if name in wanted}
    histograms, broken = _histogram_increases(previous, shown, whole, new)
    whole |= broken
    delta[whole] = counters[whole]
    first = new & ~young
    delta[first] = np.where(np.isnan(counters[first]), np.nan, 0.0)
    return delta, np.where(new, np.where(young, age, 0.0), change[:, READ_AT]), histograms


def _aligned(memory: EngineMemory | None, engines: Engines) -> EngineMemory:
    """Return the memory with exactly the engines' rows; NaN rows for engines that it does not know."""
    if memory is not None and (memory.keys is engines.keys or memory.keys == engines.keys):
        return memory
    count = len(engines.keys)
    values = np.full(engines.values.shape, np.nan)
    idle, zero = np.zeros(count, dtype=np.intp), np.zeros(count, dtype=np.intp)
    flat = np.full(count, np.inf)
    histograms: dict[str, tuple[HistogramRows, ...]] = {}
    if memory is not None:
        where = {key: row for row, key in enumerate(memory.keys)}
        pairs = [(row, where[key]) for row, key in enumerate(engines.keys) if key in where]
        if pairs:
            new, old = np.array(pairs, dtype=np.intp).T
            values[new], idle[new] = memory.values[old], memory.idle_polls[old]
            zero[new], flat[new] = memory.zero_polls[old], memory.flat_since[old]
        moved = {old: new for new, old in pairs}
        histograms = {name: _moved_rows(blocks, moved) for name, blocks in memory.histograms.items()}
    return EngineMemory(
        keys=engines.keys, values=values, histograms=histograms, idle_polls=idle, zero_polls=zero, flat_since=flat
    )


def _moved_rows(blocks: tuple[HistogramRows, ...], moved: Mapping[int, int]) -> tuple[HistogramRows, ...]:
    """Return the blocks with rows renumbered by `moved`; rows that it lacks are dropped."""
    result = []
    for block in blocks:
        kept = [(moved[int(row)], index) for index, row in enumerate(block.rows) if int(row) in moved]
        if kept:
            kept.sort()
            rows, indices = np.array(kept, dtype=np.intp).T
            result.append(HistogramRows(bounds=block.bounds, rows=rows, counts=block.counts[indices]))
    return tuple(result)


def _histogram_increases(
    previous: EngineMemory, shown: Histograms, whole: np.ndarray, new: np.ndarray
) -> tuple[dict[str, FleetHistogram], np.ndarray]:
    """Return the increases by name, and which rows' histograms fell, a reset that the counters did not show."""
    deltas: list[tuple[str, HistogramRows, Floats]] = []
    broken = np.zeros(len(whole), dtype=bool)
    for name, blocks in shown.items():
        before = previous.histograms.get(name, ())
        for block in blocks:
            delta, known = _block_delta(block, before)
            fell = (delta < 0.0).any(axis=1) & known
            broken[block.rows[fell]] = True
            delta[~known & ~whole[block.rows]] = 0.0
            deltas.append((name, block, delta))
    restarted = whole | (broken & ~new)
    result: dict[str, FleetHistogram] = {}
    for name, block, delta in deltas:
        again = restarted[block.rows]
        if again.any():
            delta[again] = block.counts[again]
        result[name] = _add(result.get(name), FleetHistogram(block.bounds, delta.sum(axis=0)))
    return result, broken


def _steady_increases(
    previous: EngineMemory, engines: Engines, wanted: Collection[str]
) -> dict[str, FleetHistogram] | None:
    """Return the increases of the common case: the same engines with the same one layout, and no bucket fell."""
    result: dict[str, FleetHistogram] = {}
    for name in wanted:
        blocks, before = engines.histograms.get(name), previous.histograms.get(name, ())
        if blocks is None:
            continue
        if len(blocks) != 1 or len(before) != 1:
            return None
        block, old = blocks[0], before[0]
        if old.bounds != block.bounds or not _same_rows(old, block):
            return None
        delta = block.counts - old.counts
        if np.minimum.reduce(delta, axis=None, initial=0.0) < 0.0:
            return None
        result[name] = FleetHistogram(block.bounds, np.add.reduce(delta, axis=0))
    return result


def _same_rows(left: HistogramRows, right: HistogramRows) -> bool:
    return left.rows is right.rows or np.array_equal(left.rows, right.rows)


def _block_delta(block: HistogramRows, before: tuple[HistogramRows, ...]) -> tuple[Floats, np.ndarray]:
    """Return each row's increase and whether its previous counts are known (else the increase is its counts)."""
    for old in before:
        if old.bounds == block.bounds:
            if _same_rows(old, block):
                return block.counts - old.counts, np.ones(len(block.rows), dtype=bool)
            delta, known = block.counts.copy(), np.isin(block.rows, old.rows)
            delta[known] -= old.counts[np.isin(old.rows, block.rows)]
            return delta, known
    return block.counts.copy(), np.zeros(len(block.rows), dtype=bool)


def _busy_memory(previous: EngineMemory, engines: Engines) -> EngineMemory:
    """Return the memory where every engine was read anew and generates: what counts sameness stays as it was, zero."""
    return EngineMemory(
        keys=engines.keys,
        values=np.where(np.isnan(engines.values), previous.values, engines.values),
        histograms=engines.histograms,
        idle_polls=previous.idle_polls,
        zero_polls=previous.zero_polls,
        flat_since=previous.flat_since,
        steady=True,
    )


def _next_memory(previous: EngineMemory, engines: Engines, since_read: Floats, counters: Floats) -> EngineMemory:
    """Return the memory of the engines that were read, with their polls of sameness counted.

    Args:
        since_read: seconds between each engine's last two readings; NaN where this is the first.
    """
    cur = engines.values
    generated, prompted = counters[:, GENERATED - FIRST_COUNTER], counters[:, PROMPTED - FIRST_COUNTER]
    running, fresh = cur[:, RUNNING], since_read > 0.0
    flat = (generated == 0.0) & ~(prompted > 0.0)
    idle = flat & (running == 0.0) & (cur[:, WAITING] == 0.0)
    zero = (cur[:, USAGE] == 0.0) & (running > 0.0)
    stuck_since = np.where(flat & (running > 0.0), np.minimum(previous.flat_since, previous.values[:, READ_AT]), np.inf)
    return EngineMemory(
        keys=engines.keys,
        values=np.where(np.isnan(cur), previous.values, cur),
        histograms=engines.histograms,
        idle_polls=np.where(fresh, np.where(idle, previous.idle_polls + 1, 0), previous.idle_polls),
        zero_polls=np.where(fresh, np.where(zero, previous.zero_polls + 1, 0), previous.zero_polls),
        flat_since=np.where(fresh, stuck_since, previous.flat_since),
        steady=bool(fresh.all()) and not (flat | zero).any(),
    )


def _with_absent(memory: EngineMemory | None, current: EngineMemory, pods: tuple[Pod, ...]) -> EngineMemory:
    """Return `current` plus the rows of engines that were not read, while their pods live."""
    if memory is None or memory.keys is current.keys or memory.keys == current.keys:
        return current
    here = set(current.keys)
    uids = {pod.uid for pod in pods}
    absent = [row for row, key in enumerate(memory.keys) if key not in here and key.pod_uid in uids]
    if not absent:
        return current
    keys = [*current.keys, *(memory.keys[row] for row in absent)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    place = {old: new for new, old in enumerate(order)}
    took = np.array(order, dtype=np.intp)
    lost = {row: place[len(current.keys) + index] for index, row in enumerate(absent)}
    kept = {row: place[row] for row in range(len(current.keys))}
    names = {**memory.histograms, **current.histograms}
    histograms = {
        name: _merged(
            _moved_rows(current.histograms.get(name, ()), kept), _moved_rows(memory.histograms.get(name, ()), lost)
        )
        for name in names
    }
    return EngineMemory(
        keys=tuple(keys[index] for index in order),
        values=np.concatenate((current.values, memory.values[absent]))[took],
        histograms=histograms,
        idle_polls=np.concatenate((current.idle_polls, memory.idle_polls[absent]))[took],
        zero_polls=np.concatenate((current.zero_polls, memory.zero_polls[absent]))[took],
        flat_since=np.concatenate((current.flat_since, memory.flat_since[absent]))[took],
    )


def _merged(left: tuple[HistogramRows, ...], right: tuple[HistogramRows, ...]) -> tuple[HistogramRows, ...]:
    """Return one block per layout."""
    by_bounds: dict[tuple[float, ...], list[HistogramRows]] = {}
    for block in (*left, *right):
        by_bounds.setdefault(block.bounds, []).append(block)
    result = []
    for bounds, blocks in by_bounds.items():
        rows = np.concatenate([block.rows for block in blocks])
        order = np.argsort(rows)
        counts = np.concatenate([block.counts for block in blocks])[order]
        result.append(HistogramRows(bounds=bounds, rows=rows[order], counts=counts))
    return tuple(result)


def _add(total: FleetHistogram | None, increase: FleetHistogram) -> FleetHistogram:
    """Return the sum of two histograms, on the union of their bounds."""
    if total is None:
        return increase
    if total.bounds == increase.bounds:
        return FleetHistogram(total.bounds, total.counts + increase.counts)
    bounds = union(total.bounds, increase.bounds)
    left, right = rebased(total.bounds, total.counts, bounds), rebased(increase.bounds, increase.counts, bounds)
    return FleetHistogram(bounds, left + right)


def next_row(previous: FleetRow | None, at: float, added: Sequence[float], increase: Increase) -> FleetRow:
    """Return the fleet's row after this tick.

    Args:
        added: by `SUMS`, what this tick adds; the last, the waiting requests, is the new value itself.
    """
    if previous is None:
        return fleet_row(at, tuple(added), increase.histograms)
    histograms = dict(previous.histograms)
    for name, histogram in increase.histograms.items():
        histograms[name] = _add(histograms.get(name), histogram)
    return fleet_row(at, (*map(add, previous.sums[:-1], added), added[-1]), histograms)


def fleet_row(at: float, sums: tuple[float, ...], histograms: Mapping[str, FleetHistogram]) -> FleetRow:
    """Return the row of these sums; its work is picked out once, because demand asks for it in many ticks."""
    prefill = sums[SUMS["prompt_tokens"]] - sums[SUMS["cached_prompt_tokens"]]
    return FleetRow(at, sums, histograms, (at, prefill, *_work(sums)))


def observations(old: FleetRow, new: FleetRow, name: str) -> Observations | None:
    """Return what was observed between two rows, on the newer row's bounds; None when it was never read."""
    last, first = new.histograms.get(name), old.histograms.get(name)
    if last is None:
        return None
    if first is None:
        return Observations(last.bounds, rising(last.counts))
    return Observations(last.bounds, rising(last.counts - rebased(first.bounds, first.counts, last.bounds)))


def spanned_seconds(seconds: float, spanned: float, pods: float) -> float:
    """Return the seconds in which the work between two rows was done: those between them, or longer ones that it spans.

    Engines that were not read for five minutes bring five minutes' work into the tick in which they are read again.

    Args:
        seconds: between the rows.
        spanned: pod-seconds that the increases span.
        pods: expected, on average.
    """
    worked = spanned / pods if pods > 1.0 else spanned
    return max(seconds, worked)


def row_at(times: tuple[float, ...], at: float) -> int:
    """Return the index of the newest row at or before `at`, within half a second; -1 when all are newer."""
    return bisect_right(times, at + 0.5) - 1
