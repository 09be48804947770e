"""The Deployment as target: what the API's objects say of it, and reading them from a fake API server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from autoscaler.actuators.deployment import DeploymentActuator
from autoscaler.clock import SystemClock
from autoscaler.core.policy import TargetRef
from autoscaler.core.types import Drain, Outcome, Pod, PodPhase, ScaleReplicas, TargetStatus
from autoscaler.errors import ActuationError, TargetError
from autoscaler.sources.cluster import PRUNE, RIGHTS, ClusterCaches, Pace
from autoscaler.sources.deployment import DeploymentTarget, pod_of, target_status
from autoscaler.sources.kubernetes_api import KubernetesApi
from tests.fake_api import (
    FakeApi,
    Fault,
    Json,
    deployment,
    hpa,
    manager,
    pending_pod,
    pod,
    replica_set,
)

REF = TargetRef(deployment="chat", namespace="serving")
COST = "controller.kubernetes.io/pod-deletion-cost"
QUICK = Pace(watch_s=1, relist_s=0.05, backoff_s=0.05, max_backoff_s=0.2, hidden_s=0.2)
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


def test_the_template_is_read_where_it_is_asked_for() -> None:
    sets = [replica_set("old", revision=1, wanted=0), replica_set("new", revision=2)]
    assert target_status(deployment(), sets, [], []).template is None
    template = target_status(deployment(), sets, [], [], templates=True).template
    assert template is not None
    assert (template.revision, template.fixed) == ("new", "the pod template has no containers")


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


@pytest.mark.parametrize(
    ("managers", "writer"),
    [
        pytest.param([], ("", None), id="not said"),
        pytest.param([manager("kubectl-edit", 50.0, field="paused")], ("", None), id="other fields only"),
        pytest.param([manager("helm", 50.0)], ("helm", 50.0), id="its creator"),
        pytest.param([manager("autoscaler", subresource="scale")], ("autoscaler", None), id="by the scale: no time"),
        pytest.param([manager("flux", 90.0, operation="Apply")], ("flux", 90.0), id="by an applied manifest"),
        pytest.param(
            [manager("flux", 90.0, operation="Apply"), manager("autoscaler", subresource="scale")],
            ("autoscaler", None),
            id="applied with the value that is there",
        ),
        pytest.param(
            [manager("flux", 90.0, operation="Apply"), manager("helm", 50.0, operation="Apply")],
            ("flux", 90.0),
            id="the newest of two that applied",
        ),
        pytest.param([{"manager": "helm", "fieldsV1": "odd"}, {"fieldsV1": {"f:spec": None}}], ("", None), id="odd"),
    ],
)
def test_who_last_wrote_the_replicas(managers: list[Json], writer: tuple[str, float | None]) -> None:
    target = deployment()
    target["metadata"]["managedFields"] = managers
    for seen in (target, PRUNE["deployments"](target)):
        status = target_status(seen, [], [], [])
        assert (status.scaled_by, status.scaled_at) == writer


def condition(kind: str, status: str, reason: str, message: str = "") -> Json:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def recreated(reason: str, replicas: int = 2, **status: Any) -> Json:
    """Return a Deployment of strategy Recreate; `reason` is that of its condition Progressing."""
    target = deployment(replicas=replicas, conditions=[condition("Progressing", "True", reason)], **status)
    return target | {"spec": target["spec"] | {"strategy": {"type": "Recreate"}}}


@pytest.mark.parametrize(
    ("target", "sets", "rollout"),
    [
        pytest.param(
            recreated("NewReplicaSetAvailable"),
            [replica_set("chat-2", revision=2), replica_set("chat-1", wanted=0)],
            False,
            id="complete",
        ),
        pytest.param(recreated("NewReplicaSetAvailable"), [replica_set("chat-1")], False, id="scaled up"),
        pytest.param(recreated("ReplicaSetUpdated"), [replica_set("chat-1")], False, id="the very first pods load"),
        pytest.param(
            recreated("NewReplicaSetAvailable", readyReplicas=0) | {"status": {"observedGeneration": 3}},
            [replica_set("chat-1", wanted=0)],
            True,
            id="old pods end, there is no new revision yet",
        ),
        pytest.param(
            recreated("NewReplicaSetAvailable") | {"status": {"observedGeneration": 3}},
            [replica_set("chat-2", revision=2, living=0), replica_set("chat-1", wanted=0)],
            True,
            id="the new revision is made, and not yet in the status",
        ),
        pytest.param(
            recreated("ReplicaSetUpdated", readyReplicas=1),
            [replica_set("chat-2", revision=2), replica_set("chat-1", wanted=0)],
            True,
            id="new pods load",
        ),
        pytest.param(
            recreated("NewReplicaSetAvailable", replicas=0),
            [replica_set("chat-1", wanted=0)],
            False,
            id="scaled to zero",
        ),
    ],
)
def test_a_recreate_rollout(target: Json, sets: list[Json], rollout: bool) -> None:
    assert target_status(target, sets, [], []).rollout is rollout


def paused(**status: Any) -> Json:
    target = deployment(conditions=[condition("Progressing", "Unknown", "DeploymentPaused")], **status)
    return target | {"spec": target["spec"] | {"paused": True}}


@pytest.mark.parametrize(
    ("target", "sets", "rollout"),
    [
        pytest.param(paused(), [replica_set("chat-1")], False, id="nothing changed"),
        pytest.param(paused(updatedReplicas=0), [replica_set("chat-1")], False, id="a changed template"),
        pytest.param(paused(observedGeneration=2), [replica_set("chat-1")], True, id="not yet seen"),
        pytest.param(
            paused(updatedReplicas=1),
            [replica_set("chat-2", revision=2, wanted=1), replica_set("chat-1", wanted=1)],
            False,
            id="paused half way",
        ),
    ],
)
def test_c100_a_paused_deployment_rolls_nothing_out(target: Json, sets: list[Json], rollout: bool) -> None:
    status = target_status(target, sets, [pod("a")], [])
    assert (status.deployment_paused, status.rollout, status.rollout_unhealthy) == (True, rollout, False)
    assert not status_of(deployment()).deployment_paused


def test_pods_that_crash_are_no_unhealthy_rollout_unless_they_are_of_a_second_revision() -> None:
    crashing = pod("a", owner="chat-2", ready=False, changed=0.0, state=WAITS_CRASHED, restarts=6)
    newest = replica_set("chat-2", revision=2, wanted=1)
    for older, unhealthy in ((0, False), (1, True)):
        sets = [newest, replica_set("chat-1", wanted=older)]
        assert target_status(paused(updatedReplicas=0), sets, [crashing], []).rollout_unhealthy is unhealthy


def test_c101_a_rollout_that_makes_no_progress_has_failed_until_it_does() -> None:
    reasons = (("False", "ProgressDeadlineExceeded", True), ("True", "ReplicaSetUpdated", False))
    for truth, reason, failed in reasons:
        target = deployment(replicas=4, readyReplicas=3, conditions=[condition("Progressing", truth, reason)])
        status = status_of(target)
        assert (status.rollout, status.rollout_unhealthy, status.rollout_failed) == (False, failed, failed)


QUOTA = "exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=2"


@pytest.mark.parametrize(
    ("conditions", "refused"),
    [
        pytest.param([], "", id="none"),
        pytest.param(
            [condition("ReplicaFailure", "True", "FailedCreate", f'pods "chat-1-x7k2p" is forbidden: {QUOTA}')],
            f"forbidden: {QUOTA}",
            id="a quota, without the name of a pod that changes",
        ),
        pytest.param(
            [
                condition(
                    "ReplicaFailure", "True", "FailedCreate", 'admission webhook "a.example.org" denied the request'
                )
            ],
            'admission webhook "a.example.org" denied the request',
            id="an admission webhook",
        ),
        pytest.param([condition("ReplicaFailure", "True", "FailedCreate")], "FailedCreate", id="without a message"),
        pytest.param([condition("ReplicaFailure", "True", "FailedCreate", "x" * 999)], "x" * 200, id="long"),
        pytest.param([condition("ReplicaFailure", "False", "FailedCreate", "old")], "", id="over"),
    ],
)
def test_pods_that_the_api_server_refuses_to_make(conditions: list[Json], refused: str) -> None:
    assert status_of(deployment(conditions=conditions)).refused == refused


def test_how_the_pods_end_is_read_from_the_template() -> None:
    target = deployment()
    assert status_of(target).drain == Drain()
    container = {"name": "vllm", "args": ["--shutdown-timeout", "300"]}
    target["spec"]["template"] = {"spec": {"terminationGracePeriodSeconds": 330, "containers": [container]}}
    assert status_of(target).drain == Drain(grace_s=330.0, drain_s=300.0)


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
        pytest.param([hpa("keda-hpa-chat", scaled="chat")], "ScaledObject/chat", id="KEDA's"),
        pytest.param([hpa("b"), hpa("a")], "HorizontalPodAutoscaler/a", id="two of them"),
        pytest.param([hpa("other", target="chat-a")], "", id="of another Deployment"),
        pytest.param([hpa("set", kind="StatefulSet")], "", id="of a StatefulSet of that name"),
        pytest.param([hpa("old", version=None)], "HorizontalPodAutoscaler/old", id="without apiVersion"),
        pytest.param([hpa("else", version="example.org/v1")], "", id="of another API group"),
    ],
)
def test_c084_another_owner_of_the_replicas(hpas: list[Json], owner: str) -> None:
    for seen in (hpas, [PRUNE["horizontalpodautoscalers"](one) for one in hpas]):
        assert target_status(deployment(), [], [], seen).other_owner == owner


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
    item["metadata"]["annotations"] = {COST: "-100"}
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
        deletion_cost=-100,
    )


@pytest.mark.parametrize(
    ("text", "cost"),
    [
        pytest.param("0", 0, id="zero"),
        pytest.param("2147483647", 2**31 - 1, id="largest"),
        pytest.param("-2147483648", -(2**31), id="smallest"),
        pytest.param("2147483648", None, id="above int32"),
        pytest.param("-2147483649", None, id="below int32"),
        pytest.param("+5", None, id="plus"),
        pytest.param("007", None, id="leading zeros"),
        pytest.param("1.5", None, id="fraction"),
        pytest.param("", None, id="empty"),
        pytest.param("\u0665", None, id="digits of another script"),
        pytest.param(5, None, id="no text"),
    ],
)
def test_a_deletion_cost_that_kubernetes_takes_for_none_is_none(text: object, cost: int | None) -> None:
    item = pod("a")
    item["metadata"]["annotations"] = {COST: text}
    assert pod_of(item).deletion_cost == cost


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


@pytest.fixture
async def fake() -> AsyncIterator[FakeApi]:
    async with FakeApi(rights=RIGHTS).serve() as server:
        yield server


@pytest.fixture
async def api(fake: FakeApi, tmp_path: Path) -> AsyncIterator[KubernetesApi]:
    path = fake.write_kubeconfig(tmp_path / "config")
    api = await KubernetesApi.connect(SystemClock(), kubeconfig=str(path), timeout_s=5.0)
    yield api
    await api.close()


@asynccontextmanager
async def reading(api: KubernetesApi, ref: TargetRef = REF, pace: Pace = QUICK) -> AsyncIterator[DeploymentTarget]:
    """Return a target while the block runs."""
    target = DeploymentTarget(ClusterCaches(api, SystemClock(), pace), ref)
    try:
        yield target
    finally:
        await target.close()


async def until(target: DeploymentTarget, true: Callable[[TargetStatus], bool]) -> TargetStatus:
    """Return the status once something is true of it; while it cannot be read it is read again."""
    async with asyncio.timeout(20.0):
        while True:
            with suppress(TargetError):
                status = await target.read()
                if true(status):
                    return status
            await asyncio.sleep(0.01)


async def test_reading_takes_one_list_of_each_kind_and_the_declared_rights(fake: FakeApi, api: KubernetesApi) -> None:
    fake.pods = [pod("a"), pod("b"), pod("stranger", owner="other-1")]
    fake.hpas = [hpa("keda-hpa-chat")]
    async with reading(api, pace=Pace()) as target:
        first = await target.read()
        assert all([await target.read() is first for _ in range(100)])
        assert target.hpa_visible
    assert [member.name for member in first.pods] == ["a", "b"]
    assert first.other_owner == "HorizontalPodAutoscaler/keda-hpa-chat"
    assert {request.right for request in fake.requests} == RIGHTS
    assert len(fake.requests) == len(RIGHTS) == 8


async def test_what_changes_is_read_without_a_request(fake: FakeApi, api: KubernetesApi) -> None:
    assert fake.deployment is not None
    fake.pods = [pod("a")]
    async with reading(api, pace=Pace()) as target:
        await target.read()
        fake.requests.clear()
        fake.pods.append(pod("b"))
        await until(target, lambda status: [member.name for member in status.pods] == ["a", "b"])
        fake.pods[0] = pod("a", ready=False)
        await until(target, lambda status: [member.ready for member in status.pods] == [False, True])
        del fake.pods[0]
        await until(target, lambda status: [member.name for member in status.pods] == ["b"])
        fake.deployment["spec"]["replicas"] = 5
        await until(target, lambda status: status.current_replicas == 5)
        fake.replica_sets[0] = replica_set("chat-1", owner="another")
        await until(target, lambda status: status.pods == ())
        fake.hpas = [hpa("h")]
        await until(target, lambda status: status.other_owner == "HorizontalPodAutoscaler/h")
    assert fake.requests == []


async def test_c143_no_address_of_a_deleted_pod(fake: FakeApi, api: KubernetesApi) -> None:
    fake.pods = [pod("a", podIP="10.0.0.1"), pod("b", podIP="10.0.0.2")]
    async with reading(api) as target:
        assert [member.ip for member in (await target.read()).pods] == ["10.0.0.1", "10.0.0.2"]
        fake.pods = [pod("b", podIP="10.0.0.2"), pod("stranger", owner="other-1", podIP="10.0.0.1")]
        status = await until(target, lambda status: len(status.pods) == 1)
        assert [(member.name, member.ip) for member in status.pods] == [("b", "10.0.0.2")]


@pytest.mark.parametrize(
    ("request_name", "fault"),
    [
        pytest.param("list", Fault(status=403, body={"kind": "Status", "message": "forbidden"}), id="no right to list"),
        pytest.param("watch", Fault(status=403), id="no right to watch"),
        pytest.param("list", Fault(status=404, body="404 page not found"), id="no autoscaling v2"),
    ],
)
async def test_invisible_hpas_are_told_and_tolerated(
    fake: FakeApi, api: KubernetesApi, request_name: str, fault: Fault
) -> None:
    fake.hpas = [hpa("h")]
    fake.faults = {f"{request_name} horizontalpodautoscalers": [fault] * 1000}
    async with reading(api) as target:
        seen = [target.hpa_visible]
        assert (await target.read()).other_owner == ""
        seen.append(target.hpa_visible)
        fake.faults.clear()
        # The list is in before its watch is open, and only the watch makes them visible.
        await until(target, lambda status: status.other_owner != "" and target.hpa_visible is True)
    assert seen == [None, False]


@pytest.mark.parametrize(
    ("request_name", "fault", "reason"),
    [
        pytest.param("list deployments", Fault(status=403), "forbidden", id="forbidden"),
        pytest.param("list pods", Fault(status=403), "forbidden", id="pods forbidden"),
        pytest.param("watch pods", Fault(status=403), "forbidden", id="watching pods forbidden"),
        pytest.param("list pods", Fault(status=200, body={"kind": "PodList", "items": {}}), "bad_body", id="no list"),
        pytest.param("list pods", Fault(status=200, body={"items": []}), "bad_body", id="a list without a version"),
        pytest.param("list pods", Fault(status=410), "unreachable", id="forgotten while listing"),
        pytest.param("list replicasets", Fault(status=503), "unreachable", id="no server behind the proxy"),
        pytest.param("list horizontalpodautoscalers", Fault(status=500), "unreachable", id="HPAs unknown"),
        pytest.param("list deployments", Fault(status=401), "unauthorized", id="c094 not logged in"),
    ],
)
async def test_a_target_that_cannot_be_read(
    fake: FakeApi, api: KubernetesApi, request_name: str, fault: Fault, reason: str
) -> None:
    fake.faults = {request_name: [fault, fault]}
    async with reading(api) as target:
        with pytest.raises(TargetError) as caught:
            await target.read()
        assert caught.value.reason == reason
        assert (await until(target, lambda _: True)).current_replicas == 2


async def test_a_target_that_does_not_exist(fake: FakeApi, api: KubernetesApi) -> None:
    async with reading(api, TargetRef(deployment="chta", namespace="serving")) as target:
        with pytest.raises(TargetError) as caught:
            await target.read()
    assert (caught.value.reason, caught.value.detail) == ("target_not_found", 'deployments.apps "chta" not found')


# --- after a write --------------------------------------------------------------------------------------------------


@pytest.fixture
async def stuck(fake: FakeApi, api: KubernetesApi) -> AsyncIterator[DeploymentTarget]:
    """Return a target whose stream of Deployments tells nothing."""
    fake.rights = None
    fake.faults = {"watch deployments": [Fault(silent=True)]}
    async with reading(api, pace=Pace()) as target:
        assert (await target.read()).current_replicas == 2
        fake.requests.clear()
        yield target


async def test_a_write_of_ours_is_read_at_once_and_once(
    fake: FakeApi, api: KubernetesApi, stuck: DeploymentTarget
) -> None:
    assert await DeploymentActuator(api, REF).apply(ScaleReplicas(seen=2, to=3)) is Outcome.APPLIED
    assert [(await stuck.read()).current_replicas for _ in range(3)] == [3, 3, 3]
    assert fake.verbs() == ["patch deployments/scale", "list deployments"]
    assert fake.requests[-1].query == {"fieldSelector": "metadata.name=chat"}


async def test_c090_after_a_conflict_the_other_writers_number_is_read(
    fake: FakeApi, api: KubernetesApi, stuck: DeploymentTarget
) -> None:
    assert fake.deployment is not None
    fake.deployment["spec"]["replicas"] = 7
    assert (await stuck.read()).current_replicas == 2
    with pytest.raises(ActuationError) as caught:
        await DeploymentActuator(api, REF).apply(ScaleReplicas(seen=2, to=3))
    assert caught.value.reason == "conflict"
    assert (await stuck.read()).current_replicas == 7


async def test_after_a_write_an_old_view_is_not_decided_on(
    fake: FakeApi, api: KubernetesApi, stuck: DeploymentTarget
) -> None:
    await DeploymentActuator(api, REF).apply(ScaleReplicas(seen=2, to=3))
    fake.faults = {"list deployments": [Fault(status=503)] * 2}
    for _ in range(2):
        with pytest.raises(TargetError) as caught:
            await stuck.read()
        assert caught.value.reason == "unreachable"
    assert (await stuck.read()).current_replicas == 3


async def test_after_a_write_a_deployment_that_has_gone_is_not_found(
    fake: FakeApi, api: KubernetesApi, stuck: DeploymentTarget
) -> None:
    fake.deployment = None
    with pytest.raises(ActuationError):
        await DeploymentActuator(api, REF).apply(ScaleReplicas(seen=2, to=3))
    with pytest.raises(TargetError) as caught:
        await stuck.read()
    assert caught.value.reason == "target_not_found"


async def test_a_reloaded_policy_reads_what_the_last_one_wrote(
    fake: FakeApi, api: KubernetesApi, stuck: DeploymentTarget
) -> None:
    await DeploymentActuator(api, REF).apply(ScaleReplicas(seen=2, to=3))
    successor = DeploymentTarget(stuck._caches, REF)
    assert (await successor.read()).current_replicas == 3
    await successor.close()
    assert (await stuck.read()).current_replicas == 3
