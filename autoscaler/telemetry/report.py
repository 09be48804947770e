"""The report of the loop: a line a tick, fresh metrics, and troubles without floods."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from structlog.typing import FilteringBoundLogger

from autoscaler import __version__
from autoscaler.core.policy import Policy
from autoscaler.core.types import (
    Action,
    Batching,
    Bounds,
    Decision,
    Demand,
    Forecast,
    ForeignChange,
    Gap,
    GapReason,
    Limits,
    Measured,
    Outcome,
    RollOut,
    ScaleReplicas,
    Score,
    SetBatching,
    Snapshot,
)
from autoscaler.errors import ActuationError, AutoscalerError, TargetError
from autoscaler.telemetry.metrics import (
    COST_RESULTS,
    ERROR_KINDS,
    EVENT_RESULTS,
    LIMITS,
    MAX_GAP_SERIES,
    OTHER,
    RELOAD_RESULTS,
    ROLLOUT_RESULTS,
    SCORE_PARTS,
    SEEN,
    SIGNALS,
    SOURCES,
    TOLD_RESULTS,
    Metrics,
    known,
)

MAX_COSTS, MAX_LEFT_ALONE = 5, 5
"""Deletion costs that a line names, and pods whose batching limits are left alone."""
_ACTIONS = {"hold": "hold", "batching": "set_batching", "rollout": "roll_out"}


def _direction(action: Action) -> str:
    if isinstance(action, ScaleReplicas):
        return "up" if action.to > action.seen else "down"
    if isinstance(action, RollOut):
        return "rollout"
    return "batching" if isinstance(action, SetBatching) else "hold"


def _desired(snapshot: Snapshot, action: Action) -> int:
    return action.to if isinstance(action, ScaleReplicas) else snapshot.target.current_replicas


def _proposed(decision: Decision) -> int | None:
    """Return the replicas that wait for a person's approval; None where nothing does."""
    standing = decision.proposal.standing
    return standing.to if standing is not None and not isinstance(decision.action, ScaleReplicas) else None


def _approval_fields(decision: Decision) -> dict[str, object] | None:
    standing = decision.proposal.standing
    if standing is None:
        return None
    state = "approved" if isinstance(decision.action, ScaleReplicas) else "waits"
    return {"id": standing.id, "state": state, "replicas": standing.to, "expires_at": standing.expires_at}


def _core_gaps(decision: Decision) -> Iterator[Gap]:
    """Yield what the core could not compute, as gaps; what the policy does not ask for is none."""
    parts = decision.score.parts if decision.score is not None else ()
    found = [(part.name, part.gap) for part in parts]
    found += [("demand", decision.demand.gap), ("forecast", decision.forecast.gap)]
    for name, reason in found:
        if reason is not None and reason is not GapReason.NOT_CONFIGURED:
            yield Gap(signal=name, reason=reason, source="core")


def _short(value: float | None) -> float | None:
    """Return the value at four decimals, enough to explain a decision by."""
    return None if value is None or not math.isfinite(value) else round(value, 4)


def _given(**fields: object) -> dict[str, object]:
    """Return the fields that are known."""
    return {name: value for name, value in fields.items() if value is not None}


def _score_fields(score: Score | None) -> dict[str, object] | None:
    if score is None:
        return None
    parts = {
        part.name: {
            "value": _short(part.value),
            "shrink_value": _short(part.shrink_value),
            "weight": part.weight,
            **_given(driver=part.driver or None, gap=part.gap),
        }
        for part in score.parts
    }
    return {
        "value": _short(score.value),
        "shrink_value": _short(score.shrink_value),
        "known_weight": _short(score.known_weight),
        "binds": score.binds,
        "parts": parts,
        **_given(memory_guard=_short(score.memory_guard), degraded=score.degraded or None),
    }


def _demand_fields(demand: Demand) -> dict[str, object]:
    terms = _given(itl=_short(demand.itl), kv=_short(demand.kv), sequences=_short(demand.sequences))
    return {"value": _short(demand.value), **terms, **_given(binds=demand.binds or None, gap=demand.gap)}


def _forecast_fields(forecast: Forecast) -> dict[str, object]:
    return {
        "horizon_s": _short(forecast.horizon_s),
        **_given(
            level=_short(forecast.level),
            top=_short(forecast.top),
            sigma=_short(forecast.sigma),
            up=forecast.up,
            keep=forecast.keep,
            changed=forecast.changed or None,
            score=_short(forecast.score),
            gap=forecast.gap,
        ),
    }


def _gap_text(gap: Gap) -> str:
    """Return one gap in words: source, signal, pod, detail."""
    words = " ".join(word for word in (gap.source, gap.signal, gap.pod) if word)
    return f"{words}: {gap.detail}" if gap.detail else words


def _gap_fields(gaps: Iterable[Gap]) -> dict[str, dict[str, object]]:
    """Return per reason how many gaps there are, and the first in words."""
    found: dict[str, dict[str, object]] = {}
    counts: Counter[str] = Counter()
    for gap in gaps:
        counts[gap.reason] += 1
        found.setdefault(str(gap.reason), {"count": 0, "first": _gap_text(gap)})["count"] = counts[gap.reason]
    return found


def rollout_result(action: RollOut) -> str:
    """Return what a write to the pod template is to the rollout: its begin, its end, or the way back."""
    begun, kept, rolled_back = ROLLOUT_RESULTS
    return rolled_back if action.back else begun if action.restarts else kept


def _cost_fields(action: Action) -> list[str] | None:
    """Return the deletion costs to be changed, the first in words; None without any."""
    costs = action.costs if isinstance(action, ScaleReplicas) else ()
    shown = [
        f"{one.pod} {'none' if one.cost is None else one.cost}"
        + ("" if one.requests is None else f" ({one.requests:g} requests)")
        for one in costs[:MAX_COSTS]
    ]
    return [*shown, *([f"and {len(costs) - MAX_COSTS} more"] if len(costs) > MAX_COSTS else [])] or None


def _batching_fields(batching: Batching | None) -> dict[str, object] | None:
    """Return what was made of the batching limits, and what it was judged by; None where they are left alone."""
    if batching is None:
        return None
    measured = batching.measured
    return {
        "bound": str(batching.bound),
        "reason": str(batching.reason),
        "limits": str(batching.limits),
        **_given(
            wanted=None if batching.wanted is None else str(batching.wanted),
            pods=len(batching.pods) or None,
            detail=batching.detail or None,
            left_alone=[f"{pod}: {reason}" for pod, reason in batching.left_alone[:MAX_LEFT_ALONE]] or None,
            applied=batching.applied,
            verified=batching.verified,
        ),
        **({} if measured is None else _measured_fields(measured)),
    }


def _measured_fields(measured: Measured) -> dict[str, object]:
    values = {field.name: getattr(measured, field.name) for field in dataclasses.fields(measured)}
    return _given(**{name: _short(value) for name, value in values.items()})


def _change_fields(change: ForeignChange) -> dict[str, object]:
    """Return who changed the replicas from what to what, whether that undid a write of ours, and when it was made."""
    fields = {"by": change.by, "before": change.before, "after": change.after, "undid": change.undid}
    return {**fields, **_given(written_at=change.written_at)}


def decision_fields(snapshot: Snapshot, decision: Decision, outcome: Outcome, duration_s: float) -> dict[str, object]:
    """Return the fields of a `decision` line, plain data, beside `policy` and `target`."""
    direction = _direction(decision.action)
    return {
        "at": snapshot.at,
        "score": _score_fields(decision.score),
        "demand": _demand_fields(decision.demand),
        "forecast": _forecast_fields(decision.forecast),
        "current_replicas": snapshot.target.current_replicas,
        "ready_replicas": snapshot.target.ready_replicas,
        "desired_replicas": _desired(snapshot, decision.action),
        "action": _ACTIONS.get(direction, f"scale_{direction}"),
        "reason": str(decision.reason),
        "mode": str(decision.mode),
        "steps": [
            f"{step.rule} {step.before}->{step.after}" + (f": {step.detail}" if step.detail else "")
            for step in decision.proposal.steps
        ],
        "gaps": _gap_fields(snapshot.gaps),
        "unblocks": list(decision.unblocks),
        **_given(bounds=None if decision.bounds is None else str(decision.bounds)),
        **_given(approval=_approval_fields(decision)),
        "outcome": str(outcome),
        "duration_s": _short(duration_s),
        **_given(deletion_costs=_cost_fields(decision.action), batching=_batching_fields(decision.batching)),
    }


_MAX_REMEMBERED = 10_000
_DIGITS = re.compile(r"\d+(?:\.\d+)?")


class _Said:
    """Remembers what was said and last held when, so that a lasting condition is one line and not one a tick."""

    def __init__(self) -> None:
        self._held_at: dict[tuple[str, ...], float] = {}

    def is_news(self, key: tuple[str, ...], at: float) -> bool:
        """Return whether the condition is new, and remember that it holds at `at`."""
        news = self._held_at.pop(key, None) is None
        self._held_at[key] = at
        if len(self._held_at) > _MAX_REMEMBERED:
            del self._held_at[next(iter(self._held_at))]
        return news

    def ended(self, at: float, quiet_s: float) -> list[tuple[str, ...]]:
        """Forget and return the conditions that have not held for `quiet_s`."""
        over = [key for key, held_at in self._held_at.items() if at - held_at >= quiet_s]
        for key in over:
            del self._held_at[key]
        return over


def _same_text(text: str) -> str:
    """Return the text with its numbers masked: `age 17.3 s` and `age 22.3 s` say the same."""
    return _DIGITS.sub("#", text)


@dataclass(slots=True)
class _Memory:
    """What telemetry remembers of one policy.

    Args:
        quiet_s: a condition that did not hold for this long has ended.
        drain_s: how long requests may take to end; None where the policy does not say.
        bounds: the policy's own, without schedules.
        at: of the last tick. `scored_at`: of the last one with a score, or of the first.
        silent: the `no_data` gauge is 1. `forbidden`: the `write_forbidden` gauge is.
        gap_series: label sets in use, see MAX_GAP_SERIES.
    """

    quiet_s: float = 60.0
    alert_after_s: float = 300.0
    drain_s: float | None = None
    dry_run: bool = False
    bounds: Bounds | None = None
    at: float = 0.0
    scored_at: float | None = None
    silent: bool = False
    forbidden: bool = False
    gaps: _Said = field(default_factory=_Said)
    texts: _Said = field(default_factory=_Said)
    gap_series: set[tuple[str, str, str]] = field(default_factory=set)


def _lacking(memory: _Memory, snapshot: Snapshot) -> str | None:
    """Return what the pod template lacks for requests to end; "" for nothing; None where that is not asked or known."""
    drain = snapshot.target.drain
    return None if drain is None or memory.drain_s is None else drain.lacks(memory.drain_s)


class Telemetry:
    """Implements `ports.Report`: a line and fresh metrics per tick, and the loop's troubles without floods.

    Args:
        registry: where the metrics are registered.
        logger: takes the lines; `configure_logging` makes its output redacted.
    """

    def __init__(self, registry: CollectorRegistry, logger: FilteringBoundLogger) -> None:
        self._metrics = Metrics(registry)
        self._logger = logger
        self._policies: dict[str, _Memory] = {}
        self._last_problems: tuple[str, ...] = ()
        self._events_written = True
        self._last_lease_trouble = ""
        self._metrics.set("build_info", __version__, 1.0)

    def loaded(self, policy: Policy, *, dry_run: bool = False) -> None:
        """Take note of a policy that is in force from now on: a new one, or a new version of one.

        Args:
            dry_run: the whole process is in dry-run, whatever the policy says.
        """
        name, memory = policy.name, self._memory(policy.name)
        memory.quiet_s = max(60.0, 3.0 * policy.interval_s)
        memory.alert_after_s = policy.evidence.alert_after_s
        memory.drain_s = policy.scale_down.drain_s
        memory.dry_run = dry_run or policy.dry_run
        memory.bounds = policy.bounds()
        with self._metrics.lock:
            self._metrics.set("min_replicas", name, policy.replicas.min)
            self._metrics.set("max_replicas", name, policy.replicas.max)
            self._metrics.set("dry_run", name, float(memory.dry_run))
            self._metrics.set("no_data", name, float(memory.silent))
            self._metrics.set("write_forbidden", name, float(memory.forbidden))
            for counter in ("ticks_total", "tick_overruns_total"):
                self._metrics.add(counter, name, amount=0.0)

    def forget(self, policy: str) -> None:
        """Forget a policy that is gone, and remove its series. Its last tick must have been reported."""
        self._metrics.forget(policy)
        self._policies.pop(policy, None)

    def tick(self, policy: str, snapshot: Snapshot, decision: Decision, outcome: Outcome, duration_s: float) -> None:
        """Log one completed tick and show it in the metrics."""
        memory = self._memory(policy)
        memory.at = snapshot.at
        log = self._logger.bind(policy=policy, target=f"{snapshot.target.namespace}/{snapshot.target.name}")
        score = decision.score.value if decision.score is not None else None
        if score is not None or memory.scored_at is None or snapshot.target.current_replicas == 0:
            memory.scored_at = snapshot.at  # a target at 0 replicas has nothing to score
        silent = snapshot.at - memory.scored_at >= memory.alert_after_s
        lacking = _lacking(memory, snapshot)
        with self._metrics.lock:
            self._show(policy, snapshot, decision)
            self._metrics.set("unsafe_drain", policy, None if lacking is None else float(bool(lacking)))
            self._show_bounds(policy, decision.bounds or memory.bounds)
            self._count(policy, memory, snapshot, decision, outcome)
            self._metrics.observe(policy, duration_s)
            self._metrics.set("no_data", policy, float(silent))
            if outcome is Outcome.APPLIED:
                self._set_forbidden(policy, False)
            self._metrics.set("last_tick_timestamp_seconds", policy, snapshot.at)
        if silent != memory.silent:
            memory.silent = silent
            (log.warning if silent else log.info)("no_data" if silent else "data_again", reason=str(decision.reason))
        if decision.change is not None:
            say = log.warning if decision.change.undid else log.info
            say("replicas_changed", **_change_fields(decision.change))
        refused = snapshot.target.refused
        if refused and memory.texts.is_news(("refused", refused), snapshot.at):
            log.warning("pods_refused", detail=refused)
        if lacking and memory.texts.is_news(("drain", lacking), snapshot.at):
            log.warning("unsafe_drain", detail=lacking)
        self._log_gaps(log, memory, snapshot)
        fields = decision_fields(snapshot, decision, outcome, duration_s)
        log.info("decision", **fields, dry_run=memory.dry_run)

    def error(self, policy: str, kind: str, error: BaseException) -> None:
        """Count an error of one policy's tick, and log it unless the same was said and has not ended.

        An error of ours is one line; any other is a bug and comes with its traceback.

        Args:
            kind: `target`, `actuation`, or `bug`. The metric's kind is the error's own reason where it has one.
        """
        memory = self._memory(policy)
        with self._metrics.lock:
            reason = error.reason if isinstance(error, TargetError | ActuationError) else ""
            label = reason if reason in ERROR_KINDS else known(kind, ERROR_KINDS)
            self._metrics.add("tick_errors_total", policy, label)
            if kind != "actuation":
                self._metrics.forget(policy, SEEN)
            elif reason == "forbidden":
                self._set_forbidden(policy, True)
        if not memory.texts.is_news(("error", kind, type(error).__name__, _same_text(str(error))), memory.at):
            return
        log = self._logger.bind(policy=policy, kind=kind, error=type(error).__name__, detail=str(error))
        if isinstance(error, AutoscalerError):
            log.warning("tick_failed")
        else:
            log.error("tick_failed", exc_info=error)

    def right_missing(self, policy: str, right: str) -> None:
        """Log that the API server forbids us what carries out the policy's decisions, and show it."""
        self._set_forbidden(policy, True)
        self._logger.warning("right_missing", policy=policy, right=right)

    def overrun(self, policy: str) -> None:
        """Count a tick that took longer than the interval, and log the first of a row."""
        memory = self._memory(policy)
        self._metrics.add("tick_overruns_total", policy)
        if memory.texts.is_news(("overrun",), memory.at):
            self._logger.warning("tick_overrun", policy=policy)

    def deletion_cost(self, policy: str, result: str, detail: str) -> None:
        """Count a pod's deletion cost that a step down needed changed, and log the first of a row that is not written.

        Args:
            result: `written`, or `failed`.
        """
        self._metrics.add("deletion_costs_total", policy, known(result, COST_RESULTS))
        memory = self._memory(policy)
        if result != "written" and memory.texts.is_news(("deletion_cost",), memory.at):
            self._logger.warning("deletion_cost_not_written", policy=policy, detail=detail)

    def batching_pod(self, policy: str, pod: str, problem: str) -> None:
        """Count a pod that was told batching limits, and log the first of a row that did not take them.

        Args:
            problem: why it did not; "" where it did.
        """
        taken, failed = TOLD_RESULTS
        self._metrics.add("batching_pods_total", policy, failed if problem else taken)
        memory = self._memory(policy)
        if problem and memory.texts.is_news(("batching_pod", pod), memory.at):
            self._logger.warning("batching_limits_not_taken", policy=policy, pod=pod, detail=problem)

    def reload(self, result: str, problems: Iterable[object] = ()) -> None:
        """Count an attempt to take up changed policy files, and log it unless it repeats the last one's problems.

        Args:
            result: `applied`, or `rejected`: the policies in force stay.
        """
        self._metrics.add("policy_reloads_total", known(result, RELOAD_RESULTS))
        texts = tuple(str(problem) for problem in problems)
        if not texts:
            self._logger.info("policies_reloaded", result=result)
        elif texts != self._last_problems:
            self._logger.warning("policies_reloaded", result=result, problems=texts)
        self._last_problems = texts

    def event(self, result: str, detail: str) -> None:
        """Count a Kubernetes Event, and log the first of a row that is not written.

        Args:
            result: `written`; `failed` where the API server did not take it; `dropped` where too many waited.
        """
        self._metrics.add("events_total", known(result, EVENT_RESULTS))
        if result != "written" and self._events_written:
            self._logger.warning("events_not_written", result=result, detail=detail)
        self._events_written = result == "written"

    def leads(self, lease: str, *, leading: bool, news: bool = True) -> None:
        """Show whether this process leads by the Lease, `namespace/name`, and log it where it is news."""
        self._metrics.set("leader", lease, float(leading))
        self._last_lease_trouble = ""
        if news:
            self._logger.info("leading" if leading else "standing_by", lease=lease)

    def lease_trouble(self, lease: str, error: TargetError) -> None:
        """Log that the Lease could not be read or written, unless it repeats what was said since the last news."""
        if _same_text(str(error)) != self._last_lease_trouble:
            self._last_lease_trouble = _same_text(str(error))
            self._logger.warning("lease_trouble", lease=lease, reason=error.reason, detail=error.detail)

    def memory_damaged(self, policy: str, problem: str) -> None:
        """Log that what the last leader knew of a policy's target cannot be read; its cooldowns are forgotten."""
        self._logger.error("memory_damaged", policy=policy, problem=problem)

    def recording_failed(self, problem: str) -> None:
        """Log that the recording stopped; the loop goes on."""
        self._logger.error("recording_stopped", problem=problem)

    def learned(
        self, policy: str, c0: float, cp: float, cb: float, ck: float, rows: float, horizon_s: float | None
    ) -> None:
        """Show what was learned of a target.

        Args:
            c0, cp, cb, ck: of the step-time line: base [s], per prefill token, per sequence, per resident token [s].
            rows: observations behind them.
            horizon_s: learned time from ordered to ready plus one interval; None before the first start.
        """
        with self._metrics.lock:
            terms = {"base": c0, "prefill_token": cp, "sequence": cb, "resident_token": ck}
            for term, value in terms.items():
                self._metrics.set("step_time_seconds", policy, value, term)
            self._metrics.set("step_time_rows", policy, rows)
            self._metrics.set("learned_horizon_seconds", policy, horizon_s)

    def _memory(self, policy: str) -> _Memory:
        """Return what is remembered of the policy."""
        return self._policies.setdefault(policy, _Memory())

    def _set_forbidden(self, policy: str, forbidden: bool) -> None:
        self._memory(policy).forbidden = forbidden
        self._metrics.set("write_forbidden", policy, float(forbidden))

    def _show(self, policy: str, snapshot: Snapshot, decision: Decision) -> None:
        """Set the gauges that say what the tick saw and wants."""
        score = decision.score or Score(value=None, shrink_value=None, known_weight=0.0, parts=())
        demand, forecast = decision.demand, decision.forecast
        values = {
            "score": score.value,
            "score_shrink": score.shrink_value,
            "score_known_weight": score.known_weight,
            "memory_guard": score.memory_guard,
            "forecast_level_replicas": forecast.level,
            "forecast_top_replicas": forecast.top,
            "forecast_sigma_replicas": forecast.sigma,
            "forecast_up_replicas": forecast.up,
            "forecast_keep_replicas": forecast.keep,
            "forecast_score": forecast.score,
            "forecast_horizon_seconds": forecast.horizon_s,
            "current_replicas": snapshot.target.current_replicas,
            "ready_replicas": snapshot.target.ready_replicas,
            "desired_replicas": _desired(snapshot, decision.action),
            "proposed_replicas": _proposed(decision),
            "rollout_unhealthy": snapshot.target.rollout_unhealthy,
        }
        for name, value in values.items():
            self._metrics.set(name, policy, value)
        parts = {part.name: part.value for part in score.parts}
        for name in SCORE_PARTS:
            self._metrics.set("score_part", policy, parts.get(name), name)
        limits = decision.batching.limits if decision.batching is not None else Limits()
        for name in LIMITS:
            self._metrics.set("batching_limit", policy, getattr(limits, name), name)
        left = None if decision.batching is None else len(decision.batching.left_alone)
        self._metrics.set("batching_left_alone_pods", policy, left)
        applied = None if decision.batching is None else decision.batching.applied
        self._metrics.set("batching_applied", policy, applied)
        for name, term in (("itl", demand.itl), ("kv", demand.kv), ("sequences", demand.sequences)):
            self._metrics.set("demand_replicas", policy, term, name)

    def _show_bounds(self, policy: str, bounds: Bounds | None) -> None:
        """Set the gauges of the bounds that hold; of a policy that was never loaded they are not known."""
        if bounds is not None:
            self._metrics.set("min_replicas", policy, bounds.min)
            self._metrics.set("max_replicas", policy, bounds.max)

    def _count(self, policy: str, memory: _Memory, snapshot: Snapshot, decision: Decision, outcome: Outcome) -> None:
        self._metrics.add("ticks_total", policy)
        self._metrics.add("decisions_total", policy, str(decision.reason))
        self._metrics.add("actions_total", policy, _direction(decision.action), str(outcome))
        if decision.batching is not None:
            self._metrics.add("batching_decisions_total", policy, str(decision.batching.reason))
        if isinstance(decision.action, RollOut) and outcome is Outcome.APPLIED:
            self._metrics.add("batching_rollouts_total", policy, rollout_result(decision.action))
        if decision.change is not None:
            self._metrics.add("foreign_changes_total", policy, "undid" if decision.change.undid else "changed")
        for gap in (*snapshot.gaps, *_core_gaps(decision)):
            labels = (known(gap.source, SOURCES), known(gap.signal, SIGNALS), str(gap.reason))
            if labels not in memory.gap_series:
                if len(memory.gap_series) >= MAX_GAP_SERIES:
                    labels = (OTHER, OTHER, OTHER)
                else:
                    memory.gap_series.add(labels)
            self._metrics.add("gaps_total", policy, *labels)

    def _log_gaps(self, log: FilteringBoundLogger, memory: _Memory, snapshot: Snapshot) -> None:
        """Log gaps that are new, or say something new, and those that ended: one line per source, signal and reason."""
        new: dict[tuple[str, str, str], list[Gap]] = {}
        for gap in snapshot.gaps:
            group = (gap.source, gap.signal, str(gap.reason))
            news = memory.gaps.is_news((*group, gap.pod), snapshot.at)
            if memory.texts.is_news(("gap", *group, _same_text(gap.detail)), snapshot.at) or news:
                new.setdefault(group, []).append(gap)
        for (source, signal, reason), gaps in new.items():
            fields = {"source": source, "signal": signal, "reason": reason, "count": len(gaps)}
            pods = [gap.pod for gap in gaps if gap.pod][:3]
            log.warning("gap", **fields, **_given(pods=pods or None, detail=gaps[0].detail or None))
        memory.texts.ended(snapshot.at, memory.quiet_s)
        ended: Counter[tuple[str, ...]] = Counter(key[:3] for key in memory.gaps.ended(snapshot.at, memory.quiet_s))
        for (source, signal, reason), count in ended.items():
            log.info("gap_ended", source=source, signal=signal, reason=reason, count=count)
