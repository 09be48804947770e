"""The share of the policies that this daemon runs, on the command line and at each reload."""

from collections.abc import Mapping

import click
from structlog.typing import FilteringBoundLogger

from autoscaler.core.policy import Policy
from autoscaler.policy_file import Loaded, Selection, parse_selector


def parse_selection(selector: str, namespaces: tuple[str, ...]) -> Selection:
    """Return what `--selector` and `--namespace` select. Raises BadParameter."""
    try:
        terms = parse_selector(selector)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--selector") from error
    return Selection(text=selector.strip(), terms=terms, namespaces=namespaces)


def selected(selection: Selection, loaded: Loaded, log: FilteringBoundLogger) -> Mapping[str, Policy]:
    """Return the selected policies of a reload. None is no error then: they may have moved to another daemon."""
    policies = selection.of(loaded).policies
    if not policies:
        log.warning("nothing_selected", detail=selection.complaint(loaded))
    return policies
