"""Field failures of the prediction, by the ids under which they were collected."""

from dataclasses import replace
from itertools import pairwise

import pytest

from autoscaler.core.forecast import forecast_score, linear_trend
from autoscaler.core.policy import Forecaster, Prediction
from autoscaler.core.types import Hold, Reason, ScaleReplicas
from tests.core.world import P0, START, World

TREND = Prediction(score=Forecaster.TREND, score_window_s=120.0, score_horizon_s=60.0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param((0.9, 0.7, 0.5, 0.3, 0.1), 0.0, id="decline-raw-minus-0.7"),
        pytest.param((0.1, 0.3, 0.5, 0.7, 0.9), 1.0, id="rise-raw-1.7"),
    ],
)
def test_c063_forecast_is_clamped(values: tuple[float, ...], expected: float) -> None:
    history = [(15.0 * index, value) for index, value in enumerate(values)]
    raw = linear_trend(history, 60.0)
    assert raw == pytest.approx(values[-1] + 4 * (values[1] - values[0]))
    assert forecast_score(TREND, history) == expected


@pytest.mark.parametrize(
    ("measured", "predicted", "to"),
    [
        pytest.param(0.80, 0.20, 6, id="a-measured-asks-for-growth"),
        pytest.param(0.20, 0.80, 6, id="b-predicted-asks-for-growth"),
        pytest.param(0.20, 0.10, 3, id="c-both-low"),
    ],
)
def test_c064_prediction_does_not_undo_the_measurement(measured: float, predicted: float, to: int) -> None:
    world = World(P0, 4)
    world.press(0.2, 0.2, 0.2)
    world.run(25, apply=False)
    # A straight line through the present measurement that reaches `predicted` at the horizon of 60 s.
    slope = (predicted - measured) / 60.0
    line = tuple((world.at - age, measured - slope * age) for age in (60.0, 45.0, 30.0, 15.0))
    world.state = replace(world.state, scores=line, last_up_at=None, last_down_at=None)
    world.press(measured, measured, measured)
    decision = world.decide()
    assert decision.score is not None
    assert decision.score.value == pytest.approx(measured)
    assert decision.forecast.score == pytest.approx(predicted)
    assert decision.action == ScaleReplicas(seen=4, to=to, uid="uid-of-target")


def test_c064_low_measurement_with_high_prediction_never_shrinks() -> None:
    world = World(P0, 4)
    world.press(0.0, 0.0, 0.0)
    world.run(25, apply=False)
    for value in (0.05, 0.10, 0.15, 0.20, 0.25):
        world.press(value, value, value)
        decision = world.tick(apply=False)
    assert decision.score is not None
    assert decision.score.value == pytest.approx(0.25)
    assert decision.forecast.score is not None
    assert decision.forecast.score > 0.30
    assert isinstance(decision.action, Hold)


def test_c066_identical_timestamps() -> None:
    assert forecast_score(TREND, [(100.0, 0.4), (100.0, 0.6), (115.0, 0.6)]) == pytest.approx(0.6, abs=1e-9)
    assert forecast_score(TREND, [(100.0, 0.4), (100.0, 0.6)]) == pytest.approx(0.6, abs=1e-9)


def test_c069_an_old_spike_does_not_hold_for_ever() -> None:
    world = World(P0, 3)
    world.press(1.0, 1.0, 1.0)
    world.tick()
    world.tick()
    world.press(0.05, 0.05, 0.05)
    last_up = world.writes[-1][0] - START
    forecasts = []
    for _ in range(80):
        forecasts.append(world.tick().forecast.score)
    downs = [at - START for at, seen, to in world.writes if to < seen]
    # The window of 300 s must hold calm scores only: they begin at 30 s.
    assert downs[0] == pytest.approx(max(last_up, 30.0) + 300.0, abs=15.0)
    assert all(later - earlier >= 300.0 for earlier, later in pairwise(downs))
    assert len(downs) >= 2
    calm = forecasts[9:]
    assert all(value is not None and value <= 0.30 for value in calm)


def test_lag_is_the_seed_compensation() -> None:
    settings = Prediction(score=Forecaster.LAG, alpha=0.25, score_window_s=120.0, score_horizon_s=15.0)
    history = [(0.0, 0.1), (15.0, 0.2), (30.0, 0.3)]
    assert forecast_score(settings, history) == pytest.approx(0.25 * 0.3 + 0.75 * 0.4)


def test_reason_of_growth_names_the_rule() -> None:
    world = World(P0, 2)
    world.press(1.0, 1.0, 1.0)
    assert world.decide().reason is Reason.UP_SCORE
