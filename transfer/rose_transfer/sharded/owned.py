"""The buckets that a rank owns: their bits at the version published last, and the deltas to the next one.

Invariants
- `fingerprint` names the version whose bits all owned buckets have; None while they have none, or not all the same.
- Memory: the owned buckets once, and while a version is made its deltas as they travel.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rose_transfer.codec import bucket_hash, encode, overwrite
from rose_transfer.sharded.pieces import Bits
from rose_transfer.store.manifest import RAW, ZSTD, BucketEntry
from rose_transfer.store.objects import object_key
from rose_transfer.store.packing import Bucket


@dataclass(slots=True)
class OwnedBuckets:
    """Buckets are told by their place in the packing."""

    fingerprint: str | None = None
    _bits: dict[int, Bits] = field(default_factory=dict)
    _hashes: dict[int, int] = field(default_factory=dict)

    def forget(self) -> None:
        """Hold nothing any more."""
        self.fingerprint = None
        self._bits.clear()
        self._hashes.clear()

    def put(self, index: int, bits: Bits) -> None:
        """Hold `bits`, which nobody changes afterwards, whatever they replace."""
        self._bits[index] = bits
        self._hashes[index] = bucket_hash(bits)

    def step(self, index: int, bucket: Bucket, new: Bits, *, whole: bool, compress: bool) -> tuple[BucketEntry, bytes]:
        """Hold `new` from now on, which nobody changes afterwards.

        Returns the delta that led there, as it travels, and its entry; `whole` makes one that needs no base.
        """
        delta = overwrite(new, bucket_hash(new)) if whole else encode(self._bits[index], new, self._hashes[index])
        self._bits[index] = new
        self._hashes[index] = delta.after
        wire = delta.to_wire(compress=compress)
        level = ZSTD if compress else RAW
        entry = BucketEntry(
            bucket.bucket_id, object_key(wire), level, len(wire), bucket.dense_bytes, delta.before, delta.after
        )
        return entry, wire
