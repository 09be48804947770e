"""The route on vLLM's own port, and the two ways to it: an endpoint plugin from 0.26 on, a middleware before.

It is a plain ASGI application: it needs nothing that a release of vLLM might bring in another version.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from .hook import UTILITY
from .limits import LARGEST_BODY, SEQS, BadRequestError, Problem, read_target

PATH = "/v1/autoscaler/limits"
TOKEN_HEADER = b"x-autoscaler-token"
TOKEN_VARIABLE, TOKEN_FILE_VARIABLE = "AUTOSCALER_PLUGIN_TOKEN", "AUTOSCALER_PLUGIN_TOKEN_FILE"
# vLLM's own way to move the cap, where a release has it: two hands on one limit would undo each other's moves.
NATIVE_PATH = "/v1/runtime_config"
ANSWER_S = 10.0
LIFTED = ("contract", "plugin", "vllm", "persistent")
logger = logging.getLogger("vllm.autoscaler_plugin")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class HttpError(Exception):
    """An answer that is no state."""

    def __init__(self, status: int, code: str, message: str, **more: Any) -> None:
        """Keep what the answer says."""
        super().__init__(message)
        self.status = status
        self.document = {"error": {"code": code, "message": message, **more}}


class LimitsRoute:
    """Answers GET and PUT with the state of all engines behind one API server."""

    def __init__(self, client: Callable[[Scope], Any]) -> None:
        """`client` returns vLLM's engine client for a request, or None where there is none."""
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            status, document = 200, await self._answer(scope, receive)
        except HttpError as error:
            status, document = error.status, error.document
        content = json.dumps(document).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _answer(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        authenticate(scope)
        if scope["method"] not in ("GET", "PUT"):
            raise HttpError(405, "method_not_allowed", "only GET and PUT")
        native = native_limits(scope)
        body = ""
        if scope["method"] == "PUT":
            body = await read_body(receive)
            check_body(body, native)
        return combine(await ask(self._client(scope), body), native)


class LimitsEndpoint:
    """What `vllm.endpoint_plugins` loads, where the plugin is named in VLLM_PLUGINS."""

    name = "autoscaler"
    required_tasks: tuple[str, ...] | None = None

    def __init__(self) -> None:
        """Wait for the engine client."""
        self._client: Any = None

    def attach_router(self, app: Any) -> None:
        """Add the route to vLLM's application."""
        route = LimitsRoute(lambda _: self._client)
        try:
            app.add_route(PATH, route, methods=["GET", "PUT"], include_in_schema=False)
        except Exception as error:  # noqa: BLE001 - a server without this route is better than none
            logger.warning("autoscaler plugin: the route cannot be added: %r", error)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Take the engine client, None on a server without an engine."""
        self._client = engine_client


class LimitsMiddleware:
    """The same route for `--middleware vllm_autoscaler_plugin.LimitsMiddleware`, before 0.26."""

    def __init__(self, app: App) -> None:
        """Pass on to `app` what is not for this route."""
        self._app = app
        self._route = LimitsRoute(lambda scope: getattr(scope["app"].state, "engine_client", None))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        path = str(scope.get("path", "")).removeprefix(str(scope.get("root_path", "")))
        mine = scope["type"] == "http" and path == PATH
        await (self._route if mine else self._app)(scope, receive, send)


def authenticate(scope: Scope) -> None:
    """Check the token of a request. vLLM's own API key is another one: those who may ask may not set limits.

    Raises: HttpError 403, without a token in this pod; 401, when the request's is another one.
    """
    token = configured_token()
    if not token:
        message = f"neither {TOKEN_VARIABLE} nor {TOKEN_FILE_VARIABLE} is set: the route is closed"
        raise HttpError(403, "no_token", message)
    sent = next((value for name, value in scope["headers"] if name.lower() == TOKEN_HEADER), b"")
    if not hmac.compare_digest(sent, token):
        raise HttpError(401, "unauthorized", "X-Autoscaler-Token is missing or wrong")


def configured_token() -> bytes:
    """Return this pod's token, read at each request, so that a rotated Secret needs no restart; empty without one."""
    file = os.environ.get(TOKEN_FILE_VARIABLE)
    if not file:
        return os.environ.get(TOKEN_VARIABLE, "").strip().encode()
    try:
        return Path(file).read_bytes().strip()
    except OSError:
        return b""


def native_limits(scope: Scope) -> list[str]:
    """Return the limits that this vLLM moves itself: those of a route that its application answers."""
    probe = {"type": "http", "method": "GET", "path": NATIVE_PATH, "root_path": "", "headers": []}
    # By matching, not by path: FastAPI may keep a router that it includes as one entry without a path.
    matches = (route.matches(probe)[0] for route in scope["app"].routes)
    return [SEQS] if any(match.name == "FULL" for match in matches) else []


async def read_body(receive: Receive) -> str:
    """Return the body of a request. Raises: HttpError 413, 400."""
    body = b""
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise HttpError(400, "bad_request", "the client went away")
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > LARGEST_BODY:
            raise HttpError(413, "too_large", f"over {LARGEST_BODY} bytes")
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise HttpError(400, "bad_request", "not UTF-8") from error


def check_body(body: str, native: list[str]) -> None:
    """Refuse what no engine needs to see. Raises: HttpError 400, 422."""
    try:
        asked = read_target(body)
    except BadRequestError as error:
        raise HttpError(400, "bad_request", str(error)) from error
    problems = [
        Problem(name, value, "unsupported", f"{name} is moved by vLLM itself, at {NATIVE_PATH}")
        for name, value in asked.limits.items()
        if name in native
    ]
    if problems:
        documents = [problem.document() for problem in problems]
        raise HttpError(422, "refused", problems[0].message, problems=documents)


async def ask(client: Any, body: str) -> list[dict[str, Any]]:
    """Return the state of each engine behind an engine client.

    Raises: HttpError, with the status that an engine gave; 503, without an engine or the plugin in it; 504.
    """
    core = getattr(client, "engine_core", None)
    if core is None:
        raise HttpError(503, "passive", "no_engine: this server has no engine")
    try:
        texts = await asyncio.wait_for(call(core, body), ANSWER_S)
    except asyncio.TimeoutError as error:  # noqa: UP041 - not the built-in one before Python 3.11
        raise HttpError(504, "no_answer", f"the engine gave no answer in {ANSWER_S:g} s: ask again") from error
    except Exception as error:  # vLLM raises a bare Exception for a failed call
        code = "engine_without_plugin" if f"'{UTILITY}'" in str(error) else "engine_failed"
        raise HttpError(503, "passive", f"{code}: the engine cannot be asked: {error}") from error
    answers = [json.loads(text) for text in texts]
    for answer in answers:
        if "error" in answer:
            raise HttpError(**answer["error"])
    return [answer["state"] for answer in answers]


async def call(core: Any, body: str) -> list[str]:
    """Call the plugin's part in every engine: one a data-parallel rank."""
    everybody = getattr(core, "call_utility_all_async", None)  # since 0.32; before, only some clients have it
    if everybody is not None:
        return list(await everybody(UTILITY, body))
    engines, one = getattr(core, "core_engines", None), getattr(core, "_call_utility_async", None)
    if engines and one is not None:
        return list(await asyncio.gather(*(one(UTILITY, body, engine=engine) for engine in engines)))
    return [await core.call_utility_async(UTILITY, body)]


def combine(states: list[dict[str, Any]], native: list[str]) -> dict[str, Any]:
    """Return one document for all engines of a server."""
    reasons = [state["reason"] for state in states if state["reason"] is not None]
    first: Mapping[str, Any] = states[0]
    return {
        **{name: first[name] for name in LIFTED},
        "persistent": all(state["persistent"] for state in states),
        "status": "passive" if reasons else "active",
        "reason": reasons[0] if reasons else None,
        "native": native,
        "generation": min(state["generation"] for state in states),
        "applied_generation": min(state["applied_generation"] for state in states),
        "engines": [{name: value for name, value in state.items() if name not in LIFTED} for state in states],
    }
