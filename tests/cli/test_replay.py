"""`autoscaler replay`, on recordings of a hand-set world."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autoscaler.replay
import autoscaler.schedule
from autoscaler.cli.main import run
from autoscaler.core.decide import decide
from autoscaler.core.policy import Policy, ReplicaBounds, Schedule, TargetRef
from autoscaler.core.state import State, absorb, advance
from autoscaler.core.types import Decision, Hold, Outcome, Reason, ScaleReplicas, Snapshot
from autoscaler.policy_file import policy_to_plain
from autoscaler.schedule import Calendar
from autoscaler.trace import Recorder
from tests.core.world import P0, World

POLICY = """apiVersion: autoscaler/v1alpha1
kind: ScalingPolicy
metadata: {name: NAME}
spec:
  target: {namespace: serving, deployment: DEPLOYMENT}
  replicas: {min: 1, max: 5}
  sizing: score
"""


def named(name: str, **changes: object) -> Policy:
    """Return profile P0 under another name, for a Deployment of that name."""
    target = TargetRef(namespace="serving", deployment=name)
    return replace(P0, **{"name": name, "target": target, **changes})  # type: ignore[arg-type]


class Live:
    """One policy in force over a world, as the loop runs it, without the loop."""

    def __init__(self, policy: Policy, replicas: int = 2) -> None:
        self.policy, self.world, self.state = policy, World(policy, replicas), State()
        self.calendar = Calendar(policy.schedules)

    def tick(self) -> tuple[Snapshot, Decision, Outcome]:
        """Decide and act once."""
        self.world.schedules = self.calendar.active(self.world.at)
        snapshot = self.world.snapshot()
        self.state = absorb(self.policy, self.state, snapshot)
        decision = decide(self.policy, self.state, snapshot)
        outcome = Outcome.UNCHANGED if isinstance(decision.action, Hold) else Outcome.APPLIED
        self.state = advance(self.policy, self.state, decision, outcome)
        if isinstance(decision.action, ScaleReplicas):
            self.world.scale(decision.action.to)
        for engine in self.world.engines.values():
            engine.run(self.policy.interval_s)
        self.world.at += self.policy.interval_s
        return snapshot, decision, outcome


def no_change(decision: Decision) -> Decision:
    return decision


def recording(
    path: Path,
    policies: Iterable[Policy] = (P0,),
    ticks: int = 60,
    *,
    change_at: Mapping[int, Policy] | None = None,
    recorded: Callable[[Decision], Decision] = no_change,
    plain: Callable[[Policy], Mapping[str, Any]] = policy_to_plain,
) -> Path:
    """Record some ticks of rising and falling pressure; `recorded` may tell lies about the decisions."""
    lives = {policy.name: Live(policy) for policy in policies}
    with Recorder(path, "autoscaler 9.9.9") as recorder:
        for live in lives.values():
            recorder.policy(live.policy.name, plain(live.policy))
        for number in range(ticks):
            changed = (change_at or {}).get(number)
            if changed is not None:
                lives[changed.name].policy = changed
                recorder.policy(changed.name, plain(changed))
            for live in lives.values():
                pressure = 1.0 if number < 20 else 0.1
                live.world.press(memory=pressure, backlog=pressure, latency=pressure)
                snapshot, decision, outcome = live.tick()
                recorder.tick(live.policy.name, snapshot, recorded(decision), outcome, 0.01)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return the recording of 60 ticks by profile P0."""
    return recording(tmp_path / "p0.trace.gz")


@pytest.fixture
def policy_file(tmp_path: Path) -> Callable[..., str]:
    """Return what writes a policy file and gives its path."""

    def write(name: str = "p0", deployment: str = "chat-a", more: str = "") -> str:
        path = tmp_path / f"{name}.yaml"
        path.write_text(POLICY.replace("NAME", name).replace("DEPLOYMENT", deployment) + more, encoding="utf-8")
        return str(path)

    return write


def documents(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_the_table_shows_what_acts_and_then_what_it_came_to(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(trace)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].split() == ["time", "(UTC)", "policy", "ordered/ready", "score", "demand", "action", "why"]
    acts = [line for line in lines if "->" in line and "p0" in line]
    assert [line.split("  ")[0] for line in acts[:2]] == ["2025-11-30 10:53:20", "2025-11-30 10:54:20"]
    assert "2 -> 4" in acts[0]
    assert "up_score" in acts[0]
    assert not any("hold" in line for line in lines)
    assert any(line.startswith("p0: 60 ticks over 0.2 h, 3 ups, 1 downs, 1 reversals") for line in lines)
    assert err == ""


def test_all_shows_every_tick(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(trace), "--all"]) == 0
    assert sum("2025-11-30" in line for line in capsys.readouterr().out.splitlines()) == 60


def test_json_is_one_object_a_tick_and_the_summary(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(trace), "--json"]) == 0
    *ticks, last = documents(capsys.readouterr().out)
    assert len(ticks) == 60
    assert {tick["policy"] for tick in ticks} == {"p0"}
    action = {"kind": "scale_replicas", "seen": 2, "to": 4, "uid": "uid-of-target", "costs": []}
    assert ticks[0]["decision"]["action"] == action
    assert (last["summary"]["p0"]["ticks"], last["summary"]["p0"]["ups"], last["summary"]["p0"]["errors"]) == (60, 3, 0)
    assert "verified" not in last


def test_a_recording_of_several_policies_one_of_them_changed_verifies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bounded = named("a", replicas=ReplicaBounds(min=1, max=3))
    elsewhere = named("b", target=TargetRef(namespace="serving", deployment="a-new-one"))
    path = recording(tmp_path / "t", [named("a"), named("b"), P0], change_at={10: bounded, 12: elsewhere})
    assert run(["replay", str(path), "--verify"]) == 1  # the world kept the memory of `b`, the loop would not
    out = capsys.readouterr().out
    assert "not equal" in out
    path = recording(tmp_path / "u", [named("a"), named("b"), P0], change_at={10: bounded})
    assert run(["replay", str(path), "--verify"]) == 0
    assert "verified: 180 of 180 recorded decisions come out bit-equal" in capsys.readouterr().out


def one_bit(decision: Decision) -> Decision:
    """Return the decision with one bit of its score turned."""
    assert decision.score is not None
    assert decision.score.value is not None
    score = replace(decision.score, value=decision.score.value + 2**-52)
    return replace(decision, score=score) if decision.proposal.current == 4 else decision


def other_reason(decision: Decision) -> Decision:
    """Return the decision with another reason."""
    return replace(decision, reason=Reason.NO_DATA) if decision.proposal.current == 4 else decision


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        pytest.param(one_bit, "score.value: recorded 1.0000000000000002, now 1.0", id="one bit"),
        pytest.param(other_reason, "reason: recorded 'no_data', now 'held_cooldown'", id="the reason"),
    ],
)
def test_what_differs_is_shown_with_its_line(
    lie: Callable[[Decision], Decision], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recording(tmp_path / "t", recorded=lie)
    assert run(["replay", str(path), "--verify"]) == 1
    out = capsys.readouterr().out
    assert "not equal: 4 of 60 decisions differ" in out
    # The header, the policy, and two lines a tick: the second tick starts at line 5.
    assert f"line 5, 2025-11-30 10:53:35: {words}" in out
    assert run(["replay", str(path), "--verify", "--json"]) == 1
    last = documents(capsys.readouterr().out)[-1]
    assert last["verified"] is False
    assert len(last["mismatches"]) == 4


def test_verified_in_json(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(trace), "--verify", "--json"]) == 0
    last = documents(capsys.readouterr().out)[-1]
    assert (last["verified"], last["mismatches"]) == (True, [])


def test_another_policy_decides_instead(
    trace: Path, policy_file: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["replay", str(trace), "--json", "--policy", policy_file("other")]) == 0
    *ticks, last = documents(capsys.readouterr().out)
    assert max(tick["decision"]["proposal"]["replicas"] for tick in ticks) <= 8
    assert ticks[0]["decision"] != documents_of(trace, capsys)[0]["decision"]
    assert last["summary"]["p0"]["ticks"] == 60


NOON = Schedule(name="noon", cron="0 11 * * *", duration_s=120.0, min=6)
"""From 400 s after the recording's start."""


def test_schedules_are_replayed_as_they_were_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recording(tmp_path / "t", [replace(P0, schedules=(NOON,))])
    monkeypatch.setattr(autoscaler.schedule, "neighbours", None)  # nothing is looked up in a calendar
    assert run(["replay", str(path), "--verify"]) == 0
    assert "verified: 60 of 60" in capsys.readouterr().out
    *ticks, _ = documents_of(path, capsys)
    bounds = [tick["decision"]["bounds"] for tick in ticks]
    assert [index for index, found in enumerate(bounds) if found] == list(range(27, 35))
    assert bounds[30] == {"min": 6, "max": 8, "by": ["noon"]}


def test_another_policys_schedules_are_its_own(
    tmp_path: Path, policy_file: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = recording(tmp_path / "t", [replace(P0, schedules=(NOON,))])
    later = policy_file(more='  schedules: [{name: later, cron: "2 11 * * *", duration: 1m, max: 3}]\n')
    assert run(["replay", str(path), "--json", "--policy", later]) == 0
    *ticks, _ = documents(capsys.readouterr().out)
    bounds = [tick["decision"]["bounds"] for tick in ticks]
    assert [index for index, found in enumerate(bounds) if found] == list(range(35, 39))
    assert bounds[36] == {"min": 1, "max": 3, "by": ["later"]}


def documents_of(trace: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert run(["replay", str(trace), "--json"]) == 0
    return documents(capsys.readouterr().out)


def test_a_second_policy_shows_where_the_two_part(
    trace: Path, policy_file: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["replay", str(trace), "--against", policy_file()]) == 0
    out = capsys.readouterr().out
    assert "p0 (against): 60 ticks" in out
    (parted,) = (line for line in out.splitlines() if line.startswith("the two policies part on"))
    rows = [line for line in out.splitlines() if line.startswith("2025-11-30")]
    assert parted == f"the two policies part on {len(rows)} ticks"
    assert rows
    assert run(["replay", str(trace), "--against", policy_file(), "--json"]) == 0
    *ticks, last = documents(capsys.readouterr().out)
    assert last["parted"] == len(rows)
    assert last["against"]["p0"]["ticks"] == 60
    assert sum(
        tick["decision"]["proposal"]["replicas"] != tick["against"]["proposal"]["replicas"] for tick in ticks
    ) == len(rows)


def test_a_policy_does_not_part_from_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Path(__file__).parent.parent / "data" / "policies" / "p0.yaml"
    path = recording(tmp_path / "t")
    assert run(["replay", str(path), "--policy", str(source), "--against", str(source)]) == 0
    out = capsys.readouterr().out
    assert "the two policies part on 0 ticks" in out
    assert "2025-11-30" not in out


@pytest.mark.parametrize("option", ["--policy", "--against"])
def test_no_policy_for_a_recorded_stream_is_said(
    option: str, trace: Path, policy_file: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    two = Path(policy_file("x", "x"))
    two.write_text(two.read_text() + "---\n" + POLICY.replace("NAME", "y").replace("DEPLOYMENT", "y"))
    assert run(["replay", str(trace), option, str(two)]) == 1
    assert "no policy for the recorded p0 of serving/chat-a (there is: x, y)" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--policy", "--against"])
def test_verify_takes_the_recorded_policies_only(
    option: str, trace: Path, policy_file: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["replay", str(trace), "--verify", option, policy_file()]) == 2
    assert "goes with neither" in capsys.readouterr().err


def test_a_bad_policy_is_bad_input(
    trace: Path, policy_file: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["replay", str(trace), "--policy", policy_file(more="  replica: 3\n")]) == 2
    assert "spec.replica" in capsys.readouterr().err


@pytest.mark.parametrize(("strict", "code"), [(True, 1), (False, 0)])
def test_c128_errors_are_counted_and_strict_minds_them(
    strict: bool, code: int, trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def sometimes(policy: Policy, state: State, snapshot: Snapshot) -> Decision:
        nonlocal calls
        calls += 1
        if calls % 10 in (2, 5, 8):
            raise FloatingPointError("predictor")
        return decide(policy, state, snapshot)

    monkeypatch.setattr(autoscaler.replay, "decide", sometimes)
    more = ["--strict"] if strict else []
    assert run(["replay", str(trace), *more]) == code
    out = capsys.readouterr().out
    assert "60 ticks over 0.2 h, 18 errors" in out
    assert "FloatingPointError: predictor" in out
    assert run(["replay", str(trace), "--json", *more]) == code
    *ticks, last = documents(capsys.readouterr().out)
    assert last["summary"]["p0"]["errors"] == 18
    assert sum(last["summary"]["p0"]["reasons"].values()) == 42
    assert [tick["decision"] is None for tick in ticks] == ["error" in tick for tick in ticks]
    assert sum("error" in tick for tick in ticks) == 18


# --- recordings that are not as they should be ----------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 20, 300])
def test_a_torn_end_is_said_and_skipped(cut: int, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_bytes(trace.read_bytes()[:-cut])
    assert run(["replay", str(trace), "--verify"]) == 0
    out = capsys.readouterr().out
    assert "note: line" in out
    assert "recorded decisions come out bit-equal" in out
    assert run(["replay", str(trace), "--json"]) == 0
    captured = capsys.readouterr()
    assert documents(captured.out)[-1]["summary"]["p0"]["ticks"] >= 50
    assert captured.err.startswith("note: line")


def packed(*lines: object) -> bytes:
    return gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode())


HEADER = {"format": "autoscaler-trace", "version": 1, "created_by": "autoscaler 9.9.9", "columns": ["read_at"]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(
            packed({**HEADER, "version": 99}),
            "line 1: version 99, written by autoscaler 9.9.9: this program reads versions up to 1",
            id="of a newer version",
        ),
        pytest.param(b"apiVersion: v1\n", "is no recording", id="no recording"),
        pytest.param(gzip.compress(b'{"a": 1}\n'), "no recording", id="another JSON"),
        pytest.param(packed(HEADER), "holds no tick", id="no tick"),
        pytest.param(b"", "holds no tick", id="empty"),
        pytest.param(packed(HEADER)[:-12], "holds no tick: line", id="torn at once"),
    ],
)
def test_what_cannot_be_replayed_is_said_in_one_line(
    content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.trace.gz"
    path.write_bytes(content)
    assert run(["replay", str(path), "--verify"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert str(path) in err
    assert words in err


def test_a_recording_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(tmp_path / "none")]) == 1
    assert f"{tmp_path / 'none'}: cannot be read: No such file or directory" in capsys.readouterr().err


def test_damage_in_the_middle_is_said_with_its_line(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = zlib.decompress(trace.read_bytes(), 31).splitlines(keepends=True)
    text[10] = b'{"tick":"p0","outcome":"applied","at":\n'
    trace.write_bytes(gzip.compress(b"".join(text)))
    assert run(["replay", str(trace)]) == 1
    assert f"{trace}: line 11: not JSON" in capsys.readouterr().err


def test_a_recorded_policy_of_another_version_asks_for_one(
    tmp_path: Path, policy_file: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = recording(tmp_path / "t", plain=lambda policy: {**policy_to_plain(policy), "novelty": 1})
    assert run(["replay", str(path)]) == 1
    err = capsys.readouterr().err
    assert "the recorded policy p0 cannot be used; give --policy" in err
    assert "novelty" in err
    assert run(["replay", str(path), "--policy", policy_file()]) == 0
