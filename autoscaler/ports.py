"""The protocols between the core and the world. A mode is a choice of implementations, made in `cli`."""

from typing import Protocol

from autoscaler.core.types import Action, Decision, Outcome, Reading, Snapshot, TargetStatus


class Clock(Protocol):
    """Time that never steps back: wall time taken once, then carried by a monotonic clock."""

    def now(self) -> float:
        """Return epoch seconds."""
        ...

    async def sleep_until(self, at: float) -> None:
        """Return once `now()` has reached `at`; at once when it has."""
        ...


class Target(Protocol):
    """Reads one Deployment and its pods."""

    async def read(self) -> TargetStatus:
        """Return the target's state now. Raises TargetError when it cannot be read."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


class Source(Protocol):
    """Reads signals of one target."""

    name: str

    async def read(self, target: TargetStatus, at: float) -> Reading:
        """Return what could be read, and a gap with its reason for what could not.

        Bounded in time. Raises SourceError only when nothing at all could be read.
        """
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


class Actuator(Protocol):
    """Carries out an action on one target."""

    async def apply(self, action: Action) -> Outcome:
        """Return what became of it; `Hold` is `UNCHANGED`. Raises ActuationError when refused or unreachable."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


class Report(Protocol):
    """Is told of every completed tick: telemetry, the recorder, the live table."""

    def tick(self, policy: str, snapshot: Snapshot, decision: Decision, outcome: Outcome, duration_s: float) -> None:
        """Take note of one tick; must not raise on any decision."""
        ...
