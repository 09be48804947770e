"""The report: its numbers, its one file, and nothing from a decision that could act as markup."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autoscaler.core.policy import Policy, ReplicaBounds, ScaleDown, ScaleUp, ScorePolicy, Slos, TargetRef
from autoscaler.core.signals import COLUMN as COLUMNS
from autoscaler.core.signals import ENGINE_COLUMNS
from autoscaler.core.types import (
    Action,
    Decision,
    Demand,
    EngineKey,
    Engines,
    Forecast,
    Hold,
    Mode,
    Outcome,
    Part,
    Proposal,
    Reason,
    ScaleReplicas,
    Score,
    Snapshot,
    Step,
    TargetStatus,
)
from autoscaler.errors import AutoscalerError
from autoscaler.sim.fleet import RunSummary
from autoscaler.sim.ledger import LatencyBin
from autoscaler.sim.report import MAX_POINTS, TickCollector, TickRow, chart_data, reversals, why, write_report
from autoscaler.sim.scenario import Event

START = 1_768_348_800.0
POLICY = Policy(
    name="chat",
    target=TargetRef(deployment="chat", namespace="demo"),
    replicas=ReplicaBounds(min=1, max=8),
    scale_up=ScaleUp(threshold=0.65),
    scale_down=ScaleDown(threshold=0.35),
)
SCORE = Score(
    value=0.74,
    shrink_value=0.74,
    known_weight=1.0,
    parts=(
        Part(name="memory", weight=0.4, value=0.6, shrink_value=0.6, driver="kv_cache_usage 0.54"),
        Part(name="backlog", weight=0.35, value=0.8, shrink_value=0.8, driver="waiting 48"),
        Part(name="latency", weight=0.25, value=None, shrink_value=None),
    ),
)
HOLD = TickRow(
    at=START,
    ordered=3,
    ready=3,
    demand=2.2,
    forecast=2.4,
    score=0.3,
    memory=0.4,
    backlog=0.1,
    latency=None,
    waiting=2.0,
    kv_usage=0.36,
    acted_to=None,
    outcome="unchanged",
    reason="steady",
    why="demand 2.20 replicas (kv)",
    steps=(),
)
SUMMARY = RunSummary(
    started_at=START,
    duration_s=7200.0,
    requests=20_000,
    attained=19_999,
    failed=1,
    ttft_s=2.0,
    tpot_s=0.1,
    gpus=4,
    gpu_hours=20.0,
    peak_replicas=5,
    traffic=(3.0, 4.0, 5.5),
    bins=(
        LatencyBin(start=0.0, end=300.0, arrived=100, attained=99, ttft_p99=0.5, itl_p99=0.05),
        LatencyBin(start=300.0, end=600.0, arrived=0, attained=0, ttft_p99=None, itl_p99=None),
        LatencyBin(start=600.0, end=900.0, arrived=200, attained=150, ttft_p99=4.0, itl_p99=0.2),
    ),
)


def act(at: float, seen: int, to: int, outcome: Outcome = Outcome.APPLIED) -> TickRow:
    return replace(HOLD, at=START + at, ordered=seen, acted_to=to, outcome=str(outcome), reason="up_demand")


def decision(action: Action, steps: tuple[Step, ...] = ()) -> Decision:
    return Decision(
        at=START,
        score=SCORE,
        demand=Demand(itl=3.1, kv=4.25, sequences=1.0),
        forecast=Forecast(horizon_s=180.0, top=4.6, up=6, keep=5),
        proposal=Proposal(current=3, replicas=5, reason=Reason.UP_DEMAND, steps=steps),
        reason=Reason.UP_DEMAND,
        mode=Mode.NORMAL,
        action=action,
    )


def snapshot(rows: list[dict[str, float]]) -> Snapshot:
    values = np.full((len(rows), len(ENGINE_COLUMNS)), np.nan)
    for index, row in enumerate(rows):
        for name, value in row.items():
            values[index, COLUMNS[name]] = value
    engines = Engines(keys=tuple(EngineKey(f"pod-{index}") for index in range(len(rows))), values=values)
    target = TargetStatus(namespace="demo", name="chat", current_replicas=3, ready_replicas=2)
    return Snapshot(at=START, target=target, engines=engines)


def test_a_tick_becomes_a_row() -> None:
    collector = TickCollector()
    step = Step(rule=Reason.LIMITED_STEP, before=6, after=5, detail="+2/-1 an action")
    seen = snapshot(
        [
            {"num_requests_waiting": 30.0, "kv_cache_usage": 0.9, "kv_capacity_tokens": 100.0},
            {"num_requests_waiting": 18.0, "kv_cache_usage": 0.1, "kv_capacity_tokens": 300.0},
            {"kv_cache_usage": 0.5},
        ]
    )
    collector.tick("chat", seen, decision(ScaleReplicas(seen=3, to=5), (step,)), Outcome.APPLIED, 0.01)
    (row,) = collector.rows
    assert (row.ordered, row.ready, row.acted_to, row.outcome, row.reason) == (3, 2, 5, "applied", "up_demand")
    assert (row.demand, row.forecast, row.score) == (4.25, 4.6, 0.74)
    assert (row.memory, row.backlog, row.latency) == (0.6, 0.8, None)
    assert row.waiting == 48.0
    assert row.kv_usage == pytest.approx(0.3)  # (0.9 x 100 + 0.1 x 300) / 400
    assert row.steps == ("limited_step 6 → 5 (+2/-1 an action)",)
    assert row.acted


@pytest.mark.parametrize(
    ("rows", "waiting", "usage"),
    [
        pytest.param([], None, None, id="no engines"),
        pytest.param([{"num_requests_waiting": 0.0}], 0.0, None, id="no KV gauge"),
        pytest.param([{"kv_cache_usage": 0.5, "kv_capacity_tokens": 10.0}], None, 0.5, id="no queue gauge"),
    ],
)
def test_what_no_engine_says_is_unknown(
    rows: list[dict[str, float]], waiting: float | None, usage: float | None
) -> None:
    row = TickRow.of(snapshot(rows), decision(Hold()), Outcome.UNCHANGED)
    assert (row.waiting, row.kv_usage, row.acted_to, row.acted) == (waiting, usage, None, False)


def test_why_says_demand_forecast_and_what_drives_the_score() -> None:
    assert why(decision(Hold())) == (
        "demand 4.25 replicas (kv); forecast 4.60 in 180 s: wants 6, keeps 5; "
        "score 0.74: memory 0.60 (kv_cache_usage 0.54), backlog 0.80 (waiting 48)"
    )
    blind = replace(decision(Hold()), score=None, demand=Demand(), forecast=Forecast(horizon_s=180.0))
    assert why(blind) == "nothing was known"


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        pytest.param([], 0, id="none"),
        pytest.param([(3, 4), (4, 6), (6, 7)], 0, id="all up"),
        pytest.param([(3, 4), (4, 3), (3, 4)], 2, id="there and back and there"),
    ],
)
def test_reversals(actions: list[tuple[int, int]], expected: int) -> None:
    rows = [HOLD, *(act(60.0 * index, seen, to) for index, (seen, to) in enumerate(actions)), HOLD]
    assert reversals(rows) == expected


def test_a_failed_action_is_no_action() -> None:
    rows = [act(0.0, 3, 4), act(60.0, 4, 3, Outcome.FAILED), act(120.0, 4, 5)]
    assert reversals(rows) == 0
    actions = chart_data(rows, POLICY, SUMMARY, ())["actions"]
    assert isinstance(actions, list)
    assert len(actions) == 2


def test_long_runs_are_thinned_and_keep_their_peaks() -> None:
    rows = [
        replace(HOLD, at=START + tick, waiting=float(tick == 7_001), ordered=tick) for tick in range(3 * MAX_POINTS)
    ]
    data = chart_data(rows, POLICY, SUMMARY, ())
    at, waiting, ordered, latency = (data[name] for name in ("at", "waiting", "ordered", "latency"))
    assert isinstance(at, list)
    assert isinstance(waiting, list)
    assert isinstance(ordered, list)
    assert len(at) == len(waiting) == len(ordered) == MAX_POINTS
    assert sum(waiting) == 1.0
    assert (at[-1], ordered[-1]) == (round((START + 3 * MAX_POINTS - 1) * 1000), 3 * MAX_POINTS - 1)
    assert latency == [None] * MAX_POINTS


def written(path: Path, rows: list[TickRow], policy: Policy = POLICY, title: str = "A run") -> str:
    write_report(
        path,
        rows,
        title=title,
        policy=policy,
        summary=SUMMARY,
        events=(Event(at=START + 60.0, text="a rush"),),
        note="Simulated.",
    )
    return path.read_text(encoding="utf-8")


def embedded(page: str) -> dict[str, object]:
    """Return the charts' data out of the page."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    data: dict[str, object] = json.loads(match.group(1))
    return data


def test_the_page_is_one_file_with_everything_inside(tmp_path: Path) -> None:
    page = written(tmp_path / "report.html", [HOLD, act(5.0, 3, 5), replace(HOLD, at=START + 10.0, ordered=5)])
    own = page[: page.index("<script>")]
    assert not re.search(r"<(script|link|img|iframe)[^>]*\b(src|href)=", own)
    assert "plotly.js v" in page
    assert not re.findall(r"<!--[A-Z_]+-->", own)
    data = embedded(page)
    assert data["ordered"] == [3, 3, 5]
    assert data["latency"] == [None, None, None]
    assert data["thresholds"] == {"up": 0.65, "down": 0.35, "critical": 0.95}
    assert data["slo"] == {"ttft": 2.0, "itl": 0.1}
    assert data["events"] == [{"at": (START + 60.0) * 1000, "text": "a rush"}]
    assert data["bins"] == {
        "at": [(START + at) * 1000 for at in (150.0, 450.0, 750.0)],
        "width": [300_000] * 3,
        "ttft": [0.5, None, 4.0],
        "itl": [0.05, None, 0.2],
        "attained": ["99.00% of 100 in time", "no requests", "75.00% of 200 in time"],
    }


def test_tiles_tell_the_run(tmp_path: Path) -> None:
    page = written(tmp_path / "report.html", [act(0.0, 3, 4), act(300.0, 4, 3), HOLD])
    tiles = dict(re.findall(r'<div class="name">(.*?)</div><div class="value">(.*?)</div>', page))
    assert tiles == {
        "Attainment": "99.99 %",  # 99.995 % is not rounded up to perfection
        "GPU-hours": "20.0",
        "Actions": "2",
        "Reversals per hour": "0.50",
        "Failed requests": "1",
        "Worst 5 minutes": "75.0 %",
    }
    assert "−50 % against 40 for a static fleet of the peak&#x27;s 5 replicas" in page
    assert "in time, from 00:10" in page


def test_a_run_of_minutes_is_told_in_minutes(tmp_path: Path) -> None:
    short = replace(
        SUMMARY,
        duration_s=180.0,
        gpu_hours=0.154,
        traffic_span_s=5.0,
        bins=(
            LatencyBin(start=0.0, end=10.0, arrived=10, attained=10, ttft_p99=0.5, itl_p99=0.05),
            LatencyBin(start=10.0, end=20.0, arrived=10, attained=9, ttft_p99=2.5, itl_p99=0.05),
        ),
    )
    write_report(tmp_path / "r.html", [act(0.0, 3, 4), act(9.0, 4, 3)], title="t", policy=POLICY, summary=short)
    page = (tmp_path / "r.html").read_text()
    tiles = dict(re.findall(r'<div class="name">(.*?)</div><div class="value">(.*?)</div>', page))
    assert (tiles["GPU-hours"], tiles["Reversals"], tiles["Worst 10 seconds"]) == ("0.15", "1", "90.0 %")
    assert "1 to 8 replicas; 3 minutes from" in page
    assert "in time, from 00:00:10" in page
    traffic = chart_data([HOLD], POLICY, short, ())["traffic"]
    assert traffic == {"at": [(START + at) * 1000 for at in (0.0, 5.0, 10.0)], "rate": [3.0, 4.0, 5.5]}


def test_the_table_lists_every_action_and_the_holds_by_reason(tmp_path: Path) -> None:
    rows = [
        replace(act(3.0, 3, 5), steps=("limited_step 7 → 5",)),
        act(8.0, 5, 4, Outcome.FAILED),
        *[HOLD] * 3,
        replace(HOLD, reason="held_cooldown"),
    ]
    page = written(tmp_path / "report.html", rows)
    body = page[page.index("<tbody>") : page.index("</tbody>")]
    assert re.findall(r'<td class="(up|down)">(\d → \d)</td>', body) == [("up", "3 → 5"), ("down", "5 → 4")]
    assert "<li>limited_step 7 → 5</li>" in body
    assert body.count("failed") == 1
    assert "00:00:03" in body
    holds = page[page.index('<ul class="card holds">') :]
    assert holds.index("steady") < holds.index("held_cooldown")
    assert "3 ticks, 50.0%" in holds


def test_text_cannot_act_as_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    row = replace(act(0.0, 3, 5), why=f"demand {evil}", reason=evil, steps=(evil,), outcome="simulated")
    policy = replace(POLICY, name=evil)
    page = written(tmp_path / "report.html", [row], policy=policy, title=evil)
    own = page[: page.index("plotly.js v")]
    assert "alert(1)" in own
    assert "<script>alert" not in own
    actions = embedded(page)["actions"]
    assert isinstance(actions, list)
    assert "<script>" not in actions[0]["text"]


def test_objectives_and_thresholds_that_a_policy_lacks_are_not_drawn() -> None:
    policy = replace(POLICY, slo=replace(Slos(), itl=None), score=replace(ScorePolicy(), critical=1.1))
    data = chart_data([HOLD], policy, SUMMARY, ())
    assert data["slo"] == {"ttft": 2.0, "itl": None}
    assert data["thresholds"] == {"up": 0.65, "down": 0.35, "critical": None}


def test_a_run_without_ticks_or_requests_still_makes_a_page(tmp_path: Path) -> None:
    summary = replace(SUMMARY, duration_s=0.0, requests=0, attained=0, peak_replicas=0, traffic=(), bins=())
    path = tmp_path / "report.html"
    write_report(path, [], title="Nothing", policy=POLICY, summary=summary)
    assert embedded(path.read_text())["at"] == []


def test_without_plotly_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(AutoscalerError, match=r"vllm-autoscaler\[report\]"):
        written(tmp_path / "report.html", [HOLD])
    assert not (tmp_path / "report.html").exists()


def test_a_path_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(AutoscalerError, match="cannot write"):
        written(tmp_path / "missing" / "report.html", [HOLD])
