"""Each guard alone, then their order, the urgent paths, budgets, bounds, and what is learned of starts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autoscaler.core.facts import Facts, Usage
from autoscaler.core.guards import (
    GUARDS,
    Tick,
    blow_fuse,
    check_rebound,
    count_pending,
    hold_cooldown,
    hold_dead_band,
    hold_turn,
    keep_bounds,
    largest_step,
    leave_in_motion,
    limit_rate,
    limit_step,
    pressing,
    pressure,
    propose,
    require_evidence,
    stabilize,
    stabilized,
)
from autoscaler.core.policy import (
    Emergency,
    Forecaster,
    HealthFuse,
    Pending,
    Policy,
    Prediction,
    RateBudget,
    ReplicaBounds,
    ScaleUp,
    Select,
    Sizing,
    Slo,
    Slos,
    TargetRef,
)
from autoscaler.core.state import State
from autoscaler.core.types import (
    Demand,
    Forecast,
    GapReason,
    Hold,
    Outcome,
    Part,
    PodPhase,
    Proposal,
    Reason,
    ScaleReplicas,
    Score,
)
from tests.core.world import P0, START, LoadingWorld, World, loading

POLICY = Policy(name="p", target=TargetRef(deployment="d"), replicas=ReplicaBounds(max=20))
CALM = {"memory": 0.1, "backlog": 0.0, "latency": 0.1}


def facts(**changes: Any) -> Facts:
    """Return the facts of four ready pods that all report."""
    values: dict[str, Any] = {
        "ready": 4.0,
        "loading": 0,
        "overdue": 0,
        "stuck": 0,
        "expected": 4,
        "known": 4,
        "cold": 0,
        "waiting": 0.0,
        "running": 8.0,
        "kv": Usage(growth=0.1, shrink=0.1),
        "kv_tokens": 1e5,
        "idle": False,
        "stalled": False,
        "asleep": 0.0,
        "live": 4,
    }
    return Facts(**{**values, **changes})


def score(parts: dict[str, float | None] | None = None, **changes: Any) -> Score:
    """Return a score of these parts; None is a part that is missing."""
    weights = {"memory": 0.40, "backlog": 0.35, "latency": 0.25}
    levels = {**CALM, **(parts or {})}
    made = tuple(
        Part(
            name=name,
            weight=weights[name],
            value=level,
            shrink_value=level,
            driver=name,
            gap=GapReason.EMPTY if level is None else None,
        )
        for name, level in levels.items()
    )
    known = [part for part in made if part.value is not None]
    weight = sum(part.weight for part in known)
    value = sum(part.weight * (part.value or 0.0) for part in known) / weight if weight >= 0.5 else None
    values: dict[str, Any] = {
        "value": value,
        "shrink_value": value if len(known) == 3 else None,
        "known_weight": weight,
        "parts": made,
    }
    return Score(**{**values, **changes})


def lumpy(clear: float) -> Score:
    """Return a score whose latency is at its worst, but `clear` where it alone would hold a shrink."""
    found = score({"latency": 1.0})
    return replace(found, parts=(*found.parts[:2], replace(found.part("latency"), clear_value=clear)))


def tick(*, current: int = 4, target: dict[str, Any] | None = None, **changes: Any) -> Tick:
    """Return all that a guard may look at: four calm replicas, unless said otherwise."""
    world = World(POLICY, current)
    world.status = target or {}
    values: dict[str, Any] = {
        "policy": POLICY,
        "state": State(),
        "snapshot": world.snapshot(),
        "facts": facts(),
        "score": score(),
        "demand": Demand(itl=2.0, kv=2.0, sequences=2.0),
        "forecast": Forecast(horizon_s=180.0, level=2.0, top=2.0, sigma=0.1, up=3, keep=3),
    }
    return Tick(**{**values, **changes})


def proposal(to: int, current: int = 4, **changes: Any) -> Proposal:
    """Return a proposal of `to` replicas."""
    reason = Reason.UP_DEMAND if to > current else Reason.DOWN_DEMAND if to < current else Reason.STEADY
    return Proposal(current=current, replicas=to, reason=reason, wished=to, **changes)


def check(found: Proposal, given: Proposal, to: int, reason: Reason) -> None:
    """Assert where the proposal stands and why, and that each step tells of one change."""
    assert (found.replicas, found.reason) == (to, reason)
    assert found.current == given.current
    assert found.wished == given.wished
    for step in found.steps[len(given.steps) :]:
        assert step.before != step.after
        assert step.detail
    if found.replicas == given.replicas:
        assert found.steps == given.steps


# --- the proposal ---------------------------------------------------------------------------------------------------


class TestPropose:
    """What is wished for before any guard."""

    @pytest.mark.parametrize(
        ("changes", "to", "reason"),
        [
            pytest.param({}, 3, Reason.DOWN_DEMAND, id="demand-keeps-fewer"),
            pytest.param({"forecast": Forecast(horizon_s=180.0, up=4, keep=4)}, 4, Reason.STEADY, id="demand-fits"),
            pytest.param({"forecast": Forecast(horizon_s=180.0, up=3, keep=4)}, 4, Reason.STEADY, id="dead-band"),
            pytest.param({"forecast": Forecast(horizon_s=180.0, up=6, keep=7)}, 6, Reason.UP_DEMAND, id="demand-asks"),
            pytest.param({"forecast": Forecast(horizon_s=180.0)}, 4, Reason.STEADY, id="no-demand"),
            pytest.param({"facts": facts(known=2)}, 4, Reason.STEADY, id="pods-without-data-count-as-full"),
            pytest.param(
                {"score": score({"memory": 0.8, "backlog": 0.7, "latency": 0.6})}, 5, Reason.UP_SCORE, id="score-asks"
            ),
            pytest.param(
                {
                    "score": score({"memory": 0.8, "backlog": 0.7, "latency": 0.6}),
                    "forecast": Forecast(horizon_s=180.0, up=9, keep=9),
                },
                9,
                Reason.UP_DEMAND,
                id="demand-asks-for-more-than-the-score",
            ),
            pytest.param(
                {"score": score({"memory": 0.8, "backlog": 0.7, "latency": 0.6}), "facts": facts(loading=1)},
                3,
                Reason.DOWN_DEMAND,
                id="score-waits-for-what-loads",
            ),
            pytest.param(
                {"score": score({"backlog": None, "memory": None})},
                4,
                Reason.INSUFFICIENT_COMPONENTS,
                id="little-known",
            ),
            pytest.param(
                {"score": score({"backlog": None, "memory": None, "latency": None})}, 4, Reason.NO_DATA, id="blind"
            ),
            pytest.param(
                {
                    "score": score({"backlog": None, "memory": None, "latency": None}),
                    "facts": facts(expected=0, known=0),
                },
                4,
                Reason.NO_READY_PODS,
                id="nobody-to-ask",
            ),
        ],
    )
    def test_by_demand(self, changes: dict[str, Any], to: int, reason: Reason) -> None:
        found = propose(tick(**changes))
        assert (found.replicas, found.reason, found.urgent, found.final) == (to, reason, False, False)
        assert found.wished == to

    @pytest.mark.parametrize(
        ("level", "predicted", "to", "reason"),
        [
            # Sized to the middle of the dead band, 0.55: 4 x 0.9 / 0.55 = 6.5.
            pytest.param(0.9, None, 7, Reason.UP_SCORE, id="up"),
            pytest.param(0.7, None, 6, Reason.UP_SCORE, id="at-the-threshold"),
            pytest.param(0.1, 0.9, 7, Reason.UP_SCORE, id="up-by-the-prediction"),
            pytest.param(0.5, None, 4, Reason.STEADY, id="between"),
            pytest.param(0.4, None, 3, Reason.DOWN_SCORE, id="down"),
            pytest.param(0.4, 0.5, 4, Reason.STEADY, id="the-prediction-keeps"),
        ],
    )
    def test_by_the_score_alone(self, level: float, predicted: float | None, to: int, reason: Reason) -> None:
        policy = replace(POLICY, sizing=Sizing.SCORE)
        even = score(dict.fromkeys(CALM, level))
        found = propose(tick(policy=policy, score=even, forecast=Forecast(horizon_s=180.0, score=predicted)))
        assert (found.replicas, found.reason) == (to, reason)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            pytest.param({"target": {"other_owner": "HorizontalPodAutoscaler/x"}}, Reason.OTHER_OWNER, id="owner"),
            pytest.param({"current": 0}, Reason.SCALED_TO_ZERO, id="zero-by-hand"),
            pytest.param({"state": State(doubled_polls=3)}, Reason.GROUP_SIZE, id="groups"),
        ],
    )
    def test_not_ours_is_final(self, changes: dict[str, Any], reason: Reason) -> None:
        found = propose(tick(**changes))
        assert (found.reason, found.final, found.replicas) == (reason, True, found.current)

    @pytest.mark.parametrize(
        ("parts", "asks"),
        [
            pytest.param({"memory": 0.7, "backlog": 0.7, "latency": 0.7}, Reason.UP_SCORE, id="at-the-threshold"),
            pytest.param({"memory": 0.69, "backlog": 0.69, "latency": 0.69}, None, id="below"),
            pytest.param({"memory": 0.95}, Reason.UP_CRITICAL, id="one-part-critical"),
            pytest.param({"memory": 0.94}, None, id="one-part-almost"),
        ],
    )
    def test_pressing(self, parts: dict[str, float | None], asks: Reason | None) -> None:
        assert pressing(tick(score=score(parts))) is asks

    def test_a_critical_part_orders_where_demand_cannot_be_known(self) -> None:
        critical = score({"memory": 0.95})
        assert propose(tick(score=critical)).reason is Reason.DOWN_DEMAND
        blind = propose(tick(score=critical, forecast=Forecast(horizon_s=180.0, gap=GapReason.NO_CAPACITY)))
        assert (blind.replicas, blind.reason) == (5, Reason.UP_CRITICAL)

    @pytest.mark.parametrize(
        ("missing", "orders"),
        [
            pytest.param({}, False, id="known-in-three-minutes"),
            pytest.param({"prompt_rate": None}, True, id="a-series-is-missing"),
            pytest.param({"capacity": None}, True, id="no-capacity"),
        ],
    )
    def test_after_a_start_demand_is_waited_for(self, missing: dict[str, Any], orders: bool) -> None:
        world = World(POLICY, 4)
        world.set(kv=0.2, running=8.0, prompt_rate=500.0, token_rate=40.0, request_rate=2.0, ttft_s=3.0)
        world.set(**missing)
        late = world.run(60, apply=False)[10]
        # Latency is 1, memory 0.22: 0.25 + 0.40 x 0.22.
        assert pressing(tick(score=late.score)) is Reason.UP_CRITICAL
        assert bool(world.writes) is orders
        assert orders or late.unblocks[0] == "up: score 0.34 of 0.7"

    def test_after_an_outage_demand_is_waited_for(self) -> None:
        world = World(POLICY, 4)
        world.set(kv=0.2, running=8.0, prompt_rate=500.0, token_rate=40.0, request_rate=2.0, ttft_s=3.0)
        world.run(90, apply=False)
        world.silent = {one.uid for one in world.pods}
        world.run(24, apply=False)
        world.silent = set()
        world.run(60, apply=False)
        assert not world.writes

    def test_pressure_is_the_higher_of_measured_and_predicted(self) -> None:
        low = score(dict.fromkeys(CALM, 0.2))
        assert pressure(tick(score=low, forecast=Forecast(horizon_s=180.0, score=0.6))) == 0.6
        assert pressure(tick(score=low, forecast=Forecast(horizon_s=180.0, score=0.1))) == pytest.approx(0.2)


# --- one guard each -------------------------------------------------------------------------------------------------

COARSE = replace(score().part("memory"), shrink_value=None, gap=GapReason.MEMORY_COARSE)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({}, None, id="all-known"),
        pytest.param({"score": score({"latency": None})}, Reason.PARTIAL_NO_SHRINK, id="a-part-is-missing"),
        pytest.param(
            {"score": replace(score(), shrink_value=None, parts=(COARSE,))},
            Reason.MEMORY_COARSE,
            id="framebuffer-only",
        ),
        pytest.param(
            {"score": score({"memory": None}), "facts": facts(cold=4)}, Reason.WARMING_UP, id="all-pods-warm-up"
        ),
        pytest.param({"facts": facts(known=3)}, None, id="three-of-four-report"),
        pytest.param({"facts": facts(known=2)}, Reason.PARTIAL_NO_SHRINK, id="two-of-four-report"),
        pytest.param({"state": State(last_restart_at=START - 600.0)}, Reason.UNSTABLE_PODS, id="restarted-just-now"),
        pytest.param({"state": State(last_restart_at=START - 601.0)}, None, id="restarted-long-ago"),
    ],
)
def test_require_evidence(changes: dict[str, Any], reason: Reason | None) -> None:
    given = proposal(3)
    found = require_evidence(tick(**changes), given)
    check(found, given, *((4, reason) if reason else (3, Reason.DOWN_DEMAND)))


@pytest.mark.parametrize(
    ("to", "changes", "reason"),
    [
        pytest.param(6, {}, None, id="up"),
        pytest.param(6, {"facts": facts(loading=2)}, None, id="demand-counts-what-loads-by-itself"),
        pytest.param(
            6,
            {"facts": facts(loading=2), "policy": replace(POLICY, sizing=Sizing.SCORE)},
            Reason.PENDING_CAPACITY,
            id="the-score-does-not",
        ),
        pytest.param(6, {"facts": facts(stuck=1)}, Reason.UNSCHEDULABLE, id="no-node"),
        pytest.param(6, {"target": {"rollout_unhealthy": True}}, Reason.ROLLOUT_UNHEALTHY, id="bad-revision"),
        pytest.param(6, {"target": {"refused": "exceeded quota"}}, Reason.QUOTA, id="quota"),
        pytest.param(3, {"target": {"refused": "exceeded quota"}}, None, id="quota-may-shrink"),
        pytest.param(6, {"target": {"rollout": True}}, None, id="rollout-may-grow"),
        pytest.param(6, {"facts": facts(unready=1)}, None, id="unready-may-grow"),
        pytest.param(3, {}, None, id="down"),
        pytest.param(3, {"facts": facts(loading=2, stuck=2)}, None, id="cancel-what-has-not-started"),
        pytest.param(3, {"facts": facts(unready=1)}, Reason.UNREADY_PODS, id="unready"),
        pytest.param(4, {"facts": facts(stuck=1, unready=1)}, None, id="nothing-to-hold"),
    ],
)
def test_count_pending(to: int, changes: dict[str, Any], reason: Reason | None) -> None:
    given = proposal(to)
    found = count_pending(tick(**changes), given)
    check(found, given, *((4, reason) if reason else (to, given.reason)))


ONE_BY_ONE = replace(POLICY, scale_down=replace(POLICY.scale_down, serialize_drain=True))


@pytest.mark.parametrize(
    ("to", "changes", "reason"),
    [
        pytest.param(3, {}, None, id="down"),
        pytest.param(3, {"target": {"rollout": True}}, Reason.ROLLOUT, id="rollout"),
        pytest.param(3, {"target": {"rollout": True, "rollout_failed": True}}, None, id="a-failed-rollout"),
        pytest.param(6, {"target": {"rollout": True}}, None, id="rollout-may-grow"),
        pytest.param(3, {"facts": facts(terminating=1)}, None, id="drains-side-by-side"),
        pytest.param(3, {"facts": facts(terminating=1), "policy": ONE_BY_ONE}, Reason.DRAINING, id="drains-one-by-one"),
    ],
)
def test_leave_in_motion(to: int, changes: dict[str, Any], reason: Reason | None) -> None:
    given = proposal(to)
    found = leave_in_motion(tick(**changes), given)
    check(found, given, *((4, reason) if reason else (to, given.reason)))


def test_a_moment_of_rollout_does_not_start_the_downward_window_afresh() -> None:
    world = World(P0, 4)
    world.press(0.0, 0.0, 0.0)
    world.run(10)
    world.status = {"rollout": True}
    world.run(1)
    world.status = {}
    world.run(10)
    assert world.writes[0][0] == world.at - 15.0


def test_count_pending_lets_urgent_growth_pass_what_loads() -> None:
    scored = replace(POLICY, sizing=Sizing.SCORE)
    given = proposal(6, urgent=True)
    assert count_pending(tick(policy=scored, facts=facts(loading=2)), given) == given


@pytest.mark.parametrize(
    ("level", "current", "step", "to", "found", "reason"),
    [
        pytest.param(0.39, 2, 1, 1, 2, Reason.WOULD_REBOUND, id="0.78-on-one"),
        pytest.param(0.35, 2, 1, 1, 2, Reason.WOULD_REBOUND, id="0.70-on-one"),
        pytest.param(0.349, 2, 1, 1, 1, Reason.DOWN_DEMAND, id="just-below-on-one"),
        pytest.param(0.39, 8, 1, 7, 7, Reason.DOWN_DEMAND, id="0.45-on-seven"),
        pytest.param(0.39, 8, 1, 2, 2, Reason.DOWN_DEMAND, id="one-step-of-six-now"),
        # 0.39 x 8 = 3.12: on four 0.78, on five 0.62.
        pytest.param(0.39, 8, 4, 2, 5, Reason.DOWN_DEMAND, id="a-step-of-four-becomes-three"),
        pytest.param(0.39, 8, None, 1, 5, Reason.DOWN_DEMAND, id="any-step"),
        pytest.param(0.0, 8, None, 1, 1, Reason.DOWN_DEMAND, id="nothing-to-carry"),
        pytest.param(0.0, 1, 1, 0, 0, Reason.DOWN_DEMAND, id="the-last-one-is-the-bounds'"),
        pytest.param(0.39, 2, 1, 3, 3, Reason.UP_DEMAND, id="growth"),
        pytest.param(None, 2, 1, 1, 1, Reason.DOWN_DEMAND, id="unknown-is-the-evidence-guard's"),
    ],
)
def test_check_rebound(
    level: float | None, current: int, step: int | None, to: int, found: int, reason: Reason
) -> None:
    policy = replace(POLICY, scale_down=replace(POLICY.scale_down, max_step=step))
    given = proposal(to, current)
    check(
        check_rebound(tick(policy=policy, current=current, score=score(shrink_value=level)), given),
        given,
        found,
        reason,
    )


def test_check_rebound_below_the_last_one() -> None:
    policy = replace(POLICY, replicas=ReplicaBounds(min=0, max=8))
    given = proposal(0, 1)
    check(check_rebound(tick(policy=policy, current=1), given), given, 1, Reason.WOULD_REBOUND)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({}, None, id="calm"),
        pytest.param({"score": score(dict.fromkeys(CALM, 0.40))}, None, id="at-the-threshold"),
        pytest.param({"score": score(dict.fromkeys(CALM, 0.41))}, Reason.HELD_HYSTERESIS, id="above-it"),
        pytest.param({"score": score({"latency": 0.95})}, Reason.HELD_HYSTERESIS, id="a-part-not-clear"),
        pytest.param({"score": score({"latency": 0.94})}, None, id="a-part-just-clear"),
        pytest.param({"score": lumpy(0.94)}, None, id="a-tail-alone"),
        pytest.param({"score": lumpy(0.95)}, Reason.HELD_HYSTERESIS, id="a-tail-and-a-mean-not-clear"),
        pytest.param({"score": score(memory_guard=0.5)}, Reason.MEMORY_GUARD, id="memory-tight"),
        pytest.param({"score": score(memory_guard=0.49)}, None, id="memory-not-so-tight"),
        pytest.param({"score": score(degraded=True)}, Reason.DEGRADED, id="objective-missed"),
        pytest.param(
            {"forecast": Forecast(horizon_s=180.0, keep=3, score=0.41)}, Reason.HELD_HYSTERESIS, id="predicted"
        ),
    ],
)
def test_hold_dead_band(changes: dict[str, Any], reason: Reason | None) -> None:
    given = proposal(3)
    found = hold_dead_band(tick(**changes), given)
    check(found, given, *((4, reason) if reason else (3, Reason.DOWN_DEMAND)))
    up = proposal(6)
    assert hold_dead_band(tick(**changes), up) == up


@pytest.mark.parametrize(
    ("to", "up", "down", "limited"),
    [
        pytest.param(9, 2, 1, 6, id="up"),
        pytest.param(5, 2, 1, 5, id="small-up"),
        pytest.param(1, 2, 1, 3, id="down"),
        pytest.param(4, 2, 1, 4, id="none"),
        pytest.param(19, None, 1, 19, id="up-without-limit"),
        pytest.param(1, 2, None, 1, id="down-without-limit"),
    ],
)
def test_limit_step(to: int, up: int | None, down: int | None, limited: int) -> None:
    policy = replace(
        POLICY,
        scale_up=replace(POLICY.scale_up, max_step=up),
        scale_down=replace(POLICY.scale_down, max_step=down),
    )
    given = proposal(to)
    found = limit_step(tick(policy=policy), given)
    check(found, given, limited, given.reason)
    assert [step.rule for step in found.steps] == ([] if limited == to else [Reason.LIMITED_STEP])


def budgeted(up: tuple[RateBudget, ...] = (), down: tuple[RateBudget, ...] = (), select: Select = Select.MAX) -> Policy:
    """Return a policy with rate budgets."""
    return replace(
        POLICY,
        scale_up=replace(POLICY.scale_up, budgets=up, select=select),
        scale_down=replace(POLICY.scale_down, budgets=down, select=select),
    )


ONE_A_MINUTE, HALF_A_MINUTE = (
    RateBudget(type="Pods", value=1, period_s=60.0),
    RateBudget(type="Percent", value=50, period_s=60.0),
)


@pytest.mark.parametrize(
    ("policy", "to", "changes", "limited"),
    [
        pytest.param(POLICY, 9, ((START - 1.0, 4),), 9, id="no-budget"),
        pytest.param(budgeted(up=(ONE_A_MINUTE,)), 9, (), 5, id="one-pod-a-minute"),
        pytest.param(budgeted(up=(ONE_A_MINUTE,)), 9, ((START - 59.0, 1),), 4, id="used-up"),
        pytest.param(budgeted(up=(ONE_A_MINUTE,)), 9, ((START - 60.0, 1),), 5, id="of-the-period-before"),
        pytest.param(budgeted(up=(ONE_A_MINUTE,)), 9, ((START - 30.0, -2),), 7, id="what-was-removed-may-come-back"),
        pytest.param(budgeted(up=(HALF_A_MINUTE,)), 9, (), 6, id="half-of-four"),
        pytest.param(budgeted(up=(ONE_A_MINUTE, HALF_A_MINUTE)), 9, (), 6, id="the-larger"),
        pytest.param(budgeted(up=(ONE_A_MINUTE, HALF_A_MINUTE), select=Select.MIN), 9, (), 5, id="the-smaller"),
        pytest.param(budgeted(up=(ONE_A_MINUTE,), select=Select.DISABLED), 9, (), 4, id="disabled"),
        pytest.param(budgeted(down=(ONE_A_MINUTE,)), 1, (), 3, id="down-one-pod"),
        pytest.param(budgeted(down=(HALF_A_MINUTE,)), 1, (), 2, id="down-half"),
        pytest.param(budgeted(down=(ONE_A_MINUTE, HALF_A_MINUTE)), 1, (), 2, id="down-the-larger"),
        pytest.param(budgeted(down=(ONE_A_MINUTE,)), 1, ((START - 30.0, -1),), 4, id="down-used-up"),
        pytest.param(budgeted(up=(ONE_A_MINUTE,)), 1, (), 1, id="only-upwards"),
        pytest.param(budgeted(down=(ONE_A_MINUTE,)), 9, (), 9, id="only-downwards"),
        pytest.param(budgeted(up=(ONE_A_MINUTE,)), 9, ((START - 10.0, 9),), 4, id="never-turns-round"),
    ],
)
def test_limit_rate(policy: Policy, to: int, changes: tuple[tuple[float, int], ...], limited: int) -> None:
    given = proposal(to)
    found = limit_rate(tick(policy=policy, state=State(changes=changes)), given)
    check(found, given, limited, Reason.LIMITED_RATE if limited == 4 else given.reason)


@pytest.mark.parametrize(
    ("to", "up_ago", "down_ago", "urgent", "held"),
    [
        pytest.param(6, None, None, False, False, id="first-action"),
        pytest.param(6, 119.0, None, False, True, id="up-after-up"),
        pytest.param(6, 120.0, None, False, False, id="up-after-up-in-time"),
        pytest.param(6, None, 119.0, False, True, id="up-after-down"),
        pytest.param(3, 119.0, None, False, True, id="down-after-up"),
        pytest.param(3, None, 119.0, False, True, id="down-after-down"),
        pytest.param(3, 120.0, 120.0, False, False, id="down-in-time"),
        pytest.param(3, 500.0, 5.0, False, True, id="the-newer-counts"),
        pytest.param(6, 5.0, 5.0, True, False, id="urgent"),
        pytest.param(3, 5.0, None, True, True, id="down-is-never-urgent"),
        pytest.param(4, 5.0, None, False, False, id="nothing-to-hold"),
    ],
)
def test_hold_cooldown(to: int, up_ago: float | None, down_ago: float | None, urgent: bool, held: bool) -> None:
    state = State(
        last_up_at=None if up_ago is None else START - up_ago,
        last_down_at=None if down_ago is None else START - down_ago,
    )
    given = proposal(to, urgent=urgent)
    found = hold_cooldown(tick(state=state), given)
    check(found, given, *((4, Reason.HELD_COOLDOWN) if held else (to, given.reason)))


def test_cooldowns_of_their_own() -> None:
    policy = replace(
        POLICY,
        scale_up=replace(POLICY.scale_up, cooldown_s=30.0),
        scale_down=replace(POLICY.scale_down, cooldown_s=600.0),
    )
    at = tick(policy=policy, state=State(last_up_at=START - 60.0))
    assert hold_cooldown(at, proposal(6)).replicas == 6
    assert hold_cooldown(at, proposal(3)).reason is Reason.HELD_COOLDOWN


@pytest.mark.parametrize(
    ("to", "changes", "held"),
    [
        pytest.param(6, {}, False, id="healthy"),
        pytest.param(6, {"facts": facts(broken=2)}, False, id="half-crashes"),
        pytest.param(6, {"facts": facts(broken=3)}, True, id="most-crash"),
        pytest.param(3, {"facts": facts(broken=3)}, False, id="down-is-free"),
        pytest.param(6, {"facts": facts(live=0)}, False, id="no-pods"),
        pytest.param(6, {"facts": facts(overdue=1)}, True, id="late"),
        pytest.param(3, {"facts": facts(overdue=1)}, False, id="down-may-cancel-what-is-late"),
        pytest.param(
            6,
            {"facts": facts(broken=3), "policy": replace(POLICY, health=HealthFuse(enabled=False))},
            False,
            id="switched-off",
        ),
    ],
)
def test_blow_fuse(to: int, changes: dict[str, Any], held: bool) -> None:
    given = proposal(to)
    found = blow_fuse(tick(**changes), given)
    check(found, given, *((4, Reason.HEALTH_FUSE) if held else (to, given.reason)))


def test_the_fuse_stops_urgent_growth_too() -> None:
    assert blow_fuse(tick(facts=facts(broken=4)), proposal(6, urgent=True)).reason is Reason.HEALTH_FUSE


@pytest.mark.parametrize(
    ("current", "to", "bounded", "reason"),
    [
        pytest.param(4, 6, 6, Reason.UP_DEMAND, id="inside"),
        pytest.param(7, 9, 8, Reason.UP_DEMAND, id="cut-at-max"),
        pytest.param(8, 9, 8, Reason.LIMITED_MAX, id="at-max"),
        pytest.param(3, 1, 2, Reason.DOWN_DEMAND, id="cut-at-min"),
        pytest.param(2, 1, 2, Reason.LIMITED_MIN, id="at-min"),
        pytest.param(12, 12, 8, Reason.DOWN_BOUNDS, id="above-max"),
        pytest.param(12, 14, 8, Reason.DOWN_BOUNDS, id="above-max-and-growing"),
        pytest.param(1, 1, 2, Reason.UP_BOUNDS, id="below-min"),
        pytest.param(1, 0, 2, Reason.UP_BOUNDS, id="below-min-and-shrinking"),
        pytest.param(12, 7, 7, Reason.DOWN_DEMAND, id="already-on-its-way-inside"),
    ],
)
def test_keep_bounds(current: int, to: int, bounded: int, reason: Reason) -> None:
    policy = replace(POLICY, replicas=ReplicaBounds(min=2, max=8))
    given = proposal(to, current)
    found = keep_bounds(tick(policy=policy, current=current), given)
    check(found, given, bounded, reason)


# --- stabilization --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("up", "keep", "history", "found"),
    [
        pytest.param(6, 6, [], 6, id="nothing-else-in-the-window"),
        pytest.param(6, 6, [(10.0, 5, 5)], 5, id="lowest-wish-to-grow"),
        pytest.param(6, 6, [(10.0, 4, 4)], 4, id="one-tick-without-a-wish"),
        pytest.param(6, 6, [(30.0, 4, 4)], 6, id="wish-out-of-the-window"),
        pytest.param(4, 2, [(10.0, 4, 3)], 3, id="highest-to-keep"),
        pytest.param(4, 2, [(299.0, 4, 4)], 4, id="still-in-the-window"),
        pytest.param(4, 2, [(300.0, 4, 4), (10.0, 4, 2)], 2, id="out-of-the-window"),
        pytest.param(4, 6, [(10.0, 4, 6)], 4, id="to-keep-is-no-wish-to-grow"),
    ],
)
def test_stabilized(up: int, keep: int, history: list[tuple[float, int, int]], found: int) -> None:
    assert stabilized(4, up, keep, history, 30.0, 300.0) == found


class TestStabilize:
    """The windows as they fill tick by tick."""

    scored = replace(P0, interval_s=5.0, scale_up=replace(P0.scale_up, stabilization_s=30.0), prediction=Prediction())

    def world(self, replicas: int = 4, **changes: Any) -> World:
        """Return a world with rate and score to spare: demand decides. Cooldowns are off, so that only windows hold."""
        policy = replace(POLICY, cooldown_s=0.0, slo=Slos(itl=Slo(seconds=0.5)), **changes)
        world = World(policy, replicas)
        world.set(kv=0.05, running=2.0, prompt_rate=500.0, token_rate=40.0, request_rate=2.0)
        return world

    def test_the_up_window_takes_the_minimum(self) -> None:
        world = World(self.scored, 2)
        world.press(0.5, 0.5, 0.5)
        world.run(7)
        reasons = []
        world.press(1.0, 1.0, 1.0)
        for _ in range(6):
            reasons.append(world.tick().reason)
        # The last calm tick is 30 s old, and out of the window, at the sixth.
        assert reasons == [Reason.HELD_STABILIZATION] * 5 + [Reason.UP_SCORE]

    def test_a_dip_starts_the_wait_again(self) -> None:
        world = World(self.scored, 2)
        world.press(0.5, 0.5, 0.5)
        world.run(7)
        for level in (1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0):
            world.press(level, level, level)
            world.tick()
        assert not world.writes

    def test_a_regime_change_skips_the_up_window(self) -> None:
        world = self.world()
        world.run(60, apply=False)
        world.set(prompt_rate=40_000.0)
        decisions = world.run(30, apply=False)
        first = next(decision for decision in decisions if isinstance(decision.action, ScaleReplicas))
        changed = next(decision for decision in decisions if decision.forecast.changed)
        assert first.at - changed.at < 30.0
        assert first.reason is Reason.UP_DEMAND

    @pytest.mark.parametrize(
        ("factor", "horizon_s", "window_s"),
        [
            pytest.param(1.25, 180.0, 300.0, id="its-own"),
            pytest.param(2.0, 300.0, 600.0, id="two-horizons"),
            pytest.param(0.0, 600.0, 300.0, id="no-horizons"),
        ],
    )
    def test_shrinking_waits_for_a_full_down_window(self, factor: float, horizon_s: float, window_s: float) -> None:
        world = self.world(
            scale_down=replace(POLICY.scale_down, horizon_factor=factor),
            prediction=Prediction(horizon_s=horizon_s),
        )
        decisions = world.run(int(window_s / 5.0) + 60)
        first = next(decision for decision in decisions if isinstance(decision.action, ScaleReplicas))
        assert first.action == ScaleReplicas(seen=4, to=3, uid="uid-of-target")
        # Demand is known from 180 s on, when three bins are: the last tick that keeps all four is at 175 s.
        assert first.at - START == 175.0 + window_s

    def test_one_wish_to_keep_holds_for_a_whole_window(self) -> None:
        policy = replace(P0, interval_s=5.0)
        world = World(policy, 4)
        world.press(0.1, 0.1, 0.1)
        world.run(40)
        world.press(0.5, 0.5, 0.5)
        loaded_at = world.at
        world.run(1)
        world.press(0.1, 0.1, 0.1)
        world.run(70)
        assert world.writes[0][0] == loaded_at + 300.0

    def test_ticks_without_a_score_keep(self) -> None:
        policy = replace(P0, interval_s=5.0)
        world = World(policy, 4)
        world.press(0.1, 0.1, 0.1)
        world.run(40)
        world.silent = {one.uid for one in world.pods}
        world.samples = {}
        blind_at = world.at
        world.run(1)
        world.silent = set()
        world.press(0.1, 0.1, 0.1)
        world.run(70)
        assert world.writes[0][0] >= blind_at + 300.0

    @pytest.mark.parametrize(
        ("hole_s", "fresh"),
        [pytest.param(45.0, False, id="a-short-hole"), pytest.param(3600.0, True, id="an-hour")],
    )
    def test_a_window_with_a_hole_is_not_full(self, hole_s: float, fresh: bool) -> None:
        world = World(P0, 4)
        world.press(0.1, 0.1, 0.1)
        world.run(15)
        world.at += hole_s
        resumed = world.at
        world.run(30)
        assert world.writes[0][0] == (resumed + 300.0 if fresh else START + 15 * 15.0 + 75.0)

    def test_a_target_that_is_not_ours_ends_the_windows(self) -> None:
        world = World(P0, 4)
        world.press(0.1, 0.1, 0.1)
        world.run(18)
        world.state = replace(world.state, doubled_polls=2)
        world.pods += [replace(one, uid=f"{one.uid}-twin", name=f"{one.name}-twin") for one in world.pods]
        assert world.tick().reason is Reason.GROUP_SIZE
        world.pods = world.pods[:4]
        resumed = world.at
        world.run(25)
        assert world.writes[0][0] == resumed + 300.0

    def test_urgent_growth_skips_the_up_window(self) -> None:
        at = tick(facts=facts(waiting=50.0))
        given = proposal(6, urgent=True)
        assert stabilize(at, given).replicas == 6


# --- all together ---------------------------------------------------------------------------------------------------


def test_order_of_the_guards() -> None:
    assert [guard.__name__ for guard in GUARDS] == [
        "require_evidence",
        "count_pending",
        "check_rebound",
        "hold_dead_band",
        "stabilize",
        "leave_in_motion",
        "require_answers",
        "protect_requests",
        "limit_step",
        "limit_rate",
        "hold_cooldown",
        "hold_turn",
        "blow_fuse",
        "obey_direction",
        "keep_bounds",
    ]


@pytest.mark.parametrize("to", [4, 9, 20])
@pytest.mark.parametrize("guard", GUARDS[:-1], ids=lambda guard: guard.__name__)
def test_no_guard_but_the_bounds_grows(guard: Callable[[Tick, Proposal], Proposal], to: int) -> None:
    ticks = [tick(), tick(facts=facts(stuck=1, broken=4)), tick(score=score({"latency": None}))]
    for at in ticks:
        assert 4 <= guard(at, proposal(to)).replicas <= to


@pytest.mark.parametrize("guard", GUARDS[:-1], ids=lambda guard: guard.__name__)
def test_no_guard_but_the_bounds_shrinks(guard: Callable[[Tick, Proposal], Proposal]) -> None:
    ticks = [tick(), tick(facts=facts(unready=1)), tick(score=score({"latency": None}))]
    for at in ticks:
        assert 1 <= guard(at, proposal(1)).replicas <= 4


class TestEmergency:
    """A critical queue that grows, longer than the ready replicas, with nothing loading."""

    def world(self, **changes: Any) -> World:
        world = World(replace(POLICY, **changes), 4)
        world.set(kv=0.3, running=4.0, prompt_rate=400.0, token_rate=100.0, request_rate=2.0, step_rate=40.0)
        world.run(120, apply=False)
        world.writes.clear()
        # Just acted: only what is urgent passes.
        world.state = replace(world.state, last_up_at=world.at - 5.0)
        return world

    def queue(self, world: World, waiting: float) -> None:
        world.set(waiting=waiting, request_rate=0.0, prompt_rate=0.0)

    def test_it_passes_the_cooldown_and_the_window(self) -> None:
        world = self.world()
        self.queue(world, 30.0)
        decision = world.tick()
        assert decision.reason is Reason.UP_EMERGENCY
        assert decision.proposal.urgent is True
        assert decision.action == ScaleReplicas(seen=4, to=5, uid="uid-of-target")

    def test_it_orders_what_works_the_queue_off_in_a_horizon(self) -> None:
        world = self.world(scale_up=replace(POLICY.scale_up, max_step=None))
        # p = 200 tokens a request: 4 x 30,000 x 200 x 60e-6 / 180 s = 8 replicas besides what is being served.
        self.queue(world, 30_000.0)
        snapshot = world.decide()
        served = snapshot.demand.value
        assert served is not None
        assert snapshot.reason is Reason.UP_EMERGENCY
        assert snapshot.proposal.wished is not None
        assert snapshot.proposal.wished >= 8.0 + served - 1.0

    @pytest.mark.parametrize(
        "spoil",
        [
            pytest.param(lambda world: world.set(waiting=0.9), id="shorter-than-the-ready-replicas"),
            pytest.param(
                lambda world: setattr(world, "policy", replace(world.policy, emergency=Emergency(enabled=False))),
                id="switched-off",
            ),
        ],
    )
    def test_what_is_no_emergency(self, spoil: Callable[[World], object]) -> None:
        world = self.world()
        self.queue(world, 30.0)
        spoil(world)
        assert world.tick().reason is not Reason.UP_EMERGENCY

    def test_a_queue_that_does_not_grow_is_none(self) -> None:
        world = self.world()
        self.queue(world, 30.0)
        world.tick(apply=False)
        assert world.tick(apply=False).reason is not Reason.UP_EMERGENCY

    def test_larger_demand_does_not_take_its_urgency(self) -> None:
        world = self.world()
        self.queue(world, 30.0)
        decision = world.decide()
        at = tick(
            state=world.state,
            score=decision.score,
            facts=world.state.facts,
            forecast=replace(decision.forecast, up=19),
        )
        found = propose(at)
        assert (found.replicas, found.urgent, found.reason) == (19, True, Reason.UP_EMERGENCY)

    def test_the_fuse_and_unschedulable_pods_stop_it(self) -> None:
        world = self.world()
        self.queue(world, 30.0)
        world.pods.append(loading("stuck", world.at - 700.0, phase=PodPhase.PENDING, unschedulable_at=world.at - 700.0))
        assert world.tick().reason is Reason.UNSCHEDULABLE


class TestSaturation:
    """Served work cannot show demand once the fleet is saturated."""

    def world(self) -> LoadingWorld:
        world = LoadingWorld(POLICY, 4)
        world.load_s = 1e9
        world.set(kv=0.3, running=4.0, prompt_rate=400.0, token_rate=100.0, request_rate=2.0, step_rate=40.0)
        world.run(120, apply=False)
        world.writes.clear()
        return world

    def grow(self, world: World, ticks: int) -> list[Reason]:
        reasons = []
        for _ in range(ticks):
            for one in world.pods[:4]:
                world.engines[one.uid].waiting = (world.engines[one.uid].waiting or 0.0) + 30.0
                world.engines[one.uid].request_rate = 0.0
                world.engines[one.uid].prompt_rate = 0.0
            reasons.append(world.tick().reason)
        return reasons

    def test_half_as_many_again_although_replicas_load(self) -> None:
        world = self.world()
        reasons = self.grow(world, 8)
        # The emergency orders one; then 15 s of growth while it loads order up to 1.5 x 4.
        assert reasons[0] is Reason.UP_EMERGENCY
        assert Reason.UP_SATURATION in reasons
        assert world.replicas == 6
        assert [to for _, _, to in world.writes] == [5, 6]

    def test_it_counts_ready_replicas_only(self) -> None:
        world = self.world()
        reasons = self.grow(world, 60)
        # The queue that grows on orders by its work; the multiple is of the four that are ready, for good.
        assert reasons.count(Reason.UP_SATURATION) == 1
        assert [to for _, _, to in world.writes][:2] == [5, 6]

    def test_calm_resets_the_count(self) -> None:
        world = self.world()
        self.grow(world, 2)
        assert world.state.saturated_s == 10.0
        world.set(waiting=0.0)
        world.tick()
        assert world.state.saturated_s == 0.0

    def test_a_failed_order_keeps_the_count(self) -> None:
        world = self.world()
        world.outcome = Outcome.FAILED
        self.grow(world, 6)
        assert world.replicas == 4
        assert world.state.saturated_s == 30.0


@pytest.mark.parametrize(
    ("to", "up_ago", "down_ago", "urgent", "held"),
    [
        pytest.param(5, None, 600.0, False, True, id="up-soon-after-down"),
        pytest.param(5, None, 601.0, False, False, id="up-later"),
        pytest.param(5, 10.0, None, False, False, id="up-after-up"),
        pytest.param(5, None, 1.0, True, False, id="urgent"),
        pytest.param(3, 600.0, None, False, True, id="down-soon-after-up"),
        pytest.param(3, 601.0, 10.0, False, False, id="down-later"),
        pytest.param(4, 1.0, 1.0, False, False, id="nothing-to-hold"),
    ],
)
def test_hold_turn(to: int, up_ago: float | None, down_ago: float | None, urgent: bool, held: bool) -> None:
    state = State(
        last_up_at=None if up_ago is None else START - up_ago,
        last_down_at=None if down_ago is None else START - down_ago,
    )
    given = proposal(to, urgent=urgent)
    found = hold_turn(tick(state=state), given)
    check(found, given, *((4, Reason.HELD_TURN) if held else (to, given.reason)))


def test_the_fallback_turns_at_once() -> None:
    at = tick(state=State(last_down_at=START - 1.0))
    assert hold_turn(at, replace(proposal(6), reason=Reason.UP_FALLBACK)).replicas == 6


def test_turns_may_be_switched_off() -> None:
    policy = replace(POLICY, scale_down=replace(POLICY.scale_down, turn_s=0.0))
    assert hold_turn(tick(policy=policy, state=State(last_up_at=START)), proposal(3)).replicas == 3


@pytest.mark.parametrize(
    ("current", "most", "share", "largest"),
    [
        pytest.param(4, 2, 0.1, 2, id="small"),
        pytest.param(29, 2, 0.1, 2, id="just-below-three-tenths"),
        pytest.param(30, 2, 0.1, 3, id="a-tenth"),
        pytest.param(200, 2, 0.1, 20, id="large"),
        pytest.param(200, 2, 0.0, 2, id="no-share"),
        pytest.param(200, None, 0.1, None, id="no-limit"),
    ],
)
def test_largest_step(current: int, most: int | None, share: float, largest: int | None) -> None:
    assert largest_step(ScaleUp(max_step=most, max_step_share=share), current) == largest


def test_budgets_hold_through_decide() -> None:
    policy = replace(
        P0,
        replicas=ReplicaBounds(min=1, max=30),
        cooldown_s=0.0,
        scale_up=replace(
            P0.scale_up, cooldown_s=0.0, max_step=4, budgets=(RateBudget(type="Pods", value=5, period_s=60.0),)
        ),
    )
    world = World(policy, 2)
    for _ in range(30):
        world.press(1.0, 1.0, 1.0)
        world.tick()
    assert world.replicas == 30
    for at, _, to in world.writes:
        inside = [(seen, after) for when, seen, after in world.writes if at - 60.0 < when <= at]
        assert to - inside[0][0] <= 5


@pytest.mark.parametrize(
    ("outcome", "counts"),
    [
        pytest.param(Outcome.APPLIED, True, id="applied"),
        pytest.param(Outcome.SIMULATED, True, id="simulated"),
        pytest.param(Outcome.FAILED, False, id="failed"),
        pytest.param(Outcome.UNCHANGED, False, id="unchanged"),
    ],
)
def test_only_what_was_done_starts_a_cooldown(outcome: Outcome, counts: bool) -> None:
    world = World(P0, 2)
    world.press(1.0, 1.0, 1.0)
    world.outcome = outcome
    world.tick()
    assert (world.state.last_up_at == START) is counts
    assert bool(world.state.changes) is counts
    assert (world.tick().reason is Reason.HELD_COOLDOWN) is counts


class TestBoundsWithoutData:
    """Bounds hold whatever is known, whatever was done a moment ago."""

    @pytest.mark.parametrize(
        ("replicas", "to", "reason"),
        [
            pytest.param(12, 8, Reason.DOWN_BOUNDS, id="above"),
            pytest.param(1, 3, Reason.UP_BOUNDS, id="below"),
            pytest.param(5, None, Reason.NO_DATA, id="inside"),
        ],
    )
    def test_blind(self, replicas: int, to: int | None, reason: Reason) -> None:
        world = World(replace(P0, replicas=ReplicaBounds(min=3, max=8)), replicas)
        world.silent = {one.uid for one in world.pods}
        world.state = replace(world.state, last_up_at=START - 1.0)
        decision = world.decide()
        assert decision.reason is reason
        assert decision.action == (Hold() if to is None else ScaleReplicas(seen=replicas, to=to, uid="uid-of-target"))

    def test_unschedulable_pods_do_not_stop_the_way_back(self) -> None:
        world = World(replace(P0, replicas=ReplicaBounds(min=3, max=8)), 1)
        world.pods.append(loading("new", START - 900.0, unschedulable_at=START - 900.0))
        assert world.decide().reason is Reason.UP_BOUNDS

    def test_min_equal_to_max_pins(self) -> None:
        world = World(replace(P0, replicas=ReplicaBounds(min=3, max=3)), 3)
        for level in (1.0, 0.0):
            world.press(level, level, level)
            world.run(60)
        assert not world.writes


class TestHealthFuse:
    """Growth stops while what was ordered does not become ready, and goes on by itself."""

    def world(self) -> LoadingWorld:
        policy = replace(
            P0,
            health=HealthFuse(ready_within_s=120.0),
            pending=Pending(grace_s=60.0),
            replicas=ReplicaBounds(min=1, max=30),
        )
        world = LoadingWorld(policy, 4)
        world.load_s = 1e9
        return world

    def test_it_blows_and_reopens(self) -> None:
        world = self.world()
        seen = []
        for _ in range(24):
            world.press(0.95, 0.95, 0.95)
            seen.append((world.at - START, world.tick().reason))
        held = [at for at, reason in seen if reason is Reason.HEALTH_FUSE]
        # Past the grace of 60 s more is ordered, at 75 s. The first pods are late from 120 s to 240 s, the second ones
        # from 195 s to 315 s; to 135 s these count as pending.
        assert [at - START for at, _, _ in world.writes] == [0.0, 75.0, 315.0]
        assert held == [at for at, _ in seen if 135.0 < at < 315.0]

    def test_ready_pods_close_it_at_once(self) -> None:
        world = self.world()
        for _ in range(14):
            world.press(0.95, 0.95, 0.95)
            last = world.tick()
        assert last.reason is Reason.HEALTH_FUSE
        world.load_s = 0.0
        world.decide()
        world.press(0.95, 0.95, 0.95)
        assert isinstance(world.tick().action, ScaleReplicas)

    def test_crashing_pods_stop_growth_until_they_are_gone(self) -> None:
        world = self.world()
        world.press(0.95, 0.95, 0.95)
        bad = [loading(f"bad-{index}", START - 9.0, waiting_reason="CrashLoopBackOff") for index in range(5)]
        world.pods += bad
        assert world.decide().reason is Reason.HEALTH_FUSE
        world.pods = world.pods[:4]
        assert isinstance(world.decide().action, ScaleReplicas)


# --- starts ---------------------------------------------------------------------------------------------------------


class TestStarts:
    """Time from created to ready, of pods that were seen to start."""

    def world(self) -> World:
        world = World(replace(POLICY, pending=Pending(grace_s=1200.0)), 2)
        world.run(2, apply=False)
        return world

    def ready(self, world: World, index: int, **changes: Any) -> None:
        """Let one pod become ready now."""
        values = {"ready": True, "was_ready": True, "ready_at": world.at, "phase": PodPhase.RUNNING, **changes}
        world.pods[index] = replace(world.pods[index], **values)

    def learned(self, world: World) -> list[float]:
        world.run(2, apply=False)
        return list(world.state.starts)

    def test_a_pod_that_was_seen_to_load(self) -> None:
        world = self.world()
        world.pods.append(loading("new", world.at))
        world.run(10, apply=False)
        self.ready(world, 2)
        assert self.learned(world) == [50.0]

    def test_a_pod_that_was_loading_when_we_came(self) -> None:
        world = World(POLICY, 2)
        world.pods.append(loading("new", START - 100.0))
        world.run(4, apply=False)
        self.ready(world, 2)
        assert self.learned(world) == [120.0]

    def test_a_pod_that_started_between_two_ticks(self) -> None:
        world = self.world()
        world.pods.append(loading("new", world.at - 4.0))
        self.ready(world, 2)
        assert self.learned(world) == [4.0]

    @pytest.mark.parametrize(
        "age_s", [pytest.param(3600.0, id="long-before-us"), pytest.param(20.0, id="just-before-us")]
    )
    def test_a_pod_that_was_ready_when_we_came_teaches_nothing(self, age_s: float) -> None:
        world = World(POLICY, 2)
        world.pods = [replace(one, created_at=START - age_s, ready_at=START - age_s / 2) for one in world.pods]
        assert self.learned(world) == []

    def test_a_pod_that_crashed_on_its_way_teaches_nothing(self) -> None:
        world = self.world()
        world.pods.append(loading("new", world.at))
        world.run(10, apply=False)
        self.ready(world, 2, restarts=1)
        assert self.learned(world) == []

    def test_readiness_that_flaps_teaches_once(self) -> None:
        world = self.world()
        world.pods.append(loading("new", world.at))
        world.run(10, apply=False)
        self.ready(world, 2)
        first = self.learned(world)
        world.pods[2] = replace(world.pods[2], ready=False)
        world.run(10, apply=False)
        self.ready(world, 2)
        assert self.learned(world) == first

    def test_cleared_clocks_are_no_negative_starts(self) -> None:
        world = self.world()
        world.pods.append(loading("new", world.at + 30.0))
        world.run(1, apply=False)
        self.ready(world, 2)
        assert self.learned(world) == [0.0]


def test_a_restart_is_remembered() -> None:
    world = World(POLICY, 2)
    noticed = []
    for restarts in (0, 0, 1, 1, 3):
        world.pods[0] = replace(world.pods[0], restarts=restarts)
        world.run(1, apply=False)
        noticed.append(world.state.last_restart_at)
    assert noticed == [None, None, START + 10.0, START + 10.0, START + 20.0]


@pytest.mark.parametrize(
    ("forecaster", "predicted"),
    [
        pytest.param(Forecaster.NONE, None, id="none"),
        # 0.1 more every 5 s: 0.4 and twelve steps more, cut at 1.
        pytest.param(Forecaster.TREND, 1.0, id="trend"),
        pytest.param(Forecaster.LAG, 0.4, id="lag-of-the-last-alone"),
    ],
)
def test_the_score_is_forecast_as_the_policy_says(forecaster: Forecaster, predicted: float | None) -> None:
    prediction = Prediction(score=forecaster, alpha=1.0)
    world = World(replace(P0, interval_s=5.0, prediction=prediction), 2)
    for level in (0.1, 0.2, 0.3, 0.4):
        world.press(level, level, level)
        decision = world.tick(apply=False)
    assert decision.forecast.score == (None if predicted is None else pytest.approx(predicted))
