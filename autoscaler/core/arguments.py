"""A vLLM engine's batching limits among its container's command and arguments: read, and changed where they stand.

`--x v` and `--x=v` are told apart only in form; vLLM takes underscores for dashes, and the last of a flag that is given
twice. What a shell, a file or a variable brings in is not looked into: it is named as the reason why nothing can be
changed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import NamedTuple

from autoscaler.core.types import Limits

SHELLS = frozenset({"sh", "bash", "ash", "dash", "ksh", "zsh"})
SHELL_SCRIPT = re.compile(r"-[a-z]*c[a-z]*")
VARIABLE = re.compile(r"\$\(|\$\{?\w")
WHOLE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]?)")
FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
"""What vLLM multiplies by: `8k` are 8000 tokens and `8K` are 8192."""
FALSE = frozenset({"false", "0", "no"})
ACTIVE = "--max-num-active-seqs"
"""From 0.31 on how many sequences run may be said apart from how many may run at the most."""
MASK = "*"
_SHOWN = 60


class EngineWords(NamedTuple):
    """What a container's words say of its engine.

    Args:
        said: they name a limit, whatever they say of it.
        limits: those that are said as numbers; None for the others.
        fixed: why the limits cannot be changed there; "" when they can.
        chunked_prefill: on, which is vLLM's default, or off; None where a file may say either.
        max_model_len: None where it is not said as a number.
    """

    said: bool = False
    limits: Limits = Limits()
    fixed: str = ""
    chunked_prefill: bool | None = None
    max_model_len: int | None = None


def flag_of(name: str) -> str:
    """Return the flag of a limit: `--max-num-seqs` for `max_num_seqs`."""
    return "--" + name.replace("_", "-")


LIMIT_FLAGS: Mapping[str, str] = {field.name: flag_of(field.name) for field in fields(Limits)}


def read_engine(words: Sequence[str]) -> EngineWords:
    """Return what the words, command and arguments in a row, say of the engine."""
    said = {name: text for name, flag in LIMIT_FLAGS.items() if (text := _value(words, flag)) is not None}
    read = {name: whole_of(text) for name, text in said.items()}
    config = _value(words, "--config")
    length = _value(words, "--max-model-len")
    return EngineWords(
        said=bool(said),
        limits=Limits(**read),
        fixed=_fixed(words, said, config),
        chunked_prefill=_chunked(words, config),
        max_model_len=None if length is None else whole_of(length),
    )


def _fixed(words: Sequence[str], said: Mapping[str, str], config: str | None) -> str:
    """Return why the limits cannot be changed among the words; "" when they can."""
    for word, following in pairwise([*words, ""]):
        if word.rpartition("/")[2] in SHELLS and SHELL_SCRIPT.fullmatch(following):
            return f"a shell starts the engine ({word} {following}): its script is not edited"
    for name, text in said.items():
        if whole_of(text) is None:
            what = "comes from a variable" if VARIABLE.search(text) else "is no whole number"
            return f"{LIMIT_FLAGS[name]} {what}: {text[:_SHOWN]}"
    if _value(words, ACTIVE) is not None:
        return f"{ACTIVE} says how many sequences run, and is not moved"
    unsaid = [LIMIT_FLAGS[name] for name in ("max_num_seqs", "max_num_batched_tokens") if name not in said]
    if config is not None and unsaid:
        may = f"--config {config[:_SHOWN]} may set {' and '.join(unsaid)}"
        return f"{may}: a file is not edited, and no engine reads it again"
    return "" if said else f"the arguments say neither {' nor '.join(unsaid)}"


def _chunked(words: Sequence[str], config: str | None) -> bool | None:
    """Return whether prompts may take several steps, which is vLLM's default."""
    found: bool | None = None if config is not None else True
    for word, following in pairwise([*words, ""]):
        flag, equals, value = _parts(word)
        if flag == "--no-enable-chunked-prefill":
            found = False
        elif flag == "--enable-chunked-prefill":
            found = (value if equals else following).lower() not in FALSE
    return found


def with_limits(words: Sequence[str], limits: Limits) -> list[str]:
    """Return the words with these limits, each in the form in which it is said now; None leaves one as it is.

    Raises ValueError for one that they do not say: there is no telling what would come after an added word.
    """
    wanted = {name: value for name in LIMIT_FLAGS if (value := getattr(limits, name)) is not None}
    changed = list(words)
    for name, value in wanted.items():
        place = _last(words, LIMIT_FLAGS[name])
        if place is None:
            raise ValueError(f"the arguments do not say {LIMIT_FLAGS[name]}")
        _put(changed, place, str(value))
    return changed


def masked(words: Sequence[str]) -> list[str]:
    """Return the words without the limits' values: what does not change when only these do."""
    changed = list(words)
    for flag in LIMIT_FLAGS.values():
        for place in range(len(words)):
            if _is_flag(words, place, flag):
                _put(changed, place, MASK)
    return changed


def whole_of(text: str) -> int | None:
    """Return the whole number that vLLM reads a value as, `8k` and `8K` included; None where it is none."""
    found = WHOLE.fullmatch(text.strip())
    if found is None:
        return None
    number = float(found[1]) * FACTORS[found[2]]
    return int(number) if number.is_integer() else None


def _put(words: list[str], place: int, value: str) -> None:
    """Write the value of the flag that stands there, in its form."""
    flag, equals, _ = words[place].partition("=")
    if equals:
        words[place] = f"{flag}={value}"
    else:
        words[place + 1] = value


def _value(words: Sequence[str], flag: str) -> str | None:
    """Return what is said last for a flag; None where nothing is."""
    place = _last(words, flag)
    if place is None:
        return None
    _, equals, value = words[place].partition("=")
    return value if equals else words[place + 1]


def _last(words: Sequence[str], flag: str) -> int | None:
    return next((place for place in range(len(words) - 1, -1, -1) if _is_flag(words, place, flag)), None)


def _is_flag(words: Sequence[str], place: int, flag: str) -> bool:
    """Tell whether the flag stands there, with a value."""
    name, equals, _ = _parts(words[place])
    return name == flag and (bool(equals) or place + 1 < len(words))


def _parts(word: str) -> tuple[str, str, str]:
    """Return a word's flag, spelled with dashes, the equals sign and the value."""
    flag, equals, value = word.partition("=")
    return (flag.replace("_", "-") if flag.startswith("--") else flag), equals, value
