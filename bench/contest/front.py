"""The front that our policy can be moved along by its margin, and how rivals stand against it."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from bench.contest.matches import Match, Row
from bench.contest.picture import Point, front
from bench.contest.play import GOAL, OURS
from bench.contest.variants import SWEEP

EQUAL = 0.0005
"""Attainments this near to each other are the same."""
LEAST_MISSED = 1e-6


@dataclass(frozen=True, slots=True)
class Front:
    """What our policy uses, by what it attains: the best of its margins, straight between two of them.

    Both are logarithmic, as the pictures have them: GPU-hours, and the share of the requests that is missed.

    Args:
        points: at least one, the cheapest first.
    """

    points: Sequence[Point]

    @property
    def lowest(self) -> float:
        """The attainment of the cheapest."""
        return self.points[0].attainment

    def gpu_hours(self, attainment: float) -> float | None:
        """Return what that attainment takes, at the least the cheapest margin's; None where none attains it."""
        highest = self.points[-1]
        if attainment > highest.attainment:
            return highest.gpu_hours if attainment - highest.attainment <= EQUAL else None
        effort = [-_missed(point.attainment) for point in self.points]
        hours = [math.log(point.gpu_hours) for point in self.points]
        return math.exp(float(np.interp(-_missed(attainment), effort, hours)))


def _missed(attainment: float) -> float:
    return math.log(max(1.0 - attainment, LEAST_MISSED))


def swept(match: Match) -> list[Row]:
    """Return our rows along the margin, all on the seeds that all of them ran on."""
    rows = [row for row in match.rows if row.policy == OURS or row.policy in SWEEP]
    shared = frozenset.intersection(*(row.seeds for row in rows)) if rows else frozenset()
    return [row.on(shared) for row in rows] if shared else []


def our_front(match: Match, seeds: Collection[int]) -> Front | None:
    """Return our front on these seeds; None where one of them is missing."""
    rows = [row.on(seeds) for row in swept(match) if row.seeds >= set(seeds)]
    points = [
        Point(name=row.policy, gpu_hours=row.mean("gpu_hours"), attainment=row.mean("attainment"), kind="ours")
        for row in rows
    ]
    return Front(front(points)) if points else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    """A rival beside our policy at the same attainment, on the seeds that both ran on.

    Args:
        gpu_hours: the rival's.
        ours: what our front takes for as much; None where it does not reach it.
        spanned: whether it attains at least what the cheapest of ours does.
    """

    match: str
    policy: str
    attainment: float
    gpu_hours: float
    ours: float | None
    spanned: bool

    @property
    def ratio(self) -> float | None:
        """Our GPU-hours over the rival's."""
        return None if self.ours is None else self.ours / self.gpu_hours


def duel(match: Match, row: Row) -> Duel | None:
    """Return it; None where no seed is shared. A rival that attains less than the cheapest of ours meets that one."""
    ours = swept(match)
    shared = row.seeds & ours[0].seeds if ours else frozenset()
    curve = our_front(match, shared) if shared else None
    if curve is None:
        return None
    row = row.on(shared)
    attained, used = row.mean("attainment"), row.mean("gpu_hours")
    return Duel(
        match=match.name,
        policy=row.policy,
        attainment=attained,
        gpu_hours=used,
        ours=curve.gpu_hours(attained),
        spanned=attained >= curve.lowest,
    )


def duels(match: Match) -> list[Duel]:
    """Return those with the rivals and static fleets of a match that attain what one of our margins does."""
    rows = (row for row in match.rows if row.kind != "ours" and row.policy != "oracle")
    return [found for row in rows if (found := duel(match, row)) is not None and found.spanned]


@dataclass(frozen=True, slots=True, kw_only=True)
class Everywhere:
    """A policy with one configuration over all the matches of a day.

    Args:
        rows: one of each match, in their order.
    """

    policy: str
    rows: Sequence[Row]
    matches: Sequence[Match]

    @property
    def kind(self) -> str:
        """Whose it is."""
        return self.rows[0].kind

    @property
    def lowest(self) -> tuple[float, str]:
        """The least attainment of a match, and where."""
        return min((row.mean("attainment"), match.name) for row, match in zip(self.rows, self.matches, strict=True))

    @property
    def attainment(self) -> float:
        """The mean over the matches."""
        return math.fsum(row.mean("attainment") for row in self.rows) / len(self.rows)

    @property
    def over(self) -> list[float]:
        """GPU-hours over the oracle's, of each match in which the oracle ran."""
        return [ratio for row in self.rows if (ratio := row.against_oracle) is not None]

    @property
    def mean_over(self) -> float:
        """Their mean; infinite without any."""
        return math.fsum(self.over) / len(self.over) if self.over else math.inf

    @property
    def attains(self) -> bool:
        """Whether it meets the goal in every match."""
        return self.lowest[0] >= GOAL


def everywhere(played: Sequence[Match]) -> list[Everywhere]:
    """Return the policies that ran in all matches of a day: those that attain first, the cheapest first.

    Of the others those that attain most come first. Static fleets and the oracle are sized for each trace, so they are
    not among them.
    """
    days = [match for match in played if match.of_a_day]
    names = dict.fromkeys(row.policy for match in days for row in match.shown if row.kind != "hindsight")
    found = []
    for name in names:
        rows = [row for match in days if (row := match.row(name)) is not None]
        if len(rows) == len(days):
            found.append(Everywhere(policy=name, rows=rows, matches=days))
    return sorted(found, key=lambda one: (not one.attains, one.mean_over if one.attains else -one.lowest[0]))
