"""The fake kubelet holds on to what it has to write."""

from typing import Any

import pytest

from autoscaler.testbed.api import Api, ApiError, Json
from autoscaler.testbed.kubelet import FakeKubelet, FakePod, Settings


def a_pod(version: int) -> Json:
    return {
        "metadata": {"name": "chat-a", "namespace": "serving", "uid": "u", "resourceVersion": str(version)},
        "spec": {"containers": [{"name": "vllm", "image": "vllm"}]},
    }


class Scripted(Api):
    """An API whose answers are given: objects, or errors to raise."""

    def __init__(self, *answers: Json | Exception) -> None:
        super().__init__("https://127.0.0.1:1", "", "")
        self.answers = list(answers)

    async def request(self, *_: Any, **__: Any) -> Json:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_a_status_is_written_in_the_end_where_the_server_is_away_for_a_while() -> None:
    pod = FakePod(item=a_pod(5), ip="127.0.0.2")
    api = Scripted(TimeoutError(), ConnectionResetError(), ApiError(503, b""), ApiError(429, b""), a_pod(6))
    await FakeKubelet(api, Settings(nodes=("gpu-0",)))._write(pod, "Running")
    assert (pod.item, api.answers) == (a_pod(6), [])


async def test_a_refusal_is_no_reason_to_insist() -> None:
    pod = FakePod(item=a_pod(5), ip="127.0.0.2")
    with pytest.raises(ApiError, match="404"):
        await FakeKubelet(Scripted(ApiError(404, b"")), Settings(nodes=("gpu-0",)))._write(pod, "Running")
    assert pod.item == a_pod(5)


async def test_what_was_told_while_a_status_was_written_is_not_forgotten() -> None:
    pod = FakePod(item=a_pod(7), ip="127.0.0.2")  # told by the watch, before the answer to our write has arrived
    await FakeKubelet(Scripted(a_pod(6)), Settings(nodes=("gpu-0",)))._write(pod, "Running")
    assert pod.item == a_pod(7)
