"""The live snapshot stream: its schedule, its failures, and how readings become one snapshot."""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from autoscaler.clock import SystemClock
from autoscaler.core.policy import VllmSignals
from autoscaler.core.signals import COLUMN, ENGINE_COLUMNS
from autoscaler.core.types import (
    EngineKey,
    Engines,
    Gap,
    GapReason,
    Gpu,
    HistogramRows,
    Reading,
    Sample,
    Snapshot,
    TargetStatus,
)
from autoscaler.errors import SourceError, TargetError
from autoscaler.observe import MAX_PAUSE_S, merge, observe
from autoscaler.ports import Source
from autoscaler.sim.serve import PageServer
from autoscaler.sources.vllm import VllmSource
from tests.core.world import P0, START, World, pod
from tests.fake_ports import ManualClock, Watch, WorldSource, WorldTarget

STATUS = TargetStatus(namespace="serving", name="chat-a", current_replicas=2)


class Stream:
    """An observation under way, and all that it yielded."""

    def __init__(self, interval_s: float = 15.0) -> None:
        self.clock = ManualClock()
        self.target = WorldTarget(World(P0, 2), self.clock)
        self.sources: list[Source] = [WorldSource(self.target)]
        self.watch = Watch()
        self.snapshots: list[Snapshot] = []
        self.interval_s = interval_s

    async def run(self, seconds: float, attempts: int | None = None) -> None:
        """Observe for so many seconds of the clock."""
        task = asyncio.create_task(self._collect(attempts))
        await self.clock.advance(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _collect(self, attempts: int | None) -> None:
        snapshots = observe("p0", self.interval_s, self.target, self.sources, self.clock, self.watch, attempts)
        async with aclosing(snapshots):
            async for snapshot in snapshots:
                self.snapshots.append(snapshot)

    @property
    def started(self) -> list[float]:
        """When each tick began, seconds after the start."""
        return [at - START for at in self.target.reads]


def sleeping(clock: ManualClock, *seconds: float) -> Callable[[int], object]:
    """Return a hook that takes so long at each call in turn; at later ones as long as at the last."""
    return lambda number: clock.sleep(seconds[min(number, len(seconds) - 1)])


def raising(failures: dict[int, BaseException]) -> Callable[[int], object]:
    """Return a hook that raises at these calls."""

    def hook(number: int) -> None:
        if number in failures:
            raise failures[number]

    return hook


async def test_one_snapshot_an_interval_from_the_start_on() -> None:
    stream = Stream()
    await stream.run(60.0)
    assert stream.started == [0.0, 15.0, 30.0, 45.0, 60.0]
    assert [snapshot.at - START for snapshot in stream.snapshots] == stream.started
    assert stream.watch.overruns == []


@pytest.mark.parametrize("interval_s", [0.1, 1.1, 5.0, 7.3])
async def test_the_schedule_neither_drifts_nor_skips(interval_s: float) -> None:
    stream = Stream(interval_s)
    await stream.run(interval_s * 300.5)
    assert stream.started == pytest.approx([number * interval_s for number in range(301)])


async def test_c147_overruns_are_skipped_and_the_first_normal_tick_is_on_schedule() -> None:
    stream = Stream()
    stream.sources = [WorldSource(stream.target, before_read=sleeping(stream.clock, 40.0, 40.0, 40.0, 1.0))]
    await stream.run(185.0)
    # Three times 40 s: each next tick is the first on the grid of 15 s after the end, with nothing to catch up.
    assert stream.started == [0.0, 45.0, 90.0, 135.0, 150.0, 165.0, 180.0]
    assert stream.watch.overruns == ["p0"] * 3
    ended = [snapshot.at - START for snapshot in stream.snapshots]
    assert ended == [40.0, 85.0, 130.0, 136.0, 151.0, 166.0, 181.0]


async def test_a_slow_consumer_is_an_overrun_too() -> None:
    stream = Stream()
    snapshots = observe("p0", 15.0, stream.target, stream.sources, stream.clock, stream.watch)
    async with aclosing(snapshots):
        await anext(snapshots)
        stream.clock.at += 31.0
        following = asyncio.ensure_future(anext(snapshots))
        await stream.clock.advance(15.0)
        assert (await following).at == START + 45.0
    assert stream.watch.overruns == ["p0"]


async def test_a_tick_that_takes_exactly_the_interval_is_none_too_late() -> None:
    stream = Stream()
    stream.sources = [WorldSource(stream.target, before_read=sleeping(stream.clock, 15.0, 0.0))]
    await stream.run(30.0)
    assert stream.started == [0.0, 15.0, 30.0]
    assert stream.watch.overruns == []


async def test_only_so_many_attempts_the_failed_ones_counted() -> None:
    stream = Stream()
    stream.target.before_read = raising({0: TargetError("target_not_found")})
    await stream.run(100.0, attempts=2)
    assert stream.started == [0.0, 15.0]
    assert len(stream.snapshots) == 1


async def test_a_target_that_cannot_be_read_gives_no_snapshot_and_the_stream_goes_on() -> None:
    stream = Stream()
    stream.target.before_read = raising({1: TargetError("forbidden", "deployments: 403")})
    await stream.run(45.0)
    assert [snapshot.at - START for snapshot in stream.snapshots] == [0.0, 30.0, 45.0]
    assert [(policy, kind, str(error)) for policy, kind, error in stream.watch.errors] == [
        ("p0", "target", "forbidden: deployments: 403")
    ]


@pytest.mark.parametrize(
    ("wish_s", "next_start_s"),
    [
        pytest.param(None, 15.0, id="no wish"),
        pytest.param(3.0, 15.0, id="within the interval"),
        pytest.param(15.0, 15.0, id="exactly the interval"),
        pytest.param(16.0, 30.0, id="just over"),
        pytest.param(29.0, 30.0, id="two intervals"),
        pytest.param(3600.0, MAX_PAUSE_S, id="an hour, in pieces"),
    ],
)
async def test_a_server_that_asks_for_patience_gets_it(wish_s: float | None, next_start_s: float) -> None:
    stream = Stream()
    stream.target.before_read = raising({0: TargetError("throttled", retry_after_s=wish_s)})
    await stream.run(60.0)
    assert stream.started[:2] == [0.0, next_start_s]
    assert all(at % 15.0 == 0.0 for at in stream.started)


async def test_c140_a_source_that_raises_once_loses_one_reading_and_nothing_else() -> None:
    stream = Stream()
    broken = WorldSource(stream.target, name="dcgm", before_read=raising({5: KeyError("uuid")}))
    stream.sources = [WorldSource(stream.target), broken]
    await stream.run(15.0 * 7)
    assert stream.started == [15.0 * number for number in range(8)]
    assert [(policy, kind, type(error)) for policy, kind, error in stream.watch.errors] == [("p0", "bug", KeyError)]
    gap = Gap(signal="*", reason=GapReason.BUG, source="dcgm", detail="KeyError")
    assert [snapshot.gaps for snapshot in stream.snapshots] == [()] * 5 + [(gap,)] + [()] * 2
    assert all(len(snapshot.engines.keys) == 2 for snapshot in stream.snapshots)


async def test_c140_a_target_that_raises_what_nobody_expected_loses_one_tick() -> None:
    stream = Stream()
    stream.target.before_read = raising({5: KeyError("metadata")})
    await stream.run(15.0 * 7)
    assert len(stream.snapshots) == 7
    assert [(policy, kind, type(error)) for policy, kind, error in stream.watch.errors] == [("p0", "bug", KeyError)]
    assert stream.started == [15.0 * number for number in range(8)]


async def test_a_source_that_dies_does_not_leave_the_others_running() -> None:
    stream = Stream()
    slow = WorldSource(stream.target, before_read=sleeping(stream.clock, 4.0))
    stream.sources = [WorldSource(stream.target, name="dcgm", before_read=raising({0: KeyError()})), slow]
    await stream.run(15.0)
    assert stream.snapshots[0].at == START + 4.0
    assert len(stream.snapshots[0].engines.keys) == 2


async def test_a_source_that_says_that_nothing_could_be_read_is_one_gap() -> None:
    stream = Stream()
    error = SourceError("dcgm", GapReason.TIMEOUT, "d" * 300)
    stream.sources.append(WorldSource(stream.target, name="other", before_read=raising({0: error})))
    await stream.run(1.0)
    assert stream.snapshots[0].gaps == (Gap(signal="*", reason=GapReason.TIMEOUT, source="dcgm", detail="d" * 200),)
    assert stream.watch.errors == []


async def test_sources_are_read_side_by_side_after_the_target() -> None:
    stream = Stream()
    stream.target.before_read = sleeping(stream.clock, 1.0)
    sources = [WorldSource(stream.target, before_read=sleeping(stream.clock, seconds)) for seconds in (2.0, 5.0, 3.0)]
    stream.sources = list(sources)
    await stream.run(10.0)
    assert [source.times[0] - START for source in sources] == [1.0, 1.0, 1.0]
    assert stream.snapshots[0].at == START + 6.0


async def test_cancelled_in_mid_read_it_ends_and_leaves_nothing_behind() -> None:
    stream = Stream()
    stream.sources = [WorldSource(stream.target, before_read=sleeping(stream.clock, 4.0))] * 2
    before = asyncio.all_tasks()
    await stream.run(2.0)
    assert asyncio.all_tasks() == before
    assert stream.snapshots == []


async def test_c143_pods_are_scraped_at_the_address_they_have_now() -> None:
    asked: list[str] = []

    def page(address: str) -> str:
        asked.append(address)
        return "vllm:num_requests_running 1.0\n"

    clock, pages = ManualClock(), PageServer(page)
    source = VllmSource(VllmSignals(port=await pages.start()), clock)
    await pages.follow({"127.10.8.2", "127.10.8.3"})
    try:
        for uid, ip in (("a", "127.10.8.2"), ("a", "127.10.8.3"), ("b", "127.10.8.2")):
            reading = await source.read(replace(STATUS, pods=(pod("one", uid=uid, ip=ip),)), clock.now())
            assert reading.engines is not None
            assert [key.pod_uid for key in reading.engines.keys] == [uid]  # the pod's own, though the address is old
    finally:
        await source.close()
        await pages.close()
    assert asked == ["127.10.8.2", "127.10.8.3", "127.10.8.2"]


def test_c150_the_clock_does_not_follow_the_wall_clock_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SystemClock()
    before = clock.now()
    assert before == pytest.approx(time.time(), abs=1.0)
    monkeypatch.setattr(time, "time", lambda: before - 7200.0)
    assert 0.0 <= clock.now() - before < 60.0


async def test_the_system_clock_sleeps_until_its_own_time_has_come() -> None:
    clock = SystemClock()
    at = clock.now() + 0.02
    await clock.sleep_until(at)
    assert clock.now() >= at - 0.001  # it counts in whole milliseconds
    await clock.sleep_until(at - 100.0)


# --- merge ----------------------------------------------------------------------------------------------------------


def table(rows: dict[str, tuple[float, float]], bounds: tuple[float, ...] = (1.0, float("inf"))) -> Engines:
    """Return engines by pod: when each was read, and its running requests, which its histogram counts too."""
    values = np.full((len(rows), len(ENGINE_COLUMNS)), np.nan)
    for index, (read_at, running) in enumerate(rows.values()):
        values[index, COLUMN["read_at"]] = read_at
        values[index, COLUMN["num_requests_running"]] = running
    counts = np.array([[running] * len(bounds) for _, running in rows.values()])
    block = HistogramRows(bounds=bounds, rows=np.arange(len(rows), dtype=np.intp), counts=counts)
    return Engines(keys=tuple(EngineKey(pod) for pod in rows), values=values, histograms={"ttft": (block,)})


def running_of(engines: Engines) -> dict[str, float]:
    """Return the running requests by pod."""
    column = engines.values[:, COLUMN["num_requests_running"]]
    return {key.pod_uid: float(value) for key, value in zip(engines.keys, column, strict=True)}


def counted_of(engines: Engines) -> dict[tuple[str, tuple[float, ...]], float]:
    """Return the first bucket's count by pod and layout."""
    return {
        (engines.keys[int(row)].pod_uid, block.bounds): float(counts[0])
        for block in engines.histograms.get("ttft", ())
        for row, counts in zip(block.rows, block.counts, strict=True)
    }


def merged(*readings: Reading) -> Snapshot:
    return merge(STATUS, readings, START)


def test_without_any_page_there_are_no_engines() -> None:
    empty = Engines(keys=(), values=np.empty((0, len(ENGINE_COLUMNS))))
    snapshot = merged(Reading(engines=empty), Reading())
    assert snapshot.engines.keys == ()
    assert snapshot.engines.values.shape == (0, len(ENGINE_COLUMNS))
    assert (snapshot.at, snapshot.target) == (START, STATUS)


def test_one_table_of_engines_is_handed_on_as_it_is() -> None:
    engines = table({"a": (1.0, 1.0)})
    assert merged(Reading(), Reading(engines=engines)).engines is engines


@pytest.mark.parametrize("turned", [False, True])
def test_of_two_rows_of_an_engine_the_fresher_counts_with_its_histogram(turned: bool) -> None:
    first = table({"a": (5.0, 1.0), "b": (5.0, 2.0), "d": (5.0, 3.0)})
    second = table({"a": (4.0, 10.0), "b": (6.0, 20.0), "c": (1.0, 30.0)})
    tables = (second, first) if turned else (first, second)
    engines = merged(*(Reading(engines=one) for one in tables)).engines
    assert running_of(engines) == {"a": 1.0, "b": 20.0, "c": 30.0, "d": 3.0}
    assert list(engines.keys) == sorted(engines.keys)
    bounds = (1.0, float("inf"))
    assert counted_of(engines) == {("a", bounds): 1.0, ("b", bounds): 20.0, ("c", bounds): 30.0, ("d", bounds): 3.0}
    (block,) = engines.histograms["ttft"]  # one entry a layout, its rows ascending
    assert block.rows.tolist() == [0, 1, 2, 3]


def test_of_two_equally_old_rows_the_first_sources_counts() -> None:
    engines = merged(Reading(engines=table({"a": (5.0, 1.0)})), Reading(engines=table({"a": (5.0, 2.0)}))).engines
    assert running_of(engines) == {"a": 1.0}


def test_layouts_stay_apart() -> None:
    short, long = (1.0, float("inf")), (1.0, 2.0, float("inf"))
    engines = merged(
        Reading(engines=table({"a": (5.0, 1.0), "b": (5.0, 2.0)}, short)),
        Reading(engines=table({"b": (6.0, 3.0), "c": (6.0, 4.0)}, long)),
    ).engines
    assert counted_of(engines) == {("a", short): 1.0, ("b", long): 3.0, ("c", long): 4.0}


def test_of_two_samples_of_a_signal_the_fresher_counts_and_they_are_sorted() -> None:
    old, new = Sample(signal="ttft", value=1.0, at=10.0), Sample(signal="ttft", value=2.0, at=11.0)
    queue = Sample(signal="upstream_queue", value=3.0, at=1.0)
    for samples in ((old, new), (new, old)):
        snapshot = merged(Reading(samples=(queue, samples[0])), Reading(samples=(samples[1],)))
        assert snapshot.samples == (new, queue)


def test_devices_of_the_only_source_are_handed_on_as_the_same_object() -> None:
    gpus = (Gpu(uuid="GPU-a", pod_uid="a"), Gpu(uuid="GPU-a", pod_uid="b"), Gpu(uuid="GPU-a", instance="1"))
    assert merged(Reading(), Reading(gpus=gpus), Reading()).gpus is gpus


def test_of_two_readings_of_a_device_the_first_sources_counts() -> None:
    mine = Gpu(uuid="GPU-a", pod_uid="a", memory_used=1.0)
    theirs = (replace(mine, memory_used=2.0), Gpu(uuid="GPU-b", pod_uid="b"))
    assert merged(Reading(gpus=(mine,)), Reading(gpus=theirs)).gpus == (mine, theirs[1])


def test_gaps_of_all_sources_are_kept_in_order() -> None:
    gaps = tuple(Gap(signal=name, reason=GapReason.STALE) for name in "abc")
    assert merged(Reading(gaps=gaps[:1]), Reading(gaps=gaps[1:])).gaps == gaps
