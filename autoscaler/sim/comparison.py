"""Several runs side by side: a table for the terminal, and one page with pictures."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoscaler.core.policy import Policy
from autoscaler.sim.fleet import RunSummary
from autoscaler.sim.report import TickRow, action_row, chart_data, fill_page, holds, percent, script, tile
from autoscaler.sim.run import QUANTILES
from autoscaler.sim.scenario import Event
from autoscaler.sim.scored import P99, Mean, Scored, means

MAX_POINTS = 1_500
MAX_ACTIONS = 400
TARGET = 0.99
"""The share that the pictures draw a line at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """One run as the page draws it: plain data and escaped HTML, small enough to come from another process.

    Args:
        chart: what the charts of one run draw.
        actions, holds: rows of the table of actions, and what the other ticks said.
        attained: the share of each bin of the chart; None without requests.
    """

    policy: str
    seed: int
    chart: Mapping[str, Any]
    actions: str
    action_count: int
    holds: str
    attained: tuple[float | None, ...]


def detail(
    policy: str,
    seed: int,
    ticks: Sequence[TickRow],
    rules: Policy,
    summary: RunSummary,
    events: Sequence[Event] = (),
) -> Detail:
    """Return what the page shows of a run.

    Args:
        policy: the name that the run goes by. rules: the policy itself.
    """
    acted = [row for row in ticks if row.acted_to is not None]
    return Detail(
        policy=policy,
        seed=seed,
        chart=chart_data(ticks, rules, summary, events, max_points=MAX_POINTS),
        actions="".join(action_row(row) for row in acted[:MAX_ACTIONS]),
        action_count=len(acted),
        holds=holds(ticks),
        attained=tuple(round(item.attained / item.arrived, 5) if item.arrived else None for item in summary.bins),
    )


# -- the table -------------------------------------------------------------------------------------------------------

Cells = tuple[str, ...]


def table(runs: Sequence[Scored], price: float | None = None) -> tuple[Cells, list[Cells]]:
    """Return the headings, and a row for each policy over its seeds.

    Args:
        price: of a GPU-hour.
    """
    rows = means(runs)
    cheapest = min((mean.gpu_hours for mean in rows), default=0.0)
    headings: Cells = (
        "policy",
        "seeds",
        "attainment",
        "GPU-hours",
        "× cheapest",
        "reversals/h",
        "flaps/h",
        "worst 10 min",
        "TTFT p99",
        "TPOT p99",
        "failed",
    )
    cells = [_cells(mean, cheapest) for mean in rows]
    if price is None:
        return headings, cells
    return (*headings, "cost"), [
        (*row, f"{mean.gpu_hours * price:,.2f}") for row, mean in zip(cells, rows, strict=True)
    ]


def _cells(mean: Mean, cheapest: float) -> Cells:
    share = percent(mean.attainment, 2)
    if mean.seeds > 1:
        share += f" ({percent(mean.lowest, 2).removesuffix(' %')}–{percent(mean.highest, 2).removesuffix(' %')})"
    return (
        mean.policy,
        str(mean.seeds),
        share,
        f"{mean.gpu_hours:,.{1 if mean.gpu_hours >= 10.0 else 2}f}",
        f"{mean.gpu_hours / cheapest:.3f}" if cheapest else "–",
        f"{mean.reversals_per_hour:.2f}",
        f"{mean.flaps_per_hour:.2f}",
        percent(mean.worst, 1),
        _seconds(mean.ttft_s[P99]),
        _seconds(mean.tpot_s[P99]),
        f"{mean.failed:,}",
    )


def _seconds(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.2f} s" if value >= 1.0 else f"{value * 1e3:.0f} ms"


# -- the page --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What a comparison is of, for its head and foot.

    Args:
        title: one line. facts: name and value of what was simulated.
        note: what the page was made by.
        ttft_s, tpot_s: the objectives.
        price: of a GPU-hour; None when nobody said.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    note: str
    ttft_s: float
    tpot_s: float
    price: float | None = None


def write_comparison(path: Path, runs: Sequence[Scored], details: Sequence[Detail], heading: Heading) -> None:
    """Write the runs as one HTML page that needs no network.

    Raises: AutoscalerError without plotly, and when the file cannot be written.
    """
    names, rows = table(runs, heading.price)
    fill_page(
        path,
        "comparison.html",
        {
            "TITLE": html.escape(heading.title),
            "SUBTITLE": html.escape("; ".join(f"{name} {value}" for name, value in heading.facts)),
            "TILES": "".join(tile(*one) for one in _tiles(runs, heading.price)),
            "HEADINGS": "".join(f"<th>{html.escape(name)}</th>" for name in names),
            "ROWS": "".join(_row(row) for row in rows),
            "SEED_ROWS": "".join(_row(_seed_cells(one)) for one in runs),
            "NOTE": html.escape(heading.note),
            "DATA": script(
                {
                    "policies": [_policy_data(mean, runs) for mean in means(runs)],
                    "quantiles": [f"p{100 * quantile:g}" for quantile in QUANTILES],
                    "target": TARGET,
                    "slo": {"ttft": heading.ttft_s, "tpot": heading.tpot_s},
                    "runs": [_run_data(one, runs, heading.price) for one in details],
                }
            ),
        },
    )


def _row(cells: Cells) -> str:
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"


def _seed_cells(one: Scored) -> Cells:
    figures = one.figures
    return (
        one.policy,
        str(one.seed),
        f"{figures.requests:,}",
        percent(one.attainment, 2),
        f"{figures.gpu_hours:,.1f}",
        f"{figures.mean_replicas:.2f}",
        f"{figures.ups} up, {figures.downs} down",
        f"{figures.reversals_per_hour:.2f} ({figures.flaps} flaps)",
        percent(one.worst, 1),
        _failures(one),
    )


def _tiles(runs: Sequence[Scored], price: float | None) -> list[tuple[str, str, str]]:
    """Return name, value and remark of each tile."""
    rows = means(runs)
    best = max(rows, key=lambda mean: mean.attainment)
    good = [mean for mean in rows if mean.attainment >= TARGET]
    tiles = [("Best attainment", percent(best.attainment, 2), f"{best.policy}, {best.gpu_hours:,.1f} GPU-hours")]
    if good:
        cheapest = min(good, key=lambda mean: mean.gpu_hours)
        tiles.append((f"Cheapest at {TARGET:.0%}", f"{cheapest.gpu_hours:,.1f}", f"GPU-hours, {cheapest.policy}"))
        if price is not None:
            tiles.append(("Its cost", f"{cheapest.gpu_hours * price:,.2f}", f"at {price:g} a GPU-hour"))
    else:
        tiles.append((f"Cheapest at {TARGET:.0%}", "none", "no policy reaches it"))
    calmest = min(rows, key=lambda mean: mean.reversals_per_hour)
    tiles.append(("Calmest", f"{calmest.reversals_per_hour:.2f}", f"reversals an hour, {calmest.policy}"))
    failed, asked = sum(mean.failed for mean in rows), sum(mean.requests for mean in rows)
    tiles.append(("Failed requests", f"{failed:,}", f"of {asked:,} in {len(runs)} runs"))
    return tiles


def _known(value: float, digits: int) -> float | None:
    return None if math.isnan(value) else round(value, digits)


def _policy_data(mean: Mean, runs: Sequence[Scored]) -> dict[str, object]:
    own = [one for one in runs if one.policy == mean.policy]
    return {
        "name": html.escape(mean.policy),
        "attainment": round(mean.attainment, 6),
        "gpu_hours": round(mean.gpu_hours, 4),
        "seeds": [
            {"seed": one.seed, "x": round(one.figures.gpu_hours, 4), "y": round(one.attainment, 6)} for one in own
        ],
        "ttft": [_known(value, 4) for value in mean.ttft_s],
        "tpot": [_known(value, 5) for value in mean.tpot_s],
    }


def _facts(one: Scored, price: float | None) -> str:
    """Return a run in a line."""
    figures = one.figures
    words = [
        f"{percent(one.attainment, 2)} of {figures.requests:,} requests within the objectives",
        f"worst ten minutes {percent(one.worst, 1)}",
        f"failed: {_failures(one)}",
        f"{figures.gpu_hours:,.1f} GPU-hours, {figures.mean_replicas:.2f} replicas on average",
    ]
    if price is not None:
        words.append(f"cost {figures.gpu_hours * price:,.2f}")
    return "; ".join(words)


def _failures(one: Scored) -> str:
    counts = (f"{count:,} {name.replace('_', ' ')}" for name, count in one.figures.fates.items() if count)
    return ", ".join(counts) or "none"


def _run_data(one: Detail, runs: Sequence[Scored], price: float | None) -> dict[str, object]:
    left_out = f" (the first {MAX_ACTIONS})" if one.action_count > MAX_ACTIONS else ""
    return {
        "policy": html.escape(one.policy),
        "seed": one.seed,
        "facts": "".join(
            html.escape(_facts(run, price)) for run in runs if (run.policy, run.seed) == (one.policy, one.seed)
        ),
        "chart": dict(one.chart),
        "actions": one.actions,
        "action_count": f"{one.action_count}{left_out}",
        "holds": one.holds,
        "attained": list(one.attained),
    }
