"""What a fleet held against what the work needed, by hand."""

from pathlib import Path

import numpy as np
import pytest

from autoscaler.core.types import Pod, PodPhase, TargetStatus
from bench.contest.play import DEFAULT, our_run, rival_run, the_policy
from bench.contest.traces import BY_NAME, Ground
from bench.contest.watch import Watch, provision, quiet_hours
from bench.oracle import THETAS
from bench.rivals.base import Bounds
from bench.rivals.static import StaticSettings

HALF = THETAS.index(0.5)


def _status(ready: int, pods: int, homeless: int = 0) -> TargetStatus:
    return TargetStatus(
        namespace="serving",
        name="chat",
        current_replicas=ready,
        ready_replicas=ready,
        pods=tuple(
            Pod(name=f"pod-{number}", uid=str(number), phase=PodPhase.RUNNING, node="" if number >= pods else "a")
            for number in range(pods + homeless)
        ),
    )


def test_time_below_the_need_and_far_above_it() -> None:
    watch = Watch(0.0)
    for at, ready in ((0.0, 2), (60.0, 2), (90.0, 4), (120.0, 5), (180.0, 6)):
        watch.note(at, _status(ready, ready))
    busy = np.array([1.0, 2.0, 2.0, 2.0])  # at a theta of one half: 2, 4, 4, 4 replicas are needed
    found = provision(watch, busy, np.array([1.0]), duration_s=240.0, bounds=Bounds(max=9), gpus=2)
    assert found.under[HALF] == pytest.approx(30.0 / 240.0)  # 2 of 4, from 60 to 90 s
    assert found.over[HALF] == pytest.approx(60.0 / 240.0)  # 6 of 4, from 180 s on; 5 are just 1.25 times 4
    assert found.quiet_gpu_hours is None
    assert list(found.under) == sorted(found.under, reverse=True)
    assert found.to_document()["under"] == [round(share, 5) for share in found.under]


def test_the_need_stays_inside_the_bounds() -> None:
    watch = Watch(0.0)
    watch.note(0.0, _status(2, 2))
    found = provision(watch, np.array([9.0]), np.array([1.0]), duration_s=60.0, bounds=Bounds(max=2), gpus=1)
    assert set(found.under) == {0.0}


def test_quiet_hours_cost_what_their_pods_take() -> None:
    day = 24
    arrivals = np.concatenate([3600.0 * hour + np.arange(10 if hour % 2 else 20) for hour in range(day)])
    quiet = quiet_hours(arrivals, day * 3600.0 + 59.0)
    assert quiet is not None
    assert quiet.tolist() == [hour % 2 == 1 for hour in range(day)]
    watch = Watch(0.0)
    for hour in range(day):
        watch.note(3600.0 * hour, _status(1, 3 if hour % 2 else 7, homeless=2))
    found = provision(watch, np.ones(day * 60), arrivals, duration_s=day * 3600.0, bounds=Bounds(max=9), gpus=4)
    assert found.quiet_gpu_hours == pytest.approx(12 * 3 * 4)  # pods without a node cost nothing


@pytest.mark.parametrize("policy", ["ours", "static"])
def test_what_is_watched_of_a_run_adds_up_to_its_gpu_hours(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.contest.watch.quiet_hours", lambda arrivals, _: np.array([True]))
    path = tmp_path / "requests.csv"
    rows = (f"{at},1500,{30 if at < 1800 else 120}" for at in np.arange(0.0, 3600.0, 0.2).tolist())
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]))
    ground = Ground.of(BY_NAME["code"], path, seed=0)
    static = StaticSettings(replicas=3, bounds=ground.bounds).build()
    came = our_run(ground, the_policy(DEFAULT)) if policy == "ours" else rival_run(ground, static, replicas=3)
    assert came.provision.quiet_gpu_hours == pytest.approx(came.figures.gpu_hours, rel=0.01)
