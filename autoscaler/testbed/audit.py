"""What an account wrote, as the API server's audit log has it."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from autoscaler.testbed.plane import AuditEvent

SCALE = "deployments/scale"
FORBIDDEN = 403


class Scaling(NamedTuple):
    """One accepted change of a Deployment's replicas: when, by which token, and to how many."""

    at: str
    credential: str
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What one account wrote.

    Attributes:
        scalings: in the order of time.
        more: how many other requests changed something, by resource.
        refused: how many requests it had no right to.
        others: who else changed a Deployment or its replicas.
    """

    scalings: tuple[Scaling, ...]
    more: Mapping[str, int]
    refused: int
    others: tuple[str, ...]

    def outside(self, low: int, high: int) -> tuple[Scaling, ...]:
        """Return the changes to fewer or more replicas than these."""
        return tuple(one for one in self.scalings if not low <= one.replicas <= high)

    def hands(self) -> list[tuple[str, int]]:
        """Return who wrote, in turn: each token and how many changes in a row; two that alternate show."""
        return [(who, len(list(some))) for who, some in groupby(self.scalings, key=lambda one: one.credential)]


def written(events: Iterable[AuditEvent], user: str) -> Written:
    """Return what the user wrote."""
    events = sorted(events, key=lambda event: event.at)
    mine = [event for event in events if event.user == user]
    done = [event for event in mine if event.wrote]
    return Written(
        scalings=tuple(
            Scaling(event.at, event.credential, int((event.answer or {})["spec"]["replicas"]))
            for event in done
            if event.resource == SCALE
        ),
        more=Counter(event.resource for event in done if event.resource != SCALE),
        refused=sum(event.code == FORBIDDEN for event in mine),
        others=tuple(sorted({event.user for event in events if event.user != user and _moves(event)})),
    )


def _moves(event: AuditEvent) -> bool:
    """Return whether a request may have changed the replicas of a Deployment that was there."""
    return event.wrote and event.resource in ("deployments", SCALE) and event.verb != "create"
