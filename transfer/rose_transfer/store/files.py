"""Files that appear whole or not at all.

A file is written beside under a draft's name, flushed, then renamed. A writer that dies leaves a draft, never half of
a file under its name. A new name is safe from a loss of power once its folder has been flushed too.

What is no file is passed over, whatever its name: a folder, a pipe that nobody writes to, a link to elsewhere. It is
not opened, for that may wait for ever, and goes only where a file of its name is written: nobody here has made it.

The functions here raise OSError; `disk_trouble` makes a TransferError of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rose.errors import TransferError
from rose.logs import logger
from rose_transfer.full_disk import is_full

log = logger("weight store")
Bytes = bytes | bytearray | memoryview
DRAFT_PREFIX = ".draft-"
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a link",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NoRoom(TransferError):
    """The disk, or what the store may use of it, is full. Nothing of what was to be written is left.

    `needed_bytes` is what the disk lacked room for, None where nobody knows; `by_quota` where that is no matter of
    what the disk has free.
    """

    needed_bytes: int | None = None
    by_quota: bool = False


class DiskTrouble(TransferError):
    """A disk of this host fails, or a folder was taken away; it is not full."""


class NotAFile(OSError):
    """Something else lies where a file should."""


@contextlib.contextmanager
def disk_trouble(doing: str, needed_bytes: int | None = None) -> Iterator[None]:
    """Raises NoRoom or DiskTrouble for an OSError; `doing` is what could not be done, with so many bytes."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise DiskTrouble(f"{doing}: {error}", to_do=_to_do(error)) from error
        lacking = "" if needed_bytes is None else f"no room for {needed_bytes} bytes: "
        no_room = NoRoom(f"{lacking}{doing}: {error}", to_do="free some of the disk")
        no_room.needed_bytes, no_room.by_quota = needed_bytes, error.errno == errno.EDQUOT
        raise no_room from error


def _to_do(error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        return "look at whose it is, and at its mode"
    if error.errno in (errno.ENOENT, errno.ESTALE):
        return "look whether its folder was removed: then end what uses it, and start that again"
    return "look at the disk"


def check_file(path: Path) -> None:
    """To be asked before `path` is opened. Raises NotAFile, FileNotFoundError if nothing is there."""
    mode = stat.S_IFMT(path.lstat().st_mode)
    if mode != stat.S_IFREG:
        raise NotAFile(f"{path} is {_KINDS[mode]}, not a file")


def is_file(path: Path) -> bool:
    try:
        check_file(path)
    except (NotAFile, FileNotFoundError):
        return False
    return True


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
    check_file(path)
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
        with contextlib.suppress(FileNotFoundError, NotAFile):
            check_file(folder / name)
            yield name, (folder / name).lstat().st_size


def strangers_in(folder: Path) -> dict[str, str]:
    """Of everything in a folder that is no file, what it is, by its name."""
    with os.scandir(folder) as found:
        names = sorted(entry.name for entry in found)
    strangers: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            try:
                check_file(folder / name)
            except NotAFile as error:
                strangers[name] = str(error)
    return strangers


def remove_drafts(folder: Path) -> int:
    """Remove what writers that died have left, and say how many. No other writer may be at work."""
    removed = 0
    for draft in folder.glob(f"{DRAFT_PREFIX}*"):
        if is_file(draft):
            try:
                draft.unlink()
            except OSError as error:
                # It takes room, and is in nobody's way.
                log.warning("what a writer that died has left cannot be removed", file=str(draft), why=str(error))
            else:
                removed += 1
    return removed
