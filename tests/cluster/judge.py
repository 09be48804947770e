"""Judges what a daemon did: the API server's audit log, beside what the daemon said of each tick.

Only the audit log says what was asked of the cluster, and a write that was refused was asked for as well. A decision
line says on what grounds; each write has to be explained by one.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple

from autoscaler.testbed.api import Json
from autoscaler.testbed.plane import AuditEvent

SCALE = ("apps", "deployments/scale", "patch")
MAY_WRITE = frozenset(
    {
        SCALE,
        ("", "events", "create"),
        ("", "events", "patch"),
        ("coordination.k8s.io", "leases", "create"),
        ("coordination.k8s.io", "leases", "patch"),
    }
)
READS = frozenset({"get", "list", "watch"})
QUESTIONS = "authorization.k8s.io"
"""A group whose objects are questions, and are kept by nobody."""
TO_BOUNDS = frozenset({"up_bounds", "down_bounds"})
"""Into its bounds a target is brought at once, whatever is known and whenever the last step was."""
URGENT = frozenset({"up_emergency", "up_saturation"})
"""Growth that passes the cooldown."""
ROUNDING_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a policy allows to do with its Deployment.

    Attributes:
        step: replicas an action, either way.
        hands_off: it is paused, or its policy is in dry-run: nothing may be asked for.
    """

    minimum: int = 1
    maximum: int
    step: int = 1
    cooldown_s: float = 0.0
    hands_off: bool = False


class Blind(NamedTuple):
    """A time in which what the pods do was not to be known, in epoch seconds."""

    since: float
    until: float


class Scaling(NamedTuple):
    """One write of replicas, as it was asked for."""

    target: str
    at: float
    seen: int
    to: int
    wrote: bool
    uid: str

    @classmethod
    def of(cls, event: AuditEvent) -> "Scaling":
        """Return what a scale's JSON patch asks for. Raises ValueError for one that does not test what was seen."""
        steps: list[Json] = event.sent if isinstance(event.sent, list) else []
        by_path = {(step["op"] == "test", step["path"]): step["value"] for step in steps}
        try:
            seen = 0 if by_path.get((True, "/spec")) == {} else by_path[True, "/spec/replicas"]
            to, uid = by_path[False, "/spec/replicas"], by_path[True, "/metadata/uid"]
        except KeyError as error:
            raise ValueError(f"a scale patch without {error}: {event.sent}") from error
        return cls(f"{event.namespace}/{event.name}", seconds(event.at), seen, to, event.wrote, uid)


def seconds(stamp: str) -> float:
    """Return an audit event's time in epoch seconds."""
    return datetime.fromisoformat(stamp).timestamp()


def complaints(
    events: Iterable[AuditEvent],
    lines: Sequence[Json],
    rules: Mapping[str, Rules],
    blind: Sequence[Blind] = (),
    ended: Mapping[str, float] | None = None,
) -> list[str]:
    """Return what a daemon did that it must not do; nothing where all was well.

    Args:
        events: all that its account asked for.
        lines: its decision lines.
        rules: by `namespace/name`; any other Deployment is nobody's to scale.
        blind: of every target.
        ended: when each pod went that is gone, by name [epoch s].
    """
    found: list[str] = []
    scalings: dict[str, list[Scaling]] = {}
    for event in events:
        if not is_write(event):
            continue
        if event.right not in MAY_WRITE:
            found.append(f"{event.verb} of {event.resource} {event.name}")
        elif event.right == SCALE:
            try:
                one = Scaling.of(event)
            except ValueError as error:
                found.append(str(error))
            else:
                scalings.setdefault(one.target, []).append(one)
    for target, asked in scalings.items():
        found += _of_target(rules.get(target), sorted(asked, key=lambda one: one.at), lines, blind, ended or {})
    return found


def silence(events: Iterable[AuditEvent]) -> list[str]:
    """Return what an account asked for that may only read; nothing where it only read."""
    return [f"{event.verb} of {event.resource} {event.name}" for event in events if is_write(event)]


def is_write(event: AuditEvent) -> bool:
    """Return whether a request asks for a change, whatever its answer."""
    return event.verb not in READS and event.group != QUESTIONS


def _of_target(
    rules: Rules | None,
    asked: Sequence[Scaling],
    lines: Sequence[Json],
    blind: Sequence[Blind],
    ended: Mapping[str, float],
) -> Iterator[str]:
    if rules is None or rules.hands_off:
        yield from (f"{one.target} is not to be scaled: {one.seen} to {one.to}" for one in asked)
        return
    done: list[tuple[Scaling, Json]] = []
    for one in asked:
        if not rules.minimum <= one.to <= rules.maximum:
            yield f"{one.target} out of bounds: {one.seen} to {one.to}"
        if not one.wrote:
            continue
        line = explanation(one, lines)
        if line is None:
            yield f"{one.target} scaled without a decision: {one.seen} to {one.to}"
            continue
        done.append((one, line))
        yield from (f"{one.target}, {one.seen} to {one.to}: {why}" for why in _of_step(one, line, rules, blind, ended))
    for (_, before), (one, line) in pairwise(done):
        since_s = line["at"] - before["at"]
        passes = line["reason"] in TO_BOUNDS or (one.to > one.seen and line["reason"] in URGENT)
        if since_s < rules.cooldown_s - ROUNDING_S and not passes:
            yield f"{one.target}, {one.seen} to {one.to}: {since_s:.1f} s after the last step"


PAGE_OF = re.compile(r"vllm \S+ (\S+):")
ENDING_S = 1.0
"""A pod's page goes a moment before the pod."""


def _is_of_one_ended(line: Json, ended: Mapping[str, float]) -> bool:
    """Return whether no reading was missing, or only the page of one pod that was gone by then."""
    if not line["gaps"]:
        return True
    gap = line["gaps"].get("unreachable", {})
    found = PAGE_OF.match(str(gap.get("first", "")))
    only = len(line["gaps"]) == 1 and gap.get("count") == 1 and found is not None
    return only and found is not None and ended.get(found[1], math.inf) <= line["at"] + ENDING_S


def explanation(one: Scaling, lines: Iterable[Json]) -> Json | None:
    """Return the last decision line before a write that wanted just this; None where there is none."""
    fitting = [
        line
        for line in lines
        if line["target"] == one.target
        and (line["current_replicas"], line["desired_replicas"]) == (one.seen, one.to)
        and line["at"] <= one.at
    ]
    return max(fitting, key=lambda line: line["at"], default=None)


def _of_step(
    one: Scaling, line: Json, rules: Rules, blind: Sequence[Blind], ended: Mapping[str, float]
) -> Iterator[str]:
    """Yield what is wrong with one step, given its grounds.

    Args:
        ended: when each pod went that is gone [epoch s]. Where a watch was cut one may still be seen, unanswering.
    """
    if line["reason"] in TO_BOUNDS:
        return
    if abs(one.to - one.seen) > rules.step:
        yield f"a step of more than {rules.step}"
    if one.to > one.seen:
        return
    if missing_parts(line) or not _is_of_one_ended(line, ended):
        yield f"shrunk on missing data: {missing_parts(line) or line['gaps']}"
    if any(period.since < line["at"] < period.until for period in blind):
        yield f"shrunk while nothing was to be known: {line}"


def missing_parts(line: Json) -> list[str]:
    """Return the parts of the score that were not known well enough to shrink."""
    parts: Mapping[str, Any] = (line["score"] or {}).get("parts", {})
    unknown = [name for name, part in parts.items() if part["weight"] > 0.0 and part["shrink_value"] is None]
    return unknown if parts else ["score"]


def is_sighted(line: Json) -> bool:
    """Return whether a decision had all parts of the score, and no reading was missing."""
    return not missing_parts(line) and not line["gaps"]


def intervals_until(lines: Iterable[Json], target: str, since: float, interval_s: float) -> float:
    """Return after how many intervals the next good decision came: all known, and what it wanted was not refused.

    Raises ValueError where none came.
    """
    good = (
        line["at"]
        for line in lines
        if line["target"] == target and line["at"] >= since and line["outcome"] != "failed" and is_sighted(line)
    )
    at: float | None = min(good, default=None)
    if at is None:
        raise ValueError(f"no good decision on {target} since {since}")
    return (at - since) / interval_s
