"""The shipped profiles against published figures."""

import pytest

from autoscaler.sim.profiles import profile, profile_names
from bench.profiles import CHUNK, CHUNK_S, KNEE, LINES, attained, line_s, prefill_s, served


def test_the_line_of_each_profile_is_known() -> None:
    assert set(LINES) == set(profile_names())


def test_a_full_chunk_takes_what_was_measured() -> None:
    """llm-d: 8192 prompt tokens on Qwen3-32B, two H100, in 514 ms; the plain line is a quarter short of it."""
    assert prefill_s(profile("qwen3-32b-h100x2"), CHUNK) == pytest.approx(CHUNK_S, rel=0.1)
    assert line_s("qwen3-32b-h100x2", CHUNK) < 0.8 * CHUNK_S


@pytest.mark.parametrize("name", profile_names())
def test_line_and_norm_agree_between_the_extremes(name: str) -> None:
    ratios = [line_s(name, tokens) / prefill_s(profile(name), tokens) for tokens in (128, 512, 1024, 2048)]
    assert 0.6 < min(ratios) < max(ratios) < 1.6


def test_one_replica_serves_about_what_a_real_one_does() -> None:
    """llm-d: Qwen3-32B on two H100 takes 1.4 to 1.5 requests/s of 4000 in, 1000 out."""
    one = profile("qwen3-32b-h100x2")
    assert KNEE[0] <= served(one) <= KNEE[1]
    assert attained(one, 1.2, duration_s=1200.0) > 0.99
    assert attained(one, KNEE[1], duration_s=1200.0) < 0.5
