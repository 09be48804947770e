"""Keeps a scheduler that we know within a target, step by step."""

from __future__ import annotations

from typing import Any

from .canary import Known, PassiveError
from .limits import LIMITS, SEQS, TOKENS, Target, check


class Limiter:
    """Sets the three attributes of one scheduler, always between two of its steps."""

    def __init__(self, scheduler: Any, known: Known) -> None:
        """Begin with the start-up values, which are there already."""
        self._scheduler = scheduler
        self._known = known
        self.target = Target()
        self._wanted = dict(known.envelope.startup)
        self._written = dict(known.envelope.startup)
        self._values = dict(known.envelope.startup)
        self._occupied = -1

    def take(self, asked: Target) -> None:
        """Put a target in force.

        Raises: StaleError, RefusedError; PassiveError, as `obey` does.
        """
        check(self.target, asked, self._known.envelope)
        self.target = asked
        self._wanted = self._known.envelope.wanted(asked)
        self._occupied = -1
        self.obey()

    def obey(self) -> None:
        """Set what the next step may do. What runs keeps its place: a lower cap only lets nobody new in.

        Raises: PassiveError, when an attribute is not what was written last: somebody else moves it.
        """
        scheduler, written = self._scheduler, self._written
        occupied = len(scheduler.running) + getattr(scheduler, "num_waiting_for_streaming_input", 0)
        if occupied != self._occupied:
            self._values = self._allowed(occupied)
            self._occupied = occupied
        values = self._values
        for name, slot in self._known.slots.items():
            found = getattr(slot.owner, slot.name)
            if found != written[name]:
                raise PassiveError("changed_by_another", f"{slot.name} is {found!r}, and we wrote {written[name]}")
            if found != values[name]:
                slot.write(values[name])
                written[name] = values[name]

    def _allowed(self, occupied: int) -> dict[str, int]:
        """Return the limits while so many sequences hold a place in the batch."""
        known, values = self._known, dict(self._wanted)
        values[SEQS] = known.envelope.admission(values[SEQS], occupied, clamp=known.clamp)
        values[TOKENS] = known.envelope.budget(values[TOKENS], occupied)
        return values

    def release(self) -> list[str]:
        """Put back the start-up value of each limit that is still as we left it; return what went wrong."""
        problems = []
        for name, slot in self._known.slots.items():
            try:
                if slot.read() == self._written[name]:
                    slot.write(self._known.envelope.startup[name])
            except Exception as error:  # noqa: BLE001 - an attribute that failed once may fail again, with anything
                problems.append(f"{slot.name} could not be set back: {error}")
        return problems

    def document(self) -> dict[str, Any]:
        """Return the part of the state that only a known scheduler has."""
        known, envelope = self._known, self._known.envelope
        return {
            "admission": "clamp" if known.clamp else "cap",
            "capabilities": [name for name in LIMITS if name not in envelope.unsupported],
            "unsupported": dict(envelope.unsupported),
            "startup": dict(envelope.startup),
            "floors": dict(envelope.floors),
            "ceilings": dict(envelope.ceilings),
            "targets": dict(self.target.limits),
            "effective": {name: getattr(slot.owner, slot.name, None) for name, slot in known.slots.items()},
            "num_speculative_tokens": known.num_speculative_tokens,
        }
