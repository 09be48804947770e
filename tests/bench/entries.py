"""Results by hand: what the benchmark would have written of a run."""

from collections.abc import Mapping

from bench.contest.results import Entry


def ran(
    policy: str,
    attainment: float,
    gpu_hours: float,
    seed: int = 0,
    *,
    trace: str = "code",
    scale: float = 1.0,
    day: bool = True,
    settings: Mapping[str, object] | None = None,
    **figures: object,
) -> Entry:
    """Return a run; what is not given is the same for all.

    Args:
        day: whether the trace is one of a day.
        figures: others than these.
    """
    return Entry(
        trace=trace,
        policy=policy,
        seed=seed,
        scale=scale,
        hours=None,
        settings=settings or {},
        ground={"fluid_gpu_hours": 5.0, "duration_s": 86_400.0 if day else 3_600.0},
        figures={
            "attainment": attainment,
            "gpu_hours": gpu_hours,
            "mean_replicas": gpu_hours / 24.0,
            "worst_ten_minutes": 0.9,
            "bad_ten_minutes": 0.1,
            "ttft_s": {"p99": 1.0},
            "tpot_s": {"p99": None},
            "requests": 1_000,
            "failed": 0,
            "hours": 1.0,
            "ups": 1,
            "downs": 1,
            "reversals_per_hour": 0.5,
            "flaps": 0,
            **figures,
        },
        seconds=1.0,
        commit="abc",
    )
