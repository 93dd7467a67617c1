"""The contract with vLLM: each name that ROSE relies on is where it is used, in every version that is supported."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rose_executor
from rose_executor.vllm_reliances import EVERYWHERE, OLDER, SUPPORTED, Reliance

PUBLIC = {("vllm", "LLM"), ("vllm", "SamplingParams"), ("vllm.inputs", "TokensPrompt")}
"""What vLLM's own documentation tells users to import."""


def told(reliance: Reliance) -> str:
    module, name, parameters = reliance
    return f"{module}.{name}({', '.join(parameters)})" if parameters else f"{module}.{name}"


@pytest.fixture(scope="module")
def answer(vllm_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `contract_main` says, which imports nothing that would not start where a single name is missing."""
    path = tmp_path_factory.mktemp("contract") / "answer"
    command = [sys.executable, "-P", "-m", "contract_main", str(path)]
    done = subprocess.run(command, env={**os.environ, **vllm_env}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def missing(answer: Any) -> dict[Reliance, list[str]]:
    return dict(zip((*EVERYWHERE, *OLDER), answer["missing"], strict=True))


@pytest.mark.engine
@pytest.mark.each_vllm
def test_the_vllm_that_is_tested_is_of_the_version_that_is_named(answer: Any, request: pytest.FixtureRequest) -> None:
    assert answer["version"].startswith(f"{request.node.callspec.params['vllm_env']}.")


@pytest.mark.engine
@pytest.mark.each_vllm
@pytest.mark.parametrize("reliance", EVERYWHERE, ids=told)
def test_vllm_has(reliance: Reliance, missing: dict[Reliance, list[str]]) -> None:
    assert missing[reliance] == []


@pytest.mark.engine
@pytest.mark.parametrize("vllm_env", SUPPORTED[1:], indirect=True, scope="session")
@pytest.mark.parametrize("reliance", OLDER, ids=told)
def test_the_older_vllm_has_what_is_added_to(reliance: Reliance, missing: dict[Reliance, list[str]]) -> None:
    assert missing[reliance] == []


def imported() -> Iterator[tuple[str, str, str]]:
    """(file, module, name) of each name that a module of ours imports from vLLM."""
    for file in sorted(Path(rose_executor.__path__[0]).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                yield from ((file.name, node.module or "", alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((file.name, alias.name, "") for alias in node.names if alias.name.startswith("vllm."))


def test_no_module_imports_from_vllm_what_is_in_no_contract() -> None:
    heads = {(module, name.partition(".")[0]) for module, name, _ in (*EVERYWHERE, *OLDER)}
    modules = {module for module, _ in heads}
    found = list(imported())
    assert len(found) > 30
    assert [
        (file, module, name)
        for file, module, name in found
        if (module, name) not in heads | PUBLIC and (f"{module}.{name}" if name else module) not in modules
    ] == []
