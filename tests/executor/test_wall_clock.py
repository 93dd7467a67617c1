"""The machine's date decides nothing in the executor: whoever lets it jump changes what is shown, and no more."""

from __future__ import annotations

import ast
from pathlib import Path

import rose_executor

HARMLESS = {
    "request_log.py": ["time.time", "time.time"],  # the time of a line, and since when, by vLLM's own figure
    "page_writer.py": ["time.time_ns"],  # when the last step was, for whoever looks at a page
    "page_shelf.py": ["st_mtime"],  # which of more than PAGES_MAX pages go first
}
OF_THE_DATE = {
    ("time", "time"),
    ("time", "time_ns"),
    ("time", "localtime"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("datetime", "today"),
    ("date", "today"),
}


def asks_for_the_date(source: str) -> list[str]:
    """What of that stands in a module."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in OF_THE_DATE:
                found.append(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Attribute) and node.attr in ("create_time", "st_mtime", "st_ctime"):
            found.append(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [alias.name for alias in node.names]
    return found


def test_nothing_is_decided_by_the_date() -> None:
    folder = Path(rose_executor.__file__).parent
    found = {path.name: asked for path in folder.glob("*.py") if (asked := asks_for_the_date(path.read_text()))}
    assert found == HARMLESS


def test_what_would_be_found() -> None:
    source = "import time, datetime\nfrom time import time_ns\na = time.time()\nb = psutil.Process(1).create_time()\n"
    assert sorted(asks_for_the_date(source)) == ["create_time", "time.time", "time_ns"]
