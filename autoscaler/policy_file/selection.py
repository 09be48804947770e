"""Which of the policies a daemon is to run: by label, as kubectl selects, and by the target's namespace."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from autoscaler.errors import PolicyError, Problem
from autoscaler.policy_file.reading import Loaded

_NAME = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_PREFIX = r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?"
_KEY = re.compile(f"(?:{_PREFIX}/)?{_NAME}")
_VALUE = re.compile(f"(?:{_NAME})?")
_TERMS = re.compile(r",(?![^(]*\))")
_SET = re.compile(r"(\S+)\s+(in|notin)\s*\(([^()]*)\)")
_REMEDY = "write a=b, a!=b, a in (b, c), a notin (b, c), a or !a, joined by commas"
_EQUAL = re.compile(r"([^=!]*?)\s*(==|=|!=)\s*(.*)")


@dataclass(frozen=True, slots=True)
class Requirement:
    """One term of a selector.

    Args:
        values: what the label may be, or may not be.
        wanted: whether it has to be one of the values; else it must be none of them, or not there.
        any_value: the label has to be there, or not to be there, whatever its value.
    """

    key: str
    values: frozenset[str] = frozenset()
    wanted: bool = True
    any_value: bool = False

    def fits(self, labels: Mapping[str, str]) -> bool:
        """Return whether the labels are as required. As in Kubernetes, an absent label differs from each value."""
        found = self.key in labels and (self.any_value or labels[self.key] in self.values)
        return found is self.wanted


def parse_selector(text: str) -> tuple[Requirement, ...]:
    """Return the terms of a label selector, all of which have to fit. Raises ValueError.

    Syntax: `a=b`, `a==b`, `a!=b`, `a in (b, c)`, `a notin (b, c)`, `a`, `!a`, joined by commas.
    """
    return tuple(_requirement(term.strip()) for term in _TERMS.split(text)) if text.strip() else ()


def _requirement(term: str) -> Requirement:
    if match := _SET.fullmatch(term):
        values = frozenset(_checked(value.strip(), _VALUE, term) for value in match[3].split(","))
        return Requirement(_checked(match[1], _KEY, term), values, match[2] == "in")
    if match := _EQUAL.fullmatch(term):
        value = _checked(match[3], _VALUE, term)
        return Requirement(_checked(match[1], _KEY, term), frozenset({value}), match[2] != "!=")
    wanted = not term.startswith("!")
    return Requirement(_checked(term.removeprefix("!").strip(), _KEY, term), wanted=wanted, any_value=True)


def _checked(word: str, pattern: re.Pattern[str], term: str) -> str:
    if not pattern.fullmatch(word):
        kind = "key" if pattern is _KEY else "value"
        raise ValueError(f"{term!r}: {word!r} is no label's {kind}; {_REMEDY}")
    return word


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The share of the policies that one daemon runs; without terms and namespaces, all of them.

    Args:
        text: the selector as it was written, for messages.
        namespaces: of targets; none for any.
    """

    text: str = ""
    terms: tuple[Requirement, ...] = ()
    namespaces: tuple[str, ...] = ()

    def of(self, loaded: Loaded) -> Loaded:
        """Return what is loaded with the selected policies only."""
        chosen = {
            name: policy
            for name, policy in loaded.policies.items()
            if (not self.namespaces or policy.target.namespace in self.namespaces)
            and all(term.fits(loaded.labels.get(name, {})) for term in self.terms)
        }
        return replace(loaded, policies=chosen)

    def needed(self, loaded: Loaded) -> Loaded:
        """Return the same. Raises PolicyError when nothing is selected."""
        chosen = self.of(loaded)
        if not chosen.policies:
            raise PolicyError((Problem("policies", "", "", self.complaint(loaded)),))
        return chosen

    def complaint(self, loaded: Loaded) -> str:
        """Return what to say where none of the policies is selected."""
        there = "; ".join(_described(loaded)) or "none"
        return f"{self} selects none of the {len(loaded.policies)} policies; there are: {there}"

    def __str__(self) -> str:
        parts = [f"--selector {self.text}"] if self.terms else []
        return " ".join([*parts, *(f"--namespace {namespace}" for namespace in self.namespaces)])


_SHOWN = 8


def _described(loaded: Loaded) -> Iterator[str]:
    """Yield for the first policies what they could be selected by."""
    for name, policy in list(loaded.policies.items())[:_SHOWN]:
        yield f"{name} in {policy.target.namespace} ({_labels(loaded.labels.get(name, {}).items())})"
    if len(loaded.policies) > _SHOWN:
        yield "..."


def _labels(items: Iterable[tuple[str, str]]) -> str:
    return ",".join(f"{key}={value}" for key, value in items) or "no labels"
