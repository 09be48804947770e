"""Demand: the work of the last minutes, in replicas. It does not fall when replicas are added."""

import math
from dataclasses import dataclass
from itertools import pairwise
from operator import sub
from typing import NamedTuple

from autoscaler.core.policy import Policy, StepTime
from autoscaler.core.types import Demand, GapReason
from autoscaler.core.window import SUMS, FleetRow, row_at, spanned_seconds

MIN_FIRST_TOKENS = 20.0
MIN_BINS = 3
FIRST_TOKENS = SUMS["first_tokens"]
MAX_BASE_SHARE = 0.3
"""Floor of 1 - c0 / (share of the ITL SLO): an SLO near the bare step time would ask for endless replicas."""


class DemandWindow(NamedTuple):
    """Demand per bin, oldest first.

    Args:
        latest: the newest bin.
        terms: of ITL, KV and sequences, in this order, one value a bin in replicas; NaN in a bin that too few engines
            covered.
        prompt_per_request: prompt tokens per first token, prefix hits left out; None when too few are known.
    """

    latest: Demand
    terms: tuple[tuple[float, ...], ...] = ((), (), ())
    prompt_per_request: float | None = None


class Capacity(NamedTuple):
    """What one replica holds: tokens of KV cache (None when unknown) and sequences."""

    kv_tokens: float | None
    sequences: float


def measure_demand(
    policy: Policy, line: StepTime, capacity: Capacity, rows: tuple[FleetRow, ...], times: tuple[float, ...]
) -> DemandWindow:
    """Return the demand of the newest bins, aligned to the newest row.

    With U = cp P + (cb + ck ctx) G, the marginal work of P prefill and G generated tokens a second, N replicas step in
    c0 / (1 - U/N). Of three closed forms the largest counts: N that keeps the mean step under its share of the ITL
    SLO; N at which the resident tokens G ctx c0 / (1 - U/N) fill their share of the cache; N at which the sequences
    fill theirs. Queue growth counts as arriving prefill work.
    """
    if capacity.kv_tokens is None:
        return DemandWindow(latest=Demand(gap=GapReason.NO_CAPACITY))
    edges = _edges(policy, rows, times)
    if len(edges) < MIN_BINS + 1:
        return DemandWindow(latest=Demand(gap=GapReason.NO_HISTORY))
    prompt = _prompt_per_request(edges[0], edges[-1])
    law = _law(policy, line, capacity, prompt or 0.0)
    bins = [law.terms(old, new) for old, new in pairwise(edges)]
    terms = tuple(zip(*bins, strict=True))
    itl, kv, sequences = bins[-1]
    missing = sum(map(math.isnan, terms[0]))
    if len(bins) - missing < MIN_BINS or math.isnan(itl):
        latest = Demand(gap=GapReason.NO_HISTORY)
    else:
        latest = Demand(itl=itl, kv=kv, sequences=sequences)
    return DemandWindow(terms=terms, latest=latest, prompt_per_request=prompt)


def _edges(policy: Policy, rows: tuple[FleetRow, ...], times: tuple[float, ...]) -> list[FleetRow]:
    """Return the rows at the edges of the bins, oldest first, without those that no row is near."""
    bin_s, slack_s = policy.prediction.bin_s, policy.interval_s + 1.0
    found = []
    for index in range(round(policy.prediction.window_s / bin_s), -1, -1):
        edge = times[-1] - index * bin_s
        place = row_at(times, edge)
        if place >= 0 and edge - times[place] <= slack_s:
            found.append(rows[place])
    return found


def _prompt_per_request(old: FleetRow, new: FleetRow) -> float | None:
    """Return prefill tokens per first token between two rows; None with fewer than `MIN_FIRST_TOKENS`."""
    requests = new.sums[FIRST_TOKENS] - old.sums[FIRST_TOKENS]
    _, prefill, *_ = map(sub, new.work, old.work)
    return max(0.0, prefill) / requests if requests >= MIN_FIRST_TOKENS else None


@dataclass(frozen=True, slots=True)
class _Law:
    """The three closed forms with everything filled in but the work.

    Args:
        prompt: prefill tokens of a request.
        room: replicas = work / room for the ITL.
        kv_s, sequence_s: seconds that one generated token holds a share of a replica: of the cache, for each token of
            its context, and of the sequences.
        min_coverage: share of the pods that must have covered a bin.
    """

    line: StepTime
    prompt: float
    room: float
    kv_s: float
    sequence_s: float
    min_coverage: float

    def terms(self, old: FleetRow, new: FleetRow) -> tuple[float, float, float]:
        """Return the replicas that the work between two rows needs, by term; NaN when too few engines covered it."""
        elapsed, prefill, generated, waiting, running, kv_tokens, covered, expected, ticks, spanned = map(
            sub, new.work, old.work
        )
        if not expected > 0.0 or covered < self.min_coverage * expected:
            return math.nan, math.nan, math.nan
        seconds = spanned_seconds(elapsed, spanned, expected / ticks)
        # Requests that queue up are work that arrives and is not yet served.
        prefill = max(prefill + waiting * self.prompt, 0.0) / seconds
        context = kv_tokens / running if running > 0.0 else self.prompt
        generated /= seconds
        work = self.line.cp * prefill + (self.line.cb + self.line.ck * context) * generated
        return work / self.room, work + generated * context * self.kv_s, work + generated * self.sequence_s


def _law(policy: Policy, line: StepTime, capacity: Capacity, prompt: float) -> _Law:
    itl = policy.slo.itl.seconds if policy.slo.itl is not None else math.inf
    return _Law(
        line=line,
        prompt=prompt,
        room=max(MAX_BASE_SHARE, 1.0 - line.c0 / (policy.demand.itl_share * itl)),
        kv_s=line.c0 / (policy.demand.kv_share * (capacity.kv_tokens or math.inf)),
        sequence_s=line.c0 / (policy.demand.sequence_share * capacity.sequences),
        min_coverage=policy.demand.min_coverage,
    )
