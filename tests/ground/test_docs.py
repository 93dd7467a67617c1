"""Every file that a document names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("rose", "transfer", "executor", "scheduler", "bench", "tests", "docs", "requirements", ".ci")
READMES = (
    "README.md",
    "rose/env/README.md",
    "rose/dashboard/README.md",
    "rose/workload/README.md",
    "transfer/README.md",
    "executor/README.md",
    "scheduler/README.md",
    "bench/README.md",
)
DOCUMENTS = [*(ROOT / name for name in READMES), *sorted((ROOT / "docs").glob("*.md"))]
QUOTED = re.compile(r"`([^`\s]+)`")
LINKED = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


def named_paths(text: str) -> set[str]:
    """What stands in backquotes and begins with a room of the tree, or ends like a source file."""
    return {
        name
        for name in QUOTED.findall(text)
        if (name.endswith(".py") and not name.startswith("~"))
        or ("/" in name and name.startswith(tuple(f"{room}/" for room in ROOMS)))
    }


def is_there(name: str) -> bool:
    """Under the root, or in any room: a document that has named the folder may name the file alone."""
    pattern = name.rstrip("/")
    return any(ROOT.glob(pattern)) or any(
        found for room in ROOMS for found in (ROOT / room).rglob(pattern) if "__pycache__" not in found.parts
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_named_file_is_there(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    gone = {name for name in named_paths(text) if not is_there(name)}
    gone |= {name for name in LINKED.findall(text) if not (document.parent / name).exists()}
    assert gone == set()


def test_what_counts_as_a_named_file() -> None:
    text = "`rose/gone.py`, `gone.py`, `rose/env/`, `rose run job.toml`, `and/or`, `.ci/run`"
    assert named_paths(text) == {"rose/gone.py", "gone.py", "rose/env/", ".ci/run"}
    assert not is_there("rose/gone.py")
    assert is_there("rose/env/")
    assert is_there("frozen_lake.py")
