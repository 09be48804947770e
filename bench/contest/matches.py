"""The results as matches: all policies on one trace at one scale, a row for each, over its seeds."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import fmean

from bench.contest.play import HINDSIGHT, OURS, TUNED
from bench.contest.results import Entry, Spread
from bench.contest.traces import TRACES
from bench.contest.variants import VARIANTS
from bench.oracle import THETAS
from bench.rivals import RIVALS

DAY_S = 20 * 3600.0
"""From this length on a trace is one of a day."""
Oracles = Mapping[int, Entry]
"""The oracle's runs by seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy on one trace at one scale, over its seeds.

    Args:
        entries: its runs, those without a plan left out; at least one.
        oracles: the oracle's runs on the same ground.
    """

    policy: str
    entries: Sequence[Entry]
    oracles: Oracles

    @property
    def kind(self) -> str:
        """Whether it is ours, a rival, or knows in hindsight."""
        if self.policy in HINDSIGHT:
            return "hindsight"
        return "rival" if self.policy.removesuffix(TUNED) in RIVALS else "ours"

    @property
    def seeds(self) -> frozenset[int]:
        """The seeds that it ran on."""
        return frozenset(entry.seed for entry in self.entries)

    def on(self, seeds: Collection[int]) -> "Row":
        """Return the row of these seeds alone; it must have run on one of them."""
        return replace(self, entries=[entry for entry in self.entries if entry.seed in seeds])

    def spread(self, name: str) -> Spread:
        """Return a figure over the seeds."""
        return Spread.of(number(entry, name) for entry in self.entries)

    def mean(self, name: str) -> float:
        """Return a figure's mean over the seeds."""
        return self.spread(name).mean

    @property
    def useful(self) -> float:
        """The share of the GPU-hours that the work itself takes, at the least."""
        return fmean(entry.ground["fluid_gpu_hours"] / number(entry, "gpu_hours") for entry in self.entries)

    def beside_oracle(self, compare: Callable[[Entry, Entry], float | None]) -> float | None:
        """Return a mean over the runs that the oracle has a run beside; None without any.

        Args:
            compare: is given the run and the oracle's.
        """
        found = (compare(entry, self.oracles[entry.seed]) for entry in self.entries if entry.seed in self.oracles)
        known = [value for value in found if value is not None]
        return fmean(known) if known else None

    @property
    def against_oracle(self) -> float | None:
        """Its GPU-hours over the oracle's."""
        return self.beside_oracle(lambda own, other: number(own, "gpu_hours") / number(other, "gpu_hours"))

    def provisioned(self, name: str) -> float | None:
        """Return the share of the time `under` or `over` what the oracle's theta asks for."""
        return self.beside_oracle(lambda own, other: _at_theta(own, other, name))


def _at_theta(own: Entry, oracle: Entry, name: str) -> float | None:
    shares = (own.figures or {}).get(name)
    return None if shares is None else float(shares[THETAS.index(oracle.settings["theta"])])


def number(entry: Entry, name: str) -> float:
    """Return a figure of a run, of a latency the p99; NaN where it is not known."""
    value = (entry.figures or {}).get(name)
    if isinstance(value, dict):
        value = value["p99"]
    return float("nan") if value is None else float(value)


def attained_percent(share: float) -> str:
    """Return an attainment as people read it, rounded down: what is below the goal never reads as the goal."""
    return f"{math.floor(1e4 * share + 1e-6) / 100.0:.2f} %"


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """All policies on one trace at one scale, over the same length of it.

    Args:
        rows: the best attainment first.
        ground: a run, for what all met.
    """

    trace: str
    scale: float
    hours: float | None
    rows: Sequence[Row]
    ground: Entry

    @property
    def name(self) -> str:
        """Return a name for people and files."""
        return f"{self.trace}-x{self.scale:g}" + (f"-{self.hours:g}h" if self.hours is not None else "")

    @property
    def title(self) -> str:
        """Return it as a heading."""
        part = f", its first {self.hours:g} h" if self.hours is not None else ""
        return f"{self.trace}, {self.scale:g} x the traffic{part}"

    @property
    def of_a_day(self) -> bool:
        """Whether it is one of those that targets are set for."""
        return float(self.ground.ground.get("duration_s", 0.0)) >= DAY_S

    @property
    def shown(self) -> list[Row]:
        """The rows of the match's own table: variants of ours have tables of their own."""
        return [row for row in self.rows if row.policy not in VARIANTS]

    @property
    def seeds(self) -> int:
        """The fewest seeds of a row that is shown."""
        return min((len(row.entries) for row in self.shown), default=0)

    @property
    def fluid(self) -> float:
        """The bound's GPU-hours, a mean over the seeds."""
        return fmean(
            {entry.seed: entry.ground["fluid_gpu_hours"] for row in self.rows for entry in row.entries}.values()
        )

    def row(self, policy: str) -> Row | None:
        """Return a policy's row."""
        return next((row for row in self.rows if row.policy == policy), None)

    def others(self) -> Iterator[tuple[Row, Row]]:
        """Yield our row beside each rival's and each static fleet's, both on the seeds that both ran on."""
        ours = self.row(OURS)
        for row in self.rows:
            shared = ours.seeds & row.seeds if ours is not None else frozenset()
            if ours is not None and shared and row.kind != "ours" and row.policy != "oracle":
                yield ours.on(shared), row.on(shared)


def matches(entries: Iterable[Entry]) -> list[Match]:
    """Return the matches that the runs make, in the order of the traces."""
    order = [trace.name for trace in TRACES]

    def where(entry: Entry) -> tuple[int, float, float]:
        return order.index(entry.trace), entry.scale, entry.hours or float("inf")

    found = []
    for _, group in groupby(sorted(entries, key=where), where):
        runs = [run for run in group if run.figures is not None]
        oracles = {run.seed: run for run in runs if run.policy == "oracle"}
        rows = [
            Row(policy=policy, entries=[run for run in runs if run.policy == policy], oracles=oracles)
            for policy in dict.fromkeys(run.policy for run in runs)
        ]
        rows.sort(key=lambda row: (-row.mean("attainment"), row.mean("gpu_hours")))
        if rows:
            first = runs[0]
            found.append(Match(trace=first.trace, scale=first.scale, hours=first.hours, rows=rows, ground=first))
    return found
