"""The fleet's randomness: a stream for each purpose, so that no option shifts what another one draws."""

import math
import uuid
from random import Random

import numpy as np

_LETTERS = "bcdfghjklmnpqrstvwxz2456789"


class Chance:
    """Draws for a fleet; equal generators give equal fleets.

    Args:
        rng: only its descendants are used.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        streams = [Random(int(stream.integers(2**63))) for stream in rng.spawn(10)]
        self._names, self._starts, self._restarts, self._nodes, self._stuck, self._crashes, self._lots = streams[:7]
        self.routing, self.backoff, self.api = streams[7:]

    def letters(self, count: int) -> str:
        """Return a part of a name, as Kubernetes makes them."""
        return "".join(self._names.choices(_LETTERS, k=count))

    def uid(self) -> str:
        """Return an object's identity."""
        return str(uuid.UUID(bytes=self._names.randbytes(16), version=4))

    def start_s(self, median_s: float, sigma: float) -> float:
        """Return how long a new pod loads: lognormal."""
        return median_s * math.exp(sigma * self._starts.gauss(0.0, 1.0))

    def restart_s(self, median_s: float, sigma: float) -> float:
        """Return how long a restarted container loads: lognormal."""
        return median_s * math.exp(sigma * self._restarts.gauss(0.0, 1.0))

    def node_s(self, probability: float, span_s: tuple[float, float]) -> float:
        """Return how long a new pod waits for its node; 0 where one is free."""
        wanted, long_s = self._nodes.random() < probability, self._nodes.uniform(*span_s)
        return long_s if wanted else 0.0

    def is_stuck(self, probability: float) -> bool:
        """Tell whether a start gets stuck."""
        return self._stuck.random() < probability

    def crash_in_s(self, mean_s: float) -> float:
        """Return how long a ready replica lives: exponential; for ever with an infinite mean."""
        lot = self._crashes.random()
        return -mean_s * math.log1p(-lot) if mean_s < math.inf else math.inf

    def lot(self) -> float:
        """Return a pod's place in [0, 1): it decides the phase of its scrapes."""
        return self._lots.random()
