"""Deciding: milliseconds a tick for large fleets, and a day of 20 pods at 5 s replayed, with the bytes it takes."""

import os
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

from autoscaler.core.decide import decide
from autoscaler.core.policy import Policy, ReplicaBounds, TargetRef
from autoscaler.core.state import State, absorb, advance
from autoscaler.core.types import Outcome
from autoscaler.replay import Replayer
from autoscaler.trace import Recorder, TickLine, read_trace
from bench.trace import Fleet

POLICY = Policy(
    name="chat", target=TargetRef(namespace="serving", deployment="chat"), replicas=ReplicaBounds(min=1, max=400)
)
DAY_TICKS = 24 * 3600 // 5
Row = tuple[str, str]


def measure() -> list[Row]:
    """Return label and value of each figure."""
    return [*_decide_rows(), *_replay_rows()]


def _decide_rows() -> Iterator[Row]:
    for pods in (20, 200, 1000):
        times = _tick_times(pods, 300 if pods <= 200 else 150)
        absorbed, decided, advanced = (1e3 * median(column) for column in zip(*times, strict=True))
        label = f"{pods} pods: decide, median (absorb, advance beside it)"
        yield label, f"{decided:.2f} ms ({absorbed:.2f}, {advanced:.2f})"


def _tick_times(pods: int, ticks: int) -> list[tuple[float, float, float]]:
    """Return the seconds of absorb, decide and advance of each tick, the first quarter left out."""
    state = State()
    times = []
    for snapshot in Fleet(pods).snapshots(ticks):
        marks = [perf_counter()]
        state = absorb(POLICY, state, snapshot)
        marks.append(perf_counter())
        decision = decide(POLICY, state, snapshot)
        marks.append(perf_counter())
        state = advance(POLICY, state, decision, Outcome.UNCHANGED)
        marks.append(perf_counter())
        absorbed, decided, advanced = (after - before for before, after in pairwise(marks))
        times.append((absorbed, decided, advanced))
    return times[ticks // 4 :]


def _replay_rows() -> Iterator[Row]:
    pods = 20
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "day.trace.gz"
        _record_day(path, pods)
        size = path.stat().st_size
        yield "a day of 20 pods at 5 s: bytes a pod and tick", f"{size / pods / DAY_TICKS:.0f} ({size / 1e6:.1f} MB)"
        started = process_time()
        ticks = 0
        replayer = Replayer(POLICY)
        with read_trace(path, decisions=False) as reader:
            for line in reader:
                if isinstance(line, TickLine):
                    replayer.tick(line.snapshot, line.outcome)
                    ticks += 1
        seconds = process_time() - started
        yield f"a day of 20 pods at 5 s ({ticks} ticks): replay", f"{seconds:.1f} s of one core"


def _record_day(path: Path, pods: int) -> None:
    """Record a day of the generated fleet with the real decisions, as `run --record` does."""
    state = State()
    with Recorder(path, "bench") as recorder:
        for number, snapshot in enumerate(Fleet(pods).snapshots(DAY_TICKS)):
            state = absorb(POLICY, state, snapshot)
            decision = decide(POLICY, state, snapshot)
            recorder.tick(POLICY.name, snapshot, decision, Outcome.UNCHANGED, 0.001)
            state = advance(POLICY, state, decision, Outcome.UNCHANGED)
            if number % 1728 == 0 and sys.stderr.isatty():
                sys.stderr.write(f"\rrecording a day: {100 * number // DAY_TICKS} %")
    if sys.stderr.isatty():
        sys.stderr.write("\r" + " " * min(40, os.get_terminal_size(2).columns) + "\r")
