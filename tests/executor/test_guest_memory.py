"""What processes hold, by the kernel's books and the driver's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rose.errors import ClusterError
from rose_executor import guest_memory
from rose_executor.guest_memory import device_memory, held_by, host_memory

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


LISTING = "123, 2048\n 77, 10 \n123, 1\n9, [N/A]\n"


def test_the_driver_lists_a_process_once_for_each_device() -> None:
    assert held_by(LISTING, {123}) == 2049 * MIB
    assert held_by(LISTING, {123, 77}) == 2059 * MIB
    assert held_by(LISTING, {5}) == 0
    assert held_by("", {5}) == 0


def test_what_the_driver_does_not_tell_about_us_is_not_taken_for_nothing() -> None:
    with pytest.raises(ClusterError, match="does not tell what process 9 holds"):
        held_by(LISTING, {9})
    with pytest.raises(ClusterError, match="lists 'No running processes found'"):
        held_by("No running processes found", {9})


@contextmanager
def driver(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    yield


def test_the_driver_is_asked_for_processes_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = '[ "$1" = --query-compute-apps=pid,used_memory ] && [ "$2" = --format=csv,noheader,nounits ] && echo 5, 3'
    with driver(tmp_path, script, monkeypatch):
        assert device_memory([5]) == 3 * MIB


def test_a_driver_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with driver(tmp_path, "echo no driver >&2; exit 9", monkeypatch), pytest.raises(ClusterError, match="no driver"):
        device_memory([5])


def test_without_a_driver_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device_memory([5]) is None


def test_a_driver_that_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_memory, "_SMI_S", 0.2)
    with driver(tmp_path, "exec sleep 60", monkeypatch), pytest.raises(ClusterError, match="does not answer"):
        device_memory([5])


@pytest.mark.gpu
def test_the_real_driver_lists_what_it_is_asked_for() -> None:
    import torch

    held = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    measured = device_memory([os.getpid()])
    assert measured is not None
    assert measured >= held.numel()
