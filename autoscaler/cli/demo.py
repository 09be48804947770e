"""`autoscaler demo`: the daemon against an embedded fleet, a day in a minute, with nothing installed beside it."""

import asyncio
import contextlib
import signal
import sys
import time
from collections import deque
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import click
import structlog
from prometheus_client import CollectorRegistry
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from autoscaler import __version__
from autoscaler.cli.replay import command as replay_command
from autoscaler.cli.wiring import Watchers
from autoscaler.core.policy import Policy, VllmSignals
from autoscaler.core.types import Decision, Outcome, Part, ScaleReplicas, Snapshot
from autoscaler.errors import AutoscalerError
from autoscaler.loop import Parts, Supervisor
from autoscaler.policy_file import load_policies, shipped_policies
from autoscaler.sim.fleet import RunSummary, Settings, VirtualClock
from autoscaler.sim.report import TickCollector, write_report
from autoscaler.sim.scenario import Scenario, demo_scenario
from autoscaler.sources.vllm import VllmSource
from autoscaler.telemetry import Telemetry, configure_logging
from autoscaler.trace import Recorder
from autoscaler.web.server import Health

HOUR = 3600.0
FRAMES_PER_S = 8.0
RECENT = 8
BAR = 24


@click.command("demo")
@click.option("--hours", default=24.0, show_default=True, type=click.FloatRange(0.25, 24.0), help="Simulated time.")
@click.option("--seed", default=1, show_default=True, help="Of traffic, names and cold starts.")
@click.option("--policy", type=click.Path(path_type=Path), help="Instead of the shipped demo policy.")
@click.option("--report", default="demo-report.html", show_default=True, type=click.Path(path_type=Path))
@click.option("--record", default="demo.trace.gz", show_default=True, type=click.Path(path_type=Path))
def command(hours: float, seed: int, policy: Path | None, report: Path, record: Path) -> int:
    """Run the daemon against an embedded fleet under a day's traffic, then write a report and replay the recording.

    The fleet is simulated; the loop, the scraping over HTTP, the decisions and the recording are the daemon's own.
    """
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
        screen = stack.enter_context(Screen(console, scenario, policy))
        telemetry = Telemetry(CollectorRegistry(), structlog.get_logger())
        watchers = Watchers(telemetry, Health(clock), recorder, reports=(collector, screen))

        def build(policy: Policy) -> Parts:
            return Parts(target=fleet, sources=(VllmSource(scraped, clock),), actuator=fleet)

        await Supervisor({policy.name: policy}, build, clock, watchers).run(clock.done)
    ttft, itl = policy.slo.ttft, policy.slo.itl
    return fleet.summary(ttft_s=ttft.seconds if ttft else 2.0, tpot_s=itl.seconds if itl else 0.1)


def _print_summary(console: Console, summary: RunSummary, collector: TickCollector, seconds: float) -> None:
    attainment = summary.attainment
    share = "-" if attainment is None else f"{100.0 * attainment:.2f} %"
    saved = 1.0 - summary.gpu_hours / summary.static_gpu_hours if summary.static_gpu_hours else 0.0
    acts = sum(row.acted_to is not None for row in collector.rows)
    console.print(
        f"\n[bold]{summary.duration_s / HOUR:g} simulated hours in {seconds:.0f} s[/]: {summary.requests:,} requests, "
        f"{share} within their SLO, {summary.failed:,} failed; {acts} actions\n"
        f"GPU-hours  {summary.gpu_hours:.0f}, against {summary.static_gpu_hours:.0f} for {summary.peak_replicas} "
        f"replicas all day ({100.0 * saved:.0f} % fewer). Simulated, not measured on GPUs.",
    )


class Screen:
    """Shows the run while it runs: a live panel on a terminal, a line an hour elsewhere. A `ports.Report`."""

    def __init__(self, console: Console, scenario: Scenario, policy: Policy) -> None:
        self._console, self._scenario, self._policy = console, scenario, policy
        self._recent: deque[Text] = deque(maxlen=RECENT)
        self._live: Live | None = None
        self._drawn = 0.0
        self._hour = -1

    def __enter__(self) -> "Screen":
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def tick(self, policy: str, snapshot: Snapshot, decision: Decision, outcome: Outcome, duration_s: float) -> None:
        """Take note of one tick, and draw a frame when it is time."""
        if isinstance(decision.action, ScaleReplicas):
            line = _action_line(decision, outcome)
            self._recent.append(line)
            if self._live is None:
                self._console.print(line)
        now = time.monotonic()
        if self._live is None:
            self._print_hour(snapshot, decision)
        elif now - self._drawn >= 1.0 / FRAMES_PER_S:
            self._drawn = now
            self._live.update(self._frame(snapshot, decision), refresh=True)

    def _print_hour(self, snapshot: Snapshot, decision: Decision) -> None:
        hour = int((snapshot.at - self._scenario.epoch) / HOUR)
        if hour == self._hour:
            return
        self._hour = hour
        score = decision.score.value if decision.score is not None else None
        target = snapshot.target
        self._console.print(
            f"{_clock(snapshot.at)}  {target.ready_replicas} of {target.current_replicas} ready  "
            f"score {_number(score)}  demand {_number(decision.demand.value)}  {decision.reason}",
        )
        sys.stdout.flush()

    def _frame(self, snapshot: Snapshot, decision: Decision) -> RenderableType:
        target, elapsed = snapshot.target, snapshot.at - self._scenario.epoch
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(_clock(snapshot.at), style="bold cyan"),
            ProgressBar(total=self._scenario.duration_s, completed=elapsed, width=BAR * 2),
            f"{100.0 * elapsed / self._scenario.duration_s:3.0f} %",
        )
        facts = Table.grid(padding=(0, 2))
        facts.add_row("replicas", _replicas(target.ready_replicas, target.current_replicas, self._policy))
        demand = decision.demand.value
        text = f"{_number(demand)} now, {_number(decision.forecast.top)} in {decision.forecast.horizon_s:.0f} s"
        facts.add_row("demand", f"{text}  (replicas; {decision.demand.binds or 'not known yet'})")
        score = decision.score
        facts.add_row("score", _bar(score.value if score else None, self._policy.scale_up.threshold, ""))
        for part in score.parts if score else ():
            facts.add_row(f"  {part.name}", _bar(part.value, self._policy.score.critical, _driver(part)))
        facts.add_row("why", Text(_why(decision), style="italic"))
        body: list[RenderableType] = [head, Text(), facts]
        if self._recent:
            body += [Text(), *self._recent]
        return Panel(Group(*body), title=f"{target.namespace}/{target.name}", border_style="dim")


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M")


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"


def _driver(part: Part) -> str:
    return part.driver or (str(part.gap) if part.gap else "")


def _why(decision: Decision) -> str:
    return "; ".join(decision.unblocks) or str(decision.reason)


def _replicas(ready: int, ordered: int, policy: Policy) -> Text:
    room = max(0, policy.replicas.max - max(ready, ordered))
    text = Text("█ " * min(ready, ordered), style="green")
    text.append("▒ " * max(0, ordered - ready), style="yellow")
    text.append("· " * room, style="dim")
    text.append(f" {ready} ready, {ordered} ordered")
    return text


def _bar(value: float | None, limit: float, note: str) -> Text:
    if value is None:
        return Text(f"{'unknown':<{BAR + 6}} {note}", style="dim")
    filled = round(value * BAR)
    style = "red" if value >= limit else "yellow" if value >= 0.5 else "green"
    text = Text("━" * filled, style=style)
    text.append("━" * (BAR - filled), style="grey23")
    text.append(f" {value:.2f} ")
    text.append(note, style="dim")
    return text


def _action_line(decision: Decision, outcome: Outcome) -> Text:
    if not isinstance(decision.action, ScaleReplicas):
        return Text()
    up = decision.action.to > decision.action.seen
    line = Text(f"{_clock(decision.at)} ", style="dim")
    line.append("▲" if up else "▼", style="yellow" if up else "green")
    line.append(f" {decision.action.seen} → {decision.action.to}  {decision.reason}")
    parts = decision.score.parts if decision.score else ()
    detail = max(parts, key=lambda part: part.value or 0.0, default=None)
    if decision.demand.value is not None:
        line.append(f"  demand {decision.demand.value:.2f}", style="dim")
    if up and detail is not None and detail.driver:
        line.append(f"  {detail.driver}", style="dim")
    if outcome is not Outcome.APPLIED:
        line.append(f"  {outcome}", style="red")
    return line
