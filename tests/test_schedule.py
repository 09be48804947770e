"""Which schedules are active when: cron, time zones, and the days on which clocks change."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim
from hypothesis import example, given
from hypothesis import strategies as st

import autoscaler.schedule
from autoscaler.core.policy import Policy, ReplicaBounds, Schedule, TargetRef
from autoscaler.schedule import Calendar, neighbours, overlap_warnings, schedule_complaints, window

HOUR, DAY = 3600.0, 86400.0


def when(text: str) -> float:
    """Return the epoch seconds of a time with its offset from UTC, `2026-03-29T01:00+01:00`."""
    return datetime.fromisoformat(text).timestamp()


def schedule(cron: str, zone: str, hours: float, **more: object) -> Schedule:
    return Schedule(cron=cron, timezone=zone, duration_s=hours * HOUR, min=12, **more)  # type: ignore[arg-type]


def openings(one: Schedule, since: str, until: str, step_s: float = 300.0) -> list[tuple[str, str]]:
    """Return when its windows open and close between two times, in UTC, found by asking a calendar in small steps."""
    calendar = Calendar([one])
    found: list[tuple[str, str]] = []
    opened = ""
    at = when(since)
    while at <= when(until):
        is_open = bool(calendar.active(at))
        shown = datetime.fromtimestamp(at, UTC).strftime("%d %H:%M")
        if is_open and not opened:
            opened = shown
        elif opened and not is_open:
            found.append((opened, shown))
            opened = ""
        at += step_s
    return found


BERLIN, NEW_YORK, SHANGHAI = "Europe/Berlin", "America/New_York", "Asia/Shanghai"


@pytest.mark.parametrize(
    ("one", "since", "until", "expected"),
    [
        pytest.param(
            schedule("0 8 * * 1-5", SHANGHAI, 12),
            "2026-11-27T00:00+00:00",
            "2026-12-01T00:00+00:00",
            [("27 00:00", "27 12:00"), ("30 00:00", "30 12:00")],
            id="a zone without changes: Friday and Monday, no weekend",
        ),
        pytest.param(
            schedule("0 8 * * *", BERLIN, 10),
            "2026-03-28T00:00+00:00",
            "2026-03-30T00:00+00:00",
            [("28 07:00", "28 17:00"), ("29 06:00", "29 16:00")],
            id="Berlin in spring: at eight by the clock, before and after",
        ),
        pytest.param(
            schedule("0 8 * * *", BERLIN, 10),
            "2026-10-24T00:00+00:00",
            "2026-10-26T00:00+00:00",
            [("24 06:00", "24 16:00"), ("25 07:00", "25 17:00")],
            id="Berlin in autumn: at eight by the clock, before and after",
        ),
        pytest.param(
            schedule("0 22 * * *", BERLIN, 8),
            "2026-03-28T12:00+00:00",
            "2026-03-29T12:00+00:00",
            [("28 21:00", "29 05:00")],
            id="over midnight and the short night: eight hours that have passed, to seven by the clock",
        ),
        pytest.param(
            schedule("0 22 * * *", BERLIN, 8),
            "2026-10-24T12:00+00:00",
            "2026-10-25T12:00+00:00",
            [("24 20:00", "25 04:00")],
            id="over midnight and the long night: eight hours that have passed, to five by the clock",
        ),
        pytest.param(
            schedule("30 2 * * *", BERLIN, 1),
            "2026-03-28T12:00+00:00",
            "2026-03-30T12:00+00:00",
            [("29 01:00", "29 02:00"), ("30 00:30", "30 01:30")],
            id="Berlin in spring: half past two is not there and becomes three",
        ),
        pytest.param(
            schedule("30 2 * * *", BERLIN, 0.5),
            "2026-10-24T12:00+00:00",
            "2026-10-26T12:00+00:00",
            [("25 00:30", "25 01:00"), ("26 01:30", "26 02:00")],
            id="Berlin in autumn: half past two comes twice, the first counts",
        ),
        pytest.param(
            schedule("30 2 * * *", BERLIN, 2),
            "2026-10-24T12:00+00:00",
            "2026-10-25T12:00+00:00",
            [("25 00:30", "25 02:30")],
            id="Berlin in autumn: one that lasts through the second half past two",
        ),
        pytest.param(
            schedule("30 2 * * *", NEW_YORK, 1),
            "2026-03-07T12:00+00:00",
            "2026-03-09T12:00+00:00",
            [("08 07:00", "08 08:00"), ("09 06:30", "09 07:30")],
            id="New York in spring",
        ),
        pytest.param(
            schedule("30 1 * * *", NEW_YORK, 1),
            "2026-10-31T12:00+00:00",
            "2026-11-02T12:00+00:00",
            [("01 05:30", "01 06:30"), ("02 06:30", "02 07:30")],
            id="New York in autumn",
        ),
        pytest.param(
            schedule("0 0 * * *", "America/Havana", 1),
            "2026-03-07T12:00+00:00",
            "2026-03-09T12:00+00:00",
            [("08 05:00", "08 06:00"), ("09 04:00", "09 05:00")],
            id="Havana in spring, where midnight is the hour that is missing",
        ),
        pytest.param(
            schedule("0 * * * *", BERLIN, 0.5),
            "2026-10-25T00:00+00:00",
            "2026-10-25T03:00+00:00",
            [("25 00:00", "25 00:30"), ("25 01:00", "25 01:30"), ("25 02:00", "25 02:30")],
            id="hourly: each of the doubled hours",
        ),
        pytest.param(
            schedule("0 8 * * *", "UTC", 2, lead_s=1800.0),
            "2026-11-30T00:00+00:00",
            "2026-12-01T00:00+00:00",
            [("30 07:30", "30 10:00")],
            id="a lead begins it earlier, and it ends when it would",
        ),
        pytest.param(
            schedule("30 2 * * *", BERLIN, 1, lead_s=1800.0),
            "2026-03-28T12:00+00:00",
            "2026-03-29T12:00+00:00",
            [("29 00:30", "29 02:00")],
            id="a lead is time that passes, too",
        ),
        pytest.param(
            schedule("0 */6 * * *", "UTC", 9),
            "2026-11-30T01:00+00:00",
            "2026-12-01T01:00+00:00",
            [],
            id="longer than its period: always open",
        ),
        pytest.param(
            schedule("0 9 29 2 *", "UTC", 24),
            "2028-02-28T00:00+00:00",
            "2028-03-02T00:00+00:00",
            [("29 09:00", "01 09:00")],
            id="once in four years",
        ),
    ],
)
def test_windows_open_and_close(one: Schedule, since: str, until: str, expected: list[tuple[str, str]]) -> None:
    assert openings(one, since, until) == expected


def test_a_window_is_open_from_its_match_to_just_before_its_end() -> None:
    one, begin = schedule("0 8 * * *", "UTC", 1), when("2026-11-30T08:00+00:00")
    shown = [window(one, begin + seconds)[0] for seconds in (-0.001, 0.0, 0.001, HOUR - 0.001, HOUR)]
    assert shown == [False, True, True, True, False]


def test_a_longer_window_than_its_period_is_always_open() -> None:
    calendar = Calendar([schedule("0 */6 * * *", "UTC", 9)])
    start = when("2026-11-30T00:00+00:00")
    assert all(calendar.active(start + hours * HOUR) for hours in range(48))


ZONES = (BERLIN, NEW_YORK, SHANGHAI, "UTC", "Pacific/Chatham", "America/Havana", "Africa/Casablanca")
CHANGES = [
    when(text)
    for text in (
        "2026-03-29T01:00+00:00",
        "2026-10-25T01:00+00:00",
        "2026-03-08T07:00+00:00",
        "2026-11-01T06:00+00:00",
        "2026-04-04T14:00+00:00",
        "2026-09-26T14:00+00:00",
        "2026-03-08T05:00+00:00",
        "2026-02-15T02:00+00:00",
    )
]
CRONS = ("30 2 * * *", "0 0 * * *", "15,45 1-3 * * *", "*/20 * * * *", "10 */2 * * *", "0 8 * * 1-5", "5 1 1 * *")


def matches(one: Schedule, since: float, until: float) -> Iterator[float]:
    """Yield all matches between two times, by the library's way forward from two days earlier."""
    start = datetime.fromtimestamp(since, ZoneInfo(one.timezone)) - timedelta(days=2)
    for match in CronSim(one.cron, start):
        if match.timestamp() > until:
            return
        if match.timestamp() >= since:
            yield match.timestamp()


@example(cron="20 2 * * *", zone=BERLIN, change=CHANGES[1], minutes=10, hours=0.75, lead_s=0.0)
@given(
    cron=st.sampled_from(CRONS),
    zone=st.sampled_from(ZONES),
    change=st.sampled_from(CHANGES),
    minutes=st.integers(-300, 300),
    hours=st.sampled_from([0.25, 0.75, 1.0, 5.0, 30.0]),
    lead_s=st.sampled_from([0.0, 600.0, 5400.0]),
)
def test_active_is_what_the_matches_say(
    cron: str, zone: str, change: float, minutes: int, hours: float, lead_s: float
) -> None:
    """Around every change of clocks, for all that a match before or after could open; and it stays so until it may
    change.
    """
    one, at = schedule(cron, zone, hours, lead_s=lead_s), change + minutes * 60.0
    found = list(matches(one, at - 8 * DAY, at + 3 * DAY))

    def is_open(at: float) -> bool:
        return any(match - lead_s <= at < match + one.duration_s for match in found)

    active, until = window(one, at)
    assert active is is_open(at)
    assert until > at
    assert all(is_open(moment) is active for moment in (min(until, at + DAY) - 0.001, (at + min(until, at + DAY)) / 2))
    earlier = [match for match in found if match <= at]
    later = [match for match in found if match > at]
    last, coming = neighbours(one, at)
    assert last is None or last == earlier[-1]
    assert last is not None or not earlier or earlier[-1] < at - one.duration_s
    assert coming == later[0] if later else coming is None or coming > at + 3 * DAY


def test_a_calendar_says_all_that_are_active_in_the_policys_order() -> None:
    day = schedule("0 8 * * *", "UTC", 12, name="day")
    night = schedule("0 19 * * *", "UTC", 12, name="night")
    calendar = Calendar([night, day])
    hours = [calendar.active(when(f"2026-11-30T{hour:02}:30+00:00")) for hour in (7, 9, 19, 21)]
    assert hours == [(), ("day",), ("night", "day"), ("night",)]
    assert calendar.active(when("2026-11-30T09:30+00:00")) == ("day",)  # time may stand earlier than at the last call
    assert Calendar([]).active(0.0) == ()
    unnamed = Calendar([schedule("0 8 * * *", SHANGHAI, 24)])
    assert unnamed.active(when("2026-11-30T09:00+08:00")) == ("0 8 * * * Asia/Shanghai",)


def test_a_calendar_looks_only_when_something_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def counted(one: Schedule, at: float) -> tuple[bool, float]:
        asked.append(at)
        return window(one, at)

    monkeypatch.setattr(autoscaler.schedule, "window", counted)
    calendar, start = Calendar([schedule("0 8 * * *", "UTC", 12)]), when("2026-11-30T00:00+00:00")
    shown = [calendar.active(start + 5.0 * tick) for tick in range(17280)]
    assert len(asked) == 3  # at the start, at eight, and at twenty
    assert sum(map(bool, shown)) == 12 * 720


@pytest.mark.parametrize(
    ("cron", "words"),
    [
        pytest.param("0 8 * *", "must have five fields", id="four fields"),
        pytest.param("0 0 8 * * *", "must have five fields", id="seconds"),
        pytest.param("", "must have five fields", id="nothing"),
        pytest.param("@daily", "must have five fields", id="a nickname"),
        pytest.param("0 25 * * *", "no cron expression (bad hour)", id="hour 25"),
        pytest.param("0 8 * * MON-FRY", "no cron expression (bad day-of-week)", id="no day"),
        pytest.param("0 8 31 2 *", "no cron expression (bad day-of-month)", id="no such date"),
        pytest.param("0 0 */31 * 5L", "never matches", id="the first of a month as its last Friday"),
        pytest.param("60 8 * * *", "no cron expression (bad minute)", id="minute 60"),
    ],
)
def test_what_is_no_cron_expression_is_said(cron: str, words: str) -> None:
    policy = Policy(
        name="p",
        target=TargetRef(deployment="d"),
        replicas=ReplicaBounds(max=9),
        schedules=(schedule("0 8 * * *", "UTC", 1), schedule(cron, "UTC", 1)),
    )
    ((path, value, advice),) = schedule_complaints(policy)
    assert (path, value) == ("schedules[1].cron", cron)
    assert words in advice


@pytest.mark.parametrize(
    ("zone", "words"),
    [
        pytest.param("Europe/Berln", "did you mean Europe/Berlin?", id="misspelt"),
        pytest.param("Mars", "no time zone", id="unknown"),
        pytest.param("Europe", "no time zone", id="a directory of the database"),
        pytest.param("", "such as UTC or Europe/Berlin", id="nothing"),
        pytest.param("../etc/passwd", "no time zone", id="a path"),
        pytest.param("+08:00", "no time zone", id="an offset"),
    ],
)
def test_what_is_no_time_zone_is_said(zone: str, words: str) -> None:
    policy = Policy(
        name="p",
        target=TargetRef(deployment="d"),
        replicas=ReplicaBounds(max=9),
        schedules=(schedule("0 8 * * *", zone, 1),),
    )
    ((path, value, advice),) = schedule_complaints(policy)
    assert (path, value) == ("schedules[0].timezone", zone)
    assert words in advice


@pytest.mark.parametrize(
    ("one", "other", "places"),
    [
        pytest.param(schedule("0 8 * * 1-5", BERLIN, 12), schedule("0 20 * * *", BERLIN, 12, max=6), [], id="by turns"),
        pytest.param(
            schedule("0 8 * * 1-5", BERLIN, 12, lead_s=60.0),
            schedule("0 20 * * *", BERLIN, 12, max=6),
            ["schedules[0].min"],
            id="a lead reaches into the other",
        ),
        pytest.param(
            schedule("0 8 * * *", BERLIN, 2),
            schedule("0 8 * * *", "UTC", 2, max=6),
            ["schedules[0].min"],
            id="in two zones",
        ),
        pytest.param(
            schedule("0 0 * * *", BERLIN, 4, max=6, name="night"),
            schedule("0 12 24 12 *", BERLIN, 48, max=40, name="feast"),
            ["schedules[1].min"],
            id="once a year and every night",
        ),
        pytest.param(schedule("0 8 * * *", BERLIN, 2), schedule("0 8 * * *", BERLIN, 2, max=12), [], id="equal"),
    ],
)
def test_a_min_that_another_max_overrules_is_a_warning(one: Schedule, other: Schedule, places: list[str]) -> None:
    if not one.name:
        other = replace(other, min=None)
    policy = Policy(name="p", target=TargetRef(deployment="d"), replicas=ReplicaBounds(max=50), schedules=(one, other))
    found = list(overlap_warnings(policy))
    assert [path for path, _, _ in found] == places
