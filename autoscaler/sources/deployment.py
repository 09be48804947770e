"""The Deployment as target: its replicas, the pods that it owns, and who else writes its replicas."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote

from autoscaler.core.policy import TargetRef
from autoscaler.core.types import Pod, PodPhase, TargetStatus
from autoscaler.errors import TargetError
from autoscaler.sources.kubernetes_api import KubernetesApi

Json = Mapping[str, Any]

DEPLOYMENT = "/apis/apps/v1/namespaces/{namespace}/deployments/{name}"
REPLICA_SETS = "/apis/apps/v1/namespaces/{namespace}/replicasets"
PODS = "/api/v1/namespaces/{namespace}/pods"
HPAS = "/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers"

RIGHTS = frozenset(
    {
        ("apps", "deployments", "get"),
        ("apps", "replicasets", "list"),
        ("", "pods", "list"),
        ("autoscaling", "horizontalpodautoscalers", "list"),
    }
)
"""What the requests of this file need: API group, resource, verb. The Role in deploy/ grants these and no more."""

REVISION = "deployment.kubernetes.io/revision"
INITIAL_READINESS_S = 30.0
HEALTHY_WAITS = frozenset({"ContainerCreating", "PodInitializing"})
MAX_NUM_SEQS = re.compile(r"""(?:^|[\s"'])--max[-_]num[-_]seqs(?:=|\s+)["']?(\d+)(?![\w.])""")


class DeploymentTarget:
    """Reads one Deployment by four requests a tick.

    Attributes:
        hpa_visible: whether HorizontalPodAutoscalers could be listed at the last read; None before the first. Where
            they could not, because the right is missing or the cluster has no autoscaling/v2, `other_owner` stays "".
    """

    def __init__(self, api: KubernetesApi, ref: TargetRef) -> None:
        self._api = api
        self._places = {"namespace": quote(ref.namespace, safe=""), "name": quote(ref.deployment, safe="")}
        self.hpa_visible: bool | None = None

    async def read(self) -> TargetStatus:
        """Return the target's state now. Raises TargetError when it cannot be read."""
        deployment = await self._api.request("GET", DEPLOYMENT.format(**self._places))
        query = {"labelSelector": label_selector(_dict(_dict(deployment.get("spec")).get("selector")))}
        replica_sets = _items(await self._api.request("GET", REPLICA_SETS.format(**self._places), query=query))
        pods = _items(await self._api.request("GET", PODS.format(**self._places), query=query))
        return target_status(deployment, replica_sets, pods, await self._read_hpas())

    async def close(self) -> None:
        """Do nothing: the API is shared, and closed by whoever made it."""

    async def _read_hpas(self) -> Sequence[Json]:
        """Return the namespace's HorizontalPodAutoscalers; none where they cannot be listed."""
        try:
            hpas = _items(await self._api.request("GET", HPAS.format(**self._places)))
        except TargetError as error:
            if error.reason not in ("forbidden", "target_not_found"):
                raise
            self.hpa_visible = False
            return ()
        self.hpa_visible = True
        return hpas


def target_status(
    deployment: Json, replica_sets: Iterable[Json], pods: Iterable[Json], hpas: Iterable[Json]
) -> TargetStatus:
    """Return what the API's objects say of the target; the lists may hold what belongs to others.

    A pod is the target's when its controller is a ReplicaSet whose controller is this very Deployment: labels alone
    also match the pods of a Deployment with an overlapping selector.

    `rollout` is true while the newest generation was not yet seen by the Deployment's controller, or an older revision
    still has replicas, wanted or living. Pods of the newest revision that only load are supply under way, whether
    a rollout or a scale-up ordered them. Raises TargetError for a Deployment that is incomplete or being deleted.
    """
    metadata, spec, status = (_dict(deployment.get(part)) for part in ("metadata", "spec", "status"))
    name, uid, replicas = metadata.get("name"), metadata.get("uid"), spec.get("replicas", 1)
    if not isinstance(name, str) or not isinstance(uid, str) or type(replicas) is not int:
        raise TargetError("bad_body", "a Deployment without name, uid or a number of replicas")
    if metadata.get("deletionTimestamp"):
        raise TargetError("target_not_found", f"Deployment {name} is being deleted")
    owned_sets = {_uid(item): item for item in replica_sets if _controller(item) == uid}
    newest = max(owned_sets.values(), key=_revision, default=None)
    newest_uid = "" if newest is None else _uid(newest)
    owned_pods = sorted((item for item in pods if _controller(item) in owned_sets), key=_name)
    unobserved = _count(status, "observedGeneration") < _count(metadata, "generation")
    behind = _count(status, "updatedReplicas") < _count(status, "replicas")
    mixed = any(_wants_or_has(item) for key, item in owned_sets.items() if key != newest_uid)
    rollout = unobserved or behind or mixed
    return TargetStatus(
        namespace=str(metadata.get("namespace", "")),
        name=name,
        uid=uid,
        current_replicas=replicas,
        status_replicas=_count(status, "replicas"),
        ready_replicas=_count(status, "readyReplicas"),
        updated_replicas=_count(status, "updatedReplicas"),
        rollout=rollout,
        rollout_unhealthy=rollout and any(_crashes(pod_of(p)) for p in owned_pods if _controller(p) == newest_uid),
        other_owner=next((f"HorizontalPodAutoscaler/{owner}" for owner in sorted(_scalers(hpas, name))), ""),
        pods=tuple(pod_of(item) for item in owned_pods),
    )


def pod_of(item: Json) -> Pod:
    """Return one pod of the API as a value; a time that cannot be read is as one that is not there."""
    metadata, spec, status = (_dict(item.get(part)) for part in ("metadata", "spec", "status"))
    conditions = {str(condition.get("type")): condition for condition in _dicts(status.get("conditions"))}
    containers = [*_dicts(status.get("initContainerStatuses")), *_dicts(status.get("containerStatuses"))]
    created_at = _time(metadata.get("creationTimestamp")) or 0.0
    started_at = _time(status.get("startTime"))
    condition = conditions.get("Ready", {})
    ready, ready_at = condition.get("status") == "True", _time(condition.get("lastTransitionTime"))
    return Pod(
        name=_name(item),
        uid=_uid(item),
        phase=_phase(status.get("phase")),
        ready=ready,
        terminating=bool(metadata.get("deletionTimestamp")),
        ip=str(status.get("podIP") or ""),
        node=str(spec.get("nodeName") or ""),
        created_at=created_at,
        ready_at=ready_at,
        was_ready=ready or _lost_readiness(created_at if started_at is None else started_at, ready_at),
        restarts=sum(_count(container, "restartCount") for container in containers),
        waiting_reason=_waiting_reason(containers),
        oom_killed=any(_last_end(container) == "OOMKilled" for container in containers),
        unschedulable_at=_unschedulable_at(conditions.get("PodScheduled", {})),
        max_num_seqs=_max_num_seqs(_dicts(spec.get("containers"))),
        revision=str(_dict(metadata.get("labels")).get("pod-template-hash", "")),
    )


def label_selector(selector: Json) -> str:
    """Return a Deployment's `spec.selector` as the query parameter `labelSelector`."""
    terms = [f"{key}={value}" for key, value in _dict(selector.get("matchLabels")).items()]
    for expression in _dicts(selector.get("matchExpressions")):
        key, values = str(expression.get("key")), ",".join(map(str, expression.get("values") or ()))
        match expression.get("operator"):
            case "In":
                terms.append(f"{key} in ({values})")
            case "NotIn":
                terms.append(f"{key} notin ({values})")
            case "Exists":
                terms.append(key)
            case "DoesNotExist":
                terms.append(f"!{key}")
    return ",".join(terms)


def _lost_readiness(started_at: float, changed_at: float | None) -> bool:
    """Return whether a pod that is not ready has been ready before.

    A pod's first Ready=False is written when it starts, and stays as it is until the pod becomes ready: a later change
    can only be the loss of readiness. Changes in the first 30 s count as starting, as the HorizontalPodAutoscaler's
    initial readiness delay has it: virtual kubelets write the first condition late, and no engine loads that fast.
    """
    return changed_at is not None and changed_at - started_at > INITIAL_READINESS_S


def _crashes(pod: Pod) -> bool:
    """Return whether a pod fails to start. Between two crashes it runs and waits for nothing: its restarts tell."""
    return not pod.ready and not pod.terminating and (bool(pod.waiting_reason) or pod.restarts > 0)


def _waiting_reason(containers: Sequence[Json]) -> str:
    """Return why a container waits; "" when none does, or only as each does that starts."""
    reasons = (str(_dict(_dict(item.get("state")).get("waiting")).get("reason") or "") for item in containers)
    return next((reason for reason in reasons if reason and reason not in HEALTHY_WAITS), "")


def _last_end(container: Json) -> str:
    """Return how a container ended last; "" when it never did."""
    ends = (_dict(_dict(container.get(state)).get("terminated")) for state in ("state", "lastState"))
    return next((str(end.get("reason")) for end in ends if end), "")


def _unschedulable_at(condition: Json) -> float | None:
    if condition.get("status") == "False" and condition.get("reason") == "Unschedulable":
        return _time(condition.get("lastTransitionTime"))
    return None


def _max_num_seqs(containers: Sequence[Json]) -> int | None:
    """Return the engine's batch limit: the last one of the first container that names it, as argparse would take it."""
    for container in containers:
        words = [*(container.get("command") or ()), *(container.get("args") or ())]
        found = MAX_NUM_SEQS.findall(" ".join(map(str, words)))
        if found:
            return int(found[-1])
    return None


def _scalers(hpas: Iterable[Json], deployment: str) -> Iterator[str]:
    """Yield the names of the HorizontalPodAutoscalers that scale the Deployment."""
    for item in hpas:
        target = _dict(_dict(item.get("spec")).get("scaleTargetRef"))
        group = str(target.get("apiVersion") or "apps/v1").partition("/")[0]
        if (group, target.get("kind"), target.get("name")) == ("apps", "Deployment", deployment):
            yield _name(item)


def _wants_or_has(replica_set: Json) -> bool:
    return any(_count(_dict(replica_set.get(part)), "replicas") > 0 for part in ("spec", "status"))


def _revision(replica_set: Json) -> int:
    text = str(_dict(_dict(replica_set.get("metadata")).get("annotations")).get(REVISION, ""))
    return int(text) if text.isdecimal() else 0


def _controller(item: Json) -> str:
    """Return the uid of the controller that owns an object; "" when none does."""
    references = _dicts(_dict(item.get("metadata")).get("ownerReferences"))
    return next((str(reference.get("uid")) for reference in references if reference.get("controller") is True), "")


def _name(item: Json) -> str:
    return str(_dict(item.get("metadata")).get("name", ""))


def _uid(item: Json) -> str:
    return str(_dict(item.get("metadata")).get("uid", ""))


def _phase(value: object) -> PodPhase:
    return next((phase for phase in PodPhase if phase == value), PodPhase.UNKNOWN)


def _time(value: object) -> float | None:
    """Return an RFC 3339 time in epoch seconds."""
    if not isinstance(value, str):
        return None
    try:
        return datetime.fromisoformat(value).timestamp()
    except ValueError:
        return None


def _count(part: Json, key: str) -> int:
    """Return a count; the API leaves zeros out."""
    value = part.get(key, 0)
    return value if isinstance(value, int) else 0


def _items(answer: Json) -> Sequence[Json]:
    """Return a list's items. Raises TargetError for an answer that is no list: no pods and no answer differ."""
    items = answer.get("items", ())
    if not isinstance(items, list):
        raise TargetError("bad_body", "the API server's answer is not a list")
    return _dicts(items)


def _dict(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _dicts(value: object) -> Sequence[Json]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else ()
