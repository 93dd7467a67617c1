"""What ranks tell each other before they publish, and what follows from it. A pure core.

Invariants
- From the same calls every rank draws the same conclusion, or the same error.
- Steps are made only if every owner holds the very bits that the store has of the base, by its fingerprint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rose.errors import TransferError


class JointTrouble(TransferError):
    """What the ranks mean to publish together cannot be, whichever of them has seen it: it is no rank's own fault."""

    def to_bytes(self) -> bytes:
        return json.dumps([self.what, self.expected, self.to_do]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> JointTrouble:
        what, expected, to_do = json.loads(data)
        return cls(what, expected=expected, to_do=to_do)


@dataclass(frozen=True, slots=True)
class Call:
    """What a rank is about to do.

    `layout` identifies what it holds, `held` are the bits of the buckets it owns (the fingerprint of their version).
    `base` and `base_fingerprint` are told by the rank with the store: the version to make steps from, if any.
    """

    version: int
    packing: str
    compress: bool
    layout: str
    held: str | None
    base: int | None = None
    base_fingerprint: str | None = None

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Call:
        return cls(**json.loads(data))


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks do: make steps from `base`, or write the version whole if that is None.

    `plan`: ranks hold other parts of the model than when they last planned who owns and sends what. `restore`: the
    owners do not all hold the bits of the base, and get them from the store first.
    """

    base: int | None
    plan: bool
    restore: bool


def agree(calls: Sequence[Call], writer: int, planned: tuple[str, ...]) -> Agreed:
    """The conclusion from all ranks' calls; `writer` is the rank with the store, `planned` for whose layouts plans are.

    Raises TransferError that names the first rank that means something else than the writer.
    """
    told = calls[writer]
    for rank, call in enumerate(calls):
        for what, theirs, wanted in (
            ("version", call.version, told.version),
            ("the packing", call.packing, told.packing),
            ("compress =", call.compress, told.compress),
        ):
            if theirs != wanted:
                raise TransferError(
                    f"rank {rank} publishes {what} {theirs}, rank {writer} {wanted}", expected="the same on every rank"
                )
    plan = tuple(call.layout for call in calls) != planned
    holds = not plan and all(call.held == told.base_fingerprint for call in calls)
    return Agreed(told.base, plan, told.base is not None and not holds)
