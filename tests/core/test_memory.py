"""What outlives the process: every restart through plain JSON, and what the next process makes of it."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autoscaler.core.memory import Memory, essential, memory_from_plain, memory_of, memory_to_plain, recall
from autoscaler.core.model import new_model
from autoscaler.core.owners import Owners
from autoscaler.core.policy import DemandPolicy, StepTime, TargetRef
from autoscaler.core.state import LONGEST_HOLE_S, Hindsight, Recommended, State
from autoscaler.core.tuning import Reverted, Tuning
from autoscaler.core.types import BatchReason, ForeignChange, Limits, Reason, Regime
from tests.core.world import P0, START, World

HINDSIGHT = Hindsight(
    regimes=(Regime(since=START - 600.0, relative_sd=0.1), Regime(), Regime()),
    changed_at=START - 600.0,
    open=((START + 100.0, 3.5),),
    told_at=START - 20.0,
    errors=(0.25, -0.5, 0.125),
    ranked=(-0.5, 0.125, 0.25),
)
MODEL = replace(
    new_model(StepTime(c0=0.011, cp=1.1e-5, cb=2.2e-5, ck=3.3e-8), START - 30.0),
    rows=42,
    gram=np.arange(16.0).reshape(4, 4) / 3.0,
    moment=np.arange(4.0) / 7.0,
)
TUNING = Tuning(
    wanted=Limits(max_num_seqs=48, max_num_batched_tokens=2048, long_prefill_token_threshold=0),
    moved_at=START - 90.0,
    reverted=(Reverted(BatchReason.RAISE_SEQUENCES, 60, True, 2, START - 500.0),),
    held_from=64,
)
CHANGE = ForeignChange(at=START - 20.0, before=4, after=2, by="argocd-controller", undid=True)
FULL = State(
    times=(START,),
    last_up_at=START - 100.0,
    last_down_at=START - 900.0,
    changes=((START - 900.0, -1), (START - 100.0, 2)),
    last_restart_at=START - 50.0,
    starts=(181.5, 190.25),
    recommendations=(Recommended(START - 300.0, START - 60.0, 3, 4), Recommended(START - 45.0, START, 3, 3)),
    hindsight=HINDSIGHT,
    model=MODEL,
    owners=Owners(
        uid="u-1",
        replicas=3,
        ours=True,
        change=CHANGE,
        undone_at=(START - 60.0, START - 20.0),
        conflict=replace(CHANGE, at=START - 1200.0, written_at=START - 1201.0),
    ),
    tuning=TUNING,
)


def kept(state: State, policy: Any = P0) -> Memory:
    """Return the memory as the next process reads it."""
    memory = memory_of(policy, state)
    assert memory is not None
    return memory_from_plain(json.loads(json.dumps(memory_to_plain(memory), allow_nan=False)))


def restarted(state: State, at: float, *, into: State | None = None, policy: Any = P0) -> State:
    """Return what a process knows that takes the memory in."""
    return recall(policy, into or State(), kept(state, policy), at)


def same(left: State, right: State) -> bool:
    """Tell whether two states agree in all that is kept."""
    plain = [json.dumps(memory_to_plain(kept(replace(one, times=(START,))))) for one in (left, right)]
    return plain[0] == plain[1]


# --- round trip -----------------------------------------------------------------------------------------------------


def test_everything_that_is_kept_comes_back() -> None:
    state = restarted(FULL, START)
    for name in (
        "last_up_at",
        "last_down_at",
        "changes",
        "last_restart_at",
        "starts",
        "recommendations",
        "hindsight",
        "owners",
        "tuning",
    ):
        assert getattr(state, name) == getattr(FULL, name), name
    assert state.model is not None
    assert (state.model.line, state.model.rows, state.model.at) == (MODEL.line, MODEL.rows, MODEL.at)
    assert np.array_equal(state.model.gram, MODEL.gram)
    assert np.array_equal(state.model.moment, MODEL.moment)


def test_nothing_is_kept_of_what_has_not_begun() -> None:
    assert memory_of(P0, State()) is None
    assert same(restarted(State(times=(START,)), START), State())


def test_taking_it_in_twice_changes_nothing() -> None:
    once = restarted(FULL, START + 10.0)
    assert same(restarted(FULL, START + 10.0, into=once), once)
    own = replace(once, recommendations=(*once.recommendations, Recommended(START + 10.0, START + 20.0, 2, 2)))
    assert restarted(FULL, START + 20.0, into=own).recommendations == own.recommendations


def test_its_plain_form_is_small() -> None:
    errors = tuple(number / 7.0 for number in range(240))
    entries = tuple(Recommended(START + number, START + number + 4.0, 3, number) for number in range(0, 900, 5))
    large = replace(
        FULL, recommendations=entries, hindsight=HINDSIGHT._replace(errors=errors), starts=(181.123456,) * 30
    )
    assert len(json.dumps(memory_to_plain(kept(large)), separators=(",", ":"))) < 16_000
    assert len(json.dumps(memory_to_plain(essential(kept(large))), separators=(",", ":"))) < 950


def test_its_essence_are_the_cooldowns() -> None:
    state = recall(P0, State(), essential(kept(FULL)), START)
    assert (state.last_up_at, state.last_down_at, state.changes) == (FULL.last_up_at, FULL.last_down_at, FULL.changes)
    assert (state.recommendations, state.starts, state.model, state.hindsight) == ((), (), None, Hindsight())


# --- rules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "saved", "result"),
    [
        pytest.param(None, -50.0, -50.0, id="only saved"),
        pytest.param(-70.0, None, -70.0, id="only own"),
        pytest.param(-70.0, -50.0, -50.0, id="saved is later"),
        pytest.param(-20.0, -50.0, -20.0, id="own is later"),
        pytest.param(None, 3600.0, 0.0, id="in the future"),
        pytest.param(None, None, None, id="none"),
    ],
)
@pytest.mark.parametrize("name", ["last_up_at", "last_down_at", "last_restart_at"])
def test_c082_of_a_cooldown_the_later_counts(
    name: str, own: float | None, saved: float | None, result: float | None
) -> None:
    def at(offset: float | None) -> float | None:
        return None if offset is None else START + offset

    before = replace(State(times=(START,)), **{name: at(saved)})  # type: ignore[arg-type]
    state = restarted(before, START, into=replace(State(), **{name: at(own)}))  # type: ignore[arg-type]
    assert getattr(state, name) == at(result)


def test_changes_are_those_of_both_in_order_and_none_in_the_future() -> None:
    before = replace(State(times=(START,)), changes=((START - 60.0, 2), (START - 10.0, -1), (START + 500.0, 1)))
    state = restarted(before, START, into=State(changes=((START - 10.0, -1), (START - 5.0, 1))))
    assert state.changes == ((START - 60.0, 2), (START - 10.0, -1), (START - 5.0, 1), (START, 1))


@pytest.mark.parametrize(
    ("entries", "own", "windows"),
    [
        pytest.param([(-300, -10, 2, 4)], [], [(-300, -10, 2, 4)], id="a short hole"),
        pytest.param([(-300, -LONGEST_HOLE_S, 2, 4)], [], [(-300, -LONGEST_HOLE_S, 2, 4)], id="as long as may be"),
        pytest.param([(-300, -LONGEST_HOLE_S - 0.5, 2, 4)], [], [], id="too long a hole"),
        pytest.param([(-300, -25, 2, 4)], [(-10, 0, 2, 3)], [(-300, -25, 2, 4), (-10, 0, 2, 3)], id="before our own"),
        pytest.param([(-300, -90, 2, 4)], [(-10, 0, 2, 3)], [(-10, 0, 2, 3)], id="too long before our own"),
        pytest.param([(-300, 0, 2, 4)], [(-400, 0, 2, 3)], [(-400, 0, 2, 3)], id="we saw it ourselves"),
        pytest.param(
            [(-300, -5, 2, 4), (-5, 0, 2, 6)],
            [(-10, 0, 2, 3)],
            [(-300, -10, 2, 4), (-10, -10, 2, 6), (-10, 0, 2, 3)],
            id="both at once",
        ),
        pytest.param([(-20, 40, 2, 4), (50, 90, 2, 5)], [], [(-20, 0, 2, 4), (0, 0, 2, 5)], id="in the future"),
        pytest.param([(3000, 3600, 2, 4)], [], [(0, 0, 2, 4)], id="all in the future"),
    ],
)
def test_c082_windows_go_on_over_a_short_hole_only(
    entries: list[tuple[float, float, int, int]],
    own: list[tuple[float, float, int, int]],
    windows: list[tuple[float, float, int, int]],
) -> None:
    policy = replace(P0, interval_s=5.0)

    def absolute(rows: list[tuple[float, float, int, int]]) -> tuple[Recommended, ...]:
        return tuple(Recommended(START + since, START + until, up, keep) for since, until, up, keep in rows)

    before = replace(State(times=(START,)), recommendations=absolute(entries))
    state = restarted(before, START, into=State(recommendations=absolute(own)), policy=policy)
    assert state.recommendations == absolute(windows)


def test_of_what_was_learned_the_side_that_saw_more_counts() -> None:
    few = replace(FULL, starts=(1.0,), model=replace(MODEL, rows=41), hindsight=HINDSIGHT._replace(errors=(0.5,)))
    for state in (restarted(FULL, START, into=few), restarted(few, START, into=FULL)):
        assert state.starts == FULL.starts
        assert state.model is not None
        assert state.model.rows == 42
        assert state.hindsight.errors == HINDSIGHT.errors
        assert state.hindsight.ranked == (-0.5, 0.125, 0.25)


def test_open_forecasts_are_of_whoever_made_the_last() -> None:
    later = HINDSIGHT._replace(told_at=START - 5.0, open=((START + 170.0, 4.5),))
    for state in (
        restarted(FULL, START, into=State(hindsight=later)),
        restarted(replace(FULL, hindsight=later), START, into=State(hindsight=HINDSIGHT)),
    ):
        assert (state.hindsight.told_at, state.hindsight.open) == (START - 5.0, ((START + 170.0, 4.5),))


def test_times_of_the_learned_in_the_future_are_now() -> None:
    early = START - 1000.0
    state = restarted(FULL, early)
    assert (state.hindsight.told_at, state.hindsight.changed_at, state.hindsight.open) == (early, early, ())
    assert state.model is not None
    assert state.model.at == early


def test_a_policy_that_does_not_learn_keeps_its_own_line() -> None:
    fixed = replace(P0, demand=DemandPolicy(learn=False))
    assert restarted(FULL, START, policy=fixed).model is None


def test_another_targets_memory_is_not_taken_in() -> None:
    moved = replace(P0, target=TargetRef(namespace="serving", deployment="other"))
    state = State(last_up_at=START)
    assert recall(moved, state, kept(FULL), START) is state


# --- damage ---------------------------------------------------------------------------------------------------------


def damaged(**changes: object) -> dict[str, object]:
    memory = memory_of(P0, FULL)
    assert memory is not None
    return {**memory_to_plain(memory), **changes}


LINE = {"c0": 0.02, "cp": 1e-5, "cb": 1e-5, "ck": 1e-8}


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        pytest.param([], "is no object", id="a list"),
        pytest.param({}, "version None, not 1", id="empty"),
        pytest.param(damaged(version=2), "version 2, not 1", id="newer"),
        pytest.param(damaged(target=None), "no target", id="no target"),
        pytest.param(damaged(at=None), "None is no number", id="no time"),
        pytest.param(damaged(last_up_at="yesterday"), "'yesterday' is no number", id="words"),
        pytest.param(damaged(last_up_at=True), "True is no number", id="true"),
        pytest.param(damaged(last_up_at=float("nan")), "nan is no number", id="nan"),
        pytest.param(damaged(last_up_at=float("inf")), "inf is no number", id="inf"),
        pytest.param(damaged(changes=[[START]]), "is no list of 2", id="half a change"),
        pytest.param(damaged(changes={"a": 1}), "is no list", id="no list"),
        pytest.param(damaged(changes=[[START, 1.5]]), "1.5 is no whole number", id="half a replica"),
        pytest.param(damaged(starts=[-1.0]), "-1 is below 0", id="ready before it was created"),
        pytest.param(damaged(model={}), "None is no object", id="empty model"),
        pytest.param(damaged(model={"line": LINE, "gram": [[1.0]]}), "is no list of 4", id="gram"),
    ],
)
def test_damage_is_refused_and_said(plain: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        memory_from_plain(plain)


# --- restarts, driven through the core ------------------------------------------------------------------------------


def calm(world: World) -> World:
    world.press(memory=0.02, backlog=0.0, latency=0.0)
    return world


def restart(world: World, down_s: float) -> None:
    """Let the process end, and the next one begin so much later with what was kept."""
    memory = kept(world.state)
    for engine in world.engines.values():
        engine.run(down_s)
    world.at += down_s
    world.state = recall(world.policy, State(), memory, world.at)


@pytest.mark.parametrize("down_s", [5.0, 45.0, 600.0])
def test_c082_no_restart_forgets_the_cooldown(down_s: float) -> None:
    world = World(replace(P0, scale_up=replace(P0.scale_up, cooldown_s=1000.0)), 2)
    world.press(memory=1.0, backlog=1.0, latency=1.0)
    world.run(8)
    (written,) = world.writes
    restart(world, down_s)
    while world.at < written[0] + 1000.0:
        assert world.tick().reason is Reason.HELD_COOLDOWN
    world.tick()
    assert len(world.writes) == 2


@pytest.mark.parametrize("every_ticks", [3, 13])
def test_c082_restarts_with_long_holes_never_shrink(every_ticks: int) -> None:
    world = calm(World(P0, 5))
    for _ in range(12):
        world.run(every_ticks)
        restart(world, LONGEST_HOLE_S + P0.interval_s)
    assert world.writes == []


def test_c082_the_window_goes_on_over_a_quick_restart() -> None:
    """300 s of window: 10 ticks, a restart of 30 s, and then those that are missing, not 20 more."""
    world = calm(World(P0, 5))
    world.run(10)
    restart(world, 30.0)
    while not world.writes:
        assert world.at - START <= 330.0
        world.tick()
    assert world.writes[0][1:] == (5, 4)
    assert 300.0 <= world.writes[0][0] - START <= 315.0


def test_c082_what_was_wished_before_a_restart_still_holds_a_shrink() -> None:
    world = World(P0, 5)
    world.press(memory=0.65, backlog=0.5, latency=0.4)
    world.run(30)
    busy_until = world.at
    calm(world)
    restart(world, 30.0)
    while not world.writes:
        world.tick()
    assert world.writes[0][0] - busy_until >= 285.0


# --- batching limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "saved", "wanted", "moved_at"),
    [
        pytest.param(Tuning(), TUNING, 48, START - 90.0, id="only saved"),
        pytest.param(replace(TUNING, wanted=Limits(max_num_seqs=9)), Tuning(), 9, START - 90.0, id="only own"),
        pytest.param(
            Tuning(wanted=Limits(max_num_seqs=9), moved_at=START - 10.0), TUNING, 9, START - 10.0, id="own is later"
        ),
        pytest.param(
            Tuning(wanted=Limits(max_num_seqs=9), moved_at=START - 95.0), TUNING, 48, START - 90.0, id="saved is later"
        ),
        pytest.param(Tuning(), replace(TUNING, moved_at=START + 900.0), 48, START, id="saved is in the future"),
    ],
)
def test_the_limits_of_whoever_moved_them_last(own: Tuning, saved: Tuning, wanted: int, moved_at: float) -> None:
    state = restarted(replace(FULL, tuning=saved), START, into=State(tuning=own))
    assert state.tuning.wanted is not None
    assert (state.tuning.wanted.max_num_seqs, state.tuning.moved_at) == (wanted, moved_at)


def test_what_either_took_back_stays_taken_back() -> None:
    mine = Tuning(
        reverted=(
            Reverted(BatchReason.RAISE_SEQUENCES, 60, True, 1, START - 5.0),
            Reverted(BatchReason.LOWER_BUDGET, 512, False, 1, START - 7.0),
        )
    )
    state = restarted(FULL, START, into=State(tuning=mine))
    assert state.tuning.reverted == (
        Reverted(BatchReason.RAISE_SEQUENCES, 60, True, 2, START - 5.0),
        Reverted(BatchReason.LOWER_BUDGET, 512, False, 1, START - 7.0),
    )


def test_a_trial_that_nobody_watched_is_not_kept() -> None:
    trial = Tuning(moved_at=START, still_since=START, serving=frozenset({"a"}), replicas=3)
    assert kept(replace(FULL, tuning=trial)).tuning == Tuning(moved_at=START)
