from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from rose.errors import EngineError, TransferError
from rose_executor import layout_discovery, vllm_contract, vllm_reliances
from rose_executor.engine_model import ModelSource
from rose_executor.engine_rank import EngineRank
from rose_executor.layout_discovery import layout_key, loader_fingerprint
from rose_executor.layout_trace import trace_layout
from rose_transfer.layout.layout import Parameter

PARAMETERS = {"a": Parameter((2, 3), "bfloat16"), "b": Parameter((3,), "float32")}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSource:
    monkeypatch.setattr(layout_discovery, "loader_fingerprint", lambda: "these sources")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    return ModelSource(tmp_path, PARAMETERS, torch.bfloat16)


def holding(source: ModelSource, parameters: dict[str, Parameter]) -> ModelSource:
    return dataclasses.replace(source, parameters=parameters)


def test_the_key_is_the_same_for_the_same(source: ModelSource) -> None:
    assert layout_key(source, EngineRank()) == layout_key(holding(source, dict(PARAMETERS)), EngineRank(1, 0))


def test_the_key_changes_with_everything_a_layout_depends_on(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {
        layout_key(source, EngineRank()),
        layout_key(source, EngineRank(2, 0)),
        layout_key(source, EngineRank(2, 1)),
        layout_key(source, EngineRank(1, 0, 2, 1)),
        layout_key(source, EngineRank(2, 0, expert_parallel=True)),
        layout_key(holding(source, PARAMETERS | {"a": Parameter((3, 2), "bfloat16")}), EngineRank()),
        layout_key(holding(source, PARAMETERS | {"a": Parameter((2, 3), "float16")}), EngineRank()),
        layout_key(holding(source, dict(reversed(PARAMETERS.items()))), EngineRank()),
        layout_key(dataclasses.replace(source, dtype=torch.float32), EngineRank()),
    }
    monkeypatch.setenv("VLLM_A_SWITCH", "1")
    keys.add(layout_key(source, EngineRank()))
    monkeypatch.setattr(layout_discovery, "loader_fingerprint", lambda: "other sources")
    keys.add(layout_key(source, EngineRank()))
    monkeypatch.setattr(torch, "__version__", "9.9")
    keys.add(layout_key(source, EngineRank()))
    (source.model_dir / "config.json").write_text(json.dumps({"hidden_size": 128}))
    keys.add(layout_key(source, EngineRank()))
    assert len(keys) == 13


def test_secrets_do_not_reach_the_key(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    key = layout_key(source, EngineRank())
    monkeypatch.setenv("VLLM_API_KEY", "a secret")
    assert layout_key(source, EngineRank()) == key


@pytest.mark.parametrize("text", [None, "{"])
def test_an_unreadable_configuration_is_named(source: ModelSource, text: str | None) -> None:
    config = source.model_dir / "config.json"
    config.unlink() if text is None else config.write_text(text)
    with pytest.raises(TransferError, match=r"config\.json cannot be read"):
        layout_key(source, EngineRank())


def test_the_sources_are_found_without_importing_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    loader_fingerprint.cache_clear()
    assert len(loader_fingerprint()) == 64
    loader_fingerprint.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TransferError, match="vLLM is not installed here"):
        loader_fingerprint()
    loader_fingerprint.cache_clear()


@pytest.mark.parametrize("place", [(1, 1), (2, -1), (2, 0, 1, 1), (0, 0)])
def test_a_place_that_no_engine_has_is_refused(place: tuple[int, ...]) -> None:
    with pytest.raises(TransferError, match="there is no tp"):
        EngineRank(*place)


def test_a_vllm_that_the_tracing_does_not_know_is_not_traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def gone(relied_on: object) -> list[str]:
        return ["vllm.x._ROPE_DICT: gone"] if relied_on is vllm_reliances.TRACING else []

    monkeypatch.setattr(vllm_contract, "broken", gone)
    with pytest.raises(EngineError, match=r"vllm\.x\._ROPE_DICT: gone"):
        trace_layout("engine-0", ModelSource(tmp_path, {}, torch.float32), EngineRank())
