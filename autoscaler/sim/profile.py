"""A model on its GPUs: how long an iteration takes, and what fits."""

import math
from dataclasses import dataclass

OVERHEAD = 1.12
"""Measured over kernel time of vLLM's own end-to-end figures: median of 105 published rows, H100 and H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model on its GPUs.

    With P prefill tokens, B decoding sequences, K tokens of their context and Q = sum over chunks of
    chunk x (prefix + chunk / 2), one iteration takes

        overhead x [ (base^4 + (token x (P + B))^4)^(1/4) + sequence x B + context x K + prefix x Q ]

    Args:
        name: of the profile.
        model: the served model's name.
        gpus: per replica.
        base_s, token_s, sequence_s, context_s, prefix_s: the coefficients [s].
        kv_tokens: what the KV cache holds.
        cold_start_s: median from creation of a pod to a loaded model. cold_start_sigma: standard deviation of its
            logarithm; None where nobody measured it.
        long_prefill_token_threshold: the largest chunk of one request's prefill, 0 for no limit but the budget.
        reserve_prompt: admit a request only when its whole prompt fits, as vLLM does by default since 0.19.
        gpu, source: for people: the card, and where the coefficients come from.
        mape: mean error of the fit, as a share; None when nobody measured it.
        price_per_gpu_hour: in the user's own currency; None when nobody said.
    """

    name: str
    model: str
    gpus: int
    base_s: float
    token_s: float
    sequence_s: float
    context_s: float
    prefix_s: float
    kv_tokens: int
    cold_start_s: float
    overhead: float = OVERHEAD
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    long_prefill_token_threshold: int = 0
    reserve_prompt: bool = True
    gpu: str = ""
    source: str = ""
    mape: float | None = None
    cold_start_sigma: float | None = None
    price_per_gpu_hour: float | None = None

    def __post_init__(self) -> None:
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two: {self.block_size}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must leave every running sequence its token")

    @property
    def blocks(self) -> int:
        """KV blocks, the null block that vLLM keeps for itself included."""
        return self.kv_tokens // self.block_size

    def iteration_s(self, prefill: int, batch: int, context: int, quadratic: float) -> float:
        """Return the duration of one iteration [s], for P, B, K and Q of the class."""
        tokens = self.token_s * (prefill + batch)
        kernels = math.sqrt(math.sqrt(self.base_s**4 + tokens**4))
        return self.overhead * (
            kernels + self.sequence_s * batch + self.context_s * context + self.prefix_s * quadratic
        )
