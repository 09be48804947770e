"""What operators see: structured log lines without secrets, one line a tick, and Prometheus metrics.

Labels are the policy's name and fixed enums only: no pod names, texts or addresses. What is unknown has no series.
"""

from autoscaler.telemetry.logs import configure_logging, redact
from autoscaler.telemetry.report import Telemetry

__all__ = ["Telemetry", "configure_logging", "redact"]
