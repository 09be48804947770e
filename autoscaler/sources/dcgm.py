"""GPU readings from DCGM exporters: the rules that turn their series into `Gpu`s, and a source that scrapes pages.

The rules know nothing of HTTP: `build_gpus` takes series from a page or from a Prometheus server alike.
"""

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import aiohttp
from yarl import URL

from autoscaler.core.policy import DcgmSignals
from autoscaler.core.signals import GPU_SIGNAL, Kind, Signal, plausible
from autoscaler.core.types import WHOLE_PAGE, Attribution, Gap, GapReason, Gpu, Pod, PodPhase, Reading, TargetStatus
from autoscaler.ports import Clock
from autoscaler.sources.exposition import MAX_BODY, Series, SeriesCache, parse_page

MIB = float(2**20)


class Family(Enum):
    """A thing that DCGM measures, by its names: 2.x to 4.5, then DCGM 4.6, then the 1.x exporter."""

    USED = ("DCGM_FI_DEV_FB_USED", "dcgm_fb_used")
    FREE = ("DCGM_FI_DEV_FB_FREE", "dcgm_fb_free")
    ACTIVE = ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO", "dcgm_fi_prof_gr_engine_active")
    BUSY = ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_UTIL_RATIO", "dcgm_gpu_utilization")
    XID = ("DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_XID_ERROR", "dcgm_xid_errors")


FAMILY: Mapping[str, Family] = {name: family for family in Family for name in family.value}
"""Every name that is read. `GPU_UTIL_RATIO` is a percentage like `GPU_UTIL`, whatever it is called."""

_XID = Signal(name=WHOLE_PAGE, kind=Kind.GAUGE, unit="1", combine="max", meaning="last Xid code", high=1e4)
_SCALE: Mapping[Family, tuple[Signal, float]] = {
    Family.USED: (GPU_SIGNAL["memory_used"], MIB),
    Family.FREE: (GPU_SIGNAL["memory_free"], MIB),
    Family.ACTIVE: (GPU_SIGNAL["gpu_utilization"], 1.0),
    Family.BUSY: (GPU_SIGNAL["gpu_utilization"], 0.01),
    Family.XID: (_XID, 1.0),
}

# Which labels name the workload: Prometheus' renamed ones first, then those of `--use-old-namespace`.
_LAYOUTS: tuple[tuple[str, str, str], ...] = (
    ("exported_pod", "exported_namespace", "exported_container"),
    ("pod_name", "pod_namespace", "container_name"),
    ("pod", "namespace", "container"),
)


def is_blank(value: float) -> bool:
    """Tell whether a value is one of DCGM's markers for "no value".

    int64 2^63 - 16 to 2^63 - 13 (as a float 9.223372036854776e18, so anything from 9.2e18 up), int32 2^31 - 16 to
    2^31 - 13, double 2^47 to 2^47 + 3, and those after a conversion to percent.
    """
    if not math.isfinite(value):
        return False
    double = 140737488355328.0
    return (
        value >= 9.2e18
        or 2147483632.0 <= value <= 2147483635.0
        or double <= value <= double + 3.0
        or 100.0 * double <= value <= 100.0 * (double + 3.0)
    )


def believable(signal: Signal, value: float, scale: float = 1.0) -> float | GapReason:
    """Return `value` x `scale` in the signal's base unit, or why it is not believed."""
    return GapReason.DCGM_BLANK if is_blank(value) else plausible(signal, value * scale)


class GapList:
    """Gaps as they are found: at most one per signal, reason and pod; the first detail stays."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._gaps: dict[tuple[str, GapReason, str], Gap] = {}

    def add(self, signal: str, reason: GapReason, pod: str = "", detail: str = "") -> None:
        """Note one gap."""
        gap = Gap(signal=signal, reason=reason, source=self._source, pod=pod, detail=detail[:200])
        self._gaps.setdefault((signal, reason, pod), gap)

    def all(self) -> tuple[Gap, ...]:
        """Return the gaps in the order in which they were found."""
        return tuple(self._gaps.values())


def is_live(pod: Pod) -> bool:
    """Tell whether a pod's device counts: it runs and is not being deleted."""
    return pod.phase is PodPhase.RUNNING and not pod.terminating


class Workload(NamedTuple):
    """The pod that a series names. `namespace` and `uid` are "" where the series does not say."""

    namespace: str
    pod: str
    uid: str = ""


class _Row(NamedTuple):
    workload: Workload | None
    value: float | GapReason


@dataclass(slots=True)
class _Device:
    """All rows of one card or MIG instance."""

    uuid: str
    instance: str
    mig: bool = False
    rows: dict[Family, list[_Row]] = field(default_factory=dict)

    def value(self, family: Family) -> float | GapReason | None:
        """Return the device's own value; None without a row.

        Rows with pod labels repeat the device's value (time-slicing) or are the pods' parts of it (when an unlabelled
        row stands beside them): so the largest of the unlabelled rows, else of all, and never a sum.
        """
        rows = self.rows.get(family, [])
        values = [row.value for row in rows if row.workload is None] or [row.value for row in rows]
        known = [value for value in values if not isinstance(value, GapReason)]
        if known:
            return max(known)
        return values[0] if values else None

    def workloads(self) -> list[Workload]:
        """Return the pods that any row names, each once, with its uid where some row has one."""
        uids: dict[tuple[str, str], str] = {}
        for row in (row for rows in self.rows.values() for row in rows):
            if row.workload is not None:
                namespace, pod, uid = row.workload
                uids[namespace, pod] = uids.get((namespace, pod)) or uid
        return sorted(Workload(namespace, pod, uid) for (namespace, pod), uid in uids.items())

    def parts(self) -> dict[tuple[str, str], float | GapReason] | None:
        """Return each pod's own memory by its processes, by namespace and name; None where rows do not tell pods apart.

        Zero with an empty `pod_uid` is what the exporter writes when it cannot see the pods' processes: unknown,
        not zero. A pod's row that equals the device's is a repetition of it.
        """
        rows = self.rows.get(Family.USED, [])
        device = self.value(Family.USED)
        named = [(row.workload, row.value) for row in rows if row.workload is not None]
        if len(named) == len(rows) or all(value == device for _, value in named):
            return None
        return {
            (workload.namespace, workload.pod): value if workload.uid or value != 0.0 else GapReason.SHARED_DEVICE
            for workload, value in named
        }


@dataclass(slots=True)
class _Devices:
    """What the series said, by device.

    Args:
        layouts: the labels that named a workload, e.g. `exported_pod`.
        nameless: series without a UUID, which can be attributed to no device.
    """

    devices: dict[tuple[str, str], _Device] = field(default_factory=dict)
    layouts: set[str] = field(default_factory=set)
    nameless: int = 0


def _workload(labels: Mapping[str, str], exporters: set[tuple[str, str]]) -> tuple[str, Workload] | None:
    """Return the label that named the workload, and the workload; None when the device is nobody's.

    An empty label is an absent one. The exporter's own pod, which Prometheus adds to rows without a workload, is none.
    """
    for pod_label, namespace_label, container_label in _LAYOUTS:
        pod, namespace = labels.get(pod_label, ""), labels.get(namespace_label, "")
        if not pod:
            continue
        exporter = "dcgm-exporter" in pod or "dcgm-exporter" in labels.get(container_label, "")
        if exporter or (pod_label == "pod" and (namespace, pod) in exporters):
            continue
        return pod_label, Workload(namespace, pod, labels.get("exported_pod_uid") or labels.get("pod_uid", ""))
    return None


def _exporters(series: Iterable[Series]) -> set[tuple[str, str]]:
    """Return the (namespace, pod) of the exporters: a `pod` label beside a label that names the workload."""
    return {
        (one.labels.get("namespace", ""), one.labels["pod"])
        for one in series
        if one.labels.get("pod") and (one.labels.get("exported_pod") or one.labels.get("pod_name"))
    }


def _collect(series: Iterable[Series]) -> _Devices:
    """Sort the rows of the families that are read by device: (`UUID`, `GPU_I_ID`)."""
    wanted = [one for one in series if one.name in FAMILY]
    exporters = _exporters(wanted)
    found = _Devices()
    for one in wanted:
        uuid = one.labels.get("UUID") or one.labels.get("uuid", "")
        if not uuid:
            found.nameless += 1
            continue
        instance = one.labels.get("GPU_I_ID", "")
        device = found.devices.setdefault((uuid, instance), _Device(uuid, instance))
        device.mig |= bool(instance or one.labels.get("GPU_I_PROFILE"))
        named = _workload(one.labels, exporters)
        if named is not None:
            found.layouts.add(named[0])
        family = FAMILY[one.name]
        signal, scale = _SCALE[family]
        row = _Row(None if named is None else named[1], believable(signal, one.value, scale))
        device.rows.setdefault(family, []).append(row)
    return found


class _Owners:
    """The target's pods, to ask whose a workload is."""

    def __init__(self, pods: Sequence[Pod], namespace: str) -> None:
        self._namespace = namespace
        self._pods = {pod.name: pod for pod in pods}
        self._stems = {pod.name.rpartition("-")[0] for pod in pods} - {""}

    def live(self, workload: Workload) -> Pod | None:
        """Return the target's pod of that name if it is alive."""
        pod = self._pods.get(workload.pod) if workload.namespace in ("", self._namespace) else None
        if pod is None or not is_live(pod) or (workload.uid and workload.uid != pod.uid):
            return None
        return pod

    def gone(self, workload: Workload) -> bool:
        """Tell whether it is a pod of the target that no longer counts.

        A kubelet may list a pod long after its end, when the API server no longer does: then only the ReplicaSet's part
        of the name (`chat-7c9f6d5b8b` of `chat-7c9f6d5b8b-4x2lq`) says that it was ours.
        """
        ours = workload.pod in self._pods or workload.pod.rpartition("-")[0] in self._stems
        return ours and workload.namespace in ("", self._namespace) and self.live(workload) is None


def _memory(device: _Device, pods: Sequence[Pod], gaps: GapList) -> tuple[float | None, float | None]:
    """Return the device's used and free bytes, each None when unknown."""
    values: list[float | None] = []
    for family in (Family.USED, Family.FREE):
        value = device.value(family)
        values.append(None if isinstance(value, GapReason) else value)
        if value is None or isinstance(value, GapReason):
            for pod in pods:
                detail = f"{family.value[0]} of {device.uuid}"
                gaps.add(_SCALE[family][0].name, value or GapReason.NOT_SUPPORTED, pod.name, detail)
    used, free = values
    if used == 0.0 and free == 0.0:
        for pod in pods:
            gaps.add("memory_used", GapReason.ZERO_TOTAL, pod.name, f"used + free is 0 on {device.uuid}")
        return None, None
    return used, free


def _utilization(device: _Device, pods: Sequence[Pod], gaps: GapList) -> float | None:
    """Return the ratio of time in which the device was busy; None when unknown.

    The profiling field where the card has it; else `GPU_UTIL`, except on MIG, where it is absent or a lasting 0.
    """
    tried = (Family.ACTIVE,) if device.mig else (Family.ACTIVE, Family.BUSY)
    values = [device.value(family) for family in tried]
    names = " and ".join(family.value[0] for family in tried)
    reasons = [value for value in values if isinstance(value, GapReason)]
    if values.count(None) == len(values):
        reasons = [GapReason.NOT_SUPPORTED]
    for reason in reasons:
        for pod in pods:
            gaps.add("gpu_utilization", reason, pod.name, f"{names} of {device.uuid}")
    return next((value for value in values if isinstance(value, float)), None)


def _device_gpus(device: _Device, owners: _Owners, gaps: GapList) -> list[Gpu]:
    """Return the device as each live pod of the target on it sees it."""
    alive: list[Workload] = []
    for workload in device.workloads():
        if owners.gone(workload):
            gaps.add(WHOLE_PAGE, GapReason.POD_NOT_LIVE, workload.pod, f"device {device.uuid} still names it")
        else:
            alive.append(workload)
    ours = [(workload, pod) for workload in alive if (pod := owners.live(workload)) is not None]
    if not ours:
        return []
    pods = [pod for _, pod in ours]
    used, free = _memory(device, pods, gaps)
    utilization = _utilization(device, pods, gaps)
    xid = device.value(Family.XID)
    parts = device.parts()
    gpus: list[Gpu] = []
    for workload, pod in ours:
        attribution, own = _attribute(parts, workload, alone=len(alive) == 1, used=used)
        if attribution is Attribution.DEVICE_ONLY and own is None:
            gaps.add("memory_used", GapReason.SHARED_DEVICE, pod.name, f"no own share of {device.uuid} can be told")
        gpus.append(
            Gpu(
                uuid=device.uuid,
                instance=device.instance,
                pod_uid=pod.uid,
                attribution=attribution,
                shared=parts is not None or len(alive) > 1,
                memory_used=used,
                memory_free=free,
                pod_memory_used=own,
                utilization=utilization,
                xid=int(xid) if isinstance(xid, float) else 0,
            )
        )
    return gpus


def _attribute(
    parts: Mapping[tuple[str, str], float | GapReason] | None, workload: Workload, *, alone: bool, used: float | None
) -> tuple[Attribution, float | None]:
    """Return how sure the attribution is, and the bytes that the pod itself holds."""
    if parts is None:
        return (Attribution.EXCLUSIVE, used) if alone else (Attribution.DEVICE_ONLY, None)
    own = parts.get((workload.namespace, workload.pod))
    if isinstance(own, float):
        return Attribution.PER_PROCESS, own
    return Attribution.DEVICE_ONLY, used if alone else None


def build_gpus(
    series: Iterable[Series], pods: Sequence[Pod], namespace: str, *, source: str = "dcgm"
) -> tuple[tuple[Gpu, ...], tuple[Gap, ...]]:
    """Return the devices of the target's live pods, sorted by identity and pod, and what is missing.

    Devices of nobody and of other workloads are left out, as is what is missing on them. Through Prometheus, workload
    labels arrive as `exported_*`; these win, series by series.

    Args:
        series: of the families in `FAMILY`, from any number of exporters; others are ignored.
        pods: of the target, in whatever state.
        source: what the gaps name as their origin.
    """
    found = _collect(series)
    owners = _Owners(pods, namespace)
    gaps = GapList(source)
    gpus = [gpu for device in found.devices.values() for gpu in _device_gpus(device, owners, gaps)]
    gpus.sort(key=lambda gpu: (gpu.uuid, gpu.instance, gpu.pod_uid))
    if found.nameless:
        gaps.add(WHOLE_PAGE, GapReason.AMBIGUOUS_RESULT, detail=f"{found.nameless} series without a UUID label")
    if found.devices:
        _note_unattributed(found, gpus, [pod for pod in pods if is_live(pod)], gaps)
    return tuple(gpus), gaps.all()


def _note_unattributed(found: _Devices, gpus: Sequence[Gpu], live: Sequence[Pod], gaps: GapList) -> None:
    """Note live pods without a device, or one gap for all when none has one."""
    devices = len(found.devices)
    if gpus:
        with_device = {gpu.pod_uid for gpu in gpus}
        for pod in live:
            if pod.uid not in with_device:
                gaps.add(WHOLE_PAGE, GapReason.EMPTY, pod.name, f"none of {devices} devices names the pod")
    elif not found.layouts:
        gaps.add(WHOLE_PAGE, GapReason.NO_POD_LABEL, detail=f"none of {devices} devices names a pod")
    elif live:
        detail = f"{devices} devices name pods ({', '.join(sorted(found.layouts))}), none of them the target's"
        gaps.add(WHOLE_PAGE, GapReason.FILTER_MATCHED_NOTHING, detail=detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributionReport:
    """How the exporters label workloads, for a check at start.

    Args:
        layouts: the labels that name a workload: `exported_pod`, `pod_name` or `pod`; empty when none does.
        series: GPU series, of the families that are read.
        labelled: series that name any workload.
        attributed: series that name a live pod of the target.
    """

    layouts: tuple[str, ...]
    series: int
    labelled: int
    attributed: int

    def __str__(self) -> str:
        found = ", ".join(self.layouts) or "none"
        return (
            f"pod labels: {found}; {self.attributed} of {self.series} GPU series attributed to the target, "
            f"{self.labelled} to any pod"
        )


def attribution_report(series: Iterable[Series], pods: Sequence[Pod], namespace: str) -> AttributionReport:
    """Return which label layout the series use, and how many of them could be attributed."""
    found = _collect(series)
    owners = _Owners(pods, namespace)
    rows = [row for device in found.devices.values() for rows in device.rows.values() for row in rows]
    workloads = [row.workload for row in rows if row.workload is not None]
    return AttributionReport(
        layouts=tuple(sorted(found.layouts)),
        series=len(rows) + found.nameless,
        labelled=len(workloads),
        attributed=sum(owners.live(workload) is not None for workload in workloads),
    )


class FamilyWatch:
    """Notices a family that a page had and that is missing from `polls` good pages in a row."""

    def __init__(self, source: str = "dcgm", polls: int = 3) -> None:
        self._source = source
        self._polls = polls
        self._pages: dict[str, dict[Family, tuple[str, int]]] = {}

    def note(self, page: str, names: Iterable[str]) -> None:
        """Take note of one page that was read, by the names of its series. A new alias is not a loss."""
        seen = {FAMILY[name]: (name, 0) for name in names if name in FAMILY and FAMILY[name] is not Family.XID}
        before = self._pages.get(page, {})
        missed = {family: (name, count + 1) for family, (name, count) in before.items() if family not in seen}
        self._pages[page] = {**missed, **seen}

    def keep(self, pages: Iterable[str]) -> None:
        """Forget all other pages."""
        kept = set(pages)
        self._pages = {page: families for page, families in self._pages.items() if page in kept}

    def gaps(self) -> tuple[Gap, ...]:
        """Return one gap per signal that lost a family, naming the families."""
        lost: dict[str, set[str]] = {}
        for families in self._pages.values():
            for family, (name, count) in families.items():
                if count >= self._polls:
                    lost.setdefault(_SCALE[family][0].name, set()).add(name)
        gaps = GapList(self._source)
        for signal, names in sorted(lost.items()):
            gaps.add(signal, GapReason.FAMILY_MISSING, detail=", ".join(sorted(names)))
        return gaps.all()


TIMEOUT_S = 3.0
_PARALLEL = 32
_SLACK_S = 0.5
"""A page is due this much early, so that a tick that comes a little soon does not wait for the next one."""


class _Failure(NamedTuple):
    reason: GapReason
    detail: str


@dataclass(slots=True)
class _Page:
    """One exporter page.

    Args:
        asked_at: when it was last asked for, epoch seconds.
        read_at: when `series` were read; None before the first success.
        bad: lines among them that could not be read, counted by series name.
        failure: why the newest attempt gave nothing.
    """

    asked_at: float = -math.inf
    read_at: float | None = None
    series: tuple[Series, ...] = ()
    bad: Mapping[str, int] = field(default_factory=dict)
    failure: _Failure | None = None


class _Cached(NamedTuple):
    key: object
    reading: Reading


class DcgmSource:
    """Scrapes exporter pages, each at most every `settings.interval_s`; in between its last reading stands.

    A page that cannot be read keeps its last series until they are `settings.stale_after_s` old.
    """

    name = "dcgm"

    def __init__(self, settings: DcgmSignals, clock: Clock, session: aiohttp.ClientSession | None = None) -> None:
        self._settings = settings
        self._clock = clock
        self._session = session
        self._owned: aiohttp.ClientSession | None = None
        self._pages: dict[str, _Page] = {}
        self._families = FamilyWatch(self.name)
        self._lines = SeriesCache(FAMILY.__contains__)
        self._gate = asyncio.Semaphore(_PARALLEL)
        self._cached: _Cached | None = None

    async def read(self, target: TargetStatus, at: float) -> Reading:
        """Return the target's devices. Pages that are due are read first, within `TIMEOUT_S`."""
        urls = page_urls(self._settings.urls, target.pods)
        self._pages = {url: self._pages.get(url) or _Page() for url in urls}
        self._families.keep(urls)
        due = at - self._settings.interval_s + _SLACK_S
        await asyncio.gather(*(self._poll(url, page, at) for url, page in self._pages.items() if page.asked_at <= due))
        return self._reading(target, at)

    def report(self, target: TargetStatus) -> AttributionReport:
        """Return how the pages that were read last label workloads: for a check at start, after one `read`."""
        series = [one for page in self._pages.values() for one in page.series]
        return attribution_report(series, target.pods, target.namespace)

    async def close(self) -> None:
        """Close the session, unless it was passed in."""
        if self._owned is not None:
            await self._owned.close()
            self._owned = None

    def _reading(self, target: TargetStatus, at: float) -> Reading:
        """Return the reading of the pages at hand: the very one of before while neither pages nor pods changed."""
        oldest = at - self._settings.stale_after_s
        fresh = {url: page for url, page in self._pages.items() if page.read_at is not None and page.read_at >= oldest}
        key = (
            [(url, page.read_at) for url, page in fresh.items()],
            [(url, page.failure) for url, page in self._pages.items()],
            [(pod.name, pod.uid, pod.phase, pod.terminating) for pod in target.pods],
        )
        if self._cached is not None and self._cached.key == key:
            return self._cached.reading
        series = [one for page in fresh.values() for one in page.series]
        gpus, gaps = build_gpus(series, target.pods, target.namespace, source=self.name)
        reading = Reading(gpus=gpus, gaps=(*self._page_gaps(fresh), *self._families.gaps(), *gaps))
        self._cached = _Cached(key, reading)
        return reading

    def _page_gaps(self, fresh: Mapping[str, _Page]) -> tuple[Gap, ...]:
        """Return one gap per reason for pages that failed or grew stale."""
        trouble: dict[GapReason, list[str]] = {}
        for url, page in self._pages.items():
            if page.failure is not None:
                trouble.setdefault(page.failure.reason, []).append(f"{_place(url)} {page.failure.detail}".rstrip())
            if page.read_at is not None and url not in fresh:
                trouble.setdefault(GapReason.STALE, []).append(_place(url))
        gaps = GapList(self.name)
        for reason, places in trouble.items():
            gaps.add(WHOLE_PAGE, reason, detail=f"{len(places)} of {len(self._pages)} pages: {', '.join(places)}")
        for page in fresh.values():
            for name, lines in page.bad.items():
                gaps.add(_SCALE[FAMILY[name]][0].name, GapReason.PARSE_ERROR, detail=f"{lines} lines of {name}")
        return gaps.all()

    async def _poll(self, url: str, page: _Page, at: float) -> None:
        """Read one page into `page`, or note why it could not be."""
        page.asked_at = at
        async with self._gate:
            answer = await self._fetch(url)
        if isinstance(answer, bytes):
            parsed = parse_page(answer, self._lines)
            if parsed.keys:
                page.series, page.bad = tuple(parsed.series()), parsed.bad
                page.read_at, page.failure = self._clock.now(), None
                self._families.note(url, {key.name for key in parsed.keys} | set(parsed.bad))
                return
            wanted = GapReason.PARSE_ERROR if parsed.bad else GapReason.NO_FAMILIES
            answer = _Failure(wanted if answer.strip() else GapReason.EMPTY, "")
        page.failure = answer

    async def _fetch(self, url: str) -> bytes | _Failure:
        """Return the body, at most `MAX_BODY` long, or why there is none."""
        session = self._session or self._own_session()
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                session.get(url, headers={"Accept": "text/plain;version=0.0.4"}, allow_redirects=False) as response,
            ):
                if response.status in (401, 403):
                    return _Failure(GapReason.UNAUTHORIZED, f"HTTP {response.status}")
                if response.status != 200:
                    return _Failure(GapReason.HTTP_STATUS, f"HTTP {response.status}")
                body = bytearray()
                async for chunk in response.content.iter_chunked(2**16):
                    body += chunk
                    if len(body) > MAX_BODY:
                        return _Failure(GapReason.BODY_TOO_LARGE, f"over {MAX_BODY} bytes")
                return bytes(body)
        except TimeoutError:
            return _Failure(GapReason.TIMEOUT, f"over {TIMEOUT_S:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return _Failure(GapReason.UNREACHABLE, type(error).__name__)

    def _own_session(self) -> aiohttp.ClientSession:
        if self._owned is None:
            connector = aiohttp.TCPConnector(limit_per_host=2, ttl_dns_cache=30)
            self._owned = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self._owned


def page_urls(templates: Iterable[str], pods: Iterable[Pod]) -> tuple[str, ...]:
    """Return the pages to read: each template once, or once per node that runs a live pod when it names the node.

    Pods do not say their node's address, so `{node_ip}` becomes the node's name as well.
    """
    nodes = sorted({pod.node for pod in pods if is_live(pod) and pod.node})
    urls: dict[str, None] = {}
    for template in templates:
        if "{node}" in template or "{node_ip}" in template:
            urls |= dict.fromkeys(template.replace("{node}", node).replace("{node_ip}", node) for node in nodes)
        else:
            urls[template] = None
    return tuple(urls)


def _place(url: str) -> str:
    """Return host and port of a URL: what may be shown, as a URL can carry credentials."""
    try:
        parsed = URL(url)
    except ValueError:
        return "a malformed URL"
    return f"{parsed.host}:{parsed.port}"
