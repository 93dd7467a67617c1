"""A small model in several buckets, weights that move as in training, and an engine that holds some of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose.simulator.world import must
from rose_transfer.codec import from_wire
from rose_transfer.distribution import Fetched, Receiver
from rose_transfer.layout.layout import Parameter
from rose_transfer.store import BucketId, Objects, Packing, manifest, packing
from rose_transfer.store.packing import pack_whole

Bits = NDArray[Any]
DEADLINE_S = 30.0

PACKING = pack_whole(
    {
        "embed": Parameter((400, 8), "bfloat16"),
        "norm": Parameter((8,), "float32"),
        "proj": Parameter((300, 8), "bfloat16"),
    },
    bucket_bytes=4096,
)
"""5600 bfloat16 elements in three buckets, 8 of float32 in a fourth."""


def first_weights(seed: int, packing: Packing = PACKING) -> list[Bits]:
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, 2 ** (8 * bucket.lane), bucket.elements, dtype=np.dtype(f"<u{bucket.lane}").type)
        for bucket in packing.buckets
    ]


def moved(weights: Sequence[Bits], share: float, seed: int) -> list[Bits]:
    """Each element moved by one step with probability `share`."""
    rng = np.random.default_rng(seed)
    return [bits + (rng.random(bits.size) < share).astype(bits.dtype) for bits in weights]


@dataclass
class Engine:
    """Holds the wanted buckets of one version, and moves on by what lies in a folder."""

    wanted: Callable[[Packing], Collection[BucketId]] | None = None
    bits: dict[BucketId, Bits] = field(default_factory=dict)
    version: int | None = None
    fingerprint: str | None = None

    def apply(self, fetched: Fetched) -> None:
        """Raises if anything is missing or has not the bits that the manifests say."""
        objects = Objects(fetched.objects_folder)
        for key, backwards in fetched.steps:
            found = manifest.from_bytes(objects.read(key))
            described = packing.from_bytes(objects.read(found.packing))
            wanted = None if self.wanted is None else self.wanted(described)
            if found.base is None:
                self.bits = {}
            for bucket, entry in zip(described.buckets, found.buckets, strict=True):
                if wanted is not None and bucket.bucket_id not in wanted:
                    continue
                delta = from_wire(objects.read(entry.key))
                if found.base is None:
                    self.bits[bucket.bucket_id] = np.empty(bucket.elements, np.dtype(f"<u{bucket.lane}"))
                bits = self.bits[bucket.bucket_id]
                after = delta.undo(bits, entry.after) if backwards else delta.apply(bits, entry.before)
                must(after == (entry.before if backwards else entry.after), "a delta leaves", f"{after:016x}")
        self.version, self.fingerprint = fetched.version, fetched.fingerprint

    async def move(self, receiver: Receiver, goal: int, deadline_s: float = DEADLINE_S) -> Fetched:
        fetched = await receiver.fetch(self.version, self.fingerprint, goal, deadline_s=deadline_s)
        self.apply(fetched)
        receiver.forget()
        return fetched

    def has(self, expected: Sequence[Bits]) -> bool:
        return len(self.bits) == len(expected) and all(
            mine.tobytes() == theirs.tobytes()
            for (_, mine), theirs in zip(sorted(self.bits.items()), expected, strict=True)
        )
