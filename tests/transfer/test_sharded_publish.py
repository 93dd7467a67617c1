"""Ranks that each hold a part publish what one would that holds everything, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import sharded_worlds as worlds
from sharded_worlds import PACKING, in_world, weights

from rose_transfer.store import Store, StoreReader
from rose_transfer.store.buckets import pack
from rose_transfer.store.survey import verify


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def whole_keys(folder: Path, versions: int, *, compress: bool = False) -> list[str]:
    """The manifests of the same versions published from whole state dicts."""
    store = Store(folder, compress=compress)
    keys = [
        store.publish(version, PACKING, pack(PACKING, weights(version)), base=store.newest).key
        for version in range(1, versions + 1)
    ]
    store.close()
    return keys


def check(folder: Path, versions: int) -> None:
    """The versions are there whole, and hold the weights."""
    store = StoreReader(folder)
    assert verify(store) == ()
    assert store.versions() == tuple(range(1, versions + 1))
    for version in store.versions():
        for found, wanted in zip(store.read(version), pack(PACKING, weights(version)), strict=True):
            assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("compress", [False, True], ids=["raw", "zstd"])
def test_fsdp_over_tensor_parallel_with_float32_masters(folder: Path, tmp_path: Path, compress: bool) -> None:
    answers = in_world(4, worlds.fsdp_over_tp, folder, 3, compress)
    assert answers == [whole_keys(tmp_path / "whole", 3, compress=compress)] * 4
    check(folder, 3)


def test_pipeline_stages_with_uneven_and_empty_shards(folder: Path, tmp_path: Path) -> None:
    answers = in_world(4, worlds.pipeline_stages, folder, 2)
    assert answers == [whole_keys(tmp_path / "whole", 2)] * 4
    check(folder, 2)
