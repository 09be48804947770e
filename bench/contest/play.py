"""One policy on one ground: the same fleet, the same chance and the same measures, whoever decides."""

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from time import process_time
from typing import Any, Generic, TypeVar

import numpy as np

from autoscaler.cli.study import CLIENTS, with_objectives
from autoscaler.core.memory import Memory, memory_of, recall
from autoscaler.core.policy import Policy
from autoscaler.core.state import Hindsight, State
from autoscaler.policy_file import load_policies, shipped_policies
from autoscaler.sim.fleet import PENDING_S, ROUTING_S
from autoscaler.sim.fleet import Settings as FleetSettings
from autoscaler.sim.report import TickRow
from autoscaler.sim.run import Figures, Setting, run
from autoscaler.sim.scored import Scored
from bench.contest.traces import BY_NAME, HOUR, Ground
from bench.contest.variants import VARIANTS, Changes, Variant, overlaid, spelled
from bench.contest.watch import Provision, Watch, provision
from bench.oracle import Planned, achievable
from bench.rivals import RIVALS
from bench.rivals.base import Rival, Settings
from bench.rivals.epp import TokenAwareSettings, calibrated
from bench.rivals.feed import Counted, drive
from bench.rivals.static import StaticSettings, mean_size, peak_size
from bench.rivals.view import View
from bench.work import request_work

Key = TypeVar("Key")
GOAL = 0.99
"""The attainment that the oracle and the static fleet are sized for."""
LATE_START = 0.8
"""Standard deviations of a start's logarithm that the oracle orders ahead by: one start in five is later."""
HINDSIGHT = ("oracle", "static-peak", "static-mean")
OURS, WARM = "ours", "ours warm"
"""The shipped default; and the same with what it learned in an earlier hour of the same kind."""
ELSEWHERE = 1000
"""The seed of that hour is so much higher."""
BY_VENDOR = tuple(name for name in RIVALS if name != "static")
DEFAULT = shipped_policies() / "default.yaml"
POLICIES = (OURS, *HINDSIGHT, *BY_VENDOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run: all that another process needs to know.

    Args:
        trace, policy: names; a policy of a file goes by the file's name.
        path: the trace's file.
        hours: only its beginning; None for all of it.
        file: of a policy of this product; None for the shipped default or a variant of it, or for a rival.
        tuned: values of a rival that are not its vendor's; of ours that are not the default's.
    """

    trace: str
    policy: str
    path: Path
    seed: int
    scale: float = 1.0
    hours: float | None = None
    file: Path | None = None
    tuned: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Came:
    """What came of a run: its figures, and what was there against what was needed."""

    figures: Figures
    provision: Provision


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What a policy came to, None where no plan attains, and the values that it went by."""

    came: Came | None
    settings: Mapping[str, object]


def play(task: Task) -> dict[str, object]:
    """Return the entry of the results: what ran, on what, with which values, and what came of it."""
    started = process_time()
    ground = _ground(task, task.seed)
    played = _warm(ground, _ground(task, task.seed + ELSEWHERE)) if task.policy == WARM else answer(task, ground)
    figures: dict[str, object] | None = None
    if played.came is not None:
        scored = Scored(
            policy=task.policy, seed=task.seed, hours=ground.duration_s / HOUR, figures=played.came.figures
        ).to_document()
        figures = {name: value for name, value in scored.items() if name not in ("policy", "seed")}
        figures.update(played.came.provision.to_document())
    return {
        "trace": task.trace,
        "policy": task.policy,
        "seed": task.seed,
        "scale": task.scale,
        "hours": task.hours,
        "settings": dict(played.settings),
        "ground": {
            "file": task.path.name,
            "profile": ground.profile.name,
            "cold_start_s": ground.profile.cold_start_s,
            "ttft_s": ground.trace.ttft_s,
            "tpot_s": ground.trace.tpot_s,
            "replicas": ground.replicas,
            "min": ground.bounds.min,
            "max": ground.bounds.max,
            "requests": len(ground.sample),
            "duration_s": ground.duration_s,
            "fluid_gpu_hours": ground.fluid_gpu_hours,
        },
        "figures": figures,
        "seconds": round(process_time() - started, 2),
    }


def _ground(task: Task, seed: int) -> Ground:
    return Ground.of(BY_NAME[task.trace], task.path, seed=seed, scale=task.scale, hours=task.hours)


def answer(task: Task, ground: Ground) -> Played:
    """Return what the policy of a task comes to on a ground, whatever trace the task names."""
    name = task.policy.removesuffix(TUNED)
    if name == OURS or name in VARIANTS or task.file is not None:
        return _ours(ground, task.file or DEFAULT, VARIANTS.get(name), task.tuned or {})
    if task.policy in HINDSIGHT:
        return {"oracle": _oracle, "static-peak": _static_peak, "static-mean": _static_mean}[task.policy](ground)
    settings = settled(RIVALS[name], ground, task.tuned or {})
    return Played(came=rival_run(ground, settings.build()), settings=_shown(settings))


TUNED = " tuned"
"""What a rival with other values than its vendor's is called, behind its name."""


# -- ours ------------------------------------------------------------------------------------------------------------


def our_policy(ground: Ground, policy: Policy) -> Policy:
    """Return a policy with the trace's objectives and the bounds that hold for all."""
    bounds = replace(policy.replicas, min=ground.bounds.min, max=ground.bounds.max)
    policy = replace(policy, replicas=bounds)
    return with_objectives(policy, {"ttft": ground.trace.ttft_s, "itl": ground.trace.tpot_s})


def the_policy(file: Path) -> Policy:
    """Return the policy of a file."""
    return next(iter(load_policies([file]).policies.values()))


def our_run(ground: Ground, policy: Policy, state: State | None = None) -> Came:
    """Return what a policy of this product comes to; `state` is what it remembers at the start."""
    setting = fleet_setting(ground, ground.replicas)
    watch = Watch(setting.epoch)
    done = run(our_policy(ground, policy), ground.sample.requests(), setting, reports=(watch,), state=state)
    return Came(figures=done.figures, provision=_provision(ground, watch))


def learned(before: Ground, policy: Policy) -> State:
    """Return the state of a policy that has seen another ground, ended when this one begins: what it learned there.

    As the daemon keeps it: step times, how long starts take, and its own errors. Cooldowns and windows are left out.
    """
    setting = fleet_setting(before, before.replicas)
    earlier = replace(setting, epoch=setting.epoch - before.duration_s)
    own = our_policy(before, policy)
    memory = memory_of(own, run(own, before.sample.requests(), earlier).state)
    if memory is None:
        return State()
    taught = Memory(
        target=memory.target,
        at=memory.at,
        starts=memory.starts,
        hindsight=Hindsight(errors=memory.hindsight.errors),
        model=memory.model,
    )
    return recall(own, State(), taught, setting.epoch)


def _warm(ground: Ground, before: Ground) -> Played:
    policy = the_policy(DEFAULT)
    came = our_run(ground, policy, learned(before, policy))
    return Played(came=came, settings={"file": DEFAULT.name, "learned on seed": before.seed})


def _ours(ground: Ground, file: Path, variant: Variant | None, tuned: Changes) -> Played:
    policy = the_policy(file)
    changes = {**(variant.changes(policy) if variant is not None else {}), **tuned}
    settings = {"file": file.name, **{spelled(path): value for path, value in changes.items()}}
    return Played(came=our_run(ground, overlaid(policy, changes)), settings=settings)


def _provision(ground: Ground, watch: Watch) -> Provision:
    return provision(
        watch,
        np.array(ground.busy),
        ground.sample.arrival,
        duration_s=ground.duration_s,
        bounds=ground.bounds,
        gpus=ground.profile.gpus,
    )


def fleet_setting(ground: Ground, replicas: int) -> Setting:
    """Return the world that every policy is run in on a ground, with so many replicas at the start."""
    return Setting(
        profile=ground.profile,
        replicas=replicas,
        duration_s=ground.duration_s,
        seed=ground.seed,
        fleet=FleetSettings(clients=CLIENTS),
        ttft_s=ground.trace.ttft_s,
        tpot_s=ground.trace.tpot_s,
    )


# -- rivals ----------------------------------------------------------------------------------------------------------


def settled(settings: Settings, ground: Ground, tuned: Mapping[str, float]) -> Settings:
    """Return a rival's settings on this ground: its objectives, its profile, its bounds, and the tuned values."""
    every: Any = settings
    known = {one.name for one in fields(every)}
    own = {
        "bounds": ground.bounds,
        "profile": ground.profile,
        "ttft_s": ground.trace.ttft_s,
        "tpot_s": ground.trace.tpot_s,
        "itl_s": ground.trace.tpot_s,
    }
    changed: Settings = replace(every, **{name: value for name, value in own.items() if name in known}, **tuned)
    return calibrated(changed, ground.profile) if isinstance(changed, TokenAwareSettings) else changed


def rival_run(ground: Ground, rival: Rival, *, replicas: int | None = None) -> Came:
    """Return what a rival comes to, from the ground's replicas on or from others."""
    setting = fleet_setting(ground, ground.replicas if replicas is None else replicas)
    counted, watch = Counted(ground.sample.requests()), Watch(0.0)
    fleet = setting.make_fleet(the_policy(DEFAULT), counted)  # the policy's name alone counts
    noted = Noted(rival)
    asyncio.run(drive(fleet, noted, counted, ground.duration_s, note=watch.note))
    fleet.finish()
    summary = fleet.summary(ttft_s=ground.trace.ttft_s, tpot_s=ground.trace.tpot_s)
    figures = Figures.of(summary, fleet.ledger, noted.rows)
    return Came(figures=figures, provision=_provision(ground, watch))


class Noted:
    """A rival whose every change of the replicas is noted."""

    def __init__(self, rival: Rival) -> None:
        self.interval_s = rival.interval_s
        self.rows: list[TickRow] = []
        self._rival = rival

    def desired(self, now: float, view: View) -> int:
        """Return what the rival orders."""
        wanted = self._rival.desired(now, view)
        if wanted != view.ordered:
            self.rows.append(_moved(now, view, wanted))
        return wanted


def _moved(now: float, view: View, wanted: int) -> TickRow:
    return TickRow(
        at=now,
        ordered=view.ordered,
        ready=view.ready,
        demand=None,
        forecast=None,
        score=None,
        memory=None,
        backlog=None,
        latency=None,
        waiting=None,
        kv_usage=None,
        acted_to=wanted,
        outcome="applied",
        reason="",
        why="",
        steps=(),
    )


def _shown(settings: Settings) -> dict[str, object]:
    """Return a rival's values for the results; what the ground says is told there."""
    every: Any = settings
    left_out = ("bounds", "profile", "behavior")
    return {one.name: _plain(getattr(settings, one.name)) for one in fields(every) if one.name not in left_out}


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


# -- in hindsight ----------------------------------------------------------------------------------------------------


def _static(ground: Ground, replicas: int) -> Came:
    rival = StaticSettings(replicas=replicas, bounds=ground.bounds).build()
    return rival_run(ground, rival, replicas=replicas)


def _static_peak(ground: Ground) -> Played:
    ran: _Remembered[int] = _Remembered(lambda replicas: _static(ground, replicas))
    replicas = peak_size(lambda size: (ran(size).figures.attainment or 0.0) >= GOAL, ground.bounds)
    return Played(came=ran(replicas), settings={"replicas": replicas, "goal": GOAL})


def _static_mean(ground: Ground) -> Played:
    sample = ground.sample
    prefill, decode = request_work(ground.profile, sample.prompt.astype(np.float64), sample.output.astype(np.float64))
    replicas = mean_size(float(prefill.sum() + decode.sum()), ground.duration_s, ground.bounds)
    return Played(came=_static(ground, replicas), settings={"replicas": replicas})


def _oracle(ground: Ground) -> Played:
    one, answer_s = ground.profile, float(ground.sample.output.mean()) * ground.token_s
    setting = fleet_setting(ground, ground.replicas)
    late = math.exp(LATE_START * setting.fleet.cold_start_sigma)
    lead_s = PENDING_S + late * one.cold_start_s + setting.fleet.probe_s + ROUTING_S

    def carried_out(plan: tuple[int, ...]) -> Came:
        return rival_run(ground, Planned(plan, lead_s=lead_s))

    ran: _Remembered[tuple[int, ...]] = _Remembered(carried_out)
    found = achievable(
        np.array(ground.busy),
        lambda plan: ran(plan).figures.attainment or 0.0,
        goal=GOAL,
        start_s=lead_s + answer_s,
        bounds=ground.bounds,
        initial=ground.replicas,
    )
    settings: dict[str, object] = {"goal": GOAL, "lead_s": round(lead_s, 1), "start_s": round(lead_s + answer_s, 1)}
    if found is None:
        return Played(came=None, settings=settings)
    return Played(came=ran(found.plan), settings={**settings, "theta": found.theta})


class _Remembered(Generic[Key]):
    """Runs each size or plan once."""

    def __init__(self, simulate: Callable[[Key], Came]) -> None:
        self._simulate = simulate
        self._known: dict[Key, Came] = {}

    def __call__(self, key: Key) -> Came:
        if key not in self._known:
            self._known[key] = self._simulate(key)
        return self._known[key]
