"""Field failures of moving batching limits, by the ids under which they were collected."""

from dataclasses import replace

import pytest

from autoscaler.core.batching import unstartable
from autoscaler.core.policy import LimitBounds, ReplicaBounds
from autoscaler.core.types import BatchReason, Hold, Limits, Reason, ScaleReplicas, SetBatching
from tests.core.test_batching import CEILING, POLICY, QUEUE, RAISE, STORM, a_world, batching, lowered, moved, until
from tests.core.world import loading

FEW_TOKENS = replace(POLICY.batching, tokens=LimitBounds(min=1))


class TestC100DeploymentIsPaused:
    """Replicas are scaled, limits are not moved."""

    def test_c100_limits_of_a_paused_deployment_are_left_alone(self) -> None:
        policy = replace(POLICY, replicas=ReplicaBounds(min=4, max=8))
        world = a_world(replace(POLICY, replicas=ReplicaBounds(min=2, max=8)), **STORM)
        world.status["deployment_paused"] = True
        world.policy = policy
        decision = world.tick()
        assert isinstance(decision.action, ScaleReplicas)
        assert decision.action.to == 4
        for decision in world.run(30):
            assert batching(decision).reason is BatchReason.DEPLOYMENT_PAUSED
            assert not isinstance(decision.action, SetBatching)


class TestC113LimitsThatTheEngineRefusesAtStart:
    """No limits are set with which an engine would not start."""

    def test_c113_more_sequences_than_tokens(self) -> None:
        wrong = unstartable(
            Limits(max_num_seqs=512, max_num_batched_tokens=256), chunked_prefill=True, max_model_len=8192
        )
        assert wrong == "max_num_batched_tokens 256 < max_num_seqs 512"

    @pytest.mark.parametrize(
        ("chunked", "longest", "refused"),
        [
            pytest.param(False, 8192, True, id="whole prompts must fit"),
            pytest.param(True, 8192, False, id="prompts may take several steps"),
            pytest.param(False, None, True, id="not to be checked"),
        ],
    )
    def test_c113_fewer_tokens_than_a_prompt(self, chunked: bool, longest: int | None, refused: bool) -> None:
        limits = Limits(max_num_seqs=256, max_num_batched_tokens=4096)
        assert bool(unstartable(limits, chunked_prefill=chunked, max_model_len=longest)) is refused

    def test_c113_such_a_move_is_not_made(self) -> None:
        # Somebody has set 16 tokens, with which no engine starts 18 sequences.
        world = lowered(a_world(replace(POLICY, batching=FEW_TOKENS), running=20.0), 20, tokens=16)
        world.run(12)
        world.set(**{**STORM, "running": 20.0})
        set_before = dict(world.told)
        decision = until(world, BatchReason.INVALID)
        assert batching(decision).detail == "max_num_batched_tokens 16 < max_num_seqs 18"
        assert isinstance(decision.action, Hold)
        assert world.told == set_before


class TestC116TuningAndScalingAtTheSameTime:
    """One kind of change at a time, and replicas first."""

    def test_c116_replicas_first_and_limits_once_they_are_still(self) -> None:
        world = lowered(a_world(replace(POLICY, replicas=ReplicaBounds(min=4, max=4)), replicas=4, **QUEUE), 16)
        world.run(8)
        assert batching(world.decide()).reason in (BatchReason.OBSERVING, RAISE)
        while batching(world.decide()).reason is not RAISE:
            world.tick()
        world.policy = replace(POLICY, replicas=ReplicaBounds(min=5, max=8))
        decision = world.tick()
        assert isinstance(decision.action, ScaleReplicas)
        assert (decision.action.seen, decision.action.to) == (4, 5)
        assert batching(decision).reason is BatchReason.REPLICAS_FIRST
        assert batching(decision).detail.startswith("raise_sequences to seqs ")

    def test_c116_tuning_waits_for_the_rollout_and_a_full_window(self) -> None:
        world = lowered(a_world(**QUEUE), 16)
        world.status["rollout"] = True
        assert {batching(decision).reason for decision in world.run(30)} == {BatchReason.REPLICAS_MOVING}
        world.status["rollout"] = False
        over_at = world.at - POLICY.interval_s  # when it was last seen
        decision = until(world, RAISE)
        assert decision.at - over_at >= POLICY.batching.window_s

    def test_c116_no_shrink_while_a_rollout_is_in_progress(self) -> None:
        world = a_world(replace(POLICY, replicas=ReplicaBounds(min=1, max=4)), replicas=4, running=0.0, kv=0.0)
        world.set(token_rate=0.0, prompt_rate=0.0, request_rate=0.0, step_rate=0.0)
        world.status["rollout"] = True
        decisions = world.run(150)
        assert {type(decision.action) for decision in decisions} == {Hold}
        assert Reason.ROLLOUT in {decision.reason for decision in decisions}

    def test_c116_a_pod_that_loads_is_motion_too(self) -> None:
        world = lowered(a_world(replace(POLICY, replicas=ReplicaBounds(min=3, max=3)), replicas=3, **QUEUE), 16)
        world.pods[2] = loading(world.pods[2].name, world.at)
        assert {batching(decision).reason for decision in world.run(30)} == {BatchReason.REPLICAS_MOVING}


class TestC118PreemptionsRiseWithAFullCache:
    """Down or not at all while requests are preempted."""

    @pytest.mark.parametrize(
        ("kv", "preemption_rate"),
        [
            pytest.param(0.98, 50.0 / 60.0, id="a storm"),
            pytest.param(0.91, 0.0, id="the cache is full"),
            pytest.param(0.30, 1.0 / 120.0, id="a single preemption"),
        ],
    )
    def test_c118_never_more_sequences(self, kv: float, preemption_rate: float) -> None:
        world = a_world(kv=kv, preemption_rate=preemption_rate, waiting=30.0, running=48.0)
        world = lowered(world, 48)
        caps = [48]
        for decision in world.run(120):
            if isinstance(decision.action, SetBatching):
                caps.append(moved(decision).max_num_seqs or 0)
        assert max(caps) == 48

    def test_c118_more_sequences_where_the_cache_is_not_what_binds(self) -> None:
        world = lowered(a_world(kv=0.30, waiting=30.0, running=32.0), 32)
        cap = moved(until(world, RAISE)).max_num_seqs or 0
        assert 32 < cap <= (CEILING.max_num_seqs or 0)
