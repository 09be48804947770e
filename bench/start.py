"""From starting the process to its first decision: `autoscaler run --once` against a fake API server and real pages.

As in the image, modules are compiled: an environment that forbids Python to keep what it compiled would be measured
instead of the program.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

from tests.cli.cluster import Cluster, cluster

_ROUNDS = 5
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
_COMMAND = (sys.executable, "-c", "from autoscaler.cli import main; main()")


def measure() -> list[tuple[str, str]]:
    """Return label and value of each figure: whole-process seconds, median of 5 after one that compiles."""
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder)) as one:
        policy = str(one.policy())
        for arguments in (["check", policy], _once(one, policy)):
            _seconds(arguments)
        first = median(_seconds(_once(one, policy)) for _ in range(_ROUNDS))
        checked = median(_seconds(["check", policy]) for _ in range(_ROUNDS))
    return [
        ("start of `run --once` to its first decision (at most 1 s)", f"{first:.2f} s"),
        ("`check` of one policy", f"{checked:.2f} s"),
    ]


def _once(one: Cluster, policy: str) -> list[str]:
    return ["run", policy, "--once", "--dry-run", "--kubeconfig", one.kubeconfig]


def _seconds(arguments: list[str]) -> float:
    """Return how long it took to the first decision, or to the end of a command that decides nothing."""
    started = perf_counter()

    process = subprocess.Popen(
        [*_COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_ENVIRONMENT
    )
    assert process.stdout is not None
    with process.stdout:
        line = next((line for line in process.stdout if b'"decision"' in line), b"")
        seconds = perf_counter() - started
        process.stdout.read()
    if process.wait() != 0 or (arguments[0] == "run" and not line):
        raise RuntimeError(f"autoscaler {' '.join(arguments)} ended with {process.returncode}")
    return seconds


if __name__ == "__main__":
    for label, value in measure():
        print(f"{label:60} {value}")
