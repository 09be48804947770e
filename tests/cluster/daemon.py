"""`autoscaler run` as a process of its own, its log read line by line."""

import asyncio
import base64
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from signal import Signals

import httpx
from prometheus_client.parser import text_string_to_metric_families

from autoscaler.testbed.api import Json

ENTRY = (sys.executable, "-c", "from autoscaler.cli import main; main()", "run")
LEFT_OUT = {"KUBECONFIG", "KUBERNETES_SERVICE_HOST", "DRY_RUN", "LOG_LEVEL"}
LIMIT_S = 60.0


class Daemon:
    """One that runs.

    Attributes:
        seen: the lines of its log that were read so far.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.seen: list[Json] = []

    async def until(self, event: str, **fields: object) -> Json:
        """Return the next line of an event with these fields. Raises TimeoutError, and AssertionError when it ends."""
        try:
            async with asyncio.timeout(LIMIT_S):
                while True:
                    line = await self._line()
                    assert line, f"it ended before {event} {fields}: {self.seen}"
                    if line["event"] == event and fields.items() <= line.items():
                        return line
        except TimeoutError as error:
            raise TimeoutError(f"no {event} {fields} within {LIMIT_S:g} s; the last lines: {self.seen[-2:]}") from error

    async def url(self) -> str:
        """Return where its endpoints are, once it has said so."""
        return str((await self.until("started"))["listen"])

    async def end(self, number: Signals) -> int:
        """Send a signal, read the rest of the log, and return the exit code."""
        self._process.send_signal(number)
        return await self.ended()

    async def ended(self) -> int:
        """Wait for its end by itself, and return the exit code; `seen` is complete then."""
        async with asyncio.timeout(LIMIT_S):
            while await self._line():
                pass
            return await self._process.wait()

    def of(self, event: str) -> list[Json]:
        """Return the lines of one event that were read so far."""
        return [line for line in self.seen if line["event"] == event]

    async def _line(self) -> Json:
        """Read the next line; empty at the end."""
        assert self._process.stdout is not None
        raw = await self._process.stdout.readline()
        line: Json = json.loads(raw) if raw else {}
        self.seen += [line] if line else []
        return line


def credential_of(token: str) -> str:
    """Return how the audit log names a ServiceAccount's token."""
    claims = token.split(".")[1]
    return f"JTI={json.loads(base64.urlsafe_b64decode(claims + '=' * (-len(claims) % 4)))['jti']}"


def environment() -> dict[str, str]:
    """Return this process' environment without what a daemon would take for its own."""
    return {name: value for name, value in os.environ.items() if name not in LEFT_OUT}


@asynccontextmanager
async def running_daemon(
    kubeconfig: Path | None,
    *arguments: object,
    entry: Sequence[str] = ENTRY,
    environ: Mapping[str, str] | None = None,
) -> AsyncIterator[Daemon]:
    """Run it while the block runs; it is killed where it has not ended. What it says on stderr is ours to read.

    Args:
        kubeconfig: None where it has to find the API server by `environ`.
        entry: the command that stands for `autoscaler run`.
    """
    process = await asyncio.create_subprocess_exec(
        *entry,
        *(() if kubeconfig is None else ("--kubeconfig", str(kubeconfig))),
        "--listen",
        "127.0.0.1:0",
        "--log-format",
        "json",
        *map(str, arguments),
        stdout=asyncio.subprocess.PIPE,
        env=environment() | dict(environ or {}),
        limit=2**20,
    )
    try:
        yield Daemon(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def page(url: str, path: str = "/metrics") -> httpx.Response:
    """Return what a daemon answers at one of its endpoints."""
    async with httpx.AsyncClient() as client:
        return await client.get(url + path)


async def series(url: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return its metrics, by name without `autoscaler_` and by labels."""
    families = text_string_to_metric_families((await page(url)).text)
    return {
        (sample.name.removeprefix("autoscaler_"), frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


async def total(url: str, name: str, **labels: str) -> float | None:
    """Return the sum of a metric's series with these labels; None where there is none."""
    found = [
        value for (known, given), value in (await series(url)).items() if known == name and labels.items() <= given
    ]
    return sum(found) if found else None
