"""The plan of faults: what each fault, and all together, costs the default policy beside the same run without.

    python -m bench faults [--traces DIR] [--only code,conv] [--seeds 1] [--jobs 1] [--json docs/benchmark/faults.json]

Without a folder of traces a day of made chat runs. Exits with 1 when a run loses more than a point of attainment, when
replicas shrink while pages are missing, or when fewer than 99.95 % of the requests are answered. Shrinks while pages
stand still are counted, and not forbidden: a page that stood still while nothing ran looks idle.

All runs, those without faults too, have two replicas at least: where there is only one, its crash is an outage of a
whole start, whoever scales.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import joblib
from rich.console import Console
from rich.table import Table

from autoscaler.cli.study import PRESETS, peak_s
from autoscaler.core.types import Decision, Outcome, ScaleReplicas, Snapshot
from autoscaler.errors import AutoscalerError
from autoscaler.sim.faults import Faults
from autoscaler.sim.run import run
from autoscaler.sim.traffic import load_workload
from bench.contest.play import DEFAULT, fleet_setting, our_policy, the_policy
from bench.contest.results import commit
from bench.contest.traces import BY_NAME, Ground, Trace
from bench.rivals.base import Bounds

POINTS_LOST, ANSWERED = 1.0, 0.9995
"""The most of attainment that a run may lose, in percentage points, and the least share of answered requests."""
NONE, STILL = "none", "frozen"
"""The runs without faults, and those whose pages are there and do not move."""
LEAST = 2
"""Replicas of all runs."""
HOURS: Mapping[str, float | None] = {"code": None, "conv": None, "r1": 8.0}
"""The traces, and how much of each: None for all of it."""
MADE = Trace(
    name="made",
    text="a day of made chat, prompts of 1,000 tokens, answers of 250",
    file="diurnal:rps=20",
    profile="llama-3.1-8b-l40sx1",
    ttft_s=2.0,
    tpot_s=0.1,
)
"""What runs without a folder of traces; its file is a workload as `autoscaler simulate` takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run: all that another process needs to know. Without a path the trace is the made one.

    Args:
        fault: name of a preset of `autoscaler simulate --faults`.
        hours: only the beginning of the trace; None for all of it.
        least: replicas.
    """

    trace: str
    fault: str
    seed: int
    path: Path | None = None
    hours: float | None = None
    least: int = LEAST
    policy: Path = DEFAULT

    def ground(self) -> Ground:
        """Return what is asked of the fleet, and how small it may be."""
        if self.path is None:
            return self.bounded(made_ground(MADE, seed=self.seed, hours=self.hours))
        return self.bounded(Ground.of(BY_NAME[self.trace], self.path, seed=self.seed, hours=self.hours))

    def bounded(self, ground: Ground) -> Ground:
        """Return a ground with as many replicas as are asked for, at least."""
        bounds = Bounds(min=max(self.least, ground.bounds.min), max=max(self.least, ground.bounds.max))
        return replace(ground, bounds=bounds, replicas=bounds.clip(ground.replicas))


@dataclass(frozen=True, slots=True, kw_only=True)
class Suffered:
    """What came of a run.

    Args:
        hours: simulated. least: replicas. peak_s: when an outage of the pages begins.
        attainment: share of the requests within both objectives. answered: share with a whole answer.
        blind: the ticks in an outage of the pages.
        shrunk: those of them at which fewer replicas were ordered [s from the start].
        failed_writes, restarts: how often a fault struck.
    """

    trace: str
    fault: str
    seed: int
    hours: float
    least: int
    peak_s: float
    requests: int
    attainment: float
    answered: float
    gpu_hours: float
    shrunk: tuple[float, ...]
    blind: int
    failed_writes: int
    restarts: int


class Witness:
    """`ports.Report` that sees what the faults do, and what is decided meanwhile."""

    def __init__(self, faults: Faults, epoch: float) -> None:
        self.shrunk: list[float] = []
        self.blind = self.failed_writes = 0
        self._outages = [(epoch + one.start_s, epoch + one.start_s + one.duration_s) for one in faults.blackouts]
        self._epoch = epoch
        self._restarts: dict[str, int] = {}

    @property
    def restarts(self) -> int:
        """How often containers started anew."""
        return sum(self._restarts.values())

    def tick(self, policy: str, snapshot: Snapshot, decision: Decision, outcome: Outcome, duration_s: float) -> None:
        """See one tick."""
        action = decision.action
        self.failed_writes += outcome is Outcome.FAILED
        self._restarts.update((pod.uid, pod.restarts) for pod in snapshot.target.pods)
        if any(start <= snapshot.at < end for start, end in self._outages):
            self.blind += 1
            if isinstance(action, ScaleReplicas) and action.to < action.seen:
                self.shrunk.append(round(snapshot.at - self._epoch, 3))


def made_ground(trace: Trace, *, seed: int, hours: float | None = None) -> Ground:
    """Return a seed of a trace whose file is a workload that is made."""
    workload = load_workload(trace.file, cold_start_s=trace.hardware().cold_start_s)
    if hours is not None:
        workload = workload.first(hours * 3600.0)
    return Ground.made(trace, workload.draw(seed), workload.duration_s, seed=seed)


def suffer(job: Job) -> Suffered:
    """Run a job in this process."""
    ground = job.ground()
    peak = peak_s(ground.sample, ground.duration_s)
    return suffered(job, ground, PRESETS[job.fault](peak), peak)


def suffered(job: Job, ground: Ground, faults: Faults, peak: float) -> Suffered:
    """Return what these faults do to the policy of a job on a ground."""
    setting = replace(fleet_setting(ground, ground.replicas), faults=faults)
    witness = Witness(faults, setting.epoch)
    policy = our_policy(ground, the_policy(job.policy))
    figures = run(policy, ground.sample.requests(), setting, reports=(witness,)).figures
    return Suffered(
        trace=job.trace,
        fault=job.fault,
        seed=job.seed,
        hours=ground.duration_s / 3600.0,
        least=ground.bounds.min,
        peak_s=peak,
        requests=figures.requests,
        attainment=1.0 if figures.attainment is None else figures.attainment,
        answered=1.0 - figures.failed / max(1, figures.requests),
        gpu_hours=figures.gpu_hours,
        shrunk=tuple(witness.shrunk),
        blind=witness.blind,
        failed_writes=witness.failed_writes,
        restarts=witness.restarts,
    )


# -- the verdict -----------------------------------------------------------------------------------------------------


def points_lost(one: Suffered, sound: Suffered) -> float:
    """Return the percentage points of attainment that a run has less than the one without faults."""
    return 100.0 * (sound.attainment - one.attainment)


def _percent(share: float) -> str:
    return f"{100.0 * share:.3f} %"


def missed(runs: Sequence[Suffered]) -> list[str]:
    """Return what the runs miss of what is promised, a line each."""
    sound = {(one.trace, one.seed): one for one in runs if one.fault == NONE}
    found = []
    for one in runs:
        where = f"{one.trace}, seed {one.seed}, {one.fault}"
        lost = points_lost(one, sound[one.trace, one.seed])
        if lost > POINTS_LOST:
            found.append(f"{where}: attainment is {lost:.2f} points lower than without faults")
        if one.shrunk and one.fault != STILL:
            found.append(f"{where}: fewer replicas were ordered at {one.shrunk[0]:.0f} s, in an outage of the pages")
        if one.answered < ANSWERED:
            without = _percent(sound[one.trace, one.seed].answered)
            found.append(f"{where}: {_percent(one.answered)} of the requests were answered, without faults {without}")
    return found


COLUMNS = (
    "trace",
    "fault",
    "seed",
    "attainment %",
    "points lost",
    "answered %",
    "GPU-hours",
    "blind ticks",
    "shrinks then",
    "failed writes",
    "restarts",
)


def rows(runs: Sequence[Suffered]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of a table of the runs, below `COLUMNS`."""
    sound = {(one.trace, one.seed): one for one in runs if one.fault == NONE}
    for one in runs:
        lost = points_lost(one, sound[one.trace, one.seed])
        yield (
            one.trace,
            one.fault,
            str(one.seed),
            f"{100.0 * one.attainment:.2f}",
            "–" if one.fault == NONE else f"{lost:.2f}".replace("-", "−"),
            f"{100.0 * one.answered:.3f}",
            f"{one.gpu_hours:.1f}",
            str(one.blind or "–"),
            str(len(one.shrunk)) if one.blind else "–",
            str(one.failed_writes),
            str(one.restarts),
        )


def to_document(runs: Sequence[Suffered], version: str) -> dict[str, object]:
    """Return the runs as JSON has them."""
    promised = {"points_lost": POINTS_LOST, "shrunk": 0, "answered": ANSWERED}
    return {"commit": version, "promised": promised, "runs": [asdict(one) for one in runs]}


def from_document(document: Mapping[str, Any]) -> list[Suffered]:
    """Return the runs of a document."""
    return [Suffered(**{**one, "shrunk": tuple(one["shrunk"])}) for one in document["runs"]]


def markdown(document: Mapping[str, Any]) -> str:
    """Return a document's table for a page, and what is missed below it."""
    runs = from_document(document)
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows(runs)]
    if broken := missed(runs):
        lines += ["", "Missed:", "", *(f"* {line}." for line in broken)]
    return "\n".join(lines)


# -- the command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Run the plan, print its table, and return the exit code."""
    chosen = _parser().parse_args(arguments)
    try:
        jobs = planned(chosen)
        runs = list(_ran(jobs, chosen.jobs))
        if chosen.json is not None:
            chosen.json.write_text(json.dumps(to_document(runs, commit()), indent=1) + "\n")
    except (AutoscalerError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for row in rows(runs):
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    broken = missed(runs)
    print("\n".join(broken) or "every run keeps what is promised")
    return 1 if broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench faults")
    parser.add_argument("--traces", type=Path, help="Folder with the files of requests.")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(HOURS), help="Traces, by name.")
    parser.add_argument("--faults", type=_faults, default=list(PRESETS), help=f"Of {', '.join(PRESETS)}.")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--hours", type=float, help="Only the beginning of each trace.")
    parser.add_argument("--least", type=int, default=LEAST, help="Replicas at least.")
    parser.add_argument("--policy", type=Path, default=DEFAULT)
    parser.add_argument("--jobs", type=int, default=1, help="Processes.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write all figures here.")
    return parser


def _faults(text: str) -> list[str]:
    asked = text.split(",")
    unknown = sorted(set(asked) - set(PRESETS))
    if unknown:
        raise argparse.ArgumentTypeError(f"no such fault: {', '.join(unknown)}")
    return [NONE, *(name for name in asked if name != NONE)]


def planned(chosen: argparse.Namespace) -> list[Job]:
    """Return the runs that are asked for. Raises ValueError when the folder has none of the traces."""
    places: list[tuple[str, Path | None, float | None]] = [(MADE.name, None, chosen.hours)]
    if chosen.traces is not None:
        named = [(name, BY_NAME[name].path(chosen.traces)) for name in chosen.only if name in BY_NAME]
        places = [(name, path.resolve(), chosen.hours or HOURS.get(name)) for name, path in named if path is not None]
    if not places:
        raise ValueError(f"{chosen.traces}: none of {', '.join(chosen.only)} is there")
    return [
        Job(
            trace=name,
            fault=fault,
            seed=seed,
            path=path,
            hours=hours,
            least=chosen.least,
            policy=chosen.policy,
        )
        for name, path, hours in places
        for seed in range(chosen.seeds)
        for fault in chosen.faults
    ]


def _ran(jobs: Sequence[Job], processes: int) -> Iterator[Suffered]:
    """Yield what came of each job, in their order, and tell of each as it ends."""
    console = Console(stderr=True)
    if processes == 1:
        results = map(suffer, jobs)
    else:
        results = joblib.Parallel(n_jobs=processes, return_as="generator")(joblib.delayed(suffer)(one) for one in jobs)
    for number, one in enumerate(results, start=1):
        told = f"{100.0 * one.attainment:.2f} %, {100.0 * one.answered:.3f} % answered"
        console.print(f"{number}/{len(jobs)} {one.trace} seed {one.seed}, {one.fault}: {told}", highlight=False)
        yield one
