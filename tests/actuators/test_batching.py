"""Telling pods their batching limits: what is sent, what is believed, and what of a pod that does not take them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from autoscaler.actuators.batching import BatchingActuator, document
from autoscaler.actuators.dry_run import DryRunActuator
from autoscaler.core.policy import PluginAccess
from autoscaler.core.types import Hold, Limits, Outcome, PodBatching, ScaleReplicas, SetBatching
from autoscaler.errors import ActuationError, SourceError
from autoscaler.sources.plugin_api import PluginApi
from autoscaler.vllm_plugin.route import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from tests.plugin_pod import TOKEN, PluginPod

LIMITS = Limits(max_num_seqs=5, max_num_batched_tokens=256, long_prefill_token_threshold=0)
SENT = {"max_num_seqs": 5, "max_num_batched_tokens": 256, "long_prefill_token_threshold": 0}


@dataclass
class FakeAnswer:
    """What a pod answers."""

    status: int = 200
    document: Mapping[str, Any] = field(default_factory=dict)


class FakePods:
    """A fake of the API to the pods: canned answers by address, in order; a pod without any takes what it is told."""

    def __init__(self, answers: Mapping[str, list[FakeAnswer | SourceError]] | None = None) -> None:
        self.answers = dict(answers or {})
        self.sent: list[tuple[str, str, Any]] = []
        self.closed = False

    async def request(self, method: str, ip: str, body: Any = None) -> FakeAnswer:
        """Return the next answer."""
        self.sent.append((method, ip, body))
        waiting = self.answers.get(ip)
        if not waiting:
            return FakeAnswer(200, {"generation": body["generation"], "applied_generation": body["generation"]})
        answer = waiting.pop(0)
        if isinstance(answer, SourceError):
            raise answer
        return answer

    async def close(self) -> None:
        """Take note."""
        self.closed = True


def action(*ips: str, generation: int = 6) -> SetBatching:
    """Return the action that tells these pods."""
    pods = tuple(PodBatching(pod=f"chat-{ip}", uid=ip, ip=ip, limits=LIMITS, generation=generation) for ip in ips)
    return SetBatching(limits=LIMITS, pods=pods)


def actuator(pods: FakePods) -> tuple[BatchingActuator, list[tuple[str, str]]]:
    """Return an actuator, and what it tells."""
    told: list[tuple[str, str]] = []
    return BatchingActuator(DryRunActuator(), pods, lambda pod, problem: told.append((pod, problem))), told


async def test_every_pod_is_told_with_its_next_generation() -> None:
    pods = FakePods()
    one, told = actuator(pods)
    assert await one.apply(action("1", "2")) is Outcome.APPLIED
    assert sorted(pods.sent) == [("PUT", ip, {"generation": 7, "limits": SENT}) for ip in ("1", "2")]
    assert told == [("chat-1", ""), ("chat-2", "")]


async def test_what_is_not_about_batching_is_passed_on() -> None:
    pods = FakePods()
    one, _ = actuator(pods)
    assert await one.apply(Hold()) is Outcome.UNCHANGED
    assert await one.apply(ScaleReplicas(seen=1, to=2)) is Outcome.SIMULATED
    assert pods.sent == []
    await one.close()
    assert pods.closed


def test_a_limit_that_is_left_out_goes_back_to_the_start_value() -> None:
    assert document(LIMITS) == SENT
    assert document(Limits(max_num_seqs=5)) == {"max_num_seqs": 5}


async def test_a_generation_that_another_has_used_is_passed_once() -> None:
    stale = FakeAnswer(409, {"error": {"code": "stale_generation", "generation": 40}})
    pods = FakePods({"1": [stale]})
    one, _ = actuator(pods)
    assert await one.apply(action("1")) is Outcome.APPLIED
    assert [body["generation"] for _, _, body in pods.sent] == [7, 41]
    pods = FakePods({"1": [stale, FakeAnswer(409, {"error": {"generation": 50, "message": "generation 41 is old"}})]})
    one, told = actuator(pods)
    with pytest.raises(ActuationError, match="HTTP 409: generation 41 is old"):
        await one.apply(action("1"))
    assert len(pods.sent) == 2
    assert told == [("chat-1", "HTTP 409: generation 41 is old")]


@pytest.mark.parametrize(
    ("answer", "reason", "words"),
    [
        pytest.param(
            FakeAnswer(422, {"error": {"message": "max_num_seqs 5 is above its ceiling 4"}}),
            "invalid",
            "HTTP 422: max_num_seqs 5 is above its ceiling 4",
            id="refused",
        ),
        pytest.param(FakeAnswer(401), "unauthorized", "HTTP 401", id="wrong token"),
        pytest.param(FakeAnswer(403), "unauthorized", "HTTP 403", id="no token in the pod"),
        pytest.param(FakeAnswer(404), "target_not_found", "HTTP 404", id="no plugin"),
        pytest.param(FakeAnswer(503), "unreachable", "HTTP 503", id="passive"),
        pytest.param(SourceError("vllm", "timeout", "no answer within 2.5s"), "unreachable", "timeout", id="silent"),
        pytest.param(FakeAnswer(200, {}), "bad_body", "answered generation None", id="says nothing"),
        pytest.param(
            FakeAnswer(200, {"generation": 7, "applied_generation": 6}),
            "bad_body",
            "answered generation 7, applied 6",
            id="not yet in force",
        ),
        pytest.param(
            FakeAnswer(200, {"generation": 6, "applied_generation": 6}), "bad_body", "generation 6", id="did nothing"
        ),
    ],
)
async def test_a_pod_that_does_not_take_them_is_told_of(
    answer: FakeAnswer | SourceError, reason: str, words: str
) -> None:
    one, told = actuator(FakePods({"1": [answer]}))
    with pytest.raises(ActuationError) as caught:
        await one.apply(action("1"))
    assert caught.value.reason == reason
    assert words in caught.value.detail
    assert caught.value.reason not in ("conflict", "forbidden")  # which would hold back replicas too
    ((pod, problem),) = told
    assert pod == "chat-1"
    assert words in problem


async def test_one_pod_that_fails_does_not_stop_the_others() -> None:
    one, told = actuator(FakePods({"1": [FakeAnswer(503)]}))
    assert await one.apply(action("1", "2")) is Outcome.APPLIED
    assert told == [("chat-1", "HTTP 503"), ("chat-2", "")]


async def test_a_pod_without_an_address_is_not_asked() -> None:
    pods = FakePods()
    one, _ = actuator(pods)
    with pytest.raises(ActuationError, match="it has no address"):
        await one.apply(action(""))
    assert pods.sent == []


async def test_the_plugins_own_route_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_FILE_VARIABLE, raising=False)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    (tmp_path / "token").write_text(TOKEN)
    pod = PluginPod(engines=2)
    await pod.start()
    api = PluginApi(PluginAccess(token_file=str(tmp_path / "token")), scheme="http", port=pod.port)
    one = BatchingActuator(DryRunActuator(), api, lambda _pod, problem: None)
    assert await one.apply(action("127.0.0.1", generation=0)) is Outcome.APPLIED
    for scheduler in pod.schedulers:
        scheduler.schedule()
        assert (scheduler.max_num_active_reqs, scheduler.max_num_scheduled_tokens) == (5, 256)
    # Another process of ours has told it since: the generation is passed.
    assert await one.apply(action("127.0.0.1", generation=0)) is Outcome.APPLIED
    too_many = SetBatching(
        limits=LIMITS,
        pods=(PodBatching(pod="chat", uid="u", ip="127.0.0.1", limits=Limits(max_num_seqs=17), generation=2),),
    )
    with pytest.raises(ActuationError, match="above its ceiling 16"):
        await one.apply(too_many)
    await one.close()
    await pod.close()
