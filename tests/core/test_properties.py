"""What holds on every tick, whatever the load, the faults and the policy.

`HYPOTHESIS_PROFILE=nightly` runs `test_whatever_happens` over more than 100,000 ticks.
"""

import copy
import math
import pickle
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autoscaler.actuators.dry_run import DryRunActuator
from autoscaler.core.decide import decide
from autoscaler.core.policy import (
    Approval,
    BacklogPart,
    DemandPolicy,
    Emergency,
    Evidence,
    Fallback,
    Forecaster,
    HealthFuse,
    LatencyPart,
    Pending,
    Policy,
    Prediction,
    RateBudget,
    ReplicaBounds,
    ScaleDown,
    ScaleUp,
    Schedule,
    ScorePolicy,
    Select,
    Sizing,
    Slo,
    Slos,
    TargetRef,
    Weights,
    WithinSlo,
    complaints,
)
from autoscaler.core.state import State, absorb, advance
from autoscaler.core.types import (
    FIELD_MANAGER,
    Action,
    Decision,
    Engines,
    Gpu,
    HistogramRows,
    Hold,
    Outcome,
    PodPhase,
    Reason,
    ScaleReplicas,
    Snapshot,
)
from tests.core.world import P0, Engine, World, loading

TICKS = 100
DEFAULT = Policy(name="default", target=TargetRef(deployment="chat-a"), replicas=ReplicaBounds(min=1, max=8))
UPWARD = {reason for reason in Reason if reason.value.startswith("up_")}
DOWNWARD = {reason for reason in Reason if reason.value.startswith("down_")}
INTO_BOUNDS = {Reason.UP_BOUNDS, Reason.DOWN_BOUNDS}


# --- a fleet to which things happen ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the whole fleet carries; spread evenly over the ready engines."""

    kv: float = 1.0
    waiting: float = 0.0
    running: float = 16.0
    prompt_rate: float = 2000.0
    token_rate: float = 400.0
    request_rate: float = 4.0
    ttft_s: float = 0.3
    itl_s: float = 0.05
    preemption_rate: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Some ticks under one load, with what goes wrong meanwhile."""

    ticks: int
    load: Load = Load()
    silent: int = 0
    missing: frozenset[str] = frozenset()
    samples: dict[str, float] | None = None
    partial: bool = False
    outcome: Outcome = Outcome.APPLIED
    hole_s: float = 0.0
    by_hand: int | None = None
    load_s: float = 60.0
    crash: bool = False
    restart: bool = False
    unready: bool = False
    unschedulable: bool = False
    asleep: bool = False
    owner: str = ""
    rollout: bool = False
    memory_left: float | None = None
    active: tuple[str, ...] = ()
    approves: bool = False


class Fleet(World):
    """A world whose pods load, crash, fall unready, sleep and drain, and whose load is the whole fleet's."""

    drain_s = 40.0

    def __init__(self, policy: Policy, replicas: int) -> None:
        super().__init__(policy, replicas)
        self.phase = Phase(ticks=1)
        self.gone_at: dict[str, float] = {}
        self.born = 0

    def enter(self, phase: Phase) -> None:
        """Let a phase begin."""
        self.phase = phase
        writer = self.status.get("scaled_by", "helm") if phase.by_hand is None else "kubectl"
        self.status = {
            "scaled_by": writer,
            "other_owner": phase.owner,
            "rollout": phase.rollout,
            "rollout_unhealthy": phase.rollout and phase.crash,
        }
        self.outcome = phase.outcome
        self.schedules = phase.active
        if phase.by_hand is not None:
            self.scale(phase.by_hand)
        if phase.hole_s:
            for engine in self.engines.values():
                engine.run(phase.hole_s)
            self.at += phase.hole_s
        if phase.restart and self.pods:
            self.restart(0)
        if phase.crash:
            self.pods = [
                replace(one, ready=False, waiting_reason="CrashLoopBackOff", restarts=one.restarts + 4)
                if index % 2
                else one
                for index, one in enumerate(self.pods)
            ]

    def restart(self, index: int) -> None:
        """Restart one pod's container: its counters begin anew."""
        one = self.pods[index]
        self.pods[index] = replace(one, restarts=one.restarts + 1)
        if one.uid in self.engines:
            self.engines[one.uid] = Engine(started_at=self.at - 1.0)

    def scale(self, replicas: int) -> None:
        """Order and cancel pods as a Deployment does: what is not ready goes first, ready ones drain."""
        self.replicas = replicas
        live = [one for one in self.pods if not one.terminating]
        for _ in range(replicas - len(live)):
            self.born += 1
            self.pods.append(loading(f"new-{self.born}", self.at, phase=PodPhase.PENDING))
        surplus = sorted(live, key=lambda one: (one.ready, -one.created_at))[: max(0, len(live) - replicas)]
        for one in surplus:
            self.gone_at[one.uid] = self.at + (self.drain_s if one.ready else 0.0)
        doomed = {one.uid for one in surplus}
        self.pods = [replace(one, terminating=True) if one.uid in doomed else one for one in self.pods]

    def live_on(self) -> None:
        """Bring pods and readings up to now."""
        phase, load = self.phase, self.phase.load
        self.pods = [one for one in self.pods if self.gone_at.get(one.uid, math.inf) > self.at]
        self.engines = {uid: engine for uid, engine in self.engines.items() if uid in {one.uid for one in self.pods}}
        self.pods = [self.grown(one) for one in self.pods]
        ready = [one for one in self.pods if one.ready and not one.terminating]
        for one in ready:
            self.engines.setdefault(one.uid, Engine(started_at=one.created_at))
        share = 1.0 / max(1, len(ready))
        values: dict[str, Any] = {
            "kv": min(1.0, load.kv * share),
            "waiting": load.waiting * share,
            "running": load.running * share,
            "prompt_rate": load.prompt_rate * share,
            "token_rate": load.token_rate * share,
            "request_rate": load.request_rate * share,
            "step_rate": 40.0 if load.running else 0.0,
            "preemption_rate": load.preemption_rate * share,
            "ttft_s": load.ttft_s,
            "itl_s": load.itl_s,
            "capacity": 100_000.0,
            "asleep": False,
        }
        values |= dict.fromkeys(phase.missing, None)
        self.set(**values)
        if phase.asleep and ready:
            self.engines[ready[0].uid].asleep = True
        self.silent = {one.uid for one in self.pods[: phase.silent]}
        self.samples = dict(phase.samples or {})
        self.partial = set(self.samples) if phase.partial else set()
        self.gpus = self.cards()
        standing = self.state.standing
        self.status["approved"] = standing.id if standing is not None and phase.approves else ""

    def grown(self, one: Any) -> Any:
        """Return the pod as it is now."""
        phase = self.phase
        if phase.crash or one.terminating:
            return one
        if one.waiting_reason:
            return replace(one, waiting_reason="", ready=one.was_ready)
        if one.was_ready:
            return replace(one, ready=not phase.unready)
        if phase.unschedulable:
            return replace(one, unschedulable_at=one.created_at)
        if self.at - one.created_at >= phase.load_s:
            return replace(
                one, ready=True, was_ready=True, ready_at=self.at, phase=PodPhase.RUNNING, unschedulable_at=None
            )
        return one

    def cards(self) -> tuple[Gpu, ...]:
        """Return one card a pod, with so much memory left."""
        left = self.phase.memory_left
        if left is None:
            return ()
        return tuple(
            Gpu(uuid=f"GPU-{one.name}", pod_uid=one.uid, memory_used=8e10 * (1.0 - left), memory_free=8e10 * left)
            for one in self.pods
        )

    def carry_out(self, action: Action) -> Outcome:
        """Return what becomes of the action in this phase; only APPLIED changes the fleet."""
        if not isinstance(action, ScaleReplicas):
            return Outcome.UNCHANGED
        outcome = self.phase.outcome
        if outcome is Outcome.APPLIED:
            self.writes.append((self.at, action.seen, action.to))
            self.scale(action.to)
            self.status["scaled_by"] = FIELD_MANAGER
        elif outcome is Outcome.SIMULATED:
            outcome = result(DryRunActuator().apply(action))
        return outcome

    def let_pass(self, seconds: float) -> None:
        """Let time pass."""
        for engine in self.engines.values():
            engine.run(seconds)
        self.at += seconds


def result(coroutine: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Return what a coroutine that waits for nothing returns."""
    with pytest.raises(StopIteration) as stopped:
        coroutine.send(None)
    outcome = stopped.value.value
    assert isinstance(outcome, Outcome)
    return outcome


# --- what is drawn --------------------------------------------------------------------------------------------------

SERIES = ("kv", "waiting", "running", "prompt_rate", "token_rate", "request_rate", "step_rate", "capacity")
heavy = st.builds(
    Load,
    kv=st.floats(0.01, 8.0),
    waiting=st.sampled_from([0.0, 0.0, 1.0, 30.0, 400.0]),
    running=st.sampled_from([0.0, 4.0, 60.0, 400.0]),
    prompt_rate=st.sampled_from([0.0, 500.0, 20_000.0, 100_000.0]),
    token_rate=st.sampled_from([0.0, 50.0, 2000.0, 20_000.0]),
    request_rate=st.sampled_from([0.0, 0.05, 2.0, 50.0]),
    ttft_s=st.sampled_from([0.05, 0.8, 3.0, 30.0]),
    itl_s=st.sampled_from([0.02, 0.3, 3.0]),
    preemption_rate=st.sampled_from([0.0, 0.0, 5.0]),
)
light = st.builds(
    Load,
    kv=st.floats(0.01, 1.0),
    running=st.just(4.0),
    prompt_rate=st.floats(10.0, 20_000.0),
    token_rate=st.floats(10.0, 1000.0),
    request_rate=st.sampled_from([2.0, 50.0]),
    ttft_s=st.sampled_from([0.05, 0.3]),
    itl_s=st.just(0.02),
)
idle = st.just(Load(kv=0.0, running=0.0, prompt_rate=0.0, token_rate=0.0, request_rate=0.0))
loads = st.one_of(heavy, light, light, idle)
actives = st.sampled_from([(), (), ("low",), ("high",), ("low", "high"), ("gone",)])
troubles = st.builds(
    Phase,
    ticks=st.integers(1, 40),
    load=loads,
    silent=st.sampled_from([0, 0, 0, 1, 2, 99]),
    missing=st.one_of(st.just(frozenset()), st.frozensets(st.sampled_from(SERIES), max_size=3)),
    samples=st.one_of(
        st.none(),
        st.fixed_dictionaries(
            {},
            optional={
                "ttft": st.floats(0.0, 9.0),
                "num_requests_waiting": st.floats(0.0, 500.0),
                "kv_cache_usage": st.floats(0.0, 1.0),
                "upstream_queue": st.floats(0.0, 200.0),
                "queue_wait": st.floats(0.0, 30.0),
            },
        ),
    ),
    partial=st.booleans(),
    outcome=st.sampled_from([Outcome.APPLIED, Outcome.APPLIED, Outcome.SIMULATED, Outcome.FAILED]),
    hole_s=st.sampled_from([0.0, 0.0, 0.0, 45.0, 900.0]),
    by_hand=st.one_of(st.none(), st.none(), st.integers(0, 12)),
    load_s=st.sampled_from([0.0, 30.0, 200.0, 5000.0]),
    crash=st.sampled_from([False, False, False, True]),
    restart=st.sampled_from([False, False, False, True]),
    unready=st.sampled_from([False, False, False, True]),
    unschedulable=st.sampled_from([False, False, True]),
    asleep=st.sampled_from([False, False, False, True]),
    owner=st.sampled_from(["", "", "", "", "", "HorizontalPodAutoscaler/chat-a"]),
    rollout=st.sampled_from([False, False, False, True]),
    memory_left=st.one_of(st.none(), st.floats(0.0, 0.2)),
    active=actives,
    approves=st.booleans(),
)
calm = st.builds(
    Phase,
    ticks=st.integers(10, 60),
    load=loads,
    load_s=st.sampled_from([30.0, 200.0]),
    active=actives,
    approves=st.booleans(),
)
phases = st.one_of(calm, calm, calm, troubles)
stories = st.lists(phases, min_size=1, max_size=8)


@st.composite
def budgets(draw: st.DrawFn) -> tuple[RateBudget, ...]:
    """Draw rate budgets, mostly none."""
    one = st.builds(
        RateBudget,
        type=st.sampled_from(["Pods", "Percent"]),
        value=st.integers(1, 100),
        period_s=st.sampled_from([30.0, 60.0, 300.0]),
    )
    return tuple(draw(st.one_of(st.just([]), st.lists(one, max_size=2))))


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Schedule, ...]:
    """Draw a window of few replicas, one of many, both or none; together they may contradict each other."""
    low, high = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    both = (
        Schedule(name="low", cron="0 8 * * *", duration_s=3600.0, min=draw(st.integers(0, low)), max=low),
        Schedule(name="high", cron="0 9 * * *", duration_s=3600.0, min=draw(st.integers(1, high)), max=high),
    )
    return draw(st.sampled_from([(), (), both, both[:1]]))


@st.composite
def small_policies(draw: st.DrawFn) -> Policy:
    """Draw a policy of any shape, with short windows, so that much happens in few ticks."""
    low = draw(st.integers(1, 4))
    high = low + draw(st.integers(0, 6))
    share = draw(st.sampled_from([(0.40, 0.35, 0.25), (1.0, 0.0, 0.0), (0.0, 0.5, 0.5), (0.2, 0.8, 0.0)]))
    down = draw(st.sampled_from([0.2, 0.4, 0.6]))
    steps = st.one_of(st.none(), st.integers(1, 4))
    windows = st.sampled_from([0.0, 10.0, 30.0, 120.0])
    policy = Policy(
        name="small",
        target=TargetRef(deployment="chat-a"),
        replicas=ReplicaBounds(min=low, max=high),
        interval_s=draw(st.sampled_from([5.0, 15.0])),
        sizing=draw(st.sampled_from(list(Sizing))),
        slo=Slos(
            ttft=Slo(seconds=draw(st.sampled_from([0.5, 2.0]))),
            itl=Slo(seconds=draw(st.sampled_from([0.1, 1.0]))),
            within=draw(st.sampled_from([None, None, WithinSlo(metric="ttft")])),
        ),
        score=ScorePolicy(
            weights=Weights(memory=share[0], backlog=share[1], latency=share[2]),
            backlog=BacklogPart(pending_pods=draw(st.sampled_from([None, 5.0]))),
            latency=LatencyPart(min_observations=draw(st.sampled_from([1, 20]))),
            critical=draw(st.sampled_from([0.95, 2.0])),
            warm_up_s=draw(windows),
        ),
        scale_up=ScaleUp(
            threshold=0.7,
            max_step=draw(steps),
            stabilization_s=draw(windows),
            cooldown_s=draw(st.one_of(st.none(), windows)),
            budgets=draw(budgets()),
            select=draw(st.sampled_from(list(Select))),
        ),
        scale_down=ScaleDown(
            threshold=down,
            max_step=draw(steps),
            stabilization_s=draw(windows),
            horizon_factor=draw(st.sampled_from([0.0, 0.5])),
            cooldown_s=draw(st.one_of(st.none(), windows)),
            budgets=draw(budgets()),
            serialize_drain=draw(st.booleans()),
            drain_s=draw(st.sampled_from([None, 0.0, 300.0])),
        ),
        cooldown_s=draw(windows),
        prediction=Prediction(
            window_s=draw(st.sampled_from([60.0, 200.0])),
            bin_s=20.0,
            initial_horizon_s=60.0,
            score=draw(st.sampled_from(list(Forecaster))),
            error_min=draw(st.sampled_from([1, 30])),
        ),
        demand=DemandPolicy(learn=draw(st.booleans())),
        emergency=Emergency(enabled=draw(st.booleans())),
        pending=Pending(grace_s=draw(st.sampled_from([30.0, 600.0]))),
        evidence=Evidence(restart_window_s=60.0),
        health=HealthFuse(ready_within_s=draw(st.sampled_from([60.0, 900.0]))),
        schedules=draw(schedules()),
        approval=Approval(required=draw(st.sampled_from([False, False, True])), expiry_s=draw(windows) + 30.0),
        fallback=draw(
            st.one_of(st.none(), st.builds(Fallback, replicas=st.integers(1, high), after=st.integers(1, 5)))
        ),
    )
    assert not list(complaints(policy))
    return policy


policies = st.one_of(st.just(P0), st.just(DEFAULT), st.just(replace(DEFAULT, interval_s=15.0)), small_policies())


# --- what is checked ------------------------------------------------------------------------------------------------


class Book:
    """An account of what was done, kept apart from the state."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.last_up = -math.inf
        self.last_down = -math.inf
        self.last_foreign = -math.inf
        self.replicas: int | None = None

    def look(self, snapshot: Snapshot) -> None:
        """Take note of what others did."""
        target = snapshot.target
        if self.replicas not in (None, target.current_replicas) and target.scaled_by != FIELD_MANAGER:
            self.last_foreign = snapshot.at
        self.replicas = target.current_replicas

    def check(self, snapshot: Snapshot, state: State, decision: Decision) -> None:
        """Assert all that holds of one decision."""
        self.look(snapshot)
        assert (decision.change is not None) == (self.last_foreign == snapshot.at)
        self.is_sound(decision)
        self.explains_itself(decision)
        self.is_approved(snapshot, decision)
        if isinstance(decision.action, ScaleReplicas):
            self.keeps_limits(snapshot, decision, decision.action)
            bounds = self.policy.bounds(snapshot.schedules)
            inside = bounds.min <= decision.action.seen <= bounds.max
            if inside:
                self.has_waited(decision, decision.action)
                self.has_evidence(snapshot, state, decision, decision.action)

    def is_approved(self, snapshot: Snapshot, decision: Decision) -> None:
        """In propose mode an action goes no further than what a person has approved, and never the other way."""
        standing, action = decision.proposal.standing, decision.action
        assert standing is None or self.policy.approval.required
        if not self.policy.approval.required or not isinstance(action, ScaleReplicas):
            return
        assert standing is not None
        assert snapshot.target.approved == standing.id
        assert snapshot.at < standing.expires_at
        assert action.seen < action.to <= standing.to if standing.up else action.seen > action.to >= standing.to

    def is_sound(self, decision: Decision) -> None:
        """Every number is finite, every level in [0, 1]."""
        for value in numbers(decision):
            assert math.isfinite(value), decision
        score = decision.score
        assert score is not None
        levels = [score.value, score.shrink_value, score.memory_guard, decision.forecast.score]
        levels += [level for part in score.parts for level in (part.value, part.shrink_value)]
        assert all(level is None or 0.0 <= level <= 1.0 for level in levels)
        assert (decision.demand.value is None) == (decision.demand.gap is not None)
        up, keep = decision.forecast.up, decision.forecast.keep
        assert (up is None) == (keep is None)
        assert up is None or keep is None or 0 <= up <= keep

    def explains_itself(self, decision: Decision) -> None:
        """One reason, of the action's kind; steps that lead from the wish to the result; a hold says what it lacks."""
        proposal = decision.proposal
        assert decision.reason is proposal.reason
        places = [proposal.wished, *(place for step in proposal.steps for place in (step.before, step.after))]
        places.append(proposal.replicas)
        assert all(before == after for before, after in zip(places[::2], places[1::2], strict=True))
        if not isinstance(decision.action, ScaleReplicas):
            assert decision.reason not in UPWARD | DOWNWARD
            assert decision.unblocks
            assert all(decision.unblocks)
        else:
            assert decision.reason in (UPWARD if decision.action.to > decision.action.seen else DOWNWARD)
            assert not decision.unblocks

    def keeps_limits(self, snapshot: Snapshot, decision: Decision, action: ScaleReplicas) -> None:
        """Inside the bounds always, and one action changes by a step at most, but for the way back into bounds."""
        bounds, target = self.policy.bounds(snapshot.schedules), snapshot.target
        assert decision.bounds == (bounds if snapshot.schedules else None)
        assert bounds.min <= action.to <= bounds.max
        assert action.seen == target.current_replicas
        assert action.uid == target.uid
        assert action.to != action.seen
        assert not target.other_owner
        assert target.current_replicas > 0
        if bounds.min <= action.seen <= bounds.max:
            up, down = self.policy.scale_up.max_step, self.policy.scale_down.max_step
            assert up is None or action.to - action.seen <= up or decision.reason is Reason.UP_FALLBACK
            assert down is None or action.seen - action.to <= down
            assert decision.reason not in INTO_BOUNDS

    def has_waited(self, decision: Decision, action: ScaleReplicas) -> None:
        """No step inside a cooldown, but for urgent growth."""
        grows = action.to > action.seen
        cooldown = self.policy.up_cooldown_s if grows else self.policy.down_cooldown_s
        since = decision.at - max(self.last_up, self.last_down, self.last_foreign)
        assert since >= cooldown or (grows and decision.proposal.urgent)

    def has_evidence(self, snapshot: Snapshot, state: State, decision: Decision, action: ScaleReplicas) -> None:
        """Growth needs a score, shrinking needs every weighing part, healthy pods and memory to spare."""
        score, facts = decision.score, state.facts
        assert score is not None
        assert facts is not None
        if decision.reason is Reason.UP_FALLBACK:
            fallback = self.policy.fallback
            assert fallback is not None
            assert score.value is None
            assert action.seen < action.to <= fallback.replicas
            assert facts.expected > 0
            return
        assert score.value is not None
        if action.to > action.seen:
            assert not facts.stuck
            return
        assert all(part.shrink_value is not None for part in score.parts if part.weight > 0.0)
        assert score.shrink_value is not None
        assert score.shrink_value <= self.policy.scale_down.threshold
        assert score.shrink_value * action.seen / action.to < self.policy.scale_up.threshold
        assert not score.degraded
        assert score.memory_guard is None or score.memory_guard < 0.5
        assert not facts.unready
        assert not snapshot.target.rollout
        assert facts.known >= 0.7 * facts.expected

    def note(self, decision: Decision, outcome: Outcome) -> None:
        """Take note of what was done."""
        if decision.reason in (Reason.OTHER_OWNER, Reason.SCALED_TO_ZERO):
            self.last_up = self.last_down = self.last_foreign = -math.inf
        if isinstance(decision.action, ScaleReplicas) and outcome is Outcome.APPLIED:
            self.replicas = decision.action.to
        if isinstance(decision.action, ScaleReplicas) and outcome in (Outcome.APPLIED, Outcome.SIMULATED):
            if decision.action.to > decision.action.seen:
                self.last_up = decision.at
            else:
                self.last_down = decision.at


def numbers(value: Any) -> Iterator[float]:
    """Yield every float inside."""
    if isinstance(value, float):
        yield value
    elif is_dataclass(value):
        for one in fields(value):
            yield from numbers(getattr(value, one.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from numbers(item)


def arrays(value: Any) -> Iterator[np.ndarray]:
    """Yield every array inside."""
    if isinstance(value, np.ndarray):
        yield value
    elif is_dataclass(value):
        for one in fields(value):
            yield from arrays(getattr(value, one.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from arrays(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from arrays(item)


def ticks_of(policy: Policy, replicas: int, story: list[Phase], ticks: int) -> Iterator[Fleet]:
    """Yield the fleet at each of so many ticks, its phases one after the other, again and again."""
    fleet = Fleet(policy, replicas)
    turns = cycle(story)
    left = 0
    for _ in range(ticks):
        if left == 0:
            phase = next(turns)
            left = phase.ticks
            fleet.enter(phase)
        left -= 1
        fleet.live_on()
        yield fleet
        fleet.let_pass(policy.interval_s)


# --- the properties -------------------------------------------------------------------------------------------------


@given(policy=policies, replicas=st.integers(1, 10), story=stories)
def test_whatever_happens(policy: Policy, replicas: int, story: list[Phase]) -> None:
    """Bounds, steps, cooldowns, evidence, sound numbers, explanations, and a dry run that writes nothing."""
    book = Book(policy)
    for fleet in ticks_of(policy, replicas, story, TICKS):
        snapshot = fleet.snapshot()
        fleet.state = absorb(policy, fleet.state, snapshot)
        decision = decide(policy, fleet.state, snapshot)
        book.check(snapshot, fleet.state, decision)
        before = (fleet.replicas, tuple(fleet.pods))
        outcome = fleet.carry_out(decision.action)
        if outcome is not Outcome.APPLIED:
            assert (fleet.replicas, tuple(fleet.pods)) == before
        if fleet.phase.outcome is Outcome.SIMULATED:
            assert outcome is (Outcome.UNCHANGED if isinstance(decision.action, Hold) else Outcome.SIMULATED)
        book.note(decision, outcome)
        fleet.state = advance(policy, fleet.state, decision, outcome)


def test_nightly_is_a_hundred_thousand_ticks() -> None:
    assert settings.get_profile("nightly").max_examples * TICKS >= 100_000


@given(policy=policies, replicas=st.integers(1, 6), story=stories)
def test_decisions_follow_from_values_alone(policy: Policy, replicas: int, story: list[Phase]) -> None:
    """Equal arguments decide equally: again, after a pickle, and when nothing is the same object as before."""
    other = State()
    for fleet in ticks_of(policy, replicas, story, TICKS // 5):
        snapshot = fleet.snapshot()
        fleet.state = absorb(policy, fleet.state, snapshot)
        decision = decide(policy, fleet.state, snapshot)
        assert decide(policy, fleet.state, snapshot) == decision
        other, apart = pickle.loads(pickle.dumps((other, snapshot)))
        other = absorb(copy.deepcopy(policy), other, apart)
        assert decide(copy.deepcopy(policy), other, apart) == decision
        assert pickle.loads(pickle.dumps(decision)) == decision
        outcome = fleet.carry_out(decision.action)
        fleet.state = advance(policy, fleet.state, decision, outcome)
        other = advance(policy, other, copy.deepcopy(decision), outcome)


@example(
    policy=DEFAULT,
    replicas=1,
    story=[
        Phase(ticks=3, memory_left=0.1),
        Phase(ticks=2, memory_left=0.1, asleep=True),
        Phase(ticks=2, memory_left=0.1),
        Phase(ticks=3, memory_left=0.02),
    ],
)
@given(policy=policies, replicas=st.integers(1, 6), story=stories)
def test_objects_that_stay_the_same_decide_as_their_copies(policy: Policy, replicas: int, story: list[Phase]) -> None:
    """What a live source may share between ticks (pods, keys, rows of histograms) changes nothing."""
    shared, last = State(), None
    for fleet in ticks_of(policy, replicas, story, TICKS // 3):
        snapshot = fleet.snapshot()
        fleet.state = absorb(policy, fleet.state, snapshot)
        decision = decide(policy, fleet.state, snapshot)
        same = snapshot if last is None else sharing(snapshot, last)
        shared = absorb(policy, shared, same)
        assert decide(policy, shared, same) == decision
        outcome = fleet.carry_out(decision.action)
        fleet.state = advance(policy, fleet.state, decision, outcome)
        shared = advance(policy, shared, decision, outcome)
        last = same


def sharing(snapshot: Snapshot, last: Snapshot) -> Snapshot:
    """Return the snapshot with the objects of the last one wherever their values are equal."""
    engines, before = snapshot.engines, last.engines
    histograms = {
        name: tuple(
            HistogramRows(
                bounds=block.bounds,
                rows=old.rows if np.array_equal(old.rows, block.rows) else block.rows,
                counts=old.counts if np.array_equal(old.counts, block.counts) else block.counts,
            )
            for block, old in zip(blocks, before.histograms.get(name, blocks), strict=True)
        )
        for name, blocks in engines.histograms.items()
    }
    keys = before.keys if before.keys == engines.keys else engines.keys
    pods = last.target.pods if last.target.pods == snapshot.target.pods else snapshot.target.pods
    return replace(
        snapshot,
        target=replace(snapshot.target, pods=pods),
        engines=Engines(keys=keys, values=engines.values, histograms=histograms),
        gpus=last.gpus if last.gpus == snapshot.gpus else snapshot.gpus,
        samples=last.samples if last.samples == snapshot.samples else snapshot.samples,
    )


@given(policy=policies, replicas=st.integers(1, 6), story=stories)
def test_arguments_are_never_changed(policy: Policy, replicas: int, story: list[Phase]) -> None:
    """`absorb`, `decide` and `advance` leave state and snapshot alone; a write to one of their arrays would raise."""
    for fleet in ticks_of(policy, replicas, story, TICKS // 5):
        snapshot = fleet.snapshot()
        for array in arrays((fleet.state, snapshot)):
            array.setflags(write=False)
        before = pickle.dumps((fleet.state, snapshot))
        state = absorb(policy, fleet.state, snapshot)
        assert pickle.dumps((fleet.state, snapshot)) == before
        for array in arrays(state):
            array.setflags(write=False)
        absorbed = pickle.dumps(state)
        decision = decide(policy, state, snapshot)
        outcome = fleet.carry_out(decision.action)
        after = advance(policy, state, decision, outcome)
        assert pickle.dumps(state) == absorbed
        fleet.state = after


@given(
    policy=policies,
    replicas=st.integers(1, 10),
    story=stories,
    blind=st.sampled_from(["pages", "series"]),
    ticks=st.integers(1, TICKS // 2),
)
def test_nothing_known_moves_only_into_bounds(
    policy: Policy, replicas: int, story: list[Phase], blind: str, ticks: int
) -> None:
    policy = replace(policy, fallback=None, approval=Approval())
    for fleet in ticks_of(policy, replicas, story, ticks):
        snapshot = fleet.snapshot()
        fleet.state = absorb(policy, fleet.state, snapshot)
        decision = decide(policy, fleet.state, snapshot)
        fleet.state = advance(policy, fleet.state, decision, fleet.carry_out(decision.action))
    silent = 99 if blind == "pages" else 0
    missing = frozenset(SERIES) if blind == "series" else frozenset()
    fleet.enter(Phase(ticks=1, silent=silent, missing=missing, load=Load(request_rate=0.0, token_rate=0.0)))
    # Longer than any window of latencies.
    for _ in range(int(policy.score.latency.max_window_s / policy.interval_s) + 2):
        fleet.live_on()
        snapshot = fleet.snapshot()
        fleet.state = absorb(policy, fleet.state, snapshot)
        decision = decide(policy, fleet.state, snapshot)
        low, high = policy.replicas.min, policy.replicas.max
        assert decision.score is not None
        if decision.score.value is None and not decision.proposal.final:
            assert decision.proposal.replicas == min(max(fleet.replicas, low), high)
        if low <= fleet.replicas <= high and decision.score.value is None:
            assert decision.action == Hold()
        fleet.state = advance(policy, fleet.state, decision, fleet.carry_out(decision.action))
        fleet.let_pass(policy.interval_s)
    assert decision.score is not None
    assert decision.score.value is None or policy.score.weights.memory == 0.0


@given(
    load=loads.filter(lambda load: load.request_rate != 0.05),
    replicas=st.integers(1, 8),
    policy=st.sampled_from([P0, DEFAULT]),
    kind=st.sampled_from(["pages", "ticks"]),
    ticks=st.integers(5, 80),
)
def test_an_outage_under_steady_load_moves_nothing(
    load: Load, replicas: int, policy: Policy, kind: str, ticks: int
) -> None:
    """Where a steady load asks for no change, no outage of all pages, or of the daemon, makes it ask for one.

    Of loads whose latencies are known or not, but not just about: what an outage held back could make twenty of them.
    """
    fleet = Fleet(policy, replicas)
    fleet.enter(Phase(ticks=1, load=load, outcome=Outcome.FAILED))
    if run(fleet, 140)[60:] != [Hold()] * 80:
        return
    if kind == "ticks":
        fleet.let_pass(ticks * policy.interval_s)
    else:
        fleet.enter(replace(fleet.phase, silent=99))
        assert run(fleet, ticks) == [Hold()] * ticks
        fleet.enter(replace(fleet.phase, silent=0))
    assert run(fleet, 60) == [Hold()] * 60


def run(fleet: Fleet, ticks: int) -> list[Action]:
    """Return the actions of so many ticks, none of which is carried out."""
    actions = []
    for _ in range(ticks):
        fleet.live_on()
        snapshot = fleet.snapshot()
        fleet.state = absorb(fleet.policy, fleet.state, snapshot)
        decision = decide(fleet.policy, fleet.state, snapshot)
        actions.append(decision.action)
        fleet.state = advance(fleet.policy, fleet.state, decision, Outcome.FAILED)
        fleet.let_pass(fleet.policy.interval_s)
    return actions


# --- more load, never fewer replicas --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class More:
    """How much more the last interval brings."""

    kv: float
    waiting: float
    tokens: float
    preempted: float
    latency: float


mores = st.builds(
    More,
    kv=st.floats(0.0, 1.0),
    waiting=st.floats(0.0, 500.0),
    tokens=st.floats(1.0, 20.0),
    preempted=st.floats(0.0, 20.0),
    latency=st.floats(0.0, 9.0),
)


@given(
    policy=policies,
    replicas=st.integers(1, 8),
    story=st.lists(phases, min_size=1, max_size=4),
    latency=st.floats(0.0, 3.0),
    more=mores,
    ticks=st.integers(1, TICKS),
)
def test_more_load_never_fewer_replicas(
    policy: Policy, replicas: int, story: list[Phase], latency: float, more: More, ticks: int
) -> None:
    """After the same history, a last interval with more load is decided no lower.

    More load is: more KV usage, waiting requests, generated tokens and preemptions, and slower latencies; the same
    requests run and finish, the same series are known, and the same step-time line is in use (what the interval teaches
    is another matter: an engine that does more in the same steps is a faster one).

    One exception is the law's own: a newest minute that falls out of line widens the deviation, and with it what is
    kept. If more load brings it back into line, the margin to keep may shrink, and a shrink may go ahead.
    """
    policy = replace(policy, demand=replace(policy.demand, learn=False))
    for fleet in ticks_of(policy, replicas, [replace(one, samples=None) for one in story], ticks):
        snapshot = fleet.snapshot()
        fleet.state = absorb(policy, fleet.state, snapshot)
        decision = decide(policy, fleet.state, snapshot)
        fleet.state = advance(policy, fleet.state, decision, fleet.carry_out(decision.action))
    base, loaded = last_tick(fleet, latency, None), last_tick(fleet, latency, more)
    if loaded.proposal.replicas < base.proposal.replicas:
        before, after = base.forecast, loaded.forecast
        assert before.keep is not None
        assert after.keep is not None
        assert before.sigma is not None
        assert after.sigma is not None
        assert after.keep < before.keep
        assert after.sigma < before.sigma
        assert base.proposal.replicas <= base.proposal.current


def last_tick(fleet: Fleet, latency: float, more: More | None) -> Decision:
    """Return the decision after one more interval, with `more` or without; the fleet itself stays as it is."""
    fleet = copy.deepcopy(fleet)
    for engine in fleet.engines.values():
        if more is not None and engine.token_rate is not None:
            engine.token_rate *= more.tokens
            engine.preemption_rate += more.preempted
        engine.itl_s = 0.0
    fleet.let_pass(fleet.policy.interval_s)
    fleet.live_on()
    for engine in fleet.engines.values():
        if more is not None:
            engine.kv = None if engine.kv is None else min(1.0, engine.kv + more.kv)
            engine.waiting = None if engine.waiting is None else engine.waiting + more.waiting
    slower = latency + (more.latency if more is not None else 0.0)
    fleet.samples = {"ttft": slower, "itl": slower / 10.0}
    snapshot = fleet.snapshot()
    return decide(fleet.policy, absorb(fleet.policy, fleet.state, snapshot), snapshot)
