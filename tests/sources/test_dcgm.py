"""DCGM: what series mean, whose devices they are, and how exporter pages are read."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from autoscaler.core.policy import DcgmSignals
from autoscaler.core.types import (
    WHOLE_PAGE,
    Attribution,
    Gap,
    GapReason,
    Gpu,
    Pod,
    PodPhase,
    Reading,
    TargetStatus,
)
from autoscaler.sources import dcgm
from autoscaler.sources.dcgm import (
    FAMILY,
    DcgmSource,
    FamilyWatch,
    attribution_report,
    build_gpus,
    is_blank,
    page_urls,
)
from autoscaler.sources.exposition import Series, SeriesCache, parse_page

PAGES = Path(__file__).parents[1] / "data" / "dcgm"
EXPECTED: dict[str, Any] = json.loads((PAGES / "expected.json").read_text())
MIB = 2**20


def series_of(text: str) -> list[Series]:
    return list(parse_page(text.encode() + b"\n", SeriesCache(FAMILY.__contains__)).series())


def pod(name: str, uid: str = "", **more: Any) -> Pod:
    return Pod(name=name, uid=uid or f"uid-{name}", **more)


def read(text: str, *names: str) -> tuple[tuple[Gpu, ...], tuple[Gap, ...]]:
    return build_gpus(series_of(text), [pod(name) for name in names], "serving")


def reasons(gaps: tuple[Gap, ...]) -> set[tuple[str, GapReason, str]]:
    return {(gap.signal, gap.reason, gap.pod) for gap in gaps}


# --- the recorded pages ---


def recorded_pods(page: str) -> dict[tuple[str, str], Pod]:
    """Return a live pod for every workload of a page, with the uid that the page gives it, if any."""
    uids = {
        (one.labels["namespace"], one.labels["pod"]): one.labels["pod_uid"]
        for one in series_of((PAGES / page).read_text())
        if one.labels.get("pod_uid")
    }
    names = [tuple(name.split("/")) for name in EXPECTED[page]["pods"]]
    return {(namespace, name): pod(name, uids.get((namespace, name), "")) for namespace, name in names}


def ratio(used: float | None, gpu: Gpu) -> float | None:
    if used is None or gpu.memory_used is None or gpu.memory_free is None:
        return None
    return round(used / (gpu.memory_used + gpu.memory_free), 6)


WORKLOADS = [(page, *workload.split("/")) for page in EXPECTED for workload in EXPECTED[page]["pods"]]


@pytest.mark.parametrize(
    ("page", "namespace", "name"), [pytest.param(*row, id=f"{row[0]}-{row[2]}") for row in WORKLOADS]
)
def test_recorded_page_gives_each_pod_its_numbers(page: str, namespace: str, name: str) -> None:
    expected = EXPECTED[page]["pods"][f"{namespace}/{name}"]
    owner = recorded_pods(page)[namespace, name]
    gpus, _ = build_gpus(series_of((PAGES / page).read_text()), [owner], namespace)
    uuids = {device["gpu"]: device["uuid"] for device in EXPECTED[page]["devices"]}

    found = {
        (gpu.uuid, gpu.instance): (
            gpu.attribution.value,
            None if gpu.pod_memory_used is None else gpu.pod_memory_used / MIB,
            ratio(gpu.pod_memory_used, gpu),
            ratio(gpu.memory_used, gpu),
        )
        for gpu in gpus
    }
    assert found == {
        (uuids[device["gpu"]], device["gi"] or ""): (
            device["attribution"],
            device["pod_used_mib"],
            device["pod_ratio"],
            device["device_ratio"],
        )
        for device in expected["devices"]
    }
    assert {gpu.shared for gpu in gpus} == {expected["shared"]}
    assert {gpu.pod_uid for gpu in gpus} == {owner.uid}


@pytest.mark.parametrize("page", EXPECTED)
def test_recorded_page_gives_each_device_its_numbers(page: str) -> None:
    """Give every device to a pod of the test's own, so that devices of nobody show their values too."""
    owners = [pod(f"p{index}") for index in range(len(EXPECTED[page]["devices"]))]
    owner = {
        (device["uuid"], device["mig"]["gi"] if device["mig"] else ""): f"p{index}"
        for index, device in enumerate(EXPECTED[page]["devices"])
    }
    plain = {"exported_pod", "namespace", "container", "pod_uid"}
    bare = [
        one._replace(
            labels={name: value for name, value in one.labels.items() if name not in plain}
            | {"pod": owner[one.labels["UUID"], one.labels.get("GPU_I_ID", "")]}
        )
        for one in series_of((PAGES / page).read_text())
    ]
    gpus, _ = build_gpus(bare, owners, "serving")
    found = {
        (gpu.uuid, gpu.instance): (
            None if gpu.memory_used is None else gpu.memory_used / MIB,
            None if gpu.memory_free is None else gpu.memory_free / MIB,
            ratio(gpu.memory_used, gpu),
        )
        for gpu in gpus
    }
    assert found == {
        (device["uuid"], device["mig"]["gi"] if device["mig"] else ""): (
            device.get("used_mib"),
            device.get("free_mib"),
            device.get("ratio"),
        )
        for device in EXPECTED[page]["devices"]
    }


def test_recorded_pages_without_the_targets_pods_give_no_devices() -> None:
    series = series_of((PAGES / "a100x8-two-pods.prom").read_text())
    gpus, gaps = build_gpus(series, [pod("elsewhere-0")], "llm-prod")
    assert gpus == ()
    assert reasons(gaps) == {(WHOLE_PAGE, GapReason.FILTER_MATCHED_NOTHING, "")}


def test_last_xid_is_the_devices() -> None:
    page = "a100x8-two-pods.prom"
    name = "qwen-32b-6d4cbb9f77-r8t5w"
    gpus, _ = build_gpus(series_of((PAGES / page).read_text()), [pod(name)], "llm-prod")
    assert sorted(gpu.xid for gpu in gpus) == [0, 31]


# --- cases seen in the field ---

C001 = """
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a",exported_namespace="serving",exported_pod="chat-a-1"} %s
DCGM_FI_DEV_FB_FREE{gpu="0",UUID="GPU-a",exported_namespace="serving",exported_pod="chat-a-1"} 7000
"""


@pytest.mark.parametrize(
    "marker",
    [
        *(pytest.param(str(value), id=f"int64-{value}") for value in range(9223372036854775792, 9223372036854775796)),
        pytest.param("9.223372036854776e+18", id="int64-as-float"),
        *(pytest.param(str(value), id=f"int32-{value}") for value in range(2147483632, 2147483636)),
        pytest.param("140737488355328", id="double"),
    ],
)
def test_c001_integer_blank_is_unknown(marker: str) -> None:
    gpus, gaps = read(C001 % marker, "chat-a-1")
    assert [(gpu.memory_used, gpu.memory_free) for gpu in gpus] == [(None, 7000.0 * MIB)]
    assert [gap.reason for gap in gaps if gap.signal == "memory_used"] == [GapReason.DCGM_BLANK]


@pytest.mark.parametrize(
    ("marker", "reason"),
    [
        pytest.param("140737488355328", GapReason.DCGM_BLANK, id="blank"),
        pytest.param("140737488355331", GapReason.DCGM_BLANK, id="not-permitted"),
        pytest.param("14073748835532800", GapReason.DCGM_BLANK, id="blank-as-percent"),
        pytest.param("70368744177664", GapReason.OUT_OF_RANGE, id="a-marker-of-the-future"),
        pytest.param("1.002", GapReason.OUT_OF_RANGE, id="just-above-one"),
        pytest.param("-0.5", GapReason.OUT_OF_RANGE, id="negative"),
        pytest.param("NaN", GapReason.NON_FINITE, id="nan"),
        pytest.param("+Inf", GapReason.NON_FINITE, id="infinite"),
    ],
)
def test_c002_floating_blank_in_a_ratio_is_unknown(marker: str, reason: GapReason) -> None:
    text = f"""
DCGM_FI_PROF_GR_ENGINE_ACTIVE{{gpu="0",UUID="GPU-a",exported_pod="chat-a-1"}} {marker}
DCGM_FI_PROF_GR_ENGINE_ACTIVE{{gpu="1",UUID="GPU-b",exported_pod="chat-a-2"}} 0.62
DCGM_FI_DEV_FB_USED{{gpu="0",UUID="GPU-a",exported_pod="chat-a-1"}} 100
"""
    gpus, gaps = read(text, "chat-a-1", "chat-a-2")
    assert [(gpu.uuid, gpu.utilization) for gpu in gpus] == [("GPU-a", None), ("GPU-b", 0.62)]
    assert gpus[0].memory_used == 100.0 * MIB
    assert ("gpu_utilization", reason, "chat-a-1") in reasons(gaps)


def test_c004_memory_ratio_does_not_depend_on_reserved() -> None:
    text = """
DCGM_FI_DEV_FB_USED{UUID="GPU-a",exported_pod="chat-a-1"} 73000
DCGM_FI_DEV_FB_FREE{UUID="GPU-a",exported_pod="chat-a-1"} 7000
DCGM_FI_DEV_FB_RESERVED{UUID="GPU-a",exported_pod="chat-a-1"} 559
DCGM_FI_DEV_FB_USED{UUID="GPU-b",exported_pod="chat-a-2"} 73000
DCGM_FI_DEV_FB_FREE{UUID="GPU-b",exported_pod="chat-a-2"} 7000
"""
    gpus, gaps = read(text, "chat-a-1", "chat-a-2")
    assert [ratio(gpu.memory_used, gpu) for gpu in gpus] == [0.9125, 0.9125]
    assert {gap.signal for gap in gaps} == {"gpu_utilization"}

    later, _ = read(text.replace(" 7000", " 6000"), "chat-a-1", "chat-a-2")
    assert [gpu.memory_free for gpu in later] == [6000.0 * MIB, 6000.0 * MIB]


BUSY_MIG = 'DCGM_FI_DEV_GPU_UTIL{UUID="GPU-a",GPU_I_PROFILE="1g.12gb",GPU_I_ID="3",exported_pod="chat-a-1"} 0'
ACTIVE_MIG = (
    'DCGM_FI_PROF_GR_ENGINE_ACTIVE{UUID="GPU-a",GPU_I_PROFILE="1g.12gb",GPU_I_ID="3",exported_pod="chat-a-1"} 0.87'
)


def test_c005_mig_utilization_is_the_profiling_field() -> None:
    gpus, gaps = read(f"{BUSY_MIG}\n{ACTIVE_MIG}", "chat-a-1")
    assert [(gpu.instance, gpu.utilization) for gpu in gpus] == [("3", 0.87)]
    assert "gpu_utilization" not in {gap.signal for gap in gaps}


def test_c005_mig_without_the_profiling_field_is_unknown() -> None:
    gpus, gaps = read(BUSY_MIG, "chat-a-1")
    assert [gpu.utilization for gpu in gpus] == [None]
    assert ("gpu_utilization", GapReason.NOT_SUPPORTED, "chat-a-1") in reasons(gaps)


def test_c006_each_gpu_falls_back_on_its_own() -> None:
    text = """
DCGM_FI_PROF_GR_ENGINE_ACTIVE{UUID="GPU-a",exported_pod="chat-a-1"} 0.40
DCGM_FI_DEV_GPU_UTIL{UUID="GPU-b",exported_pod="chat-a-2"} 80
"""
    gpus, gaps = read(text, "chat-a-1", "chat-a-2")
    assert [gpu.utilization for gpu in gpus] == [0.40, pytest.approx(0.80)]
    assert "gpu_utilization" not in {gap.signal for gap in gaps}


def test_c007_empty_pod_labels_belong_to_nobody() -> None:
    text = 'DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a",Hostname="node-1",container="",namespace="",pod=""} 71000'
    gpus, gaps = read(text, "chat-a-1")
    assert gpus == ()
    assert reasons(gaps) == {(WHOLE_PAGE, GapReason.NO_POD_LABEL, "")}

    report = attribution_report(series_of(text), [pod("chat-a-1")], "serving")
    assert (report.layouts, report.attributed, report.series) == ((), 0, 1)
    assert str(report) == "pod labels: none; 0 of 1 GPU series attributed to the target, 0 to any pod"


@pytest.mark.parametrize(
    ("labels", "layout"),
    [
        pytest.param(
            'namespace="monitoring",pod="dcgm-exporter-x",exported_namespace="serving",exported_pod="chat-a-1"',
            "exported_pod",
            id="exported-wins",
        ),
        pytest.param('namespace="serving",pod="chat-a-1"', "pod", id="honor-labels"),
        pytest.param(
            'pod_namespace="serving",pod_name="chat-a-1",container_name="vllm"', "pod_name", id="old-namespace"
        ),
        pytest.param(
            'pod_namespace="serving",pod_name="chat-a-1",namespace="monitoring",pod="agent-0"',
            "pod_name",
            id="old-namespace-through-prometheus",
        ),
    ],
)
def test_c008_label_layouts(labels: str, layout: str) -> None:
    text = f'DCGM_FI_DEV_FB_USED{{UUID="GPU-a",{labels}}} 60000'
    gpus, _ = read(text, "chat-a-1")
    assert [(gpu.pod_uid, gpu.memory_used) for gpu in gpus] == [("uid-chat-a-1", 60000.0 * MIB)]
    assert attribution_report(series_of(text), [pod("chat-a-1")], "serving").layouts == (layout,)


@pytest.mark.parametrize(
    "labels",
    [
        pytest.param('namespace="serving",pod="other-0"', id="another-pod"),
        pytest.param('namespace="batch",pod="chat-a-1"', id="same-name-elsewhere"),
    ],
)
def test_c008_foreign_series_are_ignored_beside_ours(labels: str) -> None:
    text = f"""
DCGM_FI_DEV_FB_USED{{UUID="GPU-a",{labels}}} 60000
DCGM_FI_DEV_FB_USED{{UUID="GPU-b",namespace="serving",pod="chat-a-1"}} 30000
"""
    gpus, gaps = read(text, "chat-a-1")
    assert [gpu.uuid for gpu in gpus] == ["GPU-b"]
    assert {gap.pod for gap in gaps} == {"chat-a-1"}


C010 = """
DCGM_FI_PROF_GR_ENGINE_ACTIVE{UUID="GPU-a",vgpu="0",exported_pod="chat-a-1"} 0.63
DCGM_FI_PROF_GR_ENGINE_ACTIVE{UUID="GPU-a",vgpu="1",exported_pod="chat-a-2"} 0.63
DCGM_FI_PROF_GR_ENGINE_ACTIVE{UUID="GPU-a",vgpu="2",exported_pod="chat-b-1"} 0.63
"""


def test_c010_time_slices_share_one_device() -> None:
    memory = C010.replace("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_DEV_FB_USED").replace("0.63", "30000")
    gpus, gaps = read(C010 + memory, "chat-a-1", "chat-a-2")
    assert {(gpu.uuid, gpu.utilization, gpu.memory_used) for gpu in gpus} == {("GPU-a", 0.63, 30000.0 * MIB)}
    assert [gpu.pod_uid for gpu in gpus] == ["uid-chat-a-1", "uid-chat-a-2"]
    assert all(gpu.shared and gpu.attribution is Attribution.DEVICE_ONLY for gpu in gpus)
    assert all(gpu.pod_memory_used is None for gpu in gpus)
    assert ("memory_used", GapReason.SHARED_DEVICE, "chat-a-1") in reasons(gaps)


C012 = """
DCGM_FI_DEV_FB_USED{UUID="GPU-a",GPU_I_PROFILE="1g.6gb",GPU_I_ID="3",exported_pod="chat-a-1"} 5700
DCGM_FI_DEV_FB_FREE{UUID="GPU-a",GPU_I_PROFILE="1g.6gb",GPU_I_ID="3",exported_pod="chat-a-1"} 300
DCGM_FI_DEV_FB_USED{UUID="GPU-a",GPU_I_PROFILE="1g.6gb",GPU_I_ID="4",exported_pod="batch-1"} 0
DCGM_FI_DEV_FB_FREE{UUID="GPU-a",GPU_I_PROFILE="1g.6gb",GPU_I_ID="4",exported_pod="batch-1"} 6012
"""


@pytest.mark.parametrize(
    "parent",
    [
        pytest.param("", id="instances-only"),
        pytest.param('DCGM_FI_DEV_FB_USED{UUID="GPU-a",GPU_I_ID="",exported_pod=""} 40000', id="beside-the-parent"),
    ],
)
def test_c012_mig_instances_of_one_card_are_apart(parent: str) -> None:
    gpus, _ = read(C012 + parent, "chat-a-1")
    assert [(gpu.uuid, gpu.instance, ratio(gpu.memory_used, gpu), gpu.shared) for gpu in gpus] == [
        ("GPU-a", "3", 0.95, False)
    ]


C013 = """
DCGM_FI_DEV_FB_USED{UUID="GPU-a",exported_pod="chat-a-4"} 78000
DCGM_FI_DEV_FB_USED{UUID="GPU-b",exported_pod="chat-a-5"} 30000
"""


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([pod("chat-a-4", phase=PodPhase.SUCCEEDED)], id="succeeded"),
        pytest.param([pod("chat-a-4", phase=PodPhase.PENDING)], id="pending"),
        pytest.param([pod("chat-a-4", terminating=True)], id="terminating"),
        pytest.param([], id="gone"),
    ],
)
def test_c013_only_live_pods_count(others: list[Pod]) -> None:
    gpus, gaps = build_gpus(series_of(C013), [pod("chat-a-5"), *others], "serving")
    assert [(gpu.uuid, gpu.pod_uid) for gpu in gpus] == [("GPU-b", "uid-chat-a-5")]
    assert [gap.pod for gap in gaps if gap.reason is GapReason.POD_NOT_LIVE] == ["chat-a-4"]


def test_c013_a_reused_name_is_another_pod() -> None:
    text = 'DCGM_FI_DEV_FB_USED{UUID="GPU-b",pod="chat-a-5",namespace="serving",pod_uid="older"} 30000'
    gpus, gaps = read(text, "chat-a-5")
    assert gpus == ()
    assert (WHOLE_PAGE, GapReason.POD_NOT_LIVE, "chat-a-5") in reasons(gaps)


def test_c015_unified_memory_has_no_framebuffer() -> None:
    gpus, gaps = read('DCGM_FI_DEV_GPU_UTIL{UUID="GPU-a",exported_pod="chat-a-1"} 40', "chat-a-1")
    assert [(gpu.memory_used, gpu.memory_free) for gpu in gpus] == [(None, None)]
    assert [gpu.utilization for gpu in gpus] == [pytest.approx(0.4)]
    assert reasons(gaps) == {
        ("memory_used", GapReason.NOT_SUPPORTED, "chat-a-1"),
        ("memory_free", GapReason.NOT_SUPPORTED, "chat-a-1"),
    }


C017 = """
DCGM_FI_DEV_FB_USED{UUID="GPU-a",pod="chat-a-1",namespace="serving"} 60000
DCGM_FI_DEV_FB_FREE{UUID="GPU-a",pod="chat-a-1",namespace="serving"} 20000
DCGM_FI_DEV_GPU_UTIL{UUID="GPU-a",pod="chat-a-1",namespace="serving"} 55
"""
C017_AFTER = "\n".join(line for line in C017.splitlines() if "GPU_UTIL" not in line) + "\n"


async def test_c017_vanished_family_is_named_after_three_polls() -> None:
    async with exporter(C017) as fake:
        source = fake.source(interval_s=5.0)
        before = await source.read(TARGET, fake.clock.tick(0.0))
        fake.body = C017_AFTER
        polls = [await source.read(TARGET, fake.clock.tick(5.0 * (1 + index))) for index in range(4)]
        fake.body = C017
        again = await source.read(TARGET, fake.clock.tick(30.0))
        await source.close()

    assert [gpu.utilization for gpu in before.gpus] == [0.55]
    missing = [[gap.detail for gap in poll.gaps if gap.reason is GapReason.FAMILY_MISSING] for poll in polls]
    assert missing == [[], [], ["DCGM_FI_DEV_GPU_UTIL"], ["DCGM_FI_DEV_GPU_UTIL"]]
    assert all(poll.gpus[0].utilization is None for poll in polls)
    assert all(poll.gpus[0].memory_used == 60000.0 * MIB for poll in polls)
    assert [gpu.utilization for gpu in again.gpus] == [0.55]
    assert again.gaps == ()


# --- further rules ---


@pytest.mark.parametrize(
    ("used", "free", "busy", "active"),
    [
        pytest.param(*names, id=names[0])
        for names in (
            (
                "DCGM_FI_DEV_FB_USED",
                "DCGM_FI_DEV_FB_FREE",
                "DCGM_FI_DEV_GPU_UTIL_RATIO",
                "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO",
            ),
            ("dcgm_fb_used", "dcgm_fb_free", "dcgm_gpu_utilization", "dcgm_fi_prof_gr_engine_active"),
        )
    ],
)
def test_other_names_of_the_same_families(used: str, free: str, busy: str, active: str) -> None:
    labels = 'uuid="GPU-a",hostname="node-1",pod_name="chat-a-1",pod_namespace="serving"'
    text = f"{used}{{{labels}}} 30\n{free}{{{labels}}} 70\n{busy}{{{labels}}} 50\n"
    gpus, gaps = read(text, "chat-a-1")
    assert [(ratio(gpu.memory_used, gpu), gpu.utilization) for gpu in gpus] == [(0.3, 0.5)]
    assert gaps == ()
    with_active, _ = read(text + f"{active}{{{labels}}} 0.25\n", "chat-a-1")
    assert [gpu.utilization for gpu in with_active] == [0.25]


def test_zero_total_is_unknown() -> None:
    text = C001.replace("7000", "0") % "0"
    gpus, gaps = read(text, "chat-a-1")
    assert [(gpu.memory_used, gpu.memory_free) for gpu in gpus] == [(None, None)]
    assert ("memory_used", GapReason.ZERO_TOTAL, "chat-a-1") in reasons(gaps)


def test_rejected_profiling_field_falls_back_and_says_so() -> None:
    text = """
DCGM_FI_PROF_GR_ENGINE_ACTIVE{UUID="GPU-a",exported_pod="chat-a-1"} 140737488355328
DCGM_FI_DEV_GPU_UTIL{UUID="GPU-a",exported_pod="chat-a-1"} 80
"""
    gpus, gaps = read(text, "chat-a-1")
    assert [gpu.utilization for gpu in gpus] == [pytest.approx(0.8)]
    assert ("gpu_utilization", GapReason.DCGM_BLANK, "chat-a-1") in reasons(gaps)


PARTS = """
DCGM_FI_DEV_FB_FREE{UUID="GPU-a",pod="chat-a-1",namespace="serving"} 40000
DCGM_FI_DEV_FB_USED{UUID="GPU-a"%s} 40000
DCGM_FI_DEV_FB_USED{UUID="GPU-a",pod="chat-a-1",namespace="serving",pod_uid="uid-chat-a-1"} %s
"""


@pytest.mark.parametrize(
    ("device", "own", "attribution", "memory", "shared"),
    [
        pytest.param("", "30000", Attribution.PER_PROCESS, 30000.0, True, id="own-row"),
        pytest.param("", "0", Attribution.PER_PROCESS, 0.0, True, id="mapped-and-idle"),
        pytest.param("", "40000", Attribution.EXCLUSIVE, 40000.0, False, id="repeated-device-row"),
        pytest.param("", "NaN", Attribution.DEVICE_ONLY, 40000.0, True, id="own-row-is-odd"),
        pytest.param(
            ',namespace="gpu-operator",pod="nvidia-dcgm-exporter-x"',
            "30000",
            Attribution.PER_PROCESS,
            30000.0,
            True,
            id="device-row-labelled-with-the-exporter",
        ),
    ],
)
def test_rows_of_processes(device: str, own: str, attribution: Attribution, memory: float, shared: bool) -> None:
    (gpu,), _ = read(PARTS % (device, own), "chat-a-1")
    assert (gpu.attribution, gpu.pod_memory_used, gpu.shared) == (attribution, memory * MIB, shared)
    assert gpu.memory_used == 40000.0 * MIB


def test_processes_do_not_stand_in_for_a_device_without_a_value() -> None:
    text = """
DCGM_FI_DEV_FB_USED{UUID="GPU-a"} NaN
DCGM_FI_DEV_FB_USED{UUID="GPU-a",pod="chat-a-1",namespace="serving",pod_uid="uid-chat-a-1"} 30000
"""
    (gpu,), gaps = read(text, "chat-a-1")
    assert (gpu.memory_used, gpu.pod_memory_used) == (None, 30000.0 * MIB)
    assert ("memory_used", GapReason.NON_FINITE, "chat-a-1") in reasons(gaps)


def test_exporter_is_known_by_the_pod_label_beside_an_exported_one() -> None:
    """Through Prometheus a free device carries only the exporter's own pod, whatever it is called."""
    text = """
DCGM_FI_DEV_FB_USED{UUID="GPU-a",pod="gpu-metrics-7",namespace="monitoring",exported_pod="chat-a-1"} 50
DCGM_FI_DEV_FB_USED{UUID="GPU-b",pod="gpu-metrics-7",namespace="monitoring"} 4
"""
    report = attribution_report(series_of(text), [pod("chat-a-1")], "serving")
    assert (report.series, report.labelled, report.attributed) == (2, 1, 1)


def test_live_pod_without_a_device_is_a_gap() -> None:
    _, gaps = read(C001 % "100", "chat-a-1", "chat-a-2")
    assert (WHOLE_PAGE, GapReason.EMPTY, "chat-a-2") in reasons(gaps)


def test_series_without_a_uuid_is_ambiguous() -> None:
    gpus, gaps = read('DCGM_FI_DEV_FB_USED{gpu="0",exported_pod="chat-a-1"} 50', "chat-a-1")
    assert gpus == ()
    assert reasons(gaps) == {(WHOLE_PAGE, GapReason.AMBIGUOUS_RESULT, "")}


def test_gaps_are_one_per_signal_reason_and_pod() -> None:
    lines = [
        f'DCGM_FI_DEV_FB_USED{{UUID="GPU-{index}",exported_pod="chat-a-1"}} 9223372036854775794' for index in range(8)
    ]
    _, gaps = read("\n".join(lines), "chat-a-1")
    assert len(gaps) == len(reasons(gaps)) == 3


def test_result_does_not_depend_on_the_order_of_series() -> None:
    series = series_of((PAGES / "a100-mig-mixed.prom").read_text())
    pods = list(recorded_pods("a100-mig-mixed.prom").values())
    assert build_gpus(series, pods, "llm-prod") == build_gpus(series[::-1], pods, "llm-prod")
    assert len(build_gpus(series, pods, "llm-prod")[0]) == 3


@pytest.mark.parametrize("value", [0.0, 1.0, 81920.0, 2.0**31, -1.0, float("nan"), float("inf")])
def test_ordinary_values_are_no_blanks(value: float) -> None:
    assert not is_blank(value)


def test_a_new_alias_is_no_lost_family() -> None:
    watch = FamilyWatch()
    watch.note("page", ["DCGM_FI_DEV_GPU_UTIL"])
    for _ in range(4):
        watch.note("page", ["DCGM_FI_DEV_GPU_UTIL_RATIO"])
    assert watch.gaps() == ()


def test_error_codes_come_and_go_without_a_gap() -> None:
    watch = FamilyWatch(polls=1)
    watch.note("page", ["DCGM_FI_DEV_XID_ERRORS"])
    watch.note("page", ["DCGM_FI_DEV_FB_USED"])
    assert watch.gaps() == ()


def test_page_that_is_read_no_more_loses_no_family() -> None:
    watch = FamilyWatch(polls=1)
    watch.note("page", ["DCGM_FI_DEV_GPU_UTIL"])
    watch.note("page", ["DCGM_FI_DEV_FB_USED"])
    assert [gap.signal for gap in watch.gaps()] == ["gpu_utilization"]
    watch.keep([])
    assert watch.gaps() == ()


@pytest.mark.parametrize(
    ("template", "urls"),
    [
        pytest.param("http://gpu:9400/metrics", ["http://gpu:9400/metrics"], id="plain"),
        pytest.param("http://{node}:9400/metrics", ["http://n1:9400/metrics", "http://n2:9400/metrics"], id="node"),
        pytest.param("http://{node_ip}:9400/metrics", ["http://n1:9400/metrics", "http://n2:9400/metrics"], id="ip"),
    ],
)
def test_page_urls_are_of_nodes_that_run_live_pods(template: str, urls: list[str]) -> None:
    pods = [
        pod("a", node="n2"),
        pod("b", node="n1"),
        pod("c", node="n1"),
        pod("d", node="n3", terminating=True),
        pod("e", phase=PodPhase.PENDING),
    ]
    assert list(page_urls([template, template], pods)) == urls


# --- reading pages ---

TARGET = TargetStatus(namespace="serving", name="chat-a", current_replicas=1, pods=(pod("chat-a-1", node="127.0.0.1"),))


class HandClock:
    """A fake clock that moves only by hand; it cannot sleep."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def tick(self, at: float) -> float:
        self.at = at
        return at

    async def sleep_until(self, at: float) -> None:
        raise NotImplementedError


class FakeExporter:
    """A fake of the DCGM exporter: serves whatever `body` holds. It measures nothing and has no other endpoint."""

    def __init__(self, body: str) -> None:
        self.body: str | bytes = body
        self.status = 200
        self.served = 0
        self.hang = asyncio.Event()
        self.hang.set()
        self.clock = HandClock()
        self.url = ""

    async def serve(self, _: web.Request) -> web.Response:
        self.served += 1
        await self.hang.wait()
        body = self.body if isinstance(self.body, bytes) else self.body.encode()
        headers = {"Content-Type": "text/plain; version=0.0.4"} | ({"Location": self.url} if self.status == 302 else {})
        return web.Response(status=self.status, body=body, headers=headers)

    def source(self, **settings: Any) -> DcgmSource:
        return DcgmSource(DcgmSignals(urls=(self.url,), **settings), self.clock)


@asynccontextmanager
async def exporter(body: str) -> AsyncIterator[FakeExporter]:
    fake = FakeExporter(body)
    app = web.Application()
    app.router.add_get("/metrics", fake.serve)
    server = TestServer(app, host="127.0.0.1", port=0)
    await server.start_server()
    fake.url = str(server.make_url("/metrics"))
    try:
        yield fake
    finally:
        fake.hang.set()
        await server.close()


async def test_page_is_read_once_an_interval_and_its_reading_stands_between() -> None:
    async with exporter(C017) as fake:
        source = fake.source(interval_s=15.0)
        readings = [await source.read(TARGET, fake.clock.tick(at)) for at in (0.0, 5.0, 10.0, 14.8)]
        await source.close()
    assert fake.served == 2
    assert all(reading is readings[0] for reading in readings[:3])
    assert [gpu.pod_uid for gpu in readings[0].gpus] == ["uid-chat-a-1"]
    assert str(source.report(TARGET)).startswith("pod labels: pod; 3 of 3 GPU series attributed")


async def test_pods_that_changed_are_attributed_anew_from_the_same_page() -> None:
    async with exporter(C017) as fake:
        source = fake.source()
        first = await source.read(TARGET, fake.clock.tick(0.0))
        ending = replace(TARGET, pods=(replace(TARGET.pods[0], terminating=True),))
        second = await source.read(ending, fake.clock.tick(5.0))
        await source.close()
    assert fake.served == 1
    assert (len(first.gpus), len(second.gpus)) == (1, 0)
    assert (WHOLE_PAGE, GapReason.POD_NOT_LIVE, "chat-a-1") in reasons(second.gaps)


async def test_page_of_a_new_node_is_read_at_once() -> None:
    async with exporter(C017) as fake:
        template = fake.url.replace("127.0.0.1", "{node}")
        source = DcgmSource(DcgmSignals(urls=(template,), interval_s=15.0), fake.clock)
        without = await source.read(replace(TARGET, pods=()), fake.clock.tick(0.0))
        with_pod = await source.read(TARGET, fake.clock.tick(5.0))
        await source.close()
    assert (without.gpus, without.gaps) == ((), ())
    assert len(with_pod.gpus) == 1


def whole(reading: Reading) -> set[GapReason]:
    return {gap.reason for gap in reading.gaps if gap.signal == WHOLE_PAGE and not gap.pod}


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        pytest.param(200, "", GapReason.EMPTY, id="empty-while-reloading"),
        pytest.param(200, "<html><body>login</body></html>\n", GapReason.NO_FAMILIES, id="html"),
        pytest.param(200, "process_cpu_seconds_total 3\n", GapReason.NO_FAMILIES, id="another-exporter"),
        pytest.param(200, 'DCGM_FI_DEV_FB_USED{UUID="GPU-a"} <<<\n', GapReason.PARSE_ERROR, id="no-number"),
        pytest.param(200, "#" * 2000, GapReason.BODY_TOO_LARGE, id="huge"),
        pytest.param(500, C017, GapReason.HTTP_STATUS, id="gather-error"),
        pytest.param(302, C017, GapReason.HTTP_STATUS, id="redirect"),
        pytest.param(401, C017, GapReason.UNAUTHORIZED, id="no-login"),
    ],
)
async def test_bad_page_is_a_gap_and_the_last_good_one_stands_until_stale(
    monkeypatch: pytest.MonkeyPatch, status: int, body: str, reason: GapReason
) -> None:
    monkeypatch.setattr(dcgm, "MAX_BODY", 1000)
    async with exporter(C017) as fake:
        source = fake.source(interval_s=5.0, stale_after_s=10.0)
        good = await source.read(TARGET, fake.clock.tick(0.0))
        fake.status, fake.body = status, body
        held = await source.read(TARGET, fake.clock.tick(6.0))
        stale = await source.read(TARGET, fake.clock.tick(12.0))
        fake.status, fake.body = 200, C017
        again = await source.read(TARGET, fake.clock.tick(18.0))
        await source.close()
    assert (len(good.gpus), good.gaps) == (1, ())
    assert (held.gpus, whole(held)) == (good.gpus, {reason})
    assert (stale.gpus, whole(stale)) == ((), {reason, GapReason.STALE})
    assert (again.gpus, again.gaps) == (good.gpus, ())


async def test_hanging_exporter_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcgm, "TIMEOUT_S", 0.05)
    async with exporter(C017) as fake:
        fake.hang.clear()
        source = fake.source()
        reading = await source.read(TARGET, fake.clock.tick(0.0))
        await source.close()
    assert reading.gpus == ()
    assert whole(reading) == {GapReason.TIMEOUT}


@pytest.mark.parametrize(
    "url",
    [
        pytest.param("http://user:s3cret@127.0.0.1:1/metrics", id="refused"),
        pytest.param("http://user:s3cret@[::1/metrics", id="malformed"),
    ],
)
async def test_unreachable_page_is_a_gap_that_shows_no_credentials(url: str) -> None:
    source = DcgmSource(DcgmSignals(urls=(url,)), HandClock())
    reading = await source.read(TARGET, 0.0)
    await source.close()
    assert whole(reading) == {GapReason.UNREACHABLE}
    assert "s3cret" not in str(reading)


async def test_one_bad_page_leaves_the_others() -> None:
    async with exporter(C017) as fake:
        settings = DcgmSignals(urls=(fake.url, "http://127.0.0.1:1/metrics"))
        source = DcgmSource(settings, fake.clock)
        reading = await source.read(TARGET, fake.clock.tick(0.0))
        await source.close()
    assert len(reading.gpus) == 1
    assert [(gap.reason, gap.detail.split(":")[0]) for gap in reading.gaps] == [(GapReason.UNREACHABLE, "1 of 2 pages")]


async def test_line_that_is_no_number_is_counted_and_the_rest_used() -> None:
    odd = 'DCGM_FI_PROF_GR_ENGINE_ACTIVE{UUID="GPU-a",pod="chat-a-1"} ERROR - FAILED TO CONVERT TO STRING\n'
    async with exporter(C017 + odd) as fake:
        source = fake.source()
        reading = await source.read(TARGET, fake.clock.tick(0.0))
        await source.close()
    assert [gpu.utilization for gpu in reading.gpus] == [0.55]
    assert reasons(reading.gaps) == {("gpu_utilization", GapReason.PARSE_ERROR, "")}
