"""Forecasts: least squares, regimes, margins, the learned horizon, and how forecasts are judged."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.core.demand import DemandWindow
from autoscaler.core.forecast import (
    Line,
    error_quantile,
    fitted_lines,
    forecast_demand,
    forecast_score,
    learned_horizon,
    linear_trend,
)
from autoscaler.core.policy import Forecaster, Policy, Prediction, ReplicaBounds, TargetRef
from autoscaler.core.state import MINUTES_KEPT, STARTS_KEPT, Hindsight, State, advance
from autoscaler.core.types import (
    Decision,
    Demand,
    Forecast,
    GapReason,
    Hold,
    Mode,
    Outcome,
    Proposal,
    Reason,
    Regime,
)
from tests.core.world import START, LoadingWorld, World

POLICY = Policy(name="p", target=TargetRef(deployment="d"), replicas=ReplicaBounds(max=20))
CALM = (Regime(), Regime(), Regime())
FLAT = [4.0] * 10


def window(itl: list[float], kv: list[float] | None = None, sequences: list[float] | None = None) -> DemandWindow:
    """Return a window of these terms; a missing one needs nothing."""
    terms = tuple(tuple(term or [0.0] * len(itl)) for term in (itl, kv, sequences))
    return DemandWindow(terms=terms, latest=Demand(itl=terms[0][-1], kv=terms[1][-1], sequences=terms[2][-1]))


def forecast(
    values: list[float],
    *,
    policy: Policy = POLICY,
    horizon_s: float = 180.0,
    regimes: tuple[Regime, ...] = CALM,
    errors: tuple[float, ...] = (),
    at: float = START,
) -> Forecast:
    """Return the forecast of one term."""
    return forecast_demand(policy, window(values), at, horizon_s, regimes, sorted(errors))


def least_squares(values: list[float]) -> Line:
    """Return the line through all values."""
    return fitted_lines(values)[1]


def number(value: float | None) -> float:
    """Return a value that must be known."""
    assert value is not None
    return value


# --- least squares --------------------------------------------------------------------------------------------------


@given(values=st.lists(st.floats(0.0, 100.0), min_size=3, max_size=60))
def test_least_squares_is_polyfit(values: list[float]) -> None:
    level, slope, slope_error, sd = least_squares(values)
    times = np.arange(len(values), dtype=np.float64) - (len(values) - 1)
    if len(values) > 3:
        (want_slope, want_level), covariance = np.polyfit(times, values, 1, cov=True)
        assert slope_error == pytest.approx(math.sqrt(max(0.0, covariance[0, 0])), abs=1e-5)
    else:
        want_slope, want_level = np.polyfit(times, values, 1)
    residuals = np.asarray(values) - want_level - want_slope * times
    assert level == pytest.approx(want_level, abs=1e-6)
    assert slope == pytest.approx(want_slope, abs=1e-6)
    assert sd == pytest.approx(math.sqrt(float((residuals**2).sum()) / (len(values) - 2)), abs=1e-5)


@given(values=st.lists(st.floats(0.0, 100.0), min_size=2, max_size=60))
def test_the_line_without_the_newest_value_is_that_of_the_others(values: list[float]) -> None:
    assert fitted_lines(values)[0] == least_squares(values[:-1])


@pytest.mark.parametrize(
    ("values", "level"), [pytest.param([3.0], 3.0, id="one"), pytest.param([3.0, 5.0], 4.0, id="two")]
)
def test_too_few_values_for_a_slope(values: list[float], level: float) -> None:
    assert least_squares(values) == (level, 0.0, math.inf, 0.0)


@given(
    start=st.floats(0.0, 1.0),
    slope=st.floats(-0.002, 0.002),
    at=st.floats(0.0, 2e9),
    gaps=st.lists(st.floats(1.0, 60.0), min_size=1, max_size=20),
)
def test_linear_trend_follows_a_line_at_any_epoch(start: float, slope: float, at: float, gaps: list[float]) -> None:
    ages = np.concatenate(([0.0], np.cumsum(gaps)))
    points = [(at + age, start + slope * age) for age in ages.tolist()]
    assert linear_trend(points, 60.0) == pytest.approx(start + slope * (ages[-1] + 60.0), abs=1e-5)


# --- level, slope, margin -------------------------------------------------------------------------------------------


def test_flat_demand_worked_by_hand() -> None:
    # Nothing varies: sd is its floor, 6 % of 4. Up (4 + 1.2 x 0.24) / 0.93 = 4.61; keep (4 + 3.2 x 0.24) / 0.93 = 5.13.
    found = forecast(FLAT)
    assert [found.level, found.top] == pytest.approx([4.0, 4.0])
    assert found.sigma == pytest.approx(0.24)
    assert (found.up, found.keep, found.changed) == (5, 6, False)
    assert found.regimes == (Regime(relative_sd=0.06), *CALM[1:])


def test_dead_band_between_up_and_keep() -> None:
    # sd 0.06 x 22: up (22 + 1.2 x 1.32) / 0.93 = 25.4; keep (22 + 3.2 x 1.32) / 0.93 = 28.2.
    found = forecast([22.0] * 10)
    assert (found.up, found.keep) == (26, 29)


def test_a_spare_is_on_top_of_both_and_of_an_idle_target() -> None:
    two = replace(POLICY, prediction=replace(POLICY.prediction, spare=2))
    assert [(one.up, one.keep) for one in (forecast(FLAT, policy=two), forecast([0.0] * 10, policy=two))] == [
        (7, 8),
        (2, 2),
    ]


@pytest.mark.parametrize(
    ("demand", "up"),
    [
        pytest.param(0.93 / 1.072, 1, id="exactly-one"),
        pytest.param(0.93 * 3 / 1.072, 3, id="exactly-three"),
        pytest.param(0.93 * 3 / 1.072 + 1e-6, 4, id="just-above-three"),
        pytest.param(0.0, 0, id="nothing"),
    ],
)
def test_replicas_are_rounded_up_but_not_by_float_noise(demand: float, up: int) -> None:
    assert forecast([demand] * 10).up == up


def test_a_clean_slope_reaches_to_the_horizon() -> None:
    values = [float(index) for index in range(1, 11)]
    found = forecast(values, horizon_s=180.0)
    assert [found.level, found.top] == pytest.approx([10.0, 13.0])


def test_a_falling_trend_does_not_lower_the_top() -> None:
    found = forecast([float(index) for index in range(20, 10, -1)])
    assert [found.level, found.top] == pytest.approx([11.0, 11.0])


@given(values=st.lists(st.floats(1.0, 30.0), min_size=4, max_size=10), horizon_s=st.floats(0.0, 600.0))
def test_slope_is_shrunk_by_two_standard_errors(values: list[float], horizon_s: float) -> None:
    found = forecast(values, horizon_s=horizon_s)
    level, slope, slope_error, _ = least_squares(values)
    if found.changed:
        return
    rise = max(0.0, slope - 2.0 * slope_error) * horizon_s / 60.0
    assert found.top == pytest.approx(max(0.0, level) + rise)


def test_margin_is_the_residual_deviation() -> None:
    values = [10.0, 12.0] * 5
    found = forecast(values)
    _, _, _, sd = least_squares(values)
    assert found.sigma == pytest.approx(sd)
    assert sd > 0.06 * 11.0
    assert found.up == math.ceil((number(found.top) + 1.2 * sd) / 0.93)
    assert found.keep == math.ceil((number(found.top) + 3.2 * sd) / 0.93)


def test_the_widest_term_decides() -> None:
    # By its margin the second term asks for more than the first, whose level is higher.
    steady, wild = [10.0] * 10, [8.0, 11.0, 9.0, 12.0, 8.0, 11.5, 9.0, 11.0, 8.5, 10.0]
    found = forecast_demand(POLICY, window(steady, wild), START, 0.0, CALM, ())
    alone = forecast(wild, horizon_s=0.0)
    assert found.top == pytest.approx(10.0)
    assert (found.level, found.sigma) == (alone.level, alone.sigma)
    assert found.up == alone.up


def test_dropped_bins_are_left_out_of_the_fit() -> None:
    values = [4.0, math.nan, 4.2, math.nan, math.nan, 3.9, 4.1, 4.0, math.nan, 4.0]
    known = [value for value in values if value == value]
    assert forecast(values) == forecast(known)


@pytest.mark.parametrize("gap", [GapReason.NO_HISTORY, GapReason.NO_CAPACITY])
def test_no_demand_no_forecast(gap: GapReason) -> None:
    nothing = DemandWindow(terms=((math.nan,) * 4,) * 3, latest=Demand(gap=gap))
    kept = (Regime(since=START - 60.0, relative_sd=0.2), Regime(), Regime())
    found = forecast_demand(POLICY, nothing, START, 180.0, kept, ())
    assert (found.gap, found.level, found.top, found.sigma, found.up, found.keep) == (gap, *[None] * 5)
    assert found.regimes == kept


# --- regimes --------------------------------------------------------------------------------------------------------


class TestRegimeChange:
    """A newest bin beyond chance starts a new regime: the bins before it are forgotten."""

    @pytest.mark.parametrize(
        ("values", "changed"),
        [
            # Flat at 4: the limit is max(4.8 x 6 % x 4, 0.5) = 1.152.
            pytest.param([4.0] * 9 + [5.14], False, id="below-the-limit"),
            pytest.param([4.0] * 9 + [5.16], True, id="above-the-limit"),
            pytest.param([1.0] * 9 + [1.5], False, id="half-a-replica-is-nothing"),
            pytest.param([1.0] * 9 + [1.51], True, id="more-than-half-a-replica"),
            pytest.param([4.0] * 9 + [1.0], False, id="a-fall-is-no-change"),
            pytest.param([4.0, 6.0] * 4 + [4.0, 9.0], False, id="inside-its-own-noise"),
            pytest.param([float(index) for index in range(1, 11)], False, id="as-the-trend-predicts"),
            pytest.param([4.0, 4.0, 9.0], False, id="three-bins-tell-nothing"),
            pytest.param([4.0, 4.0, 4.0, 9.0], True, id="four-bins-do"),
            pytest.param([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.55], True, id="rise-out-of-a-fall"),
        ],
    )
    def test_when(self, values: list[float], changed: bool) -> None:
        found = forecast(values)
        assert found.changed is changed
        assert found.regimes[0].since == (START if changed else None)

    def test_level_is_the_newest_bin_with_the_remembered_deviation(self) -> None:
        regimes = (Regime(relative_sd=0.2), Regime(), Regime())
        found = forecast([4.0] * 9 + [12.0], regimes=regimes)
        assert [found.level, found.top] == pytest.approx([12.0, 12.0])
        assert found.sigma == pytest.approx(2.4)
        assert found.up == math.ceil((12.0 + 1.2 * 2.4) / 0.93)

    def test_deviation_is_remembered_from_calm_times_between_its_bounds(self) -> None:
        assert forecast(FLAT).regimes[0].relative_sd == pytest.approx(0.06)
        noisy = [10.0, 12.0] * 5
        level, _, _, sd = least_squares(noisy)
        assert forecast(noisy).regimes[0].relative_sd == pytest.approx(sd / level)
        assert forecast([0.1, 9.0] * 5).regimes[0].relative_sd == pytest.approx(0.30)

    @pytest.mark.parametrize(
        ("age_s", "level", "trend"),
        [
            pytest.param(55.0, 13.0, False, id="one-bin"),
            pytest.param(60.0, 13.0, False, id="two-bins-the-larger"),
            pytest.param(120.0, 40.0 / 3.0, False, id="three-bins-their-mean"),
            pytest.param(180.0, 13.2, True, id="four-bins-a-fit-of-those"),
        ],
    )
    def test_until_four_new_bins(self, age_s: float, level: float, trend: bool) -> None:
        # Only the bins since the change count, of 11, 15, 12, 13; the newest alone when it has just come.
        values = [4.0] * 6 + [11.0, 15.0, 12.0, 13.0]
        regimes = (Regime(since=START - age_s, relative_sd=0.1), Regime(), Regime())
        found = forecast(values, regimes=regimes)
        assert found.level == pytest.approx(level)
        assert found.sigma == pytest.approx(
            max(least_squares(values[-4:])[3], 0.06 * level) if trend else 0.1 * number(found.level)
        )
        assert found.regimes[0].since == START - age_s
        assert found.changed is False

    def test_a_regime_as_long_as_the_window_is_over(self) -> None:
        regimes = (Regime(since=START - 540.0, relative_sd=0.1), Regime(), Regime())
        assert forecast(FLAT, regimes=regimes).regimes[0].since is None

    def test_no_second_change_before_four_new_bins(self) -> None:
        regimes = (Regime(since=START - 120.0, relative_sd=0.1), Regime(), Regime())
        assert forecast([4.0] * 7 + [8.0, 8.0, 30.0], regimes=regimes).changed is False

    def test_terms_have_regimes_of_their_own(self) -> None:
        found = forecast_demand(POLICY, window(FLAT, [1.0] * 9 + [5.0]), START, 180.0, CALM, ())
        assert [regime.since for regime in found.regimes] == [None, START, None]
        assert found.top == pytest.approx(5.0)

    def test_a_jump_on_top_of_a_trend_forecasts_no_less_than_the_trend(self) -> None:
        ramp = [float(index) for index in range(1, 11)]
        jump = [*ramp[:-1], 13.0]
        found = forecast(jump, horizon_s=600.0)
        assert found.changed is True
        assert number(found.top) >= number(forecast(ramp, horizon_s=600.0).top)

    def test_through_the_state(self) -> None:
        world = World(POLICY, 4)
        world.set(kv=0.35, running=8.0, prompt_rate=500.0, token_rate=200.0, request_rate=1.0)
        calm = world.run(150, apply=False)
        assert not any(decision.forecast.changed for decision in calm)
        jumped_at = world.at
        world.set(prompt_rate=10_000.0)
        decisions = world.run(30, apply=False)
        # U rises from 60e-6 x 2,000 to 60e-6 x 40,000, half a replica within a quarter of a minute.
        first = next(decision for decision in decisions if decision.forecast.changed)
        assert jumped_at < first.at <= jumped_at + 20.0
        assert jumped_at < number(world.state.hindsight.regimes[0].since) <= number(world.state.hindsight.changed_at)


@given(
    values=st.lists(st.floats(0.0, 30.0), min_size=3, max_size=10),
    extra=st.floats(0.0, 30.0),
    horizon_s=st.floats(0.0, 600.0),
    since=st.one_of(st.none(), st.floats(0.0, 900.0)),
    relative=st.floats(0.04, 0.30),
    errors=st.lists(st.floats(-0.5, 1.0), min_size=0, max_size=40),
)
def test_growth_never_falls_as_the_newest_bin_rises(
    values: list[float],
    extra: float,
    horizon_s: float,
    since: float | None,
    relative: float,
    errors: list[float],
) -> None:
    """True of `up` with the default margin and up to ten bins, where a raised end lifts the level more than it takes
    from the deviation: 1.2 x 0.286 < 0.345 at ten. Not of `keep`, whose margin is wider: a newest bin that falls out of
    line is a reason to keep more.
    """
    regime = Regime(since=None if since is None else START - since, relative_sd=relative)
    regimes = (regime, Regime(), Regime())
    base = forecast(values, horizon_s=horizon_s, regimes=regimes, errors=tuple(errors))
    more = forecast([*values[:-1], values[-1] + extra], horizon_s=horizon_s, regimes=regimes, errors=tuple(errors))
    assert number(more.up) >= number(base.up)


@given(values=st.lists(st.floats(0.6, 30.0), min_size=3, max_size=10), factor=st.floats(1.0, 20.0))
def test_the_same_history_under_more_load_never_wishes_for_less(values: list[float], factor: float) -> None:
    base, more = forecast(values), forecast([value * factor for value in values])
    assert number(more.up) >= number(base.up)
    assert base.changed or more.changed or number(more.keep) >= number(base.keep)


# --- errors and their margin ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("errors", "quantile"),
    [
        pytest.param([0.5] * 29, 0.0, id="too-few"),
        pytest.param([0.5] * 30, 0.5, id="enough"),
        pytest.param([2.0] * 30, 0.6, id="capped"),
        pytest.param([-0.5] * 30, 0.0, id="always-too-high"),
        pytest.param([index / 100.0 for index in range(101)], 0.6, id="capped-at-0.95"),
        pytest.param([index / 200.0 for index in range(101)], 0.475, id="a-sample"),
        pytest.param([index / 100.0 for index in range(34)], 0.3135, id="linear-between-samples"),
    ],
)
def test_error_quantile(errors: list[float], quantile: float) -> None:
    assert error_quantile(Prediction(error_cap=0.6), errors) == pytest.approx(quantile)


def test_margin_grows_with_the_errors() -> None:
    # q 0.12 at a top of 4: sigma = 0.12 x 4 / 1.645; 0.5 counts as the cap, 0.15.
    found = forecast(FLAT, errors=(0.12,) * 30)
    assert found.sigma == pytest.approx(0.48 / 1.645)
    assert found.up == math.ceil((4.0 + 1.2 * 0.48 / 1.645) / 0.93)
    assert forecast(FLAT, errors=(0.5,) * 30).sigma == pytest.approx(0.6 / 1.645)


def test_margin_is_never_below_the_deviation() -> None:
    assert forecast(FLAT, errors=(0.01,) * 30).sigma == pytest.approx(0.24)


class TestJudgingForecasts:
    """Once a minute the forecast is kept, and judged by the newest minute's demand when it falls due."""

    def after(
        self,
        state: State,
        at: float,
        *,
        top: float | None = 4.0,
        realised: float | None = 4.0,
        horizon_s: float = 180.0,
    ) -> State:
        """Return the state after one more tick with this demand and forecast."""
        decision = Decision(
            at=at,
            score=None,
            demand=Demand(itl=realised, kv=realised, sequences=realised),
            forecast=Forecast(horizon_s=horizon_s, top=top),
            proposal=Proposal(current=4, replicas=4, reason=Reason.STEADY, recommended=(4, 4)),
            reason=Reason.STEADY,
            mode=Mode.NORMAL,
            action=Hold(),
        )
        return advance(POLICY, state, decision, Outcome.UNCHANGED)

    @pytest.mark.parametrize("horizon_s", [20.0, 180.0, 600.0])
    def test_one_a_minute_whatever_the_horizon(self, horizon_s: float) -> None:
        state, made = State(), []
        for tick in range(121):
            before = state.hindsight.told_at
            state = self.after(state, START + 5.0 * tick, horizon_s=horizon_s)
            if state.hindsight.told_at != before:
                made.append(number(state.hindsight.told_at) - START)
        assert made == [60.0 * minute for minute in range(11)]
        assert len(state.hindsight.errors) == len([at for at in made if at + horizon_s <= 600.0])

    def test_a_changed_horizon_makes_no_extra_one(self) -> None:
        state = self.after(State(), START, horizon_s=180.0)
        for tick, horizon_s in enumerate((60.0, 600.0, 30.0), start=1):
            state = self.after(state, START + 5.0 * tick, horizon_s=horizon_s)
        assert state.hindsight.open == ((START + 180.0, 4.0),)

    def test_error_is_realised_over_expected(self) -> None:
        state = self.after(State(), START, top=4.0)
        state = self.after(state, START + 179.0, realised=9.0)
        assert state.hindsight.errors == ()
        state = self.after(state, START + 180.0, realised=5.0)
        assert list(state.hindsight.errors) == pytest.approx([0.25])

    def test_unknown_demand_judges_nothing(self) -> None:
        state = self.after(self.after(State(), START), START + 180.0, realised=None, top=None)
        assert (state.hindsight.errors, state.hindsight.open) == ((), ())

    def test_tiny_forecasts_judge_nothing(self) -> None:
        state = self.after(self.after(State(), START, top=0.3), START + 180.0)
        assert state.hindsight.errors == ()

    def test_errors_are_kept_up_to_their_number(self) -> None:
        state = State(hindsight=Hindsight(errors=tuple(float(index) for index in range(240))))
        state = self.after(self.after(state, START), START + 180.0)
        assert len(state.hindsight.errors) == 240
        assert (state.hindsight.errors[0], state.hindsight.errors[-1]) == (1.0, 0.0)
        assert state.hindsight.ranked == (0.0, *state.hindsight.errors[:-1])


# --- the horizon ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("starts", "settings", "horizon_s"),
    [
        pytest.param([], {}, 180.0, id="before-the-first-start"),
        pytest.param([], {"initial_horizon_s": 900.0}, 600.0, id="capped-before-the-first-start"),
        pytest.param([100.0], {}, 105.0, id="one-start-and-a-tick"),
        pytest.param([100.0, 200.0], {}, 205.0, id="two-starts-the-slowest"),
        pytest.param([float(index) for index in range(1, 11)], {}, 14.0, id="ninth-of-ten"),
        pytest.param([float(index) for index in range(1, 31)], {}, 32.0, id="27th-of-thirty"),
        pytest.param([700.0] * 5, {}, 600.0, id="capped"),
        pytest.param([100.0] * 5, {"horizon_s": 42.0}, 42.0, id="fixed"),
    ],
)
def test_horizon_is_p90_of_the_starts(starts: list[float], settings: dict[str, float], horizon_s: float) -> None:
    prediction = Prediction(**settings)  # type: ignore[arg-type]
    assert learned_horizon(prediction, starts, 5.0) == pytest.approx(horizon_s)


@given(starts=st.lists(st.floats(0.0, 5000.0), min_size=1, max_size=60))
def test_nine_of_ten_starts_are_inside_the_horizon(starts: list[float]) -> None:
    horizon_s = learned_horizon(Prediction(max_horizon_s=1e9), starts, 5.0)
    assert sum(1 for start in starts if start <= horizon_s) >= 0.9 * len(starts)


def test_starts_are_learned_from_the_pods_themselves() -> None:
    world = LoadingWorld(POLICY, 2)
    world.load_s = 90.0
    world.run(3, apply=False)
    assert world.decide().forecast.horizon_s == 180.0
    world.scale(3)
    world.run(30, apply=False)
    assert list(world.state.starts) == pytest.approx([90.0])
    assert world.decide().forecast.horizon_s == pytest.approx(95.0)


def test_only_the_last_starts_count() -> None:
    world = LoadingWorld(POLICY, 1)
    world.load_s = 10.0
    for replicas in range(2, STARTS_KEPT + 5):
        world.scale(replicas)
        world.run(4, apply=False)
    assert len(world.state.starts) == STARTS_KEPT


# --- the score's own forecast ---------------------------------------------------------------------------------------


def test_no_forecaster_or_history_no_forecast() -> None:
    assert forecast_score(Prediction(), [(START, 0.5)]) is None
    assert forecast_score(Prediction(score=Forecaster.TREND), []) is None


@given(
    values=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30),
    kind=st.sampled_from([Forecaster.TREND, Forecaster.LAG]),
    horizon_s=st.floats(0.0, 600.0),
)
def test_forecast_score_stays_a_score(values: list[float], kind: Forecaster, horizon_s: float) -> None:
    settings = Prediction(score=kind, score_horizon_s=horizon_s)
    found = forecast_score(settings, [(START + 5.0 * index, value) for index, value in enumerate(values)])
    assert 0.0 <= number(found) <= 1.0
    higher = [(START + 5.0 * index, value) for index, value in enumerate([*values[:-1], min(1.0, values[-1] + 0.1)])]
    assert number(forecast_score(settings, higher)) >= number(found) - 1e-9


def test_minutes_are_kept_for_an_hour() -> None:
    world = World(POLICY, 1)
    world.set(request_rate=2.0)
    for _ in range(70):
        world.tick(60.0)
    counts = [
        after[1] - before[1]
        for before, after in zip(world.state.arrivals.minutes, world.state.arrivals.minutes[1:], strict=False)
    ]
    assert len(counts) == MINUTES_KEPT
    assert counts == pytest.approx([120.0] * MINUTES_KEPT)
    assert world.state.arrivals.minutes[-1][0] == world.at - 60.0
