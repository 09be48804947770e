"""What all rivals share: how they are asked, how they are made, and which of their numbers may be tuned."""

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Any, NamedTuple, Protocol

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


def tuned(default: float, low: float, high: float, *, log: bool = False) -> Any:
    """Return a field of a settings class that a search may change, beside the vendor's value."""
    return field(default=default, metadata={"span": Span(low, high, log)})


def spans(settings: Settings) -> dict[str, Span]:
    """Return what a search may change of a rival, by field."""
    return {one.name: one.metadata["span"] for one in _fields(settings) if "span" in one.metadata}


def _fields(settings: Any) -> Iterator[Field[Any]]:
    yield from fields(settings)
