"""Calibration: what a recording of the simulator says about the profile, the traffic and the starts that made it."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autoscaler.core.policy import Policy, ReplicaBounds, TargetRef
from autoscaler.core.types import Decision, Outcome, Snapshot
from autoscaler.errors import AutoscalerError
from autoscaler.sim.calibrate import Calibration, Starts, calibrate, fit, profile_text, to_profile, traffic_text
from autoscaler.sim.profiles import load_profile, profile
from autoscaler.sim.run import Setting, run
from autoscaler.sim.traffic import Sample, load_workload

TRUE = replace(profile("llama-3.1-8b-l40sx1"), max_num_batched_tokens=2048, cold_start_s=60.0)
LIKE = replace(profile("llama-3.1-8b-h100x1"), max_num_batched_tokens=2048)
POLICY = Policy(
    name="chat",
    target=TargetRef(deployment="chat", namespace="serving"),
    replicas=ReplicaBounds(min=1, max=12),
)
WORKLOAD = "ramp:rps=2,to=16,hours=0.75,prompt=800,output=200"


class Snapshots:
    """`ports.Report` that keeps the snapshots, as a recording does."""

    def __init__(self) -> None:
        self.kept: list[Snapshot] = []

    def tick(self, policy: str, snapshot: Snapshot, decision: Decision, outcome: Outcome, duration_s: float) -> None:
        """Keep one."""
        self.kept.append(snapshot)


@pytest.fixture(scope="module")
def sample() -> Sample:
    return load_workload(WORKLOAD).draw(1)


@pytest.fixture(scope="module")
def snapshots(sample: Sample) -> list[Snapshot]:
    """What the daemon saw of a fleet of `TRUE` replicas on three quarters of an hour of rising traffic."""
    seen = Snapshots()
    setting = Setting(profile=TRUE, replicas=1, duration_s=2700.0, seed=3)
    run(POLICY, sample.requests(), setting, reports=[seen])
    return seen.kept


@pytest.fixture(scope="module")
def found(snapshots: list[Snapshot]) -> Calibration:
    return calibrate(snapshots)


@pytest.mark.parametrize(
    ("prefill", "batch"),
    [
        pytest.param(0, 2, id="nearly-idle"),
        pytest.param(0, 16, id="16-sequences"),
        pytest.param(0, 40, id="40-sequences"),
        pytest.param(800, 16, id="prefill-of-a-mean-prompt"),
    ],
)
def test_iterations_take_what_they_took(found: Calibration, prefill: int, batch: int) -> None:
    again = to_profile(found, LIKE, "again")
    context, quadratic = batch * 900, prefill * prefill / 2
    took = again.iteration_s(prefill, batch, context, quadratic)
    assert took == pytest.approx(TRUE.iteration_s(prefill, batch, context, quadratic), rel=0.06)


def test_the_line_explains_the_readings(found: Calibration) -> None:
    assert found.rows > 300
    assert found.mape < 0.05


def test_what_the_pods_and_engines_say_is_taken(found: Calibration) -> None:
    again = to_profile(found, LIKE, "again")
    assert again.kv_tokens == TRUE.blocks * TRUE.block_size
    assert again.max_num_seqs == TRUE.max_num_seqs
    assert (again.gpus, again.max_num_batched_tokens) == (LIKE.gpus, LIKE.max_num_batched_tokens)


def test_starts_are_those_of_the_recording(found: Calibration) -> None:
    assert found.starts is not None
    assert found.starts.count >= 2
    # a median of few lognormal starts of sigma 0.25, a probe period and the scheduling later
    spread = 60.0 * 3.0 * 0.25 * 1.25 / math.sqrt(found.starts.count)
    assert abs(found.starts.median_s - 64.5) < spread + 5.0
    assert to_profile(found, LIKE, "again").cold_start_s == found.starts.median_s


@pytest.mark.parametrize(
    ("count", "sigma"), [pytest.param(4, None, id="too-few"), pytest.param(5, 0.4321, id="enough")]
)
def test_the_spread_of_enough_starts_goes_into_the_profile(
    found: Calibration, tmp_path: Path, count: int, sigma: float | None
) -> None:
    seen = replace(found, starts=Starts(count=count, median_s=70.0, sigma=0.4321))
    again, path = to_profile(seen, LIKE, "again"), tmp_path / "again.yaml"
    assert again.cold_start_sigma == sigma
    path.write_text(profile_text(again, seen, "chat.trace.gz"))
    assert load_profile(path).cold_start_sigma == (None if sigma is None else pytest.approx(sigma, abs=1e-3))


def test_the_traffic_is_that_of_the_workload(found: Calibration, sample: Sample) -> None:
    minutes = np.bincount((sample.arrival // 60.0).astype(int), minlength=45)[:45] / 60.0
    seen = np.array([span.rps for span in found.traffic])[:45]
    assert seen.sum() == pytest.approx(minutes.sum(), rel=0.02)
    assert np.abs(seen - minutes).max() < 1.5, "each minute"
    assert found.prompt == pytest.approx(sample.prompt.mean(), rel=0.02)
    outputs = sum(span.rps * span.output for span in found.traffic) / sum(span.rps for span in found.traffic)
    assert outputs == pytest.approx(sample.output.mean(), rel=0.04)


def test_both_files_are_what_simulate_takes(found: Calibration, sample: Sample, tmp_path: Path) -> None:
    again = to_profile(found, LIKE, "again")
    path, curve = tmp_path / "again.yaml", tmp_path / "again.csv"
    path.write_text(profile_text(again, found, "chat.trace.gz"))
    curve.write_text(traffic_text(found))
    read = load_profile(path)
    assert read.iteration_s(500, 20, 20_000, 0.0) == pytest.approx(again.iteration_s(500, 20, 20_000, 0.0), rel=1e-3)
    assert (read.kv_tokens, read.max_num_seqs, read.gpus) == (again.kv_tokens, again.max_num_seqs, again.gpus)
    drawn = load_workload(f"{curve}:noise=0").draw(5)
    assert len(drawn) == pytest.approx(len(sample), rel=0.05)
    assert drawn.prompt.mean() == pytest.approx(sample.prompt.mean(), rel=0.05)


def test_without_a_start_the_other_profile_says(snapshots: list[Snapshot]) -> None:
    calm = [one for one in snapshots if all(pod.ready for pod in one.target.pods)][:120]
    first = calibrate(calm)
    assert first.starts is None
    again = to_profile(first, LIKE, "again")
    assert again.cold_start_s == LIKE.cold_start_s
    assert "no pod started in the recording" in profile_text(again, first, "chat.trace.gz")


@pytest.mark.parametrize(
    ("count", "message"),
    [pytest.param(0, "only 0 readings", id="nothing"), pytest.param(3, "a profile takes 20", id="too-little")],
)
def test_too_little_is_said(snapshots: list[Snapshot], count: int, message: str) -> None:
    def few() -> Iterator[Snapshot]:
        yield from snapshots[:count]

    with pytest.raises(AutoscalerError) as error:
        calibrate(few())
    assert message in str(error.value)


def test_no_coefficient_is_negative() -> None:
    """Sequences and their context move together here, so that an unbounded fit would trade one against the other."""
    batch = np.linspace(2.0, 60.0, 50)
    design = np.column_stack([np.ones(50), np.zeros(50), batch, 1000.0 * batch + 5.0 * np.sin(batch)])
    seconds = 0.02 + 200e-6 * batch + np.where(batch > 30.0, 3e-4, -3e-4)
    line = fit(design, seconds)
    assert min(line.c0, line.cp, line.cb, line.ck) >= 0.0
    predicted = line.c0 + line.cb * batch + line.ck * design[:, 3]
    assert predicted == pytest.approx(seconds, rel=0.05)
