"""The board's bytes: its halves, what each holds, and in which form. Pure.

A half has two banks, written in turn. A bank is the number of the write, when it was made, the state's values in the
order of its fields, and a checksum.

Invariants
- Of a half the newest bank whose checksum holds counts. A writer killed at any store leaves the state before valid.
- What is torn, stale, of another layout, of another boot, cut short or never written is seen as such: the state is
  unknown, and `why` says so. No bytes make a reader raise.
- A time that is no number, and a count below 0, is no engine's word, whatever the checksum says. A quota may be below
  0: its reader brings it within bounds.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

from rose.errors import ContractError
from rose_executor.board_states import GuestState, Quota, Reading, ServingKv, ServingState

S = TypeVar("S", ServingState, Quota, GuestState, ServingKv)

MAGIC = b"ROSEBORD"
LAYOUT = 6
BOARD_BYTES = 2560
HEADER = struct.Struct("<8sQ16s")
"""Magic, layout version, the machine's boot."""
HALF_BYTES = 512
BANK_BYTES = HALF_BYTES // 2
_CHECKSUM = struct.Struct("<Q")
_NUMBER = struct.Struct("<q")
_BODY_BYTES = BANK_BYTES - _CHECKSUM.size
NUMBER_MAX = 2**62
"""Of the last write that another writer goes on from: no engine gets there in a century. As many numbers follow it."""
_LETTERS = {int: "q", bool: "?7x", float: "d"}


@dataclass(frozen=True, slots=True)
class Half(Generic[S]):
    """Where a half lies, what it holds, and the age in seconds from which it counts as stale."""

    name: str
    offset: int
    kind: type[S]
    stale_after_s: float


# A writer beats at least every HEARTBEAT_S. The limits leave room for a process that a busy machine kept waiting:
# a gate that shuts too often costs rollouts, one that stays open for half a second costs serving one bad half-second.
HEARTBEAT_S = 0.05
SERVING: Half[ServingState] = Half("serving", 512, ServingState, 0.5)
QUOTA: Half[Quota] = Half("quota", 1024, Quota, 0.5)
GUEST: Half[GuestState] = Half("guest", 1536, GuestState, 2.0)
# An idle engine core says nothing, and holds what it held: its half is as good as its writer is alive.
SERVING_KV: Half[ServingKv] = Half("serving KV", 2048, ServingKv, math.inf)


class _Form:
    """How a state becomes the body of a bank. Each step of both engines goes through here."""

    def __init__(self, kind: type[Any]) -> None:
        columns = list(get_type_hints(kind).values())
        body = "<qq" + "".join(_LETTERS[column] for column in columns)
        self.body = struct.Struct(f"{body}{_BODY_BYTES - struct.calcsize(body)}x")
        self.floats = _picker([at for at, column in enumerate(columns) if column is float])
        counts = [at for at, column in enumerate(columns) if column is int]
        self.counts = _picker([] if kind is Quota else counts)
        self.kind = kind


def _picker(positions: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    return itemgetter(*positions) if len(positions) > 1 else lambda values: tuple(values[at] for at in positions)


_FORMS = {half.name: _Form(half.kind) for half in (SERVING, QUOTA, GUEST, SERVING_KV)}


class Held(NamedTuple, Generic[S]):
    """What a half holds, however old it is by now."""

    number: int
    written_at_s: float
    state: S


def encode(half: Half[S], state: S, number: int, written_at_ns: int) -> bytes:
    """One bank. Raises ContractError for a value that does not fit, or is no number."""
    form = _FORMS[half.name]
    try:
        if not math.isfinite(sum(form.floats(state))):
            raise ValueError("a value is not finite")
        body = form.body.pack(number, written_at_ns, *state)
    except (struct.error, ValueError, OverflowError, TypeError) as error:
        raise ContractError(f"{state} cannot stand on a board: {error}", expected="64-bit numbers") from error
    return body + _CHECKSUM.pack(_checksum(body, half))


def decode(page: bytes, half: Half[S], now_s: float, header: bytes) -> Reading[S]:
    """What a half of a board's bytes says at `now_s`, if the board begins with `header`."""
    return aged(held(page, half, header), half, now_s)


def held(page: bytes, half: Half[S], header: bytes) -> Held[S] | str:
    """Or why that cannot be known."""
    if len(page) < BOARD_BYTES:
        return f"the board is cut short: {len(page)} of {BOARD_BYTES} bytes"
    if not page.startswith(header):
        return _wrong_header(page)
    newest = _newest(page, half)
    if newest is None:
        empty = not any(page[half.offset : half.offset + HALF_BYTES])
        return f"the {half.name} half {'was never written' if empty else 'is torn'}"
    number, written_at_ns, *values = newest
    form = _FORMS[half.name]
    if not _sound(form, values):
        return f"the {half.name} half says what no engine would"
    return Held(number, written_at_ns / 1e9, form.kind(*values))


def _sound(form: _Form, values: list[Any]) -> bool:
    return math.isfinite(sum(form.floats(values))) and min(form.counts(values), default=0) >= 0


def aged(held: Held[S] | str, half: Half[S], now_s: float) -> Reading[S]:
    """What is held, as of `now_s`."""
    if isinstance(held, str):
        return Reading(None, why=held)
    age_s = now_s - held.written_at_s
    # A little ahead is a write between the reader's look at the clock and at the board; far ahead is nonsense.
    if not -half.stale_after_s <= age_s <= half.stale_after_s:
        return Reading(None, held.number, f"the {half.name} half is {age_s:.1f} s old")
    return Reading(held.state, held.number)


def newest(page: bytes, half: Half[S]) -> int:
    """The highest number that a half holds, 0 where it holds none."""
    bank = _newest(page, half)
    return 0 if bank is None else int(bank[0])


def is_beginning(page: bytes) -> bool:
    """Whether that is what there is of a board without its header: nothing, zeros, and whole banks of its halves.

    So it looks where its maker was killed, or where it was emptied and somebody wrote on.
    """
    if len(page) > BOARD_BYTES:
        return False
    page = page.ljust(BOARD_BYTES, b"\0")
    rest = bytearray(page)
    halves: tuple[Half[Any], ...] = (SERVING, QUOTA, GUEST, SERVING_KV)
    for half in halves:
        for start in (half.offset, half.offset + BANK_BYTES):
            if _bank(page, half, start) is not None:
                rest[start : start + BANK_BYTES] = bytes(BANK_BYTES)
    return not any(rest)


def _newest(page: bytes, half: Half[S]) -> tuple[Any, ...] | None:
    """The newest bank whose checksum holds; of the other most readers need to know no more than its number."""
    first, second = half.offset, half.offset + BANK_BYTES
    if _number(page, first) < _number(page, second):
        first, second = second, first
    return _bank(page, half, first) or _bank(page, half, second)


def _number(page: bytes, start: int) -> int:
    number: int = _NUMBER.unpack_from(page, start)[0]
    return number


def _bank(page: bytes, half: Half[S], start: int) -> tuple[Any, ...] | None:
    """Number, time and values of one bank, None where its checksum does not hold."""
    body = page[start : start + _BODY_BYTES]
    (checksum,) = _CHECKSUM.unpack_from(page, start + _BODY_BYTES)
    return _FORMS[half.name].body.unpack_from(body) if checksum == _checksum(body, half) else None


def _checksum(body: bytes, half: Half[S]) -> int:
    # Another for the same bytes in another half, and not 0 for a bank of zeros.
    return zlib.crc32(body, half.offset)


def _wrong_header(page: bytes) -> str:
    magic, layout, _ = HEADER.unpack_from(page)
    if magic != MAGIC:
        return "the file is not a board"
    return f"the board has layout {layout}, not {LAYOUT}" if layout != LAYOUT else "the board is of another boot"
