"""Plain data, as JSON holds it, back to values. Each of these says what is wrong with what it is given: ValueError."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def mapping(plain: object) -> Mapping[str, object]:
    """Return an object. Raises ValueError for anything else, as all of these do."""
    if not isinstance(plain, Mapping):
        raise ValueError(f"{plain!r:.40} is no object")
    return plain


def row(plain: object, length: int) -> Sequence[object]:
    """Return a list of that length."""
    if not isinstance(plain, list | tuple) or len(plain) != length:
        raise ValueError(f"{plain!r:.40} is no list of {length}")
    return plain


def each(plain: object, read: Callable[[object], T]) -> tuple[T, ...]:
    """Return what is read of each of a list's entries; nothing for what is not there."""
    if plain is None:
        return ()
    if not isinstance(plain, list | tuple):
        raise ValueError(f"{plain!r:.40} is no list")
    return tuple(read(item) for item in plain)


def number(plain: object) -> float:
    """Return a finite number; JSON's true is none."""
    if isinstance(plain, bool) or not isinstance(plain, int | float) or not abs(plain) < 1e15:
        raise ValueError(f"{plain!r:.40} is no number")
    return float(plain)


def text(plain: object) -> str:
    """Return a text."""
    if not isinstance(plain, str):
        raise ValueError(f"{plain!r:.40} is no text")
    return plain


def maybe(plain: object) -> float | None:
    """Return a number, or None where there is none."""
    return None if plain is None else number(plain)


def positive(plain: object) -> float:
    """Return a number from 0 on."""
    value = number(plain)
    if value < 0.0:
        raise ValueError(f"{value:g} is below 0")
    return value


def whole(plain: object) -> int:
    """Return a whole number."""
    value = number(plain)
    if not value.is_integer():
        raise ValueError(f"{value:g} is no whole number")
    return int(value)
