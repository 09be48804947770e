"""The loop: for each snapshot decide, act, remember, report. One task a policy, supervised together."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from autoscaler.core.policy import Policy, TargetRef
from autoscaler.core.state import State
from autoscaler.core.tick import Reread, Ticked, take_tick
from autoscaler.core.types import Action, Outcome, Snapshot, TargetStatus
from autoscaler.errors import ActuationError, PolicyError, Problem, TargetError
from autoscaler.observe import Trouble, observe
from autoscaler.ports import Actuator, Clock, Report, Source, Target
from autoscaler.schedule import Calendar

RELOAD_EVERY_S = 5.0
RELOADER = "(reload)"
"""Name of the task that watches the files; no policy can have it."""
ReadAgain = Callable[[], Awaitable[TargetStatus]]
Recall = Callable[[Policy, State, float], State]


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
        """Release every connection, the others too where closing one fails."""
        async with AsyncExitStack() as stack:
            for close in (self.target.close, self.actuator.close, *(source.close for source in self.sources)):
                stack.push_async_callback(close)


def know_nothing_else(_policy: Policy, state: State, _at: float) -> State:
    """Return the state: there is no other memory than this process' own."""
    return state


async def control(
    policy: Policy,
    state: State,
    snapshots: AsyncIterator[Snapshot],
    actuator: Actuator,
    watcher: Watcher,
    clock: Clock,
    reread: ReadAgain,
    recall: Recall = know_nothing_else,
) -> AsyncGenerator[State]:
    """Decide and act on each snapshot; yield the state after each tick. A tick that dies of a bug leaves no trace.

    Args:
        recall: returns the state with what another process knew, before the tick at that time.
    """
    async for snapshot in snapshots:
        try:
            state = recall(policy, state, snapshot.at)
            tick = await step(policy, state, snapshot, actuator, watcher, reread)
            state = tick.state
        except Exception as error:  # noqa: BLE001 - one bad tick must not stop the next
            watcher.error(policy.name, "bug", error)
            continue
        duration_s = max(0.0, clock.now() - snapshot.at)
        watcher.tick(policy.name, tick.snapshot, tick.decision, tick.outcome, duration_s)
        watcher.learned(policy.name, state)
        yield state


async def step(
    policy: Policy, state: State, snapshot: Snapshot, actuator: Actuator, watcher: Watcher, reread: ReadAgain
) -> Ticked:
    """Carry out one tick: the actuator acts, `reread` gives the target after a conflict."""
    tick = take_tick(policy, state, snapshot)
    answer: Outcome | TargetStatus | None = None
    while True:
        try:
            wanted = tick.send(answer)
        except StopIteration as end:
            ticked: Ticked = end.value
            return ticked
        answer = None
        try:
            answer = await reread() if isinstance(wanted, Reread) else await act(actuator, wanted)
        except (ActuationError, TargetError) as error:
            watcher.error(policy.name, "actuation", error)
            if isinstance(error, ActuationError) and error.reason != "conflict":
                answer = Outcome.FAILED


async def act(actuator: Actuator, action: Action) -> Outcome:
    """Return what became of the action.

    A write that has begun is waited for: a cancellation in the meantime takes effect at the next await, so that the
    tick is still remembered and reported.
    """
    write = asyncio.ensure_future(actuator.apply(action))
    cancelled = False
    while not write.done():
        try:
            await asyncio.wait([write])
        except asyncio.CancelledError:
            cancelled = True
    task = asyncio.current_task()
    if cancelled and task is not None:
        task.cancel()
    return write.result()


class Supervisor:
    """Runs one task a policy, and swaps policies when their files change.

    Args:
        build: makes the parts of one policy.
        read: returns the policies by name, or raises PolicyError; called again to notice changes. None never reloads.
        fingerprint: a cheap value that changes when the files do.
        once: stop after one tick of each policy.
        recall: see `control`.
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
        recall: Recall = know_nothing_else,
    ) -> None:
        self._policies = dict(policies)
        self._build = build
        self._clock = clock
        self._watcher = watcher
        self._read = read
        self._fingerprint = fingerprint
        self._once = once
        self._recall = recall
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._memory: dict[str, tuple[TargetRef, State]] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set, or, with `once`, until every policy had its tick.

        A policy's task that ends in any other way ends the run: raises ExceptionGroup.
        """
        async with asyncio.TaskGroup() as group:
            for policy in self._policies.values():
                self._start(group, policy)
            if self._read is not None and self._fingerprint is not None and not self._once:
                self._spawn(group, RELOADER, partial(self._reload_on_change, group, self._read, self._fingerprint))
            try:
                await self._until_end(stop)
            finally:
                self._dismiss(tuple(self._tasks))

    async def _until_end(self, stop: asyncio.Event) -> None:
        """Wait for `stop`, and with `once` also for the policies' tasks, whichever comes first."""
        ends: list[asyncio.Future[Any]] = [asyncio.ensure_future(stop.wait())]
        if self._once:
            ends.append(asyncio.gather(*self._tasks.values(), return_exceptions=True))
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()

    @property
    def ticked(self) -> frozenset[str]:
        """The policies that completed at least one tick."""
        return frozenset(self._memory)

    def _start(self, group: asyncio.TaskGroup, policy: Policy) -> None:
        self._watcher.started(policy)
        self._spawn(group, policy.name, partial(self._run_policy, policy))

    def _spawn(self, group: asyncio.TaskGroup, name: str, work: Callable[[], Awaitable[None]]) -> None:
        self._tasks[name] = group.create_task(self._keep(name, work), name=name)

    def _dismiss(self, names: Iterable[str]) -> list[asyncio.Task[None]]:
        """Cancel these policies' tasks, and return them: a write in flight still has to end."""
        tasks = [self._tasks.pop(name) for name in names]
        for task in tasks:
            task.cancel()
        return tasks

    async def _keep(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work. A cancellation that is no dismissal is an error: the work would silently not be done."""
        try:
            await work()
        except asyncio.CancelledError as error:
            if self._tasks.get(name) is not asyncio.current_task():
                raise
            self._tasks.clear()
            raise RuntimeError(f"a bug cancelled the task {name}") from error
        except BaseException:
            self._tasks.clear()  # the group takes the others along, which is a dismissal
            raise

    async def _run_policy(self, policy: Policy) -> None:
        parts = self._build(policy)
        attempts = 1 if self._once else None
        try:
            snapshots = observe(
                policy.name,
                policy.interval_s,
                parts.target,
                parts.sources,
                self._clock,
                self._watcher,
                attempts,
                Calendar(policy.schedules).active,
            )
            _, state = self._memory.get(policy.name, (policy.target, State()))
            states = control(
                policy,
                state,
                snapshots,
                parts.actuator,
                self._watcher,
                self._clock,
                parts.target.read,
                self._recall,
            )
            async with aclosing(snapshots), aclosing(states):
                async for state in states:
                    self._memory[policy.name] = (policy.target, state)
        finally:
            await parts.close()

    async def _reload_on_change(
        self, group: asyncio.TaskGroup, read: Callable[[], Mapping[str, Policy]], fingerprint: Callable[[], object]
    ) -> None:
        seen = fingerprint()
        due = self._clock.now()
        while True:
            due += RELOAD_EVERY_S
            await self._clock.sleep_until(due)
            now = fingerprint()
            if now != seen:
                seen = now
                await self._reload(group, read)

    async def _reload(self, group: asyncio.TaskGroup, read: Callable[[], Mapping[str, Policy]]) -> None:
        """Swap what changed; a bad file keeps every old policy.

        The memory of a target outlives its policy's change, and even its absence: its cooldowns go on.
        """
        try:
            fresh = dict(read())
        except PolicyError as error:
            self._watcher.reloaded(self._policies, error.problems)
            return
        changed = [name for name, policy in self._policies.items() if fresh.get(name) != policy]
        dismissed = self._dismiss(changed)
        if dismissed:
            await asyncio.wait(dismissed)
        self._policies = fresh
        for name, policy in fresh.items():
            remembered = self._memory.get(name)
            if remembered is not None and remembered[0] != policy.target:
                del self._memory[name]
            if name not in self._tasks:
                self._start(group, policy)
        self._watcher.reloaded(self._policies, ())
