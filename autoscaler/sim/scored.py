"""Runs with a name and a seed, and what each policy came to over its seeds."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from statistics import fmean

from autoscaler.sim.run import QUANTILES, Figures

P99 = QUANTILES.index(0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The figures of one run.

    Args:
        policy, seed: which run. hours: simulated.
    """

    policy: str
    seed: int
    hours: float
    figures: Figures

    @property
    def attainment(self) -> float:
        """Share of the requests within both objectives; 1 without requests, which nobody missed."""
        return 1.0 if self.figures.attainment is None else self.figures.attainment

    @property
    def worst(self) -> float:
        """The smallest share of any ten minutes; 1 without requests."""
        return 1.0 if self.figures.worst_ten_minutes is None else self.figures.worst_ten_minutes

    @property
    def flaps_per_hour(self) -> float:
        """Actions within ten minutes of one in the other direction, an hour."""
        return self.figures.flaps / self.hours

    def to_document(self) -> dict[str, object]:
        """Return it as JSON has it: unknown latencies are null."""
        figures = {field.name: _plain(getattr(self.figures, field.name)) for field in fields(self.figures)}
        return {"policy": self.policy, "seed": self.seed, "hours": self.hours, **figures}


def _plain(value: object) -> object:
    """Return a figure as JSON has it; a tuple holds the quantiles."""
    if isinstance(value, tuple):
        named = zip(QUANTILES, value, strict=True)
        return {f"p{100 * quantile:g}": None if math.isnan(one) else one for quantile, one in named}
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A policy over its seeds: means, but sums of requests and failed ones, and the worst of `worst`.

    Args:
        lowest, highest: attainment over the seeds.
        worst: attainment of the worst ten minutes.
    """

    policy: str
    seeds: int
    attainment: float
    lowest: float
    highest: float
    gpu_hours: float
    reversals_per_hour: float
    flaps_per_hour: float
    worst: float
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    failed: int
    requests: int


def means(runs: Iterable[Scored]) -> list[Mean]:
    """Return a row for each policy, in the order in which they first come."""
    groups: dict[str, list[Scored]] = {}
    for one in runs:
        groups.setdefault(one.policy, []).append(one)
    return [
        Mean(
            policy=policy,
            seeds=len(group),
            attainment=fmean(one.attainment for one in group),
            lowest=min(one.attainment for one in group),
            highest=max(one.attainment for one in group),
            gpu_hours=fmean(one.figures.gpu_hours for one in group),
            reversals_per_hour=fmean(one.figures.reversals_per_hour for one in group),
            flaps_per_hour=fmean(one.flaps_per_hour for one in group),
            worst=min(one.worst for one in group),
            ttft_s=_each([one.figures.ttft_s for one in group]),
            tpot_s=_each([one.figures.tpot_s for one in group]),
            failed=sum(one.figures.failed for one in group),
            requests=sum(one.figures.requests for one in group),
        )
        for policy, group in groups.items()
    ]


def _each(rows: list[tuple[float, ...]]) -> tuple[float, ...]:
    """Return the mean of each column."""
    return tuple(fmean(column) for column in zip(*rows, strict=True))
