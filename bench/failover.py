"""`python -m bench failover [--kills 200]`: pairs of daemons that share a Lease, whose leader is killed, frozen or cut.

Each pair runs as two processes on a real control plane, over a Deployment of its own whose engines always ask for a
step, so that only the cooldown holds it. The API server's audit log judges: never two writers, every takeover within
the Lease's duration and two seconds, no two steps within a cooldown. Exit code 1 where that is not so.

A takeover needs answers: each call for the Lease is given up after a tenth of its duration. So the API server is asked
all the time how long it takes, and a late takeover during which it took longer is shown, and breaks no promise.

The nodes and the engines are fake (see `autoscaler.testbed`); the Leases, the writes and the processes are real.
"""

import argparse
import asyncio
import json
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP

import httpx
from rich.console import Console
from rich.table import Table

from autoscaler.actuators.deployment import RIGHTS as WRITES
from autoscaler.actuators.events import RIGHTS as TELLS
from autoscaler.lease import RELEASED_S
from autoscaler.lease import RIGHTS as ELECTS
from autoscaler.sources.cluster import RIGHTS as READS
from autoscaler.testbed.api import ApiError, Json
from autoscaler.testbed.plane import AuditEvent, Plane, running_plane
from tests.cluster.daemon import ENTRY, credential_of, environment
from tests.cluster.forwarder import Cut, Forwarder, running_forwarder
from tests.cluster.manifests import Place, deployment, eventually, grant, is_ready, new_place, policy

SPARE_S = 2.0
SLACK_S = 1.0
"""Of a cooldown, which counts from a decision; the audit log has the writes, of which the earlier may be the slower."""
LIMIT_S = 60.0
FEWEST, MOST = 1, 3
"""Replicas between which the load sends a target up and down, for ever."""
BUSY = {"rps": 5, "running": 64, "kv": 0.9, "waiting": 120}
CALM = {"rps": 5, "running": 1, "kv": 0.05, "waiting": 0}
FEED_S = 0.3
RULES = """\
  cooldown: {cooldown_s:g}s
  sizing: score
  score: {{weights: {{memory: 0.5, backlog: 0.5, latency: 0}}, warmUp: 0s, window: 5s}}
  scaleUp: {{maxStep: 1, stabilization: 0s, turn: 0s}}
  scaleDown: {{maxStep: 1, stabilization: 0s, horizonFactor: 0, turn: 0s}}
  evidence: {{restartWindow: 0s}}
  emergency: {{enabled: false}}
"""
BIN_S = 0.5
CALL_SHARE = 0.1
"""Of the Lease's duration, for one call."""
PROBE_S = 0.1


class Kind(StrEnum):
    """What befalls the leader."""

    KILLED = "killed"
    FROZEN = "frozen"
    SILENT = "cut off, silent"
    REFUSED = "cut off, refused"


class Phase(StrEnum):
    """When it does."""

    ANY = "any time"
    WRITE = "around a write"
    SAVE = "after a write"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How hard to try.

    Args:
        lease_s, cooldown_s: of the daemons.
    """

    kills: int = 200
    pairs: int = 7
    seed: int = 0
    lease_s: float = 8.0
    cooldown_s: float = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One that was done.

    Attributes:
        namespace: of the pair.
        at: epoch seconds.
        victim: the credential of the process that it was done to.
    """

    namespace: str
    kind: Kind
    phase: Phase
    at: float
    victim: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the audit log says.

    Attributes:
        takeovers: of each fault that befell the holder, from it to the next one's acquisition of the Lease [s].
        slow: of these, late ones during which the API server was slow.
        steps: scale writes that were applied. refused: those that were not.
        gaps: between two applied steps in a row, of whatever process [s].
        handed_over: of these, between steps of two processes.
        violations: of what is promised, a line each.
    """

    takeovers: tuple[tuple[Fault, float], ...]
    slow: int
    steps: int
    refused: int
    gaps: tuple[float, ...]
    handed_over: tuple[float, ...]
    violations: tuple[str, ...]


# --- the judge ------------------------------------------------------------------------------------------------------


def judge(
    events: Iterable[AuditEvent],
    faults: Sequence[Fault],
    *,
    lease_s: float,
    cooldown_s: float,
    slow_at: Sequence[tuple[float, float]] = (),
) -> Verdict:
    """Return what the requests of all pairs say of the promises.

    Args:
        slow_at: from when to when [epoch s] the API server took too long for an answer.
    """
    pairs: dict[str, list[AuditEvent]] = {fault.namespace: [] for fault in faults}
    for event in sorted(events, key=lambda one: one.at):
        if event.namespace in pairs and event.verb == "patch":
            pairs[event.namespace].append(event)
    acquired = {name: [one for one in found if acquires(one)] for name, found in pairs.items()}
    takeovers, violations, slow = [], [], 0
    for fault in faults:
        holders = [one.credential for one in acquired[fault.namespace] if time_of(one) <= fault.at]
        if holders[-1:] != [fault.victim]:
            continue  # it had just lost the Lease by itself, and says so a moment later
        after = [one for one in acquired[fault.namespace] if time_of(one) > fault.at]
        took_s = next((time_of(one) - fault.at for one in after if one.credential != fault.victim), float("inf"))
        takeovers.append((fault, took_s))
        if took_s <= lease_s + SPARE_S:
            continue
        if any(start < fault.at + took_s and end > fault.at for start, end in slow_at):
            slow += 1
        else:
            violations.append(f"{fault.namespace}: taken over {took_s:.2f} s after it was {fault.kind} ({fault.phase})")
    gaps, handed_over = [], []
    for name, found in pairs.items():
        violations += two_writers(name, found)
        steps = [one for one in found if is_step(one) and one.wrote]
        for before, after_it in pairwise(steps):
            gap_s = time_of(after_it) - time_of(before)
            gaps.append(gap_s)
            if before.credential != after_it.credential:
                handed_over.append(gap_s)
            if gap_s < cooldown_s - SLACK_S:
                violations.append(f"{name}: a step {gap_s:.2f} s after the last one, cooldown {cooldown_s:g} s")
    writes = [one for found in pairs.values() for one in found if is_step(one)]
    return Verdict(
        takeovers=tuple(takeovers),
        slow=slow,
        steps=sum(one.wrote for one in writes),
        refused=sum(not one.wrote for one in writes),
        gaps=tuple(gaps),
        handed_over=tuple(handed_over),
        violations=tuple(violations),
    )


def two_writers(name: str, events: Sequence[AuditEvent]) -> list[str]:
    """Return the steps that were not, from their arrival to their answer, of whoever held the Lease alone."""
    found = []
    acquisitions = [one for one in events if acquires(one)]
    for step in (one for one in events if is_step(one) and one.wrote):
        before = [one for one in acquisitions if time_of(one) <= time_of(step)]
        meanwhile = [one for one in acquisitions if time_of(step) < time_of(one) <= step.answered_at]
        holders = {one.credential for one in (*before[-1:], *meanwhile)}
        if holders != {step.credential}:
            held = " and ".join(sorted(holders)) or "nobody"
            found.append(f"{name}: {step.credential} wrote at {step.at}, and {held} held the Lease")
    return found


def acquires(event: AuditEvent) -> bool:
    """Return whether a request made its sender the holder of a Lease."""
    sent = event.sent if isinstance(event.sent, dict) else {}
    return event.resource == "leases" and event.wrote and "acquireTime" in (sent.get("spec") or {})


def is_step(event: AuditEvent) -> bool:
    """Return whether a request asks for other replicas."""
    return event.resource == "deployments/scale"


def time_of(event: AuditEvent) -> float:
    """Return when the API server received a request, epoch seconds."""
    return datetime.fromisoformat(event.at).timestamp()


# --- the daemons ----------------------------------------------------------------------------------------------------


@dataclass
class Daemon:
    """One process.

    Attributes:
        credential: of its requests in the audit log.
        leading: whether it says so; `leading_at`, when it said that.
        ticks: decisions that it logged. stepped_at: of its last applied one.
    """

    process: asyncio.subprocess.Process
    network: Forwarder
    credential: str
    leading: bool = False
    leading_at: str = ""
    ticks: int = 0
    decided_at: float = 0.0
    stepped_at: float = 0.0

    async def read(self) -> None:
        """Take note of what it logs, until it ends."""
        assert self.process.stdout is not None
        async for raw in self.process.stdout:
            line = json.loads(raw)
            event = line["event"]
            if event in ("leading", "standing_by"):
                self.leading, self.leading_at = event == "leading", line["timestamp"]
            elif event == "decision":
                self.ticks += 1
                self.decided_at = line["at"]
                if line["outcome"] == "applied":
                    self.stepped_at = line["at"]
        self.leading = False


@dataclass
class Pair:
    """Two daemons over one Deployment, and what is done to them."""

    place: Place
    settings: Settings
    rng: random.Random
    folder: Path
    stack: AsyncExitStack
    group: asyncio.TaskGroup
    rules: Path
    daemons: list[Daemon] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    _last: tuple[bool, tuple[str, ...]] = (True, ())

    # --- processes --------------------------------------------------------------------------------------------------

    async def start(self) -> Daemon:
        """Start a daemon with a token and a network of its own."""
        plane, namespace = self.place.plane, self.place.namespace
        network = await self.stack.enter_async_context(running_forwarder(plane))
        token = await plane.token_for(namespace, "subject")
        kubeconfig = network.kubeconfig_for(plane, token, self.folder / f"{secrets.token_hex(4)}.kubeconfig")
        words = ("--lease", f"{namespace}/autoscaler", "--lease-duration", f"{self.settings.lease_s:g}s")
        process = await asyncio.create_subprocess_exec(
            # Whatever ends this process ends them.
            *("setpriv", "--pdeathsig", "KILL", "--", *ENTRY, str(self.rules), "--kubeconfig", str(kubeconfig)),
            *("--listen", "127.0.0.1:0", "--log-format", "json", *words),
            stdout=asyncio.subprocess.PIPE,
            env=environment(),
            limit=2**20,
        )
        daemon = Daemon(process, network, credential_of(token))
        self.stack.push_async_callback(end, process)
        self.daemons.append(daemon)
        self.group.create_task(daemon.read())
        return daemon

    @property
    def leader(self) -> Daemon | None:
        """Whoever says that it leads, the last of them: one that is frozen has not yet said that it does not."""
        return max((one for one in self.daemons if one.leading), key=lambda one: one.leading_at, default=None)

    async def settled(self) -> Daemon:
        """Return the leader once the other stands by, with all that it needs to take over."""

        async def is_so() -> bool:
            return self.leader is not None and all(one.ticks for one in self.daemons)

        await eventually(is_so, f"leader and standby in {self.place.namespace}", LIMIT_S)
        leader = self.leader
        assert leader is not None
        return leader

    # --- load -------------------------------------------------------------------------------------------------------

    async def feed(self) -> None:
        """Have the engines ask for more replicas until there are enough, then for fewer, for ever."""
        up = True
        while True:
            with suppress(httpx.HTTPError):  # a pod that has just gone
                up = await self._tell(up)
            await asyncio.sleep(FEED_S)

    async def _tell(self, up: bool) -> bool:
        replicas = (await self.place.read())["spec"]["replicas"]
        up = replicas < MOST if up else replicas <= FEWEST
        pods = [pod for pod in await self.place.list_pods() if is_ready(pod)]
        told = up, tuple(pod["metadata"]["uid"] for pod in pods)
        if told != self._last:
            await self.place.tell(pods, **(BUSY if up else CALM))
            self._last = told
        return up

    # --- faults -----------------------------------------------------------------------------------------------------

    async def suffer(self, kind: Kind, phase: Phase) -> None:
        """Do one thing to the leader, and return once another leads and there are two again."""
        await self.settled()
        await self._reach(phase)
        victim = await self.settled()
        fault = Fault(namespace=self.place.namespace, kind=kind, phase=phase, at=time.time(), victim=victim.credential)
        self.faults.append(fault)
        if kind is Kind.KILLED:
            victim.process.send_signal(SIGKILL)
            self.daemons.remove(victim)
            await self.start()
        elif kind is Kind.FROZEN:
            victim.process.send_signal(SIGSTOP)
        else:
            victim.network.cut(Cut.SILENT if kind is Kind.SILENT else Cut.REFUSED)
        others = [one for one in self.daemons if one is not victim]

        async def is_taken_over() -> bool:
            return any(one.leading for one in others)

        with suppress(TimeoutError):  # which the judge will see
            await eventually(is_taken_over, "successor", self.settings.lease_s + 5.0 * SPARE_S)
        if kind is not Kind.KILLED:
            await asyncio.sleep(fault.at + self.settings.lease_s + SPARE_S * self.rng.uniform(0.5, 2.0) - time.time())
            await self._restore(victim, kind)

    async def _restore(self, victim: Daemon, kind: Kind) -> None:
        """Let it go on, and return once it decides again."""
        if kind is Kind.FROZEN:
            victim.process.send_signal(SIGCONT)
        else:
            victim.network.heal()
        ticks = victim.ticks

        async def decides() -> bool:
            return victim.ticks >= ticks + 2

        await eventually(decides, f"daemon that decides again after it was {kind}", LIMIT_S)

    async def _reach(self, phase: Phase) -> None:
        """Return at a moment of that kind."""
        leader, cooldown_s = await self.settled(), self.settings.cooldown_s
        if phase is Phase.ANY:
            await asyncio.sleep(self.rng.uniform(0.0, cooldown_s))
        elif phase is Phase.WRITE:
            # The first tick after the cooldown, as the ticks of the last seconds have it.
            due = max(leader.stepped_at + cooldown_s, time.time())
            tick = leader.decided_at + max(1.0, -(-(due - leader.decided_at) // 1.0))
            await asyncio.sleep(tick + self.rng.uniform(-0.02, 0.08) - time.time())
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(2.0 * cooldown_s):
                    await self._stepped()

    async def _stepped(self) -> None:
        """Return as soon as the API server tells of a change of the replicas."""
        known: int | None = None
        async with aclosing(self.place.api.follow(self.place.deployments)) as events:
            async for event in events:
                items = event.object["items"] if event.kind == "SYNC" else [event.object]
                for item in items:
                    if known not in (None, item["spec"]["replicas"]):
                        return
                    known = item["spec"]["replicas"]


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill a process that has not ended, and wait for its end."""
    if process.returncode is None:
        process.kill()
    await process.wait()


# --- a run ----------------------------------------------------------------------------------------------------------


async def failover(plane: Plane, folder: Path, settings: Settings) -> Verdict:
    """Return what the audit log says after so many faults, spread over the pairs."""
    deck = _deck(settings)
    faults: list[Fault] = []
    async with plane.api() as api, AsyncExitStack() as stack:
        names = [f"failover-{secrets.token_hex(3)}-{number}" for number in range(settings.pairs)]
        places = [await new_place(plane, api, name) for name in names]
        slow_at: list[tuple[float, float]] = []
        probe = asyncio.create_task(_probe(places[0], CALL_SHARE * settings.lease_s, slow_at))
        try:
            async with asyncio.TaskGroup() as group:
                for number, place in enumerate(places):
                    share = deck[number :: settings.pairs]
                    group.create_task(_run(place, settings, number, folder, share, faults))
        finally:
            probe.cancel()
        for name in names:
            stack.push_async_callback(api.request, "DELETE", f"/api/v1/namespaces/{name}")
        events = await plane.audit()
    return judge(events, faults, lease_s=settings.lease_s, cooldown_s=settings.cooldown_s, slow_at=slow_at)


async def _probe(place: Place, limit_s: float, slow_at: list[tuple[float, float]]) -> None:
    """Ask for a Lease again and again, for ever, and note from when to when an answer took longer than that."""
    while True:
        asked_at = time.time()
        with suppress(ApiError):  # as long as there is none
            await place.api.get(f"/apis/coordination.k8s.io/v1/namespaces/{place.namespace}/leases/autoscaler")
        if time.time() - asked_at > limit_s:
            slow_at.append((asked_at, time.time()))
        await asyncio.sleep(PROBE_S)


def _deck(settings: Settings) -> list[tuple[Kind, Phase]]:
    """Return what is to be done, each kind and phase equally often, in the seed's order."""
    both = [(kind, phase) for kind in Kind for phase in Phase]
    rng = random.Random(settings.seed)
    deck: list[tuple[Kind, Phase]] = []
    while len(deck) < settings.kills:
        deck += rng.sample(both, len(both))
    return deck[: settings.kills]


async def _run(
    place: Place,
    settings: Settings,
    number: int,
    folder: Path,
    deck: Sequence[tuple[Kind, Phase]],
    faults: list[Fault],
) -> None:
    async with _pair(place, settings, number, folder) as pair:
        for kind, phase in deck:
            await pair.suffer(kind, phase)
            faults.append(pair.faults[-1])
        await asyncio.sleep(settings.cooldown_s)  # for the step that comes next


@asynccontextmanager
async def _pair(place: Place, settings: Settings, number: int, folder: Path) -> AsyncIterator[Pair]:
    """Run two daemons over a Deployment, and the load on it, while the block runs."""
    await grant(place, READS | WRITES | TELLS | ELECTS)
    await place.api.request("POST", f"/apis/coordination.k8s.io/v1/namespaces/{place.namespace}/leases", RELEASED)
    await place.create(deployment(replicas=1, gpus=0, fake={"cold-start-seconds": 1}))
    await place.until_ready(1)
    home = folder / place.namespace
    home.mkdir()
    more = RULES.format(cooldown_s=settings.cooldown_s)
    rules = policy(home, place.plane, place.namespace, replicas="{min: 1, max: 5}", more=more)
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        rng = random.Random(f"{settings.seed} {number}")
        pair = Pair(place, settings, rng, home, stack, group, rules)
        feed = group.create_task(pair.feed())
        for _ in range(2):
            await pair.start()
        try:
            yield pair
        finally:
            feed.cancel()


RELEASED: Json = {
    "apiVersion": "coordination.k8s.io/v1",
    "kind": "Lease",
    "metadata": {"name": "autoscaler"},
    "spec": {"holderIdentity": "", "leaseDurationSeconds": RELEASED_S},
}
"""As a leader leaves it that has ended well, so that the first need not wait."""


# --- the report -----------------------------------------------------------------------------------------------------


def tables(verdict: Verdict, settings: Settings) -> list[Table]:
    """Return the takeovers by kind of fault, how they are distributed, and the steps."""
    by_kind = Table(
        "the leader was", "times", "median", "p99", "longest", title="From the fault to the next leader [s]"
    )
    every = [seconds for _, seconds in verdict.takeovers]
    rows = [(str(kind), [took for fault, took in verdict.takeovers if fault.kind is kind]) for kind in Kind]
    for name, seconds in (*rows, ("any of these", every)):
        if seconds:
            figures = (statistics.median(seconds), quantile(seconds, 0.99), max(seconds))
            by_kind.add_row(name, str(len(seconds)), *(f"{figure:.2f}" for figure in figures))
    spread = Table("from [s]", "takeovers", "", title=f"At most {settings.lease_s + SPARE_S:g} s are promised")
    bins = Counter(int(min(seconds, settings.lease_s + SPARE_S) // BIN_S) for seconds in every)
    for number in range(min(bins, default=0), max(bins, default=-1) + 1):
        share = 40 * bins[number] / max(bins.values())
        spread.add_row(f"{number * BIN_S:.1f}", str(bins[number]), "#" * round(share))
    steps = Table("steps", "refused", "shortest gap", "of two processes", title=f"Cooldown {settings.cooldown_s:g} s")
    gaps = (f"{min(some):.2f}" if some else "" for some in (verdict.gaps, verdict.handed_over))
    steps.add_row(str(verdict.steps), str(verdict.refused), *gaps)
    return [by_kind, spread, steps]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that so large a share of them is not above."""
    ranked = sorted(values)
    return ranked[max(0, -(-int(share * 1e6) * len(ranked) // 10**6) - 1)]


def main(arguments: Sequence[str]) -> int:
    """Run it, print tables, and return the exit code."""
    usual = Settings()
    parser = argparse.ArgumentParser(prog="python -m bench failover", description=__doc__)
    parser.add_argument("--kills", type=int, default=usual.kills)
    parser.add_argument("--pairs", type=int, default=usual.pairs)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args(arguments)
    seed = random.randrange(10**6) if options.seed is None else options.seed
    settings = Settings(kills=options.kills, pairs=options.pairs, seed=seed)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(f"seed {seed}: {settings.kills} faults over {settings.pairs} pairs, Lease {settings.lease_s:g} s")
    started, call_s = time.monotonic(), CALL_SHARE * settings.lease_s

    async def run() -> Verdict:
        with tempfile.TemporaryDirectory() as folder:
            async with running_plane() as plane:
                return await failover(plane, Path(folder), settings)

    verdict = asyncio.run(run())
    console.print(*tables(verdict, settings), sep="\n")
    if verdict.slow:
        console.print(f"{verdict.slow} takeovers were late while the API server took over {call_s:g} s for an answer")
    console.print(f"{len(verdict.violations)} violations, {time.monotonic() - started:.0f} s")
    for violation in verdict.violations:
        console.print(violation)
    return 1 if verdict.violations else 0
