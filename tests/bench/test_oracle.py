"""The oracle: plans whose cost is known by hand, and the cheapest of all plans where all can be tried."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.sim.engine import Engine, Request
from autoscaler.sim.ledger import Ledger
from autoscaler.sim.profiles import profile, profile_names
from bench.oracle import Planned, achievable, cheapest, fluid_gpu_hours, needed, plan_cost
from bench.rivals.base import Bounds
from bench.rivals.view import View
from bench.work import busy_replicas, request_work, spread
from tests.bench.scenes import PLAIN

BIN_S, START_S = 60.0, 200.0


def _floats(*values: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.array(values, dtype=np.float64)


def _plan(*need: int) -> list[int]:
    found: list[int] = cheapest(np.array(need), bin_s=BIN_S, start_s=START_S).tolist()
    return found


# -- work --------------------------------------------------------------------------------------------------------


def test_work_of_a_request() -> None:
    prefill, decode = request_work(PLAIN, _floats(900.0, 100.0), _floats(101.0, 1.0))
    assert prefill.tolist() == pytest.approx([0.09, 0.01])
    assert decode.tolist() == pytest.approx([0.01, 0.0])  # the first token comes with the prefill


@pytest.mark.parametrize("name", profile_names())
@pytest.mark.parametrize(
    ("prompt", "output", "count", "least"),
    [
        pytest.param(2000, 2, 400, 0.99, id="prompts"),
        pytest.param(100, 200, 1024, 0.9, id="full-batches"),
        pytest.param(4000, 100, 200, 0.9, id="both"),
        pytest.param(1269, 1529, 1024, 0.7, id="a-full-cache"),
        pytest.param(100, 200, 8, 0.0, id="a-small-batch"),
    ],
)
def test_an_engine_never_needs_less_than_the_work(
    name: str, prompt: int, output: int, count: int, least: float
) -> None:
    ledger, one = Ledger(), profile(name)
    engine = Engine(one, ledger)
    assert all(engine.submit(Request(index * 1e-6, prompt, output)) for index in range(count))
    engine.advance(1e6)
    taken = float(ledger.column("finish").max())
    prefill, decode = request_work(one, np.full(count, float(prompt)), np.full(count, float(output)))
    assert least * taken < float(prefill.sum() + decode.sum()) < taken * (1.0 + 1e-9)


def test_spread_over_service_times() -> None:
    edges = _floats(0.0, 60.0, 120.0, 180.0)
    found = spread(_floats(30.0, 60.0, 170.0), _floats(60.0, 0.0, 20.0), _floats(6.0, 5.0, 2.0), edges)
    # half of 6 on each side of 60; 5 at once at 60; half of 2 beyond the end
    assert found.tolist() == pytest.approx([3.0, 8.0, 1.0])


def test_busy_replicas_keep_all_work() -> None:
    rng = np.random.default_rng(1)
    arrivals = np.sort(rng.uniform(0.0, 3600.0, 500))
    prompts, outputs = rng.uniform(1.0, 4000.0, 500), np.rint(rng.uniform(1.0, 800.0, 500))
    busy = busy_replicas(PLAIN, arrivals, prompts, outputs, duration_s=7200.0, token_s=0.05)
    prefill, decode = request_work(PLAIN, prompts, outputs)
    assert len(busy) == 120
    assert float(busy.sum()) * 60.0 == pytest.approx(float(prefill.sum() + decode.sum()))
    assert fluid_gpu_hours(PLAIN, prompts, outputs) == pytest.approx(float(busy.sum()) / 60.0)


# -- plans -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("need", "plan"),
    [
        pytest.param((3, 3, 3, 3), [3, 3, 3, 3], id="constant"),
        pytest.param((2, 2, 5, 5), [2, 2, 5, 5], id="one-step-up"),
        pytest.param((5, 5, 2, 2), [5, 5, 2, 2], id="one-step-down"),
        pytest.param((1, 2, 3, 4, 3, 2, 1), [1, 2, 3, 4, 3, 2, 1], id="ramp-up-and-down"),
        pytest.param((1, 1, 4, 1, 1), [1, 1, 4, 1, 1], id="a-spike-must-be-met"),
        pytest.param((3, 1, 1, 1, 3), [3, 3, 3, 3, 3], id="a-gap-of-180s-is-not-worth-a-start"),
        pytest.param((3, 1, 1, 1, 1, 3), [3, 1, 1, 1, 1, 3], id="a-gap-of-240s-is"),
        pytest.param((3, 1, 1, 1, 2, 1, 1, 1, 3), [3, 2, 2, 2, 2, 2, 2, 2, 3], id="one-of-two-bridges-it"),
        pytest.param((0, 0), [0, 0], id="nothing"),
        pytest.param((7,), [7], id="one-bin"),
    ],
)
def test_cheapest_plans_known_by_hand(need: tuple[int, ...], plan: list[int]) -> None:
    assert _plan(*need) == plan


def test_costs() -> None:
    assert plan_cost([2, 2, 5, 4, 5], bin_s=BIN_S, start_s=START_S, initial=1) == 18 * 60.0 + 5 * 200.0


@given(
    need=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    start_s=st.sampled_from([0.0, 30.0, 59.0, 61.0, 130.0, 500.0]),
    initial=st.integers(0, 4),
)
def test_no_plan_is_cheaper(need: list[int], start_s: float, initial: int) -> None:
    def cost(plan: Sequence[int]) -> float:
        return plan_cost(plan, bin_s=BIN_S, start_s=start_s, initial=initial)

    all_plans = itertools.product(*(range(low, 4) for low in need))
    found = cheapest(np.array(need), bin_s=BIN_S, start_s=start_s, initial=initial)
    assert all(found >= need)
    assert cost(found.tolist()) == pytest.approx(min(map(cost, all_plans)))


def test_needed_replicas() -> None:
    bounds = Bounds(min=1, max=5)
    assert needed(_floats(0.0, 0.7, 1.4, 1.41, 9.0), 0.7, bounds).tolist() == [1, 1, 2, 3, 5]


# -- theta -------------------------------------------------------------------------------------------------------


def _cliff(most_s: float, busy: Sequence[float]) -> Callable[[tuple[int, ...]], float]:
    """Return a simulation that attains as long as no bin is busier than `most_s`."""

    def simulate(plan: tuple[int, ...]) -> float:
        return 1.0 if all(work / count <= most_s for work, count in zip(busy, plan, strict=True)) else 0.4

    return simulate


def test_the_best_theta_is_found() -> None:
    busy = [7.0] * 30
    found = achievable(_floats(*busy), _cliff(0.72, busy), bin_s=BIN_S, start_s=START_S, bounds=Bounds(max=50))
    assert found is not None
    # 10 replicas are 70 % busy; 9 would be 78 %. Every theta from 0.70 to 0.76 asks for 10.
    assert (found.theta, set(found.plan), found.attainment) == (0.76, {10}, 1.0)


@pytest.mark.parametrize(
    ("attainment", "theta"), [pytest.param(0.98, None, id="never"), pytest.param(0.995, 1.0, id="always")]
)
def test_theta_at_its_ends(attainment: float, theta: float | None) -> None:
    found = achievable(_floats(1.0, 2.0), lambda _: attainment, bin_s=BIN_S, start_s=START_S, bounds=Bounds())
    assert (found.theta if found else None) == theta


def test_a_plan_is_ordered_ahead() -> None:
    rival = Planned([1, 1, 1, 4, 2, 2], lead_s=110.0)
    asked = {now: rival.desired(now, View(ordered=1)) for now in np.arange(0.0, 420.0, 5.0).tolist()}
    # 110 s and a tick before 180 s; kept until that minute is over; the last count for good
    assert {now for now, count in asked.items() if count == 4} == set(np.arange(65.0, 240.0, 5.0).tolist())
    assert asked[60.0] == 1
    assert asked[415.0] == 2
