"""The control plane installs without torch, vllm and ray: nothing on its way may import them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import rose

HEAVY = {"torch", "vllm", "ray", "transformers"}
GROUND = sorted(f"rose.{path.stem}" for path in Path(rose.__path__[0]).glob("*.py") if path.stem != "__init__")
COMMANDS = ["main", "run", "status", "doctor", "job_page", "terminal", "weights", "relay"]


def loaded_by(code: str) -> set[str]:
    script = f"{code}\nimport json, sys; print(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_probe_sees_an_import() -> None:
    assert "sqlite3" in loaded_by("import sqlite3")
    assert "sqlite3" not in loaded_by("pass")


def test_the_ground_imports_without_frameworks() -> None:
    assert len(GROUND) > 10
    assert loaded_by(f"import {', '.join(GROUND)}").isdisjoint(HEAVY)


def test_the_commands_import_without_frameworks() -> None:
    assert loaded_by("import " + ", ".join(f"rose.cli.{name}" for name in COMMANDS)).isdisjoint(HEAVY)


def test_an_executor_runs_beside_a_serving_engine_without_frameworks() -> None:
    assert loaded_by("import rose.cli.executor").isdisjoint(HEAVY)


@pytest.mark.parametrize("argument", ["--help", "run --help", "--version"])
def test_help_imports_hardly_anything(argument: str) -> None:
    code = f"""
import sys
from rose.cli.main import main

sys.argv = {["rose", *argument.split()]!r}
try:
    main()
except SystemExit:
    pass
"""
    assert loaded_by(code).isdisjoint(HEAVY | {"numpy", "structlog", "grpc", "psutil", "prometheus_client"})
