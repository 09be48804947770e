"""`autoscaler simulate`, as a person runs it: minutes of traffic on small replicas."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from autoscaler.cli.main import run
from autoscaler.cli.simulate import fitting
from autoscaler.cli.study import PRESETS, Case, load_named, peak_s, run_case, run_cases, starting_replicas
from autoscaler.errors import AutoscalerError
from autoscaler.sim.profiles import profile
from autoscaler.sim.traffic import load_workload

POLICIES = Path(__file__).parents[2] / "policies"
MINE, CHEAP = str(POLICIES / "demo.yaml"), str(POLICIES / "cost-first.yaml")
TRAFFIC = "step:rps=2,to=10,hours=0.25,at=0.3,output=120"
SMALL = ["--profile", "llama-3.1-8b-l40sx1", "--jobs", "1"]
Capture = pytest.CaptureFixture[str]


def simulate(*arguments: str) -> int:
    return run(["simulate", *SMALL, *arguments])


def test_two_policies_end_to_end(tmp_path: Path, capsys: Capture) -> None:
    """Table, report, baseline, gates and JSON of two policies on two seeds, in two processes."""
    report, kept = tmp_path / "s.html", tmp_path / "baseline.json"
    asked = [TRAFFIC, "--policy", MINE, "--policy", CHEAP, "--seeds", "2", "--jobs", "2", "--price", "2"]
    assert simulate(*asked, "--report", str(report), "--write-baseline", str(kept)) == 0
    out = capsys.readouterr().out
    for word in ("demo", "cost-first", "attainment", "× cheapest", "cost", "0 to 1", "Simulated, not measured"):
        assert word in out
    assert "demo, cost-first on step" in report.read_text()
    # in one process the same seeds give the same figures, so that the baseline is met to the bit
    assert simulate(*asked, "--jobs", "1", "--no-report", "--gate", str(kept), "--json") == 0
    captured = capsys.readouterr()
    runs = json.loads(captured.out)["runs"]
    assert [(one["policy"], one["seed"]) for one in runs] == [
        ("demo", 0),
        ("demo", 1),
        ("cost-first", 0),
        ("cost-first", 1),
    ]
    assert "gate passed" in captured.err
    baseline = json.loads(kept.read_text())
    mean = sum(one["gpu_hours"] for one in runs[:2]) / 2
    assert baseline["policies"]["demo"]["gpu_hours"] == pytest.approx(mean, rel=1e-12)


@pytest.fixture
def kept(tmp_path: Path, capsys: Capture) -> Path:
    """A baseline of the demo's policy on ten minutes."""
    path = tmp_path / "baseline.json"
    assert simulate("steady:rps=3,hours=0.1", "--policy", MINE, "--no-report", "--write-baseline", str(path)) == 0
    capsys.readouterr()
    return path


def test_the_gate_names_what_got_worse(kept: Path, capsys: Capture) -> None:
    document = json.loads(kept.read_text())
    document["policies"]["demo"]["gpu_hours"] *= 0.5
    kept.write_text(json.dumps(document))
    gated = ["steady:rps=3,hours=0.1", "--policy", MINE, "--no-report", "--gate", str(kept)]
    assert simulate(*gated) == 1
    out = capsys.readouterr().out
    assert "GPU-hours" in out.split("allows")[1]
    assert "flaps" not in out.split("allows")[1]
    assert simulate(*gated, "--margin", "gpu-hours=150%") == 0


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        pytest.param(60, ["policy chat cost-first", "attainment 99.1 % 98.2 %", "GPU-hours 10.0 8.0"], id="narrow"),
        pytest.param(100, ["policy attainment GPU-hours", "chat 99.1 % 10.0", "cost-first 98.2 % 8.0"], id="wide"),
    ],
)
def test_the_table_fits_its_terminal(width: int, lines: list[str]) -> None:
    console = Console(width=width, record=True, file=StringIO())
    headings = ("policy", "attainment" + 20 * " ", "GPU-hours" + 20 * " ")
    console.print(fitting(console, headings, [("chat", "99.1 %", "10.0"), ("cost-first", "98.2 %", "8.0")]))
    assert [" ".join(line.split()) for line in console.export_text().splitlines()] == lines


@pytest.mark.parametrize(
    "moved",
    [pytest.param("curve.csv:lengths=day.csv", id="here"), pytest.param("a/curve.csv:lengths=b/c/day.csv", id="there")],
)
def test_a_baseline_knows_files_by_their_names(moved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders differ between machines."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "b/c").mkdir(parents=True)
    for folder in ("", "a/"):
        (tmp_path / f"{folder}curve.csv").write_text("t_s,rps\n0,2\n60,2\n")
    for folder in ("", "b/c/"):
        (tmp_path / f"{folder}day.csv").write_text("0,500,50\n1,600,60\n")
    assert simulate(moved, "--policy", MINE, "--no-report", "--write-baseline", "kept.json") == 0
    assert json.loads((tmp_path / "kept.json").read_text())["setting"]["workload"] == "curve.csv:lengths=day.csv"


def test_another_setting_does_not_compare(kept: Path, capsys: Capture) -> None:
    assert simulate("steady:rps=4,hours=0.1", "--policy", MINE, "--no-report", "--gate", str(kept)) == 1
    assert "was made with workload 'steady:rps=3,hours=0.1'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param([], "name a workload", id="no-workload"),
        pytest.param(["steady"], "name at least one --policy", id="no-policy"),
        pytest.param(["stedy", "--policy", MINE], "neither a file nor a built-in workload", id="workload"),
        pytest.param(["steady", "--policy", MINE, "--slo", "e2e=2s"], "must be one of ttft=..., itl=...", id="slo"),
        pytest.param(["steady", "--policy", MINE, "--slo", "ttft=soon"], "must be a duration", id="slo-value"),
        pytest.param(["steady", "--policy", MINE, "--slo", "ttft=0s"], "must be above 0", id="slo-zero"),
        pytest.param(["steady", "--policy", MINE, "--margin", "flaps=few"], "is not a number", id="margin"),
        pytest.param(["steady", "--policy", MINE, "--margin", "flaps=-1"], "must be at least 0", id="margin-negative"),
        pytest.param(["steady", "--policy", MINE, "--profile", "gpt"], "no such profile", id="profile"),
        pytest.param(["steady", "--policy", "missing.yaml"], "missing.yaml", id="policy-file"),
        pytest.param(["steady", "--policy", MINE, "--faults", "all"], "'all' is not one of", id="faults"),
    ],
)
def test_bad_input_is_said_before_anything_runs(arguments: list[str], message: str, capsys: Capture) -> None:
    assert simulate(*arguments) == 2
    assert message in capsys.readouterr().err


def test_objectives_are_what_it_scales_and_is_judged_by(capsys: Capture) -> None:
    asked = ["steady:rps=4,hours=0.1", "--policy", MINE, "--no-report", "--json"]
    assert simulate(*asked, "--slo", "ttft=10s,itl=1s") == 0
    lenient = json.loads(capsys.readouterr().out)["runs"][0]
    assert simulate(*asked, "--slo", "ttft=1ms") == 0
    strict = json.loads(capsys.readouterr().out)["runs"][0]
    assert (lenient["attainment"], strict["attainment"]) == (1.0, 0.0)


def test_calibration_makes_what_simulate_takes(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    golden = Path(__file__).parents[1] / "golden/rush.trace.gz"
    asked = ["--profile", "llama-3.1-8b-l40sx1", "--token-budget", "512"]
    assert run(["simulate", "--calibrate", str(golden), *asked]) == 0
    told = capsys.readouterr().out
    assert "step time" in told
    assert "1 GPU a replica, 512 tokens an iteration, from" in told
    assert "autoscaler simulate rush.csv --profile rush.yaml --policy FILE" in told
    made = ["rush.csv", "--profile", "rush.yaml", "--policy", MINE, "--hours", "0.05", "--no-report", "--jobs", "1"]
    assert run(["simulate", *made]) == 0


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        pytest.param(["--stream", "other"], 1, "holds no policy other", id="stream"),
        pytest.param(["--token-budget", "64"], 1, "give the engines' --token-budget", id="budget"),
        pytest.param(["--output", "profile.txt"], 2, "a profile's file ends in .yaml", id="output"),
    ],
)
def test_calibration_says_what_is_wrong(more: list[str], code: int, message: str, capsys: Capture) -> None:
    golden = Path(__file__).parents[1] / "golden/rush.trace.gz"
    assert run(["simulate", "--calibrate", str(golden), *more]) == code
    assert message in capsys.readouterr().err


# -- the study behind it ---------------------------------------------------------------------------------------------


def case(**changes: object) -> Case:
    policies = load_named([Path(MINE)])
    plain: dict[str, object] = {
        "label": "demo",
        "policy": policies["demo"],
        "workload": "steady:rps=3,hours=0.1,output=80",
        "profile": profile("llama-3.1-8b-l40sx1"),
        "seed": 1,
    }
    return Case(**{**plain, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_of_faults_runs(name: str) -> None:
    assert run_case(case(faults=name)).scored.figures.requests > 0


def test_a_blackout_is_at_the_peak() -> None:
    sample = load_workload("spike:rps=2,factor=10,seconds=300,at=0.6,hours=2").draw(0)
    assert peak_s(sample, 7200.0) == pytest.approx(4200.0, abs=600.0)
    assert PRESETS["blackout"](4200.0).blackouts[0].start_s == 4200.0
    assert PRESETS["blackout"](4200.0).api_errors == 0.0


def test_a_meter_tells_how_much_is_done(tmp_path: Path) -> None:
    run_case(case(meter=tmp_path / "0"))
    assert 0.0 <= float((tmp_path / "0").read_text()) <= 1.0


def test_threads_and_this_process_agree() -> None:
    cases = [case(seed=seed, workload="steady:rps=3,hours=0.03") for seed in (1, 2)]
    here = [one.scored for one in run_cases(cases, jobs=1, backend="loky")]
    there = sorted((one.scored for one in run_cases(cases, jobs=2, backend="threading")), key=lambda one: one.seed)
    assert here == there


def test_an_unknown_back_end_is_said() -> None:
    with pytest.raises(AutoscalerError, match="no back end 'nowhere'"):
        list(run_cases([case()], jobs=2, backend="nowhere"))


@pytest.mark.parametrize(
    ("rps", "least", "most"),
    [pytest.param(1.0, 1, 1, id="one"), pytest.param(20.0, 4, 12, id="some"), pytest.param(0.0, 1, 1, id="no-traffic")],
)
def test_a_fleet_begins_at_what_the_first_minutes_take(rps: float, least: int, most: int) -> None:
    sample = load_workload(f"steady:rps={rps},hours=0.5").draw(0)
    assert least <= starting_replicas(profile("llama-3.1-8b-l40sx1"), sample, 0.1) <= most


def test_policies_of_one_name_go_by_their_files(tmp_path: Path) -> None:
    text = Path(MINE).read_text()
    files = [tmp_path / name for name in ("a.yaml", "b.yaml")]
    for file in files:
        file.write_text(text)
    assert list(load_named(files)) == ["a", "b"]
    assert list(load_named(files[:1])) == ["demo"]
    (tmp_path / "more").mkdir()
    (tmp_path / "more/a.yaml").write_text(text)
    with pytest.raises(AutoscalerError, match="two policies are called a"):
        load_named([*files, tmp_path / "more/a.yaml"])
