"""From the tensors of all ranks to the deltas of all buckets, round by round.

Invariants
- Ranks send what was planned, whatever goes wrong at one of them: nobody waits for bytes that never come. A rank in
  trouble sends what lies in its room and says so when all rounds are done; nothing that was made of it is used then.
- The room for what crosses is there before the first round: from then on no rank needs more to keep its word.
- Owned buckets have the bits of no version until the new one is in the store, and then those of that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rose_transfer.layout.layout import Piece
from rose_transfer.sharded.owned import OwnedBuckets
from rose_transfer.sharded.pieces import Bits, lay, take
from rose_transfer.sharded.ranks import Ranks, Rooms, to_array
from rose_transfer.sharded.routes import Routes, pieces_bytes
from rose_transfer.store.manifest import BucketEntry
from rose_transfer.store.packing import Bucket, Packing


@dataclass(frozen=True, slots=True)
class Team:
    """The ranks, and what each of them does with which bucket of `packing`."""

    ranks: Ranks
    packing: Packing
    routes: Routes


@dataclass(frozen=True, slots=True)
class Made:
    """The delta of a bucket as it travels, and its entry in the manifest."""

    entry: BucketEntry
    wire: bytes


class Trouble:
    """The first thing that goes wrong here while others count on this rank: no memory, most of all.

    What the body of a `with` raises is kept for `raise_first`, and execution goes on behind it.
    """

    def __init__(self) -> None:
        self._first: Exception | None = None

    def __bool__(self) -> bool:
        return self._first is not None

    def __str__(self) -> str:
        return str(self._first or "")

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._first = self._first or error
        return True

    def raise_first(self) -> None:
        if self._first is not None:
            raise self._first


def make_room(team: Team) -> Rooms:
    """For the largest round. Raises MemoryError, or RuntimeError on a device."""
    sent = (sum(_part_bytes(team, index) for index in taken) for taken in team.routes.rounds)
    received = (
        sum(pieces_bytes(pieces, team.packing.buckets[index]) for pieces in by_sender)
        for index, by_sender in team.routes.incoming.items()
    )
    return team.ranks.rooms(max(sent, default=0), max(received, default=0))


def make(
    team: Team, rooms: Rooms, tensors: Mapping[str, torch.Tensor], owned: OwnedBuckets, *, whole: bool, compress: bool
) -> dict[int, Made]:
    """Send the pieces in the local `tensors` to the owners, and make the deltas of the buckets that this rank owns.

    `whole` makes deltas that need no base. Raises what went wrong here, which the others then do not know yet,
    and LostRank.
    """
    owned.fingerprint = None
    made: dict[int, Made] = {}
    trouble = Trouble()
    for owners_buckets in team.routes.rounds:
        parts = (_part(team, tensors, index, trouble) for index in owners_buckets)
        lengths = [_part_bytes(team, index) for index in owners_buckets]
        mine = owners_buckets[team.ranks.rank]
        if mine is None:
            team.ranks.exchange(rooms, parts, lengths, [0] * team.ranks.size)
            continue
        bucket, incoming = team.packing.buckets[mine], team.routes.incoming[mine]
        received = team.ranks.exchange(rooms, parts, lengths, [pieces_bytes(pieces, bucket) for pieces in incoming])
        with trouble:
            new = _put_together(bucket, incoming, received)
            made[mine] = Made(*owned.step(mine, bucket, new, whole=whole, compress=compress))
    trouble.raise_first()
    return made


def _part(team: Team, tensors: Mapping[str, torch.Tensor], index: int | None, trouble: Trouble) -> torch.Tensor | None:
    """What this rank sends of a bucket, flat uint8; None in trouble."""
    if index is not None:
        with trouble:
            return take(tensors, team.routes.outgoing[index], team.packing.buckets[index])
    return None


def _part_bytes(team: Team, index: int | None) -> int:
    return 0 if index is None else pieces_bytes(team.routes.outgoing[index], team.packing.buckets[index])


def _put_together(bucket: Bucket, incoming: Sequence[Sequence[Piece]], received: Sequence[torch.Tensor]) -> Bits:
    bits: Bits = np.empty(bucket.elements, dtype=f"<u{bucket.lane}")
    for pieces, data in zip(incoming, received, strict=True):
        lay(bits, bucket, pieces, to_array(data))
    return bits
