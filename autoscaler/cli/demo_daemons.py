"""The daemons of the demo on a control plane: processes whose recordings are followed."""

import base64
import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from autoscaler.cli.demo_place import ACCOUNT, LEASE, Place
from autoscaler.core.memory import Memory
from autoscaler.core.types import Decision, Outcome, Snapshot
from autoscaler.policy_file import policy_from_plain
from autoscaler.replay import Replayer
from autoscaler.testbed.plane import Process
from autoscaler.trace import MemoryLine, PolicyLine, read_trace

ENTRY = (sys.executable, "-P", "-c", "from autoscaler.cli import main; main()", "run")
LEFT_OUT = frozenset({"KUBECONFIG", "KUBERNETES_SERVICE_HOST", "DRY_RUN", "LOG_LEVEL"})

Tick = tuple[Snapshot, Decision, Outcome]


class Follower:
    """What a daemon has recorded, decided anew tick by tick: that is its own decision, to the bit.

    Attributes:
        memory: what the daemon took over from the Lease, once it has.
    """

    def __init__(self, path: Path) -> None:
        self.memory: Memory | None = None
        self._path = path
        self._size = self._seen = 0
        self._replayer: Replayer | None = None

    def new(self) -> list[Tick]:
        """Return the ticks since the last look.

        The file is read from its start each time it has grown: a demo's takes some milliseconds.
        """
        size = self._path.stat().st_size if self._path.exists() else 0
        if size == self._size:
            return []
        self._size = size
        ticks: list[Tick] = []
        with read_trace(self._path, decisions=False) as reader:
            lines = list(reader)
        for line in lines[self._seen :]:
            if isinstance(line, PolicyLine):
                self._replayer = Replayer(policy_from_plain(line.plain))
            elif self._replayer is not None and isinstance(line, MemoryLine):
                self.memory = line.memory
                self._replayer.recall(line.memory, line.at)
            elif self._replayer is not None and not isinstance(line, MemoryLine):
                decision = self._replayer.tick(line.snapshot, line.outcome).decision
                ticks += [(line.snapshot, decision, line.outcome)] if decision is not None else []
        self._seen = len(lines)
        return ticks


@dataclass(frozen=True, slots=True)
class Daemon:
    """One `autoscaler run`, with the token that it writes by."""

    name: str
    process: Process
    recording: Path
    follower: Follower
    credential: str

    def has_said(self, event: str) -> bool:
        """Return whether its log has a line of that event."""
        lines = self.process.log.read_text().splitlines() if self.process.log.exists() else []
        return any(json.loads(line)["event"] == event for line in lines if line[:1] == "{" and line[-1:] == "}")


def token_id(token: str) -> str:
    """Return the id that a ServiceAccount's token says it has."""
    payload = token.split(".")[1]
    content = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    return str(content["jti"])


async def start_daemon(name: str, place: Place, policy: Path, record: Path) -> Daemon:
    """Start a daemon with a token of its own."""
    plane = place.plane
    token = await plane.token_for(place.namespace, ACCOUNT)
    recording = recording_of(record, name)
    recording.unlink(missing_ok=True)
    words = {
        "--kubeconfig": plane.kubeconfig_for(token, plane.folder / f"daemon-{name}.kubeconfig"),
        "--lease": f"{place.namespace}/{LEASE}",
        "--record": recording,
        "--listen": "127.0.0.1:0",
        "--log-format": "json",
        "--log-level": "info",
    }
    flat = [str(word) for pair in words.items() for word in pair]
    environ = {key: value for key, value in os.environ.items() if key not in LEFT_OUT}
    process = Process(f"daemon-{name}", (*ENTRY, str(policy), *flat), plane.folder, environ)
    process.start()
    return Daemon(name, process, recording, Follower(recording), f"JTI={token_id(token)}")


def recording_of(record: Path, name: str) -> Path:
    """Return the file that a daemon records into: the leader's is the one that was asked for."""
    if name == "a":
        return record
    stem, dot, suffix = record.name.partition(".")
    return record.with_name(f"{stem}-{name}{dot}{suffix}")


def leading(daemon: Daemon) -> Callable[[], Awaitable[bool]]:
    """Return what tells whether it leads, and raises EndedError when it has ended."""

    async def leads() -> bool:
        daemon.process.check()
        return daemon.has_said("leading")

    return leads


async def end(daemons: Iterable[Daemon]) -> None:
    """Ask them to end, and wait for it."""
    for daemon in daemons:
        await daemon.process.stop()
