"""Policies in closed loop on workloads to tune by: other days than those that results are reported on.

    python -m bench tuning FOLDER [--only NAME ...] [--policy NAME|FILE ...] [--seed N]

FOLDER holds the request files and, under `rates`, the rate curves. Each workload keeps the lengths of its requests and
the shape of its day, but is another day of the curve, or its only day with the windows in reverse order.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time

import numpy as np
from rich.console import Console
from rich.table import Table

from autoscaler.sim.traffic import Sample, Workload, load_workload
from autoscaler.sim.workload import HOUR, Surge
from bench.contest.days import CHAT, another_day
from bench.contest.play import OURS, POLICIES, Task, answer
from bench.contest.traces import Ground, Trace
from bench.rivals.base import Bounds

WINDOW_S = 600.0
BOUNDS = Bounds(max=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """A workload to tune by.

    Args:
        make: from the folder of traces to the workload of a whole day.
        hours: first and last hour of the day that are run.
        profile: of every replica. ttft_s, tpot_s: objectives.
        scored: whether a search is to meet it; not where standing overcapacity alone would.
    """

    make: Callable[[Path], Workload]
    hours: tuple[float, float]
    profile: str
    ttft_s: float
    tpot_s: float
    scale: float = 1.0
    scored: bool = True

    def ground(self, name: str, folder: Path, seed: int) -> Ground:
        """Return what every policy meets: these hours of the day that the seed draws."""
        first_s, last_s = self.hours[0] * HOUR, self.hours[1] * HOUR
        workload = self.make(folder)
        trace = Trace(
            name=name,
            text=workload.text,
            file=workload.name,
            profile=self.profile,
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s,
            bounds=BOUNDS,
        )
        sample = part(workload.draw(seed, self.scale), first_s, last_s)
        return Ground.made(trace, sample, last_s - first_s, seed=seed, scale=self.scale)


def part(sample: Sample, first_s: float, last_s: float) -> Sample:
    """Return the requests between two times, counted from the first."""
    first, last = np.searchsorted(sample.arrival, (first_s, last_s)).tolist()
    return Sample(
        arrival=sample.arrival[first:last] - first_s, prompt=sample.prompt[first:last], output=sample.output[first:last]
    )


# -- the workloads ---------------------------------------------------------------------------------------------------


def backwards(requests: Path, seed: int = 1) -> Workload:
    """Return a day with its ten-minute windows in reverse order; within each, lengths go to other requests."""
    forwards = load_workload(str(requests))
    if forwards.recorded is None:
        raise ValueError(f"{requests} is no file of requests")
    rng, sample = np.random.default_rng(seed), forwards.recorded
    windows = math.ceil(forwards.duration_s / WINDOW_S)
    edges = np.searchsorted(sample.arrival, np.arange(windows + 1) * WINDOW_S)
    arrivals, order = [], []
    for place, window in enumerate(reversed(range(windows))):
        rows = np.arange(edges[window], edges[window + 1])
        arrivals.append(sample.arrival[rows] + (place - window) * WINDOW_S)
        order.append(rng.permutation(rows))
    picked = np.concatenate(order)
    turned = Sample(arrival=np.concatenate(arrivals), prompt=sample.prompt[picked], output=sample.output[picked])
    return replace(forwards, name=f"{forwards.name}-backwards", duration_s=windows * WINDOW_S, recorded=turned)


def _code(folder: Path) -> Workload:
    return another_day(
        folder / "rates" / "azure2024_code_week.csv.gz", 3, 1 / 4, folder / "azure2024_code_24h_q4.csv.gz"
    )


def _conv(folder: Path) -> Workload:
    return another_day(
        folder / "rates" / "azure2024_conv_week.csv.gz", 2, 1 / 8, folder / "azure2024_conv_24h_q8.csv.gz"
    )


def _reasoning(folder: Path) -> Workload:
    return backwards(folder / "servegen_r1_24h.csv.gz")


def _large(folder: Path) -> Workload:
    surge = Surge(at=13.5 * HOUR, duration_s=WINDOW_S, factor=8.0, ramp_s=60.0)
    return another_day(folder / "rates" / "servegen_mlarge_10min.csv.gz", 2, 1 / 34, CHAT, surge)


LARGE, MIDDLE, SMALL = "llama-3.1-70b-h100x4", "qwen3-32b-h100x2", "llama-3.1-8b-h100x1"
TUNINGS = {
    "code": Tuning(make=_code, hours=(5.0, 17.0), profile=LARGE, ttft_s=2.0, tpot_s=0.2),
    "code-day": Tuning(make=_code, hours=(0.0, 24.0), profile=LARGE, ttft_s=2.0, tpot_s=0.2),
    "code-x3": Tuning(make=_code, hours=(8.0, 16.0), profile=LARGE, ttft_s=2.0, tpot_s=0.2, scale=3.0),
    "conv": Tuning(make=_conv, hours=(8.0, 20.0), profile=LARGE, ttft_s=2.0, tpot_s=0.1),
    "conv-x4": Tuning(make=_conv, hours=(10.0, 16.0), profile=LARGE, ttft_s=2.0, tpot_s=0.1, scale=4.0),
    "r1": Tuning(make=_reasoning, hours=(12.0, 20.0), profile=MIDDLE, ttft_s=3.0, tpot_s=0.1),
    "mlarge-x4": Tuning(
        make=_large, hours=(6.0, 16.0), profile=SMALL, ttft_s=0.5, tpot_s=0.05, scale=4.0, scored=False
    ),
}


# -- the runs --------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Run the policies and print a row for each run."""
    parser = argparse.ArgumentParser(prog="python -m bench tuning")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=TUNINGS, default=list(TUNINGS))
    parser.add_argument(
        "--policy", nargs="+", default=[OURS], help=f"Files of this product's policies, or: {', '.join(POLICIES)}"
    )
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    columns = ("workload", "policy", "attained %", "GPU-h", "x fluid", "worst 10 min %", "reversals/h", "CPU s")
    table = Table(*columns, box=None, pad_edge=False)
    for name in chosen.only:
        ground = TUNINGS[name].ground(name, chosen.folder, chosen.seed)
        for policy in chosen.policy:
            table.add_row(name, Path(policy).stem, *row(ground, policy))
    Console(width=120).print(table)
    return 0


def row(ground: Ground, policy: str) -> list[str]:
    """Return what a policy comes to: the cells of the table."""
    started = process_time()
    file = None if policy in POLICIES else Path(policy)
    name = policy if file is None else file.stem
    task = Task(trace=ground.trace.name, policy=name, path=Path(), seed=ground.seed, file=file)
    came = answer(task, ground).came
    if came is None:
        return ["-"] * 6
    figures = came.figures
    share, worst = figures.attainment or 0.0, figures.worst_ten_minutes or 0.0
    times = figures.gpu_hours / ground.fluid_gpu_hours
    cells = (100 * share, figures.gpu_hours, times, 100 * worst, figures.reversals_per_hour)
    return [*(f"{cell:.2f}" for cell in cells), f"{process_time() - started:.0f}"]
