"""Actuators: one file per effect. Which one acts is decided once, at start, by the mode."""

from collections.abc import Callable, Mapping

from autoscaler.actuators.deployment import DeploymentActuator, ScaleApi
from autoscaler.actuators.dry_run import DryRunActuator
from autoscaler.core.policy import TargetRef
from autoscaler.ports import Actuator

ACTUATORS: Mapping[str, Callable[[ScaleApi, TargetRef], Actuator]] = {
    "live": DeploymentActuator,
    "dry-run": lambda _api, _ref: DryRunActuator(),
}
