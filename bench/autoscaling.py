"""The benchmark of autoscalers: policies x traces x seeds x fleet sizes, one results file, one page.

    python -m bench autoscaling --traces DIR [--only code,conv/ours,oracle] [--resume results.jsonl] [--page PAGE.md]

Each run is written as it ends; runs that the results file has already are not repeated, so an interrupted benchmark
goes on when it is called again. Without --traces only the page is made. --traces takes what is in the folder.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import product
from pathlib import Path

import joblib
from rich.console import Console

from autoscaler.errors import AutoscalerError
from bench.contest.page import write
from bench.contest.play import BY_VENDOR, OURS, POLICIES, TUNED, WARM, Task, play
from bench.contest.results import Entry, append, commit, read
from bench.contest.traces import TRACES
from bench.contest.variants import ABLATIONS, SWEEP

RESULTS = Path("bench/results/autoscaling.jsonl")
Tuned = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Only:
    """What is asked for: patterns of trace names, and of policy names."""

    traces: Sequence[str]
    policies: Sequence[str]

    @classmethod
    def of(cls, text: str) -> "Only":
        """Return what `TRACES/POLICIES` asks for, each a list of names or patterns; without a slash, of policies."""
        traces, slash, policies = text.rpartition("/")
        return cls((traces if slash else "*").split(","), policies.split(","))

    def has(self, trace: str, policy: str) -> bool:
        """Tell whether it asks for this one."""
        return any(fnmatch(trace, one) for one in self.traces) and any(fnmatch(policy, one) for one in self.policies)


def main(arguments: Sequence[str]) -> int:
    """Run what is not there yet, make the page, and return the exit code."""
    chosen = _parser().parse_args(arguments)
    try:
        return _run(chosen)
    except (AutoscalerError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench autoscaling")
    parser.add_argument("--traces", type=Path, help="Folder with the files of requests.")
    parser.add_argument("--only", type=Only.of, action="append", metavar="TRACES/POLICIES", help="May be repeated.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--scales", type=lambda text: [float(one) for one in text.split(",")], default=[1.0, 4.0])
    parser.add_argument("--hours", type=float, help="Only the beginning of each trace.")
    parser.add_argument("--jobs", type=int, default=1, help="Processes.")
    parser.add_argument("--policy", type=Path, action="append", default=[], help="Another policy file to run as well.")
    parser.add_argument("--tuned", type=Path, help="JSON of values, of rivals or ours, by name: these run as well.")
    parser.add_argument("--sweep", action="store_true", help="The default policy with other margins as well.")
    parser.add_argument("--ablations", action="store_true", help="And without each of its elements.")
    parser.add_argument("--resume", type=Path, default=RESULTS, metavar="FILE", help="The results.")
    parser.add_argument("--again", type=Only.of, action="append", metavar="TRACES/POLICIES", help="Repeat these.")
    parser.add_argument("--page", type=Path, help="Write the page of all results here, pictures beside it.")
    parser.add_argument("--law-final", action="store_true", help="The default policy is final: the page says so.")
    return parser


def _run(chosen: argparse.Namespace) -> int:
    entries = read(chosen.resume)
    if chosen.traces is not None:
        done = {entry.key for entry in entries if not _asked(chosen.again or (), entry.trace, entry.policy)}
        todo = [task for task in tasks(chosen) if _key(task) not in done]
        play_all(todo, chosen.resume, jobs=chosen.jobs)
        entries = read(chosen.resume)
    if chosen.page is not None:
        if not any(entry.figures for entry in entries):
            raise ValueError(f"{chosen.resume}: no results to make a page of")
        write(chosen.page, entries, law_final=chosen.law_final)
    return 0


def tasks(chosen: argparse.Namespace) -> list[Task]:
    """Return what is asked for, the runs on the same file together. Raises ValueError when that is nothing."""
    only = chosen.only or [Only.of("*")]
    tuned = _tuned(chosen.tuned)
    variants = [*(SWEEP if chosen.sweep else ()), *(ABLATIONS if chosen.ablations else ())]
    files = {path.stem: path.resolve() for path in chosen.policy}
    found = [
        Task(
            trace=trace.name,
            policy=policy,
            path=path.resolve(),
            seed=seed,
            scale=scale,
            hours=chosen.hours,
            file=files.get(policy),
            tuned=tuned.get(policy),
        )
        for trace in TRACES
        if (path := trace.path(chosen.traces)) is not None
        for scale, seed in product(chosen.scales, range(chosen.seeds))
        for policy in (*POLICIES, *((WARM,) if trace.short else ()), *variants, *files, *tuned)
        if _asked(only, trace.name, policy)
    ]
    if not found:
        names = ", ".join(trace.file for trace in TRACES)
        raise ValueError(f"{chosen.traces}: nothing to run; files: {names}; policies: {', '.join(POLICIES)}")
    return found


def _tuned(path: Path | None) -> dict[str, dict[str, float]]:
    """Return the tuned policies by the names they go by. Raises ValueError for one that is not known."""
    if path is None:
        return {}
    values: Tuned = json.loads(path.read_text())
    unknown = sorted(set(values) - {OURS, *BY_VENDOR})
    if unknown:
        raise ValueError(f"{path}: no such rival: {', '.join(unknown)}")
    return {name + TUNED: dict(own) for name, own in values.items()}


def _asked(only: Sequence[Only], trace: str, policy: str) -> bool:
    return any(one.has(trace, policy) for one in only)


def _key(task: Task) -> tuple[str, str, int, float, float | None]:
    return task.trace, task.policy, task.seed, task.scale, task.hours


def play_all(todo: Sequence[Task], results: Path, *, jobs: int) -> None:
    """Run the tasks, and write each one's entry as it ends."""
    console, version = Console(stderr=True), commit()
    results.parent.mkdir(parents=True, exist_ok=True)
    for number, document in enumerate(_played(todo, jobs), start=1):
        entry = append(results, {**document, "commit": version})
        console.print(f"{number}/{len(todo)} {_line(entry)}", highlight=False, soft_wrap=True)


def _played(todo: Sequence[Task], jobs: int) -> Iterator[dict[str, object]]:
    if jobs == 1:
        yield from map(play, todo)
    else:
        yield from joblib.Parallel(n_jobs=jobs, return_as="generator_unordered")(
            joblib.delayed(play)(one) for one in todo
        )


def _line(entry: Entry) -> str:
    where = f"{entry.trace} x{entry.scale:g} seed {entry.seed}: {entry.policy}"
    if entry.figures is None:
        return f"{where}: no plan attains ({entry.seconds:.0f} s)"
    attained, used = entry.figures["attainment"], entry.figures["gpu_hours"]
    return f"{where}: {100.0 * attained:.2f} %, {used:.1f} GPU-hours ({entry.seconds:.0f} s)"
