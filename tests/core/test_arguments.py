"""An engine's limits among its container's words: what is read, what is refused, and what is written."""

import pytest

from autoscaler.core.arguments import EngineWords, masked, read_engine, whole_of, with_limits
from autoscaler.core.types import Limits

SEQS, BUDGET = "--max-num-seqs", "--max-num-batched-tokens"
BOTH = [SEQS, "64", f"{BUDGET}=2048"]


@pytest.mark.parametrize(
    ("words", "limits"),
    [
        pytest.param(BOTH, Limits(max_num_seqs=64, max_num_batched_tokens=2048), id="either form"),
        pytest.param(
            ["vllm", "serve", "m", "--max_num_seqs=8", "--long-prefill-token-threshold", "0"],
            Limits(max_num_seqs=8, long_prefill_token_threshold=0),
            id="underscores, and a zero",
        ),
        pytest.param([SEQS, "64", f"{SEQS}=32"], Limits(max_num_seqs=32), id="the last one counts"),
        pytest.param([SEQS, "64", BUDGET, "8K"], Limits(max_num_seqs=64, max_num_batched_tokens=8192), id="8K"),
        pytest.param(["--model", "m"], Limits(), id="neither"),
        pytest.param([], Limits(), id="no words"),
    ],
)
def test_limits_are_read(words: list[str], limits: Limits) -> None:
    assert read_engine(words).limits == limits


@pytest.mark.parametrize(
    ("words", "fixed"),
    [
        pytest.param(BOTH, "", id="both said"),
        pytest.param([SEQS, "64"], "", id="one said"),
        pytest.param(
            ["/bin/sh", "-c", "exec vllm serve m --max-num-seqs 64"],
            "a shell starts the engine (/bin/sh -c): its script is not edited",
            id="a shell's string",
        ),
        pytest.param(
            ["bash", "-lc", 'exec vllm serve "$@"', "--", *BOTH],
            "a shell starts the engine (bash -lc): its script is not edited",
            id="a shell that passes words on",
        ),
        pytest.param([SEQS, "$(SEQS)"], "--max-num-seqs comes from a variable: $(SEQS)", id="a variable"),
        pytest.param([f"{SEQS}=$SEQS"], "--max-num-seqs comes from a variable: $SEQS", id="a variable for a shell"),
        pytest.param([SEQS, "many"], "--max-num-seqs is no whole number: many", id="no number"),
        pytest.param(
            ["--config", "/etc/vllm/config.yaml", SEQS, "64"],
            "--config /etc/vllm/config.yaml may set --max-num-batched-tokens:"
            " a file is not edited, and no engine reads it again",
            id="a file that may say the other",
        ),
        pytest.param(["--config=/etc/vllm/config.yaml", *BOTH], "", id="a file, and words that overrule it"),
        pytest.param(
            ["--model", "m"],
            "the arguments say neither --max-num-seqs nor --max-num-batched-tokens",
            id="defaults, which depend on card and release",
        ),
        pytest.param(
            [*BOTH, "--max-num-active-seqs", "32"],
            "--max-num-active-seqs says how many sequences run, and is not moved",
            id="another limit that binds",
        ),
    ],
)
def test_what_cannot_be_expressed_says_why(words: list[str], fixed: str) -> None:
    assert read_engine(words).fixed == fixed


@pytest.mark.parametrize(
    ("words", "chunked", "longest"),
    [
        pytest.param(BOTH, True, None, id="vLLM's default"),
        pytest.param([*BOTH, "--no-enable-chunked-prefill", "--max-model-len=8k"], False, 8000, id="off"),
        pytest.param([*BOTH, "--enable-chunked-prefill=False", "--max-model-len", "4096"], False, 4096, id="=False"),
        pytest.param([*BOTH, "--enable-chunked-prefill", "false"], False, None, id="false"),
        pytest.param([*BOTH, "--enable-chunked-prefill", "--model"], True, None, id="on"),
        pytest.param([*BOTH, "--config", "c.yaml", "--max-model-len=auto"], None, None, id="a file may say either"),
        pytest.param([*BOTH, "--config", "c.yaml", "--enable-chunked-prefill"], True, None, id="said beside a file"),
    ],
)
def test_what_start_up_depends_on(words: list[str], chunked: bool | None, longest: int | None) -> None:
    said = read_engine(words)
    assert (said.chunked_prefill, said.max_model_len) == (chunked, longest)


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        pytest.param(BOTH, [SEQS, "96", f"{BUDGET}=1024"], id="each in its form"),
        pytest.param(
            ["serve", f"{SEQS}=1", "--max_num_seqs", "64", BUDGET, "2048", "--x"],
            ["serve", f"{SEQS}=1", "--max_num_seqs", "96", BUDGET, "1024", "--x"],
            id="the one that counts",
        ),
    ],
)
def test_limits_are_written_where_they_stand(words: list[str], changed: list[str]) -> None:
    wanted = Limits(max_num_seqs=96, max_num_batched_tokens=1024)
    before = list(words)
    assert with_limits(words, wanted) == changed
    assert words == before
    assert read_engine(changed).limits == wanted


def test_off_is_written_and_not_left_out() -> None:
    words = [*BOTH, "--long-prefill-token-threshold", "512"]
    changed = with_limits(words, Limits(long_prefill_token_threshold=0))
    assert changed == [*BOTH, "--long-prefill-token-threshold", "0"]


def test_no_word_is_added() -> None:
    with pytest.raises(ValueError, match="do not say --max-num-batched-tokens"):
        with_limits([SEQS, "64"], Limits(max_num_seqs=64, max_num_batched_tokens=2048))


def test_only_the_limits_are_masked() -> None:
    other = ["serve", "m", SEQS, "8", f"{BUDGET}=16", "--seed=1"]
    assert masked(other) == masked(with_limits(other, Limits(max_num_seqs=9, max_num_batched_tokens=17)))
    assert masked(other) != masked([*other[:-1], "--seed=2"])


def test_a_flag_without_a_value_is_none() -> None:
    assert read_engine(["serve", SEQS]) == EngineWords(
        fixed="the arguments say neither --max-num-seqs nor --max-num-batched-tokens", chunked_prefill=True
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [
        pytest.param("256", 256, id="plain"),
        pytest.param("8k", 8000, id="a thousand"),
        pytest.param("1.5k", 1500, id="a fraction of it"),
        pytest.param("2M", 2 * 2**20, id="binary"),
        pytest.param("-1", None, id="auto"),
        pytest.param("1.5", None, id="no whole number"),
        pytest.param("", None, id="nothing"),
        pytest.param("8kb", None, id="bytes"),
    ],
)
def test_whole_numbers(text: str, number: int | None) -> None:
    assert whole_of(text) == number
