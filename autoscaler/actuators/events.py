"""Kubernetes Events: what a live policy did and what holds it, on change only, and never in the loop's way."""

import asyncio
import hashlib
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from autoscaler.actuators.deployment import ScaleApi
from autoscaler.core.approval import APPROVE
from autoscaler.core.policy import Policy
from autoscaler.core.rollout import proposal_id
from autoscaler.core.types import (
    FIELD_MANAGER,
    Decision,
    ForeignChange,
    Outcome,
    Reason,
    RollOut,
    ScaleReplicas,
    SetBatching,
    Snapshot,
    Standing,
)
from autoscaler.errors import TargetError

EVENTS = "/api/v1/namespaces/{namespace}/events"
MERGE_PATCH = "application/merge-patch+json"
COMPONENT = "autoscaler"

RIGHTS = frozenset({("", "events", "create"), ("", "events", "patch")})
"""What the requests of this file need: API group, resource, verb. The Role in deploy/ grants these and no more."""

HELD = frozenset(
    {
        Reason.UNSCHEDULABLE,
        Reason.QUOTA,
        Reason.ROLLOUT_UNHEALTHY,
        Reason.UNSAFE_DRAIN,
        Reason.OTHER_OWNER,
        Reason.WRITER_CONFLICT,
        Reason.SCALED_TO_ZERO,
        Reason.PAUSED,
        Reason.HEALTH_FUSE,
        Reason.MEMORY_GUARD,
    }
)
"""The holds that somebody has to look at. The others pass by themselves, and are in the log."""
MEANT = frozenset({Reason.SCALED_TO_ZERO, Reason.PAUSED})
"""Holds that somebody wished for: Normal, not Warning."""

PROPOSED = "AwaitingApproval"
"""The Event of a proposal that waits for a person; each new id is told."""
CHANGED = "ReplicasChanged"
"""The Event of a change by somebody else; an owner's changes, to which we yield, are its own to tell."""
LIMITS = "BatchingLimits"
"""The Event of batching limits that were set."""
ROLLOUT, ROLLED_BACK, ROLLOUT_KEPT = "BatchingRollout", "BatchingRolledBack", "BatchingRolloutKept"
"""The Events of batching limits that were written into the pod template, in a rollout's order."""
QUIET_S = 60.0
"""A hold that was not the reason for this long, and for three intervals, is over: reasons alternate tick by tick."""
AGGREGATE_S = 60.0
"""The same reason within this time is counted on the Event that is there; at most one new Event a reason and minute."""
WAITING = 64
DRAIN_S = 2.0
MAX_MESSAGE = 1024
MAX_NAME = 200

WRITTEN, FAILED, DROPPED = "written", "failed", "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One thing that is worth an Event.

    Args:
        reason: in UpperCamelCase, from our `Reason`.
        at: epoch seconds.
        namespace, name, uid: of the Deployment.
    """

    reason: str
    warning: bool
    message: str
    at: float
    namespace: str
    name: str
    uid: str


def camel(reason: Reason) -> str:
    """Return a reason as Events spell it: `up_demand` is `UpDemand`."""
    return "".join(word.capitalize() for word in reason.split("_"))


def why(snapshot: Snapshot, decision: Decision) -> str:
    """Return what explains a decision, in one line: counts and numbers only, no names but of another owner."""
    target, score, demand, forecast = snapshot.target, decision.score, decision.demand, decision.forecast
    words = [str(decision.reason), f"{target.ready_replicas} of {target.current_replicas} ready"]
    if target.other_owner:
        words.append(f"owned by {target.other_owner}")
    if score is not None and score.value is not None:
        words.append(f"score {score.value:.2f} {score.binds}".rstrip())
    if demand.value is not None:
        words.append(f"demand {demand.value:.2f} {demand.binds}".rstrip())
    if forecast.top is not None:
        words.append(f"forecast {forecast.top:.2f} in {forecast.horizon_s:.0f} s")
    if decision.bounds is not None:
        words.append(str(decision.bounds))
    words += [
        f"{step.rule} {step.before} to {step.after}" + (f" ({step.detail})" if step.detail else "")
        for step in decision.proposal.steps
    ]
    costs = decision.action.costs if isinstance(decision.action, ScaleReplicas) else ()
    marked = [one for one in costs if one.cost is not None]
    if marked:
        requests = sum(one.requests or 0.0 for one in marked)
        words.append(f"marked {len(marked)} to go first, with {requests:g} requests")
    gaps = Counter(str(gap.reason) for gap in snapshot.gaps)
    if gaps:
        words.append("gaps " + ", ".join(f"{reason} x{count}" for reason, count in sorted(gaps.items())))
    return "; ".join([*words, *decision.unblocks])


def told(change: ForeignChange) -> str:
    """Return who changed the replicas, and when where that is known."""
    return str(change) + ("" if change.written_at is None else f" at {_stamp(change.written_at)}")


def limits_told(decision: Decision) -> str:
    """Return which batching limits were set, and why, in one line."""
    batching = decision.batching
    if batching is None:
        return ""
    words = f"batching limits from {batching.limits} to {batching.wanted}: {batching.reason}, {batching.bound}"
    if batching.roll_out is not None:
        words = f"rolling restart: {words}" if batching.roll_out.restarts else f"rollout of {batching.wanted} is kept"
    return f"{words}; {batching.detail}" if batching.detail else words


class Changes:
    """Tells what is new in the ticks of one policy."""

    def __init__(self, policy: Policy) -> None:
        self._held_at: dict[Reason, float] = {}
        self._failed_at: dict[Reason, float] = {}
        self._scored_at: float | None = None
        self._proposed: Standing | None = None
        self._limits_proposed: Standing | None = None
        self.follow(policy)

    def follow(self, policy: Policy) -> None:
        """Go on by a changed policy."""
        self._quiet_s = max(QUIET_S, 3.0 * policy.interval_s)
        self._alert_after_s = policy.evidence.alert_after_s

    def notes(self, snapshot: Snapshot, decision: Decision, outcome: Outcome, error: str) -> Iterator[Note]:
        """Yield what is new in one tick.

        Args:
            error: of the write that failed; "" when none did.
        """
        reason, at, explained = decision.reason, snapshot.at, why(snapshot, decision)
        if decision.change is not None and not snapshot.target.other_owner:
            words = told(decision.change)
            yield _note(snapshot, CHANGED, decision.change.undid, f"{words}: {explained}")
        if isinstance(decision.action, ScaleReplicas):
            sizes = f"from {decision.action.seen} to {decision.action.to}"
            if outcome is Outcome.APPLIED:
                self._failed_at.clear()
                yield _note(snapshot, camel(reason), False, f"scaled {sizes}: {explained}")
            elif outcome is Outcome.FAILED:
                if reason not in self._failed_at:
                    sizes += f" ({error})" if error else ""
                    yield _note(snapshot, f"{camel(reason)}Failed", True, f"could not scale {sizes}: {explained}")
                self._failed_at[reason] = at
        if isinstance(decision.action, SetBatching) and outcome is Outcome.APPLIED:
            yield _note(snapshot, LIMITS, False, limits_told(decision))
        if isinstance(decision.action, RollOut) and outcome is Outcome.APPLIED:
            back, kept = decision.action.back, not decision.action.restarts
            what = ROLLED_BACK if back else ROLLOUT_KEPT if kept else ROLLOUT
            yield _note(snapshot, what, back, limits_told(decision))
        yield from self._proposals(snapshot, decision, explained)
        yield from self._rollouts(snapshot, decision)
        for held in self._holds(snapshot, decision):
            if held not in self._held_at:
                current = snapshot.target.current_replicas
                yield _note(snapshot, camel(held), held not in MEANT, f"holds at {current} replicas: {explained}")
            self._held_at[held] = at
        for over in self._ended(at):
            yield _note(snapshot, f"{camel(over)}Ended", False, f"no longer {over}: {explained}")

    def _proposals(self, snapshot: Snapshot, decision: Decision, explained: str) -> Iterator[Note]:
        """Yield the proposal that is new, with how to approve it, or that the last one is withdrawn."""
        standing, before = decision.proposal.standing, self._proposed
        if isinstance(decision.action, ScaleReplicas):
            self._proposed = None
            return
        self._proposed = standing
        if standing is not None and (before is None or before.id != standing.id):
            sizes = f"{snapshot.target.current_replicas} to {standing.to} until {_stamp(standing.expires_at)}"
            how = _how(snapshot, standing.id)
            yield _note(snapshot, PROPOSED, False, f"proposes {sizes}; to approve: {how}; {explained}")
        elif standing is None and before is not None:
            yield _note(snapshot, f"{PROPOSED}Ended", False, f"{before.id} is withdrawn: {explained}")

    def _rollouts(self, snapshot: Snapshot, decision: Decision) -> Iterator[Note]:
        """Yield the rollout of batching limits that newly waits for a person, with how to approve it."""
        standing = decision.batching.standing if decision.batching is not None else None
        if decision.batching is None or standing is None or standing == self._limits_proposed:
            return
        self._limits_proposed = standing
        words = f"{decision.batching.detail}; to approve: {_how(snapshot, proposal_id(standing))}"
        yield _note(snapshot, PROPOSED, False, f"proposes a rolling restart: {words}")

    def _holds(self, snapshot: Snapshot, decision: Decision) -> Iterator[Reason]:
        """Yield the holds of this tick that are worth an Event."""
        if not isinstance(decision.action, ScaleReplicas) and decision.reason in HELD:
            yield decision.reason
        scored = decision.score is not None and decision.score.value is not None
        if scored or self._scored_at is None or snapshot.target.current_replicas == 0:
            self._scored_at = snapshot.at  # a target at 0 replicas has nothing to score
        if snapshot.at - self._scored_at >= self._alert_after_s:
            yield Reason.NO_DATA

    def _ended(self, at: float) -> list[Reason]:
        """Forget what has not held for long enough; return the holds among it."""
        for reason in [reason for reason, last in self._failed_at.items() if at - last >= self._quiet_s]:
            del self._failed_at[reason]
        over = [reason for reason, last in self._held_at.items() if at - last >= self._quiet_s]
        for reason in over:
            del self._held_at[reason]
        return over


def _how(snapshot: Snapshot, proposal: str) -> str:
    """Return the command that approves a proposal."""
    target = snapshot.target
    return f"kubectl -n {target.namespace} annotate deployment {target.name} --overwrite {APPROVE}={proposal}"


def _note(snapshot: Snapshot, reason: str, warning: bool, message: str) -> Note:
    target = snapshot.target
    return Note(
        reason=reason,
        warning=warning,
        message=message,
        at=snapshot.at,
        namespace=target.namespace,
        name=target.name,
        uid=target.uid,
    )


@dataclass(slots=True)
class _Series:
    """One Event that is there: its name, when it began, and how often it was seen."""

    name: str
    first_at: float
    count: int = 1


class Events:
    """Writes Events about the targets of live policies. A `ports.Report`, and a context while which it writes.

    A write is tried once: what is lost is in the log. What cannot wait in the queue is dropped and counted, and nothing
    here ever waits for the API server but its own task. Give it an API client of its own, so that a server that asks
    for patience with Events is not taken to ask for it with the targets.

    Args:
        clean: returns a text without credentials.
        told: is told what became of each Event, `written`, `failed` or `dropped`, and why.
    """

    def __init__(self, api: ScaleApi, *, clean: Callable[[str], str], told: Callable[[str, str], None]) -> None:
        self._api = api
        self._clean = clean
        self._told = told
        self._changes: dict[str, Changes] = {}
        self._errors: dict[str, str] = {}
        self._series: dict[tuple[str, str, str], _Series] = {}
        self._waiting: asyncio.Queue[Note] = asyncio.Queue(WAITING)
        self._instance = socket.gethostname()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._write_all(), name="(events)")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Write what waits, for at most 2 s."""
        if self._task is None:
            return
        drained = asyncio.create_task(self._waiting.join())
        await asyncio.wait([drained, self._task], timeout=DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()
        self._task.cancel()
        await asyncio.wait([drained, self._task])
        for _ in range(self._waiting.qsize()):
            self._told(DROPPED, "the process ends")
        if not self._task.cancelled():
            self._task.result()

    def watch(self, policy: Policy, *, live: bool) -> None:
        """Take note of a policy that begins, or goes on changed. In dry-run nothing is written, Events neither."""
        if not live:
            self._changes.pop(policy.name, None)
        elif policy.name in self._changes:
            self._changes[policy.name].follow(policy)
        else:
            self._changes[policy.name] = Changes(policy)

    def error(self, policy: str, kind: str, error: BaseException) -> None:
        """Take note of a write that failed: the tick that is reported next says so."""
        if kind == "actuation":
            self._errors[policy] = str(error)

    def tick(self, policy: str, snapshot: Snapshot, decision: Decision, outcome: Outcome, duration_s: float) -> None:
        """Queue what is new in one tick."""
        error = self._errors.pop(policy, "")
        if policy not in self._changes:
            return
        for note in self._changes[policy].notes(snapshot, decision, outcome, error):
            try:
                self._waiting.put_nowait(note)
            except asyncio.QueueFull:
                self._told(DROPPED, f"{WAITING} wait already")

    async def _write_all(self) -> None:
        while True:
            note = await self._waiting.get()
            try:
                await self._write(note)
            except TargetError as error:
                self._told(FAILED, str(error))
            else:
                self._told(WRITTEN, "")
            finally:
                self._waiting.task_done()

    async def _write(self, note: Note) -> None:
        """Count the note on the Event that is there, or create one. Raises TargetError."""
        self._series = {key: one for key, one in self._series.items() if note.at - one.first_at < AGGREGATE_S}
        key = (note.namespace, note.uid, note.reason)
        series = self._series.get(key)
        if series is not None:
            try:
                await self._patch(note, series)
            except TargetError as error:
                if error.reason != "target_not_found":
                    raise
            else:
                return
        series = _Series(event_name(note), note.at)
        await self._send("POST", note, self._body(note, series))
        self._series[key] = series

    async def _patch(self, note: Note, series: _Series) -> None:
        fields = {"count": series.count + 1, "lastTimestamp": _stamp(note.at), "message": self._message(note)}
        await self._send("PATCH", note, fields, f"/{series.name}", MERGE_PATCH)
        series.count += 1

    async def _send(
        self, method: str, note: Note, body: object, name: str = "", content_type: str = "application/json"
    ) -> None:
        path = EVENTS.format(namespace=quote(note.namespace, safe="")) + name
        await self._api.request(
            method, path, query={"fieldManager": FIELD_MANAGER}, body=body, content_type=content_type
        )

    def _body(self, note: Note, series: _Series) -> dict[str, Any]:
        """Return a core/v1 Event."""
        about = {"apiVersion": "apps/v1", "kind": "Deployment", "namespace": note.namespace, "name": note.name}
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": series.name, "namespace": note.namespace},
            "involvedObject": about | ({"uid": note.uid} if note.uid else {}),
            "reason": note.reason,
            "message": self._message(note),
            "type": "Warning" if note.warning else "Normal",
            "count": 1,
            "firstTimestamp": _stamp(note.at),
            "lastTimestamp": _stamp(note.at),
            "source": {"component": COMPONENT},
            "reportingComponent": COMPONENT,
            "reportingInstance": self._instance,
        }

    def _message(self, note: Note) -> str:
        return self._clean(note.message)[:MAX_MESSAGE]


def event_name(note: Note) -> str:
    """Return a name for a new Event: the Deployment's, and what tells it from every other one."""
    unique = hashlib.sha256(f"{note.uid}/{note.reason}/{note.at}".encode()).hexdigest()[:16]
    return f"{note.name[:MAX_NAME].rstrip('-.')}.{unique}"


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
