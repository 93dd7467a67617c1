"""Which rank owns which bucket, and which pieces of it come from whom. A pure core.

Invariants
- Every bucket has one owner. No rank owns more than its share of all bytes by more than one bucket.
- Among the ranks that have room for a bucket, the one that holds most of it owns it; what it holds is not sent.
- All ranks choose the same owners from the same layouts. Each plans the buckets that it owns, and tells the others what
  they send of those; all draw the same rounds from what was told.
- Round by round, every rank receives at most one bucket, and sends no more bytes than two of the largest have.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rose_transfer.layout.box import Box, row_major
from rose_transfer.layout.layout import Layout, LocalTensor, Piece
from rose_transfer.layout.plan import plan
from rose_transfer.layout.sources import NotHeld, Sources
from rose_transfer.sharded.agreement import JointTrouble
from rose_transfer.store.packing import Bucket, Packing

Round = tuple[int | None, ...]
"""The bucket that each rank receives, None for a rank that receives none now."""
Pieces = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class OwnPlan:
    """What one rank plans; buckets are told by their place in the packing.

    `owners` has the owner of each bucket. For each bucket that this rank owns, `incoming` has where in it the pieces go
    that come from each rank, and `asked` where these lie there, in the same order.
    """

    owners: tuple[int, ...]
    incoming: Mapping[int, tuple[Pieces, ...]]
    asked: Mapping[int, tuple[Pieces, ...]]

    def to_bytes(self, packing: Packing) -> bytes:
        """What the other ranks need of it: a line for all, with the bytes that each sends, then one for each rank."""
        sent = {index: [pieces_bytes(one, packing.buckets[index]) for one in by] for index, by in self.asked.items()}
        ranks = len(next(iter(self.asked.values()), ()))
        lines = [{index: list(map(_words, by[rank])) for index, by in self.asked.items()} for rank in range(ranks)]
        return b"\n".join(json.dumps(line, separators=(",", ":")).encode() for line in (sent, *lines))


@dataclass(frozen=True, slots=True)
class Routes:
    """What one rank does; `owners` and `incoming` are those of its `OwnPlan`.

    `outgoing` are the pieces of its tensors that it sends of each bucket, in the order in which they are sent.
    """

    owners: tuple[int, ...]
    outgoing: Mapping[int, Pieces]
    incoming: Mapping[int, tuple[Pieces, ...]]
    rounds: tuple[Round, ...]


def plan_own(packing: Packing, layouts: Sequence[Layout], rank: int) -> OwnPlan:
    """The plan of `rank`; `layouts` has what each rank holds, in their order, and has checked there.

    Raises JointTrouble that names the parameter if no rank holds an element of a bucket that this one owns,
    TransferError if two ranks describe one differently.
    """
    sources = Sources(layouts, checked=True)
    owners = choose_owners(packing, sources)
    incoming: dict[int, tuple[Pieces, ...]] = {}
    asked: dict[int, tuple[Pieces, ...]] = {}
    for index, bucket in enumerate(packing.buckets):
        if owners[index] != rank:
            continue
        try:
            segments = plan(sources, bucket_layout(packing, bucket), near=sources.holders[rank]).segments
        except NotHeld as error:
            # The rank that owns the bucket is the one that sees it, not the one that lacks something.
            raise JointTrouble(
                f"no rank holds {error.parameter}{error.box}; {sources.who_holds(error.parameter)}",
                to_do="give `publish` every part of the model on some rank",
            ) from error
        by_sender = [[one for one in segments if one.holder == holder] for holder in sources.holders]
        incoming[index] = tuple(tuple(segment.destination for segment in sent) for sent in by_sender)
        asked[index] = tuple(tuple(segment.source for segment in sent) for sent in by_sender)
    return OwnPlan(owners, incoming, asked)


def make_routes(packing: Packing, own: OwnPlan, rank: int, told: Sequence[bytes]) -> Routes:
    """The routes of `rank`, whose plan is `own`, from what all ranks told of theirs, in their order."""
    outgoing: dict[int, Pieces] = {}
    sent_bytes: list[list[int]] = [[] for _ in packing.buckets]
    for data in told:
        for_all, *lines = data.split(b"\n")
        for index, sent in json.loads(for_all).items():
            sent_bytes[int(index)] = sent
        if lines:
            outgoing |= {int(index): tuple(map(_piece, words)) for index, words in json.loads(lines[rank]).items()}
    limit_bytes = 2 * max((bucket.dense_bytes for bucket in packing.buckets), default=0)
    return Routes(own.owners, outgoing, own.incoming, _rounds(own.owners, sent_bytes, len(told), limit_bytes))


def pieces_bytes(pieces: Sequence[Piece], bucket: Bucket) -> int:
    """Bytes of pieces of `bucket` on their way."""
    return sum(piece.box.elements for piece in pieces) * bucket.lane


def choose_owners(packing: Packing, sources: Sources) -> tuple[int, ...]:
    """The owner of each bucket, as a place in the list of sources."""
    owned_bytes = [0] * len(sources.holders)
    share_bytes = packing.dense_bytes / len(owned_bytes)
    owners: list[int] = []
    for bucket in packing.buckets:
        parts = (sources.held_elements(region.parameter, region.box) for region in bucket.regions)
        held = np.sum(list(parts), axis=0).tolist()
        has_room = (place for place, owned in enumerate(owned_bytes) if owned <= share_bytes)
        owner = min(has_room, key=lambda place: (-held[place], owned_bytes[place], place))
        owned_bytes[owner] += bucket.dense_bytes
        owners.append(owner)
    return tuple(owners)


def bucket_layout(packing: Packing, bucket: Bucket) -> Layout:
    """A bucket as what receives: a local tensor for each of its regions, named by its place among them."""
    tensors = {str(place): LocalTensor(region.box.sizes, bucket.dtype) for place, region in enumerate(bucket.regions)}
    pieces = tuple(
        Piece(region.parameter, region.box, str(place), 0, row_major(region.box.sizes))
        for place, region in enumerate(bucket.regions)
    )
    return Layout(f"bucket {bucket.bucket_id}", packing.parameters, tensors, pieces)


def _words(piece: Piece) -> list[Any]:
    return [piece.parameter, piece.box.starts, piece.box.sizes, piece.tensor, piece.offset, piece.strides]


def _piece(words: list[Any]) -> Piece:
    parameter, starts, sizes, tensor, offset, strides = words
    return Piece(parameter, Box(tuple(starts), tuple(sizes)), tensor, offset, tuple(strides))


def _rounds(
    owners: Sequence[int], sent_bytes: Sequence[Sequence[int]], ranks: int, limit_bytes: int
) -> tuple[Round, ...]:
    """`sent_bytes` has what each rank sends of each bucket. Owners with the most left to receive come first."""
    left = [deque(index for index, owner in enumerate(owners) if owner == rank) for rank in range(ranks)]
    rounds: list[Round] = []
    while any(left):
        taken: list[int | None] = [None] * ranks
        sending = [0] * ranks
        for rank in sorted(range(ranks), key=lambda rank: -len(left[rank])):
            if left[rank]:
                more = [sent + of_it for sent, of_it in zip(sending, sent_bytes[left[rank][0]], strict=True)]
                if max(more) <= limit_bytes:
                    taken[rank], sending = left[rank].popleft(), more
        rounds.append(tuple(taken))
    return tuple(rounds)
