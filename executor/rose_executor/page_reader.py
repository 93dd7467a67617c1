"""Any process's side of an engine's token page. Its layout and invariants: `token_page`.

Invariant
- The page is read, never mapped: a mapped file that somebody cuts short kills whoever touches it, and a page may be a
  dead engine's, or a file that somebody has put there. What is no page any more is an error that names it.
"""

from __future__ import annotations

import os
import stat
import struct
import weakref
from collections.abc import Iterable
from pathlib import Path

from rose.errors import EngineError
from rose_executor.quick_file import QuickReader
from rose_executor.token_page import (
    BANK_WORDS,
    BANKS,
    COMMIT,
    FREE,
    H_INCARNATION,
    H_KV_TOKENS,
    H_LAYOUT,
    H_MAGIC,
    H_PID,
    H_SLOTS,
    H_STEPPED_AT_NS,
    H_STEPS,
    H_TOKEN_NS,
    H_VERSION,
    HEADER_WORDS,
    LAYOUT,
    MAGIC,
    RUNNING,
    SLOT_WORDS,
    SLOTS_MAX,
    RequestCount,
    Slot,
    request_key,
)

_HEADER = struct.Struct(f"<{HEADER_WORDS}q")
_SLOT = struct.Struct(f"<{SLOT_WORDS}q")
_ATTEMPTS = 1000
"""At a slot that is written to meanwhile. An engine does that once per step, and three reads take microseconds."""


class PageReader:
    """Any process's side; stays readable after the writer's death and after the file was removed.

    Raises EngineError if the file is missing, empty, too short, or not a page of this layout; so does each reading of
    one that was cut short, or is another page, since.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # What is no file, such as a pipe, is not waited for.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise self._refused(str(error)) from error
        self._closed = weakref.finalize(self, os.close, self._fd)
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            raise self._refused("is no regular file")
        size = found.st_size
        if size < _HEADER.size or size % 8:
            raise self._refused(f"has {size} bytes")
        self._header_file, self._slot_file = QuickReader(_HEADER.size), QuickReader(_SLOT.size)
        header: tuple[int, ...] = _HEADER.unpack(self._read(self._header_file, _HEADER.size))
        if header[H_MAGIC] != MAGIC:
            raise self._refused("does not begin with the page's magic")
        if header[H_LAYOUT] != LAYOUT:
            raise self._refused(f"has layout {header[H_LAYOUT]}")
        self._count = header[H_SLOTS]
        if not 1 <= self._count <= SLOTS_MAX or size != _HEADER.size + self._count * _SLOT.size:
            raise self._refused(f"has {size} bytes for {self._count} slots")
        self._begins = header[: H_INCARNATION + 1]
        self._slots_file = QuickReader(self._count * _SLOT.size)

    def _refused(self, why: str) -> EngineError:
        return EngineError(
            f"{self.path} is not a readable token page: {why}",
            expected=f"a page of layout {LAYOUT} written by a live or dead engine",
        )

    @property
    def incarnation(self) -> str:
        """16 hex digits; another at every start of an engine."""
        return f"{self._begins[H_INCARNATION] & (2**64 - 1):016x}"

    @property
    def pid(self) -> int:
        """Process id of the engine core that writes, or wrote, this page."""
        return self._begins[H_PID]

    @property
    def version(self) -> int:
        """Weight version in force."""
        return self._header()[H_VERSION]

    @property
    def steps(self) -> int:
        """Engine steps finished so far: the heartbeat of an engine that has work."""
        return self._header()[H_STEPS]

    @property
    def stepped_at_s(self) -> float:
        """`time.time()` of the last finished step, 0 before the first."""
        return self._header()[H_STEPPED_AT_NS] / 1e9

    @property
    def kv_tokens(self) -> int:
        """For how many tokens there is KV memory, 0 if that was not told."""
        return self._header()[H_KV_TOKENS]

    @property
    def token_s(self) -> float:
        """How long it takes to compute one token of a context, 0 as long as it is unknown."""
        return self._header()[H_TOKEN_NS] / 1e9

    def total(self) -> int:
        """Tokens that this incarnation sampled and kept, all requests together. Never decreases."""
        return sum(tokens + retired for _, _, tokens, retired, *_ in self._banks())

    def request(self, request_id: str) -> RequestCount | None:
        """The count of one request; None if it is not known here (yet), or its slot was reused since."""
        return self.requests((request_id,)).get(request_id)

    def requests(self, request_ids: Iterable[str]) -> dict[str, RequestCount]:
        """The counts of many in one pass over the page, in their order; without those that are not known here."""
        ids: dict[tuple[int, ...], str] = {request_key(request_id): request_id for request_id in request_ids}
        found: dict[str, RequestCount] = {}
        for bank in self._banks():
            request_id = ids.get(bank[:2])
            if request_id is None:
                continue
            slot = Slot(*bank)
            if slot.state != FREE and (request_id not in found or slot.state == RUNNING):
                found[request_id] = slot.count()
        return {request_id: found[request_id] for request_id in ids.values() if request_id in found}

    def close(self) -> None:
        self._closed()
        self._fd = -1

    def discard(self) -> None:
        """Close, and remove the file: the ledger has read it."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _header(self) -> tuple[int, ...]:
        header: tuple[int, ...] = _HEADER.unpack(self._read(self._header_file, _HEADER.size))
        if header[: len(self._begins)] != self._begins:
            raise self._refused("it is another file's content by now")
        return header

    def _banks(self) -> list[tuple[int, ...]]:
        """The state of each slot, whole: the words of its valid bank."""
        before, during, after = (self._read(self._slots_file, self._count * _SLOT.size, _HEADER.size) for _ in range(3))
        self._header()
        banks = [_valid(words) for words in _SLOT.iter_unpack(during)]
        if before != after:
            earlier, later = (memoryview(page).cast("q")[COMMIT::SLOT_WORDS].tolist() for page in (before, after))
            for at in (at for at, commit in enumerate(earlier) if commit != later[at]):
                banks[at] = self._settled(at)
        return banks

    def _settled(self, at: int) -> tuple[int, ...]:
        """The same of a slot that was written to meanwhile."""
        offset = _HEADER.size + at * _SLOT.size
        for _ in range(_ATTEMPTS):
            before, during, after = (self._read(self._slot_file, _SLOT.size, offset) for _ in range(3))
            if before[: 8 * (COMMIT + 1)] == after[: 8 * (COMMIT + 1)]:
                return _valid(_SLOT.unpack(during))
        raise self._refused(f"slot {at} changes as fast as it is read")

    def _read(self, file: QuickReader, size: int, offset: int = 0) -> bytes:
        try:
            content = file.read(self._fd, offset)
        except OSError as error:
            raise self._refused(str(error)) from error
        if len(content) < size:
            raise self._refused("it was cut short")
        return content


def _valid(slot: tuple[int, ...]) -> tuple[int, ...]:
    bank = BANKS[slot[COMMIT] % 2]
    return slot[bank : bank + BANK_WORDS]
