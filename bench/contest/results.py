"""The results file: one JSON document a line, one line a run, written as each run ends, so that a run can go on."""

import json
import math
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

Key = tuple[str, str, int, float, float | None]
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t, two-sided 95 %, from one degree of freedom on."""
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One run, as it stands in the file.

    Args:
        hours: only its beginning; None for all of it.
        settings: the values that the policy went by. ground: what it met.
        figures: None where there is no plan that attains.
        seconds: of one core. commit: of this project.
    """

    trace: str
    policy: str
    seed: int
    scale: float
    hours: float | None
    settings: Mapping[str, Any]
    ground: Mapping[str, Any]
    figures: Mapping[str, Any] | None
    seconds: float
    commit: str

    @property
    def key(self) -> Key:
        """What makes a run: with the same key it is the same one again."""
        return self.trace, self.policy, self.seed, self.scale, self.hours


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A figure over the seeds: its mean, and half the width of its 95 % interval; None with one seed."""

    mean: float
    half: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Return it for the values that are known, those that are not NaN; NaN without any."""
        known = [value for value in values if not math.isnan(value)]
        if len(known) < 2:
            return cls(mean=known[0] if known else math.nan, half=None)
        degrees = len(known) - 1
        t = T_95[degrees - 1] if degrees <= len(T_95) else 1.96
        return cls(mean=fmean(known), half=t * stdev(known) / math.sqrt(len(known)))


def read(path: Path) -> list[Entry]:
    """Return the runs of a file, the last of each key; none of a file that is not there.

    A last line that was cut off by an interruption is not a run.
    Raises: ValueError, for any other line that is none.
    """
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    whole, rest = lines[:-1], lines[-1]
    if rest:  # nothing ended it
        path.write_text("".join(f"{line}\n" for line in whole))
    found: dict[Key, Entry] = {}
    for number, line in enumerate(whole, start=1):
        try:
            entry = Entry(**json.loads(line))
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(f"{path}: line {number} is no result: {error}") from error
        found.pop(entry.key, None)
        found[entry.key] = entry
    return list(found.values())


def append(path: Path, document: Mapping[str, object]) -> Entry:
    """Write one run at the end of the file, and return it."""
    with path.open("a") as file:
        file.write(json.dumps(document, allow_nan=False) + "\n")
    return Entry(**dict(document))  # type: ignore[arg-type]


def commit() -> str:
    """Return the commit that runs, with a plus where files differ from it; `unknown` outside a repository."""
    try:
        head = _git("rev-parse", "--short=10", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()
