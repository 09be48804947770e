"""`autoscaler run`: the daemon."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import click
import structlog
from prometheus_client import CollectorRegistry

from autoscaler import __version__
from autoscaler.actuators.events import Events
from autoscaler.cli.leadership import (
    LEASE_S,
    Leadership,
    Timing,
    WhileLeading,
    forget,
    parse_lease,
    parse_lease_duration,
)
from autoscaler.cli.rights import review
from autoscaler.cli.selecting import parse_selection, selected
from autoscaler.cli.wiring import FirstTicks, Watchers, fingerprint, live_parts, open_recorder
from autoscaler.clock import SystemClock
from autoscaler.core.policy import Policy
from autoscaler.loop import Parts, Supervisor, know_nothing_else
from autoscaler.policy_file import Loaded, Selection, load_policies, parse_bool
from autoscaler.ports import Report
from autoscaler.sources.cluster import ClusterCaches
from autoscaler.sources.kubernetes_api import KubernetesApi
from autoscaler.telemetry import Telemetry, configure_logging, redact
from autoscaler.web.server import Health, serve

DEFAULT_LISTEN = "127.0.0.1:9090"
WRITES = frozenset({("apps", "deployments/scale", "patch")})
REQUEST_S = 3.0
"""Of one request to the API server."""
LEVELS = ("debug", "info", "warning", "error", "critical")


@click.command("run")
@click.argument("policies", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--dry-run", is_flag=True, help="Decide and explain, write nothing. Also DRY_RUN=true.")
@click.option(
    "--record",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Record every tick into this file; where it exists, into one beside it with the time in its name.",
)
@click.option(
    "--lease",
    default="",
    metavar="NAMESPACE/NAME",
    callback=parse_lease,
    help="Write only while this process holds that Lease, and keep in it what must survive. A dry-run needs none.",
)
@click.option(
    "--lease-duration",
    "timing",
    default=f"{LEASE_S:g}s",
    show_default=True,
    callback=parse_lease_duration,
    help="How long the others wait for a leader that is silent; it renews every 2/15 of that, and writes for 2/3.",
)
@click.option("-l", "--selector", default="", help="Run the policies with these labels only, written as for kubectl.")
@click.option("-n", "--namespace", "namespaces", multiple=True, help="Run the policies of targets there; repeatable.")
@click.option("--once", is_flag=True, help="One tick of each policy, then exit; 1 when a target cannot be read.")
@click.option("--listen", default=DEFAULT_LISTEN, show_default=True, help="Where /metrics, /healthz and /readyz are.")
@click.option("--kubeconfig", default="", help="Instead of KUBECONFIG, the pod's service account or ~/.kube/config.")
@click.option("--context", default="", help="Context of the kubeconfig.")
@click.option(
    "--log-level",
    type=click.Choice(LEVELS, case_sensitive=False),
    default="info",
    show_default=True,
    envvar="LOG_LEVEL",
)
@click.option("--log-format", type=click.Choice(["auto", "json", "console"]), default="auto", show_default=True)
def command(
    policies: tuple[Path, ...],
    dry_run: bool,
    record: Path | None,
    lease: tuple[str, str] | None,
    timing: Timing,
    selector: str,
    namespaces: tuple[str, ...],
    once: bool,
    listen: str,
    kubeconfig: str,
    context: str,
    log_level: str,
    log_format: str,
) -> int:
    """Run the daemon on POLICIES: files, or directories of them. Changed files are taken up while it runs."""
    if lease is not None and once:
        raise click.UsageError("--once cannot wait for a --lease; leave one of them out")
    dry_run = _dry_run_by(os.environ) or dry_run
    selection = parse_selection(selector, namespaces)
    loaded = selection.needed(load_policies(policies))
    configure_logging(log_level, json=None if log_format == "auto" else log_format == "json")
    for problem in loaded.warnings:
        structlog.get_logger().warning("policy_warning", problem=str(problem))
    return asyncio.run(
        _run(
            loaded,
            policies,
            dry_run=dry_run,
            record=record,
            lease=None if dry_run else lease,
            timing=timing,
            selection=selection,
            once=once,
            listen=listen,
            kubeconfig=kubeconfig,
            context=context,
        )
    )


def _dry_run_by(environ: Mapping[str, str]) -> bool:
    """Return what DRY_RUN says. What it says unclearly is an error: it must not mean live."""
    if "DRY_RUN" not in environ:
        return False
    try:
        return parse_bool(environ["DRY_RUN"])
    except ValueError as error:
        raise click.BadParameter(f"{environ['DRY_RUN']!r} {error}", param_hint="DRY_RUN") from error


async def _run(
    loaded: Loaded,
    paths: tuple[Path, ...],
    *,
    dry_run: bool,
    record: Path | None,
    lease: tuple[str, str] | None,
    timing: Timing,
    selection: Selection,
    once: bool,
    listen: str,
    kubeconfig: str,
    context: str,
) -> int:
    """Run until a signal, or for one tick. Returns the exit code."""
    clock = SystemClock()
    registry = CollectorRegistry()
    health = Health(clock)
    log = structlog.get_logger()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:

        async def connect(timeout_s: float = REQUEST_S, elder: KubernetesApi | None = None) -> KubernetesApi:
            api = await KubernetesApi.connect(
                clock, kubeconfig=kubeconfig, context=context, environ=os.environ, timeout_s=timeout_s, elder=elder
            )
            stack.push_async_callback(api.close)
            return api

        caches = ClusterCaches(await connect(), clock)
        recorder = None
        if record is not None:
            recorder, file = open_recorder(record, clock.now())
            stack.callback(recorder.close)
            log.info("recording", file=str(file), **({"taken": str(record)} if file != record else {}))
        first_ticks, telemetry = FirstTicks(log), Telemetry(registry, log)
        reports: list[Report] = [first_ticks]
        leadership = None
        if lease is not None:
            recalled = recorder.memory if recorder is not None else forget
            leadership = Leadership(lease, await connect(timing.call_s), clock, telemetry, recalled, timing)
        events = None
        if not dry_run:
            api = await connect(elder=caches.api)
            events = await stack.enter_async_context(Events(api, clean=redact, told=telemetry.event))
            reports.append(events if leadership is None else WhileLeading(events, leadership.elector.leading))
        remember = leadership.memories.learned if leadership is not None else None
        watchers = Watchers(telemetry, health, recorder, dry_run=dry_run, reports=reports, remember=remember)

        def build(policy: Policy) -> Parts:
            parts = live_parts(
                policy, caches, clock, dry_run=dry_run, marked=telemetry.deletion_cost, limited=telemetry.batching_pod
            )
            first_ticks.built(policy, parts)
            if events is not None:
                events.watch(policy, live=not policy.dry_run)
            return parts if leadership is None else leadership.gated(policy, parts)

        supervisor = Supervisor(
            loaded.policies,
            build,
            clock,
            watchers,
            read=lambda: selected(selection, load_policies(paths), log),
            fingerprint=lambda: fingerprint(paths),
            once=once,
            recall=know_nothing_else if leadership is None else leadership.memories.recall,
        )
        if not once:
            url = await stack.enter_async_context(serve(listen, registry, health))
            log.info("started", version=__version__, policies=sorted(loaded.policies), listen=url, dry_run=dry_run)
            if not dry_run:
                await _ask_for_rights(caches.api, loaded, telemetry)
        await (supervisor.run(stop) if leadership is None else leadership.during(supervisor.run(stop)))
        if not once:
            log.info("stopped")
            return 0
        missed = {name: watchers.failures.get(name, "no tick") for name in loaded.policies}
        for name in sorted(missed.keys() - supervisor.ticked):
            click.echo(f"{click.style('error', fg='red')}: policy {name}: {missed[name]}", err=True)
        return 0 if supervisor.ticked >= missed.keys() else 1


async def _ask_for_rights(api: KubernetesApi, loaded: Loaded, telemetry: Telemetry) -> None:
    """Say of each live policy that it may not write, where the API server says so: its first write may be days away."""
    live = [policy for policy in loaded.policies.values() if not policy.dry_run]
    answers = await asyncio.gather(*(review(api, policy.target.namespace, WRITES) for policy in live))
    for policy, answer in zip(live, answers, strict=True):
        for (_, resource, verb), granted in answer.items():
            if granted is False:
                telemetry.right_missing(policy.name, f"{verb} {resource} in namespace {policy.target.namespace}")
