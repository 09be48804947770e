"""`autoscaler run` as a process, under the manifests of deploy/, against a real control plane."""

import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from autoscaler.testbed.api import MERGE
from autoscaler.testbed.plane import Plane
from tests.cluster.daemon import running_daemon
from tests.cluster.manifests import (
    Place,
    Pool,
    autoscaler_of,
    deployment,
    eventually,
    is_unschedulable,
    new_place,
    policy,
    until_granted,
)
from tests.cluster.site import BASE, DEPLOYED, LIVE, SCALE_WRITE, Site, granted, site_of

NAMESPACE = "serving"
ACCOUNT = "autoscaler"


# --- deploy/ --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def serving(plane: Plane) -> Iterator[str]:
    """Return the namespace that the manifests name."""
    plane.kubectl("create", "namespace", NAMESPACE)
    yield NAMESPACE
    plane.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.fixture
async def deployed(plane: Plane, serving: str) -> AsyncIterator[Place]:
    """Return that namespace, and remove the tests' Deployments from it afterwards."""
    await plane.mend()
    async with plane.api() as api:
        place = await new_place(plane, api, serving)
        yield place
        await api.request("DELETE", place.deployments)
        await place.until(lambda pods: not pods, "empty namespace")


async def test_the_base_is_valid_and_its_account_can_read_and_not_write(deployed: Place, tmp_path: Path) -> None:
    plane = deployed.plane
    assert "serviceaccount/autoscaler" in plane.kubectl("apply", "--server-side", "--validate=strict", "-k", BASE)
    await deployed.until_ready(1, ACCOUNT)
    await until_granted(deployed, granted(BASE), ACCOUNT)
    await deployed.create(deployment(replicas=1))
    site = await site_of(deployed, ACCOUNT, tmp_path)
    rules = policy(tmp_path, plane, NAMESPACE, replicas="{min: 2, max: 4}")
    async with running_daemon(site.kubeconfig, rules, "--once", "--dry-run") as daemon:
        assert await daemon.ended() == 0
    (decision,) = daemon.of("decision")
    assert (decision["action"], decision["desired_replicas"], decision["outcome"]) == ("scale_up", 2, "simulated")
    asked = await site.requests()
    assert {event.right for event in asked} <= granted(BASE)
    assert ("", "pods", "list") in {event.right for event in asked}
    async with running_daemon(site.kubeconfig, rules, "--once") as daemon:
        assert await daemon.ended() == 0
    (decision,) = daemon.of("decision")
    assert decision["outcome"] == "failed"
    assert (await deployed.read())["spec"]["replicas"] == 1
    refused = [event for event in await site.requests() if event.right == SCALE_WRITE]
    assert [(event.code, event.wrote) for event in refused] == [(403, False)]


async def test_live_adds_the_one_right_and_the_way_back_takes_it(deployed: Place, tmp_path: Path) -> None:
    plane = deployed.plane
    plane.kubectl("apply", "--server-side", "--validate=strict", "-k", LIVE)
    await until_granted(deployed, DEPLOYED, ACCOUNT)
    manifest = await deployed.read(ACCOUNT)
    assert "--dry-run" not in manifest["spec"]["template"]["spec"]["containers"][0]["args"]
    await deployed.create(deployment(replicas=1))
    site = await site_of(deployed, ACCOUNT, tmp_path)
    rules = policy(tmp_path, plane, NAMESPACE, replicas="{min: 2, max: 4}")
    async with running_daemon(site.kubeconfig, rules, "--once") as daemon:
        assert await daemon.ended() == 0
    assert daemon.of("decision")[0]["outcome"] == "applied"
    assert (await deployed.read())["spec"]["replicas"] == 2
    done = await site.scalings()
    assert [(event.right, event.name) for event in done] == [(SCALE_WRITE, "chat")]
    plane.kubectl("apply", "--server-side", "--validate=strict", "-k", BASE)
    plane.kubectl("-n", NAMESPACE, "delete", "role,rolebinding", "autoscaler-write")
    await until_granted(deployed, granted(LIVE), ACCOUNT, allowed=False)
    manifest = await deployed.read(ACCOUNT)
    assert "--dry-run" in manifest["spec"]["template"]["spec"]["containers"][0]["args"]


# --- the process ----------------------------------------------------------------------------------------------------


async def test_a_live_daemon_brings_its_target_into_bounds(site: Site, tmp_path: Path) -> None:
    place = site.place
    await place.create(deployment(replicas=1))
    rules = policy(
        tmp_path, place.plane, place.namespace, replicas="{min: 3, max: 4}", more="  scaleUp: {maxStep: 1}\n"
    )
    async with running_daemon(site.kubeconfig, rules) as daemon:
        first = await daemon.until("decision", outcome="applied")
        assert (first["current_replicas"], first["desired_replicas"], first["reason"]) == (1, 3, "up_bounds")
        await place.until_ready(3)
        settled = await daemon.until("decision", ready_replicas=3, gaps={})
        assert (settled["current_replicas"], settled["action"]) == (3, "hold")
        assert await daemon.end(signal.SIGTERM) == 0
    assert {event.right for event in await site.requests()} <= DEPLOYED
    (write,) = await site.scalings()
    assert write.answer is not None
    assert (write.name, write.answer["spec"]) == ("chat", {"replicas": 3})
    assert write.agent.startswith("vllm-autoscaler/")


async def test_a_queue_that_grows_orders_replicas(site: Site, tmp_path: Path) -> None:
    place = site.place
    await place.create(deployment(replicas=1, fake={"cold-start-seconds": 3}))
    pods = await place.until_ready(1)
    await place.tell(pods, rps=2, running=6, kv=0.1)
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 1, max: 4}")
    async with running_daemon(site.kubeconfig, rules) as daemon:
        assert (await daemon.until("decision", gaps={}))["action"] == "hold"
        await place.tell(pods, rps=2, running=64, kv=0.9, waiting=120, queue=6, ttft=6)
        up = await daemon.until("decision", outcome="applied")
        assert (up["action"], up["reason"]) == ("scale_up", "up_emergency")
        assert 2 <= up["desired_replicas"] <= 4
        loading = await daemon.until("decision", current_replicas=up["desired_replicas"], ready_replicas=1)
        assert (loading["action"], loading["desired_replicas"]) == ("hold", up["desired_replicas"])
        await daemon.until("decision", ready_replicas=up["desired_replicas"])
        assert await daemon.end(signal.SIGTERM) == 0
    assert len(await site.scalings()) == 1


async def test_with_a_real_autoscaler_on_the_target_it_yields(site: Site, tmp_path: Path) -> None:
    place = site.place
    await place.create(deployment(replicas=1))
    await place.apply(autoscaler_of("chat"))
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 3, max: 4}")
    async with running_daemon(site.kubeconfig, rules) as daemon:
        held = await daemon.until("decision")
        assert (held["action"], held["reason"]) == ("hold", "other_owner")
        await place.api.request(
            "DELETE", f"/apis/autoscaling/v2/namespaces/{place.namespace}/horizontalpodautoscalers/chat"
        )
        assert (await daemon.until("decision", outcome="applied"))["desired_replicas"] == 3
        assert await daemon.end(signal.SIGTERM) == 0


async def test_a_persons_edit_is_taken_as_it_is(site: Site, tmp_path: Path) -> None:
    place = site.place
    await place.create(deployment(replicas=2))
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 1, max: 4}")
    async with running_daemon(site.kubeconfig, rules) as daemon:
        await daemon.until("decision", current_replicas=2)
        await place.api.request("PATCH", f"{place.deployments}/chat", {"spec": {"replicas": 0}}, content_type=MERGE)
        paused = await daemon.until("decision", current_replicas=0)
        assert (paused["action"], paused["reason"]) == ("hold", "scaled_to_zero_externally")
        assert await daemon.end(signal.SIGTERM) == 0
    assert await site.scalings() == []


async def test_a_deployment_that_is_made_anew_is_another_one(site: Site, tmp_path: Path) -> None:
    place = site.place
    await place.create(deployment(replicas=1))
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 2, max: 4}")
    async with running_daemon(site.kubeconfig, rules) as daemon:
        await daemon.until("decision", outcome="applied")
        await place.api.request("DELETE", f"{place.deployments}/chat")
        gone = await daemon.until("tick_failed")
        assert "target_not_found" in gone["detail"]
        made = await place.create(deployment(replicas=1))
        again = await daemon.until("decision", outcome="applied")
        assert (again["current_replicas"], again["desired_replicas"]) == (1, 2)
        assert await daemon.end(signal.SIGTERM) == 0
    writes = await site.scalings()
    uids = [event.answer["metadata"]["uid"] for event in writes if event.answer is not None]
    assert len(uids) == len(set(uids)) == 2
    assert uids[1] == made["metadata"]["uid"]


async def test_above_its_bounds_it_gives_up_the_pods_that_do_not_serve(site: Site, pool: Pool, tmp_path: Path) -> None:
    place = site.place
    await place.create(deployment(replicas=2, gpus=4, pool=pool.label))
    serving = {pod["metadata"]["uid"] for pod in await place.until_ready(2)}
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 1, max: 2}")
    await place.api.request("PATCH", f"{place.deployments}/chat", {"spec": {"replicas": 4}}, content_type=MERGE)
    await place.until(lambda pods: sum(map(is_unschedulable, pods)) == 2, "pods without a node")
    async with running_daemon(site.kubeconfig, rules) as daemon:
        down = await daemon.until("decision", outcome="applied")
        assert (down["current_replicas"], down["desired_replicas"], down["reason"]) == (4, 2, "down_bounds")
        await place.until_ready(2)
        assert await daemon.end(signal.SIGTERM) == 0
    assert {pod["metadata"]["uid"] for pod in await place.list_pods()} == serving


@pytest.mark.usefixtures("outage")
@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_after_an_outage_of_the_api_server_it_goes_on(site: Site, tmp_path: Path, how: str) -> None:
    place, plane = site.place, site.place.plane
    await place.create(deployment(replicas=2))
    await place.until_ready(2)
    rules = policy(tmp_path, plane, place.namespace, replicas="{min: 1, max: 4}")
    async with running_daemon(site.kubeconfig, rules) as daemon:
        await daemon.until("decision", ready_replicas=2)
        if how == "killed":
            plane.api_server.kill()
        else:
            plane.api_server.send(signal.SIGSTOP)
        failed = await daemon.until("tick_failed")
        assert (failed["kind"], failed["detail"].split(":")[0]) == ("target", "unreachable")
        if how == "killed":
            plane.api_server.start()
        else:
            plane.api_server.send(signal.SIGCONT)
        await plane.ready()
        assert (await daemon.until("decision"))["current_replicas"] == 2
        assert await daemon.end(signal.SIGTERM) == 0

    async def is_whole() -> bool:
        return bool((await place.read())["status"].get("readyReplicas") == 2)

    await eventually(is_whole, "fleet as before")
    assert await site.scalings() == []
