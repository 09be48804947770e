"""Quantiles and shares against the recorded vectors, which Prometheus itself agrees with."""

import json
import math
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.core.histogram import deviation, is_spread, quantile, rebased, rising, share_within, slowest, union

VECTORS = json.loads((Path(__file__).parents[1] / "data/prometheus/quantile_vectors.json").read_text())


def _layout(cumulative: dict[str, float]) -> tuple[tuple[float, ...], list[float]]:
    pairs = sorted((float(bound), float(count)) for bound, count in cumulative.items())
    return tuple(bound for bound, _ in pairs), [count for _, count in pairs]


@pytest.mark.parametrize("vector", [pytest.param(vector, id=vector["id"]) for vector in VECTORS["quantile"]])
def test_quantile_vectors(vector: dict[str, object]) -> None:
    bounds, counts = _layout(vector["cumulative"])  # type: ignore[arg-type]
    found = quantile(bounds, rising(np.array(counts)), float(vector["q"])).value  # type: ignore[arg-type]
    expected = vector["expected"]
    if expected == "NaN":
        assert math.isnan(found)
    else:
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("vector", [pytest.param(vector, id=vector["id"]) for vector in VECTORS["fraction"]])
def test_fraction_vectors(vector: dict[str, object]) -> None:
    bounds, counts = _layout(vector["cumulative"])  # type: ignore[arg-type]
    found = share_within(bounds, rising(np.array(counts)), float(vector["threshold"]))  # type: ignore[arg-type]
    expected = vector["expected_fraction"]
    if expected == "NaN" or expected is None:
        assert math.isnan(found)
        return
    assert found == pytest.approx(expected, abs=1e-9)
    assert (found < float(vector["target"]) - 1e-9) is vector["degraded"]  # type: ignore[arg-type]


def test_c032_quantile_in_the_last_bucket_is_censored() -> None:
    found = quantile((10.0, 60.0, math.inf), [40.0, 80.0, 100.0], 0.95)
    assert (found.value, found.censored) == (60.0, True)
    sane = quantile((0.5, 1.0, 2.5, 5.0, math.inf), [10.0, 30.0, 45.0, 50.0, 50.0], 0.95)
    assert sane.value == pytest.approx(3.75, abs=0.01)
    assert not sane.censored


def test_mixed_layouts_are_interpolated_before_the_sum() -> None:
    vector = next(vector for vector in VECTORS["quantile"] if vector["id"] == "v16")
    layouts = [_layout(replica) for replica in vector["replicas"]]
    bounds = union(layouts[0][0], layouts[1][0])
    total = np.sum([rebased(own, np.array(counts), bounds) for own, counts in layouts], axis=0)
    assert quantile(bounds, total.tolist(), 0.99).value == pytest.approx(vector["expected"], abs=1e-6)


def test_slowest_is_the_bound_that_holds_all() -> None:
    assert slowest((0.1, 1.0, math.inf), [1.0, 3.0, 3.0]) == 1.0
    assert slowest((0.1, 1.0, math.inf), [1.0, 2.0, 3.0]) == math.inf


def test_where_counts_fall_the_largest_so_far_is_meant() -> None:
    assert rising(np.array([4.0, 3.0, 8.0, 7.0, 9.0])) == [4.0, 4.0, 8.0, 8.0, 9.0]


def test_deviation_worked_by_hand() -> None:
    # Two at 0.5, one at 1.5 and, beyond the last bound, three at 2.0: their sum is 8.5, that of their squares 14.75.
    assert deviation((1.0, 2.0, math.inf), [2.0, 3.0, 6.0]) == pytest.approx(math.sqrt(14.75 / 6 - (8.5 / 6) ** 2))


def test_deviation_of_one_bucket_is_zero() -> None:
    assert deviation((1.0, 2.0, math.inf), [0.0, 7.0, 7.0]) == 0.0
    assert math.isnan(deviation((1.0, math.inf), [0.0, 0.0]))


COUNTS = st.lists(st.integers(0, 1000), min_size=4, max_size=12)


@given(COUNTS, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_quantiles_rise_with_q_and_lie_inside_the_layout(counts: list[int], low: float, high: float) -> None:
    bounds = (*(float(index + 1) for index in range(len(counts) - 1)), math.inf)
    cumulative = [float(count) for count in accumulate(counts)]
    first, second = (quantile(bounds, cumulative, q).value for q in sorted((low, high)))
    if cumulative[-1] == 0:
        assert math.isnan(first)
    else:
        assert 0.0 <= first <= second <= bounds[-2]


@given(COUNTS)
def test_rebasing_keeps_the_total_and_its_own_bounds(counts: list[int]) -> None:
    bounds = (*(2.0 * (index + 1) for index in range(len(counts) - 1)), math.inf)
    onto = tuple(sorted({*bounds, 1.0, 3.0, 5.5}))
    cumulative = np.cumsum(np.array(counts, dtype=float))
    moved = rebased(bounds, cumulative, onto)
    assert all(before <= after + 1e-9 for before, after in pairwise(moved))
    assert [moved[onto.index(bound)] for bound in bounds] == pytest.approx(cumulative.tolist())


@given(own=st.lists(st.integers(0, 50), min_size=2, max_size=8), limit=st.floats(0.01, 20.0))
def test_spread_is_a_deviation_above_the_limit(own: list[int], limit: float) -> None:
    bounds = (*(float(index + 1) for index in range(len(own) - 1)), math.inf)
    cumulative = [float(count) for count in accumulate(own)]
    assert is_spread(bounds, cumulative, limit) is (deviation(bounds, cumulative) > limit)
