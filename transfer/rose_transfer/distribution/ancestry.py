"""Which relays lie between a server and its publisher, so that a relay can see that it follows itself. Pure.

    {"layout": 1, "relays": [id of who answers, if that is a relay, id of the one that it follows, ...]}

It is asked for as an object under `relays-<nonce>`; an id is drawn when a relay starts.

Invariants
- A list never comes back to the relay that keeps it, so it is finite in a ring too, and each relay of a ring finds
  itself as soon as every one has heard of the one before it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rose_transfer.store import canonical
from rose_transfer.store.canonical import MalformedRecord

LAYOUT = 1
RELAYS_MAX = 64
TEXT = canonical.Kind("list of relays", bytes_max=64 * 2**10, values_max=4 * RELAYS_MAX)
_ASK = re.compile("relays-[0-9a-f]{32}")
_ID = re.compile("[0-9a-f]{32}")


def ask_key(nonce: str) -> str:
    """The key of the question; `nonce` is 32 random hex digits."""
    return f"relays-{nonce}"


def is_ask(key: str) -> bool:
    return _ASK.fullmatch(key) is not None


def to_bytes(relays: Sequence[str]) -> bytes:
    """The text described above; of more than RELAYS_MAX the nearest ones."""
    return canonical.dump(_value(relays), TEXT)


def from_bytes(data: bytes) -> tuple[str, ...]:
    """The relays of a text, nearest first. Raises MalformedRecord unless the text is one that `to_bytes` writes."""
    with canonical.reading(TEXT):
        relays = tuple(canonical.load(data, TEXT, relays=_id)["relays"])
        canonical.check(_value(relays), data, TEXT)
    return relays


def before(own: str, heard: Sequence[str]) -> tuple[str, ...]:
    """Those of `heard` that come before `own`, all if that is not among them."""
    return tuple(heard[: heard.index(own)] if own in heard else heard)


def _value(relays: Sequence[str]) -> dict[str, object]:
    return {"layout": LAYOUT, "relays": tuple(relays[:RELAYS_MAX])}


def _id(value: object) -> str:
    text = canonical.text(value)
    if _ID.fullmatch(text) is None:
        raise MalformedRecord(f"{text[:80]!r} is no id of a relay", expected="32 hex digits")
    return text
