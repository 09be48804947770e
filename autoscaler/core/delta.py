"""Snapshots as differences in plain form, and back, exact to the bit.

What a difference leaves out is as it was in the snapshot before. Its keys:

    at            epoch seconds; always there
    target        all of the target's fields but the pods
    pods          one entry a pod: the index of an unchanged pod among those before, or all fields of a new one
    keys          the engines. An engine that was there before keeps its row; a new row starts at zero
    read_at       that column, as milliseconds after `at`
    adds          [columns, increments]: whole numbers, column after column
    sets          [columns, values]: anything else, column after column
    layout        per histogram [name, [bounds, rows], ...]. Known buckets of known engines keep their counts
    increments    "skip increment skip increment ...": how many buckets to pass, and what the next one gained. Buckets
                  count apart, not cumulated, through all histograms, layouts and engines in the layout's order
    counts        instead of increments, where some count is no whole number: all of them, cumulated
    gpus          all fields of all devices
    gpu_readings  by field name one value a device, where the devices are the same
    samples, gaps all fields of all of them
    schedules     labels of the active ones
    limits        all fields of all pods' batching limits

Runs of whole numbers are text ("5 -1 0"): numpy reads it four times faster than a list out of JSON.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from autoscaler.core.plain import to_number, to_plain
from autoscaler.core.signals import ENGINE_COLUMNS
from autoscaler.core.types import (
    EngineKey,
    Engines,
    Floats,
    Gap,
    Gpu,
    HistogramRows,
    Ints,
    Pod,
    PodLimits,
    Sample,
    Snapshot,
    TargetStatus,
)

COLUMNS = tuple(signal.name for signal in ENGINE_COLUMNS)

_READ_AT = "read_at"
_TARGET_FIELDS = tuple(each.name for each in fields(TargetStatus) if each.name != "pods")
_GPU_READINGS = ("memory_used", "memory_free", "pod_memory_used", "utilization", "xid")
_GPU_IDENTITY = tuple(each.name for each in fields(Gpu) if each.name not in _GPU_READINGS)
_LARGEST_INT = 2.0**51

_Difference = dict[str, Any]
_Value = TypeVar("_Value")

# What reading a damaged line may raise. The warning: numpy's, where warnings are errors, for text that is no number.
_DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, DeprecationWarning)


class _Block(NamedTuple):
    """One bucket layout of one histogram, and where its counts stand among all counts of a tick."""

    bounds: tuple[float, ...]
    rows: Ints
    start: int
    stop: int

    def matrix(self, counts: Floats) -> Floats:
        """Return the block's part of all counts, one row an engine."""
        return counts[self.start : self.stop].reshape(len(self.rows), len(self.bounds))


class _Layout(NamedTuple):
    """How the counts of one tick stand in one vector: histogram by histogram, block by block, engine by engine.

    Args:
        histograms: the blocks of each, by name.
        starts, widths: of every engine's row of buckets in the vector.
    """

    histograms: tuple[tuple[str, tuple[_Block, ...]], ...]
    starts: Ints
    widths: Ints

    @property
    def size(self) -> int:
        """Length of the vector."""
        return int(self.widths.sum())


def _lay_out(parts: Iterable[tuple[str, list[tuple[tuple[float, ...], Ints]]]]) -> _Layout:
    """Return the layout of histograms, given by name, bounds and rows."""
    histograms = []
    widths: list[int] = []
    start = 0
    for name, pairs in parts:
        blocks = []
        for bounds, rows in pairs:
            blocks.append(_Block(bounds, rows, start, start + len(bounds) * len(rows)))
            widths += [len(bounds)] * len(rows)
            start = blocks[-1].stop
        histograms.append((name, tuple(blocks)))
    lengths = np.array(widths, dtype=np.intp)
    return _Layout(tuple(histograms), np.cumsum(lengths) - lengths, lengths)


@dataclass(slots=True, kw_only=True)
class Known:
    """What the lines of one policy have said so far: the base of the next difference.

    Args:
        columns: names of the columns of `values`.
        counts: the counts of all blocks of `layout`, one after the other.
    """

    columns: tuple[str, ...] = COLUMNS
    target: TargetStatus | None = None
    keys: tuple[EngineKey, ...] = ()
    values: Floats = field(init=False)
    layout: _Layout = field(default_factory=lambda: _lay_out(()))
    counts: Floats = field(default_factory=lambda: np.zeros(0))
    gpus: tuple[Gpu, ...] = ()
    samples: tuple[Sample, ...] = ()
    gaps: tuple[Gap, ...] = ()
    schedules: tuple[str, ...] = ()
    limits: tuple[PodLimits, ...] = ()

    def __post_init__(self) -> None:
        self.values = np.zeros((0, len(self.columns)))

    def carry_to(self, keys: tuple[EngineKey, ...], layout: _Layout) -> None:
        """Take over new engines or layouts. What was there before keeps its numbers, all else starts at zero."""
        values = np.zeros((len(keys), len(self.columns)))
        before = dict(zip(self.keys, self.values, strict=True))
        for index, key in enumerate(keys):
            if key in before:
                values[index] = before[key]
        counts = np.zeros(layout.size)
        rows_before = dict(_rows_of(self.layout, self.keys, self.counts))
        for name, row in _rows_of(layout, keys, counts):
            if name in rows_before:
                row[:] = rows_before[name]
        self.keys, self.values, self.layout, self.counts = keys, _frozen(values), layout, _frozen(counts)


def _rows_of(
    layout: _Layout, keys: tuple[EngineKey, ...], counts: Floats
) -> Iterator[tuple[tuple[str, tuple[float, ...], EngineKey], Floats]]:
    """Yield each row of `counts`, and whose it is: histogram, bounds and engine."""
    for name, blocks in layout.histograms:
        for block in blocks:
            for index, row in zip(block.rows, block.matrix(counts), strict=True):
                yield (name, block.bounds, keys[index]), row


def encode(known: Known, snapshot: Snapshot) -> _Difference:
    """Return what changed since the snapshot that `known` was last given, and make this one the base of the next."""
    line: _Difference = {"at": to_plain(snapshot.at)}
    _write_target(known, snapshot.target, line)
    _write_engines(known, snapshot, line)
    _write_gpus(known, snapshot.gpus, line)
    known.samples = _write_all("samples", known.samples, snapshot.samples, line)
    known.gaps = _write_all("gaps", known.gaps, snapshot.gaps, line)
    known.schedules = _write_all("schedules", known.schedules, snapshot.schedules, line)
    known.limits = _write_all("limits", known.limits, snapshot.limits, line)
    return line


def decode(known: Known, line: _Difference) -> Snapshot:
    """Return the snapshot that `line` was made from, given what the lines before it have said.

    Parts that did not change are the same objects as in the snapshot before.

    Raises: ValueError, when the line does not fit.
    """
    try:
        return Snapshot(
            at=to_number(line["at"]),
            target=_read_target(known, line),
            engines=_read_engines(known, line),
            gpus=_read_gpus(known, line),
            samples=_read_samples(known, line),
            gaps=_read_gaps(known, line),
            schedules=_read_schedules(known, line),
            limits=_read_limits(known, line),
        )
    except _DAMAGE as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


# Each _write_ has its _read_; both leave the same in Known.


def _write_target(known: Known, target: TargetStatus, line: _Difference) -> None:
    before = known.target
    if before is target or before == target:
        return
    if before is None or replace(before, pods=target.pods) != target:
        line["target"] = {name: to_plain(getattr(target, name)) for name in _TARGET_FIELDS}
    if before is None or before.pods != target.pods:
        places = {pod: index for index, pod in enumerate(before.pods)} if before is not None else {}
        line["pods"] = [places[pod] if pod in places else to_plain(pod) for pod in target.pods]
    known.target = target


def _read_target(known: Known, line: _Difference) -> TargetStatus:
    if "pods" in line or "target" in line:
        pods = known.target.pods if known.target is not None else ()
        if "pods" in line:
            pods = tuple(pods[pod] if isinstance(pod, int) else Pod(**_convert(Pod, pod)) for pod in line["pods"])
        if "target" in line:
            known.target = TargetStatus(**_convert(TargetStatus, line["target"]), pods=pods)
        elif known.target is not None:
            known.target = replace(known.target, pods=pods)
    if known.target is None:
        raise LookupError("the first tick of a policy must say its target")
    return known.target


def _write_engines(known: Known, snapshot: Snapshot, line: _Difference) -> None:
    engines = snapshot.engines
    same_layout = _is_layout_of(known.layout, engines.histograms)
    layout = known.layout
    if not same_layout:
        histograms = engines.histograms.items()
        layout = _lay_out((name, [(part.bounds, part.rows) for part in parts]) for name, parts in histograms)
        line["layout"] = to_plain([[name, *([part.bounds, part.rows] for part in parts)] for name, parts in histograms])
    if engines.keys != known.keys:
        line["keys"] = to_plain(engines.keys)
    if not same_layout or engines.keys != known.keys:
        known.carry_to(engines.keys, layout)
    _write_values(known, engines.values, snapshot.at, line)
    _write_counts(known, engines.histograms, line)


def _is_layout_of(layout: _Layout, histograms: Mapping[str, tuple[HistogramRows, ...]]) -> bool:
    if len(layout.histograms) != len(histograms):
        return False
    for (name, blocks), (its_name, parts) in zip(layout.histograms, histograms.items(), strict=True):
        if name != its_name or len(blocks) != len(parts):
            return False
        for block, part in zip(blocks, parts, strict=True):
            if block.bounds != part.bounds or not np.array_equal(block.rows, part.rows):
                return False
    return True


def _read_engines(known: Known, line: _Difference) -> Engines:
    if "keys" in line or "layout" in line:
        keys = tuple(EngineKey(*key) for key in line["keys"]) if "keys" in line else known.keys
        layout = _read_layout(known.layout, line["layout"]) if "layout" in line else known.layout
        known.carry_to(keys, layout)
    _read_values(known, line)
    _read_counts(known, line)
    counts = known.counts
    histograms = {
        name: tuple(
            [HistogramRows(bounds=block.bounds, rows=block.rows, counts=block.matrix(counts)) for block in blocks]
        )
        for name, blocks in known.layout.histograms
    }
    return Engines(keys=known.keys, values=_own_columns(known), histograms=histograms)


def _read_layout(before: _Layout, parts: list[Any]) -> _Layout:
    """Return a layout; bounds and rows that are equal become one object, also across layouts."""
    pool: dict[tuple[Any, ...], Any] = {}
    for _, blocks in before.histograms:
        for block in blocks:
            pool["bounds", block.bounds] = block.bounds
            pool["rows", tuple(block.rows.tolist())] = block.rows

    def read(bounds: list[Any], rows: list[int]) -> tuple[tuple[float, ...], Ints]:
        edges = tuple(to_number(bound) for bound in bounds)
        where = tuple(rows)
        return (
            pool.setdefault(("bounds", edges), edges),
            pool.setdefault(("rows", where), _frozen(np.array(where, dtype=np.intp))),
        )

    return _lay_out((name, [read(*pair) for pair in pairs]) for name, *pairs in parts)


def _write_values(known: Known, values: Floats, at: float, line: _Difference) -> None:
    base, known.values = known.values, np.array(values, dtype=np.float64, order="C")
    now = known.values
    both_nan = np.isnan(now) & np.isnan(base)
    changed = ~((now.view(np.int64) == base.view(np.int64)) | both_nan).all(axis=0)
    clock = known.columns.index(_READ_AT)
    if changed[clock]:
        delays = _delays_ms(now[:, clock], at)
        if delays is not None:
            line["read_at"] = _write_ints(delays)
            changed[clock] = False
    whole = ((_is_whole(now) & _is_whole(base)) | both_nan).all(axis=0)
    adds, sets = np.flatnonzero(changed & whole), np.flatnonzero(changed & ~whole)
    if adds.size:
        increments = np.where(both_nan[:, adds], 0.0, now[:, adds] - base[:, adds])
        line["adds"] = [adds.tolist(), _write_ints(increments.T.ravel())]
    if sets.size:
        line["sets"] = [sets.tolist(), to_plain(now[:, sets].T.ravel())]


def _read_values(known: Known, line: _Difference) -> None:
    if "adds" not in line and "sets" not in line and "read_at" not in line:
        return
    values = known.values.copy()
    if "read_at" in line:
        delays = _read_ints(line["read_at"], len(known.keys))
        values[:, known.columns.index(_READ_AT)] = (delays + _in_ms(line["at"])) / 1000.0
    if "adds" in line:
        columns, text = line["adds"]
        increments = _read_ints(text, len(columns) * len(known.keys)).reshape(len(columns), len(known.keys))
        values[:, columns] = values.take(columns, axis=1) + increments.T
    if "sets" in line:
        columns, numbers = line["sets"]
        values[:, columns] = np.array(numbers, dtype=np.float64).reshape(len(columns), len(known.keys)).T
    known.values = _frozen(values)


def _own_columns(known: Known) -> Floats:
    """Return the values in this program's columns; what the recording lacks is unknown."""
    if known.columns == COLUMNS:
        return known.values
    values = np.full((len(known.keys), len(COLUMNS)), np.nan)
    for index, name in enumerate(COLUMNS):
        if name in known.columns:
            values[:, index] = known.values[:, known.columns.index(name)]
    return _frozen(values)


def _write_counts(known: Known, histograms: Mapping[str, tuple[HistogramRows, ...]], line: _Difference) -> None:
    parts = [part.counts.ravel() for parts in histograms.values() for part in parts]
    base, known.counts = known.counts, np.concatenate(parts, dtype=np.float64) if parts else np.zeros(0)
    if not (_is_whole(known.counts).all() and _is_whole(base).all()):
        line["counts"] = to_plain(known.counts)
        return
    gains = known.counts - base
    apart = gains.copy()
    starts = known.layout.starts
    apart[1:] -= gains[:-1]
    apart[starts] = gains[starts]
    places = np.flatnonzero(apart)
    if places.size:
        pairs = np.empty(2 * places.size)
        pairs[0::2] = np.diff(places, prepend=-1) - 1
        pairs[1::2] = apart[places]
        line["increments"] = _write_ints(pairs)


def _read_counts(known: Known, line: _Difference) -> None:
    if "counts" in line:
        known.counts = _frozen(np.array(line["counts"], dtype=np.float64).reshape(known.counts.shape))
    elif "increments" in line:
        pairs = _read_ints(line["increments"])
        gains = np.zeros(known.counts.size + 1, dtype=np.int64)
        gains[np.add.accumulate(pairs[0::2] + 1)] = pairs[1::2]
        np.add.accumulate(gains, out=gains)
        before_row = np.repeat(gains[known.layout.starts], known.layout.widths)
        known.counts = _frozen(known.counts + (gains[1:] - before_row))


def _write_gpus(known: Known, gpus: tuple[Gpu, ...], line: _Difference) -> None:
    before = known.gpus
    if before is gpus or before == gpus:
        return
    if _columns_of(before, _GPU_IDENTITY) == _columns_of(gpus, _GPU_IDENTITY):
        was, now = _columns_of(before, _GPU_READINGS), _columns_of(gpus, _GPU_READINGS)
        line["gpu_readings"] = {name: to_plain(now[name]) for name in _GPU_READINGS if now[name] != was[name]}
    else:
        line["gpus"] = to_plain(gpus)
    known.gpus = gpus


def _columns_of(gpus: tuple[Gpu, ...], names: Iterable[str]) -> dict[str, list[Any]]:
    return {name: [getattr(gpu, name) for gpu in gpus] for name in names}


def _read_gpus(known: Known, line: _Difference) -> tuple[Gpu, ...]:
    if "gpus" in line:
        known.gpus = tuple(Gpu(**_convert(Gpu, gpu)) for gpu in line["gpus"])
    elif "gpu_readings" in line:
        new = line["gpu_readings"]
        readings = [
            map(to_number, new[name]) if name in new else [getattr(gpu, name) for gpu in known.gpus]
            for name in _GPU_READINGS
        ]
        # Written out: `replace` takes three times as long, and a fleet's readings change every few ticks.
        known.gpus = tuple(
            [
                Gpu(
                    uuid=gpu.uuid,
                    instance=gpu.instance,
                    pod_uid=gpu.pod_uid,
                    attribution=gpu.attribution,
                    shared=gpu.shared,
                    memory_used=memory_used,
                    memory_free=memory_free,
                    pod_memory_used=pod_memory_used,
                    utilization=utilization,
                    xid=xid,
                )
                for gpu, memory_used, memory_free, pod_memory_used, utilization, xid in zip(
                    known.gpus, *readings, strict=True
                )
            ]
        )
    return known.gpus


def _write_all(key: str, before: tuple[_Value, ...], now: tuple[_Value, ...], line: _Difference) -> tuple[_Value, ...]:
    if now != before:
        line[key] = to_plain(now)
    return now


def _read_samples(known: Known, line: _Difference) -> tuple[Sample, ...]:
    if "samples" in line:
        known.samples = tuple(Sample(**_convert(Sample, sample)) for sample in line["samples"])
    return known.samples


def _read_gaps(known: Known, line: _Difference) -> tuple[Gap, ...]:
    if "gaps" in line:
        known.gaps = tuple(Gap(**_convert(Gap, gap)) for gap in line["gaps"])
    return known.gaps


def _read_schedules(known: Known, line: _Difference) -> tuple[str, ...]:
    if "schedules" in line:
        known.schedules = tuple(map(str, line["schedules"]))
    return known.schedules


def _read_limits(known: Known, line: _Difference) -> tuple[PodLimits, ...]:
    if "limits" in line:
        known.limits = tuple(PodLimits(**_convert(PodLimits, limits)) for limits in line["limits"])
    return known.limits


# Numbers and fields


def _is_whole(values: Floats) -> NDArray[np.bool_]:
    """Return which are whole, and small enough for exact sums. Negative zero is not: added up it loses its sign."""
    negative_zero = (values == 0.0) & np.signbit(values)
    whole: NDArray[np.bool_] = (np.rint(values) == values) & (np.abs(values) <= _LARGEST_INT) & ~negative_zero
    return whole


def _write_ints(values: NDArray[Any]) -> str:
    return " ".join(map(str, values.astype(np.int64).tolist()))


def _read_ints(text: str, count: int | None = None) -> NDArray[np.int64]:
    """Return the whole numbers of a text. Raises ValueError when it holds anything else, or not `count` of them."""
    if text.encode().translate(None, b"0123456789- ") or text.endswith("-"):
        raise ValueError(f"not whole numbers: {text[:40]!r}")
    values = np.fromstring(text, dtype=np.int64, sep=" ")
    if values.size != text.count(" ") + 1 or count not in (None, values.size):
        raise ValueError(f"not the expected count of whole numbers: {text[:40]!r}")
    return values


def _in_ms(at: float) -> int:
    return round(at * 1000.0)


def _delays_ms(times: Floats, at: float) -> NDArray[np.int64] | None:
    """Return the times as milliseconds after `at`; None when that would not give them back to the bit."""
    if not (np.abs([at, *times]) <= _LARGEST_INT / 1000.0).all():
        return None
    delays = np.rint(times * 1000.0).astype(np.int64) - _in_ms(at)
    exact = (delays + _in_ms(at)) / 1000.0
    return delays if np.array_equal(exact.view(np.int64), times.view(np.int64)) else None


def _convert(kind: type, plain: _Difference) -> _Difference:
    """Return the fields of one of our dataclasses, from its plain form."""
    return {name: convert(plain[name]) if convert else plain[name] for name, convert in _converters(kind, tuple(plain))}


@cache
def _converters(kind: Any, names: tuple[str, ...]) -> tuple[tuple[str, Callable[[Any], Any] | None], ...]:
    hints = get_type_hints(kind)
    return tuple((name, _converter(hints[name])) for name in names)


def _converter(hint: Any) -> Callable[[Any], Any] | None:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    kind = next((one for one in (hint, *get_args(hint)) if is_dataclass(one)), None)
    if isinstance(kind, type):
        return lambda plain: None if plain is None else kind(**_convert(kind, plain))
    return to_number if hint is float or float in get_args(hint) else None


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array, read-only: it is shared between the snapshots and the next difference."""
    array.setflags(write=False)
    return array
