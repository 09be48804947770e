"""The Lease of a daemon, and what hangs on it: who may write, and what the next leader will know."""

import asyncio
import socket
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

import click

from autoscaler.actuators.gate import WRITE_S, GatedActuator
from autoscaler.core.memory import Memory
from autoscaler.core.policy import Policy
from autoscaler.core.types import Decision, Outcome, Snapshot
from autoscaler.errors import TargetError
from autoscaler.lease import LONGEST_LEASE_S, Elector, LeaseApi, Memories
from autoscaler.loop import Parts
from autoscaler.policy_file import parse_duration
from autoscaler.ports import Clock, Report
from autoscaler.telemetry import Telemetry

LEASE_S = 15.0
SHORTEST_S, LONGEST_S = 5.0, LONGEST_LEASE_S
"""Of `--lease-duration`. In the shortest a write has 2 s; others wait for no more than the longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The times of an election, each a share of how long the others wait [s].

    Attributes:
        lease_s: how long the others wait.
        renew_s, retry_s: see `Elector`.
        call_s: of one request of the API client that is the Lease's own: neither its pauses nor its connections are
            shared with the targets'.
        write_s: the longest that one write of replicas may take. It begins only while it can end within `renew_s`, of
            which punctual renewals leave more than that at any time.
    """

    lease_s: float = LEASE_S

    @property
    def renew_s(self) -> float:
        return self.lease_s * 10.0 / 15.0

    @property
    def retry_s(self) -> float:
        return self.lease_s * 2.0 / 15.0

    @property
    def call_s(self) -> float:
        return self.lease_s * 1.5 / 15.0

    @property
    def write_s(self) -> float:
        return self.lease_s * WRITE_S / LEASE_S


def parse_lease(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[str, str] | None:
    """Return namespace and name of `--lease`; None without one. Raises BadParameter."""
    if not text:
        return None
    namespace, _, name = text.partition("/")
    if not namespace or not name or "/" in name:
        raise click.BadParameter(f"{text!r} must be NAMESPACE/NAME")
    return namespace, name


def parse_lease_duration(_context: click.Context, _parameter: click.Parameter, text: str) -> Timing:
    """Return the times that follow from `--lease-duration`. Raises BadParameter."""
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} {error}") from error
    if not SHORTEST_S <= seconds <= LONGEST_S:
        raise click.BadParameter(f"{text!r} must be from {SHORTEST_S:g}s to {LONGEST_S:g}s")
    return Timing(lease_s=seconds)


def forget(_policy: str, _at: float, _memory: Memory) -> None:
    """Take no note of a memory that was taken in: nothing is recorded."""


class Told(Report, Protocol):
    """A report that also hears of errors."""

    def error(self, policy: str, kind: str, error: BaseException) -> None:
        """Take note of an error of the tick under way."""
        ...


class WhileLeading:
    """Passes on to a report what happens while this process leads: what a standby sees, the leader sees too."""

    def __init__(self, report: Told, leading: Callable[[], bool]) -> None:
        self._report = report
        self._leading = leading

    def error(self, policy: str, kind: str, error: BaseException) -> None:
        """Pass an error on."""
        if self._leading():
            self._report.error(policy, kind, error)

    def tick(self, policy: str, snapshot: Snapshot, decision: Decision, outcome: Outcome, duration_s: float) -> None:
        """Pass a tick on."""
        if self._leading():
            self._report.tick(policy, snapshot, decision, outcome, duration_s)


class Leadership:
    """One Lease of this process.

    Args:
        lease: namespace and name.
        recalled: see `Memories`.
        timing: of the election.
    """

    def __init__(
        self,
        lease: tuple[str, str],
        api: LeaseApi,
        clock: Clock,
        telemetry: Telemetry,
        recalled: Callable[[str, float, Memory], None],
        timing: Timing = Timing(),
    ) -> None:
        namespace, name = lease
        self._write_s = timing.write_s
        self._lease = f"{namespace}/{name}"
        self._telemetry = telemetry
        self.memories = Memories(damaged=telemetry.memory_damaged, recalled=recalled)
        self.elector = Elector(
            api,
            clock,
            namespace=namespace,
            name=name,
            identity=f"{socket.gethostname()}_{uuid.uuid4()}",
            memories=self.memories,
            listener=self,
            lease_s=timing.lease_s,
            renew_s=timing.renew_s,
            retry_s=timing.retry_s,
        )
        telemetry.leads(self._lease, leading=False, news=False)

    def leads(self, leading: bool) -> None:
        """Pass the news on."""
        self._telemetry.leads(self._lease, leading=leading)

    def trouble(self, error: TargetError) -> None:
        """Pass a trouble on."""
        self._telemetry.lease_trouble(self._lease, error)

    def gated(self, policy: Policy, parts: Parts) -> Parts:
        """Return the parts with the gate before what writes; a policy in dry-run has nothing that writes.

        While the policy's state lacks what the last leader saved the gate stays closed: a tick may have begun before.
        """
        if policy.dry_run:
            return parts

        def allowed(for_s: float) -> bool:
            return self.elector.leading(for_s) and self.memories.is_recalled(policy.name)

        return replace(parts, actuator=GatedActuator(parts.actuator, allowed, self._write_s))

    async def during(self, work: Awaitable[None]) -> None:
        """Do the work while the election goes on, and give the Lease up after it.

        A bug in the election ends the work: raises ExceptionGroup.
        """
        try:
            async with asyncio.TaskGroup() as group:
                election = group.create_task(self.elector.run(), name="(lease)")
                try:
                    await work
                finally:
                    election.cancel()
        finally:
            await self.elector.release()
