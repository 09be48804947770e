"""What hangs on the Lease of a daemon: the gate, the Events, the end, and a bug in the election."""

import asyncio
import logging
from dataclasses import replace

import pytest
import structlog
from prometheus_client import CollectorRegistry
from structlog.testing import LogCapture

from autoscaler.actuators.gate import WRITE_S
from autoscaler.cli.leadership import Leadership, Timing, WhileLeading, forget
from autoscaler.core.types import Decision, Outcome, ScaleReplicas, Snapshot
from autoscaler.errors import TargetError
from autoscaler.lease import PREFIX, RELEASED_S, Elector
from autoscaler.telemetry import Telemetry
from tests.core.world import P0, START, World
from tests.fake_ports import ManualClock, WorldTarget, parts_of, settle
from tests.test_lease import FakeLeases

GROW = ScaleReplicas(seen=2, to=3)
MEMORY = '{"policy":"p0","version":1,"target":"serving/chat-a","at":1,"last_up_at":1}'


class Scene:
    """One process that elects, beside a target; its Lease was given up by whoever had it before."""

    def __init__(self, **annotations: str) -> None:
        self.clock = ManualClock()
        self.leases = FakeLeases()
        spec = {"holderIdentity": "", "leaseDurationSeconds": RELEASED_S}
        self.leases._store({"metadata": {"uid": "1", "annotations": annotations}, "spec": spec})
        self.registry = CollectorRegistry()
        self.lines = LogCapture()
        logger = structlog.wrap_logger(
            structlog.ReturnLogger(),
            processors=[self.lines],
            wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        )
        telemetry = Telemetry(self.registry, logger)
        self.leadership = Leadership(("serving", "autoscaler"), self.leases.of("us"), self.clock, telemetry, forget)
        self.target = WorldTarget(World(P0, 2), self.clock)

    @property
    def shown(self) -> float | None:
        """What the gauge shows."""
        return self.registry.get_sample_value("autoscaler_leader", {"lease": "serving/autoscaler"})


async def test_the_gate_opens_when_it_leads_and_closes_with_the_end() -> None:
    scene, stop = Scene(), asyncio.Event()
    parts = scene.leadership.gated(P0, parts_of(scene.target))
    assert await parts.actuator.apply(GROW) is Outcome.STANDBY
    assert scene.shown == 0.0
    task = asyncio.create_task(scene.leadership.during(_until(stop)))
    await settle()
    assert scene.shown == 1.0
    assert await parts.actuator.apply(GROW) is Outcome.APPLIED
    stop.set()
    await task
    assert [(line["event"], line["lease"]) for line in scene.lines.entries] == [
        ("leading", "serving/autoscaler"),
        ("standing_by", "serving/autoscaler"),
    ]
    assert scene.shown == 0.0
    assert scene.leases.spec["holderIdentity"] == ""
    assert await parts.actuator.apply(replace(GROW, seen=3, to=4)) is Outcome.STANDBY


async def test_a_tick_that_began_before_the_takeover_writes_nothing() -> None:
    scene, stop = Scene(**{PREFIX + "p0": MEMORY}), asyncio.Event()
    parts = scene.leadership.gated(P0, parts_of(scene.target))
    task = asyncio.create_task(scene.leadership.during(_until(stop)))
    await settle()
    assert scene.leadership.elector.leading()
    assert await parts.actuator.apply(GROW) is Outcome.STANDBY
    state = scene.leadership.memories.recall(P0, scene.target.world.state, START)
    assert state.last_up_at == 1.0
    assert await parts.actuator.apply(GROW) is Outcome.APPLIED
    stop.set()
    await task


@pytest.mark.parametrize("lease_s", [5.0, 15.0, 3600.0])
def test_the_times_of_any_lease_leave_room_for_a_write(lease_s: float) -> None:
    timing = Timing(lease_s=lease_s)
    assert timing.renew_s - timing.retry_s - timing.call_s > timing.write_s > timing.call_s
    assert timing.lease_s - timing.renew_s > 2.0 * timing.retry_s


def test_by_default_the_times_are_round() -> None:
    timing = Timing()
    assert (timing.lease_s, timing.renew_s, timing.retry_s, timing.call_s, timing.write_s) == (15, 10, 2, 1.5, WRITE_S)


async def test_a_policy_in_dry_run_needs_no_gate() -> None:
    scene = Scene()
    parts = parts_of(scene.target)
    assert scene.leadership.gated(replace(P0, dry_run=True), parts) is parts


async def test_a_bug_in_the_election_ends_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_self: Elector) -> None:
        raise ZeroDivisionError("bug")

    monkeypatch.setattr(Elector, "run", broken)
    with pytest.raises(ExceptionGroup) as raised:
        await Scene().leadership.during(_until(asyncio.Event()))
    assert [type(error) for error in raised.value.exceptions] == [ZeroDivisionError]


async def test_work_that_fails_still_gives_the_lease_up() -> None:
    scene = Scene()

    async def fail() -> None:
        await settle()
        assert scene.leadership.elector.leading()
        raise OSError("broken")

    with pytest.raises(ExceptionGroup):
        await scene.leadership.during(fail())
    assert scene.leases.spec["holderIdentity"] == ""


async def test_troubles_and_damage_are_said_without_floods() -> None:
    scene, stop = Scene(**{PREFIX + "p0": "{"}), asyncio.Event()
    for seconds in (1.5, 2.5):
        scene.leadership.trouble(TargetError("unreachable", f"no answer within {seconds} s"))
    scene.leadership.trouble(TargetError("forbidden", "leases"))
    task = asyncio.create_task(scene.leadership.during(_until(stop)))
    await settle()
    stop.set()
    await task
    lines = scene.lines.entries
    said = [(line["event"], line.get("reason") or line.get("policy")) for line in lines]
    assert said[:3] == [("lease_trouble", "unreachable"), ("lease_trouble", "forbidden"), ("memory_damaged", "p0")]
    assert (lines[0]["log_level"], lines[2]["log_level"]) == ("warning", "error")


class Heard:
    """A report that counts what it hears."""

    def __init__(self) -> None:
        self.ticks = self.errors = 0

    def tick(self, policy: str, snapshot: Snapshot, decision: Decision, outcome: Outcome, duration_s: float) -> None:
        """Count it."""
        self.ticks += 1

    def error(self, policy: str, kind: str, error: BaseException) -> None:
        """Count it."""
        self.errors += 1


@pytest.mark.parametrize("leading", [True, False])
def test_a_standby_leaves_reports_to_the_leader(leading: bool) -> None:
    heard, world = Heard(), World(P0, 2)
    report = WhileLeading(heard, lambda: leading)
    report.tick("p0", world.snapshot(), world.decide(), Outcome.STANDBY, 0.1)
    report.error("p0", "actuation", OSError())
    assert (heard.ticks, heard.errors) == (int(leading), int(leading))


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()
