"""Every rival decides as the project it stands for says of itself, on that project's own cases."""

import json
import math
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from autoscaler.core.policy import RateBudget, Select
from bench.rivals import ratios
from bench.rivals.base import Bounds
from bench.rivals.behavior import Behavior, Hpa, Rules, combined, percent, pods
from bench.rivals.keda import Activation, Fallback, KedaSettings, ScalerError, Trigger, prometheus_value
from bench.rivals.kpa import Decider, KpaSettings, Panic, Phase, to_zero
from bench.rivals.phpa import decided
from bench.rivals.predictors import linear
from bench.rivals.ratios import Usage
from bench.rivals.view import Page, Pod, PodState, Signal, View

Line = dict[str, Any]
LINES: list[Line] = [
    json.loads(line) for line in (Path(__file__).parents[1] / "data/vectors/peers.jsonl").read_text().splitlines()
]
STATES = {
    "R": PodState.READY,
    "U": PodState.UNREADY,
    "P": PodState.PENDING,
    "F": PodState.FAILED,
    "D": PodState.DELETING,
    "M": PodState.READY,
}
SAMPLED = "RU"


def _of(*kinds: str) -> list[Any]:
    return [pytest.param(line, id=line["id"]) for line in LINES if line["k"] in kinds]


def test_no_kind_is_left_out() -> None:
    held = "avg kedaexec kedafb kpa kpa0 lin note phpa plain prom rate stab util value"
    assert sorted({line["k"] for line in LINES}) == held.split()


def _usages(line: Line) -> list[Usage]:
    """Return the pods: the samples belong to those that run, in order, and to none that is marked as missing."""
    samples = iter(line["u"])
    requests = cycle(line["r"] if isinstance(line.get("r"), list) else [line.get("r", 1)])
    return [
        Usage(
            state=STATES[letter],
            value=float(next(samples)) if letter in SAMPLED else None,
            request=float(next(requests)),
        )
        for letter in line["s"]
    ]


# -- HorizontalPodAutoscaler -------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", _of("util"))
def test_utilization(line: Line) -> None:
    assert ratios.utilization(line["cur"], _usages(line), line["t"] / 100.0) == line["want"]


@pytest.mark.parametrize("line", _of("plain"))
def test_plain_metric_of_pods(line: Line) -> None:
    assert ratios.plain(line["cur"], _usages(line), float(line["t"])) == line["want"]


@pytest.mark.parametrize("line", _of("value"))
def test_value(line: Line) -> None:
    assert ratios.value(line["cur"], line["ready"], line["v"], line["t"]) == line["want"]


@pytest.mark.parametrize("line", _of("avg"))
def test_average_value(line: Line) -> None:
    assert ratios.average(line["cur"], line["v"], line["t"]) == line["want"]


def _rules(values: Sequence[int], select: Select) -> Rules:
    count, count_s, share, share_s = values
    budgets: list[RateBudget] = [pods(count, count_s)] if count_s else []
    budgets += [percent(share, share_s)] if share_s else []
    return Rules(budgets=tuple(budgets), select=select)


def _changes(line: Line) -> list[tuple[float, int]]:
    """Spread the earlier changes evenly over the 120 s before 0."""
    found = []
    for key, sign in (("upEv", 1), ("dnEv", -1)):
        events = line.get(key, [])
        found += [(-120.0 * (index + 0.5) / len(events), sign * event) for index, event in enumerate(events)]
    return sorted(found)


@pytest.mark.parametrize("line", _of("rate"))
def test_rate_budgets(line: Line) -> None:
    select = Select(line.get("sel", "Max"))
    behavior = Behavior(
        up=_rules(line.get("up", [4, 15, 100, 15]), select), down=_rules(line.get("dn", [0, 0, 100, 15]), select)
    )
    hpa = Hpa(Bounds(min=line["min"], max=line["max"]), behavior, changes=_changes(line))
    assert hpa.settle(0.0, line["cur"], [line["des"]]) == line["want"]


@pytest.mark.parametrize("line", _of("stab"))
def test_stabilization_windows(line: Line) -> None:
    behavior = Behavior(up=Rules(window_s=line["upW"]), down=Rules(window_s=line["dnW"]))
    hpa = Hpa(Bounds(max=1000), behavior, wishes=sorted((-float(age), wish) for wish, age in line["recs"]))
    assert hpa.settle(0.0, line["cur"], [line["des"]]) == line["want"]


# -- Knative -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", _of("kpa"))
def test_windows_and_panic(line: Line) -> None:
    settings = KpaSettings(
        capacity=line["t"],
        share=1.0,
        max_up=line.get("msu", 10.0),
        max_down=line.get("msd", 10.0),
        activation=line.get("act", 1),
        reachable=line.get("reach", True),
    )
    panic = Panic(line["panicAt"], line["maxP"]) if "panicAt" in line else None
    decider = Decider(settings, panic)
    assert [decider.scale(now, stable, short, ready) for now, stable, short, ready in line["seq"]] == line["want"]


@pytest.mark.parametrize("line", _of("kpa0"))
def test_to_zero(line: Line) -> None:
    settings = KpaSettings(stable_s=300.0, grace_s=60.0, start_s=151.0, retention_s=line.get("ret", 0.0))
    verdict = to_zero(
        settings, line["cur"], line["des"], Phase(line["st"]), line["for"], probed=line.get("probe", True)
    )
    assert list(verdict) == line["want"]


# -- KEDA --------------------------------------------------------------------------------------------------------


def _or_error(compute: Callable[[], float]) -> float | str:
    try:
        return compute()
    except ScalerError:
        return "error"


@pytest.mark.parametrize("line", _of("kedafb"))
def test_fallback(line: Line) -> None:
    fallback = Fallback(threshold=line["thr"], replicas=line["n"], behavior=line.get("b", "static"))
    assert _or_error(lambda: fallback.value(line["fails"], line.get("cur", 1), line["target"])) == line["want"]


@pytest.mark.parametrize("line", _of("kedaexec"))
def test_executor(line: Line) -> None:
    activation = Activation(
        minimum=line.get("min", 0),
        idle=line.get("idle"),
        paused_in=line.get("pauseIn", False),
        forced=line.get("force", False),
    )
    found = activation.replicas(line["cur"], active=line.get("active", False), failed=line.get("err", False))
    assert found == line["want"]


ANSWERS: dict[str, list[float]] = {"empty": [], "NaN": [float("nan")], "+Inf": [float("inf")], "multi": [1.0, 2.0]}


# A failed request never comes to an answer, so the line `http-400` has nothing here to be held to.
@pytest.mark.parametrize("line", [line for line in _of("prom") if line.values[0]["v"] in ANSWERS])
def test_prometheus_answers(line: Line) -> None:
    found = _or_error(lambda: prometheus_value(ANSWERS[line["v"]], ignore_null=line["ign"]))
    assert found == line["want"]


# -- predictive HPA ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", _of("phpa"))
def test_decision_types(line: Line) -> None:
    assert decided(line["v"], line["d"]) == line["want"]


@pytest.mark.parametrize("line", _of("lin"))
def test_linear_model(line: Line) -> None:
    assert math.ceil(linear(line["pts"], line["at"])) == line["want"]


# -- facts about whole controllers -------------------------------------------------------------------------------
# `two-HPAs-same-pods` is left out: a rival is alone with its target.


def _note(name: str) -> Line:
    return next(line for line in LINES if line["id"] == name)


def test_one_of_two_metrics_fails() -> None:
    down, up = _note("1-of-2-metrics-errors")["cases"]
    assert combined(down["cur"], [None, down["cur"] - 2]) is None
    assert Hpa(Bounds(), Behavior()).settle(0.0, down["cur"], [None, 3]) == down["want"]
    assert Hpa(Bounds(), Behavior()).settle(0.0, up["cur"], [None, 4]) == up["want"]


@pytest.mark.parametrize("case", [pytest.param(case, id=str(case)) for case in _note("bounds")["cases"]])
def test_bounds(case: Line) -> None:
    now = Behavior(down=Rules())
    hpa = Hpa(Bounds(min=case.get("min", 1), max=case.get("max", 100)), now)
    wish = ratios.average(case["cur"], case.get("v", 30.0), 10.0)
    assert hpa.settle(0.0, case["cur"], [wish]) == case["want"]


def test_first_sync_after_a_restart_holds() -> None:
    line = _note("first-sync-after-restart")
    assert Hpa(Bounds(), Behavior()).settle(0.0, line["cur"], [line["raw"]]) == line["want"]


def test_metric_type_compounds() -> None:
    line = _note("metricType-compounds")
    pages = tuple(Pod(name=str(index), page=Page(waiting=line["metric"])) for index in range(1))
    average = Trigger(signal=Signal.WAITING, threshold=line["target"])
    assert average.wish(View(ordered=1, pods=pages), line["metric"], 0.1) == line["AverageValue"]
    value = Trigger(signal=Signal.WAITING, threshold=line["target"], kind="Value")
    counts, bounds = [2], Bounds(max=10)
    for _ in range(3):
        ready = tuple(Pod(name=str(index)) for index in range(counts[-1]))
        counts.append(bounds.clip(value.wish(View(ordered=counts[-1], pods=ready), line["metric"], 0.1)))
    assert counts == [2, 8, 10, 10]


def test_keda_through_the_rival_reads_an_outage_as_zero_unless_told_otherwise() -> None:
    blind = View(ordered=6, pods=tuple(Pod(name=str(index)) for index in range(6)))
    strict = KedaSettings(ignore_null=False).build()
    assert [strict.desired(now, blind) for now in (0.0, 400.0, 800.0)] == [6, 6, 6]
    caught = KedaSettings(ignore_null=False, fallback=Fallback(threshold=3, replicas=8)).build()
    assert [caught.desired(now, blind) for now in (0.0, 15.0, 30.0, 45.0)] == [6, 6, 6, 8]
    loose = KedaSettings().build()
    assert [loose.desired(now, blind) for now in (0.0, 290.0, 310.0)] == [6, 6, 1]
