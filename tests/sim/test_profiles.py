"""Profiles as files: the shipped ones, a user's own, and what a wrong one is told."""

from dataclasses import replace
from pathlib import Path

import pytest

from autoscaler.errors import ProfileError
from autoscaler.sim.profile import Profile
from autoscaler.sim.profiles import KEYS, load_profile, profile, profile_names

PAIRS = {
    "llama-3.1-8b-h100x1", "llama-3.1-8b-h200x1", "llama-3.1-8b-a100x1", "llama-3.1-8b-l40sx1", "qwen3-32b-h100x2",
    "qwen3-32b-a100x4", "llama-3.1-70b-h100x4", "llama-3.1-70b-h100x8", "llama-3.1-70b-h200x4", "llama-3.1-70b-a100x8",
}  # fmt: skip

OWN = """\
model: chat
gpus: 2
stepTime: {baseMs: 8, tokenUs: 30.5, sequenceUs: 10, contextNs: 40, prefixPs: 0, overhead: 1}
kvCache: {tokens: 100000}
coldStart: {medianSeconds: 45}
"""


def test_the_ten_pairs_are_shipped() -> None:
    assert set(profile_names()) == PAIRS


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_a_shipped_profile_says_what_it_is(name: str) -> None:
    one = profile(name)
    assert one.name == name == f"{one.model.lower()}-{one.gpu.split()[0].lower()}x{one.gpus}"
    assert one.source.startswith("least squares on 70 points")
    assert one.mape is not None
    assert 0.03 < one.mape < 0.07
    assert one.price_per_gpu_hour is None
    assert one.overhead == 1.12
    # an iteration that only reads the weights, and one that is full: between milliseconds and seconds
    assert 0.005 < one.iteration_s(0, 1, 1000, 0.0) < 0.03
    assert 0.1 < one.iteration_s(8192, 0, 0, 8192 * 4096.0) < 2.0


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        # (0.9 x 80 GB - 16 GB - 3 GB) / 131,072 B = 404,357; published figures for other engines: 412-467 k
        pytest.param("llama-3.1-8b-h100x1", 404_357, id="8B on one H100"),
        pytest.param("qwen3-32b-h100x2", 350_000, id="32B on two H100, llm-d's own figure"),
        # (288 GB - 140 GB - 12 GB) / 327,680 B
        pytest.param("llama-3.1-70b-h100x4", 415_039, id="70B on four H100"),
    ],
)
def test_what_fits_the_cache(name: str, tokens: int) -> None:
    assert profile(name).kv_tokens == tokens


def test_an_own_file_reads_like_a_shipped_one(tmp_path: Path) -> None:
    path = tmp_path / "measured.yaml"
    path.write_text(
        OWN.replace("medianSeconds: 45", "medianSeconds: 45, sigma: 0.4")
        + "price: {perGpuHour: 2.5}\nlimits: {longPrefillTokenThreshold: 512, reserveFullPrompt: false}\n"
    )
    assert profile(path) == profile(str(path)) == Profile(
        name="measured",
        model="chat",
        gpus=2,
        base_s=8 * 1e-3,
        token_s=30.5 * 1e-6,
        sequence_s=10 * 1e-6,
        context_s=40 * 1e-9,
        prefix_s=0.0,
        overhead=1,
        kv_tokens=100_000,
        cold_start_s=45,
        cold_start_sigma=0.4,
        long_prefill_token_threshold=512,
        reserve_prompt=False,
        price_per_gpu_hour=2.5,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        pytest.param("gpus: 2", "gpus: two", "2: gpus = two: must be the GPUs of one replica, 1 or more", id="word"),
        pytest.param("gpus: 2", "gpus: yes", "2: gpus = True: must be the GPUs of one replica, 1 or more", id="yes"),
        pytest.param("tokens: 100000", "tokens: 1.5", "4: kvCache.tokens = 1.5: must be a whole number", id="half"),
        pytest.param("tokenUs: 30.5", "tokenUs: .nan", "3: stepTime.tokenUs = nan: must be microseconds", id="nan"),
        pytest.param("baseMs: 8", "baseMs: -8", "3: stepTime.baseMs = -8: must be milliseconds above 0", id="negative"),
        pytest.param("baseMs: 8", "baseMs: [8]", "3: stepTime.baseMs = [8]: must be milliseconds", id="a list"),
        pytest.param("baseMs: 8, ", "", ": stepTime.baseMs: is missing; must be milliseconds above 0", id="missing"),
        pytest.param("model: chat\n", "", ": model: is missing; must be a name", id="missing at the top"),
        pytest.param("baseMs: 8", "baseMS: 8", "3: stepTime.baseMS = 8: unknown key; known are model", id="spelling"),
        pytest.param("gpus: 2", "gpus: 2\ngpus: 4", "3: gpus = 4: is there twice", id="twice"),
        pytest.param("kvCache: {tokens: 100000}", "kvCache: 100000", "kvCache = 100000: must be a mapping", id="flat"),
        pytest.param("tokens: 100000", "tokens: 9, blockSize: 24", ": block_size must be a power of two: 24", id="24"),
        pytest.param("gpus: 2", "gpus: [2", ": is not YAML: ", id="not YAML"),
        pytest.param("gpus: 2", "gpus: 2020-13-45", ": is not YAML: month must be in 1..12", id="no date"),
        pytest.param(OWN, "- model\n", ": must be a mapping with model, gpus, stepTime.baseMs", id="a list at the top"),
        pytest.param(OWN, "", ": must be a mapping with model, gpus, stepTime.baseMs", id="empty"),
    ],
)
def test_a_wrong_file_is_told_where_and_what_is_right(tmp_path: Path, old: str, new: str, expected: str) -> None:
    path = tmp_path / "measured.yaml"
    assert old in OWN
    path.write_text(OWN.replace(old, new))
    with pytest.raises(ProfileError) as caught:
        load_profile(path)
    first = str(caught.value).splitlines()[0]
    assert first.startswith(str(path))
    assert expected in first


def test_every_mistake_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "measured.yaml"
    path.write_text("model: ''\ngpus: 0\nstepTime: {baseMs: x}\nspeed: 3\n")
    with pytest.raises(ProfileError) as caught:
        load_profile(path)
    told = {problem.key for problem in caught.value.problems}
    required = {path for path, key in KEYS.items() if key.required}
    assert told == required | {"speed"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param(
            "some-70b-h100x4", "no such profile; it is a file, or one of llama-3.1-70b-a100x8", id="unknown name"
        ),
        pytest.param("missing.yaml", "cannot be read: No such file", id="no such file"),
    ],
)
def test_an_unknown_profile_is_told_the_known_ones(name: str, expected: str) -> None:
    with pytest.raises(ProfileError, match=expected):
        profile(name)


def test_a_profile_can_be_changed_for_one_run() -> None:
    assert replace(profile("qwen3-32b-h100x2"), cold_start_s=12.0).cold_start_s == 12.0
