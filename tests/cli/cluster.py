"""A fake cluster for the command line: an API server and the pods' pages over HTTP, in a thread of its own.

The pods are those of a small simulated fleet under traffic, in real time. A fake: it lacks what `tests.fake_api` lacks,
and nobody starts or ends pods, whatever the Deployment asks for.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from aiohttp import web

from autoscaler.sim.fleet import Fleet
from autoscaler.sim.profiles import profile
from autoscaler.sim.workload import Lengths, requests, steady
from tests.fake_api import FakeApi, deployment, pod

PODS = 2
STEP_S = 0.1
LONGEST_S = 120.0


@dataclass
class Cluster:
    """What a test needs to know of the cluster.

    Attributes:
        port: of every pod's page.
        dcgm_url: of a DCGM exporter's page.
    """

    folder: Path
    api: FakeApi = field(default_factory=FakeApi)
    port: int = 0
    dcgm_url: str = ""
    kubeconfig: str = ""

    def policy(
        self,
        name: str = "chat",
        deployment: str = "chat",
        more: str = "",
        replicas: str = "{max: 8}",
        labels: str = "{}",
    ) -> Path:
        """Write a policy for this cluster into the folder `policies`, and return its path."""
        path = self.folder / "policies" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            "apiVersion: autoscaler/v1alpha1\nkind: ScalingPolicy\n"
            f"metadata: {{name: {name}, labels: {labels}}}\nspec:\n"
            f"  target: {{namespace: serving, deployment: {deployment}}}\n"
            f"  replicas: {replicas}\n  interval: 1s\n"
            + (more if "signals:" in more else f"  signals: {{vllm: {{port: {self.port}}}}}\n{more}"),
            encoding="utf-8",
        )
        return path


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Run a cluster while the block runs."""
    one = Cluster(folder)
    up = threading.Event()
    failures: list[BaseException] = []
    loop = asyncio.new_event_loop()
    end = asyncio.Event()

    def work() -> None:
        try:
            loop.run_until_complete(_serve(one, up, end))
        except BaseException as error:  # noqa: BLE001 - shown by the test that waits
            failures.append(error)
        finally:
            up.set()
            loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        up.wait()
        if not failures:
            yield one
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(end.set)
        thread.join()
    if failures:
        raise failures[0]


async def _serve(one: Cluster, up: threading.Event, end: asyncio.Event) -> None:
    slow = replace(profile("llama-3.1-8b-l40sx1"), cold_start_s=30.0)
    traffic, life = np.random.default_rng(1).spawn(2)
    arrivals = requests(traffic, steady(4.0), Lengths(prompt=400.0, output=40.0), LONGEST_S)
    fleet = Fleet(slow, arrivals, replicas=PODS, epoch=time.time(), rng=life)
    async with one.api.serve(), fleet.serve() as port, _exporter(one):
        one.port = port
        one.api.deployment = deployment(replicas=PODS)
        pods = (await fleet.read()).pods
        one.api.pods = [pod(item.name, podIP=item.ip, started=item.created_at) for item in pods]
        one.kubeconfig = str(one.api.write_kubeconfig(one.folder / "kubeconfig"))
        up.set()
        started = time.monotonic()
        while not end.is_set() and fleet.now < LONGEST_S:
            fleet.advance(min(LONGEST_S, time.monotonic() - started))
            await asyncio.sleep(STEP_S)
        await end.wait()


@asynccontextmanager
async def _exporter(one: Cluster) -> AsyncIterator[None]:
    """Serve a DCGM exporter's page with one card of the first pod."""

    async def page(_request: web.Request) -> web.Response:
        labels = (
            f'gpu="0",UUID="GPU-a",exported_namespace="serving",exported_pod="{one.api.pods[0]["metadata"]["name"]}"'
        )
        return web.Response(text=f"DCGM_FI_DEV_FB_USED{{{labels}}} 40000\nDCGM_FI_DEV_FB_FREE{{{labels}}} 5000\n")

    app = web.Application()
    app.router.add_get("/metrics", page)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        one.dcgm_url = f"http://127.0.0.1:{runner.addresses[0][1]}/metrics"
        yield
    finally:
        await runner.cleanup()
