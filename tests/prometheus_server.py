"""A real Prometheus server on loopback, for tests: Debian's package, which `tests/install-debian` installs."""

import asyncio
import json
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

START_LIMIT_S = 30.0
STOP_LIMIT_S = 20.0
POLL_S = 0.05
MISSING = "prometheus is not installed; tests/install-debian does it where it may"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeTarget:
    """One page to scrape.

    Args:
        address: host and port.
        labels: what the server adds to every series, such as `namespace` and `pod`.
        honor_labels: of two labels with one name the page's stays; otherwise it becomes `exported_...`.
    """

    address: str
    labels: Mapping[str, str] = field(default_factory=dict)
    path: str = "/metrics"
    honor_labels: bool = False


class RunningPrometheus:
    """A server that is ready.

    Args:
        url: base URL.
        home: the directory with the files that tell it what to scrape.
    """

    def __init__(self, url: str, home: Path) -> None:
        self.url = url
        self._home = home
        self._targets: tuple[ScrapeTarget, ...] = ()

    def scrape(self, targets: Iterable[ScrapeTarget]) -> None:
        """Scrape these from now on, and no others. The server takes up to five seconds to begin."""
        self._targets = tuple(targets)
        for honor_labels in (False, True):
            groups = [
                {"targets": [target.address], "labels": {"__metrics_path__": target.path, **target.labels}}
                for target in self._targets
                if target.honor_labels is honor_labels
            ]
            file = targets_file(self._home, honor_labels)
            written = file.with_suffix(".new")
            written.write_text(json.dumps(groups), encoding="utf-8")
            written.replace(file)

    async def scraped(self) -> float:
        """Wait until the newest scrape of every target succeeded; return when the server found that out."""
        return await self.until(f"count(up == 1) == {len(self._targets)}")

    async def until(self, expr: str) -> float:
        """Wait until a query gives anything; return the time for which it did."""
        async with asyncio.timeout(START_LIMIT_S), httpx.AsyncClient(base_url=self.url, trust_env=False) as client:
            while True:
                answer = await client.get("/api/v1/query", params={"query": expr})
                rows = answer.json()["data"]["result"]
                if rows:
                    return float(rows[0]["value"][0])
                await asyncio.sleep(POLL_S)


def targets_file(home: Path, honor_labels: bool) -> Path:
    """Return the file that lists the targets of one kind."""
    return home / f"targets-{'honored' if honor_labels else 'plain'}.json"


def skip_without_prometheus() -> None:
    """Skip the calling module, in one line, where the program is missing. With CI=true its tests fail instead."""
    if shutil.which("prometheus") is None and os.environ.get("CI") != "true":
        pytest.skip(MISSING, allow_module_level=True)


@asynccontextmanager
async def running_prometheus(
    targets: Iterable[ScrapeTarget] = (), *, interval: str = "1s"
) -> AsyncIterator[RunningPrometheus]:
    """Start a server in a directory of its own, and stop it in the end.

    Args:
        interval: how often it scrapes; also its limit for one scrape.
    """
    program = shutil.which("prometheus")
    if program is None:
        pytest.fail(MISSING)
    with tempfile.TemporaryDirectory(prefix="prometheus-") as name:
        home = Path(name)
        config = {
            "global": {"scrape_interval": interval, "scrape_timeout": interval},
            "scrape_configs": [
                {
                    "job_name": "honored" if honor_labels else "pods",
                    "honor_labels": honor_labels,
                    "file_sd_configs": [{"files": [str(targets_file(home, honor_labels))]}],
                }
                for honor_labels in (False, True)
            ],
        }
        (home / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")
        server = RunningPrometheus(f"http://127.0.0.1:{_free_port()}", home)
        server.scrape(targets)
        with (home / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                program,
                f"--config.file={home / 'prometheus.yml'}",
                f"--storage.tsdb.path={home / 'data'}",
                f"--web.listen-address={server.url.removeprefix('http://')}",
                "--log.level=warn",
                stdout=log,
                stderr=log,
            )
        try:
            await _ready(server.url, process, home / "log")
            yield server
        finally:
            await _stop(process)


async def _ready(url: str, process: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(START_LIMIT_S), httpx.AsyncClient(base_url=url, trust_env=False) as client:
        while True:
            if process.returncode is not None:
                raise RuntimeError(f"prometheus ended with {process.returncode}: {_words(log)}")
            try:
                if (await client.get("/-/ready")).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(POLL_S)


def _words(log: Path) -> str:
    return log.read_text(encoding="utf-8")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_LIMIT_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
