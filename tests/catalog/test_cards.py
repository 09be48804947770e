"""The table of cards."""

import pytest

from autoscaler.catalog import card, card_names
from autoscaler.core.kv import GIB
from autoscaler.errors import ModelError
from autoscaler.sim.profiles import profile, profile_names


@pytest.mark.parametrize("name", card_names())
def test_slices_are_smaller_than_their_card_and_fit_on_it(name: str) -> None:
    one = card(name)
    sizes = [slice_.memory_bytes for slice_ in one.slices]
    assert sizes == sorted(sizes)
    for slice_ in one.slices:
        assert slice_.memory_bytes * slice_.per_card <= one.memory_bytes
        # its name says the memory in GB, of which CUDA has nine tenths in GiB at least
        said = float(slice_.name.partition(".")[2].removesuffix("gb"))
        assert 0.85 * said < slice_.memory_bytes / GIB <= said


@pytest.mark.parametrize(
    ("name", "gib", "first"),
    [
        # public start-up logs of vLLM: total_gpu_memory
        pytest.param("a100", 79.25, "1g.10gb", id="A100 80 GB"),
        pytest.param("h200", 139.8, "1g.18gb", id="H200"),
        pytest.param("l40s", 44.3, None, id="L40S has no MIG"),
        pytest.param("b200", 178.3, "1g.23gb", id="B200"),
    ],
)
def test_memory_is_what_cuda_has(name: str, gib: float, first: str | None) -> None:
    one = card(name)
    assert one.memory_bytes == gib * GIB
    assert next((slice_.name for slice_ in one.slices), None) == first


def test_every_simulated_profile_is_of_a_card_of_the_table() -> None:
    titles = {card(name).title: name for name in card_names()}
    for name in profile_names():
        one = profile(name)
        assert name == f"{one.model.lower()}-{titles[one.gpu]}x{one.gpus}"


def test_an_unknown_card_is_told_the_known_ones() -> None:
    with pytest.raises(ModelError, match="--gpu = h1000: no such card; known are a10, a30"):
        card("h1000")


def test_case_does_not_matter() -> None:
    assert card("H100") == card("h100")
