"""One tick, whoever carries it out: take the snapshot in, decide, act, remember."""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Final

from autoscaler.core.decide import decide
from autoscaler.core.policy import Policy
from autoscaler.core.state import State, absorb, advance
from autoscaler.core.types import Action, Decision, Outcome, Snapshot, TargetStatus


class Reread:
    """Asks for the target as it is now: it was not what the action expected."""


REREAD: Final = Reread()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """One decided and executed tick; `state` is what is remembered of it."""

    state: State
    snapshot: Snapshot
    decision: Decision
    outcome: Outcome


Tick = Generator[Action | Reread, Outcome | TargetStatus | None, Ticked]
"""Yields what is to be done and is sent what became of it.

To an action the answer is its outcome, None for a conflict; to `REREAD` it is the target, None where that could not be
read. Returns the tick.
"""


def take_tick(policy: Policy, state: State, snapshot: Snapshot) -> Tick:
    """Go through one tick. After a conflict the target is read again and decided on once more; a second one fails."""
    absorbed = absorb(policy, state, snapshot)
    decision = decide(policy, absorbed, snapshot)
    outcome = yield decision.action
    if outcome is None:
        target = yield REREAD
        if isinstance(target, TargetStatus):
            snapshot = replace(snapshot, target=target)
            absorbed = absorb(policy, state, snapshot)
            decision = decide(policy, absorbed, snapshot)
            outcome = yield decision.action
    became = outcome if isinstance(outcome, Outcome) else Outcome.FAILED
    state = advance(policy, absorbed, decision, became)
    return Ticked(state=state, snapshot=snapshot, decision=decision, outcome=became)
