"""Benchmarks: figures against a baseline of the same run, or of a whole process. `make bench` prints them all."""
