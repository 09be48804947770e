"""What of a target's state outlives the process: as plain data, and taken in again so that no cooldown is forgotten and
nothing shrinks by surprise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

import numpy as np

from autoscaler.core.model import StepModel
from autoscaler.core.owners import Owners, merged, unknown_step
from autoscaler.core.plain import Plain, to_plain
from autoscaler.core.policy import Policy, StepTime, TargetRef
from autoscaler.core.state import STARTS_KEPT, Hindsight, Recommended, State, longest_hole_s
from autoscaler.core.tuning import Reverted, Tuning
from autoscaler.core.types import BatchReason, ForeignChange, Limits, Regime, Standing

VERSION = 1
DIGITS = 6
"""Of learned times and errors: what is kept is small, and none of it is known better."""

T = TypeVar("T")


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
    if kept.moved_at is None or (own.moved_at or 0.0) >= min(kept.moved_at, at):
        return replace(own, reverted=reverted)
    moved_at = min(kept.moved_at, at)
    return replace(own, wanted=kept.wanted, moved_at=moved_at, held_from=kept.held_from, reverted=reverted, trial=None)


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
    }
    return {name: value for name, value in learned.items() if value}


def memory_from_plain(plain: object) -> Memory:
    """Return the memory that a plain value says. Raises ValueError, saying what is wrong with it."""
    content = _mapping(plain)
    if content.get("version") != VERSION:
        raise ValueError(f"version {content.get('version')!r}, not {VERSION}")
    target = content.get("target")
    if not isinstance(target, str):
        raise ValueError("no target")
    model, standing = content.get("model"), content.get("standing")
    return Memory(
        target=target,
        at=_number(content.get("at")),
        last_up_at=_maybe(content.get("last_up_at")),
        last_down_at=_maybe(content.get("last_down_at")),
        changes=_each(content.get("changes"), lambda item: _change(_row(item, 2))),
        last_restart_at=_maybe(content.get("last_restart_at")),
        starts=_each(content.get("starts"), _positive),
        recommendations=_each(content.get("recommendations"), lambda item: _recommended(_row(item, 4))),
        hindsight=_hindsight_from_plain(_mapping(content.get("hindsight") or {})),
        model=None if model is None else _model_from_plain(_mapping(model)),
        owners=_owners_from_plain(_mapping(content.get("owners") or {})),
        standing=None if standing is None else _standing_from_plain(_mapping(standing)),
        tuning=_tuning_from_plain(_mapping(content.get("tuning") or {})),
    )


def _hindsight_from_plain(plain: Mapping[str, object]) -> Hindsight:
    errors = _each(plain.get("errors"), _number)
    regimes = _each(plain.get("regimes"), lambda item: _regime(_row(item, 2)))
    first, second, third = regimes if len(regimes) == 3 else Hindsight().regimes
    return Hindsight(
        regimes=(first, second, third),
        changed_at=_maybe(plain.get("changed_at")),
        open=_each(plain.get("open"), lambda item: _point(_row(item, 2))),
        told_at=_maybe(plain.get("told_at")),
        errors=errors,
        ranked=tuple(sorted(errors)),
    )


def _owners_from_plain(plain: Mapping[str, object]) -> Owners:
    change, conflict = plain.get("change"), plain.get("conflict")
    return Owners(
        uid=_text(plain.get("uid", "")),
        replicas=_whole(plain.get("replicas", 0)),
        ours=plain.get("ours") is True,
        since=_number(plain.get("since", 0.0)),
        change=None if change is None else _foreign_from_plain(_mapping(change)),
        undone_at=_each(plain.get("undone_at"), _number),
        conflict=None if conflict is None else _foreign_from_plain(_mapping(conflict)),
    )


def _foreign_from_plain(plain: Mapping[str, object]) -> ForeignChange:
    return ForeignChange(
        at=_number(plain.get("at")),
        before=_whole(plain.get("before")),
        after=_whole(plain.get("after")),
        by=_text(plain.get("by")),
        written_at=_maybe(plain.get("written_at")),
        undid=plain.get("undid") is True,
    )


def _model_from_plain(plain: Mapping[str, object]) -> StepModel:
    line = _mapping(plain.get("line"))
    gram = [_each(_row(row, 4), _number) for row in _row(plain.get("gram"), 4)]
    return StepModel(
        line=StepTime(**{name: _positive(line.get(name)) for name in ("c0", "cp", "cb", "ck")}),
        rows=_whole(plain.get("rows")),
        gram=np.array(gram),
        moment=np.array(_each(_row(plain.get("moment"), 4), _number)),
        at=_number(plain.get("at")),
    )


def _standing_from_plain(plain: Mapping[str, object]) -> Standing:
    return Standing(
        up=plain.get("up") is True,
        to=_whole(plain.get("to")),
        made_at=_number(plain.get("made_at")),
        expires_at=_number(plain.get("expires_at")),
        wished_at=_number(plain.get("wished_at")),
    )


def _tuning_from_plain(plain: Mapping[str, object]) -> Tuning:
    wanted, held_from = plain.get("wanted"), plain.get("held_from")
    return Tuning(
        wanted=None if wanted is None else _limits_from_plain(_mapping(wanted)),
        moved_at=_maybe(plain.get("moved_at")),
        reverted=_each(plain.get("reverted"), lambda item: _reverted(_row(item, 5))),
        held_from=None if held_from is None else _whole(held_from),
    )


def _limits_from_plain(plain: Mapping[str, object]) -> Limits:
    names = (field.name for field in fields(Limits))
    return Limits(**{name: None if plain.get(name) is None else _whole(plain.get(name)) for name in names})


def _reverted(row: Sequence[object]) -> Reverted:
    return Reverted(BatchReason(_text(row[0])), _whole(row[1]), row[2] is True, _whole(row[3]), _number(row[4]))


def _change(row: Sequence[object]) -> tuple[float, int]:
    return _number(row[0]), _whole(row[1])


def _recommended(row: Sequence[object]) -> Recommended:
    return Recommended(_number(row[0]), _number(row[1]), _whole(row[2]), _whole(row[3]))


def _regime(row: Sequence[object]) -> Regime:
    return Regime(since=_maybe(row[0]), relative_sd=_positive(row[1]))


def _point(row: Sequence[object]) -> tuple[float, float]:
    return _number(row[0]), _number(row[1])


def _mapping(plain: object) -> Mapping[str, object]:
    if not isinstance(plain, Mapping):
        raise ValueError(f"{plain!r:.40} is no object")
    return plain


def _row(plain: object, length: int) -> Sequence[object]:
    if not isinstance(plain, list | tuple) or len(plain) != length:
        raise ValueError(f"{plain!r:.40} is no list of {length}")
    return plain


def _each(plain: object, read: Callable[[object], T]) -> tuple[T, ...]:
    if plain is None:
        return ()
    if not isinstance(plain, list | tuple):
        raise ValueError(f"{plain!r:.40} is no list")
    return tuple(read(item) for item in plain)


def _number(plain: object) -> float:
    """Return a finite number; JSON's true is none."""
    if isinstance(plain, bool) or not isinstance(plain, int | float) or not abs(plain) < 1e15:
        raise ValueError(f"{plain!r:.40} is no number")
    return float(plain)


def _text(plain: object) -> str:
    if not isinstance(plain, str):
        raise ValueError(f"{plain!r:.40} is no text")
    return plain


def _maybe(plain: object) -> float | None:
    return None if plain is None else _number(plain)


def _positive(plain: object) -> float:
    number = _number(plain)
    if number < 0.0:
        raise ValueError(f"{number:g} is below 0")
    return number


def _whole(plain: object) -> int:
    number = _number(plain)
    if not number.is_integer():
        raise ValueError(f"{number:g} is no whole number")
    return int(number)
