"""Recordings: exact, whole ticks only after a kill, and a clear message for everything that is no recording."""

import gzip
import json
import math
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.core.delta import COLUMNS
from autoscaler.core.memory import Memory, memory_to_plain
from autoscaler.core.plain import to_plain
from autoscaler.core.signals import ENGINE_COLUMNS
from autoscaler.core.types import (
    Attribution,
    Decision,
    Demand,
    EngineKey,
    Engines,
    Floats,
    Forecast,
    Gap,
    GapReason,
    Gpu,
    HistogramRows,
    Hold,
    Mode,
    Outcome,
    Pod,
    PodPhase,
    Proposal,
    Reason,
    Sample,
    ScaleReplicas,
    Snapshot,
    TargetStatus,
)
from autoscaler.errors import TraceError
from autoscaler.ports import Report
from autoscaler.trace import FORMAT, VERSION, MemoryLine, PolicyLine, Recorder, TickLine, TornEnd, read_trace

EPOCH = 1764500000.0


def snapshot_at(at: float, count: float = 0.0) -> Snapshot:
    """Return a small snapshot whose counters and histogram stand at `count`."""
    values = np.full((1, len(ENGINE_COLUMNS)), count)
    ttft = HistogramRows(bounds=(1.0, math.inf), rows=np.array([0]), counts=np.array([[count, 2.0 * count]]))
    pods = (Pod(name="chat-a", uid="a"),)
    return Snapshot(
        at=at,
        target=TargetStatus(namespace="serving", name="chat", current_replicas=1, pods=pods),
        engines=Engines(keys=(EngineKey("a"),), values=values, histograms={"ttft": (ttft,)}),
    )


def decision_at(at: float) -> Decision:
    return Decision(
        at=at,
        score=None,
        demand=Demand(itl=1.0 / 3.0),
        forecast=Forecast(horizon_s=185.0),
        proposal=Proposal(current=1, replicas=2, reason=Reason.UP_DEMAND),
        reason=Reason.UP_DEMAND,
        mode=Mode.NORMAL,
        action=ScaleReplicas(seen=1, to=2),
    )


def record(path: Path, times: list[float], policy: str = "chat") -> None:
    with Recorder(path, "test") as recorder:
        recorder.policy(policy, {"name": policy})
        for index, at in enumerate(times):
            recorder.tick(policy, snapshot_at(at, float(index)), decision_at(at), Outcome.APPLIED, 0.002)


def ticks_of(path: Path) -> list[TickLine]:
    with read_trace(path, decisions=True) as events:
        return [event for event in events if isinstance(event, TickLine)]


def bits(values: Floats) -> tuple[tuple[int, ...], bytes]:
    """Return shape and bits, every NaN as the same one."""
    return values.shape, np.where(np.isnan(values), np.nan, values).tobytes()


def comparable(snapshot: Snapshot) -> object:
    """Return what must be equal in two equal snapshots; floats by their text, which tells NaN and -0.0."""
    histograms = [
        (name, [(part.bounds, part.rows.tolist(), bits(part.counts)) for part in parts])
        for name, parts in snapshot.engines.histograms.items()
    ]
    rest = repr((snapshot.at, snapshot.target, snapshot.gpus, snapshot.samples, snapshot.gaps, snapshot.schedules))
    return rest, snapshot.engines.keys, bits(snapshot.engines.values), histograms


# Any snapshots whatever, drawn from small pools so that parts often stay, move a little, or jump.

NUMBERS = st.one_of(
    st.integers(0, 5).map(float),
    st.sampled_from([0.1, 1 / 3, 0.25, -0.0, math.nan, math.inf, -math.inf, EPOCH + 0.123, EPOCH + 1e-7, 5e-324]),
    st.sampled_from([2.0**51, -(2.0**51), 2.0**53, 2.0**53 + 2.0, 1e300]),
)
KNOWN_NUMBERS = st.one_of(st.integers(0, 3).map(float), st.just(0.7))
NAMES = st.sampled_from(["a", "b", "c"])
PODS = st.builds(
    Pod,
    name=NAMES,
    uid=NAMES,
    phase=st.sampled_from(PodPhase),
    ready_at=st.none() | KNOWN_NUMBERS,
    waiting_reason=st.sampled_from(["", 'Crash"Loop\n', "🦙\udc80"]),
    max_num_seqs=st.none() | st.integers(1, 2),
    deletion_cost=st.none() | st.integers(-1, 1),
)
TARGETS = st.builds(
    TargetStatus,
    namespace=st.just("serving"),
    name=NAMES,
    current_replicas=st.integers(0, 3),
    rollout=st.booleans(),
    pods=st.lists(PODS, max_size=3, unique_by=lambda pod: pod.uid).map(tuple),
)
GPUS = st.builds(
    Gpu,
    uuid=NAMES,
    pod_uid=NAMES,
    attribution=st.sampled_from(Attribution),
    memory_used=st.none() | NUMBERS,
    utilization=st.none() | KNOWN_NUMBERS,
    xid=st.integers(0, 1),
)
SAMPLES = st.builds(Sample, signal=st.just("ttft"), value=NUMBERS, at=KNOWN_NUMBERS, partial=st.booleans())
GAPS = st.builds(Gap, signal=NAMES, reason=st.sampled_from(GapReason), pod=NAMES, detail=st.text(max_size=3))
TIMES = st.one_of(st.integers(0, 10**7).map(lambda ms: EPOCH + ms / 1000.0), NUMBERS.filter(math.isfinite))


@st.composite
def engines(draw: st.DrawFn) -> Engines:
    keys = tuple(sorted(draw(st.sets(st.builds(EngineKey, NAMES, st.sampled_from(["0", "1"])), max_size=3))))
    numbers = draw(st.sampled_from([KNOWN_NUMBERS, NUMBERS]))
    cells = draw(st.lists(numbers, min_size=4, max_size=4))
    values = np.resize(np.array(cells), (len(keys), len(ENGINE_COLUMNS)))
    values[:, 0] = [draw(TIMES) for _ in keys]
    histograms: dict[str, tuple[HistogramRows, ...]] = {}
    for name in draw(st.lists(st.sampled_from(["ttft", "itl"]), max_size=2, unique=True)):
        split = draw(st.integers(0, len(keys)))
        blocks = [histogram(draw, range(split)), histogram(draw, range(split, len(keys)))]
        histograms[name] = tuple(block for block in blocks if len(block.rows))
    return Engines(keys=keys, values=values, histograms=histograms)


def histogram(draw: st.DrawFn, rows: range) -> HistogramRows:
    bounds = draw(st.sampled_from([(math.inf,), (0.5, math.inf), (0.5, 1.0, 2.5, math.inf)]))
    counts = st.integers(0, 4).map(float)
    cells = draw(st.lists(counts | NUMBERS if draw(st.booleans()) else counts, min_size=5, max_size=5))
    table = np.resize(np.array(cells), (len(rows), len(bounds)))
    return HistogramRows(bounds=bounds, rows=np.array(rows, dtype=np.intp), counts=table)


SNAPSHOTS = st.builds(
    Snapshot,
    at=TIMES,
    target=TARGETS,
    engines=engines(),
    gpus=st.lists(GPUS, max_size=2).map(tuple),
    samples=st.lists(SAMPLES, max_size=2).map(tuple),
    gaps=st.lists(GAPS, max_size=2).map(tuple),
    schedules=st.lists(NAMES, max_size=2, unique=True).map(tuple),
)


@st.composite
def runs(draw: st.DrawFn) -> list[tuple[str, Snapshot]]:
    """Return ticks of several policies, each part of a tick often the one of an earlier tick."""
    pool = draw(st.lists(SNAPSHOTS, min_size=1, max_size=4))
    ticks = []
    for _ in range(draw(st.integers(1, 6))):
        one, other = draw(st.sampled_from(pool)), draw(st.sampled_from(pool))
        mixed = replace(one, target=other.target, gpus=other.gpus) if draw(st.booleans()) else one
        ticks.append((draw(st.sampled_from(["chat", "code"])), mixed))
    return ticks


@given(runs())
def test_snapshots_of_several_policies_come_back_bit_for_bit(ticks: list[tuple[str, Snapshot]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        with Recorder(path, "test") as recorder:
            for policy, snapshot in ticks:
                recorder.tick(policy, snapshot, decision_at(snapshot.at), Outcome.UNCHANGED, 0.001)
        read = ticks_of(path)
    assert [(tick.policy, comparable(tick.snapshot)) for tick in read] == [
        (policy, comparable(snapshot)) for policy, snapshot in ticks
    ]


def test_events_come_back_in_order_with_all_they_carry(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    hold = replace(decision_at(5.0), action=Hold(), score=None)
    with Recorder(path, "autoscaler 0.1.0") as recorder:
        recorder.policy("chat", {"name": "chat", "replicas": {"max": 4, "ratio": math.inf}})
        recorder.tick("chat", snapshot_at(5.0), hold, Outcome.UNCHANGED, 0.25)
        recorder.policy("chat", {"name": "chat", "replicas": {"max": 8}})
        recorder.tick("chat", snapshot_at(10.0), decision_at(10.0), Outcome.FAILED, 0.5)
    with read_trace(path, decisions=True) as events:
        assert events.header["created_by"] == "autoscaler 0.1.0"
        assert events.header["version"] == VERSION
        one, first, two, second = events
    assert one == PolicyLine(name="chat", plain={"name": "chat", "replicas": {"max": 4, "ratio": "inf"}})
    assert two == PolicyLine(name="chat", plain={"name": "chat", "replicas": {"max": 8}})
    assert isinstance(first, TickLine)
    assert isinstance(second, TickLine)
    assert (first.outcome, first.duration_s, first.line) == (Outcome.UNCHANGED, 0.25, 3)
    assert (second.outcome, second.duration_s, second.line) == (Outcome.FAILED, 0.5, 6)
    assert first.decision == to_plain(hold)
    assert second.decision == to_plain(decision_at(10.0))
    assert events.torn is None
    assert events.position == events.size == path.stat().st_size


def test_decisions_can_be_skipped(tmp_path: Path) -> None:
    record(tmp_path / "trace", [0.0, 5.0])
    with read_trace(tmp_path / "trace", decisions=False) as events:
        _, first, second = events
    assert isinstance(first, TickLine)
    assert isinstance(second, TickLine)
    assert (first.decision, first.duration_s, first.outcome) == (None, None, Outcome.APPLIED)
    assert second.snapshot.at == 5.0


def test_a_long_recording_is_read_piece_by_piece(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    chance = np.random.default_rng(1)
    with Recorder(path, "test") as recorder:
        for index in range(300):
            snapshot = snapshot_at(5.0 * index)
            values = np.round(chance.random((20, len(ENGINE_COLUMNS))) * 1e9)
            keys = tuple(EngineKey(f"{row:02}") for row in range(20))
            busy = replace(snapshot, engines=Engines(keys=keys, values=values))
            recorder.tick("chat", busy, decision_at(snapshot.at), Outcome.UNCHANGED, 0.001)
    with read_trace(path, decisions=False) as events:
        positions = [events.position for _ in events]
    assert len(set(positions)) > 3
    assert positions == sorted(positions)
    assert positions[0] < events.size == positions[-1]


def test_a_memory_comes_back_before_the_tick_that_knew_of_it(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    memory = Memory(target="serving/chat", at=7.0, last_up_at=5.123, changes=((5.123, 2),), starts=(180.25,))
    with Recorder(path, "test") as recorder:
        recorder.memory("chat", 9.5, memory)
        recorder.tick("chat", snapshot_at(10.0), decision_at(10.0), Outcome.UNCHANGED, 0.001)
    with read_trace(path, decisions=False) as events:
        known, tick = list(events)
    assert isinstance(known, MemoryLine)
    assert isinstance(tick, TickLine)
    assert (known.policy, known.at, tick.snapshot.at) == ("chat", 9.5, 10.0)
    assert memory_to_plain(known.memory) == memory_to_plain(memory)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param({"memory": "chat", "at": 1.0, "plain": {"version": 2}}, id="newer"),
        pytest.param({"memory": "chat", "at": None, "plain": {"version": 1, "target": "a/b", "at": 1.0}}, id="no time"),
        pytest.param({"memory": "chat", "at": 1.0}, id="nothing"),
    ],
)
def test_a_damaged_memory_is_named_by_its_line(tmp_path: Path, line: Mapping[str, Any]) -> None:
    header = {"format": FORMAT, "version": VERSION, "created_by": "test", "columns": COLUMNS}
    text = "".join(json.dumps(one) + "\n" for one in (header, line))
    (tmp_path / "trace").write_bytes(gzip.compress(text.encode()))
    with read_trace(tmp_path / "trace", decisions=False) as events, pytest.raises(TraceError, match=": line 2: "):
        list(events)


def test_reading_may_stop_early(tmp_path: Path) -> None:
    record(tmp_path / "trace", [0.0, 5.0])
    with read_trace(tmp_path / "trace", decisions=True) as events:
        assert isinstance(next(iter(events)), PolicyLine)


def test_every_tick_can_be_read_while_the_recording_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with Recorder(path, "test") as recorder:
        for index in range(3):
            recorder.tick("chat", snapshot_at(5.0 * index), decision_at(5.0 * index), Outcome.UNCHANGED, 0.001)
            assert len(ticks_of(path)) == index + 1


def test_the_recorder_is_a_report(tmp_path: Path) -> None:
    with Recorder(tmp_path / "trace", "test") as recorder:
        report: Report = recorder
        report.tick("chat", snapshot_at(0.0), decision_at(0.0), Outcome.SIMULATED, 0.001)
    assert [tick.outcome for tick in ticks_of(tmp_path / "trace")] == [Outcome.SIMULATED]


def test_gzip_tools_read_a_closed_recording(tmp_path: Path) -> None:
    record(tmp_path / "trace", [0.0])
    lines = gzip.decompress((tmp_path / "trace").read_bytes()).splitlines()
    assert [next(iter(json.loads(line))) for line in lines] == ["format", "policy", "tick", "decision"]
    assert json.loads(lines[0])["columns"] == list(COLUMNS)


# What cases.md asks of request traces, of the times of ticks


@pytest.mark.parametrize("start", [pytest.param(0.0, id="relative"), pytest.param(EPOCH, id="absolute")])
def test_c122_sub_second_times_are_kept(tmp_path: Path, start: float) -> None:
    times = [start + offset for offset in (0.002, 0.003, 0.007, 0.012, 0.0123456, 1.0)]
    record(tmp_path / "trace", times)
    read = [tick.snapshot.at for tick in ticks_of(tmp_path / "trace")]
    assert read == times
    offsets = [at - read[0] for at in read[:4]]
    assert offsets == pytest.approx([0.0, 0.001, 0.005, 0.010], abs=1e-6)


def test_c123_ticks_at_one_time_are_all_kept_in_file_order(tmp_path: Path) -> None:
    record(tmp_path / "trace", [700123.0] * 4)
    read = ticks_of(tmp_path / "trace")
    assert [tick.snapshot.at for tick in read] == [700123.0] * 4
    assert [tick.snapshot.engines.values[0, 1] for tick in read] == [0.0, 1.0, 2.0, 3.0]


def test_c125_absolute_times_come_back_as_they_are(tmp_path: Path) -> None:
    relative = [15.0 * index for index in range(60)]
    record(tmp_path / "relative", relative)
    record(tmp_path / "absolute", [EPOCH + at for at in relative])
    one, other = ticks_of(tmp_path / "relative"), ticks_of(tmp_path / "absolute")
    assert [tick.snapshot.at for tick in other] == [EPOCH + at for at in relative]
    assert [comparable(replace(tick.snapshot, at=0.0)) for tick in one] == [
        comparable(replace(tick.snapshot, at=0.0)) for tick in other
    ]


# Ends of all kinds


def small_recording(path: Path, *, closed: bool) -> bytes:
    """Return the bytes of a recording with two policies and four ticks."""
    recorder = Recorder(path, "test")
    recorder.policy("chat", {"name": "chat"})
    for index, policy in enumerate(("chat", "code", "chat", "code")):
        recorder.tick(policy, snapshot_at(5.0 * index, float(index)), decision_at(0.0), Outcome.APPLIED, 0.001)
    data = path.read_bytes()
    recorder.close()
    return path.read_bytes() if closed else data


@pytest.mark.parametrize("decisions", [True, False])
def test_a_torn_end_costs_at_most_the_tick_that_is_torn(tmp_path: Path, decisions: bool) -> None:
    data = small_recording(tmp_path / "whole", closed=True)
    whole = [comparable(tick.snapshot) for tick in ticks_of(tmp_path / "whole")]
    torn = tmp_path / "torn"
    counts = []
    for length in range(len(data)):
        torn.write_bytes(data[:length])
        with read_trace(torn, decisions=decisions) as events:
            read = [comparable(event.snapshot) for event in events if isinstance(event, TickLine)]
        assert read == whole[: len(read)]
        assert isinstance(events.torn, TornEnd)
        assert events.torn.line <= 2 + 2 * 4 + 1
        counts.append(len(read))
    assert counts == sorted(counts)
    assert set(counts) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("text", "ticks", "torn", "said"),
    [
        pytest.param("", 0, TornEnd(line=1, cut=False), "line 1 is missing: the recording was not closed", id="empty"),
        pytest.param(
            "H", 0, TornEnd(line=2, cut=False), "line 2 is missing: the recording was not closed", id="header"
        ),
        pytest.param(
            "HP", 0, TornEnd(line=3, cut=False), "line 3 is missing: the recording was not closed", id="policy"
        ),
        pytest.param(
            "HPTD", 1, TornEnd(line=5, cut=False), "line 5 is missing: the recording was not closed", id="tick"
        ),
        pytest.param("HPt", 0, TornEnd(line=3, cut=True), "line 3 is cut off, its tick was skipped", id="half a tick"),
        pytest.param("HPT", 0, TornEnd(line=4, cut=True), "line 4 is cut off, its tick was skipped", id="no decision"),
        pytest.param("HPTd", 0, TornEnd(line=4, cut=True), "line 4 is cut off, its tick was skipped", id="half of one"),
        pytest.param("HPTDT", 1, TornEnd(line=6, cut=True), "line 6 is cut off, its tick was skipped", id="the second"),
    ],
)
def test_a_torn_end_is_said_with_its_line(tmp_path: Path, text: str, ticks: int, torn: TornEnd, said: str) -> None:
    record(tmp_path / "whole", [0.0])
    header, policy, tick, decision = gzip.decompress((tmp_path / "whole").read_bytes()).splitlines(keepends=True)
    pieces = {"H": header, "P": policy, "T": tick, "D": decision, "t": tick[:40], "d": decision[:-1]}
    deflater = zlib.compressobj(6, zlib.DEFLATED, 31)
    data = deflater.compress(b"".join(pieces[piece] for piece in text)) + deflater.flush(zlib.Z_SYNC_FLUSH)
    (tmp_path / "torn").write_bytes(data if text else b"")
    with read_trace(tmp_path / "torn", decisions=True) as events:
        assert len([event for event in events if isinstance(event, TickLine)]) == ticks
    assert events.torn == torn
    assert str(events.torn) == said


KILLED = """
import sys
sys.path.insert(0, sys.argv[2])
from test_trace import *
recorder = Recorder(sys.argv[1], "test")
for index in range(10**9):
    recorder.tick("chat", snapshot_at(5.0 * index, float(index)), decision_at(0.0), Outcome.APPLIED, 0.001)
    print(index, flush=True)
"""


def test_a_killed_process_loses_no_tick_that_it_had_reported(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    script = [sys.executable, "-c", KILLED, str(path), str(Path(__file__).parent)]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for _ in range(100):
            child.stdout.readline()
        child.kill()
        reported = [int(line) for line in child.stdout]
    with read_trace(path, decisions=True) as events:
        read = [event.snapshot.at for event in events if isinstance(event, TickLine)]
    assert read == [5.0 * index for index in range(len(read))]
    assert len(read) > max(reported, default=99)
    assert events.torn is not None


# Files that are no recordings, or damaged ones


def header(**changes: object) -> Mapping[str, object]:
    return {"format": FORMAT, "version": VERSION, "created_by": "test", "columns": list(COLUMNS), **changes}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        pytest.param([header(version=VERSION + 1)], "line 1: version 2, written by test: .*up to 1", id="newer"),
        pytest.param([header(format="other")], 'line 1: no recording: .*"autoscaler-trace"', id="other format"),
        pytest.param([header(version="1")], "line 1: no recording", id="version is text"),
        pytest.param([header(columns=None)], "line 1: no recording: .*columns", id="no columns"),
        pytest.param([["a"]], "line 1: no line of this format", id="a list"),
        pytest.param([header(), {"policy": "chat"}], "line 2: .*policy, plain", id="half a policy"),
        pytest.param([header(), {"note": 1}], "line 2: no line of this format", id="an unknown line"),
        pytest.param([header(), {"decision": {}, "duration_s": 1}], "line 2: no line", id="decision without tick"),
        pytest.param(
            [header(), {"tick": "chat"}, {"policy": "chat"}], "line 3: the decision", id="tick without decision"
        ),
        pytest.param(
            [header(), {"tick": "chat"}, {"decision": {}, "duration_s": 1}], "line 2: .*outcome", id="bare tick"
        ),
        pytest.param([header(), {"tick": "chat"}, {"decision": {}}], "line 3: .*duration_s", id="bare decision"),
        pytest.param(
            [header(), {"tick": "chat", "outcome": "applied"}, {"decision": {}, "duration_s": 1}],
            "line 2: damaged tick: KeyError: 'at'",
            id="tick that does not fit",
        ),
    ],
)
def test_a_line_of_another_kind_is_named(tmp_path: Path, lines: list[object], message: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    with pytest.raises(TraceError, match=f"trace: {message}"):
        ticks_of(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b'{"format": "autoscaler-trace"}\n', "line 1: .*not gzip", id="not compressed"),
        pytest.param(b"PK\x03\x04", "line 1: .*not gzip", id="zip"),
        pytest.param(gzip.compress(b"time,requests\n1,2\n"), "line 1: not JSON", id="compressed CSV"),
        pytest.param(gzip.compress(b"\xff\xfe\x00\n"), "line 1: not JSON", id="not text"),
        pytest.param(gzip.compress(b"[" * 100_000 + b"\n"), "line 1: not JSON", id="deeply nested"),
        pytest.param(gzip.compress(b" " * (1 << 27)), "line 1: the line does not end", id="endless line"),
        pytest.param(b"\x1f\x8b\x08\x00 no deflate", "line 1: damaged", id="gzip header only"),
    ],
)
def test_a_file_that_is_no_recording_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "other"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=f"other: {message}"):
        read_trace(path, decisions=True)


def cut_out(lines: list[bytes]) -> list[bytes]:
    return lines[:2] + lines[3:]


def garble(lines: list[bytes]) -> list[bytes]:
    return [*lines[:4], lines[4][:30] + b"\x00\x00" + lines[4][32:], *lines[5:]]


@pytest.mark.parametrize(
    ("damage", "line"),
    [pytest.param(garble, 5, id="garbled tick"), pytest.param(cut_out, 3, id="tick cut out")],
)
def test_damage_in_the_middle_is_named_after_the_ticks_before_it(
    tmp_path: Path, damage: Callable[[list[bytes]], list[bytes]], line: int
) -> None:
    record(tmp_path / "trace", [0.0, 5.0, 10.0])
    lines = gzip.decompress((tmp_path / "trace").read_bytes()).splitlines(keepends=True)
    (tmp_path / "trace").write_bytes(gzip.compress(b"".join(damage(lines))))
    seen: list[Any] = []
    with read_trace(tmp_path / "trace", decisions=True) as events, pytest.raises(TraceError, match=f": line {line}: "):
        seen.extend(events)
    assert len([event for event in seen if isinstance(event, TickLine)]) == (line - 3) // 2


def test_a_flipped_bit_changes_no_tick_unnoticed(tmp_path: Path) -> None:
    data = small_recording(tmp_path / "whole", closed=True)
    whole = [comparable(tick.snapshot) for tick in ticks_of(tmp_path / "whole")]
    damaged = tmp_path / "damaged"
    noticed = 0
    for index in range(len(data)):
        damaged.write_bytes(data[:index] + bytes([data[index] ^ 0x10]) + data[index + 1 :])
        read = ticks_or_nothing(damaged)
        assert read in (None, whole), index
        noticed += read is None
    assert noticed > 0.9 * len(data)


def ticks_or_nothing(path: Path) -> list[object] | None:
    """Return the ticks of a recording; None when the reader complains, or finds a torn end."""
    try:
        with read_trace(path, decisions=True) as events:
            ticks = [comparable(event.snapshot) for event in events if isinstance(event, TickLine)]
    except TraceError:
        return None
    return ticks if events.torn is None else None


def test_the_line_of_damaged_compression_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record(path, [0.0, 5.0])
    whole = path.read_bytes()
    with Recorder(tmp_path / "short", "test") as recorder:
        recorder.policy("chat", {"name": "chat"})
        recorder.tick("chat", snapshot_at(0.0), decision_at(0.0), Outcome.APPLIED, 0.002)
        length = (tmp_path / "short").stat().st_size
    path.write_bytes(whole[:length] + b"\xff" * 100)  # a block type that does not exist
    seen: list[Any] = []
    with read_trace(path, decisions=True) as events, pytest.raises(TraceError, match="trace: line 5: damaged"):
        seen.extend(events)
    assert [type(event) for event in seen] == [PolicyLine, TickLine]


@pytest.mark.parametrize("more", [pytest.param(b"\x00", id="a byte"), pytest.param(b"x" * 100_000, id="much")])
def test_data_after_the_end_is_named(tmp_path: Path, more: bytes) -> None:
    path = tmp_path / "trace"
    record(path, [0.0])
    path.write_bytes(path.read_bytes() + more)
    with pytest.raises(TraceError, match="trace: line 5: there is data after the end"):
        ticks_of(path)


@pytest.mark.parametrize("name", [pytest.param("missing", id="missing"), pytest.param(".", id="a folder")])
def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceError, match="cannot be read: "):
        read_trace(tmp_path / name, decisions=True)


# Where a recording may go


def test_a_file_that_holds_something_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record(path, [0.0])
    before = path.read_bytes()
    with pytest.raises(TraceError, match="trace: already holds data"):
        Recorder(path, "test")
    assert path.read_bytes() == before


def test_an_empty_file_is_used(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.touch()
    record(path, [0.0])
    assert len(ticks_of(path)) == 1


def test_a_place_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"missing/trace: cannot be written: No such file"):
        Recorder(tmp_path / "missing" / "trace", "test")


def test_a_disk_that_is_full_at_once_is_an_error() -> None:
    with pytest.raises(TraceError, match="/dev/full: recording stopped: No space left on device"):
        Recorder("/dev/full", "test")


DISK_FULL = """
import resource, sys
sys.path.insert(0, sys.argv[2])
from test_trace import *
recorder = Recorder(sys.argv[1], "test")
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
for index in range(200):
    recorder.tick("chat", snapshot_at(5.0 * index, float(index)), decision_at(0.0), Outcome.APPLIED, 0.001)
    recorder.policy("chat", {"name": "chat"})
print(recorder.failure)
recorder.close()
print(recorder.failure)
"""


def test_a_disk_that_fills_up_stops_the_recording_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    script = [sys.executable, "-W", "error::ResourceWarning", "-c", DISK_FULL, str(path), str(Path(__file__).parent)]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [f"{path}: recording stopped: File too large"] * 2
    assert path.stat().st_size == 2000
    read = ticks_of(path)
    assert [tick.snapshot.at for tick in read] == [5.0 * index for index in range(len(read))]
    assert len(read) > 3


def test_closing_twice_and_recording_after_it_do_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    recorder = Recorder(path, "test")
    recorder.tick("chat", snapshot_at(0.0), decision_at(0.0), Outcome.APPLIED, 0.001)
    recorder.close()
    size = path.stat().st_size
    recorder.tick("chat", snapshot_at(5.0), decision_at(5.0), Outcome.APPLIED, 0.001)
    recorder.policy("chat", {})
    recorder.close()
    assert path.stat().st_size == size
    assert recorder.failure is None
