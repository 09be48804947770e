"""Two daemons on one Lease, whose leader is killed, frozen or cut off; `python -m bench failover` does it 200 times.

The judge is tried on requests that were never made, so that it is known to see what it looks for.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from autoscaler.testbed.plane import AuditEvent, Plane
from bench.failover import Fault, Kind, Phase, Settings, failover, judge, quantile

LEASE_S, COOLDOWN_S = 5.0, 10.0
CLAIM = {"spec": {"holderIdentity": "x", "acquireTime": "now"}}
RENEWAL = {"spec": {"holderIdentity": "x"}}


def request(
    at: float, who: str, resource: str = "deployments/scale", sent: Any = None, code: int = 200, took_s: float = 0.01
) -> AuditEvent:
    """Return a request of the audit log."""
    return AuditEvent(
        id=f"{at}",
        at=datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds"),
        answered_at=at + took_s,
        user="subject",
        credential=who,
        agent="",
        verb="patch",
        group="apps",
        resource=resource,
        namespace="pair",
        name="chat",
        code=code,
        sent=sent,
        answer=None,
        dry_run=False,
    )


def claim(at: float, who: str, code: int = 200) -> AuditEvent:
    return request(at, who, "leases", CLAIM, code)


def renewal(at: float, who: str) -> AuditEvent:
    return request(at, who, "leases", RENEWAL)


def fault(at: float, victim: str = "a") -> Fault:
    return Fault(namespace="pair", kind=Kind.KILLED, phase=Phase.ANY, at=at, victim=victim)


GOOD = [claim(0, "a"), renewal(1, "a"), request(2, "a"), claim(8, "b"), request(12, "b")]


@pytest.mark.parametrize(
    ("events", "words"),
    [
        pytest.param(GOOD, [], id="as-promised"),
        pytest.param([*GOOD[:4], request(8.5, "a", code=422), GOOD[4]], [], id="a-refused-write-is-none"),
        pytest.param([*GOOD[:4], request(12, "a")], ["a wrote at"], id="the-frozen-one-writes"),
        pytest.param([GOOD[0], request(2, "b"), claim(8, "b")], ["b wrote at"], id="a-standby-writes"),
        pytest.param(
            [*GOOD[:2], request(7.9, "a", took_s=0.2), claim(8, "b")], ["a and b held"], id="a-write-during-a-takeover"
        ),
        pytest.param([request(2, "a"), claim(8, "b")], ["nobody held"], id="a-write-without-a-holder"),
        pytest.param([*GOOD[:3], claim(10.1, "b"), GOOD[4]], ["taken over 7.10 s after"], id="a-late-takeover"),
        pytest.param([*GOOD[:3], claim(8, "b", code=409)], ["taken over inf s"], id="a-takeover-that-failed"),
        pytest.param([*GOOD[:3], claim(8, "a")], ["taken over inf s"], id="the-victim-again"),
        pytest.param([claim(0, "b"), claim(2.9, "c")], [], id="it-held-the-lease-no-more"),
        pytest.param([*GOOD[:4], request(9, "b")], ["a step 7.00 s after the last one"], id="a-cooldown-forgotten"),
        pytest.param(
            [*GOOD[:3], request(4, "a"), claim(8, "b")], ["a step 2.00 s after"], id="a-cooldown-of-one-process"
        ),
    ],
)
def test_the_judge_sees(events: list[AuditEvent], words: list[str]) -> None:
    verdict = judge(events, [fault(3)], lease_s=LEASE_S, cooldown_s=COOLDOWN_S)
    assert len(verdict.violations) == len(words), verdict.violations
    assert all(word in said for word, said in zip(words, verdict.violations, strict=True))


def test_the_judge_measures() -> None:
    verdict = judge([*GOOD, request(23, "b"), request(24, "b", code=409)], [fault(3)], lease_s=5.0, cooldown_s=10.0)
    assert [round(seconds, 3) for _, seconds in verdict.takeovers] == [5.0]
    assert (verdict.steps, verdict.refused, verdict.gaps, verdict.handed_over) == (3, 1, (10.0, 11.0), (10.0,))


@pytest.mark.parametrize(
    ("slow_at", "slow"),
    [
        pytest.param((9.0, 9.6), 1, id="while-it-lasted"),
        pytest.param((2.0, 2.9), 0, id="before"),
        pytest.param((11.0, 12.0), 0, id="after"),
    ],
)
def test_a_late_takeover_is_excused_by_a_slow_api_server_only(slow_at: tuple[float, float], slow: int) -> None:
    late = [*GOOD[:3], claim(10.1, "b")]
    verdict = judge(late, [fault(3)], lease_s=5.0, cooldown_s=10.0, slow_at=[slow_at])
    assert (verdict.slow, len(verdict.violations)) == (slow, 1 - slow)


@pytest.mark.parametrize(
    ("count", "share", "expected"),
    [
        pytest.param(1, 0.99, 1, id="one"),
        pytest.param(100, 0.99, 99, id="hundred"),
        pytest.param(200, 0.99, 198, id="two-hundred"),
        pytest.param(10, 0.5, 5, id="median"),
    ],
)
def test_a_quantile_is_one_of_the_values(count: int, share: float, expected: int) -> None:
    assert quantile([float(value) for value in range(count, 0, -1)], share) == expected


@pytest.mark.slow
async def test_c106_never_two_writers_and_the_next_one_leads_in_time(plane: Plane, tmp_path: Path) -> None:
    await plane.mend()
    settings = Settings(kills=6, pairs=3, seed=7, lease_s=5.0, cooldown_s=8.0)  # each kind of fault, and each phase
    verdict = await failover(plane, tmp_path, settings)
    assert verdict.violations == ()
    assert verdict.takeovers
    assert verdict.handed_over
