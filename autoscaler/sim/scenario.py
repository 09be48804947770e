"""A workload, the fleet that meets it and when: all that a run needs besides a policy."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from autoscaler.sim.engine import Request
from autoscaler.sim.fleet import Fleet, Settings
from autoscaler.sim.profile import Profile
from autoscaler.sim.profiles import profile
from autoscaler.sim.workload import HOUR, MINUTE, Lengths, Rate, Surge, chat_day, requests, spike


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something about the scenario that a reader of its report should know: when [epoch s], and what."""

    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run.

    Args:
        title: one line for people.
        rate, lengths: the traffic.
        replicas: ready at the start.
        duration_s: how long it lasts.
        epoch: epoch seconds of its start.
        seed: of traffic, names and cold starts; equal seeds make equal runs.
        span_s: the rate follows its curve in steps of this length.
    """

    title: str
    profile: Profile
    rate: Rate
    lengths: Lengths
    replicas: int
    duration_s: float
    epoch: float
    seed: int
    events: tuple[Event, ...] = ()
    span_s: float = MINUTE

    def traffic(self) -> Iterator[Request]:
        """Yield the requests that will come, in order of arrival."""
        return requests(self._chances()[0], self.rate, self.lengths, self.duration_s, span_s=self.span_s)

    def moved_to(self, epoch: float) -> Self:
        """Return the scenario as it begins at another time."""
        events = tuple(replace(event, at=event.at - self.epoch + epoch) for event in self.events)
        return replace(self, epoch=epoch, events=events)

    def fleet(self, settings: Settings | None = None) -> Fleet:
        """Return the fleet at its start, with the traffic that will come."""
        return Fleet(
            self.profile,
            self.traffic(),
            replicas=self.replicas,
            epoch=self.epoch,
            rng=self._chances()[1],
            settings=settings,
        )

    def _chances(self) -> list[np.random.Generator]:
        """Return the chance of the traffic and that of the fleet's life."""
        return np.random.default_rng(self.seed).spawn(2)


MIDNIGHT = 1_768_348_800.0
"""2026-01-14 00:00 UTC, a Wednesday."""


def demo_scenario(seed: int = 1, *, duration_s: float = 24 * HOUR) -> Scenario:
    """Return a day of chat on Llama-3.1-8B, one L40S a replica: one replica at night, about eight in the rush.

    A budget of 512 tokens an iteration keeps prefills from holding up the others' tokens. A replica carries about
    4.5 requests/s with p99s of 0.8 s to the first token and 0.07 s between tokens; at 5.5 its queue grows.
    """
    surge = Surge(at=12.25 * HOUR, duration_s=10 * MINUTE, factor=2.5, ramp_s=10 * MINUTE)
    rush = f"lunch rush: {surge.factor:g} x the traffic in ten minutes"
    return Scenario(
        title="A day of chat traffic, with a rush at lunch",
        profile=replace(profile("llama-3.1-8b-l40sx1"), max_num_batched_tokens=512, cold_start_s=120.0),
        rate=chat_day(20.0, surge),
        lengths=Lengths(prompt=800.0, output=300.0, prompt_sigma=0.6),
        replicas=2,
        duration_s=duration_s,
        epoch=MIDNIGHT,
        seed=seed,
        events=(Event(at=MIDNIGHT + surge.at - surge.ramp_s, text=rush),),
    )


def rush_scenario(seed: int = 1, *, duration_s: float = 180.0) -> Scenario:
    """Return a rush of a few minutes, for real time: 4 requests/s, then 28, then 4 again.

    The same model as the demo's day, with shorter answers and a start of 6 s, so that all of it can be watched. A
    replica carries about 8 requests/s.
    """
    surge = Surge(at=0.45 * duration_s, duration_s=0.15 * duration_s, factor=7.0, ramp_s=0.25 * duration_s)
    rush = f"a rush: {surge.factor:g} x the traffic in {surge.ramp_s:.0f} s"
    return Scenario(
        title="A rush on a real control plane",
        profile=replace(profile("llama-3.1-8b-l40sx1"), max_num_batched_tokens=512, cold_start_s=6.0),
        rate=spike(4.0, surge),
        lengths=Lengths(prompt=800.0, output=120.0, prompt_sigma=0.6, longest_prompt=4_000, longest_output=600),
        replicas=1,
        duration_s=duration_s,
        epoch=MIDNIGHT,
        seed=seed,
        events=(Event(at=MIDNIGHT + surge.at - surge.ramp_s, text=rush),),
        span_s=2.0,
    )
