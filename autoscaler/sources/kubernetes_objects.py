"""The API's objects as they come: JSON of which nothing is certain but what was looked at."""

from collections.abc import Mapping, Sequence
from typing import Any

from autoscaler.errors import TargetError

Json = Mapping[str, Any]
REPLICAS = "f:replicas"
"""`spec.replicas` among the fields of a manager, under `f:spec`."""
CONTAINERS = ("f:spec", "f:template", "f:spec", "f:containers")
"""The way to a pod template's containers among the fields of a manager."""
WORDS = frozenset({"f:args", "f:command"})
"""What starts a container, among its fields."""


def as_object(value: object) -> Json:
    """Return an object; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def as_objects(value: object) -> Sequence[Json]:
    """Return a list's objects; none for anything else."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else ()


def only(value: object, keys: Sequence[str]) -> dict[str, Any]:
    """Return an object with these keys and no others."""
    item = as_object(value)
    return {key: item[key] for key in keys if key in item}


def count_of(part: Json, key: str) -> int:
    """Return a count; the API leaves zeros out."""
    value = part.get(key, 0)
    return value if isinstance(value, int) else 0


def metadata_of(item: Json) -> Json:
    """Return an object's metadata."""
    return as_object(item.get("metadata"))


def name_of(item: Json) -> str:
    """Return an object's name; "" where it has none."""
    return str(metadata_of(item).get("name", ""))


def uid_of(item: Json) -> str:
    """Return an object's uid; "" where it has none."""
    return str(metadata_of(item).get("uid", ""))


def replica_writers(item: Json) -> Sequence[Json]:
    """Return the entries of `metadata.managedFields` whose manager has written `spec.replicas`, in their order."""
    entries = as_objects(metadata_of(item).get("managedFields"))
    return [entry for entry in entries if REPLICAS in as_object(as_object(entry.get("fieldsV1")).get("f:spec"))]


def template_writers(item: Json) -> Sequence[Json]:
    """Return the entries of `metadata.managedFields` whose manager has written a container's command or arguments."""
    return [entry for entry in as_objects(metadata_of(item).get("managedFields")) if _writes_words(entry)]


def _writes_words(entry: Json) -> bool:
    part = as_object(entry.get("fieldsV1"))
    for key in CONTAINERS:
        part = as_object(part.get(key))
    return any(not WORDS.isdisjoint(as_object(container)) for container in part.values())


def written_fields(entry: Json, *, replicas: bool, words: bool) -> Json:
    """Return an entry's `fieldsV1` cut down to what the two functions above look at."""
    inner: Json = {"k": {key: {} for key in WORDS}}
    for key in reversed(CONTAINERS[1:]):
        inner = {key: inner}
    return {"f:spec": {**({REPLICAS: {}} if replicas else {}), **(inner if words else {})}}


def items_of(answer: Json) -> Sequence[Json]:
    """Return a list's items. Raises TargetError for an answer that is no list: no pods and no answer differ."""
    items = answer.get("items", ())
    if not isinstance(items, list):
        raise TargetError("bad_body", "the API server's answer is not a list")
    return as_objects(items)
