"""The engine core's side of its token page: creates it, and counts into it. Its layout and invariants: `token_page`."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import time
from collections import deque
from pathlib import Path

from rose.errors import EngineError
from rose_executor.token_page import (
    BANKS,
    COMMIT,
    FINISHED,
    FREE,
    H_INCARNATION,
    H_LAYOUT,
    H_MAGIC,
    H_PID,
    H_SLOTS,
    H_STEPPED_AT_NS,
    H_STEPS,
    H_VERSION,
    HEADER_WORDS,
    LAYOUT,
    MAGIC,
    NO_VERSION,
    RUNNING,
    SLOT_WORDS,
    RequestCount,
    Slot,
    page_bytes,
    request_key,
)


class PageWriter:
    """The engine core's side: creates the page and counts into it.

    `slots` must be at least the number of requests that can be unfinished at once, and at most SLOTS_MAX; more of them
    keep finished requests readable for longer. `incarnation` is up to 16 hex digits.
    Raises EngineError if the page cannot be written.
    """

    def __init__(self, path: Path, *, incarnation: str, slots: int, version: int = 0) -> None:
        size = page_bytes(slots)
        draft = _draft(path)
        try:
            self._file = draft.open("w+b")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self._file.fileno(), 0, size)
            self._map = mmap.mmap(self._file.fileno(), size)
            self._words = memoryview(self._map).cast("q")
            self._words[H_LAYOUT] = LAYOUT
            self._words[H_SLOTS] = slots
            self._words[H_PID] = os.getpid()
            self._words[H_INCARNATION] = _signed(int(incarnation, 16))
            self._words[H_VERSION] = version
            self._words[H_MAGIC] = MAGIC
            draft.rename(path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise EngineError(f"cannot create the token page {path}: {error}") from error
        self._free = deque(range(slots))
        self._finished: deque[int] = deque()
        self._held: dict[str, int] = {}
        self._slots = [Slot(0, 0, 0, 0, NO_VERSION, NO_VERSION, FREE) for _ in range(slots)]

    @property
    def version(self) -> int:
        """The weight version in force: that of every token counted from now on."""
        return self._words[H_VERSION]

    @version.setter
    def version(self, version: int) -> None:
        self._words[H_VERSION] = version

    def stepped(self) -> None:
        """The engine has finished one step."""
        self._words[H_STEPPED_AT_NS] = time.time_ns()
        self._words[H_STEPS] += 1

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
        self._slots[at].state = FINISHED
        self._finished.append(at)
        self._commit(at)
        return self._slots[at].count()

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
        slot.first_version = slot.last_version = NO_VERSION
        slot.state = RUNNING
        return at

    def _commit(self, at: int) -> None:
        base = HEADER_WORDS + at * SLOT_WORDS
        commit = self._words[base + COMMIT] + 1
        bank = base + BANKS[commit % 2]
        for offset, word in enumerate(self._slots[at].words()):
            self._words[bank + offset] = word
        self._words[base + COMMIT] = commit


def lacks_room(path: Path, slots: int) -> str:
    """Why a page has no room at `path` now, "" if it has, or if something else is in its way, which its writer tells.

    Room is taken and given back: what a quota leaves, and what is kept for others, only the disk itself knows.
    """
    draft = _draft(path)
    try:
        with draft.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, page_bytes(slots))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{path.parent} has no room for a token page of {page_bytes(slots)} bytes: {error.strerror}"
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    return ""


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
