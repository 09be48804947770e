"""A fault's trial: a live daemon at work, what it must leave alone beside its target, and the verdict afterwards."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoscaler.actuators.deployment import RIGHTS as WRITES
from autoscaler.actuators.events import RIGHTS as TELLS
from autoscaler.sources.cluster import RIGHTS as READS
from autoscaler.testbed.api import Json
from autoscaler.testbed.plane import AuditEvent
from tests.cluster.daemon import Daemon, running_daemon
from tests.cluster.judge import SCALE, Blind, Rules, Scaling, complaints, intervals_until, is_sighted, silence
from tests.cluster.manifests import Place, deployment, eventually, grant, is_ready, of_deployment, policy

LIVE, DRY = "subject", "onlooker"
INTERVAL_S = 3.0
RECOVERY_INTERVALS = 2.0
READING_S = 0.5
"""For reading the pods' pages, after the tick has begun."""
GIVEN_UP_S = 30.0
COOLDOWN_S = 4.0

CALM = {"rps": 50, "running": 1, "kv": 0.05, "waiting": 0}
"""A load that asks for fewer replicas, and with all parts of the score known after one interval."""
BUSY = {"rps": 50, "running": 64, "kv": 0.97, "waiting": 500}
"""A load that asks for more, on as many replicas as there may be."""

EAGER = f"""\
  cooldown: {COOLDOWN_S:g}s
  sizing: score
  prediction: {{horizon: 1s}}
  score: {{warmUp: 0s, window: 6s}}
  scaleUp: {{maxStep: 1, stabilization: 0s, turn: 0s}}
  scaleDown: {{maxStep: 1, stabilization: {INTERVAL_S:g}s, horizonFactor: 0, turn: 0s}}
"""
"""As quick as a policy can be: what keeps it from a step is what it does not know, and not its own patience."""

HANDS_OFF = {"paused": "", "dry": "  dryRun: true\n"}
"""Policies beside the target's, and what makes them different. Each wants one more replica at every tick."""


@dataclass
class Trial:
    """A daemon under a fault.

    Attributes:
        live: the daemon that may write. dry: one with `--dry-run` on the same policies; None where none was asked for.
        blind: when nothing was to be known of the pods.
    """

    place: Place
    live: Daemon
    dry: Daemon | None
    rules: Mapping[str, Rules]
    blind: list[Blind] = field(default_factory=list)

    @property
    def target(self) -> str:
        """The Deployment that it may scale."""
        return f"{self.place.namespace}/chat"

    async def until(self, event: str = "decision", **fields: object) -> Json:
        """Return the live daemon's next line of an event about its target."""
        return await self.live.until(event, policy="chat", **fields)

    async def until_failed(self, reason: str) -> None:
        """Return once the target could not be read."""
        while not (await self.until("tick_failed", kind="target"))["detail"].startswith(f"{reason}:"):
            pass

    async def until_good(self) -> Json:
        """Return the next decision in which all is known."""
        while not is_sighted(line := await self.until()):
            pass
        return line

    async def until_all_serve(self) -> None:
        """Return once all pods of the target are ready, however many the daemon has left of them."""

        def serve(pods: list[Json]) -> bool:
            own = of_deployment(pods, "chat")
            return bool(own) and all(map(is_ready, own))

        await self.place.until(serve, "pods that are all ready")

    async def recovered(self, since: float) -> None:
        """Wait for a good decision after that time; fail if it came later than two intervals after."""
        async with asyncio.timeout(GIVEN_UP_S):
            try:
                while (line := await self.until_good())["at"] < since or line["outcome"] == "failed":
                    pass
            except TimeoutError as error:
                raise AssertionError(f"not recovered: {self._since(since)}") from error
        took = intervals_until(self.live.of("decision"), self.target, since, INTERVAL_S)
        assert took <= RECOVERY_INTERVALS + READING_S / INTERVAL_S, f"{took:.2f} intervals: {self._since(since)}"

    def _since(self, since: float) -> list[object]:
        """Return what the log has of the time from then on, in short."""
        keys = ("event", "timestamp", "at", "policy", "reason", "outcome", "gaps", "detail")
        late = [line for line in self.live.seen if line.get("at", since) >= since - INTERVAL_S]
        return [{key: line[key] for key in keys if key in line} for line in late[-12:]]

    @contextmanager
    def blindness(self) -> Iterator[None]:
        """What begins in the block hides the pods until it ends."""
        since = time.time()
        try:
            yield
        finally:
            self.blind.append(Blind(since, time.time()))

    async def requests(self, account: str = LIVE) -> list[AuditEvent]:
        """Return what an account asked of the API server so far."""
        user = f"system:serviceaccount:{self.place.namespace}:{account}"
        return [event for event in await self.place.plane.audit() if event.user == user]

    async def scalings(self) -> list[Scaling]:
        """Return what was written of the target's replicas, in order."""
        done = [Scaling.of(event) for event in await self.requests() if event.right == SCALE and event.wrote]
        return [one for one in done if one.target == self.target]

    async def steps(self) -> list[tuple[int, int]]:
        """Return the same, each from and to."""
        return [(one.seen, one.to) for one in await self.scalings()]

    async def until_steps(self, *steps: tuple[int, int]) -> None:
        """Return once these steps, and no others, were written."""
        await eventually(lambda: self._has_done(len(steps)), f"steps {steps}")
        done = await self.steps()
        assert done == list(steps), done

    async def _has_done(self, count: int) -> bool:
        return len(await self.steps()) >= count

    async def close(self) -> None:
        """End the daemons, and judge what they did."""
        daemons = [self.live] if self.dry is None else [self.live, self.dry]
        assert await asyncio.gather(*(daemon.end(signal.SIGTERM) for daemon in daemons)) == [0] * len(daemons)
        lines = self.live.of("decision")
        ended = {
            event.name: event.answered_at
            for event in await self.place.plane.audit()
            if (event.verb, event.resource, event.namespace) == ("delete", "pods", self.place.namespace) and event.wrote
        }
        assert_none(complaints(await self.requests(), lines, self.rules, self.blind, ended))
        assert_none(line for line in self.live.seen if line.get("kind") == "bug")
        for name in HANDS_OFF:
            # Else their silence says nothing.
            assert [line for line in lines if line["policy"] == name and _is_kept_back(line)], f"{name} wanted nothing"
        if self.dry is not None:
            assert_none(silence(await self.requests(DRY)))
            assert [line for line in self.dry.of("decision") if line["outcome"] == "simulated"]


def assert_none(found: Iterable[object]) -> None:
    """Fail with what was found."""
    shown = list(found)
    assert not shown, shown


def _is_kept_back(line: Json) -> bool:
    return bool(line["reason"] == "paused" or line["outcome"] == "simulated")


async def prepared(place: Place, folder: Path, *, bounds: tuple[int, int], more: str = EAGER) -> dict[str, Rules]:
    """Make the accounts, the Deployments to be left alone, and the policies in a new folder; return their rules."""
    await grant(place, READS | WRITES | TELLS, LIVE)
    await grant(place, READS | WRITES | TELLS, DRY)  # what keeps it from writing is not a missing right
    await asyncio.to_thread(folder.mkdir)
    low, high = bounds
    policy(
        folder,
        place.plane,
        place.namespace,
        replicas=f"{{min: {low}, max: {high}}}",
        more=more,
        interval=f"{INTERVAL_S:g}s",
    )
    rules = {f"{place.namespace}/chat": Rules(minimum=low, maximum=high, cooldown_s=COOLDOWN_S)}
    for name, words in HANDS_OFF.items():
        manifest: dict[str, Any] = deployment(name, replicas=1, gpus=0)
        if name == "paused":
            manifest["metadata"]["annotations"] = {"autoscaler/paused": "true"}
        await place.create(manifest)
        policy(
            folder,
            place.plane,
            place.namespace,
            name=name,
            replicas="{min: 2, max: 3}",
            more=words,
            interval=f"{INTERVAL_S:g}s",
        )
        rules[f"{place.namespace}/{name}"] = Rules(minimum=2, maximum=3, hands_off=True)
    return rules


@asynccontextmanager
async def trial(
    place: Place,
    folder: Path,
    *,
    bounds: tuple[int, int],
    more: str = EAGER,
    connect: Callable[[str, Path], Path] | None = None,
    with_dry: bool = False,
) -> AsyncIterator[Trial]:
    """Run a daemon on the target `chat`, which is there already, while the block runs, and judge it afterwards.

    Args:
        connect: writes the kubeconfig for a token; by default the plane's.
        with_dry: run a second one with `--dry-run`.
    """
    rules = await prepared(place, folder / "policies", bounds=bounds, more=more)
    connect = connect or place.plane.kubeconfig_for
    live, dry = [
        connect(await place.plane.token_for(place.namespace, account), folder / account) for account in (LIVE, DRY)
    ]
    async with running_daemon(live, folder / "policies") as daemon:
        if not with_dry:
            yield (one := Trial(place, daemon, None, rules))
            await one.close()
            return
        async with running_daemon(dry, folder / "policies", "--dry-run") as onlooker:
            yield (one := Trial(place, daemon, onlooker, rules))
            await one.close()
