"""The page that is made of a results file: pictures, tables, where we lose, what the figures cannot say."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from string import Template

from autoscaler.sim.profile import OVERHEAD
from autoscaler.sim.profiles import profile
from bench.contest.picture import Point, pareto
from bench.contest.play import GOAL, HINDSIGHT, LATE_START, OURS, TUNED
from bench.contest.results import Entry, Spread
from bench.contest.traces import BY_NAME, ROOM, TRACES
from bench.rivals import RIVALS
from bench.rivals.feed import SCRAPE_S

SEEDS = 5
"""Fewer are preliminary."""
EQUAL = 0.0005
"""Attainments this near to each other are the same."""
GOOD, BAD = 0.99, 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy on one trace at one scale, over its seeds.

    Args:
        entries: its runs, those without a plan left out.
        against_oracle: its GPU-hours over the oracle's on the same seeds; None where the oracle did not run.
    """

    policy: str
    entries: Sequence[Entry]
    against_oracle: float | None

    @property
    def kind(self) -> str:
        """Whether it is ours, a rival, or knows in hindsight."""
        if self.policy in HINDSIGHT:
            return "hindsight"
        return "rival" if self.policy.removesuffix(TUNED) in RIVALS else "ours"

    def spread(self, name: str) -> Spread:
        """Return a figure over the seeds."""
        return Spread.of(_number(entry, name) for entry in self.entries)

    def mean(self, name: str) -> float:
        """Return a figure's mean over the seeds."""
        return self.spread(name).mean

    @property
    def useful(self) -> float:
        """The share of the GPU-hours that the work itself takes, at the least."""
        return fmean(entry.ground["fluid_gpu_hours"] / _number(entry, "gpu_hours") for entry in self.entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """All policies on one trace at one scale, over the same length of it: the rows, the best attainment first."""

    trace: str
    scale: float
    hours: float | None
    rows: Sequence[Row]
    seeds: int
    ground: Entry

    @property
    def name(self) -> str:
        """Return a name for people and files."""
        return f"{self.trace}-x{self.scale:g}" + (f"-{self.hours:g}h" if self.hours is not None else "")

    @property
    def fluid(self) -> float:
        """The bound's GPU-hours, a mean over the seeds."""
        return fmean(
            {entry.seed: entry.ground["fluid_gpu_hours"] for row in self.rows for entry in row.entries}.values()
        )

    def row(self, policy: str) -> Row | None:
        """Return a policy's row."""
        return next((row for row in self.rows if row.policy == policy), None)


def _number(entry: Entry, name: str) -> float:
    figures = entry.figures or {}
    value = figures[name]
    if isinstance(value, dict):
        value = value["p99"]
    return float("nan") if value is None else float(value)


def matches(entries: Iterable[Entry]) -> list[Match]:
    """Return the matches that the runs make, in the order of the traces."""
    order = [trace.name for trace in TRACES]

    def where(entry: Entry) -> tuple[int, float, float]:
        return order.index(entry.trace), entry.scale, entry.hours or float("inf")

    found = []
    for _, group in groupby(sorted(entries, key=where), where):
        runs = list(group)
        rows = [row for policy in dict.fromkeys(run.policy for run in runs) if (row := _row(policy, runs)) is not None]
        rows.sort(key=lambda row: (-row.mean("attainment"), row.mean("gpu_hours")))
        if rows:
            first = runs[0]
            found.append(
                Match(
                    trace=first.trace,
                    scale=first.scale,
                    hours=first.hours,
                    rows=rows,
                    seeds=min(len(row.entries) for row in rows),
                    ground=first,
                )
            )
    return found


def _row(policy: str, runs: Sequence[Entry]) -> Row | None:
    own = [run for run in runs if run.policy == policy and run.figures is not None]
    oracle = {run.seed: _number(run, "gpu_hours") for run in runs if run.policy == "oracle" and run.figures is not None}
    shared = [_number(run, "gpu_hours") / oracle[run.seed] for run in own if run.seed in oracle]
    return Row(policy=policy, entries=own, against_oracle=fmean(shared) if shared else None) if own else None


# -- the page --------------------------------------------------------------------------------------------------------


def write(path: Path, entries: Sequence[Entry], *, law_final: bool = False) -> None:
    """Write the page, and its pictures in a folder of its name beside it.

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
        losses=_losses(played),
        kept_back=_kept_back(played),
        matches="\n".join(line for match in played for line in _match(match, folder.name)),
        first_token=_first_token(played),
        useful=_useful(played),
        saved=_saved(played),
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
    points = [
        Point(name=row.policy, gpu_hours=row.mean("gpu_hours"), attainment=row.mean("attainment"), kind=row.kind)
        for row in match.rows
    ]
    return pareto(_title(match), points, fluid_gpu_hours=match.fluid, goal=GOAL)


def _title(match: Match) -> str:
    part = f", its first {match.hours:g} h" if match.hours is not None else ""
    return f"{match.trace}, {match.scale:g} x the traffic{part}"


def preliminary(played: Sequence[Match], law_final: bool) -> list[str]:
    """Return why the figures are not the benchmark's yet; empty when they are."""
    why = []
    if not law_final:
        why.append("the control law may still change")
    if any(match.hours is not None for match in played):
        why.append("only the beginnings of the traces ran")
    if (seeds := min(match.seeds for match in played)) < SEEDS:
        why.append("one seed" if seeds == 1 else f"{seeds} seeds")
    if not any(row.policy.endswith(TUNED) for match in played for row in match.rows):
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
    attained, used = ours.mean("attainment"), ours.mean("gpu_hours")
    found = []
    if attained < GOAL:
        found.append(f"attains {_percent(attained)}, which is below {_percent(GOAL)}")
    for row in match.rows:
        better_for_no_more = row.mean("attainment") >= attained - EQUAL and row.mean("gpu_hours") < used
        if row.kind != "ours" and row.policy != "oracle" and better_for_no_more:
            less = 1.0 - row.mean("gpu_hours") / used
            attains = _percent(row.mean("attainment"))
            found.append(f"`{row.policy}` attains {attains} for {100.0 * less:.1f} % fewer GPU-hours")
    return found


def cheaper(match: Match) -> list[str]:
    """Return who meets the goal for less than our policy, though attaining less than it."""
    ours = match.row(OURS)
    if ours is None:
        return []
    return [
        f"`{row.policy}` meets {_percent(GOAL)} ({_percent(row.mean('attainment'))}) at "
        f"{row.mean('gpu_hours') / ours.mean('gpu_hours'):.2f} of our GPU-hours"
        for row in match.rows
        if row.kind != "ours"
        and row.policy != "oracle"
        and GOAL <= row.mean("attainment") < ours.mean("attainment") - EQUAL
        and row.mean("gpu_hours") < ours.mean("gpu_hours")
    ]


def dearer(match: Match) -> list[str]:
    """Return who attains more than our policy for more GPU-hours: another bargain, which may be the better one."""
    ours = match.row(OURS)
    if ours is None:
        return []
    return [
        f"`{row.policy}` {_percent(row.mean('attainment'))} at {row.mean('gpu_hours') / ours.mean('gpu_hours'):.2f} x"
        for row in match.rows
        if row.mean("attainment") > ours.mean("attainment") + EQUAL and row.mean("gpu_hours") >= ours.mean("gpu_hours")
    ]


def _losses(played: Sequence[Match]) -> str:
    found = [f"* {_title(match)}: {loss}." for match in played for loss in losses(match) + cheaper(match)]
    nothing = "Nowhere in these: no policy attains as much for fewer GPU-hours, and none meets the goal for fewer."
    more = [
        f"* {_title(match)}, ours {_percent(ours.mean('attainment'))}: {', '.join(others)}."
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
    "failed",
    "actions/h",
    "reversals/h",
    "flaps",
    "useful work %",
)


def _match(match: Match, folder: str) -> Iterator[str]:
    trace, ground = BY_NAME[match.trace], match.ground.ground
    yield f"## {_title(match)}\n"
    yield (
        f"{trace.text[0].upper()}{trace.text[1:]}. `{ground['profile']}`, {ground['ttft_s']:g} s to the first token, "
        f"{1e3 * ground['tpot_s']:g} ms a token, {ground['min']} to {ground['max']} replicas, {ground['replicas']} at "
        f"the start, {ground['requests']:,} requests. Fluid bound {match.fluid:.1f} GPU-hours. {_seeds(match)}\n"
    )
    yield f"![Attainment against GPU-hours]({folder}/{match.name}.svg)\n"
    yield "| " + " | ".join(COLUMNS) + " |"
    yield "|---" * len(COLUMNS) + "|"
    for row in match.rows:
        yield "| " + " | ".join(_cells(row)) + " |"
    yield ""


def _seeds(match: Match) -> str:
    if match.seeds == 1:
        return "One seed, so no interval."
    return f"{match.seeds} seeds; ± is half of the 95 % interval of the mean."


def _cells(row: Row) -> Iterator[str]:
    name = f"**{row.policy}**" if row.policy == OURS else row.policy
    replicas = row.entries[0].settings.get("replicas") if row.policy.startswith("static") else None
    yield name if replicas is None else f"{name} ({replicas})"
    yield _with_interval(row.spread("attainment"), 100.0, 2)
    yield _with_interval(row.spread("gpu_hours"), 1.0, 1)
    yield "–" if row.against_oracle is None else f"{row.against_oracle:.2f}"
    yield f"{100.0 * min(_number(entry, 'worst_ten_minutes') for entry in row.entries):.1f}"
    yield f"{100.0 * row.mean('bad_ten_minutes'):.1f} %"
    yield f"{row.mean('ttft_s'):.2f}"
    yield f"{1e3 * row.mean('tpot_s'):.0f}"
    yield f"{sum(_number(entry, 'failed') for entry in row.entries):.0f}"
    hours = fmean(_number(entry, "hours") for entry in row.entries)
    yield f"{(row.mean('ups') + row.mean('downs')) / hours:.1f}"
    yield f"{row.mean('reversals_per_hour'):.1f}"
    yield f"{row.mean('flaps'):.0f}"
    yield f"{100.0 * row.useful:.0f}"


def _with_interval(spread: Spread, factor: float, digits: int) -> str:
    mean = f"{factor * spread.mean:.{digits}f}"
    return mean if spread.half is None else f"{mean} ± {factor * spread.half:.{digits}f}"


def _percent(share: float) -> str:
    return f"{100.0 * share:.2f} %"


# -- what is claimed, how it was run ---------------------------------------------------------------------------------


def _each(tell: Iterable[tuple[Match, str]]) -> str:
    told = [f"{match.name} {words}" for match, words in tell]
    return "; ".join(told) + "." if told else "Not measured."


def _pairs(played: Sequence[Match], policy: str) -> Iterator[tuple[Match, Row, Row]]:
    for match in played:
        ours, other = match.row(OURS), match.row(policy)
        if ours is not None and other is not None:
            yield match, ours, other


def _first_token(played: Sequence[Match]) -> str:
    small = [match for match in played if profile(BY_NAME[match.trace].profile).gpus == 1]
    return _each(
        (
            (
                match,
                f"{1e3 * other.mean('ttft_s'):.0f} ms with `keda-in-flight`, {1e3 * ours.mean('ttft_s'):.0f} with ours",
            )
            for match, ours, other in _pairs(small, "keda-in-flight")
        ),
    )


def _useful(played: Sequence[Match]) -> str:
    return _each(
        (
            (match, f"{100.0 * static.useful:.0f} % static, {100.0 * ours.useful:.0f} % ours")
            for match, ours, static in _pairs(played, "static-peak")
        ),
    )


def _saved(played: Sequence[Match]) -> str:
    def told() -> Iterator[tuple[Match, str]]:
        for match, ours, static in _pairs(played, "static-peak"):
            change = 100.0 * (ours.mean("gpu_hours") / static.mean("gpu_hours") - 1.0)
            yield match, f"{change:+.0f} % at {_percent(ours.mean('attainment'))}".replace("-", "−", 1)

    return _each(told())


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
