"""Runs of policies on a workload, each by itself and so in any process, and what they come to together."""

import contextlib
import importlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from autoscaler.core.policy import Approval, Policy, Slo
from autoscaler.errors import AutoscalerError
from autoscaler.policy_file import load_policies
from autoscaler.schedule import Calendar
from autoscaler.sim.comparison import Detail, detail
from autoscaler.sim.faults import Blackout, Faults, Symptom, fault_plan
from autoscaler.sim.fleet import Settings
from autoscaler.sim.front import Clients, Routing
from autoscaler.sim.profile import Profile
from autoscaler.sim.run import Setting, run
from autoscaler.sim.scored import Scored
from autoscaler.sim.traffic import Sample, Workload, load_workload

HOUR, TEN_MINUTES_S = 3600.0, 600.0
START_LOAD = 0.7
"""The share of the first replicas that the first ten minutes' work takes, unless somebody says how many there are."""
CLIENTS = Clients(retry_s=2.0)
"""As a gateway does: what is lost with a pod is sent once more, and counts as late rather than lost."""
YIELDING = ("loky", "threading", "sequential")
"""joblib's back ends that hand over each result as it comes."""


def _part(*names: str) -> Callable[[float], Faults]:
    """Return these parts of the fault plan only."""
    return lambda peak_s: Faults(**{name: getattr(fault_plan(peak_s), name) for name in names})


def _unreliable(symptom: Symptom) -> Callable[[float], Faults]:
    """Return the plan's outage of the pages with another symptom."""

    def faults(peak_s: float) -> Faults:
        return Faults(blackouts=(Blackout(start_s=peak_s, duration_s=TEN_MINUTES_S, symptom=symptom),))

    return faults


PRESETS: dict[str, Callable[[float], Faults]] = {
    "none": lambda _: Faults(),
    "plan": fault_plan,
    "blackout": _part("blackouts"),
    "api-errors": _part("api_errors"),
    "stuck-starts": _part("stuck_probability", "stuck_s"),
    "crashes": _part("crash_mean_s"),
    "frozen": _unreliable(Symptom.FROZEN),
    "nan": _unreliable(Symptom.NAN),
    "clock-skew": lambda _: Faults(clock_skew_s=30.0),
}
"""What goes wrong, by name, given when the traffic is at its peak [s]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run: all that another process needs to know.

    Args:
        label: the name that the policy goes by.
        workload, hours, scale: what is asked of the fleet; hours is None for all of it.
        replicas: ready at the start; None for as many as the first ten minutes' work takes.
        faults: name of a preset.
        detailed: whether the report draws this run.
        meter: a file that is told how much of the run is done, from 0 to 1; None for nobody.
    """

    label: str
    policy: Policy
    workload: str
    profile: Profile
    seed: int
    scale: float = 1.0
    hours: float | None = None
    replicas: int | None = None
    faults: str = "none"
    routing: Routing = Routing.LEAST_OUTSTANDING
    detailed: bool = False
    meter: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What came of a case."""

    scored: Scored
    detail: Detail | None


def run_case(case: Case) -> Ran:
    """Run a case in this process."""
    workload = _workload(case.workload, case.profile.cold_start_s, case.hours)
    sample = workload.draw(case.seed, case.scale)
    policy = replace(case.policy, approval=Approval())  # nobody is there to approve
    objective = policy.slo.itl.seconds if policy.slo.itl is not None else 0.1
    first = case.replicas or starting_replicas(case.profile, sample, objective)
    setting = Setting(
        profile=case.profile,
        replicas=min(max(first, policy.replicas.min), policy.replicas.max),
        duration_s=workload.duration_s,
        seed=case.seed,
        fleet=Settings(routing=case.routing, clients=CLIENTS),
        faults=PRESETS[case.faults](peak_s(sample, workload.duration_s)),
    )
    result = run(
        policy,
        sample.requests(),
        setting,
        progress=_Meter(case.meter, workload.duration_s) if case.meter is not None else None,
        active=Calendar(policy.schedules).active if policy.schedules else None,
    )
    scored = Scored(policy=case.label, seed=case.seed, hours=result.summary.duration_s / HOUR, figures=result.figures)
    shown = detail(case.label, case.seed, result.rows, policy, result.summary) if case.detailed else None
    return Ran(scored=scored, detail=shown)


@lru_cache(maxsize=1)
def _workload(spec: str, cold_start_s: float, hours: float | None) -> Workload:
    workload = load_workload(spec, cold_start_s=cold_start_s)
    return workload if hours is None else workload.first(hours * HOUR)


def starting_replicas(profile: Profile, sample: Sample, itl_s: float) -> int:
    """Return the replicas of which the work of the first ten minutes takes `START_LOAD`, at least 1.

    The larger of what the mean time between tokens takes at 90 % of `itl_s`, and of what the resident tokens take.
    """
    begin = sample.within(TEN_MINUTES_S)
    if not len(begin):
        return 1
    span_s = max(60.0, min(TEN_MINUTES_S, float(sample.arrival[-1])))
    prompts, outputs = float(begin.prompt.sum()) / span_s, float(begin.output.sum()) / span_s
    context = float(np.average(begin.prompt + begin.output / 2.0, weights=begin.output))
    token, sequence = profile.token_s, profile.sequence_s + profile.context_s * context
    work = profile.overhead * (token * (prompts + outputs) + sequence * outputs)
    base = profile.overhead * profile.base_s
    by_itl = work / max(0.3, 1.0 - base / (0.9 * itl_s))
    by_cache = work + outputs * context * base / (0.95 * profile.kv_tokens)
    return max(1, math.ceil(max(by_itl, by_cache) / START_LOAD))


def peak_s(sample: Sample, duration_s: float) -> float:
    """Return when the ten minutes with the most requests begin [s]."""
    if not len(sample):
        return 0.0
    counts = np.bincount((sample.arrival // TEN_MINUTES_S).astype(int))
    return min(float(np.argmax(counts)) * TEN_MINUTES_S, max(0.0, duration_s - TEN_MINUTES_S))


class _Meter:
    """Writes to a file how much is done, a few times a second."""

    def __init__(self, path: Path, duration_s: float) -> None:
        self._path, self._duration_s, self._next = path, duration_s, 0.0

    def __call__(self, simulated_s: float) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + 0.25
        with contextlib.suppress(OSError):  # on another machine of a cluster there is nobody to tell
            self._path.write_text(f"{simulated_s / self._duration_s:.4f}")


def run_cases(cases: Sequence[Case], *, jobs: int, backend: str) -> Iterator[Ran]:
    """Yield what comes of each case, in any order.

    Args:
        jobs: processes; 1 runs them here, -1 takes one a core.
        backend: of joblib: `loky`, `threading`, or one that a cluster registers, such as `dask` or `ray`.
    Raises: AutoscalerError, when there is no such back end.
    """
    jobs = min(jobs if jobs > 0 else os.cpu_count() or 1, len(cases)) if backend == "loky" else jobs
    if jobs == 1 and backend == "loky":
        yield from map(run_case, cases)
        return
    import joblib

    _register(backend)
    mode = "generator_unordered" if backend in YIELDING else "list"
    try:
        with joblib.parallel_config(backend=backend, n_jobs=jobs):
            results = joblib.Parallel(return_as=mode)(joblib.delayed(run_case)(case) for case in cases)
    except (ValueError, ImportError) as error:
        raise AutoscalerError(f"joblib has no back end {backend!r} here: {error}") from error
    yield from results


def _register(backend: str) -> None:
    """Let Ray's back end be known to joblib; Dask's is, once a client was made."""
    if backend != "ray":
        return
    try:
        importlib.import_module("ray.util.joblib").register_ray()
    except ImportError as error:
        raise AutoscalerError("the back end ray needs Ray: pip install ray") from error


# -- policies --------------------------------------------------------------------------------------------------------


def load_named(paths: Sequence[Path]) -> dict[str, Policy]:
    """Return the policies of these files by the names that they go by, which tell them apart.

    A policy's own name; where two files have the same, the file's.
    Raises: PolicyError; AutoscalerError, when two cannot be told apart.
    """
    found = [(path, name, policy) for path in paths for name, policy in load_policies([path]).policies.items()]
    names = [name for _, name, _ in found]
    labelled: dict[str, Policy] = {}
    for path, name, policy in found:
        label = name if names.count(name) == 1 else path.stem
        if label in labelled:
            raise AutoscalerError(f"two policies are called {label}: rename one, or its file")
        labelled[label] = policy
    return labelled


def with_objectives(policy: Policy, seconds: Mapping[str, float]) -> Policy:
    """Return the policy with other objectives: seconds by `ttft` and `itl`; the quantiles stay its own."""
    slo = policy.slo
    return replace(
        policy,
        slo=replace(slo, ttft=_moved(slo.ttft, seconds.get("ttft")), itl=_moved(slo.itl, seconds.get("itl"))),
    )


def _moved(slo: Slo | None, seconds: float | None) -> Slo | None:
    if seconds is None:
        return slo
    return Slo(seconds=seconds) if slo is None else replace(slo, seconds=seconds)
