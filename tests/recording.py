"""Makes recordings as the daemon does: the real loop, scraping a simulated fleet over HTTP, on virtual time."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import structlog
from prometheus_client import CollectorRegistry
from structlog.typing import EventDict

from autoscaler.actuators.dry_run import DryRunActuator
from autoscaler.cli.wiring import Watchers
from autoscaler.core.policy import Policy, VllmSignals
from autoscaler.core.types import Reading, TargetStatus
from autoscaler.errors import SourceError
from autoscaler.loop import Parts, Supervisor
from autoscaler.ports import Report
from autoscaler.sim.clock import VirtualClock
from autoscaler.sim.fleet import Fleet, Settings
from autoscaler.sim.profiles import profile
from autoscaler.sim.workload import Lengths, Rate, requests
from autoscaler.sources.vllm import VllmSource
from autoscaler.telemetry import Telemetry
from autoscaler.trace import Recorder
from autoscaler.web.server import Health

EPOCH = 1_768_348_800.0
TARGET = Settings(namespace="serving", deployment="chat-a")
PROFILE = replace(profile("llama-3.1-8b-l40sx1"), max_num_batched_tokens=512, cold_start_s=60.0)
"""A replica carries about 4.5 requests a second."""


def chat_fleet(rate: Rate, duration_s: float, *, replicas: int = 2, seed: int = 1) -> Fleet:
    """Return a fleet under chat traffic."""
    traffic, life = np.random.default_rng(seed).spawn(2)
    arrivals = requests(traffic, rate, Lengths(prompt=800.0, output=300.0, prompt_sigma=0.6), duration_s)
    return Fleet(PROFILE, arrivals, replicas=replicas, epoch=EPOCH, rng=life, settings=TARGET)


@dataclass
class FaultySource:
    """The engines' pages, or why they fail: `fails` tells it from the seconds since the start, "" when they do not."""

    source: VllmSource
    fails: Callable[[float], str]
    name: str = "vllm"

    async def read(self, target: TargetStatus, at: float) -> Reading:
        """Return the pages' reading, or raise."""
        reason = self.fails(at - EPOCH)
        if reason:
            raise SourceError(self.name, reason, "as planned")
        return await self.source.read(target, at)

    async def close(self) -> None:
        """Close the real one."""
        await self.source.close()


class Changes:
    """Policies that change while the loop runs: each set holds from its time [s since the start] on."""

    def __init__(self, sets: Sequence[tuple[float, Mapping[str, Policy]]]) -> None:
        self._sets = sets
        self.clock: VirtualClock | None = None

    def version(self) -> int:
        """Return which set holds now."""
        elapsed = self.clock.now() - EPOCH if self.clock is not None else 0.0
        return max(index for index, (since, _) in enumerate(self._sets) if elapsed >= since)

    def policies(self) -> Mapping[str, Policy]:
        """Return the policies that hold now."""
        return self._sets[self.version()][1]


def _drop(_logger: object, _method: str, _event: EventDict) -> EventDict:
    raise structlog.DropEvent


async def record(
    path: Path,
    fleet: Fleet,
    policies: Mapping[str, Policy],
    duration_s: float,
    *,
    changes: Sequence[tuple[float, Mapping[str, Policy]]] = (),
    fails: Callable[[float], str] = lambda _elapsed: "",
    reports: Sequence[Report] = (),
) -> None:
    """Run the policies on the fleet and record into `path`; a policy with `dry_run` only looks on.

    Args:
        changes: policies from later times on; each set with as many as the first.
        fails: see `FaultySource`.
    """
    plan = Changes([(0.0, policies), *changes])
    clock = VirtualClock(fleet, duration_s, sleepers=len(policies) + bool(changes))
    plan.clock = clock
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(fleet.serve())
        recorder = stack.enter_context(Recorder(path, "autoscaler tests"))

        def build(policy: Policy) -> Parts:
            source = FaultySource(VllmSource(replace(policy.signals.vllm or VllmSignals(), port=port), clock), fails)
            return Parts(target=fleet, sources=(source,), actuator=DryRunActuator() if policy.dry_run else fleet)

        telemetry = Telemetry(CollectorRegistry(), structlog.wrap_logger(structlog.ReturnLogger(), processors=[_drop]))
        watchers = Watchers(telemetry, Health(clock), recorder, reports=reports)
        files = {"read": plan.policies, "fingerprint": plan.version} if changes else {}
        supervisor = Supervisor(policies, build, clock, watchers, **files)  # type: ignore[arg-type]
        await supervisor.run(clock.done)
