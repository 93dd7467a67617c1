"""The difference between two versions of one bucket: made, applied, undone, composed.

Invariants
- Exact: what `apply` leaves has the bits of the new version, whatever the bits.
- A bucket is changed whole or not at all: the hash of what is held is compared before anything is written, each tile's
  check before that tile is, and if one does not hold the tiles before it are undone.
- A delta of steps works both ways; two that follow each other compose without the weights. An overwrite needs no
  particular weights below it and cannot be undone.
- A delta that came through `from_wire` is sound: no later call finds it malformed.

Hashes are those of `bucket_hash`. Whoever holds a bucket keeps its hash beside it: computing it anew reads everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose.errors import TransferError
from rose_transfer.codec import wire
from rose_transfer.codec.kernels import Kernels, best_kernels
from rose_transfer.codec.streams import (
    DENSE,
    TILE_ELEMENTS,
    MalformedDelta,
    Mode,
    Streams,
    WrongBase,
    as_bits,
    tile_count,
)


@dataclass(frozen=True, slots=True)
class Delta:
    """From the bucket with hash `before` to the one with hash `after`; `lane` is the bytes per element.

    `before` is 0 in an overwrite, which may be applied to anything.
    """

    lane: int
    elements: int
    mode: Mode
    before: int
    after: int
    streams: Streams

    @property
    def tiles(self) -> int:
        return tile_count(self.elements)

    @property
    def coded(self) -> int:
        """Elements that the delta carries: the changed ones, and in dense tiles all."""
        return int(np.sum(self.streams.counts, dtype=np.int64))

    def to_wire(self, *, compress: bool = False) -> bytes:
        """The bytes described in `wire`."""
        return wire.pack(self.lane, self.elements, self.mode, self.before, self.after, self.streams, compress=compress)

    def apply(self, target: NDArray[Any], current: int, *, kernels: Kernels | None = None) -> int:
        """Bring `target`, whose hash is `current`, to the new version in place, and return the hash it has then.

        An overwrite takes no notice of `current`, and afterwards reads the whole bucket.

        Raises ValueError if `target` is not such a bucket, and WrongBase if it holds other weights: it is then as it
        was, unless this was an overwrite of some elements, which can only be followed by one of all.
        """
        kernels = kernels or best_kernels()
        bits = self._fitting(target)
        if self.mode == "steps":
            self._check_base(current, self.before)
            self._apply_or_undo(bits, kernels, backwards=False)
            return self.after
        self.apply_tiles(target, 0, self.tiles, kernels=kernels)
        if bucket_hash(bits, kernels=kernels) != self.after:
            raise WrongBase(
                "the bucket has not become the new version", to_do="overwrite all of it: its other elements differ"
            )
        return self.after

    def undo(self, target: NDArray[Any], current: int, *, kernels: Kernels | None = None) -> int:
        """Bring `target` back to the old version; the reverse of `apply`.

        Raises TransferError if this is an overwrite, else as `apply` does.
        """
        if self.mode == "overwrite":
            raise TransferError("an overwrite cannot be undone", to_do="go back by the version before it")
        bits = self._fitting(target)
        self._check_base(current, self.after)
        self._apply_or_undo(bits, kernels or best_kernels(), backwards=True)
        return self.before

    def apply_tiles(
        self,
        target: NDArray[Any],
        first: int,
        end: int,
        *,
        backwards: bool = False,
        held_from: int = 0,
        kernels: Kernels | None = None,
    ) -> None:
        """Apply tiles `first` up to `end` alone, for one who journals them; the hash of the whole is not looked at.

        `target` is the bucket from tile `held_from` on, at least up to `end`: live weights do not lie in buckets.

        Raises WrongBase if a tile holds other weights; all are as they were then.
        """
        bits = as_bits(target)
        if not 0 <= held_from <= first <= end <= self.tiles:
            raise ValueError(f"tiles {first} up to {end} of {self.tiles}, held from {held_from}")
        needed = min(end * TILE_ELEMENTS, self.elements) - held_from * TILE_ELEMENTS
        room = self.elements - held_from * TILE_ELEMENTS
        if bits.itemsize != self.lane or not needed <= bits.size <= room:
            raise ValueError(
                f"{bits.size} elements of {bits.itemsize} bytes, not {needed} to {room} of {self.lane} bytes"
            )
        kernels = kernels or best_kernels()
        tile, why = self._change(bits, kernels, first, end, held_from, backwards=backwards)
        if why:
            raise WrongBase(f"tile {tile} was not applied: {why}", to_do="repair that tile")

    def _apply_or_undo(self, bits: NDArray[Any], kernels: Kernels, *, backwards: bool) -> None:
        tile, why = self._change(bits, kernels, 0, self.tiles, 0, backwards=backwards)
        if why:
            raise WrongBase(
                f"tile {tile} was not applied: {why}; the bucket is as it was, but not what its hash says",
                to_do="repair that tile, or fetch the whole bucket",
            )

    def _change(
        self, bits: NDArray[Any], kernels: Kernels, first: int, end: int, held_from: int, *, backwards: bool
    ) -> tuple[int, str]:
        """Change all these tiles, or none and say which one is at fault and why; ("" if none is)."""

        def change(upto: int, *, backwards: bool) -> tuple[int, str] | None:
            return kernels.apply(
                self.streams, bits, self.mode, backwards=backwards, first=first, end=upto, held_from=held_from
            )

        fault = change(end, backwards=backwards)
        if fault is None:
            return end, ""
        if self.mode == "steps":
            change(fault[0], backwards=not backwards)
        return fault

    def _fitting(self, target: NDArray[Any]) -> NDArray[Any]:
        bits = as_bits(target)
        if (bits.size, bits.itemsize) != (self.elements, self.lane):
            raise ValueError(
                f"{bits.size} elements of {bits.itemsize} bytes, not {self.elements} elements of {self.lane} bytes"
            )
        return bits

    @staticmethod
    def _check_base(current: int, wanted: int) -> None:
        if current != wanted:
            raise WrongBase(
                f"the bucket held here has hash {current:016x}",
                expected=f"{wanted:016x}, the version that the delta starts from",
                to_do="go by another delta, or fetch the whole bucket",
            )


def bucket_hash(data: NDArray[Any], *, kernels: Kernels | None = None) -> int:
    """The hash that identifies a bucket's contents; the sum of its tiles' hashes modulo 2^64."""
    return int(np.add.reduce(tile_hashes(data, kernels=kernels)))


def tile_hashes(data: NDArray[Any], *, kernels: Kernels | None = None) -> NDArray[np.uint64]:
    """One hash per tile: to find the tiles in which two buckets differ."""
    return (kernels or best_kernels()).tile_hashes(as_bits(data))


def encode(old: NDArray[Any], new: NDArray[Any], before: int, *, kernels: Kernels | None = None) -> Delta:
    """The steps from `old`, whose hash is `before`, to `new`. Reads both once.

    Raises ValueError if they are not buckets of the same shape.
    """
    old_bits, new_bits = _pair(old, new)
    streams = (kernels or best_kernels()).encode(old_bits, new_bits, "steps")
    after = (before + streams.growth()) % 2**64
    return Delta(new_bits.itemsize, new_bits.size, "steps", before, after, streams)


def overwrite(new: NDArray[Any], after: int, *, kernels: Kernels | None = None) -> Delta:
    """All of `new`, whose hash is `after`, for one who holds nothing that can be trusted."""
    bits = as_bits(new)
    return Delta(
        bits.itemsize, bits.size, "overwrite", 0, after, (kernels or best_kernels()).encode(None, bits, "overwrite")
    )


def overwrite_changed(old: NDArray[Any], new: NDArray[Any], after: int, *, kernels: Kernels | None = None) -> Delta:
    """The new bits, as they are, of the elements in which `new`, whose hash is `after`, differs from `old`."""
    old_bits, new_bits = _pair(old, new)
    streams = (kernels or best_kernels()).encode(old_bits, new_bits, "overwrite")
    return Delta(new_bits.itemsize, new_bits.size, "overwrite", 0, after, streams)


def from_wire(data: bytes | bytearray | memoryview, *, kernels: Kernels | None = None) -> Delta:
    """The delta that `to_wire` made these bytes from. It may refer to them: they must not change afterwards.

    Raises MalformedDelta, having looked at every tile, whatever the bytes are.
    """
    lane, elements, mode, before, after, streams = wire.unpack(memoryview(data).cast("B"))
    delta = Delta(lane, elements, mode, before, after, streams)
    if fault := (kernels or best_kernels()).inspect(streams, elements, lane, mode):
        raise MalformedDelta(f"tile {fault[0]}: {fault[1]}", to_do="fetch the delta again")
    whole = mode == "overwrite" and bool(np.all(streams.index_codes == DENSE))
    if (mode == "steps" or whole) and (before + streams.growth()) % 2**64 != after:
        raise MalformedDelta("the tiles' checks do not lead from the hash before to the hash after")
    return delta


def compose(first: Delta, second: Delta, *, kernels: Kernels | None = None) -> Delta:
    """One delta that does what `first` and then `second` do. Two of steps, or two overwrites.

    Raises WrongBase if `second` does not begin where `first` ends, TransferError if one is of steps and one an
    overwrite: apply the one to the weights, then.
    """
    if (first.lane, first.elements) != (second.lane, second.elements):
        raise ValueError(f"deltas of {first.elements} x {first.lane} and {second.elements} x {second.lane} bytes")
    if first.mode != second.mode:
        raise TransferError("steps and an overwrite have no common form", to_do="apply one after the other")
    if first.mode == "steps" and first.after != second.before:
        raise WrongBase(
            f"the second delta begins at {second.before:016x}", expected=f"{first.after:016x}, where the first one ends"
        )
    streams = (kernels or best_kernels()).compose(first.streams, second.streams, first.elements, first.lane, first.mode)
    return Delta(first.lane, first.elements, first.mode, first.before, second.after, streams)


def _pair(old: NDArray[Any], new: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    old_bits, new_bits = as_bits(old), as_bits(new)
    if (old_bits.size, old_bits.itemsize) != (new_bits.size, new_bits.itemsize):
        raise ValueError(
            f"{old_bits.size} elements of {old_bits.itemsize} bytes against {new_bits.size} of {new_bits.itemsize}"
        )
    return old_bits, new_bits
