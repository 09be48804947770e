"""What of a target's state outlives the process: as plain data, and taken in again so that no cooldown is forgotten and
nothing shrinks by surprise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autoscaler.core import parse
from autoscaler.core.model import StepModel
from autoscaler.core.note import limits_from_plain
from autoscaler.core.owners import Owners, merged, unknown_step
from autoscaler.core.plain import Plain, to_plain
from autoscaler.core.policy import Policy, StepTime, TargetRef
from autoscaler.core.state import STARTS_KEPT, Hindsight, Recommended, State, longest_hole_s
from autoscaler.core.tuning import Reverted, Tuning
from autoscaler.core.types import BatchReason, ForeignChange, Regime, Standing

VERSION = 1
DIGITS = 6
"""Of learned times and errors: what is kept is small, and none of it is known better."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """What is kept of one target's `State`, whose fields have the same names here. Times are epoch seconds.

    Args:
        target: `namespace/name`; the memory is of no use for another.
        at: of the last tick.
    """

    target: str
    at: float
    last_up_at: float | None = None
    last_down_at: float | None = None
    changes: tuple[tuple[float, int], ...] = ()
    last_restart_at: float | None = None
    starts: tuple[float, ...] = ()
    recommendations: tuple[Recommended, ...] = ()
    hindsight: Hindsight = field(default_factory=Hindsight)
    model: StepModel | None = None
    owners: Owners = field(default_factory=Owners)
    standing: Standing | None = None
    tuning: Tuning = field(default_factory=Tuning)


def memory_of(policy: Policy, state: State) -> Memory | None:
    """Return what to keep of the state; None before its first tick."""
    if not state.times:
        return None
    return Memory(
        target=_name(policy.target),
        at=state.times[-1],
        last_up_at=state.last_up_at,
        last_down_at=state.last_down_at,
        changes=state.changes,
        last_restart_at=state.last_restart_at,
        starts=state.starts,
        recommendations=state.recommendations,
        hindsight=state.hindsight,
        model=state.model if state.model is not None and state.model.rows else None,
        owners=state.owners,
        standing=state.standing,
        tuning=_kept(state.tuning),
    )


def _kept(tuning: Tuning) -> Tuning:
    """Return what of a tuning outlives the process: not a trial, which nobody watched, nor what is seen again."""
    return Tuning(
        wanted=tuning.wanted,
        moved_at=tuning.moved_at,
        reverted=tuning.reverted,
        held_from=tuning.held_from,
        rolled_at=tuning.rolled_at,
    )


def essential(memory: Memory) -> Memory:
    """Return the memory without what can be seen and learned again: the cooldowns are left, and who wrote."""
    return replace(memory, starts=(), recommendations=(), hindsight=Hindsight(), model=None)


def recall(policy: Policy, state: State, memory: Memory, at: float) -> State:
    """Return the state with a memory taken in at `at`. Pure; doing it twice changes nothing.

    Of a cooldown the later counts, of what was learned the side that saw more, of the windows both, provided that there
    is no hole between them. What is in the future by our clock happened now. Replicas that a process of ours wrote, and
    that are not those of the memory, are a step that was not saved.
    """
    if memory.target != _name(policy.target):
        return state
    change, since = unknown_step(memory.owners, state.owners), state.owners.since
    unsaved = ((since, change),) if change else ()
    learns = policy.demand.learn and memory.model is not None
    return replace(
        state,
        last_up_at=_later(state.last_up_at, memory.last_up_at, since if change > 0 else None, at=at),
        last_down_at=_later(state.last_down_at, memory.last_down_at, since if change < 0 else None, at=at),
        changes=tuple(sorted({*state.changes, *((min(when, at), by) for when, by in (*memory.changes, *unsaved))})),
        last_restart_at=_later(state.last_restart_at, memory.last_restart_at, at=at),
        starts=max(state.starts, memory.starts[-STARTS_KEPT:], key=len),
        recommendations=_windows(policy, state.recommendations, memory.recommendations, at),
        hindsight=_hindsight(policy, state.hindsight, memory.hindsight, at),
        model=_model(state.model, memory.model, at) if learns else state.model,
        owners=merged(state.owners, memory.owners, at),
        standing=_standing(state.standing, memory.standing, at),
        tuning=_tuning(state.tuning, memory.tuning, at),
    )


def _later(*times: float | None, at: float) -> float | None:
    known = [when for when in times if when is not None]
    return min(at, max(known)) if known else None


def _windows(
    policy: Policy, own: tuple[Recommended, ...], kept: tuple[Recommended, ...], at: float
) -> tuple[Recommended, ...]:
    """Return what was recommended before we began to, and then our own; only our own after too long a hole."""
    began = own[0].since if own else at
    earlier = tuple(entry._replace(since=min(entry.since, began), until=min(entry.until, began)) for entry in kept)
    if not earlier or began - earlier[-1].until > longest_hole_s(policy):
        return own
    # What began no earlier we saw ourselves; after it was taken in once, that is all of it.
    return own if own and earlier[0].since >= began else (*earlier, *own)


def _hindsight(policy: Policy, own: Hindsight, kept: Hindsight, at: float) -> Hindsight:
    """Return the errors of whoever saw more of them, and the open forecasts of whoever made the last."""
    errors = max(own, kept, key=lambda one: len(one.errors)).errors[-policy.prediction.error_samples :]
    newest = own if kept.told_at is None or (own.told_at or 0.0) >= kept.told_at else kept
    told_at = newest.told_at
    return Hindsight(
        regimes=newest.regimes,
        changed_at=_later(own.changed_at, kept.changed_at, at=at),
        open=tuple(point for point in newest.open if point[0] <= at + policy.prediction.max_horizon_s),
        told_at=None if told_at is None else min(told_at, at),
        errors=errors,
        ranked=tuple(sorted(errors)),
    )


def _model(own: StepModel | None, kept: StepModel | None, at: float) -> StepModel | None:
    """Return the model with more observations behind it."""
    if kept is None or (own is not None and own.rows >= kept.rows):
        return own
    return replace(kept, at=min(kept.at, at))


def _standing(own: Standing | None, kept: Standing | None, at: float) -> Standing | None:
    """Return the proposal that the last leader told people of, while it stands; ours was told to nobody."""
    return kept if kept is not None and at < kept.expires_at else own


def _tuning(own: Tuning, kept: Tuning, at: float) -> Tuning:
    """Return the limits of whoever moved them last, and what either took back."""
    tried = {one.kind: one for one in kept.reverted}
    for one in own.reverted:
        other = tried.get(one.kind, one)
        tried[one.kind] = one._replace(times=max(one.times, other.times), at=max(one.at, other.at))
    reverted = tuple(one._replace(at=min(one.at, at)) for one in tried.values())
    own = replace(
        own, reverted=reverted, rolled_at=tuple(sorted({*own.rolled_at, *(min(one, at) for one in kept.rolled_at)}))
    )
    if kept.moved_at is None or (own.moved_at or 0.0) >= min(kept.moved_at, at):
        return own
    moved_at = min(kept.moved_at, at)
    return replace(own, wanted=kept.wanted, moved_at=moved_at, held_from=kept.held_from, trial=None)


def _name(target: TargetRef) -> str:
    return f"{target.namespace}/{target.deployment}"


# --- plain ----------------------------------------------------------------------------------------------------------


def memory_to_plain(memory: Memory) -> dict[str, Plain]:
    """Return the memory as JSON can say it; what is unknown or empty is left out."""
    hindsight, model, owners = memory.hindsight, memory.model, memory.owners
    learned = {
        "regimes": [[regime.since, round(regime.relative_sd, DIGITS)] for regime in hindsight.regimes],
        "changed_at": hindsight.changed_at,
        "open": [[due_at, round(top, DIGITS)] for due_at, top in hindsight.open],
        "told_at": hindsight.told_at,
        "errors": [round(error, DIGITS) for error in hindsight.errors],
    }
    plain = {
        "target": memory.target,
        "at": memory.at,
        "last_up_at": memory.last_up_at,
        "last_down_at": memory.last_down_at,
        "changes": memory.changes,
        "last_restart_at": memory.last_restart_at,
        "starts": [round(seconds, DIGITS) for seconds in memory.starts],
        "recommendations": memory.recommendations,
        "hindsight": None if hindsight == Hindsight() else {name: value for name, value in learned.items() if value},
        "model": model,
        "owners": None if owners == Owners() else owners,
        "standing": memory.standing,
        "tuning": None if memory.tuning == Tuning() else _tuning_to_plain(memory.tuning),
    }
    return {"version": VERSION, **{name: to_plain(value) for name, value in plain.items() if value or value == 0.0}}


def _tuning_to_plain(tuning: Tuning) -> dict[str, object]:
    learned = {
        "wanted": tuning.wanted,
        "moved_at": tuning.moved_at,
        "reverted": tuning.reverted,
        "held_from": tuning.held_from,
        "rolled_at": tuning.rolled_at,
    }
    return {name: value for name, value in learned.items() if value}


def memory_from_plain(plain: object) -> Memory:
    """Return the memory that a plain value says. Raises ValueError, saying what is wrong with it."""
    content = parse.mapping(plain)
    if content.get("version") != VERSION:
        raise ValueError(f"version {content.get('version')!r}, not {VERSION}")
    target = content.get("target")
    if not isinstance(target, str):
        raise ValueError("no target")
    model, standing = content.get("model"), content.get("standing")
    return Memory(
        target=target,
        at=parse.number(content.get("at")),
        last_up_at=parse.maybe(content.get("last_up_at")),
        last_down_at=parse.maybe(content.get("last_down_at")),
        changes=parse.each(content.get("changes"), lambda item: _change(parse.row(item, 2))),
        last_restart_at=parse.maybe(content.get("last_restart_at")),
        starts=parse.each(content.get("starts"), parse.positive),
        recommendations=parse.each(content.get("recommendations"), lambda item: _recommended(parse.row(item, 4))),
        hindsight=_hindsight_from_plain(parse.mapping(content.get("hindsight") or {})),
        model=None if model is None else _model_from_plain(parse.mapping(model)),
        owners=_owners_from_plain(parse.mapping(content.get("owners") or {})),
        standing=None if standing is None else _standing_from_plain(parse.mapping(standing)),
        tuning=_tuning_from_plain(parse.mapping(content.get("tuning") or {})),
    )


def _hindsight_from_plain(plain: Mapping[str, object]) -> Hindsight:
    errors = parse.each(plain.get("errors"), parse.number)
    regimes = parse.each(plain.get("regimes"), lambda item: _regime(parse.row(item, 2)))
    first, second, third = regimes if len(regimes) == 3 else Hindsight().regimes
    return Hindsight(
        regimes=(first, second, third),
        changed_at=parse.maybe(plain.get("changed_at")),
        open=parse.each(plain.get("open"), lambda item: _point(parse.row(item, 2))),
        told_at=parse.maybe(plain.get("told_at")),
        errors=errors,
        ranked=tuple(sorted(errors)),
    )


def _owners_from_plain(plain: Mapping[str, object]) -> Owners:
    change, conflict = plain.get("change"), plain.get("conflict")
    return Owners(
        uid=parse.text(plain.get("uid", "")),
        replicas=parse.whole(plain.get("replicas", 0)),
        ours=plain.get("ours") is True,
        since=parse.number(plain.get("since", 0.0)),
        change=None if change is None else _foreign_from_plain(parse.mapping(change)),
        undone_at=parse.each(plain.get("undone_at"), parse.number),
        conflict=None if conflict is None else _foreign_from_plain(parse.mapping(conflict)),
    )


def _foreign_from_plain(plain: Mapping[str, object]) -> ForeignChange:
    return ForeignChange(
        at=parse.number(plain.get("at")),
        before=parse.whole(plain.get("before")),
        after=parse.whole(plain.get("after")),
        by=parse.text(plain.get("by")),
        written_at=parse.maybe(plain.get("written_at")),
        undid=plain.get("undid") is True,
    )


def _model_from_plain(plain: Mapping[str, object]) -> StepModel:
    line = parse.mapping(plain.get("line"))
    gram = [parse.each(parse.row(row, 4), parse.number) for row in parse.row(plain.get("gram"), 4)]
    return StepModel(
        line=StepTime(**{name: parse.positive(line.get(name)) for name in ("c0", "cp", "cb", "ck")}),
        rows=parse.whole(plain.get("rows")),
        gram=np.array(gram),
        moment=np.array(parse.each(parse.row(plain.get("moment"), 4), parse.number)),
        at=parse.number(plain.get("at")),
    )


def _standing_from_plain(plain: Mapping[str, object]) -> Standing:
    return Standing(
        up=plain.get("up") is True,
        to=parse.whole(plain.get("to")),
        made_at=parse.number(plain.get("made_at")),
        expires_at=parse.number(plain.get("expires_at")),
        wished_at=parse.number(plain.get("wished_at")),
    )


def _tuning_from_plain(plain: Mapping[str, object]) -> Tuning:
    wanted, held_from = plain.get("wanted"), plain.get("held_from")
    return Tuning(
        wanted=None if wanted is None else limits_from_plain(wanted),
        moved_at=parse.maybe(plain.get("moved_at")),
        reverted=parse.each(plain.get("reverted"), lambda item: _reverted(parse.row(item, 5))),
        held_from=None if held_from is None else parse.whole(held_from),
        rolled_at=parse.each(plain.get("rolled_at"), parse.number),
    )


def _reverted(row: Sequence[object]) -> Reverted:
    return Reverted(
        BatchReason(parse.text(row[0])), parse.whole(row[1]), row[2] is True, parse.whole(row[3]), parse.number(row[4])
    )


def _change(row: Sequence[object]) -> tuple[float, int]:
    return parse.number(row[0]), parse.whole(row[1])


def _recommended(row: Sequence[object]) -> Recommended:
    return Recommended(parse.number(row[0]), parse.number(row[1]), parse.whole(row[2]), parse.whole(row[3]))


def _regime(row: Sequence[object]) -> Regime:
    return Regime(since=parse.maybe(row[0]), relative_sd=parse.positive(row[1]))


def _point(row: Sequence[object]) -> tuple[float, float]:
    return parse.number(row[0]), parse.number(row[1])
