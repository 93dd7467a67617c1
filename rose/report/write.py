"""The two files that a run leaves behind: `report.json` and `report.html`."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from rose.errors import ClusterError
from rose.report.html import render_html
from rose.report.model import RunReport


def write_report(report: RunReport, out_dir: Path) -> None:
    """Write report.json, then report.html, each whole or not at all.

    The page comes last, so whatever goes wrong with it leaves the data written.

    Raises ClusterError if the disk is full, read-only or gone; an older file of that name is then still whole.
    """
    _write_whole(out_dir / "report.json", report.to_json())
    _write_whole(out_dir / "report.html", render_html(report))


def _write_whole(path: Path, text: str) -> None:
    content = text.encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ClusterError(
            f"{path} could not be written: {error.strerror}",
            expected=f"{len(content):,} bytes free{_free_words(path.parent)}",
            to_do="free some space or name another folder with --out",
        ) from error


def _free_words(folder: Path) -> str:
    try:
        return f", {shutil.disk_usage(folder).free:,} are"
    except OSError:
        return ""
