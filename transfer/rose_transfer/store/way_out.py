"""How a version is stored so that the one after it has room as well, whatever it will be. A pure core.

What must stay is the way from nothing to the newest version: all else may go. Deltas make that way longer and longer,
until it is too long for anything to stand beside it: no delta, and not the newest version whole, which alone would make
it short again. A version that is whole always has room beside the one before it, if that was always so.

Invariants
- Where the newest version and the next one whole have room together (`has_way_out`), they have that again after what
  `how_to_store` says, if there is room for two models that are whole. Deltas are stored as long as that holds.
- Where they have not, as where others have filled the disk, deltas are stored as long as there is room for them.

Pinned versions count as those that may go: where they take the room, to unpin them has to help.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rose_transfer.store.manifest import Manifest


class How(Enum):
    """`RENEWED`: in steps, once the version that they lead from is written whole, and the way to that removed."""

    STEPS = "in steps"
    RENEWED = "in steps from a version written whole"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Rooms:
    """In bytes. `newest` is all that leads to the newest version from nothing, `way` the deltas of that.

    `whole` is what a version takes at most that is written whole, `room` what there is for everything together.
    """

    newest: int
    way: int
    whole: int
    room: int

    @property
    def has_way_out(self) -> bool:
        return self.newest + self.whole <= self.room


def how_to_store(step_bytes: int, rooms: Rooms) -> How:
    """How to store the next version, whose steps take so many bytes."""
    if not rooms.has_way_out or rooms.newest + step_bytes + rooms.whole <= rooms.room:
        return How.STEPS
    # A way that is shorter than the version itself would be taken in place of that.
    if rooms.way > rooms.whole and 2 * rooms.whole + step_bytes <= rooms.room:
        return How.RENEWED
    return How.WHOLE if 2 * rooms.whole <= rooms.room else How.STEPS


def whole_sizes_max(made: Manifest) -> dict[str, int]:
    """What any version packed as `made` takes at most that is whole: bytes of its objects but the packing, by a name.

    A delta has 72 bytes beside its elements and 20 for each tile of 128 KiB or more, and numbers may have more digits.
    """
    deltas = {str(entry.bucket_id): entry.dense_bytes + entry.dense_bytes // 4096 + 128 for entry in made.buckets}
    return deltas | {"manifest": len(made.to_bytes()) + 32 * (len(made.buckets) + 2)}
