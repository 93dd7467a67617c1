"""Any process's side of an engine's token page. Its layout and invariants: `token_page`."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from rose.errors import EngineError
from rose_executor.token_page import (
    BANK_WORDS,
    BANKS,
    COMMIT,
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
    RUNNING,
    SLOT_WORDS,
    RequestCount,
    Slot,
    request_key,
)


class PageReader:
    """Any process's side; stays readable after the writer's death and after the file was removed.

    Raises EngineError if the file is missing, empty, too short, or not a page of this layout.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < 8 * HEADER_WORDS or size % 8:
                    raise self._refused(f"has {size} bytes")
                self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except OSError as error:
            raise self._refused(str(error)) from error
        self._words = memoryview(self._map).cast("q")
        if self._words[H_MAGIC] != MAGIC:
            raise self._refused("does not begin with the page's magic")
        if self._words[H_LAYOUT] != LAYOUT:
            raise self._refused(f"has layout {self._words[H_LAYOUT]}")
        self._count = self._words[H_SLOTS]
        if self._count < 1 or size != 8 * (HEADER_WORDS + self._count * SLOT_WORDS):
            raise self._refused(f"has {size} bytes for {self._count} slots")

    def _refused(self, why: str) -> EngineError:
        return EngineError(
            f"{self.path} is not a readable token page: {why}",
            expected=f"a page of layout {LAYOUT} written by a live or dead engine",
        )

    @property
    def incarnation(self) -> str:
        """16 hex digits; another at every start of an engine."""
        return f"{self._words[H_INCARNATION] & (2**64 - 1):016x}"

    @property
    def pid(self) -> int:
        """Process id of the engine core that writes, or wrote, this page."""
        return self._words[H_PID]

    @property
    def version(self) -> int:
        """Weight version in force."""
        return self._words[H_VERSION]

    @property
    def steps(self) -> int:
        """Engine steps finished so far: the heartbeat of an engine that has work."""
        return self._words[H_STEPS]

    @property
    def stepped_at_s(self) -> float:
        """`time.time()` of the last finished step, 0 before the first."""
        return self._words[H_STEPPED_AT_NS] / 1e9

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
            if request_id is None or slot.state == FREE:
                continue
            if request_id not in found or slot.state == RUNNING:
                found[request_id] = slot.count()
        return {request_id: found[request_id] for request_id in ids.values() if request_id in found}

    def close(self) -> None:
        self._words.release()
        self._map.close()

    def discard(self) -> None:
        """Close, and remove the file: the ledger has read it."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _read(self, at: int) -> Slot:
        base = HEADER_WORDS + at * SLOT_WORDS
        commit = self._words[base + COMMIT]
        while True:
            bank = base + BANKS[commit % 2]
            slot = Slot(*self._words[bank : bank + BANK_WORDS])
            again = self._words[base + COMMIT]
            if again == commit:
                return slot
            commit = again
