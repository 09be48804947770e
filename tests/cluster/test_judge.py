"""The judge of the fault tests finds what is wrong, and nothing else."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from autoscaler.testbed.api import Json
from autoscaler.testbed.plane import AuditEvent
from tests.cluster.judge import Blind, Rules, complaints, intervals_until, silence

RULES = Rules(minimum=1, maximum=5, step=1, cooldown_s=10.0)


def event(at: float, seen: int, to: int, name: str = "chat", **fields: Any) -> AuditEvent:
    sent = [
        {"op": "test", "path": "/spec/replicas", "value": seen},
        {"op": "test", "path": "/metadata/uid", "value": "u"},
        {"op": "replace", "path": "/spec/replicas", "value": to},
    ]
    if seen == 0:
        sent[0] = {"op": "test", "path": "/spec", "value": {}}
    known = AuditEvent(
        id=f"{name}-{at}",
        at=datetime.fromtimestamp(at, UTC).isoformat(),
        answered_at=at,
        user="daemon",
        credential="",
        agent="",
        verb="patch",
        group="apps",
        resource="deployments/scale",
        namespace="ns",
        name=name,
        code=200,
        sent=sent,
        answer=None,
        dry_run=False,
    )
    return replace(known, **fields)


def line(at: float, seen: int, to: int, **fields: Any) -> Json:
    parts = {name: {"weight": 0.5, "shrink_value": 0.1} for name in ("memory", "backlog")}
    known = {
        "target": "ns/chat",
        "at": at,
        "current_replicas": seen,
        "desired_replicas": to,
        "reason": "down_score" if to < seen else "up_score",
        "outcome": "applied",
        "score": {"parts": parts},
        "gaps": {},
    }
    return known | fields


BLIND_PART = {"parts": {"memory": {"weight": 0.5, "shrink_value": None}}}


@pytest.mark.parametrize(
    ("events", "lines"),
    [
        pytest.param([], [], id="nothing happened"),
        pytest.param([event(1.1, 2, 3)], [line(1.0, 2, 3)], id="grown"),
        pytest.param([event(1.1, 3, 2)], [line(1.0, 3, 2)], id="shrunk"),
        pytest.param([event(1.1, 0, 1)], [line(1.0, 0, 1)], id="from zero"),
        pytest.param([event(1.1, 2, 3), event(11.1, 3, 2)], [line(1.0, 2, 3), line(11.0, 3, 2)], id="cooled down"),
        pytest.param(
            [event(1.1, 2, 3), event(2.1, 3, 4)],
            [line(1.0, 2, 3), line(2.0, 3, 4, reason="up_emergency")],
            id="urgent within the cooldown",
        ),
        pytest.param([event(1.1, 9, 5)], [line(1.0, 9, 5, reason="down_bounds", score=None)], id="into bounds"),
        pytest.param([event(1.1, 2, 3, code=422)], [], id="a conflict needs no line: the second decision has it"),
        pytest.param([event(1.0, 2, 3, verb="get")], [], id="read"),
        pytest.param([event(1.0, 2, 3, group="authorization.k8s.io", verb="create")], [], id="asked for its rights"),
        pytest.param([event(1.0, 2, 3, resource="events", group="", verb="create")], [], id="said"),
    ],
)
def test_what_is_allowed(events: list[AuditEvent], lines: list[Json]) -> None:
    assert complaints(events, lines, {"ns/chat": RULES}, [Blind(20.0, 30.0)]) == []


@pytest.mark.parametrize(
    ("events", "lines", "complaint"),
    [
        pytest.param([event(1.1, 5, 6)], [line(1.0, 5, 6)], "out of bounds", id="above max"),
        pytest.param([event(1.1, 1, 0)], [line(1.0, 1, 0)], "out of bounds", id="below min"),
        pytest.param([event(1.1, 5, 6, code=422)], [], "out of bounds", id="asked for and refused"),
        pytest.param([event(1.1, 2, 3)], [], "without a decision", id="no line"),
        pytest.param([event(1.1, 2, 3)], [line(1.2, 2, 3)], "without a decision", id="a later line"),
        pytest.param([event(1.1, 2, 3)], [line(1.0, 2, 4)], "without a decision", id="another wish"),
        pytest.param([event(1.1, 2, 3)], [line(1.0, 2, 3, target="ns/b")], "without a decision", id="another target"),
        pytest.param([event(1.1, 2, 4)], [line(1.0, 2, 4)], "a step of more than 1", id="two at once"),
        pytest.param(
            [event(1.1, 2, 3), event(9.1, 3, 2)],
            [line(1.0, 2, 3), line(9.0, 3, 2)],
            "8.0 s after the last step",
            id="within the cooldown",
        ),
        pytest.param(
            [event(1.1, 4, 3), event(9.1, 3, 2)],
            [line(1.0, 4, 3), line(9.0, 3, 2, reason="up_emergency")],
            "8.0 s after the last step",
            id="no emergency shrinks",
        ),
        pytest.param([event(1.1, 3, 2)], [line(1.0, 3, 2, score=BLIND_PART)], "missing data", id="a part missing"),
        pytest.param([event(1.1, 3, 2)], [line(1.0, 3, 2, score=None)], "missing data", id="no score"),
        pytest.param([event(1.1, 3, 2)], [line(1.0, 3, 2, gaps={"refused": 1})], "missing data", id="a page missing"),
        pytest.param([event(25.1, 3, 2)], [line(25.0, 3, 2)], "nothing was to be known", id="blind"),
        pytest.param([event(1.1, 1, 2, name="paused")], [], "not to be scaled", id="hands off"),
        pytest.param([event(1.1, 1, 2, name="paused", code=403)], [], "not to be scaled", id="hands off, refused"),
        pytest.param([event(1.1, 1, 2, name="theirs")], [], "not to be scaled", id="no policy"),
        pytest.param([event(1.1, 2, 3, sent=[])], [], "without", id="not a compare-and-set"),
        pytest.param([event(1.1, 2, 3, resource="deployments")], [], "patch of deployments", id="the Deployment"),
        pytest.param([event(1.1, 2, 3, resource="pods", group="")], [], "patch of pods", id="a pod"),
    ],
)
def test_what_is_complained_of(events: list[AuditEvent], lines: list[Json], complaint: str) -> None:
    rules = {"ns/chat": RULES, "ns/paused": replace(RULES, hands_off=True)}
    (found,) = complaints(events, lines, rules, [Blind(20.0, 30.0)])
    assert complaint in found


def test_who_may_only_read_is_silent() -> None:
    assert silence([event(1.0, 2, 3, verb="list")]) == []
    assert silence([event(1.0, 2, 3, code=403)]) == ["patch of deployments/scale chat"]


def test_the_next_good_decision_ends_the_wait() -> None:
    lines = [
        line(1.0, 2, 2),
        line(3.0, 2, 2, score=BLIND_PART),
        line(5.0, 2, 3, outcome="failed"),
        line(7.0, 2, 2, gaps={"refused": 1}),
        line(8.0, 2, 2, target="ns/b"),
        line(9.0, 2, 2),
        line(11.0, 2, 2),
    ]
    assert intervals_until(lines, "ns/chat", 1.5, 2.0) == 3.75
    with pytest.raises(ValueError, match="no good decision"):
        intervals_until(lines, "ns/chat", 12.0, 2.0)


@pytest.mark.parametrize(
    ("count", "ended", "found"),
    [
        pytest.param(1, {"chat-a": 20.5}, 0, id="of one that was gone"),
        pytest.param(1, {"chat-a": 25.0}, 1, id="of one that went later"),
        pytest.param(1, {"chat-b": 20.5}, 1, id="of another"),
        pytest.param(2, {"chat-a": 20.5}, 1, id="of two"),
    ],
)
def test_a_page_that_is_missing(count: int, ended: dict[str, float], found: int) -> None:
    gaps = {"unreachable": {"count": count, "first": "vllm * chat-a: Cannot connect to host 127.1.1.1:8000"}}
    lines, events = [line(21.0, 3, 2, gaps=gaps)], [event(21.1, 3, 2)]
    assert len(complaints(events, lines, {"ns/chat": RULES}, [], ended)) == found
