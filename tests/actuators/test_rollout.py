"""Limits written into a pod template: the patch, and what becomes of it against a fake API server."""

from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

import pytest
from kubernetes_asyncio.client import Configuration

from autoscaler.actuators.dry_run import DryRunActuator
from autoscaler.actuators.rollout import RIGHTS, RolloutActuator, TemplateActuator, template_patch
from autoscaler.core.note import NOTE
from autoscaler.core.policy import TargetRef
from autoscaler.core.types import Hold, Limits, Outcome, RollOut, ScaleReplicas
from autoscaler.errors import ActuationError
from autoscaler.sources.kubernetes_api import KubernetesApi
from tests.fake_api import DEPLOYMENT_UID, FakeApi, FakeClock, Fault, Json, deployment, json_patch

SEEN, WANTED = (
    Limits(max_num_seqs=64, max_num_batched_tokens=2048),
    Limits(max_num_seqs=96, max_num_batched_tokens=2048),
)
ACTION = RollOut(uid=DEPLOYMENT_UID, container="vllm", seen=SEEN, limits=WANTED, note='{"version":1}')
ARGS = ["--model", "m", "--max-num-seqs", "64", "--max-num-batched-tokens=2048", "--api-key=secret"]
LIST, PATCH = ("apps", "deployments", "list"), ("apps", "deployments", "patch")


def engines(args: Iterable[str] = ARGS, *, command: Iterable[str] = (), **annotations: str) -> Json:
    """Return a Deployment with a sidecar before the engine."""
    found = deployment(replicas=2)
    engine: Json = {"name": "vllm", "image": "vllm", "args": list(args)}
    engine |= {"command": list(command)} if command else {}
    found["spec"]["template"] = {"spec": {"containers": [{"name": "proxy", "args": ["--seed=1"]}, engine]}}
    found["metadata"]["annotations"] = annotations
    return found


def engine_of(item: Json) -> Json:
    found: Json = item["spec"]["template"]["spec"]["containers"][1]
    return found


@pytest.fixture
async def fake() -> AsyncIterator[FakeApi]:
    async with FakeApi(rights=RIGHTS | {LIST}).serve() as server:
        server.deployment = engines()
        yield server


@pytest.fixture
async def actuator(fake: FakeApi) -> AsyncIterator[RolloutActuator]:
    api = KubernetesApi(Configuration(host=fake.url), FakeClock(), timeout_s=1.0)
    ref = TargetRef(deployment="chat", namespace="serving")
    one = RolloutActuator(DryRunActuator(), TemplateActuator(api, ref))
    yield one
    await one.close()
    await api.close()


def test_the_patch_tests_what_was_read_and_changes_what_is_to_change() -> None:
    before = engines()
    assert template_patch(ACTION, before) == [
        {"op": "test", "path": "/metadata/uid", "value": DEPLOYMENT_UID},
        {"op": "test", "path": "/spec/template/spec/containers/1/name", "value": "vllm"},
        {"op": "test", "path": "/spec/template/spec/containers/1/args", "value": ARGS},
        {
            "op": "replace",
            "path": "/spec/template/spec/containers/1/args",
            "value": ["--model", "m", "--max-num-seqs", "96", *ARGS[4:]],
        },
        {"op": "add", "path": "/metadata/annotations", "value": {NOTE: ACTION.note}},
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            {"command": ["vllm", "serve", "--max-num-seqs=64"], "args": ["--max-num-batched-tokens", "2048"]},
            {"command": ["vllm", "serve", "--max-num-seqs=96"], "args": ["--max-num-batched-tokens", "2048"]},
            id="said in the command",
        ),
        pytest.param(
            {"command": ["vllm", "--max-num-batched-tokens", "2048"], "args": ["--max_num_seqs", "64"]},
            {"command": ["vllm", "--max-num-batched-tokens", "2048"], "args": ["--max_num_seqs", "96"]},
            id="said in either",
        ),
        pytest.param({"args": ["--max-num-seqs=1", *ARGS]}, None, id="said twice"),
    ],
)
def test_words_keep_their_form(before: dict[str, Any], after: dict[str, list[str]] | None) -> None:
    item = engines(**before)
    done = engine_of(json_patch(item, template_patch(ACTION, item)))
    if after is None:
        assert done["args"] == ["--max-num-seqs=1", "--model", "m", "--max-num-seqs", "96", *ARGS[4:]]
    else:
        assert {key: done[key] for key in after} == after


def test_a_note_replaces_the_one_that_was_seen() -> None:
    item = engines(**{NOTE: "old", "other": "kept"})
    action = replace(ACTION, note_seen="old")
    path = "/metadata/annotations/autoscaler~1rollout"
    assert template_patch(action, item)[-2:] == [
        {"op": "test", "path": path, "value": "old"},
        {"op": "add", "path": path, "value": ACTION.note},
    ]
    done = json_patch(item, template_patch(action, item))
    assert done["metadata"]["annotations"] == {NOTE: ACTION.note, "other": "kept"}


def test_a_verdict_restarts_nothing() -> None:
    item = engines(**{NOTE: "old"})
    action = replace(ACTION, seen=SEEN, limits=SEEN, note_seen="old")
    done = json_patch(item, template_patch(action, item))
    assert done["spec"] == item["spec"]
    assert done["metadata"]["annotations"] == {NOTE: ACTION.note}


@pytest.mark.parametrize(
    ("item", "action", "reason"),
    [
        pytest.param(engines(), replace(ACTION, uid="another"), "conflict", id="created anew"),
        pytest.param(engines(**{NOTE: "theirs"}), ACTION, "conflict", id="another daemon's note"),
        pytest.param(engines(["--max-num-seqs=65"]), ACTION, "conflict", id="other limits"),
        pytest.param(engines(), replace(ACTION, container="engine"), "conflict", id="another container"),
        pytest.param(engines(["-c", "x"], command=["sh"]), replace(ACTION, seen=Limits()), "invalid", id="a shell"),
    ],
)
def test_what_is_no_longer_so_is_not_written(item: Json, action: RollOut, reason: str) -> None:
    with pytest.raises(ActuationError) as caught:
        template_patch(action, item)
    assert caught.value.reason == reason


async def test_a_write_is_a_read_and_a_request(fake: FakeApi, actuator: RolloutActuator) -> None:
    assert await actuator.apply(ACTION) is Outcome.APPLIED
    assert [request.right for request in fake.requests] == [LIST, PATCH]
    assert fake.requests[1].query == {"fieldManager": "autoscaler"}
    assert fake.deployment is not None
    assert engine_of(fake.deployment)["args"][3] == "96"
    assert fake.deployment["metadata"]["annotations"] == {NOTE: ACTION.note}
    assert fake.deployment["metadata"]["generation"] == 4


async def test_what_is_not_about_the_template_is_passed_on(fake: FakeApi, actuator: RolloutActuator) -> None:
    assert await actuator.apply(ScaleReplicas(seen=1, to=2)) is Outcome.SIMULATED
    assert await actuator.apply(Hold()) is Outcome.UNCHANGED
    assert fake.requests == []


async def test_a_change_between_read_and_write_is_a_conflict(fake: FakeApi, actuator: RolloutActuator) -> None:
    held = fake.deployment

    class Changed(TemplateActuator):
        async def _read(self) -> Any:
            found = await super()._read()
            fake.deployment = engines([*ARGS, "--seed=2"])
            return found

    api = KubernetesApi(Configuration(host=fake.url), FakeClock(), timeout_s=1.0)
    with pytest.raises(ActuationError) as caught:
        await Changed(api, TargetRef(deployment="chat", namespace="serving")).apply(ACTION)
    await api.close()
    assert caught.value.reason == "conflict"
    assert fake.deployment is not None
    assert fake.deployment is not held
    assert NOTE not in fake.deployment["metadata"]["annotations"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param(Fault(status=403, body={"message": "no"}), "forbidden", id="forbidden"),
        pytest.param(Fault(status=404, body={"message": "gone"}), "target_not_found", id="gone"),
        pytest.param(Fault(status=500, body="down"), "unreachable", id="down"),
    ],
)
async def test_a_refused_write_says_why(fake: FakeApi, actuator: RolloutActuator, fault: Fault, reason: str) -> None:
    fake.faults["patch deployments"] = [fault]
    with pytest.raises(ActuationError) as caught:
        await actuator.apply(ACTION)
    assert caught.value.reason == reason
    assert fake.deployment == engines()


async def test_a_write_without_an_answer_is_looked_for(fake: FakeApi, actuator: RolloutActuator) -> None:
    fake.faults["patch deployments"] = [Fault(status=502, body="cut", apply=True)]
    assert await actuator.apply(ACTION) is Outcome.APPLIED


async def test_a_deployment_that_is_not_there(fake: FakeApi, actuator: RolloutActuator) -> None:
    fake.deployment = None
    with pytest.raises(ActuationError) as caught:
        await actuator.apply(ACTION)
    assert caught.value.reason == "target_not_found"
