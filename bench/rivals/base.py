"""What all rivals share: how they are asked, how they are made, and which of their numbers may be tuned."""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from bench.rivals.view import View


class Rival(Protocol):
    """A controller with a memory of its own. Pure but for that: equal histories decide equally."""

    @property
    def interval_s(self) -> float:
        """How often it wants to be asked [s]."""

    def desired(self, now: float, view: View) -> int:
        """Return the replicas that it orders at `now` [s]; `now` must rise from call to call."""


class Settings(Protocol):
    """A rival's numbers, the vendor's by default; `dataclasses.replace` tunes them."""

    @property
    def bounds(self) -> "Bounds":
        """Between which replicas it may choose."""

    def build(self) -> Rival:
        """Return the rival with an empty memory."""


AnySettings = TypeVar("AnySettings", bound=Settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The fewest and the most replicas."""

    min: int = 1
    max: int = 100

    def clip(self, replicas: float) -> int:
        """Return the count inside the bounds that is nearest to a whole number of replicas."""
        return min(max(int(replicas), self.min), self.max)


class Span(NamedTuple):
    """Where a search may look for a value, on a logarithmic scale or not."""

    low: float
    high: float
    log: bool

    def draw(self, rng: np.random.Generator) -> float:
        """Return a value of it."""
        if self.log:
            return math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        return float(rng.uniform(self.low, self.high))


def tuned(default: float | None, low: float, high: float, *, log: bool = False) -> Any:
    """Return a field of a settings class that a search may change, beside the vendor's value."""
    return field(default=default, metadata={"span": Span(low, high, log)})


def spans(settings: Settings) -> dict[str, Span]:
    """Return what a search may change of a rival, by field; what is None there stays out of use."""
    every: Any = settings
    return {
        one.name: one.metadata["span"]
        for one in fields(every)
        if "span" in one.metadata and getattr(settings, one.name) is not None
    }


def sample(settings: AnySettings, rng: np.random.Generator) -> AnySettings:
    """Return the settings with every value that may be tuned drawn from its span."""
    drawn = {name: span.draw(rng) for name, span in spans(settings).items()}
    every: Any = settings
    changed: AnySettings = replace(every, **drawn)
    return changed
