"""Serves the simulated engines' pages over real HTTP on loopback, one address a pod."""

import socket
from collections.abc import Callable

from aiohttp import web

from autoscaler.errors import AutoscalerError
from autoscaler.sim.pages import CONTENT_TYPE

ANCHOR = "127.10.0.1"
"""No pod has it. The port is reserved here, so that two fleets on one machine never share one."""


class PageServer:
    """Listens at the addresses it is told to, all on one port.

    Args:
        page: gives an address's page, or None when nothing should answer there.
    """

    def __init__(self, page: Callable[[str], str | None]) -> None:
        self._page = page
        self._anchor: socket.socket | None = None
        self._port = 0
        self._runners: dict[str, web.ServerRunner] = {}

    async def start(self) -> int:
        """Choose the port and return it."""
        self._anchor = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._anchor.bind((ANCHOR, 0))
        except OSError as error:
            raise AutoscalerError(f"cannot listen on {ANCHOR}: {error.strerror}") from error
        self._port = self._anchor.getsockname()[1]
        return self._port

    async def follow(self, addresses: set[str]) -> None:
        """Listen at exactly these addresses; connections to others are closed."""
        for address in sorted(self._runners.keys() - addresses):
            await self._runners.pop(address).cleanup()
        for address in sorted(addresses - self._runners.keys()):
            await self._listen(address)

    async def _listen(self, address: str) -> None:
        runner = web.ServerRunner(web.Server(self._answer, access_log=None), shutdown_timeout=1.0)
        await runner.setup()
        self._runners[address] = runner
        try:
            await web.TCPSite(runner, address, self._port).start()
        except OSError as error:
            raise AutoscalerError(f"cannot listen on {address}:{self._port}: {error.strerror}") from error

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response()
        transport = request.transport
        address = transport.get_extra_info("sockname")[0] if transport is not None else ""
        text = self._page(address) if request.path == "/metrics" else None
        if text is None:
            return web.Response(status=404, text="not found")
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def close(self) -> None:
        """Stop listening everywhere."""
        await self.follow(set())
        if self._anchor is not None:
            self._anchor.close()
