"""Traffic for a real server: streams, each of which knows when its first token came and how it ended."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from tests.vllm.server import VllmServer, completion

POLL_S = 0.05


@dataclass(slots=True, kw_only=True)
class Stream:
    """One request.

    Args:
        first_at, last_at: when its first and last token came; None while they have not [s].
        tokens: how many came.
        problem: why it is no good, once it has ended.
    """

    output: int
    first_at: float | None = None
    last_at: float | None = None
    tokens: int = 0
    ended: bool = False
    problem: str | None = None

    @property
    def runs(self) -> bool:
        """Return whether it surely holds a place in the batch."""
        return self.first_at is not None and not self.ended


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
    """Send one request and read its stream to the end."""
    request |= {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async with server.client.stream("POST", "/v1/completions", json=request) as answer:
            if answer.status_code != httpx.codes.OK:
                stream.problem = f"{answer.status_code}: {(await answer.aread()).decode()}"
            async for line in answer.aiter_lines():
                read(stream, line)
    except httpx.HTTPError as error:
        stream.problem = repr(error)
    stream.ended = True
    if stream.problem is None and stream.tokens != stream.output:
        stream.problem = f"{stream.tokens} of {stream.output} tokens"


def read(stream: Stream, line: str) -> None:
    """Take one line of a stream of server-sent events."""
    if not line.startswith("data: {"):
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        stream.problem = str(event["error"])
    if event.get("choices"):
        stream.last_at = time.monotonic()
        stream.first_at = stream.first_at or stream.last_at
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
