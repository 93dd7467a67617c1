"""What a rank's memory holds while a version is in force, to see whether it still does, wherever it lies by now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rose_transfer.codec import WrongBase, bucket_hash
from rose_transfer.live import LiveWeights


@dataclass(slots=True)
class VersionInMemory:
    """`hashes` are those of the version's buckets, by their place in the packing of `weights`, where those lay last."""

    weights: LiveWeights
    hashes: Mapping[int, int]

    def compare(self) -> None:
        """Raises WrongBase if a bucket in memory is another one, OtherForm if it is none that was published.

        Raises TransferError if weights have moved to where they cannot be found or compared.
        """
        self.weights = self.weights.found_anew()
        try:
            for place, expected in self.hashes.items():
                found = bucket_hash(self.weights.bits_of(place))
                if found != expected:
                    raise WrongBase(
                        f"bucket number {place} in memory has hash {found:016x}",
                        expected=f"{expected:016x}, that of the version in force",
                        to_do="go by a way from nothing",
                    )
        finally:
            self.weights.free_scratch()
