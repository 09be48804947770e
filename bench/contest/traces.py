"""What the policies are asked: requests of a file, a model on its GPUs, objectives, and bounds that hold for all."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from autoscaler.cli.study import START_LOAD, starting_replicas
from autoscaler.sim.profile import Profile
from autoscaler.sim.profiles import profile
from autoscaler.sim.traffic import Sample, Workload, load_workload
from bench.contest.days import CHAT, Day
from bench.oracle import fluid_gpu_hours
from bench.rivals import capacity
from bench.rivals.base import Bounds
from bench.work import busy_replicas

HOUR = 3600.0
ROOM = 3.0
"""The most replicas, over what the busiest ten minutes take at a load of 0.7: a law that runs away stops there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests and the service that answers them.

    Args:
        name, text: for people.
        file: its name in the folder, without `.csv` or `.csv.gz`.
        profile: name of the model and hardware.
        ttft_s, tpot_s: objectives.
        day: of the file, where that is a rate curve; None for a file of requests.
        bounds: replicas at scale 1; None for as many as `ROOM` gives.
        cold_start_s: where it is not the profile's.
        grid_s: the file's arrivals are rounded down to multiples of it: they are spread over it, once for all seeds.
        short: an hour or less, of which learning is a large part.
        kept_back: its file is kept for a last look; the benchmark is whole without it.
    """

    name: str
    text: str
    file: str
    profile: str
    ttft_s: float
    tpot_s: float
    day: Day | None = None
    bounds: Bounds | None = None
    cold_start_s: float | None = None
    grid_s: float = 0.0
    short: bool = False
    kept_back: bool = False

    def path(self, folder: Path) -> Path | None:
        """Return its file in the folder; None where there is none."""
        found = (folder / f"{self.file}{suffix}" for suffix in (".csv.gz", ".csv"))
        return next((path for path in found if path.exists()), None)

    def workload(self, path: Path) -> Workload:
        """Return what its file holds."""
        workload = load_workload(str(path)) if self.day is None else self.day.of(path)
        return _off_grid(workload, self.grid_s) if self.grid_s > 0.0 else workload

    def hardware(self) -> Profile:
        """Return the profile of a replica."""
        one = profile(self.profile)
        return one if self.cold_start_s is None else replace(one, cold_start_s=self.cold_start_s)


SURGES = (
    "a day of chat, prompts of 771 tokens, answers of 85, made of day 9 of the published rate curve at a 33rd of it: "
    "5.8 requests/s, and 3.3 times as many from one ten minutes to the next in the evening"
)
TRACES: Sequence[Trace] = (
    Trace(
        name="code",
        text="a day of code completion, prompts of 2,500 tokens, answers of 28; a tenth of the traffic at night",
        file="azure2024_code_24h_q4",
        profile="llama-3.1-70b-h100x4",
        ttft_s=2.0,
        tpot_s=0.2,
    ),
    Trace(
        name="conv",
        text="a day of chat, prompts of 1,600 tokens, answers of 100; half of the traffic at night",
        file="azure2024_conv_24h_q8",
        profile="llama-3.1-70b-h100x4",
        ttft_s=2.0,
        tpot_s=0.1,
    ),
    Trace(
        name="r1",
        text="a day of a reasoning model, answers of 1,500 tokens, one in a hundred of 12,600; the KV cache binds",
        file="servegen_r1_24h",
        profile="qwen3-32b-h100x2",
        ttft_s=3.0,
        tpot_s=0.1,
    ),
    Trace(
        name="mlarge",
        text=f"{SURGES}; a small model",
        file="rates/servegen_mlarge_10min",
        day=Day(number=9, share=1 / 33, lengths=CHAT),
        profile="llama-3.1-8b-h100x1",
        ttft_s=0.5,
        tpot_s=0.05,
    ),
    Trace(
        name="mlarge-32b",
        text=f"{SURGES}; a model of middling size",
        file="rates/servegen_mlarge_10min",
        day=Day(number=9, share=1 / 33, lengths=CHAT),
        profile="qwen3-32b-h100x2",
        ttft_s=2.0,
        tpot_s=0.1,
    ),
    Trace(
        name="mlarge-48h",
        text="two days of a chat model, near idle for hours, with a surge to eleven times the mean",
        file="servegen_mlarge_48h",
        profile="qwen3-32b-h100x2",
        ttft_s=2.0,
        tpot_s=0.1,
        kept_back=True,
    ),
    Trace(
        name="code-2023",
        text="an hour of code completion as it was logged, in bursts",
        file="azure2023_code",
        short=True,
        profile="llama-3.1-70b-h100x4",
        ttft_s=2.0,
        tpot_s=0.2,
        bounds=Bounds(max=16),  # its bursts last seconds: what ten minutes take on average says little
    ),
    Trace(
        name="conv-2023",
        text="an hour of chat as it was logged",
        file="azure2023_conv",
        short=True,
        profile="llama-3.1-8b-h100x1",
        ttft_s=0.5,
        tpot_s=0.05,
        kept_back=True,
    ),
    Trace(
        name="mooncake",
        text="an hour of chat with prompts of 12,000 tokens, all of them computed anew",
        file="mooncake_conversation",
        short=True,
        profile="llama-3.1-70b-h100x4",
        ttft_s=15.0,
        tpot_s=0.1,
        grid_s=3.0,
    ),
    Trace(
        name="ramp",
        text="llm-d's staircase of 1 to 10 requests/s, 4,000 tokens in and 1,000 out, with its bounds and start time",
        file="llmd_slo_ramp",
        short=True,
        profile="qwen3-32b-h100x2",
        ttft_s=3.0,
        tpot_s=0.1,
        bounds=Bounds(min=3, max=8),
        cold_start_s=100.0,
    ),
)
BY_NAME = {trace.name: trace for trace in TRACES}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ground:
    """What every policy meets: one seed of a trace at a scale.

    Args:
        sample: the requests. duration_s: how long they come.
        replicas: ready at the start. bounds: for all policies.
        token_s: time per token of a replica that is as full as the objectives allow.
        busy: per minute, how many replicas the work would keep busy.
        fluid_gpu_hours: less is not possible.
    """

    trace: Trace
    profile: Profile
    sample: Sample
    duration_s: float
    seed: int
    scale: float
    replicas: int
    bounds: Bounds
    token_s: float
    busy: tuple[float, ...]
    fluid_gpu_hours: float

    @classmethod
    def of(cls, trace: Trace, path: Path, *, seed: int, scale: float = 1.0, hours: float | None = None) -> "Ground":
        """Return it; the same arguments make the same one in any process."""
        workload = _workload(trace, path)
        if hours is not None:
            workload = workload.first(hours * HOUR)
        if trace.bounds is not None:
            trace = replace(trace, bounds=scaled(trace.bounds, scale))
        return cls.made(trace, workload.draw(seed, scale), workload.duration_s, seed=seed, scale=scale)

    @classmethod
    def made(cls, trace: Trace, sample: Sample, duration_s: float, *, seed: int, scale: float = 1.0) -> "Ground":
        """Return it for requests that were drawn already."""
        one = trace.hardware()
        prompts, outputs = sample.prompt.astype(np.float64), sample.output.astype(np.float64)
        means = (float(prompts.mean()), float(outputs.mean()))
        token_s = min(trace.tpot_s, capacity.best(one, *means, trace.ttft_s, trace.tpot_s).itl_s)
        busy = busy_replicas(one, sample.arrival, prompts, outputs, duration_s=duration_s, token_s=token_s)
        bounds = trace.bounds or Bounds(max=_most(busy.tolist()))
        return cls(
            trace=trace,
            profile=one,
            sample=sample,
            duration_s=duration_s,
            seed=seed,
            scale=scale,
            replicas=bounds.clip(starting_replicas(one, sample, trace.tpot_s)),
            bounds=bounds,
            token_s=token_s,
            busy=tuple(busy.tolist()),
            fluid_gpu_hours=fluid_gpu_hours(one, prompts, outputs),
        )


def _off_grid(workload: Workload, grid_s: float) -> Workload:
    if (sample := workload.recorded) is None:
        return workload
    arrival = sample.arrival + np.random.default_rng(0).uniform(0.0, grid_s, len(sample))
    return replace(workload, recorded=replace(sample, arrival=np.minimum(np.sort(arrival), workload.duration_s)))


@lru_cache(maxsize=1)
def _workload(trace: Trace, path: Path) -> Workload:
    return trace.workload(path)


def scaled(bounds: Bounds, scale: float) -> Bounds:
    """Return bounds for so many times the traffic; at least one replica."""
    return Bounds(min=max(1, round(bounds.min * scale)), max=max(1, round(bounds.max * scale)))


def _most(busy: list[float]) -> int:
    """Return the most replicas that any policy may have, by the busiest ten minutes."""
    tens = [busy[start : start + 10] for start in range(0, len(busy), 10)]
    peak = max(math.fsum(ten) / len(ten) for ten in tens)
    return max(4, math.ceil(ROOM * peak / START_LOAD))
