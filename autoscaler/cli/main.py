"""The command group, and what exit codes mean: 0 good, 1 failed, 2 bad input."""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import click

from autoscaler import __version__
from autoscaler.errors import AutoscalerError, ModelError, PolicyError, ProfileError

COMMANDS = {
    "run": "run",
    "replay": "replay",
    "simulate": "simulate",
    "plan": "plan",
    "check": "check",
    "doctor": "doctor",
    "demo": "demo",
    "plugin-install": "plugin_install",
}
EXIT_FAILED, EXIT_BAD_INPUT = 1, 2


class LazyGroup(click.Group):
    """Imports a command's module when it is used: `check` need not wait for what `run` needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order in which people meet them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of that name."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"autoscaler.cli.{COMMANDS[cmd_name]}")
        command: click.Command = module.command
        return command


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="autoscaler")
def group() -> None:
    """Keeps vLLM Deployments on Kubernetes at the right size, and says why."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code of one command line. Our own errors are one message, not a traceback."""
    try:
        result: Any = group.main(args=arguments, prog_name="autoscaler", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("aborted", err=True)
        return EXIT_FAILED
    except (PolicyError, ProfileError, ModelError) as error:
        for problem in error.problems:
            click.echo(f"{click.style('error', fg='red')}: {problem}", err=True)
        return EXIT_BAD_INPUT
    except AutoscalerError as error:
        click.echo(f"{click.style('error', fg='red')}: {error}", err=True)
        return EXIT_FAILED
    return result if isinstance(result, int) else 0
