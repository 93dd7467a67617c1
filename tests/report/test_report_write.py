"""Writing a report: whole or not at all, and the data never lost to the page."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rose.errors import ClusterError
from rose.report import write
from rose.report.model import RunReport
from rose.report.write import write_report


def full_disk_from(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk be full from the `call`-th file on (from 1)."""
    calls = 0
    real = os.fsync

    def fsync(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls >= call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_both_files(full_report: RunReport, tmp_path: Path) -> None:
    write_report(full_report, tmp_path / "runs" / "r")
    assert names(tmp_path / "runs" / "r") == {"report.json", "report.html"}
    assert RunReport.from_json((tmp_path / "runs" / "r" / "report.json").read_text()) == full_report
    assert (tmp_path / "runs" / "r" / "report.html").stat().st_mode & 0o777 == 0o644


def test_disk_full_leaves_the_old_report_whole(
    full_report: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "report.json").write_text("old")
    full_disk_from(1, monkeypatch)
    with pytest.raises(ClusterError, match="No space left") as caught:
        write_report(full_report, tmp_path)
    assert "bytes free" in caught.value.expected
    assert (tmp_path / "report.json").read_text() == "old"
    assert names(tmp_path) == {"report.json"}


def test_disk_full_at_the_page_keeps_the_data(
    full_report: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk_from(2, monkeypatch)
    with pytest.raises(ClusterError, match=r"report\.html"):
        write_report(full_report, tmp_path)
    assert RunReport.from_json((tmp_path / "report.json").read_text()) == full_report
    assert names(tmp_path) == {"report.json"}


def test_a_page_that_cannot_be_made_keeps_the_data(
    full_report: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(report: RunReport) -> str:
        raise RuntimeError("template")

    monkeypatch.setattr(write, "render_html", broken)
    with pytest.raises(RuntimeError):
        write_report(full_report, tmp_path)
    assert RunReport.from_json((tmp_path / "report.json").read_text()) == full_report


def test_interrupted_leaves_nothing_half_written(
    full_report: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(source: str, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_report(full_report, tmp_path)
    assert names(tmp_path) == set()


def test_a_file_where_the_folder_should_be(full_report: RunReport, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(ClusterError, match="could not be written"):
        write_report(full_report, tmp_path / "runs" / "r")
