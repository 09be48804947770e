"""The objects that tests put into a cluster, and short ways to wait for what becomes of them."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from autoscaler.testbed import accounts
from autoscaler.testbed.api import Api, Json
from autoscaler.testbed.kubelet import PREFIX
from autoscaler.testbed.plane import Plane, Process

DEPLOYMENTS = "/apis/apps/v1/namespaces/{namespace}/deployments"
PODS = "/api/v1/namespaces/{namespace}/pods"
LIMIT_S = 60.0
POLL_S = 0.05


class Place(NamedTuple):
    """A namespace of its own for one test, and the API as an administrator sees it."""

    plane: Plane
    api: Api
    namespace: str

    @property
    def deployments(self) -> str:
        """The path of its Deployments."""
        return DEPLOYMENTS.format(namespace=self.namespace)

    @property
    def pods(self) -> str:
        """The path of its pods."""
        return PODS.format(namespace=self.namespace)

    async def apply(self, *manifests: Json) -> list[Json]:
        """Apply into this namespace."""
        return await self.api.apply(*manifests, namespace=self.namespace)

    async def create(self, manifest: Json) -> Json:
        """Create a Deployment. Not applied, so that only a controller or a test's subject owns its replicas."""
        return await self.api.request("POST", self.deployments, manifest, query={"fieldValidation": "Strict"})

    async def read(self, name: str = "chat") -> Json:
        """Return a Deployment."""
        return await self.api.get(f"{self.deployments}/{name}")

    async def list_pods(self) -> list[Json]:
        """Return the pods, oldest first."""
        pods = await self.api.items(self.pods)
        return sorted(pods, key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]))

    async def until(self, true: Callable[[list[Json]], bool], what: str) -> list[Json]:
        """Return the pods once something is true of them. Raises TimeoutError that shows them."""
        deadline = time.monotonic() + LIMIT_S
        while not true(pods := await self.list_pods()):
            if time.monotonic() > deadline:
                shown = [(pod["metadata"]["name"], pod["status"]) for pod in pods]
                raise TimeoutError(f"no {what} within {LIMIT_S:g} s: {shown}")
            await asyncio.sleep(POLL_S)
        return pods

    async def until_ready(self, count: int, name: str = "chat") -> list[Json]:
        """Return a Deployment's pods once so many are ready, it has no others, and its status says the same."""

        def are_ready(pods: list[Json]) -> bool:
            own = of_deployment(pods, name)
            return len(own) == count and all(map(is_ready, own))

        pods = of_deployment(await self.until(are_ready, f"{count} pods of {name} that are ready"), name)

        async def said() -> bool:
            deployment = await self.read(name)
            status = deployment["status"]
            seen: bool = status.get("observedGeneration") == deployment["metadata"]["generation"]
            counts = {status.get(key, 0) for key in ("replicas", "readyReplicas", "updatedReplicas")}
            return seen and counts == {count}

        await eventually(said, f"status with {count} ready replicas")
        return pods

    async def tell(self, pods: Iterable[Json], **wishes: object) -> None:
        """Tell fake pods that are ready what to be like; see `kubelet`."""
        async with httpx.AsyncClient() as client:
            for pod in pods:
                answer = await client.post(f"http://{address_of(self.plane, pod)}/fake", json=wishes)
                answer.raise_for_status()


class Pool(NamedTuple):
    """A node with eight GPUs of its own for one test.

    Attributes:
        label: the value of its label `pool`.
    """

    label: str
    kubelet: Process


async def new_place(plane: Plane, api: Api, namespace: str) -> Place:
    """Return a namespace that is made now, once pods can be made in it."""
    await api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})

    async def has_account() -> bool:
        return bool(await api.items(f"/api/v1/namespaces/{namespace}/serviceaccounts"))

    await eventually(has_account, "default account")
    return Place(plane, api, namespace)


Right = accounts.Right


async def grant(place: Place, rights: Iterable[Right], account: str = "subject") -> None:
    """Make an account with these rights, and wait until it has them."""
    await accounts.grant(place.api, place.namespace, account, list(rights))


async def until_granted(place: Place, rights: Iterable[Right], account: str, *, allowed: bool = True) -> None:
    """Return once an account has these rights, or none of them: the authorizer takes up roles a moment later."""
    await accounts.until_granted(place.api, place.namespace, account, list(rights), allowed=allowed)


async def takes_pods(place: Place, node: str) -> bool:
    """Return whether pods can be scheduled onto a node."""
    found = [item for item in await place.api.items("/api/v1/nodes") if item["metadata"]["name"] == node]
    return any(condition(item, "Ready").get("status") == "True" and not item["spec"].get("taints") for item in found)


async def eventually(true: Callable[[], Awaitable[bool]], what: str, limit_s: float = LIMIT_S) -> None:
    """Return once something is true. Raises TimeoutError."""
    deadline = time.monotonic() + limit_s
    while not await true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {limit_s:g} s")
        await asyncio.sleep(POLL_S)


def deployment(
    name: str = "chat",
    *,
    replicas: int = 2,
    gpus: int = 1,
    fake: Mapping[str, object] | None = None,
    strategy: Json | None = None,
    pool: str = "",
    args: Iterable[str] = ("--max-num-seqs", "64"),
) -> Json:
    """Return a Deployment of engines.

    Args:
        fake: what the fake kubelet does with its pods, e.g. `{"fail": "crash"}`.
        pool: the value of the node label `pool` that its pods ask for.
    """
    annotations = {PREFIX + key: str(value) for key, value in (fake or {}).items()}
    pod: dict[str, Any] = {
        "terminationGracePeriodSeconds": 5,
        "containers": [
            {
                "name": "vllm",
                "image": "vllm/vllm-openai",
                "args": list(args),
                "resources": {"limits": {"nvidia.com/gpu": str(gpus)}},
            }
        ],
    }
    if pool:
        pod["nodeSelector"] = {"pool": pool}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}, "annotations": annotations}, "spec": pod},
            **({"strategy": strategy} if strategy else {}),
        },
    }


def autoscaler_of(name: str, *, max_replicas: int = 5, utilization: int = 50) -> Json:
    """Return a HorizontalPodAutoscaler on CPU, of which nothing in this cluster gives a measurement."""
    target = {"type": "Utilization", "averageUtilization": utilization}
    return _autoscaler(name, max_replicas, {"type": "Resource", "resource": {"name": "cpu", "target": target}})


def queue_autoscaler_of(name: str, *, each: int, max_replicas: int = 5) -> Json:
    """Return a HorizontalPodAutoscaler on the external metric `queue`, with defaults: so many requests a replica."""
    metric = {"name": "queue", "selector": {"matchLabels": {"app": name}}}
    target = {"type": "AverageValue", "averageValue": str(each)}
    return _autoscaler(name, max_replicas, {"type": "External", "external": {"metric": metric, "target": target}})


def _autoscaler(name: str, max_replicas: int, metric: Json) -> Json:
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": name},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicas": 1,
            "maxReplicas": max_replicas,
            "metrics": [metric],
        },
    }


def of_deployment(pods: Iterable[Json], name: str) -> list[Json]:
    """Return the pods that a Deployment's ReplicaSets made: their names are its own, a hash and five letters."""
    return [pod for pod in pods if pod["metadata"]["name"].rsplit("-", 2)[0] == name]


def condition(item: Json, kind: str) -> Json:
    """Return a condition of an object; empty where it has none of that type."""
    known = item.get("status", {}).get("conditions") or ()
    return next((one for one in known if one["type"] == kind), {})


def is_ready(pod: Json) -> bool:
    """Return whether a pod is ready and not on its way out."""
    return condition(pod, "Ready").get("status") == "True" and "deletionTimestamp" not in pod["metadata"]


def is_unschedulable(pod: Json) -> bool:
    """Return whether the scheduler finds no node for a pod."""
    return condition(pod, "PodScheduled").get("reason") == "Unschedulable"


def container(pod: Json) -> Json:
    """Return the status of a pod's container; empty before the kubelet has written one."""
    return next(iter(pod.get("status", {}).get("containerStatuses") or ()), {})


def waits_for(pod: Json) -> str:
    """Return why a pod's container waits; "" when it does not."""
    return str(container(pod).get("state", {}).get("waiting", {}).get("reason", ""))


def address_of(plane: Plane, pod: Json) -> str:
    """Return where a pod's HTTP server is."""
    return f"{pod['status']['podIP']}:{plane.port}"


def policy(
    folder: Path,
    plane: Plane,
    namespace: str,
    *,
    name: str = "chat",
    replicas: str = "{max: 8}",
    more: str = "",
    labels: str = "{}",
    stale_after: str = "15s",
    interval: str = "1s",
) -> Path:
    """Write a policy for a Deployment of that namespace, and return its path."""
    path = folder / f"{name}.yaml"
    path.write_text(
        "apiVersion: autoscaler/v1alpha1\nkind: ScalingPolicy\n"
        f"metadata: {{name: {name}, labels: {labels}}}\nspec:\n"
        f"  target: {{namespace: {namespace}, deployment: {name}}}\n"
        f"  replicas: {replicas}\n  interval: {interval}\n"
        f"  signals: {{vllm: {{port: {plane.port}, timeout: 900ms, staleAfter: {stale_after}}}}}\n{more}"
    )
    return path
