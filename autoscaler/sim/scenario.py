"""A workload, the fleet that meets it and when: all that a run needs besides a policy."""

from dataclasses import dataclass, replace

import numpy as np

from autoscaler.sim.engine import PROFILES, Profile
from autoscaler.sim.fleet import Fleet, Settings
from autoscaler.sim.workload import HOUR, MINUTE, Lengths, Rate, Surge, chat_day, requests


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

    def fleet(self, settings: Settings | None = None) -> Fleet:
        """Return the fleet at its start, with the traffic that will come."""
        traffic, life = np.random.default_rng(self.seed).spawn(2)
        return Fleet(
            self.profile,
            requests(traffic, self.rate, self.lengths, self.duration_s),
            replicas=self.replicas,
            epoch=self.epoch,
            rng=life,
            settings=settings,
        )


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
        profile=replace(PROFILES["llama-3.1-8b-l40sx1"], max_num_batched_tokens=512, cold_start_s=120.0),
        rate=chat_day(20.0, surge),
        lengths=Lengths(prompt=800.0, output=300.0, prompt_sigma=0.6),
        replicas=2,
        duration_s=duration_s,
        epoch=MIDNIGHT,
        seed=seed,
        events=(Event(at=MIDNIGHT + surge.at - surge.ramp_s, text=rush),),
    )
