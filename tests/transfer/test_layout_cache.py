from __future__ import annotations

import errno
import os
from pathlib import Path

import layout_tools as tools
import pytest

from rose_transfer.layout.layout import Layout, LocalTensor, Parameter
from rose_transfer.layout.layout_cache import LayoutCache
from rose_transfer.layout.layout_json import fingerprint

MODEL = {"w": Parameter((2, 3), "bfloat16"), "scalar": Parameter((), "float32")}
LAYOUT = tools.whole_layout("engine-0 tp 0", MODEL)


@pytest.fixture
def cache(tmp_path: Path) -> LayoutCache:
    return LayoutCache(tmp_path / "layouts")


def test_a_layout_comes_back_as_that_of_who_asks(cache: LayoutCache) -> None:
    assert cache.get("key", "engine-1 tp 0") is None
    cache.put("key", LAYOUT)
    read = cache.get("key", "engine-1 tp 0")
    assert read is not None
    assert (fingerprint(read), read.holder) == (fingerprint(LAYOUT), "engine-1 tp 0")


def test_any_damage_counts_as_not_there(cache: LayoutCache, tmp_path: Path) -> None:
    cache.put("key", LAYOUT)
    (file,) = (tmp_path / "layouts").iterdir()
    whole = file.read_bytes()
    for at in range(0, len(whole), 7):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert cache.get("key", "engine-0") is None
        file.write_bytes(whole[:at])
        assert cache.get("key", "engine-0") is None
    file.write_bytes(b"\xff" + whole)
    assert cache.get("key", "engine-0") is None
    file.write_bytes(whole)
    assert cache.get("key", "engine-0") is not None


def test_a_layout_that_is_not_whole_counts_as_not_there(cache: LayoutCache) -> None:
    tensors = {**LAYOUT.tensors, "unwritten": LocalTensor((2,), "bfloat16")}
    cache.put("key", Layout("engine-0", MODEL, tensors, LAYOUT.pieces))
    assert cache.get("key", "engine-0") is None


@pytest.mark.parametrize("fails", ["mkstemp", "replace"])
def test_a_full_disk_costs_time_only(
    cache: LayoutCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = "tempfile.mkstemp" if fails == "mkstemp" else "os.replace"
    with monkeypatch.context() as patch:
        patch.setattr(f"rose_transfer.layout.layout_cache.{target}", full)
        cache.put("key", LAYOUT)
    assert list((tmp_path / "layouts").iterdir()) == []
    assert cache.get("key", "engine-0") is None
    cache.put("key", LAYOUT)
    assert cache.get("key", "engine-0") is not None
