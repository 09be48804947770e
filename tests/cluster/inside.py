"""The daemon's loop inside the test's own process, on a real API server: for what cannot be seen from outside."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry
from structlog.typing import EventDict, FilteringBoundLogger

from autoscaler.cli.wiring import Watchers, live_parts
from autoscaler.clock import SystemClock
from autoscaler.core.types import Decision, Outcome, Snapshot
from autoscaler.loop import Parts, Supervisor
from autoscaler.policy_file import load_policies
from autoscaler.ports import Clock
from autoscaler.sources.cluster import ClusterCaches
from autoscaler.sources.kubernetes_api import KubernetesApi
from autoscaler.telemetry import Telemetry
from autoscaler.web.server import Health
from tests.cluster.manifests import LIMIT_S


class ShiftedClock(SystemClock):
    """The system clock, which a test may move on."""

    shift_s = 0.0

    def now(self) -> float:
        """Return epoch seconds."""
        return super().now() + self.shift_s


class JumpingClock(SystemClock):
    """A clock for which sleeping takes no time: it jumps to the end, and goes on from there."""

    ahead_s = 0.0

    def now(self) -> float:
        """Return epoch seconds."""
        return super().now() + self.ahead_s

    async def sleep_until(self, at: float) -> None:
        """Jump to `at`, and let the others run."""
        self.ahead_s += max(0.0, at - self.now())
        await asyncio.sleep(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """One completed tick."""

    policy: str
    snapshot: Snapshot
    decision: Decision
    outcome: Outcome


@dataclass(slots=True)
class Inside:
    """A loop that runs. A `ports.Report` as well.

    Attributes:
        lines: of its log.
    """

    health: Health
    registry: CollectorRegistry
    ticks: list[Tick] = field(default_factory=list)
    lines: list[EventDict] = field(default_factory=list)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None

    def tick(self, policy: str, snapshot: Snapshot, decision: Decision, outcome: Outcome, duration_s: float) -> None:
        """Keep it."""
        self.ticks.append(Tick(policy=policy, snapshot=snapshot, decision=decision, outcome=outcome))

    async def until(self, true: Callable[[Tick], bool], since: int = 0) -> Tick:
        """Return the first tick of which something is true. Raises TimeoutError, and whatever ends the loop."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                for tick in self.ticks[since:]:
                    if true(tick):
                        return tick
                since = len(self.ticks)
                if self.task is not None and self.task.done():
                    self.task.result()
                    raise AssertionError("it ended")
                await asyncio.sleep(0.05)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's series with these labels."""
        return sum(
            sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == f"autoscaler_{name}" and labels.items() <= sample.labels.items()
        )


def unchanged(parts: Parts) -> Parts:
    """Return the parts as they are."""
    return parts


@asynccontextmanager
async def running_inside(
    kubeconfig: Path,
    *policies: Path,
    clock: Clock | None = None,
    alter: Callable[[Parts], Parts] = unchanged,
) -> AsyncIterator[Inside]:
    """Run the loop while the block runs. What is watched of the cluster always lives by the system's clock.

    Args:
        clock: of the loop, its sources and its health.
        alter: changes the parts of each policy.
    """
    clock = clock or SystemClock()
    one = Inside(Health(clock), CollectorRegistry())

    def say(_logger: object, _method: str, event: EventDict) -> EventDict:
        one.lines.append(event)
        raise structlog.DropEvent

    logger: FilteringBoundLogger = structlog.wrap_logger(structlog.ReturnLogger(), processors=[say])
    api = await KubernetesApi.connect(SystemClock(), kubeconfig=str(kubeconfig), environ={})
    caches = ClusterCaches(api, SystemClock())
    watchers = Watchers(Telemetry(one.registry, logger), one.health, reports=(one,))
    supervisor = Supervisor(
        load_policies(policies).policies,
        lambda policy: alter(live_parts(policy, caches, clock, dry_run=False)),
        clock,
        watchers,
    )
    one.task = asyncio.create_task(supervisor.run(one.stop))
    try:
        yield one
        one.stop.set()
        await one.task
    finally:
        one.task.cancel()
        await asyncio.wait([one.task])
        await api.close()
