"""The page in a real browser: it draws every chart, complains about nothing, and runs nothing from a transcript."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rose.report.html import render_html
from rose.report.model import Message, RunReport

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--dump-dom",
]
TIMEOUT_S = 60
pytestmark = pytest.mark.skipif(
    not CHROMIUM, reason="chromium is not installed: the page is not looked at in a browser"
)


def visit(page: str, folder: Path) -> tuple[str, list[str]]:
    """The document after its scripts have run, and what the console said."""
    file = folder / "report.html"
    file.write_text(page, encoding="utf-8")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_every_chart_is_drawn_without_a_complaint(full_report: RunReport, tmp_path: Path) -> None:
    page = render_html(full_report)
    dom, console = visit(page, tmp_path)
    assert console == []
    assert len(re.findall(r'class="uplot', dom)) == page.count('class="plot"') > 8


def test_a_co_served_run_is_drawn_whole(coserving_report: RunReport, tmp_path: Path) -> None:
    page = render_html(coserving_report)
    dom, console = visit(page, tmp_path)
    assert console == []
    assert len(re.findall(r'class="uplot', dom)) == page.count('class="plot"') > 15


def test_nothing_from_a_transcript_runs(full_report: RunReport, tmp_path: Path) -> None:
    attack = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    sample = full_report.samples[0].model_copy(update={"transcript": (Message(role=attack, text=attack),)})
    page = render_html(full_report.model_copy(update={"samples": (sample,), "name": attack}))
    dom, console = visit(page, tmp_path)
    assert console == []
    assert "<title>owned" not in dom
    assert 'class="uplot' in dom


def test_a_script_that_is_not_ours_would_be_refused(full_report: RunReport, tmp_path: Path) -> None:
    page = render_html(full_report).replace("</main>", "</main><script>document.title='owned'</script>")
    dom, console = visit(page, tmp_path)
    assert "<title>owned" not in dom
    assert any("Content Security Policy" in line for line in console)
