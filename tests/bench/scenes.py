"""What rivals see, by hand: fleets whose every pod carries the same load."""

import math

from autoscaler.sim.profile import Profile
from bench.rivals.base import Rival
from bench.rivals.view import Gateway, Histogram, Page, Pod, PodState, View

# An iteration takes 0.1 ms a token, whatever the token is.
PLAIN = Profile(
    name="plain",
    model="plain",
    gpus=1,
    base_s=0.0,
    token_s=1e-4,
    sequence_s=0.0,
    context_s=0.0,
    prefix_s=0.0,
    kv_tokens=1_000_000,
    cold_start_s=60.0,
    overhead=1.0,
)


def fleet(
    ready: int,
    *,
    now: float = 0.0,
    loading: int = 0,
    running: int = 0,
    waiting: int = 0,
    kv: float = 0.0,
    gpu: float = 0.0,
    ttft: tuple[float, float] = (0.0, 0.1),
    tpot: tuple[float, float] = (0.0, 0.01),
    rate: float = 0.0,
    prompt: int = 1000,
    output: int = 100,
) -> View:
    """Return a fleet in its steady state at `now`.

    Args:
        running, waiting, kv, gpu: of each ready pod.
        ttft, tpot: the bucket that holds every latency; each pod has finished one request a second since long ago.
        rate: requests a second of that prompt and output that have arrived at the gateway since 0.
    """
    finished = 10_000.0 + now
    page = Page(
        running=running,
        waiting=waiting,
        kv_usage=kv,
        ttft=Histogram(bounds=(*ttft, math.inf), counts=(0.0, finished, finished)),
        tpot=Histogram(bounds=(*tpot, math.inf), counts=(0.0, finished, finished)),
    )
    pods = [Pod(name=f"ready-{index}", page=page, gpu_util=gpu) for index in range(ready)]
    pods += [Pod(name=f"loading-{index}", state=PodState.PENDING) for index in range(loading)]
    arrived = round(rate * now)
    return View(
        ordered=ready + loading,
        pods=tuple(pods),
        gateway=Gateway(
            in_flight=ready * (running + waiting),
            requests=arrived,
            prompt_tokens=arrived * prompt,
            output_tokens=arrived * output,
        ),
    )


def ticks(rival: Rival, duration_s: float) -> list[float]:
    """Return the times at which a rival is asked."""
    return [index * rival.interval_s for index in range(int(duration_s / rival.interval_s) + 1)]
