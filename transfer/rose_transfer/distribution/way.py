"""What leads a holder of one version, or of nothing, to another: which manifests, in order, each there or back. Pure.

    {"fingerprint", "layout": 1, "start": 5 or null, "steps": [[key of a manifest, backwards], ...], "version": 7}

A way is asked for as an object under a key that says all there is to say, with a nonce, so that a key stands for the
same bytes for ever:

    way-7-from-nothing-<nonce>
    way-7-from-5-<fingerprint of what is held>-<nonce>
    checked-way-…                                       whoever answers reads every object of the way first

Invariants
- A way names no manifest twice, and at most `STEPS_MAX`; a way that passed `check_steps` comes by no version twice.
- `start` is the version that was named, if its bits are known where the way comes from, or null. A way from null
  begins anew; one from a known version does if that takes fewer bytes.
- A way that passed `check_steps` is whole: it begins at the very bits that are held, or with a manifest that has no
  base, each step begins where the one before it ended, and the last one ends at `fingerprint`. No step is of another
  version of the same number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rose_transfer.store import canonical
from rose_transfer.store.canonical import MalformedRecord

if TYPE_CHECKING:
    from rose_transfer.store.manifest import Manifest

LAYOUT = 1
STEPS_MAX = 1024
"""A step for each of the versions that are kept, 16 by default, if none could be merged."""
TEXT = canonical.Kind("way", bytes_max=128 * 2**10, values_max=4 * STEPS_MAX)
_HASH = re.compile("[0-9a-f]{64}")
_NUMBER = "0|[1-9][0-9]{0,18}"
_ASK = re.compile(rf"(checked-)?way-({_NUMBER})-from-(?:nothing|({_NUMBER})-([0-9a-f]{{64}}))-([0-9a-f]{{32}})")


@dataclass(frozen=True, slots=True)
class WayAsk:
    """`start` and `start_fingerprint` say what is held, None both for nothing; `nonce` is 32 random hex digits."""

    goal: int
    start: int | None
    start_fingerprint: str | None
    nonce: str
    checked: bool = False

    @property
    def key(self) -> str:
        held = "nothing" if self.start is None else f"{self.start}-{self.start_fingerprint}"
        return f"{'checked-' if self.checked else ''}way-{self.goal}-from-{held}-{self.nonce}"


def ask_of(key: str) -> WayAsk | None:
    """The question in a key, None if it is none."""
    found = _ASK.fullmatch(key)
    if found is None:
        return None
    checked, goal, start, fingerprint, nonce = found.groups()
    return WayAsk(int(goal), None if start is None else int(start), fingerprint, nonce, checked is not None)


@dataclass(frozen=True, slots=True)
class Way:
    """How to get to `version`. `steps` are (key of the manifest, backwards); `start` is None if it is not known."""

    version: int
    fingerprint: str
    start: int | None
    steps: tuple[tuple[str, bool], ...]

    def to_bytes(self) -> bytes:
        """The text described above."""
        return canonical.dump(_value(self), TEXT)


def from_bytes(data: bytes) -> Way:
    """The way of a text. Raises MalformedRecord unless the text is one that `to_bytes` writes."""
    with canonical.reading(TEXT):
        value = canonical.load(data, TEXT, steps=_step)
        start = value["start"]
        way = Way(
            version=canonical.number(value["version"]),
            fingerprint=_hash(value["fingerprint"]),
            start=None if start is None else canonical.number(start),
            steps=tuple(value["steps"]),
        )
        if len(way.steps) > STEPS_MAX:
            raise ValueError(f"{len(way.steps)} steps, where {STEPS_MAX} are the most")
        if len({key for key, _ in way.steps}) < len(way.steps):
            raise ValueError("a manifest is named twice")
        canonical.check(_value(way), data, TEXT)
    return way


def check_answer(way: Way, ask: WayAsk) -> None:
    """Whether a way answers what was asked. Raises MalformedRecord."""
    if way.version != ask.goal or way.start not in (ask.start, None):
        raise MalformedRecord(f"a way to version {way.version} from {way.start}", expected=f"one that answers {ask}")


def check_steps(way: Way, held: str | None, manifests: Sequence[Manifest]) -> None:
    """Whether `manifests`, those of the steps, lead to the goal from the bits with fingerprint `held`, or from nothing.

    Raises MalformedRecord if they do not.
    """
    at = (way.start, None if way.start is None else held)
    if manifests and manifests[0].base is None:
        at = (None, None)
    been = {at[0]}
    for (_, backwards), found in zip(way.steps, manifests, strict=True):
        ends = ((found.base, found.base_fingerprint), (found.version, found.fingerprint))
        begin, end = ends[::-1] if backwards else ends
        if begin != at or (backwards and (found.base is None or found.mode != "steps")):
            raise MalformedRecord(f"a step of the way to version {way.version} begins at {begin}", expected=f"{at}")
        if end[0] in been:
            raise MalformedRecord(f"the way to version {way.version} comes by version {end[0]} twice", expected="once")
        been.add(end[0])
        at = end
    if at != (way.version, way.fingerprint):
        raise MalformedRecord(f"the way to version {way.version} ends at {at}", expected=way.fingerprint)


def _value(way: Way) -> dict[str, Any]:
    return {
        "fingerprint": way.fingerprint,
        "layout": LAYOUT,
        "start": way.start,
        "steps": way.steps,
        "version": way.version,
    }


def _step(value: Any) -> tuple[str, bool]:
    key, backwards = value
    return _hash(key), _truth(backwards)


def _hash(value: object) -> str:
    text = canonical.text(value)
    if _HASH.fullmatch(text) is None:
        raise ValueError(f"{text[:80]!r} is not 64 hex digits")
    return text


def _truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"this {type(value).__name__} is neither true nor false")
    return value
