"""The simulator's engine against the brute-force scheduler of its tests, over the same requests in the same run."""

import math
from collections.abc import Callable
from functools import partial
from time import process_time

import numpy as np

from autoscaler.sim.engine import Engine, Request
from autoscaler.sim.ledger import Ledger
from autoscaler.sim.profile import Profile
from autoscaler.sim.profiles import profile
from bench import MissedError
from tests.sim.reference import Reference

LEAST = 4.0
"""Times faster than brute force, at least."""
_ROUNDS = 3
LOADS = (
    ("chat, 70B on four H100", "llama-3.1-70b-h100x4", 3.0, 800, 150, 1500),
    ("reasoning, 32B on two H100", "qwen3-32b-h100x2", 0.6, 1269, 1529, 300),
    ("code, 70B on four H100", "llama-3.1-70b-h100x4", 3.0, 2000, 28, 1500),
)
"""What, profile, requests/s, median lengths of prompt and answer, requests."""


def measure() -> list[tuple[str, str]]:
    """Return label and value of each figure; both take turns, and each one's best of three counts."""
    rows = []
    for name, model, rate, prompt, output, count in LOADS:
        one, requests = profile(model), _requests(rate, prompt, output, count)
        iterations = _by_brute_force(one, requests)
        fast, slow = _best(
            partial(_simulate, one, requests),
            partial(_by_brute_force, one, requests),
        )
        rows.append(
            (f"{name}: {iterations / count:.0f} iterations a request", f"{1e6 * fast / count:.1f} us a request")
        )
        value = f"{iterations / fast:,.0f}/s, {iterations / slow:,.0f}/s by brute force: {slow / fast:.0f}x"
        rows.append((f"{name}: iterations", value))
        if slow / fast < LEAST:
            raise MissedError(f"{name}: only {slow / fast:.1f} times faster than brute force, not {LEAST:.0f}")
    return rows


def _requests(rate: float, prompt: int, output: int, count: int) -> list[Request]:
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(1.0 / rate, count))
    prompts = np.maximum(1, rng.lognormal(math.log(prompt), 0.7, count)).astype(int)
    outputs = np.maximum(1, rng.lognormal(math.log(output), 0.7, count)).astype(int)
    return list(map(Request, arrivals.tolist(), prompts.tolist(), outputs.tolist()))


def _simulate(one: Profile, requests: list[Request]) -> None:
    engine = Engine(one, Ledger())
    for request in requests:
        engine.submit(request)
    engine.run(1e9)


def _by_brute_force(one: Profile, requests: list[Request]) -> int:
    reference = Reference(one, math.inf)
    reference.run(requests)
    return len(reference.iterations)


def _best(*jobs: Callable[[], object]) -> list[float]:
    """Return each job's shortest CPU time [s]; the jobs take turns, so that a busy machine slows them alike."""
    times: list[list[float]] = [[] for _ in jobs]
    for _ in range(_ROUNDS):
        for job, spent in zip(jobs, times, strict=True):
            start = process_time()
            job()
            spent.append(process_time() - start)
    return [min(spent) for spent in times]
