"""A small Kubernetes client for the tests: JSON over HTTP, and list-then-watch.

Deliberately not the client that the product uses, so that the two cannot be wrong in the same way.
"""

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import aiohttp
import yaml

Json = dict[str, Any]

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY = "application/apply-patch+yaml"

WATCH_S = 20
# A watch event is one line, and may be longer than aiohttp's default of 64 KiB.
LONGEST_LINE = 2**21
CONNECT_S, SILENCE_S = 5.0, 30.0

RESOURCES: Mapping[str, tuple[str, str]] = {
    "APIService": ("/apis/apiregistration.k8s.io/v1", "apiservices"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "Deployment": ("/apis/apps/v1", "deployments"),
    "HorizontalPodAutoscaler": ("/apis/autoscaling/v2", "horizontalpodautoscalers"),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
    "Namespace": ("/api/v1", "namespaces"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "Role": ("/apis/rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ("/apis/rbac.authorization.k8s.io/v1", "rolebindings"),
    "Service": ("/api/v1", "services"),
    "ServiceAccount": ("/api/v1", "serviceaccounts"),
}
CLUSTER_WIDE = frozenset({"APIService", "Namespace"})


class ApiError(Exception):
    """The API server refused.

    Attributes:
        status: the HTTP status.
        body: its Status object; empty where the answer was none.
    """

    def __init__(self, status: int, raw: bytes) -> None:
        super().__init__(f"HTTP {status}: {raw[:500].decode(errors='replace')}")
        self.status = status
        try:
            self.body: Json = json.loads(raw)
        except ValueError:
            self.body = {}


class Event(NamedTuple):
    """One event of `Api.follow`: SYNC with the whole list, or ADDED, MODIFIED, DELETED with one object."""

    kind: str
    object: Json


class Api:
    """One user's view of one API server. Each use of it as a context opens and closes its own connections."""

    def __init__(self, server: str, certificates: str, token: str) -> None:
        self._server = server.rstrip("/")
        self._certificates = certificates
        self._token = token
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def from_kubeconfig(cls, path: Path) -> Self:
        """Return the API of a kubeconfig as `Plane` writes them: one cluster, its certificates inside, and a token."""
        content = yaml.safe_load(path.read_text())
        cluster, user = content["clusters"][0]["cluster"], content["users"][0]["user"]
        certificates = base64.b64decode(cluster["certificate-authority-data"]).decode()
        return cls(cluster["server"], certificates, user["token"])

    async def __aenter__(self) -> Self:
        context = ssl.create_default_context(cadata=self._certificates)
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._token}", "User-Agent": "cluster-tests"},
            connector=aiohttp.TCPConnector(ssl=context, limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S),
            read_bufsize=LONGEST_LINE,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Json:
        """Return the object that the server answers with. Raises ApiError when it refuses."""
        answer, _ = await self.exchange(method, path, body, query=query, content_type=content_type)
        return answer

    async def exchange(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> tuple[Json, str]:
        """Return the answer's object, and the id of the request in the audit log. Raises ApiError."""
        async with self._open.request(
            method,
            self._server + path,
            params=query,
            data=None if body is None else json.dumps(body),
            headers={"Content-Type": content_type},
        ) as response:
            raw = await response.read()
            if response.status >= 300:
                raise ApiError(response.status, raw)
            return _object(raw), response.headers.get("Audit-Id", "")

    async def get(self, path: str, **query: str) -> Json:
        """Return the object at the path."""
        return await self.request("GET", path, query=query)

    async def items(self, path: str, **query: str) -> list[Json]:
        """Return a list's items."""
        return list((await self.get(path, **query))["items"])

    async def apply(self, *manifests: Json, namespace: str = "") -> list[Json]:
        """Apply on the server side, with strict validation; return the objects as the server has them then.

        Args:
            namespace: of manifests that name none.
        """
        query = {"fieldManager": "cluster-tests", "force": "true", "fieldValidation": "Strict"}
        applied = []
        for manifest in manifests:
            path = path_of(manifest, namespace)
            applied.append(await self.request("PATCH", path, manifest, query=query, content_type=APPLY))
        return applied

    async def follow(self, path: str) -> AsyncGenerator[Event]:
        """Yield the list, then what changes, for ever; after trouble the list again."""
        version = ""
        while True:
            try:
                if not version:
                    listing = await self.get(path)
                    version = listing["metadata"]["resourceVersion"]
                    yield Event("SYNC", listing)
                async for event in self._watch(path, version):
                    version = event.object["metadata"]["resourceVersion"]
                    if event.kind != "BOOKMARK":
                        yield event
            except (ApiError, aiohttp.ClientError, OSError, TimeoutError, ValueError):
                version = ""
                await asyncio.sleep(0.2)

    async def _watch(self, path: str, version: str) -> AsyncIterator[Event]:
        """Yield one watch's events until the server ends it. Raises ApiError when the version is too old."""
        query = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        async with self._open.get(self._server + path, params=query | {"timeoutSeconds": str(WATCH_S)}) as response:
            if response.status != 200:
                raise ApiError(response.status, await response.read())
            async for line in response.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise ApiError(event["object"].get("code", 500), line)
                yield Event(event["type"], event["object"])

    @property
    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use it as a context")
        return self._session


def path_of(manifest: Json, namespace: str = "") -> str:
    """Return the path of a manifest's object."""
    root, plural = RESOURCES[manifest["kind"]]
    metadata = manifest["metadata"]
    if manifest["kind"] in CLUSTER_WIDE:
        return f"{root}/{plural}/{metadata['name']}"
    return f"{root}/namespaces/{metadata.get('namespace') or namespace}/{plural}/{metadata['name']}"


def _object(raw: bytes) -> Json:
    """Return an answer's object; readiness probes and the like answer plain text, which is none."""
    try:
        content = json.loads(raw)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
