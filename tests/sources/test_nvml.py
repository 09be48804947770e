"""NVML: whose cards they are, and what each error means, by a fake of the library; `nvml_stub` tests the real calls."""

import asyncio
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoscaler.core.policy import NvmlSignals
from autoscaler.core.types import WHOLE_PAGE, Attribution, Gap, GapReason, Pod, PodPhase, Reading, TargetStatus
from autoscaler.sources import nvml
from autoscaler.sources.dcgm import build_gpus
from autoscaler.sources.exposition import Series
from autoscaler.sources.nvml import Code, Handle, NvmlError, NvmlSource, Process, Usage, pod_uid_of

MIB = 2**20

UID_A = "aaaaaaaa-0000-4000-8000-000000000000"
UID_B = "bbbbbbbb-0000-4000-8000-000000000000"
OTHER = "cccccccc-0000-4000-8000-000000000000"
POD_A, POD_B = Pod(name="chat-a", uid=UID_A), Pod(name="chat-b", uid=UID_B)
TARGET = TargetStatus(namespace="serving", name="chat", current_replicas=2, pods=(POD_A, POD_B))


class HandClock:
    """A fake clock that moves only by hand; it cannot sleep."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    async def sleep_until(self, at: float) -> None:
        raise NotImplementedError


class FakeCard:
    """A card or MIG device of the fake library: 80 GiB, 1 GiB of it reserved, half of the time busy."""

    def __init__(self, uuid: str, *pids: int, instance: int = -1, slots: Sequence["FakeCard | None"] = ()) -> None:
        self.uuid = uuid
        self.instance = instance
        self.slots = slots
        self.used = 60.0 * 1024 * MIB
        self.busy = 50.0
        self.processes = [Process(pid, 1000.0 * MIB) for pid in pids]


class FakeLibrary:
    """A fake of `Library`, in memory. It has no driver, forgets nothing, and fails or blocks only where told to.

    Args:
        fail: method, or method and UUID, to the code that it raises.
        hang: while it is cleared, every read of memory blocks.
    """

    def __init__(self, *cards: FakeCard) -> None:
        self.cards = list(cards)
        self.fail: dict[str | tuple[str, str], int] = {}
        self.calls: list[str] = []
        self.hang = threading.Event()
        self.hang.set()

    def _called(self, name: str, card: FakeCard | None = None) -> None:
        self.calls.append(name)
        code = self.fail.get(name, self.fail.get((name, card.uuid), 0) if card else 0)
        if code:
            raise NvmlError(code, f"{name} failed")

    def start(self) -> None:
        self._called("start")

    def stop(self) -> None:
        self._called("stop")

    def count(self) -> int:
        self._called("count")
        return len(self.cards)

    def card(self, index: int) -> Handle:
        self._called("card", self.cards[index])
        return self.cards[index]

    def uuid(self, card: Handle) -> str:
        return str(card.uuid)

    def mig(self, card: Handle) -> bool:
        self._called("mig", card)
        if not card.slots:
            raise NvmlError(Code.NOT_SUPPORTED, "no MIG here")
        return True

    def slots(self, card: Handle) -> int:
        return len(card.slots)

    def slot(self, card: Handle, index: int) -> Handle:
        if card.slots[index] is None:
            raise NvmlError(Code.NOT_FOUND, "a hole")
        return card.slots[index]

    def instance(self, mig_device: Handle) -> int:
        return int(mig_device.instance)

    def memory(self, device: Handle) -> Usage:
        self.hang.wait()
        self._called("memory", device)
        return Usage(device.used, 79.0 * 1024 * MIB - device.used)

    def memory_v1(self, device: Handle) -> Usage:
        self._called("memory_v1", device)
        return Usage(device.used + 1024.0 * MIB, 79.0 * 1024 * MIB - device.used)

    def utilization(self, device: Handle) -> float:
        self._called("utilization", device)
        if device.instance >= 0:
            raise NvmlError(Code.NOT_SUPPORTED, "not for instances")
        return float(device.busy)

    def processes(self, device: Handle) -> Sequence[Process]:
        self._called("processes", device)
        return list(device.processes)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A folder like /proc: 11 and 12 are chat-a's, 21 is chat-b's, 31 another pod's, 41 the host's, 51 has ended."""
    for pid, line in {
        11: f"0::/kubepods/burstable/pod{UID_A}/{'1' * 64}",
        12: f"0::/kubepods/burstable/pod{UID_A}/{'2' * 64}",
        21: f"0::/kubepods.slice/kubepods-pod{UID_B.replace('-', '_')}.slice/cri-containerd-{'3' * 64}.scope",
        31: f"0::/kubepods/pod{OTHER}/{'4' * 64}",
        41: "0::/system.slice/nvidia-persistenced.service",
    }.items():
        (tmp_path / "proc" / str(pid)).mkdir(parents=True)
        (tmp_path / "proc" / str(pid) / "cgroup").write_text(line + "\n")
    return tmp_path / "proc"


async def read(library: FakeLibrary, proc: Path, target: TargetStatus = TARGET, **settings: Any) -> Reading:
    source = NvmlSource(NvmlSignals(**settings), HandClock(), cgroup_root=proc, load=lambda: library)
    reading = await source.read(target, 0.0)
    await source.close()
    return reading


def reasons(gaps: tuple[Gap, ...]) -> set[tuple[str, GapReason, str]]:
    return {(gap.signal, gap.reason, gap.pod) for gap in gaps}


def owners(reading: Reading) -> list[tuple[str, str, str]]:
    return [(gpu.uuid, gpu.instance, gpu.pod_uid) for gpu in reading.gpus]


# --- processes and pods ---


@pytest.mark.parametrize(
    ("text", "uid"),
    [
        pytest.param(
            f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_A.replace('-', '_')}.slice/"
            f"cri-containerd-{'0' * 64}.scope\n",
            UID_A,
            id="v2-systemd-containerd",
        ),
        pytest.param(
            f"0::/kubepods.slice/kubepods-pod{UID_A.replace('-', '_')}.slice/crio-{'0' * 64}.scope/container\n",
            UID_A,
            id="v2-systemd-crio",
        ),
        pytest.param(
            f"12:hugetlb:/kubepods/besteffort/pod{UID_A}/{'0' * 64}\n1:name=systemd:/\n", UID_A, id="v1-cgroupfs"
        ),
        pytest.param(
            f"4:cpu,cpuacct:/system.slice/kubepods-pod{UID_A.replace('-', '_')}.slice:cri-containerd:{'0' * 64}\n",
            UID_A,
            id="v1-with-colons-in-the-path",
        ),
        pytest.param(f"0::/kubepods/pod{'0123456789abcdef' * 2}/{'0' * 64}\n", "0123456789abcdef" * 2, id="static"),
        pytest.param(f"0::/../../kubepods-pod{UID_A.replace('-', '_')}.slice\n", UID_A, id="private-namespace"),
        pytest.param(f"0::/kubelet/kubepods/pod{UID_A}/{'0' * 64}\n", UID_A, id="kind-nested"),
        pytest.param("0::/\n", "", id="own-namespace"),
        pytest.param("0::/system.slice/docker.service\n", "", id="host-service"),
        pytest.param(f"0::/machine.slice/libpod-{'0' * 64}.scope\n", "", id="podman"),
        pytest.param(f"0::/kubepods/pod{'0' * 33}/x\n", "", id="too-long"),
        pytest.param("", "", id="empty"),
    ],
)
def test_pod_of_a_cgroup(text: str, uid: str) -> None:
    assert pod_uid_of(text) == uid


async def test_cards_are_their_processes_pods(proc: Path) -> None:
    reading = await read(FakeLibrary(FakeCard("GPU-1", 11, 12), FakeCard("GPU-2", 21), FakeCard("GPU-3", 31)), proc)
    assert owners(reading) == [("GPU-1", "", UID_A), ("GPU-2", "", UID_B)]
    assert reading.gaps == ()
    first = reading.gpus[0]
    assert (first.memory_used, first.memory_free) == (60.0 * 1024 * MIB, 19.0 * 1024 * MIB)
    assert (first.utilization, first.attribution, first.shared) == (0.5, Attribution.EXCLUSIVE, False)
    assert first.pod_memory_used == first.memory_used


@pytest.mark.parametrize(
    ("pids", "shared", "attribution", "own"),
    [
        pytest.param((11, 12), False, Attribution.EXCLUSIVE, 60.0 * 1024, id="alone"),
        pytest.param((11, 12, 31), True, Attribution.PER_PROCESS, 2000.0, id="beside-another-pod"),
        pytest.param((11, 21), True, Attribution.PER_PROCESS, 1000.0, id="beside-our-own"),
        pytest.param((11, 41), True, Attribution.PER_PROCESS, 1000.0, id="beside-the-host"),
        pytest.param((11, 51), True, Attribution.PER_PROCESS, 1000.0, id="beside-one-that-ended"),
    ],
)
async def test_sharing_a_card(
    proc: Path, pids: tuple[int, ...], shared: bool, attribution: Attribution, own: float
) -> None:
    reading = await read(FakeLibrary(FakeCard("GPU-1", *pids)), proc)
    gpu = next(gpu for gpu in reading.gpus if gpu.pod_uid == UID_A)
    assert (gpu.shared, gpu.attribution, gpu.pod_memory_used) == (shared, attribution, own * MIB)
    assert gpu.memory_used == 60.0 * 1024 * MIB


@pytest.mark.parametrize(
    "memory",
    [pytest.param(None, id="not-told"), pytest.param(float(2**64 - 1), id="not-available")],
)
async def test_process_memory_that_is_not_told_is_unknown(proc: Path, memory: float | None) -> None:
    card = FakeCard("GPU-1", 11, 12, 31)
    card.processes[0] = Process(11, memory)
    reading = await read(FakeLibrary(card), proc)
    assert [(gpu.attribution, gpu.pod_memory_used) for gpu in reading.gpus] == [(Attribution.DEVICE_ONLY, None)]
    assert reasons(reading.gaps) == {("memory_used", GapReason.SHARED_DEVICE, "chat-a")}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"terminating": True}, id="terminating"),
        pytest.param({"phase": PodPhase.FAILED}, id="failed"),
    ],
)
async def test_c013_processes_of_a_pod_that_is_not_live_count_for_nobody(proc: Path, change: dict[str, Any]) -> None:
    target = replace(TARGET, pods=(replace(POD_A, **change), POD_B))
    reading = await read(FakeLibrary(FakeCard("GPU-1", 11, 21), FakeCard("GPU-2", 12)), proc, target)
    assert owners(reading) == [("GPU-1", "", UID_B)]
    assert not reading.gpus[0].shared
    assert reasons(reading.gaps) == {(WHOLE_PAGE, GapReason.POD_NOT_LIVE, "chat-a")}


@pytest.mark.parametrize(
    ("pids", "reason"),
    [
        pytest.param((41, 51), GapReason.NO_POD_LABEL, id="no-pods-at-all"),
        pytest.param((31, 41), GapReason.FILTER_MATCHED_NOTHING, id="only-other-pods"),
    ],
)
async def test_cards_of_nobody_are_a_gap(proc: Path, pids: tuple[int, ...], reason: GapReason) -> None:
    reading = await read(FakeLibrary(FakeCard("GPU-1", *pids)), proc)
    assert reading.gpus == ()
    assert reasons(reading.gaps) == {(WHOLE_PAGE, reason, "")}


async def test_machine_without_cards_is_a_gap(proc: Path) -> None:
    reading = await read(FakeLibrary(), proc)
    assert (reading.gpus, reasons(reading.gaps)) == ((), {(WHOLE_PAGE, GapReason.EMPTY, "")})


async def test_single_pod_takes_every_card_when_no_process_names_a_pod(proc: Path) -> None:
    library = FakeLibrary(FakeCard("GPU-1", 41), FakeCard("GPU-2"))
    reading = await read(library, proc, replace(TARGET, pods=(POD_A,)), single_pod=True)
    assert owners(reading) == [("GPU-1", "", UID_A), ("GPU-2", "", UID_A)]
    assert {(gpu.attribution, gpu.shared) for gpu in reading.gpus} == {(Attribution.EXCLUSIVE, False)}


async def test_single_pod_does_not_overrule_processes(proc: Path) -> None:
    library = FakeLibrary(FakeCard("GPU-1", 11), FakeCard("GPU-2", 31))
    reading = await read(library, proc, replace(TARGET, pods=(POD_A,)), single_pod=True)
    assert owners(reading) == [("GPU-1", "", UID_A)]


async def test_single_pod_of_two_pods_is_ambiguous(proc: Path) -> None:
    reading = await read(FakeLibrary(FakeCard("GPU-1", 41)), proc, single_pod=True)
    assert (reading.gpus, reasons(reading.gaps)) == ((), {(WHOLE_PAGE, GapReason.AMBIGUOUS_RESULT, "")})


# --- MIG ---


async def test_c012_mig_instances_are_apart_and_holes_are_skipped(proc: Path) -> None:
    slots = [FakeCard("MIG-x", 11, instance=3), None, FakeCard("MIG-y", 31, instance=4)]
    reading = await read(FakeLibrary(FakeCard("GPU-1", slots=slots)), proc)
    assert owners(reading) == [("GPU-1", "3", UID_A)]
    assert not reading.gpus[0].shared


async def test_c005_mig_utilization_is_unknown(proc: Path) -> None:
    reading = await read(FakeLibrary(FakeCard("GPU-1", slots=[FakeCard("MIG-x", 11, instance=3)])), proc)
    assert [gpu.utilization for gpu in reading.gpus] == [None]
    assert reasons(reading.gaps) == {("gpu_utilization", GapReason.NOT_SUPPORTED, "chat-a")}


async def test_compute_instances_of_one_instance_are_one_device(proc: Path) -> None:
    slots = [FakeCard("MIG-x", 11, instance=3), FakeCard("MIG-y", 31, instance=3)]
    reading = await read(FakeLibrary(FakeCard("GPU-1", slots=slots)), proc)
    assert [(gpu.instance, gpu.shared, gpu.pod_memory_used) for gpu in reading.gpus] == [("3", True, 1000.0 * MIB)]


async def test_card_whose_mig_mode_is_not_told_is_left_out(proc: Path) -> None:
    library = FakeLibrary(FakeCard("GPU-1", 11), FakeCard("GPU-2", 21))
    library.fail["mig", "GPU-1"] = Code.TIMEOUT
    reading = await read(library, proc)
    assert owners(reading) == [("GPU-2", "", UID_B)]
    assert reasons(reading.gaps) == {(WHOLE_PAGE, GapReason.TRANSIENT, "")}


# --- values ---


@pytest.mark.parametrize(
    ("used", "reason"),
    [
        pytest.param(float(2**64 - 1), GapReason.DCGM_BLANK, id="not-available"),
        pytest.param(-1.0, GapReason.OUT_OF_RANGE, id="negative"),
        pytest.param(float("nan"), GapReason.NON_FINITE, id="nan"),
    ],
)
async def test_odd_memory_is_unknown(proc: Path, used: float, reason: GapReason) -> None:
    card = FakeCard("GPU-1", 11)
    card.used = used
    reading = await read(FakeLibrary(card), proc)
    assert [(gpu.memory_used, gpu.utilization) for gpu in reading.gpus] == [(None, 0.5)]
    assert ("memory_used", reason, "chat-a") in reasons(reading.gaps)


async def test_zero_total_is_unknown(proc: Path) -> None:
    class NoMemory(FakeLibrary):
        """A fake whose cards have no memory of their own."""

        def memory(self, device: Handle) -> Usage:
            return Usage(0.0, 0.0)

    reading = await read(NoMemory(FakeCard("GPU-1", 11)), proc)
    assert [(gpu.memory_used, gpu.memory_free) for gpu in reading.gpus] == [(None, None)]
    assert reasons(reading.gaps) == {("memory_used", GapReason.ZERO_TOTAL, "chat-a")}


async def test_same_card_gives_the_same_value_as_dcgm(proc: Path) -> None:
    reading = await read(FakeLibrary(FakeCard("GPU-1", 11)), proc)
    labels = {"UUID": "GPU-1", "pod": "chat-a", "namespace": "serving"}
    page = {
        "DCGM_FI_DEV_FB_USED": 60.0 * 1024,
        "DCGM_FI_DEV_FB_FREE": 19.0 * 1024,
        "DCGM_FI_DEV_GPU_UTIL": 50.0,
    }
    gpus, gaps = build_gpus([Series(name, labels, value) for name, value in page.items()], [POD_A], "serving")
    assert (gpus, gaps) == (reading.gpus, ())


# --- errors ---


@pytest.mark.parametrize("code", [Code.FUNCTION_NOT_FOUND, Code.ARGUMENT_VERSION_MISMATCH, Code.NOT_SUPPORTED])
async def test_memory_falls_back_to_version_1(proc: Path, code: Code) -> None:
    library = FakeLibrary(FakeCard("GPU-1", 11))
    library.fail["memory"] = code
    reading = await read(library, proc)
    assert [(gpu.memory_used, gpu.memory_free) for gpu in reading.gpus] == [(61.0 * 1024 * MIB, 19.0 * 1024 * MIB)]
    assert reading.gaps == ()


async def test_c015_memory_that_is_not_supported_is_asked_for_once(proc: Path) -> None:
    library = FakeLibrary(FakeCard("GPU-1", 11))
    library.fail |= {"memory": Code.NOT_SUPPORTED, "memory_v1": Code.NOT_SUPPORTED}
    source = NvmlSource(NvmlSignals(), HandClock(), cgroup_root=proc, load=lambda: library)
    readings = [await source.read(TARGET, 0.0) for _ in range(3)]
    await source.close()
    for reading in readings:
        assert [(gpu.memory_used, gpu.memory_free) for gpu in reading.gpus] == [(None, None)]
        assert [gpu.utilization for gpu in reading.gpus] == [0.5]
        assert reasons(reading.gaps) == {
            ("memory_used", GapReason.NOT_SUPPORTED, "chat-a"),
            ("memory_free", GapReason.NOT_SUPPORTED, "chat-a"),
        }
    assert (library.calls.count("memory"), library.calls.count("memory_v1")) == (1, 1)


async def test_version_that_the_driver_does_not_know_is_asked_for_once(proc: Path) -> None:
    library = FakeLibrary(FakeCard("GPU-1", 11), FakeCard("GPU-2", 21))
    library.fail["memory"] = Code.FUNCTION_NOT_FOUND
    source = NvmlSource(NvmlSignals(), HandClock(), cgroup_root=proc, load=lambda: library)
    for _ in range(2):
        await source.read(TARGET, 0.0)
    await source.close()
    assert (library.calls.count("memory"), library.calls.count("memory_v1")) == (1, 4)


async def test_restarted_library_is_asked_anew_for_what_it_did_not_have(proc: Path) -> None:
    library = FakeLibrary(FakeCard("GPU-1", 11))
    source = NvmlSource(NvmlSignals(), HandClock(), cgroup_root=proc, load=lambda: library)
    utilization = []
    for code in (Code.NOT_SUPPORTED, 0):
        library.fail["utilization"] = code
        reading = await source.read(TARGET, 0.0)
        utilization += [gpu.utilization for gpu in reading.gpus]
        library.fail["count"] = Code.UNINITIALIZED
        await source.read(TARGET, 0.0)
        library.fail.clear()
    await source.close()
    assert utilization == [None, 0.5]


async def test_processes_that_are_not_told_are_a_gap(proc: Path) -> None:
    library = FakeLibrary(FakeCard("GPU-1", 11), FakeCard("GPU-2", 21))
    library.fail["processes", "GPU-1"] = Code.NO_PERMISSION
    reading = await read(library, proc)
    assert owners(reading) == [("GPU-2", "", UID_B)]
    assert reasons(reading.gaps) == {(WHOLE_PAGE, GapReason.TRANSIENT, "")}


@pytest.mark.parametrize("code", [Code.GPU_IS_LOST, Code.RESET_REQUIRED, Code.UNKNOWN])
@pytest.mark.parametrize("call", ["card", "memory"])
async def test_lost_card_leaves_the_others(proc: Path, code: Code, call: str) -> None:
    library = FakeLibrary(FakeCard("GPU-1", 11), FakeCard("GPU-2", 21))
    library.fail[call, "GPU-1"] = code
    reading = await read(library, proc)
    assert owners(reading) == [("GPU-2", "", UID_B)]
    assert reasons(reading.gaps) == {(WHOLE_PAGE, GapReason.DEVICE_LOST, "")}


@pytest.mark.parametrize("code", [Code.NOT_FOUND, Code.INVALID_ARGUMENT])
@pytest.mark.parametrize(
    "first", [pytest.param(0, id="first-is-read"), pytest.param(Code.GPU_IS_LOST, id="first-is-lost")]
)
async def test_cards_that_changed_are_enumerated_again(proc: Path, code: Code, first: int) -> None:
    class Changing(FakeLibrary):
        """A fake that loses its first card while it is read for the first time."""

        def utilization(self, device: Handle) -> float:
            if device.uuid == "GPU-2" and len(self.cards) == 2:
                self.cards.pop(0)
                raise NvmlError(code, "changed")
            return super().utilization(device)

    library = Changing(FakeCard("GPU-1", 11), FakeCard("GPU-2", 21))
    library.fail["memory", "GPU-1"] = first
    reading = await read(library, proc)
    assert owners(reading) == [("GPU-2", "", UID_B)]
    assert reading.gaps == ()


async def test_card_that_keeps_changing_leaves_the_others(proc: Path) -> None:
    library = FakeLibrary(FakeCard("GPU-1", 11), FakeCard("GPU-2", 21))
    library.fail["processes", "GPU-1"] = Code.NOT_FOUND
    reading = await read(library, proc)
    assert owners(reading) == [("GPU-2", "", UID_B)]
    assert reasons(reading.gaps) == {(WHOLE_PAGE, GapReason.TRANSIENT, "")}


@pytest.mark.parametrize("code", [Code.NO_PERMISSION, Code.TIMEOUT, Code.INSUFFICIENT_SIZE])
async def test_refused_value_is_held_for_a_while_and_asked_for_less_and_less(proc: Path, code: Code) -> None:
    library, clock = FakeLibrary(FakeCard("GPU-1", 11)), HandClock()
    source = NvmlSource(NvmlSignals(), clock, cgroup_root=proc, load=lambda: library)
    used: list[float | None] = []
    refused: list[bool] = []
    for clock.at in (0.0, 5.0, 6.0, 10.0, 15.0, 20.0):
        reading = await source.read(TARGET, clock.at)
        library.fail["memory"] = code
        used += [gpu.memory_used for gpu in reading.gpus]
        refused.append(("memory_used", GapReason.TRANSIENT, "chat-a") in reasons(reading.gaps))
    library.fail.clear()
    clock.at = 100.0
    again = await source.read(TARGET, clock.at)
    await source.close()
    full = 60.0 * 1024 * MIB
    assert used == [full, full, full, full, full, None]
    assert refused == [False, True, True, True, True, True]
    # Asked at 0, 5 (rest 2 s), 10 (rest 4 s), 15 (rest 8 s), and at 100.
    assert library.calls.count("memory") == 5
    assert ([gpu.memory_used for gpu in again.gpus], again.gaps) == ([full], ())


@pytest.mark.parametrize("code", [Code.UNINITIALIZED, Code.DRIVER_NOT_LOADED, Code.LIB_RM_VERSION_MISMATCH])
async def test_stopped_library_is_started_again(proc: Path, code: Code) -> None:
    library = FakeLibrary(FakeCard("GPU-1", 11), FakeCard("GPU-2", 21))
    source = NvmlSource(NvmlSignals(), HandClock(), cgroup_root=proc, load=lambda: library)
    await source.read(TARGET, 0.0)
    library.fail["memory", "GPU-2"] = code
    stopped = await source.read(TARGET, 0.0)
    library.fail.clear()
    again = await source.read(TARGET, 0.0)
    await source.close()
    assert owners(stopped) == [("GPU-1", "", UID_A)]
    assert reasons(stopped.gaps) == {(WHOLE_PAGE, GapReason.NOT_LOADED, "")}
    assert (len(again.gpus), again.gaps) == (2, ())
    assert library.calls.count("start") == 2


async def test_failed_start_is_a_gap_each_tick_and_tried_again_later(proc: Path) -> None:
    library, clock = FakeLibrary(FakeCard("GPU-1", 11)), HandClock()
    library.fail["start"] = Code.DRIVER_NOT_LOADED
    source = NvmlSource(NvmlSignals(), clock, cgroup_root=proc, load=lambda: library)
    for clock.at in (0.0, 5.0, 29.0):
        reading = await source.read(TARGET, clock.at)
        assert reasons(reading.gaps) == {(WHOLE_PAGE, GapReason.NOT_LOADED, "")}
    assert library.calls == ["start"]
    library.fail.clear()
    clock.at = 30.0
    reading = await source.read(TARGET, clock.at)
    await source.close()
    assert owners(reading) == [("GPU-1", "", UID_A)]
    assert library.calls[-1] == "stop"


async def test_missing_package_is_a_gap(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    source = NvmlSource(NvmlSignals(), HandClock(), cgroup_root=proc)
    reading = await source.read(TARGET, 0.0)
    await source.close()
    assert [(gap.signal, gap.reason, gap.source) for gap in reading.gaps] == [
        (WHOLE_PAGE, GapReason.NOT_LOADED, "nvml")
    ]
    assert "vllm-autoscaler[nvml]" in reading.gaps[0].detail


async def nvml_threads_ended() -> None:
    for thread in threading.enumerate():
        if thread.name == "nvml":
            await asyncio.to_thread(thread.join)


async def test_call_that_hangs_loses_its_card_and_blocks_nothing(proc: Path) -> None:
    library = FakeLibrary(FakeCard("GPU-1", 11), FakeCard("GPU-2", 21))
    source = NvmlSource(NvmlSignals(timeout_s=0.4), HandClock(), cgroup_root=proc, load=lambda: library)
    library.hang.clear()
    hung = [await source.read(TARGET, 0.0) for _ in range(3)]
    rounds = library.calls.count("count")
    library.hang.set()
    await nvml_threads_ended()
    reading = await source.read(TARGET, 0.0)
    await source.close()
    for each in hung:
        assert (each.gpus, reasons(each.gaps)) == ((), {(WHOLE_PAGE, GapReason.DEVICE_LOST, "")})
        assert "GPU-1" in each.gaps[0].detail
    assert rounds == 1
    assert owners(reading) == [("GPU-1", "", UID_A), ("GPU-2", "", UID_B)]


async def test_cards_before_the_hanging_one_are_used(proc: Path) -> None:
    class Stuck(FakeLibrary):
        """A fake whose second card never answers."""

        def utilization(self, device: Handle) -> float:
            if device.uuid == "GPU-2":
                self.hang.clear()
                self.hang.wait()
            return super().utilization(device)

    library = Stuck(FakeCard("GPU-1", 11), FakeCard("GPU-2", 21))
    source = NvmlSource(NvmlSignals(timeout_s=0.4), HandClock(), cgroup_root=proc, load=lambda: library)
    reading = await source.read(TARGET, 0.0)
    await source.close()
    library.hang.set()
    await nvml_threads_ended()
    assert owners(reading) == [("GPU-1", "", UID_A)]
    assert [(gap.reason, gap.detail.split(":")[0]) for gap in reading.gaps] == [(GapReason.DEVICE_LOST, "GPU-2")]
    assert "stop" not in library.calls


async def test_start_that_hangs_is_a_timeout(proc: Path) -> None:
    class Slow(FakeLibrary):
        """A fake whose driver does not come up."""

        def start(self) -> None:
            self.hang.wait()

    library = Slow()
    library.hang.clear()
    source = NvmlSource(NvmlSignals(timeout_s=0.05), HandClock(), cgroup_root=proc, load=lambda: library)
    reading = await source.read(TARGET, 0.0)
    still = await source.read(TARGET, 0.0)
    library.hang.set()
    await nvml_threads_ended()
    await source.close()
    assert reasons(reading.gaps) == reasons(still.gaps) == {(WHOLE_PAGE, GapReason.TIMEOUT, "")}


async def test_bug_in_the_thread_is_raised_to_the_caller(proc: Path) -> None:
    class Broken(FakeLibrary):
        """A fake with a bug."""

        def count(self) -> int:
            raise KeyError("count")

    source = NvmlSource(NvmlSignals(), HandClock(), cgroup_root=proc, load=Broken)
    for _ in range(2):
        with pytest.raises(KeyError, match="count"):
            await source.read(TARGET, 0.0)


def test_backoff_is_bounded(proc: Path) -> None:
    library = FakeLibrary(FakeCard("GPU-1", 11))
    library.fail["memory"] = Code.TIMEOUT
    reader = nvml.CardReader(lambda: library, proc)
    for second in range(0, 1000, 5):
        reader.sweep(nvml.Sweep(), float(second))
    # Pauses of 2, 4, 8, 16, 32 and then 60 s, each rounded up to 5 s.
    assert library.calls.count("memory") == 6 + (1000 - 5 - 5 - 10 - 20 - 35) // 60
