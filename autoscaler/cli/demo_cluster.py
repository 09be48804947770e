"""`autoscaler demo --cluster`: the daemon as a process against a real control plane on loopback, and simulated engines.

Real are etcd, the API server with its audit log, the controllers, the scheduler, the ServiceAccount with its Role, the
daemons and all that they write. The kubelet is a fake and the engines are simulated, exactly and in real time.
"""

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import aiohttp
import numpy as np
from rich.console import Console

from autoscaler import __version__
from autoscaler.cli.demo_daemons import Daemon, end, leading, start_daemon
from autoscaler.cli.demo_place import Place, nodes, rights_of, served_policy
from autoscaler.cli.replay import command as replay_command
from autoscaler.cli.screen import Screen
from autoscaler.core.memory import Memory
from autoscaler.core.policy import Policy
from autoscaler.errors import AutoscalerError
from autoscaler.sim.fleet import HOUR, RunSummary
from autoscaler.sim.report import TickCollector, TickRow, in_words, percent, write_report
from autoscaler.sim.scenario import Event, Scenario, rush_scenario
from autoscaler.testbed.api import ApiError
from autoscaler.testbed.audit import Written, written
from autoscaler.testbed.plane import (
    COMMANDS,
    EndedError,
    MissingToolsError,
    find_tools,
    new_plane,
)
from autoscaler.testbed.simulated import Traffic

POLICY = Path(__file__).with_name("demo-cluster.yaml")
LOOK_S = 0.25
AUDIT_S = 1.0
BIN_S, SPAN_S = 10.0, 5.0
"""Of the report: exact latencies, and traffic."""
TAKEOVER_FROM_S = 90.0
"""A shorter run has no takeover: a standby waits for 15 s."""
KILL_FROM, KILL_BY = 0.35, 0.6
"""The leader is killed after its first step up from here on, and at the latest by there, in shares of the run."""
KILL_AFTER_S = 1.5
"""From that step: so that the Lease has it."""


def run_on_cluster(*, minutes: float, seed: int, policy_file: Path, policy: Policy, report: Path, record: Path) -> int:
    """Run the demo, write its report, verify its recordings, and return the exit code."""
    console = Console(soft_wrap=not sys.stdout.isatty())
    for path in (report, record):  # said now, not after minutes
        if not path.parent.is_dir():
            raise AutoscalerError(f"cannot write {path}: {path.parent} is no folder")
    try:
        find_tools()
        demo = asyncio.run(_run(console, 60.0 * minutes, seed, policy_file.read_text(), policy, record))
    except MissingToolsError as error:
        raise AutoscalerError(
            f"no control plane: {error}. `make cluster-tools` builds one in a checkout; elsewhere set "
            f"KUBEBUILDER_ASSETS to a folder with {', '.join(COMMANDS)}"
        ) from error
    except asyncio.CancelledError:
        raise AutoscalerError("the demo was stopped before its traffic began") from None
    except (EndedError, ApiError, aiohttp.ClientError, TimeoutError) as error:
        raise AutoscalerError(f"the demo's control plane failed: {error}") from error
    if not demo.collector.rows or demo.summary is None:
        raise AutoscalerError("the demo was stopped before its first tick")
    findings = judge(demo.written, policy, [daemon.credential for daemon in demo.daemons])
    write_report(
        report,
        demo.collector.rows,
        title=demo.scenario.title,
        policy=policy,
        summary=demo.summary,
        events=(*demo.scenario.events, *demo.story),
        note=f"autoscaler {__version__}, seed {seed}. {demo.made_of()} In the audit log: {'; '.join(findings.lines)}.",
    )
    recordings = [daemon.recording for daemon in demo.daemons]
    verified = [_verify(console, recording) for recording in recordings]
    console.print(f"\n[bold]What the API server's audit log says was written[/], by {demo.user}:", soft_wrap=True)
    for line in findings.lines:
        console.print(f"  {line}", soft_wrap=True, highlight=False)
    _print_summary(console, demo.summary)
    names = "  ".join(map(str, recordings))
    console.print(f"\nreport     [bold]{report}[/]\nrecording  [bold]{names}[/]", soft_wrap=True)
    return int(any(verified) or not findings.good)


def _verify(console: Console, recording: Path) -> int:
    """Replay one recording, and return the exit code."""
    console.print(f"\n[bold]Replaying {recording}[/] through the same decide():", soft_wrap=True)
    code: int = replay_command.main(args=[str(recording), "--verify"], standalone_mode=False)
    return code


# --- the control plane and what is put into it ----------------------------------------------------------------------


class Stages:
    """Says what has been done, and how long each took."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextlib.contextmanager
    def stage(self, text: str) -> Iterator[None]:
        """Show that it is under way, then that it is done."""
        began = time.monotonic()
        with self._console.status(f"{text} ...") if self._console.is_terminal else contextlib.nullcontext():
            yield
        self._console.print(f"[green]✓[/] {text}  [dim]{time.monotonic() - began:.1f} s[/]", highlight=False)
        sys.stdout.flush()


async def _run(
    console: Console, duration_s: float, seed: int, policy_text: str, policy: Policy, record: Path
) -> "ClusterDemo":
    """Run it to its end or to an interrupt, and return it with all that came of it; nothing runs any more then."""
    stop, begun = asyncio.Event(), asyncio.Event()
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def interrupted() -> None:
        if begun.is_set() or task is None:
            stop.set()
        else:
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, interrupted)
    stages = Stages(console)
    async with new_plane() as plane, AsyncExitStack() as stack:
        with stages.stage("etcd and kube-apiserver: TLS, RBAC, an audit log"):
            await plane.start_api()
        api = await stack.enter_async_context(plane.api())
        version = str((await api.get("/version"))["gitVersion"])
        scenario = rush_scenario(seed, duration_s=duration_s)
        traffic = Traffic(scenario.profile, scenario.traffic(), bin_s=BIN_S)
        with stages.stage("kube-controller-manager, kube-scheduler, and a fake kubelet with 16 GPUs"):
            plane.start_controllers()
            await stack.enter_async_context(nodes(plane, traffic))
            await plane.nodes_ready()
        place = Place(plane, api, policy.target.namespace, policy.target.deployment)
        with stages.stage(f"a namespace with a ServiceAccount, its Role and a Lease; the Deployment {place}"):
            await place.fill(scenario, rights_of(policy))
        file = plane.folder / "policy.yaml"
        file.write_text(served_policy(policy_text, plane.port))
        daemons: list[Daemon] = []
        stack.push_async_callback(end, daemons)
        with stages.stage("autoscaler run --lease, live, as that account: a leads"):
            daemons.append(await start_daemon("a", place, file, record))
            await plane.until(leading(daemons[0]), "leader")
        if duration_s >= TAKEOVER_FROM_S:
            daemons.append(await start_daemon("b", place, file, record))  # not before: it might lead first
        with stages.stage("the first pod has loaded its model"):
            await plane.until(place.is_ready, "pod that is ready")
        traffic.begin()
        begun.set()
        demo = ClusterDemo(place, policy, scenario, traffic, daemons, version)
        console.print(f"\n{demo.made_of()} It takes {in_words(duration_s)}.\n", soft_wrap=True, highlight=False)
        pump = asyncio.create_task(traffic.run())
        try:
            await demo.watch(console, stop)
        finally:
            pump.cancel()
        demo.summary = demo.sum_up()  # before the kubelet ends, and with it what is in flight
        await end(daemons)
        demo.look()
        demo.written = written(await plane.audit(), demo.user)
    return demo


# --- the run --------------------------------------------------------------------------------------------------------


class ClusterDemo:
    """The run while it lasts, and what came of it.

    Attributes:
        written: what the daemons' account wrote.
        summary: how the requests fared.
        story: what happened beside the decisions.
        pod_seconds: how long pods were there, all together.
    """

    def __init__(
        self,
        place: Place,
        policy: Policy,
        scenario: Scenario,
        traffic: Traffic,
        daemons: list[Daemon],
        version: str,
    ) -> None:
        self.daemons = daemons
        self.user = place.user
        self.began = time.time()
        self.scenario = scenario.moved_to(self.began)
        self.collector = TickCollector()
        self.story: list[Event] = []
        self.pod_seconds = 0.0
        self.written = written((), place.user)
        self.summary: RunSummary | None = None
        self._plane, self._policy, self._traffic, self._version = place.plane, policy, traffic, version
        self._leader = 0
        self._killed_at = self._led_at = 0.0
        self._told_memory = False
        self._screen: Screen | None = None

    async def watch(self, console: Console, stop: asyncio.Event) -> None:
        """Show it until its time is over or `stop` is set."""
        screen = Screen(
            console,
            self._policy,
            began=self.began,
            duration_s=self.scenario.duration_s,
            line_s=10.0,
            clock="%H:%M:%S",
            more=self._rows,
        )
        audited = 0.0
        with screen:
            self._screen = screen
            while not stop.is_set() and self._traffic.at < self.scenario.duration_s:
                if self._traffic.at - audited >= AUDIT_S:
                    audited = self._traffic.at
                    self.written = written(self._plane.audited(), self.user)
                self.look()
                self.act()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), LOOK_S)
            self.look()
            self._screen = None

    def look(self) -> None:
        """Take in what the daemons recorded; only the ticks of the one that leads, or is next, count."""
        for number, daemon in enumerate(self.daemons):
            for snapshot, decision, outcome in daemon.follower.new():
                last = self.collector.rows[-1].at if self.collector.rows else self.began
                if number != self._leader or snapshot.at <= last:
                    continue
                self.collector.tick(self._policy.name, snapshot, decision, outcome, 0.0)
                self.pod_seconds += len(snapshot.target.pods) * (snapshot.at - last)
                if self._screen is not None:
                    self._screen.tick(self._policy.name, snapshot, decision, outcome, 0.0)

    # --- the takeover -----------------------------------------------------------------------------------------------

    def act(self) -> None:
        """Kill the leader when it is time, and notice who follows. Raises EndedError when one ended by itself."""
        self.daemons[self._leader].process.check()
        if len(self.daemons) == 1:
            return
        if not self._killed_at:
            self.daemons[1].process.check()
            if is_time_to_kill(self.collector.rows, self._traffic.at, self.scenario):
                self.daemons[0].process.kill()
                self.look()
                self._leader, self._killed_at = 1, time.time()
                self._tell("the leader, a, is killed (SIGKILL)", self._killed_at)
        elif not self._led_at and self.daemons[1].has_said("leading"):
            self._led_at = time.time()
            self._tell(f"b leads, {self._led_at - self._killed_at:.0f} s later", self._led_at)
        elif not self._told_memory and self.daemons[1].follower.memory is not None:
            self._told_memory = True
            self._recalled(self.daemons[1].follower.memory)

    def _recalled(self, memory: Memory) -> None:
        acted = max(memory.last_up_at or 0.0, memory.last_down_at or 0.0)
        if acted and self._screen is not None:
            until = self._screen.clock(acted + self._policy.up_cooldown_s)
            text = f"  from the Lease b knows of a's step at {self._screen.clock(acted)}: no step up before {until}"
            self._screen.say(text)

    def _tell(self, text: str, at: float) -> None:
        self.story.append(Event(at=at, text=text))
        if self._screen is not None:
            self._screen.say(f"{self._screen.clock(at)} ● {text}")

    def _rows(self) -> Iterator[tuple[str, str]]:
        """Yield what the panel shows below the decision."""
        rate, in_flight = self.scenario.rate(self._traffic.at), self._traffic.in_flight
        yield "traffic", f"about {rate:.0f} requests/s, {in_flight} in flight"
        yield "daemons", self._said_of_daemons()
        for line in judge(self.written, self._policy, [daemon.credential for daemon in self.daemons]).lines[:2]:
            yield "audit log", line

    def _said_of_daemons(self) -> str:
        if len(self.daemons) == 1:
            return "a leads"
        if not self._killed_at:
            return "a leads, b stands by"
        return "a is dead, b leads" if self._led_at else "a is dead, b waits until the Lease has run out"

    # --- what came of it --------------------------------------------------------------------------------------------

    def made_of(self) -> str:
        """Return what is real and what is not."""
        return (
            f"Real: etcd, kube-apiserver, kube-controller-manager and kube-scheduler {self._version}, the daemon as a "
            f"process under a ServiceAccount, and all that it writes. Not real: the kubelet is a fake, and the engines "
            f"({self.scenario.profile.name}) and their traffic are simulated, in real time."
        )

    def sum_up(self) -> RunSummary:
        """Return what the run came to so far."""
        traffic, slo = self._traffic, self._policy.slo
        ttft_s = slo.ttft.seconds if slo.ttft else 2.0
        tpot_s = slo.itl.seconds if slo.itl else 0.1
        ledger, gpus = traffic.ledger, traffic.profile.gpus
        return RunSummary(
            started_at=self.began,
            duration_s=traffic.at,
            requests=len(ledger),
            attained=int(np.count_nonzero(ledger.attained(ttft_s, tpot_s))),
            failed=ledger.failed(),
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            gpus=gpus,
            gpu_hours=self.pod_seconds * gpus / HOUR,
            peak_replicas=max((row.ready for row in self.collector.rows), default=0),
            traffic=ledger.traffic(SPAN_S, traffic.at),
            bins=ledger.bins(ttft_s, tpot_s),
            traffic_span_s=SPAN_S,
        )


def is_time_to_kill(rows: list[TickRow], at: float, scenario: Scenario) -> bool:
    """Return whether the leader has had its time, `at` seconds into the run.

    That is soon after a step up, which the next leader then has to know of.
    """
    if at >= KILL_BY * scenario.duration_s:
        return True
    steps = [row.at - scenario.epoch for row in rows if row.acted and (row.acted_to or 0) > row.ordered]
    return any(KILL_FROM * scenario.duration_s <= step <= at - KILL_AFTER_S for step in steps)


class Findings(NamedTuple):
    """What the audit log came to, for people, and whether it is as it should be."""

    good: bool
    lines: tuple[str, ...]


def judge(seen: Written, policy: Policy, credentials: list[str]) -> Findings:
    """Return what is to be said of what the daemons wrote.

    Args:
        credentials: each daemon's token, in the order in which they lead.
    """
    low, high = policy.least_replicas, policy.most_replicas
    outside, hands = seen.outside(low, high), seen.hands()
    in_turn = [who for who, _ in hands] == [one for one in credentials if one in {who for who, _ in hands}]
    names = dict(zip(credentials, "ab", strict=False))
    bounds = f"all within {low} to {high}" if not outside else f"{len(outside)} OUTSIDE {low} to {high}"
    turns = ", then ".join(f"{some} by {names.get(who, who)}" for who, some in hands)
    count = len(seen.scalings)
    path = " → ".join(str(one.replicas) for one in seen.scalings) or "none"
    more = ", ".join(f"{count} to {resource}" for resource, count in sorted(seen.more.items())) or "none"
    changes = f"{count} change{'' if count == 1 else 's'} of replicas, {bounds}: {path}"
    lines = (
        f"{changes}; {turns}" if len(hands) > 1 else changes,
        f"other writes: {more}; {seen.refused} refused; others who moved the replicas: "
        + (", ".join(seen.others) or "nobody"),
    )
    return Findings(good=not outside and in_turn and not seen.refused and not seen.others, lines=lines)


def _print_summary(console: Console, summary: RunSummary) -> None:
    console.print(
        f"\n[bold]{in_words(summary.duration_s)}[/]: {summary.requests:,} requests, "
        f"{percent(summary.attainment, 2)} within their SLO, "
        f"{summary.failed:,} failed; up to {summary.peak_replicas} replicas",
        soft_wrap=True,
    )
