"""Writes batching limits into a Deployment's pod template, provided that nobody else changed it since it was read."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from autoscaler.actuators.deployment import FATE_UNKNOWN, JSON_PATCH, ScaleApi
from autoscaler.core.arguments import read_engine, with_limits
from autoscaler.core.note import NOTE
from autoscaler.core.policy import TargetRef
from autoscaler.core.types import FIELD_MANAGER, Action, Outcome, RollOut
from autoscaler.errors import ActuationError, TargetError
from autoscaler.ports import Actuator

DEPLOYMENTS = "/apis/apps/v1/namespaces/{namespace}/deployments"
RIGHTS = frozenset({("apps", "deployments", "patch")})
"""What the requests of this file need beside those of the sources: API group, resource, verb."""
CONTAINERS = "/spec/template/spec/containers"
ANNOTATIONS = "/metadata/annotations"


class RolloutActuator:
    """Sets batching limits in the pod template, by one write a call, and passes every other action on.

    The arguments are read anew before the write: they may hold secrets, and no decision or recording does.

    Args:
        inner: carries out what is not about the template.
        writer: carries that out.
    """

    def __init__(self, inner: Actuator, writer: Actuator) -> None:
        self._inner = inner
        self._writer = writer

    async def apply(self, action: Action) -> Outcome:
        """Return what became of the action. Raises ActuationError.

        A template that must not be written is no reason not to write replicas: each has a patience of its own.
        """
        return await (self._writer if isinstance(action, RollOut) else self._inner).apply(action)

    async def close(self) -> None:
        """Release what both hold."""
        try:
            await self._inner.close()
        finally:
            await self._writer.close()


class TemplateActuator:
    """Writes one Deployment's pod template."""

    def __init__(self, api: ScaleApi, ref: TargetRef) -> None:
        self._api = api
        self._name = ref.deployment
        self._list = DEPLOYMENTS.format(namespace=quote(ref.namespace, safe=""))
        self._path = f"{self._list}/{quote(ref.deployment, safe='')}"

    async def apply(self, action: Action) -> Outcome:
        """Return what became of it; UNCHANGED for what is not about the template.

        A write without an answer may have been applied, so the Deployment is read afterwards. Raises ActuationError:
        `conflict` when the Deployment, its arguments or the note are not those that the decision saw.
        """
        if not isinstance(action, RollOut):
            return Outcome.UNCHANGED
        try:
            patch = template_patch(action, await self._read())
            query = {"fieldManager": FIELD_MANAGER}
            await self._api.request("PATCH", self._path, query=query, body=patch, content_type=JSON_PATCH)
        except TargetError as error:
            if error.reason not in FATE_UNKNOWN:
                raise ActuationError(error.reason, error.detail, error.retry_after_s) from error
            if not await self._is_applied(action):
                raise ActuationError("unreachable", error.detail, error.retry_after_s) from error
        return Outcome.APPLIED

    async def close(self) -> None:
        """Do nothing: the API is shared, and closed by whoever made it."""

    async def _read(self) -> Mapping[str, Any]:
        """Return the Deployment, by a list: that right is there anyway. Raises TargetError."""
        answer = await self._api.request("GET", self._list, query={"fieldSelector": f"metadata.name={self._name}"})
        for item in answer.get("items") or ():
            if item.get("metadata", {}).get("name") == self._name:
                found: Mapping[str, Any] = item
                return found
        raise TargetError("target_not_found", f'deployments.apps "{self._name}" not found')

    async def _is_applied(self, action: RollOut) -> bool:
        """Return whether the note is there that was written with the limits."""
        try:
            deployment = await self._read()
        except TargetError:
            return False
        return _note_of(deployment) == action.note


def template_patch(action: RollOut, deployment: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the JSON patch of the Deployment: tests of what was read, then the new arguments and the note.

    Raises ActuationError: `conflict` where what was read is not what the decision saw, `invalid` where the arguments
    cannot be changed.
    """
    metadata = deployment.get("metadata", {})
    if metadata.get("uid") != action.uid:
        raise ActuationError("conflict", "the Deployment is another one")
    if _note_of(deployment) != action.note_seen:
        raise ActuationError("conflict", f"the annotation {NOTE} has changed")
    same = [{"op": "test", "path": "/metadata/uid", "value": action.uid}]
    return [*same, *_words(action, deployment), *_annotation(action, metadata.get("annotations"))]


def _words(action: RollOut, deployment: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """Return the part that changes the container's words; nothing where they stay as they are."""
    containers = deployment.get("spec", {}).get("template", {}).get("spec", {}).get("containers") or ()
    found = [(place, one) for place, one in enumerate(containers) if one.get("name") == action.container]
    if not found:
        raise ActuationError("conflict", f"no container {action.container} is there any more")
    place, container = found[0]
    command, arguments = list(container.get("command") or ()), list(container.get("args") or ())
    said = read_engine([*command, *arguments])
    if said.limits != action.seen:
        raise ActuationError("conflict", f"the arguments say {said.limits}, not {action.seen}")
    if not action.restarts:
        return ()
    if said.fixed:
        raise ActuationError("invalid", said.fixed)
    changed = with_limits([*command, *arguments], action.limits)
    parts = (
        ("command", command, changed[: len(command)]),
        ("args", arguments, changed[len(command) :]),
    )
    where = f"{CONTAINERS}/{place}"
    operations: list[dict[str, Any]] = [{"op": "test", "path": f"{where}/name", "value": action.container}]
    for key, before, after in parts:
        if before:
            operations.append({"op": "test", "path": f"{where}/{key}", "value": before})
        if before != after:
            operations.append({"op": "replace", "path": f"{where}/{key}", "value": after})
    return operations


def _annotation(action: RollOut, annotations: Mapping[str, str] | None) -> Sequence[dict[str, Any]]:
    """Return the part that writes the note: a Deployment without annotations has no place for it yet."""
    path = f"{ANNOTATIONS}/{NOTE.replace('~', '~0').replace('/', '~1')}"
    if not annotations:
        return [{"op": "add", "path": ANNOTATIONS, "value": {NOTE: action.note}}]
    seen = [{"op": "test", "path": path, "value": action.note_seen}] if action.note_seen else []
    return [*seen, {"op": "add", "path": path, "value": action.note}]


def _note_of(deployment: Mapping[str, Any]) -> str:
    note = (deployment.get("metadata", {}).get("annotations") or {}).get(NOTE, "")
    return note if isinstance(note, str) else ""
