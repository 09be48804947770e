"""A published run on a cluster, repeated in the simulator with the published settings: the simulator's anchor.

    python -m bench anchor

Source: llm-d main of November 2026, guides/workload-autoscaling/slo-aware: Qwen3-32B on two H100, 4000 tokens in and
1000 out, a staircase of 2 to 10 requests a second, pods ready after 100 s, TTFT 3 s, TPOT 100 ms, 3 to 8 replicas. What
the guide does not say: starts vary as everywhere in the simulator, clients leave after 60 s without a first token.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from autoscaler.sim.engine import Request
from autoscaler.sim.fleet import Fleet
from autoscaler.sim.profiles import profile
from bench.rivals.base import Bounds, Settings
from bench.rivals.feed import Counted, drive
from bench.rivals.slo_aware import SloAwareSettings
from bench.rivals.static import StaticSettings

PROFILE = replace(profile("qwen3-32b-h100x2"), cold_start_s=100.0)
TTFT_S, TPOT_S = 3.0, 0.1
PROMPT, OUTPUT = 4000, 1000
BOUNDS = Bounds(min=3, max=8)
STAIRS = ((2.0, 330.0), (4.0, 360.0), (6.0, 360.0), (8.0, 360.0), (10.0, 360.0), (4.0, 360.0), (1.0, 300.0))
"""Requests per second, and for how long [s]."""
DURATION_S = sum(seconds for _, seconds in STAIRS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a run came to: the share of requests within both objectives, and the mean of the ready replicas."""

    attainment: float
    replicas: float


PUBLISHED_SLO_AWARE = Reading(attainment=0.958, replicas=5.93)
PUBLISHED_STATIC = Reading(attainment=1.0, replicas=8.0)
STATIC = StaticSettings(replicas=BOUNDS.max)
SLO_AWARE = SloAwareSettings(ttft_s=TTFT_S, tpot_s=TPOT_S, bounds=BOUNDS)
SEEDS = (1, 2)


def measure() -> Iterator[tuple[str, str]]:
    """Yield label and value of each figure, the published one beside it."""
    yield _row("static 8", run(STATIC, replicas=BOUNDS.max, seed=SEEDS[0]), PUBLISHED_STATIC)
    for seed in SEEDS:
        yield _row(f"SLO-aware, seed {seed}", run(SLO_AWARE, replicas=BOUNDS.min, seed=seed), PUBLISHED_SLO_AWARE)


def _row(name: str, found: Reading, published: Reading) -> tuple[str, str]:
    return (
        f"{name}: attained by how many replicas; published",
        f"{_told(found)}; {_told(published)}",
    )


def _told(one: Reading) -> str:
    return f"{100.0 * one.attainment:.1f} % by {one.replicas:.2f}"


def traffic() -> Iterator[Request]:
    """Yield the staircase, evenly spaced."""
    start = 0.0
    for rate, seconds in STAIRS:
        yield from (Request(start + index / rate, PROMPT, OUTPUT) for index in range(round(rate * seconds)))
        start += seconds


def run(settings: Settings, *, replicas: int, seed: int) -> Reading:
    """Return what a rival does on the staircase from so many replicas on; the seed draws the starts' durations."""
    counted = Counted(traffic())
    fleet = Fleet(PROFILE, counted, replicas=replicas, epoch=0.0, rng=np.random.default_rng(seed))
    asyncio.run(drive(fleet, settings.build(), counted, DURATION_S))
    attained = fleet.summary(ttft_s=TTFT_S, tpot_s=TPOT_S).attainment
    ready = [(sample.at, sample.ready) for sample in fleet.samples]
    seconds = sum((after[0] - before[0]) * before[1] for before, after in pairwise(ready))
    return Reading(attainment=attained or 0.0, replicas=seconds / DURATION_S)
