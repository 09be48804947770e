"""What goes wrong in a simulated fleet, and the plan of faults that a policy should outlive."""

import math
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import NamedTuple

MINUTE, HOUR = 60.0, 3600.0


class Symptom(StrEnum):
    """How reading a pod's page goes wrong."""

    LOST = "lost"
    """No answer."""
    FROZEN = "frozen"
    """The page answers, and nothing on it moves any more."""
    NAN = "nan"
    """The gauges read NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blackout:
    """A time in which pages cannot be relied on.

    Args:
        start_s, duration_s: simulated seconds.
        symptom: how it shows.
        share: of the pods, each by its own lot; 1 for all.
    """

    start_s: float
    duration_s: float
    symptom: Symptom = Symptom.LOST
    share: float = 1.0


class ApiTrouble(NamedTuple):
    """A failed write: why, and whether it was carried out all the same."""

    reason: str
    detail: str
    done: bool = False


API_TROUBLES = (
    ApiTrouble("conflict", "HTTP 409"),
    ApiTrouble("unreachable", "HTTP 500"),
    ApiTrouble("unreachable", "no answer in time"),
    ApiTrouble("unreachable", "no answer in time", done=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong; by default nothing does.

    Args:
        blackouts: of the pages. Where two meet, the first counts.
        api_errors: how often a write to the API server fails: a conflict, an error, or no answer, by which it may have
            been carried out or not.
        stuck_probability: how often a start hangs. stuck_s: how long, until its probe gives up and it starts anew.
        crash_mean_s: mean time from ready to a crash, exponential; what was in flight is lost.
        clock_skew_s: how far the cluster's clocks are ahead of the daemon's; below 0, behind. Its stamps are theirs.
    """

    blackouts: tuple[Blackout, ...] = ()
    api_errors: float = 0.0
    stuck_probability: float = 0.0
    stuck_s: float = 900.0
    crash_mean_s: float = math.inf
    clock_skew_s: float = 0.0

    def symptom(self, now: float, lot: float) -> Symptom | None:
        """Return what is wrong with the page of the pod with that lot in [0, 1); None when nothing is."""
        for one in self.blackouts:
            if one.start_s <= now < one.start_s + one.duration_s and lot < one.share:
                return one.symptom
        return None

    def api_trouble(self, chance: Random) -> ApiTrouble | None:
        """Return what becomes of a write; None when it succeeds."""
        if chance.random() >= self.api_errors:
            return None
        return API_TROUBLES[int(chance.random() * len(API_TROUBLES))]


def fault_plan(peak_s: float) -> Faults:
    """Return the plan that a policy should outlive: no page for ten minutes at the peak, every fifth write fails, one
    start in ten hangs for a quarter of an hour, and a replica crashes about once a day.
    """
    return Faults(
        blackouts=(Blackout(start_s=peak_s, duration_s=10 * MINUTE),),
        api_errors=0.2,
        stuck_probability=0.1,
        stuck_s=15 * MINUTE,
        crash_mean_s=24 * HOUR,
    )
