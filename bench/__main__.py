"""`make bench`: every benchmark, in one table."""

import importlib
import sys

from rich.console import Console
from rich.table import Table

MODULES = ("parser", "decide", "trace", "start")


def main() -> None:
    """Run the benchmarks named on the command line, all of them without a name, and print one table."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table("benchmark", "figure", "value", box=None, pad_edge=False)
    for name in sys.argv[1:] or MODULES:
        module = importlib.import_module(f"bench.{name}")
        for label, value in module.measure():
            table.add_row(name, label, value)
    console.print(table)


if __name__ == "__main__":
    main()
