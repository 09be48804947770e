"""What a fleet held over time: the replicas that were ready against those that the work needed, and quiet hours."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoscaler.core.types import Decision, Floats, Outcome, Snapshot, TargetStatus
from autoscaler.sim.workload import HOUR
from bench.oracle import THETAS, needed
from bench.rivals.base import Bounds

OVER = 1.25
"""Times the replicas that are needed: more than that is over-provisioned."""
BIN_S, DAY_HOURS = 60.0, 24


class Watch:
    """Notes the ready replicas, and the pods that cost: those with a node, until they are gone.

    A `Report` of the loop, and what a rival's loop tells.

    Args:
        epoch: epoch seconds of the start.
    """

    def __init__(self, epoch: float) -> None:
        self._epoch = epoch
        self._rows: list[tuple[float, int, int]] = []

    def tick(self, policy: str, snapshot: Snapshot, decision: Decision, outcome: Outcome, duration_s: float) -> None:
        """Note what a tick saw."""
        self.note(snapshot.at - self._epoch, snapshot.target)

    def note(self, at: float, status: TargetStatus) -> None:
        """Note the fleet at a time [s]."""
        self._rows.append((at, status.ready_replicas, sum(bool(pod.node) for pod in status.pods)))

    def held(self, duration_s: float) -> tuple[Floats, Floats, Floats, Floats]:
        """Return the times, how long each lasted [s], and the ready replicas and the pods meanwhile."""
        rows = np.array(self._rows, dtype=np.float64).reshape(-1, 3)
        rows = rows[rows[:, 0] < duration_s]
        return rows[:, 0], np.diff(rows[:, 0], append=duration_s), rows[:, 1], rows[:, 2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provision:
    """How well the replicas met the need.

    The need of a minute is the fewest replicas that its work keeps busy for at most a share theta; which theta is left
    open, so there is a value for each of `oracle.THETAS`.

    Args:
        under: share of the time with fewer ready replicas than needed.
        over: share of the time with more than `OVER` times as many.
        quiet_gpu_hours: GPU-hours in the half of the day with the least traffic; None for less than a day.
    """

    under: tuple[float, ...]
    over: tuple[float, ...]
    quiet_gpu_hours: float | None

    def to_document(self) -> dict[str, object]:
        """Return it as the results have it."""
        return {
            "under": [round(share, 5) for share in self.under],
            "over": [round(share, 5) for share in self.over],
            "quiet_gpu_hours": self.quiet_gpu_hours,
        }


def provision(
    watch: Watch, busy: Floats, arrivals: Floats, *, duration_s: float, bounds: Bounds, gpus: int
) -> Provision:
    """Return it for a run that was watched at least once.

    Args:
        busy: replicas that the work of each minute keeps busy.
        arrivals: of the requests [s].
    """
    at, lasted, ready, pods = watch.held(duration_s)
    minutes = np.minimum((at // BIN_S).astype(np.int64), len(busy) - 1)
    under, over = [], []
    for theta in THETAS:
        need = needed(busy, theta, bounds)[minutes]
        under.append(float(lasted[ready < need].sum() / duration_s))
        over.append(float(lasted[ready > OVER * need].sum() / duration_s))
    quiet = quiet_hours(arrivals, duration_s)
    cost = lasted * pods * gpus / HOUR
    return Provision(
        under=tuple(under),
        over=tuple(over),
        quiet_gpu_hours=None if quiet is None else float(cost[quiet[_hour(at, len(quiet))]].sum()),
    )


def quiet_hours(arrivals: Floats, duration_s: float) -> NDArray[np.bool_] | None:
    """Return which hours are the half with the fewest requests; None for less than a day."""
    hours = round(duration_s / HOUR)
    if hours < DAY_HOURS:
        return None
    counts = np.bincount(_hour(arrivals, hours), minlength=hours)
    quiet = np.zeros(hours, dtype=np.bool_)
    quiet[np.argsort(counts, kind="stable")[: hours // 2]] = True
    return quiet


def _hour(at: Floats, hours: int) -> NDArray[np.int64]:
    """Return in which of so many hours each time lies; the last takes what little is beyond it."""
    return np.minimum((at // HOUR).astype(np.int64), hours - 1)
