"""A folder of objects that are fetched: those that are there, and those that are arriving.

    objects/<key>      whole, with the hash of its key
    arriving/<key>     in parts, see `arrival`
    lock               held by the one that uses the folder

Invariants
- One at a time uses a folder: what another one maps and this one truncates would kill both. In a process that was
  forked from that one the shelf is closed.
- What `has` says is here was compared with its key just now: a loss of power, or a disk that fails, spoils what it
  likes.
- An object is taken in by a rename: a killed process leaves it here or there, never in between.
- What is in use is not tidied away: it was entered before it was looked for.
- The thread of `disk` does all work on an object, in its order: what a fetch that was given up has begun ends before
  the next one looks at that object.

Methods that read or write the disk take their time, and may be called from threads.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rose.logs import logger
from rose_transfer.distribution.arrival import Arrival, room_bytes
from rose_transfer.store import LostObject, Objects
from rose_transfer.store.files import NotAFile, check_file, disk_trouble, files_in, is_file, strangers_in
from rose_transfer.store.objects import is_key
from rose_transfer.store.roles import Role, hold_alone, is_held

log = logger("weights")
_DISK_THREADS = 4


class Shelf:
    """The shelf in `folder`, until `close`; what lies in the folder of objects `beside` is linked, not fetched.

    Raises TransferError if the folder cannot be used, is of another role (see `roles`), or another one uses it.
    """

    def __init__(self, folder: Path, beside: Path | None) -> None:
        self.objects_folder = folder / "objects"
        self._arriving = folder / "arriving"
        self._lock = hold_alone(folder, Role.RECEIVER)
        try:
            with disk_trouble(f"{folder} cannot be used for what arrives"):
                for made in (self.objects_folder, self._arriving):
                    made.mkdir(exist_ok=True)
                for folder in (self.objects_folder, self._arriving):
                    for what in strangers_in(folder).values():
                        log.warning("what is no file is passed over", what=what)
            self.objects = Objects(self.objects_folder)
            self.objects.remove_drafts()
        except BaseException:
            os.close(self._lock)
            raise
        self._beside = beside
        self._guard = threading.Lock()
        self._in_use: set[str] = set()
        self._disks = [ThreadPoolExecutor(1, thread_name_prefix="rose-shelf") for _ in range(_DISK_THREADS)]

    def close(self) -> None:
        """Let another one use the folder, once what is being done with objects has ended. What is here stays."""
        for disk in self._disks:
            disk.shutdown()
        if not self.closed:
            os.close(self._lock)
            self._lock = -1

    @property
    def closed(self) -> bool:
        return not is_held(self._lock)

    def disk(self, key: str) -> ThreadPoolExecutor:
        """Does one thing after the other with that object; others may be in other threads."""
        return self._disks[int(key[:8], 16) % _DISK_THREADS]

    def use(self, key: str) -> None:
        """Do not tidy this object away, here by now or not, until `release`."""
        with self._guard:
            self._in_use.add(key)

    def release(self) -> None:
        """Nothing is in use any more."""
        with self._guard:
            self._in_use.clear()

    def has(self, key: str) -> bool:
        """Whether the object is here; a damaged one is not. Raises TransferError if the disk fails."""
        if not is_key(key):
            return False
        if _hash_of(self.objects_folder / key) == key:
            return True
        # Who fetched it may have died behind its last byte.
        if self._link(self._arriving / key):
            self._drop_arriving(key)
            return True
        return self._beside is not None and self._link(self._beside / key)

    def arrival(self, key: str, bytes_max: int) -> Arrival:
        """Where the object of that key is fetched into."""
        return Arrival(self._arriving / key, bytes_max)

    def missing_bytes(self, sizes: Mapping[str, int | None]) -> int:
        """What the disk must have free for those of these objects that are not here, nor have their room reserved."""
        missing_bytes = 0
        for key, size_bytes in sizes.items():
            if not self.objects.has(key):
                arriving = self._arriving / key
                reserved_bytes = arriving.lstat().st_blocks * 512 if is_file(arriving) else 0
                missing_bytes += max(0, room_bytes(size_bytes or 0) - reserved_bytes)
        return missing_bytes

    def take(self, key: str) -> None:
        """Keep what has arrived whole. Raises LostObject, and removes it, if its hash is another, or TransferError."""
        sound = self._link(self._arriving / key)
        self._drop_arriving(key)
        if not sound:
            raise LostObject(f"what was received is not object {key[:12]}", to_do="get it again, or from elsewhere")

    def keep_only(self, needed: Collection[str]) -> None:
        """Remove everything else that is not in use, what is arriving included. Raises TransferError.

        Files that are not of a shelf stay.
        """
        with disk_trouble(f"{self._arriving} cannot be tidied"):
            arriving = {name for name, _ in files_in(self._arriving) if is_key(name)}
        for key in arriving.union(self.objects.known()):
            with self._guard:
                if key not in needed and key not in self._in_use:
                    self.objects.remove(key)
                    if key in arriving:
                        self._drop_arriving(key)

    def _drop_arriving(self, key: str) -> None:
        with disk_trouble(f"{self._arriving} cannot be tidied"):
            (self._arriving / key).unlink(missing_ok=True)

    def _link(self, path: Path) -> bool:
        """Take in what lies at `path`, if it has the hash of its name."""
        sound = _hash_of(path) == path.name
        if sound:
            self.objects.adopt(path)
        return sound


def _hash_of(path: Path) -> str | None:
    """None if there is no such file, or not any more."""
    with disk_trouble(f"{path} cannot be read"):
        try:
            check_file(path)
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except (FileNotFoundError, NotAFile):
            return None
