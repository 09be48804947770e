"""What policies are compared by and held to: means over seeds, baselines, margins, verdicts."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from autoscaler.errors import AutoscalerError
from autoscaler.sim.gate import Baseline, Held, Margins, held, judge, read_baseline, write_baseline
from autoscaler.sim.run import Figures
from autoscaler.sim.scored import Mean, Scored, means

FIGURES = Figures(
    attainment=0.995,
    worst_ten_minutes=0.9,
    bad_ten_minutes=0.01,
    gpu_hours=100.0,
    mean_replicas=4.2,
    requests=1000,
    failed=3,
    fates={"timed_out": 2, "refused": 1, "killed": 0, "too_long": 0},
    ups=4,
    downs=3,
    reversals_per_hour=0.5,
    flaps=6,
    ttft_s=(0.1, 0.5, 1.5),
    tpot_s=(0.02, 0.03, 0.05),
    e2e_s=(3.0, 9.0, 20.0),
)
HEAD = '{"format": "autoscaler-baseline", "version": 1, '
SETTING: dict[str, object] = {"workload": "diurnal", "seeds": [0, 1], "hours": None}


def scored(policy: str = "chat", seed: int = 0, **changes: object) -> Scored:
    figures = replace(FIGURES, **changes)  # type: ignore[arg-type]
    return Scored(policy=policy, seed=seed, hours=24.0, figures=figures)


def baseline(margins: Margins | None = None) -> Baseline:
    kept = {"chat": Held(attainment=0.995, gpu_hours=100.0, flaps_per_hour=0.25)}
    return Baseline(setting=SETTING, margins=margins or Margins(), policies=kept)


def chat(**changes: float) -> Mean:
    return replace(means([scored()])[0], **changes)  # type: ignore[arg-type]


def test_a_policy_is_its_mean_over_seeds_and_its_worst_moment() -> None:
    runs = [
        scored("b", 0, attainment=0.99, gpu_hours=10.0, worst_ten_minutes=0.5, flaps=0),
        scored("a", 0, attainment=0.8),
        scored("b", 1, attainment=0.97, gpu_hours=14.0, worst_ten_minutes=0.7, flaps=12, ttft_s=(0.3, 0.5, 2.5)),
    ]
    first, second = means(runs)
    assert (first.policy, first.seeds, second.policy, second.seeds) == ("b", 2, "a", 1)
    assert first.attainment == pytest.approx(0.98)
    assert (first.lowest, first.highest) == (0.97, 0.99)
    assert first.gpu_hours == pytest.approx(12.0)
    assert first.flaps_per_hour == pytest.approx(0.25)
    assert first.worst == 0.5
    assert first.ttft_s == pytest.approx((0.2, 0.5, 2.0))
    assert (first.failed, first.requests) == (6, 2000)


def test_a_run_without_requests_missed_nobody() -> None:
    empty = scored(attainment=None, worst_ten_minutes=None, ttft_s=(math.nan,) * 3)
    assert (empty.attainment, empty.worst) == (1.0, 1.0)
    document = empty.to_document()
    assert document["attainment"] is None
    assert document["ttft_s"] == {"p50": None, "p95": None, "p99": None}
    assert document["fates"] == FIGURES.fates
    assert json.loads(json.dumps(document, allow_nan=False)) == document


@pytest.mark.parametrize(
    ("changes", "worse"),
    [
        pytest.param({}, [], id="equal"),
        pytest.param({"attainment": 0.999, "gpu_hours": 80.0, "flaps_per_hour": 0.0}, [], id="better"),
        pytest.param({"attainment": 0.9931, "gpu_hours": 101.9, "flaps_per_hour": 0.44}, [], id="within-margins"),
        pytest.param({"attainment": 0.993, "gpu_hours": 102.0, "flaps_per_hour": 0.45}, [], id="at-the-margins"),
        pytest.param({"attainment": 0.9929}, ["attainment"], id="attainment"),
        pytest.param({"gpu_hours": 102.1}, ["GPU-hours"], id="gpu-hours"),
        pytest.param({"flaps_per_hour": 0.46}, ["flaps/h"], id="flaps"),
        pytest.param({"attainment": 0.9, "gpu_hours": 200.0}, ["attainment", "GPU-hours"], id="two"),
    ],
)
def test_what_got_worse_by_more_than_its_margin(changes: dict[str, float], worse: list[str]) -> None:
    verdicts = judge(baseline(), Margins(), SETTING, [chat(**changes)])
    assert len(verdicts) == 3
    assert [one.figure for one in verdicts if one.worse] == worse


def test_a_wider_margin_lets_it_through() -> None:
    wide = Margins(attainment=0.01, gpu_hours=0.1, flaps=1.0)
    changed = chat(attainment=0.986, gpu_hours=109.0, flaps_per_hour=1.2)
    assert not any(one.worse for one in judge(baseline(), wide, SETTING, [changed]))


@pytest.mark.parametrize(
    ("setting", "mean", "message"),
    [
        pytest.param({**SETTING, "seeds": [0]}, chat(), "made with seeds [0, 1], this run has [0]", id="setting"),
        pytest.param({**SETTING, "faults": "plan"}, chat(), "made with faults None, this run has 'plan'", id="more"),
        pytest.param(SETTING, replace(chat(), policy="code"), "has no policy code (it has: chat)", id="policy"),
    ],
)
def test_only_what_compares_is_compared(setting: dict[str, object], mean: Mean, message: str) -> None:
    with pytest.raises(AutoscalerError) as error:
        judge(baseline(), Margins(), setting, [mean])
    assert message in str(error.value)


def test_a_baseline_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    written = Baseline(
        setting=SETTING, margins=Margins(gpu_hours=0.05), policies={"chat": held(chat()), "a": held(chat())}
    )
    write_baseline(path, written)
    assert read_baseline(path) == written
    with pytest.raises(AutoscalerError, match="cannot write"):
        write_baseline(tmp_path, written)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("{", "is no JSON", id="cut"),
        pytest.param("[]", "no baseline", id="list"),
        pytest.param('{"format": "autoscaler-baseline", "version": 9}', "version 9", id="newer"),
        pytest.param(
            HEAD + '"setting": {}, "margins": {}}',
            "damaged baseline: KeyError: 'policies'",
            id="without-policies",
        ),
        pytest.param(
            HEAD + '"setting": {}, "margins": {"flaps": "many"}, "policies": {}}',
            "flaps is not a number",
            id="no-number",
        ),
        pytest.param(
            HEAD + '"setting": {}, "margins": {"luck": 1}, "policies": {}}',
            "luck",
            id="unknown-margin",
        ),
    ],
)
def test_what_is_no_baseline(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(text)
    with pytest.raises(AutoscalerError) as error:
        read_baseline(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)
    with pytest.raises(AutoscalerError, match="cannot be read"):
        read_baseline(tmp_path / "missing.json")
