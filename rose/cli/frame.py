"""One picture of a run for a terminal.

Invariants
- No line is ever wider than the terminal: lists are cut and say how many they left out. At 80 x 24 nothing is lost.
- What changes in size stands at the bottom, so nothing above it jumps.
- Text from outside (names, causes, environments) is shown as text: no markup, no control characters.
- A state is told by a word as well as by its colour.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rose.report.words import duration, evaluation_words, percent, seconds, tiny

if TYPE_CHECKING:
    from rose.cli.live_view import RunView

BARS = "▁▂▃▄▅▆▇█"
SHOWN_PARTS = 4
SHOWN_WAITS = 2
SHOWN_ALARMS = 2
STATE_STYLES = {
    "ready": "green",
    "running": "green",
    "done": "green",
    "starting": "yellow",
    "stopping": "yellow",
    "dead": "bold red",
    "failed": "bold red",
}

Section = list[tuple[str, RenderableType]]


def render_frame(view: RunView, now_s: float, since_s: float, width: int, height: int) -> RenderableType:
    """The picture `since_s` after the snapshot was taken; `now_s` is the wall clock that waits are told by."""
    sections = [
        _progress(view, width),
        _alarms(view),
        _success(view, width),
        _last_step(view),
        _tokens(view, width),
        _parts(view),
        _waits(view, now_s),
    ]
    sections = [section for section in sections if section]
    spaced = sum(len(section) for section in sections) + len(sections) + 1 < height
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(width=9, no_wrap=True, style="dim")
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for index, section in enumerate(sections):
        if spaced and index:
            grid.add_row("", "")
        for label, content in section:
            grid.add_row(label, content)
    return Group(_title(view, since_s, width), grid)


def _title(view: RunView, since_s: float, width: int) -> RenderableType:
    running = 0.0 if view.outcome else since_s
    clock = duration(view.elapsed_s + running)
    if view.outcome:
        clock = f"{view.outcome} after {clock}"
    elif view.eta_s is not None:
        clock = f"{clock}, about {duration(max(0.0, view.eta_s - running))} left"
    title = Text(f"ROSE  {printable(view.name)}  {printable(view.run_id)}", style="bold", no_wrap=True)
    title.truncate(max(8, width - len(clock) - 8), overflow="ellipsis")
    return Rule(Text.assemble(title, ("  ", ""), (clock, "dim")), align="left", style="dim", characters="─")


def _progress(view: RunView, width: int) -> Section:
    counts = f"step {view.step} of {view.steps_total}, weights v{view.version}"
    bar = ProgressBar(total=max(1, view.steps_total), completed=view.step, width=max(10, min(40, width - 48)))
    row = Table.grid(padding=(0, 2))
    row.add_column(no_wrap=True, overflow="ellipsis")
    row.add_column()
    row.add_row(_text(counts), bar)
    return [("Phase", _text(view.phase, "bold")), ("", row)]


def _success(view: RunView, width: int) -> Section:
    rows: Section = []
    if view.success_history:
        shown = view.success_history[-max(8, width - 32) :]
        line = Text.assemble((sparkline(shown), "cyan"), f" {percent(shown[-1])} in training")
        rows.append(("Success", line))
    for evaluation in view.evaluations[:1] + view.evaluations[1:][-1:]:
        words = f"{evaluation_words(evaluation)}, held out, after step {evaluation.step}"
        rows.append(("" if rows else "Success", _text(words)))
    return rows


def _last_step(view: RunView) -> Section:
    step = view.last_step
    if step is None:
        return []
    times = f"rollout {seconds(step.rollout_s)}, train {seconds(step.train_s)}, publish {seconds(step.publish_s)}"
    times += f", apply {seconds(step.apply_s)} (pause {_number(step.pause_ms, '.0f')} ms)"
    facts = f"{step.output_tokens:,} tokens, {percent(step.malformed_fraction)} malformed"
    if step.changed_fraction is not None:
        facts += f", {percent(step.changed_fraction)} of weights changed"
    if step.parity_max is not None:
        facts += f", parity {tiny(step.parity_max)}"
    return [("Last step", _text(times)), ("", _text(facts))]


def _parts(view: RunView) -> Section:
    rows: Section = []
    for part in view.parts[:SHOWN_PARTS]:
        state = (f"{printable(part.state):<10} ", STATE_STYLES.get(part.state, ""))
        line = Text.assemble(f"{printable(part.name):<14} ", state, (printable(part.detail), "dim"))
        rows.append(("" if rows else "Parts", line))
    return rows + _more(len(view.parts) - SHOWN_PARTS)


def _waits(view: RunView, now_s: float) -> Section:
    rows: Section = []
    for wait in view.waits[:SHOWN_WAITS]:
        waited = f"{max(0.0, now_s - wait.since_s):.0f} of {wait.deadline_s - wait.since_s:.0f} s"
        rows.append(("" if rows else "Waiting", _text(f"{waited}: {wait.what} from {wait.whom}")))
    return rows + _more(len(view.waits) - SHOWN_WAITS)


def _tokens(view: RunView, width: int) -> Section:
    label = "in no account" if view.outcome else "on their way"
    total = Text(f"{view.generated:,} generated, {view.gap:,} {label}")
    if view.outcome and view.gap:
        total.stylize("bold red")
    words = [f"{name} {count:,}" for name, count in view.accounts.items() if count]
    return [("Tokens", total), *(("", _text(line, "dim")) for line in _fill(words, width - 11))]


def _alarms(view: RunView) -> Section:
    rows: Section = []
    for alarm in view.alarms[-SHOWN_ALARMS:]:
        rows.append(("" if rows else "Alarms", _text(f"! {alarm}", "bold yellow")))
    return rows + _more(len(view.alarms) - SHOWN_ALARMS)


def _more(count: int) -> Section:
    return [("", Text(f"and {count} more", style="dim"))] if count > 0 else []


def _fill(words: Iterable[str], width: int) -> list[str]:
    """Words joined by commas into as few lines of `width` cells as possible."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(word) + 3 <= width:
            lines[-1] += f", {word}"
        else:
            if lines:
                lines[-1] += ","
            lines.append(word)
    return lines


def sparkline(values: Iterable[float]) -> str:
    """One bar per fraction, on a scale that always runs from 0 to 1."""
    top = len(BARS) - 1
    return "".join(BARS[round(min(1.0, max(0.0, value)) * top)] for value in values)


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _text(words: str, style: str = "") -> Text:
    return Text(printable(words), style=style)


def printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)
