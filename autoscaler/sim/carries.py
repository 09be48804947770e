"""What one replica carries: the most requests a second of one length that still come in time."""

import numpy as np

from autoscaler.sim.engine import Engine, Request
from autoscaler.sim.ledger import Ledger
from autoscaler.sim.profile import Profile

SHARE = 0.99
DURATION_S = 600.0
LOWEST_RPS = 0.05
PATIENCE_S = 60.0
"""Clients give up when they have waited so long for a first token."""
STEPS = 6
"""Halvings of the last doubling: to one and a half per cent."""


def carried_rps(profile: Profile, prompt: int, output: int, ttft_s: float, tpot_s: float) -> float:
    """Return the requests/s of so many tokens, arriving at random, of which 99 % come within both objectives.

    0.0 when not even one in 20 s does. The same arguments give the same number.
    """

    def carries(rps: float) -> bool:
        return _attained(profile, prompt, output, rps, ttft_s, tpot_s) >= SHARE

    low, high = 0.0, LOWEST_RPS
    while carries(high):
        low, high = high, 2.0 * high
    if low == 0.0:
        return 0.0
    for _ in range(STEPS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if carries(middle) else (low, middle)
    return low


def _attained(profile: Profile, prompt: int, output: int, rps: float, ttft_s: float, tpot_s: float) -> float:
    """Return the share of the requests within both objectives at that rate."""
    rng = np.random.default_rng(1)
    arrivals = np.sort(rng.uniform(0.0, DURATION_S, max(1, round(rps * DURATION_S))))
    ledger = Ledger()
    engine = Engine(profile, ledger, PATIENCE_S)
    for arrival in arrivals.tolist():
        engine.submit(Request(arrival, prompt, output))
    engine.run(100.0 * DURATION_S)
    return float(np.mean(ledger.attained(ttft_s, tpot_s)))
