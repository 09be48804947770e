"""From a queue that crosses its threshold to a patch that a real API server has accepted: ours against a real HPA.

Both run side by side on one control plane, each on Deployments of its own, whose pods' queues grow at the same moment,
at random within the HPA's period. Ours runs on its default policy; the HPA with Kubernetes' defaults, on the same queue
as an external metric, served at the moment it is asked: with Prometheus and an adapter in between, it would be later by
a scrape. Neither has a window to wait for, the HPA by its own default, ours as such a queue is an emergency. The patch
counts from when the audit log has it as answered. Needs what `make cluster-tools` builds; takes five minutes.
"""

import asyncio
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx

from autoscaler.testbed.external_metrics import external_metrics, waiting_of
from autoscaler.testbed.plane import running_plane
from bench import MissedError
from tests.cluster.daemon import Daemon, running_daemon
from tests.cluster.manifests import (
    Place,
    address_of,
    condition,
    deployment,
    eventually,
    grant,
    is_ready,
    new_place,
    queue_autoscaler_of,
)
from tests.cluster.site import DEPLOYED, site_of

CROSSINGS, AT_ONCE = 30, 6
SEED = 20261130
HPA = "hpa"
HPA_SYNC_S = 15.0
INTERVALS_S: Mapping[str, float] = {"default": 5.0, "quick": 1.0}
"""By the name of the kind: of the daemon's ticks."""
SPARE_S = 0.2
CALM = {"rps": 1, "running": 8, "kv": 0.1, "waiting": 0}
QUEUE, QUEUE_A_REPLICA = 40, 20
TICKS_BEFORE = 3
LIMIT_S = 60.0


@dataclass
class Times:
    """What was measured, by kind [s].

    Attributes:
        reaction: from the queue's growth to the patch.
        work: from the start of the tick that saw it to the patch; of ours only.
    """

    reaction: dict[str, list[float]] = field(default_factory=dict)
    work: dict[str, list[float]] = field(default_factory=dict)


def measure(crossings: int = CROSSINGS, seed: int = SEED) -> Iterator[tuple[str, str]]:
    """Yield label and value of each figure. Raises MissedError when ours was later than an interval and 0.2 s."""
    times = asyncio.run(_measure(crossings, random.Random(seed)))
    yield "crossings of each, seed", f"{crossings}, {seed}"
    yield "cores, load of the last five minutes", f"{os.cpu_count()}, {os.getloadavg()[1]:.1f}"
    for kind, interval_s in INTERVALS_S.items():
        yield f"ours, a tick every {interval_s:g} s ({kind})", _shown(times.reaction[kind])
        yield "  of which from the start of the tick to the patch", _shown(times.work[kind])
    yield f"HPA v2, a sync every {HPA_SYNC_S:g} s (default)", _shown(times.reaction[HPA])
    ours, theirs = times.reaction["default"], times.reaction[HPA]
    yield "ours against HPA, both by default", f"{median(theirs) / median(ours):.1f}x, {p99(theirs) / p99(ours):.1f}x"
    late = [kind for kind, interval_s in INTERVALS_S.items() if p99(times.reaction[kind]) > interval_s + SPARE_S]
    if late:
        raise MissedError(f"p99 of {', '.join(late)} is more than an interval and {SPARE_S:g} s")


def p99(values: Iterable[float]) -> float:
    """Return the 99th percentile by nearest rank: of up to a hundred values the largest."""
    ordered = sorted(values)
    return ordered[math.ceil(0.99 * len(ordered)) - 1]


def _shown(values: list[float]) -> str:
    return f"median {median(values):.2f} s, p99 {p99(values):.2f} s"


async def _measure(crossings: int, chance: random.Random) -> Times:
    engines: dict[str, str] = {}

    async def read(_namespace: str, _metric: str, selector: str) -> float:
        return await waiting_of([engines[selector.removeprefix("app=")]])

    times = Times()
    async with running_plane(hpa_sync_s=HPA_SYNC_S) as plane, plane.api() as api, external_metrics(plane, read):
        for first in range(0, crossings, AT_ONCE):
            if sys.stderr.isatty():
                sys.stderr.write(f"\rcrossing {first} of {crossings} ")
            numbers = range(first, min(first + AT_ONCE, crossings))
            place = await new_place(plane, api, f"from-{first}")
            await _wave(place, numbers, engines, chance, times)
            await api.request("DELETE", f"/api/v1/namespaces/{place.namespace}")
    if sys.stderr.isatty():
        sys.stderr.write("\r" + " " * 40 + "\r")
    return times


async def _wave(place: Place, numbers: range, engines: dict[str, str], chance: random.Random, times: Times) -> None:
    """Let some queues grow, each of them once in front of each kind, and take note of what came of it."""
    kinds = (*INTERVALS_S, HPA)
    names = {f"{kind}-{number}": kind for number in numbers for kind in kinds}
    for name in names:
        await place.create(deployment(name, replicas=1, gpus=0))
    pods = await place.until(lambda pods: len(pods) == len(names) and all(map(is_ready, pods)), "pods that are ready")
    await place.tell(pods, **CALM)
    engines |= {pod["metadata"]["labels"]["app"]: address_of(place.plane, pod) for pod in pods}
    await grant(place, DEPLOYED)
    with tempfile.TemporaryDirectory() as folder:
        site = await site_of(place, "subject", Path(folder))
        policies = _policies(Path(folder), place, names)
        async with running_daemon(site.kubeconfig, *policies) as daemon:
            await _settled(daemon, len(policies))
            await _watched(place, [name for name, kind in names.items() if kind == HPA])
            crossed = await _cross(numbers, kinds, engines, chance)
            await eventually(lambda: _all_scaled(place, names), "patch of each", LIMIT_S)
            await daemon.end(signal.SIGTERM)
    patched = await _patched(place)
    began = {line["policy"]: line["at"] for line in daemon.of("decision") if line["outcome"] == "applied"}
    for name, kind in names.items():
        times.reaction.setdefault(kind, []).append(patched[name] - crossed[name])
        if kind != HPA:
            times.work.setdefault(kind, []).append(patched[name] - began[name])


def _policies(folder: Path, place: Place, names: Mapping[str, str]) -> list[Path]:
    """Write a policy for each target that is ours: the defaults, but for the quick ones' interval, and limits on it."""
    quick = f"interval: {INTERVALS_S['quick']:g}s"
    written = []
    for name, kind in names.items():
        if kind != HPA:
            path = folder / f"{name}.yaml"
            path.write_text(
                "apiVersion: autoscaler/v1alpha1\nkind: ScalingPolicy\n"
                f"metadata: {{name: {name}}}\nspec:\n"
                f"  target: {{namespace: {place.namespace}, deployment: {name}}}\n  replicas: {{max: 8}}\n"
                f"  signals: {{vllm: {{port: {place.plane.port}{', timeout: 900ms' if kind == 'quick' else ''}}}}}\n"
                + (f"  {quick}\n" if kind == "quick" else "")
            )
            written.append(path)
    return written


async def _settled(daemon: Daemon, policies: int) -> None:
    """Return once every policy has had some ticks, and misses nothing."""
    ticks: Counter[str] = Counter()
    while len(ticks) < policies or min(ticks.values()) < TICKS_BEFORE:
        line = await daemon.until("decision", gaps={})
        ticks[line["policy"]] += 1


async def _watched(place: Place, names: list[str]) -> None:
    """Make the HPAs, and return once each has read its metric."""
    await place.apply(*(queue_autoscaler_of(name, each=QUEUE_A_REPLICA) for name in names))
    path = f"/apis/autoscaling/v2/namespaces/{place.namespace}/horizontalpodautoscalers"

    async def active() -> bool:
        found = await place.api.items(path)
        return all(condition(item, "ScalingActive").get("status") == "True" for item in found)

    await eventually(active, "HPAs that are active", LIMIT_S)


async def _cross(
    numbers: range, kinds: Iterable[str], engines: Mapping[str, str], chance: random.Random
) -> dict[str, float]:
    """Let the queues grow, each number's at its own time within the HPA's period; return when [epoch s], by name."""
    crossed: dict[str, float] = {}
    async with httpx.AsyncClient() as client:

        async def grow(name: str) -> None:
            crossed[name] = time.time()
            answer = await client.post(f"http://{engines[name]}/fake", json={"waiting": QUEUE})
            answer.raise_for_status()

        async def later(number: int, delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            await asyncio.gather(*(grow(f"{kind}-{number}") for kind in kinds))

        await asyncio.gather(*(later(number, chance.uniform(0.0, HPA_SYNC_S)) for number in numbers))
    return crossed


async def _all_scaled(place: Place, names: Mapping[str, str]) -> bool:
    found = await place.api.items(place.deployments)
    return all(item["spec"]["replicas"] > 1 for item in found) and len(found) == len(names)


async def _patched(place: Place) -> dict[str, float]:
    """Return when the first write of each Deployment's replicas was answered [epoch s]."""
    events = [event for event in await place.plane.audit() if event.namespace == place.namespace and event.wrote]
    scaled = [event for event in events if event.resource == "deployments/scale"]
    return {event.name: event.answered_at for event in reversed(scaled)}


if __name__ == "__main__":
    for label, value in measure():
        print(f"{label:60} {value}")
