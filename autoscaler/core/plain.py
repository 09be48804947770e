"""Our values as plain data, for decision records, logs and JSON."""

import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeAlias, get_args

import numpy as np

from autoscaler.core.types import Action

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"
"""What JSON can say."""

_AS_THEY_ARE = frozenset({str, int, bool, type(None)})
_KINDS = {kind: re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower() for kind in get_args(Action)}


def to_plain(value: Any) -> Plain:
    """Return `value` as lists, dicts, strings and numbers.

    Dataclasses become dicts with every field, in order; an action also says its `kind`, e.g. `scale_replicas`. Finite
    floats stay floats, so that JSON keeps each bit; the others become "nan", "inf" and "-inf", as JSON has no numbers
    for them and `float` reads them back. None stays None: unknown.

    Raises: TypeError, for a type that is none of ours.
    """
    kind: object = type(value)
    if kind in _AS_THEY_ARE:
        return value  # type: ignore[no-any-return]
    if kind is float:
        return value if math.isfinite(value) else str(value)
    if kind is tuple or kind is list:
        return [to_plain(item) for item in value]
    names = _field_names(kind)
    if names is None:
        return _other_to_plain(value)
    plain = {name: to_plain(getattr(value, name)) for name in names}
    return plain if kind not in _KINDS else {"kind": _KINDS[kind], **plain}


def to_number(plain: Any) -> Any:
    """Return the float that a plain value stands for where JSON has no number for it; anything else as it is."""
    return float(plain) if isinstance(plain, str) else plain


def _other_to_plain(value: Any) -> Plain:
    if isinstance(value, Enum):
        return to_plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return to_plain(value.tolist())
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no plain form")


@cache
def _field_names(kind: object) -> tuple[str, ...] | None:
    """Return the names of a dataclass' fields, None when `kind` is no dataclass."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None
