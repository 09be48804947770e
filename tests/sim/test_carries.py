"""What a replica carries: monotone in what is asked of it, and near what was measured."""

from dataclasses import replace

import pytest

from autoscaler.sim.carries import carried_rps
from autoscaler.sim.profiles import profile

ONE = profile("qwen3-32b-h100x2")


def test_a_replica_carries_what_llm_d_measured() -> None:
    # llm-d: 1.4 to 1.5 requests/s of 4000 tokens in and 1000 out
    assert carried_rps(ONE, 4000, 1000, 3.0, 0.1) == pytest.approx(1.35, rel=0.1)


@pytest.mark.parametrize(
    ("prompt", "output", "ttft_s", "tpot_s"),
    [
        pytest.param(8000, 1000, 3.0, 0.1, id="longer prompts"),
        pytest.param(4000, 2000, 3.0, 0.1, id="longer answers"),
        pytest.param(4000, 1000, 0.7, 0.1, id="a stricter first token"),
        pytest.param(4000, 1000, 3.0, 0.03, id="a stricter pace"),
    ],
)
def test_more_work_or_stricter_objectives_carry_less(prompt: int, output: int, ttft_s: float, tpot_s: float) -> None:
    assert 0.0 < carried_rps(ONE, prompt, output, ttft_s, tpot_s) < carried_rps(ONE, 4000, 1000, 3.0, 0.1)


def test_half_the_cache_carries_less() -> None:
    assert carried_rps(replace(ONE, kv_tokens=60_000), 4000, 1000, 3.0, 0.1) < carried_rps(ONE, 4000, 1000, 3.0, 0.1)


def test_nothing_is_carried_within_the_impossible() -> None:
    assert carried_rps(ONE, 4000, 1000, 0.001, 0.1) == 0.0
