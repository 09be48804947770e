"""What was aimed at, and what was reached: a line for each target."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.contest.front import Duel, duel, duels, everywhere
from bench.contest.matches import Match, Row, attained_percent, number
from bench.contest.play import GOAL, OURS, WARM
from bench.contest.results import Entry
from bench.contest.variants import BATCHING

MEAN_OVER, WORST_OVER = 1.08, 1.15
FEWER, ABOVE = 0.25, 0.03
REVERSALS, POINTS, FAILED = 1.0, 0.05, 0.0002
RAMP_REPLICAS, RAMP_COLD = 5.9, 0.97
SHOWN = 3
"""Of those that are in the way of a target so many are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One line: what was aimed at, what was reached, and whether that meets it; None where it was not measured."""

    text: str
    reached: str = "–"
    met: bool | None = None


def targets(played: Sequence[Match]) -> list[Target]:
    """Return the targets of the default policy, with what these matches say."""
    days = [(match, row) for match in played if match.of_a_day and (row := match.row(OURS)) is not None]
    entries = [(match.name, entry) for match, row in days for entry in row.entries]
    return [
        _attainment(entries),
        *_over_oracle(days),
        _against_one_configuration(played),
        _front([found for match, _ in days for found in duels(match)]),
        *_restless(days),
        _worst_ten_minutes(days),
        _ramp(played, WARM, GOAL, RAMP_REPLICAS),
        _ramp(played, OURS, RAMP_COLD, None),
        _mooncake(played),
        _failed(entries),
    ]


def percent(share: float, digits: int = 2) -> str:
    """Return a share as people read it."""
    return f"{100.0 * share:.{digits}f} %"


def _attainment(entries: Sequence[tuple[str, Entry]]) -> Target:
    text = f"attainment of at least {percent(GOAL, 1)} on every trace of a day, at every scale and seed"
    if not entries:
        return Target(text=text)
    low, name, seed = min((number(entry, "attainment"), name, entry.seed) for name, entry in entries)
    below = sum(number(entry, "attainment") < GOAL for _, entry in entries)
    reached = f"lowest {attained_percent(low)} ({name}, seed {seed}); {below} of {len(entries)} runs are below"
    return Target(text=text, reached=reached, met=low >= GOAL)


def _over_oracle(days: Sequence[tuple[Match, Row]]) -> Iterator[Target]:
    over = [(ratio, match.name) for match, row in days if (ratio := row.against_oracle) is not None]
    mean_text = f"GPU-hours at most {MEAN_OVER:g} x the oracle's on average"
    worst_text = f"and at most {WORST_OVER:g} x on the worst trace"
    if not over:
        yield from (Target(text=mean_text), Target(text=worst_text))
        return
    mean, (worst, name) = fmean(ratio for ratio, _ in over), max(over)
    yield Target(text=mean_text, reached=f"{mean:.3f} x over {len(over)}", met=mean <= MEAN_OVER)
    yield Target(text=worst_text, reached=f"{worst:.3f} x ({name})", met=worst <= WORST_OVER)


def _against_one_configuration(played: Sequence[Match]) -> Target:
    text = (
        f"{percent(FEWER, 0)} fewer GPU-hours than the best rival with one configuration for all traces of a day, "
        "at its attainment"
    )
    rival = next((one for one in everywhere(played) if one.kind == "rival"), None)
    found = [] if rival is None else [duel(*pair) for pair in zip(rival.matches, rival.rows, strict=True)]
    known = [one for one in found if one is not None]
    if rival is None or not known:
        return Target(text=text)
    ratios = [one.ratio for one in known if one.ratio is not None]
    fewer = 1.0 - fmean(ratios) if ratios else 0.0
    words = [f"{_fewer(fewer)} than `{rival.policy}` on average ({_span(ratios)})"] if ratios else []
    if not rival.attains:
        low, where = rival.lowest
        words.append(f"that rival attains {attained_percent(low)} on {where}, and none attains everywhere")
    if beyond := sum(one.ratio is None for one in known):
        words.append(f"it attains more than any of our margins on {beyond} of {len(known)}")
    if below := sum(not one.spanned for one in known):
        words.append(f"it attains less than any on {below} of {len(known)}: there it meets our cheapest")
    return Target(text=text, reached="; ".join(words), met=fewer >= FEWER and not beyond)


def _span(ratios: Sequence[float]) -> str:
    return f"{_fewer(1.0 - max(ratios))} to {_fewer(1.0 - min(ratios))}"


def _fewer(share: float) -> str:
    return f"{percent(abs(share), 1)} {'fewer' if share >= 0.0 else 'more'}"


def _front(found: Sequence[Duel]) -> Target:
    text = f"never more than {percent(ABOVE, 0)} above any rival's or static fleet's front, the margin swept"
    if not found:
        return Target(text=text)
    ratios = [(one.ratio, one) for one in found if one.ratio is not None]
    beyond = [one for one in found if one.ratio is None]
    words = []
    if ratios:
        ratio, worst = max(ratios, key=lambda pair: pair[0])
        words.append(f"at most {ratio:.3f} x, {_named(worst)}")
    above = sum(ratio > 1.0 + ABOVE for ratio, _ in ratios)
    words.append(f"{above} of {len(found)} are above")
    if beyond:
        shown = ", ".join(map(_named, beyond[:SHOWN])) + (", ..." if len(beyond) > SHOWN else "")
        words.append(f"{len(beyond)} attain more than any of our margins: {shown}")
    return Target(text=text, reached="; ".join(words), met=not beyond and not above)


def _named(one: Duel) -> str:
    return f"`{one.policy}` on {one.match} ({attained_percent(one.attainment)})"


def _restless(days: Sequence[tuple[Match, Row]]) -> Iterator[Target]:
    reversing, flapping = f"at most {REVERSALS:g} reversal an hour", "no flap: a reversal within ten minutes"
    if not days:
        yield from (Target(text=reversing), Target(text=flapping))
        return
    most, name = max((row.mean("reversals_per_hour"), match.name) for match, row in days)
    yield Target(text=reversing, reached=f"at most {most:.2f} ({name})", met=most <= REVERSALS)
    flaps, at = max((row.mean("flaps"), match.name) for match, row in days)
    total = sum(number(entry, "flaps") for _, row in days for entry in row.entries)
    runs = sum(len(row.entries) for _, row in days)
    yield Target(text=flapping, reached=f"{total:.0f} in {runs} runs; at most {flaps:.1f} a run ({at})", met=total == 0)


def _worst_ten_minutes(days: Sequence[tuple[Match, Row]]) -> Target:
    text = f"worst ten minutes at most {100.0 * POINTS:g} points below the oracle's"
    below = [
        (number(row.oracles[entry.seed], "worst_ten_minutes") - number(entry, "worst_ten_minutes"), match.name)
        for match, row in days
        for entry in row.entries
        if entry.seed in row.oracles
    ]
    if not below:
        return Target(text=text)
    most, name = max(below)
    missed = sum(points > POINTS for points, _ in below)
    reached = f"at most {100.0 * most:.1f} points below ({name}); {missed} of {len(below)} runs miss it"
    return Target(text=text, reached=reached, met=most <= POINTS)


def _short(played: Sequence[Match], trace: str, policy: str) -> Row | None:
    """Return a policy's row on a trace as it was published."""
    found = (match.row(policy) for match in played if (match.trace, match.scale) == (trace, 1.0))
    return next((row for row in found if row is not None), None)


def _ramp(played: Sequence[Match], policy: str, goal: float, replicas: float | None) -> Target:
    text = f"`ramp`: at least {percent(goal, 0)}"
    text += f" with {replicas:g} replicas, with what it learned an hour before" if replicas else " without that"
    row = _short(played, "ramp", policy)
    if row is None:
        return Target(text=text)
    attained, mean = row.mean("attainment"), row.mean("mean_replicas")
    met = attained >= goal and (replicas is None or mean <= replicas)
    return Target(text=text, reached=f"{attained_percent(attained)} with {mean:.2f} replicas{_seeds(row)}", met=met)


def _mooncake(played: Sequence[Match]) -> Target:
    text, row = f"`mooncake`: at least {percent(GOAL, 0)}", _short(played, "mooncake", OURS)
    if row is None:
        return Target(text=text)
    attained, reached = row.mean("attainment"), _over_seeds(row)
    if (moved := _short(played, "mooncake", BATCHING)) is not None:
        reached += f"; with the batching limits moved as well {_over_seeds(moved)}"
    return Target(text=text, reached=reached, met=attained >= GOAL)


def _over_seeds(row: Row) -> str:
    return f"{attained_percent(row.mean('attainment'))}{_seeds(row)}"


def _seeds(row: Row) -> str:
    if len(row.entries) == 1:
        return ", one seed"
    lowest = min(number(entry, "attainment") for entry in row.entries)
    return f", {len(row.entries)} seeds, the lowest {attained_percent(lowest)}"


def _failed(entries: Sequence[tuple[str, Entry]]) -> Target:
    text = f"at most {percent(FAILED)} of the requests fail"
    if not entries:
        return Target(text=text)
    most, name = max((number(entry, "failed") / number(entry, "requests"), name) for name, entry in entries)
    return Target(text=text, reached=f"at most {percent(most, 3)} ({name})", met=most <= FAILED)
