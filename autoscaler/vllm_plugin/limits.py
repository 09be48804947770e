"""The limits that may move, what a wish for them must say, and what a scheduler may be told: pure rules.

Nothing here knows vLLM. The rules themselves are explained in docs/batching.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

SEQS, TOKENS, PREFILL = "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold"
LIMITS = (SEQS, TOKENS, PREFILL)
# Integers up to here survive any JSON reader.
GENERATION_END = 2**53
LARGEST_BODY = 4096
NOTHING: Mapping[str, int] = MappingProxyType({})


class BadRequestError(ValueError):
    """What was sent is no wish at all: not JSON, an unknown key, a value of the wrong type."""


class StaleError(ValueError):
    """A wish with a generation that is behind the one in force, or equal to it with other limits."""

    def __init__(self, asked: int, generation: int) -> None:
        """Say which generation was asked for, and which is in force."""
        if asked == generation:
            super().__init__(f"generation {asked} is in force with other limits: take a higher one")
        else:
            super().__init__(f"generation {asked} is behind {generation}, which is in force")
        self.generation = generation


@dataclass(frozen=True)
class Problem:
    """Why one limit may not have the value that was asked for."""

    limit: str
    value: int
    code: str
    message: str

    def document(self) -> dict[str, Any]:
        """Return it as JSON says it."""
        return {"limit": self.limit, "value": self.value, "code": self.code, "message": self.message}


class RefusedError(ValueError):
    """A wish whose values may not be: every problem at once, and nothing was moved."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        """Keep the problems; the message is all of theirs."""
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = problems


@dataclass(frozen=True)
class Target:
    """One wish: the limits that are to differ from their start-up values. Generation 0 is no wish yet."""

    generation: int = 0
    limits: Mapping[str, int] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return it as the body of a PUT and the file say it."""
        return {"generation": self.generation, "limits": dict(self.limits)}


def read_target(text: str | bytes) -> Target:
    """Return the wish that a body or a file holds. Limits that are null are left out.

    Raises: BadRequestError.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise BadRequestError(f"not JSON: {error}") from error
    if not isinstance(content, dict) or set(content) != {"generation", "limits"}:
        raise BadRequestError('not an object of exactly "generation" and "limits"')
    generation, limits = content["generation"], content["limits"]
    if not is_integer(generation) or not 0 < generation < GENERATION_END:
        raise BadRequestError(f"generation {generation!r} is not an integer from 1 to 2^53 - 1")
    if not isinstance(limits, dict):
        raise BadRequestError('"limits" is not an object')
    for name, value in limits.items():
        if name not in LIMITS:
            raise BadRequestError(f"there is no limit {name!r}, only {', '.join(LIMITS)}")
        if value is not None and not is_integer(value):
            raise BadRequestError(f"{name} {value!r} is neither an integer nor null")
    return Target(generation, {name: limits[name] for name in LIMITS if limits.get(name) is not None})


def is_integer(value: object) -> bool:
    """Return whether it is an integer: a truth value is not."""
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Envelope:
    """Within what one engine's limits may move, all fixed at its start.

    `unsupported` gives the reason by limit. `tokens_per_seq` is what one running sequence may need of the token budget
    in a step: 1, and 1 more for every speculative token.
    """

    startup: Mapping[str, int]
    floors: Mapping[str, int]
    ceilings: Mapping[str, int]
    unsupported: Mapping[str, str] = field(default_factory=dict)
    tokens_per_seq: int = 1

    def problems(self, target: Target) -> tuple[Problem, ...]:
        """Return why the target may not be, one problem a limit; none when it may."""
        return tuple(
            problem for name, value in target.limits.items() if (problem := self._problem(name, value)) is not None
        )

    def _problem(self, name: str, value: int) -> Problem | None:
        if value == self.startup[name]:
            return None
        if name in self.unsupported:
            return Problem(name, value, "unsupported", f"{name} cannot be moved here: {self.unsupported[name]}")
        if value > self.ceilings[name]:
            ceiling = self.ceilings[name]
            return Problem(name, value, "above_ceiling", f"{name} {value} is above its ceiling {ceiling}")
        if value < self.floors[name]:
            floor = self.floors[name]
            return Problem(name, value, "below_floor", f"{name} {value} is below its floor {floor}")
        return None

    def wanted(self, target: Target) -> dict[str, int]:
        """Return every limit as the target has it: its start-up value where it says nothing."""
        return {**self.startup, **target.limits}

    def admission(self, wanted: int, occupied: int, *, clamp: bool) -> int:
        """Return what the scheduler's cap may be now that `occupied` sequences hold a place.

        Where the same number also asserts the size of the batch (`clamp`), it may not be below what runs: the engine
        would die, and before 0.25 its test for equality would never hold and let everybody in.
        """
        return min(max(wanted, occupied), self.ceilings[SEQS]) if clamp else wanted

    def budget(self, wanted: int, occupied: int) -> int:
        """Return what the token budget may be now: enough for one step of each running sequence.

        The scheduler spends it in the order of its list, so with less those at the end would never get any.
        """
        return min(max(wanted, occupied * self.tokens_per_seq), self.ceilings[TOKENS])


def check(current: Target, asked: Target, envelope: Envelope) -> None:
    """Check that one target may follow another.

    Raises: StaleError, for a generation that is behind; RefusedError, for values that may not be.
    """
    if asked.generation < current.generation:
        raise StaleError(asked.generation, current.generation)
    if asked.generation == current.generation:
        if dict(asked.limits) == dict(current.limits):
            return
        raise StaleError(asked.generation, current.generation)
    problems = envelope.problems(asked)
    if problems:
        raise RefusedError(problems)
