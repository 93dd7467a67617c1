"""The layout of an engine's rank, traced once for all engines of its kind.

A traced layout depends on the model's configuration, the tensors of its checkpoint, the rank's place, the
dtype, torch, vLLM's model code and our tracing: all of it is in the key, files by their content, so nobody has
to remember to forget. The key is found without importing vLLM.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch

import rose_transfer.layout
from rose.errors import TransferError
from rose_executor.engine_model import ModelSource
from rose_executor.engine_rank import EngineRank
from rose_executor.layout_trace import trace_layout
from rose_transfer.layout.layout import Layout
from rose_transfer.layout.layout_cache import LayoutCache

_OUR_TRACING = ("copy_recorder.py", "engine_model.py", "engine_rank.py", "layout_trace.py")
_VLLM_LOADING = ("_version.py", "config", "distributed/parallel_state.py", "model_executor", "platforms")
_SECRET = ("KEY", "TOKEN", "PASSWORD", "SECRET")


def discover_layout(holder: str, source: ModelSource, rank: EngineRank, cache: LayoutCache) -> Layout:
    """`trace_layout`, unless the cache holds what it would give. Raises TransferError as that does."""
    key = layout_key(source, rank)
    layout = cache.get(key, holder)
    if layout is None:
        layout = trace_layout(holder, source, rank)
        cache.put(key, layout)
    return layout


def layout_key(source: ModelSource, rank: EngineRank) -> str:
    """64 hex digits that change with anything that a traced layout depends on.

    Raises TransferError if the model's configuration cannot be read or vLLM is not installed.
    """
    config = source.model_dir / "config.json"
    try:
        model = json.loads(config.read_bytes())
    except (OSError, ValueError) as error:
        raise TransferError(f"{config} cannot be read: {error}", expected="the configuration of a model") from error
    described = {
        "model": model,
        "dtype": str(source.dtype),
        "parameters": {name: [value.dtype, value.shape] for name, value in source.parameters.items()},
        "rank": str(rank),
        "torch": torch.__version__,
        "loader": loader_fingerprint(),
        "switches": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("VLLM_") and not any(word in name for word in _SECRET)
        },
    }
    # The order of parameters counts: loaders see it.
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


@functools.cache
def loader_fingerprint() -> str:
    """SHA-256 over the sources of vLLM's models and loaders and of our tracing."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise TransferError("vLLM is not installed here", expected="the engine's own vLLM, to see how it loads")
    vllm = Path(spec.submodule_search_locations[0])
    ours = Path(__file__).parent
    digest = hashlib.sha256()
    for root, names in (
        (vllm, _VLLM_LOADING),
        (ours, _OUR_TRACING),
        (Path(rose_transfer.layout.__path__[0]), (".",)),
    ):
        for file in _sources(root, names):
            digest.update(f"{file.relative_to(root)}\0".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _sources(root: Path, names: Iterable[str]) -> Iterable[Path]:
    for name in names:
        path = root / name
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]
