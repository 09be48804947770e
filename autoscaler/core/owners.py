"""Who else writes the target's replicas: noticing it, and when to stop writing against it."""

from dataclasses import dataclass, replace

from autoscaler.core.policy import OwnersPolicy
from autoscaler.core.types import FIELD_MANAGER, ForeignChange, TargetStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """What is remembered of who wrote `spec.replicas`.

    Args:
        uid: of the Deployment that this is about; "" before the first look at one.
        replicas: as last seen, or as written by us since.
        ours: whether it was us who wrote these, in whatever process.
        since: when these were first seen, or written by us.
        change: the last change that was not ours.
        undone_at: when others undid writes of ours, since the policy's window began, oldest first.
        conflict: the change at which we began to stand down; the last time that we did.
    """

    uid: str = ""
    replicas: int = 0
    ours: bool = False
    since: float = 0.0
    change: ForeignChange | None = None
    undone_at: tuple[float, ...] = ()
    conflict: ForeignChange | None = None


def watch_owners(policy: OwnersPolicy, owners: Owners, target: TargetStatus, at: float) -> Owners:
    """Return what is remembered once a target was seen at `at`.

    A change counts as foreign when the API server names another field manager for it: a write of ours whose answer was
    lost, or of the process that led before, is no one else's. Where nobody is named, nothing is claimed.
    """
    ours = target.scaled_by == FIELD_MANAGER
    if owners.uid != target.uid or not owners.uid:
        return Owners(uid=target.uid, replicas=target.current_replicas, ours=ours, since=at)
    ours = ours if target.scaled_by else owners.ours
    if target.current_replicas == owners.replicas:
        return owners if ours == owners.ours else replace(owners, ours=ours)
    seen = replace(owners, replicas=target.current_replicas, ours=ours, since=at)
    return seen if ours or not target.scaled_by else _changed(policy, owners, seen, target, at)


def _changed(policy: OwnersPolicy, before: Owners, seen: Owners, target: TargetStatus, at: float) -> Owners:
    """Return what is remembered of a change by somebody else; with it we may begin to stand down."""
    change = ForeignChange(
        at=at,
        before=before.replicas,
        after=target.current_replicas,
        by=target.scaled_by,
        written_at=target.scaled_at,
        undid=before.ours,
    )
    if not change.undid:
        return replace(seen, change=change)
    undone_at = (*(when for when in before.undone_at if at - when < policy.window_s), at)
    if len(undone_at) < policy.reversions:
        return replace(seen, change=change, undone_at=undone_at)
    return replace(seen, change=change, undone_at=(), conflict=change)


def wrote(owners: Owners, replicas: int, at: float) -> Owners:
    """Return what is remembered once we have written the replicas."""
    return replace(owners, replicas=replicas, ours=True, since=at)


def unknown_step(known: Owners, seen: Owners) -> int:
    """Return how far a process of ours has moved the replicas from what is known, our own steps included; else 0.

    So a leader tells that died before it could say so, and a write of our own whose answer was lost. The API server
    keeps no time of a change through `scale`: it happened before it was seen, and counts from then.
    """
    return seen.replicas - known.replicas if seen.ours and known.uid and known.uid == seen.uid else 0


def standing_down_s(policy: OwnersPolicy, owners: Owners, at: float) -> float:
    """Return for how long nothing is to be written against another writer [s]; 0 for no longer."""
    return 0.0 if owners.conflict is None else max(0.0, owners.conflict.at + policy.stand_down_s - at)


def merged(own: Owners, kept: Owners, at: float) -> Owners:
    """Return the memory of two that watched the same target; what is in the future by our clock happened now.

    Both see the same changes, some moments apart: of what is counted the side that counted more is right.
    """
    if own.uid and own.uid != kept.uid:
        return own
    conflict = _later(own.conflict, kept.conflict, at)
    undone_at = tuple(min(when, at) for when in max(own.undone_at, kept.undone_at, key=len))
    return replace(
        own if own.uid else kept,
        change=_later(own.change, kept.change, at),
        undone_at=tuple(when for when in undone_at if conflict is None or when > conflict.at),
        conflict=conflict,
    )


def _later(own: ForeignChange | None, kept: ForeignChange | None, at: float) -> ForeignChange | None:
    known = [replace(change, at=min(change.at, at)) for change in (own, kept) if change is not None]
    return max(known, key=lambda change: change.at, default=None)
