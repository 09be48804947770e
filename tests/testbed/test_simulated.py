"""Simulated engines in real time, with a clock that the test moves."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace

import pytest

from autoscaler.sim.engine import Request
from autoscaler.sim.ledger import Fate
from autoscaler.sim.profiles import profile
from autoscaler.sources.exposition import SeriesCache, parse_page
from autoscaler.sources.vllm import is_wanted
from autoscaler.testbed.simulated import SimulatedEngine, Traffic

PROFILE = replace(profile("llama-3.1-8b-l40sx1"), max_num_batched_tokens=512)


class Hands:
    """A clock."""

    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


def steady(per_s: float, seconds: float, prompt: int = 400, output: int = 50) -> list[Request]:
    """Return equal requests at equal distances."""
    return [Request(index / per_s, prompt, output) for index in range(int(per_s * seconds))]


def traffic_of(requests: Iterable[Request]) -> tuple[Traffic, Hands]:
    hands = Hands()
    return Traffic(PROFILE, requests, bin_s=10.0, now=hands), hands


def gauge(engine: SimulatedEngine, name: str) -> float:
    (line,) = [line for line in engine.page().splitlines() if line.startswith(f"vllm:{name}{{")]
    return float(line.rpartition(" ")[2])


def test_nothing_arrives_before_it_begins() -> None:
    traffic, hands = traffic_of(steady(10.0, 5.0))
    traffic.engine()
    hands.at += 3.0
    traffic.advance()
    assert (traffic.at, traffic.arrived) == (0.0, 0)
    traffic.begin()
    hands.at += 1.05
    traffic.advance()
    assert (round(traffic.at, 6), traffic.arrived) == (1.05, 11)


def test_load_spreads_and_a_queue_builds_where_engines_are_too_few() -> None:
    waiting = {}
    for count in (1, 4):
        traffic, hands = traffic_of(steady(40.0, 20.0))
        engines = [traffic.engine() for _ in range(count)]
        traffic.begin()
        hands.at += 20.0
        waiting[count] = [gauge(engine, "num_requests_waiting") for engine in engines]
        shares = [gauge(engine, "prompt_tokens_total") for engine in engines]
        assert max(shares) - min(shares) <= 0.2 * max(shares)
    assert waiting[1][0] > 100.0
    assert max(waiting[4]) < 10.0


def test_the_products_parser_reads_the_page() -> None:
    traffic, hands = traffic_of(steady(5.0, 10.0))
    engine = traffic.engine()
    traffic.begin()
    hands.at += 10.0
    read = parse_page(engine.page().encode(), SeriesCache(is_wanted))
    assert read.keys
    assert not read.bad


async def test_one_that_drains_ends_what_it_has_and_gets_no_more() -> None:
    traffic, hands = traffic_of(steady(20.0, 60.0))
    leaving, staying = traffic.engine(), traffic.engine()
    traffic.begin()
    hands.at += 5.0
    traffic.advance()
    assert leaving.exact.outstanding
    drained = asyncio.create_task(leaving.drain(0.0))
    while not drained.done():
        hands.at += 0.5
        await asyncio.sleep(0.01)
    assert leaving.exact.outstanding == 0
    leaving.close()
    hands.at += 5.0
    traffic.advance()
    assert traffic.ledger.failed() == 0
    assert staying.exact.outstanding


def test_one_that_ends_at_once_fails_what_it_has_and_so_does_traffic_without_an_engine() -> None:
    traffic, hands = traffic_of(steady(20.0, 60.0))
    engine = traffic.engine()
    traffic.begin()
    hands.at += 5.0
    traffic.advance()
    lost = engine.exact.outstanding
    engine.close()
    assert traffic.in_flight == 0
    hands.at += 1.0
    traffic.advance()
    fates = list(traffic.ledger.column("fate"))
    assert fates.count(Fate.KILLED) == lost > 0
    assert fates.count(Fate.REFUSED) == 20


def test_bins_close_on_their_edges_however_late_somebody_looks() -> None:
    traffic, hands = traffic_of(steady(5.0, 40.0))
    traffic.engine()
    traffic.begin()
    hands.at += 35.0
    traffic.advance()
    bins = traffic.ledger.bins(2.0, 0.1)
    assert [(one.start, one.end) for one in bins] == [(0.0, 10.0), (10.0, 20.0), (20.0, 30.0)]
    assert all(one.attained == one.arrived > 40 for one in bins)


def test_only_what_is_not_simulated_can_be_set() -> None:
    traffic, _ = traffic_of(())
    engine = traffic.engine()
    engine.change(hang=2, health=503)
    assert (engine.load.hang, engine.load.health) == (2.0, 503.0)
    with pytest.raises(TypeError, match="'waiting'"):
        engine.change(waiting=7)
