"""Benchmarks in one table: the quick ones (`make bench`), or those named, like `profiles`, `reaction`, `failover`."""

import importlib
import sys

from rich.console import Console
from rich.table import Table

from bench import MissedError

MODULES = ("parser", "decide", "trace", "engine", "plugin", "start")
ALONE = ("batching", "failover", "closed_loop", "autoscaling", "tuning", "tune", "faults")
"""Have a command line and an exit code of their own."""


def main() -> None:
    """Run the benchmarks named on the command line, the quick ones without a name, and print one table.

    Exits with 1 when a figure misses what is promised.
    """
    if sys.argv[1:2] and sys.argv[1] in ALONE:
        sys.exit(importlib.import_module(f"bench.{sys.argv[1]}").main(sys.argv[2:]))
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table("benchmark", "figure", "value", box=None, pad_edge=False)
    missed = []
    for name in sys.argv[1:] or MODULES:
        module = importlib.import_module(f"bench.{name}")
        try:
            for label, value in module.measure():
                table.add_row(name, label, value)
        except MissedError as error:
            missed.append(f"{name}: {error}")
    console.print(table)
    if missed:
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    main()
