"""decide(): the whole pipeline on one page."""

from autoscaler.core.approval import await_approval
from autoscaler.core.batching import try_limits_first
from autoscaler.core.demand import Capacity, DemandWindow, measure_demand
from autoscaler.core.forecast import forecast_demand, forecast_score, learned_horizon
from autoscaler.core.guards import GUARDS, Tick, ordering_score, pressure, propose
from autoscaler.core.mode import trigger_mode
from autoscaler.core.owners import standing_down_s
from autoscaler.core.policy import Policy, Sizing
from autoscaler.core.rollout import move_limits
from autoscaler.core.score import score_snapshot
from autoscaler.core.state import State, down_window_s, evidence_of, step_line
from autoscaler.core.types import (
    Action,
    Batching,
    Bounds,
    Decision,
    Demand,
    Forecast,
    GapReason,
    Hold,
    Proposal,
    Reason,
    ScaleReplicas,
    Score,
    SetBatching,
    Snapshot,
)
from autoscaler.core.victims import deletion_costs


def decide(policy: Policy, state: State, snapshot: Snapshot) -> Decision:
    """Choose one action for one target. Pure: equal arguments decide equally in every mode.

    The state must have absorbed the snapshot. Raises ValueError when it has not.
    """
    evidence = evidence_of(policy, state, snapshot)
    score = score_snapshot(policy, snapshot, evidence)
    window = _measure(policy, state)
    forecast = _forecast(policy, state, snapshot, score, window)
    tick = Tick(
        policy=policy,
        state=state,
        snapshot=snapshot,
        facts=evidence.facts,
        score=score,
        demand=window.latest if window is not None else Demand(gap=GapReason.NOT_CONFIGURED),
        forecast=forecast,
    )
    change = state.owners.change
    proposal = propose(tick)
    if not proposal.final:
        # Evidence first; bounds last, so that nothing overrules them. A person's pin knows bounds only.
        for guard in (
            (*GUARDS, try_limits_first, await_approval) if proposal.reason is not Reason.PINNED else GUARDS[-1:]
        ):
            proposal = guard(tick, proposal)
    batching = move_limits(tick, proposal)
    return Decision(
        at=snapshot.at,
        score=score,
        demand=tick.demand,
        forecast=forecast,
        proposal=proposal,
        reason=proposal.reason,
        mode=trigger_mode(tick),
        action=choose_action(policy, state, snapshot, proposal, batching),
        unblocks=unblocks(tick, proposal),
        change=change if change is not None and change.at == snapshot.at else None,
        bounds=tick.bounds if snapshot.schedules else None,
        batching=batching,
    )


def _measure(policy: Policy, state: State) -> DemandWindow | None:
    """Return demand per bin; None for a policy that is sized by the score."""
    if policy.sizing is Sizing.SCORE or state.facts is None:
        return None
    return measure_demand(policy, step_line(policy, state), Capacity.of(policy, state.facts), state.rows, state.times)


def _forecast(policy: Policy, state: State, snapshot: Snapshot, score: Score, window: DemandWindow | None) -> Forecast:
    """Return demand at the learned horizon, and the score's own forecast where the policy asks for one."""
    horizon_s = learned_horizon(policy.prediction, state.starts, policy.interval_s)
    if window is None:
        history = state.scores if score.value is None else (*state.scores, (snapshot.at, score.value))
        return Forecast(
            horizon_s=horizon_s, score=forecast_score(policy.prediction, history), gap=GapReason.NOT_CONFIGURED
        )
    return forecast_demand(policy, window, snapshot.at, horizon_s, state.hindsight.regimes, state.hindsight.ranked)


def choose_action(
    policy: Policy, state: State, snapshot: Snapshot, proposal: Proposal, batching: Batching | None = None
) -> Action:
    """Return the action that takes the target to the proposal, or moves its batching limits: one of the two a tick."""
    if batching is not None and batching.roll_out is not None:
        return batching.roll_out
    if batching is not None and batching.wanted is not None and batching.pods:
        return SetBatching(limits=batching.wanted, pods=batching.pods)
    if proposal.final or proposal.replicas == proposal.current:
        return Hold()
    costs = deletion_costs(policy, snapshot, proposal.replicas, state.starts)
    return ScaleReplicas(seen=proposal.current, to=proposal.replicas, uid=snapshot.target.uid, costs=costs)


def unblocks(tick: Tick, proposal: Proposal) -> tuple[str, ...]:
    """Return what would have to change for the next step up and the next step down, a line each."""
    if proposal.replicas != proposal.current:
        return ()
    if proposal.reason is Reason.AWAITING_APPROVAL:
        return (_missing_for_approval(proposal),)
    if proposal.final or proposal.reason is Reason.PINNED:
        words = _who_holds(tick, proposal.reason)
        return (f"held by {proposal.reason}" + (f": {words}" if words else ""),)
    lines = []
    bounds = tick.bounds
    stopped = {step.rule: step.detail for step in proposal.steps if step.after == proposal.current}
    wished = proposal.wished if proposal.wished is not None else proposal.current
    if wished > proposal.current and stopped:
        rule, detail = next(iter(stopped.items()))
        lines.append(f"up to {wished}: waits for {rule}" + (f" ({detail})" if detail else ""))
    elif proposal.current >= bounds.max:
        lines.append(f"up: at max {bounds.max}{_by(bounds)}")
    else:
        lines.append(f"up: {_missing_for_up(tick)}")
    if wished < proposal.current and stopped:
        rule, detail = next(iter(stopped.items()))
        lines.append(f"down: waits for {rule}" + (f" ({detail})" if detail else ""))
    elif proposal.current <= bounds.min:
        lines.append(f"down: at min {bounds.min}{_by(bounds)}")
    else:
        lines.append(f"down: {_missing_for_down(tick)}")
    return tuple(lines)


def _who_holds(tick: Tick, reason: Reason) -> str:
    """Return who holds the target, and by what; "" where the reason says it all."""
    settings, conflict = tick.policy.owners, tick.state.owners.conflict
    if reason is Reason.WRITER_CONFLICT and conflict is not None:
        left_s = standing_down_s(settings, tick.state.owners, tick.snapshot.at)
        writes = f"{settings.reversions} writes of ours were undone within {settings.window_s:.0f}s"
        return f"{writes}, the last when {conflict}; writing again in {left_s:.0f}s"
    return {Reason.PAUSED: tick.snapshot.target.paused, Reason.OTHER_OWNER: tick.snapshot.target.other_owner}.get(
        reason, ""
    )


def _missing_for_approval(proposal: Proposal) -> str:
    last, standing = proposal.steps[-1], proposal.standing
    way, to = ("down", last.before) if standing is None or not standing.up else ("up", standing.to)
    return f"{way} to {to}: waits for {last.rule} ({last.detail})"


def _by(bounds: Bounds) -> str:
    return f" by schedule {', '.join(bounds.by)}" if bounds.by else ""


def _missing_for_up(tick: Tick) -> str:
    if tick.score.value is None:
        return f"needs known parts of weight {tick.policy.score.min_known_weight:g}, has {tick.score.known_weight:.2f}"
    if tick.facts.loading and ordering_score(tick) is not None:
        return f"{tick.facts.loading} replicas are loading"
    threshold = tick.policy.scale_up.threshold
    needs = [f"score {pressure(tick):.2f} of {threshold:g}"]
    if tick.forecast.up is not None:
        needs.append(f"demand asks for {tick.forecast.up} of {tick.current}")
    return ", ".join(needs)


def _missing_for_down(tick: Tick) -> str:
    if tick.score.value is None:
        return "needs every part known"
    needs = []
    if tick.forecast.keep is not None:
        needs.append(f"demand keeps {tick.forecast.keep} of {tick.current}")
    if tick.score.shrink_value is not None:
        needs.append(f"score {tick.score.shrink_value:.2f}, threshold {tick.policy.scale_down.threshold:g}")
    elif tick.forecast.keep is None:
        needs.append(f"demand is unknown ({tick.forecast.gap})")
    window = down_window_s(tick.policy, tick.forecast.horizon_s)
    return ", ".join([*needs, f"for {window:.0f}s"])
