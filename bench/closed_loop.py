"""A day of 1.38 million requests in closed loop: seconds, requests a second, peak memory.

    python -m bench closed_loop [TRACE] [--hours 24] [--policy FILE] [--profile NAME] [--profiler]

Without a trace, which is a workload as `autoscaler simulate` takes it, the requests are made: 16 a second on average in
the shape of a day, prompts of 1269 and answers of 1529 tokens on average.
"""

import argparse
import cProfile
import pstats
import resource
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import process_time

import numpy as np

from autoscaler.policy_file import load_policies, shipped_policies
from autoscaler.sim.engine import Request
from autoscaler.sim.profiles import profile, profile_names
from autoscaler.sim.run import Run, Setting, run
from autoscaler.sim.traffic import load_workload
from autoscaler.sim.workload import HOUR, Lengths, chat_day, requests

MEAN_RATE = 16.0
LENGTHS = Lengths(prompt=1269.0, output=1529.0, prompt_sigma=1.2, output_sigma=0.9, longest_output=8_000)


def made(duration_s: float, seed: int = 1) -> Iterator[Request]:
    """Yield the requests of such a day, or of its first part."""
    shape = chat_day(1.0)
    mean = float(np.mean([shape(minute * 60.0) for minute in range(1440)]))
    return requests(np.random.default_rng(seed), chat_day(MEAN_RATE / mean), LENGTHS, duration_s)


def main(arguments: Sequence[str]) -> int:
    """Run it and print what it took, and what came of it."""
    parser = argparse.ArgumentParser(prog="python -m bench closed_loop")
    parser.add_argument("trace", nargs="?")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--policy", type=Path, default=shipped_policies() / "default.yaml")
    parser.add_argument("--profile", choices=profile_names(), default="qwen3-32b-h100x2")
    parser.add_argument("--profiler", action="store_true", help="Also print the functions that took longest.")
    chosen = parser.parse_args(arguments)
    policy = next(iter(load_policies([chosen.policy]).policies.values()))
    policy = replace(policy, replicas=replace(policy.replicas, max=60))
    duration_s = chosen.hours * HOUR
    traffic = load_workload(chosen.trace).first(duration_s).draw(0).requests() if chosen.trace else made(duration_s)
    setting = Setting(profile=profile(chosen.profile), replicas=4, duration_s=duration_s)
    profiler = cProfile.Profile()
    if chosen.profiler:
        profiler.enable()
    started = process_time()
    result = run(policy, traffic, setting)
    seconds = process_time() - started
    profiler.disable()
    _show(result, seconds)
    if chosen.profiler:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
    return 0


def _show(result: Run, seconds: float) -> None:
    figures = result.figures
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0
    print(f"{figures.requests:,} requests, {len(result.rows):,} ticks: {seconds:.1f} s of one core")
    print(f"{figures.requests / seconds:,.0f} requests/s, peak memory {peak_mb:.0f} MB")
    print(figures)
