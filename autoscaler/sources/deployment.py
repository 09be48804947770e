"""The Deployment as target: its replicas, the pods that it owns, and who else writes its replicas."""

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from urllib.parse import quote

from autoscaler.core.policy import TargetRef
from autoscaler.core.types import Pod, PodPhase, TargetStatus
from autoscaler.core.victims import ANNOTATION
from autoscaler.errors import TargetError
from autoscaler.sources.annotations import wishes_of
from autoscaler.sources.cluster import RIGHTS, ClusterCache, ClusterCaches
from autoscaler.sources.kubernetes_objects import (
    Json,
    as_object,
    as_objects,
    count_of,
    metadata_of,
    name_of,
    replica_writers,
    uid_of,
)
from autoscaler.sources.pod_template import drain_of, max_num_seqs_of, template_of
from autoscaler.sources.rollout import TEMPLATE_HASH, condition_of, rollout_of

__all__ = ["RIGHTS", "DeploymentTarget", "pod_of", "target_status"]

DEPLOYMENT = "/apis/apps/v1/namespaces/{namespace}/deployments/{name}"

INITIAL_READINESS_S = 30.0
POD_NAME = re.compile(r'^pods "[^"]*" is ')
MAX_REFUSAL = 200
HEALTHY_WAITS = frozenset({"ContainerCreating", "PodInitializing"})
INT32 = re.compile(r"0|[1-9][0-9]{0,9}|-[0-9]{1,10}")


class DeploymentTarget:
    """Reads one Deployment from the cache of its namespace: without a request, but for one after each write to it.

    Args:
        templates: what the pod template says of batching limits is wanted too.

    Attributes:
        hpa_visible: whether HorizontalPodAutoscalers could be seen at the last read; None before the first. Where they
            could not, because the right is missing or the cluster has no autoscaling/v2, `other_owner` stays "".
    """

    def __init__(self, caches: ClusterCaches, ref: TargetRef, *, templates: bool = False) -> None:
        self._caches = caches
        self._ref = ref
        self._templates = templates
        self._path = DEPLOYMENT.format(namespace=quote(ref.namespace, safe=""), name=quote(ref.deployment, safe=""))
        self._cache: ClusterCache | None = None
        self._known_writes = 0
        self._last: tuple[int, TargetStatus] | None = None
        self.hpa_visible: bool | None = None
        caches.api.writes(self._path)  # counted from now on

    async def read(self) -> TargetStatus:
        """Return the target's state, never as it was before a write of ours, nor as it was long ago.

        The same value as before while nothing has changed. Raises TargetError when it cannot be read.
        """
        cache = self._cache = self._cache or self._caches.acquire(self._ref.namespace)
        writes = self._caches.api.writes(self._path)
        if writes != self._known_writes:
            await cache.deployments.refresh(self._ref.deployment)
            self._known_writes = writes
        await cache.ready()
        self.hpa_visible = not cache.hpas.hidden
        changes = cache.changes
        if self._last is None or self._last[0] != changes:
            self._last = changes, self._status(cache)
        return self._last[1]

    def _status(self, cache: ClusterCache) -> TargetStatus:
        deployment = cache.deployments.items.get(self._ref.deployment)
        if deployment is None:
            raise TargetError("target_not_found", f'deployments.apps "{self._ref.deployment}" not found')
        return target_status(
            deployment,
            cache.replica_sets.items.values(),
            cache.pods.items.values(),
            cache.hpas.items.values(),
            templates=self._templates,
        )

    async def close(self) -> None:
        """Give the cache back, whose streams end with its last user."""
        if self._cache is not None:
            self._cache = self._last = None
            await self._caches.release(self._ref.namespace)


def target_status(
    deployment: Json,
    replica_sets: Iterable[Json],
    pods: Iterable[Json],
    hpas: Iterable[Json],
    *,
    templates: bool = False,
) -> TargetStatus:
    """Return what the API's objects say of the target; the lists may hold what belongs to others.

    A pod is the target's when its controller is a ReplicaSet whose controller is this very Deployment: labels alone
    also match the pods of a Deployment with an overlapping selector.

    `rollout` is true while the newest generation was not yet seen by the Deployment's controller, or an older revision
    still has replicas, wanted or living. Pods of the newest revision that only load are supply under way, whether
    a rollout or a scale-up ordered them; but of a `Recreate` rollout, which has no older pods to go by, they are part.

    Args:
        templates: what the pod template says of batching limits is wanted too.
    Raises TargetError for a Deployment that is incomplete or being deleted.
    """
    metadata, spec, status = (as_object(deployment.get(part)) for part in ("metadata", "spec", "status"))
    name, uid, replicas = metadata.get("name"), metadata.get("uid"), spec.get("replicas", 1)
    if not isinstance(name, str) or not isinstance(uid, str) or type(replicas) is not int:
        raise TargetError("bad_body", "a Deployment without name, uid or a number of replicas")
    if metadata.get("deletionTimestamp"):
        raise TargetError("target_not_found", f"Deployment {name} is being deleted")
    owned_sets = {uid_of(item): item for item in replica_sets if _controller(item) == uid}
    owned_pods = sorted((item for item in pods if _controller(item) in owned_sets), key=name_of)
    rollout = rollout_of(deployment, owned_sets.values())
    broken = any(_crashes(pod_of(item)) for item in owned_pods if _controller(item) == rollout.newest)
    wishes = wishes_of(as_object(metadata.get("annotations")))
    scaled_by, scaled_at = _last_writer(deployment)
    return TargetStatus(
        namespace=str(metadata.get("namespace", "")),
        name=name,
        uid=uid,
        current_replicas=replicas,
        status_replicas=count_of(status, "replicas"),
        ready_replicas=count_of(status, "readyReplicas"),
        updated_replicas=count_of(status, "updatedReplicas"),
        rollout=rollout.moving,
        rollout_unhealthy=rollout.failed or (rollout.mixed and broken),
        rollout_failed=rollout.failed,
        deployment_paused=spec.get("paused") is True,
        refused=_refusal(condition_of(status, "ReplicaFailure")),
        drain=drain_of(as_object(spec.get("template"))),
        template=template_of(deployment, rollout.hash) if templates else None,
        other_owner=min(_scalers(hpas, name), default=""),
        scaled_by=scaled_by,
        scaled_at=scaled_at,
        paused=wishes.paused,
        pin=wishes.pin,
        direction=wishes.direction,
        approved=wishes.approved,
        pods=tuple(pod_of(item) for item in owned_pods),
    )


def pod_of(item: Json) -> Pod:
    """Return one pod of the API as a value; a time that cannot be read is as one that is not there."""
    metadata, spec, status = (as_object(item.get(part)) for part in ("metadata", "spec", "status"))
    conditions = {str(condition.get("type")): condition for condition in as_objects(status.get("conditions"))}
    containers = [*as_objects(status.get("initContainerStatuses")), *as_objects(status.get("containerStatuses"))]
    created_at = _time(metadata.get("creationTimestamp")) or 0.0
    started_at = _time(status.get("startTime"))
    condition = conditions.get("Ready", {})
    ready, ready_at = condition.get("status") == "True", _time(condition.get("lastTransitionTime"))
    return Pod(
        name=name_of(item),
        uid=uid_of(item),
        phase=_phase(status.get("phase")),
        ready=ready,
        terminating=bool(metadata.get("deletionTimestamp")),
        ip=str(status.get("podIP") or ""),
        node=str(spec.get("nodeName") or ""),
        created_at=created_at,
        ready_at=ready_at,
        was_ready=ready or _lost_readiness(created_at if started_at is None else started_at, ready_at),
        restarts=sum(count_of(container, "restartCount") for container in containers),
        waiting_reason=_waiting_reason(containers),
        oom_killed=any(_last_end(container) == "OOMKilled" for container in containers),
        unschedulable_at=_unschedulable_at(conditions.get("PodScheduled", {})),
        max_num_seqs=max_num_seqs_of(as_objects(spec.get("containers"))),
        revision=str(as_object(metadata.get("labels")).get(TEMPLATE_HASH, "")),
        deletion_cost=_deletion_cost(as_object(metadata.get("annotations")).get(ANNOTATION)),
    )


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
    reasons = (str(as_object(as_object(item.get("state")).get("waiting")).get("reason") or "") for item in containers)
    return next((reason for reason in reasons if reason and reason not in HEALTHY_WAITS), "")


def _last_end(container: Json) -> str:
    """Return how a container ended last; "" when it never did."""
    ends = (as_object(as_object(container.get(state)).get("terminated")) for state in ("state", "lastState"))
    return next((str(end.get("reason")) for end in ends if end), "")


def _unschedulable_at(condition: Json) -> float | None:
    if condition.get("status") == "False" and condition.get("reason") == "Unschedulable":
        return _time(condition.get("lastTransitionTime"))
    return None


def _refusal(failure: Json) -> str:
    """Return why pods that are missing cannot be made, by the condition ReplicaFailure; "" where they can."""
    if failure.get("status") != "True":
        return ""
    return POD_NAME.sub("", str(failure.get("message") or failure.get("reason") or "refused"))[:MAX_REFUSAL]


def _deletion_cost(text: object) -> int | None:
    """Return an annotated deletion cost; None without a valid one, as Kubernetes takes it for none."""
    found = INT32.fullmatch(text) if isinstance(text, str) else None
    cost = int(found[0]) if found else None
    return cost if cost is not None and -(2**31) <= cost < 2**31 else None


def _scalers(hpas: Iterable[Json], deployment: str) -> Iterator[str]:
    """Yield what scales the Deployment by a HorizontalPodAutoscaler: what owns that, as a ScaledObject does, or it."""
    for item in hpas:
        target = as_object(as_object(item.get("spec")).get("scaleTargetRef"))
        group = str(target.get("apiVersion") or "apps/v1").partition("/")[0]
        if (group, target.get("kind"), target.get("name")) == ("apps", "Deployment", deployment):
            owner = _controller_reference(item)
            yield f"{owner.get('kind')}/{owner.get('name')}" if owner else f"HorizontalPodAutoscaler/{name_of(item)}"


def _last_writer(deployment: Json) -> tuple[str, float | None]:
    """Return the field manager that last changed the replicas, and when; ("", None) where none is named.

    Whoever changes a value by an update owns it alone; only who applies a manifest with the same value owns it beside.
    """
    writers = [
        (entry.get("operation") != "Apply", _time(entry.get("time")) or 0.0, str(entry.get("manager") or ""))
        for entry in replica_writers(deployment)
    ]
    _, at, manager = max(writers, default=(False, 0.0, ""))
    return manager, at or None


def _controller(item: Json) -> str:
    """Return the uid of the controller that owns an object; "" when none does."""
    reference = _controller_reference(item)
    return str(reference.get("uid")) if reference else ""


def _controller_reference(item: Json) -> Json:
    references = as_objects(metadata_of(item).get("ownerReferences"))
    return next((reference for reference in references if reference.get("controller") is True), {})


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
