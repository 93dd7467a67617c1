"""What a run looks like in a terminal: fits, says everything that matters, shows outside text as text."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rose.cli.frame import render_frame, sparkline
from rose.cli.live_view import LiveView, PartLine, RunView
from rose.processes import INTERRUPTED_STATUS
from rose.report.model import Alarm, Evaluation, LedgerSummary, RunReport, Step
from rose.report.words import duration, percent, tiny
from rose.waits import Wait

NOW_S = 1_000.0


def step_of(number: int) -> Step:
    return Step(
        step=number,
        version=number + 1,
        success=0.49,
        reward_mean=0.4,
        turns_mean=5.0,
        malformed_fraction=0.021,
        groups_used=12,
        groups_zero_variance=4,
        outcomes={"completed": 128},
        output_tokens=2801,
        context_tokens=29_000,
        trained_tokens=2500,
        rollout_s=3.14,
        train_s=1.9,
        publish_s=0.05,
        apply_s=0.21,
        pause_ms=92.0,
        parity_max=1.2e-5,
        logprob_mismatch_max=0.02,
        loss=0.1,
        entropy=0.3,
        grad_norm=0.9,
        clip_fraction=0.01,
        learning_rate=2e-4,
        changed_fraction=0.44,
        update_bytes=98_900,
        model_bytes=989_000,
    )


def evaluation_of(step: int, success: float) -> Evaluation:
    return Evaluation(
        step=step,
        version=step,
        episodes=512,
        success=success,
        reward_mean=success,
        malformed_fraction=0.02,
        turns_mean=5.0,
        wall_s=5.0,
    )


START = RunView("0801-1203-k3f9", "frozen-lake", "starting", 0, 12, 0, 0.0)
FULL = RunView(
    run_id="0801-1203-k3f9",
    name="frozen-lake",
    phase="Rolling out 128 trajectories",
    step=7,
    steps_total=12,
    version=8,
    elapsed_s=133.0,
    eta_s=65.0,
    success_history=(0.11, 0.13, 0.2, 0.26, 0.33, 0.4, 0.49),
    evaluations=(evaluation_of(0, 0.11), evaluation_of(6, 0.52)),
    last_step=step_of(7),
    parts=tuple(PartLine(f"part-{index}", "ready", "a detail " * 12) for index in range(9)),
    waits=tuple(Wait(f"answer {index} " * 8, "engine-0", NOW_S - 2, NOW_S + 58) for index in range(9)),
    accounts={
        "trained": 12_345_678,
        "stale": 1,
        "zero-variance": 2_345_678,
        "truncated": 12_345,
        "environment-failed": 1_234,
        "aborted": 1_234,
        "unreceived": 1_234,
        "evaluation": 34_567_890,
        "in-flight": 12_345,
    },
    generated=51_234_567,
    gap=12,
    alarms=("v5: 62 % of actions malformed " * 4, "b", "c"),
)


def drawn(view: RunView, width: int, height: int, since_s: float = 0.0) -> list[str]:
    console = Console(width=width, height=height, force_terminal=True, record=True, file=io.StringIO())
    console.print(render_frame(view, NOW_S, since_s, width, height))
    return console.export_text().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 50), (60, 24), (200, 60)])
@pytest.mark.parametrize("view", [START, FULL, replace(FULL, outcome="stopped", gap=5)])
def test_no_line_is_wider_than_the_terminal(view: RunView, width: int, height: int) -> None:
    assert max(len(line) for line in drawn(view, width, height)) <= width


def test_all_of_a_busy_run_fits_80_by_24() -> None:
    lines = drawn(FULL, 80, 24)
    text = "\n".join(lines)
    assert len(lines) < 24
    for word in ("frozen-lake", "Phase", "Alarms", "Success", "Last step", "Tokens", "Parts", "Waiting", "in-flight"):
        assert word in text
    assert "and 5 more" in text
    assert "and 7 more" in text


def test_sections_are_set_apart_where_there_is_room() -> None:
    assert "" in [line.strip() for line in drawn(FULL, 120, 50)]
    assert "" not in [line.strip() for line in drawn(FULL, 80, 24)]


def test_what_is_said() -> None:
    text = "\n".join(drawn(replace(FULL, waits=(Wait("tokens", "engine-0", NOW_S - 2, NOW_S + 58),)), 120, 50))
    assert "step 7 of 12, weights v8" in text
    assert "11 % (8.6 % to 14 %) of 512 episodes, held out, after step 0" in text
    assert "rollout 3.1 s, train 1.9 s, publish 0.05 s, apply 0.21 s (pause 92 ms)" in text
    assert "parity 1.2e-5" in text
    assert "51,234,567 generated, 12 on their way" in text
    assert "2 of 60 s: tokens from engine-0" in text


def test_clocks_run_on_between_snapshots_and_stand_still_at_the_end() -> None:
    assert "2:18, about 1:00 left" in drawn(FULL, 80, 24, since_s=5.0)[0]
    assert "about 0:00 left" in drawn(FULL, 80, 24, since_s=500.0)[0]
    assert "finished after 2:13" in drawn(replace(FULL, outcome="finished"), 80, 24, since_s=5.0)[0]


def test_a_gap_at_the_end_is_called_one() -> None:
    assert "12 in no account" in "\n".join(drawn(replace(FULL, outcome="finished"), 80, 24))


def test_text_from_outside_is_shown_as_text() -> None:
    evil = "\x1b[2J[red]x[/red]\n\r\x07[/]"
    view = replace(
        FULL,
        run_id=evil,
        name=evil,
        phase=evil,
        parts=(PartLine(evil, evil, evil),),
        waits=(Wait(evil, evil, NOW_S, NOW_S + 1),),
        alarms=(evil,),
    )
    console = Console(width=120, height=50, force_terminal=True, file=(out := io.StringIO()), color_system=None)
    console.print(render_frame(view, NOW_S, 0.0, 120, 50))
    assert "[red]x[/red]" in out.getvalue()
    assert not {"\x1b", "\x07", "\r"} & set(out.getvalue())


def test_sparkline_has_a_fixed_scale() -> None:
    assert sparkline([0.0, 0.5, 1.0, -1.0, 2.0]) == "▁▅█▁█"


def plain_console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=80), out


def test_one_plain_line_per_step_without_a_terminal() -> None:
    console, out = plain_console()
    with LiveView(console) as view:
        assert view.plain
        view.update(START)
        view.update(replace(START, phase="rollout", elapsed_s=3.0, evaluations=(evaluation_of(0, 0.11),)))
        for number in (1, 1, 2):
            view.update(
                replace(START, phase="rollout", elapsed_s=60.0, step=number, last_step=step_of(number),
                        evaluations=(evaluation_of(0, 0.11),), alarms=("too many",) if number == 2 else ())
            )  # fmt: skip
    assert out.getvalue().splitlines() == [
        " 0:00  starting",
        " 0:03  rollout",
        " 0:03  evaluation after step 0: 11 % (8.6 % to 14 %) of 512 episodes",
        " 1:00  step 1/12  v2  success 49 %  rollout 3.1 s  train 1.9 s  parity 1.2e-5",
        " 1:00  step 2/12  v3  success 49 %  rollout 3.1 s  train 1.9 s  parity 1.2e-5",
        " 1:00  alarm: too many",
    ]
    assert all(line.isascii() and len(line) <= 80 for line in out.getvalue().splitlines())


def test_plain_can_be_asked_for_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    assert LiveView(console, plain=True).plain


def test_the_last_view_stays_and_the_summary_follows() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, height=30, force_terminal=True, color_system=None)
    with LiveView(console, clock=lambda: NOW_S) as view:
        assert not view.plain
        view.update(FULL)
        view.update(replace(FULL, outcome="finished", gap=0, phase="done"))
        view.finish(report(), Path("runs/r"))
    text = out.getvalue()
    assert text.index("finished after 2:13") < text.index("frozen-lake finished after 3:42")
    assert text.rstrip().endswith("runs/r/report.html")


def report() -> RunReport:
    return RunReport(
        run_id="r",
        name="frozen-lake",
        started_at="2026-08-01T12:00:00+00:00",
        wall_s=222.0,
        outcome="finished",
        evaluations=(evaluation_of(0, 0.11), evaluation_of(12, 0.52)),
        steps=(step_of(1),),
        ledger=LedgerSummary(accounts={"trained": 10}, generated=10),
        versions_published=13,
        alarms=(Alarm(version=5, what="too many malformed"),),
    )


def test_summary() -> None:
    console, out = plain_console()
    with LiveView(console) as view:
        view.finish(report(), Path("runs/r"))
    assert out.getvalue().splitlines() == [
        "",
        "frozen-lake finished after 3:42",
        "  before     11 % (8.6 % to 14 %) of 512 episodes",
        "  after      52 % (48 % to 56 %) of 512 episodes",
        "  gain       +41.0 points",
        "  weights    13 versions published, parity 1.2e-5, limit 1e-4",
        "  tokens     10 generated, all accounted for",
        "  alarm      too many malformed",
        "  report     runs/r/report.html",
    ]


class FullDisk(io.StringIO):
    """An output that takes nothing more."""

    writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("drawn", [False, True])
def test_an_output_that_cannot_be_written_to_is_given_up(drawn: bool) -> None:
    out = FullDisk()
    with LiveView(Console(file=out, force_terminal=drawn)) as view:
        assert view.plain is not drawn
        view.update(START)
        view.update(replace(START, phase="rollout"))
        view.finish(report(), Path("runs/r"))
    assert out.writes == 1


PIPED_RUN = """
import sys, threading
from rich.console import Console
from rose.cli import live_view
from rose.cli.live_view import LiveView, RunView

live_view.REFRESHES_PER_S = 1000
with LiveView(Console(force_terminal=sys.argv[1] == "drawn")) as view:
    for step in range(3):
        view.update(RunView("r", "n", f"phase {step}", step, 3, 0, 0.0))
        if step == 0:
            sys.stdin.readline()  # the reader has gone
    alive = [one for one in threading.enumerate() if type(one).__name__ == "_RefreshThread"]
    assert len(alive) == (sys.argv[1] == "drawn")
print("the end", file=sys.stderr)
"""


@pytest.mark.parametrize("how", ["plain", "drawn"])
def test_a_reader_that_closed_its_pipe_does_not_end_the_run(how: str) -> None:
    piped = subprocess.PIPE
    child = subprocess.Popen([sys.executable, "-c", PIPED_RUN, how], stdin=piped, stdout=piped, stderr=piped)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    assert child.stdout.read(1)
    child.stdout.close()
    child.stdin.write(b"\n")
    child.stdin.close()
    with child.stderr:
        assert child.stderr.read().decode().splitlines() == ["the end"]
    assert child.wait(20) == 0


def test_letters_that_the_output_cannot_say_are_spelled() -> None:
    raw = io.BytesIO()
    with LiveView(Console(file=io.TextIOWrapper(raw, encoding="ascii")), plain=True) as view:
        view.update(replace(START, phase="caf\u00e9"))
    assert b"caf\\xe9" in raw.getvalue()


TWICE_STOPPED = """
import os, signal, sys
from rich.console import Console
from rose.cli.live_view import LiveView
from rose.processes import two_stage_stop

with LiveView(Console(force_terminal=True)), two_stage_stop(lambda: None, lambda: None):
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
"""


def test_a_second_ctrl_c_leaves_the_terminal_with_its_cursor() -> None:
    ended = subprocess.run([sys.executable, "-c", TWICE_STOPPED], capture_output=True, timeout=20)
    assert ended.returncode == INTERRUPTED_STATUS
    assert b"\x1b[?25l" in ended.stdout
    assert ended.stdout.rindex(b"\x1b[?25h") > ended.stdout.rindex(b"\x1b[?25l")


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0:00"), (65, "1:05"), (3599.9, "59:59"), (3600, "1:00:00"), (3665, "1:01:05")]
)
def test_duration(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_percent_and_tiny() -> None:
    assert [percent(value) for value in (0.0, 0.004, 0.0949, 0.095, 0.5176, 1.0)] == [
        "0 %", "0.4 %", "9.5 %", "10 %", "52 %", "100 %",
    ]  # fmt: skip
    assert [tiny(value) for value in (1.74e-5, 1e-4, 0.0, 123.0)] == ["1.7e-5", "1e-4", "0", "1.2e2"]
