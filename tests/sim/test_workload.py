"""Request streams: as the rate says, as long as the lengths say, and the same for the same seed."""

import itertools

import numpy as np
import pytest

from autoscaler.sim.workload import HOUR, Lengths, Rate, Surge, chat_day, requests, spike, steady, step


def arrivals(rate: Rate, duration_s: float, seed: int = 1) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return when requests arrive, without the wandering of the rate."""
    rng = np.random.default_rng(seed)
    return np.array([request.arrival for request in requests(rng, rate, Lengths(), duration_s, noise=0.0)])


def test_equal_seeds_give_equal_streams() -> None:
    first, second, other = (
        list(requests(np.random.default_rng(seed), steady(2.0), Lengths(), 600.0)) for seed in (7, 7, 8)
    )
    assert first == second
    assert first != other


def test_arrivals_are_in_order_and_inside_the_duration() -> None:
    times = arrivals(steady(5.0), 330.0)
    assert np.all(np.diff(times) >= 0.0)
    assert times[0] >= 0.0
    assert 270.0 < times[-1] < 330.0


def test_interarrival_times_are_exponential() -> None:
    gaps = np.diff(arrivals(steady(4.0), 4 * HOUR))
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)


@pytest.mark.parametrize(
    ("rate", "spans"),
    [
        pytest.param(steady(3.0), [(0, 1800, 3.0)], id="steady"),
        pytest.param(step(1.0, 4.0, 600.0), [(0, 600, 1.0), (600, 1800, 4.0)], id="step"),
        pytest.param(
            spike(2.0, Surge(at=600.0, duration_s=300.0, factor=5.0)),
            [(0, 600, 2.0), (600, 900, 10.0), (900, 1800, 2.0)],
            id="spike",
        ),
    ],
)
def test_counts_follow_the_rate(rate: Rate, spans: list[tuple[float, float, float]]) -> None:
    times = arrivals(rate, 1800.0, seed=3)
    for start, end, expected in spans:
        seen = int(np.sum((times >= start) & (times < end)))
        mean = expected * (end - start)
        assert abs(seen - mean) < 4.0 * mean**0.5, f"{seen} requests in [{start}, {end}), expected about {mean:g}"


def test_wandering_keeps_the_mean_and_adds_variance_between_minutes() -> None:
    rng = np.random.default_rng(5)
    times = [request.arrival for request in requests(rng, steady(20.0), Lengths(), 20 * HOUR, noise=0.1)]
    minutes = np.bincount(np.array(times, dtype=int) // 60, minlength=1200)
    assert minutes.mean() == pytest.approx(1200.0, rel=0.02)
    assert minutes.std() == pytest.approx((1200.0 + (0.1 * 1200.0) ** 2) ** 0.5, rel=0.12)


def test_lengths_have_their_means_and_limits() -> None:
    lengths = Lengths(prompt=1000.0, output=250.0, longest_prompt=4000, longest_output=900)
    drawn = list(requests(np.random.default_rng(9), steady(50.0), lengths, 600.0))
    prompts = np.array([request.prompt_tokens for request in drawn])
    outputs = np.array([request.output_tokens for request in drawn])
    assert prompts.mean() == pytest.approx(1000.0, rel=0.05)
    assert outputs.mean() == pytest.approx(250.0, rel=0.05)
    assert (prompts.max(), outputs.max()) == (4000, 900)
    assert min(prompts.min(), outputs.min()) >= 1


def test_a_chat_day_has_its_night_its_peaks_and_its_rush() -> None:
    surge = Surge(at=12.25 * HOUR, duration_s=600.0, factor=2.5)
    calm, rushed = chat_day(20.0), chat_day(20.0, surge)
    hours = {hour: calm(hour * HOUR) for hour in range(24)}
    assert max(hours, key=lambda hour: hours[hour]) == 20
    assert max(hours.values()) == pytest.approx(20.0, rel=0.05)
    assert min(hours.values()) == pytest.approx(2.0, rel=0.15)
    assert hours[4] < hours[8] < hours[11] > hours[13]
    assert rushed(surge.at) == pytest.approx(2.5 * calm(surge.at))
    assert rushed(surge.at - 1.0) == calm(surge.at - 1.0)
    assert rushed(surge.at + 600.0) == calm(surge.at + 600.0)
    assert calm(24 * HOUR + 5.0) == pytest.approx(calm(5.0))


def test_the_stream_is_lazy() -> None:
    """A week of traffic costs nothing until it is asked for."""
    week = requests(np.random.default_rng(1), steady(1000.0), Lengths(), 7 * 24 * HOUR)
    assert len(list(itertools.islice(week, 10))) == 10
