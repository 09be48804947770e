"""Demand in replicas: the three closed forms, and what may enter a bin."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.core.demand import Capacity, DemandWindow, measure_demand, rush_demand
from autoscaler.core.policy import Emergency, Policy, Prediction, ReplicaBounds, Slo, Slos, StepTime, TargetRef
from autoscaler.core.types import GapReason
from autoscaler.core.window import SUMS, FleetRow, fleet_row
from tests.core.world import World

POLICY = Policy(name="p", target=TargetRef(deployment="d"), replicas=ReplicaBounds(max=20))
LINE = StepTime(c0=0.015, cp=60e-6, cb=20e-6, ck=40e-9)
CAPACITY = Capacity(kv_tokens=100_000.0, sequences=256.0)
START = 1_764_500_000.0


def history(bins: list[dict[str, float]], *, ticks: int = 12, interval_s: float = 5.0) -> tuple[FleetRow, ...]:
    """Return the rows of so many bins; each names what it adds a second, and its waiting requests and gauges.

    Gauges (`running`, `kv_tokens`, `covered`, `expected`) are summed over ticks; `waiting` is reached at a bin's end.
    """
    sums, waiting = np.zeros(len(SUMS)), bins[0].get("waiting", 0.0)
    rows = [fleet_row(START, _with_waiting(sums, waiting), {})]
    for one in bins:
        added = {"covered": 4.0, "expected": 4.0, **one}
        for tick in range(ticks):
            for name, value in added.items():
                gauge = name in ("running", "kv_tokens", "covered", "expected")
                sums[SUMS[name]] += value if gauge else value * interval_s
            sums[SUMS["ticks"]] += 1.0
            waiting = one.get("waiting", 0.0) if tick == ticks - 1 else waiting
            rows.append(fleet_row(rows[-1].at + interval_s, _with_waiting(sums, waiting), {}))
    return tuple(rows)


def _with_waiting(sums: np.ndarray, waiting: float) -> tuple[float, ...]:
    """Return the sums of a row, with so many requests waiting now."""
    row = sums.tolist()
    row[SUMS["waiting"]] = waiting
    return tuple(row)


def measure(
    rows: tuple[FleetRow, ...], policy: Policy = POLICY, line: StepTime = LINE, capacity: Capacity = CAPACITY
) -> DemandWindow:
    """Return the demand of the rows."""
    return measure_demand(policy, line, capacity, rows, tuple(row.at for row in rows))


def terms_of(window: DemandWindow) -> np.ndarray:
    """Return the terms as an array, shape (3, bins)."""
    return np.array(window.terms)


STEADY = {"prompt_tokens": 6000.0, "generation_tokens": 1200.0, "running": 40.0, "kv_tokens": 80_000.0}
"""A context of 2,000 tokens a sequence. Marginal work U = 60e-6 x 6000 + (20e-6 + 40e-9 x 2000) x 1200 = 0.48."""


def test_closed_forms_worked_by_hand() -> None:
    latest = measure(history([STEADY] * 10)).latest
    # ITL: room 1 - 0.015 / (0.90 x 0.1) = 5/6. KV: 1200 x 2000 x 0.015 / 95000. Sequences: 1200 x 0.015 / 243.2.
    assert latest.itl == pytest.approx(0.48 / (5 / 6))
    assert latest.kv == pytest.approx(0.48 + 36_000 / 95_000)
    assert latest.sequences == pytest.approx(0.48 + 18 / 243.2)
    assert (latest.binds, latest.gap) == ("kv", None)


def smallest(holds: Callable[[float], bool]) -> float:
    """Return the smallest replica count that holds, by bisection; `holds` is false below and true above it."""
    low, high = 0.0, 1e7
    for _ in range(200):
        middle = (low + high) / 2.0
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@given(
    prefill=st.floats(0.0, 50_000.0),
    generated=st.floats(1.0, 50_000.0),
    context=st.floats(1.0, 30_000.0),
    c0=st.floats(0.003, 0.05),
    cp=st.floats(2e-6, 2e-3),
    cb=st.floats(0.0, 2e-3),
    ck=st.floats(0.0, 2e-6),
    slo=st.floats(0.09, 1.0),
)
def test_closed_forms_are_the_fixed_point(
    prefill: float, generated: float, context: float, c0: float, cp: float, cb: float, ck: float, slo: float
) -> None:
    """N replicas step in t where t = c0 + t x U / N: one replica does U / N of marginal work a second."""
    line = StepTime(c0=c0, cp=cp, cb=cb, ck=ck)
    policy = replace(POLICY, slo=Slos(itl=Slo(seconds=slo)))
    load = {"prompt_tokens": prefill, "generation_tokens": generated, "running": 10.0, "kv_tokens": 10.0 * context}
    latest = measure(history([load] * 4), policy, line).latest
    work = cp * prefill + (cb + ck * context) * generated

    def step_s(replicas: float) -> float:
        return c0 / (1.0 - work / replicas) if replicas > work else math.inf

    def resident(replicas: float) -> float:
        return generated / replicas * step_s(replicas)

    if 1.0 - c0 / (0.90 * slo) >= 0.3:
        assert latest.itl == pytest.approx(smallest(lambda n: step_s(n) <= 0.90 * slo), rel=1e-6, abs=1e-9)
    else:
        assert latest.itl == pytest.approx(work / 0.3)
    assert latest.kv == pytest.approx(smallest(lambda n: resident(n) * context <= 95_000.0), rel=1e-6)
    assert latest.sequences == pytest.approx(smallest(lambda n: resident(n) <= 0.95 * 256.0), rel=1e-6)


@pytest.mark.parametrize(
    ("slo_s", "room"),
    [
        pytest.param(0.1, 5 / 6, id="ample"),
        pytest.param(0.024, 1 - 0.015 / 0.0216, id="close-to-the-bare-step"),
        pytest.param(0.0238, 0.3, id="floor"),
        pytest.param(0.010, 0.3, id="below-the-bare-step"),
    ],
)
def test_room_under_the_itl_objective_has_a_floor(slo_s: float, room: float) -> None:
    policy = replace(POLICY, slo=Slos(itl=Slo(seconds=slo_s)))
    assert measure(history([STEADY] * 4), policy).latest.itl == pytest.approx(0.48 / room)


def test_bins_end_at_the_newest_row() -> None:
    # The rate doubles 30 s before the end: the newest minute sees half of it, wherever the clock's minutes lie.
    double = {name: 2.0 * value for name, value in STEADY.items()}
    terms = terms_of(measure(history([STEADY] * 4 + [double])[: 4 * 12 + 7]))
    assert terms.shape == (3, 4)
    assert terms[0, :3] == pytest.approx([0.576] * 3)
    assert terms[0, 3] == pytest.approx(1.5 * 0.576)


@pytest.mark.parametrize(
    ("bins", "count"),
    [pytest.param(10, 10, id="full"), pytest.param(14, 10, id="no-more-than-the-window"), pytest.param(3, 3, id="few")],
)
def test_window_holds_so_many_bins(bins: int, count: int) -> None:
    assert terms_of(measure(history([STEADY] * bins))).shape == (3, count)


@pytest.mark.parametrize(
    ("bins", "gap"),
    [
        pytest.param([STEADY] * 3, None, id="three-bins"),
        pytest.param([STEADY] * 2, GapReason.NO_HISTORY, id="two-bins"),
        pytest.param([STEADY, {**STEADY, "covered": 2.7}, STEADY, STEADY], None, id="three-of-four-covered"),
        pytest.param([STEADY, {**STEADY, "covered": 2.7}, STEADY], GapReason.NO_HISTORY, id="two-of-three-covered"),
        pytest.param([STEADY] * 9 + [{**STEADY, "covered": 2.7}], GapReason.NO_HISTORY, id="newest-not-covered"),
        pytest.param([STEADY] * 9 + [{**STEADY, "covered": 2.9}], None, id="newest-just-covered"),
        pytest.param([{**STEADY, "expected": 0.0, "covered": 0.0}] * 9, GapReason.NO_HISTORY, id="nobody-expected"),
    ],
)
def test_bins_that_too_few_engines_covered_are_dropped(bins: list[dict[str, float]], gap: GapReason | None) -> None:
    found = measure(history(bins))
    assert found.latest.gap is gap
    assert (found.latest.value is None) == (gap is not None)
    terms = terms_of(found)
    for index, one in enumerate(bins if terms.size else []):
        expected = one.get("expected", 4.0)
        dropped = expected == 0.0 or one.get("covered", 4.0) < 0.7 * expected
        assert np.isnan(terms[:, index]).all() == dropped


def test_no_capacity_is_a_gap() -> None:
    latest = measure(history([STEADY] * 10), capacity=Capacity(kv_tokens=None, sequences=256.0)).latest
    assert (latest.gap, latest.value, latest.binds) == (GapReason.NO_CAPACITY, None, "")


def test_prefix_cache_hits_are_no_work() -> None:
    cached = {**STEADY, "cached_prompt_tokens": 4000.0}
    fewer = {**STEADY, "prompt_tokens": 2000.0}
    assert measure(history([cached] * 4)).latest == measure(history([fewer] * 4)).latest
    more = {**STEADY, "cached_prompt_tokens": 9000.0}
    assert measure(history([more] * 4)).latest.itl == pytest.approx(0.12 / (5 / 6))


class TestQueueGrowth:
    """Requests that queue up are work that arrives and is not yet served."""

    load: ClassVar = {**STEADY, "first_tokens": 6.0}

    def test_growth_counts_as_prefill(self) -> None:
        # p = 6000 / 6 = 1000 tokens a request; 120 more waiting in 60 s are 2000 tokens/s: U rises by 0.12.
        window = measure(history([self.load] * 3 + [{**self.load, "waiting": 120.0}]))
        assert window.latest.itl == pytest.approx((0.48 + 0.12) / (5 / 6))

    def test_a_shrinking_queue_is_work_done_for_earlier_bins(self) -> None:
        window = measure(history([{**self.load, "waiting": 120.0}] * 3 + [self.load]))
        assert window.latest.itl == pytest.approx((0.48 - 0.12) / (5 / 6))

    def test_prefill_is_never_negative(self) -> None:
        window = measure(history([{**self.load, "waiting": 9999.0}] * 3 + [self.load]))
        assert window.latest.itl == pytest.approx(0.12 / (5 / 6))

    def test_too_few_requests_to_know_their_length(self) -> None:
        rare = {**STEADY, "first_tokens": 19.0 / 240.0}
        window = measure(history([rare] * 3 + [{**rare, "waiting": 120.0}]))
        assert window.latest.itl == pytest.approx(0.48 / (5 / 6))


def test_nothing_running_takes_the_prompt_as_context() -> None:
    load = {"prompt_tokens": 6000.0, "generation_tokens": 1200.0, "first_tokens": 6.0}
    work = 60e-6 * 6000 + (20e-6 + 40e-9 * 1000) * 1200
    assert measure(history([load] * 4)).latest.itl == pytest.approx(work / (5 / 6))


def test_idle_needs_nothing() -> None:
    latest = measure(history([{}] * 10)).latest
    assert (latest.itl, latest.kv, latest.sequences, latest.gap) == (0.0, 0.0, 0.0, None)


@given(scale=st.floats(0.0, 50.0), bins=st.integers(3, 12))
def test_demand_is_proportional_to_the_work(scale: float, bins: int) -> None:
    rates = {"prompt_tokens", "generation_tokens", "running", "kv_tokens"}
    scaled = {name: value * scale if name in rates else value for name, value in STEADY.items()}
    one, more = (terms_of(measure(history([load] * bins))) for load in (STEADY, scaled))
    context = 2000.0 if scale > 0.0 else 0.0
    assert context == 0.0 or more == pytest.approx(one * scale)
    assert (more >= 0.0).all()


@pytest.mark.parametrize("name", ["prompt_tokens", "generation_tokens", "kv_tokens"])
@given(extra=st.floats(0.0, 1e5))
def test_more_work_is_never_less_demand(name: str, extra: float) -> None:
    """Each term grows with prefill, with generated tokens, and with resident tokens at the same batch."""
    one = measure(history([STEADY] * 4)).latest
    more = measure(history([STEADY] * 3 + [{**STEADY, name: STEADY[name] + extra}])).latest
    for before, after in ((one.itl, more.itl), (one.kv, more.kv), (one.sequences, more.sequences)):
        assert before is not None
        assert after is not None
        assert after >= before - 1e-9


class TestGapsOfReadings:
    """A gap is neither an absence of work nor, when it ends, a burst of it."""

    policy = replace(POLICY, slo=Slos(itl=Slo(seconds=0.5)), prediction=Prediction())

    def world(self) -> World:
        world = World(self.policy, 4)
        world.set(kv=0.35, running=8.0, prompt_rate=2000.0, token_rate=200.0, request_rate=4.0, step_rate=40.0)
        world.run(150, apply=False)
        return world

    @pytest.mark.parametrize("gap_s", [15.0, 30.0, 60.0, 300.0])
    def test_outage_of_all_pages(self, gap_s: float) -> None:
        world = self.world()
        usual = world.decide().demand.value or 0.0
        world.silent = {one.uid for one in world.pods}
        world.run(int(gap_s / 5.0), apply=False)
        world.silent = set()
        decisions = world.run(60, apply=False)
        found = [decision.demand.value for decision in decisions if decision.demand.value is not None]
        assert len(found) > 40
        assert max(found) <= 1.001 * usual
        assert not any(decision.forecast.changed for decision in decisions)

    @pytest.mark.parametrize("gap_s", [15.0, 60.0, 300.0])
    def test_one_silent_pod_comes_back(self, gap_s: float) -> None:
        world = self.world()
        usual = world.decide().demand.value or 0.0
        world.silent = {world.pods[0].uid}
        world.run(int(gap_s / 5.0), apply=False)
        world.silent = set()
        found = [decision.demand.value for decision in world.run(60, apply=False)]
        assert max(value for value in found if value is not None) <= 1.07 * usual

    def test_queue_of_a_silent_pod_neither_vanishes_nor_grows_back(self) -> None:
        world = self.world()
        world.set(waiting=40.0)
        world.run(30, apply=False)
        usual = world.decide().demand.value or 0.0
        world.silent = {world.pods[0].uid}
        world.run(1, apply=False)
        world.silent = set()
        found = [decision.demand.value for decision in world.run(40, apply=False)]
        assert found == pytest.approx([usual] * 40, rel=0.03)

    @pytest.mark.parametrize("name", ["prompt_rate", "token_rate", "running", "kv", "capacity"])
    def test_a_missing_series_is_a_gap_and_no_idle_fleet(self, name: str) -> None:
        world = self.world()
        world.set(**{name: None})
        decisions = world.run(30, apply=False)
        assert decisions[-1].demand.gap in (GapReason.NO_HISTORY, GapReason.NO_CAPACITY)
        assert decisions[-1].forecast.keep is None


class TestRush:
    """What arrives while the fleet serves all that it can: a queue that grows counts whole, answers included."""

    # 6 first tokens a second, of 1000 prompt tokens and 200 generated ones.
    load: ClassVar = {**STEADY, "first_tokens": 6.0}

    def rush(self, grown: float, waiting: float, load: dict[str, float] | None = None) -> float | None:
        """Return it for a queue that grew by so many in the last minute, at a horizon of 100 s."""
        policy, one = replace(POLICY, emergency=Emergency(window_s=60.0)), load or self.load
        rows = history([one] * 3 + [{**one, "waiting": grown}])
        return rush_demand(policy, LINE, CAPACITY, rows, tuple(row.at for row in rows), waiting, 100.0)

    @pytest.mark.parametrize(
        ("grown", "waiting", "times"),
        [
            pytest.param(0.0, 0.0, 1.0, id="no-queue-is-the-demand"),
            pytest.param(360.0, 0.0, 2.0, id="as-many-again-queue-up"),
            pytest.param(360.0, 300.0, 2.5, id="what-waits-is-worked-off"),
            pytest.param(360.0, 9000.0, 3.0, id="but-no-faster-than-it-arrives"),
            pytest.param(-360.0, 300.0, 1.0, id="a-queue-that-shrinks-is-being-worked-off"),
        ],
    )
    def test_in_multiples_of_the_demand(self, grown: float, waiting: float, times: float) -> None:
        # Every request is as the others are: work grows with their number, and so do all three closed forms.
        demand = measure(history([self.load] * 4)).latest.value
        assert demand is not None
        assert self.rush(grown, waiting) == pytest.approx(times * demand)

    def test_unknown_without_lengths_or_engines(self) -> None:
        assert self.rush(360.0, 0.0, {**self.load, "first_tokens": 0.01}) is None
        assert self.rush(360.0, 0.0, {**self.load, "covered": 2.0}) is None
