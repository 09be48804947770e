"""Workloads to simulate: request files, rate curves with lengths, and built-in shapes; scaled, and varied by seed."""

import csv
import gzip
import itertools
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autoscaler.core.types import Floats
from autoscaler.errors import AutoscalerError
from autoscaler.sim.engine import Request
from autoscaler.sim.workload import HOUR, MINUTE, Lengths, Rate, Surge, chat_day, requests, spike, steady, step

SEED_JITTER_S, COPY_JITTER_S = 20.0, 60.0
"""Standard deviation by which another seed, and a superposed copy, moves an arrival."""
SWAP = 50
"""Another seed and a copy swap lengths between requests at most so many places apart."""
EPOCH_FROM = 1e8
"""Arrivals above this are epoch seconds: counted from the first one."""
_GZIP_MAGIC = b"\x1f\x8b"
_PARAMETER = re.compile(r"^[a-z_]+=")
_NAMES = {
    "arrival": ("arrival_s", "arrival", "arrived_at", "timestamp", "timestamp_s", "time_s"),
    "prompt": ("input_tokens", "prompt_tokens", "contexttokens", "input_length", "num_prefill_tokens", "input"),
    "output": ("output_tokens", "generatedtokens", "output_length", "num_decode_tokens", "output"),
    "cached": ("cached_ratio",),
    "at": ("t_s", "t", "time_s", "start_s", "at_s"),
    "rps": ("rps", "rate", "requests_per_s", "requests_per_second"),
}

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A rate over time, linear between its points and level outside of them.

    Args:
        at: seconds from the start, rising.
        rps: requests per second.
    """

    at: tuple[float, ...]
    rps: tuple[float, ...]

    def __call__(self, now: float) -> float:
        """Return the rate at that time."""
        return float(np.interp(now, self.at, self.rps))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """Requests in order of arrival.

    Args:
        arrival: seconds from the start. prompt, output: tokens.
        cached: share of each prompt that is in the prefix cache; None where nothing is.
    """

    arrival: Floats
    prompt: Ints
    output: Ints
    cached: Floats | None = None

    def __len__(self) -> int:
        return len(self.arrival)

    def requests(self) -> Iterator[Request]:
        """Yield them."""
        columns = [self.arrival.tolist(), self.prompt.tolist(), self.output.tolist()]
        return map(Request, *columns, *([] if self.cached is None else [self.cached.tolist()]))

    def taken(self, rows: Ints | NDArray[np.bool_] | slice, arrival: Floats | None = None) -> "Sample":
        """Return the lengths of these rows, with their own arrivals or with others."""
        return Sample(
            arrival=self.arrival[rows] if arrival is None else arrival,
            prompt=self.prompt[rows],
            output=self.output[rows],
            cached=None if self.cached is None else self.cached[rows],
        )

    def varied(self, rng: np.random.Generator, sigma_s: float, duration_s: float) -> "Sample":
        """Return another sample like this one: arrivals moved by N(0, sigma), lengths swapped within `SWAP` places."""
        moved = np.abs(self.arrival + rng.normal(0.0, sigma_s, len(self)))
        moved = np.where(moved >= duration_s, np.maximum(2.0 * duration_s - moved, 0.0), moved)
        swapped = np.argsort(np.arange(len(self)) + rng.uniform(-SWAP / 2, SWAP / 2, len(self)), kind="stable")
        order = np.argsort(moved, kind="stable")
        return self.taken(swapped[order], moved[order])

    def within(self, duration_s: float) -> "Sample":
        """Return those that arrive before that time."""
        return self.taken(slice(int(np.searchsorted(self.arrival, duration_s))))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """What can be simulated: drawn as a sample for each seed.

    Args:
        name: for people and files.
        text: one line on what it is.
        duration_s: how long requests arrive.
        recorded: the requests of a file; None for those that are drawn from `rate` and `lengths`.
        lengths: lognormal, or a sample to draw from.
        noise, span_s: as in `workload.requests`.
    """

    name: str
    text: str
    duration_s: float
    recorded: Sample | None = None
    rate: Rate = field(default_factory=lambda: steady(0.0))
    lengths: Lengths | Sample = field(default_factory=Lengths)
    noise: float = 0.06
    span_s: float = MINUTE

    def draw(self, seed: int, scale: float = 1.0) -> Sample:
        """Return the requests of a seed, in order of arrival.

        A file's seed 0 at scale 1 is the file itself; another seed jitters arrivals and swaps lengths, and a scale
        superposes jittered copies, the last one thinned to what is left of it. Drawn workloads multiply their rate.
        """
        rng = np.random.default_rng([seed, 20_260_114])
        if self.recorded is None:
            return self._drawn(rng, scale)
        base = self.recorded if seed == 0 else self.recorded.varied(rng, SEED_JITTER_S, self.duration_s)
        copies = [
            base if number == 0 else base.varied(rng, COPY_JITTER_S, self.duration_s)
            for number in range(math.ceil(scale))
        ]
        share = scale - math.floor(scale)
        if share > 0.0:
            kept = rng.random(len(copies[-1])) < share
            copies[-1] = copies[-1].taken(kept)
        return copies[0] if len(copies) == 1 else _merged(copies)

    def _drawn(self, rng: np.random.Generator, scale: float) -> Sample:
        rate = self.rate
        lognormal = self.lengths if isinstance(self.lengths, Lengths) else Lengths()
        drawn = list(
            requests(rng, lambda at: scale * rate(at), lognormal, self.duration_s, noise=self.noise, span_s=self.span_s)
        )
        sample = Sample(
            arrival=np.array([request.arrival for request in drawn], dtype=np.float64),
            prompt=np.array([request.prompt_tokens for request in drawn], dtype=np.int64),
            output=np.array([request.output_tokens for request in drawn], dtype=np.int64),
        )
        if isinstance(self.lengths, Lengths):
            return sample
        picked = rng.integers(0, len(self.lengths), len(sample))
        return self.lengths.taken(picked, sample.arrival)

    def first(self, duration_s: float) -> "Workload":
        """Return its beginning."""
        if duration_s >= self.duration_s:
            return self
        recorded = None if self.recorded is None else self.recorded.within(duration_s)
        if recorded is not None and not len(recorded):
            raise AutoscalerError(f"{self.name}: no request arrives in the first {duration_s:g} s")
        return replace(self, duration_s=duration_s, recorded=recorded)


def _merged(samples: list[Sample]) -> Sample:
    arrival = np.concatenate([sample.arrival for sample in samples])
    order = np.argsort(arrival, kind="stable")
    cached = [sample.cached for sample in samples if sample.cached is not None]  # copies of one: all have it, or none
    return Sample(
        arrival=arrival[order],
        prompt=np.concatenate([sample.prompt for sample in samples])[order],
        output=np.concatenate([sample.output for sample in samples])[order],
        cached=np.concatenate(cached)[order] if cached else None,
    )


# -- by name ---------------------------------------------------------------------------------------------------------

_COMMON = {
    "rps": 10.0,
    "hours": 2.0,
    "prompt": 1000.0,
    "output": 250.0,
    "prompt_sigma": 0.8,
    "output_sigma": 0.7,
    "noise": 0.06,
}


def _span(values: Mapping[str, float]) -> float:
    return values["hours"] * HOUR


def _diurnal(values: Mapping[str, float]) -> Rate:
    day = chat_day(values["rps"], night=values["night"])
    return lambda now: day(now + values["start"] * HOUR)


def _step(values: Mapping[str, float]) -> Rate:
    return step(values["rps"], values["to"], values["at"] * _span(values))


def _spike(values: Mapping[str, float]) -> Rate:
    surge = Surge(at=values["at"] * _span(values), duration_s=values["seconds"], factor=values["factor"])
    return spike(values["rps"], surge)


def _ramp(values: Mapping[str, float]) -> Rate:
    return lambda now: values["rps"] + (values["to"] - values["rps"]) * min(1.0, now / _span(values))


def _sinusoid(values: Mapping[str, float]) -> Rate:
    middle, swing = (values["rps"] + values["low"]) / 2.0, (values["rps"] - values["low"]) / 2.0
    return lambda now: middle - swing * math.cos(2.0 * math.pi * now / values["period"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A built-in workload.

    Args:
        text: what it is.
        own: its own parameters, and other values of the common ones.
        span_s: its rate may change at this grain.
    """

    text: str
    rate: Callable[[Mapping[str, float]], Rate]
    own: Mapping[str, float]
    span_s: float = MINUTE


SHAPES: dict[str, Shape] = {
    "diurnal": Shape(
        text="a day of chat from midnight on; rps is its peak, night the share left at night, start the first hour",
        rate=_diurnal,
        own={"hours": 24.0, "night": 0.1, "start": 0.0},
    ),
    "steady": Shape(text="a constant rate", rate=lambda values: steady(values["rps"]), own={}),
    "step": Shape(
        text="from rps to another rate, at that share of the time",
        rate=_step,
        own={"rps": 4.0, "to": 12.0, "at": 0.5},
        span_s=5.0,
    ),
    "spike": Shape(
        text="factor times the rate for some seconds, at that share of the time",
        rate=_spike,
        own={"rps": 5.0, "factor": 5.0, "seconds": 30.0, "at": 0.5},
        span_s=5.0,
    ),
    "ramp": Shape(text="evenly from rps to another rate", rate=_ramp, own={"rps": 2.0, "to": 10.0, "hours": 1.0}),
    "sinusoid": Shape(
        text="between low and rps; its period is the profile's cold start, where every reactive law is late",
        rate=_sinusoid,
        own={"rps": 20.0, "low": 5.0, "hours": 1.0, "period": 0.0},
        span_s=5.0,
    ),
}


def load_workload(spec: str, *, cold_start_s: float = 180.0) -> Workload:
    """Return the workload that `spec` names: a file or a shape, with parameters after a colon.

    `day.csv.gz`, `curve.csv:prompt=1500,output=200`, `curve.csv:lengths=day.csv`, `diurnal:rps=12,hours=24`.

    Args:
        cold_start_s: the period of a sinusoid that does not say its own.
    Raises: AutoscalerError that says which file and line, or which parameter, cannot be used.
    """
    name, parameters = _split(spec)
    if name in SHAPES:
        return _shaped(name, parameters, cold_start_s)
    path = Path(name)
    if not path.exists() and path.parent == Path() and not path.suffix:
        raise AutoscalerError(f"{name}: neither a file nor a built-in workload ({', '.join(SHAPES)})")
    return _from_file(path, parameters)


def _split(spec: str) -> tuple[str, dict[str, str]]:
    """Return the name, and the parameters that follow its last colon where those look like some."""
    name, _, rest = spec.rpartition(":")
    if not name or not _PARAMETER.match(rest):
        return spec, {}
    parameters = {}
    for part in rest.split(","):
        key, equals, value = part.partition("=")
        if not equals or not value:
            raise AutoscalerError(f"{spec}: {part!r} is not name=value")
        parameters[key.strip()] = value.strip()
    return name, parameters


def _numbers(name: str, parameters: Mapping[str, str], known: Mapping[str, float]) -> dict[str, float]:
    """Return the known parameters, with those that were given."""
    values = dict(known)
    for key, text in parameters.items():
        if key not in known:
            raise AutoscalerError(f"{name}: no parameter {key!r} (there is: {', '.join(known)})")
        try:
            values[key] = float(text)
        except ValueError as error:
            raise AutoscalerError(f"{name}: {key} is not a number: {text!r}") from error
        lowest = 1.0 if key in ("prompt", "output") else 0.0
        if not math.isfinite(values[key]) or values[key] < lowest or (key == "hours" and not values[key]):
            raise AutoscalerError(f"{name}: {key} cannot be {text}")
    return values


def _lengths(values: Mapping[str, float]) -> Lengths:
    return Lengths(
        prompt=values["prompt"],
        output=values["output"],
        prompt_sigma=values["prompt_sigma"],
        output_sigma=values["output_sigma"],
        longest_prompt=max(16_000, round(8 * values["prompt"])),
        longest_output=max(2_000, round(8 * values["output"])),
    )


def _shaped(name: str, parameters: Mapping[str, str], cold_start_s: float) -> Workload:
    shape = SHAPES[name]
    values = _numbers(name, parameters, {**_COMMON, **shape.own})
    if values.get("period") == 0.0:
        values["period"] = cold_start_s
    words = ", ".join(f"{key} {value:g}" for key, value in values.items() if key in shape.own or key in parameters)
    return Workload(
        name=name,
        text=name + (f" ({words})" if words else ""),
        duration_s=_span(values),
        rate=shape.rate(values),
        lengths=_lengths(values),
        noise=values["noise"],
        span_s=min(shape.span_s, _span(values)),
    )


# -- from files ------------------------------------------------------------------------------------------------------


def _from_file(path: Path, parameters: dict[str, str]) -> Workload:
    lines = _read_lines(path)
    columns, start = _columns(path, lines)
    if "rps" in columns:
        return _curve(path, lines, columns, start, parameters)
    if parameters:
        raise AutoscalerError(f"{path}: a file of requests takes no parameters, its rows have lengths")
    sample = _sample(path, lines, columns, start)
    last = float(sample.arrival[-1])
    return Workload(
        name=_stem(path),
        text=f"{path.name}: {len(sample):,} requests over {last / HOUR:.3g} h",
        duration_s=math.floor(last / MINUTE + 1.0) * MINUTE,
        recorded=sample,
    )


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".csv")


def _read_lines(path: Path) -> list[str]:
    try:
        data = path.read_bytes()
        if data.startswith(_GZIP_MAGIC):
            data = gzip.decompress(data)
        lines = data.decode("utf-8-sig").splitlines()
    except OSError as error:  # gzip.BadGzipFile is one
        raise AutoscalerError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise AutoscalerError(f"{path}: damaged gzip: {error}") from error
    except UnicodeDecodeError as error:
        raise AutoscalerError(f"{path}: is no text: {error.reason} at byte {error.start}") from error
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise AutoscalerError(f"{path}: is empty")
    return lines


def _columns(path: Path, lines: list[str]) -> tuple[dict[str, int], int]:
    """Return which column holds what, and the index of the first row."""
    first = [cell.strip().strip('"').lower() for cell in lines[0].split(",")]
    if all(_is_number(cell) for cell in first):
        if len(first) == 2:
            return {"at": 0, "rps": 1}, 0
        if len(first) >= 3:
            return {"arrival": 0, "prompt": 1, "output": 2}, 0
        raise AutoscalerError(f"{path}: line 1: needs columns: arrival_s,input_tokens,output_tokens or t_s,rps")
    found = {
        what: first.index(name)
        for what, names in _NAMES.items()
        if (name := next((n for n in names if n in first), ""))
    }
    for wanted, more in ((("at", "rps"), ("prompt", "output")), (("arrival", "prompt", "output"), ("cached",))):
        if all(what in found for what in wanted):
            return {what: found[what] for what in found if what in (*wanted, *more)}, 1
    raise AutoscalerError(
        f"{path}: line 1: the header {lines[0].strip()[:80]!r} names neither arrival_s,input_tokens,output_tokens "
        "nor t_s,rps"
    )


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _table(path: Path, lines: list[str], columns: Mapping[str, int], start: int) -> dict[str, Floats]:
    """Return the columns as numbers. Raises AutoscalerError that names the first line that is not."""
    if len(lines) <= start:
        raise AutoscalerError(f"{path}: holds no row")
    try:
        table = np.loadtxt(
            itertools.islice(lines, start, None), delimiter=",", usecols=tuple(columns.values()), ndmin=2, comments=None
        )
    except (ValueError, IndexError) as error:
        raise _first_problem(path, lines, columns, start, str(error)) from error
    return {what: table[:, index] for index, what in enumerate(columns)}


def _first_problem(
    path: Path, lines: list[str], columns: Mapping[str, int], start: int, otherwise: str
) -> AutoscalerError:
    for number, cells in enumerate(csv.reader(lines[start:]), start=start + 1):
        if not cells:
            continue
        for what, index in columns.items():
            if index >= len(cells):
                return AutoscalerError(f"{path}: line {number}: {len(cells)} columns, {_NAMES[what][0]} is missing")
            if not _is_number(cells[index]):
                return AutoscalerError(f"{path}: line {number}: {_NAMES[what][0]} is not a number: {cells[index]!r}")
    return AutoscalerError(f"{path}: {otherwise}")


class _Rows:
    """Where the rows of a file stand, for what is said of a bad one."""

    def __init__(self, path: Path, lines: list[str], start: int) -> None:
        self._path, self._lines, self._start = path, lines, start

    def refuse(self, bad: NDArray[np.bool_], message: str) -> None:
        """Raise AutoscalerError for the first row that is bad, if any."""
        if not bad.any():
            return
        filled = (number for number, line in enumerate(self._lines[self._start :], self._start + 1) if line.strip())
        number = next(itertools.islice(filled, int(np.argmax(bad)), None))
        raise AutoscalerError(f"{self._path}: line {number}: {message}")


def _sample(path: Path, lines: list[str], columns: Mapping[str, int], start: int) -> Sample:
    table = _table(path, lines, columns, start)
    arrival, prompt, output = table["arrival"], table["prompt"], table["output"]
    rows = _Rows(path, lines, start)
    rows.refuse(~np.isfinite(arrival) | (arrival < 0.0), "arrival_s must be a time from 0 on")
    for name, tokens in (("input_tokens", prompt), ("output_tokens", output)):
        rows.refuse(~np.isfinite(tokens) | (tokens < 1.0), f"{name} must be at least 1")
        rows.refuse(tokens != np.rint(tokens), f"{name} must be a whole number")
    cached = table.get("cached")
    if cached is not None:
        rows.refuse(~((cached >= 0.0) & (cached <= 1.0)), "cached_ratio must be from 0 to 1")
    if float(arrival.min()) > EPOCH_FROM:
        arrival = arrival - arrival.min()
    sample = Sample(arrival=arrival, prompt=prompt.astype(np.int64), output=output.astype(np.int64), cached=cached)
    return sample.taken(np.argsort(arrival, kind="stable"))


def _curve(
    path: Path, lines: list[str], columns: Mapping[str, int], start: int, parameters: dict[str, str]
) -> Workload:
    table = _table(path, lines, columns, start)
    at, rps, rows = table["at"], table["rps"], _Rows(path, lines, start)
    rows.refuse(~np.isfinite(at) | (at < 0.0), "t_s must be a time from 0 on")
    rows.refuse(~np.isfinite(rps) | (rps < 0.0), "rps must be at least 0")
    rows.refuse(np.diff(at, prepend=-1.0) <= 0.0, "t_s must rise")
    lengths = parameters.pop("lengths", None)
    means = {
        name: float(np.average(table[name], weights=rps))
        for name in ("prompt", "output")
        if name in table and rps.any()
    }
    known = {name: value for name, value in _COMMON.items() if name not in ("rps", "hours")} | means
    values = _numbers(str(path), parameters, known)
    gap = float(at[-1] - at[-2]) if len(at) > 1 else MINUTE
    return Workload(
        name=_stem(path),
        text=f"{path.name}: a curve of {len(at)} rates over {float(at[-1] + gap) / HOUR:.3g} h",
        duration_s=float(at[-1]) + gap,
        rate=Curve(at=tuple(at.tolist()), rps=tuple(rps.tolist())),
        lengths=_lengths(values) if lengths is None else _lengths_of(lengths),
        noise=values["noise"],
        span_s=min(MINUTE, gap),
    )


def _lengths_of(name: str) -> Sample:
    path = Path(name)
    lines = _read_lines(path)
    columns, start = _columns(path, lines)
    if "rps" in columns:
        raise AutoscalerError(f"{path}: lengths are drawn from a file of requests, this is a rate curve")
    return _sample(path, lines, columns, start)
