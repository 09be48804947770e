"""Limits in the pod template: when a rollout is begun, why it is not, and how it ends."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoscaler.core.memory import memory_from_plain, memory_of, memory_to_plain, recall
from autoscaler.core.note import Failed, Note, Phase, is_open, read_note, write_note
from autoscaler.core.policy import Approval, BatchingMode, LimitBounds, Policy, ReplicaBounds, RolloutPolicy
from autoscaler.core.rollout import RETRY_S
from autoscaler.core.state import State
from autoscaler.core.tuning import DAY_S
from autoscaler.core.types import (
    BatchReason,
    Decision,
    Hold,
    Limits,
    Outcome,
    PodLimits,
    Reason,
    RollOut,
    ScaleReplicas,
    Template,
)
from tests.core.test_batching import BUSY, POLICY, QUEUE, QUIET, STORM, batching, until
from tests.core.world import RollingWorld, loading

LIMITS = Limits(max_num_seqs=16, max_num_batched_tokens=2048)
RAISED = replace(LIMITS, max_num_seqs=32)
AFTER_S = 60.0
ROLLS = replace(POLICY, batching=replace(POLICY.batching, rollout=RolloutPolicy(per_day=2, after_s=AFTER_S)))
OUTGROWN: dict[str, Any] = {"running": 30.0, "waiting": 0.0, "token_rate": 1500.0}
"""What an engine reads like that may run more."""


def a_world(policy: Policy = ROLLS, *, limits: Limits = LIMITS, replicas: int = 2, **readings: object) -> RollingWorld:
    """Return a world whose template says its limits, and whose engines read like this after a quiet minute."""
    world = RollingWorld(policy, replicas, limits)
    world.set(**QUIET)
    world.run(12)
    world.set(**readings)
    return world


def begun(world: RollingWorld, ticks: int = 60) -> RollOut:
    """Return the rollout that is begun next."""
    decision = until(world, BatchReason.RAISE_SEQUENCES, ticks=ticks)
    assert isinstance(decision.action, RollOut)
    assert decision.action.begins
    return decision.action


def note_of(world: RollingWorld) -> Note:
    note = read_note(world.template.note)
    assert note is not None
    return note


def rollouts(decisions: list[Decision]) -> list[RollOut]:
    return [one.action for one in decisions if isinstance(one.action, RollOut)]


# --- one that goes well ---------------------------------------------------------------------------------------------


def test_what_holds_for_long_enough_is_rolled_out_watched_and_kept() -> None:
    world = a_world(**QUEUE)
    world.reads = lambda limits: OUTGROWN if limits == RAISED else None
    since = world.at
    action = begun(world)
    assert world.rollouts[0][0] - since >= AFTER_S
    assert (action.seen, action.limits, action.container, action.note_seen) == (LIMITS, RAISED, "vllm", "")
    assert note_of(world).phase is Phase.TRIAL
    rolling = batching(world.tick())
    assert (rolling.reason, rolling.applied, rolling.verified) == (BatchReason.ROLLING_OUT, False, None)
    assert rolling.detail == "seqs 32, tokens 2048 for 5s: 0 new pods serve"
    decision = until(world, BatchReason.KEPT)
    kept = decision.action
    assert isinstance(kept, RollOut)
    assert not kept.restarts
    assert decision.at - world.pods[-1].created_at >= world.load_s + POLICY.batching.observe_s
    assert batching(decision).detail.endswith("; verified")
    note = note_of(world)
    assert (note.phase, note.verified, note.begun, note.failed) == (Phase.KEPT, True, (world.rollouts[0][0],), ())
    after = batching(world.tick())
    assert (after.applied, after.verified, after.roll_out) == (True, True, None)
    assert after.limits == RAISED


def test_replicas_are_not_shrunk_meanwhile_even_where_it_fails() -> None:
    """One of ours is on its way back; one of somebody else's may stand there for days."""
    world = a_world(replace(ROLLS, replicas=ReplicaBounds(min=1, max=2)), **QUEUE)
    begun(world)
    world.load_s = 1e9
    world.set(**QUIET | {"running": 0.0, "kv": 0.0, "token_rate": 0.0, "prompt_rate": 0.0, "request_rate": 0.0})
    world.status["rollout_failed"] = False
    assert Reason.ROLLOUT in {one.reason for one in world.run(150)}
    world.status["rollout_failed"] = True
    world.outcome = Outcome.FAILED  # of the way back
    assert Reason.ROLLOUT in {one.reason for one in world.run(20)}
    world.template = replace(world.template, note="")
    assert any(isinstance(one.action, ScaleReplicas) for one in world.run(5))


# --- one that goes wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"oom_killed": True}, "ran out of memory", id="out of memory"),
        pytest.param({"restarts": 3}, "has restarted 3 times", id="restarts"),
        pytest.param({"waiting_reason": "CrashLoopBackOff"}, "CrashLoopBackOff", id="crashes"),
        pytest.param({"ready": True, "restarts": 3}, "has restarted 3 times", id="starts, and dies under load"),
    ],
)
def test_pods_that_do_not_live_are_taken_back_at_once(changes: dict[str, Any], words: str) -> None:
    world = a_world(**QUEUE)
    begun(world)
    world.load_s = 1e9
    world.tick()
    name = world.pods[-1].name
    world.pods[-1] = replace(world.pods[-1], **changes)
    decision = world.tick()
    assert batching(decision).reason is BatchReason.ROLLED_BACK
    assert batching(decision).detail == f"seqs 32, tokens 2048 does not start: {name} {words}"
    assert world.template.limits == LIMITS
    (failed,) = note_of(world).failed
    assert (failed.value, failed.crashed, failed.reason) == (32, True, BatchReason.RAISE_SEQUENCES)


def test_a_deadline_that_passes_is_a_failed_start() -> None:
    world = a_world(**QUEUE)
    begun(world)
    world.load_s = 1e9
    world.run(3)
    world.status["rollout_failed"] = True
    decision = world.tick()
    assert batching(decision).detail.endswith("no progress for progressDeadlineSeconds")
    assert note_of(world).failed[0].crashed


def test_what_failed_before_the_controller_has_looked_is_not_held_against_it() -> None:
    """Until then the newest revision is the one from before."""
    world = a_world(**QUEUE)
    old = world.template.revision
    begun(world)
    world.template = replace(world.template, revision=old)
    world.pods[0] = replace(world.pods[0], restarts=9)
    world.status["rollout_failed"] = True
    world.snapshot()
    assert batching(world.decide()).reason is not BatchReason.ROLLED_BACK


@pytest.mark.parametrize("why", ["no node", "quota", "image"])
def test_no_room_says_nothing_of_the_value(why: str) -> None:
    world = a_world(**QUEUE)
    world.stuck = why == "no node"
    begun(world)
    world.load_s = 1e9
    world.tick()
    if why == "quota":
        world.status["refused"] = "exceeded quota"
    if why == "image":
        world.pods[-1] = replace(world.pods[-1], waiting_reason="ImagePullBackOff")
    decision = until(world, BatchReason.ROLLED_BACK)
    assert decision.at - world.rollouts[0][0] >= POLICY.pending.unschedulable_after_s
    assert "finds no room" in batching(decision).detail
    assert note_of(world).failed == ()
    assert world.template.limits == LIMITS


def test_worse_goodput_is_taken_back_and_not_tried_again_for_hours() -> None:
    world = a_world(**QUEUE)
    world.reads = lambda limits: {"itl_s": 0.4} if limits == RAISED else {"itl_s": 0.02}
    begun(world)
    decision = until(world, BatchReason.ROLLED_BACK)
    assert "goodput -" in batching(decision).detail
    assert note_of(world).phase is Phase.BACK
    assert batching(world.tick()).detail == f"back to {LIMITS}"
    assert batching(until(world, BatchReason.BLACKLISTED)).detail.endswith("image and these arguments: 32")
    world.at += POLICY.batching.forget_after_s
    begun(world)


def test_a_limit_that_was_lowered_for_nothing_goes_back_too() -> None:
    limits = Limits(max_num_seqs=64, max_num_batched_tokens=2048)
    world = a_world(limits=limits, **STORM)
    lowered = until(world, BatchReason.LOWER_PREEMPTIONS).action
    assert isinstance(lowered, RollOut)
    assert (lowered.limits.max_num_seqs or 0) < 30
    decision = until(world, BatchReason.ROLLED_BACK)
    assert world.template.limits == limits
    (failed,) = note_of(world).failed
    assert not failed.harmed
    assert "goodput" in batching(decision).detail


def test_the_way_back_does_not_wait_for_replicas_and_a_verdict_does() -> None:
    world = a_world(replace(ROLLS, replicas=ReplicaBounds(min=2, max=8)), **QUEUE)
    world.crashes = lambda limits: limits == RAISED
    begun(world)
    until(world, BatchReason.ROLLING_OUT)
    world.policy = replace(world.policy, replicas=ReplicaBounds(min=2, max=2))
    assert isinstance(until(world, BatchReason.ROLLED_BACK).action, RollOut)


def test_what_a_person_changes_meanwhile_is_theirs() -> None:
    world = a_world(**QUEUE)
    begun(world)
    world.tick()
    world.template = replace(world.template, limits=replace(LIMITS, max_num_seqs=24), revision="theirs")
    world.crashes = lambda _limits: True
    decisions = world.run(60)
    assert rollouts(decisions) == []
    assert batching(decisions[-1]).reason is not BatchReason.ROLLED_BACK


# --- why none is begun ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        pytest.param(
            {"fixed": "a shell starts the engine"}, BatchReason.NOT_EXPRESSIBLE, "a shell starts the engine", id="shell"
        ),
        pytest.param({"owner": "Argo CD (x)"}, BatchReason.TEMPLATE_OWNED, "Argo CD (x) would undo it", id="gitops"),
        pytest.param({"recreate": True}, BatchReason.NO_SURGE_ROOM, "Recreate", id="recreate"),
        pytest.param({"max_surge": 0}, BatchReason.NO_SURGE_ROOM, "maxSurge is 0", id="no surge"),
        pytest.param({"max_unavailable": 1}, BatchReason.NO_SURGE_ROOM, "maxUnavailable is 1", id="unavailable"),
        pytest.param({"note": "{"}, BatchReason.ROLLOUT_BUDGET, "cannot be read", id="a note that cannot be read"),
        pytest.param(
            {"note": '{"version":9}'}, BatchReason.ROLLOUT_BUDGET, "version 9, not 1", id="of another version"
        ),
    ],
)
def test_a_template_that_is_not_to_be_changed(changes: dict[str, Any], reason: BatchReason, words: str) -> None:
    world = a_world(**QUEUE)
    world.template = replace(world.template, **changes)
    decisions = world.run(40)
    assert rollouts(decisions) == []
    assert batching(decisions[-1]).reason is reason
    assert words in batching(decisions[-1]).detail


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        pytest.param({"rollout_unhealthy": True}, BatchReason.ROLLOUT_UNDER_WAY, id="a rollout that fails"),
        pytest.param({"refused": "exceeded quota"}, BatchReason.NO_SURGE_ROOM, id="quota"),
        pytest.param({"deployment_paused": True}, BatchReason.DEPLOYMENT_PAUSED, id="paused"),
        pytest.param({"paused": "autoscaler/paused is set"}, BatchReason.NOT_OURS, id="paused by a person"),
        pytest.param({"other_owner": "HorizontalPodAutoscaler/chat"}, BatchReason.NOT_OURS, id="another's"),
    ],
)
def test_nothing_is_begun_meanwhile(status: dict[str, Any], reason: BatchReason) -> None:
    world = a_world(**QUEUE)
    kept = world.snapshot

    def snapshot() -> Any:
        found = kept()
        return replace(found, target=replace(found.target, **status))

    world.snapshot = snapshot  # type: ignore[method-assign]
    decisions = world.run(40)
    assert rollouts(decisions) == []
    assert batching(decisions[-1]).reason is reason


def test_somebody_elses_rollout_is_not_added_to() -> None:
    world = a_world(**QUEUE)
    world.run(10)
    world.load_s = 1e9
    world.template = replace(world.template, revision="theirs", print="another image")
    assert {batching(one).reason for one in world.run(20)} <= {BatchReason.ROLLOUT_UNDER_WAY, BatchReason.OBSERVING}
    assert batching(world.tick()).detail == "raise_sequences to seqs 32, tokens 2048: not ours"


def test_a_node_that_is_missing_already() -> None:
    world = a_world(replace(ROLLS, replicas=ReplicaBounds(min=3, max=3)), replicas=3, **QUEUE)
    world.pods[2] = loading("late", world.at - 600.0, revision=world.template.revision, unschedulable_at=world.at)
    world.stuck = True
    assert batching(until(world, BatchReason.NO_SURGE_ROOM)).detail.endswith("1 pods find no node")


def test_a_pod_that_is_missing() -> None:
    world = a_world(replace(ROLLS, replicas=ReplicaBounds(min=3, max=3)), replicas=3, **QUEUE)
    world.pods[2] = loading("late", world.at - 10_000.0, revision=world.template.revision)
    world.load_s = 1e9
    decisions = world.run(40)
    assert rollouts(decisions) == []
    assert batching(decisions[-1]).detail.endswith("2 of 3 pods serve")


@pytest.mark.parametrize(
    ("template", "limits", "words"),
    [
        pytest.param(
            {"chunked_prefill": False, "max_model_len": 8192},
            LIMITS,
            "max_num_batched_tokens 2048 < max_model_len 8192, without chunked prefill",
            id="a prompt that does not fit",
        ),
        pytest.param({"chunked_prefill": None}, LIMITS, "max_model_len, which is unknown", id="not to be checked"),
        pytest.param(
            {},
            Limits(max_num_seqs=2000),
            "max_num_seqs 4000 needs as many max_num_batched_tokens, which the arguments do not say",
            id="a budget that is not said",
        ),
    ],
)
def test_c113_no_engine_would_start(template: dict[str, Any], limits: Limits, words: str) -> None:
    cap = float(limits.max_num_seqs or 0)
    world = a_world(limits=limits, **QUEUE | {"running": cap, "capacity": 1e8})
    world.template = replace(world.template, **template)
    decision = until(world, BatchReason.INVALID)
    assert isinstance(decision.action, Hold)
    assert batching(decision).detail.endswith(words)


def test_no_more_sequences_than_the_card_holds() -> None:
    """20 480 tokens in blocks of 16, requests of 900 in 57 of them: 22 at full length, and at most 44 are useful."""
    world = a_world(limits=replace(LIMITS, max_num_seqs=40), **QUEUE | {"running": 40.0, "kv": 0.4})
    assert begun(world).limits.max_num_seqs == 44
    world = a_world(limits=replace(LIMITS, max_num_seqs=44), **QUEUE | {"running": 44.0, "kv": 0.4})
    assert batching(until(world, BatchReason.AT_LIMIT)).detail == "10.0 wait, 44.0 of 44 run"


def test_a_cache_of_unknown_size_holds_nothing_more() -> None:
    world = a_world(**QUEUE | {"request_rate": 0.0})
    decision = until(world, BatchReason.INVALID)
    assert batching(decision).detail.endswith("pointless: what the KV cache holds is not known")


def test_the_policys_bounds_hold() -> None:
    bounded = replace(ROLLS.batching, sequences=LimitBounds(min=8, max=20))
    assert begun(a_world(replace(ROLLS, batching=bounded), **QUEUE)).limits.max_num_seqs == 20


def test_replicas_go_first() -> None:
    world = a_world(**QUEUE)
    while batching(world.decide()).roll_out is None:
        world.tick()
    world.policy = replace(ROLLS, replicas=ReplicaBounds(min=3, max=3))
    decision = world.tick()
    assert isinstance(decision.action, ScaleReplicas)
    assert batching(decision).reason is BatchReason.REPLICAS_FIRST
    assert batching(decision).detail == "raise_sequences to seqs 32, tokens 2048"


# --- which back end -------------------------------------------------------------------------------------------------


def test_a_plugin_goes_first() -> None:
    world = a_world(**QUEUE)
    world.ceiling = LIMITS
    assert rollouts(world.run(40)) == []
    world.policy = replace(ROLLS, batching=replace(ROLLS.batching, mode=BatchingMode.ROLLOUT))
    begun(world)


@pytest.mark.parametrize(
    ("mode", "rollout"),
    [
        pytest.param(BatchingMode.AUTO, None, id="not allowed"),
        pytest.param(BatchingMode.LIVE, None, id="live"),
    ],
)
def test_without_a_plugin_nothing_is_moved_unless_it_is_allowed(
    mode: BatchingMode, rollout: RolloutPolicy | None
) -> None:
    world = a_world(replace(ROLLS, batching=replace(ROLLS.batching, mode=mode, rollout=rollout)), **QUEUE)
    assert {batching(one).reason for one in world.run(40)} == {BatchReason.NO_PLUGIN}


def test_a_pod_that_did_not_answer_may_have_a_plugin() -> None:
    world = a_world(**QUEUE)
    said = world.limits

    def limits() -> tuple[PodLimits, ...]:
        first, *others = said()
        return replace(first, refused="timeout", lacking=False), *others

    world.limits = limits  # type: ignore[method-assign]
    assert {batching(one).reason for one in world.run(40)} == {BatchReason.NO_PLUGIN}


def test_what_was_begun_is_seen_through_when_no_pod_is_left_to_ask() -> None:
    world = a_world(**QUEUE)
    world.crashes = lambda limits: limits == RAISED
    begun(world)
    world.tick()
    world.pods = [one for one in world.pods if one.revision == world.template.revision]
    assert isinstance(until(world, BatchReason.ROLLED_BACK).action, RollOut)


# --- how often ------------------------------------------------------------------------------------------------------


def test_a_few_a_day_and_a_restart_does_not_reset_it() -> None:
    world = a_world(**QUEUE)
    world.crashes = lambda limits: limits != LIMITS
    begun(world)
    until(world, BatchReason.BLACKLISTED)
    world.template = replace(world.template, print="another image")
    begun(world, ticks=200)
    until(world, BatchReason.BLACKLISTED)
    world.template = replace(world.template, print="a third image")
    refused = until(world, BatchReason.ROLLOUT_BUDGET)
    assert batching(refused).detail.startswith("raise_sequences to seqs 32, tokens 2048: 2 of 2 begun within a day; ")
    world.state = State()  # another daemon, which knows the annotation alone
    assert rollouts(world.run(100)) == []
    assert batching(until(world, BatchReason.ROLLOUT_BUDGET)).roll_out is None
    world.at += DAY_S
    begun(world, ticks=200)


def test_a_memory_counts_where_the_annotation_is_gone() -> None:
    policy = replace(ROLLS, batching=replace(ROLLS.batching, rollout=RolloutPolicy(per_day=1, after_s=AFTER_S)))
    world = a_world(policy, **QUEUE)
    world.reads = lambda limits: OUTGROWN if limits == RAISED else None
    begun(world)
    memory = memory_of(policy, world.state)
    assert memory is not None
    kept = memory_from_plain(json.loads(json.dumps(memory_to_plain(memory))))
    until(world, BatchReason.KEPT)
    world.template = replace(world.template, note="", limits=LIMITS, revision=f"rev {LIMITS}")
    world.reads = lambda _limits: None
    world.state = State()
    world.set(**QUEUE)
    world.tick()
    world.state = recall(policy, world.state, kept, world.at)
    assert batching(until(world, BatchReason.ROLLOUT_BUDGET)).roll_out is None


def test_in_dry_run_it_says_so_now_and_then() -> None:
    world = a_world(**QUEUE)
    before = world.template
    decisions = world.run(200, apply=False)
    assert [one.note_seen for one in rollouts(decisions)] == ["", ""]
    times = [one.at for one in decisions if isinstance(one.action, RollOut)]
    assert times[1] - times[0] >= AFTER_S
    assert world.template == before
    assert batching(decisions[-1]).reason is BatchReason.ROLLOUT_BUDGET


def test_a_write_that_fails_is_not_tried_at_every_tick() -> None:
    world = a_world(**QUEUE)
    world.outcome = Outcome.FAILED
    decisions = world.run(100)
    times = [one.at for one in decisions if isinstance(one.action, RollOut)]
    assert len(times) > 2
    assert min(after - before for before, after in pairwise(times)) >= RETRY_S
    counted = Counter(batching(one).reason for one in decisions)
    assert counted[BatchReason.ROLLOUT_BUDGET] == 0


def test_a_person_approves_it() -> None:
    world = a_world(replace(ROLLS, approval=Approval(required=True)), **QUEUE)
    decision = until(world, BatchReason.AWAITING_APPROVAL)
    standing = batching(decision).standing
    assert standing is not None
    known = f"limits-{standing.id}"
    assert f"raise_sequences to seqs 32, tokens 2048: approve {known} within 600s" == batching(decision).detail
    waiting = world.run(20)
    assert rollouts(waiting) == []
    assert {one.batching.standing for one in waiting if one.batching is not None} == {standing}
    world.status["approved"] = known
    begun(world, ticks=1)
    world.status["approved"] = ""
    world.crashes = lambda limits: limits == RAISED
    assert isinstance(until(world, BatchReason.ROLLED_BACK).action, RollOut)


def test_an_approval_of_replicas_is_none_of_a_rollout() -> None:
    world = a_world(replace(ROLLS, approval=Approval(required=True)), **QUEUE)
    standing = batching(until(world, BatchReason.AWAITING_APPROVAL)).standing
    assert standing is not None
    world.status["approved"] = standing.id
    assert rollouts(world.run(10)) == []


# --- what is remembered ---------------------------------------------------------------------------------------------

NOTE = Note(
    phase=Phase.TRIAL,
    at=1.5,
    reason=BatchReason.RAISE_SEQUENCES,
    before=LIMITS,
    after=RAISED,
    print="print",
    revision="old",
    replicas=3,
    measured=BUSY,
    begun=(1.0, 1.5),
    failed=(Failed("print", BatchReason.LOWER_BUDGET, 256, True, False, 0.5),),
)


@pytest.mark.parametrize("note", [NOTE, replace(NOTE, measured=None, failed=(), verified=False)])
def test_a_note_is_read_as_it_was_written(note: Note) -> None:
    assert read_note(write_note(note)) == note


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"at": "now"}, "no number", id="a time that is none"),
        pytest.param({"at": float("inf")}, "no number", id="an endless time"),
        pytest.param({"phase": "lost"}, "lost", id="an unknown phase"),
        pytest.param({"after": [1]}, "no object", id="limits that are none"),
        pytest.param({"measured": {"seconds": 1.0}}, "measured has no running", id="half a measurement"),
        pytest.param({"failed": [[1]]}, "no list of 6", id="half a failure"),
        pytest.param({"begun": 5}, "no list", id="no list"),
    ],
)
def test_a_damaged_note_says_what_is_wrong(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_note(json.dumps({**json.loads(write_note(NOTE)), **change}))


def test_a_note_is_open_while_the_template_is_as_it_says() -> None:
    template = Template(limits=RAISED, print="print", note=write_note(NOTE))
    assert is_open(template)
    assert not is_open(replace(template, print="another"))
    assert not is_open(replace(template, limits=LIMITS))
    assert not is_open(replace(template, note=write_note(replace(NOTE, phase=Phase.KEPT))))
    assert not is_open(replace(template, note="{"))
    assert not is_open(replace(template, note=""))


# --- what always holds ----------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    per_day=st.integers(0, 3),
    fates=st.lists(st.sampled_from(["crash", "worse", "better", "stuck", "image", "restart", "note"]), max_size=6),
)
def test_reverts_end(per_day: int, fates: list[str]) -> None:
    """Whatever becomes of them: no more than the budget are begun within a day, and no more go back than were begun."""
    policy = replace(ROLLS, batching=replace(ROLLS.batching, rollout=RolloutPolicy(per_day=per_day, after_s=30.0)))
    world = a_world(policy, **QUEUE)
    for fate in fates:
        world.crashes = (lambda _limits: True) if fate == "crash" else (lambda _limits: False)
        itl = {"worse": 0.4, "better": 0.01}.get(fate, 0.02)
        world.reads = lambda _limits, itl=itl: {"itl_s": itl}  # type: ignore[misc]
        world.stuck = fate == "stuck"
        if fate == "image":
            world.template = replace(world.template, print=f"image {world.at}")
        if fate == "restart":
            memory = memory_of(policy, world.state)
            assert memory is not None
            world.state = State()
            world.tick()
            world.state = recall(policy, world.state, memory, world.at)
        if fate == "note":
            world.template = replace(world.template, note="")
        world.run(40)
    begun_at = [at for at, action in world.rollouts if action.begins]
    assert all(sum(at <= other < at + DAY_S for other in begun_at) <= max(per_day, 0) for at in begun_at)
    assert sum(action.back for _, action in world.rollouts) <= len(begun_at)
    assert all(action.limits.max_num_seqs is not None for _, action in world.rollouts)
