"""What a model takes of a card's memory: weights, the engine's own reserve, and a KV cache in vLLM's blocks.

Everything is per GPU of a replica unless said otherwise. The layout of the blocks is that of vLLM's V1 engine
(`v1/core/kv_cache_utils.py` of 0.32), so that blocks and tokens equal its `cache_config_info`.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

GIB = 2.0**30
BLOCK_TOKENS, LATENT_BLOCK_TOKENS = 16, 64
"""Tokens a block, for attention with heads and for a shared latent vector (MLA)."""
DTYPE_BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0}
KV_BYTES = {"auto": None, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0}
"""Bytes an element of each `--kv-cache-dtype`; None is the model's own type."""

LOGITS_BYTES = 16.0
"""A vocabulary entry of a sampled sequence: logits in float32 and three copies while top-k and top-p are sorted."""
RUNTIME_BYTES = 0.9 * GIB
"""Beside activations: 0.3 GiB outside of PyTorch's allocator and 0.6 GiB of CUDA graphs, as start-up logs show."""
COMMUNICATION_BYTES = 0.8 * GIB
"""More with tensor parallelism: NCCL's and the all-reduce kernels' buffers."""
MARLIN_HIDDEN, MARLIN_EXPERT = 256, 128
"""What vLLM's kernels pad the two sides of an MXFP4 expert to: 2880 x 2880 becomes 3072 x 2944."""


class Span(NamedTuple):
    """Attention layers of one kind: how many, and the tokens that each looks back on (None: all)."""

    layers: int
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How the linear layers are stored.

    Args:
        method: vLLM's `--quantization`; "" for none.
        bits: a weight with its share of the scales; of the model's own type where there is no method.
    """

    method: str = ""
    bits: float = 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of a model's configuration that memory depends on.

    Args:
        name: for people, and what the server is told to load.
        hidden, heads, vocab: sizes; `ffn` is the widest dense MLP, 0 where all are experts.
        kv_heads, head_dim: of the KV cache; `latent` instead of them where a token's keys and values are one vector.
        spans: the attention layers by how far they look back.
        max_model_len: what the model was made for, in tokens.
        linear: parameters that quantization stores in fewer bits. `kept`: those that it leaves in `dtype`.
        experts, experts_per_token, expert_ffn: of a mixture; 0 without one. `expert_linear` of `linear` are theirs.
        dtype: of weights and activations.
        kv_dtype: "fp8" where the checkpoint brings its own scales for the cache, else "auto".
        checkpoint_bytes: size of the weights' files; None where unknown or where they hold more than is loaded.
        source: where the numbers come from.
    """

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    ffn: int
    spans: tuple[Span, ...]
    max_model_len: int
    linear: int
    kept: int
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"
    latent: int | None = None
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    expert_linear: int = 0
    quantization: Quantization = Quantization()
    checkpoint_bytes: int | None = None
    source: str = ""

    @property
    def layers(self) -> int:
        """All attention layers."""
        return sum(span.layers for span in self.spans)

    @property
    def parameters(self) -> int:
        """All parameters that are loaded."""
        return self.linear + self.kept

    @property
    def block_tokens(self) -> int:
        """Tokens a block, where nobody asks for another number."""
        return BLOCK_TOKENS if self.latent is None else LATENT_BLOCK_TOKENS


def weight_bytes(shape: ModelShape, gpus: int = 1) -> float:
    """Return what the weights take on each of `gpus` cards: the checkpoint's size where known, else by arithmetic."""
    if shape.checkpoint_bytes is not None:
        return (shape.checkpoint_bytes + _padding_bytes(shape)) / gpus
    if shape.quantization.method:
        linear = shape.linear * shape.quantization.bits / 8.0
    else:
        linear = shape.linear * DTYPE_BYTES[shape.dtype]
    return (linear + shape.kept * DTYPE_BYTES[shape.dtype] + _padding_bytes(shape)) / gpus


def _padding_bytes(shape: ModelShape) -> float:
    """Return what loading adds to MXFP4 experts, whose kernels want whole tiles."""
    if shape.quantization.method != "mxfp4" or not shape.expert_linear:
        return 0.0
    padded = _up(shape.hidden, MARLIN_HIDDEN) * _up(shape.expert_ffn, MARLIN_EXPERT)
    share = padded / (shape.hidden * shape.expert_ffn) - 1.0
    return shape.expert_linear * share * shape.quantization.bits / 8.0


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def activation_bytes(shape: ModelShape, gpus: int, batched_tokens: int, seqs: int) -> float:
    """Return the peak of what an iteration needs beside the weights.

    The larger of a full token budget in the widest layer and the logits of all sequences: they are not there at once.
    """
    element = DTYPE_BYTES[shape.dtype]
    dense = 3.0 * shape.ffn / gpus
    mixture = shape.experts_per_token * (3.0 * shape.expert_ffn / gpus + 2.0 * shape.hidden)
    widest = batched_tokens * element * (4.0 * shape.hidden + max(dense, mixture))
    return max(widest, min(seqs, batched_tokens) * shape.vocab * LOGITS_BYTES)


def reserve_bytes(shape: ModelShape, gpus: int, batched_tokens: int, seqs: int) -> float:
    """Return what the engine takes beside weights and KV cache."""
    communication = COMMUNICATION_BYTES if gpus > 1 else 0.0
    return activation_bytes(shape, gpus, batched_tokens, seqs) + RUNTIME_BYTES + communication


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """How a KV cache is cut into blocks on each GPU.

    Args:
        block_tokens: tokens that a block holds for the layers of one table.
        page_bytes: of one layer in a block.
        table_layers: layers that share a table; layers of unequal kinds are filled up to it.
        windows: for each block table of a request the tokens that its layers look back on, None for all. A model whose
            layers are all alike has one table.
    """

    block_tokens: int
    page_bytes: float
    table_layers: int
    windows: tuple[int | None, ...]

    @property
    def block_bytes(self) -> float:
        """Bytes of one block: a page of each layer of a table. All tables draw on one pool of blocks."""
        return self.page_bytes * self.table_layers

    def blocks(self, memory_bytes: float) -> int:
        """Return the blocks that fit, the null block that vLLM keeps for itself included."""
        return max(0, int(memory_bytes // self.block_bytes))

    def request_blocks(self, tokens: int, in_flight: int = 1) -> int:
        """Return the blocks that a request of so many tokens holds.

        Args:
            in_flight: tokens scheduled and not yet settled, kept beside a window: 1 while it decodes.
        """
        return sum(self._table_blocks(window, tokens, in_flight) for window in self.windows)

    def _table_blocks(self, window: int | None, tokens: int, in_flight: int) -> int:
        whole = -(-tokens // self.block_tokens)
        if window is None:
            return whole
        # one more, since a window need not begin where a block does
        return min(whole, -(-min(window - 1 + in_flight, tokens) // self.block_tokens) + 1)

    def sequences(self, blocks: int, tokens: int) -> int:
        """Return how many decoding requests of so many tokens fit at once, the null block left out."""
        return max(0, blocks - 1) // self.request_blocks(tokens)

    def longest(self, blocks: int, batched_tokens: int) -> int:
        """Return the tokens of the longest request that fits alone while its prompt is computed in such chunks."""
        low, high = 0, max(0, blocks - 1) * self.block_tokens
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.request_blocks(middle, 2 * batched_tokens) <= blocks - 1
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def size_tokens(self, blocks: int, max_model_len: int, in_flight: int) -> int:
        """Return vLLM's `kv_cache_size_tokens`: the requests of `max_model_len` that fit, with a fraction, in tokens.

        Args:
            in_flight: as `request_blocks`; for vLLM's number its token budget, twice that with asynchronous scheduling.
        """
        request = sum(
            -(-max_model_len // self.block_tokens)
            if window is None
            else -(-min(window - 1 + in_flight, max_model_len) // self.block_tokens) + 1
            for window in self.windows
        )
        return int(blocks / request * max_model_len)


def kv_layout(shape: ModelShape, gpus: int, element_bytes: float, block_tokens: int | None = None) -> KvLayout:
    """Return the layout on each of `gpus` cards.

    Heads are divided among the cards and repeated when there are fewer heads than cards; a latent vector is repeated
    on each. Layers of two kinds are cut into tables of equal size, as many layers as the rarer kind has.
    """
    block = block_tokens or shape.block_tokens
    if shape.latent is None:
        token = 2.0 * max(1, shape.kv_heads // gpus) * shape.head_dim * element_bytes
    else:
        token = shape.latent * element_bytes
    counts = [span.layers for span in shape.spans]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    windows = [span.window for span in shape.spans for _ in range(math.ceil(span.layers / size))]
    return KvLayout(block_tokens=block, page_bytes=block * token, table_layers=size, windows=tuple(windows))


def kv_token_bytes(shape: ModelShape, element_bytes: float) -> float:
    """Return the bytes of one token's keys and values in all layers of one copy of the cache, over all cards."""
    token = 2.0 * shape.kv_heads * shape.head_dim if shape.latent is None else float(shape.latent)
    return shape.layers * token * element_bytes


def kv_element_bytes(shape: ModelShape, kv_dtype: str) -> float:
    """Return the bytes of one element of the cache; "auto" is the checkpoint's choice, else the model's type."""
    chosen = KV_BYTES[shape.kv_dtype if kv_dtype == "auto" else kv_dtype]
    return DTYPE_BYTES[shape.dtype] if chosen is None else chosen
