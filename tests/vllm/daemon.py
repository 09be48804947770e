"""The daemon's own loop beside real servers: they are the pods of a Deployment that no Kubernetes has."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from autoscaler.actuators.batching import BatchingActuator
from autoscaler.actuators.dry_run import DryRunActuator
from autoscaler.cli.wiring import live_sources, plugin_api
from autoscaler.clock import SystemClock
from autoscaler.core.policy import (
    BatchingMode,
    BatchingPolicy,
    PluginAccess,
    Policy,
    ReplicaBounds,
    Signals,
    Slos,
    TargetRef,
    VllmSignals,
)
from autoscaler.core.types import Batching, BatchReason, Decision, Limits, Outcome, Pod, Snapshot, TargetStatus
from autoscaler.loop import Parts, Supervisor
from tests.fake_ports import Watch
from tests.vllm.server import API_KEY, TOKEN, VllmServer

INTERVAL_S = 2.0
WAIT_LIMIT_S = 600.0
CALM_S = 30.0
"""With nothing to do or to wait for so long, the limits are taken as found."""
ON_ITS_WAY = frozenset({BatchReason.OBSERVING, BatchReason.COOLDOWN, BatchReason.NO_DATA, BatchReason.REPLICAS_MOVING})


@dataclass(slots=True, kw_only=True)
class Pods:
    """`ports.Target` of a Deployment with these pods, which no one scales."""

    pods: tuple[Pod, ...]

    async def read(self) -> TargetStatus:
        """Return the target as it is."""
        return TargetStatus(
            namespace="serving",
            name="chat",
            current_replicas=len(self.pods),
            ready_replicas=sum(pod.ready_at is not None for pod in self.pods),
            pods=self.pods,
        )

    async def close(self) -> None:
        """Do nothing: nothing is open."""

    def become_ready(self, name: str) -> None:
        """Make a pod ready, from now on."""
        now = SystemClock().now()
        self.pods = tuple(replace(pod, ready=True, ready_at=now) if pod.name == name else pod for pod in self.pods)


def pod_at(host: str, *, ready: bool = True) -> Pod:
    """Return a pod with that address. One that is ready has been so for ten minutes."""
    now = SystemClock().now()
    return Pod(
        name=f"chat-{host}",
        uid=host,
        ip=host,
        created_at=now - 900.0,
        ready=ready,
        ready_at=now - 600.0 if ready else None,
    )


@dataclass
class Found(Watch):
    """What the daemon decided, tick by tick.

    Args:
        came: set at every tick.
        calm_since: since when it has had nothing to do or to wait for; None before the first move, and while it has.
    """

    came: asyncio.Event = field(default_factory=asyncio.Event)
    calm_since: float | None = None
    moves: list[Batching] = field(default_factory=list)

    def tick(self, policy: str, snapshot: Snapshot, decision: Decision, outcome: Outcome, duration_s: float) -> None:
        """Remember it."""
        super().tick(policy, snapshot, decision, outcome, duration_s)
        batching = decision.batching
        if batching is not None and batching.pods and outcome is Outcome.APPLIED:
            self.moves.append(batching)
        if not self.moves or batching is None or batching.pods or batching.reason in ON_ITS_WAY:
            self.calm_since = None
        elif self.calm_since is None:
            self.calm_since = decision.at
        self.came.set()

    @property
    def batching(self) -> Batching:
        """What it made of the limits at the last tick."""
        batching = self.ticks[-1].decision.batching
        assert batching is not None
        return batching

    @property
    def limits(self) -> Limits:
        """The limits that hold now."""
        return self.batching.wanted or self.batching.limits

    async def until(self, true: Callable[[], bool], what: str) -> None:
        """Wait until something is so after a tick. Raises: AssertionError."""
        try:
            async with asyncio.timeout(WAIT_LIMIT_S):
                while not (self.ticks and true()):
                    assert self.bugs() == []
                    self.came.clear()
                    await self.came.wait()
        except TimeoutError:
            said = [f"{batching.reason}: {batching.detail}" for batching in self._said()[-5:]]
            raise AssertionError(f"not {what}; moves: {self.words()}; last ticks: {said}") from None

    async def until_calm(self) -> None:
        """Wait until limits were moved, and there is nothing more to do or to wait for. Raises: AssertionError."""

        def calm() -> bool:
            return self.calm_since is not None and self.ticks[-1].decision.at - self.calm_since >= CALM_S

        await self.until(calm, "calm")

    def bugs(self) -> list[BaseException]:
        """Return what went wrong, but for pods that were too busy to answer in time: these are told again."""
        return [error for _, kind, error in self.errors if kind == "bug"]

    def words(self) -> list[str]:
        """Return the moves, in words."""
        return [f"{one.reason}: {one.limits} to {one.wanted}; {one.detail}" for one in self.moves]

    def _said(self) -> list[Batching]:
        return [batching for tick in self.ticks if (batching := tick.decision.batching) is not None]


@asynccontextmanager
async def daemon(policy: Policy, pods: Pods) -> AsyncIterator[Found]:
    """Run the daemon, until the block ends."""
    clock, found, stop = SystemClock(), Found(), asyncio.Event()

    def build(policy: Policy) -> Parts:
        actuator = BatchingActuator(DryRunActuator(), plugin_api(policy), lambda _pod, problem: None)
        return Parts(target=pods, sources=live_sources(policy, clock), actuator=actuator)

    task = asyncio.create_task(Supervisor({policy.name: policy}, build, clock, found).run(stop))
    try:
        yield found
    finally:
        stop.set()
        await task
    assert found.bugs() == []


async def left_alone(server: VllmServer, folder: Path) -> str:
    """Return why the daemon moves none of a server's limits, once it has decided about its replicas all the same.

    Raises: AssertionError, when it moves them.
    """
    async with daemon(policy_of(server, folder), Pods(pods=(pod_at(server.client.base_url.host),))) as found:
        await found.until(lambda: bool(found.ticks[-1].snapshot.engines.keys), "read")
        assert (found.batching.reason, found.moves) == (BatchReason.NO_PLUGIN, [])
        assert found.ticks[-1].decision.score is not None
        ((_, why),) = found.batching.left_alone
        return why


def policy_of(server: VllmServer, folder: Path, slos: Slos | None = None, *, replicas: int = 1) -> Policy:
    """Return a policy whose limits are moved, at the pace of a test; all pods listen at this server's port."""
    (folder / "token").write_text(TOKEN)
    (folder / "key").write_text(API_KEY)
    port = server.client.base_url.port
    assert port is not None
    access = PluginAccess(token_file=str(folder / "token"), api_key_file=str(folder / "key"), timeout_s=20.0)
    return Policy(
        name="chat",
        target=TargetRef(deployment="chat"),
        replicas=ReplicaBounds(min=replicas, max=replicas),
        interval_s=INTERVAL_S,
        signals=Signals(vllm=VllmSignals(port=port, timeout_s=10.0)),
        slo=slos or Slos(),
        batching=BatchingPolicy(
            mode=BatchingMode.LIVE, window_s=10.0, observe_s=20.0, max_observe_s=40.0, cooldown_s=5.0, plugin=access
        ),
    )
