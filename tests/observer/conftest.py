from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where services of this test are found; not in `tmp_path`, whose length leaves no room for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="rose-") as folder:
        path = Path(folder) / "rt"
        monkeypatch.setenv("ROSE_RUNTIME_DIR", str(path))
        yield path
