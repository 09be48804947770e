"""A small world for tests of the core: pods and engines whose readings are set by hand. No model of an engine."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from autoscaler.core.decide import decide
from autoscaler.core.policy import (
    BacklogPart,
    Emergency,
    Forecaster,
    HealthFuse,
    LatencyPart,
    MemoryPart,
    Policy,
    Prediction,
    ReplicaBounds,
    ScaleDown,
    ScaleUp,
    ScorePolicy,
    Sizing,
    Slo,
    Slos,
    TargetRef,
    Weights,
)
from autoscaler.core.signals import COLUMN, ENGINE_COLUMNS
from autoscaler.core.state import NO_ENGINES, State, absorb, advance
from autoscaler.core.types import (
    Decision,
    EngineKey,
    Engines,
    Gap,
    Gpu,
    HistogramRows,
    Limits,
    Outcome,
    Pod,
    PodLimits,
    PodPhase,
    RollOut,
    Sample,
    ScaleReplicas,
    SetBatching,
    Snapshot,
    TargetStatus,
    Template,
)

START = 1_764_500_000.0
BOUNDS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, float("inf"))

P0 = Policy(
    name="p0",
    target=TargetRef(namespace="serving", deployment="chat-a"),
    replicas=ReplicaBounds(min=1, max=8),
    interval_s=15.0,
    sizing=Sizing.SCORE,
    slo=Slos(ttft=Slo(seconds=2.0, quantile=0.95), itl=None),
    score=ScorePolicy(
        weights=Weights(memory=0.40, backlog=0.35, latency=0.25),
        memory=MemoryPart(kv_full=1.0, preemption_full=0.0, oom_weight=0.0),
        backlog=BacklogPart(waiting_per_replica=8.0, wait_s=None),
        latency=LatencyPart(floor=0.0),
        critical=2.0,
        clear=1.0,
    ),
    scale_up=ScaleUp(threshold=0.70, max_step=2, max_step_share=0.0, stabilization_s=0.0, cooldown_s=60.0, turn_s=0.0),
    scale_down=ScaleDown(
        threshold=0.30,
        max_step=1,
        max_step_share=0.0,
        stabilization_s=300.0,
        horizon_factor=0.0,
        cooldown_s=300.0,
        turn_s=0.0,
    ),
    prediction=Prediction(score=Forecaster.TREND, score_window_s=120.0, score_horizon_s=60.0),
    emergency=Emergency(enabled=False),
    health=HealthFuse(enabled=False),
)
"""Profile P0 of the field cases: sized by the score alone, +2 / -1, cooldowns 60 s and 300 s."""


@dataclass
class Engine:
    """One engine's readings. `None` leaves a reading out. Counters grow by their rates."""

    kv: float | None = 0.0
    waiting: float | None = 0.0
    running: float | None = 0.0
    asleep: bool = False
    capacity: float | None = 100_000.0
    reserved: float | None = None
    started_at: float | None = None
    prompt_rate: float | None = 0.0
    token_rate: float | None = 0.0
    request_rate: float | None = 0.0
    step_rate: float | None = 0.0
    preemption_rate: float = 0.0
    itl_s: float = 0.02
    ttft_s: float = 0.05
    queue_s: float | None = None
    preempted: float = 0.0
    prompted: float = 0.0
    generated: float = 0.0
    finished: float = 0.0
    steps: float = 0.0
    itl_sum: float = 0.0
    ttft: np.ndarray = field(default_factory=lambda: np.zeros(len(BOUNDS)))
    itl: np.ndarray = field(default_factory=lambda: np.zeros(len(BOUNDS)))
    queue: np.ndarray = field(default_factory=lambda: np.zeros(len(BOUNDS)))

    def run(self, seconds: float) -> None:
        """Let the counters grow."""
        requests, tokens = (self.request_rate or 0.0) * seconds, (self.token_rate or 0.0) * seconds
        self.prompted += (self.prompt_rate or 0.0) * seconds
        self.generated += tokens
        self.finished += requests
        self.steps += (self.step_rate or 0.0) * seconds
        self.preempted += self.preemption_rate * seconds
        self.itl_sum += tokens * self.itl_s
        self.ttft = self.ttft + requests * (self.ttft_s <= np.asarray(BOUNDS))
        self.itl = self.itl + tokens * (self.itl_s <= np.asarray(BOUNDS))
        if self.queue_s is not None:
            self.queue = self.queue + requests * (self.queue_s <= np.asarray(BOUNDS))

    def row(self, at: float) -> list[float]:
        """Return the reading in the order of `ENGINE_COLUMNS`."""
        values = {
            "read_at": at,
            "started_at": self.started_at,
            "num_requests_running": self.running,
            "num_requests_waiting": self.waiting,
            "kv_cache_usage": self.kv,
            "kv_capacity_tokens": self.capacity,
            "asleep": float(self.asleep),
            "gpu_memory_utilization": self.reserved,
            "num_preemptions": self.preempted,
            "prompt_tokens": None if self.prompt_rate is None else self.prompted,
            "cached_prompt_tokens": 0.0,
            "generation_tokens": None if self.token_rate is None else self.generated,
            "requests_finished": None if self.request_rate is None else self.finished,
            "iterations": None if self.step_rate is None else self.steps,
            "itl_sum": self.itl_sum,
        }
        found = (values[signal.name] for signal in ENGINE_COLUMNS)
        return [float("nan") if value is None else value for value in found]


def pod(name: str, **changes: object) -> Pod:
    """Return a pod that has been ready for an hour."""
    values: dict[str, object] = {
        "name": name,
        "uid": f"uid-{name}",
        "ip": "127.0.0.1",
        "created_at": START - 3700.0,
        "ready_at": START - 3600.0,
        "was_ready": True,
    }
    return Pod(**{**values, **changes})  # type: ignore[arg-type]


def loading(name: str, created_at: float, **changes: object) -> Pod:
    """Return a pod that has never been ready."""
    return pod(name, ready=False, was_ready=False, ready_at=None, created_at=created_at, **changes)


class World:
    """A target with hand-set readings, driven tick by tick through the core."""

    def __init__(self, policy: Policy, replicas: int, *, at: float = START) -> None:
        self.policy = policy
        self.at = at
        self.replicas = replicas
        self.pods: list[Pod] = [pod(f"{policy.target.deployment}-{index}") for index in range(replicas)]
        self.engines: dict[str, Engine] = {one.uid: Engine() for one in self.pods}
        self.samples: dict[str, float] = {}
        self.partial: set[str] = set()
        self.gpus: tuple[Gpu, ...] = ()
        self.gaps: tuple[Gap, ...] = ()
        self.schedules: tuple[str, ...] = ()
        self.silent: set[str] = set()
        self.state = State()
        self.status: dict[str, object] = {}
        self.writes: list[tuple[float, int, int]] = []
        self.ceiling: Limits | None = None
        self.told: dict[str, Limits] = {}
        self.deaf: set[str] = set()
        self.refused: dict[str, str] = {}
        self.outcome: Outcome | None = None

    def set(self, **readings: object) -> None:
        """Set the same readings on every engine."""
        for engine in self.engines.values():
            for name, value in readings.items():
                setattr(engine, name, value)

    def press(self, memory: float | None, backlog: float | None, latency: float | None) -> None:
        """Set readings that give these parts under profile P0, spread evenly over the engines."""
        for engine in self.engines.values():
            engine.kv = memory
            engine.waiting = None if backlog is None else backlog * 8.0
            engine.running = 1.0 if memory else 0.0
            engine.token_rate = 10.0 if memory else 0.0
        self.samples = {} if latency is None else {"ttft": latency * 2.0}

    def snapshot(self) -> Snapshot:
        """Return the snapshot of now."""
        keys = tuple(
            sorted(
                EngineKey(one.uid)
                for one in self.pods
                if one.phase is PodPhase.RUNNING and one.uid in self.engines and one.uid not in self.silent
            )
        )
        engines = NO_ENGINES
        if keys:
            chosen = [self.engines[key.pod_uid] for key in keys]
            rows = np.arange(len(keys), dtype=np.intp)
            counts = {"ttft": [one.ttft for one in chosen], "itl": [one.itl for one in chosen]}
            counts["e2e"] = counts["ttft"]
            if any(one.queue_s is not None for one in chosen):
                counts["queue_time"] = [one.queue for one in chosen]
            engines = Engines(
                keys=keys,
                values=np.array([engine.row(self.at) for engine in chosen]),
                histograms={
                    name: (HistogramRows(bounds=BOUNDS, rows=rows, counts=np.array(found)),)
                    for name, found in counts.items()
                },
            )
        values: dict[str, object] = {
            "namespace": self.policy.target.namespace,
            "name": self.policy.target.deployment,
            "uid": "uid-of-target",
            "current_replicas": self.replicas,
            "status_replicas": len(self.pods),
            "ready_replicas": sum(one.ready for one in self.pods),
            "pods": tuple(self.pods),
        }
        return Snapshot(
            at=self.at,
            target=TargetStatus(**{**values, **self.status}),  # type: ignore[arg-type]
            engines=engines,
            gpus=self.gpus,
            samples=tuple(
                Sample(signal=name, value=value, at=self.at, partial=name in self.partial)
                for name, value in self.samples.items()
            ),
            gaps=self.gaps,
            schedules=self.schedules,
            limits=self.limits(),
        )

    def limits(self) -> tuple[PodLimits, ...]:
        """Return what the plugin in each ready pod says; nothing without a ceiling."""
        if self.ceiling is None:
            return ()
        return tuple(
            PodLimits(
                pod_uid=one.uid,
                limits=self.told.get(one.uid, self.ceiling),
                ceiling=self.ceiling,
                refused=self.refused.get(one.uid, ""),
            )
            for one in self.pods
            if one.ready
        )

    def decide(self) -> Decision:
        """Take the present in and decide, without letting time pass or anything be written."""
        snapshot = self.snapshot()
        self.state = absorb(self.policy, self.state, snapshot)
        return decide(self.policy, self.state, snapshot)

    def tick(self, seconds: float | None = None, *, apply: bool = True) -> Decision:
        """Decide, carry the action out (pods appear and vanish at once, already warm), then let time pass."""
        decision = self.decide()
        outcome = Outcome.UNCHANGED
        if isinstance(decision.action, ScaleReplicas):
            outcome = self.outcome or (Outcome.APPLIED if apply else Outcome.SIMULATED)
            self.writes.append((self.at, decision.action.seen, decision.action.to))
            if outcome is Outcome.APPLIED:
                self.scale(decision.action.to)
        elif isinstance(decision.action, SetBatching):
            outcome = self.outcome or (Outcome.APPLIED if apply else Outcome.SIMULATED)
            if outcome is Outcome.APPLIED:
                self.told |= {one.uid: one.limits for one in decision.action.pods if one.uid not in self.deaf}
        elif isinstance(decision.action, RollOut):
            outcome = self.outcome or (Outcome.APPLIED if apply else Outcome.SIMULATED)
            if outcome is Outcome.APPLIED:
                self.roll_out(decision.action)
        self.state = advance(self.policy, self.state, decision, outcome)
        step = self.policy.interval_s if seconds is None else seconds
        for engine in self.engines.values():
            engine.run(step)
        self.at += step
        return decision

    def roll_out(self, action: RollOut) -> None:
        """Take a write to the pod template up."""
        raise NotImplementedError(action)

    def run(self, ticks: int, *, apply: bool = True) -> list[Decision]:
        """Return the decisions of so many ticks."""
        return [self.tick(apply=apply) for _ in range(ticks)]

    def scale(self, replicas: int) -> None:
        """Set the replicas; subclasses may let pods load."""
        self.replicas = replicas
        while len(self.pods) > replicas:
            gone = self.pods.pop()
            self.engines.pop(gone.uid, None)
        while len(self.pods) < replicas:
            self.add_pod()

    def add_pod(self) -> None:
        """Add a warm pod that reads like the first one."""
        name = f"{self.policy.target.deployment}-{int(self.at)}-{len(self.pods)}"
        self.pods.append(pod(name, created_at=self.at - 3700.0, ready_at=self.at - 3600.0))
        first = next(iter(self.engines.values()), Engine())
        self.engines[f"uid-{name}"] = replace(first)


class LoadingWorld(World):
    """As `World`, but a new pod loads for `load_s` before it is ready."""

    load_s = 240.0

    def add_pod(self) -> None:
        name = f"{self.policy.target.deployment}-{int(self.at)}-{len(self.pods)}"
        self.pods.append(loading(name, self.at, phase=PodPhase.PENDING))

    def decide(self) -> Decision:
        self.pods = [
            replace(one, ready=True, was_ready=True, ready_at=self.at, phase=PodPhase.RUNNING)
            if not one.was_ready and self.at - one.created_at >= self.load_s
            else one
            for one in self.pods
        ]
        for one in self.pods:
            if one.ready and one.uid not in self.engines:
                self.engines[one.uid] = Engine()
        return super().decide()


class RollingWorld(World):
    """As `World`, with a pod template whose pods have no plugin. A rollout replaces one pod after the other.

    Attributes:
        template: what the Deployment's template says now.
        load_s: from a new pod's creation to ready.
        crashes: tells of limits whether an engine ends at start with them; of memory where it says so.
        reads: returns an engine's readings with these limits; None leaves them.
        stuck: no node has room for another pod.
    """

    load_s = 30.0

    def __init__(self, policy: Policy, replicas: int, limits: Limits) -> None:
        super().__init__(policy, replicas)
        self.template = Template(
            container="vllm", limits=limits, chunked_prefill=True, max_surge=1, print="print", revision=f"rev {limits}"
        )
        self.pods = [replace(one, revision=self.template.revision) for one in self.pods]
        self.crashes: Callable[[Limits], bool] = lambda _limits: False
        self.reads: Callable[[Limits], dict[str, float] | None] = lambda _limits: None
        self.stuck = False
        self.rollouts: list[tuple[float, RollOut]] = []
        self.notes: list[tuple[float, RollOut]] = []

    def snapshot(self) -> Snapshot:
        self._roll()
        self.status["template"] = self.template
        self.status["rollout"] = any(one.revision != self.template.revision for one in self.pods)
        newest = [one for one in self.pods if one.revision == self.template.revision]
        self.status["rollout_unhealthy"] = bool(self.status["rollout"]) and any(
            not one.ready and bool(one.waiting_reason or one.restarts) for one in newest
        )
        return super().snapshot()

    def limits(self) -> tuple[PodLimits, ...]:
        """Return that there is no plugin in any ready pod, unless `ceiling` says what they started with."""
        if self.ceiling is not None:
            return super().limits()
        refused = "the plugin is not there (HTTP 404)"
        return tuple(PodLimits(pod_uid=one.uid, refused=refused, lacking=True) for one in self.pods if one.ready)

    def roll_out(self, action: RollOut) -> None:
        """Take a write to the template up; the same limits make the same revision again."""
        (self.rollouts if action.restarts else self.notes).append((self.at, action))
        revision = f"rev {action.limits}" if action.restarts else self.template.revision
        self.template = replace(self.template, limits=action.limits, note=action.note, revision=revision)

    def scale(self, replicas: int) -> None:
        super().scale(replicas)
        self.pods = [one if one.revision else replace(one, revision=self.template.revision) for one in self.pods]

    def _roll(self) -> None:
        """Take the rollout as far as it has come by now: a surplus of pods is taken from those that are worth least."""
        newest, limits = self.template.revision, self.template.limits
        for index, one in enumerate(self.pods):
            if one.ready or one.revision != newest or self.stuck or self.at - one.created_at < self.load_s:
                continue
            if self.crashes(limits):
                restarts = int((self.at - one.created_at) / self.load_s)
                reason = "CrashLoopBackOff" if restarts > 1 else ""
                self.pods[index] = replace(one, restarts=restarts, waiting_reason=reason)
                continue
            self.pods[index] = replace(one, ready=True, was_ready=True, ready_at=self.at)
            self.engines[one.uid] = replace(next(iter(self.engines.values()), Engine()))
            for name, value in (self.reads(limits) or {}).items():
                setattr(self.engines[one.uid], name, value)
        self.pods = [one for one in self.pods if one.ready or one.revision == newest]
        ranked = sorted(self.pods, key=lambda one: (one.ready, one.revision == newest))
        ready = sum(one.ready for one in self.pods)
        rolling = any(one.revision != newest for one in self.pods)
        surplus = len(self.pods) - self.replicas if ready >= self.replicas and not rolling else ready - self.replicas
        for one in [one for one in ranked if not rolling or one.ready][: max(0, surplus)]:
            self.pods.remove(one)
            self.engines.pop(one.uid, None)
        if any(one.revision != newest for one in self.pods) and len(self.pods) <= self.replicas:
            name = f"{self.policy.target.deployment}-{int(self.at)}-{len(self.rollouts)}"
            phase = PodPhase.PENDING if self.stuck else PodPhase.RUNNING
            since = self.at if self.stuck else None
            self.pods.append(loading(name, self.at, revision=newest, phase=phase, unschedulable_at=since))


def column(snapshot: Snapshot, name: str) -> np.ndarray:
    """Return one column of the engines' readings."""
    return np.asarray(snapshot.engines.values[:, COLUMN[name]])
