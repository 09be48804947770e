"""Marking pods before a step down: the patch, what is written when, and what a mark that fails does to the step."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from kubernetes_asyncio.client import Configuration

from autoscaler.actuators.deletion_cost import AT_ONCE, FAILED, MARKS_S, RIGHTS, WRITTEN, MarkingActuator, cost_patch
from autoscaler.actuators.deployment import RIGHTS as WRITES
from autoscaler.actuators.deployment import DeploymentActuator
from autoscaler.actuators.gate import WRITE_S, GatedActuator
from autoscaler.core.policy import TargetRef
from autoscaler.core.types import DeletionCost, Hold, Outcome, ScaleReplicas
from autoscaler.core.victims import ANNOTATION
from autoscaler.errors import ActuationError
from autoscaler.sources.kubernetes_api import KubernetesApi
from tests.fake_api import DEPLOYMENT_UID, FakeApi, FakeClock, Fault, deployment, pod

REF = TargetRef(deployment="chat", namespace="serving")
MARK, SCALE = "patch pods", "patch deployments/scale"
Told = list[tuple[str, str]]
Make = Callable[..., MarkingActuator]


def cost(name: str, value: int | None = -1, uid: str = "") -> DeletionCost:
    return DeletionCost(pod=name, uid=uid or f"pod-{name}", cost=value)


def down(*costs: DeletionCost, seen: int = 3) -> ScaleReplicas:
    return ScaleReplicas(seen=seen, to=1, uid=DEPLOYMENT_UID, costs=costs)


@pytest.mark.parametrize(("value", "text"), [pytest.param(-1, "-1", id="set"), pytest.param(None, None, id="removed")])
def test_the_patch_is_of_one_annotation_of_that_very_pod(value: int | None, text: str | None) -> None:
    assert cost_patch(cost("a", value)) == {"metadata": {"uid": "pod-a", "annotations": {ANNOTATION: text}}}


@pytest.fixture
async def fake() -> AsyncIterator[FakeApi]:
    async with FakeApi(rights=RIGHTS | WRITES).serve() as server:
        server.deployment = deployment(replicas=3)
        server.pods = [pod("a"), pod("b"), pod("c")]
        yield server


@pytest.fixture
def told() -> Told:
    return []


@pytest.fixture
async def make(fake: FakeApi, told: Told) -> AsyncIterator[Make]:
    """Return what makes an actuator over the fake, which it closes in the end."""
    api = KubernetesApi(Configuration(host=fake.url), FakeClock(), timeout_s=5.0)
    made = []

    def new(on_failure: str = "proceed", **settings: Any) -> MarkingActuator:
        inner = DeploymentActuator(api, REF)
        tell = lambda *words: told.append(words)  # noqa: E731
        made.append(MarkingActuator(inner, api, REF, on_failure=on_failure, told=tell, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield new
    for one in made:
        await one.close()
    await api.close()


def costs_there(fake: FakeApi) -> dict[str, str | None]:
    return {item["metadata"]["name"]: item["metadata"].get("annotations", {}).get(ANNOTATION) for item in fake.pods}


def replicas(fake: FakeApi) -> int:
    assert fake.deployment is not None
    return int(fake.deployment["spec"]["replicas"])


async def test_c112_the_marks_are_written_before_the_replicas(fake: FakeApi, make: Make, told: Told) -> None:
    fake.pods[2]["metadata"]["annotations"] = {ANNOTATION: "-1", "note": "kept"}
    assert await make().apply(down(cost("a"), cost("b"), cost("c", None))) is Outcome.APPLIED
    assert fake.verbs() == [MARK, MARK, MARK, SCALE]
    assert costs_there(fake) == {"a": "-1", "b": "-1", "c": None}
    assert fake.pods[2]["metadata"]["annotations"] == {"note": "kept"}
    assert {request.content_type for request in fake.requests[:3]} == {"application/merge-patch+json"}
    assert {request.query["fieldManager"] for request in fake.requests} == {"autoscaler"}
    assert {request.right for request in fake.requests[:3]} == RIGHTS
    assert (replicas(fake), told) == (1, [(WRITTEN, "")] * 3)


@pytest.mark.parametrize(
    ("action", "verbs"),
    [
        pytest.param(Hold(), [], id="hold"),
        pytest.param(ScaleReplicas(seen=3, to=5), [SCALE], id="growth"),
        pytest.param(down(), [SCALE], id="nothing to change"),
    ],
)
async def test_without_costs_no_pod_is_touched(
    fake: FakeApi, make: Make, told: Told, action: Hold | ScaleReplicas, verbs: list[str]
) -> None:
    await make("hold").apply(action)
    assert (fake.verbs(), told) == (verbs, [])


FAULTS = [
    pytest.param([Fault(status=403)], "forbidden", id="403"),
    pytest.param([Fault(status=404)], "conflict", id="404"),
    pytest.param([Fault(status=500)], "unreachable", id="500"),
    pytest.param([Fault(hang=True)], "unreachable", id="timeout"),
]


@pytest.mark.parametrize(("faults", "reason"), FAULTS)
async def test_c112_a_mark_that_fails_is_counted_and_the_step_goes_on(
    fake: FakeApi, make: Make, told: Told, faults: list[Fault], reason: str
) -> None:
    fake.faults = {MARK: list(faults)}
    assert await make("proceed", marks_s=0.5).apply(down(cost("a"))) is Outcome.APPLIED
    assert fake.verbs() == [MARK, SCALE]
    assert [result for result, _ in told] == [FAILED]
    assert told[0][1].startswith("a: ")
    assert reason


@pytest.mark.parametrize(("faults", "reason"), FAULTS)
async def test_c112_a_mark_that_fails_holds_the_step_where_the_policy_says_so(
    fake: FakeApi, make: Make, told: Told, faults: list[Fault], reason: str
) -> None:
    fake.faults = {MARK: list(faults)}
    with pytest.raises(ActuationError) as caught:
        await make("hold", marks_s=0.5).apply(down(cost("a"), cost("b")))
    assert caught.value.reason == reason
    assert caught.value.detail.startswith("1 of 2 deletion costs not written; ")
    assert SCALE not in fake.verbs()
    assert replicas(fake) == 3
    assert sorted(result for result, _ in told) == [FAILED, WRITTEN]


async def test_a_successor_of_the_same_name_is_not_marked(fake: FakeApi, make: Make) -> None:
    with pytest.raises(ActuationError) as caught:
        await make("hold").apply(down(cost("a", uid="another")))
    assert (caught.value.reason, costs_there(fake)["a"]) == ("conflict", None)


async def test_a_throttled_mark_keeps_the_step_waiting_too(fake: FakeApi, make: Make, told: Told) -> None:
    fake.faults = {MARK: [Fault(status=429, headers={"Retry-After": "7"})]}
    with pytest.raises(ActuationError) as caught:
        await make("proceed").apply(down(cost("a")))
    assert (caught.value.reason, fake.verbs()) == ("throttled", [MARK])
    assert [result for result, _ in told] == [FAILED]


async def test_a_refused_step_leaves_its_marks_for_the_next_one(fake: FakeApi, make: Make) -> None:
    with pytest.raises(ActuationError) as caught:
        await make().apply(down(cost("a"), seen=9))
    assert (caught.value.reason, costs_there(fake)["a"]) == ("conflict", "-1")


class Crowd:
    """A fake API that answers when it is told to, and knows how many requests were open at once."""

    def __init__(self) -> None:
        self.open = self.most = self.done = 0
        self.crowded, self.answer = asyncio.Event(), asyncio.Event()

    async def request(self, method: str, path: str, **_: object) -> dict[str, object]:
        """Wait for the word."""
        self.open += 1
        self.most = max(self.most, self.open)
        if self.open == AT_ONCE:
            self.crowded.set()
        await self.answer.wait()
        self.open -= 1
        self.done += 1
        return {}


async def test_many_marks_are_written_some_at_a_time() -> None:
    crowd = Crowd()
    actuator = MarkingActuator(DeploymentActuator(crowd, REF), crowd, REF, on_failure="proceed", told=lambda *_: None)
    costs = [cost(f"p{index}") for index in range(3 * AT_ONCE)]
    writing = asyncio.create_task(actuator.apply(down(*costs)))
    await crowd.crowded.wait()
    crowd.answer.set()
    assert await writing is Outcome.APPLIED
    assert (crowd.most, crowd.done) == (AT_ONCE, len(costs) + 1)


async def test_the_gates_time_is_for_the_marks_and_the_step_together() -> None:
    crowd = Crowd()
    inner = MarkingActuator(DeploymentActuator(crowd, REF), crowd, REF, on_failure="proceed", told=lambda *_: None)
    with pytest.raises(ActuationError, match="no answer within"):
        await GatedActuator(inner, lambda _for_s: True, write_s=0.05).apply(down(cost("a")))
    assert (crowd.open, crowd.done) == (1, 0)
    assert MARKS_S < WRITE_S / 2


async def test_a_closed_gate_lets_no_mark_through(fake: FakeApi, make: Make, told: Told) -> None:
    assert await GatedActuator(make(), lambda _for_s: False).apply(down(cost("a"))) is Outcome.STANDBY
    assert (fake.verbs(), told) == ([], [])
