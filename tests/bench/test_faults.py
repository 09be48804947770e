"""The plan of faults on hours of made traffic, and what the bench makes of runs: verdict, table, JSON, exit code."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autoscaler.cli.study import PRESETS, peak_s
from autoscaler.core.types import Decision, Outcome, Reason, ScaleReplicas, Snapshot
from autoscaler.sim.faults import Blackout, Faults, Symptom, fault_plan
from autoscaler.sim.run import run
from bench import faults
from bench.contest.page import write
from bench.contest.play import DEFAULT, fleet_setting, our_policy, the_policy
from bench.contest.traces import Ground, Trace
from bench.faults import Job, Suffered, made_ground, main, markdown, missed, points_lost, rows, suffered, to_document
from tests.bench.entries import ran

CHAT = ",prompt=2500,output=500"
"""A replica carries about 1.4 of these a second: a small rate makes a fleet of some size."""
MORNING = Trace(
    name="morning",
    text="the three hours of a day of chat in which the office comes",
    file=f"diurnal:rps=10,hours=3,start=8{CHAT}",
    profile="llama-3.1-8b-l40sx1",
    ttft_s=2.0,
    tpot_s=0.1,
    cold_start_s=60.0,
)
FALLING = replace(MORNING, name="falling", file="step:rps=16,to=5,at=0.33,hours=1,prompt=800")
LEVEL = replace(MORNING, name="level", file=f"steady:rps=8,hours=1{CHAT}")


def ground_of(trace: Trace) -> Ground:
    return Job(trace=trace.name, fault="none", seed=0).bounded(made_ground(trace, seed=0))


def hard(peak: float) -> Faults:
    """Return the plan with twice the failed writes and hangs and four times the crashes: its own are those of a day."""
    return replace(fault_plan(peak), api_errors=0.4, stuck_probability=0.2, crash_mean_s=6 * 3600.0)


def test_the_plan_costs_little_and_nothing_shrinks_on_missing_data() -> None:
    ground = ground_of(MORNING)
    peak = peak_s(ground.sample, ground.duration_s)
    sound, plan = (
        suffered(Job(trace=MORNING.name, fault=name, seed=0), ground, planned, peak)
        for name, planned in (("none", Faults()), ("plan", hard(peak)))
    )
    assert plan.blind == 120, "ten minutes of ticks at the peak"
    assert plan.failed_writes > 0
    assert plan.restarts > 0
    assert (sound.blind, sound.failed_writes, sound.restarts) == (0, 0, 0)
    assert points_lost(plan, sound) <= 1.0
    assert plan.shrunk == ()
    assert plan.answered >= 0.9995
    assert missed([sound, plan]) == []


# -- no shrink on missing data ---------------------------------------------------------------------------------------

OUTAGE = (1600.0, 2200.0)
"""After traffic fell: without an outage replicas go then."""


class Decisions:
    """Keeps what was decided at each tick."""

    def __init__(self) -> None:
        self.ticks: list[tuple[float, int, Decision]] = []

    def tick(self, policy: str, snapshot: Snapshot, decision: Decision, outcome: Outcome, duration_s: float) -> None:
        self.ticks.append((snapshot.at, snapshot.target.current_replicas, decision))


def decided(trace: Trace, planned: Faults, start: float, end: float) -> list[tuple[int, Decision]]:
    """Return, for each tick between two times, the replicas that were ordered, and the decision."""
    ground = ground_of(trace)
    setting, kept = replace(fleet_setting(ground, ground.replicas), faults=planned), Decisions()
    run(our_policy(ground, the_policy(DEFAULT)), ground.sample.requests(), setting, reports=(kept,))
    return [(now, one) for at, now, one in kept.ticks if start <= at - setting.epoch < end]


def shrinks(ticks: list[tuple[int, Decision]]) -> list[Decision]:
    return [one for now, one in ticks if isinstance(one.action, ScaleReplicas) and one.action.to < now]


def test_without_an_outage_replicas_go_as_traffic_falls() -> None:
    assert shrinks(decided(FALLING, Faults(), *OUTAGE))


@pytest.mark.parametrize("symptom", [Symptom.LOST, Symptom.NAN])
def test_nothing_shrinks_at_any_tick_of_an_outage(symptom: Symptom) -> None:
    start, end = OUTAGE
    outage = Blackout(start_s=start, duration_s=end - start, symptom=symptom)
    ticks = decided(FALLING, Faults(blackouts=(outage,)), *OUTAGE)
    assert len(ticks) == 120
    assert shrinks(ticks) == []
    replicas = [now for now, _ in ticks]
    assert replicas == sorted(replicas), "nor did anything that was ordered before"
    # what was read last is fresh for 15 s; after that too little is known for any wish
    reasons = {one.reason for _, one in ticks[4:]}
    assert reasons <= {Reason.NO_DATA, Reason.INSUFFICIENT_COMPONENTS, Reason.PARTIAL_NO_SHRINK}


def test_pages_that_stood_still_teach_nothing_when_they_move_on() -> None:
    """Ten minutes' tokens within one interval are no engine that is a hundred times as fast."""
    start, end = 900.0, 1500.0
    still = Blackout(start_s=start, duration_s=end - start, symptom=Symptom.FROZEN)
    sound, moved_on = (
        np.mean([one.demand.value for _, one in decided(LEVEL, planned, end + 300.0, 3600.0)])
        for planned in (Faults(), Faults(blackouts=(still,)))
    )
    assert moved_on == pytest.approx(sound, rel=0.1)


# -- the verdict and what is shown -----------------------------------------------------------------------------------

SOUND = Suffered(
    trace="code",
    fault="none",
    seed=0,
    hours=24.0,
    least=2,
    peak_s=3600.0,
    requests=10_000,
    attainment=0.995,
    answered=1.0,
    gpu_hours=50.0,
    shrunk=(),
    blind=0,
    failed_writes=0,
    restarts=0,
)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        pytest.param({"attainment": 0.986}, "", id="less-than-a-point"),
        pytest.param({"attainment": 0.984}, "attainment is 1.10 points lower", id="more-than-a-point"),
        pytest.param({"answered": 0.9996}, "", id="enough-answered"),
        pytest.param({"answered": 0.9994}, "99.940 % of the requests were answered", id="too-few-answered"),
        pytest.param({"blind": 120, "shrunk": (3700.0,)}, "fewer replicas were ordered at 3700 s", id="shrunk"),
        pytest.param({"blind": 120, "shrunk": (3700.0,), "fault": "frozen"}, "", id="shrunk-while-pages-stood-still"),
    ],
)
def test_what_is_promised_is_held_to(changed: dict[str, object], words: str) -> None:
    one: Suffered = replace(SOUND, **{"fault": "plan", **changed})  # type: ignore[arg-type]
    found = missed([SOUND, one])
    assert len(found) == bool(words)
    assert all(words in line and line.startswith("code, seed 0, plan: ") for line in found)


def test_each_seed_is_held_to_its_own_sound_run() -> None:
    other = replace(SOUND, seed=1, attainment=0.97)
    assert missed([SOUND, other, replace(other, fault="plan", attainment=0.965)]) == []
    assert len(missed([SOUND, other, replace(SOUND, fault="plan", attainment=0.965)])) == 1


def test_a_page_gets_the_table_and_what_is_missed() -> None:
    bad = replace(SOUND, fault="plan", attainment=0.9, blind=120)
    document = json.loads(json.dumps(to_document([SOUND, bad], "abc")))
    text = markdown(document)
    first, second = (line for line in text.splitlines() if line.startswith("| code"))
    assert first.split(" | ")[3:6] == ["99.50", "–", "100.000"]
    assert second.split(" | ")[3:6] == ["90.00", "9.50", "100.000"]
    assert "* code, seed 0, plan: attainment is 9.50 points lower than without faults." in text
    assert "Missed" not in markdown(to_document([SOUND], "abc"))
    assert len({len(row) for row in rows([SOUND, bad])}) == 1


def test_the_benchmark_page_has_what_ran(tmp_path: Path) -> None:
    page, figures = tmp_path / "benchmark.md", tmp_path / "benchmark" / "faults.json"
    run = ran("ours", 0.99, 1.0)
    shown = {"profile": "llama-3.1-8b-h100x1", "ttft_s": 0.5, "tpot_s": 0.05, "min": 1, "max": 9, "replicas": 2}
    entries = [replace(run, ground={**run.ground, **shown, "requests": 1_000})]
    write(page, entries)
    assert "None ran." in page.read_text().partition("## Under faults")[2].partition("\n## ")[0]
    figures.write_text(json.dumps(to_document([SOUND], "abc")))
    write(page, entries)
    assert "\n| code | none | 0 | 99.50 | – | 100.000 |" in page.read_text()


def test_the_command_runs_a_made_day_and_says_whether_it_keeps_what_is_promised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "faults.json"
    asked = ["--hours", "0.15", "--faults", "plan,nan", "--json", str(written)]
    assert main(asked) == 0
    assert "every run keeps what is promised" in capsys.readouterr().out
    runs = json.loads(written.read_text())["runs"]
    assert [(one["trace"], one["fault"]) for one in runs] == [("made", "none"), ("made", "plan"), ("made", "nan")]
    monkeypatch.setattr(faults, "ANSWERED", 1.1)
    assert main(asked[:4]) == 1
    assert "100.000 % of the requests were answered" in capsys.readouterr().out


def test_traces_come_from_the_folder_and_one_that_is_not_there_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--traces", str(tmp_path)]) == 2
    assert "none of code, conv, r1 is there" in capsys.readouterr().err
    lines = [f"{at},500,40" for at in range(300)]
    (tmp_path / "azure2024_code_24h_q4.csv").write_text("\n".join(["arrival_s,input_tokens,output_tokens", *lines]))
    assert main(["--traces", str(tmp_path), "--faults", "blackout", "--jobs", "2"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:3]] == [
        ["code", "none"],
        ["code", "blackout"],
    ]


def test_an_unknown_fault_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--faults", "plan,flood"])
    assert end.value.code == 2
    assert "no such fault: flood" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "none"])
def test_each_preset_makes_something_go_wrong(name: str) -> None:
    assert PRESETS[name](3600.0) != Faults()
