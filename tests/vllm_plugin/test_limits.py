"""Targets as they are sent, what of them is refused, and what a scheduler may be told: pure rules."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.vllm_plugin.limits import (
    PREFILL,
    SEQS,
    TOKENS,
    BadRequestError,
    Envelope,
    RefusedError,
    StaleError,
    Target,
    check,
    read_target,
)

STARTUP = {SEQS: 16, TOKENS: 512, PREFILL: 0}
ENVELOPE = Envelope(
    startup=STARTUP,
    floors={SEQS: 1, TOKENS: 2, PREFILL: 0},
    ceilings={SEQS: 16, TOKENS: 512, PREFILL: 400},
    tokens_per_seq=2,
)


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        pytest.param('{"generation": 1, "limits": {}}', {}, id="nothing"),
        pytest.param('{"generation": 1, "limits": {"max_num_seqs": 3}}', {SEQS: 3}, id="one"),
        pytest.param('{"generation": 1, "limits": {"max_num_seqs": null}}', {}, id="null-is-the-start-up-value"),
        pytest.param(
            '{"generation": 1, "limits": {"long_prefill_token_threshold": 0, "max_num_batched_tokens": 64}}',
            {TOKENS: 64, PREFILL: 0},
            id="zero-is-a-value",
        ),
    ],
)
def test_a_target_is_read(text: str, limits: dict[str, int]) -> None:
    assert read_target(text) == Target(1, limits)
    assert read_target(json.dumps(read_target(text).document())) == Target(1, limits)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("", "not JSON", id="empty"),
        pytest.param("[1]", "not an object", id="list"),
        pytest.param('{"limits": {}}', "not an object of exactly", id="no-generation"),
        pytest.param('{"generation": 1, "limits": {}, "force": true}', "not an object of exactly", id="unknown-key"),
        pytest.param('{"generation": 0, "limits": {}}', "generation 0", id="generation-zero"),
        pytest.param('{"generation": 9007199254740992, "limits": {}}', "2^53", id="generation-too-large"),
        pytest.param('{"generation": true, "limits": {}}', "generation True", id="generation-true"),
        pytest.param('{"generation": 1, "limits": []}', '"limits"', id="limits-list"),
        pytest.param('{"generation": 1, "limits": {"max_num_seq": 3}}', "no limit 'max_num_seq'", id="misspelt"),
        pytest.param('{"generation": 1, "limits": {"max_num_seqs": 3.0}}', "3.0", id="float"),
        pytest.param('{"generation": 1, "limits": {"max_num_seqs": "3"}}', "'3'", id="text"),
        pytest.param('{"generation": 1, "limits": {"max_num_seqs": true}}', "True", id="truth"),
    ],
)
def test_what_is_no_target_is_refused(text: str, words: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        read_target(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("limits", "codes"),
    [
        pytest.param({SEQS: 16, TOKENS: 512, PREFILL: 400}, [], id="ceilings"),
        pytest.param({SEQS: 1, TOKENS: 2, PREFILL: 0}, [], id="floors"),
        pytest.param({SEQS: 17}, ["above_ceiling"], id="above"),
        pytest.param({SEQS: 0}, ["below_floor"], id="zero"),
        pytest.param({SEQS: -1}, ["below_floor"], id="negative"),
        pytest.param({TOKENS: 1}, ["below_floor"], id="no-room-for-one-sequence"),
        pytest.param({SEQS: 99, TOKENS: 999, PREFILL: 999}, ["above_ceiling"] * 3, id="all-at-once"),
    ],
)
def test_values_are_refused_with_the_reason(limits: dict[str, int], codes: list[str]) -> None:
    problems = ENVELOPE.problems(Target(1, limits))
    assert [problem.code for problem in problems] == codes
    assert all(str(problem.value) in problem.message and problem.limit in problem.message for problem in problems)


def test_what_may_not_move_may_only_be_asked_to_stay() -> None:
    fixed = Envelope(startup=STARTUP, floors=ENVELOPE.floors, ceilings=STARTUP, unsupported={TOKENS: "so it is"})
    assert fixed.problems(Target(1, {TOKENS: 512, SEQS: 3})) == ()
    (problem,) = fixed.problems(Target(1, {TOKENS: 256}))
    assert problem.code == "unsupported"
    assert problem.message.endswith("so it is")


NOW = Target(5, {SEQS: 3})


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        pytest.param(Target(6, {SEQS: 4}), None, id="next"),
        pytest.param(Target(9, {}), None, id="released"),
        pytest.param(Target(5, {SEQS: 3}), None, id="repeated"),
        pytest.param(Target(5, {SEQS: 4}), StaleError, id="same-generation-other-limits"),
        pytest.param(Target(4, {SEQS: 3}), StaleError, id="behind"),
        pytest.param(Target(6, {SEQS: 99}), RefusedError, id="refused"),
        pytest.param(Target(4, {SEQS: 99}), StaleError, id="behind-and-bad"),
    ],
)
def test_a_target_follows_another_by_generation(asked: Target, error: type[ValueError] | None) -> None:
    if error is None:
        check(NOW, asked, ENVELOPE)
        return
    with pytest.raises(error):
        check(NOW, asked, ENVELOPE)


@given(wanted=st.integers(1, 16), occupied=st.integers(0, 16))
def test_a_cap_is_never_below_the_batch_where_it_is_asserted(wanted: int, occupied: int) -> None:
    assert ENVELOPE.admission(wanted, occupied, clamp=True) == max(wanted, occupied)
    assert ENVELOPE.admission(wanted, occupied, clamp=False) == wanted


@given(wanted=st.integers(2, 512), occupied=st.integers(0, 16))
def test_the_budget_always_holds_a_step_of_what_runs(wanted: int, occupied: int) -> None:
    assert 2 * occupied <= ENVELOPE.budget(wanted, occupied) <= 512
    assert ENVELOPE.budget(wanted, occupied) >= wanted
