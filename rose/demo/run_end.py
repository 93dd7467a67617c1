"""How the demo's run ended, for whoever has only the demo's own lines: one that dies may take its last words along."""

from __future__ import annotations

from pathlib import Path

from rose.report.model import RunReport

REPORT = "report.json"
LOG = "log.jsonl"


def failure_of(status: int, death: str, output: Path) -> str:
    """One line on a run that failed, or ended without its report; "" on one that ended well.

    `death` follows its name, `output` is its folder.
    """
    report = output / REPORT
    written = report.exists()
    if status == 0 and written:
        return ""
    cause = RunReport.from_json(report.read_text(encoding="utf-8")).cause if written else ""
    why = f": {cause}" if cause else "" if written else ", and left no report"
    return f"the run {death}{why}; its log: {output / LOG}"
