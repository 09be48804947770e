"""nvidia-ml-py, and the NVML source on top of it, against a stub of the C library that is compiled here."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autoscaler.core.types import WHOLE_PAGE, GapReason
from autoscaler.sources.nvml import Code, NvmlError, load_library

STUB = Path(__file__).parent
MIB = 2**20
UID_A = "aaaaaaaa-0000-4000-8000-000000000000"
UID_B = "bbbbbbbb-0000-4000-8000-000000000000"
OTHER = "cccccccc-0000-4000-8000-000000000000"

CARDS = """
driver
gpu GPU-1 81920 60000 647 40
gpu GPU-2 81920 0 647 0
mig 1 0 3 20000 5000
mig 1 2 5 10000 9000
proc 0 -1 11 59000
proc 1 0 21 4000
proc 1 2 12 -1
proc 1 2 31 2000
"""
SCENARIOS = {
    "cards": [CARDS],
    "no-driver": [""],
    "driver-goes": [CARDS, "gpu GPU-1 1 1 0 0", CARDS],
    "old-driver": [CARDS + "fail nvmlDeviceGetMemoryInfo_v2 13"],
    "lost": [CARDS + "fail nvmlDeviceGetMemoryInfo_v2 15 0", CARDS],
    "not-supported": [CARDS + "fail nvmlDeviceGetMemoryInfo_v2 3 0\nfail nvmlDeviceGetMemoryInfo 3 0"],
    "refused": [CARDS, CARDS.replace("60000", "1") + "fail nvmlDeviceGetMemoryInfo_v2 4 0"],
    "odd-code": [CARDS + "fail nvmlDeviceGetCount_v2 777"],
}


CC = os.environ.get("CC", "gcc")
MISSING = [
    what
    for what, found in {CC: shutil.which(CC), "nvidia-ml-py": importlib.util.find_spec("pynvml")}.items()
    if found is None
]
# In CI the tests run, and fail, where something is missing: nothing is left out there by accident.
pytestmark = (
    pytest.mark.skip(f"the NVML stub needs {' and '.join(MISSING)}")
    if MISSING and os.environ.get("CI") != "true"
    else pytest.mark.usefixtures("stub_readings")
)


@pytest.fixture(scope="session")
def stub_readings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What one process reads from the stub in all scenarios."""
    assert not MISSING, f"the NVML stub needs {' and '.join(MISSING)}"
    folder = tmp_path_factory.mktemp("nvml")
    for pid, uid in {11: UID_A, 12: UID_A, 21: UID_B, 31: OTHER}.items():
        (folder / "proc" / str(pid)).mkdir(parents=True)
        (folder / "proc" / str(pid) / "cgroup").write_text(f"0::/kubepods/pod{uid}/{'0' * 64}\n")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([STUB / "build", library], check=True)
    done = subprocess.run(
        [sys.executable, STUB / "read_cards.py", library, folder / "proc"],
        input=json.dumps(SCENARIOS),
        env={**os.environ, "NVML_STUB": str(folder / "stub.txt"), "PYTHONPATH": str(STUB.parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def stub_gpus(tick: dict[str, Any]) -> dict[tuple[str, str], tuple[str, float | None, float | None, float | None]]:
    def mib(value: float | None) -> float | None:
        return None if value is None else value / MIB

    return {
        (gpu["uuid"], gpu["instance"]): (
            gpu["pod_uid"],
            mib(gpu["memory_used"]),
            mib(gpu["memory_free"]),
            gpu["utilization"],
        )
        for gpu in tick["gpus"]
    }


WHOLE = {
    ("GPU-1", ""): (UID_A, 60000.0, 21273.0, 0.4),
    ("GPU-2", "3"): (UID_B, 5000.0, 15000.0, None),
    ("GPU-2", "5"): (UID_A, 9000.0, 1000.0, None),
}


def stub_reasons(tick: dict[str, Any]) -> set[tuple[str, str]]:
    return {(signal, reason) for signal, reason, *_ in tick["gaps"]}


# Instances tell no utilization, and one process on the second tells no memory.
USUAL = {("gpu_utilization", "not_supported"), ("memory_used", "shared_device")}


def test_stub_cards_instances_and_processes(stub_readings: dict[str, list[dict[str, Any]]]) -> None:
    (tick,) = stub_readings["cards"]
    assert stub_gpus(tick) == WHOLE
    assert stub_reasons(tick) == USUAL
    assert {(gpu["instance"], gpu["attribution"], gpu["shared"]) for gpu in tick["gpus"]} == {
        ("", "exclusive", False),
        ("3", "exclusive", False),
        ("5", "device-only", True),
    }


def test_stub_without_a_driver(stub_readings: dict[str, list[dict[str, Any]]]) -> None:
    (tick,) = stub_readings["no-driver"]
    assert (tick["gpus"], stub_reasons(tick)) == ([], {(WHOLE_PAGE, "not_loaded")})


def test_stub_whose_driver_goes_and_comes(stub_readings: dict[str, list[dict[str, Any]]]) -> None:
    before, gone, after = stub_readings["driver-goes"]
    assert (gone["gpus"], stub_reasons(gone)) == ([], {(WHOLE_PAGE, "not_loaded")})
    assert stub_gpus(before) == stub_gpus(after) == WHOLE


def test_stub_of_an_old_driver(stub_readings: dict[str, list[dict[str, Any]]]) -> None:
    (tick,) = stub_readings["old-driver"]
    assert stub_gpus(tick)["GPU-1", ""] == (UID_A, 60647.0, 21273.0, 0.4)
    assert stub_reasons(tick) == USUAL


def test_stub_with_a_lost_card(stub_readings: dict[str, list[dict[str, Any]]]) -> None:
    lost, again = stub_readings["lost"]
    assert stub_gpus(lost).keys() == WHOLE.keys() - {("GPU-1", "")}
    assert (WHOLE_PAGE, "device_lost") in stub_reasons(lost)
    assert any("GPU is lost" in detail for *_, detail in lost["gaps"])
    assert stub_gpus(again) == WHOLE


def test_c015_stub_without_memory(stub_readings: dict[str, list[dict[str, Any]]]) -> None:
    (tick,) = stub_readings["not-supported"]
    assert stub_gpus(tick)["GPU-1", ""] == (UID_A, None, None, 0.4)
    assert stub_reasons(tick) == USUAL | {("memory_used", "not_supported"), ("memory_free", "not_supported")}


def test_stub_that_refuses_a_value(stub_readings: dict[str, list[dict[str, Any]]]) -> None:
    _, refused = stub_readings["refused"]
    assert stub_gpus(refused)["GPU-1", ""] == (UID_A, 60000.0, 21273.0, 0.4)
    assert ("memory_used", "transient") in stub_reasons(refused)


def test_stub_with_a_code_that_nobody_knows(stub_readings: dict[str, list[dict[str, Any]]]) -> None:
    (tick,) = stub_readings["odd-code"]
    assert (tick["gpus"], stub_reasons(tick)) == ([], {(WHOLE_PAGE, "transient")})


def test_loaded_library_translates_errors() -> None:
    """Without a driver on this machine, or a library that is not there, the error is ours."""
    library = load_library()
    with pytest.raises(NvmlError) as failure:
        library.count()
    assert failure.value.code == Code.UNINITIALIZED
    assert failure.value.reason == GapReason.NOT_LOADED
    assert isinstance(failure.value.__cause__, sys.modules["pynvml"].NVMLError)
