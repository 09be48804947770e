"""The actuator of dry-run and replay."""

from autoscaler.core.types import Action, Hold, Outcome


class DryRunActuator:
    """Says what it would do; holds no client, so it has nothing to do it with."""

    async def apply(self, action: Action) -> Outcome:
        """Return SIMULATED for what would be written, UNCHANGED for `Hold`."""
        return Outcome.UNCHANGED if isinstance(action, Hold) else Outcome.SIMULATED

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""
