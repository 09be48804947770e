"""YAML to plain values that know their lines."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from autoscaler.errors import AutoscalerError
from autoscaler.policy_file.scalars import parse_bool

Loc = tuple[str | int, ...]
"""Where a value stands in its document: keys in the file's spelling, and list indices."""


class _Loader(yaml.SafeLoader):
    """Resolves plain scalars as kubectl does, `yes` as a boolean too, but leaves what readers differ on as text.

    That is: octal and base-60 numbers, underscores in numbers, and dates.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own shape


_TAG = "tag:yaml.org,2002:"
_RESOLVERS: tuple[tuple[str, str, str], ...] = (
    ("bool", r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF", "yYnNtTfFoO"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("merge", r"<<", "<"),
    ("int", r"[-+]?(?:0|[1-9][0-9]{0,39})", "-+0123456789"),
    ("float", r"[-+]?(?:(?:0|[1-9][0-9]*)?\.[0-9]+|(?:0|[1-9][0-9]*)\.?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
)
for _name, _pattern, _first in _RESOLVERS:
    # An empty scalar has no first character; the resolver looks it up under "".
    _firsts = ["" if character == "\0" else character for character in _first]
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_pattern})$"), _firsts)

_MAX_VALUES, _MAX_DEPTH = 20_000, 32


@dataclass(slots=True)
class Tree:
    """One document as plain values.

    Args:
        root: its value.
        lines: of every value that is in it.
        problems: place and message of what is wrong with the YAML itself.
    """

    root: Any = None
    lines: dict[Loc, int] = field(default_factory=dict)
    problems: list[tuple[Loc, str]] = field(default_factory=list)
    values: int = 0

    def line(self, loc: Loc) -> int:
        """Return the line of a value, or of the nearest one around it that is written down."""
        return next((self.lines[loc[:end]] for end in range(len(loc), -1, -1) if loc[:end] in self.lines), 0)


class TreeError(AutoscalerError):
    """A text is not YAML, or more of it than any policy needs.

    Args:
        line: where, 0 when it concerns no line.
    """

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


def read_trees(text: str) -> Iterator[Tree]:
    """Yield the documents of a text that are not empty. Raises TreeError, after those before the mistake."""
    try:
        for node in yaml.compose_all(text, Loader=_Loader):
            tree = Tree()
            tree.root = _build(tree, node, ())
            if tree.root is not None:
                yield tree
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        raise TreeError(f"is not YAML: {error.problem or error.context}, column {column}", line) from error
    except yaml.reader.ReaderError as error:
        raise TreeError(f"is not YAML: {error.reason}, character {error.position}") from error
    except RecursionError as error:
        raise TreeError(f"is no policy: it is nested deeper than {_MAX_DEPTH}") from error
    except (ValueError, OverflowError) as error:
        # PyYAML lets these out for an escape such as "\\UFFFFFFFF" and for a version of thousands of digits.
        raise TreeError("is not YAML: an escape is no character, or a directive no version") from error


def _build(tree: Tree, node: yaml.Node, loc: Loc) -> Any:
    """Return a node's value, and note its line and its problems in the tree.

    Raises: TreeError, when aliases of aliases or nesting make more of it than any policy needs.
    """
    tree.values += 1
    if tree.values > _MAX_VALUES or len(loc) > _MAX_DEPTH:
        raise TreeError(f"is no policy: more than {_MAX_VALUES} values, or nested deeper than {_MAX_DEPTH}")
    tree.lines.setdefault(loc, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        return _mapping(tree, node, loc)
    if isinstance(node, yaml.SequenceNode):
        return [_build(tree, item, (*loc, index)) for index, item in enumerate(node.value)]
    return _scalar(tree, node, loc)


def _mapping(tree: Tree, node: yaml.MappingNode, loc: Loc) -> dict[str, Any]:
    own: dict[str, Any] = {}
    merged: dict[str, Any] = {}
    for key, value in node.value:
        if key.tag == f"{_TAG}merge":
            merged = _merged(tree, value, loc) | merged
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            tree.problems.append((loc, "keys must be text"))
            continue
        name, line = _joined(tree, key.value, loc), key.start_mark.line + 1
        if name in own:
            tree.problems.append(((*loc, name), f"is given twice, again in line {line}: keep one of them"))
        elif key.tag != f"{_TAG}merge":
            tree.lines[*loc, name] = line
            own[name] = _build(tree, value, (*loc, name))
    return merged | own


def _merged(tree: Tree, node: yaml.Node, loc: Loc) -> dict[str, Any]:
    """Return what `<<` brings in: a mapping, or several of which the first wins."""
    merged: dict[str, Any] = {}
    for part in node.value if isinstance(node, yaml.SequenceNode) else [node]:
        if isinstance(part, yaml.MappingNode):
            merged = _build(tree, part, loc) | merged
        else:
            tree.problems.append((loc, "<< must be followed by an alias of a mapping"))
    return merged


def _joined(tree: Tree, text: str, loc: Loc) -> str:
    r"""Return the text with its surrogate pairs joined: JSON escapes some characters as `\ud83d\ude00`."""
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        tree.problems.append((loc, "holds half of an escaped character"))
        return text.encode("utf-8", "replace").decode()


def _scalar(tree: Tree, node: yaml.Node, loc: Loc) -> Any:
    text = _joined(tree, node.value, loc)
    readers: dict[str, Callable[[str], object]] = {
        "null": lambda _: None,
        "bool": parse_bool,
        "int": int,
        "float": lambda number: float(re.sub(r"\.(?=inf|nan)", "", number.lower())),
        "str": str,
    }
    read = readers.get(node.tag.removeprefix(_TAG))
    if read is None:
        tree.problems.append((loc, f"has an unknown YAML tag, {node.tag[:40]!a}"))
        return text
    try:
        return read(text)
    except ValueError:
        tree.problems.append((loc, f"is not what its YAML tag {node.tag.removeprefix(_TAG)} says"))
        return text
