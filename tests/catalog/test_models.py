"""Models: the shipped ones against their published sizes, and configurations as Hugging Face writes them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from autoscaler.catalog import model, model_names
from autoscaler.core.kv import ModelShape, Quantization, Span, kv_element_bytes, kv_layout, weight_bytes
from autoscaler.errors import ModelError

DATA = Path(__file__).parents[1] / "data" / "plan"

# Parameters, as the sizes of the published safetensors give them.
PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "gemma-3-27b": 27_432_406_640,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v3": 671_026_419_200,
    "deepseek-r1": 671_026_419_200,
    "phi-4": 14_659_507_200,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}  # fmt: skip
ATTENTION, MLP = 4 * (2 * 1024 * 1024 + 2 * 1024 * 256), 4 * 3 * 1024 * 4096


def read(folder: Path, **changes: object) -> ModelShape:
    """Return the shape of the small configuration with some keys changed; None leaves a key out."""
    values = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    return model(str(folder))


def test_all_shipped_models_are_listed_here() -> None:
    assert set(model_names()) == set(PARAMETERS)


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_parameters_of_a_shipped_model_are_the_published_ones(name: str) -> None:
    one = model(name)
    assert one.parameters == pytest.approx(PARAMETERS[name], rel=0.001)
    assert one.source.startswith(f"config.json of {one.name}")


@pytest.mark.parametrize(
    ("folder", "page"),
    [
        pytest.param("tiny-llama", "cache_config_info", id="Llama"),
        pytest.param("tiny-llama", "cache_config_info_fp8", id="8 bits"),
        pytest.param("tiny-gemma3", "cache_config_info", id="Gemma 3, windows"),
    ],
)
def test_the_cache_of_a_real_server_follows_from_its_models_configuration(folder: str, page: str) -> None:
    labels = dict(re.findall(r'(?<=[{,])(\w+)="([^"]*)"', (DATA / folder / f"{page}.prom").read_text()))
    shape = model(str(DATA / folder))
    layout = kv_layout(shape, 1, kv_element_bytes(shape, labels["cache_dtype"]), int(labels["block_size"]))
    blocks = layout.blocks(float(labels["kv_cache_memory_bytes"]))
    assert blocks == int(labels["num_gpu_blocks"])
    assert layout.size_tokens(blocks, 2048, 512) == int(labels["kv_cache_size_tokens"])


@pytest.mark.parametrize(
    ("changes", "spans"),
    [
        pytest.param({}, (Span(4, None),), id="all look on everything"),
        pytest.param({"sliding_window": 512}, (Span(4, 512),), id="a window and no pattern"),
        pytest.param({"sliding_window": 512, "use_sliding_window": False}, (Span(4, None),), id="a window not used"),
        pytest.param({"sliding_window": 512, "sliding_window_pattern": 4}, (Span(1, None), Span(3, 512)), id="pattern"),
        pytest.param({"sliding_window": 512, "model_type": "gemma2"}, (Span(2, None), Span(2, 512)), id="in turn"),
        pytest.param(
            {"sliding_window": 64, "layer_types": ["full_attention", *3 * ["sliding_attention"]]},
            (Span(1, None), Span(3, 64)),
            id="layer types",
        ),
        pytest.param(
            {"attention_chunk_size": 64, "layer_types": [*3 * ["chunked_attention"], "full_attention"]},
            (Span(1, None), Span(3, 64)),
            id="chunks",
        ),
    ],
)
def test_windows(tmp_path: Path, changes: dict[str, object], spans: tuple[Span, ...]) -> None:
    assert read(tmp_path, **changes).spans == spans


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, (4, 64), id="grouped heads"),
        pytest.param({"num_key_value_heads": None}, (16, 64), id="as many as heads"),
        pytest.param({"head_dim": 128}, (4, 128), id="wider than hidden / heads"),
        pytest.param({"head_dim": None, "num_attention_heads": 8}, (4, 128), id="hidden / heads"),
    ],
)
def test_heads(tmp_path: Path, changes: dict[str, object], expected: tuple[int, int]) -> None:
    shape = read(tmp_path, **changes)
    assert (shape.kv_heads, shape.head_dim) == expected


def test_a_latent_cache(tmp_path: Path) -> None:
    changes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    shape = read(tmp_path, **changes)
    assert shape.latent == 576
    assert shape.linear == MLP + 4 * (1024 * 16 * 192 + 1024 * 576 + 512 * 16 * 256 + 16 * 128 * 1024)


def test_parameters_of_a_small_model(tmp_path: Path) -> None:
    norms = 1024 * 9
    assert read(tmp_path).linear == ATTENTION + MLP
    assert read(tmp_path).kept == 2 * 1000 * 1024 + norms
    assert read(tmp_path, tie_word_embeddings=True).kept == 1000 * 1024 + norms


@pytest.mark.parametrize(
    ("changes", "linear", "experts"),
    [
        pytest.param(
            {"num_local_experts": 8, "num_experts_per_tok": 2}, ATTENTION + 8 * MLP, 8 * MLP, id="experts everywhere"
        ),
        pytest.param(
            {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512},
            ATTENTION + MLP,
            MLP,
            id="narrow ones",
        ),
        pytest.param(
            {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "n_shared_experts": 1,
             "first_k_dense_replace": 1},
            ATTENTION + MLP // 4 + (MLP + MLP // 8) * 3 // 4,
            MLP * 3 // 4,
            id="the first dense, and a shared one",
        ),
    ],
)  # fmt: skip
def test_experts(tmp_path: Path, changes: dict[str, object], linear: int, experts: int) -> None:
    shape = read(tmp_path, **changes)
    assert (shape.linear, shape.expert_linear) == (linear, experts)
    assert shape.experts_per_token == 2


@pytest.mark.parametrize(
    ("config", "method", "bits", "kv_dtype"),
    [
        pytest.param({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 8.0, "auto", id="fp8"),
        pytest.param({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq", 4.15625, "auto", id="awq"),
        pytest.param({"quant_method": "gptq", "bits": 8, "group_size": -1}, "gptq", 8.0, "auto", id="gptq, whole rows"),
        pytest.param({"quant_method": "mxfp4"}, "mxfp4", 4.25, "auto", id="mxfp4"),
        pytest.param({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes", 4.5, "auto", id="nf4"),
        pytest.param({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt", 4.5, "auto", id="nvfp4"),
        pytest.param(
            {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
            "modelopt", 8.0, "fp8", id="fp8, the cache too",
        ),
        pytest.param(
            {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"},
             "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}},
            "compressed-tensors", 8.0, "fp8", id="compressed-tensors, the cache too",
        ),
        pytest.param(
            {"quant_method": "compressed-tensors",
             "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}}},
            "compressed-tensors", 4.125, "auto", id="w4a16",
        ),
    ],
)  # fmt: skip
def test_quantization(tmp_path: Path, config: dict[str, Any], method: str, bits: float, kv_dtype: str) -> None:
    shape = read(tmp_path, quantization_config=config)
    assert shape.quantization == Quantization(method=method, bits=bits)
    assert shape.kv_dtype == kv_dtype
    assert weight_bytes(shape) == pytest.approx((ATTENTION + MLP) * bits / 8 + shape.kept * 2)


@pytest.mark.parametrize(
    ("key", "patterns", "kept"),
    [
        pytest.param("modules_to_not_convert", ["lm_head"], 0, id="the head is never stored in fewer bits"),
        pytest.param("ignore", ["re:.*self_attn.*"], ATTENTION, id="an expression"),
        pytest.param("exclude_modules", ["model.layers.*.self_attn"], ATTENTION, id="a wildcard"),
        pytest.param("ignored_layers", ["model.layers.0"], (ATTENTION + MLP) // 4, id="a layer"),
        pytest.param("modules_to_not_convert", ["o_proj"], 4 * 1024 * 1024, id="part of a name"),
        pytest.param("ignore", ["model.layers.1.mlp.down_proj"], 1024 * 4096, id="a module"),
    ],
)
def test_modules_that_stay_as_they_are(tmp_path: Path, key: str, patterns: list[str], kept: int) -> None:
    shape = read(tmp_path, quantization_config={"quant_method": "fp8", key: patterns})
    assert shape.linear == ATTENTION + MLP - kept


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, "bfloat16", id="as written"),
        pytest.param({"torch_dtype": None}, "bfloat16", id="nothing said"),
        pytest.param({"torch_dtype": None, "dtype": "float16"}, "float16", id="the new key"),
        pytest.param({"torch_dtype": "float32"}, "bfloat16", id="float32 is not served"),
    ],
)
def test_types(tmp_path: Path, changes: dict[str, object], expected: str) -> None:
    assert read(tmp_path, **changes).dtype == expected


def test_stretched_positions(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    assert read(tmp_path, rope_scaling=yarn).max_model_len == 32_768
    assert read(tmp_path, rope_scaling={"rope_type": "llama3", "factor": 8.0}).max_model_len == 8192


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_files_size_counts_instead_of_arithmetic(tmp_path: Path, gpus: int) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 200000000}}')
    assert weight_bytes(read(tmp_path), gpus) == 200_000_000 / gpus


def test_files_without_an_index_count_by_their_size(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(12_345))
    assert read(tmp_path).checkpoint_bytes == 12_345


def test_files_with_layers_that_are_not_loaded_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(12_345))
    assert read(tmp_path, num_nextn_predict_layers=1).checkpoint_bytes is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param(
            {"hidden_size": None}, ": hidden_size: is missing; must be a whole number, 1 or more", id="missing"
        ),
        pytest.param({"num_hidden_layers": "4"}, "num_hidden_layers = 4: must be a whole number, 1 or more", id="text"),
        pytest.param({"vocab_size": 0}, "vocab_size = 0: must be a whole number, 1 or more", id="zero"),
        pytest.param({"vocab_size": True}, "vocab_size = True: must be a whole number", id="true"),
        pytest.param({"num_attention_heads": 7}, "num_attention_heads = 7: must divide hidden_size (1024)", id="heads"),
        pytest.param(
            {"torch_dtype": "int3"}, "torch_dtype = int3: must be one of bfloat16, float16, float32", id="type"
        ),
        pytest.param(
            {"layer_types": ["full_attention"]}, "layer_types = 1: must name each of the 4 layers", id="kinds"
        ),
        pytest.param({"layer_types": "full"}, "layer_types = full: must be a list", id="no list"),
        pytest.param(
            {"layer_types": 4 * ["linear_attention"]},
            "layer_types: layers that hold a state instead of",
            id="recurrent",
        ),
        pytest.param({"mamba_d_state": 16}, "mamba_d_state: layers that hold a state instead of", id="mamba"),
        pytest.param(
            {"quantization_config": {"quant_method": "exl2"}},
            "quantization_config.quant_method = exl2: is not one that can be planned; known are fp8, int8, awq",
            id="quantization",
        ),
        pytest.param({"quantization_config": "fp8"}, "quantization_config = fp8: must be an object", id="no object"),
    ],
)
def test_a_wrong_configuration_is_told_where_and_what_is_right(
    tmp_path: Path, changes: dict[str, object], expected: str
) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, **changes)
    text = str(caught.value)
    assert text.startswith(str(tmp_path / "config.json"))
    assert expected in text


def test_every_mistake_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, hidden_size=None, vocab_size=-1, torch_dtype="int3")
    assert {problem.key for problem in caught.value.problems} == {"hidden_size", "vocab_size", "torch_dtype"}


def test_keys_of_a_text_part_are_told_with_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA | {"vocab_size": None}}))
    with pytest.raises(ModelError, match=r"text_config\.vocab_size: is missing"):
        model(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("{", "is not JSON", id="broken"),
        pytest.param("[]", "must be an object", id="a list"),
        pytest.param(None, "cannot be read: No such file", id="a folder without one"),
    ],
)
def test_what_is_no_configuration(tmp_path: Path, text: str | None, expected: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=expected):
        model(str(tmp_path))


def test_an_index_without_a_size(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": "much"}}')
    with pytest.raises(ModelError, match=r"metadata\.total_size = much: must give the weights' bytes"):
        read(tmp_path)


def test_an_unknown_model_is_told_the_known_ones() -> None:
    with pytest.raises(
        ModelError, match=r"no such model; it is a config\.json, a folder with one, or one of deepseek-r1"
    ):
        model("llama-9-1b")
