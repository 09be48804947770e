"""Pods on loopback whose route is the plugin's own code over HTTP; behind it is a fake of vLLM's scheduler.

They lack vLLM's server: its API key, its other routes, and the time that an engine takes to answer.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from autoscaler.vllm_plugin.route import PATH, LimitsRoute
from tests.vllm_plugin.fake_scheduler import FakeConfig, FakeCore, FakeScheduler, hooked

TOKEN = "a-token-of-the-test"


class PluginPod:
    """One pod's engines and their route.

    Args:
        engines: data-parallel ranks.

    Attributes:
        answer: instead of the route's own: a status and a body.
        silent: it takes requests, and answers none.
        asked: the methods of all requests.
    """

    def __init__(self, engines: int = 1, config: FakeConfig | None = None) -> None:
        self.schedulers: list[FakeScheduler] = []
        self.cores: list[FakeCore] = []
        for _ in range(engines):
            scheduler, core = hooked(config=config)
            self.schedulers.append(scheduler)
            self.cores.append(core)
        self.answer: tuple[int, bytes] | None = None
        self.silent = False
        self.asked: list[str] = []
        self.port = 0
        self._route = LimitsRoute(lambda _: SimpleNamespace(engine_core=self))
        self._runner: web.AppRunner | None = None

    async def call_utility_all_async(self, name: str, body: str) -> list[str]:
        """Return every engine's answer, as vLLM's client does."""
        return [core.call(name, body) for core in self.cores]

    async def start(self, ip: str = "127.0.0.1", port: int = 0) -> None:
        """Listen."""
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", PATH, self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, ip, port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _serve(self, request: web.Request) -> web.Response:
        """Pass a request to the route, which is an ASGI application."""
        self.asked.append(request.method)
        if self.silent:
            await asyncio.Event().wait()
        if self.answer is not None:
            status, body = self.answer
            return web.Response(status=status, body=body)
        sent: list[Any] = []
        body = await request.read()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(name.lower().encode(), value.encode()) for name, value in request.headers.items()]
        scope = {
            "type": "http",
            "method": request.method,
            "path": request.path,
            "headers": headers,
            "app": SimpleNamespace(routes=[]),
        }
        await self._route(scope, receive, send)
        return web.Response(status=sent[0]["status"], body=sent[1]["body"], content_type="application/json")
