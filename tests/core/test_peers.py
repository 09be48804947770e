"""Rate budgets and stabilization windows hold to what the HorizontalPodAutoscaler decides."""

import json
from pathlib import Path
from typing import Any

import pytest

from autoscaler.core.guards import rate_limit, stabilized
from autoscaler.core.policy import RateBudget, Select

LINES = [json.loads(line) for line in (Path(__file__).parents[1] / "data/vectors/peers.jsonl").read_text().splitlines()]
HPA_UP = [4, 15, 100, 15]
HPA_DOWN = [0, 0, 100, 15]


def _of(kind: str) -> list[Any]:
    return [pytest.param(line, id=line["id"]) for line in LINES if line["k"] == kind]


def _budgets(pods: int, pods_s: float, percent: int, percent_s: float) -> tuple[RateBudget, ...]:
    found = []
    if pods_s:
        found.append(RateBudget(type="Pods", value=pods, period_s=pods_s))
    if percent_s:
        found.append(RateBudget(type="Percent", value=percent, period_s=percent_s))
    return tuple(found)


def _changes(line: dict[str, Any]) -> list[tuple[float, int]]:
    """Spread the earlier changes evenly over the last 120 s."""
    changes = []
    for key, sign in (("upEv", 1), ("dnEv", -1)):
        events = line.get(key, [])
        changes += [(120.0 * (index + 0.5) / len(events), sign * event) for index, event in enumerate(events)]
    return changes


@pytest.mark.parametrize("line", _of("rate"))
def test_rate_budgets(line: dict[str, Any]) -> None:
    current, desired, changes = line["cur"], line["des"], _changes(line)
    select = Select(line.get("sel", "Max"))
    if desired > current:
        ceiling = rate_limit(_budgets(*line.get("up", HPA_UP)), select, current, changes, up=True)
        limited = max(current, min(desired, ceiling))
    else:
        floor = rate_limit(_budgets(*line.get("dn", HPA_DOWN)), select, current, changes, up=False)
        limited = min(current, max(desired, floor))
    assert min(max(limited, line["min"]), line["max"]) == line["want"]


@pytest.mark.parametrize("line", _of("stab"))
def test_stabilization_windows(line: dict[str, Any]) -> None:
    history = [(float(age), value, value) for value, age in line["recs"]]
    found = stabilized(line["cur"], line["des"], line["des"], history, line["upW"], line["dnW"])
    assert found == line["want"]


def test_disabled_budgets_do_not_move() -> None:
    assert rate_limit(_budgets(5, 60, 0, 0), Select.DISABLED, 7, [], up=True) == 7
