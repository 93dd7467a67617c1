"""The bench file: what it holds, when a target is met, and that it is whole or absent."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.result import BenchResult, Run, Target, git_state
from rose.errors import ClusterError


def result(runs: list[Run], **more: Any) -> BenchResult:
    fields: dict[str, Any] = {
        "bench": "x",
        "command": "./dev python -m bench x",
        "commit": "abc",
        "dirty": False,
        "headline": ("gain", "wall_s"),
        "targets": (Target("gain", ">=", 0.25), Target("wall_s", "<=", 300)),
    }
    return BenchResult(runs=runs, **fields | more)


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "results" / "x.json"
    result([{"gain": 0.5, "wall_s": 10.0, "extra": 1}, {"gain": 0.3, "wall_s": 20.0, "extra": 2}], note="calm").write(
        path
    )
    held = json.loads(path.read_text())
    assert (held["gain"], held["wall_s"]) == (0.4, 15.0)
    assert "extra" not in held
    assert held["figures"]["wall_s"] == {"runs": 2, "median": 15.0, "min": 10.0, "max": 20.0, "spread": 5.0}
    assert held["figures"]["extra"]["median"] == 1.5
    assert held["runs"] == [{"gain": 0.5, "wall_s": 10.0, "extra": 1}, {"gain": 0.3, "wall_s": 20.0, "extra": 2}]
    assert held["targets"][0] == {"figure": "gain", "target": ">= 0.25", "found": 0.4, "met": True}
    assert held["targets_met"] is True
    assert (held["bench"], held["commit"], held["dirty"], held["note"]) == ("x", "abc", False, "calm")
    assert held["machine"]["cores"] >= 1
    assert "pydantic" in held["machine"]["packages"]


@pytest.mark.parametrize(
    ("target", "found", "met"),
    [
        (Target("a", ">=", 1), 1.0, True),
        (Target("a", ">=", 1), 0.99, False),
        (Target("a", "<=", 1), 1.0, True),
        (Target("a", "<=", 1), 1.01, False),
        (Target("a", "==", 0), 0, True),
        (Target("a", "==", 0), -1, False),
        (Target("a", ">=", 1), None, False),
        (Target("a", "==", 0), None, False),
    ],
)
def test_targets(target: Target, found: float | None, met: bool) -> None:
    assert target.met_by(found) is met


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_figure_that_was_not_measured_is_null_and_misses_its_target(value: float | None) -> None:
    held = result([{"gain": value, "wall_s": 1.0}]).to_json()
    assert held["gain"] is None
    assert held["targets_met"] is False
    assert held["runs"][0]["gain"] is None


def test_a_figure_left_out_on_request_is_named_and_misses_nothing() -> None:
    held = result([{"gain": 0.5}], left_out={"wall_s": "left out with --quick"}).to_json()
    assert "wall_s" not in held
    assert held["left_out"] == {"wall_s": "left out with --quick"}
    assert held["targets_met"] is True


def test_a_figure_measured_in_one_run_only_keeps_its_value() -> None:
    assert result([{"gain": 0.5, "wall_s": 10.0}, {"gain": 0.5}]).figures()["wall_s"] == 10.0


def test_a_figure_may_not_take_the_name_of_a_key() -> None:
    with pytest.raises(ValueError, match="machine"):
        result([{"machine": 1.0}], headline=("machine",), targets=()).to_json()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    path.write_text("old")

    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ClusterError, match="No space left"):
        result([{"gain": 0.5, "wall_s": 1.0}]).write(path)
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]
    assert path.read_text() == "old"


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_git_state(tmp_path: Path) -> None:
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "first")
    commit, dirty = git_state(tmp_path)
    assert len(commit) == 40
    assert dirty is False
    (tmp_path / "new").write_text("")
    assert git_state(tmp_path) == (commit, True)


def test_git_state_outside_a_repository(tmp_path: Path) -> None:
    assert git_state(tmp_path / "nowhere") == ("unknown", True)
