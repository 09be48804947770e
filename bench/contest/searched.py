"""The log of the search for values, as a table: what each policy was given, and what came of it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.contest.variants import spelled
from bench.tune import scored
from bench.tuning import TUNINGS

Logged = Mapping[str, Any]
"""A candidate, as `bench tune` writes it: a line of JSON."""


def read_log(path: Path) -> list[Logged]:
    """Return the candidates of a log; none of a file that is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def searches(log: Sequence[Logged]) -> Iterator[tuple[str, Sequence[Logged]]]:
    """Yield each policy with its candidates, by name."""
    for name in sorted({entry["rival"] for entry in log}):
        yield name, [entry for entry in log if entry["rival"] == name]


def told(log: Sequence[Logged]) -> Iterator[str]:
    """Yield the lines of the page that say what was searched, and what was found."""
    if not log:
        yield "No search was logged: the rivals run with their vendors' values."
        return
    workloads = list(dict.fromkeys(name for entry in log for name in entry["workloads"]))
    left_out = [name for name in workloads if name in TUNINGS and not TUNINGS[name].scored]
    yield (
        f"`python -m bench tune`, workloads {_names(workloads)} of `bench/tuning.py`; every candidate is in "
        "[tune.jsonl](benchmark/tune.jsonl). The vendor's values, for ours the shipped ones, are the first candidate. "
        "The score, lower is better, is the mean of the GPU-hours over the fluid bound, plus 1 for each point of "
        "attainment that is missing to 99 % on all of them."
    )
    if left_out:
        yield (
            f"{_names(left_out)} ran, and is not scored: its made surge comes within a minute, so that only standing "
            "overcapacity meets it, which every policy would be tuned to buy."
        )
    yield ""
    yield "| policy | candidates | score at first | best score | attained then, on each, % | best values |"
    yield "|---|---|---|---|---|---|"
    for name, entries in searches(log):
        best = min(entries, key=scored)
        first = next((f"{scored(entry):.2f}" for entry in entries if entry["number"] == 0), "–")
        attained = ", ".join(f"{100.0 * share:.2f}" for share in best["attained"])
        values = ", ".join(f"{_shown(name, key)} {value:.3g}" for key, value in best["values"].items())
        yield f"| {name} | {len(entries)} | {first} | {scored(best):.2f} | {attained} | {values or 'as at first'} |"


def _names(workloads: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in workloads)


def _shown(policy: str, key: str) -> str:
    return spelled(key) if policy == "ours" else key
