"""What is remembered of the batching limits: those wanted, what is being tried, and what was taken back."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from autoscaler.core.facts import Facts
from autoscaler.core.policy import BatchingPolicy
from autoscaler.core.types import (
    Batching,
    BatchReason,
    Bound,
    Decision,
    Hold,
    Limits,
    Measured,
    Outcome,
    PodLimits,
    RollOut,
    ScaleReplicas,
    SetBatching,
    Snapshot,
    Standing,
)

LEFT_ALONE_AFTER = 3
"""A pod that does not take up what it was told so many times is left alone."""
RETELL_S = 15.0
FORGIVEN_S = 300.0
"""After so long with the limits that it was told, a pod starts with a clean slate."""
DAY_S = 86400.0
KNOBS = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold")


class Reverted(NamedTuple):
    """A limit that was taken back: by which move it came about, whether it did harm or was of no use, how often, and
    when last.
    """

    reason: BatchReason
    value: int
    harmed: bool
    times: int
    at: float

    @property
    def kind(self) -> tuple[BatchReason, int, bool]:
        """What is counted together."""
        return self[:3]


class Told(NamedTuple):
    """How often one pod was told again what it had not taken up, and when it was last told anything."""

    uid: str
    times: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Limits that are being tried. Times are epoch seconds.

    Args:
        reason: why they were set.
        before, after: the limits.
        at: when they were set. settled_at: from when on they are judged. until: at least until then.
        measured: how the engines fared before.
    """

    reason: BatchReason
    before: Limits
    after: Limits
    at: float
    settled_at: float
    until: float
    measured: Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """All memory of one target's batching limits. Times are epoch seconds.

    Args:
        wanted: what every pod is to have; None before the first move.
        moved_at: of the last move. settled_at: since when readings are of these limits.
        trial: what is being tried.
        reverted: what was taken back.
        told: of pods that were told something.
        held_from: the sequences before the card's memory was short, or before a relief from preemptions that
            nothing has judged; None without one, or when they are back.
        bound, bound_since: what held the engines back at the last tick, and since when it does.
        still_since: since when no replica moves; None before the first tick.
        replicas, serving: as of the last tick.
        rolled_at: when rollouts were begun within the last day. roll_failed_at: when such a write last failed.
        standing: the rollout that waits for a person's approval, its limit in place of replicas.
    """

    wanted: Limits | None = None
    moved_at: float | None = None
    settled_at: float | None = None
    trial: Trial | None = None
    reverted: tuple[Reverted, ...] = ()
    told: tuple[Told, ...] = ()
    held_from: int | None = None
    bound: Bound = Bound.UNKNOWN
    bound_since: float = 0.0
    still_since: float | None = None
    replicas: int = -1
    serving: frozenset[str] = frozenset()
    rolled_at: tuple[float, ...] = ()
    roll_failed_at: float | None = None
    standing: Standing | None = None


def clipped(limits: Limits, pod: PodLimits) -> Limits:
    """Return the limits within what one pod takes; None for those that it cannot move, or that are not said."""
    return Limits(**{name: _within(name, limits, pod) for name in KNOBS})


def _within(name: str, limits: Limits, pod: PodLimits) -> int | None:
    value, high = getattr(limits, name), getattr(pod.ceiling, name)
    if value is None or high is None:
        return None
    lowest = 0 if name == "long_prefill_token_threshold" else 1
    low = max(lowest, getattr(pod.floor, name) or 0)
    return int(max(low, min(value, high)))


def obeys(pod: PodLimits, limits: Limits) -> bool:
    """Tell whether a pod has the limits, as far as it can move them."""
    asked = clipped(limits, pod)
    pairs = ((getattr(asked, name), getattr(pod.limits, name)) for name in KNOBS)
    return all(value is None or value == has for value, has in pairs)


# --- absorb ---------------------------------------------------------------------------------------------------------


def watch(tuning: Tuning, snapshot: Snapshot, facts: Facts, serving: frozenset[str]) -> Tuning:
    """Return the tuning with one snapshot taken in: since when no replica moves, and which pods obey."""
    target, at = snapshot.target, snapshot.at
    rollout = target.rollout and not target.rollout_failed
    moving = rollout or facts.loading > 0 or facts.terminating > 0 or facts.unready > 0
    same = tuning.still_since is not None and tuning.replicas == target.current_replicas and tuning.serving == serving
    return replace(
        tuning,
        still_since=tuning.still_since if same and not moving else at,
        replicas=target.current_replicas,
        serving=serving,
        told=tuple(_remembered(tuning, snapshot)),
    )


def _remembered(tuning: Tuning, snapshot: Snapshot) -> Iterable[Told]:
    """Yield what is still of interest about pods that were told something."""
    if not tuning.told:
        return
    limits = {one.pod_uid: one for one in snapshot.limits}
    uids = {pod.uid for pod in snapshot.target.pods}
    for told in tuning.told:
        pod = limits.get(told.uid)
        good = pod is not None and tuning.wanted is not None and obeys(pod, tuning.wanted)
        if told.uid in uids and not (good and snapshot.at - told.at > FORGIVEN_S):
            yield told


# --- advance --------------------------------------------------------------------------------------------------------


def remember(settings: BatchingPolicy, tuning: Tuning, decision: Decision, outcome: Outcome) -> Tuning:
    """Return the tuning with a decision and its outcome taken in. What was only simulated starts a cooldown."""
    batching, at = decision.batching, decision.at
    if batching is None:
        return tuning
    if batching.bound is not tuning.bound:
        tuning = replace(tuning, bound=batching.bound, bound_since=at)
    if isinstance(decision.action, ScaleReplicas):
        return tuning
    if isinstance(decision.action, RollOut):
        return _rolled(tuning, decision.action, outcome, at)
    if batching.standing is not None:
        tuning = replace(tuning, standing=batching.standing)
    if isinstance(decision.action, Hold):
        return _without_trial(tuning, batching) if batching.ended else tuning
    if outcome is Outcome.SIMULATED:
        return replace(tuning, moved_at=at, settled_at=at + batching.settle_s, trial=None)
    if outcome is not Outcome.APPLIED:
        return tuning
    tuning = replace(tuning, wanted=decision.action.limits, told=_told(tuning, decision.action, batching, at))
    if batching.reason is BatchReason.ALIGN:
        return tuning
    settled_at = at + batching.settle_s
    return replace(
        tuning,
        moved_at=at,
        settled_at=settled_at,
        trial=_trial(batching, decision.action.limits, at),
        reverted=_reverted(settings, tuning, batching, at),
        held_from=_held_from(tuning, batching, decision.action.limits),
    )


def _rolled(tuning: Tuning, action: RollOut, outcome: Outcome, at: float) -> Tuning:
    """Return the tuning after a write to the pod template; what was only simulated counts as begun."""
    if outcome is Outcome.FAILED:
        return replace(tuning, roll_failed_at=at)
    if outcome not in (Outcome.APPLIED, Outcome.SIMULATED) or not action.begins:
        return tuning
    recent = [one for one in tuning.rolled_at if at - one < DAY_S]
    return replace(tuning, rolled_at=(*recent, at), standing=None)


def _without_trial(tuning: Tuning, batching: Batching) -> Tuning:
    """Return the tuning after a trial that has ended; a relief that was not judged is to be undone in time."""
    trial = tuning.trial
    if trial is None or trial.reason is not BatchReason.LOWER_PREEMPTIONS or batching.reason is BatchReason.KEPT:
        return replace(tuning, trial=None)
    return replace(tuning, trial=None, held_from=tuning.held_from or trial.before.max_num_seqs)


def _told(tuning: Tuning, action: SetBatching, batching: Batching, at: float) -> tuple[Told, ...]:
    """Return who was told what how often."""
    known = {told.uid: told for told in tuning.told}
    again = batching.reason is BatchReason.ALIGN
    for pod in action.pods:
        times = known[pod.uid].times if pod.uid in known else 0
        known[pod.uid] = Told(pod.uid, times + again, at)
    return tuple(known.values())


def _trial(batching: Batching, limits: Limits, at: float) -> Trial | None:
    if not batching.tried or batching.measured is None:
        return None
    settled_at = at + batching.settle_s
    return Trial(
        reason=batching.reason,
        before=batching.limits,
        after=limits,
        at=at,
        settled_at=settled_at,
        until=settled_at + batching.observe_s,
        measured=batching.measured,
    )


def _reverted(settings: BatchingPolicy, tuning: Tuning, batching: Batching, at: float) -> tuple[Reverted, ...]:
    """Return what was taken back and is not yet forgotten, this tick's included."""
    kept = [one for one in tuning.reverted if at - one.at < settings.forget_after_s]
    trial = tuning.trial
    if batching.reason is not BatchReason.REVERTED or trial is None:
        return tuple(kept)
    new = Reverted(trial.reason, moved_value(trial.reason, trial.after), batching.harmed, 1, at)
    times = sum(one.times for one in kept if one.kind == new.kind)
    return (*(one for one in kept if one.kind != new.kind), new._replace(times=times + 1))


def moved_value(reason: BatchReason, limits: Limits) -> int:
    """Return the limit that a move of that kind is about."""
    budget = reason in (BatchReason.LOWER_BUDGET, BatchReason.RAISE_BUDGET)
    return (limits.max_num_batched_tokens if budget else limits.max_num_seqs) or 0


def _held_from(tuning: Tuning, batching: Batching, limits: Limits) -> int | None:
    """Return the sequences to go back to."""
    unjudged = batching.reason is BatchReason.LOWER_PREEMPTIONS and not batching.tried
    if unjudged or batching.reason is BatchReason.LOWER_MEMORY:
        return tuning.held_from or batching.limits.max_num_seqs
    back = tuning.held_from is not None and (limits.max_num_seqs or 0) >= tuning.held_from
    return None if back else tuning.held_from
