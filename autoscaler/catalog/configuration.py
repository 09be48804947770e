"""Hugging Face's `config.json` as a ModelShape: heads, windows, experts, quantization, by the names that models use."""

import math
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from autoscaler.core.kv import DTYPE_BYTES, ModelShape, Quantization, Span
from autoscaler.errors import ModelError, Problem

Json = Mapping[str, Any]

UNGATED = frozenset({"gpt_neox", "nemotron", "phi", "starcoder2"})
"""Model types whose MLP has two matrices and not three."""
RECURRENT = frozenset({"linear_attention", "mamba", "mamba2", "recurrent"})
"""Kinds of layers that hold a state instead of a KV cache."""
RECURRENT_KEYS = ("hybrid_override_pattern", "layers_block_type", "mamba_d_state", "ssm_cfg", "linear_num_key_heads")
KEPT_KEYS = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules", "exclude")
"""Where quantization methods list the modules that stay as they are."""
BITS = {"fp8": 8.0, "int8": 8.0, "awq": 4.0 + 20.0 / 128.0, "gptq": 4.0 + 20.0 / 128.0, "mxfp4": 4.25, "nvfp4": 4.5}
"""Bits a weight with its share of the scales: int4 in groups of 128 with a scale and a zero point, MXFP4 in groups of
32, NVFP4 in groups of 16."""
QUANTIZATIONS = tuple(BITS)


def unusable(file: str, message: str, key: str = "", value: object = None) -> ModelError:
    """Return the error of a file that is wrong in one place."""
    shown = "" if value is None else str(value)
    return ModelError((Problem(file=file, key=key, value=shown, message=message),))


def read_configuration(file: str, root: Json, name: str) -> ModelShape:
    """Return the shape of the model that a configuration describes. Raises ModelError, with every mistake."""
    reader = _Reader(file, root)
    shape = _shape(reader, name)
    if reader.problems:
        raise ModelError(tuple(reader.problems))
    return shape


class _Reader:
    """Takes numbers out of a configuration and collects what is wrong with them. A null counts as absent."""

    def __init__(self, file: str, root: Json) -> None:
        self.file, self.root = file, root
        nested = root.get("text_config")
        self.prefix = "text_config." if isinstance(nested, dict) else ""
        self.text: Json = {**root, **nested} if isinstance(nested, dict) else root
        self.problems: list[Problem] = []

    def wrong(self, key: str, value: object, message: str) -> None:
        """Remember a mistake, once."""
        shown = "" if value is None else str(value)
        problem = Problem(file=self.file, key=f"{self.prefix}{key}", value=shown, message=message)
        if problem not in self.problems:
            self.problems.append(problem)

    def count(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """Return the whole number under the first of these keys that is there; 1 beside a remembered mistake."""
        key = next((key for key in keys if self.text.get(key) is not None), None)
        if key is None:
            if default is None:
                self.wrong(keys[0], None, f"is missing; must be a whole number, {least} or more")
            return 1 if default is None else default
        value = self.text[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.wrong(key, value, f"must be a whole number, {least} or more")
            return max(1, least)
        return value

    def listed(self, key: str) -> list[Any]:
        """Return the list under a key; empty when there is none."""
        value = self.text.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            self.wrong(key, value, "must be a list")
            return []
        return value


class _Module(NamedTuple):
    """One matrix, or all experts' matrices of one layer: its dotted name and its parameters."""

    name: str
    parameters: int
    expert: bool = False


def _shape(reader: _Reader, name: str) -> ModelShape:
    hidden, heads = reader.count("hidden_size"), reader.count("num_attention_heads")
    layers, vocab = reader.count("num_hidden_layers"), reader.count("vocab_size")
    latent = reader.text.get("kv_lora_rank") is not None
    quantization, kv_dtype, kept_patterns = _quantization(reader)
    modules = list(_modules(reader, hidden, heads, layers))
    is_kept = _matcher(kept_patterns) if quantization.method else lambda _: False
    quantized = [module for module in modules if not is_kept(module.name)]
    linear = sum(module.parameters for module in quantized)
    tied = bool(reader.text.get("tie_word_embeddings", False))
    embeddings = vocab * hidden * (1 if tied else 2)
    others = sum(module.parameters for module in modules) - linear + _routers(reader, hidden, layers)
    mixture = _experts(reader) > 0
    return ModelShape(
        name=name,
        hidden=hidden,
        heads=heads,
        kv_heads=reader.count("num_key_value_heads", default=heads),
        head_dim=_head_dim(reader, hidden, heads),
        latent=reader.count("kv_lora_rank") + reader.count("qk_rope_head_dim") if latent else None,
        vocab=vocab,
        ffn=reader.count("intermediate_size") if not mixture or _dense_layers(reader, layers) else 0,
        spans=_spans(reader, layers),
        max_model_len=_max_model_len(reader),
        linear=linear,
        kept=embeddings + others + hidden * (2 * layers + 1) + _vision(reader),
        dtype=_dtype(reader),
        kv_dtype=kv_dtype,
        experts=_experts(reader),
        experts_per_token=reader.count("num_experts_per_tok", "experts_per_token") if mixture else 0,
        expert_ffn=_expert_ffn(reader) if mixture else 0,
        expert_linear=sum(module.parameters for module in quantized if module.expert),
        quantization=quantization,
        source=str(reader.root.get("_source", reader.file)),
    )


def _head_dim(reader: _Reader, hidden: int, heads: int) -> int:
    if reader.text.get("head_dim") is None and hidden % heads and not reader.problems:
        reader.wrong("num_attention_heads", heads, f"must divide hidden_size ({hidden}), or head_dim must be there")
    return reader.count("head_dim", default=max(1, hidden // heads))


def _max_model_len(reader: _Reader) -> int:
    """Return the positions that the model was made for, stretched ones included."""
    positions = reader.count("max_position_embeddings")
    scaling = reader.text.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) == "yarn":
        factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
        if isinstance(factor, int | float) and isinstance(original, int):
            return max(positions, int(factor * original))
    return positions


def _dtype(reader: _Reader) -> str:
    """Return the type that vLLM chooses: the checkpoint's, but bfloat16 for float32 and where nothing is said."""
    value = reader.text.get("torch_dtype") or reader.text.get("dtype") or "bfloat16"
    chosen = str(value).removeprefix("torch.")
    if chosen not in DTYPE_BYTES:
        reader.wrong("torch_dtype", value, f"must be one of {', '.join(DTYPE_BYTES)}")
    return "bfloat16" if chosen == "float32" or chosen not in DTYPE_BYTES else chosen


# --- attention ------------------------------------------------------------------------------------------------------


def _spans(reader: _Reader, layers: int) -> tuple[Span, ...]:
    """Return the attention layers by how far they look back."""
    for key in RECURRENT_KEYS:
        if reader.text.get(key) is not None:
            reader.wrong(key, None, "layers that hold a state instead of a KV cache cannot be planned")
            return (Span(layers, None),)
    windowed = _windowed(reader, layers)
    if not windowed:
        return (Span(layers, None),)
    window = reader.count("sliding_window", "attention_chunk_size")
    spans = (Span(layers - windowed, None), Span(windowed, window))
    return tuple(span for span in spans if span.layers)


def _windowed(reader: _Reader, layers: int) -> int:
    """Return how many layers look back on a window only."""
    kinds = reader.listed("layer_types")
    if kinds:
        if RECURRENT & set(kinds):
            reader.wrong("layer_types", None, "layers that hold a state instead of a KV cache cannot be planned")
        if len(kinds) != layers:
            reader.wrong("layer_types", len(kinds), f"must name each of the {layers} layers")
        return sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds[:layers])
    if reader.text.get("sliding_window") is None or reader.text.get("use_sliding_window") is False:
        return 0
    if reader.text.get("model_type") == "gemma2":
        return layers - layers // 2
    pattern = reader.count("sliding_window_pattern", "_sliding_window_pattern", default=0)
    # every so-many-th layer looks on everything; without a pattern none does
    return layers - (layers // pattern if pattern else 0)


def _attention(reader: _Reader, hidden: int, heads: int) -> dict[str, int]:
    """Return the attention matrices of a layer by name."""
    if reader.text.get("kv_lora_rank") is None:
        width = _head_dim(reader, hidden, heads)
        kv_heads = reader.count("num_key_value_heads", default=heads)
        return {
            "q_proj": hidden * heads * width,
            "k_proj": hidden * kv_heads * width,
            "v_proj": hidden * kv_heads * width,
            "o_proj": heads * width * hidden,
        }
    rank, rope = reader.count("kv_lora_rank"), reader.count("qk_rope_head_dim")
    plain, value = reader.count("qk_nope_head_dim"), reader.count("v_head_dim")
    queries = reader.count("q_lora_rank", default=0, least=0)
    query = heads * (plain + rope)
    return {
        **({"q_a_proj": hidden * queries, "q_b_proj": queries * query} if queries else {"q_proj": hidden * query}),
        "kv_a_proj_with_mqa": hidden * (rank + rope),
        "kv_b_proj": rank * heads * (plain + value),
        "o_proj": heads * value * hidden,
    }


# --- MLPs and experts -----------------------------------------------------------------------------------------------


def _experts(reader: _Reader) -> int:
    return reader.count("num_local_experts", "num_experts", "n_routed_experts", default=0, least=0)


def _expert_ffn(reader: _Reader) -> int:
    return reader.count("moe_intermediate_size", "intermediate_size")


def _dense_layers(reader: _Reader, layers: int) -> frozenset[int]:
    """Return the layers without experts."""
    if not _experts(reader):
        return frozenset(range(layers))
    first = reader.count("first_k_dense_replace", default=0, least=0)
    step = reader.count("decoder_sparse_step", "moe_layer_freq", default=1)
    listed = {one for one in reader.listed("mlp_only_layers") if isinstance(one, int)}
    # Qwen counts from 1, DeepSeek's frequency from 0; both have every layer sparse at 1
    return frozenset(layer for layer in range(layers) if layer < first or layer in listed or (layer + 1) % step)


def _mlp(prefix: str, hidden: int, ffn: int, *, gated: bool) -> Iterator[_Module]:
    for part in ("gate_proj", "up_proj", "down_proj") if gated else ("up_proj", "down_proj"):
        yield _Module(f"{prefix}.{part}", hidden * ffn)


def _modules(reader: _Reader, hidden: int, heads: int, layers: int) -> Iterator[_Module]:
    """Yield the linear modules of all layers."""
    attention = _attention(reader, hidden, heads)
    gated = reader.text.get("model_type") not in UNGATED
    experts, dense = _experts(reader), _dense_layers(reader, layers)
    wide = reader.count("intermediate_size") if dense else 0
    narrow = _expert_ffn(reader) if experts else 0
    shared = reader.count("shared_expert_intermediate_size", default=0, least=0)
    shared = shared or narrow * reader.count("n_shared_experts", default=0, least=0)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for part, parameters in attention.items():
            yield _Module(f"{prefix}.self_attn.{part}", parameters)
        if layer in dense:
            yield from _mlp(f"{prefix}.mlp", hidden, wide, gated=gated)
            continue
        yield _Module(f"{prefix}.mlp.experts.0.gate_proj", 3 * experts * hidden * narrow, expert=True)
        if shared:
            yield from _mlp(f"{prefix}.mlp.shared_experts", hidden, shared, gated=gated)


def _routers(reader: _Reader, hidden: int, layers: int) -> int:
    experts = _experts(reader)
    return experts * hidden * (layers - len(_dense_layers(reader, layers))) if experts else 0


def _vision(reader: _Reader) -> int:
    """Return the parameters of the blocks of a vision tower; 0 without one."""
    tower = reader.root.get("vision_config")
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers")
    if not isinstance(tower, dict) or not all(isinstance(tower.get(key), int) for key in keys):
        return 0
    width, ffn, layers = (tower[key] for key in keys)
    return int(layers * (4 * width * width + 2 * width * ffn))


# --- quantization ---------------------------------------------------------------------------------------------------


def _quantization(reader: _Reader) -> tuple[Quantization, str, list[str]]:
    """Return how the weights are stored, the type of the cache, and the patterns of modules that stay as they are."""
    found = reader.root.get("quantization_config", reader.text.get("quantization_config"))
    if found is None:
        return Quantization(), "auto", []
    if not isinstance(found, dict):
        reader.wrong("quantization_config", found, "must be an object with quant_method")
        return Quantization(), "auto", []
    kept = [str(one) for key in KEPT_KEYS if isinstance(found.get(key), list) for one in found[key]]
    stored = _stored(found)
    if stored is None:
        message = f"is not one that can be planned; known are {', '.join((*QUANTIZATIONS, 'compressed-tensors'))}"
        reader.wrong("quantization_config.quant_method", found.get("quant_method"), message)
        return Quantization(), "auto", kept
    return stored, _kv_dtype(found), kept


def _kv_dtype(found: Json) -> str:
    """Return "fp8" where the checkpoint brings scales for an 8-bit cache."""
    scheme = found.get("kv_cache_scheme")
    if isinstance(scheme, dict) and scheme.get("num_bits") == 8:
        return "fp8"
    return "fp8" if str(found.get("kv_cache_quant_algo", "")).upper() == "FP8" else "auto"


def _stored(found: Json) -> Quantization | None:
    """Return method and bits; None for a method that is not known."""
    method = str(found.get("quant_method", "")).lower()
    if method in ("awq", "gptq"):
        group = found.get("group_size", 128)
        return Quantization(method=method, bits=_grouped(found.get("bits", 4), group, 20.0))
    if method in ("fp8", "fbgemm_fp8"):
        return Quantization(method=method, bits=8.0)
    if method == "mxfp4":
        return Quantization(method=method, bits=BITS["mxfp4"])
    if method == "bitsandbytes":
        return Quantization(method=method, bits=4.5 if found.get("load_in_4bit") else 8.0)
    if method == "compressed-tensors":
        return _compressed(found)
    if method.startswith("modelopt"):
        algorithm = str(found.get("quant_algo", "")).upper()
        bits = {"FP8": 8.0, "NVFP4": BITS["nvfp4"]}.get(algorithm)
        return None if bits is None else Quantization(method="modelopt", bits=bits)
    return None


def _compressed(found: Json) -> Quantization | None:
    """Return method and bits of compressed-tensors: those of its first group."""
    groups = found.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or not isinstance(weights.get("num_bits"), int):
        return None
    scale = 8.0 if weights["num_bits"] == 4 and weights.get("type") == "float" else 16.0
    return Quantization(
        method="compressed-tensors", bits=_grouped(weights["num_bits"], weights.get("group_size"), scale)
    )


def _grouped(bits: object, group: object, scale_bits: float) -> float:
    """Return bits a weight with its share of a group's scales; a group of None or -1 is a whole row."""
    plain = float(bits) if isinstance(bits, int | float) else math.nan
    return plain + (scale_bits / group if isinstance(group, int) and group > 0 else 0.0)


def _matcher(patterns: list[str]) -> Any:
    """Return what tells whether a module stays as it is: by name, part of a name, wildcard or `re:` expression."""
    exact = frozenset(
        pattern for pattern in patterns if not any(sign in pattern for sign in "*?[^$\\") and "." in pattern
    )
    loose = [pattern for pattern in patterns if pattern not in exact]
    parts = tuple(pattern for pattern in loose if not pattern.startswith("re:") and "*" not in pattern)
    globs = tuple(pattern for pattern in loose if not pattern.startswith("re:") and "*" in pattern)
    expressions = [re.compile(pattern[3:]) for pattern in loose if pattern.startswith("re:")]

    def is_kept(module: str) -> bool:
        pieces = module.split(".")
        prefixes = {".".join(pieces[:end]) for end in range(1, len(pieces) + 1)}
        return (
            not exact.isdisjoint(prefixes)
            or any(part in pieces for part in parts)
            or any(fnmatchcase(prefix, glob) for glob in globs for prefix in prefixes)
            or any(expression.match(module) for expression in expressions)
        )

    return is_kept
