"""The engine against a brute-force scheduler that takes one iteration at a time, and against conservation laws."""

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pytest

from autoscaler.sim.engine import Engine, Request
from autoscaler.sim.ledger import Fate, Ledger, run_quantile
from autoscaler.sim.profile import Profile
from autoscaler.sim.profiles import profile
from autoscaler.sim.tally import Tally

PROFILE = profile("llama-3.1-70b-h100x4")


@dataclass(eq=False)
class Job:
    """One request in the reference scheduler."""

    request: Request
    computed: int = 0
    tokens: list[float] = field(default_factory=list)
    scheduled: float | None = None
    preemptions: int = 0
    decoding: bool = False
    end: float | None = None
    failed: bool = False

    @property
    def length(self) -> int:
        """Prompt and generated tokens."""
        return self.request.prompt_tokens + len(self.tokens)


@dataclass
class Iteration:
    """One finished iteration: when, how long, how much, and the gauges at its end."""

    start: float
    end: float
    latencies: list[float]
    tokens: int
    running: int
    waiting: int
    free: int


class Reference:
    """Runs a list of requests through one replica to the end."""

    def __init__(self, profile: Profile, timeout_s: float) -> None:
        self.profile = profile
        self.timeout_s = timeout_s
        self.total = profile.blocks - 1
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self.iterations: list[Iteration] = []

    def blocks(self, tokens: int) -> int:
        """Blocks for that many tokens."""
        return -(-tokens // self.profile.block_size)

    @property
    def free(self) -> int:
        """Blocks that nobody holds between two iterations."""
        return self.total - sum(self.blocks(job.computed) for job in self.running)

    def run(self, requests: list[Request]) -> list[Job]:
        """Return every request with the times of its tokens."""
        jobs = [Job(request) for request in requests]
        arriving = [job for job in jobs if self.fits(job)]
        now = 0.0
        while arriving or self.waiting or self.running:
            if not self.waiting and not self.running:
                now = max(now, arriving[0].request.arrival)
                self.waiting.append(arriving.pop(0))
            while arriving and arriving[0].request.arrival < now:
                self.waiting.append(arriving.pop(0))
            self.drop_expired(now)
            if self.waiting or self.running:
                now = self.iterate(now)
        return jobs

    def fits(self, job: Job) -> bool:
        """Could it ever run to its end?"""
        return self.blocks(job.request.prompt_tokens + job.request.output_tokens - 1) <= self.total

    def gone(self, job: Job, now: float) -> bool:
        """Has its client gone?"""
        return not job.tokens and job.request.arrival + self.timeout_s <= now

    def drop_expired(self, now: float) -> None:
        """Abort what nobody waits for any more."""
        for queue in (self.running, self.waiting):
            for job in [job for job in queue if self.gone(job, now)]:
                queue.remove(job)
                job.failed, job.end, job.computed = True, now, 0

    def schedule(self, now: float) -> dict[Job, int]:
        """Choose each job's tokens of this iteration."""
        chosen: dict[Job, int] = {}
        budget, free, preempted = self.profile.max_num_batched_tokens, self.free, False
        index = 0
        while index < len(self.running) and budget > 0:
            job = self.running[index]
            count = min(job.length - job.computed, budget)
            needed = self.blocks(job.computed + count) - self.blocks(job.computed)
            while needed > free:
                victim = self.running.pop()
                free += self.blocks(victim.computed)
                victim.computed, victim.decoding = 0, False
                victim.preemptions += 1
                self.waiting.insert(0, victim)
                preempted = True
                if victim is job:
                    break
            if job not in self.running:
                break
            free -= needed
            chosen[job] = count
            budget -= count
            index += 1
        while self.waiting and budget > 0 and not preempted and len(self.running) < self.profile.max_num_seqs:
            job = self.waiting[0]
            count = min(job.length, budget)
            if self.blocks(job.length if self.profile.reserve_prompt else count) > free:
                break
            self.waiting.pop(0)
            self.running.append(job)
            if job.scheduled is None:
                job.scheduled = now
            chosen[job] = count
            free -= self.blocks(count)
            budget -= count
        return chosen

    def iterate(self, now: float) -> float:
        """Run one iteration. Return its end."""
        chosen = self.schedule(now)
        decoding = [job for job in chosen if job.decoding]
        prefill = {job: count for job, count in chosen.items() if job not in decoding}
        quadratic = sum(count * (job.computed + count / 2) for job, count in prefill.items())
        context = sum(job.computed + 1 for job in decoding)
        end = now + self.profile.iteration_s(sum(prefill.values()), len(decoding), context, quadratic)
        latencies, tokens = [], 0
        for job, count in chosen.items():
            job.computed += count
            if job.computed < job.length:
                continue
            if not job.tokens and job.request.arrival + self.timeout_s < end:
                self.running.remove(job)
                job.failed, job.end, job.computed = True, end, 0
                continue
            if job.tokens:
                latencies.append(end - job.tokens[-1])
                tokens += 1
            else:
                tokens += 1 + job.request.prompt_tokens
            job.tokens.append(end)
            job.decoding = True
            if len(job.tokens) == job.request.output_tokens:
                self.running.remove(job)
                job.end = end
        self.iterations.append(Iteration(now, end, latencies, tokens, len(self.running), len(self.waiting), self.free))
        return end


class Load(NamedTuple):
    """Poisson arrivals of lognormal lengths: seed, number, per second, and the medians."""

    seed: int
    number: int
    rate: float
    prompt: float
    output: float


def random_requests(load: Load) -> list[Request]:
    """Return the requests of a load."""
    seed, count, rate, prompt, output = load
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1.0 / rate, count))
    prompts = np.maximum(1, rng.lognormal(np.log(prompt), 0.9, count)).astype(int)
    outputs = np.maximum(1, rng.lognormal(np.log(output), 0.9, count)).astype(int)
    return [Request(float(a), int(p), int(o)) for a, p, o in zip(arrivals, prompts, outputs, strict=True)]


SCENARIOS = [
    pytest.param({}, Load(1, 300, 3.0, 800, 150), math.inf, 0, id="steady"),
    pytest.param({}, Load(2, 200, 0.5, 200, 40), math.inf, 0, id="mostly-idle"),
    pytest.param(
        {"max_num_batched_tokens": 512, "max_num_seqs": 64},
        Load(3, 200, 4.0, 1500, 100),
        math.inf,
        0,
        id="chunked-prefill",
    ),
    pytest.param({"kv_tokens": 16_000}, Load(4, 250, 6.0, 300, 400), math.inf, 20, id="preemption"),
    pytest.param(
        {"kv_tokens": 9_000, "max_num_batched_tokens": 256, "max_num_seqs": 256},
        Load(5, 200, 5.0, 500, 300),
        math.inf,
        20,
        id="preemption-of-partial-prefills",
    ),
    pytest.param(
        {"kv_tokens": 9_000, "reserve_prompt": False, "max_num_batched_tokens": 256},
        Load(6, 200, 5.0, 900, 200),
        math.inf,
        20,
        id="admission-without-reserve",
    ),
    pytest.param({"max_num_seqs": 8}, Load(7, 200, 8.0, 300, 80), math.inf, 0, id="seats"),
    pytest.param({"max_num_seqs": 8}, Load(8, 300, 8.0, 300, 120), 6.0, 0, id="clients-give-up"),
    pytest.param(
        {"kv_tokens": 9_000, "max_num_batched_tokens": 256},
        Load(9, 250, 6.0, 700, 250),
        9.0,
        20,
        id="clients-give-up-under-preemption",
    ),
    pytest.param(
        {"kv_tokens": 20_000, "block_size": 128},
        Load(10, 150, 3.0, 400, 300),
        math.inf,
        10,
        id="big-blocks",
    ),
    pytest.param({"context_s": 0.0}, Load(11, 150, 3.0, 400, 200), math.inf, 0, id="flat-step-time"),
]


def simulate(
    profile: Profile, requests: list[Request], timeout_s: float, look_every: float | None = None
) -> tuple[Engine, list[bool]]:
    """Run the engine over the requests to the end; with `look_every` somebody scrapes it all the time."""
    engine = Engine(profile, Ledger(), timeout_s)
    accepted, look = [], look_every or math.inf
    for request in requests:
        while look <= request.arrival:
            engine.advance(look)
            look += look_every or math.inf
        accepted.append(engine.submit(request))
    while engine.next_event < math.inf:
        engine.advance(min(engine.next_event, look))
        look += 0.0 if look > engine.next_event else (look_every or math.inf)
    return engine, accepted


def by_arrival(engine: Engine) -> dict[float, tuple[float, float, float]]:
    """Return first token, end and fate of every ended request, by its arrival."""
    ledger = engine.ledger
    columns = (ledger.column(name) for name in ("arrival", "first", "finish", "fate"))
    return {arrival: (first, finish, fate) for arrival, first, finish, fate in zip(*columns, strict=True)}


@pytest.mark.parametrize("look_every", [None, 0.37], ids=["jumping", "scraped"])
@pytest.mark.parametrize(("changes", "load", "timeout_s", "preemptions"), SCENARIOS)
def test_engine_equals_the_brute_force_scheduler(
    changes: dict[str, float], load: Load, timeout_s: float, preemptions: int, look_every: float | None
) -> None:
    profile = replace(PROFILE, **changes)  # type: ignore[arg-type]
    requests = random_requests(load)
    reference = Reference(profile, timeout_s)
    jobs = reference.run(requests)
    engine, accepted = simulate(profile, requests, timeout_s, look_every)
    ended = by_arrival(engine)
    assert accepted == [reference.fits(job) for job in jobs]
    for job in jobs:
        if not reference.fits(job):
            assert job.request.arrival not in ended
            continue
        first, finish, fate = ended[job.request.arrival]
        assert job.end is not None
        assert finish == pytest.approx(job.end, abs=1e-9)
        assert (fate == Fate.TIMED_OUT) == job.failed
        if not job.failed:
            assert first == pytest.approx(job.tokens[0], abs=1e-9)
    check_tallies(engine, reference, jobs)
    assert sum(job.preemptions for job in jobs) >= preemptions
    if timeout_s < math.inf:
        assert engine.tallies.aborted > 20


def check_tallies(engine: Engine, reference: Reference, jobs: list[Job]) -> None:
    """Every counter and histogram against the reference's iterations and jobs."""
    tallies = engine.tallies
    done = [job for job in jobs if job.end is not None and not job.failed]
    latencies = [latency for iteration in reference.iterations for latency in iteration.latencies]
    tokens = [iteration.tokens for iteration in reference.iterations if iteration.tokens]
    assert tallies.finished == len(done)
    assert tallies.aborted == sum(job.failed for job in jobs)
    assert tallies.generation_tokens == sum(len(job.tokens) for job in jobs)
    assert tallies.prompt_tokens == sum(job.request.prompt_tokens for job in jobs if job.tokens)
    assert tallies.preemptions == sum(job.preemptions for job in jobs if not job.failed)
    times = [(job, job.request.arrival, job.scheduled or 0.0, job.tokens[0], job.tokens[-1]) for job in done]
    for tally, values in (
        (tallies.itl, latencies),
        (tallies.iteration_tokens, [float(count) for count in tokens]),
        (tallies.ttft, [first - arrival for _, arrival, _, first, _ in times]),
        (tallies.e2e, [last - arrival for _, arrival, _, _, last in times]),
        (tallies.queue, [scheduled - arrival for _, arrival, scheduled, _, _ in times]),
        (tallies.inference, [last - scheduled for _, _, scheduled, _, last in times]),
        (tallies.prefill, [first - scheduled for _, _, scheduled, first, _ in times]),
        (tallies.decode, [last - first for _, _, _, first, last in times]),
        (tallies.tpot, [(last - first) / max(1, len(job.tokens) - 1) for job, _, _, first, last in times]),
        (tallies.prompt_length, [float(job.request.prompt_tokens) for job in done]),
        (tallies.generation_length, [float(len(job.tokens)) for job in done]),
        (tallies.request_preemptions, [float(job.preemptions) for job in done]),
    ):
        assert tally.counts == counted(tally.bounds, values)
        assert tally.sum == pytest.approx(sum(values), rel=1e-9, abs=1e-6)


def counted(bounds: tuple[float, ...], values: list[float]) -> list[int]:
    """Return how many values lie in each bucket, upper bounds inclusive."""
    edges = [-math.inf, *bounds, math.inf]
    # a value that ought to sit on a bound must not fall aside by the last bits of a difference of times
    array = np.round(np.array(values), 9)
    return [int(np.sum((array > low) & (array <= high))) for low, high in itertools.pairwise(edges)]


def test_gauges_are_those_of_the_last_finished_iteration() -> None:
    profile = replace(PROFILE, kv_tokens=20_000, max_num_seqs=16)
    requests = random_requests(Load(21, 200, 5.0, 400, 200))
    reference = Reference(profile, math.inf)
    reference.run(requests)
    ends = np.array([iteration.end for iteration in reference.iterations])
    engine = Engine(profile, Ledger())
    seen, queue = 0, list(requests)
    for at in np.arange(0.5, float(ends[-1]) + 1.0, 0.31):
        while queue and queue[0].arrival <= at:
            engine.submit(queue.pop(0))
        engine.advance(float(at))
        last = int(np.searchsorted(ends, at, side="right")) - 1
        if last >= 0:
            iteration = reference.iterations[last]
            assert (engine.running, engine.waiting) == (iteration.running, iteration.waiting)
            assert engine.kv_usage == pytest.approx((reference.total - iteration.free) / reference.total, abs=1e-12)
            seen += iteration.waiting > 0
    assert seen > 50


def test_littles_law_holds() -> None:
    """Mean number in the system = arrival rate x mean time in it, over a run that starts and ends empty."""
    requests = random_requests(Load(31, 2000, 2.0, 600, 150))
    engine = Engine(PROFILE, Ledger())
    area, last, queue = 0.0, 0.0, list(requests)
    while queue or engine.next_event < math.inf:
        arrival = queue[0].arrival if queue else math.inf
        at = min(arrival, engine.next_event)
        area += engine.outstanding * (at - last)
        last = at
        engine.run(at)
        if arrival == at:
            engine.submit(queue.pop(0))
    ledger = engine.ledger
    assert len(ledger) == 2000
    assert area == pytest.approx(float(np.sum(ledger.column("finish") - ledger.column("arrival"))), rel=1e-9)


def test_everything_is_free_again_at_the_end() -> None:
    profile = replace(PROFILE, kv_tokens=9_000, max_num_batched_tokens=256)
    engine, _ = simulate(profile, random_requests(Load(9, 250, 6.0, 700, 250)), 9.0)
    assert engine.tallies.preemptions > 20
    assert engine.tallies.aborted > 20
    assert (engine.outstanding, engine.running, engine.waiting, engine.context_tokens) == (0, 0, 0, 0)
    assert engine.free_blocks == profile.blocks - 1


def test_a_request_longer_than_the_cache_is_refused() -> None:
    profile = replace(PROFILE, kv_tokens=160)
    engine = Engine(profile, Ledger())
    assert not engine.submit(Request(0.0, 140, 6))  # 145 tokens at the end need 10 of 9 blocks
    assert engine.outstanding == 0
    assert engine.submit(Request(0.0, 140, 5))
    engine.advance(60.0)
    assert engine.tallies.finished == 1


def test_kill_fails_everything_in_flight_and_empties_the_engine() -> None:
    profile = replace(PROFILE, kv_tokens=9_000, max_num_seqs=32)
    engine = Engine(profile, Ledger())
    requests = random_requests(Load(41, 80, 40.0, 600, 300))
    for request in requests:
        engine.submit(request)
    at = requests[-1].arrival + 0.05
    engine.advance(at)
    before, in_flight = len(engine.ledger), engine.outstanding
    assert engine.kill(at) == in_flight
    assert len(engine.ledger) == before + in_flight == 80
    assert set(engine.ledger.column("fate")[before:]) == {Fate.KILLED}
    assert engine.free_blocks == profile.blocks - 1
    assert engine.submit(Request(at + 1.0, 100, 5))
    engine.advance(at + 10.0)
    assert engine.outstanding == 0


@pytest.mark.parametrize(
    ("prefill", "batch", "context", "expected_ms"),
    [
        # overhead 1.12 x ((15.59^4 + (0.0666 x 8192)^4)^(1/4) + 749e-9 x 8192^2 / 2 ms): 545.6 + 25.1
        pytest.param(8192, 0, 0, 1.12 * (545.587 + 25.133), id="a full chunk"),
        # 1.12 x ((15.59^4 + 4.2624^4)^(1/4) + 64 x 0.0193 + 65536 x 27.5e-6 ms)
        pytest.param(0, 64, 65_536, 1.12 * (15.6117 + 1.2352 + 1.80224), id="64 sequences of 1024 tokens"),
    ],
)
def test_iteration_time_by_hand(prefill: int, batch: int, context: int, expected_ms: float) -> None:
    seconds = PROFILE.iteration_s(prefill, batch, context, prefill * prefill / 2)
    assert seconds * 1e3 == pytest.approx(expected_ms, rel=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"block_size": 24}, id="block size not a power of two"),
        pytest.param({"max_num_batched_tokens": 128}, id="budget below the running sequences"),
    ],
)
def test_impossible_profiles_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        replace(PROFILE, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "slope", "steps"),
    [
        pytest.param(0.024, 1e-5, 5000, id="over several bounds"),
        pytest.param(0.01, 0.005, 9, id="values on the bounds"),
        pytest.param(0.0249, 1e-6, 10, id="inside one bucket"),
        pytest.param(0.02, 0.0, 7, id="flat"),
        pytest.param(0.025, 0.0, 7, id="flat, on a bound"),
        pytest.param(79.0, 0.5, 10, id="into +Inf"),
    ],
)
def test_a_run_is_counted_as_its_values_would_be(first: float, slope: float, steps: int) -> None:
    bounds = (0.01, 0.025, 0.05, 0.075, 0.1, 80.0)
    run, single = Tally(bounds), Tally(bounds)
    run.observe_run(first, slope, steps, 3)
    for step in range(steps):
        single.observe(first + slope * step, 3)
    assert run.counts == single.counts
    assert run.cumulative()[-1] == 3 * steps
    assert run.sum == pytest.approx(single.sum, rel=1e-12)


def test_run_quantile_is_the_order_statistic() -> None:
    rng = np.random.default_rng(51)
    first, slope = rng.uniform(0.01, 0.2, 40), rng.uniform(0.0, 1e-4, 40) * (rng.random(40) > 0.3)
    steps, batch = rng.integers(1, 50, 40), rng.integers(1, 9, 40)
    runs = zip(first, slope, steps, batch, strict=True)
    values = np.sort(np.concatenate([np.repeat(f + s * np.arange(n), b) for f, s, n, b in runs]))
    for quantile in (0.01, 0.5, 0.9, 0.99, 1.0):
        expected = values[math.ceil(quantile * len(values)) - 1]
        assert run_quantile(first, slope, steps, batch, quantile) == pytest.approx(expected, abs=1.5e-6)


def test_run_quantile_of_nothing_is_unknown() -> None:
    none = np.array([], dtype=np.int64)
    assert run_quantile(np.array([]), np.array([]), none, none, 0.99) is None
