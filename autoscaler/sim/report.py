"""One page that shows a run: what was needed, what was there, what was decided and why, and how the requests fared."""

import html
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Self

import numpy as np

from autoscaler.core.policy import Policy
from autoscaler.core.signals import COLUMN
from autoscaler.core.types import Decision, Engines, Outcome, ScaleReplicas, Snapshot
from autoscaler.errors import AutoscalerError
from autoscaler.sim.fleet import HOUR, RunSummary
from autoscaler.sim.scenario import Event

MAX_POINTS = 6_000
_LINE = 74


@dataclass(frozen=True, slots=True, kw_only=True)
class TickRow:
    """One tick, flattened for charts and tables. None is unknown.

    Args:
        at: epoch seconds.
        ordered, ready: replicas.
        demand, forecast: replicas needed now, and expected at the horizon.
        score, memory, backlog, latency: in [0, 1].
        waiting: requests in the engines' queues. kv_usage: share of the fleet's KV cache.
        acted_to: the replicas that were ordered; None for a hold.
        outcome: what became of it.
        reason: the decision's one reason.
        why: what was seen, in a line.
        steps: the rules that shaped it, in order.
    """

    at: float
    ordered: int
    ready: int
    demand: float | None
    forecast: float | None
    score: float | None
    memory: float | None
    backlog: float | None
    latency: float | None
    waiting: float | None
    kv_usage: float | None
    acted_to: int | None
    outcome: str
    reason: str
    why: str
    steps: tuple[str, ...]

    @classmethod
    def of(cls, snapshot: Snapshot, decision: Decision, outcome: Outcome) -> Self:
        """Return the row of a tick."""
        action = decision.action
        parts = {part.name: part.value for part in decision.score.parts} if decision.score is not None else {}
        waiting, kv_usage = _load(snapshot.engines)
        return cls(
            at=snapshot.at,
            ordered=snapshot.target.current_replicas,
            ready=snapshot.target.ready_replicas,
            demand=decision.demand.value,
            forecast=decision.forecast.top,
            score=decision.score.value if decision.score is not None else None,
            memory=parts.get("memory"),
            backlog=parts.get("backlog"),
            latency=parts.get("latency"),
            waiting=waiting,
            kv_usage=kv_usage,
            acted_to=action.to if isinstance(action, ScaleReplicas) else None,
            outcome=str(outcome),
            reason=str(decision.reason),
            why=why(decision),
            steps=tuple(
                f"{step.rule} {step.before} → {step.after}" + (f" ({step.detail})" if step.detail else "")
                for step in decision.proposal.steps
            ),
        )

    @property
    def acted(self) -> bool:
        """Whether replicas were moved, or would have been in a dry run."""
        return self.acted_to is not None and self.outcome in (Outcome.APPLIED, Outcome.SIMULATED)


def _load(engines: Engines) -> tuple[float | None, float | None]:
    """Return the waiting requests, and the KV usage weighted by capacity; None where no engine says."""
    waiting = engines.values[:, COLUMN["num_requests_waiting"]]
    usage = engines.values[:, COLUMN["kv_cache_usage"]]
    capacity = engines.values[:, COLUMN["kv_capacity_tokens"]]
    known = ~np.isnan(usage) & ~np.isnan(capacity)
    total = float(capacity[known].sum())
    return (
        float(np.nansum(waiting)) if np.any(~np.isnan(waiting)) else None,
        float((usage[known] * capacity[known]).sum()) / total if total > 0.0 else None,
    )


def why(decision: Decision) -> str:
    """Return what a decision saw, in a line: demand, forecast, and the score's parts with what drives them."""
    demand, forecast, score = decision.demand, decision.forecast, decision.score
    words = []
    if demand.value is not None:
        words.append(f"demand {demand.value:.2f} replicas ({demand.binds})")
    if forecast.top is not None and forecast.up is not None and forecast.keep is not None:
        wish = f"wants {forecast.up}, keeps {forecast.keep}"
        words.append(f"forecast {forecast.top:.2f} in {forecast.horizon_s:.0f} s: {wish}")
    if score is not None and score.value is not None:
        parts = (f"{part.name} {part.value:.2f} ({part.driver})" for part in score.parts if part.value is not None)
        words.append(f"score {score.value:.2f}: {', '.join(parts)}")
    return "; ".join(words) or "nothing was known"


class TickCollector:
    """`ports.Report` that keeps a row of every tick."""

    def __init__(self) -> None:
        self.rows: list[TickRow] = []

    def tick(self, policy: str, snapshot: Snapshot, decision: Decision, outcome: Outcome, duration_s: float) -> None:
        """Keep one tick."""
        self.rows.append(TickRow.of(snapshot, decision, outcome))


def write_report(
    path: Path,
    ticks: Sequence[TickRow],
    *,
    title: str,
    policy: Policy,
    summary: RunSummary,
    events: Sequence[Event] = (),
    note: str = "",
) -> None:
    """Write the run as one HTML page that needs no network.

    Args:
        note: what the page was made from, for its foot.
    Raises: AutoscalerError without plotly, and when the file cannot be written.
    """
    fill_page(
        path,
        "report.html",
        {
            "TITLE": html.escape(title),
            "SUBTITLE": html.escape(_subtitle(ticks, policy, summary)),
            "TILES": "".join(tile(*one) for one in _tiles(ticks, summary)),
            "ACTIONS": "".join(action_row(row) for row in ticks if row.acted_to is not None),
            "ACTION_COUNT": str(sum(row.acted_to is not None for row in ticks)),
            "HOLDS": holds(ticks),
            "NOTE": html.escape(note),
            "DATA": script(chart_data(ticks, policy, summary, events)),
        },
    )


def fill_page(path: Path, template: str, filled: Mapping[str, str]) -> None:
    """Write a page of this folder with its placeholders filled, its style and scripts inside it.

    Raises: AutoscalerError without plotly, and when the file cannot be written.
    """
    try:  # an extra, and needed here only
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise AutoscalerError("the report needs plotly: pip install 'vllm-autoscaler[report]'") from error
    parts = {"STYLE": _part("report.css"), "CHARTS": _part("charts.js"), **filled, "PLOTLY": str(get_plotlyjs())}
    page = _part(template)
    for name, text in parts.items():
        page = page.replace(f"<!--{name}-->", text)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise AutoscalerError(f"cannot write {path}: {error.strerror}") from error


def _part(name: str) -> str:
    return resources.files("autoscaler.sim").joinpath(name).read_text(encoding="utf-8")


# -- what the charts show --------------------------------------------------------------------------------------------


def chart_data(
    ticks: Sequence[TickRow],
    policy: Policy,
    summary: RunSummary,
    events: Sequence[Event],
    *,
    max_points: int = MAX_POINTS,
) -> dict[str, object]:
    """Return all that the charts draw, as plain data; times in milliseconds, as Plotly wants them."""
    last, most = _last, _most
    columns: tuple[tuple[str, Callable[[list[float | None]], float | None], int], ...] = (
        ("ordered", last, 0),
        ("ready", last, 0),
        ("demand", last, 2),
        ("forecast", last, 2),
        ("score", most, 3),
        ("memory", most, 3),
        ("backlog", most, 3),
        ("latency", most, 3),
        ("waiting", most, 0),
        ("kv_usage", most, 3),
    )
    size = max(1, math.ceil(len(ticks) / max_points))
    groups = [ticks[start : start + size] for start in range(0, len(ticks), size)]
    return {
        "span": [_ms(summary.started_at), _ms(summary.started_at + summary.duration_s)],
        "at": [_ms(group[-1].at) for group in groups],
        **{
            name: [_rounded(choose([getattr(row, name) for row in group]), digits) for group in groups]
            for name, choose, digits in columns
        },
        "traffic": {
            "at": [_ms(summary.started_at + summary.traffic_span_s * span) for span in range(len(summary.traffic))],
            "rate": [_rounded(rate, 2) for rate in summary.traffic],
        },
        "bins": _bins(summary),
        "bin": _bin_words(summary),
        "actions": [_marker(row) for row in ticks if row.acted],
        "events": [{"at": _ms(event.at), "text": html.escape(event.text)} for event in events],
        "thresholds": {
            "up": policy.scale_up.threshold,
            "down": policy.scale_down.threshold,
            "critical": policy.score.critical if policy.score.critical <= 1.0 else None,
        },
        "slo": {
            "ttft": policy.slo.ttft.seconds if policy.slo.ttft is not None else None,
            "itl": policy.slo.itl.seconds if policy.slo.itl is not None else None,
        },
        "max": policy.most_replicas,
    }


def _last(values: list[float | None]) -> float | None:
    return values[-1]


def _most(values: list[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _ms(at: float) -> int:
    return round(at * 1000.0)


def _bins(summary: RunSummary) -> dict[str, object]:
    bins = summary.bins
    return {
        "at": [_ms(summary.started_at + (item.start + item.end) / 2.0) for item in bins],
        "width": [_ms(item.end - item.start) for item in bins],
        "ttft": [_rounded(item.ttft_p99, 3) for item in bins],
        "itl": [_rounded(item.itl_p99, 4) for item in bins],
        "attained": [
            f"{item.attained / item.arrived:.2%} of {item.arrived:,} in time" if item.arrived else "no requests"
            for item in bins
        ],
    }


def _bin_words(summary: RunSummary) -> str:
    """Return how long a bin of the exact latencies is."""
    return in_words(summary.bins[0].end - summary.bins[0].start) if summary.bins else ""


def _marker(row: TickRow) -> dict[str, object]:
    lines = [
        f"<b>{_clock(row.at)}: {row.ordered} → {row.acted_to}, {html.escape(row.reason)}</b>",
        *_wrapped(row.why.split("; ")),
    ]
    if row.steps:
        lines += ["<i>steps</i>", *_wrapped(row.steps)]
    return {"at": _ms(row.at), "to": row.acted_to, "up": (row.acted_to or 0) > row.ordered, "text": "<br>".join(lines)}


def _wrapped(lines: Iterable[str]) -> Iterable[str]:
    """Yield the lines, escaped and broken where a hover box would grow too wide."""
    for line in lines:
        words, current = line.split(" "), ""
        for word in words:
            if current and len(current) + len(word) >= _LINE:
                yield html.escape(current)
                current = "   " + word
            else:
                current = f"{current} {word}" if current else word
        yield html.escape(current)


def script(data: dict[str, object]) -> str:
    """Return the data as JSON that cannot end its own script element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


# -- what people read ------------------------------------------------------------------------------------------------


def _clock(at: float, form: str = "%H:%M:%S") -> str:
    return datetime.fromtimestamp(at, UTC).strftime(form)


def _subtitle(ticks: Sequence[TickRow], policy: Policy, summary: RunSummary) -> str:
    return (
        f"{policy.target.namespace}/{policy.target.deployment} by policy {policy.name}, "
        f"{policy.replicas.min} to {policy.replicas.max} replicas; {in_words(summary.duration_s)} from "
        f"{_clock(summary.started_at, '%A %d %B %Y %H:%M')} UTC in {len(ticks):,} ticks of {policy.interval_s:g} s"
    )


def in_words(seconds: float) -> str:
    """Return a length of time: in hours from two hours on, in minutes from two minutes on, below in seconds."""
    for unit, name in ((HOUR, "hours"), (60.0, "minutes")):
        if seconds >= 2.0 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} seconds"


def reversals(ticks: Sequence[TickRow]) -> int:
    """Return how often an action went against the direction of the one before it."""
    directions = [(row.acted_to or 0) > row.ordered for row in ticks if row.acted]
    return sum(before != after for before, after in itertools.pairwise(directions))


def _tiles(ticks: Sequence[TickRow], summary: RunSummary) -> Iterable[tuple[str, str, str]]:
    """Yield name, value and remark of each tile."""
    hours = summary.duration_s / HOUR
    objectives = f"{summary.ttft_s:g} s to the first token, then {summary.tpot_s * 1e3:g} ms a token"
    yield "Attainment", percent(summary.attainment, 2), f"of {summary.requests:,} requests: {objectives}"
    static = summary.static_gpu_hours
    change = f"{(summary.gpu_hours / static - 1.0) * 100.0:+.0f} %".replace("-", "−") if static else "–"
    peak = f"against {_hours(static, 0)} for a static fleet of the peak's {summary.peak_replicas} replicas"
    yield "GPU-hours", _hours(summary.gpu_hours, 1), f"{change} {peak}"
    acted = [row for row in ticks if row.acted]
    up = sum((row.acted_to or 0) > row.ordered for row in acted)
    yield "Actions", str(len(acted)), f"{up} up, {len(acted) - up} down"
    if hours >= 1.0:
        yield "Reversals per hour", f"{reversals(ticks) / hours:.2f}", "changes of direction"
    else:
        yield "Reversals", str(reversals(ticks)), "changes of direction"
    yield "Failed requests", f"{summary.failed:,}", "no first token in time, refused, or cut off in a drain"
    worst = min((item for item in summary.bins if item.arrived), key=lambda b: b.attained / b.arrived, default=None)
    if worst is not None:
        form = "%H:%M" if worst.end - worst.start >= 60.0 else "%H:%M:%S"
        share = percent(worst.attained / worst.arrived, 1)
        yield f"Worst {_bin_words(summary)}", share, f"in time, from {_clock(summary.started_at + worst.start, form)}"


def _hours(value: float, digits: int) -> str:
    """Return GPU-hours; few of them with two digits."""
    return f"{value:,.{digits if value >= 10.0 else 2}f}"


def percent(share: float | None, digits: int) -> str:
    """Return the share in percent, rounded down: 99.996 % is not 100 %."""
    if share is None:
        return "–"
    scale = 10.0**digits
    return f"{math.floor(share * 100.0 * scale + 1e-9) / scale:.{digits}f} %"


def tile(name: str, value: str, remark: str) -> str:
    return (
        f'<div class="tile"><div class="name">{html.escape(name)}</div>'
        f'<div class="value">{html.escape(value)}</div><div class="remark">{html.escape(remark)}</div></div>'
    )


def action_row(row: TickRow) -> str:
    direction = "up" if (row.acted_to or 0) > row.ordered else "down"
    steps = "".join(f"<li>{html.escape(step)}</li>" for step in row.steps)
    why_text = "".join(f"<li>{html.escape(part)}</li>" for part in row.why.split("; "))
    outcome = "" if row.outcome == Outcome.APPLIED else f' <span class="outcome">{html.escape(row.outcome)}</span>'
    return (
        f'<tr data-at="{_ms(row.at)}"><td class="time">{_clock(row.at)}</td>'
        f'<td class="{direction}">{row.ordered} → {row.acted_to}</td>'
        f"<td><code>{html.escape(row.reason)}</code>{outcome}</td>"
        f"<td><ul>{why_text}</ul></td><td><ul>{steps}</ul></td></tr>"
    )


def holds(ticks: Sequence[TickRow]) -> str:
    """Return what the ticks without an action said, the most frequent first."""
    counts = Counter(row.reason for row in ticks if row.acted_to is None)
    total = max(1, len(ticks))
    return "".join(
        f'<li style="--share:{count / total:.4f}"><code>{html.escape(reason)}</code>'
        f"<span>{count:,} ticks, {count / total:.1%}</span></li>"
        for reason, count in counts.most_common()
    )
