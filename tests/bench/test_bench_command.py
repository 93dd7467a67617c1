"""`python -m bench`: what it takes, what it runs, how it ends; and the demo that it runs against a stand-in."""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest

from bench import __main__ as command
from bench import child
from bench.child import timed
from bench.coserve_demo import reported
from bench.registry import Bench, BenchFailed, benches
from bench.result import Run, Target
from rose.report.model import LedgerSummary, RunReport


def stand_in(figures: list[float | None]) -> Bench:
    def measure(arguments: Namespace, index: int) -> Run:
        if figures[index] is None:
            raise BenchFailed("the child died", to_do="look at its last lines")
        return {"gain": figures[index]}

    def nothing(parser: ArgumentParser) -> None:
        pass

    return Bench("x", "a stand-in", ("gain",), (Target("gain", ">=", 1),), measure, nothing, lambda arguments: {}, 1)


def run(monkeypatch: pytest.MonkeyPatch, figures: list[float | None], *arguments: str) -> int:
    monkeypatch.setattr(command, "benches", lambda: {"x": stand_in(figures)})
    return command.main(["x", *arguments])


def test_targets_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    assert run(monkeypatch, [1.0, 3.0, 2.0], "--json", str(path), "--runs", "3", "--note", "calm") == 0
    held = json.loads(path.read_text())
    assert held["gain"] == 2.0
    assert held["note"] == "calm"
    assert held["command"] == f"./dev python -m bench x --json {path} --runs 3 --note calm"


def test_a_missed_target_is_written_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    assert run(monkeypatch, [0.5], "--json", str(path)) == 1
    assert json.loads(path.read_text())["targets_met"] is False
    assert "missed: gain >= 1" in capsys.readouterr().out


def test_a_failed_run_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    assert run(monkeypatch, [1.0, None], "--json", str(path), "--runs", "2") == 1
    assert not path.exists()
    assert "bench: the child died" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["x"], ["x", "--json", "f", "--runs", "0"], ["y", "--json", "f"]])
def test_wrong_arguments(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "benches", lambda: {"x": stand_in([1.0])})
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    assert caught.value.code == 2


def test_without_a_name_the_benches_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main([])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    assert all(name in said for name in benches())


def test_every_target_is_a_headline_figure() -> None:
    for bench in benches().values():
        assert {target.figure for target in bench.targets} <= set(bench.headline)


def a_report() -> RunReport:
    return RunReport(
        run_id="r",
        name="n",
        started_at="2026-11-30T00:00:00+00:00",
        wall_s=1.0,
        outcome="finished",
        ledger=LedgerSummary(accounts={"trained": 7}, generated=9),
        versions_published=10,
    )


def fake_demo(body: str) -> list[str]:
    """A command that is given its folder as the demo is."""
    start = "import sys, pathlib; out = pathlib.Path(sys.argv[sys.argv.index('--out') + 1]) / 'r'\n"
    return [sys.executable, "-c", start + body, "demo", "--out"]


def test_the_demo_is_read_from_the_one_report_that_it_leaves() -> None:
    write = f"out.mkdir(parents=True); (out / 'report.json').write_text({a_report().to_json()!r})"
    found, wall_s, cores = reported(fake_demo(write), [])
    assert (found, cores) == (a_report(), {})
    assert wall_s > 0


def test_a_failed_demo_shows_its_last_lines() -> None:
    body = "print('\\n'.join(f'line {i}' for i in range(100))); print('boom', file=sys.stderr); sys.exit(3)"
    with pytest.raises(BenchFailed, match="status 3") as caught:
        reported(fake_demo(body), [])
    assert "boom" in caught.value.what
    assert "line 99" in caught.value.what
    assert "line 10\n" not in caught.value.what


def test_a_demo_without_a_report_fails() -> None:
    with pytest.raises(BenchFailed, match="left 0 reports"):
        reported(fake_demo("pass"), [])


def ended(pid: str) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("last", ["wait", "trap '' INT; wait; wait", "exit 3"])
def test_a_command_that_hangs_or_fails_takes_all_it_started_along(
    last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "GRACE_S", 0.1)
    log = tmp_path / "log"
    with pytest.raises(BenchFailed, match=r"within 0\.3 s|status 3"):
        timed(["sh", "-c", f"sleep 60 & echo $!; {last}"], cwd=tmp_path, log=log, timeout_s=0.3)
    (pid,) = log.read_text().split()
    deadline_s = time.monotonic() + 10
    while not ended(pid):  # a killed process is gone a moment later
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
