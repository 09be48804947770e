"""The work of requests on a profile: seconds of a busy replica, and when it has to be done."""

import math

import numpy as np

from autoscaler.core.types import Floats
from autoscaler.sim.engine import Profile


def request_work(profile: Profile, prompts: Floats, outputs: Floats) -> tuple[Floats, Floats]:
    """Return each request's seconds of prefill and of decode, without its share of an iteration's fixed time.

    An iteration never takes less than the work in it, so the sum is what even a replica that is always full needs.
    The first token comes with the prefill; token i of an answer reads prompt + i tokens of context.
    """
    tokens = np.maximum(outputs - 1.0, 0.0)
    context = tokens * prompts + tokens * (tokens + 1.0) / 2.0
    prefill = profile.token_s * prompts + profile.prefix_s * prompts * prompts / 2.0
    decode = (profile.token_s + profile.sequence_s) * tokens + profile.context_s * context
    return profile.overhead * prefill, profile.overhead * decode


def spread(starts: Floats, lengths: Floats, amounts: Floats, edges: Floats) -> Floats:
    """Return how much falls between neighbouring edges, each amount spread evenly over [start, start + length].

    Args:
        lengths: 0 puts all of it at the start. edges: ascending.
    """
    rates = np.divide(amounts, lengths, out=np.zeros_like(amounts), where=lengths > 0.0)
    at_once = np.where(lengths > 0.0, 0.0, amounts)
    grown = _ramps(starts, rates, edges) - _ramps(starts + lengths, rates, edges)
    inside = np.histogram(starts, edges, weights=at_once)[0]
    return np.asarray(np.maximum(np.diff(grown), 0.0) + inside, dtype=np.float64)


def _ramps(at: Floats, rates: Floats, edges: Floats) -> Floats:
    """Return, at each edge, the sum of rate x (edge - at) over what began before it."""
    bins = np.concatenate(([-math.inf], edges, [math.inf]))
    began = np.cumsum(np.histogram(at, bins, weights=rates)[0])[: len(edges)]
    offset = np.cumsum(np.histogram(at, bins, weights=rates * at)[0])[: len(edges)]
    return np.asarray(edges * began - offset, dtype=np.float64)


def busy_replicas(
    profile: Profile,
    arrivals: Floats,
    prompts: Floats,
    outputs: Floats,
    *,
    duration_s: float,
    token_s: float,
    bin_s: float = 60.0,
) -> Floats:
    """Return per bin how many replicas the work would keep busy all the time.

    Args:
        token_s: time per output token of a well-filled replica: long answers spread their work over that long.
        duration_s: what would run on beyond it is left out.
    """
    edges: Floats = np.arange(math.ceil(duration_s / bin_s) + 1, dtype=np.float64) * bin_s
    prefill, decode = request_work(profile, prompts, outputs)
    work = spread(arrivals, np.zeros_like(arrivals), prefill, edges)
    work += spread(arrivals, np.maximum(outputs - 1.0, 0.0) * token_s, decode, edges)
    return np.asarray(work / bin_s, dtype=np.float64)
