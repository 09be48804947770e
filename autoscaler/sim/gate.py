"""A baseline that later runs are held to, so that a change of policy is reviewed like code."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autoscaler.errors import AutoscalerError
from autoscaler.sim.scored import Mean

FORMAT, VERSION = "autoscaler-baseline", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Margins:
    """How much worse a policy may get, on the mean over its seeds.

    Args:
        attainment: points of a share: 0.002 is 0.2 %.
        gpu_hours: a share of the baseline's.
        flaps: more of them an hour.
    """

    attainment: float = 0.002
    gpu_hours: float = 0.02
    flaps: float = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What runs are held to.

    Args:
        setting: what was simulated, as plain data: only equal settings compare.
        policies: figures by policy.
    """

    setting: Mapping[str, object]
    margins: Margins
    policies: Mapping[str, "Held"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The figures that a policy is held to."""

    attainment: float
    gpu_hours: float
    flaps_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One figure of one policy against its baseline.

    Args:
        limit: the worst that is let through.
        worse: it is beyond the limit.
    """

    policy: str
    figure: str
    before: float
    now: float
    limit: float
    worse: bool


def held(mean: Mean) -> Held:
    """Return what a policy that did so is held to."""
    return Held(attainment=mean.attainment, gpu_hours=mean.gpu_hours, flaps_per_hour=mean.flaps_per_hour)


def judge(baseline: Baseline, margins: Margins, setting: Mapping[str, object], rows: Iterable[Mean]) -> list[Verdict]:
    """Return a verdict for each figure of each policy.

    Raises: AutoscalerError, when the baseline is of another setting, or lacks a policy.
    """
    for key in sorted({*baseline.setting, *setting}):
        if baseline.setting.get(key) != setting.get(key):
            raise AutoscalerError(
                f"the baseline was made with {key} {baseline.setting.get(key)!r}, this run has {setting.get(key)!r}: "
                "they do not compare; make a new one with --write-baseline"
            )
    verdicts = []
    for mean in rows:
        before, now = baseline.policies.get(mean.policy), held(mean)
        if before is None:
            names = ", ".join(baseline.policies) or "none"
            raise AutoscalerError(f"the baseline has no policy {mean.policy} (it has: {names})")
        figures: tuple[tuple[str, float, float, float, Callable[[float, float], bool]], ...] = (
            ("attainment", before.attainment, now.attainment, before.attainment - margins.attainment, _below),
            ("GPU-hours", before.gpu_hours, now.gpu_hours, before.gpu_hours * (1.0 + margins.gpu_hours), _above),
            ("flaps/h", before.flaps_per_hour, now.flaps_per_hour, before.flaps_per_hour + margins.flaps, _above),
        )
        verdicts += [
            Verdict(policy=mean.policy, figure=name, before=old, now=new, limit=limit, worse=beyond(new, limit))
            for name, old, new, limit, beyond in figures
        ]
    return verdicts


def _below(value: float, limit: float) -> bool:
    return value < limit - 1e-12


def _above(value: float, limit: float) -> bool:
    return value > limit + 1e-12


def write_baseline(path: Path, baseline: Baseline) -> None:
    """Write it as JSON that a diff shows well. Raises AutoscalerError, when the file cannot be written."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "setting": dict(baseline.setting),
        "margins": _plain(baseline.margins),
        "policies": {name: _plain(one) for name, one in sorted(baseline.policies.items())},
    }
    try:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise AutoscalerError(f"cannot write {path}: {error.strerror}") from error


def _plain(one: Margins | Held) -> dict[str, float]:
    return {name: getattr(one, name) for name in one.__slots__}


def read_baseline(path: Path) -> Baseline:
    """Return the baseline in a file. Raises AutoscalerError that names the file, when it holds none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AutoscalerError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise AutoscalerError(f"{path}: is no JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise AutoscalerError(f'{path}: no baseline: it must say "format": "{FORMAT}"')
    if document.get("version") != VERSION:
        raise AutoscalerError(f"{path}: version {document.get('version')}: this program reads version {VERSION}")
    try:
        return Baseline(
            setting=dict(document["setting"]),
            margins=Margins(**_numbers(document["margins"])),
            policies={str(name): Held(**_numbers(one)) for name, one in document["policies"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise AutoscalerError(f"{path}: damaged baseline: {type(error).__name__}: {error}") from error


def _numbers(section: Mapping[str, object]) -> dict[str, float]:
    for name, value in section.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} is not a number: {value!r}")
    return {name: float(str(value)) for name, value in section.items()}
