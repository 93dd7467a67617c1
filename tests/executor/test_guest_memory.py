"""What processes hold, by the kernel's books."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rose.errors import ClusterError
from rose_executor import guest_memory
from rose_executor.guest_memory import host_memory

MIB = 2**20
_FORKED = """
import mmap, os, sys
held = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
held.write(b"1" * len(held))
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print("ready", flush=True)
sys.stdin.read()
os.wait()
"""


@contextmanager
def family() -> Iterator[int]:
    """A process with 64 MiB, and a child that shares them."""
    process = subprocess.Popen(
        [sys.executable, "-c", _FORKED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process.pid
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def test_shared_pages_are_resident_twice_and_owned_once() -> None:
    with family() as pid:
        memory = host_memory(pid)
    assert memory.processes == 2
    assert memory.resident_bytes > 128 * MIB
    assert memory.own_bytes is not None
    assert 64 * MIB < memory.own_bytes < 110 * MIB


def test_where_the_kernel_does_not_tell_who_shares_it_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path, **_: object) -> str:
        raise PermissionError

    with family() as pid:
        monkeypatch.setattr(guest_memory.Path, "read_text", refused)
        memory = host_memory(pid)
    assert (memory.processes, memory.own_bytes) == (2, None)
    assert memory.resident_bytes > 128 * MIB


def test_a_process_that_is_gone_is_told() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    with pytest.raises(ClusterError, match="is gone"):
        host_memory(process.pid)
