"""The step-time line t = c0 + cp P + cb B + ck K, learned online per target."""

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
MIN_BUSY = 0.75
SCALE = np.array([0.02, 60e-6, 20e-6, 40e-9])
"""Typical sizes of c0 [s], cp, cb [s/token, s/sequence], ck [s/token]: the ridge pulls by deviations from the prior
in these units, with weight 1."""
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
    ends, three iterations, and iterations x mean ITL filling three quarters of the time. One row is
    (1, prefill tokens, sequences, resident tokens) an iteration against seconds an iteration, weighted by 1/t, so that
    relative errors count.
    """
    if at - model.at < LEARN_EVERY_S:
        return model
    design, seconds = _rows(engines.values, increase)
    if not len(seconds):
        return model
    decay = 0.5 ** ((at - model.at) / HALF_LIFE_S)
    weighted = design / seconds[:, None]
    gram = model.gram * decay + weighted.T @ weighted
    moment = model.moment * decay + weighted.sum(axis=0)
    rows = model.rows + len(seconds)
    line = _solve(gram, moment, prior) if rows >= MIN_ROWS else model.line
    return StepModel(line=line, rows=rows, gram=gram, moment=moment, at=at)


def _rows(values: Floats, increase: Increase) -> tuple[Floats, Floats]:
    """Return the design matrix, shape (n, 4), and the seconds an iteration, shape (n,), of the engines that teach."""
    column = {name: increase.counters[:, COLUMN[name] - FIRST_COUNTER] for name in _LEARNED_FROM}
    running = COLUMN["num_requests_running"]
    resident = values[:, COLUMN["kv_cache_usage"]] * values[:, COLUMN["kv_capacity_tokens"]]
    iterations, generated = column["iterations"], column["generation_tokens"]
    prefill = np.maximum(column["prompt_tokens"] - np.nan_to_num(column["cached_prompt_tokens"]), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        # Each token but a request's first is one observation of ITL: their sum over their count is the mean step.
        mean_itl = column["itl_sum"] / generated
        busy = iterations * mean_itl >= MIN_BUSY * increase.elapsed
        enough = (increase.was_running >= 2.0) & (values[:, running] >= 2.0) & (iterations >= MIN_ITERATIONS)
        usable = busy & enough & (increase.elapsed > 0.0) & np.isfinite(resident) & np.isfinite(prefill)
        steps = iterations[usable]
        design = np.stack(
            (np.ones(len(steps)), prefill[usable] / steps, generated[usable] / steps, resident[usable]), axis=1
        )
        return design, increase.elapsed[usable] / steps


_LEARNED_FROM = ("iterations", "prompt_tokens", "cached_prompt_tokens", "generation_tokens", "itl_sum")


def _solve(gram: Floats, moment: Floats, prior: StepTime) -> StepTime:
    """Return the ridge solution, non-negative and inside its bounds.

    The most negative coefficient is set to 0 and the rest solved again, until none is negative.
    """
    start = np.array([prior.c0, prior.cp, prior.cb, prior.ck])
    ridge = 1.0 / SCALE**2
    left, right = gram + np.diag(ridge), moment + ridge * start
    free = np.ones(4, dtype=bool)
    solution = np.zeros(4)
    while free.any():
        solution = np.zeros(4)
        # Columns differ by six orders of magnitude: solve in units of SCALE.
        scaled = left[np.ix_(free, free)] * np.outer(SCALE[free], SCALE[free])
        solution[free] = np.linalg.solve(scaled, right[free] * SCALE[free]) * SCALE[free]
        if (solution >= 0.0).all():
            break
        free[int(np.argmin(solution / SCALE))] = False
    c0, cp, cb, ck = (float(value) for value in np.clip(solution, LOWER, UPPER))
    return StepTime(c0=c0, cp=cp, cb=cb, ck=ck)
