"""Which rank owns which bucket, and which pieces of it come from whom. A pure core.

Invariants
- Every bucket has one owner. No rank owns more than its share of all bytes by more than one bucket.
- Among the ranks that have room for a bucket, the one that holds most of it owns it; what it holds is not sent.
- All ranks come to the same answer from the same layouts, so nothing but the pieces themselves has to be sent.
- Round by round, every rank receives at most one bucket, and sends no more bytes than two of the largest have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rose_transfer.layout.box import row_major
from rose_transfer.layout.layout import Layout, LocalTensor, Piece
from rose_transfer.layout.plan import Segment, plan
from rose_transfer.layout.sources import Sources
from rose_transfer.store.packing import Bucket, Packing

Round = tuple[int | None, ...]
"""The bucket that each rank receives, None for a rank that receives none now."""


@dataclass(frozen=True, slots=True)
class Routes:
    """What one rank does; buckets are told by their place in the packing.

    `owners` has the owner of each bucket. `outgoing` are the pieces that this rank sends of a bucket, in the order in
    which they are sent, and `incoming` those of the buckets it owns, by the rank that sends them.
    """

    owners: tuple[int, ...]
    outgoing: Mapping[int, tuple[Segment, ...]]
    incoming: Mapping[int, tuple[tuple[Segment, ...], ...]]
    rounds: tuple[Round, ...]


def make_routes(packing: Packing, layouts: Sequence[Layout], rank: int) -> Routes:
    """The routes of `rank`; `layouts` has what each rank holds, in their order.

    Raises TransferError that names the parameter if no rank holds an element that is packed, or two ranks describe
    one differently.
    """
    sources = Sources(layouts)
    owners = choose_owners(packing, sources)
    outgoing: dict[int, tuple[Segment, ...]] = {}
    incoming: dict[int, tuple[tuple[Segment, ...], ...]] = {}
    sent_bytes: list[tuple[int, ...]] = []
    for index, bucket in enumerate(packing.buckets):
        owner = owners[index]
        segments = plan(sources, bucket_layout(packing, bucket), near=sources.holders[owner]).segments
        by_sender: dict[str, list[Segment]] = {holder: [] for holder in sources.holders}
        for segment in segments:
            by_sender[segment.holder].append(segment)
        outgoing[index] = tuple(by_sender[sources.holders[rank]])
        sent_bytes.append(tuple(segments_bytes(sent, bucket) for sent in by_sender.values()))
        if owner == rank:
            incoming[index] = tuple(map(tuple, by_sender.values()))
    limit_bytes = 2 * max((bucket.dense_bytes for bucket in packing.buckets), default=0)
    return Routes(owners, outgoing, incoming, _rounds(owners, sent_bytes, len(layouts), limit_bytes))


def segments_bytes(segments: Sequence[Segment], bucket: Bucket) -> int:
    """Bytes of pieces of `bucket` on their way."""
    return sum(segment.source.box.elements for segment in segments) * bucket.lane


def choose_owners(packing: Packing, sources: Sources) -> tuple[int, ...]:
    """The owner of each bucket, as a place in the list of sources."""
    owned_bytes = [0] * len(sources.holders)
    share_bytes = packing.dense_bytes / len(owned_bytes)
    owners: list[int] = []
    for bucket in packing.buckets:
        held = _held_elements(bucket, sources)
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


def _held_elements(bucket: Bucket, sources: Sources) -> list[int]:
    held = [0] * len(sources.holders)
    for region in bucket.regions:
        for place, piece in sources.touching(region.parameter, region.box):
            common = piece.box.intersect(region.box)
            held[place] += common.elements if common else 0
    return held


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
