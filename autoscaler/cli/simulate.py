"""`autoscaler simulate`: policies in closed loop on a workload, before they touch a GPU."""

import contextlib
import json
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
from click.core import ParameterSource
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from autoscaler import __version__
from autoscaler.cli.calibrating import calibrate_to
from autoscaler.cli.study import PRESETS, Case, Ran, load_named, run_cases, with_objectives
from autoscaler.core.policy import Policy
from autoscaler.errors import AutoscalerError
from autoscaler.policy_file import parse_duration
from autoscaler.sim.comparison import Cells, Heading, table, write_comparison
from autoscaler.sim.front import Routing
from autoscaler.sim.gate import Baseline, Margins, Verdict, held, judge, read_baseline, write_baseline
from autoscaler.sim.profile import Profile
from autoscaler.sim.profiles import profile, profile_names
from autoscaler.sim.scored import Scored, means
from autoscaler.sim.traffic import SHAPES, Workload, load_workload

OBJECTIVES = ("ttft", "itl")
_FOLDERS = re.compile(r"[^=:,]*/")
MARGINS = {"attainment": "attainment", "gpu-hours": "gpu_hours", "flaps": "flaps"}


@click.command("simulate")
@click.argument("workload", required=False)
@click.option("--policy", "policy_files", multiple=True, type=click.Path(path_type=Path), help="Repeatable.")
@click.option(
    "--profile",
    "profile_name",
    default="llama-3.1-8b-h100x1",
    show_default=True,
    help=f"Model and GPUs of a replica: a file, or one of {', '.join(profile_names())}.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="The first; 0 is a file itself.")
@click.option("--seeds", default=1, show_default=True, type=click.IntRange(min=1), help="How many, from the first on.")
@click.option("--hours", type=click.FloatRange(min=0, min_open=True), help="Only so much of the workload.")
@click.option(
    "--scale", default=1.0, show_default=True, type=click.FloatRange(min=0, min_open=True), help="Times the traffic."
)
@click.option("--replicas", type=click.IntRange(min=1), help="Ready at the start; else what the first minutes take.")
@click.option("--slo", "slos", multiple=True, help="ttft=2s or itl=100ms, in place of every policy's own.")
@click.option("--faults", default="none", show_default=True, type=click.Choice(list(PRESETS)), help="What goes wrong.")
@click.option(
    "--routing",
    default=Routing.LEAST_OUTSTANDING.value,
    show_default=True,
    type=click.Choice([one.value for one in Routing]),
    help="Which replica gets a request.",
)
@click.option("--price", type=click.FloatRange(min=0), help="Of a GPU-hour; else the profile's, if it says.")
@click.option("--jobs", default=-1, show_default=True, help="Processes; -1 is one a core.")
@click.option("--backend", default="loky", show_default=True, help="Of joblib: loky, threading, dask, ray.")
@click.option(
    "--report", default="simulation.html", show_default=True, type=click.Path(path_type=Path), help="One HTML page."
)
@click.option("--no-report", is_flag=True, help="Only the table.")
@click.option("--json", "as_json", is_flag=True, help="Every run in numbers instead of the table.")
@click.option("--gate", type=click.Path(path_type=Path), help="Exit 1 when worse than this baseline by a margin.")
@click.option("--write-baseline", type=click.Path(path_type=Path), help="Make the baseline of later gates.")
@click.option("--margin", "margins", multiple=True, help="attainment=0.2%, gpu-hours=2% or flaps=0.2 an hour.")
@click.option(
    "--calibrate", type=click.Path(path_type=Path), help="Make profile and workload from a recording instead."
)
@click.option("--stream", help="With --calibrate: the recorded policy, when there are several.")
@click.option("--output", type=click.Path(path_type=Path), help="With --calibrate: the profile's file, NAME.yaml.")
@click.option(
    "--token-budget",
    type=click.IntRange(min=1),
    help="With --calibrate: the engines' max_num_batched_tokens; else the profile's.",
)
@click.pass_context
def command(
    context: click.Context,
    /,
    workload: str | None,
    policy_files: tuple[Path, ...],
    profile_name: str,
    calibrate: Path | None,
    stream: str | None,
    output: Path | None,
    token_budget: int | None,
    **options: object,
) -> int:
    """Let policies scale simulated vLLM replicas under WORKLOAD and compare what they come to.

    WORKLOAD is a CSV of arrival_s,input_tokens,output_tokens, plain or gzip; a rate curve, CSV of t_s,rps, as
    curve.csv:prompt=1500,output=200 or curve.csv:lengths=requests.csv; or one of the built-in shapes, such as
    diurnal:rps=12,hours=24,prompt=1500,output=200. Nothing has to be downloaded, and nothing is measured on GPUs.
    """
    model = profile(profile_name)
    if calibrate is not None:
        return calibrate_to(calibrate, model, stream, output, token_budget)
    if workload is None:
        raise click.UsageError(f"name a workload: a CSV file, or one of {', '.join(SHAPES)}")
    if not policy_files:
        raise click.UsageError("name at least one --policy")
    given = context.get_parameter_source("report") is ParameterSource.COMMANDLINE
    asked = _Asked(workload=workload, profile=model, report_asked=given, **options)  # type: ignore[arg-type]
    return _simulate(asked, load_named(policy_files))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The options, as they were given."""

    workload: str
    profile: Profile
    seed: int
    seeds: int
    hours: float | None
    scale: float
    replicas: int | None
    slos: tuple[str, ...]
    faults: str
    routing: str
    price: float | None
    jobs: int
    backend: str
    report: Path
    report_asked: bool
    no_report: bool
    as_json: bool
    gate: Path | None
    write_baseline: Path | None
    margins: tuple[str, ...]


def _simulate(asked: _Asked, policies: Mapping[str, Policy]) -> int:
    """Run, show and judge. Returns the exit code."""
    # Whatever can be wrong with what was asked for is said before anything runs for minutes.
    baseline = read_baseline(asked.gate) if asked.gate is not None else None
    margins = _margins(asked.margins, baseline.margins if baseline is not None else Margins())
    seconds = _objectives(asked.slos)
    chosen = {name: with_objectives(policy, seconds) for name, policy in policies.items()}
    source = _read_workload(asked)
    setting = _setting(asked, seconds)
    if baseline is not None:
        judge(baseline, margins, setting, [])
    cases = [
        Case(
            label=name,
            policy=policy,
            workload=asked.workload,
            profile=asked.profile,
            seed=seed,
            scale=asked.scale,
            hours=asked.hours,
            replicas=asked.replicas,
            faults=asked.faults,
            routing=Routing(asked.routing),
            detailed=not asked.no_report and seed == asked.seed,
        )
        for name, policy in chosen.items()
        for seed in range(asked.seed, asked.seed + asked.seeds)
    ]
    ran = _run_all(cases, asked)
    runs = [one.scored for one in ran]
    price = asked.price if asked.price is not None else asked.profile.price_per_gpu_hour
    console = Console(width=None if sys.stdout.isatty() else 160)
    _show(console, asked, source, chosen, runs, price)
    _report(console, asked, source, chosen, ran, price)
    if asked.write_baseline is not None:
        found = {mean.policy: held(mean) for mean in means(runs)}
        write_baseline(asked.write_baseline, Baseline(setting=setting, margins=margins, policies=found))
        click.echo(f"baseline written to {asked.write_baseline}", err=True)
    if baseline is None:
        return 0
    return _judged(judge(baseline, margins, setting, means(runs)), asked)


# -- what was asked for ----------------------------------------------------------------------------------------------


def _pair(text: str, known: Sequence[str], option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or name not in known:
        raise click.BadParameter(
            f"{text!r}: must be one of {', '.join(f'{one}=...' for one in known)}", param_hint=option
        )
    return name, value


def _objectives(texts: Sequence[str]) -> dict[str, float]:
    """Return the objectives [s] by name, from `ttft=2s,itl=100ms` or several of these."""
    seconds = {}
    for text in ",".join(texts).split(",") if texts else ():
        name, value = _pair(text, OBJECTIVES, "--slo")
        try:
            seconds[name] = parse_duration(value)
        except ValueError as error:
            raise click.BadParameter(f"{text!r}: {error}", param_hint="--slo") from error
        if not seconds[name]:
            raise click.BadParameter(f"{text!r}: must be above 0", param_hint="--slo")
    return seconds


def _margins(texts: Sequence[str], before: Margins) -> Margins:
    """Return the margins with those that were given, as a number or in per cent."""
    for text in texts:
        name, value = _pair(text, tuple(MARGINS), "--margin")
        try:
            number = float(value.removesuffix("%")) / (100.0 if value.endswith("%") else 1.0)
        except ValueError as error:
            raise click.BadParameter(f"{text!r}: is not a number", param_hint="--margin") from error
        if not 0.0 <= number < float("inf"):
            raise click.BadParameter(f"{text!r}: must be at least 0", param_hint="--margin")
        before = replace(before, **{MARGINS[name]: number})
    return before


def _read_workload(asked: _Asked) -> Workload:
    try:
        workload = load_workload(asked.workload, cold_start_s=asked.profile.cold_start_s)
        return workload if asked.hours is None else workload.first(asked.hours * 3600.0)
    except AutoscalerError as error:
        raise click.BadParameter(str(error), param_hint="WORKLOAD") from error


def _setting(asked: _Asked, seconds: Mapping[str, float]) -> dict[str, object]:
    """Return what was simulated, as plain data; of files their names, since folders differ between machines."""
    return {
        "workload": _FOLDERS.sub("", asked.workload),
        "profile": asked.profile.name,
        "seeds": list(range(asked.seed, asked.seed + asked.seeds)),
        "hours": asked.hours,
        "scale": asked.scale,
        "replicas": asked.replicas,
        "slo": dict(seconds),
        "faults": asked.faults,
        "routing": asked.routing,
    }


# -- running ---------------------------------------------------------------------------------------------------------


def _run_all(cases: Sequence[Case], asked: _Asked) -> list[Ran]:
    """Return what came of the cases, in their order, with a progress bar on a terminal."""
    order = {(case.label, case.seed): number for number, case in enumerate(cases)}
    with contextlib.ExitStack() as stack:
        if sys.stderr.isatty():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autoscaler-")))
            cases = [replace(case, meter=folder / str(number)) for number, case in enumerate(cases)]
            stack.enter_context(_progress(folder, len(cases)))
        ran = list(run_cases(cases, jobs=asked.jobs, backend=asked.backend))
    return sorted(ran, key=lambda one: order[one.scored.policy, one.scored.seed])


@contextlib.contextmanager
def _progress(folder: Path, total: int) -> Iterator[None]:
    """Show how much of the runs is done, by what they write into the folder."""
    columns = (TextColumn("simulating"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    over = threading.Event()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=float(total))

        def follow() -> None:
            while not over.wait(0.3):
                progress.update(task, completed=sum(_read_share(path) for path in folder.iterdir()))

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield
        finally:
            over.set()
            follower.join()


def _read_share(path: Path) -> float:
    try:
        return float(path.read_text() or 0.0)
    except (OSError, ValueError):  # being written
        return 0.0


# -- showing ---------------------------------------------------------------------------------------------------------


def _facts(asked: _Asked, source: Workload, policies: Mapping[str, Policy]) -> list[tuple[str, str]]:
    seeds = f"{asked.seed}" if asked.seeds == 1 else f"{asked.seed} to {asked.seed + asked.seeds - 1}"
    facts = [
        ("workload", source.text + (f", × {asked.scale:g}" if asked.scale != 1.0 else "")),
        ("simulated", f"{source.duration_s / 3600.0:.3g} h"),
        ("replicas of", f"{asked.profile.name} ({asked.profile.gpus} GPU{'s' if asked.profile.gpus > 1 else ''})"),
        ("seed" if asked.seeds == 1 else "seeds", seeds),
    ]
    if asked.faults != "none":
        facts.append(("faults", asked.faults))
    objectives = {_judged_by(policy) for policy in policies.values()}
    if len(objectives) == 1:
        ttft_s, itl_s = objectives.pop()
        facts.append(("objectives", f"{ttft_s:g} s to the first token, then {itl_s * 1e3:g} ms a token"))
    else:
        facts.append(("objectives", "each policy's own, which differ: --slo judges all alike"))
    return facts


def _judged_by(policy: Policy) -> tuple[float, float]:
    ttft, itl = policy.slo.ttft, policy.slo.itl
    return ttft.seconds if ttft is not None else 2.0, itl.seconds if itl is not None else 0.1


def _show(
    console: Console,
    asked: _Asked,
    source: Workload,
    policies: Mapping[str, Policy],
    runs: Sequence[Scored],
    price: float | None,
) -> None:
    if asked.as_json:
        click.echo(json.dumps({"runs": [one.to_document() for one in runs], "price_per_gpu_hour": price}, indent=2))
        return
    for name, value in _facts(asked, source, policies):
        console.print(f"[dim]{name}[/] {value}", highlight=False)
    console.print()
    console.print(fitting(console, *table(runs, price)))
    console.print("\n[dim]Simulated, not measured on GPUs.[/]")


def fitting(console: Console, headings: Cells, rows: Sequence[Cells]) -> Table:
    """Return the table with a line for each row, or for each heading where those would be too wide."""
    wide = _plain_table(headings, rows)
    if Measurement.get(console, console.options.update(max_width=10_000), wide).maximum <= console.width:
        return wide
    first, *others = zip(headings, *rows, strict=True)
    return _plain_table(first, others)


def _plain_table(headings: Cells, rows: Sequence[Cells]) -> Table:
    shown = Table(box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        shown.add_column(heading, no_wrap=True, justify="right" if number else "left")
    for row in rows:
        shown.add_row(*row)
    return shown


def _report(
    console: Console,
    asked: _Asked,
    source: Workload,
    policies: Mapping[str, Policy],
    ran: Sequence[Ran],
    price: float | None,
) -> None:
    if asked.no_report:
        return
    ttft_s, tpot_s = _judged_by(next(iter(policies.values())))
    heading = Heading(
        title=f"{', '.join(policies)} on {source.name}",
        facts=_facts(asked, source, policies),
        note=f"autoscaler {__version__}. Simulated, not measured on GPUs.",
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        price=price,
    )
    details = [one.detail for one in ran if one.detail is not None]
    try:
        write_comparison(asked.report, [one.scored for one in ran], details, heading)
    except AutoscalerError as error:
        if asked.report_asked:
            raise
        click.echo(f"no report: {error}", err=True)
        return
    if not asked.as_json:
        console.print(f"report [bold]{asked.report}[/]", soft_wrap=True)


def _judged(verdicts: Sequence[Verdict], asked: _Asked) -> int:
    """Show what got worse than the baseline allows. Returns 1 when anything did."""
    worse = [one for one in verdicts if one.worse]
    console = Console(stderr=asked.as_json, width=None if sys.stdout.isatty() else 160)
    if not worse:
        policies = len({one.policy for one in verdicts})
        console.print(
            f"[green]gate passed[/]: {policies} {'policy' if policies == 1 else 'policies'} against {asked.gate}"
        )
        return 0
    shown = Table(box=None, pad_edge=False, title=f"[red]worse than {asked.gate} allows[/]", title_justify="left")
    for heading in ("policy", "figure", "baseline", "limit", "now"):
        shown.add_column(heading, no_wrap=True, justify="left" if heading in ("policy", "figure") else "right")
    for one in worse:
        form = ".3%" if one.figure == "attainment" else ".2f"
        shown.add_row(one.policy, one.figure, *(format(value, form) for value in (one.before, one.limit, one.now)))
    console.print(shown)
    return 1
