"""Files that appear whole or not at all.

A file is written beside under a draft's name, flushed, then renamed. A writer that dies leaves a draft, never half of
a file under its name. A new name is safe from a loss of power once its folder has been flushed too.

The functions here raise OSError; `disk_trouble` makes a TransferError of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rose.errors import TransferError

Bytes = bytes | bytearray | memoryview
DRAFT_PREFIX = ".draft-"


class NoRoom(TransferError):
    """The disk, or what the store may use of it, is full. Nothing of what was to be written is left."""


@contextlib.contextmanager
def disk_trouble(doing: str) -> Iterator[None]:
    """Raises NoRoom or another TransferError for an OSError; `doing` is what could not be done."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise (NoRoom if full else TransferError)(f"{doing}: {error}", to_do="look at the disk") from error


def write_whole(path: Path, data: Bytes) -> None:
    """Put `data` at `path`, over what is there. If it fails no draft is left."""
    descriptor, draft = tempfile.mkstemp(prefix=DRAFT_PREFIX, dir=path.parent)
    try:
        try:
            rest = memoryview(data).cast("B")
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def flush_folder(folder: Path) -> None:
    """Make the names in a folder, and that some are gone, outlast a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_file(path: Path) -> int:
    """Make the bytes of a file outlast a loss of power. Returns how many there are."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def files_in(folder: Path) -> Iterator[tuple[str, int]]:
    """Name and size in bytes of every whole file, by name; a file removed meanwhile is left out."""
    with os.scandir(folder) as found:
        names = sorted(entry.name for entry in found if not entry.name.startswith(DRAFT_PREFIX))
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            yield name, (folder / name).stat().st_size


def remove_drafts(folder: Path) -> int:
    """Remove what writers that died have left, and say how many. No other writer may be at work."""
    drafts = list(folder.glob(f"{DRAFT_PREFIX}*"))
    for draft in drafts:
        draft.unlink(missing_ok=True)
    return len(drafts)
