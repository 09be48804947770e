"""Kubernetes Events: what is worth one, what it says, and that writing them is in nobody's way."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from kubernetes_asyncio.client import Configuration

from autoscaler.actuators.events import (
    AGGREGATE_S,
    DROPPED,
    FAILED,
    HELD,
    MAX_MESSAGE,
    QUIET_S,
    RIGHTS,
    WAITING,
    WRITTEN,
    Changes,
    Events,
    Note,
    camel,
    event_name,
    why,
)
from autoscaler.core.policy import Evidence, Policy
from autoscaler.core.state import NO_ENGINES
from autoscaler.core.types import (
    Action,
    Batching,
    BatchReason,
    Bound,
    Decision,
    DeletionCost,
    Demand,
    Forecast,
    ForeignChange,
    Gap,
    GapReason,
    Hold,
    Limits,
    Mode,
    Outcome,
    PodBatching,
    Proposal,
    Reason,
    RollOut,
    ScaleReplicas,
    Score,
    SetBatching,
    Snapshot,
    Standing,
    Step,
    TargetStatus,
)
from autoscaler.errors import ActuationError, TargetError
from autoscaler.sources.kubernetes_api import KubernetesApi
from tests.core.world import P0
from tests.fake_api import FakeApi, FakeClock, Fault

TICK_S = 5.0
CHAT = TargetStatus(namespace="serving", name="chat", uid="u-1", current_replicas=4, ready_replicas=3)
SCORE = Score(value=0.81, shrink_value=None, known_weight=0.75, parts=(), binds="memory")
UP = ScaleReplicas(seen=4, to=6)
POLICY = replace(P0, interval_s=TICK_S, evidence=Evidence(alert_after_s=30.0))


def a_snapshot(at: float = 1000.0, target: TargetStatus = CHAT, gaps: tuple[Gap, ...] = ()) -> Snapshot:
    return Snapshot(at=at, target=target, engines=NO_ENGINES, gaps=gaps)


def a_decision(
    reason: Reason = Reason.STEADY, action: Action | None = None, score: Score | None = SCORE, **fields: Any
) -> Decision:
    return Decision(
        at=0.0,
        score=score,
        demand=Demand(itl=5.25, kv=3.0, sequences=1.0),
        forecast=Forecast(horizon_s=185.0, top=6.5),
        proposal=Proposal(current=4, replicas=4, reason=reason, steps=fields.pop("steps", ())),
        reason=reason,
        mode=Mode.NORMAL,
        action=action or Hold(),
        **fields,
    )


def notes_of(changes: Changes, at: float, decision: Decision, outcome: Outcome = Outcome.UNCHANGED) -> list[str]:
    return [note.reason for note in changes.notes(a_snapshot(at), decision, outcome, "")]


# --- what is worth an Event -----------------------------------------------------------------------------------------


def test_a_steady_target_has_none() -> None:
    changes = Changes(POLICY)
    for tick in range(100):
        assert notes_of(changes, tick * TICK_S, a_decision()) == []


@pytest.mark.parametrize("reason", [Reason.UP_DEMAND, Reason.DOWN_SCORE, Reason.UP_BOUNDS], ids=str)
def test_every_action_that_was_carried_out_has_one(reason: Reason) -> None:
    changes = Changes(POLICY)
    for at in (0.0, 5.0):
        (note,) = changes.notes(a_snapshot(at), a_decision(reason, UP), Outcome.APPLIED, "")
        assert (note.reason, note.warning, note.at) == (camel(reason), False, at)
        assert note.message.startswith(f"scaled from 4 to 6: {reason}; ")
        assert (note.namespace, note.name, note.uid) == ("serving", "chat", "u-1")


def test_a_step_down_says_how_many_pods_were_marked_and_what_they_held() -> None:
    costs = [DeletionCost(pod=f"chat-x{index}", uid="u", cost=-1, requests=2.0) for index in range(2)]
    left_over = DeletionCost(pod="chat-x9", uid="u", cost=None, requests=50.0)
    down = ScaleReplicas(seen=4, to=2, costs=(*costs, left_over))
    (note,) = Changes(POLICY).notes(a_snapshot(), a_decision(Reason.DOWN_DEMAND, down), Outcome.APPLIED, "")
    assert "; marked 2 to go first, with 4 requests" in note.message
    assert "chat-x" not in note.message
    (note,) = Changes(POLICY).notes(a_snapshot(), a_decision(Reason.UP_DEMAND, UP), Outcome.APPLIED, "")
    assert "marked" not in note.message


STANDING = Standing(up=True, to=6, made_at=1_764_500_000.0, expires_at=1_764_500_600.0, wished_at=1_764_500_000.0)


def proposing(standing: Standing | None, action: Action | None = None) -> Decision:
    """Return a decision with a proposal that waits, or that is carried out."""
    decision = a_decision(Reason.UP_DEMAND if action is not None else Reason.AWAITING_APPROVAL, action)
    return replace(decision, proposal=replace(decision.proposal, standing=standing))


def test_a_proposal_is_said_once_with_how_to_approve_it() -> None:
    changes = Changes(POLICY)
    (note,) = changes.notes(a_snapshot(0.0), proposing(STANDING), Outcome.UNCHANGED, "")
    assert (note.reason, note.warning) == ("AwaitingApproval", False)
    assert note.message.startswith(
        "proposes 4 to 6 until 2025-11-30T11:03:20Z; to approve: kubectl -n serving annotate deployment chat "
        "--overwrite autoscaler/approve=up-to-6-t6jcww; awaiting_approval; "
    )
    assert notes_of(changes, 5.0, proposing(STANDING)) == []
    other = replace(STANDING, made_at=STANDING.expires_at)
    assert notes_of(changes, 605.0, proposing(other)) == ["AwaitingApproval"]
    assert notes_of(changes, 610.0, proposing(other, UP), Outcome.APPLIED) == ["UpDemand"]
    assert notes_of(changes, 615.0, a_decision()) == []


def test_a_proposal_that_is_withdrawn_is_said() -> None:
    changes = Changes(POLICY)
    assert notes_of(changes, 0.0, proposing(STANDING)) == ["AwaitingApproval"]
    (note,) = changes.notes(a_snapshot(70.0), a_decision(), Outcome.UNCHANGED, "")
    assert note.reason == "AwaitingApprovalEnded"
    assert note.message.startswith("up-to-6-t6jcww is withdrawn: steady; ")
    assert notes_of(changes, 75.0, a_decision()) == []


@pytest.mark.parametrize("outcome", [Outcome.SIMULATED, Outcome.UNCHANGED], ids=str)
def test_what_was_not_written_has_none(outcome: Outcome) -> None:
    assert notes_of(Changes(POLICY), 0.0, a_decision(Reason.UP_DEMAND, UP), outcome) == []


def test_an_action_that_fails_tick_after_tick_is_said_once_and_again_after_it_worked() -> None:
    changes, failing = Changes(POLICY), a_decision(Reason.UP_DEMAND, UP)
    (note,) = changes.notes(a_snapshot(0.0), failing, Outcome.FAILED, "forbidden: cannot patch")
    assert (note.reason, note.warning) == ("UpDemandFailed", True)
    assert note.message.startswith("could not scale from 4 to 6 (forbidden: cannot patch): up_demand; ")
    for at in range(5, 200, 5):
        assert notes_of(changes, float(at), failing, Outcome.FAILED) == []
    assert notes_of(changes, 200.0, failing, Outcome.APPLIED) == ["UpDemand"]
    assert notes_of(changes, 205.0, failing, Outcome.FAILED) == ["UpDemandFailed"]


def test_an_action_that_failed_long_ago_is_said_again() -> None:
    changes, failing = Changes(POLICY), a_decision(Reason.UP_DEMAND, UP)
    assert notes_of(changes, 0.0, failing, Outcome.FAILED) == ["UpDemandFailed"]
    assert notes_of(changes, QUIET_S, a_decision()) == []
    assert notes_of(changes, QUIET_S + TICK_S, failing, Outcome.FAILED) == ["UpDemandFailed"]


def test_c109_a_change_by_somebody_else_names_who_and_when() -> None:
    change = ForeignChange(at=0.0, before=5, after=4, by="argocd-controller", undid=True)
    (note,) = Changes(POLICY).notes(a_snapshot(), a_decision(change=change), Outcome.UNCHANGED, "")
    assert (note.reason, note.warning) == ("ReplicasChanged", True)
    assert note.message.startswith("argocd-controller changed our 5 to 4: steady; ")
    edited = replace(change, by="kubectl-edit", undid=False, written_at=1_764_500_000.0)
    (note,) = Changes(POLICY).notes(a_snapshot(), a_decision(change=edited), Outcome.UNCHANGED, "")
    assert note.warning is False
    assert note.message.startswith("kubectl-edit changed 5 to 4 at 2025-11-30T10:53:20Z: steady; ")


def test_what_an_owner_changes_to_which_we_yield_is_not_told() -> None:
    change = ForeignChange(at=0.0, before=5, after=4, by="kube-controller-manager")
    owned = a_snapshot(target=replace(CHAT, other_owner="HorizontalPodAutoscaler/chat"))
    notes = list(Changes(POLICY).notes(owned, a_decision(Reason.OTHER_OWNER, change=change), Outcome.UNCHANGED, ""))
    assert [note.reason for note in notes] == ["OtherOwner"]


def test_c109_a_conflict_names_the_other_manager() -> None:
    held = a_decision(
        Reason.WRITER_CONFLICT, unblocks=("held by writer_conflict: argocd-controller changed our 5 to 4",)
    )
    (note,) = Changes(POLICY).notes(a_snapshot(), held, Outcome.UNCHANGED, "")
    assert (note.reason, note.warning) == ("WriterConflict", True)
    assert "argocd-controller changed our 5 to 4" in note.message


@pytest.mark.parametrize("reason", sorted(HELD), ids=str)
def test_a_hold_that_somebody_must_look_at_is_said_at_first_sight_and_when_it_is_over(reason: Reason) -> None:
    changes = Changes(POLICY)
    (first,) = changes.notes(a_snapshot(0.0), a_decision(reason), Outcome.UNCHANGED, "")
    assert (first.reason, first.warning) == (camel(reason), reason not in (Reason.SCALED_TO_ZERO, Reason.PAUSED))
    assert first.message.startswith(f"holds at 4 replicas: {reason}; ")
    assert notes_of(changes, 5.0, a_decision(reason)) == []
    assert notes_of(changes, 5.0 + QUIET_S - 1.0, a_decision()) == []
    (last,) = changes.notes(a_snapshot(5.0 + QUIET_S), a_decision(), Outcome.UNCHANGED, "")
    assert (last.reason, last.warning) == (f"{camel(reason)}Ended", False)
    assert last.message.startswith(f"no longer {reason}: steady; ")
    assert notes_of(changes, 6.0 + QUIET_S, a_decision(reason)) == [camel(reason)]


@pytest.mark.parametrize(
    "reason", [Reason.HELD_COOLDOWN, Reason.LIMITED_MAX, Reason.PENDING_CAPACITY, Reason.ROLLOUT], ids=str
)
def test_a_hold_that_passes_by_itself_has_none(reason: Reason) -> None:
    assert notes_of(Changes(POLICY), 0.0, a_decision(reason)) == []


def test_reasons_that_alternate_are_said_once_each() -> None:
    changes = Changes(POLICY)
    seen = [
        note
        for tick in range(200)
        for note in notes_of(
            changes, tick * TICK_S, a_decision((Reason.UNSCHEDULABLE, Reason.STEADY, Reason.HEALTH_FUSE)[tick % 3])
        )
    ]
    assert seen == ["Unschedulable", "HealthFuse"]


def test_a_slow_policy_waits_for_three_intervals_before_a_hold_is_over() -> None:
    changes = Changes(replace(POLICY, interval_s=60.0))
    assert notes_of(changes, 0.0, a_decision(Reason.UNSCHEDULABLE)) == ["Unschedulable"]
    assert [notes_of(changes, at, a_decision()) for at in (60.0, 120.0, 180.0)] == [[], [], ["UnschedulableEnded"]]


def test_no_data_is_said_after_alert_after_and_when_there_is_data_again() -> None:
    changes, blind = Changes(POLICY), a_decision(Reason.NO_DATA, score=None)
    seen = {at: notes_of(changes, float(at), blind) for at in (0, 25, 30, 35)}
    assert seen == {0: [], 25: [], 30: ["NoData"], 35: []}
    assert notes_of(changes, 40.0, a_decision()) == []
    assert notes_of(changes, 35.0 + QUIET_S, a_decision()) == ["NoDataEnded"]


def test_a_target_at_zero_has_nothing_to_know() -> None:
    changes, paused = Changes(POLICY), replace(CHAT, current_replicas=0, ready_replicas=0)
    seen = [
        note.reason
        for tick in range(100)
        for note in changes.notes(
            a_snapshot(tick * TICK_S, paused), a_decision(Reason.SCALED_TO_ZERO, score=None), Outcome.UNCHANGED, ""
        )
    ]
    assert seen == ["ScaledToZeroExternally"]


# --- what it says ---------------------------------------------------------------------------------------------------


def test_why_explains_in_numbers() -> None:
    target = replace(CHAT, other_owner="HorizontalPodAutoscaler/chat")
    gaps = tuple(Gap(signal="*", reason=GapReason.TIMEOUT, detail="http://u:p@host") for _ in range(2))
    step = Step(rule=Reason.LIMITED_STEP, before=8, after=6, detail="at most +2")
    decision = a_decision(Reason.UP_DEMAND, UP, steps=(step,), unblocks=("down: at min 2",))
    assert why(a_snapshot(0.0, target, gaps), decision) == (
        "up_demand; 3 of 4 ready; owned by HorizontalPodAutoscaler/chat; score 0.81 memory; demand 5.25 itl; "
        "forecast 6.50 in 185 s; limited_step 8 to 6 (at most +2); gaps timeout x2; down: at min 2"
    )


def test_what_is_unknown_is_left_out() -> None:
    blind = a_decision(Reason.NO_DATA, score=None)
    decision = replace(blind, demand=Demand(gap=GapReason.NO_HISTORY), forecast=Forecast(horizon_s=9.0))
    assert why(a_snapshot(), decision) == "no_data; 3 of 4 ready"


@pytest.mark.parametrize(
    ("name", "start"),
    [
        pytest.param("chat", "chat.", id="short"),
        pytest.param("a" * 199 + "-" + "b" * 50, "a" * 199 + ".", id="cut where a name cannot end"),
    ],
)
def test_names_are_valid_and_differ(name: str, start: str) -> None:
    def named(at: float, reason: str) -> str:
        note = Note(reason=reason, warning=False, message="", at=at, namespace="serving", name=name, uid="u")
        return event_name(note)

    names = {named(at, reason) for at in (1.0, 2.0) for reason in ("A", "B")}
    assert len(names) == 4
    assert all(one.startswith(start) and len(one) <= 253 for one in names)


# --- writing --------------------------------------------------------------------------------------------------------


class Told:
    """What became of the Events so far."""

    def __init__(self) -> None:
        self.results: Counter[str] = Counter()
        self.details: list[str] = []

    def __call__(self, result: str, detail: str) -> None:
        self.results[result] += 1
        self.details.append(detail)


@pytest.fixture
async def fake() -> AsyncIterator[FakeApi]:
    async with FakeApi().serve() as server:
        yield server


@pytest.fixture
async def api(fake: FakeApi) -> AsyncIterator[KubernetesApi]:
    client = KubernetesApi(Configuration(host=fake.url), FakeClock(), timeout_s=0.5)
    yield client
    await client.close()


def tell(events: Events, at: float, reason: Reason = Reason.UP_DEMAND, policy: Policy = POLICY, **fields: Any) -> None:
    """Report one action that was carried out."""
    events.tick(policy.name, a_snapshot(at, **fields), a_decision(reason, UP), Outcome.APPLIED, 0.1)


async def test_an_event_as_the_api_server_gets_it(api: KubernetesApi, fake: FakeApi) -> None:
    told = Told()
    async with Events(api, clean=lambda text: text.replace("memory", "***"), told=told) as events:
        events.watch(POLICY, live=True)
        tell(events, 1_764_500_000.25)
    ((name, event),) = fake.events.items()
    assert event.pop("reportingInstance")
    assert event == {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": "serving"},
        "involvedObject": {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "namespace": "serving",
            "name": "chat",
            "uid": "u-1",
        },
        "reason": "UpDemand",
        "message": "scaled from 4 to 6: up_demand; 3 of 4 ready; score 0.81 ***; demand 5.25 itl; "
        "forecast 6.50 in 185 s",
        "type": "Normal",
        "count": 1,
        "firstTimestamp": "2025-11-30T10:53:20Z",
        "lastTimestamp": "2025-11-30T10:53:20Z",
        "source": {"component": "autoscaler"},
        "reportingComponent": "autoscaler",
    }
    assert {request.right for request in fake.requests} <= RIGHTS
    assert told.results == {WRITTEN: 1}


async def test_the_same_reason_within_a_minute_is_counted_and_later_is_another(
    api: KubernetesApi, fake: FakeApi
) -> None:
    async with Events(api, clean=str, told=Told()) as events:
        events.watch(POLICY, live=True)
        tell(events, 1000.0)
        tell(events, 1005.0, target=replace(CHAT, ready_replicas=1))
        tell(events, 1010.0, Reason.UP_SCORE)
        tell(events, 1000.0 + AGGREGATE_S)
    first, other, later = fake.events.values()
    assert [event["reason"] for event in (first, other, later)] == ["UpDemand", "UpScore", "UpDemand"]
    assert [event["count"] for event in (first, other, later)] == [2, 1, 1]
    assert (first["firstTimestamp"], first["lastTimestamp"]) == ("1970-01-01T00:16:40Z", "1970-01-01T00:16:45Z")
    assert "1 of 4 ready" in first["message"]
    assert {request.right for request in fake.requests} == RIGHTS


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"target": replace(CHAT, uid="u-2")}, id="recreated"),
        pytest.param({"target": replace(CHAT, namespace="elsewhere")}, id="namespace"),
    ],
)
async def test_another_deployment_is_another_event(other: Mapping[str, Any], api: KubernetesApi, fake: FakeApi) -> None:
    async with Events(api, clean=str, told=Told()) as events:
        events.watch(POLICY, live=True)
        tell(events, 1000.0)
        tell(events, 1001.0, **other)
    assert [event["count"] for event in fake.events.values()] == [1, 1]


async def test_an_event_that_has_expired_is_made_anew(api: KubernetesApi, fake: FakeApi) -> None:
    async with Events(api, clean=str, told=Told()) as events:
        events.watch(POLICY, live=True)
        tell(events, 1000.0)
        await until(lambda: bool(fake.events))
        fake.events.clear()
        tell(events, 1005.0)
    assert [event["count"] for event in fake.events.values()] == [1]


async def test_a_message_is_cut(api: KubernetesApi, fake: FakeApi) -> None:
    async with Events(api, clean=lambda text: "x" * 5000, told=Told()) as events:
        events.watch(POLICY, live=True)
        tell(events, 1000.0)
    assert [len(event["message"]) for event in fake.events.values()] == [MAX_MESSAGE]


async def test_c152_a_policy_in_dry_run_leaves_none(api: KubernetesApi, fake: FakeApi) -> None:
    async with Events(api, clean=str, told=Told()) as events:
        events.watch(POLICY, live=False)
        tell(events, 1000.0)
        events.watch(POLICY, live=True)
        events.watch(POLICY, live=False)
        tell(events, 1005.0)
    assert fake.requests == []


async def test_a_changed_policy_goes_on_with_what_was_said(api: KubernetesApi, fake: FakeApi) -> None:
    async with Events(api, clean=str, told=Told()) as events:
        for at in (0.0, 5.0):
            events.watch(replace(POLICY, interval_s=TICK_S + at), live=True)
            events.tick(POLICY.name, a_snapshot(at), a_decision(Reason.UNSCHEDULABLE), Outcome.UNCHANGED, 0.1)
    assert [event["reason"] for event in fake.events.values()] == ["Unschedulable"]


async def test_the_error_of_a_write_is_in_the_message_of_its_own_tick(api: KubernetesApi, fake: FakeApi) -> None:
    async with Events(api, clean=str, told=Told()) as events:
        events.watch(POLICY, live=True)
        events.error(POLICY.name, "target", TargetError("unreachable"))
        events.error(POLICY.name, "actuation", ActuationError("forbidden", "cannot patch"))
        for at, reason in ((0.0, Reason.UP_DEMAND), (5.0, Reason.UP_SCORE)):
            events.tick(POLICY.name, a_snapshot(at), a_decision(reason, UP), Outcome.FAILED, 0.1)
    first, second = (event["message"] for event in fake.events.values())
    assert first.startswith("could not scale from 4 to 6 (forbidden: cannot patch): ")
    assert second.startswith("could not scale from 4 to 6: ")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(Fault(status=403, body={"message": "no"}), "forbidden", id="forbidden"),
        pytest.param(Fault(status=500), "unreachable", id="server error"),
        pytest.param(Fault(hang=True), "no answer within", id="frozen"),
        pytest.param(Fault(status=422, body={"details": {"causes": [{}]}}), "invalid", id="invalid"),
    ],
)
async def test_what_the_api_server_does_not_take_is_counted_and_the_next_is_tried(
    fault: Fault, words: str, api: KubernetesApi, fake: FakeApi
) -> None:
    told = Told()
    fake.faults["create events"] = [fault]
    async with Events(api, clean=str, told=told) as events:
        events.watch(POLICY, live=True)
        tell(events, 1000.0)
        tell(events, 1001.0)
    assert told.results == {FAILED: 1, WRITTEN: 1}
    assert words in told.details[0]


async def test_a_frozen_api_server_holds_nobody_up_and_what_it_cannot_take_is_dropped(
    api: KubernetesApi, fake: FakeApi
) -> None:
    told = Told()
    frozen = KubernetesApi(Configuration(host=fake.url), FakeClock(), timeout_s=60.0)
    fake.faults["create events"] = [Fault(hang=True)]
    async with Events(frozen, clean=str, told=told) as events:
        events.watch(POLICY, live=True)
        tell(events, 1000.0)
        await until(lambda: bool(fake.requests))
        for number in range(WAITING + 3):
            tell(events, 1001.0 + number)
        assert told.results == {DROPPED: 3}
    assert told.results == {DROPPED: 3 + WAITING}
    assert len(fake.requests) == 1
    await frozen.close()


async def test_a_server_that_asks_for_patience_is_not_asked_again(api: KubernetesApi, fake: FakeApi) -> None:
    told = Told()
    fake.faults["create events"] = [Fault(status=429, headers={"Retry-After": "30"})]
    async with Events(api, clean=str, told=told) as events:
        events.watch(POLICY, live=True)
        for number in range(3):
            tell(events, 1000.0 + number)
    assert told.results == {FAILED: 3}
    assert len(fake.requests) == 1


async def until(true: Callable[[], bool]) -> None:
    """Return once something is so; after 30 s it is an error."""
    for _ in range(3000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


# --- batching limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        pytest.param(Outcome.APPLIED, ["BatchingLimits"], id="set"),
        pytest.param(Outcome.SIMULATED, [], id="a dry run"),
        pytest.param(Outcome.FAILED, [], id="refused"),
    ],
)
def test_limits_that_were_set_have_one(outcome: Outcome, told: list[str]) -> None:
    limits, wanted = Limits(max_num_seqs=64), Limits(max_num_seqs=20)
    batching = Batching(
        bound=Bound.KV,
        reason=BatchReason.LOWER_PREEMPTIONS,
        limits=limits,
        wanted=wanted,
        pods=(PodBatching(pod="chat-1", uid="u-1", limits=wanted),),
        detail="44 preemptions",
    )
    decision = a_decision(action=SetBatching(limits=wanted, pods=batching.pods), batching=batching)
    notes = list(Changes(POLICY).notes(a_snapshot(), decision, outcome, ""))
    assert [note.reason for note in notes] == told
    words = "batching limits from seqs 64 to seqs 20: lower_preemptions, kv_bound; 44 preemptions"
    assert [note.message for note in notes] == [words] * len(told)


ROLLED = Limits(max_num_seqs=64), Limits(max_num_seqs=96)


@pytest.mark.parametrize(
    ("action", "outcome", "told", "words"),
    [
        pytest.param(
            {}, Outcome.APPLIED, ["BatchingRollout"], "rolling restart: batching limits from seqs 64 to", id="begun"
        ),
        pytest.param({"back": True}, Outcome.APPLIED, ["BatchingRolledBack"], "rolling restart: ", id="taken back"),
        pytest.param(
            {"limits": ROLLED[0]}, Outcome.APPLIED, ["BatchingRolloutKept"], "rollout of seqs 96 is kept", id="kept"
        ),
        pytest.param({}, Outcome.SIMULATED, [], "", id="a dry run"),
        pytest.param({}, Outcome.FAILED, [], "", id="refused"),
    ],
)
def test_limits_that_were_rolled_out_have_one(
    action: dict[str, Any], outcome: Outcome, told: list[str], words: str
) -> None:
    before, after = ROLLED
    roll_out = RollOut(**{"uid": "u", "container": "vllm", "seen": before, "limits": after, "note": "{}", **action})
    batching = Batching(
        bound=Bound.SEQUENCES, reason=BatchReason.RAISE_SEQUENCES, limits=before, wanted=after, roll_out=roll_out
    )
    notes = list(Changes(POLICY).notes(a_snapshot(), a_decision(action=roll_out, batching=batching), outcome, ""))
    assert [note.reason for note in notes] == told
    assert all(note.message.startswith(words) for note in notes)
    assert all(note.warning is roll_out.back for note in notes)


def test_a_rollout_that_waits_for_a_person_has_one() -> None:
    standing = Standing(up=True, to=96, made_at=1000.0, expires_at=1600.0, wished_at=1000.0)
    batching = Batching(
        bound=Bound.SEQUENCES, reason=BatchReason.AWAITING_APPROVAL, detail="raise to 96", standing=standing
    )
    changes = Changes(POLICY)
    found = [
        note
        for at in (1000.0, 1005.0)
        for note in changes.notes(a_snapshot(at), a_decision(batching=batching), Outcome.UNCHANGED, "")
    ]
    assert [note.reason for note in found] == ["AwaitingApproval"]
    command = f"kubectl -n serving annotate deployment chat --overwrite autoscaler/approve=limits-{standing.id}"
    assert found[0].message == f"proposes a rolling restart: raise to 96; to approve: {command}"
