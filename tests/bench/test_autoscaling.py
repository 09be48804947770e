"""The benchmark of autoscalers: from a folder of traces to a page, over an interruption."""

import dataclasses
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from autoscaler.core.policy import Policy
from autoscaler.errors import PolicyError
from autoscaler.policy_file import policy_to_plain
from autoscaler.sim.workload import Lengths, requests, step
from bench.autoscaling import Only, main
from bench.contest import page
from bench.contest.matches import matches
from bench.contest.page import cheaper, dearer, losses
from bench.contest.picture import Point, front, pareto
from bench.contest.play import DEFAULT, learned, our_policy, settled, the_policy
from bench.contest.results import Entry, Spread, read
from bench.contest.traces import BY_NAME, Ground
from bench.contest.variants import VARIANTS, overlaid
from bench.oracle import THETAS
from bench.rivals import RIVALS
from bench.rivals.base import Bounds
from tests.bench.entries import ran

DURATION_S = 300.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with one trace: five minutes, three times the requests in the second half."""
    lengths = Lengths(prompt=1500, output=30, longest_output=200)
    made = requests(np.random.default_rng(3), step(3.0, 9.0, DURATION_S / 2.0), lengths, DURATION_S, span_s=60.0)
    rows = [f"{one.arrival:.3f},{one.prompt_tokens},{one.output_tokens}" for one in made]
    traces = tmp_path / "traces"
    traces.mkdir()
    (traces / "azure2023_code.csv").write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]) + "\n")
    return traces


def _run(folder: Path, results: Path, *more: str) -> int:
    return main(["--traces", str(folder), "--resume", str(results), "--seeds", "1", "--scales", "1", *more])


def test_from_a_folder_of_traces_to_a_page(folder: Path, tmp_path: Path) -> None:
    results, made = tmp_path / "results.jsonl", tmp_path / "docs" / "page.md"
    assert _run(folder, results, "--only", "*/ours,oracle,static-peak,hpa-queue", "--page", str(made)) == 0
    entries = {entry.policy: entry for entry in read(results)}
    assert set(entries) == {"ours", "oracle", "static-peak", "hpa-queue"}
    assert len({json.dumps(dict(entry.ground)) for entry in entries.values()}) == 1
    for entry in entries.values():
        assert entry.figures is not None
        assert entry.figures["requests"] == entry.ground["requests"]
        assert entry.figures["gpu_hours"] > entry.ground["fluid_gpu_hours"]
    for policy in ("oracle", "static-peak"):
        assert _figure(entries[policy], "attainment") >= 0.99
    theta = THETAS.index(entries["oracle"].settings["theta"])
    assert 0.0 < _share(entries["ours"], "under", theta) < 1.0
    assert _share(entries["static-peak"], "over", theta) > 0.0

    text = made.read_text()
    assert text.startswith("> **PRELIMINARY")
    assert "$" not in text
    for policy in entries:
        assert f"| {policy}" in text or f"| **{policy}**" in text
    assert "(page/code-2023-x1.svg)" in text
    picture = ElementTree.parse(tmp_path / "docs" / "page" / "code-2023-x1.svg")
    words = {element.text for element in picture.iter() if element.tag.endswith("text")}
    assert {*entries, "fluid bound"} <= words


def test_an_interrupted_run_goes_on(folder: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    assert _run(folder, results, "--only", "static-mean,hpa-queue,keda-in-flight") == 0
    whole = results.read_text()
    lines = whole.splitlines(keepends=True)
    results.write_text(lines[0] + lines[1][:40])  # cut off while it wrote the second
    assert _run(folder, results, "--only", "static-mean,hpa-queue,keda-in-flight") == 0
    again = results.read_text()
    assert again.startswith(lines[0])
    assert _without_seconds(again) == _without_seconds(whole)


def test_what_is_there_runs_again_only_when_asked(folder: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    assert _run(folder, results, "--only", "static-mean") == 0
    assert _run(folder, results, "--only", "static-mean") == 0
    assert len(results.read_text().splitlines()) == 1
    assert _run(folder, results, "--only", "static-mean", "--again", "*/static-*") == 0
    assert len(results.read_text().splitlines()) == 2
    assert len(read(results)) == 1


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_tuned_rivals_and_other_policies_run_beside(folder: Path, tmp_path: Path, jobs: str) -> None:
    tuned, other = tmp_path / "tuned.json", tmp_path / "other.yaml"
    tuned.write_text(json.dumps({"hpa-queue": {"target": 2.0}}))
    other.write_text(Path("policies/cost-first.yaml").read_text())
    results = tmp_path / "results.jsonl"
    wanted = ("--only", "hpa-queue*,other", "--tuned", str(tuned), "--policy", str(other), "--hours", "0.05")
    assert _run(folder, results, *wanted, "--jobs", jobs) == 0
    entries = {entry.policy: entry for entry in read(results)}
    assert set(entries) == {"hpa-queue", "hpa-queue tuned", "other"}
    assert entries["hpa-queue"].settings["target"] == 5.0
    assert entries["hpa-queue tuned"].settings["target"] == 2.0
    assert entries["other"].settings["file"] == "other.yaml"
    assert entries["other"].hours == 0.05


def test_the_sweep_ablations_and_our_tuned_values_run_beside(folder: Path, tmp_path: Path) -> None:
    tuned = tmp_path / "tuned.json"
    tuned.write_text(json.dumps({"ours": {"prediction.z_up": 2.0}}))
    results = tmp_path / "results.jsonl"
    wanted = ("--only", "ours margin x4,ours by score,ours tuned", "--sweep", "--ablations", "--tuned", str(tuned))
    assert _run(folder, results, *wanted) == 0
    entries, shipped = {entry.policy: entry for entry in read(results)}, the_policy(DEFAULT).prediction
    assert entries["ours margin x4"].settings == {
        "file": "default.yaml",
        "prediction.zUp": pytest.approx(4.0 * shipped.z_up),
        "prediction.zKeep": pytest.approx(4.0 * shipped.z_keep),
    }
    assert entries["ours by score"].settings["sizing"] == "score"
    assert entries["ours tuned"].settings["prediction.zUp"] == 2.0


def test_what_an_earlier_hour_has_taught_is_kept(folder: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    assert _run(folder, results, "--only", "ours,ours warm") == 0
    entries = {entry.policy: entry for entry in read(results)}
    assert entries["ours warm"].settings["learned on seed"] == 1000
    before = Ground.of(BY_NAME["code-2023"], folder / "azure2023_code.csv", seed=1000)
    state = learned(before, the_policy(DEFAULT))
    assert state.model is not None
    assert state.model.rows > 0
    assert (state.last_up_at, state.last_down_at, state.changes, state.recommendations) == (None, None, (), ())


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_another_policy(name: str) -> None:
    policy = the_policy(DEFAULT)
    changes = VARIANTS[name].changes(policy)
    made = overlaid(policy, changes)
    assert made != policy
    assert overlaid(made, {path: _at(policy, path) for path in changes}) == policy
    assert Only.of(name).has("code", name)


def _at(policy: Policy, path: str) -> object:
    value: object = policy_to_plain(policy)
    for key in path.split("."):
        assert isinstance(value, dict)
        value = value[key]
    return value


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param({"prediction.z_up": 9.0}, "z_keep", id="above-keep"),
        pytest.param({"prediction.zUp": 1.0}, "zUp", id="unknown"),
    ],
)
def test_a_variant_must_be_a_policy(changes: dict[str, object], says: str) -> None:
    with pytest.raises((ValueError, PolicyError), match=says):
        overlaid(the_policy(DEFAULT), changes)


def test_all_policies_get_the_same_objectives_and_bounds(folder: Path) -> None:
    trace = BY_NAME["code-2023"]
    ground = Ground.of(trace, folder / "azure2023_code.csv", seed=0, scale=2.0)
    policy = our_policy(ground, the_policy(DEFAULT))
    assert Bounds(min=policy.replicas.min, max=policy.replicas.max) == ground.bounds
    assert policy.slo.ttft is not None
    assert policy.slo.ttft.seconds == trace.ttft_s
    assert policy.slo.itl is not None
    assert policy.slo.itl.seconds == trace.tpot_s
    for name, settings in RIVALS.items():
        every: Any = settled(settings, ground, {})
        assert every.bounds == ground.bounds, name
        values = {field.name: getattr(every, field.name) for field in dataclasses.fields(every)}
        assert values.get("ttft_s", trace.ttft_s) == trace.ttft_s, name
        assert values.get("tpot_s", trace.tpot_s) == trace.tpot_s, name
        assert values.get("itl_s", trace.tpot_s) == trace.tpot_s, name
        assert values.get("profile", ground.profile) == ground.profile, name


def test_a_day_is_made_of_a_curve(tmp_path: Path) -> None:
    curve = tmp_path / "rates" / "servegen_mlarge_10min.csv"
    curve.parent.mkdir()
    rates = (f"{ten * 600},{330 if ten >= 9 * 144 else 33}" for ten in range(10 * 144))
    curve.write_text("\n".join(["t_s,rps", *rates]))
    trace = BY_NAME["mlarge"]
    assert trace.path(tmp_path) == curve
    once, again = (Ground.of(trace, curve, seed=0, scale=2.0, hours=0.1) for _ in range(2))
    assert len(once.sample) == pytest.approx(20 * 360, rel=0.2)  # day 9 has 330 requests/s, a 33rd of it is 10
    assert np.array_equal(once.sample.arrival, again.sample.arrival)
    assert not np.array_equal(once.sample.arrival, Ground.of(trace, curve, seed=1, scale=2.0, hours=0.1).sample.arrival)


def test_arrivals_on_a_grid_are_spread(folder: Path) -> None:
    path = folder / "mooncake.csv"
    path.write_text(
        "arrival_s,input_tokens,output_tokens\n" + "".join(f"{3 * (row // 9)},99,9\n" for row in range(900))
    )
    arrivals = BY_NAME["mooncake"].workload(path).draw(0).arrival
    assert np.all(np.diff(arrivals) >= 0.0)
    assert np.array_equal(arrivals // 3.0, np.arange(900) // 9)
    assert len(np.unique(arrivals)) == 900


def test_published_bounds_grow_with_the_traffic(folder: Path) -> None:
    path = folder / "azure2023_code.csv"
    bounds = [Ground.of(BY_NAME["ramp"], path, seed=0, scale=scale).bounds for scale in (1.0, 4.0)]
    assert bounds == [Bounds(min=3, max=8), Bounds(min=12, max=32)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(["--traces", "nowhere"], "nothing to run", id="no-traces"),
        pytest.param(["--page", "page.md"], "no results", id="no-results"),
    ],
)
def test_nothing_to_do_is_said(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


def test_a_file_that_holds_no_results_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text('{"trace": "code"}\n')
    assert _run(folder, results) == 2
    assert "line 1 is no result" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "trace", "policy", "has"),
    [
        pytest.param("code,r1/ours,oracle", "r1", "oracle", True, id="both"),
        pytest.param("code,r1/ours,oracle", "conv", "oracle", False, id="other-trace"),
        pytest.param("*/keda-*", "conv", "keda-gpu-70", True, id="pattern"),
        pytest.param("ours", "conv", "ours", True, id="policy-alone"),
        pytest.param("ours", "conv", "oracle", False, id="other-policy"),
    ],
)
def test_only(text: str, trace: str, policy: str, has: bool) -> None:
    assert Only.of(text).has(trace, policy) is has


@pytest.mark.parametrize(
    ("ours", "other", "lost", "undercut"),
    [
        pytest.param((0.995, 10.0), ("kpa", 0.999, 9.0), True, False, id="better-for-less"),
        pytest.param((0.995, 10.0), ("static-peak", 0.995, 9.0), True, False, id="as-good-for-less"),
        pytest.param((0.999, 10.0), ("kpa", 0.992, 9.0), False, True, id="meets-the-goal-for-less"),
        pytest.param((0.999, 10.0), ("kpa", 0.98, 9.0), False, False, id="misses-the-goal"),
        pytest.param((0.995, 10.0), ("kpa", 0.999, 11.0), False, False, id="better-for-more"),
        pytest.param((0.98, 10.0), ("kpa", 0.97, 11.0), True, False, id="ours-misses-the-goal"),
        pytest.param((0.995, 10.0), ("oracle", 0.999, 9.0), False, False, id="oracle"),
    ],
)
def test_losses_are_told(
    ours: tuple[float, float], other: tuple[str, float, float], lost: bool, undercut: bool
) -> None:
    (match,) = matches([ran("ours", *ours), ran(*other)])
    assert bool(losses(match)) is lost
    assert bool(cheaper(match)) is undercut


def test_who_attains_more_for_more_is_told() -> None:
    (match,) = matches([ran("ours", 0.992, 10.0), ran("kpa", 0.999, 12.0), ran("keda-in-flight", 0.98, 20.0)])
    assert dearer(match) == ["`kpa` 99.90 % at 1.20 x"]


def test_a_page_of_five_seeds_has_intervals() -> None:
    runs = [ran("ours", 0.99 + 0.001 * seed, 10.0 + seed, seed) for seed in range(5)]
    oracle = [ran("oracle", 0.99, 5.0 * (1 + seed), seed) for seed in range(4)]
    (match,) = matches([*runs, *oracle])
    row = match.row("ours")
    assert row is not None
    assert row.spread("gpu_hours").mean == pytest.approx(12.0)
    assert row.spread("gpu_hours").half == pytest.approx(2.776 * 2.5**0.5 / 5**0.5)
    assert row.against_oracle == pytest.approx((10 / 5 + 11 / 10 + 12 / 15 + 13 / 20) / 4)
    assert match.seeds == 4


def test_one_run_has_no_interval() -> None:
    assert Spread.of([3.0]) == Spread(mean=3.0, half=None)


def test_runs_of_other_lengths_are_another_match() -> None:
    part = dataclasses.replace(ran("ours", 0.9, 1.0), hours=6.0)
    assert [match.name for match in matches([ran("ours", 0.99, 10.0), part])] == ["code-x1-6h", "code-x1"]


def test_a_plan_that_is_not_there_is_told(tmp_path: Path) -> None:
    missing = dataclasses.replace(ran("oracle", 0.0, 0.0), figures=None)
    assert [row.policy for row in matches([ran("ours", 0.99, 10.0), missing])[0].rows] == ["ours"]
    assert "no plan of the oracle's kind" in page._runs([missing])


def test_the_front_and_labels_of_a_picture() -> None:
    points = [
        Point(name="a", gpu_hours=10.0, attainment=0.9, kind="rival"),
        Point(name="b", gpu_hours=20.0, attainment=0.99, kind="ours"),
        Point(name="c", gpu_hours=30.0, attainment=0.95, kind="rival"),
    ]
    assert [point.name for point in front(points)] == ["a", "b"]
    crowd = [dataclasses.replace(points[0], name=f"<{number}>") for number in range(12)]
    root = ElementTree.fromstring(pareto("crowd & more", crowd, fluid_gpu_hours=5.0, goal=0.99))
    labels = [element for element in root.iter() if (element.text or "").startswith("<")]
    assert len({(label.get("x"), label.get("y")) for label in labels}) == 12


def _share(entry: Entry, name: str, place: int) -> float:
    assert entry.figures is not None
    return float(entry.figures[name][place])


def _figure(entry: Entry, name: str) -> float:
    assert entry.figures is not None
    return float(entry.figures[name])


def _without_seconds(text: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in text.splitlines()]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]
