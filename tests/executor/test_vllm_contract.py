"""The contract with vLLM: each name that ROSE relies on is where it is used, in every version that is supported."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from contract_main import EVERYWHERE

import rose_executor
from rose_executor.vllm_reliances import (
    BACKEND,
    ENGINE,
    OLDER,
    PROBE,
    QUOTA,
    RECORDER,
    SERVING_KV,
    SUPPORTED,
    Reliance,
)

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


CHECKED = {
    "counting_scheduler": ENGINE,
    "quota_scheduler kv_keeping kv_untouched step_clock": (*ENGINE, *QUOTA),
    "step_recorder step_clock": (*ENGINE, *RECORDER),
    "live_model": ENGINE,
    "serving_probe": PROBE,
    "kv_serving": SERVING_KV,
    "transfer_plugin transfer_backend transfer_info version_label live_model worker_agreement": BACKEND,
}
"""What has been looked at when these modules run."""


def in_no_contract(relied_on: Iterable[Reliance], only: Collection[str] | None = None) -> list[tuple[str, str, str]]:
    """Imports from vLLM, of `only` these files of ours, that no name in `relied_on` is about."""
    heads = {(module, name.partition(".")[0]) for module, name, _ in relied_on}
    modules = {module for module, _ in heads}
    return [
        (file, module, name)
        for file, module, name in imported()
        if (only is None or file in only)
        and (module, name) not in heads | PUBLIC
        and (f"{module}.{name}" if name else module) not in modules
    ]


@pytest.mark.parametrize("modules", CHECKED)
def test_what_a_part_imports_from_vllm_is_looked_at_before_it_runs(modules: str) -> None:
    files = {f"{name}.py" for name in modules.split()}
    assert files <= {file for file, _, _ in imported()}
    assert in_no_contract(CHECKED[modules], files) == []


def test_no_module_imports_from_vllm_what_is_in_no_contract() -> None:
    assert len(list(imported())) > 30
    assert in_no_contract((*EVERYWHERE, *OLDER)) == []
