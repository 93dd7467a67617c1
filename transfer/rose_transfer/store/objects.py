"""Immutable blobs on disk, each under the SHA-256 of its bytes.

Invariants
- What `read` returns are the bytes that the key stands for, compared each time.
- An object is there whole or not at all, whenever its writer died, and once however often it is put.
- Two may put the same object at the same time. The limit holds for what one `Objects` knows: those that another one
  on the same folder has put since count only when it is opened anew.

A key is no secret and no permission; it makes an object safe to take from anybody.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Collection, Mapping
from pathlib import Path

from rose.errors import TransferError
from rose_transfer.full_disk import is_full
from rose_transfer.store.files import (
    DRAFT_PREFIX,
    Bytes,
    NoRoom,
    NotAFile,
    check_file,
    disk_trouble,
    files_in,
    flush_file,
    flush_folder,
    is_file,
    remove_drafts,
    write_whole,
)

_COMPARED_BYTES = 2**20
_BLOCK_BYTES = 4096
"""By which a file may take more of a disk than it has bytes."""
_KEY = re.compile(r"[0-9a-f]{64}")


class LostObject(TransferError):
    """The object is not there, or its bytes are not those that its key stands for: get it from elsewhere."""


def object_key(data: Bytes) -> str:
    """The key of an object: 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def is_key(text: str) -> bool:
    return _KEY.fullmatch(text) is not None


class Objects:
    """The objects in `folder`, together at most `bytes_max` bytes, None for no limit. Raises TransferError.

    Safe to use from several threads; a transport serves from it.
    """

    def __init__(self, folder: Path, bytes_max: int | None = None) -> None:
        self._folder = folder
        self._bytes_max = bytes_max
        self._guard = threading.Lock()
        with disk_trouble(f"{folder} cannot be read"):
            self._sizes = {name: size for name, size in files_in(folder) if is_key(name)}
        self._used = sum(self._sizes.values())

    @property
    def used_bytes(self) -> int:
        return self._used

    @property
    def folder(self) -> Path:
        return self._folder

    def free_bytes(self) -> int:
        """What may still be written, by the limit and by the disk. Raises TransferError if the disk fails."""
        free_bytes = self.disk_free_bytes()
        return free_bytes if self._bytes_max is None else max(0, min(free_bytes, self._bytes_max - self._used))

    def room_bytes(self) -> tuple[int, int]:
        """What all objects may take together, were there nothing yet, and how much more than its bytes each may take.

        By the limit, or by the disk if that has less, as far as one can know. Raises TransferError if the disk fails.
        """
        disk_bytes = self.disk_free_bytes() + self._used
        if self._bytes_max is not None and self._bytes_max <= disk_bytes:
            return self._bytes_max, 0
        return disk_bytes, _BLOCK_BYTES

    def bytes_of(self, keys: Collection[str]) -> int:
        """What these objects take, as far as they are here."""
        with self._guard:
            return sum(self._sizes.get(key, 0) for key in keys)

    def freed_bytes(self, keys: Collection[str]) -> int:
        """What the disk has more once these objects are removed: nothing for one that lies elsewhere as well."""
        freed_bytes = 0
        for key in keys:
            with disk_trouble(f"object {key[:12]} cannot be looked at"), contextlib.suppress(FileNotFoundError):
                found = self._path(key).lstat()
                freed_bytes += found.st_blocks * 512 if found.st_nlink == 1 else 0
        return freed_bytes

    def disk_free_bytes(self) -> int:
        """Raises TransferError if the disk fails."""
        with disk_trouble(f"{self._folder} cannot be looked at"):
            return shutil.disk_usage(self._folder).free

    def would_fit(self, staying: Collection[str], more: Mapping[str, int]) -> bool:
        """Whether objects of these bytes, by key, have room where only `staying` ones are left of those here.

        Exactly by the limit; by the disk as far as one can know, for others write there too.
        """
        with self._guard:
            left = {key: self._sizes[key] for key in staying if key in self._sizes}
            freed_bytes = self._used - sum(left.values())
        new = [size for key, size in more.items() if key not in left]
        if self._bytes_max is not None and sum(left.values()) + sum(new) > self._bytes_max:
            return False
        disk_bytes = self.disk_free_bytes()
        return sum(new) + len(new) * _BLOCK_BYTES <= disk_bytes + freed_bytes

    def known(self) -> tuple[str, ...]:
        """The keys of the objects known here, in no order."""
        with self._guard:
            return tuple(self._sizes)

    def has(self, key: str) -> bool:
        return is_key(key) and is_file(self._folder / key)

    def size_bytes(self, key: str) -> int | None:
        """Size of an object, None if there is none; its bytes are not looked at. Raises TransferError."""
        path = self._path(key)
        try:
            check_file(path)
            return path.lstat().st_size
        except (FileNotFoundError, NotAFile):
            return None
        except OSError as error:
            raise TransferError(f"object {key[:12]} cannot be looked at: {error}") from error

    def put(self, data: Bytes) -> str:
        """Write an object, if it is not there as it should be, and return its key.

        Its name is not yet safe from a loss of power: see `flush`. Raises NoRoom, or TransferError if the disk fails.
        """
        key = object_key(data)
        path = self._path(key)
        try:
            if _holds(path, data):
                self._count(key, len(data))
                return key
            earlier = self._reserve(key, len(data))
            try:
                write_whole(path, data)
            except BaseException:
                self._count(key, earlier)
                raise
        except OSError as error:
            if not is_full(error):
                raise TransferError(f"cannot write an object to {self._folder}: {error}") from error
            free = shutil.disk_usage(self._folder).free
            raise NoRoom(
                f"no room for an object in {self._folder}: {len(data)} bytes needed, {free} free on the disk",
                to_do="free some of the disk, or keep fewer versions",
            ) from error
        return key

    def adopt(self, path: Path) -> None:
        """Take the file at `path` as the object that it is named for, over a damaged one; the file stays where it is.

        Not copied, so it must lie on the same disk, and must not be changed any more. Its bytes are not compared with
        the key here: `read` does that. Raises NoRoom, or TransferError.
        """
        key = path.name
        placed = self._path(key)
        with disk_trouble(f"object {key[:12]} cannot be taken into {self._folder}"):
            if is_file(placed) and os.path.samefile(path, placed):
                return
            size = flush_file(path)
            earlier = self._reserve(key, size)
            draft = self._folder / f"{DRAFT_PREFIX}{key}"
            try:
                draft.unlink(missing_ok=True)
                os.link(path, draft)
                os.rename(draft, placed)
            except BaseException:
                self._count(key, earlier)
                draft.unlink(missing_ok=True)
                raise

    def read(self, key: str) -> bytes:
        """All bytes of an object. Raises LostObject, or TransferError if the disk fails."""
        path = self._path(key)
        try:
            check_file(path)
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise _lost(key) from error
        except OSError as error:
            damaged = LostObject if isinstance(error, NotAFile) or error.errno == errno.EIO else TransferError
            raise damaged(f"object {key[:12]} cannot be read: {error}", to_do="get it again") from error
        if object_key(data) != key:
            raise LostObject(f"the bytes of object {key[:12]} are not what they were", to_do="get it again")
        return data

    def open(self, key: str) -> OpenObject:
        """For reading in parts. Raises LostObject if there is none, or TransferError."""
        path = self._path(key)
        try:
            check_file(path)
            return OpenObject(path)
        except (FileNotFoundError, NotAFile) as error:
            raise _lost(key) from error
        except OSError as error:
            raise TransferError(f"object {key[:12]} cannot be opened: {error}") from error

    def remove(self, key: str) -> None:
        """Remove an object, if it is there. Whoever has it open keeps it. Raises TransferError if the disk fails."""
        path = self._path(key)
        with disk_trouble(f"object {key[:12]} cannot be removed"):
            path.unlink(missing_ok=True)
        self._count(key, None)

    def flush(self) -> None:
        """Make all objects put so far outlast a loss of power. Raises TransferError if the disk fails."""
        with disk_trouble(f"the objects in {self._folder} cannot be flushed"):
            flush_folder(self._folder)

    def remove_drafts(self) -> int:
        """Remove what killed writers left, and say how many. No other writer may be at work."""
        return remove_drafts(self._folder)

    def _path(self, key: str) -> Path:
        # A key may come from the network, and becomes a path.
        if not is_key(key):
            raise LostObject(f"{key[:80]!r} is no key", expected="64 hex digits")
        return self._folder / key

    def _reserve(self, key: str, size: int) -> int | None:
        """Count an object before it is written, so that two at once cannot go over the limit together.

        Returns its size before, to count if it is not written: a damaged one, which stays then. None if there was none.
        """
        with self._guard:
            earlier = self._sizes.get(key)
            used = self._used - (earlier or 0)
            if self._bytes_max is not None and used + size > self._bytes_max:
                raise NoRoom(
                    f"no room for an object in {self._folder}: {size} bytes needed, "
                    f"{max(0, self._bytes_max - used)} free of {self._bytes_max}",
                    expected="a limit of at least three times the model",
                    to_do="keep fewer versions, or raise the limit: `--disk-gb` of `rose relay`, or `bytes_max`",
                )
            self._sizes[key], self._used = size, used + size
            return earlier

    def _count(self, key: str, size: int | None) -> None:
        """The object has that size, None if it is not there."""
        with self._guard:
            self._used += (size or 0) - self._sizes.pop(key, 0)
            if size is not None:
                self._sizes[key] = size


class OpenObject:
    """An object, readable in parts, also after it was removed; closes itself at the end of a `with`.

    The bytes are not compared with the key here: whoever has put them together does that.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size_bytes = os.fstat(self._descriptor).st_size
        self._path = path

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def path(self) -> Path:
        """The file that is this object and nothing else, for another process on this host; until it is removed."""
        return self._path

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`. Raises TransferError if there are fewer, or the disk fails."""
        with disk_trouble(f"object {self._path.name[:12]} cannot be read"):
            data = os.pread(self._descriptor, length, offset)
        if len(data) != length:
            raise TransferError(
                f"object {self._path.name[:12]} has {self._size_bytes} bytes", expected=f"{length} from {offset}"
            )
        return data

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> OpenObject:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _holds(path: Path, data: Bytes) -> bool:
    """Whether the file has these bytes; a damaged one has not, and is written again."""
    view = memoryview(data).cast("B")
    try:
        check_file(path)
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != len(view):
                return False
            # Two `bytes` compare as fast as memory is read, memoryviews element by element.
            parts = range(0, len(view), _COMPARED_BYTES)
            return all(file.read(_COMPARED_BYTES) == bytes(view[at : at + _COMPARED_BYTES]) for at in parts)
    except (FileNotFoundError, NotAFile):
        return False


def _lost(key: str) -> LostObject:
    return LostObject(f"object {key[:12]} is not there", to_do="get it again")
