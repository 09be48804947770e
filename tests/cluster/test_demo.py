"""`autoscaler demo --cluster`, as a person runs it, shortened. It starts a control plane of its own."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from autoscaler.cli.main import run

ENTRY = (sys.executable, "-c", "from autoscaler.cli import main; main()", "demo", "--cluster")
LIMIT_S = 150.0

pytestmark = pytest.mark.cluster


@asynccontextmanager
async def running_demo(folder: Path, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run it while the block runs, with its temporary files and its report in the folder."""
    files = ("--report", str(folder / "report.html"), "--record", str(folder / "demo.trace.gz"))
    process = await asyncio.create_subprocess_exec(
        *ENTRY, *files, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=environ(folder)
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def environ(folder: Path) -> dict[str, str]:
    """Return the environment of a user who has set what would make a daemon do otherwise."""
    return {**os.environ, "TMPDIR": str(folder), "DRY_RUN": "true", "KUBECONFIG": "/nowhere", "COLUMNS": "200"}


def children(pid: int) -> set[int]:
    """Return the processes that a process has started."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return set(map(int, text.split()))


def names_in(folder: Path) -> set[str]:
    """Return the names of a folder's entries."""
    return {path.name for path in folder.iterdir()}


async def test_the_demo_scales_within_bounds_and_its_recording_verifies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_demo(tmp_path, "--minutes", "0.2") as demo:
        out, _ = await demo.communicate()
    said = out.decode()
    assert demo.returncode == 0, said
    found = re.search(r"(\d+) changes? of replicas, all within 1 to 8: (\S+)", said)
    assert found is not None, said
    assert int(found[1]) >= 1
    assert int(found[2]) >= 2
    assert "0 refused; others who moved the replicas: nobody" in said
    assert "recorded decisions come out bit-equal" in said
    assert "all within 1 to 8" in (tmp_path / "report.html").read_text()
    assert names_in(tmp_path) == {"report.html", "demo.trace.gz"}
    assert run(["replay", str(tmp_path / "demo.trace.gz"), "--verify"]) == 0
    assert "verified" in capsys.readouterr().out


async def test_an_interrupt_ends_all_of_it(tmp_path: Path) -> None:
    async with running_demo(tmp_path) as demo:
        assert demo.stdout is not None
        async for line in demo.stdout:
            if b"kube-controller-manager, kube-scheduler" in line:
                break
        started = children(demo.pid)
        assert len(started) >= 4
        demo.send_signal(signal.SIGINT)
        rest = (await demo.stdout.read()).decode()
        assert await demo.wait() == 1
    assert "stopped before its traffic began" in rest
    assert not {str(pid) for pid in started} & names_in(Path("/proc"))
    assert names_in(tmp_path) == set()
