"""Policies that differ from the shipped default in a stated way: other margins, or the law less one element."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from autoscaler.core.policy import Policy, complaints
from autoscaler.policy_file import policy_from_plain, policy_to_plain
from autoscaler.policy_file.spelling import dotted, spelled_loc
from bench.rivals.base import Span

Changes = Mapping[str, object]
"""New values by field path: `prediction.z_up`."""
OFF = 1e9
"""So many seconds, or standard deviations, never come."""
BATCHING = "ours with batching"
MARGINS = (0.25, 0.5, 1.75, 2.75, 4.0, 7.0)
"""Times the default's margins: the front that the policy can be moved along; 1 is the default."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What is changed of the default policy.

    Args:
        text: for people.
        changes: from the default policy to what is changed.
    """

    text: str
    changes: Callable[[Policy], Changes]


def _set(text: str, changes: Changes) -> Variant:
    return Variant(text, lambda _: changes)


def _margin(factor: float) -> Variant:
    def changes(policy: Policy) -> Changes:
        prediction = policy.prediction
        return {"prediction.z_up": factor * prediction.z_up, "prediction.z_keep": factor * prediction.z_keep}

    return Variant(f"both margins times {factor:g}", changes)


def _without_weight(part: str) -> Variant:
    def changes(policy: Policy) -> Changes:
        weights = policy.score.weights
        own = {"memory": weights.memory, "backlog": weights.backlog, "latency": weights.latency, part: 0.0}
        return {f"score.weights.{name}": weight / sum(own.values()) for name, weight in own.items()}

    return Variant(f"the score without its {part} part, the other two in their proportion", changes)


SWEEP: Mapping[str, Variant] = {f"ours margin x{factor:g}": _margin(factor) for factor in MARGINS}
ABLATIONS: Mapping[str, Variant] = {
    "ours without look-ahead": _set(
        "demand as it is now, not as it will be once a replica is ready", {"prediction.horizon_s": 1.0}
    ),
    "ours with horizon 60 s": _set("looks ahead a minute, whatever a start takes", {"prediction.horizon_s": 60.0}),
    "ours with horizon 300 s": _set(
        "looks ahead five minutes, whatever a start takes", {"prediction.horizon_s": 300.0}
    ),
    "ours without error quantile": _set("no margin from its own past errors", {"prediction.error_cap": 0.0}),
    "ours without regime change": _set("a jump is fitted as a part of the trend", {"prediction.change_sigma": OFF}),
    "ours without dead band": Variant(
        "keeps no more than it would grow to", lambda policy: {"prediction.z_keep": policy.prediction.z_up}
    ),
    "ours without learning": _set("step times stay those of the prior", {"demand.learn": False}),
    "ours at full utilization": _set("plans for the whole of the fluid capacity", {"prediction.utilization": 1.0}),
    "ours without saturation": _set(
        "no multiple of the ready replicas for a queue that grows", {"emergency.hold_s": OFF}
    ),
    "ours without urgency": _set("nothing passes the upward cooldown", {"emergency.enabled": False}),
    "ours without memory weight": _without_weight("memory"),
    "ours without backlog weight": _without_weight("backlog"),
    "ours without latency weight": _without_weight("latency"),
    "ours without critical part": _set("one part alone never asks for growth", {"score.critical": 2.0}),
    "ours without clear part": _set("one part alone never holds a shrink", {"score.clear": 2.0}),
    "ours by score": _set("the score alone says how many", {"sizing": "score"}),
    "ours by score and trend": _set(
        "the score alone says how many, its trend included", {"sizing": "score", "prediction.score": "trend"}
    ),
    "ours with threshold 0.30": _set("shrinks at a score of 0.30 or less", {"scale_down.threshold": 0.30}),
    "ours without wait up": _set("grows at the first wish", {"scale_up.stabilization_s": 0.0}),
    "ours with wait down 120 s": _set("shrinks after two minutes", {"scale_down.stabilization_s": 120.0}),
    "ours with wait down 600 s": _set("shrinks after ten minutes", {"scale_down.stabilization_s": 600.0}),
    "ours without cooldown": _set("acts at any tick", {"cooldown_s": 0.0}),
    "ours without step limits": _set("any number at once", {"scale_up.max_step": None, "scale_down.max_step": None}),
    "ours without share of a step": _set(
        "steps do not grow with the fleet", {"scale_up.max_step_share": 0.0, "scale_down.max_step_share": 0.0}
    ),
    "ours without turn": _set(
        "a step back as soon as it is wished for", {"scale_up.turn_s": 0.0, "scale_down.turn_s": 0.0}
    ),
    "ours with emergency window 60 s": _set(
        "an emergency measures what arrives over a minute", {"emergency.window_s": 60.0}
    ),
    "ours with a spare": _set("keeps a replica more than it would", {"prediction.spare": 1}),
    "ours with error cap 1": _set("trusts its own errors up to the whole of demand", {"prediction.error_cap": 1.0}),
    BATCHING: _set("moves the engines' batching limits as well, by the plugin", {"batching.mode": "live"}),
    "ours each 15 s": _set("decides every 15 s", {"interval_s": 15.0}),
}
VARIANTS: Mapping[str, Variant] = {**SWEEP, **ABLATIONS}
SPANS: Mapping[str, Span] = {
    "prediction.z_up": Span(0.3, 3.0, log=True),
    "prediction.error_cap": Span(0.05, 1.0, log=True),
    "prediction.error_quantile": Span(0.80, 0.99, log=False),
    "prediction.utilization": Span(0.80, 1.0, log=False),
    "scale_up.threshold": Span(0.60, 0.95, log=False),
    "scale_down.threshold": Span(0.20, 0.55, log=False),
    "scale_down.stabilization_s": Span(120.0, 900.0, log=True),
    "cooldown_s": Span(30.0, 300.0, log=True),
}
"""Where a search may look for values of the policy."""
DEAD_BAND = Span(0.2, 2.5, log=False)
"""And for what `z_keep` is above `z_up`."""


def drawn(rng: np.random.Generator) -> dict[str, float]:
    """Return a value from each span."""
    values = {path: span.draw(rng) for path, span in SPANS.items()}
    return {**values, "prediction.z_keep": values["prediction.z_up"] + DEAD_BAND.draw(rng)}


def overlaid(policy: Policy, changes: Changes) -> Policy:
    """Return the policy with other values. Raises PolicyError or ValueError for what a policy cannot have."""
    plain = policy_to_plain(policy)
    for path, value in changes.items():
        *above, name = path.split(".")
        place = plain
        for key in above:
            place = place[key]
        place[name] = value
    made = policy_from_plain(plain)
    if wrong := [f"{path} = {value}: {advice}" for path, value, advice in complaints(made)]:
        raise ValueError("; ".join(wrong))
    return made


def spelled(path: str) -> str:
    """Return a field path as policy files have it: `prediction.zUp`."""
    return dotted(spelled_loc(path)[1:])
