"""`autoscaler simulate --calibrate`: a recording of the live daemon becomes a profile and a workload."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click

from autoscaler.core.types import Snapshot
from autoscaler.errors import AutoscalerError
from autoscaler.sim.calibrate import Calibration, calibrate, profile_text, to_profile, traffic_text
from autoscaler.sim.profile import Profile
from autoscaler.trace import TickLine, read_trace


def calibrate_to(trace: Path, like: Profile, stream: str | None, output: Path | None, budget: int | None) -> int:
    """Write the profile and, beside it, the traffic as a CSV; say what was found. Returns the exit code.

    Args:
        like: gives what no recording says.
        stream: the recorded policy whose ticks count; None where there is only one.
        output: of the profile; by default the recording's name in this folder.
        budget: `max_num_batched_tokens` of the engines; None for `like`'s.
    """
    target = output or Path(f"{trace.name.partition('.')[0]}.yaml")
    if target.suffix not in (".yaml", ".yml"):
        raise click.BadParameter(f"{target}: a profile's file ends in .yaml", param_hint="--output")
    curve = target.with_suffix(".csv")
    found = calibrate(_snapshots(trace, stream))
    try:
        like = like if budget is None else replace(like, max_num_batched_tokens=budget)
        profile = to_profile(found, like, target.stem)
    except ValueError as error:
        raise AutoscalerError(f"{trace}: {error}: give the engines' --token-budget") from error
    for path, text in ((target, profile_text(profile, found, trace.name)), (curve, traffic_text(found))):
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise AutoscalerError(f"cannot write {path}: {error.strerror}") from error
    _tell(found, like, target, curve)
    return 0


def _snapshots(trace: Path, stream: str | None) -> Iterator[Snapshot]:
    """Yield the ticks of one policy. Raises AutoscalerError, when it is not clear which."""
    names: set[str] = set()
    with read_trace(trace, decisions=False) as reader:
        for line in reader:
            if not isinstance(line, TickLine):
                continue
            names.add(line.policy)
            if stream is None and len(names) > 1:
                raise AutoscalerError(
                    f"{trace} holds several policies: choose one by --stream ({', '.join(sorted(names))}, ...)"
                )
            if stream in (None, line.policy):
                yield line.snapshot
    if stream is not None and stream not in names:
        raise AutoscalerError(f"{trace} holds no policy {stream} (it holds {', '.join(sorted(names)) or 'none'})")


def _tell(found: Calibration, like: Profile, target: Path, curve: Path) -> None:
    line, starts = found.line, found.starts
    click.echo(
        f"step time   {line.c0 * 1e3:.2f} ms + {line.cp * 1e6:.1f} us a prefill token "
        f"+ {line.cb * 1e6:.1f} us a sequence + {line.ck * 1e9:.1f} ns a resident token; "
        f"{found.rows} readings, mean error {found.mape:.1%}"
    )
    if starts is None:
        click.echo(f"cold start  none in the recording: {like.cold_start_s:g} s, as {like.name} has it")
    else:
        click.echo(
            f"cold start  {starts.median_s:.0f} s, the median of {starts.count}; "
            f"standard deviation of the logarithm {starts.sigma:.2f}"
        )
    hours = sum(1 for _ in found.traffic) / 60.0
    peak = max((span.rps for span in found.traffic), default=0.0)
    click.echo(
        f"traffic     {hours:.2g} h, at most {peak:.2f} requests/s in a minute, prompts of {found.prompt:.0f} tokens"
    )
    cards = f"{like.gpus} GPU{'s' if like.gpus > 1 else ''} a replica"
    click.echo(f"not in it   {cards}, {like.max_num_batched_tokens} tokens an iteration, from {like.name}")
    click.echo(f"\nautoscaler simulate {curve} --profile {target} --policy FILE")
