"""The test bed itself: what the tests of this folder take for granted, against a real control plane."""

import asyncio
import signal

import httpx
import pytest

from autoscaler.actuators.deployment import scale_patch
from autoscaler.core.types import ScaleReplicas
from autoscaler.sources.exposition import SeriesCache, parse_page
from autoscaler.sources.vllm import is_wanted
from autoscaler.testbed.api import JSON_PATCH, ApiError, Json
from tests.cluster.manifests import (
    Place,
    Pool,
    address_of,
    condition,
    container,
    deployment,
    is_ready,
    is_unschedulable,
    waits_for,
)

INVALID = 422


async def patch_scale(place: Place, patch: list[Json], name: str = "chat") -> Json:
    """Return the Scale after a JSON patch of it."""
    path = f"{place.deployments}/{name}/scale"
    return await place.api.request("PATCH", path, patch, content_type=JSON_PATCH)


async def page(place: Place, pod: Json, timeout_s: float = 5.0) -> str:
    """Return a pod's /metrics page."""
    async with httpx.AsyncClient(timeout=timeout_s) as client:
        answer = await client.get(f"http://{address_of(place.plane, pod)}/metrics")
        return answer.raise_for_status().text


# --- pods -----------------------------------------------------------------------------------------------------------


async def test_a_deployment_becomes_ready_and_is_scraped_at_its_pods_addresses(place: Place) -> None:
    await place.create(deployment(replicas=3))
    pods = await place.until_ready(3)
    assert len({pod["status"]["podIP"] for pod in pods}) == 3
    assert {pod["spec"]["nodeName"] for pod in pods} <= {"gpu-0", "gpu-1"}
    await place.tell(pods[:1], waiting=12, kv=0.5)
    assert 'vllm:num_requests_waiting{engine="0",model_name="fake-model"} 12.0\n' in await page(place, pods[0])
    assert 'vllm:num_requests_waiting{engine="0",model_name="fake-model"} 0.0\n' in await page(place, pods[1])


async def test_the_products_parser_reads_the_whole_page(place: Place) -> None:
    await place.create(deployment(replicas=1))
    (pod,) = await place.until_ready(1)
    await place.tell([pod], rps=5, running=3)
    read = parse_page((await page(place, pod)).encode(), SeriesCache(is_wanted))
    assert not read.bad
    assert read.keys


async def test_nothing_listens_before_a_pod_is_ready_nor_after_its_end(place: Place) -> None:
    await place.create(deployment(replicas=1, fake={"cold-start-seconds": 600}))
    (pod,) = await place.until(
        lambda pods: [container(pod).get("state", {}).keys() for pod in pods] == [{"running"}], "running pod"
    )
    assert not is_ready(pod)
    with pytest.raises(httpx.ConnectError):
        await page(place, pod)
    await place.create(deployment("other", replicas=1))
    pods = await place.until(lambda pods: sum(map(is_ready, pods)) == 1, "ready pod")
    (ready,) = filter(is_ready, pods)
    assert await page(place, ready)
    await patch_scale(place, [{"op": "replace", "path": "/spec/replicas", "value": 0}], "other")
    await place.until(lambda pods: len(pods) == 1, "end of the pod")
    with pytest.raises(httpx.ConnectError):
        await page(place, ready)


async def test_more_pods_than_gpus_wait_as_unschedulable(place: Place, pool: Pool) -> None:
    await place.create(deployment(replicas=4, gpus=4, pool=pool.label))  # of 8
    pods = await place.until(
        lambda pods: (sum(map(is_ready, pods)), sum(map(is_unschedulable, pods))) == (2, 2), "two of four pods"
    )
    waiting = next(filter(is_unschedulable, pods))
    assert waiting["status"]["phase"] == "Pending"
    assert "Insufficient nvidia.com/gpu" in condition(waiting, "PodScheduled")["message"]
    await patch_scale(place, [{"op": "replace", "path": "/spec/replicas", "value": 2}])
    await place.until_ready(2)  # those that never ran go first


@pytest.mark.parametrize(
    ("fail", "waiting", "restarts", "ended"),
    [
        pytest.param("crash", "CrashLoopBackOff", 1, "Error", id="crash loop"),
        pytest.param("oom", "CrashLoopBackOff", 1, "OOMKilled", id="killed for memory"),
        pytest.param("pull", "ImagePullBackOff", 0, "", id="no image"),
    ],
)
async def test_pods_that_fail_to_start(place: Place, fail: str, waiting: str, restarts: int, ended: str) -> None:
    await place.create(deployment(replicas=1, fake={"fail": fail, "cold-start-seconds": 0.1}))
    (pod,) = await place.until(lambda pods: [waits_for(pod) for pod in pods] == [waiting], waiting)
    status = container(pod)
    assert status["restartCount"] == restarts
    assert status.get("lastState", {}).get("terminated", {}).get("reason", "") == ended
    assert condition(pod, "Ready")["status"] == "False"


async def test_a_pod_that_never_becomes_ready_runs(place: Place) -> None:
    await place.create(deployment(replicas=1, fake={"fail": "never-ready", "cold-start-seconds": 0}))
    (pod,) = await place.until(lambda pods: [pod["status"]["phase"] for pod in pods] == ["Running"], "running pod")
    assert (is_ready(pod), waits_for(pod), container(pod)["restartCount"]) == (False, "", 0)


async def test_a_ready_pod_loses_readiness_crashes_and_comes_back(place: Place) -> None:
    await place.create(deployment(replicas=1, fake={"cold-start-seconds": 0.2}))
    (pod,) = await place.until_ready(1)
    await place.tell([pod], ready=False)
    (unready,) = await place.until(lambda pods: not is_ready(pods[0]), "unready pod")
    assert container(unready)["restartCount"] == 0
    assert await page(place, unready)  # it serves, and only says that it should get no traffic
    await place.tell([pod], ready=True)
    await place.until_ready(1)
    await place.tell([pod], crash="OOMKilled")
    (back,) = await place.until(lambda pods: is_ready(pods[0]) and container(pods[0])["restartCount"] == 1, "restart")
    assert back["metadata"]["uid"] == pod["metadata"]["uid"]
    assert container(back)["lastState"]["terminated"]["reason"] == "OOMKilled"


async def test_a_page_that_hangs(place: Place) -> None:
    await place.create(deployment(replicas=1))
    (pod,) = await place.until_ready(1)
    await place.tell([pod], hang=600)
    with pytest.raises(httpx.ReadTimeout):
        await page(place, pod, timeout_s=0.2)


async def test_a_pod_drains_up_to_its_grace_period(place: Place) -> None:
    await place.create(deployment(replicas=1, fake={"drain-seconds": 600}))
    (pod,) = await place.until_ready(1)
    await patch_scale(place, [{"op": "replace", "path": "/spec/replicas", "value": 0}])
    (leaving,) = await place.until(lambda pods: "deletionTimestamp" in pods[0]["metadata"], "pod that leaves")
    assert leaving["metadata"]["deletionGracePeriodSeconds"] == 5
    assert await page(place, pod)  # it serves what it still has
    await place.until(lambda pods: not pods, "end of the pod")


# --- the scale ------------------------------------------------------------------------------------------------------


async def test_the_scale_is_patched_where_it_is_as_it_was_seen(place: Place) -> None:
    uid = (await place.create(deployment(replicas=1)))["metadata"]["uid"]
    scale = await patch_scale(place, scale_patch(ScaleReplicas(seen=1, to=2, uid=uid)))
    assert (scale["kind"], scale["spec"]) == ("Scale", {"replicas": 2})
    await place.until_ready(2)


@pytest.mark.parametrize(
    "action",
    [
        pytest.param(ScaleReplicas(seen=2, to=3), id="other replicas"),
        pytest.param(ScaleReplicas(seen=1, to=3, uid="11111111-1111-4111-8111-111111111111"), id="other Deployment"),
        pytest.param(ScaleReplicas(seen=0, to=3), id="not zero"),
    ],
)
async def test_a_test_that_fails_is_a_422_without_causes_and_changes_nothing(
    place: Place, action: ScaleReplicas
) -> None:
    before = await place.create(deployment(replicas=1))
    with pytest.raises(ApiError) as raised:
        await patch_scale(place, scale_patch(action))
    assert raised.value.status == INVALID
    assert raised.value.body["reason"] == "Invalid"
    assert not raised.value.body.get("details", {}).get("causes")
    assert (await place.read())["spec"]["replicas"] == before["spec"]["replicas"]


async def test_a_value_that_is_not_allowed_is_a_422_with_causes(place: Place) -> None:
    await place.create(deployment(replicas=1))
    with pytest.raises(ApiError) as raised:
        await patch_scale(place, [{"op": "replace", "path": "/spec/replicas", "value": -1}])
    assert raised.value.status == INVALID
    assert [cause["field"] for cause in raised.value.body["details"]["causes"]] == ["spec.replicas"]


async def test_a_scale_of_zero_has_an_empty_spec_which_the_patch_takes_for_zero(place: Place) -> None:
    uid = (await place.create(deployment(replicas=0)))["metadata"]["uid"]
    scale = await place.api.get(f"{place.deployments}/chat/scale")
    assert scale["spec"] == {}
    assert (await patch_scale(place, scale_patch(ScaleReplicas(seen=0, to=1, uid=uid))))["spec"] == {"replicas": 1}
    assert (await patch_scale(place, scale_patch(ScaleReplicas(seen=1, to=0, uid=uid))))["spec"] == {}


# --- rights, tokens, the log ----------------------------------------------------------------------------------------


async def test_a_token_has_the_rights_of_its_account_and_no_others(place: Place) -> None:
    token = await place.plane.token_for(place.namespace, "default")
    async with place.plane.api(token) as api:
        with pytest.raises(ApiError) as raised:
            await api.get(place.pods)
    assert raised.value.status == 403
    assert f"system:serviceaccount:{place.namespace}:default" in raised.value.body["message"]
    async with place.plane.api("nonsense") as api:
        with pytest.raises(ApiError) as raised:
            await api.get(place.pods)
    assert raised.value.status == 401


async def test_the_audit_log_has_what_was_asked_and_answered(place: Place) -> None:
    await place.create(deployment(replicas=1))
    patch = scale_patch(ScaleReplicas(seen=1, to=2))
    await patch_scale(place, patch)
    with pytest.raises(ApiError):
        await patch_scale(place, patch)
    events = [event for event in await place.plane.audit() if event.namespace == place.namespace]
    done, refused = [event for event in events if event.right == ("apps", "deployments/scale", "patch")]
    assert (done.user, done.name, done.code, done.wrote, done.sent) == ("admin", "chat", 200, True, patch)
    assert done.answer is not None
    assert done.answer["spec"] == {"replicas": 2}
    assert (refused.code, refused.wrote) == (INVALID, False)


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("outage")
async def test_the_plane_survives_its_parts(place: Place) -> None:
    """Killed, restarted and frozen parts: state is kept, pods stay ready, and work goes on afterwards."""
    plane = place.plane
    await place.create(deployment(replicas=1))
    (before,) = await place.until_ready(1)

    plane.api_server.send(signal.SIGSTOP)
    async with plane.api() as api:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await api.get("/readyz")
    plane.api_server.send(signal.SIGCONT)
    await plane.ready()

    plane.api_server.kill()
    plane.etcd.kill()
    plane.etcd.start()
    plane.api_server.start()
    await plane.ready()
    for process in (plane.scheduler, plane.kubelet):
        process.kill()
        process.start()

    await patch_scale(place, scale_patch(ScaleReplicas(seen=1, to=2)))
    pods = await place.until_ready(2)
    assert before["metadata"]["uid"] in {pod["metadata"]["uid"] for pod in pods}
    assert await page(place, before)
