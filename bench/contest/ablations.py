"""Variants of the policy beside the policy, on the same runs: less one of its elements, or with the batching limits."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.contest.matches import Match, Row, number
from bench.contest.play import OURS
from bench.contest.variants import ABLATIONS, BATCHING


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """Attainment, GPU-hours over the oracle's (None where it did not run), and reversals an hour."""

    attainment: float
    over: float | None
    reversals: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """A variant, and the policy on the matches and seeds that the variant ran on; means over the matches.

    Args:
        runs: of the variant that count.
    """

    policy: str
    variant: Means
    ours: Means
    matches: Sequence[str]
    runs: int


def ablations(played: Sequence[Match]) -> list[Ablation]:
    """Return those that ran beside the policy, in their order; that of the batching limits has its own table."""
    found = []
    for name in filter(BATCHING.__ne__, ABLATIONS):
        pairs = [pair for match in played if (pair := _pair(match, name)) is not None]
        if pairs:
            found.append(
                Ablation(
                    policy=name,
                    variant=_means([variant for _, variant, _ in pairs]),
                    ours=_means([ours for _, _, ours in pairs]),
                    matches=[match.name for match, _, _ in pairs],
                    runs=sum(len(variant.entries) for _, variant, _ in pairs),
                )
            )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """A match with the batching limits moved as well, beside the policy alone on the same seeds.

    Args:
        higher: the seeds that attained more with them. fewer: those that took fewer GPU-hours.
    """

    match: Match
    moved: Row
    alone: Row
    higher: int
    fewer: int


def joint(played: Sequence[Match]) -> list[Joint]:
    """Return the matches that both ran on."""
    found = []
    for match, moved, alone in (pair for match in played if (pair := _pair(match, BATCHING)) is not None):
        runs = {entry.seed: entry for entry in alone.entries}
        pairs = [(entry, runs[entry.seed]) for entry in moved.entries]
        higher = sum(number(one, "attainment") > number(other, "attainment") for one, other in pairs)
        fewer = sum(number(one, "gpu_hours") < number(other, "gpu_hours") for one, other in pairs)
        found.append(Joint(match=match, moved=moved, alone=alone, higher=higher, fewer=fewer))
    return found


def _pair(match: Match, name: str) -> tuple[Match, Row, Row] | None:
    variant, ours = match.row(name), match.row(OURS)
    if variant is None or ours is None:
        return None
    shared = variant.seeds & ours.seeds
    return (match, variant.on(shared), ours.on(shared)) if shared else None


def _means(rows: Sequence[Row]) -> Means:
    over = [row.against_oracle for row in rows]
    return Means(
        attainment=fmean(row.mean("attainment") for row in rows),
        over=fmean(ratio for ratio in over if ratio is not None) if None not in over else None,
        reversals=fmean(row.mean("reversals_per_hour") for row in rows),
    )
