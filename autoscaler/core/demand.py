"""Demand: the work of the last minutes, in replicas. It does not fall when replicas are added."""

import math
from dataclasses import dataclass
from itertools import pairwise
from operator import sub
from typing import NamedTuple

from autoscaler.core.facts import Facts
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
    """

    latest: Demand
    terms: tuple[tuple[float, ...], ...] = ((), (), ())


class Capacity(NamedTuple):
    """What one replica holds: tokens of KV cache (None when unknown) and sequences."""

    kv_tokens: float | None
    sequences: float

    @classmethod
    def of(cls, policy: Policy, facts: Facts) -> "Capacity":
        """Return what the engines and their arguments say of it, and the policy where these do not."""
        return cls(kv_tokens=facts.kv_tokens, sequences=float(facts.sequences or policy.demand.max_num_seqs))


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
    tokens = _tokens_per_request(edges[0], edges[-1])
    law = _law(policy, line, capacity, tokens[0] if tokens is not None else 0.0)
    bins = [law.terms(old, new) for old, new in pairwise(edges)]
    terms = tuple(zip(*bins, strict=True))
    itl, kv, sequences = bins[-1]
    missing = sum(map(math.isnan, terms[0]))
    if len(bins) - missing < MIN_BINS or math.isnan(itl):
        latest = Demand(gap=GapReason.NO_HISTORY)
    else:
        latest = Demand(itl=itl, kv=kv, sequences=sequences)
    return DemandWindow(terms=terms, latest=latest)


def rush_demand(
    policy: Policy,
    line: StepTime,
    capacity: Capacity,
    rows: tuple[FleetRow, ...],
    times: tuple[float, ...],
    waiting: float,
    horizon_s: float,
) -> float | None:
    """Return the replicas that what arrives now needs, if the queue is worked off within the horizon as well.

    A saturated fleet serves what it can, whatever arrives. Over the last `emergency.window` each request by which the
    queue grew therefore counts whole, with its answer, and so does each that waits, spread over the horizon; but those
    no more than what arrives, or replicas that do not come would be ordered again for the queue that they leave.
    None when the requests' lengths, or the engines, are known too little.
    """
    old = rows[max(0, row_at(times, times[-1] - policy.emergency.window_s))]
    first = rows[max(0, row_at(times, times[-1] - policy.prediction.window_s))]
    tokens = _tokens_per_request(first, rows[-1])
    if tokens is None or capacity.kv_tokens is None or old is rows[-1]:
        return None
    prompt, answer = tokens
    law = _law(policy, line, capacity, prompt)
    rates = law.rates(old, rows[-1])
    if rates is None:
        return None
    queued = max(rates.queued, 0.0)
    arriving = queued + min(queued, waiting / horizon_s)
    return max(law.replicas(rates.prefill + arriving * prompt, rates.generated + arriving * answer, rates.context))


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


def _tokens_per_request(old: FleetRow, new: FleetRow) -> tuple[float, float] | None:
    """Return prefill and generated tokens per first token between two rows, prefix hits left out; None with fewer than
    `MIN_FIRST_TOKENS`.
    """
    requests = new.sums[FIRST_TOKENS] - old.sums[FIRST_TOKENS]
    _, prefill, generated, *_ = map(sub, new.work, old.work)
    if requests < MIN_FIRST_TOKENS:
        return None
    return max(0.0, prefill) / requests, max(0.0, generated) / requests


class _Rates(NamedTuple):
    """Work between two rows: prefill and generated tokens a second, requests a second by which the queue grew, and the
    context of a running request in tokens.
    """

    prefill: float
    generated: float
    queued: float
    context: float


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

    def rates(self, old: FleetRow, new: FleetRow) -> _Rates | None:
        """Return the work between two rows; None when too few engines covered it."""
        elapsed, prefill, generated, waiting, running, kv_tokens, covered, expected, ticks, spanned = map(
            sub, new.work, old.work
        )
        if not expected > 0.0 or covered < self.min_coverage * expected:
            return None
        seconds = spanned_seconds(elapsed, spanned, expected / ticks)
        context = kv_tokens / running if running > 0.0 else self.prompt
        return _Rates(prefill / seconds, generated / seconds, waiting / seconds, context)

    def terms(self, old: FleetRow, new: FleetRow) -> tuple[float, float, float]:
        """Return the replicas that the work between two rows needs, by term; NaN when too few engines covered it."""
        rates = self.rates(old, new)
        if rates is None:
            return math.nan, math.nan, math.nan
        # Requests that queue up are work that arrives and is not yet served.
        return self.replicas(max(rates.prefill + rates.queued * self.prompt, 0.0), rates.generated, rates.context)

    def replicas(self, prefill: float, generated: float, context: float) -> tuple[float, float, float]:
        """Return the replicas that prefill and generated tokens a second need at a context of so many, by term."""
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
