"""The loop: deciding, acting, remembering; its supervisor: isolation, reload, shutdown, and what a dead task means."""

import asyncio
import gc
import os
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry
from structlog.typing import EventDict, FilteringBoundLogger

from autoscaler.actuators.dry_run import DryRunActuator
from autoscaler.cli.wiring import Watchers, live_parts
from autoscaler.clock import SystemClock
from autoscaler.core.policy import (
    Policy,
    PrometheusServer,
    Query,
    ReplicaBounds,
    Schedule,
    Signals,
    TargetRef,
    VllmSignals,
)
from autoscaler.core.state import State
from autoscaler.core.types import Action, Decision, Hold, Outcome, Reason, ScaleReplicas, Snapshot, TargetStatus
from autoscaler.errors import ActuationError, PolicyError, Problem, TargetError
from autoscaler.loop import RELOAD_EVERY_S, Parts, Supervisor, act, control, step
from autoscaler.observe import observe
from autoscaler.ports import Actuator
from autoscaler.sim.serve import PageServer
from autoscaler.sources.cluster import ClusterCaches
from autoscaler.sources.kubernetes_api import KubernetesApi
from autoscaler.telemetry import Telemetry
from autoscaler.web.server import Health
from tests.core.world import P0, START, World
from tests.fake_api import FakeApi, pod
from tests.fake_ports import ManualClock, Watch, WorldSource, WorldTarget, parts_of, settle

PAGE = Path(__file__).parent / "data" / "vllm" / "0.32.0" / "loaded.prom"
CONFLICT = ActuationError("conflict", "replicas are 3, not 2")


def pressed(policy: Policy = P0, replicas: int = 2) -> World:
    """Return a world whose score is 1: every tick wants to grow."""
    world = World(policy, replicas)
    world.press(memory=1.0, backlog=1.0, latency=1.0)
    return world


def named(name: str, **changes: object) -> Policy:
    """Return profile P0 under another name, for a Deployment of that name."""
    target = TargetRef(namespace="serving", deployment=name)
    return replace(P0, **{"name": name, "target": target, **changes})  # type: ignore[arg-type]


class Run:
    """A supervisor under way, over worlds by policy name."""

    def __init__(self, *policies: Policy, once: bool = False) -> None:
        self.clock = ManualClock()
        self.watch = Watch()
        self.policies = {policy.name: policy for policy in policies}
        self.targets = {policy.name: WorldTarget(pressed(policy), self.clock) for policy in policies}
        self.sources: dict[str, tuple[WorldSource, ...]] = {}
        self.actuators: dict[str, Actuator | None] = {}
        self.built: list[str] = []
        self.version = 0
        self.problems: tuple[Problem, ...] = ()
        self.supervisor = Supervisor(
            self.policies, self.build, self.clock, self.watch, read=self.read, fingerprint=self.fingerprint, once=once
        )
        self.stop = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def build(self, policy: Policy) -> Parts:
        self.built.append(policy.name)
        if policy.name not in self.targets:
            self.targets[policy.name] = WorldTarget(pressed(policy), self.clock)
        target = self.targets[policy.name]
        target.world.policy = policy
        parts = parts_of(target, *self.sources.get(policy.name, ()))
        return replace(parts, actuator=self.actuators.get(policy.name) or parts.actuator)

    def read(self) -> Mapping[str, Policy]:
        if self.problems:
            raise PolicyError(self.problems)
        return dict(self.policies)

    def fingerprint(self) -> object:
        return self.version

    def change(self, *policies: Policy, problems: tuple[Problem, ...] = ()) -> None:
        """Let the files say this from now on."""
        self.version += 1
        self.problems = problems
        if not problems:
            self.policies = {policy.name: policy for policy in policies}

    async def go(self, seconds: float) -> None:
        """Let so many seconds of the clock pass."""
        if self.task is None:
            self.task = asyncio.create_task(self.supervisor.run(self.stop))
        await self.clock.advance(seconds)

    async def end(self) -> None:
        """Ask it to stop, and wait until it has."""
        self.stop.set()
        if self.task is not None:
            await self.task


@asynccontextmanager
async def running(*policies: Policy) -> AsyncIterator[Run]:
    run = Run(*policies)
    before = asyncio.all_tasks()
    try:
        yield run
    finally:
        await run.end()
        assert asyncio.all_tasks() == before
        assert all(target.closed for name, target in run.targets.items() if name in run.built)


# --- one tick -------------------------------------------------------------------------------------------------------


async def ticks(target: WorldTarget, count: int) -> tuple[Watch, list[State]]:
    """Return what so many ticks over a target led to."""
    watch, states = Watch(), []
    policy = target.world.policy
    sources = (WorldSource(target),)
    snapshots = observe(policy.name, policy.interval_s, target, sources, target.clock, watch, count)
    controlled = control(policy, State(), snapshots, target, watch, target.clock, target.read)

    async def collect() -> None:
        async with aclosing(snapshots), aclosing(controlled):
            async for state in controlled:
                states.append(state)

    task = asyncio.create_task(collect())
    await target.clock.advance(policy.interval_s * count)
    await task
    return watch, states


def failing(failures: Mapping[int, Exception]) -> Callable[[int], object]:
    """Return a hook that raises at these calls."""

    def hook(number: int) -> None:
        if number in failures:
            raise failures[number]

    return hook


async def test_each_tick_is_decided_carried_out_remembered_and_reported() -> None:
    target = WorldTarget(pressed(), ManualClock())
    watch, states = await ticks(target, 6)
    assert target.writes == [
        ScaleReplicas(seen=2, to=4, uid="uid-of-target"),
        ScaleReplicas(seen=4, to=6, uid="uid-of-target"),
    ]
    assert [tick.outcome for tick in watch.ticks] == [
        Outcome.APPLIED,
        *[Outcome.UNCHANGED] * 3,
        Outcome.APPLIED,  # 60 s of cooldown, and the clock of the decisions is the snapshot's
        Outcome.UNCHANGED,
    ]
    assert [state.last_up_at for state in states] == [START] * 4 + [START + 60.0] * 2
    assert watch.states == {"p0": states[-1]}
    assert watch.errors == []


async def test_the_duration_is_from_the_snapshot_to_the_completed_action() -> None:
    target = WorldTarget(pressed(), ManualClock())
    target.before_write = lambda _number: target.clock.sleep(2.5)
    watch, _ = await ticks(target, 2)
    assert [tick.duration_s for tick in watch.ticks] == [2.5, 0.0]


@pytest.mark.parametrize(
    "reason", ["forbidden", "unauthorized", "target_not_found", "throttled", "invalid", "unreachable"]
)
async def test_a_failed_write_starts_no_cooldown_and_is_not_tried_twice_in_a_tick(reason: str) -> None:
    target = WorldTarget(pressed(), ManualClock(), before_write=failing({0: ActuationError(reason)}))
    watch, states = await ticks(target, 2)
    assert [tick.outcome for tick in watch.ticks] == [Outcome.FAILED, Outcome.APPLIED]
    assert target.attempts == 2
    assert [state.last_action_at for state in states] == [None, START + 15.0]
    assert [(kind, str(error)) for _, kind, error in watch.errors] == [("actuation", reason)]


async def test_c090_after_a_conflict_the_target_is_read_and_decided_on_again() -> None:
    target = WorldTarget(pressed(), ManualClock())

    def person(number: int) -> None:
        if number == 0:
            target.world.scale(3)

    target.before_write = person
    watch, states = await ticks(target, 1)
    assert target.writes == [ScaleReplicas(seen=3, to=5, uid="uid-of-target")]
    assert target.attempts == 2
    (tick,) = watch.ticks
    assert tick.outcome is Outcome.APPLIED
    assert tick.snapshot.target.current_replicas == tick.decision.proposal.current == 3
    assert states[0].last_up_at == START
    assert len(states[0].times) == 1  # one snapshot was taken in, once
    assert [str(error) for _, _, error in watch.errors] == ["conflict: replicas are 3, not 2"]


async def test_c090_after_a_conflict_the_second_decision_may_be_to_hold() -> None:
    target = WorldTarget(pressed(), ManualClock())

    def person(_number: int) -> None:
        target.world.scale(8)

    target.before_write = person
    watch, _ = await ticks(target, 1)
    assert target.writes == []
    assert target.attempts == 1
    assert watch.ticks[0].outcome is Outcome.UNCHANGED
    assert isinstance(watch.ticks[0].decision.action, Hold)


async def test_c090_at_most_two_writes_a_tick_and_after_three_such_ticks_all_is_as_ever() -> None:
    target = WorldTarget(pressed(), ManualClock(), before_write=failing(dict.fromkeys(range(6), CONFLICT)))
    watch, states = await ticks(target, 4)
    assert [tick.outcome for tick in watch.ticks] == [Outcome.FAILED] * 3 + [Outcome.APPLIED]
    assert target.attempts == 7
    assert [state.last_action_at for state in states] == [None, None, None, START + 45.0]
    assert target.world.replicas == 4


async def test_c090_a_target_that_cannot_be_read_after_a_conflict_fails_the_tick() -> None:
    target = WorldTarget(pressed(), ManualClock(), before_write=failing({0: CONFLICT}))
    target.before_read = failing({1: TargetError("unreachable")})
    watch, _ = await ticks(target, 1)
    (tick,) = watch.ticks
    assert (tick.outcome, tick.snapshot.target.current_replicas) == (Outcome.FAILED, 2)
    assert [str(error) for _, _, error in watch.errors] == [str(CONFLICT), "unreachable"]


async def test_c140_a_tick_that_dies_of_a_bug_leaves_no_trace_and_the_next_one_runs() -> None:
    target = WorldTarget(pressed(), ManualClock(), before_write=failing({0: KeyError("spec")}))
    watch, states = await ticks(target, 2)
    assert [(kind, type(error)) for _, kind, error in watch.errors] == [("bug", KeyError)]
    assert [tick.outcome for tick in watch.ticks] == [Outcome.APPLIED]
    assert states[0].times == (START + 15.0,)


async def test_the_second_decision_equals_that_on_a_snapshot_with_the_reread_target() -> None:
    target = WorldTarget(pressed(), ManualClock(), before_write=failing({0: CONFLICT}))
    snapshot = target.world.snapshot()

    async def reread() -> TargetStatus:
        return replace(snapshot.target, current_replicas=5)

    target.world.scale(5)
    conflicted = await step(P0, State(), snapshot, target, Watch(), reread)
    fresh = await step(P0, State(), replace(snapshot, target=await reread()), target, Watch(), reread)
    assert conflicted.decision == fresh.decision
    assert conflicted.snapshot.target == fresh.snapshot.target


async def test_c152_a_dry_run_decides_as_live_does_up_to_the_first_write() -> None:
    decisions: list[list[Decision]] = []
    for actuator in (None, DryRunActuator()):
        run = Run(named("a"))
        target = run.targets["a"]
        target.world.press(memory=0.2, backlog=0.2, latency=0.2)
        target.before_read = lambda number, target=target: (
            target.world.press(memory=1.0, backlog=1.0, latency=1.0) if number == 4 else None
        )
        run.actuators["a"] = actuator
        await run.go(15.0 * 6)
        await run.end()
        assert [tick.outcome for tick in run.watch.ticks].count(Outcome.SIMULATED) == (actuator is not None)
        assert len(target.writes) == (actuator is None)
        decisions.append([tick.decision for tick in run.watch.ticks])
    live, dry = decisions
    first = next(index for index, one in enumerate(live) if isinstance(one.action, ScaleReplicas))
    assert first == 4
    assert live[: first + 1] == dry[: first + 1]
    # What is only simulated starts a cooldown as well: a dry run says what it would do, not the same thing each tick.
    assert [one.reason for one in dry[first + 1 :]] == [Reason.HELD_COOLDOWN] * 2


class SlowWrite:
    """An actuator whose write takes until `done` is set, and then fails with `error` if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun, self.done, self.error = asyncio.Event(), asyncio.Event(), error
        self.ended = False

    async def apply(self, action: Action) -> Outcome:
        """Wait, then end."""
        self.begun.set()
        await self.done.wait()
        self.ended = True
        if self.error is not None:
            raise self.error
        return Outcome.APPLIED

    async def close(self) -> None:
        """Hold nothing."""


@pytest.mark.parametrize("cancellations", [1, 3])
async def test_a_write_that_has_begun_ends_before_a_cancellation_takes_effect(cancellations: int) -> None:
    actuator = SlowWrite()
    outcomes: list[Outcome] = []

    async def tick() -> None:
        outcomes.append(await act(actuator, ScaleReplicas(seen=1, to=2)))
        await asyncio.sleep(0)
        outcomes.append(Outcome.FAILED)

    task = asyncio.create_task(tick())
    await actuator.begun.wait()
    for _ in range(cancellations):
        task.cancel()
        await settle()
    assert not task.done()
    actuator.done.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert outcomes == [Outcome.APPLIED]


async def test_a_write_that_fails_after_the_cancellation_is_a_failed_write() -> None:
    actuator = SlowWrite(ActuationError("forbidden"))
    task = asyncio.create_task(act(actuator, ScaleReplicas(seen=1, to=2)))
    await actuator.begun.wait()
    task.cancel()
    await settle()
    actuator.done.set()
    with pytest.raises(ActuationError):
        await task


# --- supervisor -----------------------------------------------------------------------------------------------------


async def test_every_policy_has_a_task_and_a_rhythm_of_its_own() -> None:
    async with running(named("a", interval_s=5.0), named("b", interval_s=15.0)) as run:
        await run.go(30.0)
        assert run.watch.times("a") == [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]
        assert run.watch.times("b") == [0.0, 15.0, 30.0]
        assert [policy.name for policy in run.watch.begun] == ["a", "b"]


async def hang() -> None:
    await asyncio.Event().wait()


def forbidden(_number: int) -> None:
    raise TargetError("forbidden", 'deployments "b" is forbidden')


@pytest.mark.parametrize(
    ("target_fault", "source_fault", "errors"),
    [
        pytest.param(None, lambda _number: hang(), set(), id="its source never answers"),
        pytest.param(lambda _number: hang(), None, set(), id="its target never answers"),
        pytest.param(forbidden, None, {("b", "target")}, id="its target is forbidden"),
        pytest.param(failing(dict.fromkeys(range(99), KeyError())), None, {("b", "bug")}, id="its target has a bug"),
        pytest.param(None, failing(dict.fromkeys(range(99), KeyError())), {("b", "bug")}, id="its source has a bug"),
    ],
)
async def test_c149_one_broken_target_does_not_stop_the_others(
    target_fault: Callable[[int], object] | None,
    source_fault: Callable[[int], object] | None,
    errors: set[tuple[str, str]],
) -> None:
    policies = [named("a"), named("b"), named("c")]
    async with running(*policies) as whole:
        await whole.go(300.0)
        expected = [tick.decision for tick in whole.watch.ticks if tick.policy in ("a", "c")]
    async with running(*policies) as run:
        run.targets["b"].before_read = target_fault
        run.sources["b"] = (WorldSource(run.targets["b"], before_read=source_fault),)
        await run.go(300.0)
        for name in ("a", "c"):
            assert run.watch.times(name) == [15.0 * number for number in range(21)]
        assert [tick.decision for tick in run.watch.ticks if tick.policy in ("a", "c")] == expected
        assert {(policy, kind) for policy, kind, _ in run.watch.errors} == errors
        assert run.targets["b"].writes == []
        assert len(run.targets["a"].writes) > 1


async def test_c149_each_failure_of_the_broken_target_counts() -> None:
    async with running(named("a"), named("b")) as run:
        run.targets["b"].before_read = forbidden
        await run.go(150.0)
        assert len(run.watch.errors) == 11


async def test_a_write_in_flight_at_shutdown_is_carried_out_and_reported() -> None:
    run = Run(named("a"), named("b"))
    release = asyncio.Event()
    run.targets["a"].before_write = lambda _number: release.wait()
    await run.go(1.0)
    assert run.watch.times("a") == []
    run.stop.set()
    await settle()
    assert run.task is not None
    assert not run.task.done()
    release.set()
    await run.task
    assert [(tick.policy, tick.outcome) for tick in run.watch.ticks] == [("b", Outcome.APPLIED), ("a", Outcome.APPLIED)]
    assert run.targets["a"].world.replicas == 4
    assert run.targets["a"].closed == 2
    assert "a" in run.supervisor.ticked


async def test_a_read_in_flight_at_shutdown_is_dropped() -> None:
    run = Run(named("a"))
    run.sources["a"] = (WorldSource(run.targets["a"], before_read=lambda _number: hang()),)
    await run.go(1.0)
    await run.end()
    assert run.watch.ticks == []
    assert run.targets["a"].closed == 2
    assert run.sources["a"][0].closed == 1


async def test_asked_to_stop_before_it_begins_it_decides_nothing() -> None:
    run = Run(named("a"))
    run.stop.set()
    await run.go(0.0)
    await run.end()
    assert (run.watch.ticks, run.targets["a"].attempts, run.targets["a"].closed) == ([], 0, 2)


async def test_cancelled_from_outside_it_closes_everything() -> None:
    run = Run(named("a"), named("b"))
    await run.go(20.0)
    assert run.task is not None
    run.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run.task
    assert [target.closed for target in run.targets.values()] == [2, 2]


class BrokenWatch(Watch):
    """A watcher whose report of policy `a` raises: a bug outside the part of a tick that is guarded."""

    def tick(self, policy: str, *rest: object) -> None:
        """Raise for `a`."""
        if policy == "a":
            raise ZeroDivisionError("bug")


async def test_c140_a_dead_task_ends_the_run_with_its_error() -> None:
    clock, watch = ManualClock(), BrokenWatch()
    policies = {name: named(name) for name in ("a", "b", "c")}
    targets = {name: WorldTarget(pressed(policy), clock) for name, policy in policies.items()}
    supervisor = Supervisor(policies, lambda policy: parts_of(targets[policy.name]), clock, watch)
    with pytest.raises(ExceptionGroup) as raised:
        await supervisor.run(asyncio.Event())
    assert [type(error) for error in raised.value.exceptions] == [ZeroDivisionError]
    assert [target.closed for target in targets.values()] == [2, 2, 2]


@pytest.mark.parametrize("name", ["a", "(reload)"])
async def test_c140_a_task_that_a_bug_cancels_ends_the_run(name: str) -> None:
    run = Run(named("a"), named("b"))
    await run.go(20.0)
    next(task for task in asyncio.all_tasks() if task.get_name() == name).cancel()
    assert run.task is not None
    with pytest.raises(ExceptionGroup) as raised:
        await run.task
    assert [str(error) for error in raised.value.exceptions] == [f"a bug cancelled the task {name}"]
    assert [target.closed for target in run.targets.values()] == [2, 2]


async def test_parts_that_cannot_be_built_end_the_run() -> None:
    def build(_policy: Policy) -> Parts:
        raise OSError("no such device")

    supervisor = Supervisor({"a": named("a")}, build, ManualClock(), Watch())
    with pytest.raises(ExceptionGroup) as raised:
        await supervisor.run(asyncio.Event())
    assert [str(error) for error in raised.value.exceptions] == ["no such device"]


async def test_closing_one_part_badly_still_closes_the_others() -> None:
    target = WorldTarget(pressed(), ManualClock())

    class Bad(WorldSource):
        async def close(self) -> None:
            raise OSError("close")

    good = WorldSource(target)
    with pytest.raises(OSError, match="close"):
        await Parts(target=target, sources=(Bad(target), good, Bad(target)), actuator=target).close()
    assert (good.closed, target.closed) == (1, 2)


# --- what another process knew --------------------------------------------------------------------------------------


async def test_what_another_process_knew_is_taken_in_before_the_tick() -> None:
    asked: list[tuple[str, float]] = []

    def recall(policy: Policy, state: State, at: float) -> State:
        asked.append((policy.name, at))
        return replace(state, last_up_at=START - 50.0) if len(asked) == 1 else state

    policy = named("a")
    clock, watch, stop = ManualClock(), Watch(), asyncio.Event()
    target = WorldTarget(pressed(policy), clock)
    supervisor = Supervisor({"a": policy}, lambda _policy: parts_of(target), clock, watch, recall=recall)
    task = asyncio.create_task(supervisor.run(stop))
    await clock.advance(20.0)
    stop.set()
    await task
    assert asked == [("a", START), ("a", START + 15.0)]
    assert watch.ticks[0].decision.reason is Reason.HELD_COOLDOWN
    assert [tick.outcome for tick in watch.ticks] == [Outcome.UNCHANGED, Outcome.APPLIED]  # 60 s of cooldown


# --- once -----------------------------------------------------------------------------------------------------------


async def test_once_is_one_tick_of_each_policy() -> None:
    run = Run(named("a"), named("b"), once=True)
    await run.supervisor.run(run.stop)
    assert run.watch.times("a") == run.watch.times("b") == [0.0]
    assert run.supervisor.ticked == {"a", "b"}
    assert [target.closed for target in run.targets.values()] == [2, 2]


async def test_once_does_not_try_again_and_tells_who_had_no_tick() -> None:
    run = Run(named("a"), named("b"), once=True)
    run.targets["b"].before_read = forbidden
    await run.supervisor.run(run.stop)
    assert run.supervisor.ticked == {"a"}
    assert len(run.targets["b"].reads) == 1


async def test_once_can_be_stopped() -> None:
    run = Run(named("a"), once=True)
    run.targets["a"].before_read = lambda _number: hang()
    await run.go(1.0)
    await run.end()
    assert run.supervisor.ticked == frozenset()
    assert run.targets["a"].closed == 2


async def test_once_ends_though_a_task_died() -> None:
    clock, watch = ManualClock(), BrokenWatch()
    target = WorldTarget(pressed(named("a")), clock)
    supervisor = Supervisor({"a": named("a")}, lambda _policy: parts_of(target), clock, watch, once=True)
    with pytest.raises(ExceptionGroup):
        await supervisor.run(asyncio.Event())


# --- reload ---------------------------------------------------------------------------------------------------------

RELOAD_S = RELOAD_EVERY_S + 1.0


async def test_the_bounds_of_a_schedule_hold_from_its_minute_on() -> None:
    noon = Schedule(name="noon", cron="0 11 * * *", duration_s=120.0, min=6)
    async with running(named("a", schedules=(noon,))) as run:
        run.targets["a"].world.press(memory=0.5, backlog=0.5, latency=0.5)
        await run.go(600.0)
        active = [round(tick.snapshot.at - START) for tick in run.watch.ticks if tick.snapshot.schedules]
        assert active == list(range(405, 520, 15))
        assert [(write.seen, write.to) for write in run.targets["a"].writes] == [(2, 6)]


async def test_a_changed_policy_takes_over_with_the_targets_memory() -> None:
    async with running(named("a"), named("b")) as run:
        await run.go(1.0)
        kept = run.watch.states["a"]
        run.change(named("a", replicas=ReplicaBounds(min=1, max=3)), named("b"))
        await run.go(RELOAD_S)
        assert run.watch.reloads == [(("a", "b"), ())]
        assert [policy.name for policy in run.watch.begun] == ["a", "b", "a"]
        assert run.built == ["a", "b", "a"]
        assert run.targets["a"].closed == 2
        assert run.watch.states["a"].times[:1] == kept.times
        assert run.watch.states["a"].last_up_at == START
        assert run.targets["a"].world.replicas == 3  # down to the new bound
        assert run.watch.times("b") == [0.0]


async def test_files_that_change_without_a_change_of_policies_touch_nothing() -> None:
    async with running(named("a")) as run:
        await run.go(1.0)
        run.change(named("a"))
        await run.go(RELOAD_S)
        assert run.watch.reloads == [(("a",), ())]
        assert run.built == ["a"]


async def test_unchanged_files_are_not_read_again() -> None:
    async with running(named("a")) as run:
        await run.go(100.0)
        assert run.watch.reloads == []


async def test_a_bad_file_keeps_every_old_policy_and_the_next_good_one_is_taken() -> None:
    problem = Problem("a.yaml", "spec.replicas.max", "0", "must be at least 1")
    async with running(named("a")) as run:
        await run.go(1.0)
        run.change(problems=(problem,))
        await run.go(31.0)
        assert run.watch.reloads == [(("a",), (problem,))]  # once for each change of the files
        assert run.watch.times("a") == [0.0, 15.0, 30.0]
        run.change(named("a", interval_s=5.0))
        await run.go(RELOAD_S)
        assert run.watch.reloads[1:] == [(("a",), ())]
        assert run.watch.begun[-1].interval_s == 5.0


async def test_a_removed_policy_stops_and_an_added_one_starts() -> None:
    async with running(named("a"), named("b")) as run:
        await run.go(1.0)
        run.change(named("b"), named("c"))
        await run.go(30.0)
        assert run.watch.times("a") == [0.0]
        assert run.watch.times("b") == [0.0, 15.0, 30.0]
        assert run.watch.times("c") == [5.0, 20.0]
        assert run.targets["a"].closed == 2
        assert run.watch.reloads == [(("b", "c"), ())]


async def test_a_policy_that_comes_back_still_knows_its_cooldown() -> None:
    async with running(named("a"), named("b")) as run:
        await run.go(1.0)
        run.change(named("b"))
        await run.go(10.0)
        run.change(named("a"), named("b"))
        await run.go(10.0)
        assert run.watch.times("a") == [0.0, 15.0]
        assert run.watch.states["a"].last_up_at == START
        assert len(run.targets["a"].writes) == 1


async def test_another_target_is_met_without_memories() -> None:
    async with running(named("a")) as run:
        await run.go(1.0)
        assert run.watch.states["a"].last_up_at == START
        run.change(named("a", target=TargetRef(namespace="serving", deployment="other")))
        await run.go(RELOAD_S)
        assert run.watch.states["a"].times == (START + 5.0,)


async def test_a_reload_during_a_write_waits_for_it_and_remembers_its_cooldown() -> None:
    async with running(named("a")) as run:
        release = asyncio.Event()
        run.targets["a"].before_write = lambda _number: release.wait()
        await run.go(1.0)
        run.change(named("a", interval_s=5.0))
        await run.go(RELOAD_S)
        assert run.built == ["a"]
        release.set()
        await run.go(20.0)
        assert run.built == ["a", "a"]
        assert [tick.outcome for tick in run.watch.ticks][:2] == [Outcome.APPLIED, Outcome.UNCHANGED]
        assert len(run.targets["a"].writes) == 1
        assert run.watch.states["a"].last_up_at == START


# --- two thousand ticks ---------------------------------------------------------------------------------------------


class JumpingClock:
    """`ports.Clock` that never waits: sleeping moves it."""

    def __init__(self) -> None:
        self.at = START

    def now(self) -> float:
        """Return epoch seconds."""
        return self.at

    async def sleep_until(self, at: float) -> None:
        """Move to `at`, and let the others run."""
        self.at = max(self.at, at)
        await asyncio.sleep(0)


class Footprint:
    """`ports.Report` that measures the process now and then, and ends the run after so many ticks."""

    def __init__(self, api: FakeApi, stop: asyncio.Event, ticks: int, warm: int) -> None:
        self.measured: list[tuple[int, float]] = []
        self.gaps: set[str] = set()
        self._api, self._stop, self._left, self._warm = api, stop, ticks, warm

    def tick(self, policy: str, snapshot: Snapshot, decision: Decision, outcome: Outcome, duration_s: float) -> None:
        """Count one tick, and forget what the fake server remembers."""
        self._api.requests.clear()
        self.gaps |= {str(gap.reason) for gap in snapshot.gaps}
        self._left -= 1
        if self._left % self._warm == 0:
            self.measured.append((sockets(), resident_mb()))
        if self._left == 0:
            self._stop.set()


def drop(_logger: object, _method: str, _event: EventDict) -> EventDict:
    """Let no line through."""
    raise structlog.DropEvent


def sockets() -> int:
    """Return how many sockets the process has open."""
    return sum(str(file.readlink()).startswith("socket:") for file in Path("/proc/self/fd").iterdir() if file.exists())


def resident_mb() -> float:
    """Return the resident memory of the process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@asynccontextmanager
async def fake_prometheus(clock: JumpingClock) -> AsyncIterator[str]:
    """Serve one fresh sample to any query, at the URL that is given. A fake: it evaluates nothing, and knows no age."""

    async def answer(request: web.Request) -> web.Response:
        asked = str((await request.post()).get("query") or request.query.get("query", ""))
        value = str(clock.now()) if "timestamp(" in asked else "1"
        result = [{"metric": {}, "value": [clock.now(), value]}]
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": result}})

    app = web.Application()
    app.router.add_route("*", "/api/v1/query", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.slow
async def test_c141_two_thousand_ticks_open_nothing_new(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    contexts = 0
    create = ssl.create_default_context

    def counting(*args: object, **kwargs: object) -> ssl.SSLContext:
        nonlocal contexts
        contexts += 1
        return create(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(ssl, "create_default_context", counting)
    clock, stop = JumpingClock(), asyncio.Event()
    addresses = ["127.10.9.2", "127.10.9.3"]
    page = PAGE.read_text(encoding="utf-8")
    pages = PageServer(lambda _address: page)
    before = asyncio.all_tasks()
    async with FakeApi().serve() as api, fake_prometheus(clock) as url:
        port = await pages.start()
        await pages.follow(set(addresses))
        api.pods = [pod(f"chat-{ip}", podIP=ip) for ip in addresses]
        policy = Policy(
            name="chat",
            target=TargetRef(namespace="serving", deployment="chat"),
            replicas=ReplicaBounds(min=2, max=2),
            signals=Signals(
                vllm=VllmSignals(port=port),
                prometheus={"default": PrometheusServer(url=url)},
                queries=(Query(signal="upstream_queue", query="sum(queue)"),),
            ),
        )
        client = await KubernetesApi.connect(
            clock, kubeconfig=str(api.write_kubeconfig(tmp_path / "config")), environ={}
        )
        footprint = Footprint(api, stop, 2000, warm=250)
        logger: FilteringBoundLogger = structlog.wrap_logger(structlog.ReturnLogger(), processors=[drop])
        telemetry = Telemetry(CollectorRegistry(), logger)
        watchers = Watchers(telemetry, Health(clock), reports=(footprint,))
        caches = ClusterCaches(client, SystemClock())
        supervisor = Supervisor(
            {policy.name: policy}, lambda one: live_parts(one, caches, clock, dry_run=False), clock, watchers
        )
        await supervisor.run(stop)
        await client.close()
        await pages.close()
        assert api.connections <= 8  # each of four kinds has its stream
    assert watchers.failures == {}
    assert footprint.gaps == set()
    assert len({count for count, _ in footprint.measured}) == 1
    assert footprint.measured[-1][1] - footprint.measured[1][1] < 20.0
    assert contexts <= 3
    assert asyncio.all_tasks() == before
