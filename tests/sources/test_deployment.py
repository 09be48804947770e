"""The Deployment as target: what the API's objects say of it, and reading them from a fake API server."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from autoscaler.core.policy import TargetRef
from autoscaler.core.types import Pod, PodPhase, TargetStatus
from autoscaler.errors import TargetError
from autoscaler.sources.deployment import RIGHTS, DeploymentTarget, label_selector, pod_of, target_status
from autoscaler.sources.kubernetes_api import KubernetesApi
from tests.fake_api import (
    FakeApi,
    FakeClock,
    Fault,
    Json,
    deployment,
    hpa,
    pending_pod,
    pod,
    replica_set,
    selects,
)

REF = TargetRef(deployment="chat", namespace="serving")
WAITS_CRASHED: Json = {"waiting": {"reason": "CrashLoopBackOff"}}
OOM: Json = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
FAILED: Json = {"terminated": {"reason": "Error", "exitCode": 1}}


def status_of(target: Json, *pods: Json, sets: list[Json] | None = None, hpas: tuple[Json, ...] = ()) -> TargetStatus:
    return target_status(target, [replica_set("chat-1")] if sets is None else sets, pods, hpas)


def test_a_healthy_target_is_read_in_full() -> None:
    status = status_of(deployment(replicas=2), pod("b"), pod("a"))
    assert (status.namespace, status.name, status.uid) == ("serving", "chat", deployment()["metadata"]["uid"])
    assert (status.current_replicas, status.status_replicas) == (2, 2)
    assert (status.ready_replicas, status.updated_replicas) == (2, 2)
    assert not status.rollout
    assert not status.rollout_unhealthy
    assert status.other_owner == ""
    assert [member.name for member in status.pods] == ["a", "b"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"metadata": {}}, "bad_body", id="no name and uid"),
        pytest.param({"spec": {"replicas": "4"}}, "bad_body", id="replicas as text"),
        pytest.param({"spec": {"replicas": True}}, "bad_body", id="replicas as a truth value"),
        pytest.param(
            {"metadata": deployment()["metadata"] | {"deletionTimestamp": "2026-01-01T00:00:00Z"}},
            "target_not_found",
            id="being deleted",
        ),
    ],
)
def test_a_deployment_that_cannot_be_used(change: Json, reason: str) -> None:
    with pytest.raises(TargetError) as caught:
        target_status(deployment() | change, [], [], [])
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("target", "sets", "rollout"),
    [
        pytest.param(deployment(), [replica_set("chat-1")], False, id="complete"),
        pytest.param(
            deployment(), [replica_set("chat-2", revision=2), replica_set("chat-1", wanted=0)], False, id="kept"
        ),
        pytest.param(deployment(observedGeneration=2), [replica_set("chat-1")], True, id="generation not yet seen"),
        pytest.param(deployment(observedGeneration=0), [], True, id="just created"),
        pytest.param(deployment(replicas=4, readyReplicas=1), [replica_set("chat-1", wanted=4)], False, id="loading"),
        pytest.param(
            deployment(replicas=4, updatedReplicas=2), [replica_set("chat-1", wanted=4)], True, id="older pods by count"
        ),
        pytest.param(
            deployment(),
            [replica_set("chat-2", revision=2), replica_set("chat-1", wanted=0, living=1)],
            True,
            id="older revision still lives",
        ),
        pytest.param(
            deployment(),
            [replica_set("chat-10", revision=10, wanted=1), replica_set("chat-9", revision=9, wanted=1)],
            True,
            id="older revision still wanted",
        ),
        pytest.param(deployment(replicas=0), [replica_set("chat-1", wanted=0)], False, id="scaled to zero"),
    ],
)
def test_rollout(target: Json, sets: list[Json], rollout: bool) -> None:
    status = target_status(target, sets, [], [])
    assert status.rollout is rollout
    assert not status.rollout_unhealthy


def test_c071_unschedulable_pods_are_seen_without_an_address() -> None:
    ready = [pod(f"chat-{index}") for index in range(4)]
    waiting = [pending_pod(f"chat-{index}", since=5_000.0) for index in (4, 5)]
    status = status_of(deployment(replicas=6, readyReplicas=4), *ready, *waiting)
    assert [member.unschedulable_at for member in status.pods] == [None] * 4 + [5_000.0] * 2
    stuck = status.pods[4]
    assert (stuck.phase, stuck.ready, stuck.ip, stuck.node, stuck.ready_at) == (PodPhase.PENDING, False, "", "", None)
    assert not status.rollout


def test_c073_the_base_of_every_change_is_the_spec() -> None:
    target = deployment(replicas=4) | {"status": deployment(replicas=6, readyReplicas=5, updatedReplicas=2)["status"]}
    sets = [replica_set("chat-2", revision=2), replica_set("chat-1", wanted=4)]
    for _ in range(10):
        status = target_status(target, sets, [], [])
        assert (status.current_replicas, status.status_replicas, status.updated_replicas) == (4, 6, 2)
        assert status.rollout
        assert not status.rollout_unhealthy


@pytest.mark.parametrize(
    ("broken", "unhealthy"),
    [
        pytest.param({"state": WAITS_CRASHED, "restarts": 6}, True, id="CrashLoopBackOff"),
        pytest.param({"last_state": FAILED, "restarts": 6}, True, id="running between two crashes"),
        pytest.param({"state": {"waiting": {"reason": "ImagePullBackOff"}}}, True, id="cannot pull"),
        pytest.param({"state": {"waiting": {"reason": "ContainerCreating"}}}, False, id="being created"),
        pytest.param({}, False, id="loading"),
    ],
)
def test_c075_the_new_revision_does_not_start(broken: dict[str, Any], unhealthy: bool) -> None:
    target = deployment(replicas=1, updatedReplicas=1) | {"spec": deployment(replicas=1)["spec"]}
    target["status"]["replicas"] = 2
    sets = [replica_set("chat-2", revision=2, wanted=1), replica_set("chat-1", wanted=1)]
    new = pod("new", owner="chat-2", ready=False, changed=0.0, **broken)
    status = target_status(target, sets, [pod("old"), new], [])
    assert (status.current_replicas, status.rollout, status.rollout_unhealthy) == (1, True, unhealthy)
    assert [(member.name, member.ready, member.revision) for member in status.pods] == [
        ("new", False, "chat-2"),
        ("old", True, "chat-1"),
    ]


def test_old_pods_that_crash_make_no_rollout_unhealthy() -> None:
    sets = [replica_set("chat-2", revision=2), replica_set("chat-1")]
    old = pod("old", ready=False, state=WAITS_CRASHED, restarts=3)
    status = target_status(deployment(updatedReplicas=1), sets, [old, pod("new", owner="chat-2")], [])
    assert (status.rollout, status.rollout_unhealthy) == (True, False)


def test_c077_terminating_pods_are_marked() -> None:
    leaving = pod("c")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:10:00Z"
    status = status_of(deployment(), pod("a"), pod("b"), leaving)
    assert [(member.name, member.ready, member.terminating) for member in status.pods] == [
        ("a", True, False),
        ("b", True, False),
        ("c", True, True),
    ]


def test_c080_the_start_of_readiness_is_read() -> None:
    status = status_of(
        deployment(), pod("warm", started=0.0, changed=200.0), pod("fresh", started=800.0, changed=990.0)
    )
    assert [(member.name, member.ready_at) for member in status.pods] == [("fresh", 990.0), ("warm", 200.0)]


@pytest.mark.parametrize(
    ("hpas", "owner"),
    [
        pytest.param([], "", id="none"),
        pytest.param([hpa("keda-hpa-chat")], "HorizontalPodAutoscaler/keda-hpa-chat", id="ours"),
        pytest.param([hpa("b"), hpa("a")], "HorizontalPodAutoscaler/a", id="two of them"),
        pytest.param([hpa("other", target="chat-a")], "", id="of another Deployment"),
        pytest.param([hpa("set", kind="StatefulSet")], "", id="of a StatefulSet of that name"),
        pytest.param([hpa("old", version=None)], "HorizontalPodAutoscaler/old", id="without apiVersion"),
        pytest.param([hpa("else", version="example.org/v1")], "", id="of another API group"),
    ],
)
def test_c084_another_owner_of_the_replicas(hpas: list[Json], owner: str) -> None:
    assert target_status(deployment(), [], [], hpas).other_owner == owner


def test_c085_zero_replicas_are_zero() -> None:
    status = status_of(deployment(replicas=0), sets=[replica_set("chat-1", wanted=0)])
    assert (status.current_replicas, status.status_replicas, status.pods) == (0, 0, ())
    assert not status.rollout


@pytest.mark.parametrize(
    ("containers", "restarts", "killed"),
    [
        pytest.param([{"restartCount": 3, "lastState": OOM}], 3, True, id="killed and running again"),
        pytest.param([{"restartCount": 1, "state": OOM, "lastState": FAILED}], 1, True, id="killed just now"),
        pytest.param(
            [{"restartCount": 2, "state": FAILED, "lastState": OOM}], 2, False, id="killed before the last end"
        ),
        pytest.param([{"restartCount": 1, "lastState": FAILED}], 1, False, id="failed otherwise"),
        pytest.param([{"restartCount": 0}, {"restartCount": 2, "lastState": OOM}], 2, True, id="a second container"),
        pytest.param([], 0, False, id="not started"),
    ],
)
def test_c088_restarts_and_out_of_memory_kills(containers: list[Json], restarts: int, killed: bool) -> None:
    member = pod_of(pod("a", containerStatuses=containers))
    assert (member.restarts, member.oom_killed) == (restarts, killed)


def test_c110_only_owned_pods_count() -> None:
    canary = {"uid": "22222222-2222-4222-8222-222222222222"}
    sets = [replica_set("chat-1", wanted=3), replica_set("canary-7", owner=canary["uid"], revision=7, wanted=2)]
    ours = [pod(f"chat-{index}") for index in range(3)]
    theirs = [
        pod(f"canary-{index}", owner="canary-7", ready=False, state=WAITS_CRASHED, restarts=9) for index in (0, 1)
    ]
    orphan = pod("orphan")
    del orphan["metadata"]["ownerReferences"]
    status = target_status(deployment(replicas=3), sets, [*ours, *theirs, orphan], [])
    assert [member.name for member in status.pods] == ["chat-0", "chat-1", "chat-2"]
    assert all(member.restarts == 0 and not member.waiting_reason for member in status.pods)
    assert (status.rollout, status.rollout_unhealthy) == (False, False)


@pytest.mark.parametrize(
    ("item", "was_ready"),
    [
        pytest.param(pod("a"), True, id="ready now"),
        pytest.param(pod("a", started=500.0, changed=500.0, ready=False), False, id="loading"),
        pytest.param(pod("a", started=500.0, changed=900.0, ready=False), True, id="lost readiness"),
        pytest.param(pod("a", started=500.0, changed=500.0, ready=False, restarts=4), False, id="crashes since start"),
        pytest.param(pod("a", started=500.0, changed=529.0, ready=False), False, id="first condition written late"),
        pytest.param(pod("a", conditions=[]), False, id="never evaluated"),
        pytest.param(pending_pod("a"), False, id="without a node"),
        pytest.param(pod("a", startTime=None, started=500.0, changed=900.0, ready=False), True, id="since creation"),
    ],
)
def test_was_ready(item: Json, was_ready: bool) -> None:
    assert pod_of(item).was_ready is was_ready


@pytest.mark.parametrize(
    ("args", "limit"),
    [
        pytest.param(["--model", "m", "--max-num-seqs", "256"], 256, id="two words"),
        pytest.param(["--max-num-seqs=128", "--port=8000"], 128, id="one word"),
        pytest.param(["--max_num_seqs=64"], 64, id="underscores"),
        pytest.param(["-c", "exec vllm serve m --max-num-seqs '32' --port 8000"], 32, id="inside a shell line"),
        pytest.param(["--max-num-seqs", "256", "--max-num-seqs", "64"], 64, id="the last one counts"),
        pytest.param(["--max-num-seqs", "$(SEQS)"], None, id="a variable"),
        pytest.param(["--max-num-seqs", "1k"], None, id="not a plain number"),
        pytest.param(["--max-num-seqs-per-rank", "8"], None, id="another option"),
        pytest.param(["--max-num-batched-tokens", "8192"], None, id="absent"),
        pytest.param([], None, id="no arguments"),
    ],
)
def test_max_num_seqs(args: list[str], limit: int | None) -> None:
    assert pod_of(pod("a", args=args)).max_num_seqs == limit


@pytest.mark.parametrize(
    ("statuses", "reason"),
    [
        pytest.param({"containerStatuses": [{"state": WAITS_CRASHED}]}, "CrashLoopBackOff", id="crashes"),
        pytest.param(
            {"initContainerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull"}}}]}, "ErrImagePull", id="init"
        ),
        pytest.param(
            {"containerStatuses": [{"state": {"waiting": {"reason": "PodInitializing"}}}, {"state": WAITS_CRASHED}]},
            "CrashLoopBackOff",
            id="the failing one of two",
        ),
        pytest.param({"containerStatuses": [{"state": {"waiting": {}}}]}, "", id="no reason given"),
    ],
)
def test_waiting_reason(statuses: Json, reason: str) -> None:
    assert pod_of(pod("a", **statuses)).waiting_reason == reason


def test_a_pod_is_read_in_full() -> None:
    item = pod("a", started=100.0, changed=300.0, args=["--max-num-seqs", "256"])
    assert pod_of(item) == Pod(
        name="a",
        uid="pod-a",
        phase=PodPhase.RUNNING,
        ready=True,
        ip="10.1.0.5",
        node="node-a",
        created_at=100.0,
        ready_at=300.0,
        was_ready=True,
        max_num_seqs=256,
        revision="chat-1",
    )


@pytest.mark.parametrize(
    "item",
    [
        pytest.param({}, id="empty"),
        pytest.param({"metadata": None, "spec": [], "status": "Running"}, id="parts of other types"),
        pytest.param({"status": {"conditions": [None, {"type": "Ready", "lastTransitionTime": "now"}]}}, id="odd time"),
        pytest.param({"status": {"phase": "Sleeping", "containerStatuses": {"a": 1}}}, id="unknown phase"),
    ],
)
def test_an_odd_pod_breaks_nothing(item: Json) -> None:
    member = pod_of(item)
    assert (member.phase, member.ready, member.ready_at, member.created_at) == (PodPhase.UNKNOWN, False, None, 0.0)


@pytest.mark.parametrize(
    ("selector", "text"),
    [
        pytest.param({"matchLabels": {"app": "chat", "tier": "gpu"}}, "app=chat,tier=gpu", id="labels"),
        pytest.param(
            {
                "matchLabels": {"app": "chat"},
                "matchExpressions": [
                    {"key": "tier", "operator": "In", "values": ["a", "b"]},
                    {"key": "zone", "operator": "NotIn", "values": ["z"]},
                    {"key": "tested", "operator": "Exists"},
                    {"key": "canary", "operator": "DoesNotExist"},
                ],
            },
            "app=chat,tier in (a,b),zone notin (z),tested,!canary",
            id="expressions",
        ),
        pytest.param({}, "", id="empty"),
    ],
)
def test_label_selector(selector: Json, text: str) -> None:
    assert label_selector(selector) == text
    assert selects(text, {"metadata": {"labels": {"app": "chat", "tier": "gpu", "tested": ""}}}) is ("in" not in text)


@pytest.fixture
async def fake() -> AsyncIterator[FakeApi]:
    async with FakeApi(rights=RIGHTS).serve() as server:
        yield server


@pytest.fixture
async def api(fake: FakeApi, tmp_path: Path) -> AsyncIterator[KubernetesApi]:
    path = fake.write_kubeconfig(tmp_path / "config")
    api = await KubernetesApi.connect(FakeClock(), kubeconfig=str(path), timeout_s=5.0)
    yield api
    await api.close()


async def test_reading_takes_four_requests_and_the_declared_rights(fake: FakeApi, api: KubernetesApi) -> None:
    stranger = pod("stranger")
    stranger["metadata"]["labels"]["app"] = "other"
    fake.pods = [pod("a"), pod("b"), stranger]
    fake.hpas = [hpa("keda-hpa-chat")]
    target = DeploymentTarget(api, REF)
    status = await target.read()
    await target.close()
    assert [member.name for member in status.pods] == ["a", "b"]
    assert status.other_owner == "HorizontalPodAutoscaler/keda-hpa-chat"
    assert target.hpa_visible
    assert {request.right for request in fake.requests} == RIGHTS
    assert len(fake.requests) == 4
    assert [request.query for request in fake.requests[1:3]] == [{"labelSelector": "app=chat"}] * 2


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault(status=403, body={"kind": "Status", "message": "forbidden"}), id="right is missing"),
        pytest.param(Fault(status=404, body="404 page not found"), id="no autoscaling v2"),
    ],
)
async def test_invisible_hpas_are_told_and_tolerated(fake: FakeApi, api: KubernetesApi, fault: Fault) -> None:
    fake.faults = {"list horizontalpodautoscalers": [fault]}
    target = DeploymentTarget(api, REF)
    seen = [target.hpa_visible]
    for _ in range(2):
        assert (await target.read()).other_owner == ""
        seen.append(target.hpa_visible)
    assert seen == [None, False, True]


@pytest.mark.parametrize(
    ("request_name", "fault", "reason"),
    [
        pytest.param("get deployments", Fault(status=403), "forbidden", id="forbidden"),
        pytest.param("list pods", Fault(status=403), "forbidden", id="pods forbidden"),
        pytest.param("list pods", Fault(status=200, body={"kind": "PodList", "items": {}}), "bad_body", id="no list"),
        pytest.param("get deployments", Fault(status=200, body={"kind": "Status"}), "bad_body", id="no Deployment"),
        pytest.param("list replicasets", Fault(status=503), "unreachable", id="no server behind the proxy"),
        pytest.param("list horizontalpodautoscalers", Fault(status=500), "unreachable", id="HPAs unknown"),
    ],
)
async def test_a_target_that_cannot_be_read(
    fake: FakeApi, api: KubernetesApi, request_name: str, fault: Fault, reason: str
) -> None:
    fake.faults = {request_name: [fault]}
    target = DeploymentTarget(api, REF)
    with pytest.raises(TargetError) as caught:
        await target.read()
    assert caught.value.reason == reason
    assert (await target.read()).current_replicas == 2


async def test_a_target_that_does_not_exist(fake: FakeApi, api: KubernetesApi) -> None:
    with pytest.raises(TargetError) as caught:
        await DeploymentTarget(api, TargetRef(deployment="chta", namespace="serving")).read()
    assert caught.value.reason == "target_not_found"
    assert 'deployments.apps "chta" not found' in caught.value.detail
