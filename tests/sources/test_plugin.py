"""What pods say of their batching limits: by the plugin's own route, and by routes that are none of ours."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from autoscaler.core.policy import PluginAccess
from autoscaler.core.types import Limits, Pod, PodLimits, PodPhase, TargetStatus
from autoscaler.sources import plugin_api
from autoscaler.sources.plugin import REFRESH_S, PluginSource, limits_of
from autoscaler.sources.plugin_api import MAX_BODY, Answer, PluginApi, words_of
from autoscaler.vllm_plugin.route import PATH, TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from tests.fake_api import FakeClock
from tests.plugin_pod import TOKEN, PluginPod
from tests.vllm_plugin.fake_scheduler import FakeConfig

STARTUP = Limits(max_num_seqs=16, max_num_batched_tokens=512, long_prefill_token_threshold=0)
CEILING = replace(STARTUP, long_prefill_token_threshold=512)
FLOOR = Limits(max_num_seqs=1, max_num_batched_tokens=1, long_prefill_token_threshold=0)
POD = Pod(name="chat-a", uid="a", ip="127.0.0.1")


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the pods a token."""
    monkeypatch.delenv(TOKEN_FILE_VARIABLE, raising=False)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


@pytest_asyncio.fixture
async def pod() -> AsyncIterator[PluginPod]:
    """Return a pod that listens."""
    one = PluginPod()
    await one.start()
    yield one
    await one.close()


@pytest.fixture
def access(tmp_path: Path) -> PluginAccess:
    """Return what lets us in."""
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    return PluginAccess(token_file=str(file))


def write(access: PluginAccess, token: str) -> None:
    """Rotate the token."""
    assert access.token_file is not None
    Path(access.token_file).write_text(token)


def target(*pods: Pod) -> TargetStatus:
    return TargetStatus(namespace="serving", name="chat", current_replicas=len(pods), pods=pods or (POD,))


async def read(pod: PluginPod, access: PluginAccess, at: float = 1000.0) -> tuple[PodLimits, ...]:
    """Return what a new source reads of the pod."""
    source = PluginSource(PluginApi(access, scheme="http", port=pod.port), FakeClock(), stale_after_s=15.0)
    try:
        return (await source.read(target(), at)).limits
    finally:
        await source.close()


async def test_limits_as_the_plugin_says_them(pod: PluginPod, access: PluginAccess) -> None:
    (said,) = await read(pod, access)
    assert said == PodLimits(pod_uid="a", limits=STARTUP, ceiling=CEILING, floor=FLOOR)
    api = PluginApi(access, scheme="http", port=pod.port)
    answer = await api.request("PUT", "127.0.0.1", {"generation": 7, "limits": {"max_num_seqs": 5}})
    await api.close()
    assert limits_of("a", answer) == replace(said, limits=replace(STARTUP, max_num_seqs=5), generation=7, applied=7)


async def test_a_budget_that_cannot_be_moved_has_no_ceiling(access: PluginAccess) -> None:
    whole = PluginPod(config=FakeConfig(enable_chunked_prefill=False))
    await whole.start()
    (said,) = await read(whole, access)
    await whole.close()
    assert said.ceiling.max_num_batched_tokens is None
    assert said.ceiling.max_num_seqs == 16
    assert said.limits.max_num_batched_tokens == 512


async def test_of_several_engines_the_tightest(access: PluginAccess) -> None:
    two = PluginPod(engines=2)
    await two.start()
    (said,) = await read(two, access)
    assert said.ceiling == CEILING
    two.schedulers[1].max_num_scheduled_tokens = 7
    two.schedulers[1].schedule()
    (said,) = await read(two, access)
    await two.close()
    assert said.refused.startswith("passive: changed_by_another: ")


async def test_pods_are_asked_now_and_then(pod: PluginPod, access: PluginAccess) -> None:
    source = PluginSource(PluginApi(access, scheme="http", port=pod.port), FakeClock(), stale_after_s=15.0)
    for at in (0.0, 5.0, REFRESH_S, REFRESH_S + 5.0):
        (said,) = (await source.read(target(), 1000.0 + at)).limits
        assert said.limits == STARTUP
    assert pod.asked == ["GET", "GET"]
    await pod.close()
    # What it said counts on while its page would.
    (said,) = (await source.read(target(), 1000.0 + REFRESH_S + 20.0)).limits
    assert said.limits == STARTUP
    (said,) = (await source.read(target(), 1000.0 + REFRESH_S + 60.0)).limits
    assert said == PodLimits(pod_uid="a", refused="unreachable: ClientConnectorError")
    await source.close()


async def test_only_ready_pods_are_asked(pod: PluginPod, access: PluginAccess) -> None:
    source = PluginSource(PluginApi(access, scheme="http", port=pod.port), FakeClock(), stale_after_s=15.0)
    others = (
        replace(POD, uid="b", ready=False),
        replace(POD, uid="c", phase=PodPhase.PENDING),
        replace(POD, uid="d", ip=""),
    )
    reading = await source.read(target(POD, *others), 1000.0)
    await source.close()
    assert [one.pod_uid for one in reading.limits] == ["a"]


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        pytest.param(404, b"Not Found", "the plugin is not there (HTTP 404)", id="no route"),
        pytest.param(200, b"<html>", "its state cannot be read: contract None, not 1", id="html"),
        pytest.param(200, b"[1]", "its state cannot be read: contract None, not 1", id="no object"),
        pytest.param(200, b'{"contract": 2}', "its state cannot be read: contract 2, not 1", id="another contract"),
        pytest.param(200, b"[" * 100_000, "its state cannot be read: contract None, not 1", id="nested deeply"),
        pytest.param(200, b"x" * (MAX_BODY + 1), f"body_too_large: more than {MAX_BODY} bytes", id="endless"),
        pytest.param(302, b"", "HTTP 302", id="elsewhere"),
        pytest.param(
            503,
            json.dumps({"error": {"code": "passive", "message": "no_engine: this server has no engine"}}).encode(),
            "HTTP 503 passive: no_engine: this server has no engine",
            id="no engine",
        ),
    ],
)
async def test_a_route_that_is_none_of_ours_is_told_apart(
    pod: PluginPod, access: PluginAccess, status: int, body: bytes, words: str
) -> None:
    pod.answer = (status, body)
    assert await read(pod, access) == (PodLimits(pod_uid="a", refused=words, lacking=status == 404),)


def state(**changes: Any) -> dict[str, Any]:
    """Return a state of one engine, with changes to that engine."""
    engine = {
        "capabilities": ["max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold"],
        "startup": {"max_num_seqs": 16, "max_num_batched_tokens": 512, "long_prefill_token_threshold": 0},
        "floors": {"max_num_seqs": 1, "max_num_batched_tokens": 1, "long_prefill_token_threshold": 0},
        "ceilings": {"max_num_seqs": 16, "max_num_batched_tokens": 512, "long_prefill_token_threshold": 512},
        "targets": {"max_num_seqs": 3},
        "effective": {"max_num_seqs": 9, "max_num_batched_tokens": 512, "long_prefill_token_threshold": 0},
        "generation": 7,
        "applied_generation": 7,
        **changes,
    }
    return {"contract": 1, "status": "active", "generation": 7, "applied_generation": 7, "engines": [engine]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"ceilings": None}, "ceilings is no object", id="no ceilings"),
        pytest.param({"ceilings": {"max_num_seqs": True}}, "max_num_seqs is True", id="a boolean"),
        pytest.param({"targets": {"max_num_seqs": -1}}, "max_num_seqs is -1", id="negative"),
        pytest.param({"targets": {"max_num_seqs": 2**40}}, "max_num_seqs is 1099511627776", id="absurd"),
        pytest.param({"targets": {"max_num_seqs": 3.0}}, "max_num_seqs is 3.0", id="no whole number"),
    ],
)
def test_a_state_that_lies_is_not_believed(changes: dict[str, Any], words: str) -> None:
    said = limits_of("a", Answer(200, state(**changes)))
    assert said == PodLimits(pod_uid="a", refused=f"its state cannot be read: {words}")


@pytest.mark.parametrize(
    ("code", "lacking"),
    [
        pytest.param("missing_attribute", True, id="a release that it does not know"),
        pytest.param("engine_failed", False, id="an engine that is dead now"),
    ],
)
def test_a_plugin_that_moves_nothing_is_as_good_as_none(code: str, lacking: bool) -> None:
    passive = {**state(), "status": "passive", "reason": {"code": code, "message": "why"}}
    said = limits_of("a", Answer(200, passive))
    assert said == PodLimits(pod_uid="a", refused=f"passive: {code}: why", lacking=lacking)


def test_what_is_not_yet_taken_up_is_what_it_obeys() -> None:
    assert limits_of("a", Answer(200, state())).limits.max_num_seqs == 3
    assert limits_of("a", Answer(200, state(applied_generation=6))).limits.max_num_seqs == 9


def test_what_vllm_moves_itself_is_not_ours() -> None:
    said = limits_of("a", Answer(200, {**state(), "native": ["max_num_seqs"]}))
    assert said.ceiling.max_num_seqs is None
    assert said.ceiling.max_num_batched_tokens == 512
    assert limits_of("a", Answer(200, {**state(), "engines": []})).refused.endswith("no engines")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(None, "cannot be read: No such file or directory", id="missing"),
        pytest.param(b"", "holds no token", id="empty"),
        pytest.param(b"two\nlines", "holds no token", id="a header of its own"),
        pytest.param(b"\xff", "cannot be read: not text", id="bytes"),
    ],
)
async def test_without_a_token_nobody_is_asked(
    pod: PluginPod, tmp_path: Path, content: bytes | None, words: str
) -> None:
    file = tmp_path / "other"
    if content is not None:
        file.write_bytes(content)
    (said,) = await read(pod, PluginAccess(token_file=str(file)))
    assert said.refused.startswith("unauthorized: tokenFile ")
    assert said.refused.endswith(words)
    assert pod.asked == []


async def test_the_wrong_token_and_none(pod: PluginPod, tmp_path: Path) -> None:
    file = tmp_path / "other"
    file.write_text("another")
    (said,) = await read(pod, PluginAccess(token_file=str(file)))
    assert said.refused == "HTTP 401 unauthorized: X-Autoscaler-Token is missing or wrong"
    (said,) = await read(pod, PluginAccess())
    assert said.refused.startswith("HTTP 401 unauthorized")


async def test_a_rotated_token_is_taken_up_and_never_shown(pod: PluginPod, access: PluginAccess) -> None:
    api = PluginApi(access, scheme="http", port=pod.port)
    pod.answer = (422, json.dumps({"error": {"code": "refused", "message": f"you sent {TOKEN}"}}).encode())
    assert words_of(await api.request("GET", "127.0.0.1")) == "HTTP 422 refused: you sent ***"
    pod.answer = None
    write(access, "another")
    assert (await api.request("GET", "127.0.0.1")).status == 401
    write(access, TOKEN)
    assert (await api.request("GET", "127.0.0.1")).status == 200
    await api.close()


async def test_an_answer_takes_no_longer_than_it_may(pod: PluginPod, access: PluginAccess) -> None:
    pod.silent = True
    (said,) = await read(pod, replace(access, timeout_s=0.05))
    assert said.refused == "timeout: no answer within 0.05s"


def test_the_route_is_the_plugins() -> None:
    assert plugin_api.PATH == PATH
