"""Benchmarks: figures against a baseline of the same run, or of a whole process. `make bench` prints the quick ones."""


class MissedError(Exception):
    """A figure misses what is promised."""
