"""The step-time line t = c0 + cp P + cb B + ck K, learned online per target."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoscaler.core.policy import StepTime
from autoscaler.core.signals import COLUMN, FIRST_COUNTER
from autoscaler.core.types import Engines, Floats
from autoscaler.core.window import Increase

HALF_LIFE_S = 3600.0
LEARN_EVERY_S = 30.0
MIN_ROWS = 20
MIN_ITERATIONS = 3.0
MIN_BUSY, MAX_BUSY = 0.75, 3.0
"""How much of the time between two readings iterations x mean ITL fill. They come to 2 at most, where answers are short
and a token's wait began before the first reading. More is the work of a longer time: a page that stood still moves on.
"""
SCALE = np.array([0.02, 60e-6, 20e-6, 40e-9])
"""Typical sizes of c0 [s], cp, cb [s/token, s/sequence], ck [s/token]: the ridge pulls by deviations from the prior
in these units, with weight 1."""
SCALES, RIDGE = np.multiply.outer(SCALE, SCALE), np.eye(4)
RUNNING = COLUMN["num_requests_running"]
LEARNED_FROM = tuple(
    COLUMN[name] - FIRST_COUNTER
    for name in ("iterations", "generation_tokens", "itl_sum", "prompt_tokens", "cached_prompt_tokens")
)
LOWER = np.array([0.002, 2e-6, 0.0, 0.0])
UPPER = np.array([0.2, 2000e-6, 2000e-6, 2000e-9])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepModel:
    """What has been learned of one target's engines.

    Args:
        line: the coefficients in use.
        rows: observations behind them, undecayed.
        gram, moment: weighted normal equations, shapes (4, 4) and (4,).
        at: of the last update.
    """

    line: StepTime
    rows: int
    gram: Floats
    moment: Floats
    at: float


def new_model(prior: StepTime, at: float) -> StepModel:
    """Return a model that knows nothing yet."""
    return StepModel(line=prior, rows=0, gram=np.zeros((4, 4)), moment=np.zeros(4), at=at)


def learn(model: StepModel, prior: StepTime, engines: Engines, increase: Increase, at: float) -> StepModel:
    """Return the model after one more look at the engines, at most one look in `LEARN_EVERY_S`.

    An engine teaches when it was busy throughout the interval between its two readings: at least two requests at both
    ends, three iterations, and iterations x mean ITL filling three quarters of the time, but not several times it. One
    row is (1, prefill tokens, sequences, resident tokens) an iteration against seconds an iteration, weighted by 1/t,
    so that relative errors count.
    """
    if at - model.at < LEARN_EVERY_S:
        return model
    design, seconds = observations(engines.values, increase)
    if not len(seconds):
        return model
    decay = 0.5 ** ((at - model.at) / HALF_LIFE_S)
    weighted = design / seconds[:, None]
    # Products first, then one sum along axis 0: a matrix product's last bits depend on the CPU (see `_solved`).
    gram = model.gram * decay + np.add.reduce(weighted[:, :, None] * weighted[:, None, :], axis=0)
    moment = model.moment * decay + np.add.reduce(weighted, axis=0)
    rows = model.rows + len(seconds)
    line = _solve(gram, moment, prior) if rows >= MIN_ROWS else model.line
    return StepModel(line=line, rows=rows, gram=gram, moment=moment, at=at)


def observations(values: Floats, increase: Increase) -> tuple[Floats, Floats]:
    """Return the design matrix, shape (n, 4), and the seconds an iteration, shape (n,), of the engines that teach."""
    iterations, generated, itl_sum, prompt, cached = (increase.counters[:, column] for column in LEARNED_FROM)
    elapsed, running = increase.elapsed, values[:, RUNNING]
    resident = values[:, COLUMN["kv_cache_usage"]] * values[:, COLUMN["kv_capacity_tokens"]]
    # An engine that does not count its cached tokens computes all of them.
    prefill = np.maximum(np.fmin(prompt, prompt - cached), 0.0)
    # Each token but a request's first is one observation of ITL: their sum over their count is the mean step.
    whole = elapsed * generated
    filled = iterations * itl_sum
    busy = (whole > 0.0) & (filled >= MIN_BUSY * whole) & (filled <= MAX_BUSY * whole)
    enough = (np.minimum(increase.was_running, running) >= 2.0) & (iterations >= MIN_ITERATIONS)
    usable = busy & enough & np.isfinite(resident + prefill)
    steps = iterations[usable]
    design = np.empty((len(steps), 4))
    design[:, 0] = 1.0
    design[:, 1] = prefill[usable] / steps
    design[:, 2] = generated[usable] / steps
    design[:, 3] = resident[usable]
    return design, elapsed[usable] / steps


def _solve(gram: Floats, moment: Floats, prior: StepTime) -> StepTime:
    """Return the ridge solution, non-negative and inside its bounds.

    The most negative coefficient is set to 0 and the rest solved again, until none is negative.
    """
    # Columns differ by six orders of magnitude: solve in units of SCALE, in which the ridge is 1.
    left = (gram * SCALES + RIDGE).tolist()
    right = (moment * SCALE + np.array([prior.c0, prior.cp, prior.cb, prior.ck]) / SCALE).tolist()
    free = [0, 1, 2, 3]
    solution = [0.0] * 4
    while free:
        found = _solved([[left[row][column] for column in free] for row in free], [right[row] for row in free])
        solution = [0.0] * 4
        for index, value in zip(free, found, strict=True):
            solution[index] = value
        lowest = min(free, key=solution.__getitem__)
        if solution[lowest] >= 0.0:
            break
        free.remove(lowest)
    c0, cp, cb, ck = np.minimum(np.maximum(np.array(solution) * SCALE, LOWER), UPPER).tolist()
    return StepTime(c0=c0, cp=cp, cb=cb, ck=ck)


def _solved(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Return x of A x = b for a symmetric positive definite A, whose elimination needs no pivots.

    In plain Python: the last bits of BLAS and LAPACK depend on the CPU, and a replay is equal to the bit on any.
    """
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for index, pivot in enumerate(rows):
        for below in range(index + 1, len(rows)):
            factor = rows[below][index] / pivot[index]
            rows[below] = [value - factor * above for value, above in zip(rows[below], pivot, strict=True)]
    solution = [0.0] * len(rows)
    for index in range(len(rows) - 1, -1, -1):
        rest = rows[index][-1]
        for known in range(index + 1, len(rows)):
            rest -= rows[index][known] * solution[known]
        solution[index] = rest / rows[index][index]
    return solution
