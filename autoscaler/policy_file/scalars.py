"""Scalars of a policy file: one rule for all keys of a kind.

Text is taken where it can be read in one way only, as templates often quote what they fill in: numbers as Kubernetes
quantities, booleans by a strict table, durations with their units. A boolean is never a number, nor a number a boolean
but for 0 and 1.
"""

import math
import re
from decimal import Decimal, localcontext

from autoscaler.core.policy import ratio_text

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
DURATION_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}

_QUANTITY = re.compile(
    r"(?P<number>[+-]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40}))"
    r"(?:[eE](?P<exponent>[+-]?[0-9]{1,3})|(?P<suffix>[KMGTPE]i|[numkMGTPE]))?"
)
_SUFFIX: dict[str, Decimal] = {
    **{f"{letter}i": Decimal(1024**power) for power, letter in enumerate("KMGTPE", start=1)},
    **{letter: Decimal(1000**power) for power, letter in enumerate("kMGTPE", start=1)},
    "m": Decimal("1e-3"),
    "u": Decimal("1e-6"),
    "n": Decimal("1e-9"),
}
_AMOUNT = r"[0-9]{1,15}(?:\.[0-9]{1,15})?"
_DURATION = re.compile("".join(rf"(?:(?P<{unit}>{_AMOUNT}){unit})?" for unit in DURATION_UNITS))
_SECONDS = re.compile(r"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,15})?")
_MAX_DURATION_S = 366 * 86400.0
_INT32 = 2**31 - 1


def parse_bool(text: str) -> bool:
    """Return true for true, yes, on, 1 and false for false, no, off, 0, whatever the case.

    Raises: ValueError, for anything else, the empty text too: no text is true merely by being there.
    """
    word = text.strip().lower()
    if word in TRUE:
        return True
    if word in FALSE:
        return False
    raise ValueError(f"must be one of {', '.join(TRUE + FALSE)}")


def parse_quantity(text: str) -> Decimal:
    """Return a Kubernetes quantity exactly: `500m` is 0.5, `1Gi` is 1073741824, `131e6` is 131000000.

    Raises: ValueError, for an unknown suffix, a space, a sign too many, or no number at all.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError("must be a number, such as 8, 0.5, 500m, 2k or 1Gi")
    with localcontext() as context:
        context.prec = 200
        number = Decimal(match["number"])
        if match["exponent"]:
            return number.scaleb(int(match["exponent"]))
        return number * _SUFFIX[match["suffix"]] if match["suffix"] else number


def parse_duration(text: str) -> float:
    """Return the seconds of `90s`, `5m`, `1h30m`, `500ms`, `1.5h`; a plain number is seconds.

    Raises: ValueError, for negative or malformed durations, and for more than a year.
    """
    match = _DURATION.fullmatch(text)
    if match is not None and text:
        parts = [float(amount) * DURATION_UNITS[unit] for unit, amount in match.groupdict().items() if amount]
        return _duration_s(math.fsum(parts))
    if _SECONDS.fullmatch(text):
        return _duration_s(float(text))
    raise ValueError("must be a duration, such as 90s, 5m, 1h30m or 500ms")


def _duration_s(seconds: float) -> float:
    if not 0.0 <= seconds <= _MAX_DURATION_S:
        raise ValueError("must be a duration from 0s to 366d")
    return seconds


def what_is(value: object) -> str:
    """Return what kind of YAML value this is, for a message."""
    kinds = ((bool, "a boolean"), (int | float, "a number"), (str, "text"), (list, "a list"), (dict, "a mapping"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "empty")


def _number(value: object) -> float | Decimal:
    """Return a finite number. Raises ValueError: booleans are none, nor is text that could be read in two ways."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"must be a number, but is {what_is(value)}")
    if not isinstance(value, str):
        if not math.isfinite(value):
            raise ValueError("must be a finite number")
        return value
    percent = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*%", value)
    if percent:
        raise ValueError(f"must not be written as percent: write {ratio_text(float(percent[1]) / 100.0)}")
    if re.match(r"[+-]?0[0-9]", value):
        raise ValueError("must not have a leading zero, which some YAML readers take as octal")
    return parse_quantity(value)


def read_float(value: object) -> float:
    """Return the number of a scalar. Raises ValueError."""
    number = float(_number(value))
    if not math.isfinite(number):
        raise ValueError("must be a finite number")
    return number


def read_int(value: object) -> int:
    """Return the whole number of a scalar, in 32 bits as Kubernetes counts. Raises ValueError."""
    number = _number(value)
    if not -_INT32 <= number <= _INT32 or number != int(number):
        raise ValueError(f"must be a whole number, at most {_INT32}")
    return int(number)


def read_duration(value: object) -> float:
    """Return the seconds of a scalar. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"must be a duration, such as 90s, but is {what_is(value)}")
    return parse_duration(value) if isinstance(value, str) else _duration_s(float(value))


def read_bool(value: object) -> bool:
    """Return the boolean of a scalar. Raises ValueError."""
    if isinstance(value, bool):
        return value
    if isinstance(value, float) or not isinstance(value, int | str):
        raise ValueError(f"must be true or false, but is {what_is(value)}")
    return parse_bool(str(value))
