"""What a rollout of batching limits leaves on the Deployment: an annotation that outlives the daemon, as JSON.

It is written with the arguments, in one request, so that neither is there without the other.
"""

import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from typing import NamedTuple

from autoscaler.core import parse
from autoscaler.core.plain import to_plain
from autoscaler.core.types import BatchReason, Limits, Measured, Template

NOTE = "autoscaler/rollout"
"""The annotation's name."""
VERSION = 1
FAILED_KEPT = 8


class Phase(StrEnum):
    """Where a rollout is: under way or being judged, kept, or taken back."""

    TRIAL = "trial"
    KEPT = "kept"
    BACK = "back"


class Failed(NamedTuple):
    """A limit that was rolled back.

    Args:
        print: of the template that it was tried with, see `Template`.
        reason: by which move it came about. value: the limit that the move is about.
        harmed: it did harm, and was not merely of no use. crashed: with it the pods did not even start.
        at: when, epoch seconds.
    """

    print: str
    reason: BatchReason
    value: int
    harmed: bool
    crashed: bool
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """The last rollout of batching limits, and what is to be remembered of those before. Times are epoch seconds.

    Args:
        at: when it was begun.
        reason: why.
        before, after: the limits.
        print: of the template, see `Template`. revision: that it had before.
        replicas: when it was begun.
        measured: how the engines fared before; None where that was not known.
        verified: the engines have shown that they run with `after`; None where they have shown nothing.
        begun: when rollouts were begun within the last day, this one included.
        failed: what was rolled back, oldest first.
    """

    phase: Phase
    at: float
    reason: BatchReason
    before: Limits
    after: Limits
    print: str
    revision: str
    replicas: int
    measured: Measured | None = None
    verified: bool | None = None
    begun: tuple[float, ...] = ()
    failed: tuple[Failed, ...] = ()


def write_note(note: Note) -> str:
    """Return the annotation's value."""
    plain = to_plain(note)
    content = plain if isinstance(plain, dict) else {}
    return json.dumps({"version": VERSION, **content}, separators=(",", ":"))


def read_note(text: str) -> Note | None:
    """Return the note that an annotation holds; None for "". Raises ValueError, saying what is wrong with it."""
    if not text:
        return None
    content = parse.mapping(json.loads(text))
    if content.get("version") != VERSION:
        raise ValueError(f"version {content.get('version')!r:.20}, not {VERSION}")
    measured, verified = content.get("measured"), content.get("verified")
    return Note(
        phase=Phase(parse.text(content.get("phase"))),
        at=parse.number(content.get("at")),
        reason=BatchReason(parse.text(content.get("reason"))),
        before=limits_from_plain(content.get("before")),
        after=limits_from_plain(content.get("after")),
        print=parse.text(content.get("print")),
        revision=parse.text(content.get("revision")),
        replicas=parse.whole(content.get("replicas")),
        measured=None if measured is None else _measured_from_plain(measured),
        verified=verified if isinstance(verified, bool) else None,
        begun=parse.each(content.get("begun"), parse.number),
        failed=parse.each(content.get("failed"), lambda one: _failed(parse.row(one, len(Failed._fields)))),
    )


def is_open(template: Template) -> bool:
    """Tell whether what we have rolled out stands in the template, and is neither kept nor taken back yet.

    A note that cannot be read says nothing.
    """
    try:
        note = read_note(template.note)
    except ValueError:
        return False
    return note is not None and stands(note, template) and note.phase is Phase.TRIAL


def stands(note: Note, template: Template) -> bool:
    """Tell whether the template is as the note's last write left it: nobody has changed limits or anything else."""
    limits = note.before if note.phase is Phase.BACK else note.after
    return template.print == note.print and template.limits == limits


def limits_from_plain(plain: object) -> Limits:
    """Return the limits that a plain value says. Raises ValueError."""
    content = parse.mapping(plain)
    said = {one.name: content.get(one.name) for one in fields(Limits)}
    return Limits(**{name: None if value is None else parse.whole(value) for name, value in said.items()})


def _measured_from_plain(plain: object) -> Measured:
    content = parse.mapping(plain)
    numbers = {one.name: parse.maybe(content.get(one.name)) for one in fields(Measured)}
    lacking = [one.name for one in fields(Measured) if numbers[one.name] is None and one.default is MISSING]
    if lacking:
        raise ValueError(f"measured has no {lacking[0]}")
    return Measured(**numbers)  # type: ignore[arg-type]


def _failed(row: Sequence[object]) -> Failed:
    return Failed(
        print=parse.text(row[0]),
        reason=BatchReason(parse.text(row[1])),
        value=parse.whole(row[2]),
        harmed=row[3] is True,
        crashed=row[4] is True,
        at=parse.number(row[5]),
    )
