"""What the daemon does while its target's pods are gone, cannot start or start slowly."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from autoscaler.testbed.api import JSON_PATCH, Json
from autoscaler.testbed.plane import GPUS, Process
from tests.cluster.manifests import (
    Place,
    Pool,
    deployment,
    eventually,
    is_ready,
    is_unschedulable,
    of_deployment,
    takes_pods,
    waits_for,
)
from tests.cluster.trial import BUSY, CALM, EAGER, INTERVAL_S, trial

SHORT_OF_NODES = EAGER + "  pending: {unschedulableAfter: 1s}\n"
SOON_STABLE = EAGER + "  evidence: {restartWindow: 5s}\n"


@asynccontextmanager
async def another_node(place: Place, pool: Pool) -> AsyncIterator[Process]:
    """Return a second node of a pool, with a kubelet of its own, while the block runs."""
    name = f"{pool.label}-2"
    kubelet = place.plane.fake_kubelet(name, [name], gpus=GPUS, labels={"pool": pool.label})
    kubelet.start()
    try:
        await eventually(lambda: takes_pods(place, name), f"node {name}")
        yield kubelet
    finally:
        await kubelet.stop()
        await place.api.request("DELETE", f"/api/v1/nodes/{name}")


def have_lost_some(pods: list[Json]) -> bool:
    """Return whether some of the target's pods are not ready."""
    return not all(map(is_ready, of_deployment(pods, "chat")))


async def ready_replicas(place: Place) -> int:
    """Return how many of the target's pods are ready."""
    return sum(map(is_ready, of_deployment(await place.list_pods(), "chat")))


async def test_its_deployment_is_deleted_and_made_anew_while_it_shrinks(place: Place, tmp_path: Path) -> None:
    await place.create(deployment(replicas=4))
    await place.tell(await place.until_ready(4), **CALM)
    async with trial(place, tmp_path, bounds=(2, 4)) as one:
        await one.until(outcome="applied", desired_replicas=3)
        with one.blindness():
            await place.api.request("DELETE", f"{place.deployments}/chat")
            await one.until_failed("target_not_found")
        made = await place.create(deployment(replicas=4))
        await one.until_all_serve()
        await one.recovered(time.time())
        await one.until_steps((4, 3), (4, 3), (3, 2))
        uids = [scaling.uid for scaling in await one.scalings()]
        assert uids[0] != uids[1] == uids[2] == made["metadata"]["uid"]


async def test_a_node_is_lost_while_it_shrinks(place: Place, pool: Pool, tmp_path: Path) -> None:
    async with another_node(place, pool) as lost:
        await place.create(deployment(replicas=4, pool=pool.label))
        pods = await place.until_ready(4)
        assert {pod["spec"]["nodeName"] for pod in pods} == {pool.label, f"{pool.label}-2"}
        await place.tell(pods, **CALM)
        async with trial(place, tmp_path, bounds=(1, 4)) as one:
            await one.until(outcome="applied", desired_replicas=3)
            with one.blindness():
                lost.kill()
                await place.until(have_lost_some, "pods whose node is lost")
                fallen = await one.until(ready_replicas=await ready_replicas(place))
                assert (fallen["current_replicas"], fallen["action"]) == (3, "hold")
                await asyncio.sleep(2 * INTERVAL_S)
            lost.start()
            await one.until_all_serve()
            await one.recovered(time.time())
            await one.until_steps((4, 3), (3, 2), (2, 1))


async def test_gpus_run_out_while_it_grows(place: Place, pool: Pool, tmp_path: Path) -> None:
    await place.create(deployment(replicas=1, gpus=GPUS // 2, pool=pool.label))
    await place.tell(await place.until_ready(1), **BUSY)
    async with trial(place, tmp_path, bounds=(1, 4), more=SHORT_OF_NODES) as one:
        await place.until(lambda pods: any(map(is_unschedulable, pods)), "pod without a node")
        await one.until(reason="unschedulable")
        await asyncio.sleep(3 * INTERVAL_S)
        await one.until_steps((1, 2), (2, 3))
        async with another_node(place, pool):
            await place.until_ready(3)
            await one.recovered(time.time())
            await one.until_steps((1, 2), (2, 3), (3, 4))
            await place.until_ready(4)


async def test_a_new_revision_crashes_again_and_again_while_it_grows(place: Place, tmp_path: Path) -> None:
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    await place.create(deployment(replicas=2, strategy=strategy))
    pods = await place.until_ready(2)
    async with trial(place, tmp_path, bounds=(1, 3)) as one:
        await one.until(ready_replicas=2)
        await change(place, deployment(fake={"fail": "crash", "cold-start-seconds": 0.1}))
        await place.until(lambda pods: any(waits_for(pod) == "CrashLoopBackOff" for pod in pods), "crash loop")
        await place.tell(pods, **BUSY)
        await one.until(reason="rollout_unhealthy")
        await asyncio.sleep(2 * INTERVAL_S)
        await one.until_steps()
        await change(place, deployment())
        await place.until_ready(2)
        await one.recovered(time.time())
        await one.until_steps((2, 3))


async def test_a_pod_crashes_while_it_shrinks(place: Place, tmp_path: Path) -> None:
    await place.create(deployment(replicas=4, fake={"backoff-seconds": 4}))
    await place.tell(await place.until_ready(4), **CALM)
    async with trial(place, tmp_path, bounds=(2, 4), more=SOON_STABLE) as one:
        await one.until(outcome="applied", desired_replicas=3)
        pods = await place.until_ready(3)
        for _ in range(2):
            with one.blindness():
                await place.tell(pods[:1], crash="OOMKilled")
                await place.until(have_lost_some, "pod that has crashed")
            await place.tell(await place.until_ready(3), **CALM)
        await one.recovered(time.time())
        await one.until_steps((4, 3), (3, 2))
        assert "unstable_pods" in {line["reason"] for line in one.live.of("decision")}


async def test_loading_takes_ten_times_as_long_while_it_grows(place: Place, pool: Pool, tmp_path: Path) -> None:
    await place.create(deployment(replicas=1, pool=pool.label))
    await place.tell(await place.until_ready(1), **BUSY)
    async with trial(place, tmp_path, bounds=(1, 4)) as one:
        await one.until(outcome="applied", desired_replicas=2)
        await place.until_ready(2)
        pool.kubelet.send(signal.SIGUSR1)
        await one.until(outcome="applied", desired_replicas=3)
        held = await one.until(reason="pending_capacity", current_replicas=3)
        assert held["ready_replicas"] == 2
        await place.until_ready(3)
        await one.recovered(time.time())
        await one.until_steps((1, 2), (2, 3), (3, 4))
        ordered = [line for line in one.live.of("decision") if line["outcome"] == "applied"]
        assert [line["ready_replicas"] for line in ordered] == [1, 2, 3]


async def change(place: Place, manifest: Json) -> None:
    """Roll out another template."""
    template = [{"op": "replace", "path": "/spec/template", "value": manifest["spec"]["template"]}]
    await place.api.request("PATCH", f"{place.deployments}/chat", template, content_type=JSON_PATCH)
