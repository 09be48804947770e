"""What a demo shows while it runs: a live panel on a terminal, a line now and then elsewhere."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from autoscaler.core.policy import Policy
from autoscaler.core.types import Decision, Outcome, Part, ScaleReplicas, Snapshot

FRAMES_PER_S = 8.0
RECENT = 8
BAR = 24


class Screen:
    """Shows the run while it runs. A `ports.Report`.

    Args:
        began, duration_s: of the run, epoch seconds and seconds.
        line_s: from one line to the next, off a terminal.
        clock: how times of day are written.
        more: gives further rows of the panel, name and text.
    """

    def __init__(
        self,
        console: Console,
        policy: Policy,
        *,
        began: float,
        duration_s: float,
        line_s: float,
        clock: str = "%H:%M",
        more: Callable[[], Iterable[tuple[str, str]]] = tuple,
    ) -> None:
        self._console, self._policy = console, policy
        self._began, self._duration_s, self._line_s = began, duration_s, line_s
        self._clock_form, self._more = clock, more
        self._recent: deque[Text] = deque(maxlen=RECENT)
        self._waiting: tuple[object, ...] = ()
        self._live: Live | None = None
        self._drawn = 0.0
        self._lines = -1

    def __enter__(self) -> "Screen":
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def tick(self, policy: str, snapshot: Snapshot, decision: Decision, outcome: Outcome, duration_s: float) -> None:
        """Take note of one tick, and draw a frame when it is time."""
        if isinstance(decision.action, ScaleReplicas):
            self._act(decision, decision.action, outcome)
        now = time.monotonic()
        if self._live is None:
            self._print_line(snapshot, decision)
        elif now - self._drawn >= 1.0 / FRAMES_PER_S:
            self._drawn = now
            self._live.update(self._frame(snapshot, decision), refresh=True)

    def say(self, text: str, style: str = "magenta") -> None:
        """Show something that happened beside the decisions."""
        self._note(Text(text, style=style))

    def clock(self, at: float) -> str:
        """Return the time of day."""
        return datetime.fromtimestamp(at, UTC).strftime(self._clock_form)

    def _act(self, decision: Decision, action: ScaleReplicas, outcome: Outcome) -> None:
        """Note an action; a wish that goes on unfulfilled is noted once."""
        wish = (action.seen, action.to, outcome)
        if outcome is Outcome.APPLIED or wish != self._waiting:
            self._note(self._action_line(decision, action, outcome))
        self._waiting = wish

    def _note(self, line: Text) -> None:
        self._recent.append(line)
        if self._live is None:
            self._console.print(line)

    def _print_line(self, snapshot: Snapshot, decision: Decision) -> None:
        line = int((snapshot.at - self._began) / self._line_s)
        if line == self._lines:
            return
        self._lines = line
        score = decision.score.value if decision.score is not None else None
        target = snapshot.target
        self._console.print(
            f"{self.clock(snapshot.at)}  {target.ready_replicas} of {target.current_replicas} ready  "
            f"score {_number(score)}  demand {_number(decision.demand.value)}  {decision.reason}",
        )
        sys.stdout.flush()

    def _frame(self, snapshot: Snapshot, decision: Decision) -> RenderableType:
        target, elapsed = snapshot.target, snapshot.at - self._began
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(self.clock(snapshot.at), style="bold cyan"),
            ProgressBar(total=self._duration_s, completed=elapsed, width=BAR * 2),
            f"{100.0 * elapsed / self._duration_s:3.0f} %",
        )
        facts = Table.grid(padding=(0, 2))
        facts.add_row("replicas", _replicas(target.ready_replicas, target.current_replicas, self._policy))
        demand = decision.demand.value
        text = f"{_number(demand)} now, {_number(decision.forecast.top)} in {decision.forecast.horizon_s:.0f} s"
        facts.add_row("demand", f"{text}  (replicas; {decision.demand.binds or 'not known yet'})")
        score = decision.score
        facts.add_row("score", _bar(score.value if score else None, self._policy.scale_up.threshold, ""))
        for part in score.parts if score else ():
            facts.add_row(f"  {part.name}", _bar(part.value, self._policy.score.critical, _driver(part)))
        facts.add_row("why", Text(_why(decision), style="italic"))
        for name, more in self._more():
            facts.add_row(name, more)
        body: list[RenderableType] = [head, Text(), facts]
        if self._recent:
            body += [Text(), *self._recent]
        return Panel(Group(*body), title=f"{target.namespace}/{target.name}", border_style="dim")

    def _action_line(self, decision: Decision, action: ScaleReplicas, outcome: Outcome) -> Text:
        up = action.to > action.seen
        line = Text(f"{self.clock(decision.at)} ", style="dim")
        line.append("▲" if up else "▼", style="yellow" if up else "green")
        line.append(f" {action.seen} → {action.to}  {decision.reason}")
        parts = decision.score.parts if decision.score else ()
        detail = max(parts, key=lambda part: part.value or 0.0, default=None)
        if decision.demand.value is not None:
            line.append(f"  demand {decision.demand.value:.2f}", style="dim")
        if up and detail is not None and detail.driver:
            line.append(f"  {detail.driver}", style="dim")
        if outcome is not Outcome.APPLIED:
            line.append(f"  {outcome}", style="red")
        return line


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"


def _driver(part: Part) -> str:
    return part.driver or (str(part.gap) if part.gap else "")


def _why(decision: Decision) -> str:
    return "; ".join(decision.unblocks) or str(decision.reason)


def _replicas(ready: int, ordered: int, policy: Policy) -> Text:
    room = max(0, policy.most_replicas - max(ready, ordered))
    text = Text("█ " * min(ready, ordered), style="green")
    text.append("▒ " * max(0, ordered - ready), style="yellow")
    text.append("· " * room, style="dim")
    text.append(f" {ready} ready, {ordered} ordered")
    return text


def _bar(value: float | None, limit: float, note: str) -> Text:
    if value is None:
        return Text(f"{'unknown':<{BAR + 6}} {note}", style="dim")
    filled = round(value * BAR)
    style = "red" if value >= limit else "yellow" if value >= 0.5 else "green"
    text = Text("━" * filled, style=style)
    text.append("━" * (BAR - filled), style="grey23")
    text.append(f" {value:.2f} ")
    text.append(note, style="dim")
    return text
