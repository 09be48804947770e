"""A Deployment is rolled out under the daemon's eyes while requests queue: it neither shrinks nor runs away."""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from autoscaler.testbed.api import Json
from tests.cluster.daemon import Daemon, running_daemon
from tests.cluster.manifests import Place, address_of, deployment, is_ready, policy, waits_for
from tests.cluster.site import SCALE_WRITE, Site

# Twenty requests that wait a replica are a score of 1. Nothing else counts, and a second's calm is enough to shrink.
EAGER = """\
  sizing: score
  score: {weights: {memory: 0, backlog: 1, latency: 0}, backlog: {wait: null}, warmUp: 0s}
  scaleUp: {threshold: 0.7, stabilization: 0s, turn: 0s}
  scaleDown: {threshold: 0.4, stabilization: 1s, horizonFactor: 0, turn: 0s}
  cooldown: 0s
  emergency: {enabled: false}
"""
# Shared by two replicas: a score of 0.3, for which one would do, of 0.5, which is fine, of 0.75, which takes three.
CALM, STEADY, BUSY = 12, 20, 30
SURGE = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
# For so long a new pod is ready before an old one goes.
MIN_READY_S = 3


@dataclass
class Queue:
    """The requests that wait for all replicas together."""

    waiting: int = STEADY

    async def spread(self, place: Place) -> None:
        """Share them among the pods that are ready, again and again, for ever.

        A pod beyond the replicas takes no share from the others: it goes, or replaces one that will.
        """
        async with httpx.AsyncClient() as client:
            while True:
                replicas = (await place.read())["spec"]["replicas"]
                ready = [pod for pod in await place.list_pods() if is_ready(pod)]
                for pod in ready:
                    load = load_of(self.waiting / min(len(ready), replicas))
                    with suppress(httpx.TransportError):  # gone meanwhile
                        await client.post(f"http://{address_of(place.plane, pod)}/fake", json=load)
                await asyncio.sleep(0.1)


def load_of(waiting: float) -> dict[str, float]:
    """Return a pod's load, of which only the queue counts."""
    return {"rps": 1, "running": 8, "kv": 0.3, "waiting": waiting}


@asynccontextmanager
async def queue_at(place: Place) -> AsyncIterator[Queue]:
    """Make a Deployment of two pods with a queue, while the block runs."""
    manifest = deployment(replicas=2, strategy=SURGE)
    manifest["spec"]["minReadySeconds"] = MIN_READY_S
    await place.create(manifest)
    await place.tell(await place.until_ready(2), **load_of(STEADY / 2))
    queue = Queue()
    task = asyncio.create_task(queue.spread(place))
    try:
        yield queue
        assert not task.done(), task.exception()
    finally:
        task.cancel()


async def replicas_written(site: Site) -> list[int]:
    """Return what the daemon set the replicas to, oldest first."""
    answers = [event.answer for event in await site.requests() if event.right == SCALE_WRITE and event.wrote]
    return [int(answer["spec"]["replicas"]) for answer in answers if answer is not None]


async def rolled_out(daemon: Daemon, place: Place) -> None:
    """Return once the Deployment's newest revision is all there is, some ticks after."""
    await asyncio.to_thread(
        place.plane.kubectl, "-n", place.namespace, "rollout", "status", "deployment/chat", "--timeout=60s"
    )
    for _ in range(3):
        await daemon.until("decision")


async def change(place: Place, **fake: object) -> None:
    """Change the pods' template, as a new image and new arguments do."""
    template: Json = deployment(fake=fake)["spec"]["template"]
    await place.api.request(
        "PATCH",
        f"{place.deployments}/chat",
        {"spec": {"template": template}},
        content_type="application/strategic-merge-patch+json",
    )


@pytest.mark.parametrize(
    ("waiting", "needed"),
    [pytest.param(STEADY, 2, id="steady load"), pytest.param(BUSY, 3, id="load that rises")],
)
async def test_a_rolling_update_during_load_neither_shrinks_nor_runs_away(
    site: Site, tmp_path: Path, waiting: int, needed: int
) -> None:
    place = site.place
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 1, max: 8}", more=EAGER)
    async with queue_at(place) as queue, running_daemon(site.kubeconfig, rules) as daemon:
        await daemon.until("decision", reason="steady", gaps={})
        place.plane.kubectl("-n", place.namespace, "set", "image", "deployment/chat", "vllm=vllm/vllm-openai:new")
        queue.waiting = CALM
        held = await daemon.until("decision", reason="rollout_in_progress")
        assert held["steps"] == ["rollout_in_progress 1->2: a rollout is under way"]
        queue.waiting = waiting
        await rolled_out(daemon, place)
        await place.until_ready(needed)
        await daemon.until("decision", reason="steady", ready_replicas=needed)
        assert await daemon.end(signal.SIGTERM) == 0
    images = {pod["spec"]["containers"][0]["image"] for pod in await place.list_pods()}
    assert images == {"vllm/vllm-openai:new"}
    sizes = [2, *await replicas_written(site)]
    assert all(before < after for before, after in itertools.pairwise(sizes))
    assert sizes[-1] == needed
    assert all(line["desired_replicas"] <= needed for line in daemon.of("decision"))


async def test_a_rollout_that_fails_stops_growth_until_it_is_undone(site: Site, tmp_path: Path) -> None:
    place = site.place
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 1, max: 8}", more=EAGER)
    async with queue_at(place) as queue, running_daemon(site.kubeconfig, rules) as daemon:
        await daemon.until("decision", reason="steady", gaps={})
        await change(place, **{"fail": "crash", "cold-start-seconds": 0.1})
        await place.until(lambda pods: any(waits_for(pod) == "CrashLoopBackOff" for pod in pods), "crash loop")
        queue.waiting = BUSY
        for _ in range(3):
            held = await daemon.until("decision", reason="rollout_unhealthy")
            assert (held["action"], held["desired_replicas"], held["ready_replicas"]) == ("hold", 2, 2)
        assert await replicas_written(site) == []
        place.plane.kubectl("-n", place.namespace, "rollout", "undo", "deployment/chat")
        grown = await daemon.until("decision", outcome="applied")
        assert (grown["current_replicas"], grown["desired_replicas"]) == (2, 3)
        await place.until_ready(3)
        assert await daemon.end(signal.SIGTERM) == 0
    assert await replicas_written(site) == [3]
