"""Which pods a shrink takes: the fewest deletion costs that make a ReplicaSet take those with the least to lose.

What a real ReplicaSet takes is asked in `tests/cluster/test_gentle.py`; here its documented order decides.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.core.policy import ScaleDown, Victims, complaints
from autoscaler.core.signals import COLUMN, ENGINE_COLUMNS
from autoscaler.core.state import NO_ENGINES
from autoscaler.core.types import (
    DeletionCost,
    EngineKey,
    Engines,
    Pod,
    PodPhase,
    ScaleReplicas,
    Snapshot,
    TargetStatus,
)
from autoscaler.core.victims import FIRST, Load, Standing, deletion_costs, pod_loads, standing
from tests.core.world import P0, START, World, pod

EMPTIEST = replace(P0, scale_down=replace(P0.scale_down, victims=Victims(order="emptiest")))
INT32 = range(-(2**31), 2**31)


@dataclass(frozen=True, kw_only=True)
class One:
    """One pod and its engines. `running` of None: its page says nothing of it; no `engines`: no page.

    Args:
        loaded_s: from created to ready. served_s: from ready to now.
        cached: prompt tokens that the prefix cache supplied in the engine's 1000 s.
        age_s: of the page.
    """

    running: float | None = 0.0
    waiting: float | None = 0.0
    cached: float | None = 0.0
    age_s: float = 1.0
    engines: int = 1
    cost: int | None = None
    loaded_s: float = 100.0
    served_s: float | None = 3600.0
    fields: Mapping[str, Any] | None = None

    def pod(self, name: str) -> Pod:
        """Return the pod."""
        ready_at = None if self.served_s is None else START - self.served_s
        created_at = START - 7200.0 if ready_at is None else ready_at - self.loaded_s
        return pod(name, created_at=created_at, ready_at=ready_at, deletion_cost=self.cost, **(self.fields or {}))

    def row(self) -> list[float]:
        """Return one engine's reading, in the order of `ENGINE_COLUMNS`."""
        row = [0.0] * len(ENGINE_COLUMNS)
        said = {"num_requests_running": self.running, "num_requests_waiting": self.waiting}
        said["cached_prompt_tokens"] = self.cached
        read_at = START - self.age_s
        for name, value in {**said, "read_at": read_at, "started_at": read_at - 1000.0}.items():
            row[COLUMN[name]] = math.nan if value is None else value
        return row


def snapshot_of(pods: Mapping[str, One], replicas: int | None = None) -> Snapshot:
    """Return a snapshot of these pods, by name."""
    rows = sorted(
        (EngineKey(f"uid-{name}", str(rank)), one.row()) for name, one in pods.items() for rank in range(one.engines)
    )
    keys = tuple(key for key, _ in rows)
    engines = Engines(keys=keys, values=np.array([row for _, row in rows])) if rows else NO_ENGINES
    target = TargetStatus(
        namespace="serving",
        name="chat-a",
        current_replicas=len(pods) if replicas is None else replicas,
        pods=tuple(one.pod(name) for name, one in pods.items()),
    )
    return Snapshot(at=START, target=target, engines=engines)


def costs_of(pods: Mapping[str, One], to: int, **more: Any) -> dict[str, int | None]:
    """Return the costs to change, by pod."""
    found = deletion_costs(EMPTIEST, snapshot_of(pods, more.get("replicas")), to, more.get("starts", ()))
    assert len({cost.pod for cost in found}) == len(found)
    return {cost.pod: cost.cost for cost in found}


def test_c112_the_idle_pod_costs_least_and_the_others_stay_as_they_are() -> None:
    pods = {"a": One(running=0.0), "b": One(running=5.0), "c": One(running=9.0)}
    (only,) = deletion_costs(EMPTIEST, snapshot_of(pods), 2, ())
    assert only == DeletionCost(pod="a", uid="uid-a", cost=FIRST, requests=0.0)
    a, b, c = FIRST, 0, 0  # no annotation counts as 0
    assert a < b <= c


WORK = {"a": One(running=3.0, waiting=1.0), "b": One(running=2.0), "c": One(running=9.0), "d": One(waiting=3.0)}


@pytest.mark.parametrize(
    ("pods", "to", "costs"),
    [
        pytest.param(WORK, 3, {"b": FIRST}, id="running and waiting together"),
        pytest.param(WORK, 2, {"b": FIRST, "d": FIRST}, id="two"),
        pytest.param(WORK, 1, {"b": FIRST, "d": FIRST, "a": FIRST}, id="all but one"),
        pytest.param(WORK, 0, {}, id="all go"),
        pytest.param(WORK, 4, {}, id="as many"),
        pytest.param(WORK, 6, {}, id="growth"),
        pytest.param({}, 1, {}, id="no pod"),
        pytest.param({"a": One(running=1), "b": One(), "c": One(running=1)}, 1, {"b": FIRST}, id="the rest is alike"),
        pytest.param({"a": One(), "b": One(), "c": One()}, 1, {}, id="all alike"),
        pytest.param({"a": One(), "b": One(running=1), "c": One()}, 2, {"a": FIRST}, id="one of two that are alike"),
        pytest.param({"a": One(cached=8000), "b": One(cached=10), "c": One(cached=900)}, 2, {"b": FIRST}, id="prefix"),
        pytest.param({"a": One(cached=10, running=1), "b": One(cached=900)}, 1, {"b": FIRST}, id="work before prefix"),
        pytest.param({"a": One(cached=None), "b": One(cached=900)}, 1, {"b": FIRST}, id="unknown prefix"),
        pytest.param({"a": One(running=1, engines=2), "b": One(engines=2)}, 1, {"b": FIRST}, id="ranks"),
    ],
)
def test_the_least_to_lose_goes_first(pods: Mapping[str, One], to: int, costs: dict[str, int | None]) -> None:
    assert costs_of(pods, to) == costs


@pytest.mark.parametrize(
    ("pods", "costs"),
    [
        pytest.param({"a": One(cost=-1), "b": One(running=5)}, {}, id="fits already"),
        pytest.param({"a": One(cost=-9), "b": One(running=5)}, {}, id="fits already, somebody else's"),
        pytest.param({"a": One(), "b": One(running=5, cost=7)}, {}, id="the other is protected"),
        pytest.param({"a": One(), "b": One(), "c": One(cost=7)}, {}, id="either goes before the protected one"),
        pytest.param({"a": One(cost=0), "b": One(running=5, cost=0)}, {"a": FIRST}, id="zeros"),
        pytest.param({"a": One(), "b": One(running=5, cost=-1)}, {"a": FIRST, "b": None}, id="left over"),
        pytest.param({"a": One(), "b": One(cost=-1)}, {}, id="left over on one that is alike"),
        pytest.param({"a": One(cost=5), "b": One(running=5)}, {}, id="protected stays"),
        pytest.param({"a": One(cost=5), "b": One(running=5, cost=5)}, {"a": FIRST}, id="protected alike"),
        pytest.param({"a": One(cost=5), "b": One(running=5, cost=10)}, {}, id="protected less"),
        pytest.param({"a": One(cost=2**31 - 1), "b": One(running=5, cost=-(2**31))}, {}, id="the edges of int32"),
    ],
)
def test_costs_that_are_there(pods: Mapping[str, One], costs: dict[str, int | None]) -> None:
    assert costs_of(pods, len(pods) - 1) == costs


UNKNOWN = {"a": One(running=5.0), "c": One(running=9.0)}


@pytest.mark.parametrize(
    "unknown",
    [
        pytest.param(One(engines=0), id="no page"),
        pytest.param(One(running=None), id="running is missing"),
        pytest.param(One(waiting=None), id="waiting is missing"),
        pytest.param(One(age_s=60.0), id="an old page"),
    ],
)
def test_c112_unknown_is_not_idle(unknown: One) -> None:
    assert costs_of({**UNKNOWN, "b": unknown}, 2) == {"a": FIRST}
    assert costs_of({**UNKNOWN, "b": replace(unknown, cost=-1)}, 2) == {"a": FIRST, "b": None}
    assert costs_of({"a": unknown, "b": unknown, "c": unknown}, 1) == {}
    assert costs_of({"a": unknown, "b": replace(unknown, cost=-1)}, 1) == {"b": None}
    assert costs_of({"a": One(running=5.0), "b": unknown, "c": unknown}, 1) == {"a": FIRST}


def test_a_pod_that_shows_fewer_engines_than_another_is_unknown() -> None:
    assert costs_of({"a": One(engines=1), "b": One(running=5, engines=2)}, 1) == {"b": FIRST}


def test_without_engines_to_read_nobody_is_marked() -> None:
    blind = replace(EMPTIEST, signals=replace(EMPTIEST.signals, vllm=None))
    pods = {"a": One(cost=-1), "b": One(running=5)}
    assert deletion_costs(blind, snapshot_of(pods), 1, ()) == (DeletionCost(pod="a", uid="uid-a", cost=None),)


YOUNG = One(loaded_s=300.0, served_s=200.0)
OLDER = One(loaded_s=300.0, served_s=301.0)
AGELESS = One(served_s=None)


@pytest.mark.parametrize(
    ("pods", "costs"),
    [
        pytest.param({"a": YOUNG, "b": One(), "c": One(running=5)}, {"b": FIRST}, id="an older one is idle"),
        pytest.param({"a": YOUNG, "b": One(cached=900), "c": One(running=5)}, {"b": FIRST}, id="whatever its prefix"),
        pytest.param({"a": YOUNG, "b": One(running=5), "c": One(running=5)}, {"a": FIRST}, id="no older one is idle"),
        pytest.param({"a": OLDER, "b": One(cached=9), "c": One(cached=9)}, {"a": FIRST}, id="no longer young"),
        pytest.param({"a": AGELESS, "b": One(cached=9), "c": One(running=5)}, {"b": FIRST}, id="unknown age"),
    ],
)
def test_c112_a_young_pod_is_spared_while_an_older_one_is_idle(
    pods: Mapping[str, One], costs: dict[str, int | None]
) -> None:
    assert costs_of(pods, 2) == costs


def test_a_pod_that_lost_readiness_did_not_load_for_hours() -> None:
    pods = {"a": One(loaded_s=36_000.0, served_s=700.0), "b": One(cached=900)}
    assert costs_of(pods, 1) == {"a": FIRST}
    assert costs_of(pods, 1, starts=(90.0, 800.0)) == {"b": FIRST}


NOT_SERVING: dict[str, dict[str, Any]] = {
    "loading": {"ready": False},
    "pending": {"ready": False, "phase": PodPhase.PENDING},
}
GONE: dict[str, dict[str, Any]] = {
    "terminating": {"terminating": True},
    "failed": {"ready": False, "phase": PodPhase.FAILED},
}


@pytest.mark.parametrize("fields", NOT_SERVING.values(), ids=NOT_SERVING)
def test_what_kubernetes_takes_first_anyway_needs_no_cost_and_leaves_less_to_mark(fields: dict[str, Any]) -> None:
    pods = {"a": One(), "b": One(running=5), "c": One(engines=0, fields=fields)}
    assert costs_of(pods, 2) == {}
    assert costs_of(pods, 1) == {"a": FIRST}


@pytest.mark.parametrize("fields", GONE.values(), ids=GONE)
def test_what_is_gone_does_not_count(fields: dict[str, Any]) -> None:
    pods = {"a": One(), "b": One(running=5), "c": One(fields=fields)}
    assert costs_of(pods, 1, replicas=2) == {"a": FIRST}


def test_where_the_cluster_chooses_nothing_is_written() -> None:
    assert deletion_costs(P0, snapshot_of(WORK), 1, ()) == ()


def test_pods_in_groups_cannot_be_chosen() -> None:
    groups = replace(EMPTIEST, target=replace(EMPTIEST.target, pods_per_replica=2))
    assert [path for path, _, _ in complaints(groups)] == ["scale_down.victims.order"]
    assert list(complaints(EMPTIEST)) == []


# --- whatever the pods are ------------------------------------------------------------------------------------------

FEW = st.sampled_from([None, 0.0, 1.0, 5.0, 9.0])
ONES = st.builds(
    One,
    running=FEW,
    waiting=st.sampled_from([0.0, 0.0, 2.0, None]),
    cached=st.sampled_from([0.0, 100.0, None]),
    age_s=st.sampled_from([1.0, 60.0]),
    engines=st.sampled_from([1, 1, 1, 0]),
    cost=st.sampled_from([None, None, -(2**31), -1, 0, 7, 2**31 - 1]),
    served_s=st.sampled_from([3600.0, 50.0, None]),
    fields=st.sampled_from([None, None, None, {"ready": False}, {"terminating": True}]),
)
FLEETS = st.lists(ONES, min_size=1, max_size=6).map(lambda ones: {f"p{index}": one for index, one in enumerate(ones)})


def standings(snapshot: Snapshot) -> dict[str, Standing]:
    """Return the standing of each pod that serves, by name."""
    loads = pod_loads(snapshot.engines, snapshot.at, 15.0)
    serving = [one for one in snapshot.target.pods if one.ready and not one.terminating]
    return {one.name: standing(one, loads.get(one.uid, Load()), START, 600.0) for one in serving}


def after(snapshot: Snapshot, changes: Mapping[str, int | None]) -> dict[str, int]:
    """Return the cost that Kubernetes sees of each pod that serves, once the changes are written."""
    pods = {one.name: one for one in snapshot.target.pods if one.ready and not one.terminating}
    return {name: changes.get(name, one.deletion_cost) or 0 for name, one in pods.items()}


@given(FLEETS, st.integers(0, 6))
def test_c112_whoever_goes_has_no_more_to_lose_than_any_who_stays(pods: Mapping[str, One], to: int) -> None:
    snapshot = snapshot_of(pods)
    changes = costs_of(pods, to)
    costs, lost = after(snapshot, changes), standings(snapshot)
    alive = [one for one in snapshot.target.pods if not one.terminating]
    going = len(costs) - to
    assert all(cost in INT32 for cost in costs.values())
    if not 0 < going < len(costs) or to >= len(pods):
        assert changes == {}
        return
    assert len(alive) >= len(costs)
    # In each order that Kubernetes may take equal costs in, who goes has no more to lose than who stays.
    for worst in (1, -1):
        order = sorted(costs, key=lambda name: (costs[name], tuple(worst * part for part in lost[name])))
        gone, kept = order[:going], order[going:]
        assert all(lost[one] <= lost[other] for one in gone for other in kept), (gone, kept)
    for name, one in lost.items():
        if one.unknown and any(not other.unknown for other in lost.values()):
            assert costs[name] >= 0
    before = {one.name: one.deletion_cost for one in snapshot.target.pods}
    assert all(changes[name] != before[name] for name in changes)


@given(FLEETS, st.integers(0, 6))
def test_what_was_written_is_not_written_again(pods: Mapping[str, One], to: int) -> None:
    changes = costs_of(pods, to)
    assert costs_of({name: replace(one, cost=changes.get(name, one.cost)) for name, one in pods.items()}, to) == {}


@given(FLEETS, st.integers(0, 6), st.data())
def test_more_work_never_puts_a_pod_among_the_first(pods: Mapping[str, One], to: int, data: st.DataObject) -> None:
    busier = data.draw(st.sampled_from(sorted(pods)))
    before, one = costs_of(pods, to), pods[busier]
    more = replace(one, running=None if one.running is None else one.running + 3.0)
    if before.get(busier) != FIRST:
        assert costs_of({**pods, busier: more}, to).get(busier) != FIRST


@given(FLEETS, st.integers(0, 6))
def test_the_order_of_the_pods_does_not_matter(pods: Mapping[str, One], to: int) -> None:
    assert costs_of(dict(reversed(list(pods.items()))), to) == costs_of(pods, to)


# --- in a decision --------------------------------------------------------------------------------------------------


def test_only_a_step_down_carries_costs() -> None:
    quick = ScaleDown(
        threshold=0.30,
        stabilization_s=0.0,
        horizon_factor=0.0,
        cooldown_s=0.0,
        turn_s=0.0,
        victims=Victims(order="emptiest"),
    )
    world = World(replace(P0, scale_down=quick), 3)
    world.press(0.1, 0.0, 0.1)
    busy = list(world.engines.values())
    for engine, running in zip(busy, (4.0, 0.0, 9.0), strict=True):
        engine.running = running
    actions = [world.tick().action for _ in range(3)]
    down = next(action for action in actions if isinstance(action, ScaleReplicas))
    assert (down.seen, down.to) == (3, 2)
    assert [(cost.pod, cost.cost, cost.requests) for cost in down.costs] == [("chat-a-1", FIRST, 0.0)]
    world.press(0.95, 2.0, 2.0)
    up = next(action for action in (world.tick(60.0).action for _ in range(10)) if isinstance(action, ScaleReplicas))
    assert (up.to > up.seen, up.costs) == (True, ())
