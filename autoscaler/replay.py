"""Replay: a recording's snapshots through the same decide and advance, without a clock or a cluster.

Open-loop: it shows what a policy decides on what was seen, not what would then have happened.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from autoscaler.core.decide import decide
from autoscaler.core.memory import Memory, recall
from autoscaler.core.policy import Policy
from autoscaler.core.state import State, absorb, advance
from autoscaler.core.types import Decision, Hold, Outcome, RollOut, ScaleReplicas, SetBatching, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replayed:
    """One tick decided anew; `decision` is None, and `error` says why, where deciding raised."""

    snapshot: Snapshot
    decision: Decision | None
    error: str = ""


class Replayer:
    """Decides one target's recorded snapshots by one policy, in the order of time.

    Args:
        active: returns the policy's schedules that are active at a time; None takes what was recorded.
    """

    def __init__(self, policy: Policy, active: Callable[[float], tuple[str, ...]] | None = None) -> None:
        self.policy = policy
        self._active = active
        self.state = State()

    def change_policy(self, policy: Policy) -> None:
        """Go on by another policy, as the daemon does after a reload: a target's memory outlives its policy."""
        if policy.target != self.policy.target:
            self.state = State()
        self.policy = policy

    def recall(self, memory: Memory, at: float) -> None:
        """Take in what another process knew, as the daemon did at `at`."""
        self.state = recall(self.policy, self.state, memory, at)

    def tick(self, snapshot: Snapshot, outcome: Outcome | None) -> Replayed:
        """Return the decision on one snapshot.

        Args:
            outcome: what became of the recorded decision; None takes what a dry-run would have made of the new one.
        """
        schedules = snapshot.schedules if self._active is None else self._active(snapshot.at)
        if schedules != snapshot.schedules:
            snapshot = replace(snapshot, schedules=schedules)
        try:
            state = absorb(self.policy, self.state, snapshot)
            decision = decide(self.policy, state, snapshot)
            if outcome is None:
                outcome = Outcome.UNCHANGED if isinstance(decision.action, Hold) else Outcome.SIMULATED
            self.state = advance(self.policy, state, decision, outcome)
        except Exception as error:  # noqa: BLE001 - counted and shown; the live loop, too, outlives a bad tick
            return Replayed(snapshot=snapshot, decision=None, error=f"{type(error).__name__}: {error}")
        return Replayed(snapshot=snapshot, decision=decision)


@dataclass(slots=True, kw_only=True)
class Summary:
    """What a replay came to.

    Args:
        first_at, last_at: epoch seconds.
        ups, downs: steps. reversals: steps against the direction of the one before.
        reasons: ticks by primary reason.
        gapped: ticks with at least one gap.
        replica_seconds: what the recorded fleet ordered. wanted_seconds: what the decisions asked for.
    """

    ticks: int = 0
    errors: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    ups: int = 0
    downs: int = 0
    reversals: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    gapped: int = 0
    replica_seconds: float = 0.0
    wanted_seconds: float = 0.0
    _direction: int = 0

    def add(self, replayed: Replayed) -> None:
        """Count one tick."""
        at, decision = replayed.snapshot.at, replayed.decision
        if self.ticks == 0:
            self.first_at = at
        elapsed = at - self.last_at if self.ticks else 0.0
        self.ticks, self.last_at = self.ticks + 1, at
        self.gapped += bool(replayed.snapshot.gaps)
        self.replica_seconds += elapsed * replayed.snapshot.target.current_replicas
        if decision is None:
            self.errors += 1
            return
        self.wanted_seconds += elapsed * decision.proposal.replicas
        self.reasons[decision.reason] = self.reasons.get(decision.reason, 0) + 1
        change = decision.proposal.replicas - decision.proposal.current
        if not isinstance(decision.action, ScaleReplicas) or change == 0:
            return
        direction = 1 if change > 0 else -1
        self.ups += direction > 0
        self.downs += direction < 0
        self.reversals += self._direction == -direction
        self._direction = direction

    @property
    def hours(self) -> float:
        """How long the replay spans."""
        return (self.last_at - self.first_at) / 3600.0


def choose_policy(recorded: str, policies: Mapping[str, Policy], target: tuple[str, str]) -> Policy | None:
    """Return the policy to replay a recorded stream by: of the same name, else target, else the only one."""
    if recorded in policies:
        return policies[recorded]
    matching = [one for one in policies.values() if (one.target.namespace, one.target.deployment) == target]
    if len(matching) == 1:
        return matching[0]
    return next(iter(policies.values())) if len(policies) == 1 else None


def differs(left: Decision | None, right: Decision | None) -> bool:
    """Tell whether two decisions on one snapshot would act differently."""
    if left is None or right is None:
        return left is not right
    if left.proposal.replicas != right.proposal.replicas:
        return True
    limits = [one.action.limits if isinstance(one.action, SetBatching | RollOut) else None for one in (left, right)]
    return limits[0] != limits[1]


def first_difference(left: object, right: object, path: str = "") -> str:
    """Return where two plain documents part, as `path: left, right`; "" when they are equal.

    Numbers are equal when their bits are: the recording holds their shortest exact form.
    """
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        names: Iterator[str] = iter(sorted({*left, *right}))
        found = (
            first_difference(left.get(name), right.get(name), f"{path}.{name}" if path else name) for name in names
        )
        return next((difference for difference in found if difference), "")
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        found = (first_difference(one, other, f"{path}[{index}]") for index, (one, other) in pairs)
        return next((difference for difference in found if difference), "")
    return "" if left == right and type(left) is type(right) else f"{path}: recorded {left!r}, now {right!r}"
