"""The search for rivals' values: the vendor's first, the same draws anywhere, logged, and it goes on."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autoscaler.sim.traffic import Workload, load_workload
from bench import tune
from bench.contest.play import DEFAULT, the_policy
from bench.contest.variants import SPANS, overlaid
from bench.rivals import RIVALS
from bench.rivals.base import spans
from bench.tune import Candidate, main, score, scored
from bench.tuning import Tuning


def _steps(_: Path) -> Workload:
    return load_workload("step:rps=3,to=9,hours=0.1,prompt=1500,output=30")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tune by one workload of five minutes."""
    one = Tuning(make=_steps, hours=(0.01, 0.09), profile="llama-3.1-70b-h100x4", ttft_s=2.0, tpot_s=0.2)
    monkeypatch.setattr(tune, "TUNINGS", {"small": one})


def _search(folder: Path, *rivals: str, budget: int = 3) -> int:
    places = ("--traces", str(folder), "--log", str(folder / "log.jsonl"), "--output", str(folder / "tuned.json"))
    return main([*rivals, "--budget", str(budget), *places])


@pytest.mark.usefixtures("small")
def test_the_best_of_the_budget_is_written(tmp_path: Path) -> None:
    assert _search(tmp_path, "hpa-queue", "kpa") == 0
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(entry["rival"], entry["number"]) for entry in log] == [
        (r, n) for r in ("hpa-queue", "kpa") for n in range(3)
    ]
    tuned = json.loads((tmp_path / "tuned.json").read_text())
    for rival, values in tuned.items():
        best = min((entry for entry in log if entry["rival"] == rival), key=scored)
        assert values == best["values"]


@pytest.mark.usefixtures("small")
def test_our_policy_is_searched_alike(tmp_path: Path) -> None:
    assert _search(tmp_path, "ours", budget=2) == 0
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(entry["rival"], entry["number"]) for entry in log] == [("ours", 0), ("ours", 1)]
    assert log[0]["values"] == {}
    assert set(log[1]["values"]) == {*SPANS, "prediction.z_keep"}
    assert json.loads((tmp_path / "tuned.json").read_text())["ours"] in [entry["values"] for entry in log]


@pytest.mark.parametrize("number", range(1, 21))
def test_every_candidate_of_ours_is_a_policy(number: int) -> None:
    values = Candidate(rival="ours", number=number, seed=1).values()
    made = overlaid(the_policy(DEFAULT), values)
    assert made.prediction.z_up < made.prediction.z_keep
    for path, span in SPANS.items():
        assert span.low <= values[path] <= span.high


@pytest.mark.usefixtures("small")
def test_a_search_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    assert _search(tmp_path, "hpa-queue") == 0
    whole = log.read_text()
    lines = whole.splitlines(keepends=True)
    log.write_text("".join(lines[:2]) + lines[2][:30])
    assert _search(tmp_path, "hpa-queue") == 0
    assert log.read_text() == whole
    assert _search(tmp_path, "hpa-queue", budget=2) == 0
    assert log.read_text() == whole


def test_a_workload_that_is_not_scored_need_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored_one = Tuning(make=_steps, hours=(0.01, 0.09), profile="llama-3.1-70b-h100x4", ttft_s=2.0, tpot_s=0.2)
    monkeypatch.setattr(tune, "TUNINGS", {"small": scored_one, "surge": replace(scored_one, scored=False)})
    assert _search(tmp_path, "hpa-queue") == 0
    whole = (tmp_path / "log.jsonl").read_text()
    assert json.loads(whole.splitlines()[0])["workloads"] == ["small", "surge"]
    assert _search(tmp_path, "hpa-queue", "--only", "small") == 0
    assert (tmp_path / "log.jsonl").read_text() == whole


def test_candidates_are_drawn_from_their_spans_and_the_first_is_the_vendors() -> None:
    for rival, settings in RIVALS.items():
        assert Candidate(rival=rival, number=0, seed=1).values() == {}
        drawn = Candidate(rival=rival, number=4, seed=1).values()
        assert drawn == Candidate(rival=rival, number=4, seed=1).values()
        allowed = spans(settings)
        assert set(drawn) == set(allowed)
        for name, value in drawn.items():
            assert allowed[name].low <= value <= allowed[name].high


def test_a_point_below_the_goal_weighs_as_much_as_the_fluid_bound() -> None:
    assert score([0.995, 0.99], [1.4, 1.6]) == pytest.approx(1.5)
    assert score([0.98, 0.98], [1.4, 1.6]) == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("workloads", "expected"),
    [
        pytest.param(["code", "mlarge-x4"], 2.0, id="a-surge-is-left-out"),
        pytest.param(["mlarge-x4", "code"], 9.0 + 100.0 * 0.09, id="the-other-way-round"),
        pytest.param(["mlarge-x4", "mlarge-x4"], 5.5 + 100.0 * 0.045, id="nothing-else"),
    ],
)
def test_what_is_scored(workloads: list[str], expected: float) -> None:
    entry = {"workloads": workloads, "attained": [0.99, 0.90], "over_fluid": [2.0, 9.0]}
    assert scored(entry) == pytest.approx(expected)
