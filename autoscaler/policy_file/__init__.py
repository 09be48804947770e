"""Policy files: YAML in Kubernetes' shape to the values of `core.policy`, and their JSON Schema."""

from autoscaler.policy_file.reading import (
    Loaded,
    json_schema,
    load_policies,
    parse_policies,
    policy_from_plain,
    policy_to_plain,
    shipped_policies,
)
from autoscaler.policy_file.scalars import parse_bool, parse_duration, parse_quantity
from autoscaler.policy_file.selection import Selection, parse_selector

__all__ = [
    "Loaded",
    "Selection",
    "json_schema",
    "load_policies",
    "parse_bool",
    "parse_duration",
    "parse_policies",
    "parse_quantity",
    "parse_selector",
    "policy_from_plain",
    "policy_to_plain",
    "shipped_policies",
]
