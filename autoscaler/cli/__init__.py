"""The command line: arguments, wiring and exit codes. The only room that builds the parts."""

from autoscaler.cli.main import main

__all__ = ["main"]
