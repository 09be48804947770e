"""What the second actuator is worth on the benchmark's own workloads, and that its runs replay to the same moves."""

from pathlib import Path

import pytest

from autoscaler.core.policy import BatchingMode, BatchingPolicy, Policy, ReplicaBounds, TargetRef
from autoscaler.core.types import Decision, Outcome, SetBatching, Snapshot
from autoscaler.policy_file import policy_to_plain
from autoscaler.replay import Replayer
from autoscaler.sim.run import Setting, run
from autoscaler.trace import Recorder, TickLine, read_trace
from bench.batching import Came, Situation, play, situations

STORM, PROMPTS = situations()
MINUTES = 20.0


def both(situation: Situation) -> tuple[Came, Came]:
    """Return what comes of it with the limits left alone, and with the limits moved."""
    off, auto = (BatchingPolicy(mode=mode) for mode in (BatchingMode.OFF, BatchingMode.AUTO))
    return play(situation, off, MINUTES, 1), play(situation, auto, MINUTES, 1)


def test_a_storm_of_preemptions_ends_and_more_is_served() -> None:
    alone, moved = both(STORM)
    assert alone.moves == ()
    assert moved.preemptions <= 0.1 * alone.preemptions
    assert moved.tokens_per_s >= 1.1 * alone.tokens_per_s
    assert moved.itl_p99_s < alone.itl_p99_s


def test_long_prompts_do_not_hold_up_the_others() -> None:
    alone, moved = both(PROMPTS)
    assert moved.itl_p99_s <= alone.itl_p99_s / 4.0
    assert moved.ttft_p99_s <= 1.25 * alone.ttft_p99_s
    assert moved.attained >= alone.attained


class Kept:
    """Keeps the actions."""

    def __init__(self) -> None:
        self.actions: list[object] = []

    def tick(self, policy: str, snapshot: Snapshot, decision: Decision, outcome: Outcome, duration_s: float) -> None:
        self.actions.append(decision.action)


@pytest.mark.parametrize("situation", [STORM, PROMPTS], ids=lambda one: one.name)
def test_a_run_replays_to_the_same_moves(situation: Situation, tmp_path: Path) -> None:
    policy = Policy(
        name="chat",
        target=TargetRef(deployment="chat"),
        replicas=ReplicaBounds(min=1, max=3),
        slo=situation.slos,
        batching=BatchingPolicy(mode=BatchingMode.AUTO),
    )
    path, kept = tmp_path / "run.trace.gz", Kept()
    with Recorder(path, "tests") as recorder:
        recorder.policy(policy.name, policy_to_plain(policy))
        setting = Setting(profile=situation.profile, replicas=1, duration_s=600.0)
        run(policy, situation.requests(600.0, 1), setting, reports=(recorder, kept))
    replayer, again = Replayer(policy), []
    with read_trace(path, decisions=False) as reader:
        for line in reader:
            if isinstance(line, TickLine):
                decision = replayer.tick(line.snapshot, line.outcome).decision
                assert decision is not None
                again.append(decision.action)
    assert again == kept.actions
    assert any(isinstance(action, SetBatching) for action in again)
