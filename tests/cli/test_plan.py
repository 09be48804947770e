"""`autoscaler plan`."""

import json
import re
from pathlib import Path

import pytest
import yaml

from autoscaler.cli.main import run


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what a plan prints. It must succeed."""
    assert run(["plan", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what a plan says to bad input, which is exit 2."""
    assert run(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_a_table_on_a_pipe_has_a_reason_beside_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    first, *rows = printed(capsys, "llama-3.1-70b", "--gpu", "h100").splitlines()
    assert first == "meta-llama/Llama-3.1-70B-Instruct on 4 x H100 80 GB"
    table = {cells[0]: cells[1:] for row in rows if len(cells := re.split(r"\s{2,}", row)) > 1}
    assert table["weights"] == ["32.9 GiB", "70.55 B parameters in bfloat16 / 4 cards"]
    assert table["KV bytes a token"] == ["327,680", "2 x 80 layers x 8 KV heads x 128 x 2 bytes"]
    assert table["gpu_memory_utilization"][0] == "0.92"
    assert table["max_num_batched_tokens"][0] == "8,192"
    for name, cells in table.items():
        assert len(cells) == 2 or name.startswith("sequences of "), name
    assert rows[-1].endswith("add --profile llama-3.1-70b-h100x4 --slo ttft=2s,itl=100ms")


def test_the_readme_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    shown = re.search(r"autoscaler (plan llama[^\n]*)\n```\n\n```\n(.*?)\n```", readme, re.DOTALL)
    assert shown is not None
    assert printed(capsys, *shown[1].split()[1:]).startswith(f"{shown[2]}\n\n")


def test_arguments_are_a_containers_yaml_with_reasons_as_comments(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "llama-3.1-70b", "--gpu", "h100", "--output", "args")
    assert yaml.safe_load(text) == {
        "args": [
            "--model=meta-llama/Llama-3.1-70B-Instruct",
            "--tensor-parallel-size=4",
            "--gpu-memory-utilization=0.92",
            "--max-model-len=131072",
            "--max-num-seqs=360",
            "--max-num-batched-tokens=8192",
        ],
        "resources": {"limits": {"nvidia.com/gpu": 4}},
    }
    assert all("  # " in line for line in text.splitlines() if line.startswith("- "))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(("--quantization", "fp8"), "--quantization=fp8", id="quantization"),
        pytest.param(("--kv-cache-dtype", "fp8"), "--kv-cache-dtype=fp8", id="cache"),
        pytest.param(("--dtype", "float16"), "--dtype=float16", id="type"),
        pytest.param(("--block-size", "32"), "--block-size=32", id="block"),
        pytest.param(("--gpu-memory-utilization", "0.85"), "--gpu-memory-utilization=0.85", id="utilization"),
        pytest.param(("--max-model-len", "8192"), "--max-model-len=8192", id="length"),
        pytest.param(("--gpus", "2"), "--tensor-parallel-size=2", id="cards"),
    ],
)
def test_what_was_asked_for_is_among_the_arguments(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], expected: str
) -> None:
    found = json.loads(printed(capsys, "llama-3.1-8b", "--gpu", "h100", *options, "--output", "json"))
    assert expected in found["args"]


def test_a_slice_is_a_resource_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "llama-3.1-8b", "--gpu", "h100", "--mig", "3g.40gb", "--output", "args")
    assert yaml.safe_load(text)["resources"] == {"limits": {"nvidia.com/mig-3g.40gb": 1}}


def test_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "llama-3.1-8b", "--gpu", "h100", "--context", "4096", "--output", "json"))
    per_gpu, cache = found["perGpu"], found["kvCache"]
    assert cache["bytesPerToken"] == 131_072
    assert cache["tokens"] == cache["blocks"] * cache["blockSize"]
    assert cache["sequences"] == {"4096": (cache["blocks"] - 1) // 256}
    usable = per_gpu["weightBytes"] + per_gpu["reserveBytes"] + per_gpu["kvCacheBytes"]
    assert usable == pytest.approx(0.92 * per_gpu["memoryBytes"])
    assert set(found["values"]) == set(found["reasons"])
    assert found["carries"] is None
    assert found["migFits"]["profile"] == "2g.20gb"


def test_a_folder_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parents[1] / "data" / "plan" / "tiny-llama"
    found = json.loads(printed(capsys, str(folder), "--gpu", "t4", "--output", "json"))
    assert found["model"] == str(folder)
    assert found["kvCache"]["bytesPerToken"] == 2 * 2 * 2 * 64 * 2
    assert f"--model={folder}" in found["args"]


def test_a_profile_times_the_limits_and_says_what_a_replica_carries(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("qwen3-32b", "--gpu", "h100", "--profile", "qwen3-32b-h100x2", "--request", "prompt=4000,output=1000")
    found = json.loads(printed(capsys, *options, "--slo", "ttft=3s,itl=100ms", "--output", "json"))
    # llm-d measured 1.4 to 1.5 requests/s of this length on such a replica
    assert 1.2 < found["carries"]["rps"] < 1.6
    assert found["values"]["tensor_parallel_size"] == 2
    assert found["values"]["max_num_batched_tokens"] < 8192
    assert found["reasons"]["tensor_parallel_size"] == "that of qwen3-32b-h100x2"


def test_an_objective_that_is_stricter_carries_less(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("llama-3.1-70b", "--gpu", "h100", "--profile", "llama-3.1-70b-h100x4", "--output", "json")
    strict, easy = (
        json.loads(printed(capsys, *options, "--slo", slo)) for slo in ("ttft=500ms,itl=25ms", "ttft=2s,itl=100ms")
    )
    assert 0.0 < strict["carries"]["rps"] < easy["carries"]["rps"]
    assert strict["values"]["max_num_seqs"] < easy["values"]["max_num_seqs"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(("nope", "--gpu", "h100"), "nope: no such model; it is a config.json", id="model"),
        pytest.param(("llama-3.1-8b", "--gpu", "h1"), "--gpu = h1: no such card; known are a10", id="card"),
        pytest.param(("llama-3.1-8b",), "Missing option '--gpu'", id="no card"),
        pytest.param(("llama-3.1-405b", "--gpu", "l4"), "does not fit 8 L4 24 GB: weights 94.5 GiB", id="too large"),
        pytest.param(
            ("llama-3.1-8b", "--gpu", "h100", "--request", "prompt=9"),
            "'prompt=9': must be like prompt=1000,output=200", id="half a length",
        ),
        pytest.param(
            ("llama-3.1-8b", "--gpu", "h100", "--request", "prompt=9,output=-1"),
            "'-1': must be a whole number of tokens, 1 or more", id="negative length",
        ),
        pytest.param(("llama-3.1-8b", "--gpu", "h100", "--slo", "ttft=2s,itl=1s"), "needs a --profile", id="profile"),
        pytest.param(
            ("llama-3.1-8b", "--gpu", "l4", "--profile", "llama-3.1-8b-h100x1"),
            "llama-3.1-8b-h100x1 is of H100 80 GB, not L4 24 GB", id="a profile of another card",
        ),
        pytest.param(
            ("llama-3.1-8b", "--gpu", "h100", "--gpus", "2", "--profile", "llama-3.1-8b-h100x1"),
            "is of 1 cards, not 2", id="a profile of fewer cards",
        ),
        pytest.param(
            ("llama-3.1-8b", "--gpu", "h100", "--mig", "3g.40gb", "--profile", "llama-3.1-8b-h100x1"),
            "a profile is of whole cards", id="a profile and a slice",
        ),
        pytest.param(
            ("llama-3.1-8b", "--gpu", "h100", "--profile", "llama-3.1-8b-h100x1", "--slo", "ttft=2s,itl=soon"),
            "'soon': must be a duration", id="objective",
        ),
        pytest.param(
            ("llama-3.1-8b", "--gpu", "h100", "--profile", "llama-3.1-8b-h100x1", "--slo", "ttft=2s,itl=0s"),
            "must be above 0", id="objective of nothing",
        ),
        pytest.param(
            ("gpt-oss-20b", "--gpu", "h100", "--quantization", "fp8"),
            "openai/gpt-oss-20b is stored in mxfp4 already", id="stored already",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_told_what_would_be_right(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in refused(capsys, *arguments)


def test_a_checkpoint_must_be_stored_as_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "qwen3-32b", "--gpu", "l40s", "--quantization", "awq", "--output", "args")
    assert "- --quantization=awq  # the checkpoint must be stored so" in text


def test_a_small_cache_is_told_what_it_depends_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert "; a release that takes 1 GiB more costs 20% of it" in printed(capsys, "gpt-oss-120b", "--gpu", "h100")


def test_more_memory_than_the_table_has(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "llama-3.1-8b", "--gpu", "l4", "--memory", "47.4", "--output", "json"))
    assert found["perGpu"]["memoryBytes"] == int(47.4 * 2**30)
    assert found["values"]["tensor_parallel_size"] == 1
