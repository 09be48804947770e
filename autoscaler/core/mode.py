"""The trigger mode: what kind of situation a snapshot shows."""

from collections.abc import Callable

from autoscaler.core.guards import Tick
from autoscaler.core.histogram import is_spread
from autoscaler.core.types import Mode
from autoscaler.core.window import SUMS, observations, row_at

LONG_CONTEXT_TOKENS_PER_S, LONG_CONTEXT_KV, LONG_CONTEXT_S = 5.0, 0.85, 10.0
IDLE_GPU, FULL_BLOCKS = 0.30, 0.65


def trigger_mode(tick: Tick) -> Mode:
    """Return the first mode that fits, the most urgent first."""
    return next((mode for mode, fits in CHECKS if fits(tick)), Mode.NORMAL)


def _is_long_context(tick: Tick) -> bool:
    """Tell whether sequences crawl, under 5 tokens a second each, over a nearly full KV cache."""
    usage, running = tick.facts.kv.growth, tick.facts.running
    position = row_at(tick.state.times, tick.snapshot.at - LONG_CONTEXT_S)
    if usage is None or usage <= LONG_CONTEXT_KV or not running or position < 0:
        return False
    old, new = tick.state.rows[position], tick.state.rows[-1]
    covered, generated = SUMS["covered"], SUMS["generation_tokens"]
    if new.sums[covered] == old.sums[covered]:
        return False
    tokens = new.sums[generated] - old.sums[generated]
    return tokens / (new.at - old.at) / running < LONG_CONTEXT_TOKENS_PER_S


def _is_jittery(tick: Tick) -> bool:
    """Tell whether inter-token latencies of the last minute deviate by more than their SLO."""
    slo = tick.policy.slo.itl
    if slo is None or len(tick.state.rows) < 2:
        return False
    position = max(0, min(row_at(tick.state.times, tick.snapshot.at - 60.0), len(tick.state.rows) - 2))
    observed = observations(tick.state.rows[position], tick.state.rows[-1], "itl")
    if observed is None:
        return False
    return is_spread(observed.bounds, observed.counts, slo.seconds)


def _is_imbalanced(tick: Tick) -> bool:
    """Tell whether the cards idle while most of the KV blocks are held."""
    usage = tick.facts.kv.growth
    if usage is None or usage <= FULL_BLOCKS:
        return False
    busy = [gpu.utilization for gpu in tick.snapshot.gpus if gpu.utilization is not None]
    return bool(busy) and sum(busy) / len(busy) < IDLE_GPU


CHECKS: tuple[tuple[Mode, Callable[[Tick], bool]], ...] = (
    (Mode.INFERENCE_BLOCKED, lambda tick: tick.facts.stalled),
    (Mode.LONG_CONTEXT_BLOCK, _is_long_context),
    (Mode.QPS_SPIKE, lambda tick: tick.state.arrivals.spiking),
    (Mode.MEMORY_IMBALANCE, _is_imbalanced),
    (Mode.BATCH_JITTER, _is_jittery),
    (Mode.IDLE, lambda tick: tick.facts.idle),
)
