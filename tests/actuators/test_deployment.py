"""The write: its patch, and what becomes of it against a fake API server."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from kubernetes_asyncio.client import Configuration

from autoscaler.actuators import ACTUATORS
from autoscaler.actuators.deployment import RIGHTS, DeploymentActuator, scale_patch
from autoscaler.core.policy import TargetRef
from autoscaler.core.types import Hold, Outcome, ScaleReplicas
from autoscaler.errors import ActuationError
from autoscaler.sources.kubernetes_api import KubernetesApi
from tests.fake_api import DEPLOYMENT_UID, FakeApi, FakeClock, Fault, PatchError, deployment, json_patch

REF = TargetRef(deployment="chat", namespace="serving")
PATCH = "patch deployments/scale"
GET = "get deployments/scale"


@pytest.mark.parametrize(
    ("action", "patch"),
    [
        pytest.param(
            ScaleReplicas(seen=4, to=6, uid="u"),
            [
                {"op": "test", "path": "/spec/replicas", "value": 4},
                {"op": "test", "path": "/metadata/uid", "value": "u"},
                {"op": "replace", "path": "/spec/replicas", "value": 6},
            ],
            id="replicas and identity",
        ),
        pytest.param(
            ScaleReplicas(seen=4, to=3),
            [
                {"op": "test", "path": "/spec/replicas", "value": 4},
                {"op": "replace", "path": "/spec/replicas", "value": 3},
            ],
            id="replicas alone",
        ),
        pytest.param(
            ScaleReplicas(seen=0, to=1),
            [{"op": "test", "path": "/spec", "value": {}}, {"op": "add", "path": "/spec/replicas", "value": 1}],
            id="from zero, which the API leaves out",
        ),
    ],
)
def test_scale_patch(action: ScaleReplicas, patch: list[dict[str, Any]]) -> None:
    assert scale_patch(action) == patch


@pytest.mark.parametrize(
    ("spec", "uid", "after"),
    [
        pytest.param({"replicas": 4}, "u", 6, id="as seen"),
        pytest.param({"replicas": 5}, "u", None, id="written by someone else"),
        pytest.param({}, "u", None, id="set to zero"),
        pytest.param({"replicas": 4}, "v", None, id="created anew"),
    ],
)
def test_the_patch_applies_only_to_what_was_seen(spec: dict[str, int], uid: str, after: int | None) -> None:
    scale = {"metadata": {"uid": uid}, "spec": spec}
    patch = scale_patch(ScaleReplicas(seen=4, to=6, uid="u"))
    if after is None:
        with pytest.raises(PatchError):
            json_patch(scale, patch)
    else:
        assert json_patch(scale, patch)["spec"] == {"replicas": after}


@pytest.fixture
async def fake() -> AsyncIterator[FakeApi]:
    async with FakeApi(rights=RIGHTS).serve() as server:
        server.deployment = deployment(replicas=4)
        yield server


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def actuator(fake: FakeApi, clock: FakeClock) -> AsyncIterator[DeploymentActuator]:
    api = KubernetesApi(Configuration(host=fake.url), clock, timeout_s=1.0)
    actuator = DeploymentActuator(api, REF)
    yield actuator
    await actuator.close()
    await api.close()


def replicas(fake: FakeApi) -> int:
    assert fake.deployment is not None
    return int(fake.deployment["spec"]["replicas"])


async def refused(actuator: DeploymentActuator, action: ScaleReplicas) -> ActuationError:
    """Return the error of one write."""
    with pytest.raises(ActuationError) as caught:
        await actuator.apply(action)
    return caught.value


async def test_hold_sends_nothing(fake: FakeApi, actuator: DeploymentActuator) -> None:
    assert await actuator.apply(Hold()) is Outcome.UNCHANGED
    assert fake.requests == []


async def test_a_write_is_one_request(fake: FakeApi, actuator: DeploymentActuator) -> None:
    outcome = await actuator.apply(ScaleReplicas(seen=4, to=6, uid=DEPLOYMENT_UID))
    (request,) = fake.requests
    assert outcome is Outcome.APPLIED
    assert replicas(fake) == 6
    assert (request.verb, request.resource, request.query) == (
        "patch",
        "deployments/scale",
        {"fieldManager": "autoscaler"},
    )
    assert request.content_type == "application/json-patch+json"


@pytest.mark.parametrize(("seen", "to"), [pytest.param(4, 0, id="to zero"), pytest.param(0, 3, id="from zero")])
async def test_zero(fake: FakeApi, actuator: DeploymentActuator, seen: int, to: int) -> None:
    fake.deployment = deployment(replicas=seen)
    assert await actuator.apply(ScaleReplicas(seen=seen, to=to)) is Outcome.APPLIED
    assert replicas(fake) == to


@pytest.mark.parametrize(
    "action",
    [
        pytest.param(ScaleReplicas(seen=3, to=5), id="another writer was first"),
        pytest.param(ScaleReplicas(seen=4, to=5, uid="another"), id="Deployment created anew"),
        pytest.param(ScaleReplicas(seen=0, to=1), id="woken up by someone else"),
    ],
)
async def test_a_write_on_what_is_no_longer_so(
    fake: FakeApi, actuator: DeploymentActuator, action: ScaleReplicas
) -> None:
    assert (await refused(actuator, action)).reason == "conflict"
    assert replicas(fake) == 4
    assert fake.verbs() == [PATCH]


async def test_c090_a_conflict_is_reported_after_one_write_and_the_next_one_lands(
    fake: FakeApi, actuator: DeploymentActuator
) -> None:
    fake.faults = {PATCH: [Fault(status=409, body={"kind": "Status", "reason": "Conflict"})]}
    action = ScaleReplicas(seen=4, to=5, uid=DEPLOYMENT_UID)
    assert (await refused(actuator, action)).reason == "conflict"
    assert fake.verbs() == [PATCH]
    assert fake.deployment is not None
    fake.deployment["metadata"]["resourceVersion"] = "103"  # only the status moved: the same write is still right
    assert await actuator.apply(action) is Outcome.APPLIED
    assert replicas(fake) == 5
    assert [operation["path"] for operation in fake.requests[-1].body if operation["op"] != "test"] == [
        "/spec/replicas"
    ]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param(Fault(status=400), "invalid", id="400"),
        pytest.param(Fault(status=401), "unauthorized", id="401"),
        pytest.param(Fault(status=403), "forbidden", id="403"),
        pytest.param(Fault(status=404), "target_not_found", id="404"),
        pytest.param(Fault(status=429, headers={"Retry-After": "7"}), "throttled", id="429"),
    ],
)
async def test_refused_writes_are_not_read_back(
    fake: FakeApi, actuator: DeploymentActuator, fault: Fault, reason: str
) -> None:
    fake.faults = {PATCH: [fault, fault]}
    assert (await refused(actuator, ScaleReplicas(seen=4, to=5))).reason == reason
    assert GET not in fake.verbs()
    assert replicas(fake) == 4


async def test_a_value_that_is_not_allowed_is_no_conflict(fake: FakeApi, actuator: DeploymentActuator) -> None:
    assert (await refused(actuator, ScaleReplicas(seen=4, to=-1))).reason == "invalid"


async def test_c092_a_throttled_write_keeps_the_next_one_waiting(
    fake: FakeApi, actuator: DeploymentActuator, clock: FakeClock
) -> None:
    fake.faults = {PATCH: [Fault(status=429, headers={"Retry-After": "7"})]}
    action = ScaleReplicas(seen=4, to=5)
    assert (await refused(actuator, action)).retry_after_s == 7.0
    clock.at += 6.0
    assert (await refused(actuator, action)).reason == "throttled"
    assert fake.verbs() == [PATCH]
    clock.at += 1.0
    assert await actuator.apply(action) is Outcome.APPLIED


@pytest.mark.parametrize(
    ("fault", "after"),
    [
        pytest.param(Fault(hang=True, apply=True), 6, id="applied, no answer"),
        pytest.param(Fault(status=504, apply=True), 6, id="applied, gateway timeout"),
        pytest.param(Fault(status=200, body="<html>", apply=True), 6, id="applied, a proxy's page"),
        pytest.param(Fault(hang=True), 4, id="lost, no answer"),
        pytest.param(Fault(status=500), 4, id="lost, server error"),
        pytest.param(Fault(status=200, body="<html>"), 4, id="lost, a proxy's page"),
    ],
)
async def test_c098_the_fate_of_a_write_without_an_answer_is_read(
    fake: FakeApi, actuator: DeploymentActuator, fault: Fault, after: int
) -> None:
    fake.faults = {PATCH: [fault]}
    action = ScaleReplicas(seen=4, to=6, uid=DEPLOYMENT_UID)
    if after == action.to:
        assert await actuator.apply(action) is Outcome.APPLIED
    else:
        assert (await refused(actuator, action)).reason == "unreachable"
    assert replicas(fake) == after
    assert fake.verbs() == [PATCH, GET]


async def test_a_fate_that_cannot_be_read_is_a_failure(fake: FakeApi, actuator: DeploymentActuator) -> None:
    fake.faults = {PATCH: [Fault(status=500, apply=True)], GET: [Fault(status=500)]}
    assert (await refused(actuator, ScaleReplicas(seen=4, to=6))).reason == "unreachable"


async def test_another_deployment_at_that_size_is_not_ours(fake: FakeApi, actuator: DeploymentActuator) -> None:
    fake.deployment = deployment(replicas=6, uid="another")
    fake.faults = {PATCH: [Fault(status=500)]}
    assert (await refused(actuator, ScaleReplicas(seen=4, to=6, uid=DEPLOYMENT_UID))).reason == "unreachable"


async def test_the_mode_live_writes_with_the_declared_rights(fake: FakeApi, clock: FakeClock) -> None:
    api = KubernetesApi(Configuration(host=fake.url), clock, timeout_s=1.0)
    actuator = ACTUATORS["live"](api, REF)
    fake.faults = {PATCH: [Fault(status=500, apply=True)]}
    assert await actuator.apply(ScaleReplicas(seen=4, to=5)) is Outcome.APPLIED
    await api.close()
    assert {request.right for request in fake.requests} == RIGHTS
