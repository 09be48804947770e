"""Writes a Deployment's replicas through its scale, provided that nobody else wrote them since they were read."""

from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import quote

from autoscaler.core.policy import TargetRef
from autoscaler.core.types import FIELD_MANAGER, Action, Outcome, ScaleReplicas
from autoscaler.errors import ActuationError, TargetError

SCALE = "/apis/apps/v1/namespaces/{namespace}/deployments/{name}/scale"
JSON_PATCH = "application/json-patch+json"

RIGHTS = frozenset({("apps", "deployments/scale", "get"), ("apps", "deployments/scale", "patch")})
"""What the requests of this file need: API group, resource, verb. The Role in deploy/ grants these and no more."""

FATE_UNKNOWN = frozenset({"unreachable", "bad_body"})


class ScaleApi(Protocol):
    """What is needed of the Kubernetes API: the answer's object, or TargetError."""

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = "application/json",
    ) -> Mapping[str, Any]:
        """Return the object that the server answers with."""
        ...


class DeploymentActuator:
    """Sets one Deployment's `spec.replicas`, by one write a call."""

    def __init__(self, api: ScaleApi, ref: TargetRef) -> None:
        self._api = api
        self._path = SCALE.format(namespace=quote(ref.namespace, safe=""), name=quote(ref.deployment, safe=""))

    async def apply(self, action: Action) -> Outcome:
        """Return what became of it; what does not move replicas is `UNCHANGED`.

        A write without an answer may have been applied, so the scale is read afterwards. Raises ActuationError:
        `conflict` when the replicas or the Deployment are not the ones that the decision saw.
        """
        if not isinstance(action, ScaleReplicas):
            return Outcome.UNCHANGED
        query, patch = {"fieldManager": FIELD_MANAGER}, scale_patch(action)
        try:
            await self._api.request("PATCH", self._path, query=query, body=patch, content_type=JSON_PATCH)
        except TargetError as error:
            if error.reason not in FATE_UNKNOWN:
                raise ActuationError(error.reason, error.detail, error.retry_after_s) from error
            if not await self._is_applied(action):
                raise ActuationError("unreachable", error.detail, error.retry_after_s) from error
        return Outcome.APPLIED

    async def close(self) -> None:
        """Do nothing: the API is shared, and closed by whoever made it."""

    async def _is_applied(self, action: ScaleReplicas) -> bool:
        """Return whether the scale stands where the action wanted it."""
        try:
            scale = await self._api.request("GET", self._path)
        except TargetError:
            return False
        spec, metadata = scale.get("spec") or {}, scale.get("metadata") or {}
        return spec.get("replicas", 0) == action.to and action.uid in ("", metadata.get("uid"))


def scale_patch(action: ScaleReplicas) -> list[dict[str, Any]]:
    """Return the JSON patch of the Scale: tests of what the decision saw, then the new value.

    Tests of the value, not of the resourceVersion: each status write moves that, and would refuse us in every rollout.
    The API leaves a zero out, so that zero replicas are an empty spec; `replicas` is all that a Scale's spec holds.
    """
    seen: dict[str, Any] = {"op": "test", "path": "/spec/replicas", "value": action.seen}
    if action.seen == 0:
        seen = {"op": "test", "path": "/spec", "value": {}}
    same = [{"op": "test", "path": "/metadata/uid", "value": action.uid}] if action.uid else []
    return [seen, *same, {"op": "add" if action.seen == 0 else "replace", "path": "/spec/replicas", "value": action.to}]
