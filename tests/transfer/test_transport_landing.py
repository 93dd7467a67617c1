"""The size of an object is what a server says: one that cannot be is an error of ours, wherever it lands."""

from __future__ import annotations

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


def test_more_than_it_may_be() -> None:
    assert len(MemoryLanding(bytes_max=10).room(10)) == 10
    with pytest.raises(TransferError, match="at most 10"):
        MemoryLanding(bytes_max=10).room(11)
