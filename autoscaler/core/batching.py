"""The second actuator: what holds the engines back, which batching limit to move, and whether to keep what was tried.

A limit moves in a second, a replica in minutes. So a limit first where it helps within the objectives, and a replica
where it does not; and no limit that only moves the queue from the KV cache to the waiting requests.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import sub
from typing import NamedTuple

from autoscaler.core.facts import is_serving
from autoscaler.core.guards import MEMORY_BRAKE, Tick
from autoscaler.core.histogram import quantile
from autoscaler.core.model import MIN_ROWS
from autoscaler.core.policy import BatchingMode, BatchingPolicy, LimitBounds, MemorySource, Policy, Slo, Slos
from autoscaler.core.tuning import (
    KNOBS,
    LEFT_ALONE_AFTER,
    RETELL_S,
    Reverted,
    Trial,
    Tuning,
    clipped,
    moved_value,
    obeys,
)
from autoscaler.core.types import (
    Batching,
    BatchReason,
    Bound,
    Limits,
    Measured,
    Pod,
    PodBatching,
    PodLimits,
    Proposal,
    Reason,
)
from autoscaler.core.window import SUMS, FleetRow, observations, row_at

KV_FULL, KV_SLACK = 0.90, 0.85
KV_BLOCKED = 0.95
"""Above `KV_FULL` no limit is raised, below `KV_SLACK` one may be; above `KV_BLOCKED` requests wait for blocks."""
WASTEFUL = 0.20
"""Preemptions per finished request from which they are worth a lower limit: one of five is computed twice."""
MIN_FINISHED = 20.0
DEAR = 0.20
"""Share of the engines' time that goes into computing preempted requests anew, below which a queue costs more."""
QUEUED = 0.5
"""Waiting requests of an engine, on average, from which on there is a queue."""
SATURATED = 1.0
"""The same from which on what is served says what can be served, and not what was asked for."""
ROOM = 0.90
"""Share of the KV cache that sequences at their full length may fill."""
MOST_DOWN, LEAST_DOWN = 0.5, 0.9
"""Of the sequences that run, what one move down leaves."""
UP_LEAST, UP, UP_FAST = 1.10, 1.25, 2.0
ITL_AIM = 0.9
"""Share of the ITL objective that a step is to take."""
ITL_SLACK = 0.5
"""Share of the ITL objective below which steps may grow."""
GENTLEST, SHARPEST = 0.75, 8
"""One move leaves at most this share of the budget, and no less than that divided by this."""
BUDGET_GRID = 16
LATE = 0.1
"""What a token is worth while an objective is missed altogether."""
MIN_SHARE_OF_WINDOW = 0.5
LIFETIME_WINDOW_S = 120.0

LOWERING = frozenset({BatchReason.LOWER_PREEMPTIONS, BatchReason.LOWER_BUDGET})
RAISING = frozenset({BatchReason.RAISE_SEQUENCES, BatchReason.RAISE_BUDGET})


# --- what was measured ----------------------------------------------------------------------------------------------


def measure(tick: Tick, since: float, shortest_s: float) -> Measured | None:
    """Return how the engines fared since then; None where that is too short, or too few engines were read."""
    rows, times, joined = tick.state.rows, tick.state.times, tick.state.joined
    position = max(row_at(times, since), 0)
    old, new = rows[position], rows[-1]
    seconds = new.at - old.at
    grew = dict(zip(SUMS, map(sub, new.sums, old.sums), strict=True))
    covered, ticks = grew["covered"], grew["ticks"]
    if seconds < max(shortest_s, 1e-9) or joined is None or covered <= 0.0:
        return None
    if covered < tick.policy.demand.min_coverage * grew["expected"]:
        return None
    per_pod = joined.engines_per_pod
    engines = covered / ticks * per_pod
    finished, running = grew["requests_finished"], grew["running"] / ticks
    tokens = tick.facts.kv_tokens
    gaps = grew["itl_count"]
    per_replica = tick.policy.target.pods_per_replica
    preemptions = max(grew["num_preemptions"], surely_preempted(rows[position:]))
    context = grew["kv_tokens"] / grew["running"] if grew["running"] > 0.0 else None
    return Measured(
        seconds=seconds,
        running=running / engines,
        waiting=sum(row.sums[SUMS["waiting"]] for row in rows[position + 1 :]) / ticks / engines,
        peak=max(_running(rows, index) for index in range(position + 1, len(rows))) / engines,
        preemptions=preemptions,
        recomputing=_recomputing(tick, preemptions / seconds / engines, context),
        finished=finished,
        tokens_per_s=grew["generation_tokens"] / seconds,
        kv_usage=grew["kv_tokens"] / covered / (tokens / per_replica) if tokens else None,
        sequence_tokens=sequence_tokens(tick, min(since, new.at - LIFETIME_WINDOW_S)),
        itl_s=_latency(old, new, "itl", tick.policy.slo.itl, tick.policy),
        itl_mean_s=grew["itl_sum"] / gaps if gaps > 0.0 else None,
        ttft_s=_latency(old, new, "ttft", tick.policy.slo.ttft, tick.policy),
    )


def _recomputing(tick: Tick, preempted: float, context: float | None) -> float | None:
    """Return the share of an engine's time that goes into computing preempted requests anew; None where step times are
    not learned yet, or the context is not known.

    Worked: one of 98 sequences with 3500 tokens each, preempted every five seconds at 55 us a token, takes 4 %; on two
    CPU cores, 4.5 a second of 800 tokens at 310 us: all of it.

    Args:
        preempted: requests of one engine a second. context: tokens of one that runs.
    """
    model = tick.state.model
    if context is None or model is None or model.rows < MIN_ROWS:
        return None
    return preempted * context * model.line.cp


def lifetime_s(tick: Tick) -> float | None:
    """Return for how long a request ran on average in the last minutes, by Little's law; None where none has ended."""
    rows, times = tick.state.rows, tick.state.times
    old, new = rows[max(row_at(times, tick.snapshot.at - LIFETIME_WINDOW_S), 0)], rows[-1]
    running, finished, ticks = (
        new.sums[SUMS[name]] - old.sums[SUMS[name]] for name in ("running", "requests_finished", "ticks")
    )
    return running / ticks * (new.at - old.at) / finished if finished > 0.0 and ticks > 0.0 else None


def sequence_tokens(tick: Tick, since: float) -> float | None:
    """Return the tokens of a request, prompt and answer, on average since then; None where none has ended.

    What is computed and what has ended are of the same requests only over some lifetimes: in the first of a storm
    tokens come, and few requests end.
    """
    rows, times = tick.state.rows, tick.state.times
    old, new = rows[max(row_at(times, since), 0)], rows[-1]
    prompts, answers, finished = (
        new.sums[SUMS[name]] - old.sums[SUMS[name]]
        for name in ("prompt_tokens", "generation_tokens", "requests_finished")
    )
    return (prompts + answers) / finished if finished > 0.0 else None


def _running(rows: Sequence[FleetRow], index: int) -> float:
    """Return the requests that ran at one tick: rows hold sums over ticks."""
    column = SUMS["running"]
    return rows[index].sums[column] - (rows[index - 1].sums[column] if index else 0.0)


def surely_preempted(rows: Sequence[FleetRow]) -> float:
    """Return how many requests must have been preempted: fewer run by more than have finished.

    vLLM counts a preemption when the request produces its next token, in a storm half a minute later. Only ticks that
    cover as many pods as the last one are compared with it.
    """
    ended, pods = SUMS["requests_finished"], SUMS["covered"]
    last = len(rows) - 1
    now = _running(rows, last)

    def covered(index: int) -> float:
        return rows[index].sums[pods] - rows[index - 1].sums[pods]

    lost = [
        _running(rows, index) - now - (rows[last].sums[ended] - rows[index].sums[ended])
        for index in range(1, last)
        if covered(index) == covered(last)
    ]
    return max([0.0, *lost])


def _latency(old: FleetRow, new: FleetRow, name: str, slo: Slo | None, policy: Policy) -> float | None:
    """Return a latency at its objective's quantile [s]; None without an objective, or enough observations."""
    observed = observations(old, new, name) if slo is not None else None
    if slo is None or observed is None or observed.counts[-1] < policy.score.latency.min_observations:
        return None
    seconds = quantile(observed.bounds, observed.counts, slo.quantile).value
    return None if math.isnan(seconds) else seconds


def wasted(measured: Measured) -> float:
    """Return the preemptions per finished request; small samples stay quiet."""
    return measured.preemptions / max(measured.finished, MIN_FINISHED)


def classify(policy: Policy, limits: Limits, ceiling: Limits, measured: Measured | None) -> Bound:
    """Return what holds the engines back."""
    cap, budget = limits.max_num_seqs, limits.max_num_batched_tokens
    if measured is None or cap is None:
        return Bound.UNKNOWN
    kv, queued = measured.kv_usage, measured.waiting >= QUEUED
    if kv is not None and ((kv >= KV_SLACK and wasted(measured) >= WASTEFUL) or (kv >= KV_BLOCKED and queued)):
        return Bound.KV
    if _is_held_up_by_prompts(policy, measured):
        return Bound.PREFILL
    if queued and measured.running >= cap - max(1.0, 0.05 * cap):
        return Bound.SEQUENCES
    if budget is not None and budget < (ceiling.max_num_batched_tokens or 0) and _waits_for_prompts(policy, measured):
        return Bound.BUDGET
    idle = not queued and measured.running < cap / 2.0 and (kv is None or kv < KV_SLACK)
    return Bound.UNDERLOADED if idle else Bound.HEALTHY


def _is_held_up_by_prompts(policy: Policy, measured: Measured) -> bool:
    """Tell whether the tail of ITL misses its objective, and its mean does not: single long steps hold it up."""
    slo = policy.slo.itl
    if slo is None or measured.itl_s is None or measured.itl_mean_s is None:
        return False
    return measured.itl_s > slo.seconds >= measured.itl_mean_s


def _waits_for_prompts(policy: Policy, measured: Measured) -> bool:
    """Tell whether first tokens come too late while steps are short."""
    ttft, itl = policy.slo.ttft, policy.slo.itl
    if ttft is None or measured.ttft_s is None or measured.ttft_s <= ttft.seconds:
        return False
    return itl is None or (measured.itl_s is not None and measured.itl_s <= ITL_SLACK * itl.seconds)


# --- whether to keep what was tried ---------------------------------------------------------------------------------


def goodput(tokens_per_s: float, met: float) -> float:
    """Return the tokens a second, at a discount as far as the worst objective is missed."""
    return tokens_per_s * (LATE + (1.0 - LATE) * met)


def worst_met(slo: Slos, before: Measured, after: Measured, *, saturated: bool) -> tuple[float, float]:
    """Return how far the worst objective was met before and after: 1 when it was, else the objective over the latency.

    Of those that are known of both; 1 without any. With a queue all the time TTFT tells how long that has become, and
    nothing of the limit: what is served, and how, does.
    """
    pairs = [(slo.itl, before.itl_s, after.itl_s)]
    if not saturated:
        pairs.append((slo.ttft, before.ttft_s, after.ttft_s))
    known = [
        (min(1.0, objective.seconds / max(was, 1e-9)), min(1.0, objective.seconds / max(now, 1e-9)))
        for objective, was, now in pairs
        if objective is not None and was is not None and now is not None
    ]
    return min((was for was, _ in known), default=1.0), min((now for _, now in known), default=1.0)


class Verdict(NamedTuple):
    """Whether to keep what was tried, whether it did harm, and why."""

    kept: bool
    harmed: bool
    words: str


def judge(policy: Policy, trial: Trial, after: Measured) -> Verdict:
    """Return what to make of what was tried.

    Not worse is enough for a limit that was raised. One that was lowered has made requests wait: goodput must have
    grown, or what it was lowered for must be half of what it was.
    """
    before = trial.measured
    saturated = min(before.waiting, after.waiting) >= SATURATED
    # Without a queue the tokens are those that were asked for.
    was_tokens, tokens = (before.tokens_per_s, after.tokens_per_s) if saturated else (1.0, 1.0)
    was_met, met = worst_met(policy.slo, before, after, saturated=saturated)
    was = goodput(was_tokens, was_met)
    gain = goodput(tokens, met) / was - 1.0 if was > 0.0 else 0.0
    words = f"goodput {gain:+.0%}, worst objective met {was_met:.0%} to {met:.0%}"
    words += f", {before.tokens_per_s:.0f} to {after.tokens_per_s:.0f} tokens/s"
    tolerance = policy.batching.tolerance
    if gain < -tolerance:
        return Verdict(kept=False, harmed=True, words=words)
    kept = trial.reason not in LOWERING or gain > tolerance or _eased(trial, after)
    return Verdict(kept=kept, harmed=False, words=words)


def is_unseen(trial: Trial, after: Measured) -> bool:
    """Tell whether what a limit was lowered for could not show: no tokens came, or too few."""
    return trial.reason is BatchReason.LOWER_BUDGET and after.itl_s is None


def _eased(trial: Trial, after: Measured) -> bool:
    """Tell whether what a limit was lowered for is at most half of what it was."""
    before = trial.measured
    if trial.reason is BatchReason.LOWER_PREEMPTIONS:
        return wasted(after) <= wasted(before) / 2.0
    return before.itl_s is not None and after.itl_s is not None and after.itl_s <= before.itl_s / 2.0


def is_blacklisted(reverted: Sequence[Reverted], reason: BatchReason, value: int) -> bool:
    """Tell whether moves that say enough of this one were taken back twice.

    One that goes farther than what did harm does harm, and one that goes less far than what was of no use is of no use.
    """
    lowering = reason in LOWERING
    times = [
        one.times
        for one in reverted
        if one.reason is reason and (one.value >= value if lowering is one.harmed else one.value <= value)
    ]
    return sum(times) >= 2


def unstartable(limits: Limits, *, chunked_prefill: bool | None, max_model_len: int | None) -> str:
    """Return why an engine with these limits would not start; "" when it would.

    A value that cannot be checked counts as wrong.
    """
    seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    if seqs is not None and tokens is not None and tokens < seqs:
        return f"max_num_batched_tokens {tokens} < max_num_seqs {seqs}"
    if tokens is None or chunked_prefill:
        return ""
    if max_model_len is None:
        return "without chunked prefill max_num_batched_tokens must hold max_model_len, which is unknown"
    if tokens < max_model_len:
        return f"max_num_batched_tokens {tokens} < max_model_len {max_model_len}, without chunked prefill"
    return ""


# --- the target's pods ----------------------------------------------------------------------------------------------


class Fleet(NamedTuple):
    """The pods whose limits are moved.

    Args:
        limits: that hold for the target.
        low, ceiling: between which they are moved; None for a limit that is not moved.
        left_alone: the other serving pods' names, and why their limits are not moved.
    """

    pods: tuple[tuple[Pod, PodLimits], ...]
    limits: Limits
    low: Limits
    ceiling: Limits
    left_alone: tuple[tuple[str, str], ...]


def look_at(tick: Tick) -> Fleet:
    """Return the pods whose limits are moved, and the others."""
    said = {one.pod_uid: one for one in tick.snapshot.limits}
    told = {one.uid: one.times for one in tick.state.tuning.told}
    pods, others = [], []
    for pod in tick.snapshot.target.pods:
        if not is_serving(pod):
            continue
        limits = said.get(pod.uid)
        if limits is None:
            others.append((pod.name, "does not say its limits"))
        elif limits.refused:
            others.append((pod.name, limits.refused))
        elif told.get(pod.uid, 0) >= LEFT_ALONE_AFTER and not obeys(limits, tick.state.tuning.wanted or Limits()):
            others.append((pod.name, f"did not take up what it was told {LEFT_ALONE_AFTER + 1} times"))
        else:
            pods.append((pod, limits))
    found = [limits for _, limits in pods]
    settings = tick.policy.batching
    bounds = {"max_num_seqs": settings.sequences, "max_num_batched_tokens": settings.tokens}
    ceiling = {name: _ceiling(name, bounds.get(name), found) for name in KNOBS}
    low = {name: _low(name, bounds.get(name), ceiling[name], found) for name in KNOBS}
    return Fleet(
        pods=tuple(pods),
        limits=_in_force(tick.state.tuning, found, ceiling),
        low=Limits(**low),
        ceiling=Limits(**ceiling),
        left_alone=tuple(others),
    )


def _ceiling(name: str, bounds: LimitBounds | None, pods: Sequence[PodLimits]) -> int | None:
    """Return the largest value that a limit is moved to: the policy's, and the largest that any pod started with."""
    known: list[int] = [value for one in pods if (value := getattr(one.ceiling, name)) is not None]
    if not known:
        return None
    return min(max(known), bounds.max) if bounds is not None and bounds.max is not None else max(known)


def _low(name: str, bounds: LimitBounds | None, ceiling: int | None, pods: Sequence[PodLimits]) -> int | None:
    if ceiling is None or bounds is None:
        return None
    return min(ceiling, max([bounds.min, *(getattr(one.floor, name) or 1 for one in pods)]))


def _in_force(tuning: Tuning, pods: Sequence[PodLimits], ceiling: dict[str, int | None]) -> Limits:
    """Return the limits that hold for the target.

    Those that were set last; else the lowest of a pod below what it started with, as another process of ours may have
    set it; else what the pods started with.
    """
    values: dict[str, int | None] = {}
    for name in KNOBS:
        lowered = [
            has
            for one in pods
            if (has := getattr(one.limits, name)) is not None
            and (high := getattr(one.ceiling, name)) is not None
            and has < high
        ]
        wanted = getattr(tuning.wanted, name) if tuning.wanted is not None else min(lowered, default=None)
        high = ceiling[name]
        if name == "long_prefill_token_threshold":
            # 0 is the start value of most engines and the loosest of all: it is left as it is found.
            values[name] = getattr(tuning.wanted, name) if tuning.wanted is not None else _only(name, pods)
        else:
            values[name] = high if wanted is None or high is None else min(wanted, high)
    return Limits(**values)


def _only(name: str, pods: Sequence[PodLimits]) -> int | None:
    """Return what all pods say; None where they differ."""
    said = {getattr(one.limits, name) for one in pods}
    return said.pop() if len(said) == 1 else None


# --- the choice -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """All that a rule may look at."""

    tick: Tick
    proposal: Proposal
    fleet: Fleet
    measured: Measured | None
    bound: Bound

    @property
    def settings(self) -> BatchingPolicy:
        """The policy's section."""
        return self.tick.policy.batching

    @property
    def tuning(self) -> Tuning:
        """What is remembered."""
        return self.tick.state.tuning

    @property
    def at(self) -> float:
        """Now."""
        return self.tick.snapshot.at

    @property
    def lifetime_s(self) -> float:
        """How long a request runs, at most `max_observe_s`; that where it is unknown."""
        known = lifetime_s(self.tick)
        return self.settings.max_observe_s if known is None else min(known, self.settings.max_observe_s)

    @property
    def observe_s(self) -> float:
        """Over how long a move is judged."""
        return max(self.settings.observe_s, self.lifetime_s)

    @property
    def is_still(self) -> bool:
        """Whether no replica moves, nor has moved for as long as a move is observed."""
        since = self.tuning.still_since
        return since is not None and self.at - since >= self.observe_s

    @property
    def bound_s(self) -> float:
        """For how long the same has held the engines back."""
        return self.at - self.tuning.bound_since if self.tuning.bound is self.bound else 0.0

    @property
    def must_not_grow(self) -> str:
        """Why nothing may be raised; "" when it may."""
        guard, measured = self.tick.score.memory_guard, self.measured
        if guard is not None and guard >= MEMORY_BRAKE:
            return f"out-of-memory guard {guard:.2f}"
        if measured is None or measured.kv_usage is None:
            return "the KV cache's use is unknown"
        if measured.preemptions > 0.0:
            return f"{measured.preemptions:.0f} preemptions"
        now = self.tick.facts.kv.growth
        usage = max(measured.kv_usage, now or 0.0)
        return f"KV cache at {usage:.2f}" if usage >= KV_FULL else ""

    def hold(self, reason: BatchReason, detail: str = "", *, ended: bool = False) -> Batching:
        """Return that nothing is moved."""
        return Batching(
            bound=self.bound,
            reason=reason,
            limits=self.fleet.limits,
            measured=self.measured,
            detail=detail,
            ended=ended,
            left_alone=self.fleet.left_alone,
        )

    def move(self, reason: BatchReason, wanted: Limits, detail: str, *, tried: bool = False) -> Batching:
        """Return the move, or why it is not made."""
        wrong = unstartable(wanted, chunked_prefill=True, max_model_len=None)
        if wrong and reason is not BatchReason.REVERTED:
            return self.hold(BatchReason.INVALID, wrong)
        if reason in LOWERING | RAISING:
            value = moved_value(reason, wanted)
            if is_blacklisted(self.unforgotten, reason, value):
                return self.hold(BatchReason.BLACKLISTED, f"{wanted} was taken back twice")
        fewer = (wanted.max_num_seqs or 0) < (self.fleet.limits.max_num_seqs or 0)
        return replace(
            self.hold(reason, detail),
            wanted=wanted,
            pods=tell(self.fleet, wanted),
            tried=tried,
            settle_s=self.lifetime_s if fewer else 2.0 * self.tick.policy.interval_s,
            observe_s=self.observe_s,
            ended=self.tuning.trial is not None,
        )

    @property
    def unforgotten(self) -> list[Reverted]:
        """What was taken back, and is not yet to be tried again."""
        return [one for one in self.tuning.reverted if self.at - one.at < self.settings.forget_after_s]

    def with_sequences(self, sequences: float) -> Limits:
        """Return the limits with so many sequences, within bounds."""
        low, high = self.fleet.low.max_num_seqs or 1, self.fleet.ceiling.max_num_seqs or 1
        return replace(self.fleet.limits, max_num_seqs=max(low, min(math.floor(sequences), high)))


def tell(fleet: Fleet, limits: Limits) -> tuple[PodBatching, ...]:
    """Return the pods that do not have the limits yet, with what each is to be told."""
    return tuple(
        PodBatching(pod=pod.name, uid=pod.uid, ip=pod.ip, limits=clipped(limits, has), generation=has.generation)
        for pod, has in fleet.pods
        if not obeys(has, limits)
    )


Rule = Callable[[Scene], Batching | None]


def stand_down(scene: Scene) -> Batching | None:
    """Leave a target that is not ours alone, one without our plugin, and one that is paused."""
    if scene.proposal.final:
        return scene.hold(BatchReason.NOT_OURS, str(scene.proposal.reason), ended=True)
    if not scene.fleet.pods or scene.fleet.limits.max_num_seqs is None:
        return scene.hold(BatchReason.NO_PLUGIN, "no serving pod says limits that can be moved", ended=True)
    if scene.tick.snapshot.target.deployment_paused:
        return scene.hold(BatchReason.DEPLOYMENT_PAUSED, ended=True)
    return None


def climb_down(scene: Scene) -> Batching | None:
    """Run fewer sequences while the card's memory is short: at once, whatever else is going on."""
    ladder, memory = scene.settings.ladder, memory_share(scene.tick)
    if memory is None or memory <= ladder.soft:
        return None
    shown = f"{memory:.0%} of the card's spare memory is used"
    moved_at = scene.tuning.moved_at
    if moved_at is not None and scene.at - moved_at < ladder.hold_s:
        return scene.hold(BatchReason.OBSERVING, shown)
    cap = scene.fleet.limits.max_num_seqs or 1
    running = cap if scene.measured is None else min(cap, math.ceil(scene.measured.peak) or cap)
    wanted = scene.with_sequences(running * (ladder.hard_factor if memory > ladder.hard else ladder.soft_factor))
    if (wanted.max_num_seqs or 0) >= cap:
        return scene.hold(BatchReason.AT_LIMIT, shown)
    return scene.move(BatchReason.LOWER_MEMORY, wanted, shown)


def memory_share(tick: Tick) -> float | None:
    """Return how much is used of what the engine leaves free of the card; below a half it is not told apart.

    The guard HR counts that share from a half on: HR 0.8 is 0.90. Where the policy reads the framebuffer as memory, the
    engine preallocates nothing, and its use is the share.
    """
    if tick.policy.score.memory.source is MemorySource.FRAMEBUFFER:
        return next((one.value for one in tick.snapshot.samples if one.signal == "gpu_memory_ratio"), None)
    guard = tick.score.memory_guard
    return None if guard is None else 0.5 + guard / 2.0


def align(scene: Scene) -> Batching | None:
    """Tell the limits of the target to pods that do not have them: new ones, restarted ones, forgetful ones."""
    told = {one.uid: one.at for one in scene.tuning.told}
    late = [pod for pod in tell(scene.fleet, scene.fleet.limits) if scene.at - told.get(pod.uid, -math.inf) >= RETELL_S]
    if not late:
        return None
    detail = f"{len(late)} of {len(scene.fleet.pods)} pods have other limits"
    return replace(scene.hold(BatchReason.ALIGN, detail), wanted=scene.fleet.limits, pods=tuple(late))


def relieve(scene: Scene) -> Batching | None:
    """Run fewer sequences while requests are preempted: what is computed twice helps nobody.

    While replicas load too: a storm is over before they are there. Only downwards, and from what is known.
    """
    trial, measured = scene.tuning.trial, scene.measured
    if scene.bound is not Bound.KV or measured is None or wasted(measured) < WASTEFUL:
        return None
    shown = f"{measured.preemptions:.0f} preemptions, KV cache at {measured.kv_usage or 0.0:.2f}"
    if trial is not None and trial.reason in RAISING:
        return replace(scene.move(BatchReason.REVERTED, trial.before, shown), harmed=True)
    if trial is not None:
        return None
    if measured.recomputing is not None:
        shown += f", {measured.recomputing:.1%} of the time to compute them anew"
        if measured.recomputing < DEAR:
            return scene.hold(BatchReason.NEEDS_REPLICAS, shown)
    wanted = scene.with_sequences(sustainable(scene, measured))
    if (wanted.max_num_seqs or 0) >= (scene.fleet.limits.max_num_seqs or 0):
        return scene.hold(BatchReason.NEEDS_REPLICAS, shown)
    return scene.move(BatchReason.LOWER_PREEMPTIONS, wanted, shown, tried=scene.is_still)


def sustainable(scene: Scene, measured: Measured) -> float:
    """Return the sequences that the KV cache holds at full length, between half and nine tenths of those that run.

    Worked: 20 480 tokens, requests of 964: 0.9 x 20480 / 964 = 19.1 of 30 that run.
    """
    tokens, joined = scene.tick.facts.kv_tokens, scene.tick.state.joined
    least, most = MOST_DOWN * measured.running, LEAST_DOWN * measured.running
    if not tokens or joined is None or not measured.sequence_tokens:
        return (least + most) / 2.0
    engines = scene.tick.policy.target.pods_per_replica * joined.engines_per_pod
    return min(max(ROOM * tokens / engines / measured.sequence_tokens, least), most)


def leave_in_motion(scene: Scene) -> Batching | None:
    """Move nothing while replicas move, nor judge by what happens meanwhile."""
    trial, since = scene.tuning.trial, scene.tuning.still_since
    if scene.is_still or (trial is not None and since is not None and since <= trial.at):
        return None
    still_s = 0.0 if since is None else scene.at - since
    detail = f"replicas still for {still_s:.0f}s of {scene.observe_s:.0f}s"
    return scene.hold(BatchReason.REPLICAS_MOVING, detail, ended=True)


def weigh(scene: Scene) -> Batching | None:
    """Keep or revert what was tried, once it has shown."""
    trial = scene.tuning.trial
    if trial is None:
        return None
    if scene.at < trial.until:
        return scene.hold(BatchReason.OBSERVING, f"{trial.after} for {trial.until - scene.at:.0f}s more")
    observed_s = trial.until - trial.settled_at
    after = measure(scene.tick, trial.settled_at, MIN_SHARE_OF_WINDOW * observed_s)
    if after is None or is_unseen(trial, after):
        if scene.at < trial.until + observed_s:
            return scene.hold(BatchReason.OBSERVING, f"{trial.after}: too little is known yet")
        return scene.hold(BatchReason.KEPT, f"{trial.after}: too little is known to judge it", ended=True)
    verdict = judge(scene.tick.policy, trial, after)
    words = f"{trial.after}: {verdict.words}"
    if verdict.kept:
        return scene.hold(BatchReason.KEPT, words, ended=True)
    return replace(scene.move(BatchReason.REVERTED, trial.before, words), harmed=verdict.harmed)


def cool_down(scene: Scene) -> Batching | None:
    """Leave time between moves."""
    moved_at = scene.tuning.moved_at
    if moved_at is None or scene.at - moved_at >= scene.settings.cooldown_s:
        return None
    return scene.hold(BatchReason.COOLDOWN, f"{scene.at - moved_at:.0f}s of {scene.settings.cooldown_s:.0f}s")


def climb_back(scene: Scene) -> Batching | None:
    """Run more sequences again, step by step, once what they were fewer for is over: the card's memory was short, or
    preemptions were relieved while replicas moved, which nothing has judged.
    """
    held_from, cap = scene.tuning.held_from, scene.fleet.limits.max_num_seqs or 1
    if held_from is None or held_from <= cap or scene.must_not_grow:
        return None
    measured, moved_at = scene.measured, scene.tuning.moved_at
    if measured is not None and (measured.kv_usage or 0.0) >= KV_SLACK and measured.waiting >= QUEUED:
        return None
    # Those that were let in last are to have shown what of the cache they take.
    if moved_at is not None and scene.at - moved_at < scene.lifetime_s:
        return None
    tokens = scene.fleet.limits.max_num_batched_tokens or math.inf
    wanted = scene.with_sequences(min(held_from, max(cap + 1, UP * cap), tokens))
    if (wanted.max_num_seqs or 0) <= cap:
        return None
    return scene.move(BatchReason.RESTORE_MEMORY, wanted, f"back to {held_from}")


def choose(scene: Scene) -> Batching:
    """Choose one move by what holds the engines back."""
    measured = scene.measured
    if measured is None:
        return scene.hold(BatchReason.NO_DATA, "too few engines are read, or not for long enough")
    rules = {Bound.SEQUENCES: _more_sequences, Bound.PREFILL: _smaller_steps, Bound.BUDGET: _larger_steps}
    if scene.bound in rules:
        # What it was like before is to be compared with: the window must show nothing else.
        if scene.bound_s < scene.settings.window_s:
            held = f"{scene.bound} for {scene.bound_s:.0f}s of {scene.settings.window_s:.0f}s"
            return scene.hold(BatchReason.OBSERVING, held)
        return rules[scene.bound](scene, measured)
    # Requests that wait for blocks wait as well in the queue: a lower limit would only move them there.
    return scene.hold(BatchReason.NEEDS_REPLICAS if scene.bound is Bound.KV else BatchReason.STEADY)


def _more_sequences(scene: Scene, measured: Measured) -> Batching:
    """Let more sequences run, where the KV cache and ITL have room for them."""
    limits, slo = scene.fleet.limits, scene.tick.policy.slo.itl
    cap, usage = limits.max_num_seqs or 1, measured.kv_usage
    shown = f"{measured.waiting:.1f} wait, {measured.running:.1f} of {cap} run"
    if cap >= (scene.fleet.ceiling.max_num_seqs or 0):
        return scene.hold(BatchReason.AT_LIMIT, shown)
    why_not = scene.must_not_grow
    if slo is not None and (measured.itl_s is None or measured.itl_s > slo.seconds):
        why_not = why_not or "ITL has no room"
    if why_not or usage is None or usage >= KV_SLACK:
        return scene.hold(BatchReason.NEEDS_REPLICAS, f"{shown}; {why_not or 'the KV cache has no room'}")
    quick = slo is None or (measured.itl_mean_s or 0.0) <= ITL_SLACK * slo.seconds
    room = cap * KV_SLACK / usage if usage > 0.0 else math.inf
    grown = min(max(cap + 1, cap * (UP_FAST if quick else UP)), room, limits.max_num_batched_tokens or math.inf)
    wanted = scene.with_sequences(grown)
    if (wanted.max_num_seqs or 0) < min(UP_LEAST * cap, scene.fleet.ceiling.max_num_seqs or 0):
        return scene.hold(BatchReason.NEEDS_REPLICAS, f"{shown}; room for {grown:.1f}")
    return scene.move(BatchReason.RAISE_SEQUENCES, wanted, shown, tried=True)


def _smaller_steps(scene: Scene, measured: Measured) -> Batching:
    """Take fewer tokens into one step: the p99 of ITL is a step that is full of a prompt, whose time its tokens make.

    No engine starts with fewer tokens than sequences: where more may run than ever do, fewer may from now on.
    """
    limits, low, slo = scene.fleet.limits, scene.fleet.low, scene.tick.policy.slo.itl
    budget, cap = limits.max_num_batched_tokens, limits.max_num_seqs or 1
    if budget is None or slo is None or low.max_num_batched_tokens is None or not measured.itl_s:
        return scene.hold(BatchReason.NEEDS_REPLICAS, "the token budget cannot be moved")
    shown = f"p{100.0 * slo.quantile:g} of ITL {measured.itl_s:.3f}s, mean {measured.itl_mean_s or 0.0:.3f}s"
    useless = [one.value for one in scene.unforgotten if one.reason is BatchReason.LOWER_BUDGET and not one.harmed]
    # What was of no use was not far enough: prompts shorter than the budget never filled a step.
    most = min([GENTLEST * budget, *(value / 2.0 for value in useless)])
    aim = min(max(budget * ITL_AIM * slo.seconds / measured.itl_s, most / SHARPEST), most)
    lowest = max(low.max_num_batched_tokens, math.ceil(2.0 * measured.peak))
    tokens = max(math.floor(aim) // BUDGET_GRID * BUDGET_GRID, lowest)
    if tokens >= budget:
        return scene.hold(BatchReason.AT_LIMIT, shown)
    fewer = scene.with_sequences(min(cap, max(2.0 * measured.peak, tokens))) if tokens < cap else limits
    wanted = replace(fewer, max_num_batched_tokens=max(tokens, fewer.max_num_seqs or 1))
    return scene.move(BatchReason.LOWER_BUDGET, wanted, shown, tried=True)


def _larger_steps(scene: Scene, measured: Measured) -> Batching:
    """Take more tokens into one step: prompts wait for it, and ITL has room."""
    slo, limits = scene.tick.policy.slo.ttft, scene.fleet.limits
    quantile_of = f"p{100.0 * slo.quantile:g} " if slo is not None else ""
    shown = f"{quantile_of}TTFT {measured.ttft_s or 0.0:.2f}s"
    why_not = scene.must_not_grow
    if why_not:
        return scene.hold(BatchReason.NEEDS_REPLICAS, f"{shown}; {why_not}")
    high = scene.fleet.ceiling.max_num_batched_tokens or 1
    tokens = min(2 * (limits.max_num_batched_tokens or high), high)
    return scene.move(BatchReason.RAISE_BUDGET, replace(limits, max_num_batched_tokens=tokens), shown, tried=True)


RULES: tuple[Rule, ...] = (
    stand_down,
    climb_down,
    align,
    relieve,
    leave_in_motion,
    weigh,
    cool_down,
    climb_back,
    choose,
)
"""In order: the first that has something to say decides."""


def scene_of(tick: Tick, proposal: Proposal, fleet: Fleet) -> Scene:
    """Return all that a choice for these limits may look at."""
    settled_at, window_s = tick.state.tuning.settled_at, tick.policy.batching.window_s
    since = tick.snapshot.at - window_s
    measured = measure(tick, since if settled_at is None else max(since, settled_at), MIN_SHARE_OF_WINDOW * window_s)
    bound = classify(tick.policy, fleet.limits, fleet.ceiling, measured)
    return Scene(tick=tick, proposal=proposal, fleet=fleet, measured=measured, bound=bound)


def tune(tick: Tick, proposal: Proposal) -> Batching | None:
    """Return what to make of the batching limits; None where the policy leaves them alone."""
    settings = tick.policy.batching
    if settings.mode is BatchingMode.OFF:
        return None
    scene = scene_of(tick, proposal, look_at(tick))
    found = next(batching for rule in RULES if (batching := rule(scene)) is not None)
    return _deferred(scene, found)


def _deferred(scene: Scene, batching: Batching) -> Batching:
    """Return the move, unless a person has to approve it, or replicas go first: one kind of change a tick."""
    if not batching.pods:
        return batching
    wish = f"{batching.reason} to {batching.wanted}"
    if scene.tick.policy.approval.required:
        return replace(batching, reason=BatchReason.AWAITING_APPROVAL, pods=(), tried=False, ended=False, detail=wish)
    scales = scene.proposal.replicas != scene.proposal.current
    if scales and batching.reason is not BatchReason.LOWER_MEMORY:
        return replace(batching, reason=BatchReason.REPLICAS_FIRST, pods=(), tried=False, ended=False, detail=wish)
    return batching


def try_limits_first(tick: Tick, proposal: Proposal) -> Proposal:
    """Hold growth for some seconds after more sequences were allowed: the queue may be gone by then.

    Not growth back into the bounds. A guard on replicas, behind the others.
    """
    settings, trial = tick.policy.batching, tick.state.tuning.trial
    if settings.mode is BatchingMode.OFF or trial is None or trial.reason is not BatchReason.RAISE_SEQUENCES:
        return proposal
    since = tick.snapshot.at - trial.at
    if proposal.replicas <= proposal.current or proposal.current < tick.bounds.min or since >= settings.limit_first_s:
        return proposal
    detail = f"{trial.after} for {since:.0f}s of {settings.limit_first_s:.0f}s"
    return proposal.moved_to(proposal.current, Reason.LIMIT_FIRST, detail)
