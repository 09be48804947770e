"""Policy files to policies: every problem of every file at once, each with its place and key path.

Four steps: YAML to a tree that knows its lines; the tree through models made from the policy dataclasses, in the
spelling of a file; the result into the dataclasses; their own invariants. Where the second step finds mistakes, the
last two go on without the broken keys, so that one reading reports all.
"""

import copy
import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from autoscaler.core.plain import to_plain
from autoscaler.core.policy import Complaint, Policy, complaints, warnings
from autoscaler.errors import PolicyError, Problem
from autoscaler.policy_file.messages import remedy, shown
from autoscaler.policy_file.scalars import what_is
from autoscaler.policy_file.spelling import (
    API_VERSION,
    KIND,
    document_model,
    dotted,
    plain_adapter,
    spelled_loc,
    type_at,
)
from autoscaler.policy_file.tree import Loc, Tree, TreeError, read_trees
from autoscaler.schedule import overlap_warnings, schedule_complaints

_SUFFIXES = (".yaml", ".yml")
_MAX_BYTES = 256 * 1024
"""Of one file. A policy has some 4 KiB, a ConfigMap at most 1 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a set of policy files says.

    Args:
        policies: by name, in the order of the files.
        warnings: what is allowed but probably not meant.
        labels: by the name of the policy that has them.
    """

    policies: Mapping[str, Policy]
    warnings: tuple[Problem, ...] = ()
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def load_policies(paths: Sequence[Path]) -> Loaded:
    """Return the policies of these files, and of all `*.yaml` and `*.yml` in these directories.

    Hidden entries of a directory are left out: a mounted ConfigMap keeps its old and new contents there.

    Raises: PolicyError, with every problem of every file.
    """
    problems: list[Problem] = []
    found: list[_Found] = []
    for path in dict.fromkeys(_files(paths, problems)):
        text = _text(path, problems)
        if text is not None:
            found.extend(_read(text, str(path)))
    if not found and not problems:
        problems.append(Problem("policies", "", "", "no policy file was given"))
    return _loaded(found, problems)


def parse_policies(text: str, file: str) -> Loaded:
    """Return the policies of one text; `file` is what problems call it. Raises PolicyError."""
    return _loaded(list(_read(text, file)), [])


def policy_to_plain(policy: Policy) -> dict[str, Any]:
    """Return the policy as JSON data under its Python field names, for recordings."""
    return {member.name: to_plain(getattr(policy, member.name)) for member in dataclasses.fields(policy)}


def policy_from_plain(plain: Mapping[str, Any]) -> Policy:
    """Return exactly the policy that `policy_to_plain` was given.

    Raises: PolicyError, for unknown or missing fields and wrong types; nothing is converted.
    """
    try:
        (policy,) = plain_adapter().validate_json(json.dumps([plain]))
    except ValidationError as error:
        problems = (Problem("policy", dotted(e["loc"][1:]), "", e["msg"]) for e in error.errors(include_url=False))
        raise PolicyError(tuple(problems)) from error
    except (TypeError, ValueError) as error:
        raise PolicyError((Problem("policy", "", "", f"is not JSON data: {error}"),)) from error
    return policy


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of one document."""
    schema = _untitled(document_model().model_json_schema(by_alias=True))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": KIND, **schema}


def _untitled(schema: Any) -> Any:
    """Return a schema without pydantic's titles, which only repeat the keys."""
    if isinstance(schema, list):
        return [_untitled(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _untitled(item) for key, item in schema.items() if key != "title" or not isinstance(item, str)}


def shipped_policies() -> Path:
    """Return the directory of the policies that come with the program: in the wheel, or in the source tree."""
    package = Path(__file__).parent.parent
    return package / "policies" if (package / "policies").is_dir() else package.parent / "policies"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """One document, read.

    Args:
        policy: with defaults in the place of broken keys; None when the document is no policy at all.
        broken: places that are wrong, so that nothing is concluded from them.
    """

    file: str
    tree: Tree
    policy: Policy | None = None
    broken: frozenset[Loc] = frozenset()
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()


def _files(paths: Sequence[Path], problems: list[Problem]) -> Iterator[Path]:
    """Yield the policy files among and in these paths; what cannot be one is a problem."""
    for path in paths:
        try:
            if not path.is_dir():
                yield path
                continue
            inside = sorted(entry for entry in path.iterdir() if entry.suffix in _SUFFIXES and entry.name[0] != ".")
        except OSError as error:
            problems.append(Problem(str(path), "", "", f"cannot be read: {error.strerror}"))
            continue
        if not inside:
            problems.append(Problem(str(path), "", "", f"holds no policy file ({', '.join(_SUFFIXES)})"))
        yield from inside


def _text(path: Path, problems: list[Problem]) -> str | None:
    """Return a file's text, None with its problem noted."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) <= _MAX_BYTES:
            return content.decode("utf-8-sig")
        message = f"is larger than {_MAX_BYTES // 1024} KiB: not a policy file"
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 text (byte {error.start})"
    problems.append(Problem(str(path), "", "", message))
    return None


def _read(text: str, file: str) -> Iterator[_Found]:
    """Yield every document of a text, those before a mistake in the YAML too."""
    message, line = "is empty: a policy starts with apiVersion", 0
    try:
        for tree in read_trees(text):
            message = ""
            yield _examined(tree, file)
    except TreeError as error:
        message, line = str(error), error.line
    if message:
        yield _Found(file=file, tree=Tree(), problems=(Problem(file, "", "", message, line),))


def _examined(tree: Tree, file: str) -> _Found:
    """Return what one document says, with all that is wrong with it."""
    raw = tree.root
    if not isinstance(raw, dict):
        message = f"must be a mapping with apiVersion, kind, metadata and spec, but is {what_is(raw)}"
        return _Found(file=file, tree=tree, problems=(Problem(file, "", "", message, tree.line(())),))
    foreign = [
        Problem(file, key, shown(raw[key]), f"must be {right}", tree.line((key,)))
        for key, right in (("apiVersion", API_VERSION), ("kind", KIND))
        if key in raw and raw[key] != right
    ]
    if foreign:  # another kind of document: its spec would only add noise
        return _Found(file=file, tree=tree, problems=tuple(foreign))
    policy, errors = _policy_of(raw)
    mistakes = [*tree.problems, *((error["loc"], remedy(error)) for error in errors)]
    broken = frozenset(loc for loc, _ in mistakes)
    policy = policy or _policy_despite(raw, errors)
    if policy is not None:
        located = _located(chain(complaints(policy), schedule_complaints(policy)))
        mistakes += [(loc, message) for loc, message in located if not _touches(broken, loc, message)]
    advice = (
        list(_located(chain(warnings(policy), overlap_warnings(policy)))) if policy is not None and not mistakes else []
    )
    return _Found(
        file=file,
        tree=tree,
        policy=policy,
        broken=broken,
        problems=_problems(file, tree, mistakes),
        warnings=_problems(file, tree, advice),
    )


def _problems(file: str, tree: Tree, mistakes: Iterable[tuple[Loc, str]]) -> tuple[Problem, ...]:
    """Return the mistakes in the order of their lines."""
    problems = (
        Problem(file, dotted(loc), _value_at(tree.root, loc), message, tree.line(loc)) for loc, message in mistakes
    )
    return tuple(sorted(problems, key=lambda problem: problem.line))


def _policy_of(raw: Mapping[str, Any]) -> tuple[Policy | None, list[ErrorDetails]]:
    """Return the policy of a document, or what is wrong with its keys and types."""
    try:
        document = document_model().model_validate(raw)
    except ValidationError as error:
        return None, error.errors(include_url=False)
    plain = document.model_dump(mode="json", exclude_unset=True)
    return policy_from_plain({**plain["spec"], "name": plain["metadata"]["name"]}), []


_ROUNDS = 8
"""A stand-in for `spec` lacks its target, that its deployment: each nesting takes a round."""


def _policy_despite(raw: Mapping[str, Any], errors: Sequence[ErrorDetails]) -> Policy | None:
    """Return the policy with defaults, or stand-ins where there are none, in the place of what is wrong."""
    patched = copy.deepcopy(raw)
    policy = None
    for _ in range(_ROUNDS):
        if not errors:
            break
        for error in errors:
            _patch(patched, error["loc"], missing=error["type"] == "missing")
        policy, errors = _policy_of(patched)
    return policy


def _patch(raw: Any, loc: Loc, *, missing: bool) -> None:
    """Take out what stands at `loc`, or put a stand-in there. A broken list item takes its list along."""
    above, last = loc[:-1], loc[-1]
    parent = _at(raw, above)
    if isinstance(last, int):
        _patch(raw, above, missing=False)
    elif isinstance(parent, dict) and missing:
        parent[last] = _stand_in(type_at(loc))
    elif isinstance(parent, dict):
        parent.pop(last, None)


_ABSENT = object()


def _at(raw: Any, loc: Loc) -> Any:
    """Return the value at a place, `_ABSENT` when there is none."""
    for key in loc:
        try:
            raw = raw[key]
        except (KeyError, IndexError, TypeError):
            return _ABSENT
    return raw


def _value_at(raw: Any, loc: Loc) -> str:
    """Return the value at a place for a message: scalars of known keys only, as others could be secrets."""
    value = _at(raw, loc)
    secret = "headers" in loc or type_at(loc) is None
    return "" if secret or value is _ABSENT else shown(value)


def _stand_in(hint: Any) -> object:
    if get_origin(hint) is Literal:
        return get_args(hint)[0]
    return "unnamed" if hint is str else 1 if hint in (int, float) else {}


def _located(found: Iterable[Complaint]) -> Iterator[tuple[Loc, str]]:
    """Yield the core's complaints with their places in the spelling of a file."""
    for path, _, advice in found:
        yield spelled_loc(path), advice


def _touches(broken: Iterable[Loc], loc: Loc, message: str) -> bool:
    """Return whether a complaint stands at, around or inside a broken key, or speaks of one."""
    for bad in broken:
        if bad[: len(loc)] == loc or loc[: len(bad)] == bad:
            return True
        key = re.escape(dotted(bad).removeprefix("spec."))
        if re.search(rf"(?<![\w.]){key}(?![\w.])", message):
            return True
    return False


def _loaded(found: Sequence[_Found], problems: Sequence[Problem]) -> Loaded:
    """Return the policies, when no document has a problem and no two want the same name or Deployment."""
    problems = [*problems, *(problem for one in found for problem in one.problems), *_doubles(found)]
    if problems:
        raise PolicyError(tuple(problems))
    return Loaded(
        policies={one.policy.name: one.policy for one in found if one.policy is not None},
        warnings=tuple(warning for one in found for warning in one.warnings),
        labels={
            one.policy.name: one.tree.root["metadata"].get("labels", {}) for one in found if one.policy is not None
        },
    )


def _doubles(found: Iterable[_Found]) -> Iterator[Problem]:
    """Yield the documents that repeat the name or the target of an earlier one."""
    first: dict[tuple[Loc, str], _Found] = {}
    for one in found:
        if one.policy is None:
            continue
        target = f"{one.policy.target.namespace}/{one.policy.target.deployment}"
        for loc, value in ((("metadata", "name"), one.policy.name), (("spec", "target"), target)):
            if _touches(one.broken, loc, ""):
                continue
            other = first.setdefault((loc, value), one)
            if other is not one:
                message = f"is taken by {other.file}:{other.tree.line(loc)}: one policy for each name and Deployment"
                yield Problem(one.file, dotted(loc), shown(value), message, one.tree.line(loc))
