"""Runs inside vLLM, not inside the daemon: moves the scheduler's limits between two steps. See docs/batching.md.

Imports nothing of the daemon, and nothing but the standard library and vLLM. It is a distribution of its own (see
pyproject.toml here), and so that its modules find each other under both names, they import each other relatively.
"""

from __future__ import annotations

from .route import LimitsEndpoint, LimitsMiddleware

__version__ = "0.1.0"
__all__ = ["LimitsEndpoint", "LimitsMiddleware", "register"]


def register() -> None:
    """Wrap vLLM's scheduler: what `vllm.general_plugins` calls in every process of vLLM."""
    from .hook import install

    install(__version__)
