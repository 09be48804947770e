"""The trigger mode of each kind of situation, and which comes first."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from autoscaler.core.mode import CHECKS
from autoscaler.core.policy import Policy, ReplicaBounds, Slo, Slos, TargetRef
from autoscaler.core.types import Gpu, Mode
from tests.core.world import World

POLICY = Policy(
    name="p", target=TargetRef(deployment="d"), replicas=ReplicaBounds(max=20), slo=Slos(itl=Slo(seconds=1.0))
)
BUSY: dict[str, Any] = {
    "kv": 0.5,
    "running": 8.0,
    "prompt_rate": 500.0,
    "token_rate": 200.0,
    "request_rate": 2.0,
    "itl_s": 0.05,
}


def world(policy: Policy = POLICY, *, minutes: int = 2, **readings: Any) -> World:
    """Return two busy engines after so many minutes, then with these readings."""
    made = World(policy, 2)
    made.set(**BUSY)
    made.run(12 * minutes, apply=False)
    made.set(**readings)
    return made


def mode(made: World, ticks: int = 1) -> Mode:
    """Return the mode after so many more ticks."""
    return made.run(ticks, apply=False)[-1].mode


def cards(made: World, *utilization: float | None) -> tuple[Gpu, ...]:
    """Return one card a pod."""
    return tuple(
        Gpu(uuid=f"GPU-{index}", pod_uid=made.pods[index].uid, utilization=value)
        for index, value in enumerate(utilization)
    )


def test_normal() -> None:
    assert mode(world()) is Mode.NORMAL


class TestIdle:
    """Everything known, nothing running or waiting, no counter moves."""

    calm: ClassVar[dict[str, Any]] = {
        "running": 0.0,
        "waiting": 0.0,
        "token_rate": 0.0,
        "request_rate": 0.0,
        "prompt_rate": 0.0,
    }

    def test_idle(self) -> None:
        assert mode(world(**self.calm), 5) is Mode.IDLE

    @pytest.mark.parametrize(
        "spoil",
        [
            pytest.param(lambda made: made.set(waiting=1.0), id="one-waits"),
            pytest.param(lambda made: made.set(running=1.0), id="one-runs"),
            pytest.param(lambda made: made.set(request_rate=1.0), id="requests-end"),
            pytest.param(lambda made: made.set(request_rate=None, token_rate=None), id="counters-unknown"),
            pytest.param(lambda made: made.silent.add(made.pods[0].uid), id="one-pod-is-silent"),
        ],
    )
    def test_not_idle(self, spoil: Callable[[World], object]) -> None:
        made = world(**self.calm)
        spoil(made)
        assert mode(made, 5) is not Mode.IDLE


class TestSpike:
    """Three minutes in a row above twice the hour's median of first tokens."""

    @pytest.mark.parametrize(
        ("factor", "minutes", "found"),
        [
            pytest.param(2.5, 3, Mode.QPS_SPIKE, id="three-minutes"),
            pytest.param(2.5, 2, Mode.NORMAL, id="two-minutes"),
            pytest.param(2.0, 3, Mode.NORMAL, id="only-twice"),
            pytest.param(0.2, 3, Mode.NORMAL, id="a-lull"),
        ],
    )
    def test_spike(self, factor: float, minutes: int, found: Mode) -> None:
        made = world(minutes=20, request_rate=2.0 * factor)
        assert mode(made, 12 * minutes + 1) is found

    def test_ten_minutes_must_be_known(self) -> None:
        assert mode(world(minutes=6, request_rate=20.0), 37) is Mode.NORMAL
        assert mode(world(minutes=7, request_rate=20.0), 37) is Mode.QPS_SPIKE

    def test_a_spike_that_lasts_becomes_usual(self) -> None:
        made = world(minutes=20, request_rate=20.0)
        modes = [decision.mode for decision in made.run(12 * 45, apply=False)]
        assert modes[40] is Mode.QPS_SPIKE
        assert modes[-1] is Mode.NORMAL

    def test_first_requests_after_silence_are_no_spike(self) -> None:
        made = world(minutes=0, request_rate=0.0)
        made.run(12 * 20, apply=False)
        made.set(request_rate=20.0)
        assert mode(made, 37) is Mode.NORMAL


class TestLongContext:
    """Under 5 tokens a second for each sequence, over a KV cache above 85 %."""

    @pytest.mark.parametrize(
        ("kv", "tokens", "found"),
        [
            # Eight sequences an engine at 4.9 tokens a second each.
            pytest.param(0.86, 39.2, Mode.LONG_CONTEXT_BLOCK, id="crawls"),
            pytest.param(0.85, 39.2, Mode.NORMAL, id="cache-not-so-full"),
            pytest.param(0.86, 40.0, Mode.NORMAL, id="quick-enough"),
        ],
    )
    def test_block(self, kv: float, tokens: float, found: Mode) -> None:
        assert mode(world(kv=kv, token_rate=tokens), 4) is found

    def test_ten_seconds_of_it(self) -> None:
        made = world(kv=0.9, token_rate=8.0)
        assert [mode(made) for _ in range(3)] == [Mode.NORMAL, Mode.NORMAL, Mode.LONG_CONTEXT_BLOCK]

    @pytest.mark.parametrize(
        "readings",
        [
            pytest.param({"running": 0.0}, id="nothing-runs"),
            pytest.param({"token_rate": None}, id="tokens-unknown"),
            pytest.param({"kv": None}, id="cache-unknown"),
        ],
    )
    def test_unknown_is_not_slow(self, readings: dict[str, Any]) -> None:
        assert mode(world(**{"kv": 0.9, "token_rate": 8.0, **readings}), 4) is Mode.NORMAL


class TestJitter:
    """Inter-token latencies that deviate by more than their objective."""

    policy = replace(POLICY, slo=Slos(itl=Slo(seconds=0.1)))

    def mixed(self, policy: Policy, slow_s: float) -> World:
        """Return one quick and one slow engine: the deviation is about half of their difference."""
        made = World(policy, 2)
        made.set(**BUSY)
        made.engines[made.pods[1].uid].itl_s = slow_s
        made.run(24, apply=False)
        return made

    def test_jitter(self) -> None:
        # Buckets (0, 0.1] and (0.5, 1]: middles 0.05 and 0.75, deviation 0.35 s.
        assert mode(self.mixed(self.policy, 0.9)) is Mode.BATCH_JITTER
        assert mode(self.mixed(replace(POLICY, slo=Slos(itl=Slo(seconds=0.34))), 0.9)) is Mode.BATCH_JITTER
        assert mode(self.mixed(replace(POLICY, slo=Slos(itl=Slo(seconds=0.36))), 0.9)) is Mode.NORMAL

    def test_even_latencies_are_none_however_slow(self) -> None:
        assert mode(world(self.policy, itl_s=0.9), 24) is Mode.NORMAL

    def test_only_the_last_minute_counts(self) -> None:
        made = self.mixed(self.policy, 0.9)
        made.set(itl_s=0.05)
        assert mode(made, 12) is Mode.BATCH_JITTER
        assert mode(made, 2) is Mode.NORMAL

    def test_without_an_objective_there_is_none(self) -> None:
        assert mode(self.mixed(replace(POLICY, slo=Slos(itl=None)), 0.9)) is Mode.NORMAL

    def test_no_observations(self) -> None:
        assert mode(world(self.policy, token_rate=0.0, running=0.0), 14) is not Mode.BATCH_JITTER


class TestBlocked:
    """Requests wait while an engine has generated nothing for half a minute."""

    def test_blocked(self) -> None:
        made = world(token_rate=0.0, prompt_rate=0.0, waiting=3.0)
        modes = [mode(made) for _ in range(10)]
        assert modes[-1] is Mode.INFERENCE_BLOCKED
        # Flat since the first of these ticks: for more than 30 s at the eighth.
        assert modes.index(Mode.INFERENCE_BLOCKED) == 7

    @pytest.mark.parametrize(
        "readings",
        [
            pytest.param({"waiting": 0.0}, id="nothing-waits"),
            pytest.param({"running": 0.0}, id="nothing-runs"),
            pytest.param({"prompt_rate": 100.0}, id="a-long-prefill"),
            pytest.param({"token_rate": 1.0}, id="slow-but-alive"),
            pytest.param({"token_rate": None}, id="tokens-unknown"),
        ],
    )
    def test_not_blocked(self, readings: dict[str, Any]) -> None:
        made = world(**{"token_rate": 0.0, "prompt_rate": 0.0, "waiting": 3.0, **readings})
        assert mode(made, 12) is not Mode.INFERENCE_BLOCKED

    def test_one_engine_of_several(self) -> None:
        made = world()
        stalled = made.engines[made.pods[1].uid]
        stalled.token_rate, stalled.prompt_rate, stalled.waiting = 0.0, 0.0, 2.0
        assert mode(made, 12) is Mode.INFERENCE_BLOCKED


class TestImbalance:
    """The cards idle below 30 % while more than 65 % of the KV blocks are held."""

    @pytest.mark.parametrize(
        ("kv", "busy", "found"),
        [
            pytest.param(0.66, (0.2, 0.3), Mode.MEMORY_IMBALANCE, id="imbalanced"),
            pytest.param(0.65, (0.2, 0.3), Mode.NORMAL, id="blocks-free"),
            pytest.param(0.66, (0.3, 0.3), Mode.NORMAL, id="cards-busy"),
            pytest.param(0.66, (None, 0.2), Mode.MEMORY_IMBALANCE, id="one-card-known"),
            pytest.param(0.66, (None, None), Mode.NORMAL, id="no-card-known"),
            pytest.param(0.66, (), Mode.NORMAL, id="no-cards"),
            pytest.param(None, (0.2, 0.2), Mode.NORMAL, id="blocks-unknown"),
        ],
    )
    def test_imbalance(self, kv: float | None, busy: tuple[float | None, ...], found: Mode) -> None:
        made = world(kv=kv)
        made.gpus = cards(made, *busy)
        assert mode(made) is found


def test_the_most_urgent_comes_first() -> None:
    assert [found for found, _ in CHECKS] == [
        Mode.INFERENCE_BLOCKED,
        Mode.LONG_CONTEXT_BLOCK,
        Mode.QPS_SPIKE,
        Mode.MEMORY_IMBALANCE,
        Mode.BATCH_JITTER,
        Mode.IDLE,
    ]
    made = world(kv=0.9, token_rate=8.0)
    made.gpus = cards(made, 0.1, 0.1)
    assert mode(made, 4) is Mode.LONG_CONTEXT_BLOCK
    made.set(token_rate=0.0, prompt_rate=0.0, waiting=3.0)
    assert mode(made, 12) is Mode.INFERENCE_BLOCKED
