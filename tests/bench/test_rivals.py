"""Rivals by hand: each holds still in the middle of its target, and answers a scene with the count of its law."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autoscaler.sim.engine import Request
from autoscaler.sim.fleet import Fleet
from autoscaler.sim.profiles import profile
from autoscaler.sim.workload import Lengths as Traffic
from autoscaler.sim.workload import requests, steady
from bench.rivals import RIVALS, capacity
from bench.rivals.aibrix import AibrixKpaSettings, ApaSettings
from bench.rivals.base import Bounds, Settings, sample, spans
from bench.rivals.dynamo import DynamoSettings, TokenWorkSettings
from bench.rivals.epp import EppSettings, TokenAwareSettings, calibrated
from bench.rivals.feed import Counted, Feed, drive
from bench.rivals.hpa import HpaGpuSettings, HpaQueueSettings
from bench.rivals.keda import GPU_70, PRODUCTION_STACK, QUEUE_8_GPU_75, QUEUE_50_GPU_80, KedaSettings
from bench.rivals.kpa import KpaSettings
from bench.rivals.phpa import PhpaSettings
from bench.rivals.predictors import Kalman, holt_winters, linear
from bench.rivals.ray_serve import RayServeSettings
from bench.rivals.slo_aware import SloAwareSettings, wanted
from bench.rivals.static import StaticSettings, mean_size, peak_size
from bench.rivals.view import Gateway, Increase, PodState, Signal, View, Window, read
from bench.rivals.wva import WvaSettings
from tests.bench.scenes import PLAIN, fleet, ticks

# What each ready pod of four has, so that the law is content with four.
CONTENT: dict[str, dict[str, Any]] = {
    "static": {"waiting": 50},
    "hpa-queue": {"waiting": 5},
    "hpa-gpu": {"gpu": 0.8},
    "keda-gpu-70": {"gpu": 0.7},
    "keda-queue-50-gpu-80": {"waiting": 50, "gpu": 0.8},
    "keda-queue-8-gpu-75": {"waiting": 8, "gpu": 0.75},
    "keda-in-flight": {"running": 5},
    "keda-production-stack": {"waiting": 5},
    "kpa": {"running": 70},
    "aibrix-apa": {"kv": 0.5},
    "aibrix-kpa": {"kv": 0.5},
    "ray-serve": {"running": 2},
    "llmd-wva": {"kv": 0.6},
    "llmd-slo-aware": {"ttft": (1.4, 1.6), "tpot": (0.04, 0.05)},
    "llmd-epp-saturation": {"running": 16, "kv": 0.5},
    "llmd-epp-in-flight": {"running": 16},
    "llmd-epp-token-aware": {"kv": 0.8},
    # 3.5 of the 10 requests a second that one such replica serves, per replica
    "dynamo-throughput": {"rate": 35.0, "prompt": 900, "output": 100},
    "dynamo-load": {"running": 50, "kv": 0.9, "prompt": 900},
    "dynamo-both": {"running": 50, "kv": 0.9, "rate": 35.0, "prompt": 900, "output": 100},
    # 0.0999 s of work a request, so 2.5 busy replicas, 3.47 at 0.72
    "token-work": {"rate": 25.0, "prompt": 900, "output": 100},
    "phpa-linear": {"running": 5},
    "phpa-holt": {"running": 5},
    "phpa-holt-winters": {"running": 5},
}
PLAINLY: dict[str, Settings] = {
    "static": StaticSettings(replicas=4),
    "dynamo-throughput": DynamoSettings(profile=PLAIN, ttft_s=10.0, itl_s=0.1001),
    "dynamo-load": DynamoSettings(profile=PLAIN, ttft_s=10.0, itl_s=0.1001, throughput=False, load=True),
    "dynamo-both": DynamoSettings(profile=PLAIN, ttft_s=10.0, itl_s=0.1001, load=True),
    "token-work": TokenWorkSettings(profile=PLAIN),
}


def test_every_rival_is_in_the_table() -> None:
    assert list(CONTENT) == list(RIVALS)


@pytest.mark.parametrize("name", CONTENT)
def test_steady_load_in_the_middle_of_the_target_holds_still(name: str) -> None:
    rival = PLAINLY.get(name, RIVALS[name]).build()
    assert {rival.desired(now, fleet(4, now=now, **CONTENT[name])) for now in ticks(rival, 2400.0)} == {4}


@pytest.mark.parametrize("name", CONTENT)
def test_spans_hold_the_vendors_value(name: str) -> None:
    settings = RIVALS[name]
    for field, span in spans(settings).items():
        assert span.low <= getattr(settings, field) <= span.high


@pytest.mark.parametrize("name", CONTENT)
def test_a_search_draws_from_the_spans_and_changes_nothing_else(name: str) -> None:
    settings: Any = RIVALS[name]
    drawn = [sample(settings, np.random.default_rng(seed)) for seed in range(20)]
    assert drawn == [sample(settings, np.random.default_rng(seed)) for seed in range(20)]
    for field, span in spans(settings).items():
        values = {getattr(one, field) for one in drawn}
        assert len(values) == 20
        assert span.low <= min(values) <= max(values) <= span.high
    vendor = {field: getattr(settings, field) for field in spans(settings)}
    assert {replace(one, **vendor) for one in drawn} == {settings}


# -- static ------------------------------------------------------------------------------------------------------


def test_static_sizes_in_hindsight() -> None:
    assert StaticSettings(replicas=9, bounds=Bounds(max=6)).build().desired(0.0, fleet(2)) == 6
    assert peak_size(lambda replicas: replicas >= 7, Bounds(max=40)) == 7
    assert peak_size(lambda replicas: False, Bounds(max=40)) == 40
    assert mean_size(8400.0, 3600.0, Bounds()) == 4  # 2.33 busy, 3.33 at 0.7


# -- HPA ---------------------------------------------------------------------------------------------------------


def test_hpa_queue_doubles_then_waits_five_minutes_to_shrink() -> None:
    rival = HpaQueueSettings().build()
    assert rival.desired(0.0, fleet(4, waiting=15)) == 8  # 60 / 5 = 12, but +100 % or +4
    assert rival.desired(15.0, fleet(4, waiting=15, loading=4)) == 12
    assert rival.desired(30.0, fleet(12)) == 12
    assert rival.desired(314.0, fleet(12)) == 12
    assert rival.desired(315.0, fleet(12)) == 1  # the last wish for 12 is 300 s old
    assert rival.desired(330.0, View(ordered=1)) == 1


def test_hpa_gpu_counts_loading_pods_as_idle_when_it_would_grow() -> None:
    rival = HpaGpuSettings().build()
    assert rival.desired(0.0, fleet(4, gpu=1.0)) == 5
    assert rival.desired(15.0, fleet(4, gpu=1.0, loading=1)) == 5  # 4 of 5 at 1.0: exactly 0.8
    assert rival.desired(30.0, fleet(2, gpu=1.0, loading=3)) == 5  # 0.4 would turn it around
    assert rival.desired(45.0, View(ordered=5)) == 5


# -- KEDA --------------------------------------------------------------------------------------------------------


def test_keda_value_counts_ready_pods_only() -> None:
    assert GPU_70.build().desired(0.0, fleet(3, gpu=1.0, loading=1)) == 5  # 1 / 0.7 x 3 = 4.3
    assert GPU_70.build().desired(0.0, fleet(1, gpu=1.0, loading=5)) == 6  # 2, held by the window


def test_keda_takes_the_larger_trigger_and_its_own_bounds() -> None:
    assert QUEUE_50_GPU_80.build().desired(0.0, fleet(4, waiting=100, gpu=0.8)) == 8
    assert QUEUE_8_GPU_75.build().desired(0.0, fleet(4, waiting=8, gpu=1.0)) == 6  # 1 / 0.75 x 4 = 5.3
    assert QUEUE_50_GPU_80.build().desired(0.0, fleet(2)) == 4
    assert PRODUCTION_STACK.build().desired(0.0, fleet(2, waiting=8)) == 4  # 16 / 5 = 3.2
    assert KedaSettings(signal=Signal.IN_FLIGHT, target=5.0).build().desired(0.0, fleet(2, running=6, waiting=2)) == 4


def test_keda_goes_to_zero_after_its_cooldown_and_back_at_once() -> None:
    rival = KedaSettings(bounds=Bounds(min=0)).build()
    assert rival.desired(0.0, fleet(1, waiting=2)) == 1
    assert rival.desired(300.0, fleet(1)) == 1
    assert rival.desired(301.0, fleet(1)) == 0
    assert rival.desired(316.0, fleet(0)) == 0


# -- Knative, AIBrix, Ray ------------------------------------------------------------------------------------------


def test_kpa_panics_at_once_and_halves_when_calm() -> None:
    rival = KpaSettings().build()
    assert rival.desired(0.0, fleet(1, running=700)) == 10
    assert {rival.desired(now, fleet(10)) for now in range(2, 61, 2)} == {10}
    assert rival.desired(62.0, fleet(10)) == 5
    assert rival.desired(64.0, fleet(5)) == 2


def test_kpa_to_zero_takes_an_idle_window_and_the_grace() -> None:
    rival = KpaSettings(bounds=Bounds(min=0)).build()
    assert rival.desired(0.0, fleet(1, running=70)) == 1
    found = {now: rival.desired(float(now), fleet(1)) for now in range(2, 160, 2)}
    # The load leaves the window after 60 s; 60 s of wishes for none, and 30 s of grace, follow.
    assert next(now for now, replicas in found.items() if replicas == 0) == 58 + 60 + 30


def test_aibrix() -> None:
    apa = ApaSettings().build()
    assert apa.desired(0.0, fleet(4, kv=0.8)) == 7  # 1.6 x 4 = 6.4
    assert apa.desired(40.0, fleet(7, kv=0.45)) == 7  # within its tolerance
    assert apa.desired(80.0, fleet(7, kv=0.1)) == 7  # 3, at most halved, held
    assert apa.desired(200.0, fleet(7, kv=0.1)) == 7
    assert apa.desired(360.0, fleet(7, kv=0.1)) == 3
    assert ApaSettings(max_up=1.2).wanted(4, 0.9) == 5
    assert AibrixKpaSettings().build().desired(0.0, fleet(4, kv=0.95)) == 8  # 3.8 / 0.5 = 7.6
    assert AibrixKpaSettings().build().desired(0.0, View(ordered=3)) == 3


def test_ray_serve_waits_for_agreement() -> None:
    rival = RayServeSettings().build()
    asked = [rival.desired(now, fleet(4, running=4)) for now in (0.0, 10.0, 20.0, 30.0)]
    assert asked == [4, 4, 4, 8]
    falling = [rival.desired(now, fleet(8)) for now in (40.0, 50.0, 60.0, 630.0, 640.0)]
    assert falling == [8, 8, 8, 8, 1]
    assert RayServeSettings(up_factor=0.5).wanted(16.0, 4) == 6
    assert RayServeSettings(down_factor=0.1).wanted(4.0, 4) == 3  # 3.8 rounds up to 4: one less all the same
    assert rival.desired(650.0, View(ordered=0, gateway=Gateway(in_flight=3))) == 1


# -- llm-d -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loads", "change"),
    [
        pytest.param([(0.75, 0.0)] * 3, 1, id="little-kv-to-spare"),
        pytest.param([(0.1, 3.0)] * 3, 1, id="little-queue-to-spare"),
        pytest.param([(0.9, 0.0)] * 3, 1, id="all-saturated"),
        pytest.param([(0.9, 0.0), (0.3, 0.0), (0.3, 0.0)], -1, id="saturated-ones-are-left-out"),  # 0.6 on one
        pytest.param([(0.4, 0.0), (0.4, 0.0)], 0, id="one-could-not-carry-it"),
        pytest.param([(0.2, 0.0)], 0, id="the-last-stays"),
    ],
)
def test_wva_rule(loads: list[tuple[float, float]], change: int) -> None:
    assert WvaSettings().change(loads) == change


def test_wva_through_its_hpa() -> None:
    rival = WvaSettings().build()
    asked = [rival.desired(now, fleet(3, kv=0.75)) for now in (0.0, 60.0, 105.0, 120.0)]
    assert asked == [3, 3, 3, 4]
    assert rival.desired(135.0, fleet(3, kv=0.75, loading=1)) == 4
    assert rival.desired(195.0, fleet(3, kv=0.75, loading=1)) == 4  # nothing moves while one starts


@pytest.mark.parametrize(
    ("saturation", "ordered", "ready", "count"),
    [
        pytest.param(1.1, 4, 4, 8, id="twice-the-threshold"),
        pytest.param(1.1, 4, 2, 4, id="credit-for-those-that-load"),
        pytest.param(0.2, 4, 4, 2, id="half-the-lower-one"),
        pytest.param(0.2, 4, 1, 2, id="no-credit-downward"),
        pytest.param(0.5, 4, 4, 4, id="in-the-band"),
    ],
)
def test_slo_aware_formula(saturation: float, ordered: int, ready: int, count: int) -> None:
    assert wanted(saturation, ordered, ready, 0.55, 0.40) == count


def test_slo_aware_reads_the_pool_tail() -> None:
    rival = SloAwareSettings().build()
    asked = [4]
    for now in ticks(rival, 90.0):  # P90 8.7 s is 2.9 objectives, taken as 2; the four stay, more load
        asked.append(rival.desired(now, fleet(4, now=now, loading=asked[-1] - 4, ttft=(6.0, 9.0))))
    # Means of 0, 1 and 1.33 ask for 0, 8 and 10; the smallest of 30 s counts. Then +4 or +100 % are spent for a minute.
    # At 90 s the mean is 2, half of the eight are ready: 8 x 2 x 0.5 / 0.55 = 14.5.
    assert asked[1:] == [4, 4, 8, 8, 8, 8, 15]


def test_epp() -> None:
    assert EppSettings().build().desired(0.0, fleet(4, running=20, waiting=5)) == 7  # 100 / 16
    full = EppSettings(running=1000.0).build()
    asked = [full.desired(15.0 * index, fleet(2**index, kv=1.0, waiting=50)) for index in range(4)]
    assert asked == [2, 4, 8, 15]  # the mean is 10 at 50 waiting, however many pods: 10 / 0.7 is the end


def test_epp_by_tokens_adds_one_in_three_minutes() -> None:
    rival = TokenAwareSettings(lengths_s=60.0).build()
    assert rival.desired(0.0, fleet(1, now=0.0, waiting=20, rate=1.0, prompt=4000)) == 1
    # 20 x 4000 / 15928 = 5.02 s of prefill, 3.3 replicas
    asked = [
        rival.desired(now, fleet(ready, now=now, waiting=20 // ready, rate=1.0, prompt=4000))
        for now, ready in ((15.0, 1), (30.0, 2), (180.0, 2), (195.0, 2))
    ]
    assert asked == [2, 2, 2, 3]


def test_prefill_speed_of_a_profile_is_the_published_one() -> None:
    found = calibrated(TokenAwareSettings(), profile("qwen3-32b-h100x2")).prefill_tokens_s
    assert found == pytest.approx(15_928, rel=0.05)


# -- planners ----------------------------------------------------------------------------------------------------


def test_capacity_of_a_plain_replica() -> None:
    # A batch of x takes 9x prompt tokens and x answers an iteration: x ms. 100 at 0.1 s; each takes 100 iterations.
    found = capacity.best(PLAIN, 900.0, 100.0, 10.0, 0.1001)
    assert found.rate == pytest.approx(10.0)
    assert found.itl_s == pytest.approx(0.1)
    assert found.ttft_s == pytest.approx(0.19)  # 900 of the batch's, 900 of its own, 100 answers
    assert capacity.best(PLAIN, 900.0, 100.0, 0.05, 0.1001).rate == pytest.approx(10.0)  # one at a time: 1 / 100 ms
    assert capacity.largest_batch(PLAIN, 8000.0, 100.0) == 101  # the token budget: 100 x 8192 / 8100


def test_dynamo_plans_every_three_minutes() -> None:
    settings = DynamoSettings(profile=PLAIN, ttft_s=10.0, itl_s=0.1001)
    rival = settings.build()
    load: dict[str, Any] = {"rate": 62.0, "prompt": 900, "output": 100}
    asked = {now: rival.desired(now, fleet(4, now=now, **load)) for now in ticks(rival, 180.0)}
    assert {replicas for now, replicas in asked.items() if now < 180.0} == {4}
    assert asked[180.0] == 7
    assert replace(settings, utilization=0.8).planned(62.0, 900.0, 100.0) == 8
    assert replace(settings, predictor="kalman").build().desired(0.0, fleet(4)) == 4


@pytest.mark.parametrize(
    ("scene", "count"),
    [
        pytest.param(fleet(3, running=1200, kv=0.2), 4, id="every-engine-too-slow"),
        pytest.param(fleet(3, running=100, kv=0.2), 2, id="two-could-take-it"),
        pytest.param(fleet(3, running=700, kv=0.2), 3, id="two-would-be-too-slow"),
        pytest.param(fleet(3, running=100, kv=0.7), 3, id="two-would-be-full"),
        pytest.param(fleet(2, running=100, kv=0.2, loading=1), 3, id="observing-while-one-loads"),
        pytest.param(fleet(1, running=1, kv=0.0), 1, id="the-last-stays"),
    ],
)
def test_dynamo_by_load(scene: View, count: int) -> None:
    rival = DynamoSettings(profile=PLAIN, ttft_s=10.0, itl_s=0.1001, throughput=False, load=True).build()
    assert rival.desired(0.0, scene) == count


def test_token_work() -> None:
    rival = TokenWorkSettings(profile=PLAIN).build()
    load: dict[str, Any] = {"rate": 35.0, "prompt": 900, "output": 100}
    assert rival.desired(0.0, fleet(2, now=0.0, **load)) == 2
    assert rival.desired(180.0, fleet(2, now=180.0, **load)) == 5  # 35 x 0.0999 s = 3.5 busy, 4.86 at 0.72
    assert rival.desired(360.0, fleet(2, now=180.0, **load)) == 1  # nothing came


def test_phpa_runs_ahead_of_a_ramp() -> None:
    rival = PhpaSettings(ahead_s=15.0).build()
    assert rival.desired(0.0, fleet(1, running=5)) == 1
    assert rival.desired(15.0, fleet(1, running=10)) == 3  # 2 now, one more every 15 s
    assert rival.desired(30.0, fleet(3)) == 3  # kept for five minutes
    assert rival.desired(45.0, View(ordered=3)) == 3


def test_linear_needs_a_point() -> None:
    assert linear([(0.0, 3.0)], 60.0) == 3.0
    with pytest.raises(ValueError, match="no points"):
        linear([], 0.0)


@pytest.mark.parametrize("periods", [pytest.param(0, id="holt"), pytest.param(4, id="season-of-4")])
def test_smoothing_continues_what_fits_it_exactly(periods: int) -> None:
    season = [0.0, 3.0, -2.0, 1.0] if periods else [0.0]

    def at(index: int) -> float:
        return 10.0 + 0.5 * index + season[index % len(season)]

    found = holt_winters([at(index) for index in range(19)], alpha=0.3, beta=0.2, gamma=0.4, periods=periods)
    assert found == pytest.approx(at(19))
    assert holt_winters([1.0] * 9, alpha=0.3, beta=0.2, gamma=0.4, periods=0) is None


def test_kalman_learns_a_trend() -> None:
    kalman = Kalman()
    assert kalman.next() is None
    for value in range(0, 1000, 10):
        kalman.add(float(value))
    assert kalman.next() == pytest.approx(1000.0, abs=1.0)


# -- what is seen ------------------------------------------------------------------------------------------------


def test_signals_without_pods_are_unknown() -> None:
    nothing = View(ordered=2)
    assert [read(signal, nothing) for signal in Signal if signal is not Signal.GATEWAY_IN_FLIGHT] == [None] * 7
    assert read(Signal.SATURATION, fleet(2, kv=0.4, waiting=1)) == pytest.approx(0.5)


def test_increase_leaves_out_what_was_there_before() -> None:
    grown = Increase(60.0)
    grown.add(0.0, {"a": (100.0, 5.0)})
    assert grown.total() == ()
    grown.add(30.0, {"a": (110.0, 6.0), "b": (50.0, 1.0)})
    grown.add(60.0, {"a": (130.0, 6.0), "b": (55.0, 2.0)})
    assert grown.total() == (35.0, 2.0)
    grown.add(90.0, {"b": (56.0, 2.0)})
    assert grown.total() == (26.0, 1.0)


def test_window_keeps_the_newest() -> None:
    window = Window(10.0)
    assert window.mean == 0.0
    for now in (0.0, 5.0, 10.0):
        window.add(now, now)
    assert window.values == [5.0, 10.0]
    window.add(100.0, 1.0)
    assert window.values == [1.0]


# -- in closed loop ----------------------------------------------------------------------------------------------


def _world(seed: int, rate: float, duration_s: float, replicas: int) -> tuple[Fleet, Counted, list[Request]]:
    rng = np.random.default_rng(seed)
    traffic = list(requests(rng, steady(rate), Traffic(prompt=500, output=50), duration_s))
    counted = Counted(traffic)
    return Fleet(profile("llama-3.1-8b-h100x1"), counted, replicas=replicas, epoch=0.0, rng=rng), counted, traffic


@pytest.mark.parametrize("name", CONTENT)
def test_every_rival_can_scale_a_simulated_fleet(name: str) -> None:
    world, counted, _ = _world(1, 3.0, 600.0, 2)
    settings: Any = RIVALS[name]
    rival = replace(settings, bounds=Bounds(min=1, max=4)).build()
    asyncio.run(drive(world, rival, counted, 600.0))
    assert 1 <= world.spec_replicas <= 4
    assert len(world.ledger) > 1000


def test_the_gateway_counts_what_arrived() -> None:
    world, counted, traffic = _world(2, 5.0, 120.0, 2)
    asyncio.run(drive(world, StaticSettings(replicas=2).build(), counted, 60.0))
    arrived = [request for request in traffic if request.arrival <= 60.0]
    in_flight = sum(engine.outstanding for engine in world.engines())
    assert counted.gateway(in_flight) == Gateway(
        in_flight=in_flight,
        requests=len(arrived),
        prompt_tokens=sum(request.prompt_tokens for request in arrived),
        output_tokens=sum(request.output_tokens for request in arrived),
    )


def test_the_feed_shows_pods_as_they_come_and_go() -> None:
    world, counted, _ = _world(3, 5.0, 300.0, 2)

    async def watch() -> list[View]:
        feed, views = Feed(world, counted), []
        world.advance(10.0)
        await feed.scrape()
        views.append(await feed.view())
        world.scale(3)
        views.append(await feed.view())
        world.advance(30.0)
        views.append(await feed.view())
        world.advance(200.0)
        await feed.scrape()
        views.append(await feed.view())
        return views

    before, ordered, loading, after = asyncio.run(watch())
    assert [pod.state for pod in before.pods] == [PodState.READY] * 2
    assert all(pod.page is not None and pod.page.iterations > 0 for pod in before.pods)
    assert (ordered.ordered, ordered.ready, ordered.pods[2].state) == (3, 2, PodState.PENDING)
    assert (loading.pods[2].state, loading.pods[2].page, loading.pods[2].gpu_util) == (PodState.UNREADY, None, 0.0)
    assert (after.ready, len(after.pages)) == (3, 3)
