"""A fake of the Kubernetes API server, small enough to read, over real HTTP on loopback.

It has: GET of one Deployment; lists with pages or by one name, and watches with bookmarks, of Deployments, ReplicaSets,
Pods and HorizontalPodAutoscalers; JSON patch of a Deployment, GET and JSON patch of its scale, with uid, generation and
resourceVersion; merge patches of a pod's annotations; a list of Nodes; Events that are created and patched; reviews of
one's own access; bearer tokens, rights by role, and faults.

It lacks: every controller (a scaled Deployment gets no pods), TLS, every other kind and verb, other merge patches than
those of pods and Events, defaulting, field managers and validation beyond a replica count that must be a number from 0.
A watch sees what a test changes by looking a hundred times a second, so that two changes within that time are one, and
pages are not of one version.
"""

import asyncio
import copy
import json
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

Json = dict[str, Any]
Right = tuple[str, str, str]

DEPLOYMENT_UID = "11111111-1111-4111-8111-111111111111"
PATH = re.compile(
    r"^/(?:api|apis/(?P<group>[^/]+))/(?P<version>v[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<kind>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?$"
)
WATCHED = ("deployments", "replicasets", "pods", "horizontalpodautoscalers")
LOOK_EVERY_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong with one request.

    Args:
        status, body, headers: the answer; no `status` answers as if nothing were wrong.
        hang: never answer.
        apply: carry the request out first.
        cut: end the connection in the middle of the body.
        silent: say nothing more after the body, and do not end it.
    """

    status: int = 0
    body: str | Json | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    hang: bool = False
    apply: bool = False
    cut: bool = False
    silent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as it arrived; `resource` is the kind with its subresource, as in a role."""

    group: str
    resource: str
    verb: str
    token: str
    content_type: str
    query: Mapping[str, str]
    body: Any

    @property
    def right(self) -> Right:
        """The right that it needs."""
        return self.group, self.resource, self.verb


class FakeApi:
    """One namespace with one Deployment in memory; change the attributes to change the world.

    Args:
        rights: API group, resource and verb of what is allowed; None allows everything.
        tokens: accepted bearer tokens; None accepts everybody.

    Attributes:
        faults: by "verb resource", e.g. "patch deployments/scale"; the first is taken with each such request.
        connections: how many TCP connections were made.
        forgotten: a watch from this version or an earlier one is told that it is too old.
        bookmarks: a watch ends with one, where it is wanted; the real server sends none that says nothing new.
        watches: the kinds that are being watched now, one entry a stream.
    """

    def __init__(self, *, rights: Iterable[Right] | None = None, tokens: Iterable[str] | None = None) -> None:
        self.deployment: Json | None = deployment()
        self.replica_sets: list[Json] = [replica_set("chat-1")]
        self.pods: list[Json] = []
        self.hpas: list[Json] = []
        self.nodes: list[Json] = []
        self.events: dict[str, Json] = {}
        self.rights = None if rights is None else frozenset(rights)
        self.tokens = None if tokens is None else set(tokens)
        self.faults: dict[str, list[Fault]] = {}
        self.requests: list[Request] = []
        self.url = ""
        self.version = 1000
        self.forgotten = 0
        self.bookmarks = True
        self.watches: list[str] = []
        self._known: dict[str, dict[str, Json]] = {kind: {} for kind in WATCHED}
        self._log: list[tuple[int, str, Json]] = []
        self._peers: set[object] = set()

    @property
    def connections(self) -> int:
        """How many TCP connections were made so far."""
        return len(self._peers)

    def verbs(self) -> list[str]:
        """Return the requests so far, each as "verb resource"."""
        return [f"{request.verb} {request.resource}" for request in self.requests]

    def write_kubeconfig(self, path: Path, user: Json | None = None) -> Path:
        """Write a kubeconfig that leads here, with a context named `fake`."""
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "tester"}}],
            "users": [{"name": "tester", "user": user or {}}],
        }
        path.write_text(yaml.safe_dump(content))
        return path

    @asynccontextmanager
    async def serve(self) -> AsyncIterator["FakeApi"]:
        """Listen on a free port of 127.0.0.1 while the block runs."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        self._peers.add(None if http.transport is None else http.transport.get_extra_info("peername"))
        match = PATH.match(http.path)
        if match is None:
            return _status(404, "NotFound", f"no such path {http.path}")
        resource = match["kind"] + (f"/{match['sub']}" if match["sub"] else "")
        reading = "get" if match["name"] else "watch" if http.query.get("watch") == "true" else "list"
        verb = {"GET": reading, "POST": "create"}.get(http.method, http.method.lower())
        request = Request(
            group=match["group"] or "",
            resource=resource,
            verb=verb,
            token=http.headers.get("Authorization", "").removeprefix("Bearer "),
            content_type=http.content_type,
            query=dict(http.query),
            body=await http.json() if http.can_read_body else None,
        )
        self.requests.append(request)
        faults = self.faults.get(f"{verb} {resource}")
        fault = faults.pop(0) if faults else Fault()
        if fault.cut or fault.silent:
            return await self._broken(http, fault)
        if verb == "watch" and not fault.hang and not fault.status:
            return self._refused(request) or await self._watch(http, request)
        answer = None if (fault.hang or fault.status) and not fault.apply else self._answer(request, match["name"])
        if fault.hang:
            await asyncio.Event().wait()
        if fault.status and isinstance(fault.body, str):
            return web.Response(status=fault.status, text=fault.body, headers=dict(fault.headers))
        if fault.status or answer is None:
            return web.json_response(fault.body or {}, status=fault.status, headers=dict(fault.headers))
        return answer

    def _refused(self, request: Request) -> web.Response | None:
        if self.tokens is not None and request.token not in self.tokens:
            return _status(401, "Unauthorized", "Unauthorized")
        free = self.rights is None or request.resource == "selfsubjectaccessreviews"
        if not free and request.right not in (self.rights or ()):
            return _status(403, "Forbidden", f"{request.resource} is forbidden: cannot {request.verb} resource")
        return None

    def _lists(self) -> dict[str, list[Json]]:
        return {
            "deployments": [] if self.deployment is None else [self.deployment],
            "replicasets": self.replica_sets,
            "pods": self.pods,
            "horizontalpodautoscalers": self.hpas,
            "nodes": self.nodes,
        }

    def _list(self, request: Request) -> web.Response:
        self._look()
        query = request.query
        named = query.get("fieldSelector", "").removeprefix("metadata.name=")
        selected = [item for item in self._lists()[request.resource] if named in ("", item["metadata"]["name"])]
        start = int(query.get("continue", 0))
        end = start + int(query.get("limit", len(selected)))
        metadata = {"resourceVersion": str(self.version)} | ({"continue": str(end)} if end < len(selected) else {})
        return web.json_response({"kind": "List", "metadata": metadata, "items": selected[start:end]})

    def _look(self) -> None:
        """Take note of what was changed since the last look."""
        for kind in WATCHED:
            known, items = self._known[kind], {item["metadata"]["name"]: item for item in self._lists()[kind]}
            for name, item in list(known.items()):
                if name not in items or items[name]["metadata"].get("uid") != item["metadata"].get("uid"):
                    self._tell(kind, "DELETED", known.pop(name))
            for name, item in items.items():
                if known.get(name) != item:
                    event = "MODIFIED" if name in known else "ADDED"
                    known[name] = copy.deepcopy(item)
                    self._tell(kind, event, known[name])

    def _tell(self, kind: str, event: str, item: Json) -> None:
        self.version += 1
        told = item | {"metadata": item["metadata"] | {"resourceVersion": str(self.version)}}
        self._log.append((self.version, kind, {"type": event, "object": told}))

    async def _watch(self, http: web.Request, request: Request) -> web.StreamResponse:
        """Tell what happened to one kind since a version, until the time that was asked for is over."""
        since = int(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(http)
        if since <= self.forgotten:
            status = {"kind": "Status", "metadata": {}, "code": 410, "reason": "Expired", "message": "too old"}
            await response.write(_line({"type": "ERROR", "object": status}))
            return response
        loop = asyncio.get_running_loop()
        deadline = loop.time() + float(request.query["timeoutSeconds"])
        self.watches.append(request.resource)
        try:
            while loop.time() < deadline:
                self._look()
                now = self.version
                told = [event for version, kind, event in self._log if version > since and kind == request.resource]
                for event in told:
                    await response.write(_line(event))
                since = now
                await asyncio.sleep(LOOK_EVERY_S)
            if self.bookmarks and request.query.get("allowWatchBookmarks") == "true":
                bookmark = {"metadata": {"resourceVersion": str(since)}}
                await response.write(_line({"type": "BOOKMARK", "object": bookmark}))
        finally:
            self.watches.remove(request.resource)
        return response

    async def _broken(self, http: web.Request, fault: Fault) -> web.StreamResponse:
        """Begin an answer, and never end it well."""
        response = web.StreamResponse()
        await response.prepare(http)
        await response.write(str(fault.body or "").encode())
        if fault.silent:
            await asyncio.Event().wait()
        if http.transport is not None:
            http.transport.abort()
        return response

    def _answer(self, request: Request, name: str | None) -> web.Response:
        refused = self._refused(request)
        if refused is not None:
            return refused
        if request.resource == "selfsubjectaccessreviews":
            return self._review(request)
        if request.verb == "list" and request.resource in self._lists():
            return self._list(request)
        if request.resource == "events":
            return self._event(request, name)
        if (request.verb, request.resource) == ("patch", "pods"):
            return self._patch_pod(request, name)
        if self.deployment is None or name != self.deployment["metadata"]["name"]:
            return _status(404, "NotFound", f'deployments.apps "{name}" not found')
        if (request.verb, request.resource) == ("get", "deployments"):
            return web.json_response(self.deployment)
        if (request.verb, request.resource) == ("patch", "deployments"):
            return self._patch_deployment(self.deployment, request)
        if (request.verb, request.resource) == ("get", "deployments/scale"):
            return web.json_response(self._scale(self.deployment))
        if (request.verb, request.resource) == ("patch", "deployments/scale"):
            return self._patch_scale(self.deployment, request)
        return _status(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def _review(self, request: Request) -> web.Response:
        """Answer whether the caller may do what it asks about."""
        asked = request.body["spec"]["resourceAttributes"]
        resource = asked["resource"] + (f"/{asked['subresource']}" if asked.get("subresource") else "")
        allowed = self.rights is None or (asked["group"], resource, asked["verb"]) in self.rights
        return web.json_response(request.body | {"status": {"allowed": allowed}}, status=201)

    def _event(self, request: Request, name: str | None) -> web.Response:
        if request.verb == "create":
            name = request.body["metadata"]["name"]
            if name in self.events:
                return _status(409, "AlreadyExists", f'events "{name}" already exists')
            self.events[name] = request.body
            return web.json_response(request.body, status=201)
        if name not in self.events:
            return _status(404, "NotFound", f'events "{name}" not found')
        self.events[name] |= request.body
        return web.json_response(self.events[name])

    def _patch_pod(self, request: Request, name: str | None) -> web.Response:
        """Merge a pod's annotations, provided that its uid is the one in the patch."""
        found = next((item for item in self.pods if item["metadata"]["name"] == name), None)
        if found is None:
            return _status(404, "NotFound", f'pods "{name}" not found')
        metadata, sent = found["metadata"], request.body["metadata"]
        if sent.get("uid", metadata["uid"]) != metadata["uid"]:
            return _status(409, "Conflict", "Precondition failed: UID in precondition")
        merged = metadata.get("annotations", {}) | sent.get("annotations", {})
        metadata["annotations"] = {key: value for key, value in merged.items() if value is not None}
        return web.json_response(found)

    def _scale(self, target: Json) -> Json:
        """Return the Scale; as in the real one, zero replicas are left out."""
        replicas = target["spec"]["replicas"]
        kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {key: target["metadata"][key] for key in kept},
            "spec": {"replicas": replicas} if replicas else {},
            "status": {"replicas": target["status"].get("replicas", 0), "selector": "app=chat"},
        }

    def _patch_deployment(self, target: Json, request: Request) -> web.Response:
        """Patch the whole Deployment; a changed template is another generation."""
        if request.content_type != "application/json-patch+json":
            return _status(415, "UnsupportedMediaType", "this fake takes JSON patches only")
        try:
            patched = json_patch(target, request.body)
        except PatchError:
            return _status(422, "Invalid", "the server rejected our request due to an error in our request")
        metadata = patched["metadata"]
        metadata["resourceVersion"] = str(int(metadata["resourceVersion"]) + 1)
        metadata["generation"] += patched["spec"] != target["spec"]
        self.deployment = patched
        return web.json_response(patched)

    def _patch_scale(self, target: Json, request: Request) -> web.Response:
        if request.content_type != "application/json-patch+json":
            return _status(415, "UnsupportedMediaType", "this fake takes JSON patches only")
        try:
            patched = json_patch(self._scale(target), request.body)
        except PatchError:
            return _status(422, "Invalid", "the server rejected our request due to an error in our request")
        replicas = patched["spec"].get("replicas", 0)
        if type(replicas) is not int or replicas < 0:
            causes = [{"reason": "FieldValueInvalid", "field": "spec.replicas"}]
            return _status(422, "Invalid", f"spec.replicas: Invalid value: {replicas}", causes)
        metadata = target["metadata"]
        metadata["resourceVersion"] = str(int(metadata["resourceVersion"]) + 1)
        metadata["generation"] += replicas != target["spec"]["replicas"]
        target["spec"]["replicas"] = replicas
        return web.json_response(self._scale(target))


def _line(event: Json) -> bytes:
    return json.dumps(event).encode() + b"\n"


class PatchError(Exception):
    """A JSON patch does not apply."""


def json_patch(document: Any, operations: Iterable[Mapping[str, Any]]) -> Any:
    """Return the document after `test`, `add`, `replace` and `remove` (RFC 6902); there are no `move` and `copy`."""
    document = copy.deepcopy(document)
    for operation in operations:
        *parents, last = (part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:])
        place = document
        for part in parents:
            place = _child(place, part)
        if operation["op"] == "test":
            if _child(place, last) != operation["value"]:
                raise PatchError(f"test of {operation['path']} failed")
        elif operation["op"] == "add" and isinstance(place, list):
            place.insert(len(place) if last == "-" else int(last), operation["value"])
        elif operation["op"] == "add":
            place[last] = operation["value"]
        else:
            _child(place, last)
            key = int(last) if isinstance(place, list) else last
            if operation["op"] == "replace":
                place[key] = operation["value"]
            else:
                del place[key]
    return document


def _child(place: Any, part: str) -> Any:
    try:
        return place[int(part) if isinstance(place, list) else part]
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise PatchError(f"nothing at {part}") from error


def _status(code: int, reason: str, message: str, causes: list[Json] | None = None) -> web.Response:
    details: Json = {"causes": causes} if causes else {}
    body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code}
    return web.json_response(body | {"reason": reason, "message": message, "details": details}, status=code)


def stamp(at: float) -> str:
    """Return epoch seconds as the API writes times."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def deployment(*, name: str = "chat", uid: str = DEPLOYMENT_UID, replicas: int = 2, **status: Any) -> Json:
    """Return a Deployment whose rollout is complete; `status` overrides its status."""
    full = {"observedGeneration": 3, "replicas": replicas, "readyReplicas": replicas, "updatedReplicas": replicas}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": name,
            "namespace": "serving",
            "uid": uid,
            "resourceVersion": "100",
            "generation": 3,
            "creationTimestamp": stamp(0.0),
            "annotations": {"deployment.kubernetes.io/revision": "1"},
        },
        "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": "chat"}}},
        # As in the real API, zeros are left out.
        "status": {key: value for key, value in (full | status).items() if value},
    }


def manager(
    name: str, at: float | None = None, *, field: str = "replicas", subresource: str = "", operation: str = "Update"
) -> Json:
    """Return an entry of `managedFields`: who wrote which field of the spec, and when."""
    return {
        "manager": name,
        "operation": operation,
        "apiVersion": "apps/v1",
        "fieldsType": "FieldsV1",
        "fieldsV1": {"f:metadata": {"f:labels": {}}, "f:spec": {f"f:{field}": {}, "f:template": {}}},
        **({} if at is None else {"time": stamp(at)}),
        **({"subresource": subresource} if subresource else {}),
    }


def replica_set(
    name: str, *, owner: str = DEPLOYMENT_UID, revision: int = 1, wanted: int = 2, living: int | None = None
) -> Json:
    """Return a ReplicaSet; its uid is `rs-` and its name."""
    replicas = wanted if living is None else living
    return {
        "metadata": {
            "name": name,
            "uid": f"rs-{name}",
            "labels": {"app": "chat", "pod-template-hash": name},
            "annotations": {"deployment.kubernetes.io/revision": str(revision)},
            "ownerReferences": [_owner("Deployment", owner)],
        },
        "spec": {"replicas": wanted},
        "status": {"replicas": replicas},
    }


def pod(
    name: str,
    *,
    owner: str = "chat-1",
    started: float = 0.0,
    ready: bool = True,
    changed: float = 100.0,
    args: Iterable[str] = (),
    restarts: int = 0,
    state: Json | None = None,
    last_state: Json | None = None,
    **status: Any,
) -> Json:
    """Return a running pod of the ReplicaSet `owner`; its uid is `pod-` and its name; `status` overrides its status."""
    condition = {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": stamp(changed)}
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp(started)}
    container = {
        "name": "vllm",
        "ready": ready,
        "restartCount": restarts,
        "state": state or {"running": {"startedAt": stamp(started)}},
        "lastState": last_state or {},
    }
    return {
        "metadata": {
            "name": name,
            "namespace": "serving",
            "uid": f"pod-{name}",
            "labels": {"app": "chat", "pod-template-hash": owner},
            "creationTimestamp": stamp(started),
            "ownerReferences": [_owner("ReplicaSet", f"rs-{owner}")],
        },
        "spec": {"nodeName": "node-a", "containers": [{"name": "vllm", "args": list(args)}]},
        "status": {
            "phase": "Running",
            "podIP": "10.1.0.5",
            "startTime": stamp(started),
            "conditions": [scheduled, condition],
            "containerStatuses": [container],
        }
        | status,
    }


def pending_pod(name: str, *, owner: str = "chat-1", since: float = 0.0, reason: str = "Unschedulable") -> Json:
    """Return a pod that has no node: no address, no container, no Ready condition."""
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": reason,
        "message": "0/9 nodes are available: 9 Insufficient nvidia.com/gpu.",
        "lastTransitionTime": stamp(since),
    }
    item = pod(name, owner=owner, started=since)
    del item["spec"]["nodeName"]
    item["status"] = {"phase": "Pending", "conditions": [condition]}
    return item


def hpa(
    name: str, *, target: str = "chat", kind: str = "Deployment", version: str | None = "apps/v1", scaled: str = ""
) -> Json:
    """Return a HorizontalPodAutoscaler (autoscaling/v2); `scaled` names the ScaledObject that owns it."""
    reference = {"kind": kind, "name": target} | ({} if version is None else {"apiVersion": version})
    owners = [
        {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "name": scaled, "uid": "s", "controller": True}
    ]
    return {
        "metadata": {"name": name, "namespace": "serving"} | ({"ownerReferences": owners} if scaled else {}),
        "spec": {"scaleTargetRef": reference, "maxReplicas": 9},
    }


def _owner(kind: str, uid: str) -> Json:
    return {"apiVersion": "apps/v1", "kind": kind, "uid": uid, "controller": True, "blockOwnerDeletion": True}


class FakeClock:
    """A clock that stands still until it is told to move."""

    def __init__(self, at: float = 1_000.0) -> None:
        self.at = at

    def now(self) -> float:
        """Return epoch seconds."""
        return self.at

    async def sleep_until(self, at: float) -> None:
        """Move to `at` at once."""
        self.at = max(self.at, at)
