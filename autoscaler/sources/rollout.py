"""How far a Deployment's rollout is, from the Deployment and its ReplicaSets."""

from collections.abc import Collection
from dataclasses import dataclass

from autoscaler.sources.kubernetes_objects import Json, as_object, as_objects, count_of, metadata_of, uid_of

REVISION = "deployment.kubernetes.io/revision"
TEMPLATE_HASH = "pod-template-hash"
"""The label by which a ReplicaSet's pods are told from those of another revision."""
UNDER_WAY = frozenset({"NewReplicaSetCreated", "FoundNewReplicaSet", "ReplicaSetUpdated"})
"""Reasons of the condition Progressing until a rollout is complete. Scaling does not bring them back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One Deployment's rollout.

    Args:
        moving: a new revision takes the place of an older one, or the newest generation was not yet seen.
        mixed: pods of two revisions may be there, whether or not anything moves.
        failed: the Deployment's controller says that it makes no progress.
        newest: uid of the ReplicaSet of the newest revision; "" without any.
        hash: that one's label `pod-template-hash`.
    """

    moving: bool
    mixed: bool
    failed: bool
    newest: str
    hash: str = ""


def rollout_of(deployment: Json, replica_sets: Collection[Json]) -> Rollout:
    """Return how far a Deployment's rollout is.

    A `Recreate` rollout ends every old pod first: then neither status nor ReplicaSets hold an older revision. What
    tells is a newest ReplicaSet that wants nothing, then a status without pods of the new one, and later, while these
    load, the condition Progressing.

    Args:
        replica_sets: those that the Deployment owns.
    """
    metadata, spec, status = (as_object(deployment.get(part)) for part in ("metadata", "spec", "status"))
    newest = max(replica_sets, key=_revision, default=None)
    progressing = condition_of(status, "Progressing")
    unobserved = count_of(status, "observedGeneration") < count_of(metadata, "generation")
    behind = count_of(status, "updatedReplicas") < count_of(status, "replicas")
    older = any(_wants_or_has(item) for item in replica_sets if item is not newest)
    recreating = False
    if as_object(spec.get("strategy")).get("type") == "Recreate":
        emptied = newest is not None and _wanted(newest) == 0
        begun = count_of(status, "updatedReplicas") == 0 or progressing.get("reason") in UNDER_WAY
        recreating = count_of(spec, "replicas") > 0 and (emptied or (len(replica_sets) > 1 and begun))
    # A changed template of a paused Deployment has no ReplicaSet, and all of its pods count as behind.
    paused = spec.get("paused") is True
    return Rollout(
        moving=unobserved or (not paused and (behind or older or recreating)),
        mixed=older or (not paused and (unobserved or behind or recreating)),
        failed=progressing.get("status") == "False",
        newest="" if newest is None else uid_of(newest),
        hash="" if newest is None else str(as_object(metadata_of(newest).get("labels")).get(TEMPLATE_HASH, "")),
    )


def condition_of(status: Json, kind: str) -> Json:
    """Return a condition of an object's status; empty where it has none of that type."""
    return next((one for one in as_objects(status.get("conditions")) if one.get("type") == kind), {})


def _wants_or_has(replica_set: Json) -> bool:
    return _wanted(replica_set) > 0 or count_of(as_object(replica_set.get("status")), "replicas") > 0


def _wanted(replica_set: Json) -> int:
    return count_of(as_object(replica_set.get("spec")), "replicas")


def _revision(replica_set: Json) -> int:
    text = str(as_object(metadata_of(replica_set).get("annotations")).get(REVISION, ""))
    return int(text) if text.isdecimal() else 0
