"""`autoscaler replay`: a recording's decisions, made anew."""

import json
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from autoscaler.core.plain import to_plain
from autoscaler.core.policy import Policy
from autoscaler.core.types import Decision, Hold, RollOut, SetBatching
from autoscaler.errors import AutoscalerError, PolicyError
from autoscaler.policy_file import load_policies, policy_from_plain
from autoscaler.replay import Replayed, Replayer, Summary, choose_policy, differs, first_difference
from autoscaler.schedule import Calendar
from autoscaler.trace import MemoryLine, PolicyLine, TickLine, TraceReader, read_trace

MAX_ROWS = 200
MAX_DIFFERENCES = 20


@click.command("replay")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--policy", "policy_file", type=click.Path(path_type=Path), help="Decide by it, not by the recorded one.")
@click.option("--against", type=click.Path(path_type=Path), help="A second policy; show where the two part.")
@click.option("--verify", is_flag=True, help="Exit 1 unless every recorded decision comes out bit-equal.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a tick, then the summary.")
@click.option("--all", "every", is_flag=True, help="Show every tick, not only those that act.")
@click.option("--strict", is_flag=True, help="Exit 1 when deciding raised on any tick.")
def command(
    trace: Path,
    policy_file: Path | None,
    against: Path | None,
    verify: bool,
    as_json: bool,
    every: bool,
    strict: bool,
) -> int:
    """Decide the snapshots of TRACE anew and show what comes out. Needs no cluster and no clock."""
    if verify and (policy_file is not None or against is not None):
        raise click.UsageError("--verify uses the recorded policies; it goes with neither --policy nor --against")
    chosen = load_policies([policy_file]).policies if policy_file is not None else {}
    rival = load_policies([against]).policies if against is not None else {}
    with read_trace(trace, decisions=verify) as reader:
        session = Session(chosen, rival, verify=verify)
        rows = Rows(as_json=as_json, every=every)
        for line, replayed, other in session.run(_progress(reader, quiet=as_json)):
            rows.add(line, replayed, other, compared=bool(rival))
        torn = str(reader.torn) if reader.torn is not None else ""
        if not session.summaries:
            raise AutoscalerError(f"{trace}: holds no tick" + (f": {torn}" if torn else ""))
        rows.finish(session, torn)
    failed = (verify and bool(session.mismatches)) or (strict and session.errors > 0)
    return 1 if failed else 0


def _progress(reader: TraceReader, *, quiet: bool) -> Iterator[PolicyLine | MemoryLine | TickLine]:
    """Yield the recording's lines, with a progress bar on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield from reader
        return
    columns = (TextColumn("replaying"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("replaying", total=reader.size)
        for index, line in enumerate(reader):
            if index % 100 == 0:
                progress.update(task, completed=reader.position)
            yield line


class Session:
    """All streams of one recording, each by its policy and, when asked, by a second one."""

    def __init__(self, chosen: Mapping[str, Policy], rival: Mapping[str, Policy], *, verify: bool) -> None:
        self.summaries: dict[str, Summary] = {}
        self.rivals: dict[str, Summary] = {}
        self.mismatches: list[str] = []
        self.parted = 0
        self._chosen, self._rival, self.verifies = chosen, rival, verify
        self._recorded: dict[str, Policy] = {}
        self._replayers: dict[str, Replayer] = {}
        self._rival_replayers: dict[str, Replayer] = {}
        self._memories: dict[str, MemoryLine] = {}

    @property
    def errors(self) -> int:
        """Ticks on which deciding raised."""
        return sum(summary.errors for summary in (*self.summaries.values(), *self.rivals.values()))

    def run(
        self, lines: Iterator[PolicyLine | MemoryLine | TickLine]
    ) -> Iterator[tuple[TickLine, Replayed, Replayed | None]]:
        """Yield each tick decided anew, and by the second policy."""
        for line in lines:
            if isinstance(line, PolicyLine):
                if not self._chosen:
                    self._take(line)
                continue
            if isinstance(line, MemoryLine):
                self._memories[line.policy] = line
                continue
            memory = self._memories.pop(line.policy, None)
            replayer = self._replayer(line, self._replayers, self._chosen, memory)
            replayed = replayer.tick(line.snapshot, line.outcome if not self._chosen else None)
            self.summaries.setdefault(line.policy, Summary()).add(replayed)
            if self.verifies:
                self._compare(line, replayed)
            other = None
            if self._rival:
                rival = self._replayer(line, self._rival_replayers, self._rival, memory)
                other = rival.tick(line.snapshot, None)
                self.rivals.setdefault(line.policy, Summary()).add(other)
                self.parted += differs(replayed.decision, other.decision)
            yield line, replayed, other

    def _take(self, line: PolicyLine) -> None:
        """Go on by a recorded policy. Raises AutoscalerError for one that this version does not understand."""
        try:
            policy = policy_from_plain(line.plain)
        except PolicyError as error:
            raise AutoscalerError(f"the recorded policy {line.name} cannot be used; give --policy\n{error}") from error
        self._recorded[line.name] = policy
        if line.name in self._replayers:
            self._replayers[line.name].change_policy(policy)

    def _replayer(
        self, line: TickLine, known: dict[str, Replayer], policies: Mapping[str, Policy], memory: MemoryLine | None
    ) -> Replayer:
        """Return what decides the line's stream, with the memory taken in that came before the line."""
        replayer = known.get(line.policy) or self._begin(line, known, policies)
        if memory is not None:
            replayer.recall(memory.memory, memory.at)
        return replayer

    def _begin(self, line: TickLine, known: dict[str, Replayer], policies: Mapping[str, Policy]) -> Replayer:
        target = (line.snapshot.target.namespace, line.snapshot.target.name)
        policy = choose_policy(line.policy, policies, target) if policies else self._recorded.get(line.policy)
        if policy is None:
            names = ", ".join(sorted(policies)) or "none"
            raise AutoscalerError(f"no policy for the recorded {line.policy} of {'/'.join(target)} (there is: {names})")
        # The recording says what was active by the policies in it, and nothing of others.
        known[line.policy] = Replayer(policy, Calendar(policy.schedules).active if policies else None)
        return known[line.policy]

    def _compare(self, line: TickLine, replayed: Replayed) -> None:
        again = json.loads(json.dumps(to_plain(replayed.decision)))
        difference = first_difference(line.decision, again)
        if difference:
            self.mismatches.append(f"line {line.line}, {_clock(replayed.snapshot.at)}: {difference}")


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _verb(decision: Decision | None) -> str:
    if decision is None:
        return "error"
    if isinstance(decision.action, Hold):
        return "hold"
    if isinstance(decision.action, SetBatching | RollOut):
        return str(decision.action.limits)
    return f"{decision.action.seen} -> {decision.action.to}"


def _why(replayed: Replayed) -> str:
    decision = replayed.decision
    if decision is None:
        return replayed.error
    if isinstance(decision.action, SetBatching | RollOut) and decision.batching is not None:
        return f"{decision.batching.reason} ({decision.batching.detail})"
    steps = "; ".join(f"{step.rule} {step.before} -> {step.after}" for step in decision.proposal.steps)
    return f"{decision.reason}" + (f" ({steps})" if steps else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


class Rows:
    """Shows the ticks: JSON as they come, a table at the end."""

    def __init__(self, *, as_json: bool, every: bool) -> None:
        self._as_json, self._every = as_json, every
        self._rows: list[tuple[str, ...]] = []
        self._left_out = 0
        self._compared = False

    def add(self, line: TickLine, replayed: Replayed, other: Replayed | None, *, compared: bool) -> None:
        """Take in one tick."""
        self._compared = compared
        if self._as_json:
            document: dict[str, object] = {"policy": line.policy, "decision": to_plain(replayed.decision)}
            if replayed.error:
                document["error"] = replayed.error
            if other is not None:
                document["against"] = to_plain(other.decision)
            click.echo(json.dumps(document))
            return
        acts = replayed.decision is None or not isinstance(replayed.decision.action, Hold)
        if compared and other is not None:
            acts = differs(replayed.decision, other.decision)
        if not (acts or self._every):
            return
        if len(self._rows) >= MAX_ROWS and not self._every:
            self._left_out += 1
            return
        decision, target = replayed.decision, replayed.snapshot.target
        score = decision.score.value if decision is not None and decision.score is not None else None
        demand = decision.demand.value if decision is not None else None
        row = (
            _clock(replayed.snapshot.at),
            line.policy,
            f"{target.current_replicas}/{target.ready_replicas}",
            _number(score),
            _number(demand),
            _verb(decision),
            _why(replayed),
        )
        self._rows.append((*row, f"{_verb(other.decision)}: {_why(other)}") if other is not None else row)

    def finish(self, session: Session, torn: str) -> None:
        """Show the table and the summary."""
        if self._as_json:
            click.echo(json.dumps(_summaries(session)))
            if torn:
                click.echo(f"note: {torn}", err=True)
            return
        console = Console(width=None if sys.stdout.isatty() else 160)
        if self._rows:
            console.print(self._table())
        if self._left_out:
            console.print(f"and {self._left_out} more; --all shows every tick, --json gives all of them")
        for name, summary in session.summaries.items():
            console.print(_summary_text(name, summary))
        for name, summary in session.rivals.items():
            console.print(_summary_text(f"{name} (against)", summary))
        if self._compared:
            console.print(f"the two policies part on {session.parted} ticks")
        if torn:
            console.print(f"[yellow]note[/]: {torn}")
        self._verdict(console, session)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for heading in ("time (UTC)", "policy", "ordered/ready", "score", "demand", "action", "why"):
            table.add_column(heading, no_wrap=heading != "why")
        if self._compared:
            table.add_column("against")
        for row in self._rows:
            table.add_row(*row)
        return table

    @staticmethod
    def _verdict(console: Console, session: Session) -> None:
        if not session.verifies:
            return
        ticks = sum(summary.ticks for summary in session.summaries.values())
        if not session.mismatches:
            console.print(f"[green]verified[/]: {ticks} of {ticks} recorded decisions come out bit-equal")
            return
        console.print(f"[red]not equal[/]: {len(session.mismatches)} of {ticks} decisions differ")
        for mismatch in session.mismatches[:MAX_DIFFERENCES]:
            console.print(f"  {mismatch}")


def _summaries(session: Session) -> dict[str, object]:
    document: dict[str, object] = {"summary": {name: _plain(one) for name, one in session.summaries.items()}}
    if session.rivals:
        document["against"] = {name: _plain(one) for name, one in session.rivals.items()}
        document["parted"] = session.parted
    if session.verifies:
        document["verified"], document["mismatches"] = not session.mismatches, session.mismatches
    return document


def _plain(summary: Summary) -> dict[str, object]:
    return {
        "ticks": summary.ticks,
        "errors": summary.errors,
        "hours": round(summary.hours, 4),
        "ups": summary.ups,
        "downs": summary.downs,
        "reversals": summary.reversals,
        "gapped_ticks": summary.gapped,
        "replica_hours_recorded": round(summary.replica_seconds / 3600.0, 4),
        "replica_hours_wanted": round(summary.wanted_seconds / 3600.0, 4),
        "reasons": dict(sorted(summary.reasons.items(), key=lambda pair: -pair[1])),
    }


def _summary_text(name: str, summary: Summary) -> str:
    reasons = ", ".join(
        f"{reason} {count}" for reason, count in sorted(summary.reasons.items(), key=lambda pair: -pair[1])[:6]
    )
    errors = f", [red]{summary.errors} errors[/]" if summary.errors else ""
    return (
        f"[bold]{name}[/]: {summary.ticks} ticks over {summary.hours:.1f} h{errors}, {summary.ups} ups, "
        f"{summary.downs} downs, {summary.reversals} reversals, {summary.gapped} ticks with gaps\n"
        f"  replica-hours: recorded {summary.replica_seconds / 3600.0:.1f}, "
        f"wanted {summary.wanted_seconds / 3600.0:.1f} (open loop)\n  reasons: {reasons}"
    )
