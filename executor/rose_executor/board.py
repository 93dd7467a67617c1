"""The board: a small shared file per device, on which a serving engine, the executor and a guest see one another.

Four halves, each with one writer: *serving* (the probe in the serving engine, or the executor's observer where there
is none), *quota* (the executor), *guest* (the guest's scheduler) and *serving KV* (the serving engine's core, where it
gives memory back). A half holds its last two states, in two banks that are written in turn, each in one call.

Invariants
- A reader takes the newest bank whose checksum holds. A writer killed at any store leaves the state before valid.
- What is torn, stale, of another layout, of another boot, cut short or never written is seen as such: the state is
  unknown, and `why` says so. No reading raises.
- A half never has two writers: its writer holds the kernel's lock on it, and the kernel drops that with the process,
  whatever the process has forked.
- Writes are counted up from 1. A count that no writer gets to is not gone on with: the half is emptied for a new one.
- The file is read and written, never mapped: a mapped file that somebody cuts short kills whoever touches it, and one
  of these processes serves.
- Only the owner of the quota half makes a board or makes it whole again. It never takes a file for one that is not:
  without a board's first word it takes one only if there is nothing in it but what a board's writers leave.
- Time is the monotonic clock: a jump of the machine's date makes nothing stale and nothing fresh.
"""

from __future__ import annotations

import functools
import os
import stat
import time
from pathlib import Path
from typing import Any, Generic

from rose.errors import ClusterError
from rose_executor.board_halves import (
    BANK_BYTES,
    BOARD_BYTES,
    GUEST,
    HALF_BYTES,
    HEADER,
    HEARTBEAT_S,
    LAYOUT,
    MAGIC,
    NUMBER_MAX,
    QUOTA,
    SERVING,
    SERVING_KV,
    Half,
    Held,
    S,
    aged,
    encode,
    held,
    is_beginning,
    newest,
)
from rose_executor.board_locks import close_locked, has_writer, lock_half
from rose_executor.board_states import Quota, Reading
from rose_executor.quick_file import QuickReader, write_at

__all__ = [
    "GUEST",
    "HEARTBEAT_S",
    "QUOTA",
    "SERVING",
    "SERVING_KV",
    "BoardReader",
    "Half",
    "HalfWriter",
    "S",
    "claim_quota",
]

_CLAIM_ATTEMPTS = 5


class BoardReader:
    """Any process's side, in one of its threads. Raises ClusterError if the file cannot be opened; what is in it,
    readings say.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = _open(path, os.O_RDONLY)
        self._file = QuickReader(BOARD_BYTES)
        self._header = header()
        self._seen: dict[str, tuple[bytes, Held[Any] | str]] = {}
        self._unreadable = ""

    def read(self, half: Half[S], now_s: float) -> Reading[S]:
        """The state of a half at `now_s` of the monotonic clock."""
        return self.said(half, self.page(), now_s)

    def page(self) -> bytes:
        """The whole board as it is now, for `said`; empty where it cannot be read."""
        try:
            page, self._unreadable = self._file.read(self._fd), ""
        except OSError as error:
            page, self._unreadable = b"", f"cannot be read: {error.strerror}"
        return page

    def said(self, half: Half[S], page: bytes, now_s: float) -> Reading[S]:
        """The state of a half on a `page` of this board, at `now_s`: for whoever asks several halves at once."""
        if len(page) != BOARD_BYTES or not page.startswith(self._header):
            return Reading(None, why=self._unreadable or str(held(page, half, self._header)))
        # Most looks find what the one before has found, only older; the other halves are none of this one's business.
        own = page[half.offset : half.offset + HALF_BYTES]
        seen = self._seen.get(half.name)
        if seen is None or seen[0] != own:
            seen = self._seen[half.name] = own, held(page, half, self._header)
        return aged(seen[1], half, now_s)

    def read_of_living(self, half: Half[S], now_s: float) -> Reading[S]:
        """The same, unknown if the half has no live writer: what a dead one wrote last is nobody's state."""
        reading = self.read(half, now_s)
        if reading.state is None or has_writer(self._fd, half):
            return reading
        return Reading(None, reading.number, f"the {half.name} half has no live writer")

    def replaced(self) -> bool:
        """Whether another file, or none, has the board's name now."""
        return not _same_file(self._fd, self.path)

    def close(self) -> None:
        os.close(self._fd)
        self._fd = -1


class HalfWriter(Generic[S]):
    """The one writer of a half; see `claim_quota` for the quota's.

    Raises ClusterError if the file cannot be opened, is no whole board, or the half has a live writer.
    """

    def __init__(self, path: Path, half: Half[S]) -> None:
        self.path = path
        self._half: Half[S] = half
        self._fd = _open(path, os.O_RDWR)
        try:
            if not self.whole():
                raise ClusterError(f"{path} is not a whole board of layout {LAYOUT}", to_do="start the executor first")
            lock_half(self._fd, path, half)
            self._number = self._last_number()
        except BaseException:
            close_locked(self._fd)
            raise

    def _last_number(self) -> int:
        """Of the last writer; 0, and nothing of it left, where it is none that a writer gets to, or goes on from."""
        number = newest(os.pread(self._fd, BOARD_BYTES, 0), self._half)
        if 0 <= number <= NUMBER_MAX:
            return number
        try:
            write_at(self._fd, bytes(HALF_BYTES), self._half.offset)
        except OSError as error:
            raise ClusterError(f"cannot empty the {self._half.name} half of {self.path}: {error.strerror}") from error
        return 0

    @property
    def number(self) -> int:
        """Of the last write."""
        return self._number

    def write(self, state: S) -> None:
        """Put a state on the board, or the same again as a heartbeat.

        Raises ContractError for a value that no board holds, OSError if the file system refuses.
        """
        number = self._number + 1
        bank = encode(self._half, state, number, time.monotonic_ns())
        write_at(self._fd, bank, self._half.offset + BANK_BYTES * (number % 2))
        self._number = number

    def whole(self) -> bool:
        """Whether readers still find the board: not cut short, of this layout, under its name. A few microseconds."""
        return (
            os.fstat(self._fd).st_size == BOARD_BYTES
            and os.pread(self._fd, HEADER.size, 0) == header()
            and _same_file(self._fd, self.path)
        )

    def close(self) -> None:
        close_locked(self._fd)
        self._fd = -1


def claim_quota(path: Path) -> HalfWriter[Quota]:
    """Make the board, or take over one that is there, and become the writer of its quota half.

    What the serving engine and a guest wrote on a board of this layout stays. Raises ClusterError if another executor
    holds it, if the file is something else, or if it cannot be made (no space, no permission).
    """
    for _ in range(_CLAIM_ATTEMPTS):
        fd = _open(path, os.O_RDWR | os.O_CREAT)
        try:
            lock_half(fd, path, QUOTA)
            if not _same_file(fd, path):
                continue
            _make_whole(fd, path)
        finally:
            # The writer takes the lock anew; whoever comes between is refused there or refuses us.
            close_locked(fd)
        return HalfWriter(path, QUOTA)
    raise ClusterError(f"the board {path} is replaced again and again", to_do="look for what else writes there")


@functools.cache
def header() -> bytes:
    """What a board of this boot begins with."""
    return HEADER.pack(MAGIC, LAYOUT, _boot())


@functools.cache
def _boot() -> bytes:
    """Which start of the machine this is: the monotonic clock begins anew with each."""
    text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return bytes.fromhex(text.strip().replace("-", ""))


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ClusterError(
            f"cannot open the board {path}: {error.strerror}", expected="a file that executor and engines share"
        ) from error


def _same_file(fd: int, path: Path) -> bool:
    try:
        named, held = path.stat(), os.fstat(fd)
    except OSError:
        return False
    return (named.st_ino, named.st_dev) == (held.st_ino, held.st_dev)


def _make_whole(fd: int, path: Path) -> None:
    """Write an empty board, unless a whole one is there. The header comes last, so no reader takes a part for it."""
    regular = stat.S_ISREG(os.fstat(fd).st_mode)
    page = os.pread(fd, BOARD_BYTES + 1, 0) if regular else b""
    if len(page) == BOARD_BYTES and page[: HEADER.size] == header():
        return
    if not regular or not (page.startswith(MAGIC) or is_beginning(page)):
        raise ClusterError(f"{path} is something else than a board", to_do="name another file, or remove it")
    try:
        os.ftruncate(fd, 0)
        os.posix_fallocate(fd, 0, BOARD_BYTES)
        os.pwrite(fd, header(), 0)
    except OSError as error:
        raise ClusterError(f"cannot make the board {path}: {error.strerror}") from error
