"""The engine against a brute-force scheduler that takes one iteration at a time, and against conservation laws."""

import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest

from autoscaler.sim.engine import Engine, Limits, Request
from autoscaler.sim.ledger import Fate, Ledger, run_quantile
from autoscaler.sim.profile import Profile
from autoscaler.sim.profiles import profile
from autoscaler.sim.tally import Tally
from tests.sim.reference import Job, Reference

PROFILE = profile("llama-3.1-70b-h100x4")


class Load(NamedTuple):
    """Poisson arrivals of lognormal lengths: seed, number, per second, the medians, and the largest cached share."""

    seed: int
    number: int
    rate: float
    prompt: float
    output: float
    cached: float = 0.0


def random_requests(load: Load) -> list[Request]:
    """Return the requests of a load."""
    seed, count, rate, prompt, output, cached = load
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1.0 / rate, count))
    prompts = np.maximum(1, rng.lognormal(np.log(prompt), 0.9, count)).astype(int)
    outputs = np.maximum(1, rng.lognormal(np.log(output), 0.9, count)).astype(int)
    ratios = rng.uniform(0.0, cached, count)
    rows = zip(arrivals, prompts, outputs, ratios, strict=True)
    return [Request(float(a), int(p), int(o), float(r)) for a, p, o, r in rows]


def random_changes(profile: Profile, seed: int, until: float, every: float) -> list[tuple[float, Limits]]:
    """Return limits that change all the time, as a tuner that has lost its mind would."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(every, int(until / every)))
    changes = []
    for at in times:
        seats = int(rng.integers(1, profile.max_num_seqs + 1))
        budget = int(np.exp(rng.uniform(0.0, np.log(profile.max_num_batched_tokens))))
        threshold = int(rng.integers(1, budget + 2)) if rng.random() < 0.7 else 0
        changes.append((float(at), Limits(seats, budget, threshold)))
    return changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A load on a changed profile, and what must have happened in it to show anything.

    Args:
        timeout_s: of clients.
        tuned_s: mean time between two changes of the limits; None for none.
        preempted, refused, aborted, skipped: at least so many times.
    """

    load: Load
    profile: Profile = PROFILE
    timeout_s: float = math.inf
    tuned_s: float | None = None
    preempted: int = 0
    refused: int = 0
    aborted: int = 0
    skipped: int = 0


SMALL = replace(PROFILE, kv_tokens=9_000, max_num_batched_tokens=256)
SCENARIOS = [
    pytest.param(Scenario(load=Load(1, 300, 3.0, 800, 150)), id="steady"),
    pytest.param(Scenario(load=Load(2, 200, 0.5, 200, 40)), id="mostly-idle"),
    pytest.param(
        Scenario(
            load=Load(3, 200, 4.0, 1500, 100), profile=replace(PROFILE, max_num_batched_tokens=512, max_num_seqs=64)
        ),
        id="chunked-prefill",
    ),
    pytest.param(
        Scenario(load=Load(4, 250, 6.0, 300, 400), profile=replace(PROFILE, kv_tokens=16_000), preempted=20),
        id="preemption",
    ),
    pytest.param(
        Scenario(load=Load(5, 200, 5.0, 500, 300), profile=SMALL, preempted=20), id="preemption-of-partial-prefills"
    ),
    pytest.param(
        Scenario(
            load=Load(6, 200, 5.0, 900, 200), profile=replace(SMALL, reserve_prompt=False), preempted=20, refused=1
        ),
        id="admission-without-reserve",
    ),
    pytest.param(Scenario(load=Load(7, 200, 8.0, 300, 80), profile=replace(PROFILE, max_num_seqs=8)), id="seats"),
    pytest.param(
        Scenario(load=Load(8, 300, 8.0, 300, 120), profile=replace(PROFILE, max_num_seqs=8), timeout_s=6.0, aborted=20),
        id="clients-give-up",
    ),
    pytest.param(
        Scenario(load=Load(9, 250, 6.0, 700, 250), profile=SMALL, timeout_s=9.0, preempted=20, aborted=20),
        id="clients-give-up-under-preemption",
    ),
    pytest.param(
        Scenario(
            load=Load(10, 150, 3.0, 400, 300),
            profile=replace(PROFILE, kv_tokens=20_000, block_size=128),
            preempted=10,
        ),
        id="big-blocks",
    ),
    pytest.param(
        Scenario(load=Load(11, 150, 3.0, 400, 200), profile=replace(PROFILE, context_s=0.0)), id="flat-step-time"
    ),
    pytest.param(
        Scenario(load=Load(12, 150, 4.0, 2000, 80), profile=replace(PROFILE, kv_tokens=6_000), refused=10),
        id="prompts-longer-than-the-cache",
    ),
    pytest.param(
        Scenario(
            load=Load(13, 200, 4.0, 1500, 100),
            profile=replace(PROFILE, max_num_batched_tokens=2048, long_prefill_token_threshold=256),
        ),
        id="several-prefills-at-once",
    ),
    pytest.param(
        Scenario(
            load=Load(14, 200, 5.0, 900, 200),
            profile=replace(SMALL, max_num_batched_tokens=1024, long_prefill_token_threshold=64, reserve_prompt=False),
            timeout_s=15.0,
            preempted=20,
            aborted=20,
        ),
        id="several-prefills-preempted-and-given-up",
    ),
    pytest.param(Scenario(load=Load(15, 300, 4.0, 1500, 150, 0.9)), id="cached-prompts"),
    pytest.param(
        Scenario(load=Load(16, 200, 6.0, 600, 300, 1.0), profile=SMALL, preempted=20), id="cached-prompts-preempted"
    ),
    pytest.param(Scenario(load=Load(17, 250, 5.0, 900, 200), tuned_s=0.4, skipped=5), id="changing-limits"),
    pytest.param(
        Scenario(load=Load(18, 200, 6.0, 700, 250, 0.5), profile=SMALL, tuned_s=0.5, preempted=20, skipped=5),
        id="changing-limits-under-preemption",
    ),
    pytest.param(
        Scenario(load=Load(19, 200, 6.0, 700, 250), profile=SMALL, tuned_s=0.7, timeout_s=20.0, aborted=20),
        id="changing-limits-and-clients-give-up",
    ),
    pytest.param(Scenario(load=Load(20, 100, 0.5, 400, 60), tuned_s=0.3), id="changing-limits-mostly-idle"),
]


def drawn_scenario(seed: int) -> Scenario:
    """Return a scenario of which everything is left to chance."""
    rng = np.random.default_rng(1000 + seed)
    seats = int(rng.integers(2, 65))
    profile = replace(
        PROFILE,
        kv_tokens=int(rng.integers(4_000, 40_000)),
        block_size=int(2 ** rng.integers(3, 8)),
        max_num_seqs=seats,
        max_num_batched_tokens=int(rng.integers(max(seats, 64), 4096)),
        long_prefill_token_threshold=int(rng.integers(16, 512)) if rng.random() < 0.5 else 0,
        reserve_prompt=bool(rng.random() < 0.5),
    )
    load = Load(
        seed,
        120,
        float(rng.uniform(2.0, 8.0)),
        float(rng.uniform(100, 1200)),
        float(rng.uniform(30, 300)),
        float(rng.random() < 0.5) * float(rng.random()),
    )
    return Scenario(
        load=load,
        profile=profile,
        timeout_s=float(rng.uniform(5.0, 60.0)) if rng.random() < 0.5 else math.inf,
        tuned_s=float(rng.uniform(0.1, 5.0)) if rng.random() < 0.7 else None,
    )


def simulate(
    scenario: Scenario, requests: list[Request], changes: list[tuple[float, Limits]], look_every: float | None = None
) -> tuple[Engine, list[bool]]:
    """Run the engine over the requests to the end; with `look_every` somebody scrapes it all the time."""
    engine = Engine(scenario.profile, Ledger(), scenario.timeout_s)
    accepted = []
    steps: list[tuple[float, Request | Limits | None]] = [(request.arrival, request) for request in requests]
    steps += changes
    last = max(at for at, _ in steps)
    steps += [(float(at), None) for at in np.arange(0.0, last, look_every)] if look_every else []
    for at, step in sorted(steps, key=lambda step: step[0]):
        if isinstance(step, Request):
            accepted.append(engine.submit(step))
        elif isinstance(step, Limits):
            assert engine.set_limits(at, **step._asdict()) == engine.limits == step
        else:
            engine.advance(at)
    while engine.next_event < math.inf:
        last = max(last, engine.next_event) if look_every is None else last + look_every
        engine.advance(last)
    return engine, accepted


def by_arrival(engine: Engine) -> dict[float, tuple[float, float, float]]:
    """Return first token, end and fate of every ended request, by its arrival."""
    ledger = engine.ledger
    columns = (ledger.column(name) for name in ("arrival", "first", "finish", "fate"))
    return {arrival: (first, finish, fate) for arrival, first, finish, fate in zip(*columns, strict=True)}


@pytest.mark.parametrize("look_every", [None, 0.37], ids=["jumping", "scraped"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_engine_equals_the_brute_force_scheduler(scenario: Scenario, look_every: float | None) -> None:
    check_equal(scenario, look_every)


@pytest.mark.parametrize("seed", range(24))
def test_engine_equals_the_brute_force_scheduler_whatever_the_setting(seed: int) -> None:
    check_equal(drawn_scenario(seed), 0.61 if seed % 2 else None)


def test_a_token_that_comes_late_after_the_last_prefill() -> None:
    """Two prefill side by side; a larger chunk of the older one leaves nothing for the other's next token."""
    profile = replace(PROFILE, long_prefill_token_threshold=100)
    requests = [Request(0.0, 1000, 20), Request(1e-6, 50, 20)]
    # the second iteration takes 100 tokens of the first and all of the second, the third the first's last 800
    changes = [(profile.iteration_s(100, 0, 0, 5000.0) + 1e-6, Limits(256, 800, 0))]
    scenario = Scenario(load=Load(0, 2, 1.0, 1.0, 1.0), profile=profile, skipped=1)
    check_same(scenario, requests, changes, None)


def check_equal(scenario: Scenario, look_every: float | None) -> None:
    """Draw a scenario's requests and changes, and check."""
    requests = random_requests(scenario.load)
    until, tuned_s = requests[-1].arrival + 30.0, scenario.tuned_s
    changes = random_changes(scenario.profile, scenario.load.seed, until, tuned_s) if tuned_s else []
    check_same(scenario, requests, changes, look_every)


def check_same(
    scenario: Scenario, requests: list[Request], changes: list[tuple[float, Limits]], look_every: float | None
) -> None:
    """Every request's first token and end to a nanosecond, and everything that is counted."""
    reference = Reference(scenario.profile, scenario.timeout_s, changes)
    jobs = reference.run(requests)
    engine, accepted = simulate(scenario, requests, changes, look_every)
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
    assert engine.tallies.finished + engine.tallies.aborted + accepted.count(False) == len(requests)
    assert (engine.outstanding, engine.free_blocks, engine.context_tokens) == (0, reference.total, 0)
    assert sum(job.preemptions for job in jobs) >= scenario.preempted
    assert accepted.count(False) >= scenario.refused
    assert engine.tallies.aborted >= scenario.aborted
    assert reference.skips >= scenario.skipped


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
    assert tallies.cached_prompt_tokens == sum(job.cached for job in jobs if job.tokens)
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


@pytest.mark.parametrize(
    ("profile", "load", "tuned_s"),
    [
        pytest.param(PROFILE, Load(31, 2000, 2.0, 600, 150), None, id="steady"),
        pytest.param(SMALL, Load(32, 500, 1.0, 500, 150, 0.5), 2.0, id="changing limits, preemption, cached prompts"),
    ],
)
def test_littles_law_holds(profile: Profile, load: Load, tuned_s: float | None) -> None:
    """Mean number in the system = arrival rate x mean time in it, over a run that starts and ends empty."""
    requests = random_requests(load)
    changes = random_changes(profile, 1, requests[-1].arrival, tuned_s) if tuned_s else []
    engine = Engine(profile, Ledger())
    area, last, accepted = 0.0, 0.0, 0
    queue: list[tuple[float, Request | Limits]] = [*((request.arrival, request) for request in requests), *changes]
    queue.sort(key=lambda step: step[0])
    while queue or engine.next_event < math.inf:
        at = min(queue[0][0] if queue else math.inf, engine.next_event)
        area += engine.outstanding * (at - last)
        last = at
        engine.run(at)
        if queue and queue[0][0] == at:
            step = queue.pop(0)[1]
            if isinstance(step, Request):
                accepted += engine.submit(step)
            else:
                engine.set_limits(at, **step._asdict())
    ledger = engine.ledger
    assert len(ledger) == accepted > 0.97 * len(requests)
    assert area == pytest.approx(float(np.sum(ledger.column("finish") - ledger.column("arrival"))), rel=1e-9)


def test_lower_seats_drain_and_higher_ones_admit_at_the_next_iteration() -> None:
    engine = Engine(replace(PROFILE, max_num_seqs=16), Ledger())
    for number in range(40):
        engine.submit(Request(number * 1e-6, 100, 100 + 10 * number))
    engine.advance(1.0)
    assert (engine.running, engine.waiting) == (16, 24)
    engine.set_limits(1.0, max_num_seqs=4)
    engine.advance(1.5)
    assert (engine.running, engine.waiting) == (16, 24)  # nobody is put out
    while engine.running > 4:
        engine.run(engine.next_event)
        assert engine.waiting == 24
    before, at = engine.next_event, engine.next_event - 0.1
    engine.set_limits(at, max_num_seqs=16)
    assert at < engine.next_event <= before
    assert engine.next_event - at < 0.05  # the jump ends with the iteration under way
    engine.run(engine.next_event)
    engine.run(engine.next_event)
    assert (engine.running, engine.waiting) == (16, 12)


def test_a_budget_below_the_batch_still_gives_everybody_a_token() -> None:
    engine = Engine(PROFILE, Ledger())
    for number in range(8):
        engine.submit(Request(number * 1e-6, 100, 1000))
    engine.advance(1.0)
    assert engine.running == 8
    engine.set_limits(1.0, max_num_batched_tokens=1)
    before, itl = engine.tallies.generation_tokens, list(engine.tallies.itl.counts)
    engine.submit(Request(1.0, 100, 1000))
    engine.advance(5.0)
    assert (engine.running, engine.waiting) == (8, 1)  # nothing is left of the budget for a ninth
    made = engine.tallies.generation_tokens - before
    assert made % 8 == 0
    took = [now - then for now, then in zip(engine.tallies.itl.counts, itl, strict=True)]
    assert took == [0, made, *[0] * (len(took) - 2)]  # each came 10 to 25 ms after the one before


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        pytest.param({"max_num_seqs": 0}, "max_num_seqs must be 1 to 256: 0", id="no seats"),
        pytest.param({"max_num_seqs": 257}, "max_num_seqs must be 1 to 256: 257", id="more seats than at the start"),
        pytest.param({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be 1 to 8192: 0", id="no budget"),
        pytest.param({"max_num_batched_tokens": 8193}, "must be 1 to 8192: 8193", id="a larger budget"),
        pytest.param({"long_prefill_token_threshold": -1}, "must be 0 or more: -1", id="negative threshold"),
        pytest.param({"max_num_seqs": 8, "max_num_batched_tokens": 0}, "must be 1", id="one of two"),
    ],
)
def test_limits_that_the_engine_could_not_take_change_nothing(limits: dict[str, int], expected: str) -> None:
    engine = Engine(PROFILE, Ledger())
    with pytest.raises(ValueError, match=expected):
        engine.set_limits(0.0, **limits)
    assert engine.limits == Limits(256, 8192, 0)


@pytest.mark.parametrize(
    ("ratio", "cached"),
    [
        pytest.param(0.0, 0, id="none"),
        pytest.param(0.5, 496, id="whole blocks only"),
        pytest.param(1.0, 992, id="never the last token"),
    ],
)
def test_cached_tokens_are_not_computed_but_held(ratio: float, cached: int) -> None:
    """1000 tokens: half of them are 31 blocks of 16; all of them are 62 blocks, and the rest of 999."""
    engine = Engine(PROFILE, Ledger())
    engine.submit(Request(0.0, 1000, 2, ratio))
    rest = 1000 - cached
    assert engine.next_event == pytest.approx(PROFILE.iteration_s(rest, 0, 0, rest * (cached + rest / 2)), rel=1e-12)
    engine.run(engine.next_event)
    assert engine.free_blocks == PROFILE.blocks - 1 - 63
    tallies = engine.tallies
    assert (tallies.prompt_tokens, tallies.cached_prompt_tokens) == (1000, cached)
    assert tallies.iteration_tokens.sum == rest + 1


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
