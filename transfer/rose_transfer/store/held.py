"""The bits of a version in memory, against which the next one is encoded."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rose_transfer.codec import Delta, bucket_hash, encode, overwrite
from rose_transfer.codec.streams import as_bits
from rose_transfer.store.packing import Packing
from rose_transfer.store.reader import Bits

_COPIED_FROM = 1 / 32
"""Share of changed elements from which on it is quicker to copy a bucket than to look each of them up."""


@dataclass(slots=True)
class Held:
    """Buckets of `packing`, with their hashes, by their place there: all those of `version`, or none."""

    version: int
    packing: Packing
    buckets: dict[int, Bits] = field(default_factory=dict)
    hashes: dict[int, int] = field(default_factory=dict)

    def advance(self, place: int, given: Bits) -> Delta:
        """Hold a copy of `given` as that bucket, and return what leads to it, from nothing if none was held.

        Several threads may call, each for another bucket. Raises ValueError if it does not fit what was held.
        """
        new = as_bits(given)
        old = self.buckets.get(place)
        if old is None:
            # Whoever changes `given` too early gets other weights than they wanted, but not a hash of other ones.
            new = new.copy()
            delta = overwrite(new, bucket_hash(new))
            self.buckets[place] = new
        else:
            delta = encode(old, new, self.hashes[place])
            if delta.coded > delta.elements * _COPIED_FROM:
                np.copyto(old, new)
            else:
                delta.apply(old, delta.before)
        self.hashes[place] = delta.after
        return delta
