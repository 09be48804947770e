"""Engines whose limits stand in their arguments, more requests than they take, and a daemon that may change that."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx

from autoscaler.core.arguments import read_engine
from autoscaler.testbed.api import Json
from tests.cluster.daemon import Daemon, running_daemon
from tests.cluster.manifests import Place, address_of, deployment, is_ready, policy
from tests.cluster.site import Site

SURGE = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
ARGS = ("--max-num-seqs", "16", "--max-num-batched-tokens=2048", "--api-key", "not-to-be-told")
QUICK = """\
  batching: {mode: auto, rollout: {perDay: 1, after: 3s}, window: 3s, observe: 2s, maxObserve: 3s}
"""


def engines(pool: str = "", **fake: object) -> Json:
    """Return a Deployment of such engines."""
    return deployment(pool=pool, strategy=SURGE, args=ARGS, fake={"backoff-seconds": 1, **fake})


def rules(site: Site, folder: Path) -> Path:
    """Return a policy that keeps two replicas, and changes their limits soon."""
    return policy(folder, site.place.plane, site.place.namespace, replicas="{min: 2, max: 2}", more=QUICK)


async def crowd(place: Place) -> None:
    """Keep every ready pod as full as it may be, with more that wait, again and again, for ever."""
    async with httpx.AsyncClient() as client:
        while True:
            for pod in filter(is_ready, await place.list_pods()):
                limit = read_engine(pod["spec"]["containers"][0]["args"]).limits.max_num_seqs or 0
                load = {"running": limit, "waiting": 10, "kv": 0.4, "rps": 5}
                with suppress(httpx.TransportError):  # gone meanwhile
                    await client.post(f"http://{address_of(place.plane, pod)}/fake", json=load)
            await asyncio.sleep(0.2)


@asynccontextmanager
async def crowded(site: Site, folder: Path, *arguments: str) -> AsyncIterator[Daemon]:
    """Run the daemon while requests queue."""
    load = asyncio.create_task(crowd(site.place))
    try:
        async with running_daemon(site.kubeconfig, rules(site, folder), *arguments) as daemon:
            yield daemon
            assert await daemon.end(signal.SIGTERM) == 0
    finally:
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
