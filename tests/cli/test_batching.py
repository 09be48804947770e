"""The second actuator wired up: what a policy asks for is read and told, in a dry run only read."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from autoscaler.actuators.deployment import RIGHTS as WRITES
from autoscaler.actuators.rollout import RIGHTS as ROLLS
from autoscaler.cli.wiring import live_parts, live_sources
from autoscaler.core.policy import BatchingMode, BatchingPolicy, PluginAccess, Policy, ReplicaBounds, Signals, TargetRef
from autoscaler.core.policy import VllmSignals as Pages
from autoscaler.core.types import (
    Limits,
    Outcome,
    Pod,
    PodBatching,
    RollOut,
    ScaleReplicas,
    SetBatching,
    TargetStatus,
)
from autoscaler.errors import ActuationError
from autoscaler.sources.cluster import RIGHTS as READS
from autoscaler.sources.cluster import ClusterCaches
from autoscaler.sources.kubernetes_api import KubernetesApi
from autoscaler.vllm_plugin.route import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from tests.fake_api import DEPLOYMENT_UID, FakeApi, FakeClock, deployment
from tests.plugin_pod import TOKEN, PluginPod

POD = Pod(name="chat-a", uid="a", ip="127.0.0.1")
TARGET = TargetStatus(namespace="serving", name="chat", current_replicas=1, pods=(POD,))
FEWER = Limits(max_num_seqs=5, max_num_batched_tokens=256)
ACTION = SetBatching(limits=FEWER, pods=(PodBatching(pod="chat-a", uid="a", ip="127.0.0.1", limits=FEWER),))


@pytest_asyncio.fixture
async def pod(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PluginPod]:
    """Return a pod that listens."""
    monkeypatch.delenv(TOKEN_FILE_VARIABLE, raising=False)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    one = PluginPod()
    await one.start()
    yield one
    await one.close()


@pytest.fixture
def policy(pod: PluginPod, tmp_path: Path) -> Policy:
    """Return a policy whose limits are moved."""
    (tmp_path / "token").write_text(TOKEN)
    access = PluginAccess(token_file=str(tmp_path / "token"))
    return Policy(
        name="chat",
        target=TargetRef(namespace="serving", deployment="chat"),
        replicas=ReplicaBounds(min=1, max=2),
        signals=Signals(vllm=Pages(port=pod.port)),
        batching=BatchingPolicy(mode=BatchingMode.LIVE, plugin=access),
    )


@pytest.mark.parametrize(
    ("dry_run", "outcome", "sequences", "told"),
    [
        pytest.param(False, Outcome.APPLIED, 5, [("chat", "chat-a", "")], id="live"),
        pytest.param(True, Outcome.SIMULATED, 16, [], id="dry run"),
    ],
)
async def test_a_policy_that_moves_limits(
    pod: PluginPod,
    policy: Policy,
    tmp_path: Path,
    dry_run: bool,
    outcome: Outcome,
    sequences: int,
    told: list[tuple[str, str, str]],
) -> None:
    clock, heard = FakeClock(), []
    async with FakeApi().serve() as api:
        client = await KubernetesApi.connect(
            clock, kubeconfig=str(api.write_kubeconfig(tmp_path / "config")), environ={}
        )
        parts = live_parts(
            policy,
            ClusterCaches(client, clock),
            clock,
            dry_run=dry_run,
            limited=lambda *words: heard.append(words),
        )
        reading = await next(source for source in parts.sources if source.name == "plugin").read(TARGET, 1000.0)
        assert [one.limits.max_num_seqs for one in reading.limits] == [16]
        assert await parts.actuator.apply(ACTION) is outcome
        pod.schedulers[0].schedule()
        assert pod.schedulers[0].max_num_active_reqs == sequences
        await parts.close()
        await client.close()
    assert heard == told


def test_without_it_nobody_is_asked() -> None:
    policy = Policy(name="chat", target=TargetRef(deployment="chat"), replicas=ReplicaBounds(max=2))
    assert [source.name for source in live_sources(policy, FakeClock())] == ["vllm"]


ROLL_OUT = RollOut(
    uid=DEPLOYMENT_UID,
    container="vllm",
    seen=Limits(max_num_seqs=16),
    limits=Limits(max_num_seqs=32),
    note='{"version":1}',
)


@pytest.mark.parametrize(
    ("dry_run", "right", "outcomes", "args"),
    [
        pytest.param(False, True, (Outcome.APPLIED, Outcome.APPLIED), ["--max-num-seqs=32"], id="live"),
        pytest.param(True, True, (Outcome.SIMULATED, Outcome.SIMULATED), ["--max-num-seqs=16"], id="dry run"),
        pytest.param(False, False, ("forbidden", Outcome.APPLIED), ["--max-num-seqs=16"], id="without the right"),
    ],
)
async def test_a_policy_that_rolls_limits_out(
    policy: Policy,
    tmp_path: Path,
    dry_run: bool,
    right: bool,
    outcomes: tuple[Outcome | str, Outcome],
    args: list[str],
) -> None:
    """What the template may not be given is no reason not to write replicas."""
    clock = FakeClock()
    policy = replace(policy, batching=replace(policy.batching, mode=BatchingMode.ROLLOUT))
    async with FakeApi(rights=READS | WRITES | (ROLLS if right else frozenset())).serve() as api:
        api.deployment = deployment(replicas=1)
        api.deployment["spec"]["template"] = {"spec": {"containers": [{"name": "vllm", "args": ["--max-num-seqs=16"]}]}}
        client = await KubernetesApi.connect(
            clock, kubeconfig=str(api.write_kubeconfig(tmp_path / "config")), environ={}
        )
        parts = live_parts(policy, ClusterCaches(client, clock), clock, dry_run=dry_run)
        found: list[Outcome | str] = []
        for action in (ROLL_OUT, ScaleReplicas(seen=1, to=2)):
            try:
                found.append(await parts.actuator.apply(action))
            except ActuationError as error:
                found.append(error.reason)
        await parts.close()
        await client.close()
    assert tuple(found) == outcomes
    assert api.deployment["spec"]["template"]["spec"]["containers"][0]["args"] == args
