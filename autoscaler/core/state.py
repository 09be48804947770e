"""What is remembered between ticks: `absorb` takes a snapshot in, `advance` takes a decision's outcome in."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import itemgetter, sub
from statistics import median
from typing import NamedTuple

import numpy as np

from autoscaler.core.facts import ASLEEP, STALE_IDLE_POLLS, Facts, Join, Rows, gather, is_serving, join, load_rows
from autoscaler.core.forecast import Point
from autoscaler.core.model import StepModel, learn, new_model
from autoscaler.core.owners import Owners, unknown_step, watch_owners, wrote
from autoscaler.core.policy import BatchingMode, Forecaster, Policy, StepTime
from autoscaler.core.score import DeviceKey, Evidence, memory_guard, row_before
from autoscaler.core.signals import COLUMN, FIRST_COUNTER
from autoscaler.core.tuning import Tuning, remember, watch
from autoscaler.core.types import (
    FIELD_MANAGER,
    Decision,
    Engines,
    Floats,
    Outcome,
    Pod,
    Reason,
    Regime,
    ScaleReplicas,
    Snapshot,
    Standing,
)
from autoscaler.core.window import (
    CAPACITY,
    RUNNING,
    SUMS,
    USAGE,
    WAITING,
    EngineMemory,
    FleetRow,
    Increase,
    Overview,
    look_over,
    next_row,
    remember_engines,
    row_at,
)

STARTS_KEPT = 30
SPIKE_FACTOR, SPIKE_WINDOWS, SPIKE_HISTORY = 2.0, 3, 10
MINUTES_KEPT = 60
FORECAST_EVERY_S = 60.0
MIN_REALISED = 0.3
LONGEST_HOLE_S = 60.0
"""A stabilization window with a longer hole in it is not full: it starts afresh."""
LOAD = [RUNNING, USAGE, CAPACITY]
WORK = [COLUMN[name] - FIRST_COUNTER for name in ("prompt_tokens", "generation_tokens")]
RESERVED = COLUMN["gpu_memory_utilization"]
REQUESTS = [COLUMN[name] - FIRST_COUNTER for name in ("generation_tokens", "requests_finished")]
_traffic: Callable[[Sequence[float]], tuple[float, ...]] = itemgetter(
    *(SUMS[name] for name in ("requests_finished", "generation_tokens", "first_tokens"))
)
FRESH_REASONS = frozenset({Reason.SCALED_TO_ZERO, Reason.OTHER_OWNER, Reason.PAUSED})
"""After these, windows and cooldowns start afresh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodMemory:
    """What was seen of one pod: whether it was ever ready, and its restarts."""

    ready: bool
    restarts: int


class Recommended(NamedTuple):
    """Replicas to grow to and to keep, recommended on every tick from `since` to `until`."""

    since: float
    until: float
    up: int
    keep: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cards:
    """What was seen of the devices' memory.

    Args:
        seen: what the rest was made of.
        plateaus: for each device the lowest use [bytes] while its pod served.
        guard: the out-of-memory guard HR; None without a device whose memory is known.
    """

    seen: tuple[object, ...] = ()
    plateaus: Mapping[DeviceKey, float] = field(default_factory=dict)
    guard: float | None = None


class Arrivals(NamedTuple):
    """First tokens since the daemon's start: (at, tokens) once a minute, and what `is_spike` says of them."""

    minutes: tuple[Point, ...] = ()
    spiking: bool = False


class Hindsight(NamedTuple):
    """What became of earlier forecasts of demand.

    Args:
        regimes: of the demand terms, in `Demand`'s order. changed_at: when one last changed.
        open: (due at, demand expected then), one a minute. told_at: when the last was made.
        errors: relative errors of those that fell due, realised / expected - 1. ranked: the same, ascending.
    """

    regimes: tuple[Regime, ...] = (Regime(), Regime(), Regime())
    changed_at: float | None = None
    open: tuple[Point, ...] = ()
    told_at: float | None = None
    errors: tuple[float, ...] = ()
    ranked: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """All memory of one target.

    Args:
        rows, times: the fleet's rows, oldest first, and their times.
        starts: the last seconds from created to ready.
        last_restart_at: when a container restart was last noticed.
        first_token_at: when a first token was last seen.
        scores: (at, score) for the score forecaster.
        recommendations: what ticks in a row recommended, for the stabilization windows, oldest first.
        last_up_at, last_down_at: of the last step of this process, or of another of ours that it knows of.
        changes: (at, change) of our own actions.
        saturated_s: for how long in all the backlog was critical and growing.
        doubled_polls: polls in a row with a whole multiple of the pods that the replicas explain.
        owners: who else wrote the replicas.
        blind: ticks in a row without a score although pods were ready.
        standing: the proposal that waits for a person's approval.
        tuning: of the batching limits.
    """

    memory: EngineMemory | None = None
    joined: Join | None = None
    rows: tuple[FleetRow, ...] = ()
    times: tuple[float, ...] = ()
    facts: Facts | None = None
    model: StepModel | None = None
    pods: Mapping[str, PodMemory] = field(default_factory=dict)
    starts: tuple[float, ...] = ()
    last_restart_at: float | None = None
    cards: Cards = field(default_factory=Cards)
    arrivals: Arrivals = field(default_factory=Arrivals)
    first_token_at: float | None = None
    scores: tuple[Point, ...] = ()
    hindsight: Hindsight = field(default_factory=Hindsight)
    recommendations: tuple[Recommended, ...] = ()
    last_up_at: float | None = None
    last_down_at: float | None = None
    changes: tuple[tuple[float, int], ...] = ()
    saturated_s: float = 0.0
    no_score_since: float | None = None
    doubled_polls: int = 0
    owners: Owners = field(default_factory=Owners)
    blind: int = 0
    standing: Standing | None = None
    tuning: Tuning = field(default_factory=Tuning)

    @property
    def last_action_at(self) -> float | None:
        """When we last changed replicas."""
        actions = [at for at in (self.last_up_at, self.last_down_at) if at is not None]
        return max(actions) if actions else None


# --- absorb ---------------------------------------------------------------------------------------------------------


def absorb(policy: Policy, state: State, snapshot: Snapshot) -> State:
    """Return the state with one snapshot taken in. Pure; snapshots must come in the order of time."""
    at, target, engines = snapshot.at, snapshot.target, snapshot.engines
    joined = state.joined
    same_pods = joined is not None and joined.pods is target.pods
    if joined is None or not same_pods or joined.keys is not engines.keys:
        seen_ready = {uid for uid, pod in state.pods.items() if pod.ready}
        joined = join(target.pods, engines.keys, policy.pending, seen_ready)
    overview = look_over(engines.values)
    memory, current, increase = remember_engines(
        state.memory, engines, overview, _wanted_histograms(policy), at, policy.score.window_s, target.pods
    )
    said = load_rows(policy, engines, overview, joined, at)
    waiting = overview.total[WAITING]
    if memory is not current or not joined.all_serve or math.isnan(waiting):
        waiting = waiting_of(memory, joined)
    added, known = _added(engines, overview, joined, said, increase, waiting)
    row = next_row(state.rows[-1] if state.rows else None, at, added, increase)
    rows, times = _trimmed(policy, (*state.rows, row), (*state.times, at))
    flat = known and _is_flat(policy, rows, times)
    facts = gather(policy, snapshot, overview, joined, said, current, flat)
    model = state.model or new_model(policy.demand.prior, at)
    if policy.demand.learn:
        model = learn(model, policy.demand.prior, engines, increase, at)
    pods, starts, restarted = state.pods, state.starts, False
    if not same_pods:
        pods, starts, restarted = _watch_pods(state, target.pods)
    owners = watch_owners(policy.owners, state.owners, target, at)
    # Where nobody is named as the writer, nothing is claimed.
    change = unknown_step(state.owners, owners) if target.scaled_by == FIELD_MANAGER else 0
    tuning = state.tuning
    if policy.batching.mode is not BatchingMode.OFF:
        tuning = watch(tuning, snapshot, facts, joined.serving_uids)
    first_tokens = row.sums[SUMS["first_tokens"]]
    moved = bool(state.rows) and first_tokens > state.rows[-1].sums[SUMS["first_tokens"]]
    return State(
        memory=memory,
        joined=joined,
        rows=rows,
        times=times,
        facts=facts,
        model=model,
        pods=pods,
        starts=starts,
        last_restart_at=at if restarted else state.last_restart_at,
        cards=_watch_cards(state.cards, snapshot, joined, said, reserved_share(engines, overview)),
        arrivals=_count_arrivals(state.arrivals, at, first_tokens),
        first_token_at=at if moved else state.first_token_at,
        scores=state.scores,
        hindsight=state.hindsight,
        recommendations=state.recommendations if _goes_on(policy, state.recommendations, at) else (),
        last_up_at=at if change > 0 else state.last_up_at,
        last_down_at=at if change < 0 else state.last_down_at,
        changes=state.changes,
        saturated_s=state.saturated_s,
        no_score_since=state.no_score_since,
        doubled_polls=_doubled_polls(policy, state.doubled_polls, snapshot, joined),
        owners=owners,
        blind=state.blind,
        standing=state.standing,
        tuning=tuning,
    )


def _wanted_histograms(policy: Policy) -> list[str]:
    """Return the names of the histograms that this policy is judged by, or that the fleet's sums are made of."""
    wanted = ["ttft", "itl"]
    if policy.score.backlog.wait_s is not None:
        wanted.append("queue_time")
    within = policy.slo.within
    if policy.slo.e2e is not None or (within is not None and within.metric == "e2e"):
        wanted.append("e2e")
    return wanted


def reserved_share(engines: Engines, overview: Overview) -> float | None:
    """Return the smallest share of a card that an engine reserves at start; None when none says."""
    lowest = overview.least[RESERVED]
    if math.isnan(lowest):
        lowest = float(np.fmin.reduce(engines.values[:, RESERVED], initial=np.inf))
    return lowest if lowest < math.inf else None


def _goes_on(policy: Policy, entries: tuple[Recommended, ...], at: float) -> bool:
    """Tell whether this tick follows the last one closely enough for a window that spans both to be full."""
    return bool(entries) and at - entries[-1].until <= longest_hole_s(policy)


def longest_hole_s(policy: Policy) -> float:
    """Return how long nothing may be recommended before a stabilization window is not full any more [s]."""
    return max(LONGEST_HOLE_S, 4.0 * policy.interval_s)


def _added(
    engines: Engines, overview: Overview, joined: Join, said: Rows, increase: Increase, waiting: float
) -> tuple[list[float], bool]:
    """Return what this tick adds to the fleet's row, by `SUMS`, and whether every serving engine's request counters are
    known.

    An engine covers a tick when all that demand is made of is known of it: the work is never taken for none.
    """
    counters, elapsed = increase.counters, increase.elapsed
    sums, running, resident = np.add.reduce(counters, axis=0).tolist(), overview.total[RUNNING], overview.resident
    covered, known = said.pods, True
    if not (said.whole and joined.all_serve) or math.isnan(sum(sums, running + resident)):
        missing, load, complete = np.isnan(counters), engines.values[:, LOAD], said.fresh & joined.serving
        sums = np.where(missing, 0.0, counters).sum(axis=0).tolist()
        known = bool(said.fresh.any()) and not missing[complete][:, REQUESTS].any()
        complete = complete & ~np.isnan(load).any(axis=1) & ~missing[:, WORK].any(axis=1)
        load, elapsed, covered = load[complete], elapsed[complete], joined.count_pods(complete)
        running, resident = float(load[:, 0].sum()), float((load[:, 1] * load[:, 2]).sum())
    return [
        *sums,
        _count(increase, "ttft"),
        _count(increase, "itl"),
        running,
        resident,
        1.0,
        float(covered),
        float(joined.ready),
        float(np.add.reduce(elapsed)) / joined.engines_per_pod,
        waiting,
    ], known


def _count(increase: Increase, name: str) -> float:
    """Return how many observations a histogram gained; 0 when it was not read."""
    histogram = increase.histograms.get(name)
    return float(histogram.counts[-1]) if histogram is not None else 0.0


def waiting_of(memory: EngineMemory, joined: Join) -> float:
    """Return the waiting requests of the serving pods, an engine without a reading at its last known: the queue of a
    fleet that was not read neither vanishes nor grows back.
    """
    waiting = memory.values[:, WAITING]
    if memory.keys is joined.keys or memory.keys == joined.keys:
        return _sum(waiting[joined.serving])
    serving = {pod.uid for pod in joined.pods if is_serving(pod)}
    return _sum(waiting[[key.pod_uid in serving for key in memory.keys]])


def _sum(values: Floats) -> float:
    total = float(np.add.reduce(values))
    return float(np.nansum(values)) if math.isnan(total) else total


def _trimmed(
    policy: Policy, rows: tuple[FleetRow, ...], times: tuple[float, ...]
) -> tuple[tuple[FleetRow, ...], tuple[float, ...]]:
    """Return the rows that a window can still ask for."""
    longest = max(policy.prediction.window_s + policy.prediction.bin_s, policy.score.latency.max_window_s)
    first = max(0, row_at(times, times[-1] - longest - 2.0 * policy.interval_s))
    return (rows, times) if first == 0 else (rows[first:], times[first:])


def _is_flat(policy: Policy, rows: tuple[FleetRow, ...], times: tuple[float, ...]) -> bool:
    """Tell whether no request arrived or ended in the last polls."""
    if len(rows) <= STALE_IDLE_POLLS:
        return False
    return _traffic(rows[-1].sums) == _traffic(rows[-1 - STALE_IDLE_POLLS].sums)


def _watch_pods(state: State, pods: tuple[Pod, ...]) -> tuple[dict[str, PodMemory], tuple[float, ...], bool]:
    """Return what is now known of the pods, the start times learned, and whether any container restarted."""
    known: dict[str, PodMemory] = {}
    starts, restarted = list(state.starts), False
    for pod in pods:
        before = state.pods.get(pod.uid)
        was_ready = before.ready if before is not None else bool(pod.was_ready and not state.times)
        if before is not None and pod.restarts > before.restarts:
            restarted = True
        born_here = before is not None or (bool(state.times) and pod.created_at > state.times[0])
        if pod.ready and not was_ready and born_here and pod.restarts == 0 and pod.ready_at is not None:
            starts.append(max(0.0, pod.ready_at - pod.created_at))
        known[pod.uid] = PodMemory(ready=was_ready or pod.ready, restarts=pod.restarts)
    return known, tuple(starts[-STARTS_KEPT:]), restarted


def _watch_cards(cards: Cards, snapshot: Snapshot, joined: Join, said: Rows, reserved: float | None) -> Cards:
    """Return what is now known of the devices' memory.

    Args:
        reserved: see `reserved_share`.
    """
    gpus, seen = snapshot.gpus, (snapshot.gpus, joined, reserved)
    if said.whole and len(cards.seen) == 3 and cards.seen[0] is gpus and cards.seen[1:] == seen[1:]:
        return cards
    plateaus = _plateaus(cards.plateaus, snapshot, joined, said) if gpus else cards.plateaus
    # What a sleep leaves of the plateaus is not what the same readings make of them awake.
    return Cards(seen=seen if said.whole else (), plateaus=plateaus, guard=memory_guard(gpus, plateaus, reserved))


def _plateaus(
    plateaus: Mapping[DeviceKey, float], snapshot: Snapshot, joined: Join, said: Rows
) -> dict[DeviceKey, float]:
    """Return for each device the lowest use seen while its pod serves; one that is not read now keeps its own.

    Before a pod is ready its engine has not yet taken its memory, and a sleeping engine has given it back.
    """
    uids = {*joined.serving_uids, ""}
    if not said.whole:
        asleep = np.flatnonzero(snapshot.engines.values[:, ASLEEP] > 0.0)
        uids -= {snapshot.engines.keys[row].pod_uid for row in asleep.tolist()}
    lowest = {key: used for key, used in plateaus.items() if key[2] in uids}
    for gpu in snapshot.gpus:
        used = gpu.memory_used
        if used is not None and gpu.pod_uid in uids:
            key = (gpu.uuid, gpu.instance, gpu.pod_uid)
            if used < lowest.get(key, math.inf):
                lowest[key] = used
    return lowest


def _count_arrivals(arrivals: Arrivals, at: float, first_tokens: float) -> Arrivals:
    minutes = arrivals.minutes
    if minutes and at - minutes[-1][0] < 60.0:
        return arrivals
    minutes = (*minutes, (at, first_tokens))[-MINUTES_KEPT - 1 :]
    return Arrivals(minutes=minutes, spiking=is_spike(minutes))


def _doubled_polls(policy: Policy, polls: int, snapshot: Snapshot, joined: Join) -> int:
    """Return how many polls in a row showed a whole multiple of the pods that the replicas explain."""
    target, live = snapshot.target, joined.ready
    ordered = target.current_replicas * policy.target.pods_per_replica
    doubled = ordered > 0 and live >= 2 * ordered and live % ordered == 0 and not target.rollout
    return polls + 1 if doubled else 0


def step_line(policy: Policy, state: State) -> StepTime:
    """Return the step-time line as far as it is learned, the policy's prior before."""
    return state.model.line if state.model is not None else policy.demand.prior


def evidence_of(policy: Policy, state: State, snapshot: Snapshot) -> Evidence:
    """Return what the score reads of the state. The snapshot must have been absorbed."""
    if state.facts is None or state.joined is None or not state.times or state.times[-1] != snapshot.at:
        raise ValueError("the snapshot has not been absorbed into the state")
    grace = policy.pending.grace_s
    ordered = sum(change for at, change in state.changes if change > 0 and snapshot.at - at <= grace)
    recent = row_before(state.rows, state.times, policy.score.window_s)
    return Evidence(
        facts=state.facts,
        rows=state.rows,
        times=state.times,
        recent=recent,
        increase=None if recent is None else list(map(sub, state.rows[-1].sums, recent.sums)),
        plateaus=state.cards.plateaus,
        guard=state.cards.guard,
        first_token_age_s=None if state.first_token_at is None else snapshot.at - state.first_token_at,
        pending_pods=max(0, len(state.joined.starting) - ordered),
    )


# --- advance --------------------------------------------------------------------------------------------------------


def advance(policy: Policy, state: State, decision: Decision, outcome: Outcome) -> State:
    """Return the state with a decision and its outcome taken in. Only what was done starts a cooldown."""
    at, proposal = decision.at, decision.proposal
    if decision.batching is not None:
        state = replace(state, tuning=remember(policy.batching, state.tuning, decision, outcome))
    if decision.reason in FRESH_REASONS:
        owners = state.owners if state.owners.change is None else replace(state.owners, change=None)
        fresh = replace(state, recommendations=(), scores=(), changes=(), last_up_at=None, last_down_at=None)
        return replace(fresh, owners=owners, blind=0, standing=None)
    value = decision.score.value if decision.score is not None else None
    state = replace(
        state,
        scores=_scores(policy, state.scores, at, value),
        hindsight=_look_back(policy, state.hindsight, decision),
        recommendations=_recommendations(policy, state, decision),
        saturated_s=_saturated(policy, state, decision),
        no_score_since=None if value is not None else (at if state.no_score_since is None else state.no_score_since),
        blind=blind_ticks(state, value),
        standing=proposal.standing,
    )
    if not isinstance(decision.action, ScaleReplicas) or outcome not in (Outcome.APPLIED, Outcome.SIMULATED):
        return state
    if outcome is Outcome.APPLIED:
        state = replace(state, owners=wrote(state.owners, decision.action.to, at))
    change = decision.action.to - decision.action.seen
    longest = _longest_period(policy)
    return replace(
        state,
        changes=(*(entry for entry in state.changes if at - entry[0] <= longest), (at, change)),
        last_up_at=at if change > 0 else state.last_up_at,
        last_down_at=at if change < 0 else state.last_down_at,
        saturated_s=0.0 if proposal.reason is Reason.UP_SATURATION else state.saturated_s,
        standing=None,
    )


def blind_ticks(state: State, score: float | None) -> int:
    """Return for how many ticks in a row, this one included, there has been no score although pods are ready.

    While none is, nobody can be read: they load or have failed, and the fallback's pods would do the same.
    """
    ready = state.facts is not None and state.facts.expected > 0
    return state.blind + 1 if score is None and ready else 0


def _longest_period(policy: Policy) -> float:
    budgets = (*policy.scale_up.budgets, *policy.scale_down.budgets)
    return max((budget.period_s for budget in budgets), default=0.0) + policy.pending.grace_s


def _scores(policy: Policy, scores: tuple[Point, ...], at: float, value: float | None) -> tuple[Point, ...]:
    if policy.prediction.score is Forecaster.NONE:
        return ()
    longest = policy.prediction.score_window_s
    first = next((index for index, point in enumerate(scores) if at - point[0] <= longest), len(scores))
    return scores[first:] if value is None else (*scores[first:], (at, value))


def down_window_s(policy: Policy, horizon_s: float) -> float:
    """Return the downward stabilization window [s]."""
    return max(policy.scale_down.stabilization_s, policy.scale_down.horizon_factor * horizon_s)


def _recommendations(policy: Policy, state: State, decision: Decision) -> tuple[Recommended, ...]:
    """Return the recommendations that a window can still ask for.

    A tick that recommends nothing (the target is not ours to change) ends every window.
    """
    recommended, at, entries = decision.proposal.recommended, decision.at, state.recommendations
    if recommended is None:
        return ()
    if entries and entries[-1][2:] == recommended:
        return (*entries[:-1], Recommended(entries[-1].since, at, *recommended))
    longest = max(policy.scale_up.stabilization_s, down_window_s(policy, policy.prediction.max_horizon_s))
    # What ended before the longest window is dropped, all but one: it shows that the window is full.
    first = next((index for index, entry in enumerate(entries) if at - entry.until <= longest), len(entries))
    return (*entries[max(0, first - 1) :], Recommended(at, at, *recommended))


def _look_back(policy: Policy, hindsight: Hindsight, decision: Decision) -> Hindsight:
    """Return the hindsight with the forecasts that fell due judged, and once a minute with the new one."""
    at, new = decision.at, decision.forecast
    told = new.top is not None and (hindsight.told_at is None or at - hindsight.told_at >= FORECAST_EVERY_S)
    errors = _judged(policy, hindsight, decision)
    still = tuple(point for point in hindsight.open if point[0] > at)
    return Hindsight(
        regimes=new.regimes,
        changed_at=at if new.changed else hindsight.changed_at,
        open=(*still, (at + new.horizon_s, new.top)) if told and new.top is not None else still,
        told_at=at if told else hindsight.told_at,
        errors=errors,
        ranked=hindsight.ranked if errors is hindsight.errors else tuple(sorted(errors)),
    )


def _judged(policy: Policy, hindsight: Hindsight, decision: Decision) -> tuple[float, ...]:
    """Return the relative errors, with the forecasts that fell due judged by the newest minute's demand."""
    due = [top for due_at, top in hindsight.open if due_at <= decision.at and top > MIN_REALISED]
    realised = decision.demand.value if due else None
    if realised is None:
        return hindsight.errors
    return (*hindsight.errors, *(realised / top - 1.0 for top in due))[-policy.prediction.error_samples :]


def growing_s(policy: Policy, state: State, decision_backlog: float | None) -> float:
    """Return for how long in all the backlog has been critical and growing, this tick included [s]."""
    if decision_backlog is None or len(state.rows) < 2:
        return state.saturated_s
    if decision_backlog < 0.5:
        return 0.0
    grew = state.rows[-1].sums[SUMS["waiting"]] > state.rows[-2].sums[SUMS["waiting"]]
    step = min(state.times[-1] - state.times[-2], 2.0 * policy.interval_s)
    return state.saturated_s + (step if grew and decision_backlog >= policy.emergency.backlog else 0.0)


def _saturated(policy: Policy, state: State, decision: Decision) -> float:
    backlog = decision.score.part("backlog").value if decision.score is not None else None
    return growing_s(policy, state, backlog)


def is_spike(minutes: Sequence[tuple[float, float]]) -> bool:
    """Tell whether the last three minutes each saw more than twice the hour's median of first tokens.

    Args:
        minutes: (at, first tokens so far) once a minute.
    """
    counts = [after - before for (_, before), (_, after) in pairwise(minutes)]
    if len(counts) < SPIKE_HISTORY:
        return False
    usual = median(counts)
    return usual > 0.0 and all(count > SPIKE_FACTOR * usual for count in counts[-SPIKE_WINDOWS:])


NO_ENGINES = Engines(keys=(), values=np.empty((0, len(COLUMN))), histograms={})
"""What a snapshot holds when no page could be read."""
