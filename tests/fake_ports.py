"""Fake ports for tests of the loop, and a clock that is moved by hand.

They do as they are told and remember what was asked of them. They lack any network: what a real target or source does
when its server misbehaves is tested with them.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autoscaler.core.policy import Policy
from autoscaler.core.state import State
from autoscaler.core.types import Action, Decision, Outcome, Reading, ScaleReplicas, Snapshot, TargetStatus
from autoscaler.errors import ActuationError, Problem
from autoscaler.loop import Parts
from tests.core.world import START, World

ROUNDS = 40
"""More turns of the event loop than anything made of these fakes needs to come to rest."""


async def settle() -> None:
    """Let everything run that can run without time passing."""
    for _ in range(ROUNDS):
        await asyncio.sleep(0)


class ManualClock:
    """`ports.Clock` that stands still until `advance` moves it, from one sleeper's moment to the next."""

    def __init__(self, at: float = START) -> None:
        self.at = at
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        """Return epoch seconds."""
        return self.at

    async def sleep_until(self, at: float) -> None:
        """Return once the clock was moved to `at`."""
        if at <= self.at:
            await asyncio.sleep(0)
            return
        sleeper = (at, asyncio.get_running_loop().create_future())
        self._sleepers.append(sleeper)
        try:
            await sleeper[1]
        finally:
            if sleeper in self._sleepers:
                self._sleepers.remove(sleeper)

    async def sleep(self, seconds: float) -> None:
        """Return after so many seconds of this clock."""
        await self.sleep_until(self.at + seconds)

    async def advance(self, seconds: float) -> None:
        """Let time pass; at each sleeper's moment everything happens that it leads to."""
        end = self.at + seconds
        await settle()
        while self._sleepers:
            sleeper = min(self._sleepers, key=lambda one: one[0])
            if sleeper[0] > end:
                break
            self._sleepers.remove(sleeper)
            self.at = sleeper[0]
            sleeper[1].set_result(None)
            await settle()
        self.at = end


@dataclass
class WorldTarget:
    """`ports.Target` and `ports.Actuator` over a `World`: pods are there at once, and already warm.

    Args:
        before_read: called with the number of the read, from 0; may sleep, and raise what the read then raises.
        before_write: the same of writes.
        reads, writes: when each began, and each action that was carried out.
        closed: how often it was closed, as target and as actuator together.
    """

    world: World
    clock: ManualClock
    before_read: Callable[[int], object] | None = None
    before_write: Callable[[int], object] | None = None
    reads: list[float] = field(default_factory=list)
    writes: list[ScaleReplicas] = field(default_factory=list)
    attempts: int = 0
    closed: int = 0

    async def read(self) -> TargetStatus:
        """Return the world's target now; its engines have run until now."""
        number = len(self.reads)
        self.reads.append(self.clock.now())
        await _maybe(self.before_read, number)
        self.settle_world()
        return self.world.snapshot().target

    def settle_world(self) -> None:
        """Let the engines run until now."""
        elapsed = self.clock.now() - self.world.at
        for engine in self.world.engines.values():
            engine.run(elapsed)
        self.world.at = self.clock.now()

    async def apply(self, action: Action) -> Outcome:
        """Set the replicas, provided that they are as seen."""
        if not isinstance(action, ScaleReplicas):
            return Outcome.UNCHANGED
        self.attempts += 1
        await _maybe(self.before_write, self.attempts - 1)
        if action.seen != self.world.replicas:
            raise ActuationError("conflict", f"replicas are {self.world.replicas}, not {action.seen}")
        self.world.scale(action.to)
        self.writes.append(action)
        return Outcome.APPLIED

    async def close(self) -> None:
        """Count it."""
        self.closed += 1


@dataclass
class WorldSource:
    """`ports.Source` of the world's engines and samples.

    Args:
        before_read: called with the number of the read, from 0; may sleep, and raise what the read then raises.
        times: when each read began.
    """

    target: WorldTarget
    name: str = "vllm"
    before_read: Callable[[int], object] | None = None
    times: list[float] = field(default_factory=list)
    closed: int = 0

    async def read(self, target: TargetStatus, at: float) -> Reading:
        """Return what the world's engines say now."""
        self.times.append(at)
        await _maybe(self.before_read, len(self.times) - 1)
        self.target.settle_world()
        snapshot = self.target.world.snapshot()
        return Reading(engines=snapshot.engines, gpus=snapshot.gpus, samples=snapshot.samples, gaps=snapshot.gaps)

    async def close(self) -> None:
        """Count it."""
        self.closed += 1


async def _maybe(hook: Callable[[int], object] | None, number: int) -> None:
    result = hook(number) if hook is not None else None
    if asyncio.iscoroutine(result):
        await result


@dataclass
class Tick:
    """One reported tick."""

    policy: str
    snapshot: Snapshot
    decision: Decision
    outcome: Outcome
    duration_s: float


@dataclass
class Watch:
    """`loop.Watcher` that remembers everything it is told."""

    ticks: list[Tick] = field(default_factory=list)
    errors: list[tuple[str, str, BaseException]] = field(default_factory=list)
    overruns: list[str] = field(default_factory=list)
    begun: list[Policy] = field(default_factory=list)
    states: dict[str, State] = field(default_factory=dict)
    reloads: list[tuple[tuple[str, ...], tuple[Problem, ...]]] = field(default_factory=list)

    def started(self, policy: Policy) -> None:
        """Remember it."""
        self.begun.append(policy)

    def tick(self, policy: str, snapshot: Snapshot, decision: Decision, outcome: Outcome, duration_s: float) -> None:
        """Remember it."""
        self.ticks.append(Tick(policy, snapshot, decision, outcome, duration_s))

    def error(self, policy: str, kind: str, error: BaseException) -> None:
        """Remember it."""
        self.errors.append((policy, kind, error))

    def overrun(self, policy: str) -> None:
        """Remember it."""
        self.overruns.append(policy)

    def learned(self, policy: str, state: State) -> None:
        """Remember it."""
        self.states[policy] = state

    def reloaded(self, policies: Mapping[str, Policy], problems: Sequence[Problem]) -> None:
        """Remember it."""
        self.reloads.append((tuple(sorted(policies)), tuple(problems)))

    def times(self, policy: str) -> list[float]:
        """Return when the policy's ticks were taken, in seconds since the start of all tests."""
        return [round(tick.snapshot.at - START, 3) for tick in self.ticks if tick.policy == policy]


def parts_of(target: WorldTarget, *sources: WorldSource) -> Parts:
    """Return parts over one world: its target, its actuator, and the sources; one over its engines without any."""
    return Parts(target=target, sources=sources or (WorldSource(target),), actuator=target)
