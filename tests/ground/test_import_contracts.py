"""The import contracts name every module of the ground, so that a new one cannot slip past them."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOT_GROUND = {"cli", "dashboard", "demo", "env", "observer", "report", "simulator", "trainer", "workload"}


def ground_modules() -> set[str]:
    files = {path.stem for path in (ROOT / "rose").glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in (ROOT / "rose").glob("*/__init__.py")}
    return {f"rose.{name}" for name in files | packages - NOT_GROUND}


def contracts() -> list[dict[str, list[str]]]:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert isinstance(found, list)
    return found


def test_the_lowest_layer_is_the_whole_ground() -> None:
    lowest = contracts()[0]["layers"][-1]
    assert set(lowest.split(" : ")) == ground_modules()


def test_the_ground_is_held_free_of_torch_vllm_and_ray() -> None:
    contract = contracts()[1]
    assert ground_modules() <= set(contract["source_modules"])
    assert {"torch", "vllm", "ray"} <= set(contract["forbidden_modules"])
