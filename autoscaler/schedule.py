"""Which schedules of a policy are active at a moment: the only reader of cron expressions and time zones."""

import difflib
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import combinations, islice
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from autoscaler.core.policy import MAX_DURATION_S, Complaint, Policy, Schedule

FIELDS = 5
SOME_DAY, WINDOWS_COMPARED = 1_704_067_200.0, 60
"""What overlaps at all does so within two months of daily windows, or four years of rarer ones."""
LOOK_BACK_S = (3 * 3600.0, 86400.0, MAX_DURATION_S)
"""The last match is looked for so far back, a short way first: many matches are close by, few are soon passed."""


def schedule_complaints(policy: Policy) -> Iterator[Complaint]:
    """Yield the cron expressions and time zones that cannot be used: field path, value, what would be right."""
    for index, schedule in enumerate(policy.schedules):
        zone = _zone(schedule.timezone)
        if zone is None:
            close = difflib.get_close_matches(schedule.timezone, sorted(available_timezones()), n=1)
            hint = f"did you mean {close[0]}?" if close else "such as UTC or Europe/Berlin"
            yield f"schedules[{index}].timezone", schedule.timezone, f"is no time zone of the IANA database; {hint}"
        wrong = _wrong_cron(schedule.cron)
        if wrong:
            yield f"schedules[{index}].cron", schedule.cron, wrong


def overlap_warnings(policy: Policy) -> Iterator[Complaint]:
    """Yield the schedules whose min another one's max overrules while both are active."""
    numbered = enumerate(policy.schedules)
    for (index, one), (other_index, other) in combinations(numbered, 2):
        for place, low, high in ((index, one, other), (other_index, other, one)):
            if low.min is not None and high.max is not None and low.min > high.max and _overlap(low, high):
                advice = f"is above the max of {high.label} ({high.max}), which wins while both are active"
                yield f"schedules[{place}].min", low.min, advice


def _overlap(one: Schedule, other: Schedule) -> bool:
    """Return whether the other is active in any of one's first windows since a fixed day, or the other way round."""
    for first, second in ((one, other), (other, one)):
        start = datetime.fromtimestamp(SOME_DAY, ZoneInfo(first.timezone))
        for match in islice(CronSim(first.cron, start), WINDOWS_COMPARED):
            at = match.timestamp()
            is_active, until = window(second, at - first.lead_s)
            if is_active or until < at + first.duration_s:
                return True
    return False


def _zone(name: str) -> ZoneInfo | None:
    """Return the time zone of that name; None when there is none. A name may be that of a directory."""
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        return None


def _wrong_cron(cron: str) -> str:
    """Return what is wrong with a cron expression; "" when nothing is."""
    meant = 'minute, hour, day of month, month, day of week, such as "0 8 * * 1-5"'
    if len(cron.split()) != FIELDS:
        return f"must have five fields: {meant}"
    try:
        first = next(CronSim(cron, datetime(2024, 1, 1, tzinfo=UTC)), None)
    except CronSimError as error:
        return f"is no cron expression ({str(error).lower()}): {meant}"
    return "" if first is not None else "never matches: there is no such date"


def neighbours(schedule: Schedule, at: float) -> tuple[float | None, float | None]:
    """Return the last match at or before `at`, and the first after it, epoch seconds.

    No last one where it may be longer ago than a window lasts, no next one where there is none in 50 years. Matches are
    only ever looked for forwards: backwards, cronsim 2.8 does not end near some changes of clocks.
    """
    for back_s in LOOK_BACK_S:
        last, start = None, datetime.fromtimestamp(at - back_s, ZoneInfo(schedule.timezone))
        for match in CronSim(schedule.cron, start):
            if match.timestamp() > at:
                break
            last = match.timestamp()
        else:
            return last, None
        if last is not None or back_s >= schedule.duration_s:
            break
    return last, match.timestamp()


def window(schedule: Schedule, at: float) -> tuple[bool, float]:
    """Return whether the schedule is active at `at`, and until when that certainly stays so, epoch seconds."""
    last, coming = neighbours(schedule, at + schedule.lead_s)
    begins = math.inf if coming is None else coming - schedule.lead_s
    ends = -math.inf if last is None else last + schedule.duration_s
    return (True, min(ends, begins)) if at < ends else (False, begins)


class Calendar:
    """Tells which schedules are active. Looks into them only when one of them may begin or end."""

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self._schedules = tuple(schedules)
        self._active: tuple[str, ...] = ()
        self._known = (math.inf, math.inf) if schedules else (-math.inf, math.inf)

    def active(self, at: float) -> tuple[str, ...]:
        """Return the labels of the schedules that are active at `at`, in the policy's order."""
        since, until = self._known
        if not since <= at < until:
            found = [(schedule.label, *window(schedule, at)) for schedule in self._schedules]
            self._active = tuple(label for label, is_active, _ in found if is_active)
            self._known = at, min(end for _, _, end in found)
        return self._active
