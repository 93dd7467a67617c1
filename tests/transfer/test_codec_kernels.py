"""Which kernels are used, and what is said when they are the slow ones."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rose_transfer.codec import native
from rose_transfer.codec.kernels import best_kernels
from rose_transfer.codec.streams import BUCKET_BYTES_MAX


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    best_kernels.cache_clear()
    native.native_kernels.cache_clear()
    yield
    best_kernels.cache_clear()
    native.native_kernels.cache_clear()


def test_without_the_library_numpy_steps_in_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    with caplog.at_level(logging.WARNING):
        assert best_kernels().name == "numpy"
        assert best_kernels().name == "numpy"
    assert len(caplog.records) == 1
    assert "install a C compiler" in caplog.text


def test_a_library_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    (tmp_path / "_native.some-machine.so").write_bytes(b"not a library")
    with caplog.at_level(logging.WARNING):
        assert native.native_kernels() == ()
    assert "cannot be used" in caplog.text


def test_a_library_of_another_version_is_not_called(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not native.native_kernels():
        pytest.skip("the native library was not built")
    native.native_kernels.cache_clear()
    monkeypatch.setattr(native, "ABI", native.ABI + 1)
    assert native.native_kernels() == ()
    assert "another version" in caplog.text


def test_the_fastest_come_last_and_are_taken() -> None:
    found = native.native_kernels()
    if not found:
        pytest.skip("the native library was not built")
    assert [kernels.name for kernels in found] == ["scalar", "avx2", "avx512"][: len(found)]
    assert best_kernels() is found[-1]


def test_a_large_delta_does_not_keep_its_memory() -> None:
    found = native.native_kernels()
    if not found:
        pytest.skip("the native library was not built")
    zeros = np.zeros(BUCKET_BYTES_MAX // 8, dtype=np.uint16)
    found[-1].encode(zeros, zeros, "steps")
    assert native._room.elements == zeros.size
    found[-1].encode(None, zeros, "overwrite")
    assert native._room.elements == 0


def test_the_structures_agree() -> None:
    """ctypes' and the compiler's idea of `struct streams`: ten 8-byte fields."""
    assert ctypes.sizeof(native._Streams) == 80
