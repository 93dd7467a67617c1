"""The size of an object is what a server says: one that cannot be is an error of ours, wherever it lands."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rose.errors import TransferError
from rose_transfer.transport.landing import FileLanding, MemoryLanding

IMPOSSIBLE = (2**48, 2**62, 2**63, 2**64 - 1)


@pytest.mark.parametrize("size_bytes", IMPOSSIBLE)
def test_more_than_there_can_be(tmp_path: Path, size_bytes: int) -> None:
    with pytest.raises(TransferError, match=f"no memory for {size_bytes} bytes"):
        MemoryLanding().room(size_bytes)
    with pytest.raises(TransferError, match=f"no room for {size_bytes} bytes"):
        FileLanding(tmp_path / "object").room(size_bytes)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_told_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TransferError, match="no room for 10 bytes"):
        FileLanding(tmp_path / "object").room(10)


def test_a_folder_that_is_gone_is_not_told_as_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="No such file") as told:
        FileLanding(tmp_path / "gone" / "object").room(10)
    assert "no room" not in str(told.value)
    assert "free space" not in str(told.value)
    assert "look at that folder" in str(told.value)


def test_more_than_it_may_be() -> None:
    assert len(MemoryLanding(bytes_max=10).room(10)) == 10
    with pytest.raises(TransferError, match="at most 10"):
        MemoryLanding(bytes_max=10).room(11)
