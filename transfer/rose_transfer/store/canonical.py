"""JSON of which each value has exactly one text, and a reader that believes nothing.

The text is one object with sorted keys, no spaces and no floats. Whoever parses one builds a value from it and writes
that again: if the bytes differ (a doubled or unknown key, 1.0 for 1, a space), `check` refuses it.

Invariants
- A text is refused before it is parsed if it has more bytes or values than its kind may have, so memory and time
  follow the bytes that came. No text is written that would be refused.
- What stands in the lists and objects of a text is read and written some at a time. The JSON library holds up all
  other threads while it works, also an event loop's: it never gets more than `ITEM_CHARS_MAX` at once to read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rose.errors import TransferError

ITEM_CHARS_MAX = 4 * 2**20
"""A bucket of 64 MiB that holds 36,000 tensors takes some 2.5 million."""
_AT_ONCE = 16
_QUOTED_MAX = 200
_decode = json.JSONDecoder().raw_decode
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode


class MalformedRecord(TransferError):
    """The bytes are not such a record, or not the whole one: fetch it again."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a text is, and how large one may be; `values_max` numbers, strings, lists and objects."""

    name: str
    bytes_max: int
    values_max: int


def dump(value: Mapping[str, Any], kind: Kind) -> bytes:
    """The text of `value`, whose members may be iterators instead of lists. Raises TransferError if it is too large."""
    data = b"".join(_pieces(value))
    _check_size(data, kind, TransferError, "publish a smaller model, or in fewer parts")
    return data


def load(data: bytes, kind: Kind, **build: Callable[[Any], Any]) -> dict[str, Any]:
    """The object in `data`; `build` makes what it likes of each item of a member. Raises MalformedRecord if it is too
    large, and within `reading` whatever the bytes are."""
    _check_size(data, kind, MalformedRecord, "fetch it again")
    found: dict[str, Any] = {}
    reader = _Reader(data.decode("ascii"))
    for key in reader.members():
        found[key] = reader.member(build.get(key, _as_it_is))
    reader.end()
    return found


def check(value: Mapping[str, Any], data: bytes, kind: Kind) -> None:
    """Raises MalformedRecord unless `data` is the one text of `value`."""
    at = 0
    for piece in _pieces(value):
        if not data.startswith(piece, at):
            at = -1
            break
        at += len(piece)
    if at != len(data):
        raise MalformedRecord(f"this {kind.name} is not written as one is", expected="canonical JSON of known keys")


@contextmanager
def reading(kind: Kind) -> Iterator[None]:
    """Whatever building a value of foreign bytes raises becomes MalformedRecord, in a line of bounded length."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise MalformedRecord(
            f"this is no {kind.name}: {type(error).__name__}: {str(error)[:_QUOTED_MAX]}", to_do="fetch it again"
        ) from error


def number(value: Any, limit: int = 2**63) -> int:
    """A whole number from 0 up to but not including `limit`, else TypeError."""
    if type(value) is not int or not 0 <= value < limit:
        raise TypeError(f"{_shown(value)} is not a whole number below {limit}")
    return value


def numbers(values: Any, most: int) -> tuple[int, ...]:
    """At most so many whole numbers below 2^63, else TypeError."""
    if not isinstance(values, list) or len(values) > most:
        raise TypeError(f"{_shown(values)} is not a list of at most {most} numbers")
    for value in values:
        if type(value) is not int or not 0 <= value < 2**63:
            raise TypeError(f"{_shown(value)} is not a whole number below {2**63}")
    return tuple(values)


def text(value: Any) -> str:
    """A string, else TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{_shown(value)} is not a string")
    return value


class _Reader:
    """Takes a text apart from its start on. Raises ValueError where it is not canonical."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._window = ""
        self._window_at = 0

    def members(self) -> Iterator[str]:
        """The keys of an object; what each stands for is to be taken before the next."""
        self._expect("{")
        if self._takes("}"):
            return
        while True:
            key = text(self._value())
            self._expect(":")
            yield key
            if self._takes("}"):
                return
            self._expect(",")

    def member(self, build: Callable[[Any], Any]) -> Any:
        """A value; the items of a list or an object are built one by one."""
        if self._text.startswith("{", self._at):
            return {key: build(self._value()) for key in self.members()}
        return list(map(build, self._items())) if self._takes("[") else self._value()

    def end(self) -> None:
        if self._at != len(self._text):
            raise ValueError(f"something follows at {self._at}")

    def _items(self) -> Iterator[Any]:
        if self._takes("]"):
            return
        while True:
            yield self._value()
            if self._takes("]"):
                return
            self._expect(",")

    def _takes(self, sign: str) -> bool:
        taken = self._text.startswith(sign, self._at)
        self._at += taken
        return taken

    def _expect(self, sign: str) -> None:
        if not self._takes(sign):
            raise ValueError(f"no {sign} at {self._at}")

    def _value(self) -> Any:
        if self._window_at + len(self._window) <= self._at:
            self._look()
        try:
            return self._decoded()
        except ValueError:
            # It may go on behind the window.
            self._look()
        try:
            return self._decoded()
        except ValueError as error:
            raise ValueError(f"no value of at most {ITEM_CHARS_MAX} characters at {self._at}: {error}") from error

    def _look(self) -> None:
        self._window_at = self._at
        self._window = self._text[self._at : self._at + ITEM_CHARS_MAX]

    def _decoded(self) -> Any:
        value, end = _decode(self._window, self._at - self._window_at)
        if end == len(self._window) and self._window_at + end < len(self._text):
            raise ValueError("it is longer")
        self._at = self._window_at + end
        return value


def _pieces(value: Mapping[str, Any]) -> Iterator[bytes]:
    between = "{"
    for key, member in sorted(value.items()):
        yield f"{between}{_encode(key)}:".encode()
        if isinstance(member, Mapping):
            yield from _some_at_a_time(sorted(member.items()), dict, "{}")
        elif isinstance(member, list | tuple | Iterator):
            yield from _some_at_a_time(member, list, "[]")
        else:
            yield _encode(member).encode()
        between = ","
    yield b"}" if value else b"{}"


def _some_at_a_time(items: Iterable[Any], made: type[list[Any]] | type[dict[str, Any]], ends: str) -> Iterator[bytes]:
    waiting = iter(items)
    between = ends[0]
    while some := made(islice(waiting, _AT_ONCE)):
        yield f"{between}{_encode(some)[1:-1]}".encode()
        between = ","
    yield (ends if between == ends[0] else ends[1]).encode()


def _check_size(data: bytes, kind: Kind, raised: type[TransferError], to_do: str) -> None:
    if len(data) > kind.bytes_max:
        raise raised(f"a {kind.name} of {len(data)} bytes", expected=f"at most {kind.bytes_max}", to_do=to_do)
    if len(data) > kind.values_max:
        values = sum(map(data.count, (b",", b"[", b"{")))
        if values > kind.values_max:
            raise raised(f"a {kind.name} of {values} values", expected=f"at most {kind.values_max}", to_do=to_do)


def _shown(value: Any) -> str:
    return f"{value!r:.40}" if isinstance(value, str | float | bool) else f"this {type(value).__name__}"


def _as_it_is(value: Any) -> Any:
    return value
