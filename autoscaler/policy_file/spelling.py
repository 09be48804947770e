"""The policy dataclasses in the spelling of a file: models that read them, and the places of their keys."""

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, WithJsonSchema, create_model
from pydantic.fields import FieldInfo

from autoscaler.core.policy import Policy
from autoscaler.policy_file import scalars
from autoscaler.policy_file.tree import Loc

API_VERSION: Final = "autoscaler/v1alpha1"
KIND: Final = "ScalingPolicy"

_QUANTITY_TEXT = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+|[KMGTPE]i|[numkMGTPE])?$"
_AMOUNT = r"[0-9]+(\.[0-9]+)?"
_DURATION_TEXT = f"^({_AMOUNT}|(?=[0-9]){''.join(f'({_AMOUNT}{unit})?' for unit in scalars.DURATION_UNITS)})$"
_WORDS = scalars.TRUE + scalars.FALSE
_BOOL_TEXT = "|".join(dict.fromkeys(cased for word in _WORDS for cased in (word, word.title(), word.upper())))


def _leaf(kind: type, read: Callable[[object], object], schema: dict[str, Any]) -> object:
    return Annotated[kind, BeforeValidator(read), WithJsonSchema(schema)]


_BOOL = _leaf(
    bool,
    scalars.read_bool,
    {"type": ["boolean", "integer", "string"], "minimum": 0, "maximum": 1, "pattern": f"^({_BOOL_TEXT})$"},
)
_INT = _leaf(int, scalars.read_int, {"type": ["integer", "string"], "pattern": _QUANTITY_TEXT})
_FLOAT = _leaf(float, scalars.read_float, {"type": ["number", "string"], "pattern": _QUANTITY_TEXT})
_DURATION_S = _leaf(
    float,
    scalars.read_duration,
    {"type": ["number", "string"], "minimum": 0, "pattern": _DURATION_TEXT},
)

_STRICT = ConfigDict(extra="forbid", protected_namespaces=())


def _is_duration(name: str) -> bool:
    return name.endswith("_s") or name == "seconds"


def _key(name: str) -> str:
    """Return a field's key in a file: `max_step` is `maxStep`, `stabilization_s` is `stabilization`."""
    first, *rest = name.removesuffix("_s").split("_")
    return first + "".join(word.capitalize() for word in rest)


def _spelled(hint: Any, name: str) -> Any:
    """Return the type that reads a field's value from a file."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        (inner,) = (arg for arg in args if arg is not NoneType)
        return _spelled(inner, name) | None
    if origin is tuple:
        items: Any = list[_spelled(args[0], name)]  # type: ignore[misc]
        return items if args[-1] is Ellipsis else Annotated[items, Field(min_length=len(args), max_length=len(args))]
    if origin is dict:
        return dict[str, _spelled(args[1], name)]  # type: ignore[misc]
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _model(hint)
    if isinstance(hint, type) and issubclass(hint, StrEnum) and any(member == "off" for member in hint):
        return Annotated[hint, BeforeValidator(_switched_off)]
    return {bool: _BOOL, int: _INT, float: _DURATION_S if _is_duration(name) else _FLOAT}.get(hint, hint)


def _switched_off(value: object) -> object:
    """Return `off` for what YAML made a boolean of it."""
    return "off" if value is False else value


@cache
def _model(kind: type) -> type[BaseModel]:
    """Return the model that reads one of the policy dataclasses; a policy's name stands outside its spec."""
    hints, meanings = get_type_hints(kind), _meanings(kind)
    members: dict[str, Any] = {}
    for member in dataclasses.fields(kind):
        if kind is Policy and member.name == "name":
            continue
        options: dict[str, Any] = {"alias": _key(member.name), "description": meanings.get(member.name)}
        members[member.name] = (_spelled(hints[member.name], member.name), Field(**_default(member), **options))
    return create_model(kind.__name__, __config__=_STRICT, __doc__=_summary(kind), **members)


def _default(member: dataclasses.Field[Any]) -> dict[str, Any]:
    """Return the field's default for the schema; values come from the dataclasses themselves."""
    if member.default is not dataclasses.MISSING:
        return {"default": _written(member.default, member.name)}
    if member.default_factory is not dataclasses.MISSING:
        return {"default": _written(member.default_factory(), member.name)}
    return {}


def _written(value: Any, name: str) -> Any:
    """Return a default as a file would have it; of a mapping only what must be written."""
    if dataclasses.is_dataclass(value):
        required = (member.name for member in dataclasses.fields(value) if not _default(member))
        return {_key(name): _written(getattr(value, name), name) for name in required}
    if isinstance(value, tuple):
        return list(value)
    return f"{value:g}s" if _is_duration(name) and value is not None else value


_ENTRY = re.compile(r"    (\w+): (.+)")


def _meanings(kind: Any) -> dict[str, str]:
    """Return the fields' meanings from the `Args` of a docstring, with field names in the spelling of a file."""
    keys = {member.name: _key(member.name) for member in dataclasses.fields(kind)}
    meanings: dict[str, str] = {}
    name = ""
    for line in (inspect.getdoc(kind) or "").partition("Args:\n")[2].splitlines():
        entry = _ENTRY.fullmatch(line)
        if entry:
            name = entry[1]
        if name:
            meanings[name] = f"{meanings[name]} {line.strip()}" if not entry else entry[2]
    spelled = re.compile(r"`(\w+)`")
    return {
        name: spelled.sub(lambda match: f"`{keys.get(match[1], match[1])}`", meaning)
        for name, meaning in meanings.items()
    }


def _summary(kind: Any) -> str:
    return (inspect.getdoc(kind) or "").partition("\n\n")[0]


@cache
def document_model() -> type[BaseModel]:
    """Return the model that reads one document."""
    metadata = create_model(
        "Metadata",
        __config__=_STRICT,
        __doc__="Which policy this is.",
        name=(str, Field(description="of the policy: labels its metrics and logs")),
        labels=(dict[str, str], Field(default={}, description="for other tools, and for `autoscaler run --selector`")),
        annotations=(dict[str, str], Field(default={}, description="for other tools")),
    )
    members: dict[str, Any] = {
        "api_version": (Literal[API_VERSION], Field(alias="apiVersion", description="the format's version")),
        "kind": (Literal[KIND], Field(description="the kind of document")),
        "metadata": (metadata, Field(description="which policy this is")),
        "spec": (_model(Policy), Field(description="everything the target is scaled by")),
    }
    doc = "How one Deployment of vLLM engines is scaled."
    return create_model(KIND, __config__=_STRICT, __doc__=doc, **members)


@cache
def plain_adapter() -> TypeAdapter[tuple[Policy]]:
    """Return what validates a policy under its Python field names, strictly."""
    # The configuration is given to a tuple, as a dataclass would have to carry it itself.
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    return TypeAdapter(tuple[Policy], config=config)


def _member(hint: Any, key: str | int, *, by_field: bool = False) -> tuple[str | int, Any] | None:
    """Return the spelled key and the type of what stands at `key` in a value of this type; None when nothing may."""
    if get_origin(hint) in (Annotated, Union, UnionType):
        return _member(get_args(hint)[0], key, by_field=by_field)
    if get_origin(hint) in (list, dict):
        return key, get_args(hint)[-1]
    for name, member in members_of(hint).items():
        spelled = member.alias or name
        if key == (name if by_field else spelled):
            return spelled, member.annotation
    return None


def members_of(hint: Any) -> Mapping[str, FieldInfo]:
    """Return the fields by name of the model that a type is; none when it is something else."""
    if get_origin(hint) in (Annotated, Union, UnionType):
        return members_of(get_args(hint)[0])
    return hint.model_fields if isinstance(hint, type) and issubclass(hint, BaseModel) else {}


def type_at(loc: Loc) -> Any:
    """Return the type of what may stand at a place, None when nothing may."""
    hint: Any = document_model()
    for key in loc:
        found = _member(hint, key)
        if found is None:
            return None
        hint = found[1]
    return hint


def spelled_loc(path: str) -> Loc:
    """Return the place of a field path of the core: `signals.queries[0].server` is in `spec`."""
    if path == "name":
        return ("metadata", "name")
    loc: list[str | int] = ["spec"]
    hint: Any = _model(Policy)
    for name in re.findall(r"[^.\[\]]+", path):
        found = _member(hint, int(name) if get_origin(hint) is list else name, by_field=True)
        key, hint = found if found is not None else (name, None)
        loc.append(key)
    return tuple(loc)


def dotted(loc: Iterable[str | int]) -> str:
    """Return a place as people write it: `spec.signals.queries[0].server`; odd keys are quoted and cut."""
    keys = (f"[{key}]" if isinstance(key, int) else f".{_key_text(key)}" for key in loc)
    return "".join(keys).removeprefix(".")


def _key_text(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_./-]{1,60}", key) else json.dumps(key[:60])


def places(hint: Any, loc: Loc) -> Iterator[Loc]:
    """Yield the places of all keys that are not inside of lists or of named things."""
    for name, member in members_of(hint).items():
        here = (*loc, member.alias or name)
        yield here
        yield from places(member.annotation, here)
