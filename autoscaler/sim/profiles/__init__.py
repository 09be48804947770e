"""Profiles as data: the shipped ones lie beside this file, a user's own file reads the same way."""

import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

from autoscaler.errors import Problem, ProfileError
from autoscaler.sim.profile import Profile

FOLDER = Path(__file__).parent
Value = str | int | float | bool | None


class _Key(NamedTuple):
    """A key of a profile file: where it goes, in which unit it is written, and what may stand there."""

    field: str
    unit: float | None
    allowed: Callable[[Value], bool]
    right: str
    required: bool = True


def _number(low: float, *, above: bool = False, below: float = math.inf) -> Callable[[Value], bool]:
    """Return what tells a number that is at least `low`, or above it, and less than `below`."""

    def allowed(value: Value) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return False
        return (value > low if above else value >= low) and value < below

    return allowed


def _count(low: int) -> Callable[[Value], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= low


def _text(value: Value) -> bool:
    return isinstance(value, str) and value != ""


_POSITIVE, _NOT_NEGATIVE, _COUNT = _number(0.0, above=True), _number(0.0), _count(1)

KEYS: dict[str, _Key] = {
    "model": _Key("model", None, _text, "a name, as --served-model-name gives it"),
    "gpu": _Key("gpu", None, _text, "the card, in words", required=False),
    "gpus": _Key("gpus", None, _COUNT, "the GPUs of one replica, 1 or more"),
    "stepTime.baseMs": _Key("base_s", 1e-3, _POSITIVE, "milliseconds above 0"),
    "stepTime.tokenUs": _Key("token_s", 1e-6, _NOT_NEGATIVE, "microseconds, 0 or more"),
    "stepTime.sequenceUs": _Key("sequence_s", 1e-6, _NOT_NEGATIVE, "microseconds, 0 or more"),
    "stepTime.contextNs": _Key("context_s", 1e-9, _NOT_NEGATIVE, "nanoseconds, 0 or more"),
    "stepTime.prefixPs": _Key("prefix_s", 1e-12, _NOT_NEGATIVE, "picoseconds, 0 or more"),
    "stepTime.overhead": _Key(
        "overhead", None, _POSITIVE, "a factor above 0: 1 where whole iterations were measured, not kernels"
    ),
    "kvCache.tokens": _Key("kv_tokens", None, _COUNT, "a whole number of tokens, as vLLM logs it at its start"),
    "kvCache.blockSize": _Key("block_size", None, _COUNT, "a power of two", required=False),
    "limits.maxNumSeqs": _Key("max_num_seqs", None, _COUNT, "a whole number, 1 or more", required=False),
    "limits.maxNumBatchedTokens": _Key(
        "max_num_batched_tokens", None, _COUNT, "a whole number, at least maxNumSeqs", required=False
    ),
    "limits.longPrefillTokenThreshold": _Key(
        "long_prefill_token_threshold", None, _count(0), "a whole number, 0 for none", required=False
    ),
    "limits.reserveFullPrompt": _Key(
        "reserve_prompt", None, lambda value: isinstance(value, bool), "true or false", required=False
    ),
    "coldStart.medianSeconds": _Key("cold_start_s", None, _POSITIVE, "seconds above 0"),
    "coldStart.sigma": _Key(
        "cold_start_sigma", None, _NOT_NEGATIVE, "the standard deviation of the logarithm, 0 or more", required=False
    ),
    "price.perGpuHour": _Key(
        "price_per_gpu_hour", None, lambda value: value is None or _NOT_NEGATIVE(value), "a price", required=False
    ),
    "source": _Key("source", None, _text, "where the coefficients come from", required=False),
    "fit.mapePercent": _Key("mape", 1e-2, _number(0.0, below=100.0), "per cent, 0 to 100", required=False),
}
"""Every key that a profile file may have, by its dotted path."""
SECTIONS = frozenset(path.partition(".")[0] for path in KEYS if "." in path)


class _Leaf(NamedTuple):
    """A value in a file: at its dotted path, on its line."""

    path: str
    value: Value
    line: int


@cache
def profile_names() -> tuple[str, ...]:
    """Return the names of the shipped profiles."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def profile(name_or_path: str | Path) -> Profile:
    """Return the shipped profile of that name, or the one in that file. Raises ProfileError, with every mistake."""
    name = str(name_or_path)
    if name in profile_names():
        return _shipped(name)
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml") and not path.exists():
        names = ", ".join(profile_names())
        raise _unusable(name, f"no such profile; it is a file, or one of {names}")
    return load_profile(path)


@cache
def _shipped(name: str) -> Profile:
    return load_profile(FOLDER / f"{name}.yaml")


def load_profile(path: Path) -> Profile:
    """Return the profile in a file; its name is the file's. Raises ProfileError, with every mistake in it."""
    file = str(path)
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
        leaves = list(_leaves(root, "")) if isinstance(root, yaml.MappingNode) else []
    except OSError as error:
        raise _unusable(file, f"cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # bytes that are no text, dates that are none
        raise _unusable(file, f"is not YAML: {' '.join(str(error).split())}") from error
    if not leaves:
        raise _unusable(file, f"must be a mapping with {', '.join(path for path, key in KEYS.items() if key.required)}")
    problems = [*_wrong(file, leaves), *_missing(file, leaves)]
    if problems:
        raise ProfileError(tuple(sorted(problems, key=lambda problem: problem.line or math.inf)))
    try:
        return Profile(name=path.stem, **dict(_fields(leaves)))  # type: ignore[arg-type]
    except ValueError as error:
        raise _unusable(file, str(error)) from error


def _unusable(file: str, message: str) -> ProfileError:
    return ProfileError((Problem(file=file, key="", value="", message=message),))


def _leaves(node: yaml.MappingNode, before: str) -> Iterator[_Leaf]:
    """Yield every value below a node; a section that holds none, or a list, is one as well."""
    for key, value in node.value:
        path = f"{before}{key.value}"
        line = key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode) and path in SECTIONS:
            yield from _leaves(value, f"{path}.")
        elif isinstance(value, yaml.ScalarNode):
            loader = yaml.SafeLoader("")
            try:
                yield _Leaf(path, loader.construct_object(value), line)
            finally:
                loader.dispose()
        else:
            yield _Leaf(path, yaml.serialize(value).strip(), line)


def _wrong(file: str, leaves: list[_Leaf]) -> Iterator[Problem]:
    """Yield what is wrong about the keys that are there."""
    seen: set[str] = set()
    for path, value, line in leaves:
        key = KEYS.get(path)
        shown = "" if value is None else str(value)
        if path in seen:
            message = "is there twice"
        elif path in SECTIONS:
            inside = ", ".join(one.partition(".")[2] for one in KEYS if one.startswith(f"{path}."))
            message = f"must be a mapping with {inside}"
        elif key is None:
            message = f"unknown key; known are {', '.join(KEYS)}"
        elif not key.allowed(value):
            message = f"must be {key.right}"
        else:
            message = ""
        seen.add(path)
        if message:
            yield Problem(file=file, key=path, value=shown, message=message, line=line)


def _missing(file: str, leaves: list[_Leaf]) -> Iterator[Problem]:
    """Yield the required keys that are not there."""
    there = {leaf.path for leaf in leaves}
    for path, key in KEYS.items():
        if key.required and path not in there and path.partition(".")[0] not in there:
            yield Problem(file=file, key=path, value="", message=f"is missing; must be {key.right}")


def _fields(leaves: list[_Leaf]) -> Iterator[tuple[str, Value]]:
    """Yield the fields of a Profile, in base units."""
    for path, value, _ in leaves:
        key = KEYS[path]
        yield key.field, value * key.unit if key.unit is not None and isinstance(value, int | float) else value
