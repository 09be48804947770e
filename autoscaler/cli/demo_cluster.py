"""`autoscaler demo --cluster`: the daemon as a process against a real control plane on loopback, and simulated engines.

Real are etcd, the API server with its audit log, the controllers, the scheduler, the ServiceAccount with its Role, the
daemons and all that they write. The kubelet is a fake and the engines are simulated, exactly and in real time.
"""

import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import aiohttp
import numpy as np
import yaml
from rich.console import Console

from autoscaler import __version__
from autoscaler.cli.doctor import needed_rights
from autoscaler.cli.replay import command as replay_command
from autoscaler.cli.screen import Screen
from autoscaler.core.memory import Memory
from autoscaler.core.policy import Policy
from autoscaler.core.types import Decision, Outcome, Snapshot
from autoscaler.errors import AutoscalerError
from autoscaler.lease import LEASES, RELEASED_S
from autoscaler.lease import RIGHTS as ELECTS
from autoscaler.policy_file import policy_from_plain
from autoscaler.replay import Replayer
from autoscaler.sim.fleet import HOUR, RunSummary
from autoscaler.sim.report import TickCollector, TickRow, in_words, write_report
from autoscaler.sim.scenario import Event, Scenario, rush_scenario
from autoscaler.testbed.accounts import Right, grant
from autoscaler.testbed.api import Api, ApiError, Json
from autoscaler.testbed.audit import Written, written
from autoscaler.testbed.kubelet import PREFIX, FakeKubelet
from autoscaler.testbed.kubelet import Settings as Nodes
from autoscaler.testbed.plane import (
    COMMANDS,
    GPUS,
    NODES,
    EndedError,
    MissingToolsError,
    Plane,
    Process,
    find_tools,
    free_network,
    new_plane,
)
from autoscaler.testbed.simulated import Traffic
from autoscaler.trace import MemoryLine, PolicyLine, read_trace

POLICY = Path(__file__).with_name("demo-cluster.yaml")
ACCOUNT = LEASE = "autoscaler"
ENTRY = (sys.executable, "-P", "-c", "from autoscaler.cli import main; main()", "run")
LEFT_OUT = frozenset({"KUBECONFIG", "KUBERNETES_SERVICE_HOST", "DRY_RUN", "LOG_LEVEL"})
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

Tick = tuple[Snapshot, Decision, Outcome]


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
            await stack.enter_async_context(_nodes(plane, traffic))
            await plane.nodes_ready()
        place = Place(plane, api, policy.target.namespace, policy.target.deployment)
        with stages.stage(f"a namespace with a ServiceAccount, its Role and a Lease; the Deployment {place}"):
            await place.fill(scenario, rights_of(policy))
        file = plane.folder / "policy.yaml"
        file.write_text(served_policy(policy_text, plane.port))
        daemons: list[Daemon] = []
        stack.push_async_callback(_end, daemons)
        with stages.stage("autoscaler run --lease, live, as that account: a leads"):
            daemons.append(await _daemon("a", place, file, record))
            await plane.until(_leads(daemons[0]), "leader")
        if duration_s >= TAKEOVER_FROM_S:
            daemons.append(await _daemon("b", place, file, record))  # not before: it might lead first
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
        await _end(daemons)
        demo.look()
        demo.written = written(await plane.audit(), demo.user)
    return demo


@asynccontextmanager
async def _nodes(plane: Plane, traffic: Traffic) -> AsyncIterator[None]:
    """Run a fake kubelet here, whose pods are simulated engines that share the traffic."""
    nodes = Nodes(
        nodes=tuple(f"gpu-{number}" for number in range(NODES)),
        gpus=GPUS,
        network=free_network(),
        port=plane.port,
        pull_s=0.5,
    )
    async with FakeKubelet(plane.api(), nodes, engine=traffic.engine, told=lambda **_: None):
        yield


@dataclass(frozen=True, slots=True)
class Place:
    """Where the Deployment is."""

    plane: Plane
    api: Api
    namespace: str
    deployment: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.deployment}"

    @property
    def user(self) -> str:
        """The daemons' account."""
        return f"system:serviceaccount:{self.namespace}:{ACCOUNT}"

    async def fill(self, scenario: Scenario, rights: Collection[Right]) -> None:
        """Make the account with its rights, the Lease, and what there is to scale."""
        await self.api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}})
        await self.plane.until(self._has_account, "account for pods")
        await grant(self.api, self.namespace, ACCOUNT, rights)
        # As a leader leaves it that has ended well, so that the first need not wait.
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": LEASE}}
        spec = {"holderIdentity": "", "leaseDurationSeconds": RELEASED_S}
        await self.api.request("POST", LEASES.format(namespace=self.namespace), {**lease, "spec": spec})
        manifest = deployment_of(self.deployment, scenario)
        await self.api.request("POST", self._deployments, manifest, query={"fieldValidation": "Strict"})

    async def is_ready(self) -> bool:
        """Return whether a pod of the Deployment is ready."""
        status = (await self.api.get(f"{self._deployments}/{self.deployment}"))["status"]
        return bool(status.get("readyReplicas"))

    @property
    def _deployments(self) -> str:
        return f"/apis/apps/v1/namespaces/{self.namespace}/deployments"

    async def _has_account(self) -> bool:
        return bool(await self.api.items(f"/api/v1/namespaces/{self.namespace}/serviceaccounts"))


def rights_of(policy: Policy) -> frozenset[Right]:
    """Return what a daemon of that policy asks of the API server, which is what deploy/ grants it."""
    marking = policy.scale_down.victims.order != "cluster"
    return needed_rights(acting=True, marking=marking) | ELECTS


def deployment_of(name: str, scenario: Scenario) -> Json:
    """Return the manifest of a Deployment of engines."""
    profile = scenario.profile
    limits = {"max-num-seqs": profile.max_num_seqs, "max-num-batched-tokens": profile.max_num_batched_tokens}
    container = {
        "name": "vllm",
        "image": "vllm/vllm-openai",
        "args": [word for key, limit in limits.items() for word in (f"--{key}", str(limit))],
        "resources": {"limits": {"nvidia.com/gpu": str(profile.gpus)}},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": scenario.replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {
                    "labels": {"app": name},
                    "annotations": {f"{PREFIX}cold-start-seconds": f"{profile.cold_start_s:g}"},
                },
                "spec": {"terminationGracePeriodSeconds": 60, "containers": [container]},
            },
        },
    }


def served_policy(text: str, port: int) -> str:
    """Return a policy file that reads the engines' pages at this port, and nothing else."""
    document = yaml.safe_load(text)
    signals = document["spec"].get("signals") or {}
    vllm = {key: value for key, value in (signals.get("vllm") or {}).items() if key != "prometheus"}
    document["spec"]["signals"] = {"vllm": vllm | {"port": port}}
    return yaml.safe_dump(document, sort_keys=False)


# --- the daemons ----------------------------------------------------------------------------------------------------


class Follower:
    """What a daemon has recorded, decided anew tick by tick: that is its own decision, to the bit.

    Attributes:
        memory: what the daemon took over from the Lease, once it has.
    """

    def __init__(self, path: Path) -> None:
        self.memory: Memory | None = None
        self._path = path
        self._size = self._seen = 0
        self._replayer: Replayer | None = None

    def new(self) -> list[Tick]:
        """Return the ticks since the last look.

        The file is read from its start each time it has grown: a demo's takes some milliseconds.
        """
        size = self._path.stat().st_size if self._path.exists() else 0
        if size == self._size:
            return []
        self._size = size
        ticks: list[Tick] = []
        with read_trace(self._path, decisions=False) as reader:
            lines = list(reader)
        for line in lines[self._seen :]:
            if isinstance(line, PolicyLine):
                self._replayer = Replayer(policy_from_plain(line.plain))
            elif self._replayer is not None and isinstance(line, MemoryLine):
                self.memory = line.memory
                self._replayer.recall(line.memory, line.at)
            elif self._replayer is not None and not isinstance(line, MemoryLine):
                decision = self._replayer.tick(line.snapshot, line.outcome).decision
                ticks += [(line.snapshot, decision, line.outcome)] if decision is not None else []
        self._seen = len(lines)
        return ticks


@dataclass(frozen=True, slots=True)
class Daemon:
    """One `autoscaler run`, with the token that it writes by."""

    name: str
    process: Process
    recording: Path
    follower: Follower
    credential: str

    def has_said(self, event: str) -> bool:
        """Return whether its log has a line of that event."""
        lines = self.process.log.read_text().splitlines() if self.process.log.exists() else []
        return any(json.loads(line)["event"] == event for line in lines if line[:1] == "{" and line[-1:] == "}")


def token_id(token: str) -> str:
    """Return the id that a ServiceAccount's token says it has."""
    payload = token.split(".")[1]
    content = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    return str(content["jti"])


async def _daemon(name: str, place: Place, policy: Path, record: Path) -> Daemon:
    """Start a daemon with a token of its own."""
    plane = place.plane
    token = await plane.token_for(place.namespace, ACCOUNT)
    recording = recording_of(record, name)
    recording.unlink(missing_ok=True)
    words = {
        "--kubeconfig": plane.kubeconfig_for(token, plane.folder / f"daemon-{name}.kubeconfig"),
        "--lease": f"{place.namespace}/{LEASE}",
        "--record": recording,
        "--listen": "127.0.0.1:0",
        "--log-format": "json",
        "--log-level": "info",
    }
    flat = [str(word) for pair in words.items() for word in pair]
    environ = {key: value for key, value in os.environ.items() if key not in LEFT_OUT}
    process = Process(f"daemon-{name}", (*ENTRY, str(policy), *flat), plane.folder, environ)
    process.start()
    return Daemon(name, process, recording, Follower(recording), f"JTI={token_id(token)}")


def recording_of(record: Path, name: str) -> Path:
    """Return the file that a daemon records into: the leader's is the one that was asked for."""
    if name == "a":
        return record
    stem, dot, suffix = record.name.partition(".")
    return record.with_name(f"{stem}-{name}{dot}{suffix}")


def _leads(daemon: Daemon) -> Callable[[], Awaitable[bool]]:
    async def leads() -> bool:
        daemon.process.check()
        return daemon.has_said("leading")

    return leads


async def _end(daemons: Iterable[Daemon]) -> None:
    for daemon in daemons:
        await daemon.process.stop()


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
    low, high = policy.replicas.min, policy.replicas.max
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
    share = "-" if summary.attainment is None else f"{100.0 * summary.attainment:.2f} %"
    console.print(
        f"\n[bold]{in_words(summary.duration_s)}[/]: {summary.requests:,} requests, {share} within their SLO, "
        f"{summary.failed:,} failed; up to {summary.peak_replicas} replicas",
        soft_wrap=True,
    )
