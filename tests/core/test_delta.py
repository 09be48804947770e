"""Snapshots as differences: what a difference says, and that it gives the snapshot back."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from autoscaler.core import delta
from autoscaler.core.plain import to_plain
from autoscaler.core.signals import COLUMN, ENGINE_COLUMNS
from autoscaler.core.types import (
    Attribution,
    Drain,
    EngineKey,
    Engines,
    Floats,
    Gap,
    GapReason,
    Gpu,
    HistogramRows,
    Limits,
    Pod,
    PodLimits,
    PodPhase,
    Sample,
    Snapshot,
    TargetStatus,
    Template,
)

AT = 1764500000.0
KEYS = (EngineKey("a"), EngineKey("b"))
BOUNDS = (0.1, 1.0, np.inf)
PODS = (Pod(name="chat-a", uid="a", created_at=AT - 60.0), Pod(name="chat-b", uid="b", phase=PodPhase.PENDING))
TARGET = TargetStatus(namespace="serving", name="chat", current_replicas=2, pods=PODS)
SCALED = replace(
    TARGET,
    current_replicas=3,
    drain=Drain(grace_s=330.0, pre_stop_s=None),
    template=Template(limits=Limits(max_num_seqs=64), chunked_prefill=None, max_surge=1, note='{"version":1}'),
    refused="quota",
    scaled_by="autoscaler",
    scaled_at=AT + 3.0,
)
GPUS = (Gpu(uuid="g0", pod_uid="a", utilization=0.5, memory_used=7.0), Gpu(uuid="g1", pod_uid="b", utilization=0.25))

LIMITS = (
    PodLimits(
        pod_uid="a",
        limits=Limits(max_num_seqs=16, long_prefill_token_threshold=0),
        ceiling=Limits(max_num_seqs=64, max_num_batched_tokens=2048),
        floor=Limits(max_num_seqs=1),
        generation=7,
        applied=6,
    ),
    PodLimits(pod_uid="b", refused="another scheduler"),
)


def values(**columns: list[float]) -> Floats:
    table = np.full((len(next(iter(columns.values()))), len(ENGINE_COLUMNS)), np.nan)
    for name, column in columns.items():
        table[:, COLUMN[name]] = column
    return table


def ttft(counts: list[list[float]], rows: tuple[int, ...] = (0, 1)) -> dict[str, tuple[HistogramRows, ...]]:
    table = np.array(counts, dtype=np.float64)
    return {"ttft": (HistogramRows(bounds=BOUNDS, rows=np.array(rows, dtype=np.intp), counts=table),)}


BASE = Snapshot(
    at=AT,
    target=TARGET,
    engines=Engines(
        keys=KEYS,
        values=values(read_at=[AT + 0.004, AT + 0.012], generation_tokens=[100.0, 7.0], kv_cache_usage=[0.5, 0.25]),
        histograms=ttft([[1, 2, 2], [0, 5, 9]]),
    ),
    gpus=GPUS,
    samples=(Sample(signal="upstream_queue", value=3.0, at=AT - 2.0, source="prometheus"),),
    gaps=(Gap(signal="e2e", reason=GapReason.FAMILY_MISSING, source="vllm", pod="chat-b"),),
)


def changed(**parts: Any) -> Snapshot:
    """Return the base, five seconds later, with other parts; `values`, `keys` and `histograms` are the engines'."""
    own = {name: parts.pop(name) for name in ("keys", "values", "histograms") if name in parts}
    engines = replace(BASE.engines, **own)
    return replace(BASE, at=AT + 5.0, engines=engines, **parts)


def assert_same(one: Snapshot, other: Snapshot) -> None:
    assert (one.at, one.target, one.gpus, one.samples, one.gaps, one.limits) == (
        other.at,
        other.target,
        other.gpus,
        other.samples,
        other.gaps,
        other.limits,
    )
    assert one.engines.keys == other.engines.keys
    assert one.engines.values.tobytes() == other.engines.values.tobytes()
    assert list(one.engines.histograms) == list(other.engines.histograms)
    for name, parts in one.engines.histograms.items():
        for mine, its in zip(parts, other.engines.histograms[name], strict=True):
            assert mine.bounds == its.bounds
            assert mine.rows.tolist() == its.rows.tolist()
            assert mine.counts.tobytes() == its.counts.tobytes()


READ = {"read_at": [AT + 0.004, AT + 0.012]}
KV = {"kv_cache_usage": [0.5, 0.25]}


@pytest.mark.parametrize(
    ("snapshot", "difference"),
    [
        pytest.param(changed(), {}, id="nothing changed"),
        pytest.param(
            changed(values=values(read_at=[AT + 5.001, AT + 4.9], generation_tokens=[101.0, 5.0], **KV)),
            {"read_at": "1 -100", "adds": [[COLUMN["generation_tokens"]], "1 -2"]},
            id="whole numbers",
        ),
        pytest.param(
            changed(values=values(generation_tokens=[100.0, np.nan], kv_cache_usage=[0.5, 1 / 3], **READ)),
            {"sets": [[COLUMN["kv_cache_usage"], COLUMN["generation_tokens"]], [0.5, 1 / 3, 100.0, "nan"]]},
            id="fractions, and a reading that is lost",
        ),
        pytest.param(
            changed(values=values(generation_tokens=[2.0**60, -0.0], **READ, **KV)),
            {"sets": [[COLUMN["generation_tokens"]], [2.0**60, -0.0]]},
            id="no exact difference",
        ),
        pytest.param(
            changed(values=values(read_at=[AT + 0.0040001, np.inf], generation_tokens=[100.0, 7.0], **KV)),
            {"sets": [[COLUMN["read_at"]], [AT + 0.0040001, "inf"]]},
            id="times that are not whole milliseconds",
        ),
        pytest.param(
            changed(histograms=ttft([[1, 2, 3], [4, 9, 13]])), {"increments": "2 1 0 4"}, id="buckets, counted apart"
        ),
        pytest.param(
            changed(histograms=ttft([[0, 0, 1], [0, 5, 9]])), {"increments": "0 -1 0 -1 0 1"}, id="an engine restarted"
        ),
        pytest.param(
            changed(histograms=ttft([[1, 2, 2.5], [0, 5, 9]])),
            {"counts": [1.0, 2.0, 2.5, 0.0, 5.0, 9.0]},
            id="a count that is not whole",
        ),
        pytest.param(changed(histograms={}), {"layout": []}, id="no histograms"),
        pytest.param(
            changed(target=SCALED),
            {
                "target": {
                    each.name: to_plain(getattr(SCALED, each.name))
                    for each in fields(TargetStatus)
                    if each.name != "pods"
                }
            },
            id="another replica count",
        ),
        pytest.param(changed(target=replace(TARGET, pods=PODS[1:])), {"pods": [1]}, id="a pod is gone"),
        pytest.param(
            changed(gpus=(replace(GPUS[0], utilization=1.0), replace(GPUS[1], xid=79))),
            {"gpu_readings": {"utilization": [1.0, 0.25], "xid": [0, 79]}},
            id="devices' readings",
        ),
        pytest.param(changed(gpus=()), {"gpus": []}, id="no devices"),
        pytest.param(changed(samples=(), gaps=()), {"samples": [], "gaps": []}, id="no samples, no gaps"),
        pytest.param(changed(limits=LIMITS), {"limits": to_plain(LIMITS)}, id="batching limits"),
    ],
)
def test_only_what_changed_is_said(snapshot: Snapshot, difference: dict[str, Any]) -> None:
    writer, reader = delta.Known(), delta.Known()
    assert_same(delta.decode(reader, delta.encode(writer, BASE)), BASE)
    line = delta.encode(writer, snapshot)
    assert line == {"at": AT + 5.0, **difference}
    assert_same(delta.decode(reader, line), snapshot)


def test_an_engine_that_stays_keeps_its_numbers_when_another_comes_or_goes() -> None:
    new = EngineKey("aa")
    table = values(read_at=[AT + 5.0] * 2, generation_tokens=[50.0, 8.0], kv_cache_usage=[0.5, 0.25])
    snapshot = changed(keys=(new, KEYS[1]), values=table, histograms=ttft([[1, 1, 1], [0, 5, 10]]))
    writer, reader = delta.Known(), delta.Known()
    delta.decode(reader, delta.encode(writer, BASE))
    line = delta.encode(writer, snapshot)
    assert line["keys"] == [["aa", "0"], ["b", "0"]]
    assert line["adds"] == [[COLUMN["generation_tokens"]], "50 1"]
    assert line["increments"] == "0 1 4 1"
    assert_same(delta.decode(reader, line), snapshot)


def test_new_readings_leave_a_device_all_that_it_is() -> None:
    device = Gpu(
        uuid="g0",
        instance="3",
        pod_uid="a",
        attribution=Attribution.PER_PROCESS,
        shared=True,
        memory_used=7.0,
        memory_free=2.0,
        pod_memory_used=5.0,
        utilization=0.5,
        xid=31,
    )
    assert all(getattr(device, each.name) != each.default for each in fields(Gpu)), "a field's default shows no loss"
    writer, reader = delta.Known(), delta.Known()
    for gpu in (device, replace(device, memory_used=8.0), replace(device, memory_used=8.0, xid=79, utilization=None)):
        snapshot = changed(gpus=(gpu,))
        assert_same(delta.decode(reader, delta.encode(writer, snapshot)), snapshot)


def test_parts_that_did_not_change_are_the_same_objects() -> None:
    writer, reader = delta.Known(), delta.Known()
    first = delta.decode(reader, delta.encode(writer, BASE))
    copy = replace(BASE, at=AT + 5.0, target=replace(TARGET), gpus=tuple(replace(gpu) for gpu in GPUS))
    second = delta.decode(reader, delta.encode(writer, copy))
    assert second.target is first.target
    assert second.gpus is first.gpus
    assert second.samples is first.samples
    assert second.gaps is first.gaps
    assert second.engines.keys is first.engines.keys
    assert second.engines.values is first.engines.values
    mine, its = first.engines.histograms["ttft"][0], second.engines.histograms["ttft"][0]
    assert mine.bounds is its.bounds
    assert mine.rows is its.rows


def test_pods_survive_a_new_replica_count_and_a_new_neighbour_as_the_same_objects() -> None:
    writer, reader = delta.Known(), delta.Known()
    first = delta.decode(reader, delta.encode(writer, BASE))
    scaled = delta.decode(reader, delta.encode(writer, changed(target=SCALED)))
    assert scaled.target.pods is first.target.pods
    grown = replace(SCALED, pods=(*PODS, Pod(name="chat-c", uid="c")))
    third = delta.decode(reader, delta.encode(writer, changed(target=grown)))
    assert third.target == grown
    assert [pod is before for pod, before in zip(third.target.pods, first.target.pods, strict=False)] == [True, True]


def test_bounds_and_rows_survive_a_new_layout_as_the_same_objects() -> None:
    writer, reader = delta.Known(), delta.Known()
    first = delta.decode(reader, delta.encode(writer, BASE))
    itl = HistogramRows(bounds=(0.5, np.inf), rows=np.array([0, 1]), counts=np.zeros((2, 2)))
    second = changed(histograms={**BASE.engines.histograms, "itl": (itl,)})
    after = delta.decode(reader, delta.encode(writer, second))
    assert_same(after, second)
    mine = first.engines.histograms["ttft"][0]
    assert after.engines.histograms["ttft"][0].bounds is mine.bounds
    assert after.engines.histograms["ttft"][0].rows is mine.rows
    assert after.engines.histograms["itl"][0].rows is mine.rows


def test_snapshots_that_were_read_cannot_be_written_to() -> None:
    read = delta.decode(delta.Known(), delta.encode(delta.Known(), BASE))
    for array in (read.engines.values, read.engines.histograms["ttft"][0].counts):
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 1.0


def test_columns_that_a_recording_lacks_are_unknown() -> None:
    known = delta.Known(columns=("asleep", "no_longer_known", "read_at"))
    line = delta.encode(delta.Known(), replace(BASE, engines=Engines(keys=KEYS, values=values(asleep=[0.0, 0.0]))))
    line["adds"] = [[0, 1, 2], "1 0 8 9 5 6"]
    del line["sets"]
    read = delta.decode(known, line).engines.values
    expected = values(asleep=[1.0, 0.0], read_at=[5.0, 6.0])
    assert read.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param({"at": "noon"}, id="at is no number"),
        pytest.param({"read_at": "1"}, id="too few numbers"),
        pytest.param({"read_at": "1 2x"}, id="letters among the numbers"),
        pytest.param({"read_at": "1 -"}, id="a lone sign"),
        pytest.param({"read_at": "1-2"}, id="no blank"),
        pytest.param({"read_at": ""}, id="no numbers"),
        pytest.param({"read_at": 5}, id="no text"),
        pytest.param({"adds": [[99], "1 2"]}, id="no such column"),
        pytest.param({"adds": "1 2"}, id="no columns"),
        pytest.param({"sets": [[4], [0.5]]}, id="too few values"),
        pytest.param({"sets": [[4], ["a", "b"]]}, id="words for values"),
        pytest.param({"increments": "5 1 0 1"}, id="past the last bucket"),
        pytest.param({"increments": "5 1 0"}, id="half a pair"),
        pytest.param({"counts": [1.0]}, id="too few counts"),
        pytest.param({"layout": [["ttft", [[1.0], [7]]]]}, id="no such engine"),
        pytest.param({"keys": [["a", "b", "c"]]}, id="no engine key"),
        pytest.param({"pods": [2]}, id="no such pod"),
        pytest.param({"pods": [{"name": "a"}]}, id="half a pod"),
        pytest.param({"pods": [{"name": "a", "uid": "a", "phase": "Lost"}]}, id="no such phase"),
        pytest.param({"target": {"name": "a"}}, id="half a target"),
        pytest.param({"target": []}, id="target is no object"),
        pytest.param({"gpus": [{"serial": 5}]}, id="no such field"),
        pytest.param({"gpu_readings": {"xid": [1]}}, id="too few devices"),
        pytest.param({"samples": 5}, id="samples is no list"),
        pytest.param({"gaps": [{"signal": "ttft", "reason": "mood"}]}, id="no such reason"),
    ],
)
def test_a_line_that_does_not_fit_is_a_value_error(damage: dict[str, Any]) -> None:
    known = delta.Known()
    delta.decode(known, delta.encode(delta.Known(), BASE))
    with pytest.raises(ValueError, match=r"Error|Warning"):
        delta.decode(known, {"at": AT + 5.0, **damage})


def test_the_first_line_of_a_policy_must_say_its_target() -> None:
    with pytest.raises(ValueError, match="must say its target"):
        delta.decode(delta.Known(), {"at": AT})
