"""What is watched of a real cluster: changes as they happen, and outages of its API server."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from autoscaler.actuators.deployment import DeploymentActuator
from autoscaler.clock import SystemClock
from autoscaler.core.policy import TargetRef
from autoscaler.core.types import Outcome, ScaleReplicas, TargetStatus
from autoscaler.errors import TargetError
from autoscaler.sources.cluster import RIGHTS, ClusterCaches, Pace
from autoscaler.sources.deployment import DeploymentTarget
from autoscaler.sources.kubernetes_api import KubernetesApi
from autoscaler.testbed.api import MERGE
from tests.cluster.manifests import Place, deployment, eventually, grant

LIMIT_S = 60.0
POLL_S = 0.02


@pytest.fixture
async def product(place: Place) -> AsyncIterator[KubernetesApi]:
    """Return the product's client, as an administrator."""
    async with product_api(place.plane.kubeconfig) as api:
        yield api


@asynccontextmanager
async def product_api(kubeconfig: Path) -> AsyncIterator[KubernetesApi]:
    """Return the product's client while the block runs."""
    api = await KubernetesApi.connect(SystemClock(), kubeconfig=str(kubeconfig), environ={})
    try:
        yield api
    finally:
        await api.close()


def ref(place: Place, name: str = "chat") -> TargetRef:
    return TargetRef(namespace=place.namespace, deployment=name)


@asynccontextmanager
async def watched(caches: ClusterCaches, place: Place, name: str = "chat") -> AsyncIterator[DeploymentTarget]:
    """Return a target that has been read once, while the block runs."""
    target = DeploymentTarget(caches, ref(place, name))
    try:
        await target.read()
        yield target
    finally:
        await target.close()


async def until(target: DeploymentTarget, true: Callable[[TargetStatus], bool], what: str) -> TargetStatus:
    """Return the status once something is true of it. Raises TimeoutError after the limit.

    A read may fail in the meantime: after an outage one kind's stream is back before another's.
    """
    found: list[TargetStatus] = []

    async def is_true() -> bool:
        try:
            found[:] = [await target.read()]
        except TargetError:
            return False
        return true(found[0])

    await eventually(is_true, what, LIMIT_S)
    return found[0]


async def trouble(target: DeploymentTarget) -> TargetError:
    """Return the error of the first read that fails."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await target.read()
            except TargetError as error:
                return error
            await asyncio.sleep(POLL_S)


async def recovery(target: DeploymentTarget) -> TargetStatus:
    """Return what the first read that succeeds says."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                return await target.read()
            except TargetError:
                await asyncio.sleep(POLL_S)


async def scale(place: Place, replicas: int) -> None:
    """Set the replicas as a person would."""
    await place.api.request("PATCH", f"{place.deployments}/chat", {"spec": {"replicas": replicas}}, content_type=MERGE)


async def test_changes_are_told_by_streams_and_no_other_request(place: Place, tmp_path: Path) -> None:
    await place.create(deployment(replicas=1))
    await grant(place, RIGHTS)
    token = await place.plane.token_for(place.namespace, "subject")
    kubeconfig = place.plane.kubeconfig_for(token, tmp_path / "kubeconfig")
    async with product_api(kubeconfig) as api, watched(ClusterCaches(api, SystemClock()), place) as target:
        await until(target, lambda status: [pod.ready for pod in status.pods] == [True], "ready pod")
        await scale(place, 3)
        await until(target, lambda status: status.current_replicas == 3, "change of the replicas")
        status = await until(target, lambda status: status.ready_replicas == 3, "ready pods")
        assert (len(status.pods), status.rollout) == (3, False)
        await scale(place, 0)
        await until(target, lambda status: (status.current_replicas, status.pods) == (0, ()), "end of the pods")
    user = f"system:serviceaccount:{place.namespace}:subject"
    asked = [event.right for event in await place.plane.audit() if event.user == user]
    assert sorted(right for right in asked if right[2] == "list") == sorted(r for r in RIGHTS if r[2] == "list")
    assert set(asked) == RIGHTS


async def test_c110_pods_of_a_deployment_with_the_same_labels_have_no_effect(
    place: Place, product: KubernetesApi
) -> None:
    await place.create(deployment(replicas=3))
    await place.until_ready(3)
    canary = deployment(replicas=2, fake={"fail": "crash", "cold-start-seconds": 0.1})
    canary["metadata"]["name"] = "canary"
    await place.create(canary)
    caches = ClusterCaches(product, SystemClock())
    async with watched(caches, place) as chat, watched(caches, place, "canary") as other:
        await until(other, crash_loops, "canary in a crash loop")
        status = await chat.read()  # of the same cache
        assert [pod.ready for pod in status.pods] == [True] * 3
        assert {(pod.restarts, pod.waiting_reason) for pod in status.pods} == {(0, "")}
        assert (status.rollout, status.rollout_unhealthy) == (False, False)


def crash_loops(status: TargetStatus) -> bool:
    return [pod.waiting_reason for pod in status.pods] == ["CrashLoopBackOff"] * 2


async def test_c143_the_address_of_a_deleted_pod_goes_with_it(place: Place, product: KubernetesApi) -> None:
    await place.create(deployment(replicas=1))
    await place.until_ready(1)
    async with watched(ClusterCaches(product, SystemClock()), place) as target:
        (before,) = (await target.read()).pods
        await place.api.request("DELETE", f"{place.pods}/{before.name}")
        status = await until(
            target, lambda status: [pod.ready for pod in status.pods if pod.uid != before.uid] == [True], "successor"
        )
        assert all(pod.terminating for pod in status.pods if pod.uid == before.uid)
        await until(target, lambda status: before.uid not in {pod.uid for pod in status.pods}, "end of the pod")


async def test_a_write_of_ours_is_seen_by_the_next_read(place: Place, product: KubernetesApi) -> None:
    await place.create(deployment(replicas=1, fake={"cold-start-seconds": 600}))
    actuator = DeploymentActuator(product, ref(place))
    async with watched(ClusterCaches(product, SystemClock()), place) as target:
        seen = []
        for number in range(20):
            current = (await target.read()).current_replicas
            assert await actuator.apply(ScaleReplicas(seen=current, to=2 + number % 2)) is Outcome.APPLIED
            seen.append((await target.read()).current_replicas)
    assert seen == [2, 3] * 10


@pytest.mark.usefixtures("outage")
async def test_a_frozen_api_server_is_noticed_and_taken_up_again(place: Place, product: KubernetesApi) -> None:
    plane = place.plane
    await place.create(deployment(replicas=0))
    clock = SystemClock()
    async with watched(ClusterCaches(product, SystemClock()), place) as target:
        await asyncio.sleep(1.0)  # the list is no longer what vouches for the view
        frozen_at = clock.now()
        plane.api_server.send(signal.SIGSTOP)
        try:
            error = await trouble(target)
            noticed_s = clock.now() - frozen_at
        finally:
            plane.api_server.send(signal.SIGCONT)
        assert error.reason == "unreachable"
        assert "no word for" in error.detail
        assert noticed_s < 40.0
        assert (await recovery(target)).current_replicas == 0
        await scale(place, 1)
        await until(target, lambda status: status.current_replicas == 1, "change of the replicas")


@pytest.mark.usefixtures("outage")
async def test_c096_after_restarts_of_the_api_server_nothing_is_missed(place: Place, product: KubernetesApi) -> None:
    plane = place.plane
    await place.create(deployment(replicas=1))
    pods = f"/api/v1/namespaces/{place.namespace}/pods"
    old = str((await product.request("GET", pods))["metadata"]["resourceVersion"])
    caches = ClusterCaches(product, SystemClock(), Pace(watch_s=4, stale_s=6.0))
    async with watched(caches, place) as target:
        for replicas in (2, 3):
            before = await target.read()
            if replicas == 2:
                plane.api_server.kill()  # streams are cut
            else:
                await plane.api_server.stop()  # streams end
            # What was seen a moment ago is not forgotten.
            assert (await target.read()).current_replicas == before.current_replicas
            assert (await trouble(target)).reason == "unreachable"
            plane.api_server.start()
            await plane.ready()
            assert (await recovery(target)).current_replicas == before.current_replicas
            await scale(place, replicas)
            await until(target, partial(wants, replicas), "change of the replicas")
    with pytest.raises(TargetError) as caught:
        await told(product, pods, old)
    assert caught.value.reason == "expired"


def wants(replicas: int, status: TargetStatus) -> bool:
    return status.current_replicas == replicas


async def told(api: KubernetesApi, path: str, version: str) -> list[object]:
    """Return what is told since a version."""
    async with api.watch(path, version, 1) as events:
        return [event async for event in events]
