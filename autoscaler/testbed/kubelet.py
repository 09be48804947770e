"""A fake kubelet: nodes that exist only in the API, pods that only pretend to run.

It talks to a real API server and does what a kubelet does as seen through the API:

* registers nodes with `nvidia.com/gpu`, keeps them Ready and renews their Leases;
* takes the pods that the scheduler bound to them from Pending/ContainerCreating over Running to Ready, after a cold
  start, or lets them fail as an annotation says;
* on deletion drains, for at most the grace period, then removes the pod;
* serves one fake of vLLM's HTTP side for each ready pod at its `status.podIP`, an address in 127.0.0.0/8, which Linux
  answers on `lo` with no set-up. Before that nothing listens: connections are refused, as by a vLLM that loads.

It lacks: a container runtime, logs, exec, port-forward, probes (the fake says itself that it is ready), volumes, init
containers, images, resource pressure, evictions, and service routing: EndpointSlices refuse loopback addresses.

Annotations of a pod that override the defaults, usually set in a pod template:

    fake-kubelet/pull-seconds         in ContainerCreating
    fake-kubelet/cold-start-seconds   from a container's start to Ready
    fake-kubelet/drain-seconds        from deletion to the end, never above the grace period
    fake-kubelet/backoff-seconds      before the second restart; doubled with each, at most 300
    fake-kubelet/fail                 "pull" (ImagePullBackOff for ever), "never-ready", "crash" (ends instead of
                                      becoming ready, again and again), "oom" (the same, killed for memory)
    fake-kubelet/most-seqs            "crash" for a pod whose arguments say a higher --max-num-seqs

`POST http://<podIP>:<port>/fake` with a JSON object changes a ready pod: the numbers of `engine.Load`, `"ready": false`
for a readiness probe that fails, `"crash": "Error"` or `"OOMKilled"` for a container that ends and starts again.

As a program: `python -m autoscaler.testbed.kubelet --kubeconfig FILE --nodes gpu-0,gpu-1`. It prints a JSON line an
event. After SIGUSR1 whatever starts takes ten times as long to become ready, as from a slow disk; after SIGUSR2 as long
as before.
"""

import argparse
import asyncio
import contextlib
import ipaddress
import json
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import aiohttp
from aiohttp import web

from autoscaler.core.arguments import read_engine
from autoscaler.testbed.api import MERGE, STRATEGIC, Api, ApiError, Json
from autoscaler.testbed.engine import Engine, EngineServer, FakeEngine

PREFIX = "fake-kubelet/"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
LEASE_S = 40
MODEL = "fake-model"
LONGEST_BACKOFF_S = 300.0
SLOW = 10.0
RETRY_S = 0.2
FAILURES = {"crash": "Error", "oom": "OOMKilled"}
EXIT_CODES = {"Error": 1, "OOMKilled": 137}
UNREACHABLE = (aiohttp.ClientError, OSError, TimeoutError)


def stamp(*, micro: bool = False) -> str:
    """Return the time as the API writes it; `micro` as a Lease wants it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the nodes are like, and how long things take [s] where a pod's annotations do not say."""

    nodes: tuple[str, ...]
    gpus: int = 8
    labels: Mapping[str, str] = field(default_factory=dict)
    network: str = "127.10.0.0/16"
    port: int = 8000
    pull_s: float = 0.1
    cold_start_s: float = 1.0
    drain_s: float = 0.2
    backoff_s: float = 10.0
    heartbeat_s: float = 3.0


@dataclass(slots=True, kw_only=True)
class FakePod:
    """What is held of one pod.

    Attributes:
        ended: how its container ended last; "" when it never did.
        crash: set to how the container is to end now.
        probe: what its readiness probe says once it serves.
    """

    item: Json
    ip: str
    server: EngineServer | None = None
    task: asyncio.Task[None] | None = None
    terminating: bool = False
    ready: bool = False
    restarts: int = 0
    started: str = ""
    ended: str = ""
    crash: str = ""
    probe: bool = True
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def uid(self) -> str:
        return str(self.item["metadata"]["uid"])

    @property
    def name(self) -> str:
        return str(self.item["metadata"]["name"])

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.item['metadata']['namespace']}/pods/{self.name}"

    def text(self, key: str) -> str:
        """Return one of our annotations; "" where it is not set."""
        return str((self.item["metadata"].get("annotations") or {}).get(PREFIX + key, ""))

    def seconds(self, key: str, default: float) -> float:
        """Return one of our annotations as a number."""
        return float(self.text(key + "-seconds") or default)

    def told(self, wishes: Mapping[str, object]) -> None:
        """Take up what a test wants of the pod, beside its load."""
        unknown = wishes.keys() - {"crash", "ready"}
        if unknown:
            raise web.HTTPBadRequest(text=f"nothing is known of {sorted(unknown)}")
        self.crash = str(wishes.get("crash", self.crash))
        self.probe = bool(wishes.get("ready", self.probe))
        self.changed.set()


def say(**what: Any) -> None:
    """Print an event."""
    sys.stdout.write(json.dumps({"at": stamp(micro=True), **what}) + "\n")
    sys.stdout.flush()


class FakeKubelet:
    """The kubelets of some nodes. Leaving the context touches nothing: the nodes are lost, as when a kubelet dies.

    Args:
        engine: makes what serves in a pod that has loaded.
        told: is told of each event.
    """

    def __init__(
        self,
        api: Api,
        settings: Settings,
        *,
        engine: Callable[[], Engine] = lambda: FakeEngine(MODEL),
        told: Callable[..., None] = say,
    ) -> None:
        self._api = api
        self._settings = settings
        self._engine = engine
        self._say = told
        self._addresses = Addresses(settings.network)
        self._pods: dict[str, FakePod] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._slowness = 1.0

    def slow(self, factor: float) -> None:
        """Let cold starts that begin from now on take that many times as long."""
        self._slowness = factor

    async def __aenter__(self) -> Self:
        await self._api.__aenter__()
        for node in self._settings.nodes:
            await self._register(node)
        self._tasks = [asyncio.create_task(self._heartbeats()), asyncio.create_task(self._watch())]
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = self._tasks + [pod.task for pod in self._pods.values() if pod.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pod in self._pods.values():
            await _close(pod)
        await self._api.__aexit__()

    # --- nodes ------------------------------------------------------------------------------------------------------

    async def _register(self, node: str) -> None:
        labels = {"kubernetes.io/hostname": node, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
        labels |= {"nvidia.com/gpu.product": "fake", **self._settings.labels}
        metadata = {"name": node, "labels": labels}
        with _ignored(409):  # there already, from an earlier run
            await self._api.request(
                "POST",
                "/api/v1/nodes",
                {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"providerID": f"fake://{node}"}},
            )
        await self._beat(node)
        self._say(event="registered", node=node)

    async def _beat(self, node: str) -> None:
        status = node_status(node, self._settings.gpus)
        await self._api.request("PATCH", f"/api/v1/nodes/{node}/status", {"status": status}, content_type=STRATEGIC)
        spec = {"holderIdentity": node, "leaseDurationSeconds": LEASE_S, "renewTime": stamp(micro=True)}
        try:
            await self._api.request("PATCH", f"{LEASES}/{node}", {"spec": spec}, content_type=MERGE)
        except ApiError as error:
            if error.status != 404:
                raise
            metadata = {"name": node, "namespace": "kube-node-lease"}
            lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
            await self._api.request("POST", LEASES, lease)

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._settings.heartbeat_s)
            for node in self._settings.nodes:
                with contextlib.suppress(ApiError, *UNREACHABLE):
                    await self._beat(node)

    # --- pods -------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        async for kind, item in self._api.follow("/api/v1/pods"):
            if kind == "SYNC":
                seen = {pod["metadata"]["uid"] for pod in item["items"]}
                for uid in [uid for uid in self._pods if uid not in seen]:
                    await self._forget(uid)
                # Pods that have an address first, so that no new pod is given one of theirs.
                for pod in sorted(item["items"], key=lambda pod: "podIP" not in pod.get("status", {})):
                    self._observe(pod)
            elif kind == "DELETED":
                await self._forget(item["metadata"]["uid"])
            else:
                self._observe(item)

    def _observe(self, item: Json) -> None:
        """Take note of a pod as the API has it; begin to run or to end it."""
        metadata, status = item["metadata"], item.get("status", {})
        if item["spec"].get("nodeName") not in self._settings.nodes:
            return
        pod = self._pods.get(metadata["uid"])
        if pod is None:
            if status.get("phase") in ("Succeeded", "Failed"):
                return
            pod = FakePod(item=item, ip=self._addresses.take(status.get("podIP", "")))
            pod.restarts = max((known["restartCount"] for known in _containers(item)), default=0)
            self._pods[pod.uid] = pod
            pod.task = asyncio.create_task(self._guard(pod, self._run(pod)))
        pod.item = item
        if metadata.get("deletionTimestamp") and not pod.terminating:
            pod.terminating = True
            if pod.task is not None:
                pod.task.cancel()
            pod.task = asyncio.create_task(self._guard(pod, self._terminate(pod)))
        if pod.ready and not _is_said_ready(pod):
            pod.changed.set()

    async def _forget(self, uid: str) -> None:
        pod = self._pods.pop(uid, None)
        if pod is None:
            return
        if pod.task is not None:
            pod.task.cancel()
        await _close(pod)
        self._addresses.give_back(pod.ip)

    async def _guard(self, pod: FakePod, work: Awaitable[None]) -> None:
        """Do a pod's work; what the API refuses ends this pod's story, not the others'."""
        try:
            await work
        except (ApiError, *UNREACHABLE) as error:
            if not isinstance(error, ApiError) or error.status not in (404, 409):  # gone or replaced meanwhile
                self._say(event="error", pod=pod.name, error=repr(error))

    async def _run(self, pod: FakePod) -> None:
        """Live a pod's life, up to its deletion. A pod that is ready already goes on, as after a kubelet's restart."""
        fail, runs = "crash" if _asks_too_much(pod) else pod.text("fail"), _is_ready(pod)
        if not runs:
            await self._write(pod, "Pending", waiting="ContainerCreating")
            await asyncio.sleep(pod.seconds("pull", self._settings.pull_s))
        if fail == "pull":
            await self._write(pod, "Pending", waiting="ImagePullBackOff")
            return
        while True:
            if not runs:
                pod.started = stamp()
                await self._write(pod, "Running")
                await asyncio.sleep(self._slowness * pod.seconds("cold-start", self._settings.cold_start_s))
            if fail == "never-ready":
                return
            await self._crash(pod, FAILURES.get(fail) or await self._serve(pod))
            runs = False

    async def _serve(self, pod: FakePod) -> str:
        """Be ready, or not, until the container is told to end; return how."""
        pod.crash, pod.probe = "", True
        pod.server = EngineServer(self._engine(), pod.told)
        await pod.server.start(pod.ip, self._settings.port)
        while not pod.crash:
            pod.changed.clear()
            # The node controller says of a node's pods that they are not ready when no kubelet was heard for a while.
            if pod.ready is not pod.probe or pod.ready is not _is_said_ready(pod):
                pod.ready = pod.probe
                await self._write(pod, "Running")
            await pod.changed.wait()
        return pod.crash

    async def _crash(self, pod: FakePod, end: str) -> None:
        """End the container; return when it is time to start it again: at once the first time, then later and later."""
        await _close(pod)
        pod.ready, pod.ended = False, end
        if pod.restarts:
            await self._write(pod, "Running", waiting="CrashLoopBackOff")
            wait_s = pod.seconds("backoff", self._settings.backoff_s) * 2.0 ** (pod.restarts - 1)
            await asyncio.sleep(min(LONGEST_BACKOFF_S, wait_s))
        pod.restarts += 1

    async def _terminate(self, pod: FakePod) -> None:
        grace_s = pod.item["metadata"].get("deletionGracePeriodSeconds", 30)
        if pod.server is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await pod.server.drain(pod.seconds("drain", self._settings.drain_s))
        await _close(pod)
        await self._insist(
            "DELETE",
            pod.path,
            {
                "apiVersion": "v1",
                "kind": "DeleteOptions",
                "gracePeriodSeconds": 0,
                "preconditions": {"uid": pod.uid},
            },
        )
        self._say(event="gone", pod=pod.name)

    async def _write(self, pod: FakePod, phase: str, waiting: str = "") -> None:
        """Write the pod's status. The uid makes the server refuse if another pod took the name."""
        body = {"metadata": {"uid": pod.uid}, "status": pod_status(pod, phase, waiting)}
        answer = await self._insist("PATCH", pod.path + "/status", body, content_type=STRATEGIC)
        # The watch may have told meanwhile what became of it: the node controller's word right after ours.
        pod.item = max(pod.item, answer, key=_version)
        self._say(event=waiting or ("Ready" if pod.ready else phase), pod=pod.name, ip=pod.ip)

    async def _insist(self, method: str, path: str, body: Json, content_type: str = "application/json") -> Json:
        """Return the answer of a server that may be away for a while. Raises ApiError when it refuses."""
        while True:
            try:
                return await self._api.request(method, path, body, content_type=content_type)
            except UNREACHABLE:
                pass
            except ApiError as error:
                if error.status < 500 and error.status != 429:
                    raise
            await asyncio.sleep(RETRY_S)


class Addresses:
    """The pods' addresses. One given back is used again as late as possible, so that a stale one shows."""

    def __init__(self, network: str) -> None:
        self._network = ipaddress.ip_network(network)
        self._free = [str(host) for host in self._network.hosts()]

    def take(self, wanted: str = "") -> str:
        """Return the wanted address, else the one that has been free for longest."""
        if wanted in self._free:
            self._free.remove(wanted)
        return wanted or self._free.pop(0)

    def give_back(self, address: str) -> None:
        """Take an address back, if it is of this network."""
        if ipaddress.ip_address(address) in self._network:
            self._free.append(address)


def node_status(node: str, gpus: int) -> Json:
    """Return a healthy node's status."""
    room = {"cpu": "128", "memory": "1Ti", "pods": "250", "ephemeral-storage": "1Ti", "nvidia.com/gpu": str(gpus)}
    healthy = {"Ready": "True", "MemoryPressure": "False", "DiskPressure": "False", "PIDPressure": "False"}
    conditions = [
        {"type": kind, "status": value, "reason": "Fake", "message": "fake kubelet", "lastHeartbeatTime": stamp()}
        for kind, value in healthy.items()
    ]
    info = ["kubeletVersion", "osImage", "kernelVersion", "containerRuntimeVersion", "machineID", "systemUUID"]
    info += ["bootID", "kubeProxyVersion"]
    return {
        "capacity": room,
        "allocatable": room,
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}, {"type": "Hostname", "address": node}],
        "conditions": conditions,
        "nodeInfo": {"operatingSystem": "linux", "architecture": "amd64", **dict.fromkeys(info, "fake")},
    }


def pod_status(pod: FakePod, phase: str, waiting: str) -> Json:
    """Return a pod's status: that of its containers, all alike, and the conditions that follow from it."""
    running = phase == "Running" and not waiting
    ready = pod.ready and running
    conditions = {
        "PodReadyToStartContainers": phase == "Running",
        "Initialized": True,
        "ContainersReady": ready,
        "Ready": ready,
    }
    container: Json = {
        "image": "",
        "imageID": "",
        "ready": ready,
        "started": ready,
        "restartCount": pod.restarts,
        "state": {"waiting": {"reason": waiting}} if waiting else {"running": {"startedAt": pod.started or stamp()}},
    }
    if pod.ended:
        end = {"reason": pod.ended, "exitCode": EXIT_CODES.get(pod.ended, 1), "finishedAt": stamp()}
        container["lastState"] = {"terminated": end}
    status: Json = {
        "phase": phase,
        "startTime": pod.item.get("status", {}).get("startTime") or stamp(),
        "hostIP": "127.0.0.1",
        "conditions": [_condition(pod, kind, value) for kind, value in conditions.items()],
        "containerStatuses": [
            container | {"name": item["name"], "image": item["image"]} for item in pod.item["spec"]["containers"]
        ],
    }
    if phase == "Running":
        status |= {"podIP": pod.ip, "podIPs": [{"ip": pod.ip}]}
    return status


def _condition(pod: FakePod, kind: str, value: bool) -> Json:
    """Return a condition; its time is that of the last change, so it stays while the value does."""
    known: list[Json] = pod.item.get("status", {}).get("conditions") or []
    before = next((item for item in known if item["type"] == kind), {})
    same = before.get("status") == str(value)
    changed = before["lastTransitionTime"] if same else stamp()
    reason = {"reason": "ContainersNotReady"} if "Ready" in kind and not value else {"reason": None}
    return {"type": kind, "status": str(value), "lastTransitionTime": changed, **reason}


def _asks_too_much(pod: FakePod) -> bool:
    """Return whether an engine is to be started with more sequences than it would bear."""
    most = pod.text("most-seqs")
    said = [
        read_engine([*(one.get("command") or ()), *(one.get("args") or ())]).limits.max_num_seqs or 0
        for one in pod.item["spec"]["containers"]
    ]
    return bool(most) and max(said) > int(most)


def _is_ready(pod: FakePod) -> bool:
    """Return whether the API has the pod's containers as ready.

    Not its Ready condition: the node controller sets that False while no kubelet reports.
    """
    known = _containers(pod.item)
    return bool(known) and all(item["ready"] for item in known)


def _is_said_ready(pod: FakePod) -> bool:
    """Return whether the API has the pod as ready."""
    known: list[Json] = pod.item.get("status", {}).get("conditions") or []
    return any(item["type"] == "Ready" and item["status"] == "True" for item in known)


def _version(item: Json) -> int:
    """Return a number that is higher in a later state of an object."""
    return int(item["metadata"]["resourceVersion"])


def _containers(item: Json) -> list[Json]:
    return item.get("status", {}).get("containerStatuses") or []


async def _close(pod: FakePod) -> None:
    if pod.server is not None:
        await pod.server.stop()
        pod.server = None


@contextlib.contextmanager
def _ignored(status: int) -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        if error.status != status:
            raise


def _arguments(words: list[str]) -> tuple[Path, Settings]:
    parser = argparse.ArgumentParser(prog="fake kubelet")
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--nodes", required=True, help="names, with commas between them")
    parser.add_argument("--label", action="append", default=[], help="of the nodes: KEY=VALUE")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--network", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--cold-start", type=float, default=1.0)
    given = parser.parse_args(words)
    return given.kubeconfig, Settings(
        nodes=tuple(given.nodes.split(",")),
        labels=dict(label.split("=", 1) for label in given.label),
        gpus=given.gpus,
        network=given.network,
        port=given.port,
        cold_start_s=given.cold_start,
    )


async def main(words: list[str]) -> None:
    """Run until SIGTERM."""
    kubeconfig, settings = _arguments(words)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with FakeKubelet(Api.from_kubeconfig(kubeconfig), settings) as kubelet:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, kubelet.slow, SLOW)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, kubelet.slow, 1.0)
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
