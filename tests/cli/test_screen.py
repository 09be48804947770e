"""What a demo shows: of a recorded rush, off a terminal and on one."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from autoscaler.cli.demo_daemons import Follower, Tick
from autoscaler.cli.screen import Screen
from autoscaler.core.policy import Policy, ReplicaBounds
from autoscaler.core.types import Outcome, ScaleReplicas
from tests.golden.make import REF
from tests.recording import EPOCH

GOLDEN = Path(__file__).parents[1] / "golden" / "rush.trace.gz"


@pytest.fixture(scope="module")
def ticks() -> list[Tick]:
    return Follower(GOLDEN).new()


def shown(ticks: list[Tick], *, terminal: bool, told: str = "") -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, color_system=None)
    policy = Policy(name="chat", target=REF, replicas=ReplicaBounds(min=1, max=6))
    screen = Screen(
        console,
        policy,
        began=EPOCH,
        duration_s=2160.0,
        line_s=600.0,
        clock="%H:%M:%S",
        more=lambda: [("more", "stuff")],
    )
    with screen:
        if told:
            screen.say(told)
        for snapshot, decision, outcome in ticks:
            screen.tick("chat", snapshot, decision, outcome, 0.0)
    return out.getvalue()


def test_off_a_terminal_there_is_a_line_now_and_then_and_one_for_each_action(ticks: list[Tick]) -> None:
    lines = shown(ticks, terminal=False, told="something happens").splitlines()
    acts = sum(isinstance(decision.action, ScaleReplicas) for _, decision, _ in ticks)
    assert lines[0] == "something happens"
    assert sum("→" in line for line in lines) == acts > 2
    assert [line.split()[0] for line in lines if " ready  score " in line] == [
        "00:00:00",
        "00:10:00",
        "00:20:00",
        "00:30:00",
    ]


def test_on_a_terminal_there_is_a_panel_with_what_is_asked_for(ticks: list[Tick]) -> None:
    panel = shown(ticks[:1], terminal=True)
    for words in ("serving/chat-a", "2 ready, 2 ordered", "memory", "backlog", "latency", "why", "more", "stuff"):
        assert words in panel


def test_a_wish_that_nobody_fulfils_is_shown_once(ticks: list[Tick]) -> None:
    snapshot, decision, outcome = next(tick for tick in ticks if isinstance(tick[1].action, ScaleReplicas))
    assert outcome is Outcome.APPLIED
    wishes = [(snapshot, decision, Outcome.STANDBY)] * 5
    acted = [(snapshot, decision, Outcome.APPLIED)] * 2
    lines = [line for line in shown(wishes + acted, terminal=False).splitlines() if "→" in line]
    assert [line.endswith("standby") for line in lines] == [True, False, False]
