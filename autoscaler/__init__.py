"""Keeps vLLM Deployments on Kubernetes at the right size, and says why."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("vllm-autoscaler")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0.0.0"
