"""GPU readings of this machine's own cards through NVML: for a single node without an exporter.

Needs `nvidia-ml-py` (the extra `nvml`), the driver's library, and, to tell whose a card is, the host's process ids and
`/proc`. NVML's calls block, for ever on a sick card, so they run in a thread of their own, one sweep at a time.
"""

import asyncio
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from autoscaler.core.policy import NvmlSignals
from autoscaler.core.signals import GPU_SIGNAL
from autoscaler.core.types import WHOLE_PAGE, Attribution, GapReason, Gpu, Pod, Reading, TargetStatus
from autoscaler.errors import SourceError
from autoscaler.ports import Clock
from autoscaler.sources.dcgm import GapList, believable, is_live

Handle = Any
T = TypeVar("T")

HOLD_S = 15.0
"""How long a value stands in for one that NVML refuses just now."""
BACKOFF_S = 60.0
"""The longest pause before a refused call is tried again."""
RESTART_S = 30.0
"""The pause after NVML could not be started."""


class Code(IntEnum):
    """NVML's return codes that mean something here."""

    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18
    ARGUMENT_VERSION_MISMATCH = 25
    UNKNOWN = 999


_STOPPED = (Code.UNINITIALIZED, Code.DRIVER_NOT_LOADED, Code.LIBRARY_NOT_FOUND, Code.LIB_RM_VERSION_MISMATCH)
_ABSENT = (Code.NOT_SUPPORTED, Code.FUNCTION_NOT_FOUND, Code.ARGUMENT_VERSION_MISMATCH)
_LOST = (Code.GPU_IS_LOST, Code.RESET_REQUIRED, Code.UNKNOWN)
_CHANGED = (Code.NOT_FOUND, Code.INVALID_ARGUMENT)
_REASON: Mapping[int, GapReason] = {
    **dict.fromkeys(_STOPPED, GapReason.NOT_LOADED),
    **dict.fromkeys(_ABSENT, GapReason.NOT_SUPPORTED),
    **dict.fromkeys(_LOST, GapReason.DEVICE_LOST),
}


class NvmlError(SourceError):
    """A call of NVML failed with `code`. What is not in the table above counts as passing: `TRANSIENT`."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__("nvml", _REASON.get(code, GapReason.TRANSIENT), detail)
        self.code = code


class Usage(NamedTuple):
    """A card's memory in bytes."""

    used: float
    free: float


class Process(NamedTuple):
    """A process on a card: its host pid, its bytes (None when NVML does not say), its pod ("" for no pod)."""

    pid: int
    memory: float | None
    pod_uid: str = ""


class Library(Protocol):
    """The calls of NVML that are used. Each raises NvmlError; handles are the library's own."""

    def start(self) -> None:
        """Initialise the library."""

    def stop(self) -> None:
        """Release the library."""

    def count(self) -> int:
        """Return the number of cards."""
        ...

    def card(self, index: int) -> Handle:
        """Return one card."""
        ...

    def uuid(self, card: Handle) -> str:
        """Return a card's UUID."""
        ...

    def mig(self, card: Handle) -> bool:
        """Tell whether the card is cut into instances."""
        ...

    def slots(self, card: Handle) -> int:
        """Return how many MIG devices a card may have; some slots may be empty."""
        ...

    def slot(self, card: Handle, index: int) -> Handle:
        """Return one MIG device. NOT_FOUND for an empty slot."""
        ...

    def instance(self, mig_device: Handle) -> int:
        """Return the id of the MIG device's GPU instance."""
        ...

    def memory(self, device: Handle) -> Usage:
        """Return the memory, reserved memory in neither part."""
        ...

    def memory_v1(self, device: Handle) -> Usage:
        """Return the memory as drivers before 510 tell it: reserved memory counts as used."""
        ...

    def utilization(self, device: Handle) -> float:
        """Return the percentage of time in which any kernel ran."""
        ...

    def processes(self, device: Handle) -> Sequence[Process]:
        """Return the compute processes, with host pids."""
        ...


class PynvmlLibrary:
    """NVML by `nvidia-ml-py`."""

    def __init__(self, module: Any) -> None:
        self._nvml = module

    def _call(self, name: str, *arguments: Any, **more: Any) -> Any:
        try:
            return getattr(self._nvml, name)(*arguments, **more)
        except self._nvml.NVMLError as error:
            raise NvmlError(error.value, f"{name}: {error}") from error

    def start(self) -> None:
        """Load and initialise the library."""
        self._call("nvmlInit")

    def stop(self) -> None:
        """Release the library."""
        self._call("nvmlShutdown")

    def count(self) -> int:
        """Return the number of cards."""
        return int(self._call("nvmlDeviceGetCount"))

    def card(self, index: int) -> Handle:
        """Return one card."""
        return self._call("nvmlDeviceGetHandleByIndex", index)

    def uuid(self, card: Handle) -> str:
        """Return a card's UUID."""
        return str(self._call("nvmlDeviceGetUUID", card))

    def mig(self, card: Handle) -> bool:
        """Tell whether the card is cut into instances now; a pending change does not count."""
        current, _pending = self._call("nvmlDeviceGetMigMode", card)
        return bool(current)

    def slots(self, card: Handle) -> int:
        """Return how many MIG devices a card may have."""
        return int(self._call("nvmlDeviceGetMaxMigDeviceCount", card))

    def slot(self, card: Handle, index: int) -> Handle:
        """Return one MIG device."""
        return self._call("nvmlDeviceGetMigDeviceHandleByIndex", card, index)

    def instance(self, mig_device: Handle) -> int:
        """Return the id of the MIG device's GPU instance."""
        return int(self._call("nvmlDeviceGetGpuInstanceId", mig_device))

    def memory(self, device: Handle) -> Usage:
        """Return the memory, by version 2 of the structure."""
        found = self._call("nvmlDeviceGetMemoryInfo", device, version=self._nvml.nvmlMemory_v2)
        return Usage(float(found.used), float(found.free))

    def memory_v1(self, device: Handle) -> Usage:
        """Return the memory, by version 1."""
        found = self._call("nvmlDeviceGetMemoryInfo", device)
        return Usage(float(found.used), float(found.free))

    def utilization(self, device: Handle) -> float:
        """Return the percentage of time in which any kernel ran."""
        return float(self._call("nvmlDeviceGetUtilizationRates", device).gpu)

    def processes(self, device: Handle) -> Sequence[Process]:
        """Return the compute processes.

        By the versioned call: the other one hides a missing symbol behind an error of another kind.
        """
        found = self._call("nvmlDeviceGetComputeRunningProcesses_v3", device)
        return [Process(one.pid, None if one.usedGpuMemory is None else float(one.usedGpuMemory)) for one in found]


def load_library() -> Library:
    """Return NVML by `nvidia-ml-py`. Raises NvmlError when that is not installed."""
    try:
        import pynvml
    except ImportError as error:
        detail = "nvidia-ml-py is not installed: install vllm-autoscaler[nvml]"
        raise NvmlError(Code.LIBRARY_NOT_FOUND, detail) from error
    return PynvmlLibrary(pynvml)


# `pod<uid>` in a cgroup path: dashes (cgroupfs), underscores (systemd), or 32 digits (static pods).
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?![0-9a-f])")


def pod_uid_of(cgroup: str) -> str:
    """Return the uid of the pod that the text of a `/proc/PID/cgroup` names; "" when it names none."""
    for line in cgroup.splitlines():
        match = _POD.search(line.split(":", 2)[-1])
        if match:
            return match[1].replace("_", "-")
    return ""


@dataclass(frozen=True, slots=True)
class Field(Generic[T]):
    """One field of one card: its value, None when unknown; and why it is missing or old."""

    value: T | None = None
    reason: GapReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One card or MIG instance, as NVML tells it.

    Args:
        uuid, instance: identity, as DCGM's: the parent card's UUID, and the GPU instance id.
        used, free: bytes.
        utilization: ratio.
    """

    uuid: str
    instance: str = ""
    used: Field[float]
    free: Field[float]
    utilization: Field[float]
    processes: Field[tuple[Process, ...]]


def _believed(signal: str, raw: Field[float], scale: float = 1.0) -> Field[float]:
    """Return the field in its signal's base unit, without its value when that is not believed."""
    if raw.value is None:
        return raw
    value = believable(GPU_SIGNAL[signal], raw.value, scale)
    return Field(reason=value) if isinstance(value, GapReason) else Field(value, raw.reason)


@dataclass(slots=True)
class Sweep:
    """What one round over the cards has found so far; the thread writes it, and nobody else.

    Args:
        at: what the card in hand is called.
        lost: cards that could not be read: why, and which.
        error: what ended the round early.
    """

    at: str = ""
    cards: list[Card] = field(default_factory=list)
    lost: list[tuple[GapReason, str]] = field(default_factory=list)
    error: NvmlError | None = None


@dataclass(slots=True)
class _Memo:
    """What is remembered of one field of one card between rounds."""

    absent: bool = False
    value: Any = None
    read_at: float = 0.0
    failures: int = 0
    retry_at: float = 0.0

    def held(self, now: float) -> Any:
        """Return the last value while it is young enough, else None."""
        return self.value if now - self.read_at <= HOLD_S else None


class CardReader:
    """Reads all cards, synchronously. Not for more than one thread at a time."""

    def __init__(self, load: Callable[[], Library], cgroup_root: Path) -> None:
        self._load = load
        self._cgroup_root = cgroup_root
        self._library: Library | None = None
        self._start_at = 0.0
        self._start_failed = ""
        self._memory_v2 = True
        self._memos: dict[tuple[str, str, str], _Memo] = {}

    def sweep(self, found: Sweep, now: float) -> None:
        """Read every card into `found`. When the cards changed under it, start over, once.

        After a failed start NVML is tried again after `RESTART_S`; after it stopped, at the next round.
        """
        try:
            library = self._started(now)
            if not self._read_cards(library, found, now, again=False):
                found.cards.clear()
                found.lost.clear()
                self._read_cards(library, found, now, again=True)
        except NvmlError as error:
            found.error = error
            if error.code in _STOPPED:
                self._library = None

    def stop(self) -> None:
        """Release the library."""
        library, self._library = self._library, None
        if library is not None:
            with suppress(NvmlError):  # it is given up in any case
                library.stop()

    def _started(self, now: float) -> Library:
        """Return the running library. Raises NvmlError."""
        if self._library is not None:
            return self._library
        if self._start_failed and now < self._start_at:
            raise NvmlError(Code.LIBRARY_NOT_FOUND, self._start_failed)
        try:
            library = self._load()
            library.start()
        except NvmlError as error:
            self._start_failed, self._start_at = error.detail, now + RESTART_S
            raise NvmlError(Code.LIBRARY_NOT_FOUND, error.detail) from error
        self._library, self._start_failed, self._memory_v2 = library, "", True
        self._memos.clear()
        return library

    def _read_cards(self, library: Library, found: Sweep, now: float, *, again: bool) -> bool:
        """Read the cards one by one, past those that fail. False when they changed meanwhile, unless `again`."""
        for index in range(library.count()):
            found.at = f"card {index}"
            try:
                self._read_card(library, index, found, now)
            except NvmlError as error:
                if error.code in _STOPPED:
                    raise
                if error.code in _CHANGED and not again:
                    return False
                found.lost.append((GapReason(error.reason), f"{found.at} ({error.detail})"))
        return True

    def _read_card(self, library: Library, index: int, found: Sweep, now: float) -> None:
        """Read one card: itself, or its MIG devices, which stand in slots with holes between them."""
        card = library.card(index)
        found.at = uuid = library.uuid(card)
        mig = self._field((uuid, "", "mig"), partial(library.mig, card), now)
        if mig.value is None and mig.reason is not GapReason.NOT_SUPPORTED:
            found.lost.append((GapReason.TRANSIENT, f"{uuid} (MIG mode)"))
            return
        if not mig.value:
            found.cards.append(self._read_device(library, card, uuid, "", now))
            return
        for slot in range(library.slots(card)):
            try:
                device = library.slot(card, slot)
            except NvmlError as error:
                if error.code != Code.NOT_FOUND:
                    raise
                continue
            found.cards.append(self._read_device(library, device, uuid, str(library.instance(device)), now))

    def _read_device(self, library: Library, device: Handle, uuid: str, instance: str, now: float) -> Card:
        memory = self._field((uuid, instance, "memory"), partial(self._memory, library, device), now)
        busy = self._field((uuid, instance, "utilization"), partial(library.utilization, device), now)
        used, free = memory.value or (None, None)
        return Card(
            uuid=uuid,
            instance=instance,
            used=_believed("memory_used", Field(used, memory.reason)),
            free=_believed("memory_free", Field(free, memory.reason)),
            utilization=_believed("gpu_utilization", busy, scale=0.01),
            processes=self._field((uuid, instance, "processes"), partial(self._processes, library, device), now),
        )

    def _memory(self, library: Library, device: Handle) -> Usage:
        """Return the memory by the newest version that the driver knows."""
        if self._memory_v2:
            try:
                return library.memory(device)
            except NvmlError as error:
                if error.code not in _ABSENT:
                    raise
                self._memory_v2 = error.code == Code.NOT_SUPPORTED
        return library.memory_v1(device)

    def _processes(self, library: Library, device: Handle) -> tuple[Process, ...]:
        return tuple(
            Process(one.pid, _believed("memory_used", Field(one.memory)).value, self._pod_uid(one.pid))
            for one in library.processes(device)
        )

    def _pod_uid(self, pid: int) -> str:
        """Return the uid of a process' pod; "" when it ended, may not be looked at, or is in none."""
        try:
            return pod_uid_of((self._cgroup_root / str(pid) / "cgroup").read_text(encoding="utf-8", errors="replace"))
        except OSError:
            return ""

    def _field(self, key: tuple[str, str, str], call: Callable[[], T], now: float) -> Field[T]:
        """Return one field. Raises NvmlError for what concerns more than this field.

        A field that the card does not have is not asked for again. After a refusal (no permission, timeout, a list that
        grew) the last value stands for `HOLD_S`, and the call rests for 2, 4, ... `BACKOFF_S` seconds.
        """
        memo = self._memos.setdefault(key, _Memo())
        if memo.absent:
            return Field(reason=GapReason.NOT_SUPPORTED)
        if now < memo.retry_at:
            return Field(memo.held(now), GapReason.TRANSIENT)
        try:
            value = call()
        except NvmlError as error:
            if error.code in _ABSENT:
                memo.absent = True
                return Field(reason=GapReason.NOT_SUPPORTED)
            if error.code in _STOPPED + _LOST + _CHANGED:
                raise
            memo.failures += 1
            memo.retry_at = now + min(2.0**memo.failures, BACKOFF_S)
            return Field(memo.held(now), GapReason.TRANSIENT)
        self._memos[key] = _Memo(value=value, read_at=now)
        return Field(value)


class NvmlSource:
    """Reads this machine's cards each tick. What it cannot tell: Xid codes, which NVML gives to listeners only."""

    name = "nvml"

    def __init__(
        self,
        settings: NvmlSignals,
        clock: Clock,
        *,
        cgroup_root: Path = Path("/proc"),
        load: Callable[[], Library] = load_library,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._reader = CardReader(load, cgroup_root)
        self._sweep = Sweep()
        self._running: Future[None] | None = None

    async def read(self, target: TargetStatus, at: float) -> Reading:
        """Return the cards of the target's live pods on this machine, within `settings.timeout_s`.

        While a call of an earlier tick still hangs, nothing is known and no further call is made.
        """
        gaps = GapList(self.name)
        if self._running is not None and not self._running.done():
            _note_hanging(self._sweep, gaps, self._settings.timeout_s)
            return Reading(gaps=gaps.all())
        sweep = self._sweep = Sweep()
        self._running = _in_thread(partial(self._reader.sweep, sweep, self._clock.now()))
        in_time = await self._wait(self._running)
        if in_time:
            _note_failures(sweep, gaps)
        else:
            _note_hanging(sweep, gaps, self._settings.timeout_s)
        gpus = attribute_cards(list(sweep.cards), target.pods, gaps, single_pod=self._settings.single_pod)
        return Reading(gpus=gpus, gaps=gaps.all())

    async def close(self) -> None:
        """Release the library, unless a call still hangs in it."""
        if self._running is None or await self._wait(self._running):
            await self._wait(_in_thread(self._reader.stop))

    async def _wait(self, job: Future[None]) -> bool:
        """Tell whether the job ended in time."""
        try:
            await asyncio.wait_for(asyncio.wrap_future(job), self._settings.timeout_s)
        except TimeoutError:
            return False
        return True


def _in_thread(call: Callable[[], None]) -> Future[None]:
    """Return the future of a call in a thread of its own.

    The thread is a daemon: a call that never returns would keep an executor, and so the process, from ending.
    """
    job: Future[None] = Future()
    job.set_running_or_notify_cancel()

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            job.set_exception(error)
        else:
            job.set_result(None)

    threading.Thread(target=run, name="nvml", daemon=True).start()
    return job


def _note_hanging(sweep: Sweep, gaps: GapList, timeout_s: float) -> None:
    """Note the card that gives no answer, and so keeps those after it from being read."""
    if sweep.at:
        detail = f"{sweep.at}: no answer within {timeout_s:g} s, cards after it were not read"
        gaps.add(WHOLE_PAGE, GapReason.DEVICE_LOST, detail=detail)
    else:
        gaps.add(WHOLE_PAGE, GapReason.TIMEOUT, detail=f"NVML did not start within {timeout_s:g} s")


def _note_failures(sweep: Sweep, gaps: GapList) -> None:
    """Note what a round failed to read."""
    if sweep.error is not None:
        gaps.add(WHOLE_PAGE, GapReason(sweep.error.reason), detail=sweep.error.detail)
    elif not sweep.cards and not sweep.lost:
        gaps.add(WHOLE_PAGE, GapReason.EMPTY, detail="NVML knows no cards")
    lost: dict[GapReason, list[str]] = {}
    for reason, card in sweep.lost:
        lost.setdefault(reason, []).append(card)
    for reason, which in lost.items():
        gaps.add(WHOLE_PAGE, reason, detail=", ".join(which))


def attribute_cards(
    cards: Sequence[Card], pods: Sequence[Pod], gaps: GapList, *, single_pod: bool = False
) -> tuple[Gpu, ...]:
    """Return the cards of the target's live pods, by the processes on them; what is missing goes to `gaps`.

    Args:
        single_pod: when no process can be mapped to a pod, all cards are the target's only live pod's.
    """
    cards = _merged(cards)
    users = [_users(card) for card in cards]
    live = {pod.uid: pod for pod in pods if is_live(pod)}
    if single_pod and cards and not any(pod_uid for on_card in users for pod_uid in on_card):
        if len(live) == 1:
            (only,) = live.values()
            return tuple(_gpu(card, only, {only.uid: None}, gaps) for card in cards)
        detail = f"singlePod is set, and the target has {len(live)} live pods"
        gaps.add(WHOLE_PAGE, GapReason.AMBIGUOUS_RESULT, detail=detail)
        return ()
    dead = {pod.uid: pod for pod in pods if not is_live(pod)}
    gpus: list[Gpu] = []
    for card, on_card in zip(cards, users, strict=True):
        for uid in on_card.keys() & dead.keys():
            gaps.add(WHOLE_PAGE, GapReason.POD_NOT_LIVE, dead[uid].name, f"still has processes on {card.uuid}")
        if card.processes.reason is not None:
            gaps.add(WHOLE_PAGE, card.processes.reason, detail=f"processes of {card.uuid}")
        counted = {uid: memory for uid, memory in on_card.items() if uid not in dead}
        gpus += [_gpu(card, live[uid], counted, gaps) for uid in sorted(counted.keys() & live.keys())]
    if cards and not gpus:
        _note_unattributed(cards, users, gaps)
    return tuple(gpus)


def _note_unattributed(cards: Sequence[Card], users: Iterable[Mapping[str, float | None]], gaps: GapList) -> None:
    """Note that no card is the target's: no process is any pod's, or all are other pods'."""
    pod_uids = {uid for on_card in users for uid in on_card} - {""}
    count = sum(len(card.processes.value or ()) for card in cards)
    if pod_uids:
        detail = f"{count} processes on {len(cards)} cards, none of the target's pods"
        gaps.add(WHOLE_PAGE, GapReason.FILTER_MATCHED_NOTHING, detail=detail)
    else:
        detail = f"{count} processes on {len(cards)} cards, none in a pod: needs hostPID and /proc, or singlePod"
        gaps.add(WHOLE_PAGE, GapReason.NO_POD_LABEL, detail=detail)


def _merged(cards: Iterable[Card]) -> list[Card]:
    """Return the cards by identity, the compute instances of one GPU instance as one card with all their processes."""
    merged: dict[tuple[str, str], Card] = {}
    for card in cards:
        first = merged.get((card.uuid, card.instance))
        if first is not None:
            both = (*(first.processes.value or ()), *(card.processes.value or ()))
            card = replace(first, processes=Field(both, first.processes.reason or card.processes.reason))
        merged[card.uuid, card.instance] = card
    return [merged[key] for key in sorted(merged)]


def _users(card: Card) -> dict[str, float | None]:
    """Return each pod's bytes on the card by its uid ("" for processes in no pod); None when one is not told."""
    users: dict[str, float | None] = {}
    for process in card.processes.value or ():
        sofar = users.get(process.pod_uid, 0.0)
        users[process.pod_uid] = None if sofar is None or process.memory is None else sofar + process.memory
    return users


def _gpu(card: Card, pod: Pod, users: Mapping[str, float | None], gaps: GapList) -> Gpu:
    """Return the card as one of its `users` sees it."""
    named = {"memory_used": card.used, "memory_free": card.free, "gpu_utilization": card.utilization}
    for signal, one in named.items():
        if one.reason is not None:
            gaps.add(signal, one.reason, pod.name, card.uuid)
    used, free = card.used.value, card.free.value
    if used == 0.0 and free == 0.0:
        gaps.add("memory_used", GapReason.ZERO_TOTAL, pod.name, f"used + free is 0 on {card.uuid}")
        used = free = None
    shared, own = len(users) > 1, users[pod.uid]
    attribution = Attribution.EXCLUSIVE
    if shared:
        attribution = Attribution.DEVICE_ONLY if own is None else Attribution.PER_PROCESS
        if own is None:
            gaps.add("memory_used", GapReason.SHARED_DEVICE, pod.name, f"no own share of {card.uuid} can be told")
    return Gpu(
        uuid=card.uuid,
        instance=card.instance,
        pod_uid=pod.uid,
        attribution=attribution,
        shared=shared,
        memory_used=used,
        memory_free=free,
        pod_memory_used=own if shared else used,
        utilization=card.utilization.value,
    )
