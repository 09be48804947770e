"""The simulator against a published run on a cluster."""

import pytest

from bench.anchor import DURATION_S, PUBLISHED_SLO_AWARE, PUBLISHED_STATIC, SEEDS, SLO_AWARE, STATIC, run, traffic


def test_the_staircase() -> None:
    arrivals = [request.arrival for request in traffic()]
    assert (len(arrivals), arrivals[0], arrivals == sorted(arrivals)) == (12_480, 0.0, True)
    assert DURATION_S - 1.0 <= arrivals[-1] < DURATION_S


def test_eight_replicas_hold_it() -> None:
    found = run(STATIC, replicas=8, seed=1)
    assert found.attainment >= 0.99
    assert found.replicas == PUBLISHED_STATIC.replicas


@pytest.mark.parametrize("seed", SEEDS)
def test_the_slo_aware_law_comes_out_as_published(seed: int) -> None:
    found = run(SLO_AWARE, replicas=3, seed=seed)
    assert found.attainment == pytest.approx(PUBLISHED_SLO_AWARE.attainment, abs=0.05)
    assert found.replicas == pytest.approx(PUBLISHED_SLO_AWARE.replicas, abs=0.6)
