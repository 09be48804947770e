"""Demand: the work of the last minutes, in replicas. It does not fall when replicas are added."""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autoscaler.core.policy import Policy, StepTime
from autoscaler.core.types import Demand, Floats, GapReason
from autoscaler.core.window import SUMS, FleetRow, row_at, spanned_seconds

MIN_FIRST_TOKENS = 20.0
MIN_BINS = 3
MAX_BASE_SHARE = 0.3
"""Floor of 1 - c0 / (share of the ITL SLO): an SLO near the bare step time would ask for endless replicas."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DemandWindow:
    """Demand per bin, oldest first.

    Args:
        terms: shape (3, bins): ITL, KV and sequences, in replicas; NaN in a bin that too few engines covered.
        latest: the newest bin.
        prompt_per_request: prompt tokens per first token, prefix hits left out; None when too few are known.
    """

    terms: Floats
    latest: Demand
    prompt_per_request: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
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
    nothing = Demand(gap=GapReason.NO_HISTORY)
    bin_s, count = policy.prediction.bin_s, round(policy.prediction.window_s / policy.prediction.bin_s)
    empty = DemandWindow(terms=np.empty((3, 0)), latest=nothing, prompt_per_request=None)
    if capacity.kv_tokens is None:
        return DemandWindow(terms=empty.terms, latest=Demand(gap=GapReason.NO_CAPACITY), prompt_per_request=None)
    picked: list[FleetRow] = []
    for index in range(count, -1, -1):
        edge = times[-1] - index * bin_s
        position = row_at(times, edge)
        if position >= 0 and edge - times[position] <= policy.interval_s + 1.0:
            picked.append(rows[position])
    if len(picked) < MIN_BINS + 1:
        return empty
    sums = np.array([row.sums for row in picked])
    delta = sums[1:] - sums[:-1]
    prompt = _prompt_per_request(sums)
    seconds = spanned_seconds(delta, np.array([new.at - old.at for old, new in pairwise(picked)]))
    terms = _terms(policy, line, capacity, delta, seconds, prompt or 0.0)
    expected = delta[:, SUMS["expected"]]
    covered = (expected > 0.0) & (delta[:, SUMS["covered"]] >= policy.demand.min_coverage * expected)
    if not covered.all():
        terms[:, ~covered] = np.nan
    if np.count_nonzero(covered) < MIN_BINS or not covered[-1]:
        return DemandWindow(terms=terms, latest=nothing, prompt_per_request=prompt)
    itl, kv, sequences = (float(value) for value in terms[:, -1])
    return DemandWindow(terms=terms, latest=Demand(itl=itl, kv=kv, sequences=sequences), prompt_per_request=prompt)


def _prompt_per_request(sums: Floats) -> float | None:
    """Return prefill tokens per first token over the window; None with fewer than `MIN_FIRST_TOKENS`."""
    first, last = sums[0], sums[-1]
    tokens = last[SUMS["first_tokens"]] - first[SUMS["first_tokens"]]
    if tokens < MIN_FIRST_TOKENS:
        return None
    return float(max(0.0, _prefill(last - first)) / tokens)


def _prefill(delta: Floats) -> Floats:
    """Return prompt tokens that the engines had to compute: prefix-cache hits left out."""
    return np.asarray(delta[..., SUMS["prompt_tokens"]] - delta[..., SUMS["cached_prompt_tokens"]])


def _terms(policy: Policy, line: StepTime, capacity: Capacity, delta: Floats, seconds: Floats, prompt: float) -> Floats:
    """Return the three closed forms for each bin, shape (3, bins)."""
    arriving = _prefill(delta) + delta[:, SUMS["waiting"]] * prompt
    prefill = np.maximum(arriving, 0.0) / seconds
    generated = delta[:, SUMS["generation_tokens"]] / seconds
    running = delta[:, SUMS["running"]]
    context = delta[:, SUMS["kv_tokens"]] / np.maximum(running, 1e-9)
    if not running.all():
        context[running <= 0.0] = prompt
    work = line.cp * prefill + (line.cb + line.ck * context) * generated
    itl = policy.slo.itl.seconds if policy.slo.itl is not None else math.inf
    room = max(MAX_BASE_SHARE, 1.0 - line.c0 / (policy.demand.itl_share * itl))
    kv_tokens = capacity.kv_tokens or math.inf
    resident = generated * context * line.c0 / (policy.demand.kv_share * kv_tokens)
    sequences = generated * line.c0 / (policy.demand.sequence_share * capacity.sequences)
    return np.array((work / room, work + resident, work + sequences))
