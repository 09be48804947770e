"""The table of cards."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from autoscaler.core.kv import GIB
from autoscaler.core.planning import Card, Slice
from autoscaler.errors import ModelError, Problem

TABLE = Path(__file__).parent / "cards.yaml"


@cache
def _cards() -> dict[str, Card]:
    """Return the cards by name."""
    rows: dict[str, Any] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return {
        name: Card(
            name=name,
            title=row["title"],
            memory_bytes=row["memoryGiB"] * GIB,
            slices=tuple(Slice(one, memory * GIB, per_card) for one, (memory, per_card) in row.get("mig", {}).items()),
            small_batches=row.get("smallBatches", False),
        )
        for name, row in rows.items()
    }


def card_names() -> tuple[str, ...]:
    """Return the names of the cards."""
    return tuple(_cards())


def card(name: str) -> Card:
    """Return the card of that name, in either case. Raises ModelError, with the known ones."""
    found = _cards().get(name.lower())
    if found is None:
        known = ", ".join(card_names())
        problem = Problem(file="--gpu", key="", value=name, message=f"no such card; known are {known}")
        raise ModelError((problem,))
    return found
