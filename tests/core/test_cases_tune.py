"""Field failures of moving batching limits, by the ids under which they were collected."""

from dataclasses import replace

import pytest

from autoscaler.actuators.events import ROLLED_BACK, Changes
from autoscaler.core.arguments import read_engine, with_limits
from autoscaler.core.batching import unstartable
from autoscaler.core.policy import BatchingMode, LimitBounds, ReplicaBounds, Sizing
from autoscaler.core.tuning import DAY_S
from autoscaler.core.types import BatchReason, Hold, Limits, Outcome, Reason, RollOut, ScaleReplicas, SetBatching
from autoscaler.telemetry.report import rollout_result
from tests.core.test_batching import CEILING, POLICY, QUEUE, RAISE, STORM, a_world, batching, lowered, moved, until
from tests.core.test_rollout import ROLLS, begun
from tests.core.test_rollout import a_world as rolling_world
from tests.core.world import RollingWorld, loading

BY_TEMPLATE = replace(ROLLS.batching, mode=BatchingMode.ROLLOUT)
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


class TestC114AHigherSequenceLimitCrashesTheNewPods:
    """Back at once, not again with this image and these arguments, and no growth on the bad revision."""

    def crashing(self) -> RollingWorld:
        """Return a world in which more than 512 sequences end an engine at start, right after that was rolled out."""
        busy = QUEUE | {"running": 512.0, "capacity": 1e7, "kv": 0.4}
        world = rolling_world(limits=Limits(max_num_seqs=512, max_num_batched_tokens=8192), **busy)
        world.crashes = lambda limits: (limits.max_num_seqs or 0) > 512
        assert begun(world).limits.max_num_seqs == 1024
        return world

    def test_c114_rolled_back_within_the_observation_window(self) -> None:
        world = self.crashing()
        begun_at = world.rollouts[0][0]
        serving = []
        while world.template.limits.max_num_seqs != 512:
            world.tick()
            serving.append(sum(pod.ready for pod in world.pods))
        assert [pod.restarts for pod in world.pods if not pod.ready] == [2]
        assert world.at - begun_at < 300.0
        assert set(serving) == {2}
        assert [action.back for _, action in world.rollouts] == [False, True]

    def test_c114_growth_is_frozen_on_the_bad_revision(self) -> None:
        world = self.crashing()
        while not any(pod.restarts for pod in world.pods):
            world.tick()
        world.policy = replace(ROLLS, replicas=ReplicaBounds(min=2, max=8), sizing=Sizing.SCORE)
        world.set(waiting=500.0, kv=0.97, ttft_s=9.0)
        decisions = []
        while world.template.limits.max_num_seqs != 512:
            decisions.append(world.tick())
        assert {decision.proposal.wished for decision in decisions} == {4}
        assert {decision.reason for decision in decisions[-3:]} == {Reason.ROLLOUT_UNHEALTHY}
        assert not any(isinstance(decision.action, ScaleReplicas) for decision in decisions)
        # On the revision from before there is nothing against it.
        assert any(isinstance(decision.action, ScaleReplicas) for decision in world.run(40))

    def test_c114_not_again_until_the_image_or_the_arguments_change(self) -> None:
        world = self.crashing()
        until(world, BatchReason.ROLLED_BACK)
        seen = [batching(decision).reason for decision in world.run(60)]
        assert BatchReason.BLACKLISTED in seen
        assert len(world.rollouts) == 2
        world.at += DAY_S  # and the same on the next day
        assert BatchReason.BLACKLISTED in [batching(decision).reason for decision in world.run(60)]
        assert len(world.rollouts) == 2
        world.template = replace(world.template, print="another image")
        assert begun(world).limits.max_num_seqs == 1024

    def test_c114_one_event_and_one_counter(self) -> None:
        world = self.crashing()
        taken = [(decision, world.snapshot()) for decision in world.run(60)]
        changes = Changes(world.policy)
        notes = [
            note
            for decision, snapshot in taken
            for note in changes.notes(snapshot, decision, Outcome.APPLIED, "")
            if note.reason == ROLLED_BACK
        ]
        assert [note.warning for note in notes] == [True]
        assert "does not start" in notes[0].message
        backs = [decision.action for decision, _ in taken if isinstance(decision.action, RollOut)]
        assert [rollout_result(action) for action in backs] == ["rolled_back"]


class TestC116RollingOutAndScalingAtTheSameTime:
    """A rollout of limits waits for replicas, and no replica goes while it is under way."""

    def test_c116_no_rollout_in_a_tick_that_scales(self) -> None:
        world = rolling_world(**QUEUE)
        while batching(world.decide()).roll_out is None:
            world.tick()
        world.policy = replace(ROLLS, replicas=ReplicaBounds(min=5, max=8))
        decision = world.tick()
        assert isinstance(decision.action, ScaleReplicas)
        assert batching(decision).reason is BatchReason.REPLICAS_FIRST
        assert world.rollouts == []

    def test_c116_no_shrink_while_ours_is_under_way(self) -> None:
        world = rolling_world(replace(ROLLS, replicas=ReplicaBounds(min=1, max=2)), **QUEUE)
        begun(world)
        world.load_s = 1e9
        world.set(running=0.0, waiting=0.0, kv=0.0, token_rate=0.0, prompt_rate=0.0, request_rate=0.0, step_rate=0.0)
        decisions = world.run(150)
        assert {type(decision.action) for decision in decisions} == {Hold}
        assert Reason.ROLLOUT in {decision.reason for decision in decisions}


class TestC119AConfigurationDropsFalse:
    """What is off is said, or the change is refused; and an effect is never assumed."""

    def test_c119_off_is_written_out(self) -> None:
        words = ["--max-num-seqs", "64", "--long-prefill-token-threshold=512"]
        off = Limits(max_num_seqs=64, long_prefill_token_threshold=0)
        assert with_limits(words, off)[-1] == "--long-prefill-token-threshold=0"

    def test_c119_what_a_file_may_say_cannot_be_expressed(self) -> None:
        said = read_engine(["serve", "--config", "engine.yaml", "--max-num-seqs=64"])
        assert said.chunked_prefill is None
        world = rolling_world(**QUEUE)
        world.template = replace(world.template, fixed=said.fixed)
        decisions = world.run(40)
        assert {batching(decision).reason for decision in decisions[-20:]} == {BatchReason.NOT_EXPRESSIBLE}
        assert "--config engine.yaml may set --max-num-batched-tokens" in batching(decisions[-1]).detail

    @pytest.mark.parametrize(
        ("reads", "ceiling", "verified"),
        [
            pytest.param({}, None, None, id="nothing shows it"),
            pytest.param({"running": 30.0}, None, True, id="more run than could before"),
            pytest.param({"running": 40.0}, None, None, id="more run than may now"),
            pytest.param({}, Limits(max_num_seqs=32, max_num_batched_tokens=2048), True, id="a plugin says it"),
        ],
    )
    def test_c119_the_effective_value_is_verified_or_told_as_unverified(
        self, reads: dict[str, float], ceiling: Limits | None, verified: bool | None
    ) -> None:
        world = rolling_world(replace(ROLLS, batching=BY_TEMPLATE), **QUEUE)
        world.reads = lambda limits: {"waiting": 0.0, **reads} if limits.max_num_seqs == 32 else None
        begun(world)
        world.ceiling = ceiling
        kept = batching(until(world, BatchReason.KEPT))
        assert kept.verified is verified
        assert kept.detail.rpartition("; ")[2].startswith("verified" if verified else "unverified")
        assert {batching(decision).verified for decision in world.run(5)} == {verified}

    def test_c119_engines_that_run_with_another_value_are_taken_back(self) -> None:
        world = rolling_world(replace(ROLLS, batching=BY_TEMPLATE), **QUEUE)
        begun(world)
        world.ceiling = Limits(max_num_seqs=16, max_num_batched_tokens=2048)
        decision = until(world, BatchReason.ROLLED_BACK)
        assert batching(decision).detail == "the engines do not run with seqs 32, tokens 2048"


class TestC120AMountedFileNeverChangesInThePod:
    """Values that an engine reads from a file are not ours to move; and nothing counts until new pods run with it."""

    @pytest.mark.parametrize(
        "words",
        [
            pytest.param(["vllm", "serve", "--config", "/etc/vllm/engine.yaml"], id="a mounted file"),
            pytest.param(["sh", "-c", ". /etc/vllm/env; exec vllm serve --max-num-seqs $SEQS"], id="a script"),
            pytest.param(["vllm", "serve", "--max-num-seqs=$(SEQS)"], id="a variable of a ConfigMap"),
        ],
    )
    def test_c120_refused(self, words: list[str]) -> None:
        world = rolling_world(**QUEUE)
        world.template = replace(world.template, fixed=read_engine(words).fixed)
        decisions = world.run(40)
        assert batching(decisions[-1]).reason is BatchReason.NOT_EXPRESSIBLE
        assert world.rollouts == []

    def test_c120_not_applied_until_new_pods_serve_and_nothing_else_is_tried(self) -> None:
        world = rolling_world(**QUEUE)
        begun(world)
        seen: list[tuple[bool | None, BatchReason]] = []
        while any(pod.revision != world.template.revision for pod in world.pods) or len(seen) < 2:
            decision = world.tick()
            seen.append((batching(decision).applied, batching(decision).reason))
        assert set(seen[:-1]) == {(False, BatchReason.ROLLING_OUT)}
        assert batching(world.tick()).applied is True
        assert len(world.rollouts) == 1
