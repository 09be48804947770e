"""From a simulated fleet to what a rival sees, and a rival in closed loop with it."""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator

from autoscaler.core.types import Pod as FleetPod
from autoscaler.core.types import PodPhase, TargetStatus
from autoscaler.sim.engine import Engine, Request
from autoscaler.sim.fleet import Fleet
from autoscaler.sim.tally import Tally
from bench.rivals.base import Rival
from bench.rivals.view import Gateway, Histogram, Page, Pod, PodState, View

SCRAPE_S = 5.0
"""Between two scrapes of a pod: in the rivals' favour, as Prometheus is mostly told 15 or 30 s."""
GRID_S = 5.0
"""Scrapes fall on this grid; with a longer interval each pod's on a phase of its own."""


class Counted:
    """Requests on their way into a fleet, counted as a router would count them."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = requests
        self._arrived = self._prompt_tokens = self._output_tokens = 0

    def __iter__(self) -> Iterator[Request]:
        for request in self._requests:
            yield request  # the fleet asks for the next one as this one arrives
            self._arrived += 1
            self._prompt_tokens += request.prompt_tokens
            self._output_tokens += request.output_tokens

    def gateway(self, in_flight: int) -> Gateway:
        """Return the counts so far."""
        return Gateway(
            in_flight=in_flight,
            requests=self._arrived,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
        )


class Feed:
    """Scrapes a fleet's engines, and shows what a rival sees between the scrapes.

    Args:
        counted: the fleet's requests.
        scrape_s: between two scrapes of a pod, a multiple of the grid.
    """

    def __init__(self, fleet: Fleet, counted: Counted, scrape_s: float = SCRAPE_S) -> None:
        self._fleet = fleet
        self._counted = counted
        self._slots = max(1, round(scrape_s / GRID_S))
        self._pages: dict[str, Page] = {}

    async def scrape(self) -> None:
        """Scrape the pods whose turn it is now; a new pod at the first chance."""
        pods, engines = (await self._fleet.read()).pods, self._fleet.engines()
        slot = round(self._fleet.now / GRID_S) % self._slots
        kept: dict[str, Page] = {}
        for pod, engine in zip(pods, engines, strict=True):
            due = zlib.crc32(pod.name.encode()) % self._slots == slot or pod.name not in self._pages
            if pod.ready and due:
                kept[pod.name] = page(engine)
            elif pod.name in self._pages:
                kept[pod.name] = self._pages[pod.name]
        self._pages = kept

    async def view(self) -> View:
        """Return what a rival sees now."""
        pods, engines = (await self._fleet.read()).pods, self._fleet.engines()
        return View(
            ordered=self._fleet.spec_replicas,
            pods=tuple(self._pod(pod, engine) for pod, engine in zip(pods, engines, strict=True)),
            gateway=self._counted.gateway(sum(engine.outstanding for engine in engines)),
        )

    def _pod(self, pod: FleetPod, engine: Engine) -> Pod:
        running = pod.phase is PodPhase.RUNNING
        busy = 1.0 if engine.next_event < math.inf else 0.0  # as DCGM has it: any kernel at all
        return Pod(name=pod.name, state=_state(pod), page=self._pages.get(pod.name), gpu_util=busy if running else None)


def _state(pod: FleetPod) -> PodState:
    if pod.terminating:
        return PodState.DELETING
    if pod.phase is PodPhase.PENDING:
        return PodState.PENDING
    if pod.phase is not PodPhase.RUNNING:
        return PodState.FAILED
    return PodState.READY if pod.ready else PodState.UNREADY


def page(engine: Engine) -> Page:
    """Return an engine's page as it reads now."""
    tallies = engine.tallies
    return Page(
        running=engine.running,
        waiting=engine.waiting,
        kv_usage=engine.kv_usage,
        prompt_tokens=tallies.prompt_tokens,
        generation_tokens=tallies.generation_tokens,
        iterations=sum(tallies.iteration_tokens.counts),
        ttft=_histogram(tallies.ttft),
        tpot=_histogram(tallies.tpot),
    )


def _histogram(tally: Tally) -> Histogram:
    return Histogram(bounds=(*tally.bounds, math.inf), counts=tuple(map(float, tally.cumulative())))


async def drive(
    fleet: Fleet,
    rival: Rival,
    counted: Counted,
    duration_s: float,
    *,
    scrape_s: float = SCRAPE_S,
    note: Callable[[float, TargetStatus], None] | None = None,
) -> None:
    """Let a rival scale a fleet until `duration_s`: it is asked at its interval, and what it orders happens at once.

    Args:
        counted, scrape_s: as for `Feed`.
        note: is told the time and what the fleet is, at least at every scrape.
    """
    feed = Feed(fleet, counted, scrape_s)
    tick, scrape = 0.0, 0.0
    while fleet.now < duration_s:
        fleet.advance(min(tick, scrape, duration_s))
        if fleet.now >= scrape:
            await feed.scrape()
            scrape += GRID_S
        if fleet.now >= tick:
            fleet.scale(rival.desired(fleet.now, await feed.view()))
            tick += rival.interval_s
        if note is not None:
            note(fleet.now, fleet.status())
