"""The shipped policies, their JSON Schema, and the reference of all keys.

`python tests/test_policies.py` writes the reference in docs/policy.md anew.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from autoscaler.core.policy import Forecaster, Policy, ReplicaBounds, Schedule, Sizing, Slo, TargetRef
from autoscaler.core.signals import TARGET_SIGNALS
from autoscaler.policy_file import json_schema, load_policies, policy_from_plain, policy_to_plain, shipped_policies

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "policy.md"
BEGIN, END = "<!-- keys: begin -->\n", "<!-- keys: end -->\n"
P0 = Path(__file__).parent / "data" / "policies" / "p0.yaml"
FILES = [*sorted((ROOT / "policies").glob("*.yaml")), P0]
SCHEMA = json_schema()


def loaded(name: str) -> Policy:
    return load_policies([ROOT / "policies" / f"{name}.yaml"]).policies[name]


@pytest.mark.parametrize("file", [pytest.param(file, id=file.stem) for file in FILES])
def test_a_shipped_policy_loads_without_a_warning_under_its_files_name(file: Path) -> None:
    found = load_policies([file])
    assert list(found.policies) == [file.stem]
    assert found.warnings == ()
    jsonschema.Draft202012Validator(SCHEMA).validate(yaml.safe_load(file.read_text()))


@pytest.mark.parametrize("file", [pytest.param(file, id=file.stem) for file in FILES])
def test_a_shipped_policy_survives_its_plain_form(file: Path) -> None:
    (policy,) = load_policies([file]).policies.values()
    assert policy_from_plain(json.loads(json.dumps(policy_to_plain(policy)))) == policy


def test_the_shipped_policies_load_together() -> None:
    assert set(load_policies([shipped_policies()]).policies) == {
        "default",
        "latency-first",
        "cost-first",
        "prefill-heavy",
        "long-context",
        "scheduled",
        "seed-weighted",
        "seed-scale-score",
        "demo",
    }


@pytest.mark.parametrize("file", [pytest.param(file, id=file.stem) for file in FILES])
def test_a_shipped_policy_says_why(file: Path) -> None:
    lines = [line.strip() for line in file.read_text().splitlines()]
    assert lines[0].startswith("# ")
    if file is not P0:
        assert any(line.startswith("# Take it") for line in lines)
        assert f"[{file.stem}]({file.name})" in (ROOT / "policies" / "README.md").read_text()


def test_default_writes_out_the_programs_defaults() -> None:
    default = loaded("default")
    assert default == Policy(name="default", target=default.target, replicas=default.replicas)


def test_demo_is_the_default_law() -> None:
    assert loaded("demo") == Policy(
        name="demo",
        target=TargetRef(namespace="demo", deployment="llama"),
        replicas=ReplicaBounds(min=1, max=12),
        interval_s=15.0,
    )


def test_seed_weighted_is_the_rule() -> None:
    policy = loaded("seed-weighted")
    weights, backlog, within = policy.score.weights, policy.score.backlog, policy.slo.within
    assert policy.sizing is Sizing.SCORE
    assert (weights.memory, weights.backlog, weights.latency) == (0.40, 0.35, 0.25)
    assert backlog.waiting_total is not None
    assert 12 / backlog.waiting_total < policy.score.critical <= 13 / backlog.waiting_total
    assert within is not None
    assert (within.seconds, within.share) == (2.0, 0.95)
    assert (policy.scale_up.max_step, policy.scale_up.stabilization_s, policy.up_cooldown_s) == (2, 60.0, 120.0)
    assert (policy.scale_down.stabilization_s, policy.down_cooldown_s) == (300.0, 120.0)


def test_seed_scale_score_is_the_rule() -> None:
    policy = loaded("seed-scale-score")
    weights, backlog = policy.score.weights, policy.score.backlog
    assert policy.sizing is Sizing.SCORE
    assert (weights.memory, weights.backlog, weights.latency) == (0.0, 1.0, 0.0)
    assert backlog.combine == "weighted"
    assert backlog.weights == (0.40, 0.35, 0.25)
    assert (backlog.waiting_total, backlog.pending_pods, backlog.wait_s) == (200.0, 50.0, 5.0)
    assert backlog.waiting_per_replica is None


def test_scheduled_moves_bounds_and_nothing_else() -> None:
    policy = loaded("scheduled")
    default = Policy(name="scheduled", target=policy.target, replicas=policy.replicas)
    assert replace(policy, schedules=()) == default
    assert policy.schedules[0] == Schedule(
        name="office-hours", cron="0 8 * * 1-5", timezone="Asia/Shanghai", duration_s=43200.0, lead_s=600.0, min=12
    )


def test_p0_is_the_profile_of_the_cases() -> None:
    (policy,) = load_policies([P0]).policies.values()
    assert (policy.target.namespace, policy.target.deployment) == ("serving", "chat-a")
    assert policy.replicas == ReplicaBounds(min=1, max=8)
    assert (policy.interval_s, policy.sizing) == (15.0, Sizing.SCORE)
    assert policy.slo.ttft == Slo(seconds=2.0, quantile=0.95)
    assert (policy.slo.itl, policy.slo.e2e, policy.slo.within) == (None, None, None)
    assert (policy.scale_up.threshold, policy.scale_up.max_step, policy.up_cooldown_s) == (0.70, 2, 60.0)
    assert (policy.scale_down.threshold, policy.scale_down.max_step, policy.down_cooldown_s) == (0.30, 1, 300.0)
    assert policy.prediction.score is Forecaster.TREND
    assert (policy.pending.grace_s, policy.pending.unschedulable_after_s) == (600.0, 120.0)


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"].endswith("2020-12/schema")


@pytest.mark.parametrize("name", [pytest.param(name, id=name) for name in SCHEMA["$defs"]])
def test_the_schema_knows_every_key_of_a_mapping_and_its_meaning(name: str) -> None:
    definition = SCHEMA["$defs"][name]
    assert definition["description"]
    if definition["type"] == "object":
        assert definition["additionalProperties"] is False
        assert {key: value.get("description") for key, value in definition["properties"].items()} == {
            key: value["description"] for key, value in definition["properties"].items()
        }


# The reference: one section for every mapping that a policy may hold, one row for every key.


def mappings(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and the schema of every mapping in a schema, outermost first."""
    for part in (schema, *schema.get("anyOf", [])):
        if "$ref" in part:
            yield from mappings(SCHEMA["$defs"][part["$ref"].rpartition("/")[2]], path)
        elif part.get("type") == "array":
            yield from mappings(part["items"], f"{path}[]")
        elif isinstance(part.get("additionalProperties"), dict):
            yield from mappings(part["additionalProperties"], f"{path}.NAME")
        elif "properties" in part:
            yield path, part
            for key, value in part["properties"].items():
                yield from mappings(value, f"{path}.{key}".removeprefix("."))


def kind(schema: dict[str, Any]) -> str:
    """Return how a table names the values that a schema takes."""
    if "$ref" in schema:
        return kind(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return " or ".join(kind(part) for part in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema["type"] == "array":
        return f"list of {kind(schema['items'])}"
    if schema["type"] == "object":
        values = schema["additionalProperties"]
        return f"mapping of names to {kind(values)}" if isinstance(values, dict) else "mapping"
    kinds = {"boolean": "boolean", "integer": "whole number", "string": "text", "null": "null"}
    if isinstance(schema["type"], str):
        return kinds[schema["type"]]
    return "duration" if "number" in schema["type"] and "minimum" in schema else kinds.get(schema["type"][0], "number")


def rows(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the table of one mapping."""
    yield "| Key | Value | Default | Meaning |"
    yield "|---|---|---|---|"
    for key, value in schema["properties"].items():
        default = "**required**" if key in schema.get("required", ()) else shown_default(value)
        yield f"| `{key}` | {kind(value)} | {default} | {value['description'].rstrip('.')} |"


def shown_default(schema: dict[str, Any]) -> str:
    """Return a default as a table shows it: none for mappings that are there anyhow, with defaults of their own."""
    if kind(schema) == "mapping":
        return ""
    default = schema["default"]
    return f"`{default if isinstance(default, str) and default else json.dumps(default)}`"


def reference() -> str:
    """Return the reference of all keys; mappings of one kind share a section."""
    sections: dict[str, list[str]] = {}
    found = list(mappings(SCHEMA, ""))
    schemas = {json.dumps(schema): schema for _, schema in found}
    for path, schema in found:
        sections.setdefault(json.dumps(schema), []).append(f"`{path}`" if path else "The document")
    parts: list[str] = []
    for written, paths in sections.items():
        schema = schemas[written]
        parts += [f"### {', '.join(paths)}", "", schema["description"], "", *rows(schema), ""]
    parts += ["## Signals that a query may give", "", "| Signal | Unit | Meaning |", "|---|---|---|"]
    parts += [f"| `{signal.name}` | {signal.unit} | {signal.meaning} |" for signal in TARGET_SIGNALS]
    return "\n".join(parts) + "\n"


def test_every_key_of_the_schema_is_in_the_reference() -> None:
    written = REFERENCE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert written == reference(), "run: python tests/test_policies.py"
    for path, schema in mappings(SCHEMA, ""):
        assert f"`{path}`" in written or path == ""
        assert all(f"| `{key}` |" in written for key in schema["properties"])


def test_the_examples_in_the_reference_load(tmp_path: Path) -> None:
    examples = [part.partition("```")[0] for part in REFERENCE.read_text().split("```yaml\n")[1:]]
    assert examples
    for example in examples:
        file = tmp_path / "example.yaml"
        file.write_text(example)
        assert load_policies([file]).warnings == ()


if __name__ == "__main__":
    head, _, rest = REFERENCE.read_text().partition(BEGIN)
    REFERENCE.write_text(head + BEGIN + reference() + END + rest.partition(END)[2])
