"""What the second actuator is worth on made workloads, replicas held: preemptions, ITL, TTFT, tokens a second.

    python -m bench batching [--minutes 20] [--seed 1]
    python -m bench batching --vllm 0.32.0 [--windows 4]

Each situation runs twice on the same requests: with the batching limits left alone, and moved. Of the second run what
comes after half of the time counts, so that both are compared in the same state; so for the first.

With `--vllm` two situations on a real server of that release (`make vllm-engines`), on this machine's CPU: the daemon
finds limits, and then windows with and without them take turns, so that whatever else the machine does is in both.
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from autoscaler.core.policy import (
    BatchingMode,
    BatchingPolicy,
    Policy,
    ReplicaBounds,
    Slo,
    Slos,
    TargetRef,
)
from autoscaler.core.signals import COLUMN
from autoscaler.core.types import Decision, Engines, Outcome, SetBatching, Snapshot
from autoscaler.sim.engine import Request
from autoscaler.sim.fleet import Settings
from autoscaler.sim.front import Clients
from autoscaler.sim.profile import Profile
from autoscaler.sim.profiles import profile
from autoscaler.sim.run import Setting, run
from tests.vllm import demonstrations
from tests.vllm.server import new_place

REPLICAS = 2
TWO_CORES = Profile(
    name="tiny model on two CPU cores",
    model="tiny",
    gpus=1,
    base_s=3.0e-3,
    token_s=3.1e-4,
    sequence_s=3.0e-4,
    context_s=0.0,
    prefix_s=0.0,
    kv_tokens=160 * 128,
    block_size=128,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    cold_start_s=60.0,
)
"""After a real vLLM 0.32 without a GPU, on which computing a prompt twice costs more than on any card: 3.4 ms a step of
one sequence, 44 ms of 64 (34 there), 0.63 s for 1800 tokens of prompts.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """One made workload.

    Args:
        profile: of every replica.
        rate: requests a second, and what share of them is long.
        short, long: prompt and answer of the two kinds, on average.
    """

    name: str
    profile: Profile
    slos: Slos
    rate: float
    long_share: float
    short: tuple[float, float]
    long: tuple[float, float]

    def requests(self, seconds: float, seed: int) -> Iterator[Request]:
        """Yield the requests, Poisson arrivals of lengths within a third of their mean."""
        rng, at = np.random.default_rng(seed), 0.0
        while (at := at + float(rng.exponential(1.0 / self.rate))) < seconds:
            prompt, output = self.long if rng.random() < self.long_share else self.short
            low, high = 2.0 / 3.0, 4.0 / 3.0
            yield Request(at, int(prompt * rng.uniform(low, high)), int(output * rng.uniform(low, high)))


def situations() -> tuple[Situation, ...]:
    """Return the two situations that a limit alone can mend."""
    return (
        Situation(
            name="KV storm",
            profile=TWO_CORES,
            slos=Slos(ttft=Slo(seconds=5.0), itl=Slo(seconds=0.1)),
            rate=3.6,
            long_share=0.0,
            short=(64.0, 900.0),
            long=(64.0, 900.0),
        ),
        Situation(
            name="long prompts among decodes",
            profile=profile("llama-3.1-8b-l40sx1"),
            slos=Slos(ttft=Slo(seconds=10.0), itl=Slo(seconds=0.1)),
            rate=3.0,
            long_share=0.15,
            short=(200.0, 300.0),
            long=(12_000.0, 100.0),
        ),
    )


class Watched:
    """`ports.Report` that keeps the engines' counters, half way and at the end, and the moves."""

    def __init__(self, half_at: float) -> None:
        self.half_at = half_at
        self.half, self.end = (0.0, 0.0), (0.0, 0.0)
        self.moves: list[str] = []

    def tick(self, policy: str, snapshot: Snapshot, decision: Decision, outcome: Outcome, duration_s: float) -> None:
        """Take note of one tick."""
        self.end = (_counted(snapshot.engines, "num_preemptions"), _counted(snapshot.engines, "generation_tokens"))
        if snapshot.at <= self.half_at:
            self.half = self.end
        batching = decision.batching
        if isinstance(decision.action, SetBatching) and batching is not None:
            at = snapshot.at - self.half_at
            words = f"{batching.reason}: {batching.limits} to {batching.wanted} ({batching.detail})"
            self.moves.append(f"{at:+.0f} s from half time: {words}")


def _counted(engines: Engines, name: str) -> float:
    return float(np.nansum(engines.values[:, COLUMN[name]]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Came:
    """What a run came to in its second half."""

    preemptions: float
    tokens_per_s: float
    itl_p99_s: float
    ttft_p99_s: float
    attained: float
    moves: tuple[str, ...]


def play(situation: Situation, batching: BatchingPolicy, minutes: float, seed: int) -> Came:
    """Return what comes of a situation."""
    seconds = 60.0 * minutes
    policy = Policy(
        name="held",
        target=TargetRef(deployment="chat"),
        replicas=ReplicaBounds(min=REPLICAS, max=REPLICAS),
        slo=situation.slos,
        batching=batching,
    )
    setting = Setting(
        profile=situation.profile,
        replicas=REPLICAS,
        duration_s=seconds,
        seed=seed,
        fleet=Settings(bin_s=seconds / 2.0, clients=Clients(ttft_timeout_s=600.0)),
    )
    watched = Watched(setting.epoch + seconds / 2.0)
    fleet_bins = run(policy, situation.requests(seconds, seed), setting, reports=(watched,)).summary.bins
    last = fleet_bins[-1]
    (preempted, generated), (before, before_tokens) = watched.end, watched.half
    return Came(
        preemptions=preempted - before,
        tokens_per_s=(generated - before_tokens) / (seconds / 2.0),
        itl_p99_s=last.itl_p99 or 0.0,
        ttft_p99_s=last.ttft_p99 or 0.0,
        attained=last.attained / max(1, last.arrived),
        moves=tuple(watched.moves),
    )


async def demonstrate(release: str, windows: int, console: Console) -> None:
    """Let the daemon find limits on a real server, compare with none, and print it.

    Raises: MissingEngineError; AssertionError, when a request fails.
    """
    table = Table("situation", "limits", "preemptions", "tokens/s", "ITL p99", "TTFT p50", "requests")
    async with new_place(release) as place:
        for name, play_on in demonstrations.DEMONSTRATIONS.items():
            async with play_on(place) as scene:
                with tempfile.TemporaryDirectory() as folder:
                    found = await scene.find(await scene.window(), Path(folder))
                for words in found.words():
                    console.print(f"{name}: {words}", markup=False, soft_wrap=True)
                moved = {key: value for key, value in asdict(found.limits).items() if value is not None}
                both: dict[str, list[demonstrations.Came]] = {"left alone": [], "moved": []}
                for _ in range(windows):
                    for limits, came in both.items():
                        await scene.server.moved(**(moved if limits == "moved" else {}))
                        await scene.window()
                        came.append(await scene.window())
                        console.print(f"{name}, {limits}: {came[-1]}", markup=False, soft_wrap=True)
            assert scene.problems() == []
            requests = sum(len(one.streams) for one in scene.loads)
            for limits, came in both.items():
                table.add_row(
                    name,
                    limits,
                    f"{sum(one.preemptions for one in came):.0f}",
                    f"{sum(one.tokens for one in came) / sum(one.seconds for one in came):.0f}",
                    f"{1000.0 * statistics.median(one.itl_s for one in came):.0f} ms" if scene.decodes else "",
                    f"{statistics.median(one.ttft_s for one in came):.2f} s",
                    f"{requests}, 0 failed",
                )
    console.print(table)


def main(arguments: Sequence[str]) -> int:
    """Play every situation twice, and print what came of it and what was moved."""
    parser = argparse.ArgumentParser(prog="python -m bench batching")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vllm", metavar="RELEASE")
    parser.add_argument("--windows", type=int, default=4)
    chosen = parser.parse_args(arguments)
    console = Console()
    if chosen.vllm:
        asyncio.run(demonstrate(chosen.vllm, chosen.windows, console))
        return 0
    table = Table("situation", "limits", "preemptions", "tokens/s", "ITL p99", "TTFT p99", "attained")
    for situation in situations():
        moves: tuple[str, ...] = ()
        for mode in (BatchingMode.OFF, BatchingMode.AUTO):
            came = play(situation, BatchingPolicy(mode=mode), chosen.minutes, chosen.seed)
            table.add_row(
                situation.name,
                "moved" if mode is BatchingMode.AUTO else "left alone",
                f"{came.preemptions:.0f}",
                f"{came.tokens_per_s:.0f}",
                f"{1000.0 * came.itl_p99_s:.0f} ms",
                f"{came.ttft_p99_s:.2f} s",
                f"{came.attained:.1%}",
            )
            moves = came.moves
        for move in moves:
            console.print(f"{situation.name}: {move}", markup=False, soft_wrap=True)
    console.print(table)
    return 0
