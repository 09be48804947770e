"""The route as an ASGI application, in front of fakes of vLLM's application and engine client."""

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from autoscaler.vllm_plugin import LimitsEndpoint, LimitsMiddleware, route
from autoscaler.vllm_plugin.limits import SEQS
from autoscaler.vllm_plugin.route import NATIVE_PATH, PATH, TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, App, LimitsRoute
from tests.vllm_plugin.fake_scheduler import FakeCore, hooked

TOKEN = {"X-Autoscaler-Token": "secret"}


class AllClient:
    """A fake of the engine core's client since 0.32: one call for all engines."""

    def __init__(self, cores: list[FakeCore]) -> None:
        self.cores = cores

    async def call_utility_all_async(self, name: str, body: str) -> list[str]:
        """Return every engine's answer."""
        return [core.call(name, body) for core in self.cores]


class EachClient:
    """A fake of the client before: it calls one engine that is named."""

    def __init__(self, cores: list[FakeCore]) -> None:
        self.core_engines = list(range(len(cores)))
        self.cores = cores

    async def _call_utility_async(self, name: str, body: str, *, engine: int) -> str:
        return self.cores[engine].call(name, body)


class OneClient:
    """A fake of a client that has one engine and only the public call."""

    def __init__(self, cores: list[FakeCore]) -> None:
        (self.core,) = cores

    async def call_utility_async(self, name: str, body: str) -> str:
        """Return the engine's answer."""
        return self.core.call(name, body)


class FailingClient:
    """A fake of a client whose engine fails every call, as vLLM tells it."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def call_utility_async(self, name: str, body: str) -> str:
        """Raise the error."""
        await asyncio.sleep(0)
        raise self.error


@dataclass
class FakeRoute:
    """A route that answers one path, as Starlette's do."""

    path: str

    def matches(self, scope: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return how well it matches."""
        return SimpleNamespace(name="FULL" if scope["path"] == self.path else "NONE"), {}


@dataclass
class FakeApp:
    """What of vLLM's application the route looks at."""

    routes: list[FakeRoute] = field(default_factory=list)
    state: SimpleNamespace = field(default_factory=SimpleNamespace)


def http(app: App, fake: FakeApp | None = None, headers: dict[str, str] | None = None) -> httpx.AsyncClient:
    """Return a client of an ASGI application, whose scope names vLLM's application."""

    async def within(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "app": fake or FakeApp()}, receive, send)

    transport = httpx.ASGITransport(app=within)
    return httpx.AsyncClient(
        transport=transport, base_url="http://engine", headers=TOKEN if headers is None else headers
    )


def routed(client: object) -> LimitsRoute:
    return LimitsRoute(lambda _: SimpleNamespace(engine_core=client))


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the pod a token."""
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")


@pytest.mark.parametrize("kind", [AllClient, EachClient], ids=["since-0.32", "before"])
async def test_all_engines_take_a_target(kind: Callable[[list[FakeCore]], object]) -> None:
    cores = [hooked()[1], hooked()[1]]
    async with http(routed(kind(cores))) as client:
        answer = await client.put(PATH, json={"generation": 1, "limits": {SEQS: 3}})
        state = answer.json()
        assert (answer.status_code, state["generation"], state["applied_generation"]) == (200, 1, 1)
        assert [engine["effective"][SEQS] for engine in state["engines"]] == [3, 3]
        assert (await client.get(PATH)).json()["engines"] == state["engines"]
        assert set(state) == {
            *("contract", "plugin", "vllm", "persistent", "status", "reason", "native"),
            *("generation", "applied_generation", "engines"),
        }


async def test_the_lowest_generation_and_the_first_reason_speak_for_all() -> None:
    (first, one), (_, two) = hooked(), hooked()
    async with http(routed(AllClient([one, two]))) as client:
        await client.put(PATH, json={"generation": 1, "limits": {}})
        first.max_num_scheduled_tokens = 7
        first.schedule()
        state = (await client.get(PATH)).json()
        assert (state["status"], state["reason"]["code"], state["applied_generation"]) == (
            "passive",
            "changed_by_another",
            0,
        )


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        pytest.param({}, 401, "unauthorized", id="none"),
        pytest.param({"X-Autoscaler-Token": "other"}, 401, "unauthorized", id="other"),
        pytest.param({"Authorization": "Bearer secret"}, 401, "unauthorized", id="as-api-key"),
        pytest.param(TOKEN, 200, None, id="right"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "PUT"])
async def test_only_the_token_opens_the_route(
    headers: dict[str, str], status: int, code: str | None, method: str
) -> None:
    _, core = hooked()
    body = {"generation": 1, "limits": {SEQS: 3}} if method == "PUT" else None
    async with http(routed(OneClient([core])), headers=headers) as client:
        answer = await client.request(method, PATH, json=body)
    assert (answer.status_code, answer.json().get("error", {}).get("code")) == (status, code)
    moved = json.loads(core.call("autoscaler_limits", ""))["state"]["generation"]
    assert moved == (1 if status == 200 and method == "PUT" else 0)


async def test_a_pod_without_a_token_answers_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with http(routed(OneClient([hooked()[1]])), headers={"X-Autoscaler-Token": ""}) as client:
        monkeypatch.delenv(TOKEN_VARIABLE)
        assert (await client.get(PATH)).json()["error"]["code"] == "no_token"
        monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tmp_path / "token"))
        assert (await client.get(PATH)).status_code == 403
        (tmp_path / "token").write_text("\n")
        assert (await client.get(PATH)).status_code == 403


async def test_a_rotated_token_holds_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "token"
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(file))
    async with http(routed(OneClient([hooked()[1]]))) as client:
        file.write_text("secret\n")
        assert (await client.get(PATH)).status_code == 200
        file.write_text("another\n")
        assert (await client.get(PATH)).status_code == 401


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        pytest.param(b"", 400, "bad_request", id="empty"),
        pytest.param(b"\xff", 400, "bad_request", id="no-text"),
        pytest.param(b"{}", 400, "bad_request", id="no-target"),
        pytest.param(b" " * 4097, 413, "too_large", id="long"),
        pytest.param(b'{"generation": 1, "limits": {"max_num_seqs": 17}}', 422, "refused", id="refused"),
    ],
)
async def test_bad_bodies(content: bytes, status: int, code: str) -> None:
    async with http(routed(OneClient([hooked()[1]]))) as client:
        answer = await client.put(PATH, content=content)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_other_methods_are_refused() -> None:
    async with http(routed(OneClient([hooked()[1]]))) as client:
        assert (await client.delete(PATH)).status_code == 405


async def test_what_vllm_moves_itself_is_left_to_it() -> None:
    fake = FakeApp(routes=[FakeRoute("/health"), FakeRoute(NATIVE_PATH)])
    async with http(routed(OneClient([hooked()[1]])), fake) as client:
        assert (await client.get(PATH)).json()["native"] == [SEQS]
        answer = await client.put(PATH, json={"generation": 1, "limits": {SEQS: 3}})
        assert answer.status_code == 422
        assert answer.json()["error"]["problems"][0]["code"] == "unsupported"
        answer = await client.put(PATH, json={"generation": 1, "limits": {"max_num_batched_tokens": 64}})
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("client", "words"),
    [
        pytest.param(None, "no_engine", id="no-engine"),
        pytest.param(
            FailingClient(Exception("Call to autoscaler_limits failed: no attribute 'autoscaler_limits'")),
            "engine_without_plugin",
            id="engine-without-plugin",
        ),
        pytest.param(FailingClient(RuntimeError("EngineCore died")), "engine_failed", id="dead"),
    ],
)
async def test_an_engine_that_cannot_be_asked(client: object, words: str) -> None:
    async with http(routed(client)) as one:
        answer = await one.get(PATH)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"].startswith(words)


async def test_an_engine_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        async def call_utility_async(self, name: str, body: str) -> str:
            await asyncio.Event().wait()
            return ""

    monkeypatch.setattr(route, "ANSWER_S", 0.01)
    async with http(routed(Silent())) as client:
        answer = await client.get(PATH)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "no_answer")


async def test_the_middleware_answers_its_path_and_passes_on_the_rest() -> None:
    async def rest(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 418, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    fake = FakeApp(state=SimpleNamespace(engine_client=SimpleNamespace(engine_core=OneClient([hooked()[1]]))))
    async with http(LimitsMiddleware(rest), fake) as client:
        assert (await client.get(PATH)).json()["status"] == "active"
        assert (await client.get("/health")).status_code == 418
        assert (await client.get(PATH + "/more")).status_code == 418


def test_an_application_that_takes_no_route_starts_without(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)  # the level that another test left is not ours
    LimitsEndpoint().attach_router(object())
    assert "the route cannot be added" in caplog.text


async def test_the_endpoint_adds_the_route_and_takes_the_engine() -> None:
    added: dict[str, Any] = {}

    class Application:
        def add_route(self, path: str, app: App, *, methods: list[str], include_in_schema: bool) -> None:
            added.update(path=path, app=app, methods=methods, shown=include_in_schema)

    endpoint = LimitsEndpoint()
    endpoint.attach_router(Application())
    assert (added["path"], added["methods"], added["shown"]) == (PATH, ["GET", "PUT"], False)
    async with http(added["app"]) as client:
        assert (await client.get(PATH)).status_code == 503
        await endpoint.init_state(SimpleNamespace(engine_core=OneClient([hooked()[1]])), None, None)
        assert (await client.get(PATH)).status_code == 200
