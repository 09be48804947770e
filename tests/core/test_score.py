"""The parts of the score by the vectors they were specified with, and what missing readings do to them."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.core.policy import (
    BacklogPart,
    MemoryPart,
    MemorySource,
    Policy,
    ReplicaBounds,
    Sizing,
    Slo,
    Slos,
    TargetRef,
    Weights,
    WithinSlo,
)
from autoscaler.core.score import guard_level, memory_guard
from autoscaler.core.signals import COLUMN
from autoscaler.core.types import Attribution, Decision, EngineKey, GapReason, Gpu, Part, Reason, Score, Snapshot
from tests.core.world import World

MIB = 1024.0 * 1024.0
POLICY = Policy(
    name="p", target=TargetRef(deployment="d"), replicas=ReplicaBounds(max=50), slo=Slos(itl=Slo(seconds=5.0))
)


def score_of(decision: Decision) -> Score:
    """Return the score, which every tick has."""
    assert decision.score is not None
    return decision.score


def part(world: World, name: str) -> Part:
    """Return one part of the score of now."""
    return score_of(world.decide()).part(name)


def card(world: World, index: int, used: float, free: float, **changes: Any) -> Gpu:
    """Return a card of one pod; memory in MiB."""
    values = {"uuid": f"GPU-{index}", "pod_uid": world.pods[index].uid, **changes}
    return Gpu(memory_used=used * MIB, memory_free=free * MIB, **values)


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv", "capacity", "preempted", "finished", "memory", "driver"),
    [
        pytest.param((0.60, 0.40), (1e5, 1e5), 0, 400, 0.5556, "kv_cache_usage 0.50", id="M1-steady"),
        pytest.param((0.95, 0.80), (1e5, 1e5), 3, 300, 0.9722, "kv_cache_usage 0.88", id="M2-near-full"),
        pytest.param((0.99,), (1e5,), 12, 90, 1.0, "kv_cache_usage 0.99", id="M3-thrash"),
        pytest.param((0.90, 0.10), (1e5, 9e5), 0, 400, 0.2, "kv_cache_usage 0.18", id="M4-unequal-pools"),
        pytest.param((0.50,), (1e5,), 8, 100, 0.8, "preemptions 0.80", id="preemptions-bind"),
        pytest.param((0.50,), (1e5,), 1, 4, 0.5556, "kv_cache_usage 0.50", id="one-preemption-of-few-is-quiet"),
        pytest.param((0.50,), (1e5,), 2, 4, 1.0, "preemptions 1.00", id="two-of-at-least-twenty"),
    ],
)
def test_memory_vectors(
    kv: tuple[float, ...],
    capacity: tuple[float, ...],
    preempted: float,
    finished: float,
    memory: float,
    driver: str,
) -> None:
    world = World(POLICY, len(kv))
    for engine, usage, tokens in zip(world.engines.values(), kv, capacity, strict=True):
        engine.kv, engine.capacity, engine.running, engine.token_rate = usage, tokens, 8.0, 100.0
    first = next(iter(world.engines.values()))
    first.preemption_rate, first.request_rate = preempted / 60.0, finished / 60.0
    world.run(13, apply=False)
    found = part(world, "memory")
    assert found.value == pytest.approx(memory, abs=5e-5)
    assert found.shrink_value == pytest.approx(memory, abs=5e-5)
    assert found.driver == driver


@pytest.mark.parametrize(
    ("used", "free", "base", "guard"),
    [
        pytest.param(75142, 6131, 75142, 0.0, id="M1-steady"),
        pytest.param(23859, 705, 23859, 0.4154, id="M5-tight-card"),
        pytest.param(80000, 1273, 75142, 0.5847, id="M6-growth"),
        pytest.param(78207.5, 3065.5, 75142, 0.0, id="half-of-the-growth-is-allowed"),
        pytest.param(81273, 0, 75142, 1.0, id="nothing-left"),
        pytest.param(80000, 256, 80000, 1.0, id="256-MiB-left"),
        pytest.param(0, 0, 0, 1.0, id="no-memory-at-all"),
    ],
)
def test_guard_vectors(used: float, free: float, base: float, guard: float) -> None:
    assert guard_level(used * MIB, free * MIB, base * MIB) == pytest.approx(guard, abs=5e-5)


@given(used=st.floats(0.0, 2e11), free=st.floats(0.0, 2e11), base=st.floats(0.0, 2e11), less=st.floats(0.0, 1.0))
def test_guard_is_a_level_and_rises_as_memory_is_used(used: float, free: float, base: float, less: float) -> None:
    level = guard_level(used, free, base)
    assert 0.0 <= level <= 1.0
    moved = free * less
    assert guard_level(used + moved, free - moved, base) >= level - 1e-6


class TestMemoryGuard:
    """The out-of-memory guard brakes; alone it never orders."""

    def world(self, used: float, free: float, *, kv: float = 0.20, base: float | None = None) -> World:
        world = World(POLICY, 1)
        world.set(kv=kv, running=4.0, token_rate=100.0, request_rate=2.0)
        world.gpus = (card(world, 0, base if base is not None else used, used + free - (base or used)),)
        world.run(13, apply=False)
        world.gpus = (card(world, 0, used, free),)
        return world

    @pytest.mark.parametrize(
        ("used", "free", "base", "guard", "memory", "driver"),
        [
            pytest.param(23859, 705, 23859, 0.4154, 0.2492, "memory_guard 0.42", id="M5-tight-card"),
            pytest.param(80000, 1273, 75142, 0.5847, 0.3508, "memory_guard 0.58", id="M6-growth"),
        ],
    )
    def test_memory_part(self, used: float, free: float, base: float, guard: float, memory: float, driver: str) -> None:
        score = score_of(self.world(used, free, base=base).decide())
        assert score.memory_guard == pytest.approx(guard, abs=5e-5)
        assert score.part("memory").value == pytest.approx(memory, abs=5e-5)
        assert score.part("memory").driver == driver

    def test_it_brakes_at_a_half(self) -> None:
        world = World(POLICY, 4)
        world.set(kv=0.05, running=1.0, token_rate=10.0, request_rate=2.0, prompt_rate=10.0)
        world.gpus = tuple(card(world, index, 75142, 6131) for index in range(4))
        world.run(70, apply=False)
        world.gpus = (card(world, 0, 80000, 1273), *world.gpus[1:])
        assert {decision.reason for decision in world.run(90, apply=False)} == {Reason.MEMORY_GUARD}

    def test_a_full_card_alone_never_grows(self) -> None:
        world = World(POLICY, 1)
        world.set(kv=0.05, running=1.0, token_rate=10.0, request_rate=2.0)
        world.gpus = (card(world, 0, 81273, 0),)
        decisions = world.run(30, apply=False)
        assert score_of(decisions[-1]).memory_guard == 1.0
        assert score_of(decisions[-1]).part("memory").value == pytest.approx(0.6)
        assert not world.writes

    def test_the_worst_card_counts(self) -> None:
        world = World(POLICY, 2)
        cards = (card(world, 0, 75142, 6131), card(world, 1, 23859, 705))
        plateaus = {("GPU-0", "", world.pods[0].uid): 75142 * MIB}
        assert memory_guard(cards, plateaus, None) == pytest.approx(0.4154, abs=5e-5)

    def test_cards_without_memory_say_nothing(self) -> None:
        assert memory_guard((Gpu(uuid="GPU-0"),), {}, None) is None
        assert memory_guard((Gpu(uuid="GPU-0", memory_used=1.0),), {}, None) is None
        assert memory_guard((), {}, None) is None

    @pytest.mark.parametrize(
        ("attribution", "guard"),
        [
            # Reserved 0.92 x 81273 = 74771 MiB: h = (80000 - 74771) / 6502 = 0.804.
            pytest.param(Attribution.EXCLUSIVE, 0.6084, id="own-card-by-what-the-engine-reserves"),
            # A plateau of 40000 MiB: h = 40000 / 41273 = 0.969.
            pytest.param(Attribution.DEVICE_ONLY, 0.9383, id="shared-card-by-its-plateau"),
        ],
    )
    def test_base(self, attribution: Attribution, guard: float) -> None:
        world = World(POLICY, 1)
        cards = (card(world, 0, 80000, 1273, attribution=attribution),)
        plateaus = {("GPU-0", "", world.pods[0].uid): 40000 * MIB}
        assert memory_guard(cards, plateaus, 0.92) == pytest.approx(guard, abs=5e-5)


class TestPlateau:
    """The plateau is the lowest use while the pod serves."""

    key = ("GPU-0", "", "uid-d-0")

    def world(self) -> World:
        world = World(POLICY, 2)
        world.set(kv=0.2, running=1.0, token_rate=10.0)
        world.gpus = (card(world, 0, 75142, 6131), card(world, 1, 75142, 6131))
        world.run(2, apply=False)
        return world

    def plateau(self, world: World) -> float | None:
        """Return the first card's plateau in MiB after one more tick."""
        world.run(1, apply=False)
        found = world.state.cards.plateaus.get(self.key)
        return None if found is None else found / MIB

    def test_it_only_falls(self) -> None:
        world = self.world()
        world.gpus = (card(world, 0, 80000, 1273),)
        assert self.plateau(world) == 75142
        world.gpus = (card(world, 0, 70000, 11273),)
        assert self.plateau(world) == 70000

    @pytest.mark.parametrize("others", [pytest.param(True, id="others-read"), pytest.param(False, id="none-read")])
    def test_a_card_that_is_not_read_keeps_it(self, others: bool) -> None:
        world = self.world()
        world.gpus = world.gpus[1:] if others else ()
        assert self.plateau(world) == 75142

    def test_a_card_without_memory_keeps_it(self) -> None:
        world = self.world()
        world.gpus = (replace(world.gpus[0], memory_used=None), world.gpus[1])
        assert self.plateau(world) == 75142

    def test_loading_is_no_plateau(self) -> None:
        world = self.world()
        world.pods[0] = replace(world.pods[0], ready=False, was_ready=False)
        world.gpus = (card(world, 0, 2000, 79273),)
        assert self.plateau(world) is None
        world.pods[0] = replace(world.pods[0], ready=True, was_ready=True)
        world.gpus = (card(world, 0, 75000, 6273),)
        assert self.plateau(world) == 75000
        assert score_of(world.decide()).memory_guard == 0.0

    def test_sleep_is_no_plateau(self) -> None:
        world = self.world()
        world.engines["uid-d-0"].asleep = True
        world.gpus = (card(world, 0, 9000, 72273),)
        assert self.plateau(world) is None

    def test_a_gone_pod_takes_it_along(self) -> None:
        world = self.world()
        world.pods = world.pods[1:]
        assert self.plateau(world) is None

    def test_a_card_of_nobody_keeps_its_own(self) -> None:
        world = self.world()
        for used in (75142, 80000):
            world.gpus = (card(world, 0, used, 81273 - used, pod_uid=""),)
            world.run(1, apply=False)
        assert world.state.cards.plateaus[("GPU-0", "", "")] == 75142 * MIB


class TestFramebufferSource:
    """For servers without a KV gauge: it grows and never shrinks."""

    policy = replace(POLICY, score=replace(POLICY.score, memory=MemoryPart(source=MemorySource.FRAMEBUFFER)))

    def test_by_the_card(self) -> None:
        # Plateau 40 of 80 GiB: (0.725 - 0.5) / (0.95 - 0.5) = 0.5.
        world = World(self.policy, 1)
        world.gpus = (card(world, 0, 40 * 1024, 40 * 1024),)
        world.run(1, apply=False)
        world.gpus = (card(world, 0, 58 * 1024, 22 * 1024),)
        found = part(world, "memory")
        assert found.value == pytest.approx(0.5)
        assert (found.shrink_value, found.gap) == (None, GapReason.MEMORY_COARSE)

    def test_by_a_query(self) -> None:
        world = World(self.policy, 1)
        world.samples = {"gpu_memory_ratio": 0.475}
        assert part(world, "memory").value == pytest.approx(0.5)

    def test_without_either(self) -> None:
        found = part(World(self.policy, 1), "memory")
        assert (found.value, found.shrink_value, found.gap) == (None, None, GapReason.EMPTY)


def two_engines_a_pod(world: World) -> World:
    """Return the world with a second engine in each pod, asleep."""
    alone = world.snapshot

    def snapshot() -> Snapshot:
        one = alone()
        keys = tuple(EngineKey(key.pod_uid, engine) for key in one.engines.keys for engine in ("0", "1"))
        values = one.engines.values.repeat(2, axis=0)
        values[1::2, COLUMN["asleep"]] = 1.0
        return replace(one, engines=replace(one.engines, keys=keys, values=values, histograms={}))

    world.snapshot = snapshot  # type: ignore[method-assign]
    return world


def test_a_pod_with_one_engine_awake_of_two_is_awake() -> None:
    world = two_engines_a_pod(World(POLICY, 3))
    world.set(kv=0.45, waiting=12.0, running=4.0, token_rate=10.0)
    found = part(world, "memory")
    facts = world.state.facts
    assert facts is not None
    assert (facts.ready, facts.asleep, facts.expected, facts.known, facts.missing) == (3.0, 0.0, 3, 3, 0)
    assert (facts.waiting, facts.kv_tokens) == (36.0, 1e5)
    assert found.value == pytest.approx(0.5)
    assert found.shrink_value == pytest.approx(0.5)


def test_sleeping_pods_that_fell_unready_are_no_negative_supply() -> None:
    world = World(POLICY, 2)
    world.set(asleep=True, running=0.0, waiting=3.0)
    world.pods = [replace(one, ready=False) for one in world.pods]
    world.decide()
    facts = world.state.facts
    assert facts is not None
    assert (facts.ready, facts.asleep, facts.expected, facts.known) == (0.0, 2.0, 0, 0)


# --- backlog --------------------------------------------------------------------------------------------------------


def queueing(waiting: float, ready: int, first_tokens_per_s: float, silent_s: float = 0.0, **engine: Any) -> World:
    """Return a world with so many requests waiting in all; no first token for the last `silent_s`."""
    world = World(POLICY, ready)
    world.set(running=4.0, kv=0.2, token_rate=50.0, request_rate=first_tokens_per_s / ready, **engine)
    world.run(13, apply=False)
    if silent_s:
        world.set(request_rate=0.0)
        # Long enough that the window holds no first token, then the last one is put so long ago.
        world.run(13, apply=False)
        world.state = replace(world.state, first_token_at=world.at - silent_s)
    world.set(waiting=waiting / ready)
    return world


@pytest.mark.parametrize(
    ("waiting", "ready", "rate", "silent_s", "backlog", "driver"),
    [
        pytest.param(24, 4, 2.0, 0.0, 1.0, "queueing 12.0s", id="slow-queue"),
        pytest.param(24, 4, 20.0, 0.0, 0.3, "waiting 24", id="quick-queue"),
        pytest.param(3, 4, 2.0, 12.0, 1.0, "queueing 12.0s", id="nothing-moves-for-12-s"),
        pytest.param(3, 4, 2.0, 2.0, 0.4, "queueing 2.0s", id="nothing-moves-for-2-s"),
        pytest.param(100, 10, 200.0, 0.0, 0.5, "waiting 100", id="long-and-quick"),
        pytest.param(0, 4, 2.0, 0.0, 0.0, "waiting 0", id="no-queue"),
        pytest.param(0, 4, 2.0, 60.0, 0.0, "waiting 0", id="no-queue-and-nothing-moves"),
        pytest.param(800, 4, 1e6, 0.0, 1.0, "waiting 800", id="beyond-full"),
    ],
)
def test_backlog_vectors(waiting: float, ready: int, rate: float, silent_s: float, backlog: float, driver: str) -> None:
    found = part(queueing(waiting, ready, rate, silent_s), "backlog")
    assert found.value == pytest.approx(backlog)
    assert found.shrink_value == pytest.approx(backlog)
    assert found.driver == driver


def test_observed_queueing_times_count_when_longer() -> None:
    # p90 of times that all lie in (2, 5]: 2 + 0.9 x 3 = 4.7 s, where Little's law says 0.4 s.
    found = part(queueing(8, 4, 20.0, queue_s=4.0), "backlog")
    assert found.value == pytest.approx(4.7 / 5.0)
    assert found.driver == "queueing 4.7s"


def test_little_is_not_fooled_by_the_work_of_an_outage() -> None:
    world = queueing(12, 4, 2.0)
    world.run(13, apply=False)
    world.silent = {one.uid for one in world.pods}
    world.run(60, apply=False)
    world.silent = set()
    # Five minutes' first tokens come with the first page: 12 / 2 a second are still 6 s.
    decisions = world.run(8, apply=False)
    assert [score_of(decision).part("backlog").driver for decision in decisions] == ["queueing 6.0s"] * 8


@pytest.mark.parametrize(
    ("backlog", "readings", "value"),
    [
        pytest.param(BacklogPart(waiting_total=200.0, waiting_per_replica=None, wait_s=None), {}, 0.12, id="absolute"),
        pytest.param(BacklogPart(waiting_per_replica=None, wait_s=None), {}, 0.0, id="neither"),
        pytest.param(BacklogPart(), {"queue_wait": 4.0}, 0.8, id="asked-for-queueing-time"),
        pytest.param(BacklogPart(), {"num_requests_waiting": 60.0}, 0.75, id="asked-for-queue"),
        # 40 / 50 by itself; (40 + 24) / (20 x 4) with what the engines hold.
        pytest.param(BacklogPart(), {"upstream_queue": 40.0}, 0.8, id="gateway"),
        pytest.param(BacklogPart(upstream=500.0), {"upstream_queue": 40.0}, 0.8, id="gateway-with-the-engines"),
        pytest.param(
            BacklogPart(combine="weighted", waiting_total=200.0, waiting_per_replica=None, pending_pods=50.0),
            {"queue_wait": 4.0},
            0.40 * 0.12 + 0.25 * 0.8,
            id="weighted",
        ),
    ],
)
def test_backlog_terms(backlog: BacklogPart, readings: dict[str, float], value: float) -> None:
    world = queueing(24, 4, 20.0)
    world.policy = replace(POLICY, score=replace(POLICY.score, backlog=backlog))
    world.samples = readings
    assert part(world, "backlog").value == pytest.approx(value)


@pytest.mark.parametrize(("waiting", "level"), [pytest.param(1.0, 1.0, id="some"), pytest.param(0.0, 0.0, id="none")])
def test_backlog_without_a_ready_replica(waiting: float, level: float) -> None:
    world = World(POLICY, 1)
    world.pods = [replace(world.pods[0], ready=False)]
    world.set(waiting=waiting, running=1.0, token_rate=10.0)
    assert part(world, "backlog").value == level


def test_pods_without_data_count_as_full_when_shrinking() -> None:
    world = queueing(24, 4, 20.0)
    world.silent = {world.pods[0].uid}
    found = part(world, "backlog")
    # 18 are seen to wait, of 80; a quarter of the pods is unknown.
    assert found.value == pytest.approx(0.225)
    assert found.shrink_value == pytest.approx(0.225 + 0.775 * 0.25)


# --- latency --------------------------------------------------------------------------------------------------------

TTFT, ITL, WITHIN = Slo(seconds=2.5), Slo(seconds=0.2), WithinSlo(seconds=2.0, metric="e2e")


@pytest.mark.parametrize(
    ("readings", "latency", "degraded", "driver"),
    [
        pytest.param({"ttft": 1.2, "itl": 0.08, "within": 0.99}, 0.1, False, "e2e within 2s 99.0%", id="calm"),
        pytest.param({"ttft": 2.0, "itl": 0.08, "within": 0.94}, 0.6, True, "ttft p99 2.00s", id="tight"),
        pytest.param({"ttft": 3.9, "itl": 0.08, "within": 0.99}, 1.0, False, "ttft p99 3.90s", id="missed"),
        pytest.param({"ttft": 1.0, "itl": 0.19, "within": 1.0}, 0.9, False, "itl p99 0.19s", id="decode"),
        pytest.param({"ttft": 1.0, "itl": 0.1, "within": 0.95}, 0.5, False, "e2e within 2s 95.0%", id="just-enough"),
        pytest.param(
            {"ttft": 1.0, "itl": 0.1, "within": 0.90}, 1.0, True, "e2e within 2s 90.0%", id="twice-the-misses"
        ),
    ],
)
def test_latency_vectors(readings: dict[str, float], latency: float, degraded: bool, driver: str) -> None:
    world = World(replace(POLICY, slo=Slos(ttft=TTFT, itl=ITL, within=WITHIN)), 2)
    world.set(running=1.0, token_rate=10.0)
    world.samples = readings
    score = score_of(world.decide())
    found = score.part("latency")
    assert found.value == pytest.approx(latency)
    assert found.shrink_value == pytest.approx(latency)
    assert score.degraded is degraded
    assert found.driver == driver


@pytest.mark.parametrize(
    ("share", "value"), [pytest.param(1.0, 0.0, id="all"), pytest.param(0.999, 1.0, id="all-but-one")]
)
def test_an_objective_on_every_request(share: float, value: float) -> None:
    world = World(replace(POLICY, slo=Slos(ttft=None, itl=None, within=WithinSlo(share=1.0))), 1)
    world.set(running=1.0, token_rate=10.0)
    world.samples = {"within": share}
    assert part(world, "latency").value == value


class TestLatencyFromHistograms:
    """Quantiles of the window's observations, widened while there are few."""

    def world(self, rate: float, ttft_s: float = 1.5, **slos: Any) -> World:
        objectives = {"ttft": Slo(seconds=2.5), "itl": None, **slos}
        world = World(replace(POLICY, slo=Slos(**objectives)), 1)
        world.set(running=1.0, token_rate=10.0, request_rate=rate, ttft_s=ttft_s)
        world.run(70, apply=False)
        return world

    def test_quantile(self) -> None:
        # All in (1, 2]: p99 = 1.99 s of 2.5 s.
        found = part(self.world(2.0), "latency")
        assert found.value == pytest.approx((1.99 / 2.5 - 0.5) / 0.5)
        assert found.driver == "ttft p99 1.99s"

    @pytest.mark.parametrize(
        ("changes", "itl_s", "ttft_s", "clear"),
        [
            pytest.param({}, 0.02, 0.5, 0.0, id="the-tail-alone"),
            pytest.param({}, 1.0, 0.5, 1.0, id="the-mean-too"),
            pytest.param({}, 0.02, 4.0, 1.0, id="the-first-token"),
            pytest.param({"sizing": Sizing.SCORE}, 0.02, 0.5, 1.0, id="sized-by-the-score"),
        ],
    )
    def test_clear_by_the_mean_itl(self, changes: dict[str, Any], itl_s: float, ttft_s: float, clear: float) -> None:
        world = World(replace(POLICY, slo=Slos(ttft=Slo(seconds=2.5), itl=Slo(seconds=1.0)), **changes), 1)
        world.set(running=1.0, token_rate=100.0, request_rate=2.0, ttft_s=ttft_s, itl_s=itl_s)
        world.run(70, apply=False)
        # 100 of some 5600 tokens wait for 1.5 s: p99 is 1.4 s, and the mean 0.05 s where the others take 0.02.
        world.set(token_rate=20.0, itl_s=1.5)
        world.run(1, apply=False)
        found = part(world, "latency")
        assert (found.value, found.shrink_value, found.clear_value) == (1.0, 1.0, clear)

    def test_share(self) -> None:
        world = self.world(2.0, ttft=None, within=WithinSlo(seconds=1.5, metric="ttft"))
        score = score_of(world.decide())
        # Half of the bucket (1, 2] lies within 1.5 s.
        assert score.degraded is True
        assert score.part("latency").driver == "ttft within 1.5s 50.0%"

    def test_eight_observations_are_missing(self) -> None:
        world = self.world(8.0 / 300.0)
        found = part(world, "latency")
        assert (found.value, found.gap) == (None, GapReason.FEW_OBSERVATIONS)
        # Even the slowest lies within 2 s of 2.5.
        assert found.shrink_value == pytest.approx((2.0 / 2.5 - 0.5) / 0.5)

    def test_window_is_widened_to_five_minutes(self) -> None:
        assert part(self.world(21.0 / 300.0), "latency").value == pytest.approx((1.99 / 2.5 - 0.5) / 0.5)

    def test_few_and_slow_shares_do_not_support_a_shrink(self) -> None:
        quick = self.world(8.0 / 300.0, 0.4, ttft=None, within=WithinSlo(seconds=2.0, metric="ttft"))
        slow = self.world(8.0 / 300.0, 4.0, ttft=None, within=WithinSlo(seconds=2.0, metric="ttft"))
        assert part(quick, "latency").shrink_value == 0.0
        assert part(slow, "latency").shrink_value == 1.0

    def test_one_missing_objective_forbids_shrinking_only(self) -> None:
        world = self.world(2.0, itl=Slo(seconds=1.0))
        world.set(token_rate=0.0)
        world.run(61, apply=False)
        found = part(world, "latency")
        assert found.value == pytest.approx((1.99 / 2.5 - 0.5) / 0.5)
        assert (found.shrink_value, found.gap) == (None, GapReason.NO_OBSERVATIONS)


# --- the sum --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "value", "known", "binds"),
    [
        pytest.param((None, 1.0, 0.6), 0.8333, 0.60, "backlog", id="memory-missing"),
        pytest.param((0.5, 0.2, 1.0), 0.52, 1.0, "latency", id="all-known"),
        pytest.param((0.9, 0.2, None), 0.5733, 0.75, "memory", id="latency-missing"),
        pytest.param((None, 1.0, None), None, 0.35, "backlog", id="only-the-queue"),
        pytest.param((None, None, 0.6), None, 0.25, "latency", id="only-latency"),
    ],
)
def test_score_vectors(
    parts: tuple[float | None, float | None, float | None], value: float | None, known: float, binds: str
) -> None:
    memory, backlog, latency = parts
    world = World(POLICY, 1)
    kv = None if memory is None else memory * 0.9
    waiting = None if backlog is None else backlog * 20.0
    world.set(kv=kv, waiting=waiting, running=1.0, token_rate=10.0)
    world.samples = {} if latency is None else {"ttft": (latency + 1.0), "itl": 0.1}
    score = score_of(world.decide())
    assert score.value == (None if value is None else pytest.approx(value, abs=5e-5))
    assert score.known_weight == pytest.approx(known)
    assert score.binds == binds
    assert (score.shrink_value is None) == (None in parts)


@pytest.mark.parametrize("name", ["memory", "backlog", "latency"])
def test_a_part_without_weight_neither_counts_nor_blocks(name: str) -> None:
    shares = {"memory": 0.5, "backlog": 0.5, "latency": 0.5, name: 0.0}
    world = World(replace(POLICY, score=replace(POLICY.score, weights=Weights(**shares))), 1)
    world.set(kv=0.45, waiting=10.0, running=1.0, token_rate=10.0)
    world.samples = {"ttft": 1.5, "itl": 0.1}
    if name == "memory":
        world.set(kv=None)
    elif name == "backlog":
        world.set(waiting=None)
    else:
        world.samples = {}
    score = score_of(world.decide())
    assert score.part(name).value is None
    assert score.value == pytest.approx(0.5)
    assert score.shrink_value == pytest.approx(0.5)


readings = st.one_of(st.none(), st.floats(0.0, 1.0))
counts = st.one_of(st.none(), st.floats(0.0, 500.0))


@given(
    kv=st.lists(readings, min_size=1, max_size=4),
    waiting=counts,
    running=counts,
    ttft=st.one_of(st.none(), st.floats(0.0, 100.0)),
    silent=st.booleans(),
    used=st.floats(0.0, 1e11),
    free=st.floats(0.0, 1e11),
)
def test_score_is_none_or_a_level(
    kv: list[float | None],
    waiting: float | None,
    running: float | None,
    ttft: float | None,
    silent: bool,
    used: float,
    free: float,
) -> None:
    world = World(POLICY, len(kv))
    for engine, usage in zip(world.engines.values(), kv, strict=True):
        engine.kv, engine.waiting, engine.running, engine.token_rate = usage, waiting, running, 10.0
    world.samples = {} if ttft is None else {"ttft": ttft}
    world.silent = {world.pods[0].uid} if silent else set()
    world.gpus = (Gpu(uuid="GPU-0", pod_uid=world.pods[-1].uid, memory_used=used, memory_free=free),)
    world.run(2, apply=False)
    score = score_of(world.decide())
    levels = [score.value, score.shrink_value, score.memory_guard]
    levels += [level for one in score.parts for level in (one.value, one.shrink_value)]
    assert all(level is None or (math.isfinite(level) and 0.0 <= level <= 1.0) for level in levels)
    assert (score.value is None) == (score.known_weight < 0.5 - 1e-9)


@given(
    kv=st.floats(0.01, 1.0),
    waiting=st.floats(0.0, 100.0),
    ttft=st.floats(0.0, 5.0),
    more=st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 100.0), st.floats(0.0, 5.0)),
)
def test_score_rises_with_every_reading(
    kv: float, waiting: float, ttft: float, more: tuple[float, float, float]
) -> None:
    def measured(kv: float, waiting: float, ttft: float) -> Score:
        world = World(POLICY, 3)
        world.set(kv=min(kv, 1.0), waiting=waiting, running=4.0, token_rate=50.0, request_rate=2.0, prompt_rate=100.0)
        world.samples = {"ttft": ttft}
        world.run(3, apply=False)
        return score_of(world.decide())

    base, loaded = measured(kv, waiting, ttft), measured(kv + more[0], waiting + more[1], ttft + more[2])
    for before, after in ((base.value, loaded.value), (base.shrink_value, loaded.shrink_value)):
        assert before is not None
        assert after is not None
        assert after >= before - 1e-12
