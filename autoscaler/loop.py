"""The loop: for each snapshot decide, act, remember, report. One task a policy, supervised together."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from autoscaler.core.decide import decide
from autoscaler.core.policy import Policy
from autoscaler.core.state import State, absorb, advance
from autoscaler.core.types import Action, Decision, Outcome, Snapshot, TargetStatus
from autoscaler.errors import ActuationError, PolicyError, Problem, TargetError
from autoscaler.observe import Trouble, observe
from autoscaler.ports import Actuator, Clock, Report, Source, Target

RELOAD_EVERY_S = 5.0
Reread = Callable[[], Awaitable[TargetStatus]]


class Watcher(Trouble, Report, Protocol):
    """All that the loop tells the outside: ticks, troubles, reloads, and what was learned."""

    def started(self, policy: Policy) -> None:
        """Take note of a policy that begins, or goes on changed."""
        ...

    def learned(self, policy: str, state: State) -> None:
        """Take note of what has been learned of the target, after each tick."""
        ...

    def reloaded(self, policies: Mapping[str, Policy], problems: Sequence[Problem]) -> None:
        """Take note of a reload: the policies now in force, and the mistakes that kept new files out."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What one policy runs on; a mode is a choice of these."""

    target: Target
    sources: tuple[Source, ...]
    actuator: Actuator

    async def close(self) -> None:
        """Release every connection."""
        for source in self.sources:
            await source.close()
        await self.actuator.close()
        await self.target.close()


async def control(
    policy: Policy,
    state: State,
    snapshots: AsyncIterator[Snapshot],
    actuator: Actuator,
    watcher: Watcher,
    clock: Clock,
    reread: Reread,
) -> AsyncGenerator[State]:
    """Decide and act on each snapshot; yield the state after each tick. A tick that dies of a bug leaves no trace."""
    async for snapshot in snapshots:
        try:
            tick = await step(policy, state, snapshot, actuator, watcher, reread)
            state = advance(policy, tick.state, tick.decision, tick.outcome)
        except Exception as error:  # noqa: BLE001 - one bad tick must not stop the next
            watcher.error(policy.name, "bug", error)
            continue
        duration_s = max(0.0, clock.now() - snapshot.at)
        watcher.tick(policy.name, tick.snapshot, tick.decision, tick.outcome, duration_s)
        watcher.learned(policy.name, state)
        yield state


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """One decided and executed tick; `state` has absorbed `snapshot`."""

    state: State
    snapshot: Snapshot
    decision: Decision
    outcome: Outcome


async def step(
    policy: Policy, state: State, snapshot: Snapshot, actuator: Actuator, watcher: Watcher, reread: Reread
) -> Ticked:
    """Decide on one snapshot and act. After a conflict the target is read again and decided on once more."""
    absorbed = absorb(policy, state, snapshot)
    decision = decide(policy, absorbed, snapshot)
    try:
        outcome = await act(actuator, decision.action)
        return Ticked(state=absorbed, snapshot=snapshot, decision=decision, outcome=outcome)
    except ActuationError as error:
        watcher.error(policy.name, "actuation", error)
        if error.reason != "conflict":
            return Ticked(state=absorbed, snapshot=snapshot, decision=decision, outcome=Outcome.FAILED)
    try:
        snapshot = replace(snapshot, target=await reread())
        absorbed = absorb(policy, state, snapshot)
        decision = decide(policy, absorbed, snapshot)
        outcome = await act(actuator, decision.action)
    except (ActuationError, TargetError) as error:
        watcher.error(policy.name, "actuation", error)
        outcome = Outcome.FAILED
    return Ticked(state=absorbed, snapshot=snapshot, decision=decision, outcome=outcome)


async def act(actuator: Actuator, action: Action) -> Outcome:
    """Return what became of the action. A write that has begun is waited for, even when the task is cancelled."""
    write = asyncio.ensure_future(actuator.apply(action))
    try:
        return await asyncio.shield(write)
    except asyncio.CancelledError:
        await asyncio.wait([write])
        raise


class Supervisor:
    """Runs one task a policy, and swaps policies when their files change.

    Args:
        build: makes the parts of one policy.
        read: returns the policies by name, or raises PolicyError; called again to notice changes. None never reloads.
        fingerprint: a cheap value that changes when the files do.
        once: stop after one tick of each policy.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        build: Callable[[Policy], Parts],
        clock: Clock,
        watcher: Watcher,
        *,
        read: Callable[[], Mapping[str, Policy]] | None = None,
        fingerprint: Callable[[], object] | None = None,
        once: bool = False,
    ) -> None:
        self._policies = dict(policies)
        self._build = build
        self._clock = clock
        self._watcher = watcher
        self._read = read
        self._fingerprint = fingerprint
        self._once = once
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._states: dict[str, State] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set, or, with `once`, until every policy had its tick. A dead task ends it, visibly."""
        async with asyncio.TaskGroup() as group:
            for policy in self._policies.values():
                self._start(group, policy)
            if self._once:
                return  # the group waits for the single ticks
            reloader = group.create_task(self._reload_on_change(group), name="reload")
            await stop.wait()
            reloader.cancel()
            for task in self._tasks.values():
                task.cancel()

    @property
    def ticked(self) -> frozenset[str]:
        """The policies that completed at least one tick."""
        return frozenset(self._states)

    def _start(self, group: asyncio.TaskGroup, policy: Policy) -> None:
        self._watcher.started(policy)
        self._tasks[policy.name] = group.create_task(self._run_policy(policy), name=f"policy {policy.name}")

    async def _run_policy(self, policy: Policy) -> None:
        parts = self._build(policy)
        try:
            snapshots = observe(policy.name, policy.interval_s, parts.target, parts.sources, self._clock, self._watcher)
            state = self._states.get(policy.name, State())
            states = control(policy, state, snapshots, parts.actuator, self._watcher, self._clock, parts.target.read)
            async with aclosing(snapshots), aclosing(states):
                async for state in states:
                    self._states[policy.name] = state
        finally:
            await parts.close()

    async def _reload_on_change(self, group: asyncio.TaskGroup) -> None:
        if self._read is None or self._fingerprint is None:
            return
        seen = self._fingerprint()
        due = self._clock.now()
        while True:
            due += RELOAD_EVERY_S
            await self._clock.sleep_until(due)
            now = self._fingerprint()
            if now != seen:
                seen = now
                await self._reload(group)

    async def _reload(self, group: asyncio.TaskGroup) -> None:
        """Swap what changed; a bad file keeps every old policy. The memory of a target outlives its policy's change."""
        try:
            fresh = dict(self._read() if self._read is not None else {})
        except PolicyError as error:
            self._watcher.reloaded(self._policies, error.problems)
            return
        for name in [name for name, policy in self._policies.items() if fresh.get(name) != policy]:
            old = self._policies.pop(name)
            task = self._tasks.pop(name)
            task.cancel()
            await asyncio.wait([task])
            if name not in fresh or fresh[name].target != old.target:
                self._states.pop(name, None)
        for name, policy in fresh.items():
            if name not in self._policies:
                self._policies[name] = policy
                self._start(group, policy)
        self._watcher.reloaded(self._policies, ())
