"""Days of a published rate curve, with lengths: requests where none are published."""

from dataclasses import dataclass
from pathlib import Path

from autoscaler.sim.traffic import Workload, load_workload
from autoscaler.sim.workload import HOUR, Lengths, Surge

DAY = 24 * HOUR
CHAT = Lengths(prompt=771.0, output=85.0, prompt_sigma=1.32, output_sigma=1.23, longest_prompt=8_000)
"""ServeGen's m-large: means and medians of 771 and 321 tokens in, 85 and 40 out; sigma^2 = 2 ln(mean / median)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """A day of a rate curve.

    Args:
        number: from 0 on.
        share: of the curve's rate.
        lengths: that are drawn.
    """

    number: int
    share: float
    lengths: Lengths

    def of(self, curve: Path) -> Workload:
        """Return it as a workload."""
        return another_day(curve, self.number, self.share, self.lengths)


def another_day(curve: Path, day: int, share: float, lengths: Path | Lengths, surge: Surge | None = None) -> Workload:
    """Return a day of a curve of several days, at a share of its rate."""
    whole, factor = load_workload(str(curve)).rate, surge or Surge(at=0.0, duration_s=0.0, factor=1.0)
    drawn = lengths if isinstance(lengths, Lengths) else load_workload(str(lengths)).recorded or Lengths()
    return Workload(
        name=f"{curve.name.partition('.')[0]}-{day}",
        text=f"day {day} of {curve.name} at {share:.3g} of its rate",
        duration_s=DAY,
        rate=lambda at: share * whole(day * DAY + at) * factor(at),
        lengths=drawn,
    )
