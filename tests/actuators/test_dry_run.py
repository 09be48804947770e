"""The dry-run actuator: it says what it would do, and has nothing to do it with."""

import pytest

from autoscaler.actuators import ACTUATORS
from autoscaler.actuators.dry_run import DryRunActuator
from autoscaler.core.policy import TargetRef
from autoscaler.core.types import Action, Hold, Outcome, ScaleReplicas


@pytest.mark.parametrize(
    ("action", "outcome"),
    [
        pytest.param(Hold(), Outcome.UNCHANGED, id="hold"),
        pytest.param(ScaleReplicas(seen=2, to=4, uid="u"), Outcome.SIMULATED, id="scale"),
    ],
)
async def test_outcome(action: Action, outcome: Outcome) -> None:
    actuator = DryRunActuator()
    assert await actuator.apply(action) is outcome
    await actuator.close()


class ForbiddenApi:
    """A fake API that must not be used."""

    async def request(self, method: str, path: str, **_: object) -> dict[str, object]:
        raise AssertionError(f"dry-run sent {method} {path}")


async def test_the_mode_dry_run_never_calls_the_api() -> None:
    actuator = ACTUATORS["dry-run"](ForbiddenApi(), TargetRef(deployment="chat"))
    assert await actuator.apply(ScaleReplicas(seen=2, to=4)) is Outcome.SIMULATED
    assert not hasattr(actuator, "__dict__") or vars(actuator) == {}
