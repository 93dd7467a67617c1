"""The board: a small shared file per device, on which a serving engine, the executor and a guest see one another.

Three halves, each with one writer: *serving* (the probe in the serving engine), *quota* (the executor) and *guest*
(the guest's scheduler). A half holds its state twice, in two banks that are written in turn, each in one call.

Invariants
- A reader takes the newest bank whose checksum holds. A writer killed at any store leaves the state before valid.
- What is torn, stale, of another layout, of another boot, cut short or never written is seen as such: the state is
  unknown, and `why` says so. No reading raises.
- A half never has two writers: its writer holds the kernel's lock on it, and the kernel drops that with the process.
- The file is read and written, never mapped: a mapped file that somebody cuts short kills whoever touches it, and one
  of these processes serves.
- Only the owner of the quota half makes a board or makes it whole again. It never takes a file for one that is not.
- Time is the monotonic clock: a jump of the machine's date makes nothing stale and nothing fresh.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import struct
import time
import zlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from rose.errors import ClusterError, ContractError
from rose_executor.board_states import GuestState, Quota, Reading, ServingState

S = TypeVar("S", ServingState, Quota, GuestState)

MAGIC = b"ROSEBORD"
LAYOUT = 4
BOARD_BYTES = 2048

_HEADER = struct.Struct("<8sQ16s")
"""Magic, layout version, the machine's boot."""

_HALF_BYTES = 512
_BANK_BYTES = _HALF_BYTES // 2
_VALUES = 29
_BANK = struct.Struct(f"<{2 + _VALUES}q")
"""Number of the write, when it was made in nanoseconds, the state's values; a checksum of all that follows."""
_CHECKSUM = struct.Struct("<Q")

# struct flock of 64-bit Linux: type, whence, start, length, pid (0 for a lock of an open file description).
_FLOCK = struct.Struct("hhqqi4x")
_CLAIM_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Half(Generic[S]):
    """Where a half lies, what it holds, and the age in seconds from which it counts as stale."""

    name: str
    offset: int
    kind: type[S]
    stale_after_s: float

    @property
    def columns(self) -> tuple[tuple[str, object], ...]:
        """Name and type of each value, in the order in which they stand in a bank."""
        return _COLUMNS[self.name]


# A writer beats at least every HEARTBEAT_S. The limits leave room for a process that a busy machine kept waiting:
# a gate that shuts too often costs rollouts, one that stays open for half a second costs serving one bad half-second.
HEARTBEAT_S = 0.05
SERVING: Half[ServingState] = Half("serving", 512, ServingState, 0.5)
QUOTA: Half[Quota] = Half("quota", 1024, Quota, 0.5)
GUEST: Half[GuestState] = Half("guest", 1536, GuestState, 2.0)


_COLUMNS = {
    half.name: tuple((field.name, field.type) for field in fields(half.kind)) for half in (SERVING, QUOTA, GUEST)
}


class BoardReader:
    """Any process's side. Raises ClusterError if the file cannot be opened; what is in it, readings say."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = _open(path, os.O_RDONLY)
        self._seen: dict[str, tuple[bytes, _Held[Any] | str]] = {}

    def read(self, half: Half[S], now_s: float) -> Reading[S]:
        """The state of a half at `now_s` of the monotonic clock."""
        try:
            page = os.pread(self._fd, BOARD_BYTES, 0)
        except OSError as error:
            return Reading(None, why=f"cannot be read: {error.strerror}")
        # Most looks find what the one before has found, only older.
        seen = self._seen.get(half.name)
        if seen is None or seen[0] != page:
            seen = self._seen[half.name] = page, _held(page, half)
        return _aged(seen[1], half, now_s)

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
            _lock(self._fd, path, half)
            self._number = _newest(os.pread(self._fd, BOARD_BYTES, 0), half)
        except BaseException:
            os.close(self._fd)
            raise

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
        os.pwrite(self._fd, bank, self._half.offset + _BANK_BYTES * (number % 2))
        self._number = number

    def whole(self) -> bool:
        """Whether readers still find the board: not cut short, of this layout, under its name. A few microseconds."""
        return (
            os.fstat(self._fd).st_size == BOARD_BYTES
            and os.pread(self._fd, _HEADER.size, 0) == _header()
            and _same_file(self._fd, self.path)
        )

    def close(self) -> None:
        os.close(self._fd)
        self._fd = -1


def claim_quota(path: Path) -> HalfWriter[Quota]:
    """Make the board, or take over one that is there, and become the writer of its quota half.

    What the serving engine and a guest wrote on a board of this layout stays. Raises ClusterError if another executor
    holds it, if the file is something else, or if it cannot be made (no space, no permission).
    """
    for _ in range(_CLAIM_ATTEMPTS):
        fd = _open(path, os.O_RDWR | os.O_CREAT)
        try:
            _lock(fd, path, QUOTA)
            if not _same_file(fd, path):
                continue
            _make_whole(fd, path)
        finally:
            # The writer takes the lock anew; whoever comes between is refused there or refuses us.
            os.close(fd)
        return HalfWriter(path, QUOTA)
    raise ClusterError(f"the board {path} is replaced again and again", to_do="look for what else writes there")


@dataclass(frozen=True, slots=True)
class _Held(Generic[S]):
    """What a half holds, however old it is by now."""

    number: int
    written_at_s: float
    state: S


def decode(page: bytes, half: Half[S], now_s: float) -> Reading[S]:
    """What a half of a board's bytes says at `now_s`."""
    return _aged(_held(page, half), half, now_s)


def _held(page: bytes, half: Half[S]) -> _Held[S] | str:
    """Or why that cannot be known."""
    if len(page) < BOARD_BYTES:
        return f"the board is cut short: {len(page)} of {BOARD_BYTES} bytes"
    if page[: _HEADER.size] != _header():
        return _wrong_header(page)
    newest = max((bank for at in (0, 1) if (bank := _bank(page, half, at)) is not None), default=None)
    if newest is None:
        empty = not any(page[half.offset : half.offset + _HALF_BYTES])
        return f"the {half.name} half {'was never written' if empty else 'is torn'}"
    number, written_at_ns, *values = newest
    return _Held(number, written_at_ns / 1e9, _state(half, values))


def _aged(held: _Held[S] | str, half: Half[S], now_s: float) -> Reading[S]:
    if isinstance(held, str):
        return Reading(None, why=held)
    age_s = now_s - held.written_at_s
    # A little ahead is a write between the reader's look at the clock and at the board; far ahead is nonsense.
    if not -half.stale_after_s <= age_s <= half.stale_after_s:
        return Reading(None, held.number, f"the {half.name} half is {age_s:.1f} s old")
    return Reading(held.state, held.number)


def encode(half: Half[S], state: S, number: int, written_at_ns: int) -> bytes:
    """One bank. Raises ContractError for a value that does not fit, or is no number."""
    try:
        values = [
            round(getattr(state, name) * 1e9) if type_name == "float" else int(getattr(state, name))
            for name, type_name in half.columns
        ]
        body = _BANK.pack(number, written_at_ns, *values, *[0] * (_VALUES - len(values)))
    except (struct.error, ValueError, OverflowError) as error:
        raise ContractError(f"{state} cannot stand on a board: {error}", expected="64-bit numbers") from error
    return body + _CHECKSUM.pack(_checksum(body, half))


def _state(half: Half[S], values: list[int]) -> S:
    def value(type_name: object, word: int) -> Any:
        if type_name == "float":
            return word / 1e9
        return bool(word) if type_name == "bool" else word

    return half.kind(*(value(type_name, word) for (_, type_name), word in zip(half.columns, values, strict=False)))


def _bank(page: bytes, half: Half[S], at: int) -> tuple[int, ...] | None:
    """The words of one bank, None where its checksum does not hold."""
    start = half.offset + at * _BANK_BYTES
    body = page[start : start + _BANK.size]
    (checksum,) = _CHECKSUM.unpack_from(page, start + _BANK.size)
    return _BANK.unpack(body) if checksum == _checksum(body, half) else None


def _newest(page: bytes, half: Half[S]) -> int:
    """The highest number that a half holds, 0 where it holds none."""
    return max((bank[0] for at in (0, 1) if (bank := _bank(page, half, at)) is not None), default=0)


def _checksum(body: bytes, half: Half[S]) -> int:
    # Another for the same bytes in another half, and not 0 for a bank of zeros.
    return zlib.crc32(body, half.offset)


def _header() -> bytes:
    return _HEADER.pack(MAGIC, LAYOUT, _boot())


@functools.cache
def _boot() -> bytes:
    """Which start of the machine this is: the monotonic clock begins anew with each."""
    text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return bytes.fromhex(text.strip().replace("-", ""))


def _wrong_header(page: bytes) -> str:
    magic, layout, _ = _HEADER.unpack_from(page)
    if magic != MAGIC:
        return "the file is not a board"
    return f"the board has layout {layout}, not {LAYOUT}" if layout != LAYOUT else "the board is of another boot"


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ClusterError(
            f"cannot open the board {path}: {error.strerror}", expected="a file that executor and engines share"
        ) from error


def _lock(fd: int, path: Path, half: Half[S]) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, half.offset, _HALF_BYTES, 0))
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise ClusterError(f"cannot lock the {half.name} half of {path}: {error.strerror}") from error
        raise ClusterError(
            f"the {half.name} half of the board {path} has a live writer",
            expected="one of each per device",
            to_do="end the other one, or give this one a board of its own",
        ) from error


def _same_file(fd: int, path: Path) -> bool:
    try:
        named, held = path.stat(), os.fstat(fd)
    except OSError:
        return False
    return (named.st_ino, named.st_dev) == (held.st_ino, held.st_dev)


def _make_whole(fd: int, path: Path) -> None:
    """Write an empty board, unless a whole one is there. The header comes last, so no reader takes a part for it."""
    page = os.pread(fd, BOARD_BYTES + 1, 0)
    if len(page) == BOARD_BYTES and page[: _HEADER.size] == _header():
        return
    # A board cut short in which somebody wrote on begins with a hole.
    if not MAGIC.startswith(page[: len(MAGIC)].rstrip(b"\0")):
        raise ClusterError(f"{path} is something else than a board", to_do="name another file, or remove it")
    try:
        os.ftruncate(fd, 0)
        os.posix_fallocate(fd, 0, BOARD_BYTES)
        os.pwrite(fd, _header(), 0)
    except OSError as error:
        raise ClusterError(f"cannot make the board {path}: {error.strerror}") from error
