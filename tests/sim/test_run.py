"""The closed loop in process: the table of the pages, the decisions of the daemon, the same run in any process."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from prometheus_client import CollectorRegistry

from autoscaler.cli.main import run as autoscaler
from autoscaler.cli.wiring import Watchers
from autoscaler.core.policy import Policy, ReplicaBounds, Schedule, TargetRef, VllmSignals
from autoscaler.core.types import Decision, Engines, Outcome, Snapshot
from autoscaler.loop import Parts, Supervisor
from autoscaler.policy_file import policy_to_plain
from autoscaler.sim.clock import VirtualClock
from autoscaler.sim.engine import Request
from autoscaler.sim.faults import Faults
from autoscaler.sim.fleet import Fleet
from autoscaler.sim.profiles import profile
from autoscaler.sim.run import Run, Setting, run
from autoscaler.sim.workload import Lengths, Rate, Surge, requests, spike, steady
from autoscaler.sources.exposition import SeriesCache, parse_page
from autoscaler.sources.vllm import VllmSource
from autoscaler.sources.vllm_page import EngineBuilder, PodPage, is_wanted
from autoscaler.telemetry import Telemetry
from autoscaler.trace import Recorder
from autoscaler.web.server import Health

PROFILE = replace(profile("llama-3.1-8b-l40sx1"), max_num_batched_tokens=512, cold_start_s=40.0)
"""A replica carries about 4.5 requests a second."""
EPOCH = 1_768_348_800.25
POLICY = Policy(
    name="chat", target=TargetRef(namespace="serving", deployment="chat"), replicas=ReplicaBounds(min=1, max=8)
)
RUSH = spike(3.0, Surge(at=300.0, duration_s=300.0, factor=4.0, ramp_s=60.0))


def chat(rate: Rate, duration_s: float, seed: int = 2) -> Iterable[Request]:
    lengths = Lengths(prompt=800.0, output=300.0, prompt_sigma=0.6)
    return requests(np.random.default_rng(seed), rate, lengths, duration_s)


def setting(**changes: Any) -> Setting:
    return replace(Setting(profile=PROFILE, replicas=2, duration_s=1500.0, epoch=EPOCH, seed=3), **changes)


def rush(policy: Policy = POLICY, **changes: Any) -> Run:
    return run(policy, chat(RUSH, 1500.0), setting(**changes))


def as_read_from_pages(fleet: Fleet, builder: EngineBuilder, cache: SeriesCache) -> Engines:
    """Return the table that the product's own parser makes of every page that is served now."""
    at = round(EPOCH + fleet.now, 3)
    pages = []
    for pod in fleet.status().pods:
        text = fleet.page(pod.ip) if pod.ip else None
        if text is not None:
            pages.append(PodPage(pod=pod, read_at=at, page=parse_page(text.encode(), cache)))
    engines, gaps = builder.build(pages)
    assert gaps == ()
    return engines


@pytest.mark.parametrize(
    ("rate", "faults"),
    [
        pytest.param(RUSH, Faults(), id="rush"),
        pytest.param(steady(0.0), Faults(), id="idle"),
        pytest.param(RUSH, Faults(crash_mean_s=200.0, stuck_probability=0.3, stuck_s=60.0), id="crashes-and-restarts"),
    ],
)
def test_the_fleets_table_is_what_the_parser_makes_of_its_pages(rate: Rate, faults: Faults) -> None:
    traffic = (one._replace(cached_ratio=0.4) for one in chat(rate, 900.0))
    fleet = setting(faults=faults).make_fleet(POLICY, traffic)
    builder, cache = EngineBuilder(), SeriesCache(is_wanted)
    rows = []
    for at, replicas in ((0.0, 2), (33.3, 4), (95.0, 4), (140.0, 3), (300.0, 6), (371.7, 6), (600.0, 1), (900.0, 0)):
        fleet.advance(at)
        read = as_read_from_pages(fleet, builder, cache)
        table = fleet.reading(0.0).engines
        assert table is not None
        assert table.keys == read.keys
        np.testing.assert_array_equal(table.values, read.values)
        assert table.histograms.keys() == read.histograms.keys()
        for name, blocks in table.histograms.items():
            for block, other in zip(blocks, read.histograms[name], strict=True):
                assert block.bounds == other.bounds
                np.testing.assert_array_equal(block.rows, other.rows)
                np.testing.assert_array_equal(block.counts, other.counts)
                assert block.counts.dtype == other.counts.dtype
        rows.append(len(table.keys))
        fleet.scale(replicas)
    assert max(rows) >= 4 or faults.crash_mean_s < 300.0
    if faults.crash_mean_s < 300.0:
        assert sum(pod.restarts for pod in fleet.status().pods) > 1


class Decisions:
    """`ports.Report` that keeps every decision."""

    def __init__(self) -> None:
        self.kept: list[tuple[Decision, Outcome]] = []

    def tick(self, policy: str, snapshot: Snapshot, decision: Decision, outcome: Outcome, duration_s: float) -> None:
        """Keep one tick."""
        self.kept.append((decision, outcome))


async def test_the_daemon_over_http_decides_what_the_simulator_decides() -> None:
    policy = replace(POLICY, interval_s=15.0)
    simulated, live = Decisions(), Decisions()
    result = run(policy, chat(RUSH, 1500.0), setting(), reports=(simulated,))
    fleet = setting().make_fleet(policy, chat(RUSH, 1500.0))
    clock = VirtualClock(fleet, 1500.0)
    async with fleet.serve() as port:
        signals = VllmSignals(port=port)
        telemetry = Telemetry(CollectorRegistry(), structlog.wrap_logger(structlog.PrintLogger(), [_drop]))
        watchers = Watchers(telemetry, Health(clock), None, reports=(live,))

        def build(policy: Policy) -> Parts:
            return Parts(target=fleet, sources=(VllmSource(signals, clock),), actuator=fleet)

        await asyncio.wait_for(Supervisor({policy.name: policy}, build, clock, watchers).run(clock.done), 60.0)
    assert len(live.kept) == 100
    assert simulated.kept == live.kept
    assert result.figures.ups > 0 < result.figures.downs
    assert fleet.gpu_hours == result.figures.gpu_hours


def _drop(_logger: object, _method: str, _event: object) -> str:
    raise structlog.DropEvent


def test_a_recording_made_from_the_simulator_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.trace.gz"
    with Recorder(file, "test") as recorder:
        recorder.policy(POLICY.name, policy_to_plain(POLICY))
        faults = Faults(api_errors=0.9, crash_mean_s=600.0)
        result = run(POLICY, chat(RUSH, 1500.0), setting(faults=faults), reports=(recorder,))
    assert any(row.outcome == Outcome.FAILED for row in result.rows)
    assert autoscaler(["replay", str(file), "--verify"]) == 0
    assert "verified: 300 of 300 recorded decisions come out bit-equal" in capsys.readouterr().out


def test_the_figures_say_what_became_of_the_run() -> None:
    told: list[float] = []
    result = run(POLICY, chat(RUSH, 1500.0), setting(), progress=told.append)
    figures = result.figures
    assert told == [5.0 * number for number in range(300)]
    assert len(result.rows) == 300
    assert figures.requests == sum(1 for _ in chat(RUSH, 1500.0)) == result.summary.requests
    assert figures.attainment is not None
    assert figures.worst_ten_minutes is not None
    assert 0.5 < figures.worst_ten_minutes <= figures.attainment < 1.0
    assert figures.failed == sum(figures.fates.values())
    assert figures.ups == sum(row.acted and (row.acted_to or 0) > row.ordered for row in result.rows) > 0
    assert figures.actions == figures.ups + figures.downs
    assert figures.mean_replicas == pytest.approx(figures.gpu_hours / (1500.0 / 3600.0))
    for quantiles in (figures.ttft_s, figures.tpot_s, figures.e2e_s):
        assert list(quantiles) == sorted(quantiles)
    assert figures.e2e_s[0] > figures.ttft_s[0] > figures.tpot_s[0] > 0.0


def test_lumpy_prefill_does_not_keep_capacity() -> None:
    # Prompts of 4000 tokens take 0.3 s: whom they hold up waits three times the objective, on any number of replicas.
    lengths = Lengths(prompt=4000.0, output=100.0, prompt_sigma=0.5)
    traffic = requests(np.random.default_rng(3), steady(3.0), lengths, 3000.0)
    result = run(POLICY, traffic, setting(profile=profile("llama-3.1-70b-h100x4"), replicas=8, duration_s=3000.0))
    assert {row.latency for row in result.rows[-60:]} == {1.0}
    assert result.rows[-1].ordered == 2
    assert (result.figures.attainment or 0.0) >= 0.99


def test_without_a_duration_the_run_ends_after_the_last_request() -> None:
    result = run(POLICY, chat(RUSH, 602.0), setting(duration_s=None))
    assert result.summary.duration_s == 605.0
    assert result.figures.requests == sum(1 for _ in chat(RUSH, 602.0))


def test_without_requests_there_is_nothing_to_judge() -> None:
    figures = run(POLICY, (), setting(duration_s=60.0)).figures
    assert (figures.attainment, figures.worst_ten_minutes, figures.requests) == (None, None, 0)
    assert figures.gpu_hours == pytest.approx(2 * 60.0 / 3600.0)


def test_schedules_need_somebody_who_knows_the_time() -> None:
    policy = replace(POLICY, schedules=(Schedule(cron="0 8 * * *", duration_s=3600.0, min=3),))
    with pytest.raises(ValueError, match="chat has schedules"):
        run(policy, (), setting(duration_s=60.0))
    label = policy.schedules[0].label
    result = run(policy, (), setting(duration_s=60.0), active=lambda at: (label,) if at > EPOCH + 20.0 else ())
    assert [(row.at - EPOCH, row.acted_to) for row in result.rows if row.acted] == [(25.0, 3)]


SCRIPT = """
from tests.sim.test_run import rush
from autoscaler.sim.faults import fault_plan
from autoscaler.sim.fleet import Settings
from autoscaler.sim.front import Clients, Routing
result = rush(
    faults=fault_plan(400.0),
    fleet=Settings(routing=Routing.POWER_OF_TWO, clients=Clients(retry_s=2.0), node_probability=0.5),
)
print(result.figures, [row.why for row in result.rows])
"""


def test_equal_seeds_make_equal_runs_in_any_process() -> None:
    told = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, check=True)
        told.append(done.stdout)
    assert len(told[0]) > 10_000
    assert told[0] == told[1]


def test_another_seed_makes_another_run() -> None:
    assert rush(seed=4).figures.gpu_hours != rush(seed=5).figures.gpu_hours
