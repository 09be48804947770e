"""`autoscaler demo`: the daemon against an embedded fleet, a day in a minute, with nothing installed beside it."""

import asyncio
import contextlib
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import click
import structlog
from click.core import ParameterSource
from prometheus_client import CollectorRegistry
from rich.console import Console

from autoscaler import __version__
from autoscaler.cli.replay import command as replay_command
from autoscaler.cli.screen import Screen
from autoscaler.cli.wiring import Watchers
from autoscaler.core.policy import Policy, VllmSignals
from autoscaler.errors import AutoscalerError
from autoscaler.loop import Parts, Supervisor
from autoscaler.policy_file import load_policies, shipped_policies
from autoscaler.sim.clock import VirtualClock
from autoscaler.sim.fleet import RunSummary, Settings
from autoscaler.sim.report import TickCollector, percent, write_report
from autoscaler.sim.scenario import Scenario, demo_scenario
from autoscaler.sources.vllm import VllmSource
from autoscaler.telemetry import Telemetry, configure_logging
from autoscaler.trace import Recorder
from autoscaler.web.server import Health

HOUR = 3600.0


@click.command("demo")
@click.option("--cluster", is_flag=True, help="On a real control plane on this machine, in real time.")
@click.option("--hours", default=24.0, show_default=True, type=click.FloatRange(0.25, 24.0), help="Simulated time.")
@click.option(
    "--minutes", default=3.0, show_default=True, type=click.FloatRange(0.2, 30.0), help="Real time, with --cluster."
)
@click.option("--seed", default=1, show_default=True, help="Of traffic, names and cold starts.")
@click.option("--policy", type=click.Path(path_type=Path), help="Instead of the shipped demo policy.")
@click.option("--report", default="demo-report.html", show_default=True, type=click.Path(path_type=Path))
@click.option("--record", default="demo.trace.gz", show_default=True, type=click.Path(path_type=Path))
@click.pass_context
def command(
    context: click.Context,
    cluster: bool,
    hours: float,
    minutes: float,
    seed: int,
    policy: Path | None,
    report: Path,
    record: Path,
) -> int:
    """Run the daemon against an embedded fleet under a day's traffic, then write a report and replay the recording.

    The fleet is simulated; the loop, the scraping over HTTP, the decisions and the recording are the daemon's own.

    With --cluster it is a process that scales a Deployment on a real control plane, under a ServiceAccount; in the
    middle of it it is killed, and a standby takes over. Only the kubelet is a fake, and the engines are simulated.
    """
    other = "hours" if cluster else "minutes"
    if context.get_parameter_source(other) is ParameterSource.COMMANDLINE:
        raise click.UsageError(f"--{other} goes {'not' if cluster else 'only'} with --cluster")
    if cluster:
        from autoscaler.cli.demo_cluster import POLICY, run_on_cluster

        file = policy or POLICY
        return run_on_cluster(
            minutes=minutes, seed=seed, policy_file=file, policy=demo_policy(file), report=report, record=record
        )
    scenario = demo_scenario(seed, duration_s=hours * HOUR)
    chosen = demo_policy(policy)
    record.unlink(missing_ok=True)
    configure_logging("error")
    # Off a terminal a line stays a line: logs are searched, not looked at.
    console = Console(soft_wrap=not sys.stdout.isatty())
    console.print(
        f"[bold]{scenario.title}[/], on simulated replicas of {scenario.profile.name}. "
        f"The loop, the scraping and the decisions are real.\n",
    )
    started = time.monotonic()
    collector = TickCollector()
    summary = asyncio.run(_run(scenario, chosen, collector, record, console))
    if not collector.rows:
        raise AutoscalerError("the demo was stopped before its first tick")
    write_report(
        report,
        collector.rows,
        title=scenario.title,
        policy=chosen,
        summary=summary,
        events=scenario.events,
        note=f"autoscaler {__version__}, simulated replicas of {scenario.profile.name}, seed {seed}; see {record}",
    )
    _print_summary(console, summary, collector, time.monotonic() - started)
    console.print(
        "\n[bold]Replaying the recording[/] through the same decide(), without a clock or a fleet:", soft_wrap=True
    )
    code: int = replay_command.main(args=[str(record), "--verify"], standalone_mode=False)
    console.print(
        f"\nreport     [bold]{report}[/]\nrecording  [bold]{record}[/]  (autoscaler replay {record})", soft_wrap=True
    )
    return code


def demo_policy(path: Path | None) -> Policy:
    """Return the one policy of the file; the shipped demo policy without one."""
    policies = load_policies([path or shipped_policies() / "demo.yaml"]).policies
    if len(policies) != 1:
        raise AutoscalerError(f"{path}: the demo takes one policy, not {len(policies)}")
    return next(iter(policies.values()))


async def _run(
    scenario: Scenario, policy: Policy, collector: TickCollector, record: Path, console: Console
) -> RunSummary:
    """Run the scenario to its end, or to an interrupt. Returns what it came to."""
    fleet = scenario.fleet(Settings(namespace=policy.target.namespace, deployment=policy.target.deployment))
    clock = VirtualClock(fleet, scenario.duration_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, clock.done.set)
    async with contextlib.AsyncExitStack() as stack:
        recorder = stack.enter_context(Recorder(record, f"autoscaler {__version__} demo"))
        port = await stack.enter_async_context(fleet.serve())
        scraped = replace(policy.signals.vllm or VllmSignals(), port=port, prometheus=None)
        policy = replace(policy, signals=replace(policy.signals, vllm=scraped, dcgm=None, nvml=None, queries=()))
        screen = stack.enter_context(
            Screen(console, policy, began=scenario.epoch, duration_s=scenario.duration_s, line_s=HOUR)
        )
        telemetry = Telemetry(CollectorRegistry(), structlog.get_logger())
        watchers = Watchers(telemetry, Health(clock), recorder, reports=(collector, screen))

        def build(policy: Policy) -> Parts:
            return Parts(target=fleet, sources=(VllmSource(scraped, clock),), actuator=fleet)

        await Supervisor({policy.name: policy}, build, clock, watchers).run(clock.done)
    ttft, itl = policy.slo.ttft, policy.slo.itl
    return fleet.summary(ttft_s=ttft.seconds if ttft else 2.0, tpot_s=itl.seconds if itl else 0.1)


def _print_summary(console: Console, summary: RunSummary, collector: TickCollector, seconds: float) -> None:
    saved = 1.0 - summary.gpu_hours / summary.static_gpu_hours if summary.static_gpu_hours else 0.0
    acts = sum(row.acted_to is not None for row in collector.rows)
    console.print(
        f"\n[bold]{summary.duration_s / HOUR:g} simulated hours in {seconds:.0f} s[/]: {summary.requests:,} requests, "
        f"{percent(summary.attainment, 2)} within their SLO, {summary.failed:,} failed; {acts} actions\n"
        f"GPU-hours  {summary.gpu_hours:.0f}, against {summary.static_gpu_hours:.0f} for {summary.peak_replicas} "
        f"replicas all day ({100.0 * saved:.0f} % fewer). Simulated, not measured on GPUs.",
    )
