"""The Lease of a daemon, and what hangs on it: who may write, and what the next leader will know."""

import asyncio
import socket
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

import click

from autoscaler.actuators.gate import GatedActuator
from autoscaler.core.memory import Memory
from autoscaler.core.policy import Policy
from autoscaler.core.types import Decision, Outcome, Snapshot
from autoscaler.errors import TargetError
from autoscaler.lease import Elector, LeaseApi, Memories
from autoscaler.loop import Parts
from autoscaler.ports import Clock, Report
from autoscaler.telemetry import Telemetry

CALL_S = 1.5
"""Of the API client that is the Lease's own: neither its pauses nor its connections are shared with the targets'."""


def parse_lease(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[str, str] | None:
    """Return namespace and name of `--lease`; None without one. Raises BadParameter."""
    if not text:
        return None
    namespace, _, name = text.partition("/")
    if not namespace or not name or "/" in name:
        raise click.BadParameter(f"{text!r} must be NAMESPACE/NAME")
    return namespace, name


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
    """

    def __init__(
        self,
        lease: tuple[str, str],
        api: LeaseApi,
        clock: Clock,
        telemetry: Telemetry,
        recalled: Callable[[str, float, Memory], None],
    ) -> None:
        namespace, name = lease
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

        return replace(parts, actuator=GatedActuator(parts.actuator, allowed))

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
