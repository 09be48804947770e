"""Which pods a shrink takes, and the deletion costs that tell Kubernetes so.

A ReplicaSet gives up pods in this order: without a node, Pending, not ready; then by rising deletion cost, 0 where none
is annotated; then the newest. So only ready pods need a cost, and of these only who goes: below 0 goes, the rest stays
at 0 or above. Costs below 0 are ours. A cost above 0 is somebody's wish to keep a pod: it goes after those without.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from autoscaler.core.facts import is_serving
from autoscaler.core.policy import Policy
from autoscaler.core.signals import COLUMN
from autoscaler.core.types import DeletionCost, Engines, Pod, Snapshot
from autoscaler.core.window import READ_AT, RUNNING, STARTED_AT, WAITING

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
FIRST = -1
"""The cost of a pod that goes."""
CACHED = COLUMN["cached_prompt_tokens"]


class Standing(NamedTuple):
    """How much is lost with a pod, most weighty first: the lowest goes first.

    Args:
        protected: a deletion cost above 0.
        unknown: how many requests it holds is not known.
        requests: running and waiting; +Inf when unknown.
        young: it has not yet served for as long as it took to load.
        cached_rate: prompt tokens that its prefix cache supplied, a second since its start; +Inf when unknown.
    """

    protected: int
    unknown: bool
    requests: float
    young: bool
    cached_rate: float


class Load(NamedTuple):
    """What the engines of one pod say together; None where one of them does not, or not lately."""

    requests: float | None = None
    cached_rate: float | None = None


def deletion_costs(
    policy: Policy, snapshot: Snapshot, replicas: int, starts: Sequence[float]
) -> tuple[DeletionCost, ...]:
    """Return the costs to change before a step to so many replicas: none unless it shrinks and the policy asks.

    Few: who goes and does not already cost less than all who have more to lose and stay, and leftovers of steps that
    never happened. Of pods that are alike none is marked for another's sake: whoever Kubernetes takes will do.

    Args:
        starts: the last seconds from created to ready of this target's pods.
    """
    if policy.scale_down.victims.order == "cluster" or replicas >= snapshot.target.current_replicas:
        return ()
    serving = [pod for pod in snapshot.target.pods if is_serving(pod)]
    going = len(serving) - replicas  # all who are alive and do not serve have gone before these
    if not 0 < going < len(serving):
        return ()
    stale_after_s = policy.signals.vllm.stale_after_s if policy.signals.vllm is not None else 0.0
    loads = pod_loads(snapshot.engines, snapshot.at, stale_after_s)
    longest_s = max(starts, default=policy.prediction.max_horizon_s)
    standings = {pod.uid: standing(pod, loads.get(pod.uid, Load()), snapshot.at, longest_s) for pod in serving}
    order = sorted(serving, key=lambda pod: (standings[pod.uid], _cost(pod) >= 0, -(pod.ready_at or 0.0), pod.name))
    first = [pod for pod in order[:going] if not standings[pod.uid].unknown]
    marked = [pod for pod in first if _cost(pod) >= _floor(pod, order[going:], standings)]
    cleared = [pod for pod in order if _cost(pod) < 0 and pod not in first]
    return (*_changes(marked, FIRST, loads), *_changes(cleared, None, loads))


def _floor(pod: Pod, rest: Iterable[Pod], standings: Mapping[str, Standing]) -> float:
    """Return the lowest cost, leftovers cleared, of those who stay with more to lose than a pod that goes."""
    return min((max(0, _cost(one)) for one in rest if standings[one.uid] > standings[pod.uid]), default=math.inf)


def standing(pod: Pod, load: Load, at: float, longest_s: float) -> Standing:
    """Return how much is lost with a pod that serves.

    Args:
        longest_s: what it took to load counts as at most this: a pod that lost readiness has become ready late.
    """
    protected = max(0, _cost(pod))
    if load.requests is None:  # never marked, so that it does not matter which of them goes
        return Standing(protected, unknown=True, requests=math.inf, young=True, cached_rate=math.inf)
    rate = math.inf if load.cached_rate is None else load.cached_rate
    young = _is_young(pod, at, longest_s)
    return Standing(protected, unknown=False, requests=load.requests, young=young, cached_rate=rate)


def _is_young(pod: Pod, at: float, longest_s: float) -> bool:
    """Tell whether a pod has served for less time than it took to load, or may have."""
    if pod.ready_at is None:
        return True
    return at - pod.ready_at < min(pod.ready_at - pod.created_at, longest_s)


def pod_loads(engines: Engines, at: float, stale_after_s: float) -> dict[str, Load]:
    """Return the load of each pod that has engines, by uid.

    A pod with fewer engines than another has may not have shown all of them: what it holds is unknown.
    """
    rows: dict[str, list[list[float]]] = {}
    for key, row in zip(engines.keys, engines.values.tolist(), strict=True):
        rows.setdefault(key.pod_uid, []).append(row)
    most = max(map(len, rows.values()), default=0)
    return {uid: _load(found, at, stale_after_s) if len(found) == most else Load() for uid, found in rows.items()}


def _load(rows: Sequence[Sequence[float]], at: float, stale_after_s: float) -> Load:
    """Return what one pod's engines say together."""
    if any(at - row[READ_AT] > stale_after_s for row in rows):
        return Load()
    requests = sum(row[RUNNING] + row[WAITING] for row in rows)
    rate = sum(row[CACHED] / max(1.0, row[READ_AT] - row[STARTED_AT]) for row in rows)
    return Load(requests=_known(requests), cached_rate=_known(rate))


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _cost(pod: Pod) -> int:
    return pod.deletion_cost or 0


def _changes(pods: Iterable[Pod], cost: int | None, loads: Mapping[str, Load]) -> Iterator[DeletionCost]:
    for pod in pods:
        yield DeletionCost(pod=pod.name, uid=pod.uid, cost=cost, requests=loads.get(pod.uid, Load()).requests)
