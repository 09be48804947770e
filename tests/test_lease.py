"""The election on a clock that is moved by hand, against a fake API server that loses, delays, refuses and forgets."""

import asyncio
import copy
import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pytest

from autoscaler.core.memory import Memory
from autoscaler.core.owners import Owners
from autoscaler.core.policy import Policy, TargetRef
from autoscaler.core.state import State
from autoscaler.core.types import ForeignChange, Standing
from autoscaler.errors import TargetError
from autoscaler.lease import KEPT_S, MAX_BYTES, PREFIX, SAVE_EVERY_S, Elector, Memories, micro_time
from tests.core.world import P0, START, World
from tests.fake_ports import ManualClock, settle

Json = dict[str, Any]
LEASE = "/apis/coordination.k8s.io/v1/namespaces/serving/leases"
POLL_S = 0.25


class FakeLeases:
    """One namespace's Leases in memory, with resource versions. A fake: no rights, no validation, no watches.

    Attributes:
        before: called with the caller's name and the method; may sleep, and raise what the caller then gets.
        after: the same once the request has been carried out: an answer that is lost, or late.
    """

    def __init__(self) -> None:
        self.lease: Json | None = None
        self.before: Callable[[str, str], Any] = lambda _who, _method: None
        self.after: Callable[[str, str], Any] = lambda _who, _method: None
        self.requests: list[tuple[str, str]] = []
        self.version = 0

    async def answer(self, who: str, method: str, path: str, body: Any) -> Json:
        """Return what the server answers with."""
        self.requests.append((who, method))
        await _maybe(self.before(who, method))
        answer = copy.deepcopy(self._carry_out(method, path, json.loads(json.dumps(body))))
        await _maybe(self.after(who, method))
        return answer

    def of(self, who: str) -> "Client":
        """Return the API as one process sees it."""
        return Client(self, who)

    def _carry_out(self, method: str, path: str, body: Any) -> Json:
        if method == "POST":
            assert path == LEASE
            if self.lease is not None:
                raise TargetError("conflict", "already exists")
            return self._store({**body, "metadata": {**body["metadata"], "uid": f"uid-{self.version}"}})
        assert path == f"{LEASE}/autoscaler"
        if self.lease is None:
            raise TargetError("target_not_found", "not found")
        if method == "GET":
            return self.lease
        assert method == "PATCH"
        if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise TargetError("conflict", "the object has been modified")
        return self._store(merged(self.lease, body))

    def _store(self, lease: Json) -> Json:
        self.version += 1
        lease["metadata"]["resourceVersion"] = str(self.version)
        self.lease = lease
        return lease

    def edit(self, **spec: object) -> None:
        """Change the spec as a person does."""
        assert self.lease is not None
        self._store(merged(self.lease, {"spec": spec}))

    @property
    def spec(self) -> Json:
        assert self.lease is not None
        return dict(self.lease["spec"])

    @property
    def memories(self) -> dict[str, Json]:
        """What is saved, by policy."""
        assert self.lease is not None
        annotations = self.lease["metadata"].get("annotations", {})
        return {key.removeprefix(PREFIX): json.loads(text) for key, text in annotations.items()}


@dataclass
class Client:
    """`lease.LeaseApi` of one process."""

    leases: FakeLeases
    who: str

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = "application/json",
    ) -> Json:
        """Return the answer."""
        assert (query == {"fieldManager": "autoscaler"}) == (body is not None)
        assert (content_type == "application/merge-patch+json") == (method == "PATCH")
        return await self.leases.answer(self.who, method, path, body)


def merged(document: Json, patch: Mapping[str, Any]) -> Json:
    """Return the document after a merge patch (RFC 7386)."""
    result = copy.deepcopy(document)
    for key, value in patch.items():
        if isinstance(value, Mapping):
            result[key] = merged(result.get(key) or {}, value)
        elif value is None:
            result.pop(key, None)
        else:
            result[key] = value
    return result


async def _maybe(result: Any) -> None:
    if asyncio.iscoroutine(result):
        await result


async def hang() -> None:
    """Never return."""
    await asyncio.Event().wait()


class SkewedClock:
    """`ports.Clock` of one machine: the same seconds, another time of day; frozen, nobody who sleeps by it wakes."""

    def __init__(self, clock: ManualClock, skew_s: float) -> None:
        self._clock = clock
        self._skew_s = skew_s
        self.awake = asyncio.Event()
        self.awake.set()

    def now(self) -> float:
        """Return epoch seconds."""
        return self._clock.now() + self._skew_s

    async def sleep_until(self, at: float) -> None:
        """Return at that time, or when it is thawed."""
        await self._clock.sleep_until(at - self._skew_s)
        await self.awake.wait()


@dataclass
class Process:
    """One elector with all that belongs to it."""

    leases: FakeLeases
    clock: ManualClock
    name: str
    skew_s: float = 0.0
    told: list[tuple[float, bool]] = field(default_factory=list)
    troubles: list[TargetError] = field(default_factory=list)
    damages: list[tuple[str, str]] = field(default_factory=list)
    recalled: list[tuple[str, float, Memory]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.own_clock = SkewedClock(self.clock, self.skew_s)
        self.memories = Memories(
            damaged=lambda policy, problem: self.damages.append((policy, problem)),
            recalled=lambda policy, at, memory: self.recalled.append((policy, at, memory)),
        )
        self.elector = Elector(
            self.leases.of(self.name),
            self.own_clock,
            namespace="serving",
            name="autoscaler",
            identity=self.name,
            memories=self.memories,
            listener=self,
        )

    def leads(self, leading: bool) -> None:
        """Remember it."""
        assert leading == self.elector.leading()
        self.told.append((round(self.clock.now() - START, 3), leading))

    def trouble(self, error: TargetError) -> None:
        """Remember it."""
        self.troubles.append(error)

    @property
    def leading(self) -> bool:
        return self.elector.leading()

    def start(self) -> None:
        """Start it."""
        self.task = asyncio.create_task(self.elector.run())

    async def kill(self) -> None:
        """End it as SIGKILL does: nothing is given up."""
        if self.task is not None:
            self.task.cancel()
            with suppress(asyncio.CancelledError):
                await self.task

    async def end(self) -> None:
        """End it as SIGTERM does."""
        await self.kill()
        await self.elector.release()


class Town:
    """Some processes, one Lease, one clock."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.leases = FakeLeases()
        self.processes: list[Process] = []

    def start(self, name: str, skew_s: float = 0.0) -> Process:
        """Start a process of that name."""
        process = Process(self.leases, self.clock, name, skew_s)
        self.processes.append(process)
        process.start()
        return process

    async def pass_time(self, seconds: float) -> None:
        """Let time pass, and look all the time that no two lead."""
        end = self.clock.at + seconds
        while self.clock.at < end:
            await self.clock.advance(min(POLL_S, end - self.clock.at))
            assert len(self.leaders()) <= 1, (self.clock.at - START, self.leaders())

    def leaders(self) -> list[str]:
        """Return who leads, of those that could write: a killed or frozen one cannot."""
        return [
            one.name
            for one in self.processes
            if one.leading and one.own_clock.awake.is_set() and one.task is not None and not one.task.done()
        ]

    async def leader(self, name: str = "a") -> Process:
        """Return a process that leads."""
        process = self.start(name)
        await self.pass_time(16.0)
        assert process.leading
        return process


@pytest.fixture
async def town() -> Any:
    """Return a town without processes; those that are there at the end are killed."""
    one = Town()
    yield one
    for process in one.processes:
        process.own_clock.awake.set()
        await process.kill()
    await settle()


# --- taking and holding ---------------------------------------------------------------------------------------------


async def test_a_lease_that_was_never_there_is_made_and_taken_after_it_has_run_out(town: Town) -> None:
    a = town.start("a")
    await town.pass_time(14.75)
    assert (a.leading, town.leases.spec) == (False, {"leaseDurationSeconds": 15})
    await town.pass_time(0.5)
    assert a.leading
    assert a.told == [(15.0, True)]
    assert town.leases.spec["holderIdentity"] == "a"
    assert town.leases.spec["leaseTransitions"] == 0


async def test_a_leader_renews_and_a_standby_waits(town: Town) -> None:
    a = await town.leader()
    b = town.start("b")
    before = town.leases.spec
    town.leases.requests.clear()
    await town.pass_time(60.0)
    assert (a.leading, b.leading, b.told) == (True, False, [])
    after = town.leases.spec
    assert after["renewTime"] > before["renewTime"]
    assert {**after, "renewTime": ""} == {**before, "renewTime": ""}
    assert town.leases.requests.count(("a", "PATCH")) == 30
    assert set(town.leases.requests) == {("a", "PATCH"), ("b", "GET")}


async def test_a_killed_leader_is_succeeded_within_the_lease_and_two_seconds(town: Town) -> None:
    a = await town.leader()
    b = town.start("b")
    await town.pass_time(7.0)
    await a.kill()
    killed_at = town.clock.at
    while not b.leading:
        await town.pass_time(POLL_S)
    assert town.clock.at - killed_at <= 15.0 + 2.0
    assert town.leases.spec["leaseTransitions"] == 1
    assert town.leases.spec["acquireTime"] == micro_time(b.told[0][0] + START)


async def test_given_up_the_next_leads_at_once(town: Town) -> None:
    a = await town.leader()
    b = town.start("b")
    await town.pass_time(2.0)
    await a.end()
    assert town.leases.spec["holderIdentity"] == ""
    assert a.told[-1][1] is False
    await town.pass_time(1.5)
    assert b.leading
    assert town.leases.spec["leaseTransitions"] == 1


async def test_a_standby_that_ends_leaves_the_lease_alone(town: Town) -> None:
    await town.leader()
    b = town.start("b")
    await town.pass_time(3.0)
    before = town.leases.version
    await b.end()
    assert (town.leases.version, town.leases.spec["holderIdentity"]) == (before, "a")


async def test_two_that_come_for_the_same_lease_are_told_apart_by_its_version(town: Town) -> None:
    a = await town.leader()
    others = [town.start(name) for name in ("b", "c", "d")]
    await town.pass_time(1.0)
    await a.kill()
    await town.pass_time(17.0)
    assert [one.leading for one in others].count(True) == 1
    assert town.leases.spec["leaseTransitions"] == 1


async def test_c150_no_clock_of_another_is_ever_compared(town: Town) -> None:
    a = await town.leader()
    b, c = town.start("b", skew_s=7200.0), town.start("c", skew_s=-7200.0)
    await town.pass_time(60.0)
    assert (a.leading, b.leading, c.leading) == (True, False, False)
    await a.kill()
    await town.pass_time(17.0)
    assert [b.leading, c.leading].count(True) == 1
    await town.pass_time(60.0)
    assert len(town.leaders()) == 1


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Shanghai"])
def test_renew_times_are_utc_with_microseconds(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", zone)
    assert micro_time(1_764_500_000.25) == "2025-11-30T10:53:20.250000Z"
    assert datetime.fromisoformat(micro_time(START)) == datetime.fromtimestamp(START, UTC)


# --- losing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda _who, _method: hang(), id="frozen"),
        pytest.param(lambda _who, _method: raising(TargetError("unreachable", "refused")), id="killed"),
        pytest.param(lambda _who, _method: raising(TargetError("forbidden", "leases")), id="forbidden"),
        pytest.param(lambda _who, _method: raising(TargetError("throttled", "", 30.0)), id="throttled"),
    ],
)
async def test_c106_what_cannot_renew_stops_by_itself_before_anyone_may_start(
    town: Town, fault: Callable[[str, str], Any]
) -> None:
    a = await town.leader()
    last = datetime.fromisoformat(town.leases.spec["renewTime"]).timestamp()
    town.leases.before = fault
    await town.pass_time(last + 10.0 - town.clock.at - 0.01)
    assert a.elector.leading()
    assert not a.elector.leading(0.02)
    await town.pass_time(0.02)
    assert not a.elector.leading()
    await town.pass_time(3.0)
    assert a.told[-1][1] is False
    assert a.troubles
    town.leases.before = lambda _who, _method: None
    await town.pass_time(3.0)
    assert a.told[-1][1] is True


def raising(error: TargetError) -> None:
    """Raise it."""
    raise error


async def test_a_renewal_counts_from_its_sending_however_late_its_answer(town: Town) -> None:
    a = await town.leader()
    town.leases.after = lambda _who, _method: town.clock.sleep(1.25)
    await town.pass_time(20.0)
    last = datetime.fromisoformat(town.leases.spec["renewTime"]).timestamp()
    town.leases.before = lambda _who, _method: hang()
    await town.pass_time(last + 9.98 - town.clock.at)
    assert a.elector.leading()
    await town.pass_time(0.04)
    assert not a.elector.leading()


async def test_a_free_lease_that_cannot_be_written_is_not_hammered(town: Town) -> None:
    a = await town.leader()
    b = town.start("b")
    await town.pass_time(2.0)
    await a.kill()
    town.leases.before = lambda _who, method: raising(TargetError("unreachable")) if method == "PATCH" else None
    town.leases.requests.clear()
    await town.pass_time(40.0)
    assert not b.leading
    assert len(town.leases.requests) <= 2 * 40
    town.leases.before = lambda _who, _method: None
    await town.pass_time(1.5)
    assert b.told[-1][1] is True


async def test_an_answer_that_is_lost_is_not_taken_for_a_renewal(town: Town) -> None:
    a = await town.leader()
    b = town.start("b")
    town.leases.after = lambda who, method: hang() if (who, method) == ("a", "PATCH") else None
    await town.pass_time(30.0)
    assert not a.leading
    assert not b.leading  # the record goes on changing: somebody lives
    town.leases.after = lambda _who, _method: None
    await town.pass_time(3.0)
    assert a.leading


async def test_somebody_elses_name_on_the_lease_ends_it_at_the_next_look(town: Town) -> None:
    a = await town.leader()
    town.leases.edit(holderIdentity="somebody")
    await town.pass_time(2.5)
    assert not a.leading
    await town.pass_time(16.0)
    assert a.leading


async def test_another_field_that_is_edited_changes_nothing(town: Town) -> None:
    a = await town.leader()
    town.leases.edit(strategy="OldestEmulationVersion")
    await town.pass_time(10.0)
    assert a.told == [(15.0, True)]
    assert a.troubles == []


@pytest.mark.parametrize("deleted_by", ["deletion", "emptying"])
async def test_a_lease_that_vanishes_under_a_leader_makes_no_second_one(town: Town, deleted_by: str) -> None:
    a = await town.leader()
    b = town.start("b")
    await town.pass_time(2.0)
    if deleted_by == "deletion":
        town.leases.lease = None
    else:
        town.leases.edit(holderIdentity="")
    town.leases.before = lambda who, _method: hang() if who == "a" else None
    await town.pass_time(12.0)
    assert (a.leading, b.leading) == (False, False)
    await town.pass_time(6.0)
    assert b.leading


async def test_a_leader_makes_a_vanished_lease_anew_and_goes_on(town: Town) -> None:
    a = await town.leader()
    for _ in range(3):
        town.leases.lease = None
        await town.pass_time(5.0)
        assert town.leases.spec["holderIdentity"] == "a"
    assert a.told == [(15.0, True)]


async def test_the_others_make_a_vanished_lease_anew_and_the_leader_takes_it_at_once(town: Town) -> None:
    a = await town.leader()
    town.start("b")
    town.leases.lease = None
    town.leases.before = lambda who, method: hang() if (who, method) == ("a", "POST") else None
    await town.pass_time(5.0)
    assert a.leading
    assert a.told == [(15.0, True)]
    assert town.leases.spec["holderIdentity"] == "a"


async def test_a_frozen_leader_does_not_lead_when_it_thaws(town: Town) -> None:
    a = await town.leader()
    b = town.start("b")
    a.own_clock.awake.clear()
    town.leases.after = lambda who, _method: a.own_clock.awake.wait() if who == "a" else None
    await town.pass_time(20.0)
    assert b.leading
    a.own_clock.awake.set()
    town.leases.after = lambda _who, _method: None
    assert not a.leading
    await town.pass_time(30.0)
    assert (a.leading, b.leading) == (False, True)


async def test_without_rights_it_says_what_is_missing_and_waits(town: Town) -> None:
    town.leases.before = lambda _who, _method: raising(TargetError("forbidden", "leases is forbidden: cannot get"))
    a = town.start("a")
    await town.pass_time(30.0)
    assert not a.leading
    assert {str(error) for error in a.troubles} == {"forbidden: leases is forbidden: cannot get"}
    assert len(town.leases.requests) <= 31


@pytest.mark.parametrize(
    ("duration", "after"),
    [
        pytest.param(15, 15.0, id="as ours"),
        pytest.param(40, 40.0, id="longer"),
        pytest.param(3, 15.0, id="shorter"),
        pytest.param(2**31 - 1, 15.0, id="absurd"),
        pytest.param(None, 15.0, id="none"),
    ],
)
async def test_another_programs_lease_is_waited_for(town: Town, duration: int | None, after: float) -> None:
    spec = {"holderIdentity": "other", "leaseDurationSeconds": duration, "renewTime": micro_time(0.0)}
    town.leases._store({"metadata": {"uid": "1"}, "spec": {key: value for key, value in spec.items() if value}})
    a = town.start("a")
    await town.pass_time(after + 1.0)
    assert a.told == [(after, True)]


@pytest.mark.parametrize("times", [(15.0, 15.0, 2.0), (15.0, 3.0, 2.0), (15.0, 10.0, 0.0)])
def test_times_that_cannot_be_safe_are_refused(times: tuple[float, float, float]) -> None:
    lease_s, renew_s, retry_s = times
    process = Process(FakeLeases(), ManualClock(), "a")
    with pytest.raises(ValueError, match="a Lease needs"):
        Elector(
            process.leases.of("a"),
            process.clock,
            namespace="serving",
            name="autoscaler",
            identity="a",
            memories=process.memories,
            listener=process,
            lease_s=lease_s,
            renew_s=renew_s,
            retry_s=retry_s,
        )


# --- anything at all ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [pytest.param(seed, id=f"seed {seed}") for seed in range(6)])
async def test_c106_never_two_leaders_whatever_fails(town: Town, seed: int) -> None:
    chance = random.Random(seed)
    print(f"seed {seed}")
    bad = False
    town.clock.at += chance.random()

    def fault(_who: str, _method: str) -> Any:
        kind = chance.random() if bad else 1.0
        if kind < 0.15:
            return hang()
        if kind < 0.3:
            return town.clock.sleep(chance.uniform(0.1, 40.0))
        return raising(TargetError("unreachable")) if kind < 0.4 else None

    town.leases.before = town.leases.after = fault
    for number in range(3):
        town.start(f"p{number}", skew_s=chance.uniform(-5000.0, 5000.0))
    for number in range(3, 12):
        bad = True
        await town.pass_time(chance.uniform(2.0, 25.0))
        victim = chance.choice([one for one in town.processes if one.task is not None and not one.task.done()])
        match chance.randrange(5):
            case 0:
                await victim.kill()
            case 1:
                ending = asyncio.create_task(victim.end())
                await town.pass_time(15.0)  # while requests hang, only time ends them
                await ending
            case 2:
                victim.own_clock.awake.clear()
                await town.pass_time(chance.uniform(1.0, 30.0))
                victim.own_clock.awake.set()
                await settle()
            case 3:
                town.leases.lease = None
            case _:
                with suppress(AssertionError):  # where the Lease has just gone
                    town.leases.edit(holderIdentity=chance.choice(["", "somebody"]))
        if victim.task is not None and victim.task.done():
            town.start(f"p{number}", skew_s=chance.uniform(-5000.0, 5000.0))
        await town.pass_time(chance.uniform(0.0, 10.0))
    bad = False
    await town.pass_time(45.0)  # a late request of the bad times may still come, and the Lease has to run out
    assert len(town.leaders()) == 1
    terms = [at for one in town.processes for at, leading in one.told if leading]
    assert len(terms) > 1


# --- what is kept in it ---------------------------------------------------------------------------------------------


def named(name: str) -> Policy:
    return replace(P0, name=name, target=TargetRef(namespace="serving", deployment=name))


def ticked(at: float = START, **fields: Any) -> State:
    """Return the state of a target after its first tick."""
    return replace(State(times=(at,)), **fields)


async def test_the_next_leader_knows_the_cooldown_before_it_may_write(town: Town) -> None:
    a = await town.leader()
    policy, acted_at = named("chat"), town.clock.at
    a.memories.learned(policy, ticked(acted_at))
    a.memories.learned(policy, ticked(acted_at, last_up_at=acted_at, changes=((acted_at, 2),)))
    await settle()
    assert town.leases.memories["chat"]["last_up_at"] == acted_at  # at once, not at the next renewal
    b = town.start("b")
    await a.kill()
    await town.pass_time(17.0)
    assert b.leading
    assert not b.memories.is_recalled("chat")
    state = b.memories.recall(policy, ticked(town.clock.at), town.clock.at)
    assert b.memories.is_recalled("chat")
    assert (state.last_up_at, state.changes) == (acted_at, ((acted_at, 2),))
    assert [(name, at) for name, at, _ in b.recalled] == [("chat", town.clock.at)]
    assert b.memories.recall(policy, state, town.clock.at) is state


async def test_what_somebody_else_did_is_saved_at_once(town: Town) -> None:
    a = await town.leader()
    policy, at = named("chat"), town.clock.at
    change = ForeignChange(at=at, before=5, after=2, by="argocd-controller", undid=True)
    a.memories.learned(policy, ticked(at))
    a.memories.learned(policy, ticked(at, owners=Owners(uid="u-1", replicas=2, change=change, conflict=change)))
    await settle()
    assert town.leases.memories["chat"]["owners"]["conflict"]["by"] == "argocd-controller"


async def test_what_people_were_asked_to_approve_is_saved_at_once(town: Town) -> None:
    a = await town.leader()
    policy, at = named("chat"), town.clock.at
    standing = Standing(up=True, to=4, made_at=at, expires_at=at + 600.0, wished_at=at)
    a.memories.learned(policy, ticked(at))
    a.memories.learned(policy, ticked(at, standing=standing))
    await settle()
    assert town.leases.memories["chat"]["standing"]["to"] == 4


async def test_it_is_saved_every_fifteen_seconds_after_an_action_and_at_the_end(town: Town) -> None:
    a = await town.leader()
    policy = named("chat")
    saved: list[float] = []
    for number in range(60):
        a.memories.learned(policy, ticked(START + number))
        await town.pass_time(1.0)
        at = town.leases.memories.get("chat", {}).get("at")
        if at is not None and at not in saved:
            saved.append(at)
    assert len(saved) == 60 / SAVE_EVERY_S
    a.memories.learned(policy, ticked(START + 1000.0))
    await a.end()
    assert town.leases.memories["chat"]["at"] == START + 1000.0


async def test_a_standby_saves_nothing(town: Town) -> None:
    await town.leader()
    b = town.start("b")
    b.memories.learned(named("chat"), ticked(last_up_at=START))
    await town.pass_time(30.0)
    await b.end()
    assert town.leases.memories == {}


async def test_a_save_that_fails_is_made_up_for(town: Town) -> None:
    a = await town.leader()
    await town.pass_time(20.0)
    town.leases.before = lambda _who, _method: raising(TargetError("unreachable"))
    a.memories.learned(named("chat"), ticked(last_down_at=START))
    await settle()
    town.leases.before = lambda _who, _method: None
    await town.pass_time(4.0)
    assert town.leases.memories["chat"]["last_down_at"] == START


async def test_what_has_not_been_recalled_is_not_overwritten(town: Town) -> None:
    a = await town.leader()
    a.memories.learned(named("chat"), ticked(last_down_at=START))
    await settle()
    await a.end()
    b = town.start("b")
    await town.pass_time(2.0)
    b.memories.learned(named("chat"), ticked())  # a tick that began before the takeover
    await town.pass_time(40.0)
    await b.end()
    assert town.leases.memories["chat"]["last_down_at"] == START


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("{", id="no JSON"),
        pytest.param("[]", id="no object"),
        pytest.param('{"policy":"chat","version":2}', id="another version"),
        pytest.param('{"policy":"chat","version":1,"target":"a/b","at":"now"}', id="no number"),
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_a_memory_that_cannot_be_read_is_said_and_the_others_count(text: str) -> None:
    process = Process(FakeLeases(), ManualClock(), "a")
    other = {"policy": "other", "version": 1, "target": "serving/other", "at": START, "last_up_at": START}
    process.memories.load({PREFIX + "chat": text, PREFIX + "other": json.dumps(other), "note": "{"})
    assert [name for name, _ in process.damages] == ["chat"]
    assert process.memories.recall(named("other"), State(), START).last_up_at == START


def test_a_policy_that_is_gone_is_forgotten_after_a_day() -> None:
    process = Process(FakeLeases(), ManualClock(), "a")
    old = {"policy": "old", "version": 1, "target": "serving/old", "at": START}
    process.memories.load({PREFIX + "old": json.dumps(old)})
    early, late = process.memories.page(START + KEPT_S), process.memories.page(START + KEPT_S + 1.0)
    assert early is not None
    assert late is not None
    assert (early.annotations, late.annotations) == ({}, {PREFIX + "old": None})


def long_names() -> Iterator[str]:
    yield "a" * 63
    yield "a" * 64
    yield "a" * 63 + "b"
    yield f"{'a.' * 60}z"


def test_keys_are_of_a_length_that_the_api_server_takes_and_all_different() -> None:
    process = Process(FakeLeases(), ManualClock(), "a")
    names = list(long_names())
    for name in names:
        process.memories.learned(named(name), ticked(last_up_at=START))
    page = process.memories.page(START, last=True)
    assert page is not None
    assert len(page.annotations) == len(names)
    for key in page.annotations:
        name = key.removeprefix(PREFIX)
        assert len(name) <= 63
        assert name[-1].isalnum()
    process.memories.load({key: str(text) for key, text in page.annotations.items()})
    assert {process.memories.recall(named(name), State(), START).last_up_at for name in names} == {START}


@pytest.mark.parametrize(
    ("policies", "whole", "kept"),
    [
        pytest.param(10, True, 10, id="whole"),
        pytest.param(400, False, 400, id="only what cannot be learned again"),
        pytest.param(3000, False, None, id="only the latest"),
    ],
)
def test_all_together_stay_below_what_the_api_server_takes(policies: int, whole: bool, kept: int | None) -> None:
    process = Process(FakeLeases(), ManualClock(), "a")
    for number in range(policies):
        starts = tuple(float(second) + 0.123456 for second in range(150, 180))
        state = ticked(last_down_at=START + number, starts=starts * 3)
        process.memories.learned(named(f"policy-{number}"), state)
    page = process.memories.page(START, last=True)
    assert page is not None
    texts = {key: str(text) for key, text in page.annotations.items()}
    assert sum(len(key) + len(text) for key, text in texts.items()) <= MAX_BYTES
    assert ('"starts"' in "".join(texts.values())) == whole
    assert len(texts) == kept if kept else 0 < len(texts) < policies
    assert f"{PREFIX}policy-{policies - 1}" in texts


async def test_a_real_states_memory_comes_back_through_the_lease(town: Town) -> None:
    world = World(P0, 2)
    world.press(memory=1.0, backlog=1.0, latency=1.0)
    world.run(8)
    a = await town.leader()
    a.memories.learned(P0, world.state)
    await a.end()
    b = town.start("b")
    await town.pass_time(2.0)
    state = b.memories.recall(P0, State(), world.at)
    assert state.last_up_at == world.state.last_up_at is not None
    assert state.recommendations == world.state.recommendations != ()
