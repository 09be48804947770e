"""Weights, layout of the KV cache and the engine's own memory, beside vLLM's own code, pages and start-up logs."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from autoscaler.catalog import model
from autoscaler.core.kv import (
    GIB,
    LATENT_BLOCK_TOKENS,
    ModelShape,
    Quantization,
    Span,
    activation_bytes,
    kv_element_bytes,
    kv_layout,
    kv_token_bytes,
    reserve_bytes,
    weight_bytes,
)

PAGES = Path(__file__).parents[1] / "data" / "vllm"
SHAPE = ModelShape(
    name="small", hidden=256, heads=4, kv_heads=2, head_dim=64, vocab=1024, ffn=512, spans=(Span(4, None),),
    max_model_len=2048, linear=1_000_000, kept=10_000,
)  # fmt: skip


def like(spans: tuple[Span, ...], kv_heads: int, head_dim: int, latent: int | None = None) -> ModelShape:
    """Return a shape with these attention layers."""
    return replace(SHAPE, spans=spans, kv_heads=kv_heads, head_dim=head_dim, latent=latent)


# What vLLM 0.32.0's own `get_kv_cache_configs` and `get_kv_cache_capacity` gave for such layers: blocks, and the
# label kv_cache_size_tokens.
BY_VLLM = [
    pytest.param((Span(32, None),), 8, 128, 2.0, 131_072, 16_384, 53.71, 27_499, 439_984, id="8B"),
    pytest.param((Span(32, None),), 8, 128, 1.0, 131_072, 16_384, 53.71, 54_999, 879_984, id="8B, 8 bits"),
    pytest.param((Span(80, None),), 2, 128, 2.0, 131_072, 16_384, 35.0, 28_672, 458_752, id="70B over four"),
    pytest.param((Span(64, None),), 4, 128, 2.0, 32_768, 16_384, 8.22, 4_208, 67_328, id="32B over two"),
    pytest.param((Span(10, None), Span(52, 1024)), 16, 128, 2.0, 131_072, 16_384, 20.0, 16_384, 145_829, id="Gemma 3"),
    pytest.param((Span(10, None), Span(52, 1024)), 8, 128, 2.0, 131_072, 16_384, 20.0, 32_768, 291_658, id="over two"),
    pytest.param((Span(12, None), Span(12, 128)), 8, 64, 2.0, 131_072, 4_096, 36.56, 99_833, 1_547_275, id="24 of two"),
    pytest.param((Span(18, None), Span(18, 128)), 8, 64, 2.0, 131_072, 16_384, 10.0, 18_204, 258_648, id="36 of two"),
    pytest.param((Span(32, 4096),), 8, 128, 2.0, 32_768, 16_384, 20.0, 10_240, 261_939, id="windows only"),
    pytest.param((Span(13, None), Span(12, 128)), 8, 64, 2.0, 8_192, 4_096, 4.0, 10_082, 106_295, id="13 and 12"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("spans", "kv_heads", "head_dim", "element", "max_len", "in_flight", "gib", "blocks", "tokens"), BY_VLLM
)
def test_blocks_and_tokens_are_those_of_vllms_own_code(
    spans: tuple[Span, ...],
    kv_heads: int,
    head_dim: int,
    element: float,
    max_len: int,
    in_flight: int,
    gib: float,
    blocks: int,
    tokens: int,
) -> None:
    layout = kv_layout(like(spans, kv_heads, head_dim), 1, element)
    assert layout.blocks(int(gib * GIB)) == blocks
    assert layout.size_tokens(blocks, max_len, in_flight) == tokens


def test_a_latent_cache_is_that_of_vllms_own_code() -> None:
    # 61 layers of 576 numbers a token, blocks of 64: DeepSeek-V3
    layout = kv_layout(like((Span(61, None),), 1, 1, latent=576), 8, 2.0)
    assert layout.block_tokens == LATENT_BLOCK_TOKENS
    assert layout.blocks(30.0 * GIB) == 7_162
    assert layout.size_tokens(7_162, 163_840, 16_384) == 458_368


# "Available KV cache memory" and "GPU KV cache size" of public start-up logs. The first is rounded to 0.01 GiB.
LOGGED = [
    pytest.param("llama-3.1-8b", 1, 5.29, 43_296, id="8B, RTX A5000"),
    pytest.param("llama-3.1-8b", 1, 19.25, 157_648, id="8B, 0.10"),
    pytest.param("llama-3.1-8b", 1, 26.44, 216_624, id="8B, RTX A6000"),
    pytest.param("llama-3.1-8b", 1, 85.79, 702_800, id="8B, a large card"),
    pytest.param("qwen3-32b", 2, 8.22, 67_296, id="32B over two"),
]


@pytest.mark.parametrize(("name", "gpus", "gib", "tokens"), LOGGED)
def test_tokens_of_a_cache_are_those_of_public_logs(name: str, gpus: int, gib: float, tokens: int) -> None:
    layout = kv_layout(model(name), gpus, 2.0)
    fewest, most = (layout.blocks((gib + off) * GIB) * layout.block_tokens for off in (-0.005, 0.005))
    assert fewest <= tokens <= most


def labels(page: str) -> dict[str, str]:
    """Return the labels of the first cache_config_info of a recorded page."""
    line = next(line for line in (PAGES / page).read_text().splitlines() if line.startswith("vllm:cache_config_info{"))
    return dict(re.findall(r'(\w+)="([^"]*)"', line))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param("0.32.0/idle.prom", id="0.32, 64 blocks"),
        pytest.param("0.32.0/kv_pressure.prom", id="0.32, 160 blocks"),
        pytest.param("0.29.0/idle.prom", id="0.29, 64 blocks"),
    ],
)
def test_tokens_of_so_many_blocks_are_those_on_a_real_page(page: str) -> None:
    # servers with --max-model-len 2048 on a CPU, where nothing is in flight beside the batch
    found = labels(page)
    layout = kv_layout(SHAPE, 1, 2.0, block_tokens=int(found["block_size"]))
    blocks = int(found["num_gpu_blocks_override"])
    tokens = layout.size_tokens(blocks, 2048, 512)
    assert tokens == int(found["kv_cache_size_tokens"])
    assert tokens / 2048 == float(found["kv_cache_max_concurrency"])


# "Model loading took ... GiB", of each card.
WEIGHTS = [
    pytest.param("llama-3.1-8b", 1, 14.99, id="8B"),
    pytest.param("qwen3-32b", 2, 30.59, id="32B over two"),
    pytest.param("qwen3-30b-a3b", 4, 14.25, id="30B of experts over four"),
    pytest.param("gpt-oss-20b", 1, 13.72, id="MXFP4 experts, 20B"),
    pytest.param("gpt-oss-120b", 1, 65.97, id="MXFP4 experts, 120B"),
]


@pytest.mark.parametrize(("name", "gpus", "gib"), WEIGHTS)
def test_weights_are_within_a_per_cent_of_public_logs(name: str, gpus: int, gib: float) -> None:
    assert weight_bytes(model(name), gpus) / GIB == pytest.approx(gib, rel=0.01)


# The room that public start-up logs found, beside what the arithmetic finds with the same limits.
ROOMS = [
    # vLLM pull request 10511, H100: 79.22 GiB, utilization 0.9, chunks of 8192
    pytest.param("llama-3.1-8b", 1, 79.22, 0.90, 8192, 256, 53.29, id="8B, H100"),
    pytest.param("llama-3.1-8b", 1, 79.14, 0.90, 8192, 256, 54.93, id="8B, 80 GB, without CUDA graphs"),
    pytest.param("llama-3.1-8b", 1, 47.50, 0.90, 2048, 256, 26.44, id="8B, RTX A6000"),
    pytest.param("llama-3.1-8b", 1, 23.52, 0.90, 2048, 256, 4.95, id="8B, RTX 4090"),
    pytest.param("gpt-oss-20b", 1, 79.25, 0.65, 2048, 256, 36.56, id="20B of experts, A100"),
]


@pytest.mark.parametrize(("name", "gpus", "memory", "utilization", "budget", "seqs", "gib"), ROOMS)
def test_the_room_for_the_cache_is_within_four_per_cent_of_public_logs(
    name: str, gpus: int, memory: float, utilization: float, budget: int, seqs: int, gib: float
) -> None:
    shape = model(name)
    found = memory * utilization * GIB - weight_bytes(shape, gpus) - reserve_bytes(shape, gpus, budget, seqs)
    assert found / GIB == pytest.approx(gib, rel=0.04)


@pytest.mark.parametrize(
    ("name", "kv_dtype", "expected"),
    [
        pytest.param("llama-3.1-8b", "auto", 131_072, id="8B: 2 x 32 x 8 x 128 x 2"),
        pytest.param("llama-3.1-70b", "auto", 327_680, id="70B: 2 x 80 x 8 x 128 x 2"),
        pytest.param("llama-3.1-70b", "fp8", 163_840, id="70B, 8 bits"),
        pytest.param("qwen3-30b-a3b", "auto", 98_304, id="four heads"),
        pytest.param("deepseek-v3", "auto", 70_272, id="latent: 61 x 576 x 2, no factor 2"),
    ],
)
def test_bytes_of_a_token(name: str, kv_dtype: str, expected: int) -> None:
    shape = model(name)
    assert kv_token_bytes(shape, kv_element_bytes(shape, kv_dtype)) == expected


def test_a_checkpoint_with_scales_chooses_eight_bits_and_the_option_overrules_it() -> None:
    shape = replace(SHAPE, kv_dtype="fp8")
    assert kv_element_bytes(shape, "auto") == 1.0
    assert kv_element_bytes(shape, "bfloat16") == 2.0


@pytest.mark.parametrize(
    ("gpus", "page"),
    [
        pytest.param(1, 16 * 2 * 2 * 64 * 2, id="both heads"),
        pytest.param(2, 16 * 2 * 1 * 64 * 2, id="one each"),
        pytest.param(4, 16 * 2 * 1 * 64 * 2, id="repeated on the other two"),
    ],
)
def test_heads_are_divided_among_cards_as_far_as_they_go(gpus: int, page: int) -> None:
    assert kv_layout(SHAPE, gpus, 2.0).page_bytes == page


def test_a_latent_vector_is_on_every_card() -> None:
    shape = like((Span(4, None),), 1, 1, latent=576)
    assert kv_layout(shape, 8, 2.0).block_bytes == kv_layout(shape, 1, 2.0).block_bytes


@pytest.mark.parametrize(
    ("tokens", "in_flight", "expected"),
    [
        pytest.param(1, 1, 2, id="one token, a block of each table"),
        pytest.param(64, 1, 8, id="inside of the window"),
        pytest.param(1600, 1, 100 + 9, id="past it the window's nine blocks stay"),
        pytest.param(1600, 512, 100 + 41, id="and beside it the chunk in flight"),
    ],
)
def test_a_window_stops_growing(tokens: int, in_flight: int, expected: int) -> None:
    layout = kv_layout(like((Span(4, None), Span(4, 128)), 2, 64), 1, 2.0)
    assert layout.request_blocks(tokens, in_flight) == expected


def test_sequences_leave_out_the_null_block() -> None:
    layout = kv_layout(SHAPE, 1, 2.0)
    assert layout.sequences(161, 128) == 20  # 160 blocks of 16 tokens, 8 a sequence
    assert layout.sequences(160, 128) == 19
    assert layout.sequences(0, 128) == 0


def test_the_longest_request_fits_and_one_more_token_does_not() -> None:
    layout = kv_layout(like((Span(4, None), Span(8, 128)), 2, 64), 1, 2.0)
    longest = layout.longest(1000, 512)
    assert layout.request_blocks(longest, 1024) <= 999 < layout.request_blocks(longest + 1, 1024)


def test_quantization_shrinks_only_what_it_stores() -> None:
    fewer = replace(SHAPE, quantization=Quantization(method="fp8", bits=8.0))
    assert weight_bytes(SHAPE) == 2 * 1_010_000
    assert weight_bytes(fewer) == 1_000_000 + 2 * 10_000
    assert weight_bytes(fewer, 2) == weight_bytes(fewer) / 2


def test_the_files_size_counts_where_it_is_known() -> None:
    assert weight_bytes(replace(SHAPE, checkpoint_bytes=3_000_000), 2) == 1_500_000


def test_activations_are_the_widest_layer_or_the_logits() -> None:
    # 64 tokens: 64 x 1024 logits x 16 bytes; 4096 tokens: 4096 x 2 x (4 x 256 + 3 x 512)
    assert activation_bytes(SHAPE, 1, 64, 256) == 64 * 1024 * 16
    assert activation_bytes(SHAPE, 1, 4096, 8) == 4096 * 2 * (1024 + 1536)
    assert activation_bytes(SHAPE, 2, 4096, 8) == 4096 * 2 * (1024 + 768)


def test_more_cards_need_buffers_to_talk() -> None:
    alone, joined = (reserve_bytes(SHAPE, gpus, 256, 256) for gpus in (1, 2))
    assert joined - alone == pytest.approx(0.8 * GIB)
