"""The oracle in the simulator: its plan attains, the next busier one does not, and it costs more than the bound."""

import asyncio

import numpy as np

from autoscaler.sim.engine import Request
from autoscaler.sim.fleet import Fleet
from autoscaler.sim.profiles import profile
from autoscaler.sim.workload import Lengths, requests, step
from bench.oracle import THETAS, Planned, achievable, cheapest, fluid_gpu_hours, needed
from bench.rivals.base import Bounds
from bench.rivals.feed import Counted, drive
from bench.work import busy_replicas

PROFILE = profile("llama-3.1-70b-h100x4")
DURATION_S, STEP_S = 1500.0, 900.0
TTFT_S, TPOT_S = 2.0, 0.2
LEAD_S, START_S = 330.0, 260.0


def _traffic() -> list[Request]:
    lengths = Lengths(prompt=1500, output=40, longest_output=200)
    return list(requests(np.random.default_rng(3), step(4.0, 16.0, STEP_S), lengths, DURATION_S))


def test_the_plan_is_the_cheapest_that_attains() -> None:
    traffic = _traffic()
    arrivals, prompts, outputs, _ = (np.array(column, dtype=np.float64) for column in zip(*traffic, strict=True))
    costs: dict[tuple[int, ...], float] = {}

    def simulate(plan: tuple[int, ...]) -> float:
        counted = Counted(traffic)
        fleet = Fleet(PROFILE, counted, replicas=plan[0], epoch=0.0, rng=np.random.default_rng(4))
        asyncio.run(drive(fleet, Planned(plan, lead_s=LEAD_S), counted, DURATION_S))
        summary = fleet.summary(ttft_s=TTFT_S, tpot_s=TPOT_S)
        costs[plan] = summary.gpu_hours
        return summary.attainment or 0.0

    bounds = Bounds(max=20)
    busy = busy_replicas(PROFILE, arrivals, prompts, outputs, duration_s=DURATION_S, token_s=0.08)
    found = achievable(busy, simulate, start_s=START_S, bounds=bounds)
    assert found is not None
    assert found.attainment >= 0.99
    assert max(found.plan[: int(STEP_S // 60.0)]) < min(found.plan[int(STEP_S // 60.0) + 1 :])
    assert costs[found.plan] > fluid_gpu_hours(PROFILE, prompts, outputs)

    busier = THETAS[THETAS.index(found.theta) + 1]
    plan = tuple(cheapest(needed(busy, busier, bounds), bin_s=60.0, start_s=START_S).tolist())
    assert simulate(plan) < 0.99
