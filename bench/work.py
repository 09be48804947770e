"""The work of requests on a profile: seconds of a busy replica, and when it has to be done."""

import math
from collections.abc import Iterator

import numpy as np

from autoscaler.core.types import Floats
from autoscaler.sim.profile import Profile


def request_work(profile: Profile, prompts: Floats, outputs: Floats) -> tuple[Floats, Floats]:
    """Return each request's seconds of prefill and of decode, such that no schedule needs less in total.

    The time of an iteration is convex in its tokens, so no less than any tangent: a fixed part and so much a token. The
    sequences, the resident tokens and the token budget each force a least number of iterations. Of all these bounds the
    highest is taken. The first token comes with the prefill; token i of an answer reads prompt + i tokens of context.
    """
    tokens = np.maximum(outputs - 1.0, 0.0)
    context = tokens * prompts + tokens * (tokens + 1.0) / 2.0
    nothing = np.zeros_like(tokens)
    shares = (  # of an iteration, in prefill and decode
        (nothing, tokens / profile.max_num_seqs),
        (nothing, context / profile.kv_tokens),
        (prompts / profile.max_num_batched_tokens, tokens / profile.max_num_batched_tokens),
    )
    fewest = max(shares, key=lambda share: float(share[0].sum() + share[1].sum()))
    iterations, all_tokens = float(fewest[0].sum() + fewest[1].sum()), float(prompts.sum() + tokens.sum())
    fixed, slope = max(_tangents(profile), key=lambda line: line[0] * iterations + line[1] * all_tokens)
    prefill = slope * prompts + profile.prefix_s * prompts * prompts / 2.0 + fixed * fewest[0]
    decode = (slope + profile.sequence_s) * tokens + profile.context_s * context + fixed * fewest[1]
    return profile.overhead * prefill, profile.overhead * decode


def _tangents(profile: Profile) -> Iterator[tuple[float, float]]:
    """Yield fixed time and time per token of lines that no iteration is faster than."""
    for tokens in np.geomspace(16.0, profile.max_num_batched_tokens, 40).tolist():
        work = profile.token_s * tokens
        norm = math.sqrt(math.sqrt(profile.base_s**4 + work**4))
        slope = profile.token_s * (work / norm) ** 3
        yield norm - slope * tokens, slope
    yield 0.0, profile.token_s


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
