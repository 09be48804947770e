"""What to say about a mistake in a policy file: its remedy, and its value where that cannot be a secret."""

import difflib
import json
import re
from collections.abc import Callable

from pydantic_core import ErrorDetails

from autoscaler.policy_file.scalars import what_is
from autoscaler.policy_file.spelling import document_model, dotted, members_of, places, type_at
from autoscaler.policy_file.tree import Loc


def remedy(error: ErrorDetails) -> str:
    """Return what is wrong and what would be right, for one of pydantic's errors."""
    kind, what = error["type"], what_is(error["input"])
    context = error.get("ctx", {})
    messages: dict[str, Callable[[], str]] = {
        "missing": lambda: f"is required{_meaning_at(error['loc'])}",
        "extra_forbidden": lambda: _unknown_key(error["loc"]),
        "value_error": lambda: str(context["error"]),
        "string_type": lambda: f"must be text, but is {what}" + ("" if what == "empty" else ": put it in quotes"),
        "enum": lambda: f"must be {context['expected']}",
        "literal_error": lambda: f"must be {context['expected']}",
        "model_type": lambda: f"must be a mapping, but is {what}",
        "dict_type": lambda: f"must be a mapping, but is {what}",
        "list_type": lambda: f"must be a list, but is {what}",
        "too_short": lambda: f"must have {context['min_length']} entries, not {context['actual_length']}",
        "too_long": lambda: f"must have {context['max_length']} entries, not {context['actual_length']}",
    }
    return messages.get(kind, lambda: error["msg"])()


def _meaning_at(loc: Loc) -> str:
    members = members_of(type_at(loc[:-1])).items()
    meaning = next((member.description for name, member in members if (member.alias or name) == loc[-1]), None)
    return f" ({meaning.rstrip('.')})" if meaning else ""


def _unknown_key(loc: Loc) -> str:
    """Return a message that names the key that was probably meant: near by spelling, else the same one elsewhere."""
    members = members_of(type_at(loc[:-1])).items()
    siblings = {_squeezed(member.alias or name): member.alias or name for name, member in members}
    close = difflib.get_close_matches(_squeezed(str(loc[-1])), siblings, n=1, cutoff=0.65)
    if close:
        return f"unknown key; did you mean {siblings[close[0]]}?"
    elsewhere = [dotted(place) for place in places(document_model(), ()) if place[-1] == loc[-1]]
    if elsewhere:
        return f"unknown key here; did you mean {' or '.join(elsewhere[:3])}?"
    return f"unknown key; known here: {', '.join(siblings.values())}"


def _squeezed(key: str) -> str:
    return re.sub(r"[^a-z0-9]", "", key.lower())


def shown(value: object) -> str:
    """Return a scalar as in YAML, cut, without a URL's credentials; "" for lists and mappings."""
    if isinstance(value, str):
        text = re.sub(r"(?<=://)\S*@", "***@", value)
        return text[:80] if text.isprintable() and text else json.dumps(text[:80])
    return "" if isinstance(value, list | dict) else json.dumps(value)
