"""Signals through Prometheus: any signal by PromQL, and the raw series of engines and devices that it scrapes."""

import asyncio
import math
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import httpx

from autoscaler.core.policy import DcgmSignals, PrometheusServer, Query, VllmSignals
from autoscaler.core.signals import TARGET_SIGNAL, plausible
from autoscaler.core.types import WHOLE_PAGE, Gap, GapReason, Pod, PodPhase, Reading, Sample, TargetStatus
from autoscaler.errors import SourceError
from autoscaler.ports import Clock
from autoscaler.sources.dcgm import FAMILY, Family, FamilyWatch, build_gpus
from autoscaler.sources.exposition import Series, make_page
from autoscaler.sources.prometheus_api import Answer, PrometheusClient, Row, clip
from autoscaler.sources.promql import age_query, any_of, fill, live_pods, needs_pods, range_problem, string_literal
from autoscaler.sources.vllm_page import CONFIG_NAME, ENGINE_NAMES, STARTED_AT, EngineBuilder, PodPage

EMPTIES_BEFORE_SUSPICION = 3
MAX_REMEMBERED_TEXTS = 256
PODS_PER_QUERY = 100
INTERVAL_SLACK_S = 0.5
"""An answer is due this much early, so that a tick that comes a little soon does not wait for the next one."""


async def _all(questions: Iterable[Awaitable[Answer]]) -> list[Answer]:
    """Return all answers, asked for side by side. Raises the first failure once none is under way any more."""
    answers: list[Answer] = []
    for answer in await asyncio.gather(*questions, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer
        answers.append(answer)
    return answers


class _Remarks:
    """Turns what servers remark beside their data into gaps.

    A warning makes a `partial` gap in every cycle, an info only once; the words of either are given once.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._known: set[str] = set()

    def gaps(self, answers: Iterable[Answer], signal: str = WHOLE_PAGE) -> list[Gap]:
        """Return the gaps of one cycle."""
        warnings, infos = set[str](), set[str]()
        for answer in answers:
            warnings.update(answer.warnings)
            infos.update(answer.infos)
        fresh = sorted((warnings | infos) - self._known)
        if len(self._known) > MAX_REMEMBERED_TEXTS:
            self._known.clear()
        self._known.update(fresh)
        details = fresh or ([""] if warnings else [])
        return [Gap(signal=signal, reason=GapReason.PARTIAL, source=self._source, detail=text) for text in details]


# Any signal by PromQL


class PromQuerySource:
    """Reads whole-target signals, each by its own query; one that fails leaves the others alone.

    Args:
        servers: by the names that the queries use.
        transport: stands in for the network.
    """

    name = "prometheus"

    def __init__(
        self,
        queries: Sequence[Query],
        servers: Mapping[str, PrometheusServer],
        clock: Clock,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._queries = tuple(queries)
        used = {query.server for query in queries} & servers.keys()
        self._clients = {name: PrometheusClient(servers[name], clock, transport) for name in sorted(used)}
        self._empties = dict.fromkeys(self._queries, 0)
        self._remarks = _Remarks(self.name)

    async def read(self, target: TargetStatus, at: float) -> Reading:
        """Return a sample or a gap for each query."""
        found = await asyncio.gather(*(self._read_one(query, target, at) for query in self._queries))
        return Reading(
            samples=tuple(sample for samples, _ in found for sample in samples),
            gaps=tuple(gap for _, gaps in found for gap in gaps),
        )

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            await client.close()

    async def _read_one(self, query: Query, target: TargetStatus, at: float) -> tuple[list[Sample], list[Gap]]:
        client = self._clients.get(query.server)
        if client is None:
            return [], [self._gap(query, GapReason.NOT_CONFIGURED, f"there is no server {query.server!r}")]
        if needs_pods(query.query) and not live_pods(target):
            return [], [self._gap(query, GapReason.NO_READY_PODS, "$pods is empty")]
        expr = fill(query.query, target)
        aging = age_query(expr)
        try:
            answers = await _all(client.query(each, at) for each in (expr, aging) if each is not None)
        except SourceError as error:
            return [], [self._gap(query, GapReason(error.reason), error.detail)]
        partial = any(answer.warnings for answer in answers)
        remarks = self._remarks.gaps(answers, query.signal)
        value = self._value(query, answers[0])
        if isinstance(value, Gap):
            return [], [value, *remarks]
        taken_at = _oldest(answers[-1].rows) if aging else answers[0].rows[0].at
        if not at - taken_at <= query.stale_after_s:
            detail = f"the data is {at - taken_at:.1f} s old, limit {query.stale_after_s:g} s"
            return [], [self._gap(query, GapReason.STALE, detail), *remarks]
        sample = Sample(signal=query.signal, value=value, at=taken_at, partial=partial, source=self.name)
        return [sample], remarks

    def _value(self, query: Query, answer: Answer) -> float | Gap:
        """Return the one believable number of an answer, or why there is none."""
        if not answer.rows:
            self._empties[query] += 1
            problem = range_problem(query) if self._empties[query] >= EMPTIES_BEFORE_SUSPICION else ""
            return self._gap(query, GapReason.WINDOW_TOO_SHORT if problem else GapReason.EMPTY, problem)
        self._empties[query] = 0
        if len(answer.rows) > 1:
            return self._gap(query, GapReason.AMBIGUOUS_RESULT, _difference(answer.rows))
        value = answer.rows[0].value
        if value is None:
            return self._gap(query, GapReason.QUERY_ERROR, "a native histogram: put it into histogram_quantile()")
        judged = plausible(TARGET_SIGNAL[query.signal], value)
        return self._gap(query, judged, f"{value:g}") if isinstance(judged, GapReason) else judged

    def _gap(self, query: Query, reason: GapReason, detail: str) -> Gap:
        return Gap(signal=query.signal, reason=reason, source=self.name, detail=clip(detail))


def _oldest(rows: Sequence[Row]) -> float:
    """Return the time that an age query gave; minus infinity when it gave none."""
    return min((row.value for row in rows if row.value is not None), default=-math.inf)


def _difference(rows: Sequence[Row]) -> str:
    """Return how the label sets of several rows differ, by the first two of them."""
    first, second = rows[0].labels, rows[1].labels
    names = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    shown = (
        "{" + ", ".join(f"{name}={string_literal(labels.get(name, ''))}" for name in names) + "}"
        for labels in (first, second)
    )
    return f"{len(rows)} rows, such as {' and '.join(shown)}"


# The engines' own series

_RUNNING = tuple(f"{prefix}num_requests_running" for prefix in ("vllm:", "vllm_", "ray_vllm:", "ray_vllm_"))
"""Every engine has had this gauge, in every release: its time is the time of the scrape."""
_OWN_LABELS = frozenset({"__name__", "model_name", "engine"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scrape:
    """One scraper's view of one pod.

    Args:
        at: when it was taken, epoch seconds.
        labels: those that the scraper gave to all of its series.
    """

    at: float
    labels: Mapping[str, str]


class PrometheusVllmSource:
    """Reads the engines' raw series from a Prometheus server that scrapes them, as if from their pages.

    A pod's series are those of its newest scrape; where several scrapers read it, one of them counts.

    Args:
        transport: stands in for the network.
    """

    name = "vllm"

    def __init__(
        self,
        settings: VllmSignals,
        server: PrometheusServer,
        clock: Clock,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._settings = settings
        self._client = PrometheusClient(server, clock, transport)
        self._builder = EngineBuilder(settings.model_name, self.name)
        self._remarks = _Remarks(self.name)
        self._pods_per_query = PODS_PER_QUERY
        self._age_limit_s = settings.stale_after_s + settings.scrape_interval_s
        self._pages: list[PodPage] = []

    async def read(self, target: TargetStatus, at: float) -> Reading:
        """Return the engines of all running pods, `read_at` being the time of the scrape.

        While the server cannot be asked, what it said last stands until it is stale. Raises SourceError after that.
        """
        pods = sorted((pod for pod in target.pods if pod.phase is PodPhase.RUNNING), key=lambda pod: pod.name)
        try:
            answers = await self._ask(pods, target.namespace, at)
        except SourceError as error:
            known = {pod.uid for pod in pods}
            self._pages = [
                page for page in self._pages if page.pod.uid in known and self._age_limit_s >= at - page.read_at
            ]
            if not self._pages:
                raise SourceError(self.name, error.reason, error.detail) from error
            gaps = [Gap(signal=WHOLE_PAGE, reason=GapReason(error.reason), source=self.name, detail=error.detail)]
        else:
            self._pages, gaps = self._read_pages(answers, pods, at)
            gaps += self._remarks.gaps(answers)
        engines, missing = self._builder.build(self._pages)
        return Reading(engines=engines, gaps=(*gaps, *missing))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _ask(self, pods: Sequence[Pod], namespace: str, at: float) -> list[Answer]:
        """Return, group of pods by group of pods, their series and then the times of their scrapes.

        Where an answer grows too large, the next cycle asks for fewer pods at once.
        """
        size = self._pods_per_query
        groups = [[pod.name for pod in pods[start : start + size]] for start in range(0, len(pods), size)]
        model_name = self._settings.model_name
        exprs = [expr for names in groups for expr in engine_queries(namespace, names, model_name)]
        try:
            return await _all(self._client.query(expr, at) for expr in exprs)
        except SourceError as error:
            if error.reason == GapReason.BODY_TOO_LARGE:
                self._pods_per_query = max(1, min(size, len(pods)) // 4)
            raise

    def _read_pages(self, answers: Sequence[Answer], pods: Sequence[Pod], at: float) -> tuple[list[PodPage], list[Gap]]:
        """Return the pages that the answers hold, and a gap for each pod without one."""
        scrapes = _scrapes((row for answer in answers[1::2] for row in answer.rows), self._settings.port)
        series = _allot((row for answer in answers[0::2] for row in answer.rows), scrapes)
        pages: list[PodPage] = []
        gaps: list[Gap] = []
        for pod in pods:
            scrape = scrapes.get(pod.name)
            if scrape is None:
                gaps.append(self._gap(pod, GapReason.EMPTY, self._tried()))
            elif not at - scrape.at <= self._age_limit_s:
                detail = f"scraped {at - scrape.at:.1f} s ago, limit {self._age_limit_s:g} s"
                gaps.append(self._gap(pod, GapReason.STALE, detail))
            else:
                pages.append(PodPage(pod=pod, read_at=scrape.at, page=make_page(series[pod.name])))
        return pages, gaps

    def _tried(self) -> str:
        model = f" of model {self._settings.model_name!r}" if self._settings.model_name else ""
        return f"no series{model}; tried {', '.join(_RUNNING)}"

    def _gap(self, pod: Pod, reason: GapReason, detail: str) -> Gap:
        return Gap(signal=WHOLE_PAGE, reason=reason, source=self.name, pod=pod.name, detail=clip(detail))


def engine_queries(namespace: str, pods: Sequence[str], model_name: str) -> tuple[str, str]:
    """Return the queries for the pods' series and for the times of their scrapes.

    `or` compares label sets without names, so each operand must hold all names of a label set, or none. Names are
    spelled out for the times, as `timestamp` drops them and refuses two series that differ in nothing else.
    """
    model = f",model_name={string_literal(model_name)}" if model_name else ""
    owners = [
        f"{prefix}namespace={string_literal(namespace)},{prefix}pod=~{any_of(pods)}" for prefix in ("", "exported_")
    ]
    named = "(ray_)?vllm[:_](" + "|".join(base for base in ENGINE_NAMES if not model or base != CONFIG_NAME) + ")"
    nameless = f"(ray_)?vllm[:_]{CONFIG_NAME}|{STARTED_AT}"
    kinds = [(named, model), (nameless, "")] if model else [(f"{named}|{STARTED_AT}", "")]
    series = [f"{{__name__=~{string_literal(names)},{owner}{matcher}}}" for owner in owners for names, matcher in kinds]
    times = [f"timestamp({{__name__={string_literal(name)},{owner}{model}}})" for owner in owners for name in _RUNNING]
    return " or ".join(series), " or ".join(times)


def _scrapes(times: Iterable[Row], port: int) -> dict[str, _Scrape]:
    """Return each pod's scrape that counts: of the page at `port` if any is, of these the newest."""
    best: dict[str, tuple[tuple[bool, float, list[tuple[str, str]]], _Scrape]] = {}
    for row in times:
        if row.value is None:
            continue
        labels = {
            name: value for name, value in row.labels.items() if name.removeprefix("exported_") not in _OWN_LABELS
        }
        rank = labels.get("instance", "").endswith(f":{port}"), row.value, sorted(labels.items())
        pod = _pod_name(row.labels)
        if pod not in best or rank > best[pod][0]:
            best[pod] = rank, _Scrape(at=row.value, labels=labels)
    return {pod: scrape for pod, (_, scrape) in best.items()}


def _allot(rows: Iterable[Row], scrapes: Mapping[str, _Scrape]) -> dict[str, list[Series]]:
    """Return the series of each pod's scrape in a lasting order, without the scraper's labels.

    A series' own label that collided with one of these comes back from `exported_*`.
    """
    found: dict[str, dict[str, list[Series]]] = {pod: {} for pod in scrapes}
    for row in rows:
        pod = _pod_name(row.labels)
        scrape = scrapes.get(pod)
        if scrape is None or row.value is None or not scrape.labels.items() <= row.labels.items():
            continue
        labels = {name: value for name, value in row.labels.items() if name not in scrape.labels}
        name = labels.pop("__name__", "")
        for own in [name for name in labels if name.startswith("exported_")]:
            labels[own.removeprefix("exported_")] = labels.pop(own)
        found[pod].setdefault(name, []).append(Series(name, labels, row.value))
    return {pod: sorted(_one_spelling(by_name), key=_series_order) for pod, by_name in found.items()}


def _one_spelling(by_name: Mapping[str, list[Series]]) -> Iterator[Series]:
    """Yield the series, leaving out `vllm_x` where there is `vllm:x`."""
    for name, series in by_name.items():
        if name.replace("vllm_", "vllm:", 1) == name or name.replace("vllm_", "vllm:", 1) not in by_name:
            yield from series


def _series_order(series: Series) -> tuple[str, list[tuple[str, str]]]:
    return series.name, sorted(series.labels.items())


def _pod_name(labels: Mapping[str, str]) -> str:
    return labels.get("exported_pod") or labels.get("pod", "")


# The devices' own series

_DCGM_NAMES = "|".join(FAMILY)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Devices:
    """What a server said of the devices of `pods`.

    Args:
        scraped_at: by UUID, epoch seconds of the oldest scrape.
        gaps: what was missing, or remarked.
    """

    asked_at: float
    pods: frozenset[str]
    series: tuple[Series, ...]
    scraped_at: Mapping[str, float]
    gaps: tuple[Gap, ...]


class PrometheusDcgmSource:
    """Reads the DCGM exporters' series from a Prometheus server that scrapes them.

    Asked at most every `settings.interval_s`, and when the pods change; in between the last answer stands, and ages.

    Args:
        transport: stands in for the network.
    """

    name = "dcgm"

    def __init__(
        self,
        settings: DcgmSignals,
        server: PrometheusServer,
        clock: Clock,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._settings = settings
        self._client = PrometheusClient(server, clock, transport)
        self._families = FamilyWatch(self.name)
        self._remarks = _Remarks(self.name)
        self._kept: _Devices | None = None

    async def read(self, target: TargetStatus, at: float) -> Reading:
        """Return the devices of the live pods. Raises SourceError when nothing at all is known of them."""
        pods = frozenset(pod.name for pod in live_pods(target))
        if not pods:
            return Reading()
        failure: tuple[Gap, ...] = ()
        if self._is_due(pods, at):
            try:
                self._kept = await self._ask(target.namespace, pods, at)
            except SourceError as error:
                failure = (self._gap(GapReason(error.reason), error.detail),)
                if self._kept is None:
                    raise SourceError(self.name, error.reason, error.detail) from error
        if self._kept is None:
            return Reading()
        series, stale = self._fresh(self._kept, at)
        gpus, missing = build_gpus(series, target.pods, target.namespace, source=self.name)
        return Reading(gpus=gpus, gaps=(*failure, *self._kept.gaps, *stale, *self._families.gaps(), *missing))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    def _is_due(self, pods: frozenset[str], at: float) -> bool:
        kept = self._kept
        return kept is None or kept.pods != pods or at - kept.asked_at >= self._settings.interval_s - INTERVAL_SLACK_S

    async def _ask(self, namespace: str, pods: frozenset[str], at: float) -> _Devices:
        """Return what the server knows of the devices."""
        answers = await _all(self._client.query(expr, at) for expr in device_queries(namespace, sorted(pods)))
        series = tuple(
            Series(name, row.labels, row.value)
            for row in answers[0].rows
            if row.value is not None and (name := row.labels.get("__name__", "")) in FAMILY
        )
        scraped_at: dict[str, float] = {}
        for row in answers[1].rows:
            if row.value is not None:
                device = _device(row.labels)
                scraped_at[device] = min(row.value, scraped_at.get(device, math.inf))
        gaps = self._remarks.gaps(answers)
        if series:
            self._families.note("", {each.name for each in series})
        else:
            gaps.append(self._gap(*await self._explain_empty(at)))
        return _Devices(asked_at=at, pods=pods, series=series, scraped_at=scraped_at, gaps=tuple(gaps))

    async def _explain_empty(self, at: float) -> tuple[GapReason, str]:
        """Return why no series names a pod of the target."""
        answer = await self._client.query(f"count({{__name__=~{string_literal(_DCGM_NAMES)}}})", at)
        if answer.rows:
            return GapReason.FILTER_MATCHED_NOTHING, "there are DCGM series, but none names a pod of the target"
        return GapReason.EMPTY, f"no series of {', '.join(FAMILY)}"

    def _fresh(self, devices: _Devices, at: float) -> tuple[list[Series], list[Gap]]:
        """Return the series that are young enough, and a gap for the devices whose are not."""
        limit_s = self._settings.stale_after_s
        ages = {
            _device(each.labels): at - devices.scraped_at.get(_device(each.labels), -math.inf)
            for each in devices.series
        }
        stale = {device: age for device, age in ages.items() if not age <= limit_s}
        gaps = []
        if stale:
            oldest_s = max(stale.values())
            detail = f"{len(stale)} of {len(ages)} devices, scraped up to {oldest_s:.1f} s ago, limit {limit_s:g} s"
            gaps.append(self._gap(GapReason.STALE, detail))
        return [each for each in devices.series if _device(each.labels) not in stale], gaps

    def _gap(self, reason: GapReason, detail: str) -> Gap:
        return Gap(signal=WHOLE_PAGE, reason=reason, source=self.name, detail=clip(detail))


def device_queries(namespace: str, pods: Sequence[str]) -> tuple[str, str]:
    """Return the queries for all series of the devices that a pod's series name, and for the times of their scrapes.

    All series, not only the pods' own: on a shared device the others' rows, and the one without a pod, are needed.
    """
    ours = " or ".join(
        f"{{__name__=~{string_literal(_DCGM_NAMES)},{space}={string_literal(namespace)},{pod}=~{any_of(pods)}}}"
        for space, pod in (("namespace", "pod"), ("exported_namespace", "exported_pod"), ("pod_namespace", "pod_name"))
    )
    times = " or ".join(f"timestamp({name})" for name in (*Family.USED.value, *Family.FREE.value))
    return (
        f"{{__name__=~{string_literal(_DCGM_NAMES)}}} and on (UUID, uuid) ({ours})",
        f"({times}) and on (UUID, uuid) ({ours})",
    )


def _device(labels: Mapping[str, str]) -> str:
    return labels.get("UUID") or labels.get("uuid", "")
