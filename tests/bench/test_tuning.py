"""Workloads to tune by: another day of a curve, a day backwards, and policies on their hours."""

from pathlib import Path

import numpy as np
import pytest

from autoscaler.policy_file import shipped_policies
from autoscaler.sim.workload import HOUR, Lengths, Surge
from bench.contest.days import another_day
from bench.tuning import Tuning, backwards, part, row

SHORT = Lengths(prompt=400.0, output=40.0, longest_prompt=2_000, longest_output=200)


@pytest.fixture
def curve(tmp_path: Path) -> Path:
    """Return a curve of three days: 1, 2 and 4 requests a second."""
    rows = [f"{hour * 3600},{2 ** (hour // 24)}" for hour in range(72)]
    path = tmp_path / "three_days.csv"
    path.write_text("\n".join(["t_s,rps", *rows]))
    return path


def test_another_day(curve: Path) -> None:
    surge = Surge(at=2 * HOUR, duration_s=600.0, factor=3.0)
    day = another_day(curve, 1, 0.25, SHORT, surge)
    assert day.duration_s == 24 * HOUR
    assert [day.rate(hour * HOUR) for hour in (1.0, 2.1, 3.0)] == [0.5, 1.5, 0.5]


def test_backwards(tmp_path: Path) -> None:
    rows = [(10.0, 5, 1), (590.0, 7, 2), (610.0, 11, 3), (1300.0, 13, 4)]
    path = tmp_path / "day.csv"
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *(f"{a},{p},{o}" for a, p, o in rows)]))
    turned = backwards(path).recorded
    assert turned is not None
    assert turned.arrival.tolist() == [100.0, 610.0, 1210.0, 1790.0]
    pairs = list(zip(turned.prompt.tolist(), turned.output.tolist(), strict=True))
    assert pairs[:2] == [(13, 4), (11, 3)]
    assert sorted(pairs[2:]) == [(5, 1), (7, 2)]


def test_a_curve_cannot_be_turned(curve: Path) -> None:
    with pytest.raises(ValueError, match="no file of requests"):
        backwards(curve)


def test_part_counts_from_its_begin(curve: Path) -> None:
    whole = another_day(curve, 0, 0.1, SHORT).draw(1)
    hour = part(whole, HOUR, 2 * HOUR)
    assert 0.0 <= hour.arrival[0] <= hour.arrival[-1] < HOUR
    assert len(hour) == np.count_nonzero((whole.arrival >= HOUR) & (whole.arrival < 2 * HOUR))


def test_policies_and_the_oracle_meet_the_same_hours(curve: Path) -> None:
    tuning = Tuning(
        make=lambda folder: another_day(folder / curve.name, 2, 1.0, SHORT),
        hours=(3.0, 3.2),
        profile="llama-3.1-8b-l40sx1",
        ttft_s=2.0,
        tpot_s=0.1,
    )
    ground = tuning.ground("short", curve.parent, seed=1)
    assert 2_500 < len(ground.sample) < 3_300  # 4 a second for 720 s
    file = str(shipped_policies() / "default.yaml")
    ours, by_file, oracle = row(ground, "ours"), row(ground, file), row(ground, "oracle")
    assert ours[:-1] == by_file[:-1]
    assert float(oracle[0]) >= 99.0
    assert 0.0 < float(oracle[1]) <= float(ours[1])
