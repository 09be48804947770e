"""Start-up values from a model and a card, and the reasons beside them."""

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.catalog import card, card_names, model, model_names
from autoscaler.core.kv import GIB
from autoscaler.core.planning import Ask, Plan, PlanProblemError, plan


def planned(model_name: str, card_name: str, **more: object) -> Plan:
    """Return the plan of a shipped model on a card of the table."""
    return plan(Ask(shape=model(model_name), card=card(card_name), **more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model_name", "card_name", "gpus", "low", "high"),
    [
        # published: 412 to 467 thousand tokens; llm-d's own 350 thousand, for which it gives vLLM more of the card
        pytest.param("llama-3.1-8b", "h100", 1, 412_000, 467_000, id="8B on one H100"),
        pytest.param("qwen3-32b", "h100", 2, 315_000, 385_000, id="32B on two H100"),
        # 418 thousand counts 80 GB as 80e9 bytes at 0.9 and 3 GB of reserve; CUDA has 79.1 GiB, which are 85e9
        pytest.param("llama-3.1-70b", "h100", 4, 418_000, 500_000, id="70B on four H100"),
    ],
)
def test_known_engines(model_name: str, card_name: str, gpus: int, low: int, high: int) -> None:
    made = planned(model_name, card_name)
    assert made.gpus == gpus
    assert low <= made.kv_tokens <= high


@pytest.mark.parametrize(
    ("model_name", "card_name", "gpus"),
    [
        pytest.param("llama-3.1-70b", "h200", 2, id="a larger card takes two"),
        pytest.param("llama-3.1-405b", "h200", 8, id="weights alone need eight"),
        pytest.param("deepseek-v3", "h200", 8, id="671B"),
        pytest.param("llama-3.1-8b", "l4", 2, id="two small cards hold more a card than one"),
        pytest.param("gemma-3-27b", "h200", 1, id="one is enough"),
    ],
)
def test_cards_are_doubled_while_that_pays(model_name: str, card_name: str, gpus: int) -> None:
    assert planned(model_name, card_name).gpus == gpus


def test_the_reason_of_the_parallelism_names_half_and_twice_of_it() -> None:
    why = planned("llama-3.1-70b", "h100").reasons["tensor_parallel_size"]
    assert why.startswith("408 requests of 1,200 tokens fit; on 2 only 22; 8 would hold 0.5 times as many a card")


def test_max_num_seqs_is_what_nine_tenths_of_the_blocks_sustain() -> None:
    made = planned("llama-3.1-70b", "h100", gpus=4, prompt=4000, output=1000)
    sustained = 0.9 * (made.blocks - 1) / math.ceil(5000 / 16)
    assert made.max_num_seqs % 8 == 0
    assert sustained - 8 <= made.max_num_seqs <= sustained
    assert "/ 313 blocks of a request of 5,000 tokens" in made.reasons["max_num_seqs"]


@pytest.mark.parametrize(
    ("card_name", "seqs", "budget"),
    [
        pytest.param("l40s", 256, 2048, id="below 70 GiB"),
        pytest.param("a100", 256, 2048, id="A100, whatever its memory"),
        pytest.param("h100", 1024, 8192, id="H100"),
        pytest.param("b200", 1024, 16384, id="160 GiB and more"),
    ],
)
def test_limits_are_at_most_what_vllm_would_start_with(card_name: str, seqs: int, budget: int) -> None:
    made = planned("qwen2.5-7b", card_name, gpus=1, prompt=100, output=20)
    assert (made.max_num_seqs, made.max_num_batched_tokens) == (seqs, budget)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        pytest.param(79.1, 0.92, id="vLLM's default"),
        pytest.param(14.6, 0.92, id="1.2 GiB are left"),
        pytest.param(9.1, 0.89, id="a slice: the guard's GiB stays free"),
    ],
)
def test_utilization_leaves_the_memory_guard_its_room(memory: float, expected: float) -> None:
    small = replace(card("h100"), memory_bytes=memory * GIB)
    shape = replace(model("qwen3-8b"), linear=1_000_000_000)
    made = plan(Ask(shape=shape, card=small, gpus=1))
    assert made.gpu_memory_utilization == expected
    assert (1.0 - expected) * memory >= 1.0


def test_a_length_that_does_not_fit_is_cut_and_says_so() -> None:
    made = planned("llama-3.1-8b", "l4", gpus=1)
    assert made.max_model_len == 33 * 1024
    assert made.reasons["max_model_len"] == "the model's 131,072 would not fit the cache, which holds one of 34,016"
    assert [held.context for held in made.held] == [2048, 8192, 32768]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param(
            {"gpus": 1}, "does not fit 1 H100 80 GB: weights 131.4 GiB and 2.7 GiB of the engine's", id="weights"
        ),
        pytest.param({"gpus": 3}, "3 cards do not divide the 64 attention heads evenly", id="heads"),
        pytest.param({"mig": "2g.30gb"}, "H100 80 GB has no MIG profile 2g.30gb; it has 1g.10gb, 1g.20gb", id="slice"),
        pytest.param({"mig": "3g.40gb", "gpus": 2}, "MIG instances cannot be joined", id="slices are not joined"),
        pytest.param({"gpus": 2, "max_model_len": 90_000}, "leaves room for 27,", id="length"),
    ],
)
def test_what_cannot_start_is_told_what_is_missing(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(PlanProblemError) as caught:
        planned("llama-3.1-70b", "h100", **changes)
    assert expected in str(caught.value)


def test_a_wished_length_takes_as_many_cards_as_it_needs() -> None:
    made = planned("llama-3.1-8b", "l4", max_model_len=131_072)
    assert made.gpus == 2
    assert made.max_model_len == 131_072


@pytest.mark.parametrize(
    ("model_name", "card_name", "expected"),
    [
        pytest.param("llama-3.1-8b", "h100", "2g.20gb", id="8B"),
        pytest.param("qwen3-14b", "h100", "3g.40gb", id="14B"),
        pytest.param("qwen3-32b", "b200", "3g.90gb", id="32B"),
        pytest.param("llama-3.1-8b", "l40s", None, id="a card without MIG"),
        pytest.param("gpt-oss-120b", "h100", None, id="only the whole card"),
        pytest.param("llama-3.1-70b", "h100", None, id="more cards than one"),
    ],
)
def test_the_smallest_slice_that_serves(model_name: str, card_name: str, expected: str | None) -> None:
    fits = planned(model_name, card_name).fits
    assert (None if fits is None else fits.slice.name) == expected
    if fits is not None:
        sliced = planned(model_name, card_name, mig=fits.slice.name)
        assert sliced.gpus == 1
        assert sliced.mig == fits.slice
        assert sliced.requests >= 8


@dataclass(frozen=True)
class Metronome:
    """A pace of 1 ms, 0.1 ms more for each prompt token and 1 ms for each sequence."""

    name: str = "metronome"

    def iteration_s(self, prefill: int, batch: int, context: int, quadratic: float) -> float:
        return 1e-3 + 1e-4 * prefill + 1e-3 * batch


@pytest.mark.parametrize(
    ("itl_s", "seqs", "budget", "why"),
    [
        pytest.param(0.05, 48, 256, "the least that leaves half to prompts", id="49 sequences fit 50 ms"),
        pytest.param(
            0.3, 296, 1024, "the least that leaves half to prompts", id="no budget below two tokens a sequence"
        ),
        pytest.param(10.0, 344, 8192, "an iteration full of prompt takes", id="no hurry"),
    ],
)
def test_with_a_pace_the_limits_keep_the_objective(itl_s: float, seqs: int, budget: int, why: str) -> None:
    made = planned("llama-3.1-8b", "h100", gpus=1, itl_s=itl_s, pace=Metronome())
    assert (made.max_num_seqs, made.max_num_batched_tokens) == (seqs, budget)
    assert why in made.reasons["max_num_batched_tokens"]


@given(
    model_name=st.sampled_from(model_names()),
    card_name=st.sampled_from(card_names()),
    prompt=st.integers(1, 20_000),
    output=st.integers(1, 4_000),
    kv_dtype=st.sampled_from(["auto", "fp8"]),
)
def test_a_plan_that_is_made_can_start(
    model_name: str, card_name: str, prompt: int, output: int, kv_dtype: str
) -> None:
    try:
        made = planned(model_name, card_name, prompt=prompt, output=output, kv_dtype=kv_dtype)
    except PlanProblemError:
        return
    assert made.shape.heads % made.gpus == 0
    used = made.weight_bytes + made.reserve_bytes + made.kv_bytes
    assert used == pytest.approx(made.gpu_memory_utilization * made.device_bytes)
    assert 1 <= made.max_num_seqs <= made.max_num_batched_tokens
    assert made.max_model_len <= made.shape.max_model_len
    # vLLM's own start-up check: one request of max_model_len, its chunk in flight, fits beside the null block
    in_flight = 2 * made.max_num_batched_tokens
    assert made.layout.request_blocks(made.max_model_len, in_flight) < made.blocks
    assert set(made.reasons) == {
        "tensor_parallel_size",
        "gpu_memory_utilization",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
    }
