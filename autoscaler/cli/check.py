"""`autoscaler check`: every problem of every policy."""

import json
from pathlib import Path

import click

from autoscaler.cli.selecting import parse_selection
from autoscaler.policy_file import json_schema, load_policies


@click.command("check")
@click.argument("policies", nargs=-1, type=click.Path(path_type=Path))
@click.option("-l", "--selector", default="", help="List the policies only that `run --selector` would run.")
@click.option("-n", "--namespace", "namespaces", multiple=True, help="The same for `run --namespace`; repeatable.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of a policy file instead.")
def command(policies: tuple[Path, ...], selector: str, namespaces: tuple[str, ...], schema: bool) -> int:
    """Check POLICIES: files, or directories of them. Prints every problem with its key, value and remedy."""
    if schema:
        click.echo(json.dumps(json_schema(), indent=2))
        return 0
    if not policies:
        raise click.UsageError("name at least one policy file or directory, or give --schema")
    loaded = parse_selection(selector, namespaces).needed(load_policies(policies))
    for problem in loaded.warnings:
        click.echo(f"{click.style('warning', fg='yellow')}: {problem}", err=True)
    for name, policy in loaded.policies.items():
        bounds = f"{policy.replicas.min} to {policy.replicas.max} replicas"
        if policy.schedules:
            count = len(policy.schedules)
            bounds += f", {count} schedule{'' if count == 1 else 's'}"
        where = f"{policy.target.namespace}/{policy.target.deployment}"
        click.echo(f"{click.style('ok', fg='green')}: {name}: {where}, {bounds}, every {policy.interval_s:g}s")
    return 0
