"""Ordered safety steps on a proposal, and the proposal itself."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoscaler.core.demand import Capacity, rush_demand
from autoscaler.core.facts import Facts, is_serving
from autoscaler.core.note import is_open
from autoscaler.core.owners import standing_down_s
from autoscaler.core.policy import Policy, RateBudget, ScaleDown, ScaleUp, Select, Sizing
from autoscaler.core.state import State, blind_ticks, down_window_s, growing_s, step_line
from autoscaler.core.types import (
    WHOLE_PAGE,
    Bounds,
    Demand,
    Direction,
    Forecast,
    GapReason,
    Proposal,
    Reason,
    Score,
    Snapshot,
    Step,
)
from autoscaler.core.window import SUMS

MEMORY_BRAKE = 0.5
CHANGE_HOLD_S = 120.0
"""For so long after a regime change the upward window is skipped: its older entries are of the old regime."""
DOUBLED_POLLS = 3
ENGINES_SOURCE = "vllm"
URGENT = frozenset({Reason.UP_EMERGENCY, Reason.UP_SATURATION})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """All that a guard may look at."""

    policy: Policy
    state: State
    snapshot: Snapshot
    facts: Facts
    score: Score
    demand: Demand
    forecast: Forecast

    @property
    def current(self) -> int:
        """`spec.replicas`, the base of every change."""
        return self.snapshot.target.current_replicas

    @property
    def bounds(self) -> Bounds:
        """The bounds that hold now."""
        return self.policy.bounds(self.snapshot.schedules)


Guard = Callable[[Tick, Proposal], Proposal]


# --- the proposal ---------------------------------------------------------------------------------------------------


def propose(tick: Tick) -> Proposal:
    """Return the replicas wished for, before any guard, and why."""
    current = tick.current
    standing = _stand_down(tick)
    if standing is not None:
        return Proposal(current=current, replicas=current, reason=standing, final=True, wished=current)
    pin = tick.snapshot.target.pin
    if pin is not None:
        return Proposal(current=current, replicas=pin, reason=Reason.PINNED, wished=pin)
    if tick.score.value is None:
        fallback = _fallback(tick)
        if fallback > current:
            return Proposal(current=current, replicas=fallback, reason=Reason.UP_FALLBACK, wished=fallback)
        return Proposal(current=current, replicas=current, reason=_ignorance(tick), wished=current)
    wishes = _growth(tick)
    growth, reason = max(wishes, key=lambda wish: wish[0])
    if growth > current:
        # Growth that may pass the cooldown passes it even where demand, which may not, asks for more.
        urgent = [wish for wish in wishes if wish[1] in URGENT and wish[0] > current]
        if urgent:
            reason = max(urgent, key=lambda wish: wish[0])[1]
        return Proposal(current=current, replicas=growth, reason=reason, urgent=bool(urgent), wished=growth)
    keep, reason = _keep(tick)
    if keep < current:
        return Proposal(current=current, replicas=keep, reason=reason, wished=keep)
    return Proposal(current=current, replicas=current, reason=Reason.STEADY, wished=current)


def _stand_down(tick: Tick) -> Reason | None:
    """Return why this target is not ours to change now; None when it is."""
    if tick.snapshot.target.paused:
        return Reason.PAUSED
    if tick.snapshot.target.other_owner:
        return Reason.OTHER_OWNER
    if standing_down_s(tick.policy.owners, tick.state.owners, tick.snapshot.at) > 0.0:
        return Reason.WRITER_CONFLICT
    if tick.current == 0:
        return Reason.SCALED_TO_ZERO
    if tick.state.doubled_polls >= DOUBLED_POLLS:
        return Reason.GROUP_SIZE
    return None


def _fallback(tick: Tick) -> int:
    """Return the replicas to grow to after too many ticks without a score; 0 for no such wish."""
    fallback = tick.policy.fallback
    if fallback is None or blind_ticks(tick.state, tick.score.value) < fallback.after:
        return 0
    return fallback.replicas


def _ignorance(tick: Tick) -> Reason:
    if tick.facts.expected == 0 and not tick.snapshot.samples:
        return Reason.NO_READY_PODS
    return Reason.NO_DATA if tick.score.known_weight <= 0.0 else Reason.INSUFFICIENT_COMPONENTS


def pressure(tick: Tick) -> float:
    """Return the score that growth is judged by: measured or predicted, whichever is higher."""
    return max(tick.score.value or 0.0, tick.forecast.score or 0.0)


def pressing(tick: Tick) -> Reason | None:
    """Return why the score asks for growth: the weighted sum, or one saturated part; None when it does not."""
    if pressure(tick) >= tick.policy.scale_up.threshold:
        return Reason.UP_SCORE
    critical = [part for part in tick.score.parts if (part.value or 0.0) >= tick.policy.score.critical]
    return Reason.UP_CRITICAL if any(part.weight > 0.0 for part in critical) else None


def ordering_score(tick: Tick) -> Reason | None:
    """Return why the score orders one replica beside what demand asks for; None when it does not.

    The line may be wrong, so the weighted sum does so even when demand sees no need. A single critical part does so
    only where demand cannot be known: p99 latency beside its SLO, or a cache filled as planned, is critical all day
    long, and so it is in the minutes after a start or an outage, when demand is only not known yet.
    """
    pressed = pressing(tick)
    if pressed is not Reason.UP_CRITICAL:
        return pressed
    rows = tick.state.rows
    before = rows[-2].sums[SUMS["covered"]] if len(rows) > 1 else 0.0
    coming = tick.forecast.gap is GapReason.NO_HISTORY and bool(rows) and rows[-1].sums[SUMS["covered"]] > before
    return None if tick.forecast.up is not None or coming else pressed


def _growth(tick: Tick) -> list[tuple[int, Reason]]:
    """Return the wishes to grow, each with its reason; the current count stands for no wish."""
    wishes = [(tick.current, Reason.STEADY)]
    if tick.policy.sizing is Sizing.SCORE:
        pressed = pressing(tick)
        return [*wishes, (_sized_by_score(tick), pressed)] if pressed is not None else wishes
    if tick.forecast.up is not None:
        wishes.append((tick.forecast.up, Reason.UP_DEMAND))
    ordering = ordering_score(tick)
    if ordering is not None and tick.facts.loading == 0:
        wishes.append((tick.current + 1, ordering))
    if tick.policy.emergency.enabled:
        wishes.extend(_urgent(tick))
    return wishes


def _sized_by_score(tick: Tick) -> int:
    """Return the replicas at which the score would lie in the middle of the dead band, at least one more than now."""
    middle = (tick.policy.scale_up.threshold + tick.policy.scale_down.threshold) / 2.0
    return max(tick.current + 1, math.ceil(tick.current * pressure(tick) / middle - 1e-9))


def _urgent(tick: Tick) -> list[tuple[int, Reason]]:
    """Return the wishes of the two paths that pass the upward cooldown.

    Emergency: the backlog is critical, the queue grew and is longer than the ready replicas: order what the work of the
    last seconds needs, all that queued up counted as served, and at least one replica while none is loading.
    Saturation: that work is not known in full where answers grow longer, so order a multiple of the ready replicas once
    the backlog has been critical and growing for long enough.
    """
    settings, facts, state = tick.policy.emergency, tick.facts, tick.state
    backlog = tick.score.part("backlog").value
    waiting = facts.waiting or 0.0
    if backlog is None or backlog < settings.backlog or len(state.rows) < 2:
        return []
    wishes = []
    grew = growing_s(tick.policy, state, backlog) > state.saturated_s
    if grew and waiting > facts.ready:
        line, capacity = step_line(tick.policy, state), Capacity.of(tick.policy, facts)
        rush = rush_demand(tick.policy, line, capacity, state.rows, state.times, waiting, tick.forecast.horizon_s)
        needed = math.ceil((rush or 0.0) / tick.policy.prediction.utilization - 1e-9)
        wishes.append((max(needed, tick.current + (facts.loading == 0)), Reason.UP_EMERGENCY))
    if growing_s(tick.policy, state, backlog) >= settings.hold_s:
        wishes.append((math.ceil(settings.factor * facts.ready - 1e-9), Reason.UP_SATURATION))
    return wishes


def _keep(tick: Tick) -> tuple[int, Reason]:
    """Return the replicas to keep when nothing asks for growth, and why fewer would do."""
    if tick.policy.sizing is Sizing.SCORE:
        calm = max(tick.score.value or 0.0, tick.forecast.score or 0.0) <= tick.policy.scale_down.threshold
        return tick.current - 1 if calm else tick.current, Reason.DOWN_SCORE
    if tick.forecast.keep is None:
        return tick.current, Reason.STEADY
    # A pod without data counts as fully loaded.
    return tick.forecast.keep + tick.facts.missing, Reason.DOWN_DEMAND


# --- the guards, in order -------------------------------------------------------------------------------------------


def require_evidence(tick: Tick, proposal: Proposal) -> Proposal:
    """Refuse a shrink unless every part, and enough of the replicas, vouch for it."""
    if proposal.replicas >= proposal.current:
        return proposal
    facts, policy = tick.facts, tick.policy
    missing = [part for part in tick.score.parts if part.weight > 0.0 and part.shrink_value is None]
    if any(part.gap is GapReason.MEMORY_COARSE for part in missing):
        return _held(proposal, Reason.MEMORY_COARSE, "framebuffer use says nothing about load")
    if missing and facts.known > 0 and facts.cold == facts.known:
        return _held(proposal, Reason.WARMING_UP, f"{facts.cold} pods are ready for less than the warm-up")
    if missing:
        names = ", ".join(f"{part.name} ({part.gap})" if part.gap else part.name for part in missing)
        return _held(proposal, Reason.PARTIAL_NO_SHRINK, f"unknown: {names}")
    if facts.known < policy.evidence.min_fresh_share * facts.expected:
        return _held(proposal, Reason.PARTIAL_NO_SHRINK, f"{facts.known} of {facts.expected} pods report")
    if any(gap.reason is GapReason.PARTIAL and gap.source == ENGINES_SOURCE for gap in tick.snapshot.gaps):
        return _held(proposal, Reason.PARTIAL_NO_SHRINK, "the engines' source says that its answer is partial")
    restarted = tick.state.last_restart_at
    if restarted is not None and tick.snapshot.at - restarted <= policy.evidence.restart_window_s:
        ago = tick.snapshot.at - restarted
        return _held(proposal, Reason.UNSTABLE_PODS, f"a container restarted {ago:.0f}s ago")
    return proposal


def count_pending(tick: Tick, proposal: Proposal) -> Proposal:
    """Count ordered supply before asking for more, and do not shrink a fleet that has lost readiness."""
    facts, target = tick.facts, tick.snapshot.target
    if proposal.replicas > proposal.current:
        if target.rollout_unhealthy:
            why = (
                "the rollout makes no progress" if target.rollout_failed else "pods of the newest revision do not start"
            )
            return _held(proposal, Reason.ROLLOUT_UNHEALTHY, why)
        if target.refused:
            return _held(proposal, Reason.QUOTA, target.refused)
        if facts.stuck:
            return _held(proposal, Reason.UNSCHEDULABLE, f"{facts.stuck} pods find no node")
        # The fallback is a size, not a step: what loads is in it already.
        steps = tick.policy.sizing is Sizing.SCORE and proposal.reason is not Reason.UP_FALLBACK
        if steps and facts.loading and not proposal.urgent:
            return _held(proposal, Reason.PENDING_CAPACITY, f"{facts.loading} replicas are loading")
    elif proposal.replicas < proposal.current and facts.unready:
        return _held(proposal, Reason.UNREADY_PODS, f"{facts.unready} pods were ready and are not")
    return proposal


def check_rebound(tick: Tick, proposal: Proposal) -> Proposal:
    """Refuse what of a step down would have the same load ask for growth: S x N / n >= the up threshold."""
    score, current = tick.score.shrink_value, proposal.current
    if proposal.replicas >= current or score is None:
        return proposal
    step, threshold = largest_step(tick.policy.scale_down, current), tick.policy.scale_up.threshold
    after = max(proposal.replicas, tick.bounds.min, 0 if step is None else current - step)
    projected = score * current / after if after else math.inf
    if after >= current or projected < threshold:
        return proposal
    fewest = next((count for count in range(after + 1, current) if score * current / count < threshold), current)
    return proposal.moved_to(fewest, Reason.WOULD_REBOUND, f"score would be {projected:.2f} on {after} replicas")


def hold_dead_band(tick: Tick, proposal: Proposal) -> Proposal:
    """Refuse a shrink while the score is above its threshold, a part is not clear, or memory or an SLO is tight."""
    if proposal.replicas >= proposal.current or tick.score.shrink_value is None:
        return proposal
    score, policy = tick.score, tick.policy
    if score.memory_guard is not None and score.memory_guard >= MEMORY_BRAKE:
        return _held(proposal, Reason.MEMORY_GUARD, f"out-of-memory guard {score.memory_guard:.2f}")
    if score.degraded:
        return _held(proposal, Reason.DEGRADED, score.part("latency").driver)
    value = max(score.shrink_value or 0.0, tick.forecast.score or 0.0)
    if value > policy.scale_down.threshold:
        return _held(proposal, Reason.HELD_HYSTERESIS, f"score {value:.2f} > {policy.scale_down.threshold:g}")
    for part in score.parts:
        level = (part.shrink_value or 0.0) if part.clear_value is None else part.clear_value
        if part.weight > 0.0 and level >= policy.score.clear:
            return _held(proposal, Reason.HELD_HYSTERESIS, f"{part.name} {level:.2f} is not clear")
    return proposal


def stabilize(tick: Tick, proposal: Proposal) -> Proposal:
    """Take the upward window's minimum and the downward window's maximum; the downward window must be full."""
    state, policy, at, current = tick.state, tick.policy, tick.snapshot.at, proposal.current
    if tick.score.value is None:
        return replace(proposal, recommended=(current, current))
    wanted = proposal.replicas
    keep = wanted if wanted < current else max(wanted, tick.forecast.keep or 0)
    proposal = replace(proposal, recommended=(max(wanted, current), keep))
    if wanted == current:
        return proposal
    changed_at = at if tick.forecast.changed else state.hindsight.changed_at
    changed = changed_at is not None and at - changed_at < CHANGE_HOLD_S
    up_window = 0.0 if proposal.urgent or changed else policy.scale_up.stabilization_s
    down_window = down_window_s(policy, tick.forecast.horizon_s)
    history = [(at - entry.until, entry.up, entry.keep) for entry in state.recommendations]
    observed_s = at - state.recommendations[0].since if state.recommendations else 0.0
    if wanted < current and observed_s < down_window - 1e-6:
        return _held(proposal, Reason.HELD_STABILIZATION, f"{observed_s:.0f}s of {down_window:.0f}s observed")
    settled = stabilized(current, max(wanted, current), keep, history, up_window, down_window)
    limit = f"lowest in {up_window:.0f}s" if wanted > current else f"highest in {down_window:.0f}s"
    return proposal.moved_to(settled, Reason.HELD_STABILIZATION, f"{limit} is {settled}")


def stabilized(
    current: int,
    up: int,
    keep: int,
    history: Sequence[tuple[float, int, int]],
    up_window_s: float,
    down_window_s: float,
) -> int:
    """Return what the windows leave of a wish: at least the lowest wish to grow, at most the highest to keep.

    Args:
        up, keep: this tick's wishes.
        history: (age [s], earlier wish to grow, earlier wish to keep).
    Source: HorizontalPodAutoscaler, stabilizeRecommendationWithBehaviors, where both wishes are one.
    """
    lowest = min([up, *(wish for age, wish, _ in history if age < up_window_s)])
    highest = max([keep, *(wish for age, _, wish in history if age < down_window_s)])
    return min(max(current, lowest), highest)


def leave_in_motion(tick: Tick, proposal: Proposal) -> Proposal:
    """Hold a shrink while a rollout is under way or, if asked for, while pods drain.

    After the windows: what was recommended stands. Else the moment after our own step, when the Deployment's controller
    has not yet seen it, would make the downward window start afresh. A rollout that has failed holds nothing: it may
    stand there for days. But for one of ours, which is taken back.
    """
    if proposal.replicas >= proposal.current:
        return proposal
    target = tick.snapshot.target
    ours = target.template is not None and target.rollout_failed and is_open(target.template)
    if target.rollout and (ours or not target.rollout_failed):
        return _held(proposal, Reason.ROLLOUT, "a rollout is under way")
    if tick.policy.scale_down.serialize_drain and tick.facts.terminating:
        return _held(proposal, Reason.DRAINING, f"{tick.facts.terminating} pods terminate")
    return proposal


def protect_requests(tick: Tick, proposal: Proposal) -> Proposal:
    """Hold a shrink, if asked for, while the pod template leaves requests too little time to end."""
    required = tick.policy.scale_down.drain_s
    if proposal.replicas >= proposal.current or not tick.policy.scale_down.require_drain or required is None:
        return proposal
    drain = tick.snapshot.target.drain
    lacking = "how pods end is not known" if drain is None else drain.lacks(required)
    return _held(proposal, Reason.UNSAFE_DRAIN, lacking) if lacking else proposal


def require_answers(tick: Tick, proposal: Proposal) -> Proposal:
    """Hold a shrink while too few pods answer: the last pages of the others are still fresh, and they may be lost.

    After the windows, as `leave_in_motion`: a page that comes too late once does not make the downward window start
    afresh.
    """
    if proposal.replicas >= proposal.current:
        return proposal
    expected = tick.facts.expected
    answering = expected - _silent(tick.snapshot)
    if answering < tick.policy.evidence.min_fresh_share * expected:
        return _held(proposal, Reason.PARTIAL_NO_SHRINK, f"{max(0, answering)} of {expected} pods answer")
    return proposal


def _silent(snapshot: Snapshot) -> int:
    """Return how many of the pods that serve could not be read at this tick."""
    silent = {gap.pod for gap in snapshot.gaps if gap.signal == WHOLE_PAGE and gap.source == ENGINES_SOURCE}
    if not silent:
        return 0
    return sum("" in silent or pod.name in silent for pod in snapshot.target.pods if is_serving(pod))


def limit_step(tick: Tick, proposal: Proposal) -> Proposal:
    """Limit one action to the largest step. The fallback is no step but a size that somebody chose."""
    if proposal.reason is Reason.UP_FALLBACK:
        return proposal
    up = largest_step(tick.policy.scale_up, proposal.current)
    down = largest_step(tick.policy.scale_down, proposal.current)
    high = math.inf if up is None else proposal.current + up
    low = -math.inf if down is None else proposal.current - down
    limited = int(min(max(proposal.replicas, low), high))
    return proposal.moved_to(limited, Reason.LIMITED_STEP, f"+{up}/-{down} an action")


def largest_step(limits: ScaleUp | ScaleDown, current: int) -> int | None:
    """Return how many replicas one action may move; None for any number.

    A share of the fleet: two replicas at a time are a tenth of twenty, and no answer to a surge on two hundred.
    """
    return None if limits.max_step is None else max(limits.max_step, int(limits.max_step_share * current + 1e-9))


def limit_rate(tick: Tick, proposal: Proposal) -> Proposal:
    """Limit the change per period to the rate budgets, but for the fallback."""
    if proposal.reason is Reason.UP_FALLBACK:
        return proposal
    up, down = tick.policy.scale_up, tick.policy.scale_down
    ages = [(tick.snapshot.at - when, change) for when, change in tick.state.changes]
    if proposal.replicas > proposal.current and up.budgets:
        ceiling = rate_limit(up.budgets, up.select, proposal.current, ages, up=True)
        limited = max(proposal.current, min(proposal.replicas, ceiling))
        return proposal.moved_to(limited, Reason.LIMITED_RATE, f"budget ends at {ceiling}")
    if proposal.replicas < proposal.current and down.budgets:
        floor = rate_limit(down.budgets, down.select, proposal.current, ages, up=False)
        limited = min(proposal.current, max(proposal.replicas, floor))
        return proposal.moved_to(limited, Reason.LIMITED_RATE, f"budget ends at {floor}")
    return proposal


def rate_limit(
    budgets: Sequence[RateBudget], select: Select, current: int, changes: Sequence[tuple[float, int]], *, up: bool
) -> int:
    """Return the highest (or lowest) count that the budgets allow now.

    Args:
        changes: (age [s], change), ups positive. A budget counts from the replicas at its period's start: the current
            ones less what was added, plus what was removed, since then.
    Source: HorizontalPodAutoscaler, calculateScaleUpLimitWithScalingRules and its downward twin.
    """
    if select is Select.DISABLED:
        return current
    limits = []
    for budget in budgets:
        start = current - sum(change for age, change in changes if age < budget.period_s)
        if budget.type == "Pods":
            limits.append(start + budget.value if up else start - budget.value)
        elif up:
            limits.append(math.ceil(start * (1.0 + budget.value / 100.0) - 1e-9))
        else:
            limits.append(math.floor(start * (1.0 - budget.value / 100.0) + 1e-9))
    most = select is Select.MAX
    return max(limits) if up is most else min(limits)


def hold_cooldown(tick: Tick, proposal: Proposal) -> Proposal:
    """Leave time between changes, ours and others'; emergency and saturation pass upward."""
    last, what = tick.state.last_action_at, "the last action"
    foreign = tick.state.owners.change
    if foreign is not None and (last is None or foreign.at > last):
        last, what = foreign.at, str(foreign)
    if proposal.replicas == proposal.current or last is None:
        return proposal
    up = proposal.replicas > proposal.current
    cooldown = tick.policy.up_cooldown_s if up else tick.policy.down_cooldown_s
    since = tick.snapshot.at - last
    if since >= cooldown or (up and proposal.urgent):
        return proposal
    return _held(proposal, Reason.HELD_COOLDOWN, f"{since:.0f}s of {cooldown:.0f}s since {what}")


def hold_turn(tick: Tick, proposal: Proposal) -> Proposal:
    """Leave time between a step and one back; emergency, saturation and the fallback pass upward.

    Demand that swings within minutes is not worth a model's load, and a drain, each way.
    """
    up = proposal.replicas > proposal.current
    last, turn_s = tick.state.last_up_at, tick.policy.scale_down.turn_s
    if up:
        last, turn_s = tick.state.last_down_at, tick.policy.scale_up.turn_s
    if proposal.replicas == proposal.current or last is None or (up and _is_urgent(proposal)):
        return proposal
    since = tick.snapshot.at - last
    if since > turn_s or turn_s <= 0.0:
        return proposal
    way = "down" if up else "up"
    return _held(proposal, Reason.HELD_TURN, f"{since:.0f}s of {turn_s:.0f}s since the last step {way}")


def _is_urgent(proposal: Proposal) -> bool:
    return proposal.urgent or proposal.reason is Reason.UP_FALLBACK


def blow_fuse(tick: Tick, proposal: Proposal) -> Proposal:
    """Freeze growth while the fleet does not turn what it has into ready replicas; it reopens by itself."""
    settings, facts = tick.policy.health, tick.facts
    if not settings.enabled or proposal.replicas <= proposal.current:
        return proposal
    unhealthy = facts.broken / facts.live if facts.live else 0.0
    if unhealthy > settings.max_unhealthy_share:
        return _held(proposal, Reason.HEALTH_FUSE, f"{facts.broken} of {facts.live} pods crash or cannot be pulled")
    if facts.overdue:
        # Past twice the time one more step is risked: what kept these pods from starting may be gone.
        return _held(
            proposal, Reason.HEALTH_FUSE, f"{facts.overdue} pods not ready after {settings.ready_within_s:.0f}s"
        )
    return proposal


def keep_bounds(tick: Tick, proposal: Proposal) -> Proposal:
    """Pull the count between min and max. Last, so that nothing overrules it."""
    bounds = tick.bounds
    low, high = bounds.min, bounds.max
    bounded = min(max(proposal.replicas, low), high)
    if bounded == proposal.replicas:
        return proposal
    rule = Reason.LIMITED_MAX if bounded == high and proposal.replicas > high else Reason.LIMITED_MIN
    step = Step(rule=rule, before=proposal.replicas, after=bounded, detail=str(bounds))
    reason = proposal.reason
    if bounded == proposal.current:
        reason = rule
    elif not low <= proposal.current <= high:
        reason = Reason.UP_BOUNDS if bounded > proposal.current else Reason.DOWN_BOUNDS
    return replace(proposal, replicas=bounded, reason=reason, steps=(*proposal.steps, step))


def _held(proposal: Proposal, rule: Reason, detail: str) -> Proposal:
    return proposal.moved_to(proposal.current, rule, detail)


def obey_direction(tick: Tick, proposal: Proposal) -> Proposal:
    """Hold what a person's annotation forbids: shrinking under `up-only`, growing under `down-only`."""
    direction = tick.snapshot.target.direction
    forbidden = {Direction.UP_ONLY: -1, Direction.DOWN_ONLY: 1}.get(direction, 0)
    if forbidden * (proposal.replicas - proposal.current) > 0:
        return _held(proposal, Reason.LIMITED_DIRECTION, f"annotated {direction}")
    return proposal


GUARDS: tuple[Guard, ...] = (
    require_evidence,
    count_pending,
    check_rebound,
    hold_dead_band,
    stabilize,
    leave_in_motion,
    require_answers,
    protect_requests,
    limit_step,
    limit_rate,
    hold_cooldown,
    hold_turn,
    blow_fuse,
    obey_direction,
    keep_bounds,
)
"""In order; a pinned proposal passes the bounds only."""
