"""Reads and writes that keep the interpreter's lock: what the kernel refuses, or does by half, is an error."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rose_executor.quick_file import QuickReader, write_at


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_what_was_written_is_read_up_to_the_size_that_was_asked_for(tmp_path: Path) -> None:
    with opened(tmp_path / "file", os.O_RDWR | os.O_CREAT) as file:
        reader = QuickReader(4)
        assert reader.read(file) == b""
        write_at(file, b"abc", 0)
        first = reader.read(file)
        write_at(file, b"defg", 2)
        assert (first, reader.read(file)) == (b"abc", b"abde")
        assert (reader.read(file, 1), reader.read(file, 4), reader.read(file, 9)) == (b"bdef", b"fg", b"")


def test_a_descriptor_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        QuickReader(4).read(-1)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Bad file descriptor"):
        write_at(-1, b"abc", 0)
    with opened(tmp_path / "file", os.O_RDONLY) as file, pytest.raises(OSError, match="Bad file descriptor"):
        write_at(file, b"abc", 0)


def test_a_part_alone_is_an_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path / "file", os.O_RDWR | os.O_CREAT) as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            with pytest.raises(OSError, match="No space left") as caught:
                write_at(file, b"x" * 200, 0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.ENOSPC
