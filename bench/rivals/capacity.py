"""What one replica of a profile can serve within two latency objectives, as a planner would profile it."""

import math
from dataclasses import dataclass

from autoscaler.sim.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One replica with a steady batch.

    Args:
        rate: requests per second. ttft_s, itl_s: expected.
    """

    rate: float
    ttft_s: float
    itl_s: float


def iteration(profile: Profile, prefill: float, batch: float, context: float, prompt: float) -> float:
    """Return an iteration's seconds with `prefill` tokens of prompts of that mean length."""
    return profile.iteration_s(round(prefill), round(batch), round(context), prefill * prompt / 2.0)


def next_ttft(profile: Profile, queued: float, prompt: float, batch: float, context: float) -> float:
    """Return the seconds to the first token of one more prompt behind `queued` tokens."""
    left, total = queued + prompt, 0.0
    budget = max(1.0, profile.max_num_batched_tokens - batch)
    while left > 0.0:
        chunk = min(left, budget)
        total += iteration(profile, chunk, batch, context, prompt)
        left -= chunk
    return total


def estimate(profile: Profile, batch: int, prompt: float, output: float) -> Estimate:
    """Return what a replica does with `batch` requests that decode, and the prompts that keep it so."""
    context = batch * (prompt + output / 2.0)
    prefill = min(batch * prompt / max(1.0, output), profile.max_num_batched_tokens)
    itl = iteration(profile, prefill, batch, context, prompt)
    ttft = next_ttft(profile, prefill, prompt, batch, context)
    return Estimate(rate=batch / (max(1.0, output) * itl), ttft_s=ttft, itl_s=itl)


def largest_batch(profile: Profile, prompt: float, output: float) -> int:
    """Return how many requests fit: the KV cache, the sequences, and the token budget in a steady state."""
    cache = profile.kv_tokens / max(1.0, prompt + output / 2.0)
    steady = output * profile.max_num_batched_tokens / (prompt + output)
    return max(1, math.floor(min(cache, profile.max_num_seqs, steady)))


def best(profile: Profile, prompt: float, output: float, ttft_s: float, itl_s: float) -> Estimate:
    """Return the largest batch within both objectives; a batch of one where not even that is."""
    low, high = 1, largest_batch(profile, prompt, output)
    while low < high:
        middle = (low + high + 1) // 2
        found = estimate(profile, middle, prompt, output)
        low, high = (middle, high) if found.ttft_s <= ttft_s and found.itl_s <= itl_s else (low, middle - 1)
    return estimate(profile, low, prompt, output)
