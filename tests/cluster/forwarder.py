"""The network between one daemon and the API server: a TCP forwarder that can be cut, and be whole again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from pathlib import Path

import yaml

from autoscaler.testbed.plane import Plane

CHUNK = 2**16


class Cut(StrEnum):
    """How a network fails."""

    SILENT = "silent"
    """Connections stay open and new ones are taken, and no byte comes through: a lost route, a dropping firewall."""
    REFUSED = "refused"
    """Connections are reset, and new ones too: a server that is gone."""


class Forwarder:
    """One that runs. What was under way when it was cut is lost for good: connections from before never go on."""

    def __init__(self, host: str, port: int) -> None:
        self._upstream = host, port
        self._cut: Cut | None = None
        self._whole = asyncio.Event()
        self._whole.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.url = ""

    def cut(self, how: Cut) -> None:
        """Let nothing through from now on."""
        self._cut = how
        self._whole.clear()
        if how is Cut.REFUSED:
            self._reset()

    def heal(self) -> None:
        """Let new connections through again; those from before are reset, since bytes of them are lost."""
        self._cut = None
        self._whole.set()
        self._reset()

    def take(self, writer: asyncio.StreamWriter) -> None:
        """Take note of one side of a connection, which a cut resets."""
        self._writers.add(writer)

    async def close(self) -> None:
        """Reset all connections, those of which nobody has begun to take care too."""
        open_ones = tuple(self._writers)
        self._reset()
        for writer in open_ones:
            with suppress(OSError):
                await writer.wait_closed()

    def kubeconfig_for(self, plane: Plane, token: str, path: Path) -> Path:
        """Write a kubeconfig for the bearer of a token, whose server is this forwarder."""
        content = yaml.safe_load(plane.kubeconfig_for(token, path).read_text())
        content["clusters"][0]["cluster"]["server"] = self.url
        path.write_text(yaml.safe_dump(content))
        return path

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one connection on until either side ends it."""
        try:
            if self._cut is Cut.REFUSED:
                writer.transport.abort()
            elif self._cut is Cut.SILENT:
                await self._pass(reader, None)
            else:
                await self._forward(reader, writer)
        except OSError:
            pass  # either side has gone, which its end of the connection shows to the other
        finally:
            self._drop(writer)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, ahead = await asyncio.open_connection(*self._upstream)
        self.take(ahead)
        pumps = [asyncio.create_task(self._pass(reader, ahead)), asyncio.create_task(self._pass(back, writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._drop(ahead)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter | None) -> None:
        """Pass bytes on until their end, or lose them while the network is cut."""
        lossy = writer is None
        while data := await reader.read(CHUNK):
            lossy = lossy or self._cut is not None
            if writer is not None and not lossy:
                writer.write(data)
                await writer.drain()
        if lossy:  # nor does the end of a connection come through
            await self._whole.wait()

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.transport.abort()

    def _reset(self) -> None:
        for writer in tuple(self._writers):
            writer.transport.abort()


@asynccontextmanager
async def running_forwarder(plane: Plane) -> AsyncIterator[Forwarder]:
    """Run one to the plane's API server, on a free port of 127.0.0.1, while the block runs."""
    host, _, port = plane.url.removeprefix("https://").partition(":")
    forwarder = Forwarder(host, int(port))
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        forwarder.take(writer)
        task = asyncio.create_task(forwarder.accept(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    forwarder.url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield forwarder
    finally:
        server.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await forwarder.close()
        await server.wait_closed()
