"""Writes a tiny chat model with random weights, offline: `python tiny_model.py DIRECTORY`, by an engine's own Python.

What it generates is gibberish; queueing, KV cache, preemption, streaming and metrics are real. The output row of the
end-of-sequence token is zero, so that greedy decoding never picks it: a reply is as long as its request's max_tokens.
Equal bytes for equal versions of numpy and tokenizers.
"""

import json
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, VOCABULARY, LONGEST, SEED = 256, 512, 2, 4, 2, 1024, 16384, 0
HEAD = HIDDEN // HEADS  # a multiple of 32, as the attention kernels of a CPU want it
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
ROLE_OPEN, ROLE_CLOSE = "<|role|>", "<|end|>"
SPECIALS = [BOS, EOS, PAD, ROLE_OPEN, ROLE_CLOSE]
CHAT_TEMPLATE = (
    "{{ '" + BOS + "' }}"
    "{% for m in messages %}"
    "{{ '" + ROLE_OPEN + "' + m['role'] + ': ' + m['content'] + '" + ROLE_CLOSE + "' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ROLE_OPEN + "assistant: ' }}{% endif %}"
)


def sentences(lines: int = 2000) -> Iterator[str]:
    """Yield made-up words in Zipf's proportions, so that there are pairs to merge."""
    chance = random.Random(SEED)
    onsets = [*"bcdfghjklmnprstvw", "st", "tr", "pl", "gr", "ch", "sh"]
    vowels = [*"aeiou", "ai", "ea", "ou"]
    words = [
        "".join(chance.choice(onsets) + chance.choice(vowels) for _ in range(chance.randint(1, 3))) for _ in range(800)
    ]
    weights = [1.0 / (rank + 1) for rank in range(len(words))]
    for _ in range(lines):
        yield " ".join(chance.choices(words, weights, k=chance.randint(4, 16))) + "."


def tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer trained on those."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(sentences(), trainer)
    return made


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the tensors of the checkpoint by name, as loaders expect them."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        found[prefix + "input_layernorm.weight"] = (HIDDEN,)
        found[prefix + "post_attention_layernorm.weight"] = (HIDDEN,)
        for name, rows in (("q", HIDDEN), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD)):
            found[f"{prefix}self_attn.{name}_proj.weight"] = (rows, HIDDEN)
        found[prefix + "self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
        found[prefix + "mlp.gate_proj.weight"] = (INTERMEDIATE, HIDDEN)
        found[prefix + "mlp.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
        found[prefix + "mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
    found["model.norm.weight"] = (HIDDEN,)
    found["lm_head.weight"] = (VOCABULARY, HIDDEN)
    return found


def bfloat16(values: NDArray[np.float32]) -> bytes:
    """Return the values as brain floats, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    content: bytes = (rounded >> 16).astype("<u2").tobytes()
    return content


def write_weights(path: Path, end_id: int) -> None:
    """Write the checkpoint in the safetensors format: the header's length, the header, the tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes().items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    chance = np.random.default_rng(SEED)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(head)) + head)
        for name, shape in shapes().items():
            if name.endswith("norm.weight"):
                values = np.ones(shape, dtype="f4")
            else:
                values = chance.normal(0.0, 0.05, size=shape).astype("f4")
            if name == "lm_head.weight":
                values[end_id] = 0.0
            out.write(bfloat16(values))


def config(ids: dict[str, int]) -> dict[str, object]:
    """Return the model's configuration."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": LONGEST,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": ids[BOS],
        "eos_token_id": ids[EOS],
        "pad_token_id": ids[PAD],
        "attention_bias": False,
        "mlp_bias": False,
    }


def write_model(folder: Path) -> None:
    """Write all files of the model into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    words = tokenizer()
    # The made-up text may hold fewer pairs than asked for; spare rows of the embedding do no harm.
    ids = {name: words.token_to_id(name) for name in SPECIALS}
    words.save(str(folder / "tokenizer.json"))
    documents = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "additional_special_tokens": [ROLE_OPEN, ROLE_CLOSE],
            "clean_up_tokenization_spaces": False,
            "model_max_length": LONGEST,
            "chat_template": CHAT_TEMPLATE,
        },
        "config.json": config(ids),
        "generation_config.json": {
            "bos_token_id": ids[BOS],
            "eos_token_id": ids[EOS],
            "pad_token_id": ids[PAD],
        },
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    write_weights(folder / "model.safetensors", ids[EOS])


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
