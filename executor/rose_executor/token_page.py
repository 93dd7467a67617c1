"""The token page: what an engine has generated, counted by the engine, readable after its death.

A memory-mapped file of 64-bit words. One writer (the engine core), any number of readers, in any process.

Invariants
- The total is the sum of the slots and stands nowhere else, so the two cannot disagree, at whatever
  instruction the writer is killed.
- A slot keeps its state in two banks; commit number `n` says that bank `n % 2` is the valid one. The writer
  fills the other bank and then stores `n + 1`, one aligned 8-byte word. A reader that finds the same commit
  before and after has read a whole state: the writer cannot have touched that bank in between. A writer
  killed half-way leaves the old state valid.
- A running request's slot is never reused. Finished ones are, oldest first; the tokens of a slot's earlier
  requests stay in its `retired` count.
- A page appears under its name complete, and belongs to one incarnation of one engine for ever. Its writer holds the
  kernel's lock on it (flock), and the kernel drops that with the process.

Stores become visible in program order on x86-64. Elsewhere a *live* reader may see them late, never torn
after the writer has ended.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rose.errors import EngineError

MAGIC = int.from_bytes(b"ROSEPAGE", "little")
LAYOUT = 1

_HEADER_WORDS = 16
_H_MAGIC, _H_LAYOUT, _H_SLOTS, _H_PID, _H_INCARNATION, _H_STEPS, _H_STEPPED_AT_NS, _H_VERSION = range(8)

_SLOT_WORDS = 16
_COMMIT = 0
_BANKS = (1, 8)
_BANK_WORDS = 7

_FREE, _RUNNING, _FINISHED = 0, 1, 2
_NO_VERSION = -1


@dataclass(frozen=True, slots=True)
class RequestCount:
    """What the engine sampled and kept for one request; versions are None while `tokens` is 0."""

    tokens: int
    first_version: int | None
    last_version: int | None
    finished: bool


@dataclass(slots=True)
class _Slot:
    """One bank's content. `retired` counts the tokens of the requests that held this slot before."""

    key_high: int
    key_low: int
    tokens: int
    retired: int
    first_version: int
    last_version: int
    state: int

    def words(self) -> tuple[int, ...]:
        return (
            self.key_high,
            self.key_low,
            self.tokens,
            self.retired,
            self.first_version,
            self.last_version,
            self.state,
        )


def request_key(request_id: str) -> tuple[int, int]:
    """The 16-byte blake2b of a request id, as the two signed words that a slot holds."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(digest[8:], "little", signed=True)


class PageWriter:
    """The engine core's side: creates the page and counts into it.

    `slots` must be at least the number of requests that can be unfinished at once; more of them keep
    finished requests readable for longer. `incarnation` is up to 16 hex digits.
    Raises EngineError if the page cannot be written.
    """

    def __init__(self, path: Path, *, incarnation: str, slots: int, version: int = 0) -> None:
        size = 8 * (_HEADER_WORDS + slots * _SLOT_WORDS)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self._file = draft.open("w+b")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self._file.fileno(), 0, size)
            self._map = mmap.mmap(self._file.fileno(), size)
            self._words = memoryview(self._map).cast("q")
            self._words[_H_LAYOUT] = LAYOUT
            self._words[_H_SLOTS] = slots
            self._words[_H_PID] = os.getpid()
            self._words[_H_INCARNATION] = _signed(int(incarnation, 16))
            self._words[_H_VERSION] = version
            self._words[_H_MAGIC] = MAGIC
            draft.rename(path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise EngineError(f"cannot create the token page {path}: {error}") from error
        self._free = deque(range(slots))
        self._finished: deque[int] = deque()
        self._held: dict[str, int] = {}
        self._slots = [_Slot(0, 0, 0, 0, _NO_VERSION, _NO_VERSION, _FREE) for _ in range(slots)]

    @property
    def version(self) -> int:
        """The weight version in force: that of every token counted from now on."""
        return self._words[_H_VERSION]

    @version.setter
    def version(self, version: int) -> None:
        self._words[_H_VERSION] = version

    def stepped(self) -> None:
        """The engine has finished one step."""
        self._words[_H_STEPPED_AT_NS] = time.time_ns()
        self._words[_H_STEPS] += 1

    def add(self, request_id: str, tokens: int) -> None:
        """Count `tokens` more, sampled under the version in force, for a request.

        Raises EngineError if every slot is held by a running request.
        """
        at = self._held.get(request_id)
        if at is None:
            at = self._held[request_id] = self._take(request_id)
        slot = self._slots[at]
        if slot.tokens == 0:
            slot.first_version = self.version
        slot.tokens += tokens
        slot.last_version = self.version
        self._commit(at)

    def finish(self, request_id: str) -> RequestCount:
        """The request will get no more tokens; what it got. One that never got any is put on the page with none.

        Raises EngineError as `add` does.
        """
        at = self._held.pop(request_id, None)
        if at is None:
            at = self._take(request_id)
        self._slots[at].state = _FINISHED
        self._finished.append(at)
        self._commit(at)
        return _count_of(self._slots[at])

    def close(self) -> None:
        self._words.release()
        self._map.close()
        self._file.close()

    def _take(self, request_id: str) -> int:
        if not self._free and not self._finished:
            raise EngineError(
                f"all {len(self._slots)} slots of the token page are held by running requests",
                expected="no more unfinished requests than slots",
            )
        at = self._free.popleft() if self._free else self._finished.popleft()
        slot = self._slots[at]
        slot.key_high, slot.key_low = request_key(request_id)
        slot.retired += slot.tokens
        slot.tokens = 0
        slot.first_version = slot.last_version = _NO_VERSION
        slot.state = _RUNNING
        return at

    def _commit(self, at: int) -> None:
        base = _HEADER_WORDS + at * _SLOT_WORDS
        commit = self._words[base + _COMMIT] + 1
        bank = base + _BANKS[commit % 2]
        for offset, word in enumerate(self._slots[at].words()):
            self._words[bank + offset] = word
        self._words[base + _COMMIT] = commit


class PageReader:
    """Any process's side; stays readable after the writer's death and after the file was removed.

    Raises EngineError if the file is missing, empty, too short, or not a page of this layout.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < 8 * _HEADER_WORDS:
                    raise self._refused(f"has {size} bytes")
                self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except OSError as error:
            raise self._refused(str(error)) from error
        self._words = memoryview(self._map).cast("q")
        if self._words[_H_MAGIC] != MAGIC:
            raise self._refused("does not begin with the page's magic")
        if self._words[_H_LAYOUT] != LAYOUT:
            raise self._refused(f"has layout {self._words[_H_LAYOUT]}")
        self._count = self._words[_H_SLOTS]
        if self._count < 1 or size != 8 * (_HEADER_WORDS + self._count * _SLOT_WORDS):
            raise self._refused(f"has {size} bytes for {self._count} slots")

    def _refused(self, why: str) -> EngineError:
        return EngineError(
            f"{self.path} is not a readable token page: {why}",
            expected=f"a page of layout {LAYOUT} written by a live or dead engine",
        )

    @property
    def incarnation(self) -> str:
        """16 hex digits; another at every start of an engine."""
        return f"{self._words[_H_INCARNATION] & (2**64 - 1):016x}"

    @property
    def pid(self) -> int:
        """Process id of the engine core that writes, or wrote, this page."""
        return self._words[_H_PID]

    @property
    def version(self) -> int:
        """Weight version in force."""
        return self._words[_H_VERSION]

    @property
    def steps(self) -> int:
        """Engine steps finished so far: the heartbeat of an engine that has work."""
        return self._words[_H_STEPS]

    @property
    def stepped_at_s(self) -> float:
        """`time.time()` of the last finished step, 0 before the first."""
        return self._words[_H_STEPPED_AT_NS] / 1e9

    def total(self) -> int:
        """Tokens that this incarnation sampled and kept, all requests together. Never decreases."""
        total = 0
        for at in range(self._count):
            slot = self._read(at)
            total += slot.tokens + slot.retired
        return total

    def request(self, request_id: str) -> RequestCount | None:
        """The count of one request; None if it is not known here (yet), or its slot was reused since."""
        return self.requests((request_id,)).get(request_id)

    def requests(self, request_ids: Iterable[str]) -> dict[str, RequestCount]:
        """The counts of many in one pass over the page, in their order; without those that are not known here."""
        ids = {request_key(request_id): request_id for request_id in request_ids}
        found: dict[str, RequestCount] = {}
        for at in range(self._count):
            slot = self._read(at)
            request_id = ids.get((slot.key_high, slot.key_low))
            if request_id is None or slot.state == _FREE:
                continue
            if request_id not in found or slot.state == _RUNNING:
                found[request_id] = _count_of(slot)
        return {request_id: found[request_id] for request_id in ids.values() if request_id in found}

    def close(self) -> None:
        self._words.release()
        self._map.close()

    def discard(self) -> None:
        """Close, and remove the file: the ledger has read it."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _read(self, at: int) -> _Slot:
        base = _HEADER_WORDS + at * _SLOT_WORDS
        commit = self._words[base + _COMMIT]
        while True:
            bank = base + _BANKS[commit % 2]
            slot = _Slot(*self._words[bank : bank + _BANK_WORDS])
            again = self._words[base + _COMMIT]
            if again == commit:
                return slot
            commit = again


def _count_of(slot: _Slot) -> RequestCount:
    finished = slot.state == _FINISHED
    if slot.tokens == 0:
        return RequestCount(0, None, None, finished)
    return RequestCount(slot.tokens, slot.first_version, slot.last_version, finished)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
