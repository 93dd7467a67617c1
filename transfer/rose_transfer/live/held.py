"""Where the buckets of a packing lie in the memory of one rank.

Invariants
- A rank holds all of a bucket or nothing of it; where it would hold a part, the packing was made for other ranks, and
  is refused: a delta of a bucket needs all of its bits.
- Everything that the rank's layout holds lies in some bucket: no part of the model can stay behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rose.errors import TransferError
from rose_transfer.layout.box import subtract_all
from rose_transfer.layout.holdings import Region
from rose_transfer.layout.layout import Layout, Piece
from rose_transfer.store.packing import Bucket, BucketId, Packing


@dataclass(frozen=True, slots=True)
class HeldRegion:
    """A region of a bucket, from element `start` of that; `pieces` are its parts in local memory.

    Parts cover the region; they share elements where the rank holds these more than once.
    """

    start: int
    region: Region
    pieces: tuple[Piece, ...]

    @property
    def held_once(self) -> bool:
        return sum(piece.box.elements for piece in self.pieces) == self.region.box.elements


@dataclass(frozen=True, slots=True)
class HeldBucket:
    """Bucket number `place` of the packing, and all its regions in its order."""

    place: int
    bucket: Bucket
    regions: tuple[HeldRegion, ...]


def held_buckets(packing: Packing, layout: Layout) -> tuple[HeldBucket, ...]:
    """The buckets that a rank with this layout follows.

    Raises TransferError that names holder and parameter if the two do not fit, as the invariants say.
    """
    _check_agreement(packing, layout)
    pieces = layout.by_parameter()
    found: list[HeldBucket] = []
    for place, bucket in enumerate(packing.buckets):
        # Most buckets are other ranks': it takes a fraction of the time to see that.
        if not any(piece.box.meets(one.box) for one in bucket.regions for piece in pieces.get(one.parameter, ())):
            continue
        regions = tuple(
            HeldRegion(span.start, region, _parts(region, pieces.get(region.parameter, [])))
            for region, span in bucket.spans()
        )
        for held in regions:
            _check_whole(layout.holder, bucket, held)
        found.append(HeldBucket(place, bucket, regions))
    _check_complete(found, layout)
    return tuple(found)


def wanted_buckets(packing: Packing, layouts: Sequence[Layout]) -> frozenset[BucketId]:
    """The buckets that ranks with these layouts follow: what a receiver of theirs fetches. Raises as `held_buckets`."""
    return frozenset(held.bucket.bucket_id for layout in layouts for held in held_buckets(packing, layout))


def _parts(region: Region, pieces: list[Piece]) -> tuple[Piece, ...]:
    common = ((piece, piece.box.intersect(region.box)) for piece in pieces)
    return tuple(piece.part(box) for piece, box in common if box is not None)


def _check_agreement(packing: Packing, layout: Layout) -> None:
    for name in sorted({piece.parameter for piece in layout.pieces}):
        ours, published = layout.parameters[name], packing.parameters.get(name)
        if published is None or published.shape != ours.shape:
            raise TransferError(
                f"{layout.holder} needs {name} of shape {ours.shape}; the version has "
                f"{'none' if published is None else published.shape}",
                expected="a version of the model that the engine was started with",
            )


def _check_whole(holder: str, bucket: Bucket, held: HeldRegion) -> None:
    missing = subtract_all([held.region.box], [piece.box for piece in held.pieces])
    if missing:
        raise TransferError(
            f"{holder} holds only a part of bucket {bucket.bucket_id}: not {held.region.parameter}{missing[0]}",
            expected="buckets packed for the layout of this rank",
            to_do="name this rank's layout to the publisher",
        )


def _check_complete(found: list[HeldBucket], layout: Layout) -> None:
    packed: Mapping[str, list[Region]] = {piece.parameter: [] for piece in layout.pieces}
    for bucket in found:
        for held in bucket.regions:
            packed[held.region.parameter].append(held.region)
    for piece in layout.pieces:
        # No element lies in two regions, so to count is enough; what is left over may be as many parts as regions.
        common = (piece.box.intersect(region.box) for region in packed[piece.parameter])
        missing = piece.box.elements - sum(box.elements for box in common if box is not None)
        if missing:
            raise TransferError(
                f"{layout.holder} holds {piece.parameter}{piece.box}, of which {missing} elements are in no bucket",
                expected="a version that holds everything",
                to_do="publish the whole model",
            )
