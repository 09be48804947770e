"""`autoscaler doctor`: what would stop a policy from working, and what to do about it. It writes nothing."""

import asyncio
import importlib
import json
import os
import pkgutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from autoscaler import actuators
from autoscaler.actuators.deletion_cost import RIGHTS as MARKS
from autoscaler.actuators.events import why
from autoscaler.actuators.rollout import RIGHTS as ROLLS
from autoscaler.cli.leadership import parse_lease
from autoscaler.cli.main import EXIT_FAILED
from autoscaler.cli.rights import review
from autoscaler.cli.wiring import Reporting, live_parts
from autoscaler.clock import SystemClock
from autoscaler.core.decide import decide
from autoscaler.core.policy import Approval, Policy
from autoscaler.core.state import State, absorb
from autoscaler.core.types import Snapshot
from autoscaler.doctor import (
    Finding,
    Json,
    Level,
    Right,
    judge_batching,
    judge_cards,
    judge_decision,
    judge_drain,
    judge_failure,
    judge_models,
    judge_owners,
    judge_pages,
    judge_queries,
    judge_rights,
    judge_room,
    judge_signals,
    judge_target,
    problem,
)
from autoscaler.errors import TargetError
from autoscaler.lease import RIGHTS as ELECTS
from autoscaler.loop import Parts
from autoscaler.observe import take
from autoscaler.policy_file import Loaded, load_policies
from autoscaler.schedule import Calendar
from autoscaler.sources.cluster import ClusterCaches
from autoscaler.sources.deployment import RIGHTS as READS
from autoscaler.sources.deployment import DeploymentTarget
from autoscaler.sources.kubernetes_api import KubernetesApi
from autoscaler.sources.pod_template import drain_of
from autoscaler.sources.vllm import VllmSource
from autoscaler.telemetry import redact

DEPLOYMENTS = "/apis/apps/v1/namespaces/{namespace}/deployments"
NODES = "/api/v1/nodes"
COLORS: Mapping[Level, str] = {
    Level.OK: "green",
    Level.UNKNOWN: "cyan",
    Level.WARNING: "yellow",
    Level.PROBLEM: "red",
}
WIDTH = 8


@click.command("doctor")
@click.argument("policies", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--dry-run", is_flag=True, help="Judge for a daemon in dry-run, which needs no right to write.")
@click.option(
    "--lease",
    default="",
    metavar="NAMESPACE/NAME",
    callback=parse_lease,
    help="Judge for a daemon that runs with this --lease: its rights to the Lease too.",
)
@click.option("--kubeconfig", default="", help="Instead of KUBECONFIG, the pod's service account or ~/.kube/config.")
@click.option("--context", default="", help="Context of the kubeconfig.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    policies: tuple[Path, ...],
    dry_run: bool,
    lease: tuple[str, str] | None,
    kubeconfig: str,
    context: str,
    as_json: bool,
) -> int:
    """Say what would stop POLICIES from working: files, or directories of them. Writes nothing.

    Exit 0 when there is no problem, 1 when there is one, 2 for a bad policy.
    """
    loaded = load_policies(policies)
    found = asyncio.run(_examine_all(loaded, dry_run=dry_run, lease=lease, kubeconfig=kubeconfig, context=context))
    levels = Counter(finding.level for findings in found.values() for finding in findings)
    if as_json:
        click.echo(json.dumps(_plain(loaded, found, levels), indent=2))
    else:
        _print(loaded, found, levels)
    return EXIT_FAILED if levels[Level.PROBLEM] else 0


# --- looking --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Troubles:
    """An `observe.Trouble` that keeps what it is told."""

    found: list[str] = field(default_factory=list)

    def error(self, policy: str, kind: str, error: BaseException) -> None:
        """Keep it."""
        self.found.append(f"{type(error).__name__}: {error}")

    def overrun(self, policy: str) -> None:
        """Do nothing: one tick has no interval."""


async def _examine_all(
    loaded: Loaded, *, dry_run: bool, lease: tuple[str, str] | None, kubeconfig: str, context: str
) -> dict[str, list[Finding]]:
    """Return the findings of each policy, by its name."""
    clock = SystemClock()
    try:
        api = await KubernetesApi.connect(clock, kubeconfig=kubeconfig, context=context, environ=os.environ)
    except TargetError as error:
        unconnected = problem("target", redact(str(error)), "name one that works: --kubeconfig or KUBECONFIG")
        return {name: [unconnected] for name in loaded.policies}
    try:
        caches = ClusterCaches(api, clock)
        policies = loaded.policies.values()
        elected = [] if lease is None else await _examine_lease(api, lease[0])
        found = await asyncio.gather(
            *(_examine(policy, caches, clock, dry_run=dry_run, elected=elected) for policy in policies)
        )
        return dict(zip(loaded.policies, found, strict=True))
    finally:
        await api.close()


async def _examine_lease(api: KubernetesApi, namespace: str) -> list[Finding]:
    """Return whether an election may be held in that namespace."""
    return list(judge_rights(await review(api, namespace, ELECTS), namespace, check="lease"))


async def _examine(
    policy: Policy, caches: ClusterCaches, clock: SystemClock, *, dry_run: bool, elected: list[Finding]
) -> list[Finding]:
    """Return the findings of one policy.

    Args:
        elected: what stops the daemon from leading, which it need not where it writes nothing.
    """
    acting, victims = not (dry_run or policy.dry_run), policy.scale_down.victims
    rights, template, nodes = await asyncio.gather(
        review(
            caches.api,
            policy.target.namespace,
            needed_rights(acting=acting, marking=victims.order != "cluster", rolling=policy.batching.rolls_out),
        ),
        _read_template(caches.api, policy),
        _read_nodes(caches.api),
    )
    findings = list(judge_rights(rights, policy.target.namespace, marks_needed=victims.on_failure == "hold"))
    findings += elected if acting else []
    if template is not None:
        findings += [*judge_drain(policy, drain_of(template)), judge_room(policy, template, nodes)]
    parts = live_parts(policy, caches, clock, dry_run=True)  # an actuator that has nothing to write with
    troubles = Troubles()
    try:
        snapshot = await take(
            policy.name, parts.target, parts.sources, clock, troubles, Calendar(policy.schedules).active
        )
    except TargetError as error:
        findings.append(judge_failure(error.reason, redact(str(error))))
    else:
        findings += _judge_snapshot(policy, parts, snapshot)
    finally:
        await parts.close()
    return [*findings, *(problem("bug", redact(text), "report it") for text in troubles.found)]


def needed_rights(*, acting: bool, marking: bool = False, rolling: bool = False) -> frozenset[Right]:
    """Return what the daemon asks the API server for: what it reads, and with `acting` what it writes.

    Args:
        marking: the policy has pods marked before a step down.
        rolling: it may change batching limits in the pod template.
    """
    if not acting:
        return READS
    unused = (frozenset() if marking else MARKS) | (frozenset() if rolling else ROLLS)
    names = [module.name for module in pkgutil.iter_modules(actuators.__path__, f"{actuators.__name__}.")]
    tables: list[frozenset[Right]] = [getattr(importlib.import_module(name), "RIGHTS", frozenset()) for name in names]
    return READS.union(*tables) - unused


async def _read_template(api: KubernetesApi, policy: Policy) -> Json | None:
    """Return the target's pod template; None where it cannot be read, which the target's own finding explains."""
    path = DEPLOYMENTS.format(namespace=quote(policy.target.namespace, safe=""))
    query = {"fieldSelector": f"metadata.name={policy.target.deployment}"}
    try:
        found = _items(await api.request("GET", path, query=query))
    except TargetError:
        return None
    named = (item for item in found if item.get("metadata", {}).get("name") == policy.target.deployment)
    return next((item.get("spec", {}).get("template", {}) for item in named), None)


async def _read_nodes(api: KubernetesApi) -> list[Json] | str:
    """Return the cluster's nodes, or why they cannot be listed."""
    try:
        return _items(await api.request("GET", NODES))
    except TargetError as error:
        return redact(str(error))


def _items(answer: Json) -> list[Json]:
    return [item for item in answer.get("items") or () if isinstance(item, dict)]


def _judge_snapshot(policy: Policy, parts: Parts, snapshot: Snapshot) -> list[Finding]:
    """Return what one snapshot shows, and what would be decided on it."""
    signals, status = policy.signals, snapshot.target
    hpa_visible = parts.target.hpa_visible if isinstance(parts.target, DeploymentTarget) else None
    found = [
        *judge_target(policy, status, snapshot.schedules),
        judge_owners(status, hpa_visible),
        judge_batching(policy, status),
    ]
    if signals.vllm is not None:
        found.append(judge_pages(signals.vllm, snapshot))
        engines = [source for source in parts.sources if isinstance(source, VllmSource)]
        families = engines[0].families() if engines else Counter[tuple[str, str]]()
        found += judge_signals(snapshot, families)
        if engines:
            found += judge_models(signals.vllm.model_name, engines[0].models())
    cards = [name for name, settings in (("dcgm", signals.dcgm), ("nvml", signals.nvml)) if settings is not None]
    if cards:
        reports = [str(source.report(status)) for source in parts.sources if isinstance(source, Reporting)]
        found.append(judge_cards(snapshot, cards, reports))
    found += judge_queries(policy, snapshot)
    # What is approved is a proposal of the daemon's: one of ours would have another id.
    free = replace(policy, approval=Approval())
    decision = decide(free, absorb(free, State(), snapshot), snapshot)
    found.append(judge_decision(decision, why(snapshot, decision)))
    return found


# --- telling --------------------------------------------------------------------------------------------------------


def _where(policy: Policy) -> str:
    return f"{policy.target.namespace}/{policy.target.deployment}"


def _plain(loaded: Loaded, found: Mapping[str, list[Finding]], levels: Mapping[Level, int]) -> dict[str, Any]:
    """Return everything as plain data."""
    policies = [
        {"policy": name, "target": _where(loaded.policies[name]), "findings": [asdict(finding) for finding in findings]}
        for name, findings in found.items()
    ]
    return {
        "counts": {str(level): levels[level] for level in Level},
        "warnings": [str(warning) for warning in loaded.warnings],
        "policies": policies,
    }


def _print(loaded: Loaded, found: Mapping[str, list[Finding]], levels: Mapping[Level, int]) -> None:
    """Print for people; colours only on a terminal."""
    color = False if os.environ.get("NO_COLOR") else None
    for warning in loaded.warnings:
        click.echo(f"{click.style('warning', fg=COLORS[Level.WARNING])}: {warning}", color=color)
    for name, findings in found.items():
        click.echo(f"{click.style(name, bold=True)}  {_where(loaded.policies[name])}", color=color)
        for finding in findings:
            level = click.style(f"{finding.level:<{WIDTH}}", fg=COLORS[finding.level])
            click.echo(f"  {level} {finding.check:<{WIDTH}}  {finding.text}", color=color)
            if finding.remedy:
                click.echo(f"  {'':<{WIDTH}} {'':<{WIDTH}}  -> {finding.remedy}", color=color)
    counts = ", ".join(f"{levels[level]} {level}" for level in Level if levels[level])
    click.echo(counts, color=color)
