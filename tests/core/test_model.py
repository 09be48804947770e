"""The step-time line: what engines teach, and what they do not."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.core.model import (
    HALF_LIFE_S,
    LEARN_EVERY_S,
    LOWER,
    MIN_ROWS,
    SCALE,
    UPPER,
    StepModel,
    learn,
    new_model,
)
from autoscaler.core.policy import Policy, ReplicaBounds, StepTime, TargetRef
from autoscaler.core.signals import COLUMN, ENGINE_COLUMNS, FIRST_COUNTER
from autoscaler.core.types import EngineKey, Engines, Floats
from autoscaler.core.window import COUNTERS, Increase
from tests.core.world import START, World

PRIOR = StepTime()
CAPACITY = 400_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """One engine over one interval: `idle_s` of it without any iteration; below 0, with work from before it."""

    batch: float = 40.0
    prefill: float = 300.0
    resident: float = 80_000.0
    seconds: float = 5.0
    idle_s: float = 0.0
    running: float = 40.0
    was_running: float = 40.0


def step_s(line: StepTime, engine: Busy) -> float:
    """Return the seconds of one iteration by the line."""
    return line.c0 + line.cp * engine.prefill + line.cb * engine.batch + line.ck * engine.resident


def reading(line: StepTime, engines: list[Busy], **missing: float) -> tuple[Engines, Increase]:
    """Return what such engines show after one interval; `missing` replaces counters by name."""
    values = np.full((len(engines), len(ENGINE_COLUMNS)), np.nan)
    counters = np.zeros((len(engines), COUNTERS))
    for row, engine in enumerate(engines):
        values[row, COLUMN["num_requests_running"]] = engine.running
        values[row, COLUMN["kv_cache_usage"]] = engine.resident / CAPACITY
        values[row, COLUMN["kv_capacity_tokens"]] = CAPACITY
        seconds = step_s(line, engine)
        iterations = (engine.seconds - engine.idle_s) / seconds
        counted = {
            "iterations": iterations,
            "prompt_tokens": iterations * engine.prefill,
            "cached_prompt_tokens": 0.0,
            "generation_tokens": iterations * engine.batch,
            "itl_sum": iterations * engine.batch * seconds,
            **missing,
        }
        for name, value in counted.items():
            counters[row, COLUMN[name] - FIRST_COUNTER] = value
    keys = tuple(EngineKey(f"uid-{row}") for row in range(len(engines)))
    increase = Increase(
        counters=counters,
        elapsed=np.array([engine.seconds for engine in engines]),
        was_running=np.array([engine.was_running for engine in engines]),
    )
    return Engines(keys=keys, values=values), increase


def varied(rng: np.random.Generator, count: int) -> list[Busy]:
    """Return engines in different states."""
    return [
        Busy(
            batch=float(rng.uniform(4, 200)),
            prefill=float(rng.uniform(0, 3000)),
            resident=float(rng.uniform(5_000, 350_000)),
        )
        for _ in range(count)
    ]


def taught(line: StepTime, *, looks: int = 60, engines: int = 4, noise: float = 0.0) -> StepModel:
    """Return the model after so many looks at engines that obey the line, with relative noise on the step time."""
    rng = np.random.default_rng(7)
    model = new_model(PRIOR, START)
    for look in range(1, looks + 1):
        shaken = replace(line, c0=line.c0 * (1.0 + noise * float(rng.normal())))
        shown, increase = reading(shaken, varied(rng, engines))
        model = learn(model, PRIOR, shown, increase, START + LEARN_EVERY_S * look)
    return model


def coefficients(line: StepTime) -> Floats:
    """Return the line as an array."""
    return np.array([line.c0, line.cp, line.cb, line.ck])


LINES = [
    pytest.param(StepTime(c0=0.020, cp=90e-6, cb=35e-6, ck=60e-9), id="a-70b-model"),
    pytest.param(StepTime(c0=0.006, cp=12e-6, cb=10e-6, ck=8e-9), id="an-8b-model"),
]


def misses(model: StepModel, line: StepTime) -> Floats:
    """Return the relative errors of the model's step times over states it has not seen."""
    unseen = varied(np.random.default_rng(99), 300)
    return np.array([abs(step_s(model.line, engine) / step_s(line, engine) - 1.0) for engine in unseen])


@pytest.mark.parametrize("noise", [pytest.param(0.0, id="exact"), pytest.param(0.05, id="noisy")])
@pytest.mark.parametrize("line", LINES)
def test_step_times_are_learned_in_half_an_hour(line: StepTime, noise: float) -> None:
    model = taught(line, noise=noise)
    assert model.rows == 240
    assert misses(model, line).mean() < 0.02
    assert misses(model, line).max() < 0.10
    # Prefill is the steepest and first to be known; cb and ck lie close together and stay nearer to the prior.
    assert model.line.cp == pytest.approx(line.cp, rel=0.02)
    assert model.line.c0 == pytest.approx(line.c0, rel=0.20)


@pytest.mark.parametrize("line", LINES)
def test_each_coefficient_is_learned_by_many_rows(line: StepTime) -> None:
    model = taught(line, looks=200, engines=400)
    assert coefficients(model.line) == pytest.approx(coefficients(line), rel=0.07)
    assert misses(model, line).max() < 0.01


@pytest.mark.parametrize("line", LINES)
def test_more_rows_miss_by_less(line: StepTime) -> None:
    means = [misses(taught(line, engines=engines), line).mean() for engines in (1, 4, 16, 64)]
    assert means == sorted(means, reverse=True)


def test_engines_that_obey_the_prior_leave_it_alone() -> None:
    assert coefficients(taught(PRIOR).line) == pytest.approx(coefficients(PRIOR), rel=1e-6)


def test_the_prior_holds_until_enough_rows() -> None:
    line = StepTime(c0=0.006, cp=12e-6, cb=10e-6, ck=8e-9)
    before = taught(line, looks=MIN_ROWS - 1, engines=1)
    assert (before.rows, before.line) == (MIN_ROWS - 1, PRIOR)
    after = taught(line, looks=MIN_ROWS, engines=1)
    assert after.rows == MIN_ROWS
    assert misses(after, line).mean() < 0.1


def test_the_prior_fills_in_what_was_never_seen() -> None:
    # Always the same batch without prefill: c0, cb and ck cannot be told apart, and cp not be seen.
    line = StepTime(c0=0.020, cp=300e-6, cb=35e-6, ck=60e-9)
    model = new_model(PRIOR, START)
    same = Busy(prefill=0.0)
    for look in range(1, 100):
        model = learn(model, PRIOR, *reading(line, [same]), START + LEARN_EVERY_S * look)
    assert model.line.cp == pytest.approx(PRIOR.cp)
    assert step_s(model.line, same) == pytest.approx(step_s(line, same), rel=0.01)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(Busy(running=1.0), id="one-request-at-the-end"),
        pytest.param(Busy(was_running=1.0), id="one-request-at-the-start"),
        pytest.param(Busy(was_running=float("nan")), id="seen-for-the-first-time"),
        pytest.param(Busy(seconds=5.0, idle_s=1.5), id="idle-for-a-third-of-the-interval"),
        pytest.param(Busy(seconds=0.1), id="two-iterations"),
        pytest.param(Busy(seconds=0.0), id="the-same-page-twice"),
        pytest.param(Busy(batch=0.0), id="nothing-generated"),
        pytest.param(Busy(resident=float("nan")), id="no-kv-gauge"),
        pytest.param(Busy(idle_s=-600.0), id="ten-minutes-of-work-since-a-page-that-stood-still"),
    ],
)
def test_what_teaches_nothing(engine: Busy) -> None:
    model = new_model(PRIOR, START)
    for look in range(1, 2 * MIN_ROWS):
        model = learn(model, PRIOR, *reading(PRIOR, [engine]), START + LEARN_EVERY_S * look)
    assert (model.rows, model.line) == (0, PRIOR)


@pytest.mark.parametrize("name", ["iterations", "prompt_tokens", "generation_tokens", "itl_sum"])
def test_an_engine_without_one_counter_teaches_nothing(name: str) -> None:
    shown, increase = reading(PRIOR, [Busy(), Busy()], **{name: float("nan")})
    assert learn(new_model(PRIOR, START), PRIOR, shown, increase, START + LEARN_EVERY_S).rows == 0


def test_prefix_hits_are_no_prefill_and_may_be_unknown() -> None:
    line = StepTime(c0=0.020, cp=90e-6, cb=35e-6, ck=60e-9)
    engine = Busy(prefill=100.0)
    iterations = engine.seconds / step_s(line, engine)
    hits = {"prompt_tokens": iterations * 1100.0, "cached_prompt_tokens": iterations * 1000.0}
    at = START + LEARN_EVERY_S
    plain = learn(new_model(PRIOR, START), PRIOR, *reading(line, [engine]), at)
    cached = learn(new_model(PRIOR, START), PRIOR, *reading(line, [engine], **hits), at)
    unknown = learn(new_model(PRIOR, START), PRIOR, *reading(line, [engine], cached_prompt_tokens=float("nan")), at)
    assert cached.gram == pytest.approx(plain.gram)
    assert unknown.gram == pytest.approx(plain.gram)


def test_only_the_busy_engines_of_a_fleet_teach() -> None:
    shown, increase = reading(PRIOR, [Busy(), Busy(idle_s=4.0), Busy(running=0.0), Busy()])
    assert learn(new_model(PRIOR, START), PRIOR, shown, increase, START + LEARN_EVERY_S).rows == 2


def test_one_look_in_thirty_seconds() -> None:
    model = new_model(PRIOR, START)
    seen = []
    for tick in range(25):
        model = learn(model, PRIOR, *reading(PRIOR, [Busy()]), START + 5.0 * tick)
        seen.append(model.rows)
    assert seen == [tick // 6 for tick in range(25)]


def test_what_was_learned_fades_by_half_in_an_hour() -> None:
    first = learn(new_model(PRIOR, START), PRIOR, *reading(PRIOR, [Busy()]), START + LEARN_EVERY_S)
    later = learn(first, PRIOR, *reading(PRIOR, [Busy()]), first.at + HALF_LIFE_S)
    assert later.gram == pytest.approx(1.5 * first.gram)
    assert later.moment == pytest.approx(1.5 * first.moment)
    assert later.rows == 2


@pytest.mark.parametrize(
    ("old", "new", "hours"),
    [
        pytest.param(LINES[0].values[0], LINES[1].values[0], 2, id="a-faster-one"),
        # Rows weigh 1/t^2: those of an engine six times as fast fade for five half-lives longer.
        pytest.param(LINES[1].values[0], LINES[0].values[0], 12, id="a-slower-one"),
    ],
)
def test_another_engine_is_learned_anew(old: StepTime, new: StepTime, hours: int) -> None:
    model = taught(old)
    before = misses(model, new).mean()
    rng = np.random.default_rng(8)
    for _ in range(120 * hours):
        model = learn(model, PRIOR, *reading(new, varied(rng, 4)), model.at + LEARN_EVERY_S)
    assert before > 0.5
    assert misses(model, new).mean() < 0.03


def test_no_coefficient_is_negative() -> None:
    # Steps that get shorter with every sequence: least squares alone would make cb negative.
    model = new_model(PRIOR, START)
    rng = np.random.default_rng(9)
    for look in range(1, 400):
        engine = replace(varied(rng, 1)[0], prefill=0.0)
        line = StepTime(c0=0.050 - 200e-6 * engine.batch, cp=0.0, cb=0.0, ck=0.0)
        model = learn(model, PRIOR, *reading(line, [engine]), START + LEARN_EVERY_S * look)
    ridge = 1.0 / SCALE**2
    alone = np.linalg.solve(model.gram + np.diag(ridge), model.moment + ridge * coefficients(PRIOR))
    assert alone[2] < 0.0
    assert model.line.cb == 0.0
    assert min(coefficients(model.line)) >= 0.0


@given(
    c0=st.floats(1e-4, 1.0),
    cp=st.floats(0.0, 0.01),
    cb=st.floats(0.0, 0.01),
    ck=st.floats(0.0, 1e-5),
    seed=st.integers(0, 1000),
)
def test_coefficients_stay_inside_their_bounds(c0: float, cp: float, cb: float, ck: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    line = StepTime(c0=c0, cp=cp, cb=cb, ck=ck)
    model = new_model(PRIOR, START)
    for look in range(1, 8):
        engines = [replace(engine, seconds=60.0) for engine in varied(rng, 4)]
        model = learn(model, PRIOR, *reading(line, engines), START + LEARN_EVERY_S * look)
    found = coefficients(model.line)
    assert np.isfinite(found).all()
    assert (found >= LOWER).all() or model.line == PRIOR
    assert (found <= UPPER).all()


def test_through_the_state_and_only_if_asked() -> None:
    policy = Policy(name="p", target=TargetRef(deployment="d"), replicas=ReplicaBounds(max=9))
    # 40 steps a second of 25 ms: 0.020 s and 60e-6 s for each of 50 prefill and 20e-6 for each of 20 decoded tokens.
    load = {"kv": 0.4, "running": 20.0, "prompt_rate": 2000.0, "token_rate": 800.0, "step_rate": 40.0, "itl_s": 0.025}
    world = World(policy, 4)
    world.set(**load)
    world.run(150, apply=False)
    assert world.state.model is not None
    assert world.state.model.rows == 4 * 24
    learned = world.state.model.line
    found = learned.c0 + 50.0 * learned.cp + 20.0 * learned.cb + 40_000.0 * learned.ck
    assert found == pytest.approx(0.025, rel=0.01)
    fixed = World(replace(policy, demand=replace(policy.demand, learn=False)), 4)
    fixed.set(**load)
    fixed.run(150, apply=False)
    assert fixed.state.model is not None
    assert (fixed.state.model.rows, fixed.state.model.line) == (0, policy.demand.prior)
