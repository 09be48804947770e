"""The error tree: what each error means for the loop is fixed by its class."""

from dataclasses import dataclass


class AutoscalerError(Exception):
    """Base of every error that this program raises on purpose."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a policy, a profile or a model's configuration.

    Args:
        file: path of the file, as given.
        key: dotted path of the key inside the document, e.g. `spec.scaleUp.threshold`; "" for the whole file.
        value: the offending value as text, "" when there is none.
        message: what is wrong and what would be right.
        line: where in the file, 0 when it concerns no line.
    """

    file: str
    key: str
    value: str
    message: str
    line: int = 0

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        where = f"{place}: {self.key}" if self.key else place
        shown = f" = {self.value}" if self.value else ""
        return f"{where}{shown}: {self.message}"


class PolicyError(AutoscalerError):
    """One or more policy files cannot be used; `problems` holds every mistake found, not just the first."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


class ProfileError(AutoscalerError):
    """A simulator's profile cannot be used; `problems` holds every mistake found."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


class ModelError(AutoscalerError):
    """A model's configuration cannot be planned with; `problems` holds every mistake found."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


class TraceError(AutoscalerError):
    """A recording cannot be read; the message names file and line."""


class SourceError(AutoscalerError):
    """A source as a whole could not be read. The loop turns it into gaps and goes on.

    `reason` is a `core.types.GapReason` value.
    """

    def __init__(self, source: str, reason: str, detail: str = "") -> None:
        super().__init__(f"{source}: {reason}" + (f": {detail}" if detail else ""))
        self.source = source
        self.reason = reason
        self.detail = detail


class TargetError(AutoscalerError):
    """The target could not be read: no snapshot this tick, try again next tick.

    `reason` is one of `target_not_found`, `forbidden`, `unauthorized`, `unreachable`, `throttled`, `bad_body`,
    `conflict`, `invalid`, and of a watch also `expired`. `retry_after_s` is the server's own wish, when it gave one.
    """

    def __init__(self, reason: str, detail: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(reason + (f": {detail}" if detail else ""))
        self.reason = reason
        self.detail = detail
        self.retry_after_s = retry_after_s


class ActuationError(AutoscalerError):
    """A write was refused or its fate is unknown; the outcome is FAILED and the next tick decides afresh.

    `reason` is one of `conflict`, `forbidden`, `unauthorized`, `target_not_found`, `throttled`, `invalid`,
    `unreachable`.
    """

    def __init__(self, reason: str, detail: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(reason + (f": {detail}" if detail else ""))
        self.reason = reason
        self.detail = detail
        self.retry_after_s = retry_after_s
