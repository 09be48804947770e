"""Replay decides as the live loop did: bit for bit, by the same code, without a clock, a network or a cluster."""

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

import autoscaler.replay
import autoscaler.schedule
from autoscaler.cli.replay import Session
from autoscaler.core.decide import decide
from autoscaler.core.memory import Memory, memory_of, recall
from autoscaler.core.owners import Owners
from autoscaler.core.plain import to_plain
from autoscaler.core.policy import Policy, ReplicaBounds, ScaleDown, Schedule, TargetRef, Victims
from autoscaler.core.signals import COLUMN
from autoscaler.core.state import State, advance
from autoscaler.core.types import FIELD_MANAGER, Decision, Hold, Outcome, ScaleReplicas, Snapshot
from autoscaler.policy_file import policy_to_plain
from autoscaler.replay import Replayer, Summary, choose_policy, differs, first_difference
from autoscaler.sim.workload import MINUTE, Surge, spike
from autoscaler.trace import Recorder, TickLine, read_trace
from tests.core.world import P0, START, World
from tests.recording import EPOCH, TARGET, chat_fleet, record

GOLDEN = Path(__file__).parent / "golden"
REF = TargetRef(namespace=TARGET.namespace, deployment=TARGET.deployment)


@dataclass
class Decided:
    """`ports.Report` that keeps each live decision as JSON, and its outcome."""

    lines: list[str] = field(default_factory=list)

    def tick(self, policy: str, snapshot: Snapshot, decision: Decision, outcome: Outcome, duration_s: float) -> None:
        """Keep it."""
        self.lines.append(json.dumps([policy, to_plain(decision), outcome]))


def replayed(path: Path) -> list[str]:
    """Return what replaying decides, as `Decided` keeps it."""
    with read_trace(path, decisions=False) as reader:
        session = Session({}, {}, verify=False)
        return [
            json.dumps([line.policy, to_plain(one.decision), line.outcome])
            for line, one, _ in session.run(iter(reader))
        ]


class UsedError(Exception):
    """Something was used that a replay has no use for."""


@pytest.fixture
def sealed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what seals the process off: from then on no clock, no sleep, no socket and no event loop."""

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise UsedError

    def seal() -> None:
        for module, names in (
            (time, ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "sleep")),
            (asyncio, ("sleep", "run", "new_event_loop")),
            (socket, ("socket", "create_connection", "getaddrinfo")),
        ):
            for name in names:
                monkeypatch.setattr(module, name, refuse)

    return seal


def test_c127_replaying_equals_live_and_itself(tmp_path: Path, sealed: Callable[[], None]) -> None:
    path, live = tmp_path / "live.trace.gz", Decided()
    traffic = spike(3.0, Surge(at=10 * MINUTE, duration_s=10 * MINUTE, factor=4.0, ramp_s=2 * MINUTE))
    gentle = ScaleDown(victims=Victims(order="emptiest"))
    policy = Policy(name="chat", target=REF, replicas=ReplicaBounds(min=1, max=6), interval_s=15.0, scale_down=gentle)
    asyncio.run(record(path, chat_fleet(traffic, 50 * MINUTE), {"chat": policy}, 50 * MINUTE, reports=(live,)))
    assert len(live.lines) == 200
    actions = [json.loads(line)[1]["action"] for line in live.lines]
    assert sum(action["kind"] == "scale_replicas" for action in actions) >= 5
    assert any(action.get("costs") for action in actions)
    sealed()
    first, second = replayed(path), replayed(path)
    assert first == live.lines
    assert second == live.lines


def test_schedules_follow_virtual_time_and_a_replay_asks_no_calendar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, live = tmp_path / "live.trace.gz", Decided()
    early = Schedule(name="early", cron="5 1 * * *", timezone="Europe/Berlin", duration_s=240.0, lead_s=60.0, min=3)
    policy = Policy(name="chat", target=REF, replicas=ReplicaBounds(min=1, max=6), interval_s=15.0, schedules=(early,))
    fleet = chat_fleet(spike(1.0, Surge(at=MINUTE, duration_s=MINUTE, factor=1.0, ramp_s=MINUTE)), 12 * MINUTE)
    asyncio.run(record(path, fleet, {"chat": policy}, 12 * MINUTE, reports=(live,)))
    decisions = [json.loads(line)[1] for line in live.lines]
    active = [one["at"] - EPOCH for one in decisions if one["bounds"]]
    assert active == [15.0 * tick for tick in range(16, 36)]
    first = next(one for one in decisions if one["action"]["kind"] == "scale_replicas")
    assert (first["at"] - EPOCH, first["reason"], first["action"]["to"]) == (240.0, "up_bounds", 3)
    monkeypatch.setattr(autoscaler.schedule, "neighbours", None)
    assert replayed(path) == live.lines


def test_c106_steps_of_other_processes_count_in_a_replay_too(tmp_path: Path) -> None:
    path, live, world = tmp_path / "standby.trace.gz", Decided(), World(P0, 2)
    world.press(1.0, 1.0, 1.0)
    before = State(times=(START,), owners=Owners(uid="uid-of-target", replicas=4))
    memory = memory_of(P0, before)
    assert memory is not None
    with Recorder(path, "tests") as recorder:
        recorder.policy(P0.name, policy_to_plain(P0))
        for number in range(4):
            if number == 1:  # the leader steps, which it saves
                world.scale(4)
                world.status = {"scaled_by": FIELD_MANAGER}
            if number == 2:  # it steps again and dies; we lead
                world.scale(3)
                recorder.memory(P0.name, world.at, memory)
                world.state = recall(P0, world.state, memory, world.at)
            snapshot, decision = world.snapshot(), world.decide()
            outcome = Outcome.STANDBY if number < 2 else Outcome.UNCHANGED
            world.state = advance(P0, world.state, decision, outcome)
            recorder.tick(P0.name, snapshot, decision, outcome, 0.1)
            live.tick(P0.name, snapshot, decision, outcome, 0.1)
            world.at += P0.interval_s
    reasons = [json.loads(line)[1]["reason"] for line in live.lines]
    assert reasons == ["up_score", *["held_cooldown"] * 3]
    assert replayed(path) == live.lines


# --- golden ---------------------------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """Return a number at six digits; `-` where it is unknown."""
    return "-" if value is None else f"{value:.6g}"


def golden_line(name: str, decision: Decision, outcome: Outcome) -> str:
    """Return one decision in one line for people who review a change of it."""
    score, demand, forecast, proposal = decision.score, decision.demand, decision.forecast, decision.proposal
    assert score is not None
    parts = " ".join(f"{part.name} {number(part.value)}/{number(part.shrink_value)}" for part in score.parts)
    terms = " ".join(number(term) for term in (demand.itl, demand.kv, demand.sequences))
    steps = "".join(f" {step.rule} {step.before}->{step.after}" for step in proposal.steps)
    ahead = " ".join(number(value) for value in (forecast.level, forecast.top, forecast.sigma, forecast.score))
    words = [
        f"{decision.at - EPOCH:7.1f} {name} {proposal.current}->{proposal.replicas} {decision.reason}{steps}",
        f"{outcome} mode {decision.mode}" if decision.mode != "normal" else str(outcome),
        f"score {number(score.value)}/{number(score.shrink_value)} {parts}",
        f"demand {terms if demand.gap is None else demand.gap}",
        f"forecast {ahead} up {forecast.up} keep {forecast.keep}",
    ]
    return " | ".join(words)


def golden_lines(path: Path) -> Iterator[str]:
    with read_trace(path, decisions=False) as reader:
        for line, one, _ in Session({}, {}, verify=False).run(iter(reader)):
            yield golden_line(line.policy, one.decision, line.outcome) if one.decision is not None else one.error


@pytest.mark.parametrize("name", ["rush", "changes"])
def test_golden_replays(name: str, update_golden: bool) -> None:
    golden = GOLDEN / f"{name}.decisions"
    lines = list(golden_lines(GOLDEN / f"{name}.trace.gz"))
    if update_golden:
        golden.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert lines == golden.read_text(encoding="utf-8").splitlines()


def test_golden_recordings_are_small_and_show_what_they_should() -> None:
    paths = sorted(GOLDEN.glob("*.trace.gz"))
    assert len(paths) == 2
    assert sum(path.stat().st_size for path in paths) < 100_000
    text = "\n".join(
        (GOLDEN / f"{path.name.partition('.')[0]}.decisions").read_text(encoding="utf-8") for path in paths
    )
    assert set(re.findall(r" (p0|seed|chat) \d+->\d+", text)) == {"p0", "seed", "chat"}
    for wanted in (
        "up_",
        "down_",
        "insufficient_components",
        "pending_capacity",
        "| simulated",
        "| applied",
        "limited_min",
    ):
        assert wanted in text


# --- absolute and relative times ------------------------------------------------------------------------------------


def shifted(snapshot: Snapshot, by: float) -> Snapshot:
    """Return the snapshot at another time of the world: every absolute time in it is moved."""

    def moved(at: float | None) -> float | None:
        return None if at is None else round(at + by, 3)

    target = snapshot.target
    pods = tuple(
        replace(
            pod,
            created_at=round(pod.created_at + by, 3),
            ready_at=moved(pod.ready_at),
            unschedulable_at=moved(pod.unschedulable_at),
        )
        for pod in target.pods
    )
    values = snapshot.engines.values.copy()
    for name in ("read_at", "started_at"):
        values[:, COLUMN[name]] = np.round(values[:, COLUMN[name]] + by, 3)
    return replace(
        snapshot,
        at=round(snapshot.at + by, 3),
        target=replace(target, pods=pods),
        engines=replace(snapshot.engines, values=values),
        samples=tuple(replace(sample, at=round(sample.at + by, 3)) for sample in snapshot.samples),
    )


def short(decision: Decision | None) -> tuple[object, ...]:
    """Return what of a decision does not depend on the bits of its times."""
    assert decision is not None
    action = decision.action
    proposal, demand = decision.proposal, decision.demand.value
    wanted = (action.seen, action.to) if isinstance(action, ScaleReplicas) else None
    steps = tuple((step.rule, step.before, step.after) for step in proposal.steps)
    return wanted, decision.reason, decision.mode, steps, None if demand is None else round(demand, 3)


def decided_at(path: Path, epoch: float) -> list[tuple[object, ...]]:
    """Return the decisions on a recording that is moved so that its first snapshot is at `epoch`."""
    with read_trace(path, decisions=False) as reader:
        events = list(reader)
    by = epoch - next(event.snapshot.at for event in events if isinstance(event, TickLine))
    moved = (
        replace(event, snapshot=shifted(event.snapshot, by)) if isinstance(event, TickLine) else event
        for event in events
    )
    return [short(one.decision) for _, one, _ in Session({}, {}, verify=False).run(moved)]


@pytest.mark.parametrize("name", ["rush", "changes"])
def test_c125_absolute_and_relative_times_decide_alike(name: str) -> None:
    path = GOLDEN / f"{name}.trace.gz"
    from_zero = decided_at(path, 0.0)
    assert from_zero == decided_at(path, 1_764_500_000.0)
    assert from_zero == decided_at(path, 100_000_000_000.0)
    assert sum(wanted is not None for wanted, *_ in from_zero) >= 5


# --- a replayer -----------------------------------------------------------------------------------------------------


def pressed_snapshots(count: int, replicas: int = 2) -> list[Snapshot]:
    """Return the snapshots of a world under full pressure that is not scaled."""
    world = World(P0, replicas)
    world.press(memory=1.0, backlog=1.0, latency=1.0)
    snapshots = []
    for _ in range(count):
        snapshots.append(world.snapshot())
        for engine in world.engines.values():
            engine.run(P0.interval_s)
        world.at += P0.interval_s
    return snapshots


@pytest.mark.parametrize(
    ("outcomes", "acted"),
    [
        pytest.param([None] * 6, [0, 4], id="as a dry-run would, 60 s of cooldown"),
        pytest.param([Outcome.APPLIED] * 6, [0, 4], id="as recorded: applied"),
        pytest.param([Outcome.SIMULATED] * 6, [0, 4], id="as recorded: simulated"),
        pytest.param([Outcome.FAILED] * 6, [0, 1, 2, 3, 4, 5], id="as recorded: failed"),
    ],
)
def test_the_outcome_starts_the_cooldown_or_does_not(outcomes: list[Outcome | None], acted: list[int]) -> None:
    replayer = Replayer(P0)
    decisions = [replayer.tick(*pair).decision for pair in zip(pressed_snapshots(6), outcomes, strict=True)]
    wanted = [index for index, one in enumerate(decisions) if one and isinstance(one.action, ScaleReplicas)]
    assert wanted == acted


def test_what_another_process_knew_counts() -> None:
    snapshots = pressed_snapshots(6)
    replayer = Replayer(P0)
    target = f"{P0.target.namespace}/{P0.target.deployment}"
    replayer.recall(Memory(target=target, at=START, last_up_at=START - 30.0), START)
    decisions = [replayer.tick(snapshot, None).decision for snapshot in snapshots]
    assert [index for index, one in enumerate(decisions) if one and isinstance(one.action, ScaleReplicas)] == [2]


def test_a_changed_policy_goes_on_with_the_memory_and_another_target_without() -> None:
    snapshots = pressed_snapshots(3)
    replayer = Replayer(P0)
    replayer.tick(snapshots[0], None)
    replayer.change_policy(replace(P0, replicas=ReplicaBounds(min=1, max=3)))
    assert replayer.state.last_up_at == START
    held = replayer.tick(snapshots[1], None).decision
    assert held is not None
    assert isinstance(held.action, Hold)
    replayer.change_policy(replace(P0, target=TargetRef(namespace="serving", deployment="other")))
    forgotten = replayer.state
    assert forgotten.last_up_at is None
    assert forgotten.times == ()


def raising_on(monkeypatch: pytest.MonkeyPatch, ticks: set[int]) -> None:
    """Let the decision raise on these calls, counted from 0."""
    calls = 0

    def sometimes(policy: Policy, state: State, snapshot: Snapshot) -> Decision:
        nonlocal calls
        calls += 1
        if calls - 1 in ticks:
            raise FloatingPointError("predictor")
        return decide(policy, state, snapshot)

    monkeypatch.setattr(autoscaler.replay, "decide", sometimes)


def test_c128_a_tick_whose_decision_raises_is_counted_and_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    raising_on(monkeypatch, {2, 5, 8})
    replayer, summary = Replayer(P0), Summary()
    results = [replayer.tick(snapshot, None) for snapshot in pressed_snapshots(10)]
    for one in results:
        summary.add(one)
    assert [index for index, one in enumerate(results) if one.decision is None] == [2, 5, 8]
    assert {one.error for one in results} == {"", "FloatingPointError: predictor"}
    assert (summary.ticks, summary.errors) == (10, 3)
    assert sum(summary.reasons.values()) == 7
    assert START + 2 * P0.interval_s not in replayer.state.times  # a tick that dies of a bug leaves no trace
    # 10 ticks of 2 replicas, 15 s apart; what was wanted is not counted where nothing was decided.
    assert summary.replica_seconds == 9 * 15.0 * 2
    decided = [one.decision.proposal.replicas for one in results[1:] if one.decision is not None]
    assert summary.wanted_seconds == 15.0 * sum(decided)


def test_a_summary_counts_steps_and_turns() -> None:
    world = World(P0, 2)
    summary, replayer = Summary(), Replayer(P0)
    for pressure in (1.0, 0.0):
        world.press(memory=pressure, backlog=pressure, latency=pressure)
        for _ in range(60):
            snapshot = world.snapshot()
            one = replayer.tick(snapshot, None)
            summary.add(one)
            assert one.decision is not None
            if isinstance(one.decision.action, ScaleReplicas):
                world.scale(one.decision.action.to)
            for engine in world.engines.values():
                engine.run(15.0)
            world.at += 15.0
    assert (summary.ups, summary.reversals) == (3, 1)  # 2 to 8, two at a time, then down
    assert summary.downs >= 1
    assert (summary.first_at, summary.last_at) == (START, START + 119 * 15.0)
    assert summary.hours == pytest.approx(119 * 15.0 / 3600.0)
    assert summary.gapped == 0


# --- choosing and comparing -----------------------------------------------------------------------------------------

OTHER = replace(P0, name="other", target=TargetRef(namespace="serving", deployment="other"))
TWIN = replace(P0, name="twin")


@pytest.mark.parametrize(
    ("recorded", "policies", "target", "chosen"),
    [
        pytest.param("p0", [OTHER, P0], ("serving", "x"), "p0", id="of the same name"),
        pytest.param("chat", [OTHER, P0], ("serving", "chat-a"), "p0", id="of the same target"),
        pytest.param("chat", [OTHER], ("serving", "chat-a"), "other", id="the only one"),
        pytest.param("chat", [OTHER, TWIN, P0], ("serving", "chat-a"), None, id="two of the target"),
        pytest.param("chat", [OTHER, P0], ("serving", "x"), None, id="none fits"),
        pytest.param("chat", [], ("serving", "x"), None, id="none at all"),
    ],
)
def test_the_policy_for_a_recorded_stream(
    recorded: str, policies: list[Policy], target: tuple[str, str], chosen: str | None
) -> None:
    found = choose_policy(recorded, {policy.name: policy for policy in policies}, target)
    assert (found.name if found is not None else None) == chosen


def test_decisions_differ_when_they_would_act_differently() -> None:
    up, again = (Replayer(P0).tick(snapshot, None).decision for snapshot in pressed_snapshots(2))
    assert up is not None
    assert not differs(up, again)
    assert differs(up, replace(up, proposal=replace(up.proposal, replicas=9)))
    assert differs(up, None)
    assert differs(None, up)
    assert not differs(None, None)


@pytest.mark.parametrize(
    ("left", "right", "difference"),
    [
        pytest.param({"a": 1.5, "b": [1, {"c": "x"}]}, {"a": 1.5, "b": [1, {"c": "x"}]}, "", id="equal"),
        pytest.param({"a": 0.1}, {"a": 0.1 + 2**-55}, f"a: recorded 0.1, now {0.1 + 2**-55!r}", id="one bit"),
        pytest.param({"b": [1, {"c": "x"}]}, {"b": [1, {"c": "y"}]}, "b[1].c: recorded 'x', now 'y'", id="nested"),
        pytest.param({"a": 1}, {"a": 1, "b": 2}, "b: recorded None, now 2", id="a new key"),
        pytest.param({"a": 1}, {"a": 1.0}, "a: recorded 1, now 1.0", id="an integer and a float"),
        pytest.param([1, 2], [1], ": recorded [1, 2], now [1]", id="lengths"),
        pytest.param({"a": {}}, {"a": 3}, "a: recorded {}, now 3", id="kinds"),
        pytest.param({"z": 1, "a": 1}, {"z": 2, "a": 2}, "a: recorded 1, now 2", id="the first in order"),
    ],
)
def test_where_two_documents_part(left: object, right: object, difference: str) -> None:
    assert first_difference(left, right) == difference
