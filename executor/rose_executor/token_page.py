"""The token page: what an engine has generated, counted by the engine, readable after its death.

A file of 64-bit words. One writer maps it (the engine core, see `page_writer`), any number of readers in any process
read it (`page_reader`). Here is what both know: where the words stand, and what a slot says.

Invariants
- The total is the sum of the slots and stands nowhere else, so the two cannot disagree, at whatever
  instruction the writer is killed.
- A slot keeps its state in two banks; commit number `n` says that bank `n % 2` is the valid one. The writer
  fills the other bank and then stores `n + 1`, one aligned 8-byte word. A reader that finds the same commit
  before and after has read a whole state: the writer cannot have touched that bank in between. A writer
  killed half-way leaves the old state valid. Before, bank and after are three reads, one after the other: within one
  the kernel may copy in whatever order.
- A running request's slot is never reused. Finished ones are, oldest first; the tokens of a slot's earlier
  requests stay in its `retired` count.
- A page appears under its name complete, and belongs to one incarnation of one engine for ever. Its writer holds the
  kernel's lock on it (flock), and the kernel drops that with the process.

Stores become visible in program order on x86-64. Elsewhere a *live* reader may see them late, never torn
after the writer has ended.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

MAGIC = int.from_bytes(b"ROSEPAGE", "little")
LAYOUT = 1
SLOTS_MAX = 2**17
"""Several times what the largest engine has: who says more is no engine, and nobody makes room to read that."""

HEADER_WORDS = 16
H_MAGIC, H_LAYOUT, H_SLOTS, H_PID, H_INCARNATION, H_STEPS, H_STEPPED_AT_NS, H_VERSION = range(8)

SLOT_WORDS = 16
COMMIT = 0
BANKS = (1, 8)
BANK_WORDS = 7

FREE, RUNNING, FINISHED = 0, 1, 2
NO_VERSION = -1

# Running and preempted requests together hold at most two slots per sequence; the rest keeps finished ones
# readable until that many others have finished after them.
_SLOTS_PER_SEQUENCE = 8


def page_slots(max_num_seqs: int) -> int:
    """How many slots the page of an engine of so many sequences has."""
    return max_num_seqs * _SLOTS_PER_SEQUENCE


def page_bytes(slots: int) -> int:
    return 8 * (HEADER_WORDS + slots * SLOT_WORDS)


@dataclass(frozen=True, slots=True)
class RequestCount:
    """What the engine sampled and kept for one request; versions are None while `tokens` is 0."""

    tokens: int
    first_version: int | None
    last_version: int | None
    finished: bool


@dataclass(slots=True)
class Slot:
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

    def count(self) -> RequestCount:
        finished = self.state == FINISHED
        if self.tokens == 0:
            return RequestCount(0, None, None, finished)
        return RequestCount(self.tokens, self.first_version, self.last_version, finished)


def request_key(request_id: str) -> tuple[int, int]:
    """The 16-byte blake2b of a request id, as the two signed words that a slot holds."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(digest[8:], "little", signed=True)
