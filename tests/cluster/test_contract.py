"""The product's parts against real objects: what it reads of a Deployment, what it writes, and with which rights."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from autoscaler.actuators.deployment import RIGHTS as WRITES
from autoscaler.actuators.deployment import DeploymentActuator
from autoscaler.clock import SystemClock
from autoscaler.core.policy import TargetRef
from autoscaler.core.types import FIELD_MANAGER, Outcome, PodPhase, ScaleReplicas, TargetStatus
from autoscaler.errors import ActuationError, TargetError
from autoscaler.sources.cluster import RIGHTS as READS
from autoscaler.sources.cluster import ClusterCaches
from autoscaler.sources.deployment import DeploymentTarget
from autoscaler.sources.kubernetes_api import KubernetesApi
from autoscaler.testbed.api import APPLY, MERGE, STRATEGIC, Api, ApiError, Json
from tests.cluster.manifests import (
    Place,
    Pool,
    autoscaler_of,
    container,
    deployment,
    eventually,
    grant,
    is_ready,
    is_unschedulable,
    waits_for,
)

API_TIMEOUT_S = 10.0


@pytest.fixture
async def product(place: Place) -> AsyncIterator[KubernetesApi]:
    """Return the product's client, as an administrator."""
    async with product_api(place.plane.kubeconfig) as api:
        yield api


@asynccontextmanager
async def product_api(kubeconfig: Path) -> AsyncIterator[KubernetesApi]:
    """Return the product's client while the block runs."""
    api = await KubernetesApi.connect(SystemClock(), kubeconfig=str(kubeconfig), environ={}, timeout_s=API_TIMEOUT_S)
    try:
        yield api
    finally:
        await api.close()


@asynccontextmanager
async def product_as(place: Place, account: str, folder: Path) -> AsyncIterator[KubernetesApi]:
    """Return the product's client with a ServiceAccount's token, while the block runs."""
    token = await place.plane.token_for(place.namespace, account)
    async with product_api(place.plane.kubeconfig_for(token, folder / f"{account}.kubeconfig")) as api:
        yield api


def ref(place: Place, name: str = "chat") -> TargetRef:
    return TargetRef(namespace=place.namespace, deployment=name)


@asynccontextmanager
async def target_of(api: KubernetesApi, place: Place, name: str = "chat") -> AsyncIterator[DeploymentTarget]:
    """Return a target that has read nothing yet, while the block runs."""
    target = DeploymentTarget(ClusterCaches(api, SystemClock()), ref(place, name))
    try:
        yield target
    finally:
        await target.close()


async def read(api: KubernetesApi, place: Place, name: str = "chat") -> TargetStatus:
    """Return what a target that starts now sees of a Deployment."""
    async with target_of(api, place, name) as target:
        return await target.read()


# --- reading --------------------------------------------------------------------------------------------------------


async def test_ready_pods(place: Place, product: KubernetesApi) -> None:
    made = await place.create(deployment(replicas=2))
    pods = await place.until_ready(2)
    status = await read(product, place)
    assert (status.namespace, status.name, status.uid) == (place.namespace, "chat", made["metadata"]["uid"])
    counts = (status.current_replicas, status.status_replicas, status.ready_replicas, status.updated_replicas)
    assert counts == (2, 2, 2, 2)
    assert (status.rollout, status.rollout_unhealthy, status.other_owner) == (False, False, "")
    assert {pod.name: pod.ip for pod in status.pods} == {
        pod["metadata"]["name"]: pod["status"]["podIP"] for pod in pods
    }
    for pod in status.pods:
        assert (pod.phase, pod.ready, pod.was_ready, pod.terminating) == (PodPhase.RUNNING, True, True, False)
        assert (pod.restarts, pod.waiting_reason, pod.oom_killed, pod.unschedulable_at) == (0, "", False, None)
        assert (pod.max_num_seqs, bool(pod.revision)) == (64, True)
        assert pod.node.startswith("gpu-")
        assert pod.ready_at is not None
        assert pod.ready_at >= pod.created_at > 0


async def test_loading_pods_are_neither_ready_nor_failed(place: Place, product: KubernetesApi) -> None:
    await place.create(deployment(replicas=1, fake={"cold-start-seconds": 600}))
    await place.until(lambda pods: any("running" in container(pod).get("state", {}) for pod in pods), "running pod")
    status = await read(product, place)
    (pod,) = status.pods
    assert (pod.phase, pod.ready, pod.was_ready, pod.waiting_reason) == (PodPhase.RUNNING, False, False, "")
    assert (status.current_replicas, status.ready_replicas, status.rollout) == (1, 0, False)


async def test_a_pod_that_pulls_its_image_waits_for_nothing(place: Place, product: KubernetesApi) -> None:
    await place.create(deployment(replicas=1, fake={"pull-seconds": 600}))
    await place.until(lambda pods: [waits_for(pod) for pod in pods] == ["ContainerCreating"], "pod that is created")
    (pod,) = (await read(product, place)).pods
    assert (pod.phase, pod.waiting_reason, pod.ip, pod.unschedulable_at) == (PodPhase.PENDING, "", "", None)


async def test_unschedulable_pods_say_since_when(place: Place, pool: Pool, product: KubernetesApi) -> None:
    await place.create(deployment(replicas=3, gpus=8, pool=pool.label))
    await place.until(
        lambda pods: (sum(map(is_ready, pods)), sum(map(is_unschedulable, pods))) == (1, 2), "pods without a node"
    )
    status = await read(product, place)
    waiting = [pod for pod in status.pods if pod.unschedulable_at is not None]
    assert [(pod.phase, pod.node, pod.ready) for pod in waiting] == [(PodPhase.PENDING, "", False)] * 2
    assert all(pod.unschedulable_at >= pod.created_at for pod in waiting if pod.unschedulable_at is not None)
    assert (status.current_replicas, status.ready_replicas, status.rollout) == (3, 1, False)


@pytest.mark.parametrize(
    ("fail", "reason", "restarts", "killed"),
    [
        pytest.param("crash", "CrashLoopBackOff", 1, False, id="crash loop"),
        pytest.param("oom", "CrashLoopBackOff", 1, True, id="killed for memory"),
        pytest.param("pull", "ImagePullBackOff", 0, False, id="no image"),
    ],
)
async def test_pods_that_fail_say_why(
    place: Place, product: KubernetesApi, fail: str, reason: str, restarts: int, killed: bool
) -> None:
    await place.create(deployment(replicas=1, fake={"fail": fail, "cold-start-seconds": 0.1}))
    await place.until(lambda pods: [waits_for(pod) for pod in pods] == [reason], reason)
    (pod,) = (await read(product, place)).pods
    assert (pod.waiting_reason, pod.restarts, pod.oom_killed, pod.ready) == (reason, restarts, killed, False)
    assert pod.was_ready is False


async def test_pods_on_their_way_out_are_there_and_terminating(place: Place, product: KubernetesApi) -> None:
    await place.create(deployment(replicas=2, fake={"drain-seconds": 600}))
    await place.until_ready(2)
    await place.api.request("PATCH", f"{place.deployments}/chat", {"spec": {"replicas": 1}}, content_type=MERGE)
    await place.until(lambda pods: any("deletionTimestamp" in pod["metadata"] for pod in pods), "pod that leaves")
    status = await read(product, place)
    assert sorted(pod.terminating for pod in status.pods) == [False, True]
    assert (status.current_replicas, status.rollout) == (1, False)


def changed(**fake: object) -> Json:
    """Return a patch of a Deployment's template, which rolls out a new revision."""
    return {"spec": {"template": deployment(fake=fake)["spec"]["template"]}}


async def test_a_rollout_lasts_until_the_old_revision_is_gone(place: Place, product: KubernetesApi) -> None:
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    await place.create(deployment(replicas=2, strategy=strategy))
    before = {pod["metadata"]["labels"]["pod-template-hash"] for pod in await place.until_ready(2)}
    patch = changed(**{"cold-start-seconds": 2})
    await place.api.request("PATCH", f"{place.deployments}/chat", patch, content_type=STRATEGIC)
    statuses = [await read(product, place)]
    assert statuses[0].rollout, "from the first read after the change"
    while statuses[-1].rollout:
        statuses.append(await read(product, place))
        await asyncio.sleep(0.1)
    assert {status.rollout_unhealthy for status in statuses} == {False}
    assert {status.current_replicas for status in statuses} == {2}
    assert all(status.ready_replicas >= 2 for status in statuses)
    after = {pod["metadata"]["labels"]["pod-template-hash"] for pod in await place.until_ready(2)}
    assert len(before) == len(after) == 1
    assert before != after
    alive = [pod for pod in statuses[-1].pods if not pod.terminating]
    assert {pod.revision for pod in alive} == after


async def test_a_recreate_rollout_lasts_until_the_new_pods_serve(place: Place, product: KubernetesApi) -> None:
    await place.create(deployment(replicas=2, strategy={"type": "Recreate"}, fake={"drain-seconds": 1}))
    before = {pod["metadata"]["uid"] for pod in await place.until_ready(2)}
    async with target_of(product, place) as target:
        assert not (await target.read()).rollout
        patch = changed(**{"cold-start-seconds": 2})
        await place.api.request("PATCH", f"{place.deployments}/chat", patch, content_type=STRATEGIC)
        statuses: list[TargetStatus] = []
        while not statuses or statuses[-1].ready_replicas < 2 or before & {pod.uid for pod in statuses[-1].pods}:
            statuses.append(await target.read())
            await asyncio.sleep(0.05)
        # The first reads may still be from before the change, and the last may be the end of it.
        began = next(index for index, status in enumerate(statuses) if status.rollout)
        assert all(status.ready_replicas == 2 for status in statuses[:began])
        assert all(status.rollout for status in statuses[began:-1])
        assert any(status.ready_replicas == 0 for status in statuses[began:-1])
        await eventually(lambda: _is_over(target), "end of the rollout")


async def _is_over(target: DeploymentTarget) -> bool:
    return not (await target.read()).rollout


@pytest.mark.parametrize("fail", ["crash", "pull"])
async def test_a_rollout_that_fails_is_unhealthy(place: Place, product: KubernetesApi, fail: str) -> None:
    await place.create(deployment(replicas=2))
    await place.until_ready(2)
    patch = changed(**{"fail": fail, "cold-start-seconds": 0.1})
    await place.api.request("PATCH", f"{place.deployments}/chat", patch, content_type=STRATEGIC)
    await place.until(lambda pods: any(waits_for(pod).endswith("BackOff") for pod in pods), "pod that fails")
    status = await read(product, place)
    assert (status.rollout, status.rollout_unhealthy) == (True, True)
    assert sum(pod.ready for pod in status.pods) == 2


async def test_a_scale_is_no_rollout_once_it_was_observed(place: Place, product: KubernetesApi) -> None:
    await place.create(deployment(replicas=1, fake={"cold-start-seconds": 600}))
    await place.until(lambda pods: len(pods) == 1, "pod")
    actuator = DeploymentActuator(product, ref(place))
    assert await actuator.apply(ScaleReplicas(seen=1, to=3)) is Outcome.APPLIED
    await place.until(lambda pods: len(pods) == 3, "three pods")

    async def is_no_rollout() -> bool:
        return not (await read(product, place)).rollout

    await eventually(is_no_rollout, "observed scale")


async def test_a_horizontal_pod_autoscaler_owns_the_replicas(place: Place, product: KubernetesApi) -> None:
    await place.create(deployment("chat"))
    await place.create(deployment("other"))
    await place.apply(autoscaler_of("chat"))
    assert (await read(product, place)).other_owner == "HorizontalPodAutoscaler/chat"
    assert (await read(product, place, "other")).other_owner == ""


async def test_pods_of_a_deployment_with_the_same_labels_are_not_the_targets(
    place: Place, product: KubernetesApi
) -> None:
    await place.create(deployment("chat", replicas=1))
    twin = deployment("chat", replicas=2)
    twin["metadata"]["name"] = "twin"
    await place.create(twin)
    await place.until(lambda pods: len(pods) == 3, "pods of both")
    assert [len((await read(product, place, name)).pods) for name in ("chat", "twin")] == [1, 2]


@pytest.mark.parametrize(
    "expressions",
    [
        pytest.param([{"key": "app", "operator": "In", "values": ["chat", "x"]}], id="in"),
        pytest.param([{"key": "app", "operator": "NotIn", "values": ["x", "y"]}], id="not in"),
        pytest.param([{"key": "app", "operator": "Exists"}], id="exists"),
        pytest.param([{"key": "x", "operator": "DoesNotExist"}], id="does not exist"),
    ],
)
async def test_every_kind_of_selector(place: Place, product: KubernetesApi, expressions: list[Json]) -> None:
    manifest = deployment(replicas=1)
    manifest["spec"]["selector"] = {"matchExpressions": expressions}
    await place.create(manifest)
    await place.until(lambda pods: len(pods) == 1, "pod")
    assert len((await read(product, place)).pods) == 1


async def test_what_is_not_there_or_going_is_not_found(place: Place, product: KubernetesApi) -> None:
    with pytest.raises(TargetError) as raised:
        await read(product, place)
    assert raised.value.reason == "target_not_found"
    await place.create(deployment(replicas=1, fake={"drain-seconds": 600}))
    await place.until_ready(1)
    await place.api.request("DELETE", f"{place.deployments}/chat", {"propagationPolicy": "Foreground"})
    assert "deletionTimestamp" in (await place.read())["metadata"]
    with pytest.raises(TargetError, match="is being deleted") as raised:
        await read(product, place)
    assert raised.value.reason == "target_not_found"


async def test_pods_of_a_lost_node_are_not_ready(place: Place, pool: Pool, product: KubernetesApi) -> None:
    await place.create(deployment(replicas=1, pool=pool.label))
    await place.until_ready(1)
    pool.kubelet.kill()
    await place.until(lambda pods: not is_ready(pods[0]), "pod whose node is lost")
    status = await read(product, place)
    (pod,) = status.pods
    assert (pod.phase, pod.ready, pod.terminating, pod.waiting_reason) == (PodPhase.RUNNING, False, False, "")
    assert (status.current_replicas, status.rollout) == (1, False)
    pool.kubelet.start()
    await place.until_ready(1)


# --- writing --------------------------------------------------------------------------------------------------------


async def test_a_write_is_applied_under_our_name(place: Place, product: KubernetesApi) -> None:
    made = await place.create(deployment(replicas=1))
    actuator = DeploymentActuator(product, ref(place))
    assert await actuator.apply(ScaleReplicas(seen=1, to=3, uid=made["metadata"]["uid"])) is Outcome.APPLIED
    after = await place.read()
    assert after["spec"]["replicas"] == 3
    owners = {
        (entry["manager"], entry.get("subresource", ""))
        for entry in after["metadata"]["managedFields"]
        if "f:replicas" in entry["fieldsV1"].get("f:spec", {})
    }
    assert owners == {(FIELD_MANAGER, "scale")}


async def test_who_changed_the_replicas_last(place: Place, product: KubernetesApi) -> None:
    made = await place.create(deployment(replicas=1))
    status = await read(product, place)
    assert status.scaled_by == "cluster-tests"
    assert status.scaled_at is not None
    assert abs(status.scaled_at - time.time()) < 60.0
    await DeploymentActuator(product, ref(place)).apply(ScaleReplicas(seen=1, to=3, uid=made["metadata"]["uid"]))
    status = await read(product, place)
    assert (status.current_replicas, status.scaled_by, status.scaled_at) == (3, FIELD_MANAGER, None)
    manifest = {**deployment(replicas=3), "spec": {"replicas": 3}}
    applied = {"fieldManager": "flux", "force": "true"}
    await place.api.request("PATCH", f"{place.deployments}/chat", manifest, query=applied, content_type=APPLY)
    assert (await read(product, place)).scaled_by == FIELD_MANAGER, "the same value changes nothing"
    manifest["spec"] = {"replicas": 2}
    await place.api.request("PATCH", f"{place.deployments}/chat", manifest, query=applied, content_type=APPLY)
    status = await read(product, place)
    assert (status.current_replicas, status.scaled_by, status.scaled_at is None) == (2, "flux", False)


async def test_down_to_zero_and_up_again(place: Place, product: KubernetesApi) -> None:
    uid = (await place.create(deployment(replicas=1)))["metadata"]["uid"]
    actuator = DeploymentActuator(product, ref(place))
    assert await actuator.apply(ScaleReplicas(seen=1, to=0, uid=uid)) is Outcome.APPLIED
    assert (await read(product, place)).current_replicas == 0
    assert await actuator.apply(ScaleReplicas(seen=0, to=2, uid=uid)) is Outcome.APPLIED
    assert (await read(product, place)).current_replicas == 2


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        pytest.param(ScaleReplicas(seen=2, to=3), "conflict", id="somebody else wrote"),
        pytest.param(ScaleReplicas(seen=0, to=3), "conflict", id="not zero any more"),
        pytest.param(ScaleReplicas(seen=1, to=3, uid="u"), "conflict", id="made anew"),
        pytest.param(ScaleReplicas(seen=1, to=-1), "invalid", id="not a number of replicas"),
    ],
)
async def test_a_write_that_is_refused_changes_nothing(
    place: Place, product: KubernetesApi, action: ScaleReplicas, reason: str
) -> None:
    await place.create(deployment(replicas=1))
    with pytest.raises(ActuationError) as raised:
        await DeploymentActuator(product, ref(place)).apply(action)
    assert raised.value.reason == reason
    assert (await place.read())["spec"]["replicas"] == 1


async def test_a_write_to_what_is_not_there(place: Place, product: KubernetesApi) -> None:
    with pytest.raises(ActuationError) as raised:
        await DeploymentActuator(product, ref(place)).apply(ScaleReplicas(seen=1, to=3))
    assert raised.value.reason == "target_not_found"


# --- rights ---------------------------------------------------------------------------------------------------------

ALL = sorted(READS | WRITES)
OPTIONAL = sorted(right for right in READS if right[1] == "horizontalpodautoscalers")
BREAKS_READING = sorted(READS - set(OPTIONAL))


async def test_the_rights_suffice(place: Place, tmp_path: Path) -> None:
    await place.create(deployment(replicas=1))
    await grant(place, ALL)
    async with product_as(place, "subject", tmp_path) as api, target_of(api, place) as target:
        status = await target.read()
        assert (status.current_replicas, target.hpa_visible) == (1, True)
        action = ScaleReplicas(seen=1, to=2, uid=status.uid)
        assert await DeploymentActuator(api, ref(place)).apply(action) is Outcome.APPLIED
        scale = await api.request("GET", f"{place.deployments}/chat/scale")
        assert scale["spec"] == {"replicas": 2}


@pytest.mark.parametrize("right", BREAKS_READING, ids=lambda right: f"{right[2]} {right[1]}")
async def test_without_any_right_to_read_the_target_cannot_be_read(
    place: Place, tmp_path: Path, right: tuple[str, str, str]
) -> None:
    await place.create(deployment(replicas=1))
    await grant(place, [one for one in ALL if one != right])
    async with product_as(place, "subject", tmp_path) as api:
        with pytest.raises(TargetError) as raised:
            await read(api, place)
    assert raised.value.reason == "forbidden"
    assert right[1] in raised.value.detail


@pytest.mark.parametrize("right", OPTIONAL, ids=lambda right: f"{right[2]} {right[1]}")
async def test_without_a_right_to_see_autoscalers_none_is_seen_and_that_is_said(
    place: Place, tmp_path: Path, right: tuple[str, str, str]
) -> None:
    await place.create(deployment(replicas=1))
    await place.apply(autoscaler_of("chat"))
    await grant(place, [one for one in ALL if one != right])
    async with product_as(place, "subject", tmp_path) as api, target_of(api, place) as target:
        assert ((await target.read()).other_owner, target.hpa_visible) == ("", False)


async def test_without_the_right_to_write_nothing_is_written(place: Place, tmp_path: Path) -> None:
    await place.create(deployment(replicas=1))
    await grant(place, [right for right in ALL if right[2] != "patch"])
    async with product_as(place, "subject", tmp_path) as api:
        with pytest.raises(ActuationError) as raised:
            await DeploymentActuator(api, ref(place)).apply(ScaleReplicas(seen=1, to=2))
    assert raised.value.reason == "forbidden"
    assert (await place.read())["spec"]["replicas"] == 1


# --- as a pod -------------------------------------------------------------------------------------------------------


async def test_a_pods_account_is_used_and_its_token_taken_up_when_it_is_rotated(place: Place, tmp_path: Path) -> None:
    await place.create(deployment(replicas=1))
    await grant(place, ALL)
    host, port = place.plane.url.removeprefix("https://").split(":")
    token = tmp_path / "token"
    token.write_text("nonsense\n")
    (tmp_path / "ca.crt").write_bytes((place.plane.folder / "ca.crt").read_bytes())
    clock = SteppedClock()
    api = await KubernetesApi.connect(
        clock,
        environ={"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port},
        account=tmp_path,
        timeout_s=API_TIMEOUT_S,
    )
    try:
        with pytest.raises(TargetError) as raised:
            await read(api, place)
        assert raised.value.reason == "unauthorized"
        token.write_text(await place.plane.token_for(place.namespace, "subject") + "\n")
        clock.at += 60.0  # after a refusal it waits
        assert (await read(api, place)).current_replicas == 1
        rotated = await place.plane.token_for(place.namespace, "subject")
        token.write_text(rotated + "\n")
        await read(api, place)
    finally:
        await api.close()
    ours = [event for event in await place.plane.audit() if event.namespace == place.namespace and event.credential]
    assert ours[-1].credential == f"JTI={_claims(rotated)['jti']}"
    assert len({event.credential for event in ours}) == 2


async def test_a_token_file_of_a_kubeconfig_is_read_again_when_its_token_is_refused(
    place: Place, tmp_path: Path
) -> None:
    await place.create(deployment(replicas=1))
    await grant(place, ALL)
    first = await place.plane.token_for(place.namespace, "subject")
    token = tmp_path / "token"
    token.write_text(first + "\n")
    kubeconfig = place.plane.kubeconfig_for(first, tmp_path / "kubeconfig")
    content = yaml.safe_load(kubeconfig.read_text())
    content["users"][0]["user"] = {"tokenFile": str(token)}
    kubeconfig.write_text(yaml.safe_dump(content))
    async with product_api(kubeconfig) as api:
        await read(api, place)
        # An account that is made anew has other tokens.
        await place.api.request("DELETE", f"/api/v1/namespaces/{place.namespace}/serviceaccounts/subject")
        await grant(place, ALL)
        token.write_text(await place.plane.token_for(place.namespace, "subject") + "\n")
        async with place.plane.api(first) as stale:
            await eventually(lambda: is_refused(stale), "refused token")
        assert (await read(api, place)).current_replicas == 1


async def is_refused(api: Api) -> bool:
    """Return whether the API's token is not, or no longer, believed; the server remembers tokens for ten seconds."""
    try:
        await api.get("/api")
    except ApiError as error:
        return error.status == 401
    return False


class SteppedClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.at = 1_000.0

    def now(self) -> float:
        return self.at

    async def sleep_until(self, at: float) -> None:
        self.at = max(self.at, at)


def _claims(token: str) -> Json:
    """Return what a token says of its bearer."""
    payload = token.split(".")[1]
    claims: Json = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    return claims
