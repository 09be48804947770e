"""Who of several processes may write: one Lease, our own election with fencing, and what the next leader must know.

A leader may write until `renew_s` after it *sent* its last successful renewal, and stops by its own clock, whatever the
API server does. Anyone else takes an unreleased Lease over no sooner than `lease_s` after *seeing* its last change,
which is later than its sending: between the two lie at least `lease_s - renew_s`, in which nobody writes. No two clocks
are ever compared, and of no write is the answer needed.
"""

import asyncio
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol
from urllib.parse import quote

from autoscaler.core.memory import Memory, essential, memory_from_plain, memory_of, memory_to_plain, recall
from autoscaler.core.policy import Policy
from autoscaler.core.state import State
from autoscaler.core.types import FIELD_MANAGER
from autoscaler.errors import TargetError
from autoscaler.ports import Clock

Json = Mapping[str, Any]

LEASES = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
MERGE_PATCH = "application/merge-patch+json"

RIGHTS = frozenset({("coordination.k8s.io", "leases", verb) for verb in ("get", "create", "patch")})
"""What the requests of this file need: API group, resource, verb. The Role in deploy/ grants these and no more."""

CALL_SHARE = 0.75
"""Of the retry period, for one call."""
TRIES = 3
RELEASED_S = 1
"""`leaseDurationSeconds` of a Lease whose holder gave it up itself; without this sign an empty holder means nothing."""
LONGEST_LEASE_S = 3600.0
"""Another holder's `leaseDurationSeconds` counts up to this; whoever wrote more would lock everybody out."""

PREFIX = "memory.autoscaler/"
SAVE_EVERY_S = 15.0
KEPT_S = 86_400.0
"""For so long the memory of a policy that is not loaded stays in the Lease."""
MAX_BYTES = 200_000
"""Of all annotations together the API server takes 256 KiB."""
LONGEST_NAME = 63


class LeaseApi(Protocol):
    """What is needed of the Kubernetes API: the answer's object, or TargetError."""

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = "application/json",
    ) -> Json:
        """Return the object that the server answers with."""
        ...


class Listener(Protocol):
    """Is told how the election goes."""

    def leads(self, leading: bool) -> None:
        """Take note that this process leads from now on, or does so no longer."""
        ...

    def trouble(self, error: TargetError) -> None:
        """Take note that the Lease could not be read or written."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Annotations to write; None removes one. `actions` is what they take into account."""

    annotations: Mapping[str, str | None]
    at: float
    actions: int


def _urgent(state: State) -> tuple[object, ...]:
    """Return what is saved at once: the last step, a change by others, and what people were asked to approve."""
    standing = state.standing
    return state.last_action_at, state.owners.change, standing.id if standing is not None else ""


class Memories:
    """What is remembered of all targets, as annotations of the Lease.

    Args:
        damaged: is told of an annotation that cannot be read: its policy, and what is wrong.
        recalled: is told of each memory that is taken in: of which policy, and when.

    Attributes:
        news: set when an action has to be saved soon.
    """

    def __init__(
        self,
        *,
        damaged: Callable[[str, str], None],
        recalled: Callable[[str, float, Memory], None],
    ) -> None:
        self.news = asyncio.Event()
        self._damaged = damaged
        self._recalled = recalled
        self._states: dict[str, tuple[Policy, State]] = {}
        self._found: dict[str, Memory] = {}
        self._saved_at = -math.inf
        self._actions = self._saved_actions = 0

    # --- the loop's side --------------------------------------------------------------------------------------------

    def learned(self, policy: Policy, state: State) -> None:
        """Take note of a state after a tick; the next save has it, at once where it is urgent."""
        _, known = self._states.get(policy.name, (policy, State()))
        self._states[policy.name] = (policy, state)
        if _urgent(state) != _urgent(known):
            self._actions += 1
            self.news.set()

    def recall(self, policy: Policy, state: State, at: float) -> State:
        """Return the state with what was found in the Lease taken in, once after each takeover."""
        memory = self._found.pop(policy.name, None)
        if memory is None:
            return state
        self._recalled(policy.name, at, memory)
        return recall(policy, state, memory, at)

    def is_recalled(self, policy: str) -> bool:
        """Tell whether the policy's state has all that was found in the Lease."""
        return policy not in self._found

    # --- the Lease's side -------------------------------------------------------------------------------------------

    def load(self, annotations: Mapping[str, Any]) -> None:
        """Take up what the last leader saved; each policy's next tick recalls its own."""
        self._found = {}
        for key, text in annotations.items():
            if key.startswith(PREFIX):
                name = key.removeprefix(PREFIX)
                try:
                    content = json.loads(text)
                    name = str(content["policy"])
                    self._found[name] = memory_from_plain(content)
                except (ValueError, TypeError, KeyError, RecursionError) as error:
                    self._damaged(name, f"{type(error).__name__}: {error}"[:200])

    def page(self, at: float, *, last: bool = False) -> Page | None:
        """Return what to save at `at`; None when nothing is due. `last`: everything is."""
        if not last and at - self._saved_at < SAVE_EVERY_S and self._actions == self._saved_actions:
            return None
        memories = {
            name: memory
            for name, (policy, state) in self._states.items()
            if name not in self._found and (memory := memory_of(policy, state)) is not None
        }
        gone = {name for name, memory in self._found.items() if name not in self._states and at - memory.at > KEPT_S}
        texts = _texts(memories)
        return Page(annotations={**dict.fromkeys(map(_key, gone)), **texts}, at=at, actions=self._actions)

    def saved(self, page: Page) -> None:
        """Take note that the page was written."""
        self._saved_at = page.at
        self._saved_actions = page.actions


def _texts(memories: Mapping[str, Memory]) -> dict[str, str]:
    """Return the annotations of the memories: whole, or, where that is too much, their essence, latest action first."""
    whole = {_key(name): _text(name, memory) for name, memory in memories.items()}
    if _size(whole) <= MAX_BYTES:
        return whole
    texts: dict[str, str] = {}
    left = MAX_BYTES
    for name, memory in sorted(memories.items(), key=lambda item: _acted_at(item[1]), reverse=True):
        key, text = _key(name), _text(name, essential(memory))
        left -= len(key) + len(text)
        if left >= 0:
            texts[key] = text
    return texts


def _size(texts: Mapping[str, str]) -> int:
    return sum(len(key) + len(text) for key, text in texts.items())


def _acted_at(memory: Memory) -> float:
    return max(memory.last_up_at or 0.0, memory.last_down_at or 0.0)


def _text(name: str, memory: Memory) -> str:
    return json.dumps({"policy": name, **memory_to_plain(memory)}, separators=(",", ":"), allow_nan=False)


def _key(policy: str) -> str:
    """Return the key of a policy's annotation, whose name is shorter than a policy's may be."""
    if len(policy) <= LONGEST_NAME:
        return PREFIX + policy
    return f"{PREFIX}{policy[:40]}-{hashlib.sha256(policy.encode()).hexdigest()[:16]}"


class Elector:
    """Holds one Lease, or waits for it.

    Args:
        identity: of this process and no other, ever: a restart is somebody else.
        lease_s: for how long others wait after the last change of the Lease that they saw.
        renew_s: for how long a renewal allows to lead, from its sending.
        retry_s: from one renewal to the next; half of it from look to look while waiting.
    """

    def __init__(
        self,
        api: LeaseApi,
        clock: Clock,
        *,
        namespace: str,
        name: str,
        identity: str,
        memories: Memories,
        listener: Listener,
        lease_s: float = 15.0,
        renew_s: float = 10.0,
        retry_s: float = 2.0,
    ) -> None:
        if not 0.0 < 2.0 * retry_s < renew_s < lease_s:
            raise ValueError("a Lease needs retry_s at least twice in renew_s, and renew_s below lease_s")
        self._api = api
        self._clock = clock
        self._parent = LEASES.format(namespace=quote(namespace, safe=""))
        self._path = f"{self._parent}/{quote(name, safe='')}"
        self._name = name
        self._identity = identity
        self._memories = memories
        self._listener = listener
        self._lease_s, self._renew_s, self._retry_s = lease_s, renew_s, retry_s
        self._lease: Json | None = None
        self._record: object = None
        self._changed_at = math.inf
        self._free_at = math.inf
        self._deadline = -math.inf
        self._said = False

    def leading(self, for_s: float = 0.0) -> bool:
        """Tell whether this process leads, and will for so many seconds whatever happens."""
        return self._clock.now() + for_s < self._deadline

    async def run(self) -> None:
        """Hold the Lease, or wait for it, until cancelled; `release` then gives it up."""
        while True:
            started = self._clock.now()
            self._memories.news.clear()
            await self._attempt()
            self._say()
            await self._pause(started)

    async def release(self) -> None:
        """Stop leading, and give the Lease up with all that is remembered, so that the next leads at once.

        Nothing may be written any more. Where it cannot be given up, it runs out.
        """
        led, self._deadline = self.leading(), -math.inf
        self._say()
        for _ in range(TRIES):
            try:
                lease = self._lease or await self._read()
                if _spec(lease).get("holderIdentity") != self._identity:
                    return
                now = self._clock.now()
                page = self._memories.page(now, last=True) if led else None
                spec = {"holderIdentity": "", "leaseDurationSeconds": RELEASED_S, "renewTime": micro_time(now)}
                await self._patch(lease, spec, page)
                return
            except TargetError as error:
                self._lease = None
                if error.reason != "conflict":
                    self._listener.trouble(error)
                    return

    # --- one attempt ------------------------------------------------------------------------------------------------

    async def _attempt(self) -> None:
        """Renew, take over, or look once. After a conflict, and where the Lease has gone, once more at once."""
        self._free_at = math.inf
        for _ in range(TRIES):
            try:
                lease = self._lease or await self._read()
                free_at = self._freed(lease)
                if self._clock.now() >= free_at:
                    await self._hold(lease)
                else:
                    self._free_at = free_at
                return
            except TargetError as error:
                self._lease = None
                if error.reason not in ("conflict", "target_not_found"):
                    self._listener.trouble(error)
                    return
                gone = error.reason == "target_not_found"
            if gone and not await self._create():
                return

    async def _read(self) -> Json:
        lease = await self._call("GET", self._path)
        self._see(lease)
        return lease

    def _see(self, lease: Json) -> None:
        """Take note of what the Lease says now; a change of it counts from this moment."""
        spec = dict(_spec(lease))
        record = (_metadata(lease).get("uid"), spec)
        if record != self._record:
            self._record, self._changed_at = record, self._clock.now()
        if spec.get("holderIdentity") not in (self._identity, "", None):
            self._deadline = -math.inf

    def _freed(self, lease: Json) -> float:
        """Return from when on nobody but us can be leading by this Lease."""
        spec = _spec(lease)
        holder, duration = spec.get("holderIdentity"), spec.get("leaseDurationSeconds")
        if holder == self._identity or (not holder and (duration == RELEASED_S or self.leading())):
            return -math.inf
        said_s = float(duration) if isinstance(duration, int) and duration <= LONGEST_LEASE_S else 0.0
        return self._changed_at + max(self._lease_s, said_s)

    async def _hold(self, lease: Json) -> None:
        """Write that we hold it. The first time, what the last leader knew is taken up before we lead."""
        sent, led = self._clock.now(), self.leading()
        page = self._memories.page(sent) if led else None
        self._accept(await self._patch(lease, self._claim(lease, sent), page), sent, led)
        if page is not None:
            self._memories.saved(page)

    def _claim(self, lease: Json, now: float) -> dict[str, object]:
        """Return the spec of a Lease that we hold."""
        spec, at = _spec(lease), micro_time(now)
        claim: dict[str, object] = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": math.ceil(self._lease_s),
            "renewTime": at,
        }
        if spec.get("holderIdentity") != self._identity:
            transitions = spec.get("leaseTransitions")
            claim["acquireTime"] = at
            claim["leaseTransitions"] = transitions + 1 if isinstance(transitions, int) else 0
        return claim

    def _accept(self, answer: Json, sent: float, led: bool) -> None:
        if _spec(answer).get("holderIdentity") != self._identity:
            raise TargetError("bad_body", f"{self._path}: the answer is not the Lease that was written")
        self._see(answer)
        self._lease = answer
        if not led:
            self._memories.load(_metadata(answer).get("annotations") or {})
        self._deadline = sent + self._renew_s

    async def _create(self) -> bool:
        """Make the Lease that is not there; return whether another look is worth it now.

        Whoever leads goes on. Anybody else makes it without a holder and waits as after any change: the Lease that has
        gone may have a holder that still leads.
        """
        sent, led = self._clock.now(), self.leading()
        holder = self._claim({}, sent) if led else {"leaseDurationSeconds": math.ceil(self._lease_s)}
        page = self._memories.page(sent, last=True) if led else None
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "annotations": _present(page)},
            "spec": holder,
        }
        try:
            answer = await self._call("POST", self._parent, body)
            if led:
                self._accept(answer, sent, led)
            else:
                self._see(answer)
        except TargetError as error:
            if error.reason == "conflict":
                return True
            self._listener.trouble(error)
            return False
        if page is not None:
            self._memories.saved(page)
        return False

    async def _patch(self, lease: Json, spec: Json, page: Page | None) -> Json:
        """Write, provided that nobody wrote since `lease` was read."""
        metadata: dict[str, object] = {"resourceVersion": _metadata(lease).get("resourceVersion")}
        if page is not None and page.annotations:
            metadata["annotations"] = page.annotations
        return await self._call("PATCH", self._path, {"metadata": metadata, "spec": spec}, MERGE_PATCH)

    async def _call(self, method: str, path: str, body: object = None, content_type: str = "application/json") -> Json:
        """Return the answer. Raises TargetError, after a part of the retry period at the latest."""
        limit_s = CALL_SHARE * self._retry_s
        query = {} if body is None else {"fieldManager": FIELD_MANAGER}
        work = self._api.request(method, path, query=query, body=body, content_type=content_type)
        call = asyncio.ensure_future(work)
        limit = asyncio.ensure_future(self._clock.sleep_until(self._clock.now() + limit_s))
        try:
            await asyncio.wait((call, limit), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise TargetError("unreachable", f"{method} {path}: no answer within {limit_s:g} s")
            return call.result()
        finally:
            limit.cancel()
            call.cancel()
            # Given up, not waited for: what it still comes to is nobody's business.
            call.add_done_callback(lambda done: done.cancelled() or done.exception())

    # --- between attempts -------------------------------------------------------------------------------------------

    def _say(self) -> None:
        leading = self.leading()
        if leading != self._said:
            self._said = leading
            self._listener.leads(leading)

    async def _pause(self, started: float) -> None:
        """Sleep until the next attempt is due, the Lease is free, we no longer lead, or an action is to be saved."""
        now = self._clock.now()
        if self.leading():
            until = min(max(started + self._retry_s, now), self._deadline)
        else:
            until = min(now + self._retry_s / 2.0, max(now, self._free_at))
        sleep = asyncio.ensure_future(self._clock.sleep_until(until))
        news = asyncio.ensure_future(self._memories.news.wait())
        try:
            await asyncio.wait((sleep, news) if self.leading() else (sleep,), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleep.cancel()
            news.cancel()


def micro_time(at: float) -> str:
    """Return epoch seconds as the API writes a MicroTime, in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _spec(lease: Json) -> Json:
    return lease.get("spec") or {}


def _metadata(lease: Json) -> Json:
    return lease.get("metadata") or {}


def _present(page: Page | None) -> dict[str, str]:
    annotations = page.annotations if page is not None else {}
    return {key: text for key, text in annotations.items() if text is not None}
