"""Traffic for a real server: streams, each of which knows when its first token came and how it ended."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from tests.vllm.server import VllmServer, completion

POLL_S = 0.05


@dataclass(slots=True, kw_only=True)
class Stream:
    """One request.

    Args:
        sent_at: when it was sent [s].
        came_at: when each piece came, mostly one token.
        tokens: how many came, by the server's count at the end.
        problem: why it is no good, once it has ended.
    """

    output: int
    sent_at: float = field(default_factory=time.monotonic)
    came_at: list[float] = field(default_factory=list)
    tokens: int = 0
    ended: bool = False
    problem: str | None = None

    @property
    def runs(self) -> bool:
        """Return whether it surely holds a place in the batch."""
        return bool(self.came_at) and not self.ended


@dataclass(slots=True, kw_only=True)
class Load:
    """Streams that are sent one after another by so many clients at once, until they are told to stop."""

    server: VllmServer
    prompt: int
    output: int
    streams: list[Stream] = field(default_factory=list)
    stopped: bool = False

    @property
    def running(self) -> list[Stream]:
        """Return those that surely run."""
        return [stream for stream in self.streams if stream.runs]

    def gaps(self, since: float) -> list[float]:
        """Return the times between two pieces of a stream that came since then [s]."""
        return [
            then - before for stream in self.streams for before, then in pairwise(stream.came_at) if before >= since
        ]

    def first_tokens(self, since: float) -> list[float]:
        """Return how long the first token took, of those that were sent since then and have one [s]."""
        return [
            stream.came_at[0] - stream.sent_at for stream in self.streams if stream.came_at and stream.sent_at >= since
        ]

    def problems(self) -> list[str]:
        """Return what went wrong, of all that have ended."""
        return [stream.problem for stream in self.streams if stream.problem is not None]

    async def until_sent(self, count: int) -> None:
        """Wait until so many have been sent, all of them so far to a good end."""
        while True:
            assert self.problems() == []
            if len(self.streams) >= count:
                return
            await asyncio.sleep(POLL_S)

    async def until_running(self, count: int) -> None:
        """Wait until so many surely run at once."""
        while True:
            assert self.problems() == []
            if len(self.running) >= count:
                return
            await asyncio.sleep(POLL_S)

    async def client(self) -> None:
        """Send one stream after another, until one fails."""
        while not self.stopped and not self.problems():
            stream = Stream(output=self.output)
            self.streams.append(stream)
            await send(self.server, stream, completion(self.prompt, self.output, kind=len(self.streams) * 7))


async def send(server: VllmServer, stream: Stream, request: dict[str, object]) -> None:
    """Send one request and read its stream to the end.

    Without a client library: a client's own work on each token is not to slow down a server on the same cores.
    """
    try:
        async for line in answer_to(server, request | {"stream": True, "stream_options": {"include_usage": True}}):
            read(stream, line)
    except OSError as error:
        stream.problem = repr(error)
    stream.ended = True
    if stream.problem is None and stream.tokens != stream.output:
        stream.problem = f"{stream.tokens} of {stream.output} tokens"


async def answer_to(server: VllmServer, request: dict[str, object]) -> AsyncIterator[bytes]:
    """Yield the lines of an answer, those of the protocol too, on a connection of its own."""
    url, body = server.client.base_url, json.dumps(request).encode()
    head = {
        "Host": url.netloc.decode(),
        "Authorization": server.client.headers["Authorization"],
        "Content-Type": "application/json",
        "Content-Length": len(body),
        "Connection": "close",
    }
    lines = ["POST /v1/completions HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", ""]
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        writer.write("\r\n".join(lines).encode() + body)
        await writer.drain()
        while line := await reader.readline():
            yield line
    finally:
        writer.close()


def read(stream: Stream, line: bytes) -> None:
    """Take one line of an answer: its status, or a server-sent event, which vLLM sends in one chunk."""
    if line.startswith(b"HTTP/1.1 ") and not line.startswith(b"HTTP/1.1 200 "):
        stream.problem = line.decode().strip()
    if not line.startswith(b"data: {"):
        return
    event = json.loads(line.removeprefix(b"data: "))
    if "error" in event:
        stream.problem = str(event["error"])
    if event.get("choices"):
        stream.came_at.append(time.monotonic())
    if event.get("usage"):
        stream.tokens = event["usage"]["completion_tokens"]


async def until_ended(streams: Iterable[Stream]) -> None:
    """Wait until all of these have ended."""
    for stream in streams:
        while True:
            if stream.ended:
                break
            await asyncio.sleep(POLL_S)


@asynccontextmanager
async def load(server: VllmServer, clients: int, *, prompt: int = 30, output: int = 24) -> AsyncIterator[Load]:
    """Keep so many requests in flight; at the end wait for those that are, so that all have ended.

    Args:
        prompt, output: tokens of each.
    """
    one = Load(server=server, prompt=prompt, output=output)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(one.client())
        try:
            yield one
        finally:
            one.stopped = True
