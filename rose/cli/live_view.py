"""What a run looks like in a terminal while it goes, and the summary that stays when it is done.

Invariants
- The screen is drawn at a calm pace from the newest snapshot alone; clocks run on between snapshots.
- Without a terminal there is one short line per step and per evaluation, and nothing is drawn over.
- The view never ends a run: an output that cannot be written to any more is given up quietly.
- Whatever way the process is left, the terminal has its cursor again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, cast

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from rose.cli.frame import printable, render_frame
from rose.cli.terminal import SHOW_CURSOR, EnduringOutput
from rose.processes import at_forced_exit
from rose.report.model import Evaluation, RunReport, Step
from rose.report.words import duration, evaluation_words, percent, seconds, summary_lines, tiny
from rose.waits import Wait

REFRESHES_PER_S = 4


@dataclass(frozen=True, slots=True)
class PartLine:
    """One part of the run: `state` is one word, `detail` a few."""

    name: str
    state: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RunView:
    """All that the view shows, as of one moment. `step` counts finished training steps.

    `elapsed_s` and `eta_s` are as of that moment; the view lets them run on until the next. `gap` is what the
    engines generated and no account holds yet: tokens on their way while the run goes, a fault at its end.
    """

    run_id: str
    name: str
    phase: str
    step: int
    steps_total: int
    version: int
    elapsed_s: float
    eta_s: float | None = None
    success_history: tuple[float, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    last_step: Step | None = None
    parts: tuple[PartLine, ...] = ()
    waits: tuple[Wait, ...] = ()
    accounts: Mapping[str, int] = field(default_factory=dict)
    generated: int = 0
    gap: int = 0
    alarms: tuple[str, ...] = ()
    outcome: Literal["", "finished", "stopped"] = ""


class LiveView:
    """Shows a run until it is left; `update` may be called from any thread and as often as one likes.

    >>> with LiveView(plain=False) as view:
    ...     view.update(snapshot)
    ...     view.finish(report, out_dir)
    """

    def __init__(
        self, console: Console | None = None, *, plain: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self._console = console or Console()
        self._console.file = cast("IO[str]", EnduringOutput(self._console.file))
        self._ways_out = ExitStack()
        self._clock = clock
        self._newest: tuple[RunView, float] | None = None  # with its time; one object, since the screen has a thread
        self._lines = _PlainLines()
        terminal = self._console
        drawable = terminal.is_terminal and not terminal.is_dumb_terminal and terminal.encoding.startswith("utf")
        self.plain = plain or not drawable
        self._live = None if self.plain else self._new_live()

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._ways_out.enter_context(at_forced_exit(self._show_cursor))
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def update(self, view: RunView) -> None:
        """Show this from now on."""
        self._newest = view, self._clock()
        if self._live is None:
            self._print(self._lines.news(view))

    def finish(self, report: RunReport, out_dir: Path | None) -> None:
        """Leave the last view on the screen and print what came of the run below it."""
        self._stop()
        self._print(["", *summary_lines(report, out_dir)])

    def render(self) -> RenderableType:
        """The view of this moment, as high as the terminal allows."""
        if self._newest is None:
            return Text("starting ...", style="dim")
        view, updated_s = self._newest
        now_s = self._clock()
        return render_frame(view, now_s, now_s - updated_s, self._console.width, self._console.height)

    def _new_live(self) -> Live:
        return Live(
            console=self._console,
            get_renderable=self.render,
            refresh_per_second=REFRESHES_PER_S,
            vertical_overflow="crop",
        )

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._ways_out.close()

    def _show_cursor(self) -> None:
        """Past the console, whose lock the thread that draws may hold."""
        with suppress(OSError):
            os.write(self._console.file.fileno(), SHOW_CURSOR)

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._console.print(Text(printable(line)), soft_wrap=True)


@dataclass(slots=True)
class _PlainLines:
    """What was said already, so that every phase, step, evaluation and alarm is said once."""

    phases: set[str] = field(default_factory=set)
    step: int = 0
    evaluations: int = 0
    alarms: int = 0

    def news(self, view: RunView) -> list[str]:
        lines = []
        if view.phase not in self.phases:
            self.phases.add(view.phase)
            lines.append(view.phase)
        for evaluation in view.evaluations[self.evaluations :]:
            lines.append(f"evaluation after step {evaluation.step}: {evaluation_words(evaluation)}")
        self.evaluations = len(view.evaluations)
        if view.last_step is not None and view.last_step.step > self.step:
            self.step = view.last_step.step
            lines.append(_plain_step(view.last_step, view.steps_total))
        lines.extend(f"alarm: {alarm}" for alarm in view.alarms[self.alarms :])
        self.alarms = len(view.alarms)
        return [f"{duration(view.elapsed_s):>5}  {line}" for line in lines]


def _plain_step(step: Step, steps_total: int) -> str:
    line = f"step {step.step}/{steps_total}  v{step.version}  success {percent(step.success)}"
    line += f"  rollout {seconds(step.rollout_s)}  train {seconds(step.train_s)}"
    return line if step.parity_max is None else f"{line}  parity {tiny(step.parity_max)}"
