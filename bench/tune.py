"""Random search for values, on other days than those that are reported: the same budget for each rival, and for ours.

    python -m bench tune RIVAL|ours... --budget 20 --traces DIR [--log tune.jsonl] [--output tuned.json]

The vendor's values, for ours the shipped ones, are the first candidate; each other one draws every value that may be
tuned. The score, lower is better, is the mean over the workloads of GPU-hours over the fluid bound, plus `SHORT` for
each share of attainment that is missing to the goal. A workload whose surge comes within a minute runs, and is not
scored: only standing overcapacity meets it, which every policy would be tuned to buy. Each candidate is logged as it
ends, and not run again when the log has it.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import joblib
import numpy as np

from autoscaler.errors import AutoscalerError
from autoscaler.sim.run import Figures
from bench.contest.play import BY_VENDOR, DEFAULT, GOAL, OURS, our_run, rival_run, settled, the_policy
from bench.contest.results import commit
from bench.contest.traces import Ground
from bench.contest.variants import drawn, overlaid
from bench.rivals import RIVALS
from bench.rivals.base import sample, spans
from bench.tuning import TUNINGS

SHORT = 100.0
"""A point below the goal on all workloads weighs as much as GPU-hours of the fluid bound once more."""
TUNABLE = (OURS, *BY_VENDOR)
LOG, TUNED = Path("bench/results/tune.jsonl"), Path("bench/results/tuned.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One set of values of a rival, or of our policy: number 0 is the vendor's, or the shipped one."""

    rival: str
    number: int
    seed: int

    def values(self) -> dict[str, float]:
        """Return its values; none where they are the vendor's."""
        if self.number == 0:
            return {}
        rng = np.random.default_rng([self.seed, self.number])
        if self.rival == OURS:
            return drawn(rng)
        settings = RIVALS[self.rival]
        changed = sample(settings, rng)
        return {name: float(getattr(changed, name)) for name in spans(settings)}

    def run(self, ground: Ground) -> Figures:
        """Return what it comes to."""
        if self.rival == OURS:
            return our_run(ground, overlaid(the_policy(DEFAULT), self.values())).figures
        return rival_run(ground, settled(RIVALS[self.rival], ground, self.values()).build()).figures


def score(attained: Sequence[float], over_fluid: Sequence[float]) -> float:
    """Return the score of a candidate from its attainment and cost on each workload; lower is better."""
    return fmean(over_fluid) + SHORT * fmean(max(0.0, GOAL - share) for share in attained)


def scored(entry: Mapping[str, Any]) -> float:
    """Return the score of a candidate that was logged, over its workloads that are scored."""
    rows = zip(entry["workloads"], entry["attained"], entry["over_fluid"], strict=True)
    names = _counted(entry["workloads"])
    counted = [row for row in rows if row[0] in names]
    return score([share for _, share, _ in counted], [over for _, _, over in counted])


def _counted(workloads: Sequence[str]) -> tuple[str, ...]:
    """Return those that are scored; all of them where none is."""
    found = tuple(name for name in workloads if name not in TUNINGS or TUNINGS[name].scored)
    return found or tuple(workloads)


def evaluate(candidate: Candidate, workloads: Sequence[str], folder: Path) -> dict[str, object]:
    """Return the log's entry of a candidate."""
    values, attained, over_fluid = candidate.values(), [], []
    for name in workloads:
        ground = _ground(name, folder, candidate.seed)
        figures = candidate.run(ground)
        attained.append(figures.attainment or 0.0)
        over_fluid.append(figures.gpu_hours / ground.fluid_gpu_hours)
    return {
        "rival": candidate.rival,
        "number": candidate.number,
        "seed": candidate.seed,
        "values": values,
        "workloads": list(workloads),
        "attained": attained,
        "over_fluid": over_fluid,
    }


@lru_cache(maxsize=len(TUNINGS))
def _ground(name: str, folder: Path, seed: int) -> Ground:
    return TUNINGS[name].ground(name, folder, seed)


def main(arguments: Sequence[str]) -> int:
    """Search, write the best values of each rival, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench tune")
    parser.add_argument("rivals", nargs="+", choices=TUNABLE, metavar="RIVAL")
    parser.add_argument("--budget", type=int, default=20, help="Candidates of each, the vendor's values among them.")
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=TUNINGS, default=list(TUNINGS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--output", type=Path, default=TUNED)
    chosen = parser.parse_args(arguments)
    try:
        _search(chosen)
    except (AutoscalerError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _search(chosen: argparse.Namespace) -> None:
    done = {_key(entry): entry for entry in _logged(chosen.log)}
    every = [
        Candidate(rival=rival, number=number, seed=chosen.seed)
        for rival in chosen.rivals
        for number in range(chosen.budget if rival == OURS or spans(RIVALS[rival]) else 1)
    ]
    workloads, folder, version = tuple(chosen.only), chosen.traces.resolve(), commit()
    counted = _counted(workloads)
    todo = [one for one in every if (one.rival, one.number, one.seed, counted) not in done]
    chosen.log.parent.mkdir(parents=True, exist_ok=True)
    for entry in _evaluated(todo, workloads, folder, chosen.jobs):
        with chosen.log.open("a") as file:
            file.write(json.dumps({**entry, "commit": version}) + "\n")
        done[_key(entry)] = entry
        print(f"{entry['rival']} {entry['number']}: {scored(entry):.3f} {_words(entry['values'])}", flush=True)
    best = {
        rival: min((done[one.rival, one.number, one.seed, counted] for one in every if one.rival == rival), key=scored)
        for rival in chosen.rivals
    }
    known = json.loads(chosen.output.read_text()) if chosen.output.exists() else {}
    found = {**known, **{rival: entry["values"] for rival, entry in best.items()}}
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    chosen.output.write_text(json.dumps(found, indent=2) + "\n")


def _evaluated(
    todo: Sequence[Candidate], workloads: Sequence[str], folder: Path, jobs: int
) -> Iterator[dict[str, Any]]:
    if jobs == 1:
        yield from (evaluate(one, workloads, folder) for one in todo)
    else:
        parallel = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered")
        yield from parallel(joblib.delayed(evaluate)(one, workloads, folder) for one in todo)


def _logged(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of the log; a last line that was cut off is taken away."""
    if not path.exists():
        return
    whole, rest = path.read_text().rpartition("\n")[::2]
    if rest:
        path.write_text(f"{whole}\n" if whole else "")
    for line in whole.splitlines():
        yield json.loads(line)


def _key(entry: Mapping[str, Any]) -> tuple[str, int, int, tuple[str, ...]]:
    return entry["rival"], entry["number"], entry["seed"], _counted(entry["workloads"])


def _words(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items()) or "the vendor's values"
