"""The page that is made of a results file: pictures, tables, where we lose, what the figures cannot say."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from string import Template

from autoscaler.sim.profile import OVERHEAD
from autoscaler.sim.profiles import profile
from bench.contest.ablations import Ablation, Joint, Means, ablations, joint
from bench.contest.front import EQUAL, Everywhere, everywhere, swept
from bench.contest.matches import Match, Row, attained_percent, matches, number
from bench.contest.picture import Point, pareto
from bench.contest.play import GOAL, HINDSIGHT, LATE_START, OURS, TUNED
from bench.contest.results import Entry, Spread
from bench.contest.searched import read_log, told
from bench.contest.targets import Target, targets
from bench.contest.traces import BY_NAME, ROOM, TRACES
from bench.contest.variants import VARIANTS
from bench.faults import markdown as faults_table
from bench.rivals.feed import SCRAPE_S

SEEDS = 5
"""Fewer are preliminary."""


# -- the page --------------------------------------------------------------------------------------------------------


def write(path: Path, entries: Sequence[Entry], *, law_final: bool = False) -> None:
    """Write the page, and its pictures in a folder of its name beside it.

    The log of the search, `tune.jsonl`, and the figures under faults, `faults.json`, are read from that folder.

    Args:
        entries: at least one run with figures.
        law_final: whether the policy is the one that is shipped for good.
    """
    played = matches(entries)
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for match in played:
        (folder / f"{match.name}.svg").write_text(_picture(match))
    text = Template(Path(__file__).with_name("page.md").read_text()).substitute(
        preliminary=_preliminary(played, law_final),
        targets="\n".join(_targets(targets(played))),
        everywhere="\n".join(_everywhere(everywhere(played))),
        ablations="\n".join(_ablations(ablations(played))),
        joint="\n".join(_joint(joint(played))),
        tuning="\n".join(told(read_log(folder / "tune.jsonl"))),
        faults=_faults(folder / "faults.json"),
        losses=_losses(played),
        kept_back=_kept_back(played),
        matches="\n".join(line for match in played for line in _match(match, folder.name)),
        first_token=_first_token(played),
        useful=_useful(played),
        saved=_saved(played),
        quiet=_quiet(played),
        goal=f"{100.0 * GOAL:g} %",
        room=f"{ROOM:g}",
        scrape=f"{SCRAPE_S:g}",
        late=f"{LATE_START:g}",
        hardware="\n".join(_hardware(played)),
        overhead=f"{OVERHEAD:g}",
        runs=_runs(entries),
        settings="\n".join(_settings(entries)),
    )
    path.write_text(text)


def _picture(match: Match) -> str:
    points, margins = [_point(row) for row in match.shown], [_point(row) for row in swept(match)]
    return pareto(match.title, points, fluid_gpu_hours=match.fluid, goal=GOAL, swept=margins)


def _point(row: Row) -> Point:
    return Point(name=row.policy, gpu_hours=row.mean("gpu_hours"), attainment=row.mean("attainment"), kind=row.kind)


def preliminary(played: Sequence[Match], law_final: bool) -> list[str]:
    """Return why the figures are not the benchmark's yet; empty when they are."""
    why = []
    if not law_final:
        why.append("the control law may still change")
    if any(match.hours is not None for match in played):
        why.append("only the beginnings of the traces ran")
    rows = [row for match in played for row in match.shown]
    if few := sum(len(row.seeds) < SEEDS for row in rows):
        why.append(f"{few} of {len(rows)} rows have fewer than {SEEDS} seeds")
    if not any(row.policy.endswith(TUNED) and row.kind == "rival" for row in rows):
        why.append("the rivals run with their vendors' values, untuned")
    if len({match.scale for match in played}) < 2:
        why.append("one size of fleet")
    if missing := _not_run(played, kept_back=False):
        why.append(f"not run: {', '.join(missing)}")
    return why


def _not_run(played: Sequence[Match], *, kept_back: bool) -> list[str]:
    ran = {match.trace for match in played}
    return [trace.name for trace in TRACES if trace.kept_back is kept_back and trace.name not in ran]


def _kept_back(played: Sequence[Match]) -> str:
    missing = [f"`{name}`" for name in _not_run(played, kept_back=True)]
    return f" Not run, since their files are kept back for a last look: {' and '.join(missing)}." if missing else ""


def _preliminary(played: Sequence[Match], law_final: bool) -> str:
    why = preliminary(played, law_final)
    return f"> **PRELIMINARY, not to be quoted:** {'; '.join(why)}.\n\n" if why else ""


# -- where we lose ---------------------------------------------------------------------------------------------------


def losses(match: Match) -> list[str]:
    """Return what speaks against our policy in a match: what it misses, and who is better for no more."""
    ours = match.row(OURS)
    if ours is None:
        return []
    found = []
    if ours.mean("attainment") < GOAL:
        found.append(f"attains {_attained(ours)}, which is below {_percent(GOAL)}")
    for own, other in match.others():
        better = other.mean("attainment") >= own.mean("attainment") - EQUAL
        less = 1.0 - _times(other, own)
        if better and less > 0.0:
            found.append(f"`{other.policy}` attains {_attained(other)} for {100.0 * less:.1f} % fewer GPU-hours")
    return found


def cheaper(match: Match) -> list[str]:
    """Return who meets the goal for less than our policy, though attaining less than it."""
    return [
        f"`{other.policy}` meets {_percent(GOAL)} ({_attained(other)}) at {_times(other, own):.2f} of our GPU-hours"
        for own, other in match.others()
        if GOAL <= other.mean("attainment") < own.mean("attainment") - EQUAL and _times(other, own) < 1.0
    ]


def dearer(match: Match) -> list[str]:
    """Return who attains more than our policy for more GPU-hours: another bargain, which may be the better one."""
    return [
        f"`{other.policy}` {_attained(other)} at {_times(other, own):.2f} x"
        for own, other in match.others()
        if other.mean("attainment") > own.mean("attainment") + EQUAL and _times(other, own) >= 1.0
    ]


def _times(row: Row, other: Row) -> float:
    """Return a row's GPU-hours over another's."""
    return row.mean("gpu_hours") / other.mean("gpu_hours")


def _attained(row: Row) -> str:
    return attained_percent(row.mean("attainment"))


def _losses(played: Sequence[Match]) -> str:
    found = [f"* {match.title}: {loss}." for match in played for loss in losses(match) + cheaper(match)]
    nothing = "Nowhere in these: no policy attains as much for fewer GPU-hours, and none meets the goal for fewer."
    more = [
        f"* {match.title}, ours {_attained(ours)}: {', '.join(others)}."
        for match in played
        if (ours := match.row(OURS)) is not None and (others := dearer(match))
    ]
    lines = found or [nothing]
    if more:
        lines += ["", "More is attained for more, as a multiple of our GPU-hours:", "", *more]
    return "\n".join(lines)


# -- tables ----------------------------------------------------------------------------------------------------------

COLUMNS = (
    "policy",
    "attainment %",
    "GPU-hours",
    "x oracle",
    "worst 10 min %",
    "10 min below 95 %",
    "TTFT p99 s",
    "TPOT p99 ms",
    "failed %",
    "actions/h",
    "reversals/h",
    "flaps a run",
    "under %",
    "over %",
    "useful work %",
    "seeds",
)


def _match(match: Match, folder: str) -> Iterator[str]:
    trace, ground = BY_NAME[match.trace], match.ground.ground
    yield f"## {match.title}\n"
    yield (
        f"{trace.text[0].upper()}{trace.text[1:]}. `{ground['profile']}`, {ground['ttft_s']:g} s to the first token, "
        f"{1e3 * ground['tpot_s']:g} ms a token, {ground['min']} to {ground['max']} replicas, {ground['replicas']} at "
        f"the start, {ground['requests']:,} requests. Fluid bound {match.fluid:.1f} GPU-hours. {_seeds(match)}\n"
    )
    yield f"![Attainment against GPU-hours]({folder}/{match.name}.svg)\n"
    yield "| " + " | ".join(COLUMNS) + " |"
    yield "|---" * len(COLUMNS) + "|"
    for row in match.shown:
        yield "| " + " | ".join(_cells(row)) + " |"
    yield ""


def _seeds(match: Match) -> str:
    most = max(len(row.entries) for row in match.shown)
    if most == 1:
        return "One seed, so no interval."
    some = f"{most} seeds" if match.seeds == most else f"{match.seeds} to {most} seeds, as the last column says"
    return f"{some}; ± is half of the 95 % interval of the mean."


def _cells(row: Row) -> Iterator[str]:
    name = f"**{row.policy}**" if row.policy == OURS else row.policy
    replicas = row.entries[0].settings.get("replicas") if row.policy.startswith("static") else None
    yield name if replicas is None else f"{name} ({replicas})"
    yield _with_interval(row.spread("attainment"), 100.0, 2)
    yield _with_interval(row.spread("gpu_hours"), 1.0, 1)
    yield _known(row.against_oracle, 1.0, 2)
    yield f"{100.0 * min(number(entry, 'worst_ten_minutes') for entry in row.entries):.1f}"
    yield f"{100.0 * row.mean('bad_ten_minutes'):.1f} %"
    yield f"{row.mean('ttft_s'):.2f}"
    yield f"{1e3 * row.mean('tpot_s'):.0f}"
    failed = sum(number(entry, "failed") for entry in row.entries)
    yield f"{100.0 * failed / sum(number(entry, 'requests') for entry in row.entries):.3g}" if failed else "0"
    yield f"{(row.mean('ups') + row.mean('downs')) / row.mean('hours'):.1f}"
    yield f"{row.mean('reversals_per_hour'):.1f}"
    yield f"{row.mean('flaps'):.3g}"
    yield _known(row.provisioned("under"), 100.0, 1)
    yield _known(row.provisioned("over"), 100.0, 1)
    yield f"{100.0 * row.useful:.0f}"
    yield str(len(row.entries))


def _known(value: float | None, factor: float, digits: int) -> str:
    return "–" if value is None else f"{factor * value:.{digits}f}"


def _with_interval(spread: Spread, factor: float, digits: int) -> str:
    mean = f"{factor * spread.mean:.{digits}f}"
    return mean if spread.half is None else f"{mean} ± {factor * spread.half:.{digits}f}"


def _percent(share: float) -> str:
    return f"{100.0 * share:.2f} %"


def _down(share: float) -> str:
    return attained_percent(share).removesuffix(" %")


# -- over all traces -------------------------------------------------------------------------------------------------


def _targets(found: Sequence[Target]) -> Iterator[str]:
    yield "| Aimed at | Reached | |"
    yield "|---|---|---|"
    for one in found:
        word = {True: "met", False: "**missed**", None: "not measured"}[one.met]
        yield f"| {one.text} | {one.reached} | {word} |"


def _everywhere(found: Sequence[Everywhere]) -> Iterator[str]:
    if not found:
        yield "No policy ran on every trace of a day."
        return
    where = ", ".join(match.name for match in found[0].matches)
    yield f"Over {where}. First those that attain {_percent(GOAL)} on each, the cheapest first; then the others.\n"
    yield "| policy | lowest attainment % | where | mean % | x oracle, mean | worst | reversals/h | seeds |"
    yield "|---" * 8 + "|"
    for one in found:
        low, where = one.lowest
        seeds = sorted({len(row.entries) for row in one.rows})
        cells = (
            f"**{one.policy}**" if one.policy == OURS else one.policy,
            _down(low),
            where,
            _down(one.attainment),
            f"{one.mean_over:.3f}" if one.over else "–",
            f"{max(one.over):.2f}" if one.over else "–",
            f"{fmean(row.mean('reversals_per_hour') for row in one.rows):.1f}",
            " to ".join(str(count) for count in dict.fromkeys((seeds[0], seeds[-1]))),
        )
        yield "| " + " | ".join(cells) + " |"


def _ablations(found: Sequence[Ablation]) -> Iterator[str]:
    if not found:
        yield "None ran."
        return
    yield "| variant | what it is | attainment % | x oracle | reversals/h | points | x oracle | reversals/h | runs |"
    yield "|---" * 9 + "|"
    for one in found:
        own, ours = one.variant, one.ours
        cells = (
            one.policy.removeprefix(f"{OURS} "),
            VARIANTS[one.policy].text,
            _down(own.attainment),
            _known(own.over, 1.0, 3),
            f"{own.reversals:.2f}",
            f"{100.0 * (own.attainment - ours.attainment):+.2f}",
            _more(own, ours),
            f"{own.reversals - ours.reversals:+.2f}",
            f"{one.runs} on {len(one.matches)}",
        )
        yield "| " + " | ".join(cells) + " |"
    where = ", ".join(dict.fromkeys(name for one in found for name in one.matches))
    yield f"\nRuns are on so many of {where}; what is compared is the same runs of `{OURS}`, {_baseline(found)}."


def _joint(found: Sequence[Joint]) -> Iterator[str]:
    if not found:
        yield "Not run."
        return
    yield "| trace | attainment % | with limits | GPU-hours | with limits | | attain more | take fewer GPU-hours |"
    yield "|---" * 8 + "|"
    for one in found:
        seeds = len(one.moved.entries)
        cells = (
            one.match.name,
            _down(one.alone.mean("attainment")),
            _down(one.moved.mean("attainment")),
            f"{one.alone.mean('gpu_hours'):.1f}",
            f"{one.moved.mean('gpu_hours'):.1f}",
            f"{100.0 * (_times(one.moved, one.alone) - 1.0):+.1f} %",
            f"{one.higher} of {seeds}",
            f"{one.fewer} of {seeds}",
        )
        yield "| " + " | ".join(cells) + " |"


def _more(own: Means, ours: Means) -> str:
    return "–" if own.over is None or ours.over is None else f"{own.over - ours.over:+.3f}"


def _baseline(found: Sequence[Ablation]) -> str:
    most = max(found, key=lambda one: one.runs)
    over = f" at {most.ours.over:.3f} x" if most.ours.over is not None else ""
    return f"over most of them {attained_percent(most.ours.attainment)}{over}"


# -- what is claimed, how it was run ---------------------------------------------------------------------------------


def _each(tell: Iterable[tuple[Match, str]]) -> str:
    told = [f"{match.name} {words}" for match, words in tell]
    return "; ".join(told) + "." if told else "Not measured."


def _pairs(played: Sequence[Match], policy: str) -> Iterator[tuple[Match, Row, Row]]:
    for match in played:
        yield from ((match, ours, other) for ours, other in match.others() if other.policy == policy)


def _first_token(played: Sequence[Match]) -> str:
    def told() -> Iterator[tuple[Match, str]]:
        for match in (match for match in played if profile(BY_NAME[match.trace].profile).gpus == 1):
            found = {other.policy: (ours, other) for ours, other in match.others()}
            name = next((name for name in (f"keda-in-flight{TUNED}", "keda-in-flight") if name in found), None)
            if name is not None:
                ours, other = (f"{1e3 * row.mean('ttft_s'):.0f}" for row in found[name])
                yield match, f"{other} ms with `{name}`, {ours} with ours"

    return _each(told())


def _useful(played: Sequence[Match]) -> str:
    return _each(
        (
            (match, f"{100.0 * static.useful:.0f} % static, {100.0 * ours.useful:.0f} % ours")
            for match, ours, static in _pairs(played, "static-peak")
        ),
    )


def _quiet(played: Sequence[Match]) -> str:
    def told() -> Iterator[tuple[Match, str]]:
        for match, ours, static in _pairs(played, "static-peak"):
            used, planned = ours.mean("quiet_gpu_hours"), static.mean("quiet_gpu_hours")
            if not math.isnan(used) and planned > 0.0:
                yield match, f"{100.0 * (used / planned - 1.0):+.0f} %".replace("-", "−", 1)

    return _each(told())


def _saved(played: Sequence[Match]) -> str:
    def told() -> Iterator[tuple[Match, str]]:
        for match, ours, static in _pairs(played, "static-peak"):
            change = 100.0 * (ours.mean("gpu_hours") / static.mean("gpu_hours") - 1.0)
            yield match, f"{change:+.0f} % at {_attained(ours)}".replace("-", "−", 1)

    return _each(told())


def _faults(figures: Path) -> str:
    return faults_table(json.loads(figures.read_text())) if figures.exists() else "None ran."


def _hardware(played: Sequence[Match]) -> Iterator[str]:
    columns = ("base ms", "token us", "sequence us", "context ns", "prefix ps", "KV tokens", "cold start s", "fit")
    yield "| " + " | ".join(("profile", "used by", *columns)) + " |"
    yield "|---" * (2 + len(columns)) + "|"
    for name in dict.fromkeys(BY_NAME[match.trace].profile for match in played):
        one = profile(name)
        users = ", ".join(dict.fromkeys(match.trace for match in played if BY_NAME[match.trace].profile == name))
        cells = (
            name,
            users,
            f"{1e3 * one.base_s:.2f}",
            f"{1e6 * one.token_s:.1f}",
            f"{1e6 * one.sequence_s:.1f}",
            f"{1e9 * one.context_s:.1f}",
            f"{1e12 * one.prefix_s:.0f}",
            f"{one.kv_tokens:,}",
            f"{one.cold_start_s:g}",
            "–" if one.mape is None else f"MAPE {100.0 * one.mape:.1f} %",
        )
        yield "| " + " | ".join(cells) + " |"


def _runs(entries: Sequence[Entry]) -> str:
    commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(entry.commit for entry in entries))
    seconds = sum(entry.seconds for entry in entries)
    lines = [f"{len(entries):,} runs, {seconds / 3600.0:.2f} h of one core, commit {commits} (+ is with changes)."]
    lines += [
        f"* {entry.trace}, scale {entry.scale:g}, seed {entry.seed}: no plan of the oracle's kind attains the goal."
        for entry in entries
        if entry.figures is None
    ]
    return "\n".join(lines)


BY_TRACE = ("ttft_s", "tpot_s", "itl_s", "prefill_tokens_s")


def _settings(entries: Sequence[Entry]) -> Iterator[str]:
    shown: dict[str, Entry] = {}
    for entry in entries:
        if entry.policy not in HINDSIGHT:
            shown.setdefault(entry.policy, entry)
    for policy, entry in sorted(shown.items()):
        values = (f"{name} {_short(value)}" for name, value in entry.settings.items() if name not in BY_TRACE)
        yield f"| {policy} | {', '.join(values) or '–'} |"


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
