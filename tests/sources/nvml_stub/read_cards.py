"""Read the stub through nvidia-ml-py and the NVML source, in a process of its own.

Arguments: the stub's path, the folder that stands in for /proc. Standard input: JSON scenarios, each a list of texts
for the stub's file, one a tick. Standard output: for each scenario and tick the reading's devices and gaps.
"""

import asyncio
import ctypes
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autoscaler.core.policy import NvmlSignals
from autoscaler.core.types import Pod, TargetStatus
from autoscaler.sources.nvml import NvmlSource

PODS = tuple(Pod(name=f"chat-{digit}", uid=f"{digit * 8}-0000-4000-8000-000000000000") for digit in "ab")
TARGET = TargetStatus(namespace="serving", name="chat", current_replicas=2, pods=PODS)


class StubClock:
    """A fake clock: each look is 5 s after the last; it cannot sleep."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        self.at += 5.0
        return self.at

    async def sleep_until(self, at: float) -> None:
        raise NotImplementedError


def drive_stub(text: str) -> None:
    Path(os.environ["NVML_STUB"]).write_text(text)


async def read_scenario(texts: list[str], proc: Path) -> list[dict[str, Any]]:
    source = NvmlSource(NvmlSignals(timeout_s=30.0), StubClock(), cgroup_root=proc)
    ticks = []
    for text in texts:
        drive_stub(text)
        reading = await source.read(TARGET, 0.0)
        gaps = [[gap.signal, gap.reason, gap.pod, gap.detail] for gap in reading.gaps]
        ticks.append({"gpus": [asdict(gpu) for gpu in reading.gpus], "gaps": gaps})
    await source.close()
    return ticks


def main() -> None:
    # glibc then finds the stub by its soname when nvidia-ml-py asks for libnvidia-ml.so.1.
    ctypes.CDLL(sys.argv[1])
    scenarios = json.load(sys.stdin)
    read = {name: asyncio.run(read_scenario(texts, Path(sys.argv[2]))) for name, texts in scenarios.items()}
    json.dump(read, sys.stdout)


if __name__ == "__main__":
    main()
