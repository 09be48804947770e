"""What the series of vLLM's /metrics pages mean: pages in, engine rows out, whichever way the pages came.

Names have changed many times since 0.4. Each meaning has an ordered list of the names it has had, and the first one
that a page holds is used: no version is ever asked for.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from autoscaler.core.signals import COLUMN, ENGINE_COLUMNS, HISTOGRAMS, Signal, plausible
from autoscaler.core.types import (
    WHOLE_PAGE,
    EngineKey,
    Engines,
    Floats,
    Gap,
    GapReason,
    HistogramRows,
    Ints,
    Pod,
)
from autoscaler.sources.exposition import Page, SeriesKey

STARTED_AT = "process_start_time_seconds"
CONFIG_NAME = "cache_config_info"
_PREFIX = re.compile(r"(?:ray_)?vllm[:_]")
_PART = "finished_reason"
_MAX_PLANS = 64
_MAX_DETAIL = 200
_MAX_COUNT = 1e18


class _Family(NamedTuple):
    """A sample name that a meaning has had, and the label that picks its series, if one does."""

    name: str
    where: tuple[str, str] | None = None


def _counter(*bases: str) -> tuple[_Family, ...]:
    """Names of a counter; collectors on the way may strip `_total`."""
    return tuple(_Family(name) for base in bases for name in (f"{base}_total", base))


def _suffixed(bases: Iterable[str], suffix: str) -> tuple[_Family, ...]:
    return tuple(_Family(base + suffix) for base in bases)


_HISTOGRAM_NAMES: dict[str, tuple[str, ...]] = {
    "ttft": ("time_to_first_token_seconds",),
    "itl": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "e2e": ("e2e_request_latency_seconds",),
    "queue_time": ("request_queue_time_seconds", "time_in_queue_requests"),
}
_BUCKETS: dict[str, tuple[_Family, ...]] = {
    signal.name: _suffixed(_HISTOGRAM_NAMES[signal.name], "_bucket") for signal in HISTOGRAMS
}
_SCALARS: dict[str, tuple[_Family, ...]] = {
    "num_requests_running": (_Family("num_requests_running"),),
    "num_requests_waiting": (
        _Family("num_requests_waiting_by_reason", ("reason", "capacity")),
        _Family("num_requests_waiting"),
    ),
    "kv_cache_usage": (_Family("kv_cache_usage_perc"), _Family("gpu_cache_usage_perc")),
    "asleep": (_Family("engine_sleep_state", ("sleep_state", "awake")),),
    "num_preemptions": _counter("num_preemptions"),
    "prompt_tokens": _counter("prompt_tokens"),
    "cached_prompt_tokens": _counter("prompt_tokens_cached", "prefix_cache_hits", "gpu_prefix_cache_hits"),
    "generation_tokens": _counter("generation_tokens"),
    "requests_finished": _counter("request_success"),
    # A histogram whose base name ends in _total.
    "iterations": _suffixed(("iteration_tokens_total", "iteration_tokens"), "_count"),
    "itl_sum": _suffixed(_HISTOGRAM_NAMES["itl"], "_sum"),
}
# Absent from sound pages too: without sleep mode an engine is awake; behind several API servers no process is shown.
_QUIET = frozenset({"read_at", "started_at", "asleep", "gpu_memory_utilization"})


class _Use(NamedTuple):
    """What a sample name is good for: candidate number `rank` of `signal`."""

    signal: str
    rank: int
    where: tuple[str, str] | None


_USES: dict[str, _Use] = {
    family.name: _Use(signal, rank, family.where)
    for signal, families in (_SCALARS | _BUCKETS).items()
    for rank, family in enumerate(families)
}
ENGINE_NAMES: tuple[str, ...] = (*_USES, CONFIG_NAME)
_LOW: Floats = np.array([signal.low for signal in ENGINE_COLUMNS])
_HIGH: Floats = np.array([signal.high for signal in ENGINE_COLUMNS])
_WIDTH = len(ENGINE_COLUMNS)


def base_name(name: str) -> str:
    """Return a vLLM sample name without its prefix, however a collector spelled it; "" for any other name."""
    match = _PREFIX.match(name)
    return name[match.end() :] if match else ""


def is_wanted(name: str) -> bool:
    """Say whether a series of that name is read at all. `_created` series never are."""
    base = base_name(name)
    return base in _USES or base == CONFIG_NAME or name == STARTED_AT


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PodPage:
    """One pod's page, and when it was read (epoch seconds)."""

    pod: Pod
    read_at: float
    page: Page


class _Missing(NamedTuple):
    """A reading that a page's layout cannot give."""

    engine: int
    signal: str
    reason: GapReason
    detail: str


class _HistogramPlan(NamedTuple):
    """Where one histogram's buckets stand in a page: `buckets` has one row for each of `engines`."""

    name: str
    bounds: tuple[float, ...]
    engines: Ints
    buckets: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
    """How the values of every page with these keys become rows.

    Args:
        engines: the engines' labels, sorted; one row each.
        template: shape (engines * columns,): what the layout itself says, NaN elsewhere.
        repeats: (kept, other): two series of one meaning, of which the larger value counts.
        sources, starts, cells: `cells[i]` of the flat rows is the sum of values at `sources[starts[i]:starts[i+1]]`.
        families: which name each signal was read from.
        problem: why there is no engine, with a detail for people; None when there is one.
    """

    keys: tuple[SeriesKey, ...]
    engines: tuple[str, ...] = ()
    template: Floats = field(default_factory=lambda: np.empty(0))
    repeats: tuple[tuple[int, int], ...] = ()
    sources: Ints = field(default_factory=lambda: np.empty(0, dtype=np.intp))
    starts: Ints = field(default_factory=lambda: np.empty(0, dtype=np.intp))
    cells: Ints = field(default_factory=lambda: np.empty(0, dtype=np.intp))
    histograms: tuple[_HistogramPlan, ...] = ()
    missing: tuple[_Missing, ...] = ()
    families: Mapping[str, str] = field(default_factory=dict)
    problem: tuple[GapReason, str] | None = None


class _Found(NamedTuple):
    """A series that has a use: its place in the page and its labels."""

    place: int
    use: _Use
    name: str
    labels: Mapping[str, str]


class _Layout:
    """Sorts the series of one page by engine and meaning, once for all pages of the same layout."""

    def __init__(self, keys: tuple[SeriesKey, ...], model_name: str) -> None:
        self.keys = keys
        self.models: set[str] = set()
        self.found: dict[tuple[str, str], list[_Found]] = {}
        self.configs: list[Mapping[str, str]] = []
        self.started_at: list[int] = []
        for index, key in enumerate(keys):
            self._sort(index, key, model_name)

    def _sort(self, index: int, key: SeriesKey, model_name: str) -> None:
        if key.name == STARTED_AT:
            self.started_at.append(index)
            return
        base = base_name(key.name)
        labels = dict(key.labels)
        if base == CONFIG_NAME:
            self.configs.append(labels)
            return
        use = _USES.get(base)
        if use is None:
            return
        model = labels.get("model_name", "")
        self.models.add(model)
        if not model_name or model == model_name:
            owner = labels.get("engine", "0"), model
            self.found.setdefault(owner, []).append(_Found(index, use, key.name, labels))

    def problem(self, model_name: str) -> tuple[GapReason, str] | None:
        """Say why no engine can be told, if so."""
        if self.found:
            return None
        if not self.models:
            return GapReason.NO_FAMILIES, "no vLLM series on the page"
        seen = ", ".join(sorted(self.models))
        return GapReason.FILTER_MATCHED_NOTHING, f"no series of model {model_name!r}; the page has: {seen}"

    def engines(self) -> list[tuple[str, tuple[str, str]]]:
        """Return each engine's label and owner, sorted. Two models behind one label are two engines."""
        uses = Counter(engine for engine, _ in self.found)
        return sorted(
            (engine if uses[engine] == 1 else f"{engine}/{model}", (engine, model)) for engine, model in self.found
        )


class _Planner:
    """Writes the plan of one layout, engine by engine."""

    def __init__(self, layout: _Layout) -> None:
        self.layout = layout
        self.engines = layout.engines()
        self.template = np.full((len(self.engines), _WIDTH), np.nan)
        self.cells: dict[int, list[int]] = {}
        self.repeats: list[tuple[int, int]] = []
        self.histograms: dict[tuple[str, tuple[float, ...]], list[tuple[int, list[int]]]] = {}
        self.missing: list[_Missing] = []
        self.families: dict[str, str] = {}

    def plan(self) -> _Plan:
        """Return the plan."""
        for row, (_, owner) in enumerate(self.engines):
            chosen = self._choose(self.layout.found[owner])
            for signal in _SCALARS:
                self._scalar(row, signal, chosen.get(signal))
            for signal in _BUCKETS:
                self._histogram(row, signal, chosen.get(signal))
            if self.layout.started_at:
                self.cells[self._cell(row, "started_at")] = [self._largest(self.layout.started_at)]
            self._config(row, owner[0])
        cells = sorted(self.cells)
        sizes = [len(self.cells[cell]) for cell in cells]
        return _Plan(
            keys=self.layout.keys,
            engines=tuple(label for label, _ in self.engines),
            template=self.template.ravel(),
            repeats=tuple(self.repeats),
            sources=np.array([index for cell in cells for index in self.cells[cell]], dtype=np.intp),
            starts=np.cumsum([0, *sizes[:-1]], dtype=np.intp)[: len(cells)],
            cells=np.array(cells, dtype=np.intp),
            histograms=tuple(
                _HistogramPlan(
                    name,
                    bounds,
                    np.array([row for row, _ in rows], dtype=np.intp),
                    np.array([buckets for _, buckets in rows], dtype=np.intp),
                )
                for (name, bounds), rows in self.histograms.items()
            ),
            missing=tuple(self.missing),
            families=self.families,
        )

    def _choose(self, found: list[_Found]) -> dict[str, list[_Found]]:
        """Return the series of the first name present, for each signal."""
        chosen: dict[str, list[_Found]] = {}
        for each in found:
            where = each.use.where
            if where is not None and each.labels.get(where[0]) != where[1]:
                continue
            best = chosen.setdefault(each.use.signal, [])
            if best and each.use.rank < best[0].use.rank:
                best.clear()
            if not best or each.use.rank == best[0].use.rank:
                best.append(each)
        return chosen

    def _scalar(self, row: int, signal: str, found: list[_Found] | None) -> None:
        if not found:
            if signal == "asleep":
                self.template[row, COLUMN[signal]] = 1.0  # awake; turned round with the others
            self._miss(row, signal)
            return
        parts: dict[str, list[int]] = {}
        for each in found:
            parts.setdefault(each.labels.get(_PART, ""), []).append(each.place)
        self.cells[self._cell(row, signal)] = [self._largest(indices) for indices in parts.values()]
        self.families[signal] = found[0].name

    def _histogram(self, row: int, signal: str, found: list[_Found] | None) -> None:
        if not found:
            self._miss(row, signal)
            return
        by_bound: dict[float, list[int]] = {}
        for each in found:
            bound = _float(each.labels.get("le", ""))
            if math.isnan(bound):
                self._miss(row, signal, GapReason.PARSE_ERROR, f"bucket le={each.labels.get('le', '')!r}")
            else:
                by_bound.setdefault(bound, []).append(each.place)
        bounds = tuple(sorted(by_bound))
        if not bounds or bounds[-1] != math.inf:
            self._miss(row, signal, GapReason.NO_INF_BUCKET, "no bucket le=+Inf")
            return
        buckets = [self._largest(by_bound[bound]) for bound in bounds]
        self.histograms.setdefault((signal, bounds), []).append((row, buckets))
        self.families[signal] = found[0].name

    def _config(self, row: int, engine: str) -> None:
        configs = [labels for labels in self.layout.configs if labels.get("engine", engine) == engine]
        capacity = next((tokens for labels in configs if not math.isnan(tokens := _capacity(labels))), math.nan)
        self.template[row, COLUMN["kv_capacity_tokens"]] = capacity
        if math.isnan(capacity):
            self._miss(row, "kv_capacity_tokens", detail="cache_config_info gives no size" if configs else "")
        for labels in configs:
            column = COLUMN["gpu_memory_utilization"]
            value = plausible(ENGINE_COLUMNS[column], _float(labels.get("gpu_memory_utilization", "")))
            if not isinstance(value, GapReason):
                self.template[row, column] = value

    def _largest(self, indices: list[int]) -> int:
        """Return where the largest of several equal series will stand."""
        self.repeats += [(indices[0], other) for other in indices[1:]]
        return indices[0]

    def _miss(self, row: int, signal: str, reason: GapReason = GapReason.FAMILY_MISSING, detail: str = "") -> None:
        if signal not in _QUIET:
            self.missing.append(_Missing(row, signal, reason, detail))

    def _cell(self, row: int, signal: str) -> int:
        return row * _WIDTH + COLUMN[signal]


def _float(text: str) -> float:
    """Return the number, NaN when it is none: labels say "None"."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _capacity(labels: Mapping[str, str]) -> float:
    """Return how many tokens the KV cache holds, NaN when the configuration does not say."""
    tokens = _float(labels.get("kv_cache_size_tokens", ""))
    if not tokens > 0.0:
        tokens = _float(labels.get("num_gpu_blocks", "")) * _float(labels.get("block_size", ""))
    value = plausible(ENGINE_COLUMNS[COLUMN["kv_capacity_tokens"]], tokens)
    return math.nan if isinstance(value, GapReason) or value <= 0.0 else value


class _Rejected(NamedTuple):
    """A value that is not believed."""

    row: int
    signal: str
    reason: GapReason
    detail: str


_Layouts = dict[tuple[float, ...], list[tuple[Ints, Floats]]]


class _Rows:
    """The rows of one tick while they are filled, plan by plan.

    Args:
        offsets: shape (pages + 1,): the first row of each page, then the number of rows.
    """

    def __init__(self, pages: Sequence[PodPage], offsets: Ints) -> None:
        self.rejected: list[_Rejected] = []
        self._pages = pages
        self._offsets = offsets
        self._expected = np.zeros((offsets[-1], _WIDTH), dtype=np.bool_)
        self._blocks: dict[str, _Layouts] = {}
        self.values: Floats = np.empty((offsets[-1], _WIDTH))

    def fill(self, plan: _Plan, numbers: Sequence[int]) -> None:
        """Write the rows of the pages with these numbers, all of that plan, in one go."""
        count = len(plan.engines)
        pages = np.array(numbers, dtype=np.intp)
        rows = self._offsets[pages, None] + np.arange(count)
        read = np.array([self._pages[number].page.values for number in numbers])
        for kept, other in plan.repeats:
            read[:, kept] = np.fmax(read[:, kept], read[:, other])
        block = np.tile(plan.template, (len(pages), 1))
        if plan.cells.size:
            with np.errstate(invalid="ignore", over="ignore"):
                block[:, plan.cells] = np.add.reduceat(read[:, plan.sources], plan.starts, axis=1)
        expected = np.zeros(plan.template.shape, dtype=np.bool_)
        expected[plan.cells] = True
        flat = rows.ravel()
        self.values[flat] = block.reshape(-1, _WIDTH)
        self.values[flat, COLUMN["read_at"]] = np.repeat([self._pages[number].read_at for number in numbers], count)
        self._expected[flat] = np.tile(expected.reshape(count, _WIDTH), (len(pages), 1))
        for histogram in plan.histograms:
            counts = read[:, histogram.buckets].reshape(-1, len(histogram.bounds))
            blocks = self._blocks.setdefault(histogram.name, {}).setdefault(histogram.bounds, [])
            blocks.append((rows[:, histogram.engines].ravel(), counts))

    def judge(self) -> None:
        """Blank every value that is not believed, and bring the rest into the table's form."""
        in_range = (self.values >= _LOW) & (self.values <= _HIGH)
        for row, column in np.argwhere(self._expected & ~in_range):
            signal, value = ENGINE_COLUMNS[column], float(self.values[row, column])
            verdict = plausible(signal, value)
            if isinstance(verdict, GapReason):
                self.rejected.append(_Rejected(int(row), signal.name, verdict, _detail(signal, value)))
                verdict = math.nan
            self.values[row, column] = verdict
        self.values += 0.0  # -0.0 becomes 0.0
        self.values[:, COLUMN["asleep"]] = 1.0 - self.values[:, COLUMN["asleep"]]  # the page says awake

    def histograms(self) -> dict[str, tuple[HistogramRows, ...]]:
        """Return every histogram that was read, one entry per bucket layout."""
        read = {name: self._layouts(name, layouts) for name, layouts in self._blocks.items()}
        return {name: layouts for name, layouts in read.items() if layouts}

    def _layouts(self, name: str, layouts: _Layouts) -> tuple[HistogramRows, ...]:
        """Return one histogram's believable rows; counts never fall towards higher bounds."""
        result = []
        for bounds, blocks in layouts.items():
            rows = np.concatenate([block[0] for block in blocks])
            counts = np.concatenate([block[1] for block in blocks])
            order = np.argsort(rows, kind="stable")
            rows, counts = rows[order], counts[order]
            good = ((counts >= 0.0) & (counts <= _MAX_COUNT)).all(axis=1)
            for row, bad in zip(rows[~good], counts[~good], strict=True):
                reason = GapReason.OUT_OF_RANGE if np.isfinite(bad).all() else GapReason.NON_FINITE
                self.rejected.append(_Rejected(int(row), name, reason, "a bucket holds no count"))
            if good.any():
                counts = np.maximum.accumulate(counts[good], axis=1)
                result.append(HistogramRows(bounds=bounds, rows=rows[good], counts=counts))
        return tuple(result)


def _detail(signal: Signal, value: float) -> str:
    """Say what was read, and what the unit should have been."""
    if signal.unit == "ratio" and value > 1.0:
        return f"{value:g}: expected a ratio in [0, 1]; is this a percentage?"
    return f"{value:g}: expected a number in [{signal.low:g}, {signal.high:g}]"


class EngineBuilder:
    """Turns pages into engine rows, remembering the layouts that it has seen; keep one per target.

    Args:
        model_name: count only series of this served model; "" counts all.
        source: the name that gaps carry.
    """

    def __init__(self, model_name: str = "", source: str = "vllm") -> None:
        self._model_name = model_name
        self._source = source
        self._plans: list[_Plan] = []
        self._keys: tuple[EngineKey, ...] = ()

    def build(self, pages: Sequence[PodPage]) -> tuple[Engines, tuple[Gap, ...]]:
        """Return the rows of all pages, one page a pod, and a gap for each reading that is missing or not believed.

        While the engines stay the same, so does the `keys` object.
        """
        pages = sorted(pages, key=lambda each: each.pod.uid)
        plans = [self._plan(each.page.keys) for each in pages]
        pairs = list(zip(pages, plans, strict=True))
        keys = tuple(EngineKey(each.pod.uid, engine) for each, plan in pairs for engine in plan.engines)
        if keys != self._keys:
            self._keys = keys
        rows = _Rows(pages, np.cumsum([0, *(len(plan.engines) for plan in plans)], dtype=np.intp))
        for plan in {id(plan): plan for plan in plans if plan.engines}.values():
            rows.fill(plan, [number for number, each in enumerate(plans) if each is plan])
        rows.judge()
        engines = Engines(keys=self._keys, values=rows.values, histograms=rows.histograms())
        gaps = [gap for each, plan in pairs for gap in self._page_gaps(each, plan)]
        owners = [(each.pod, plan, number) for each, plan in pairs for number in range(len(plan.engines))]
        for row, signal, reason, detail in rows.rejected:
            pod, plan, number = owners[row]
            gaps.append(self._gap(pod, signal, reason, _of_engine(plan, number, detail)))
        return engines, tuple(gaps)

    def families(self, pages: Iterable[PodPage]) -> Counter[tuple[str, str]]:
        """Count the pages by signal and the sample name that it was read from."""
        return Counter(pair for each in pages for pair in self._plan(each.page.keys).families.items())

    def _plan(self, keys: tuple[SeriesKey, ...]) -> _Plan:
        """Return the plan for a layout. The layouts used last are kept, the newest in front."""
        for index, plan in enumerate(self._plans):
            if plan.keys == keys:
                self._plans.insert(0, self._plans.pop(index))
                return plan
        layout = _Layout(keys, self._model_name)
        problem = layout.problem(self._model_name)
        plan = _Plan(keys=keys, problem=problem) if problem else _Planner(layout).plan()
        self._plans.insert(0, plan)
        del self._plans[_MAX_PLANS:]
        return plan

    def _page_gaps(self, page: PodPage, plan: _Plan) -> Iterator[Gap]:
        """Yield the gaps that the page's layout and its bad lines leave."""
        if plan.problem is not None:
            yield self._gap(page.pod, WHOLE_PAGE, *plan.problem)
        for number, signal, reason, detail in plan.missing:
            yield self._gap(page.pod, signal, reason, _of_engine(plan, number, detail))
        for name, lines in sorted(page.page.bad.items()):
            yield self._gap(page.pod, _signal_of(name), GapReason.PARSE_ERROR, f"{lines} bad lines of {name}")

    def _gap(self, pod: Pod, signal: str, reason: GapReason, detail: str) -> Gap:
        return Gap(signal=signal, reason=reason, source=self._source, pod=pod.name, detail=detail[:_MAX_DETAIL])


def build_engines(pages: Sequence[PodPage], model_name: str = "") -> tuple[Engines, tuple[Gap, ...]]:
    """Return the rows of all pages, and their gaps, for one use; see `EngineBuilder`."""
    return EngineBuilder(model_name).build(pages)


def _of_engine(plan: _Plan, number: int, detail: str) -> str:
    """Name the engine, where a pod has several."""
    if len(plan.engines) == 1:
        return detail
    return f"engine {plan.engines[number]}" + (f": {detail}" if detail else "")


def _signal_of(name: str) -> str:
    """Return the signal that a wanted sample name is for."""
    if name == STARTED_AT:
        return "started_at"
    use = _USES.get(base_name(name))
    return "kv_capacity_tokens" if use is None else use.signal
