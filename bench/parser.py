"""Reading one page of vLLM 0.32: our parser, rows built, against prometheus_client's parser in the same process."""

from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from prometheus_client.parser import text_string_to_metric_families

from autoscaler.core.types import Pod
from autoscaler.sources.exposition import SeriesCache, parse_page
from autoscaler.sources.vllm import EngineBuilder, PodPage, is_wanted

_PAGE = Path(__file__).parent.parent / "tests" / "data" / "vllm" / "0.32.0" / "saturated.prom"
_POD = Pod(name="pod", uid="uid")
_FLEET = 200
_ROUNDS = 20


def measure() -> list[tuple[str, str]]:
    """Return label and value of each figure; times are the best of 20 rounds, each round running all of them."""
    body = _PAGE.read_bytes()
    text = body.decode()
    cache, builder = SeriesCache(is_wanted), EngineBuilder()
    fleet = [Pod(name=f"pod-{number}", uid=f"uid-{number:03}") for number in range(_FLEET)]

    def read(pods: list[Pod], cache: SeriesCache, builder: EngineBuilder) -> None:
        builder.build([PodPage(pod=pod, read_at=0.0, page=parse_page(body, cache)) for pod in pods])

    theirs, cold, warm, many = _best(
        lambda: list(text_string_to_metric_families(text)),
        lambda: read([_POD], SeriesCache(is_wanted), EngineBuilder()),
        lambda: read([_POD], cache, builder),
        lambda: read(fleet, cache, builder),
    )
    return [
        ("page of vLLM 0.32, prometheus_client", f"{theirs * 1e3:.2f} ms"),
        ("page of vLLM 0.32, first sight, rows built", f"{cold * 1e3:.2f} ms, {theirs / cold:.1f}x faster"),
        ("page of vLLM 0.32, known layout, rows built", f"{warm * 1e3:.2f} ms, {theirs / warm:.0f}x faster"),
        (f"pages of {_FLEET} pods, rows built", f"{many * 1e3:.1f} ms, {theirs * _FLEET / many:.0f}x faster"),
    ]


def _best(*jobs: Callable[[], object]) -> list[float]:
    """Return each job's shortest time [s]; the jobs take turns, so that a busy machine slows them alike."""
    times: list[list[float]] = [[] for _ in jobs]
    for _ in range(_ROUNDS):
        for job, spent in zip(jobs, times, strict=True):
            start = perf_counter()
            job()
            spent.append(perf_counter() - start)
    return [min(spent) for spent in times]


if __name__ == "__main__":
    for label, value in measure():
        print(f"{label:48} {value}")
