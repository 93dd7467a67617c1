"""The weights of one rank in memory, seen as the buckets of a packing.

Invariants
- What is read from a bucket are the bits of its elements, whatever the form in which memory holds them: a bfloat16
  element kept as float32 counts as the bfloat16 it is, and as none if it is not exactly one.
- Padding and tensors that are no part of the model are never written.
- An element that a rank holds more than once is what all its copies are; where they differ, it is none.
- The tiles of a run are changed all or none, unless the memory itself fails.
- The memory is that of the tensors as they were found. Where these have been given another one since, writing to the
  old one would change nothing that anybody computes with: `check_place` tells, and `found_anew` finds them.

Weights on a device are read and written over copies in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rose.errors import TransferError
from rose_transfer.codec import TILE_ELEMENTS, Delta
from rose_transfer.codec.streams import tile_count
from rose_transfer.layout.dtypes import dtype_name
from rose_transfer.layout.layout import Layout
from rose_transfer.layout.strided import View
from rose_transfer.live.held import HeldBucket, held_buckets
from rose_transfer.live.runs import CopiedRun, DirectRun, PartCopy, Run, tile_runs
from rose_transfer.store.packing import LANE_BYTES, Packing

Bits = NDArray[np.unsignedinteger[Any]]
_INTEGERS = {2: torch.int16, 4: torch.int32}
_WIDENED = {("bfloat16", "float32")}
"""(published, local) dtypes of which the first is the upper half of the second."""


class OtherForm(TransferError):
    """Memory holds an element that no published one can be, or copies of one that differ: it is no version."""


class Moved(TransferError):
    """The weights no longer lie where they were found; nobody knows what they are."""


class LiveWeights:
    """`tensors` by the names of `layout`, changed in place by `apply_run`. The mapping is asked again where they lie.

    Raises TransferError that names the tensor if memory is not as the layout says (packed or re-laid after loading),
    holds elements in a form that cannot keep the published bits, or does not fit the packing (see `held`).
    """

    def __init__(self, layout: Layout, packing: Packing, tensors: Mapping[str, torch.Tensor]) -> None:
        self._layout, self._packing, self._tensors = layout, packing, tensors
        self._held = {held.place: held for held in held_buckets(packing, layout)}
        found = dict(tensors)
        self._flat = _flat_tensors(layout, found)
        self._places = {name: memory_of(found[name]) for name in self._flat}
        self._runs = {
            place: {run.first: run for run in tile_runs(held, self._is_plain(held))}
            for place, held in self._held.items()
        }
        for held in self._held.values():
            for region in held.regions:
                for piece in region.pieces:
                    _check_form(layout.holder, region.region.parameter, held.bucket.dtype, self._flat[piece.tensor])
        self._scratch: torch.Tensor | None = None

    @property
    def places(self) -> tuple[int, ...]:
        """The buckets of the packing that this rank holds, by their place in it."""
        return tuple(self._held)

    def check_place(self) -> None:
        """Raises Moved if a tensor has other memory, shape or dtype than when it was found. Reads no weights."""
        found = dict(self._tensors)
        for name, place in self._places.items():
            if name not in found or memory_of(found[name]) != place:
                raise Moved(
                    f"{self._layout.holder}: {name} has been given other memory, and nobody knows what it holds",
                    expected="weights that stay where they are from the stage of an update until it is in force",
                    to_do="bring a version once more; the weights are compared where they lie then",
                )

    def found_anew(self) -> LiveWeights:
        """These weights where they lie now: itself if they have not moved. Raises TransferError as the constructor."""
        try:
            self.check_place()
        except Moved:
            return LiveWeights(self._layout, self._packing, self._tensors)
        return self

    def bits_of(self, place: int) -> Bits:
        """The bits of a bucket as memory holds it now, in room that the next call fills anew.

        Raises OtherForm if an element is not one of the published dtype, or is held twice and not the same.
        """
        held = self._held[place]
        whole = CopiedRun(0, tile_count(held.bucket.elements), held.bucket.elements, ())
        for run in self._runs[place].values():
            self._read(held, run, self._room(held, whole)[run.first * TILE_ELEMENTS :])
        return self._bits(held, self._room(held, whole))

    def runs(self, place: int) -> tuple[int, ...]:
        """The runs of a bucket that are changed one by one, each by its first tile."""
        return tuple(self._runs[place])

    def apply_run(
        self, place: int, first: int, delta: Delta, *, backwards: bool, writing: Callable[[], None] = lambda: None
    ) -> None:
        """Apply (backwards: undo) the tiles of one run of a delta of a bucket.

        Raises WrongBase if a tile holds other weights: nothing of the run is changed then. After any other error, some
        of it may be, if `writing` was called: it is before the first write.
        """
        held, run = self._held[place], self._runs[place][first]
        if isinstance(run, DirectRun):
            upto = min(run.end * TILE_ELEMENTS, held.bucket.elements)
            elements = upto - run.first * TILE_ELEMENTS
            bits = self._bits(held, self._flat[run.tensor][run.offset : run.offset + elements])
            writing()
            delta.apply_tiles(bits, run.first, run.end, backwards=backwards, held_from=run.first)
            return
        room = self._room(held, run)
        if delta.coded < delta.elements or delta.mode == "steps":
            self._read(held, run, room)
        delta.apply_tiles(self._bits(held, room), run.first, run.end, backwards=backwards, held_from=run.first)
        writing()
        self._write(run, room)

    def free_scratch(self) -> None:
        """Give back the room for copies, up to a bucket, that reading and applying have left."""
        self._scratch = None

    def _read(self, held: HeldBucket, run: Run, room: torch.Tensor) -> None:
        """Fill the beginning of `room` with the elements of a run."""
        if isinstance(run, DirectRun):
            elements = min(run.end * TILE_ELEMENTS, held.bucket.elements) - run.first * TILE_ELEMENTS
            room[:elements].copy_(self._flat[run.tensor][run.offset : run.offset + elements])
            return
        for copy in run.copies:
            flat, within = self._flat[copy.tensor], _view(room, copy.within_run)
            if flat.dtype == room.dtype:
                within.copy_(_view(flat, copy.local))
            else:
                _narrow(flat, copy, within, held.bucket.dtype)
        # Of those elements the room has the last copy now.
        for copy in run.copies:
            if copy.is_shared:
                _check_same(self._flat[copy.tensor], copy, _view(room, copy.within_run))

    def _write(self, run: CopiedRun, room: torch.Tensor) -> None:
        for copy in run.copies:
            local = _view(self._flat[copy.tensor], copy.local)
            # From bfloat16 to float32 every bit is kept, a NaN's included.
            local.copy_(_view(room, copy.within_run))

    def _room(self, held: HeldBucket, run: CopiedRun) -> torch.Tensor:
        """Host memory for the elements of a run, in the dtype of the bucket."""
        needed = run.elements * held.bucket.lane
        if self._scratch is None or self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        return self._scratch[:needed].view(getattr(torch, held.bucket.dtype))

    def _is_plain(self, held: HeldBucket) -> Callable[[str], bool]:
        def is_plain(tensor: str) -> bool:
            flat = self._flat[tensor]
            return flat.device.type == "cpu" and dtype_name(flat.dtype) == held.bucket.dtype

        return is_plain

    @staticmethod
    def _bits(held: HeldBucket, flat: torch.Tensor) -> Bits:
        lane = held.bucket.lane
        return flat.view(_INTEGERS[lane]).numpy().view(f"<u{lane}")


def _flat_tensors(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    flat: dict[str, torch.Tensor] = {}
    for name, told in layout.tensors.items():
        tensor = tensors.get(name)
        found = None if tensor is None else (tuple(tensor.shape), dtype_name(tensor.dtype))
        if tensor is None or found != (told.shape, told.dtype) or not tensor.is_contiguous() or tensor.is_neg():
            raise TransferError(
                f"{layout.holder}: {name} is {found or 'not there'} in memory",
                expected=f"{(told.shape, told.dtype)}, contiguous, as it is loaded",
                to_do="start the engine with weights that are neither packed nor re-laid, or anew for each version",
            )
        needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        if tensor.is_meta or tensor.untyped_storage().nbytes() < needed:
            raise TransferError(
                f"{layout.holder}: {name} has no memory now",
                expected="weights that are there",
                to_do="bring back what was offloaded, or finish what loads it, before an update",
            )
        flat[name] = tensor.detach().view(-1)
    return flat


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies and how; equal for two as long as both live if, and only if, they are one in memory."""
    storage = tensor.untyped_storage()
    where = (int(storage._cdata), tensor.data_ptr(), storage.nbytes(), tensor.device)
    return (*where, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.is_neg())


def _check_form(holder: str, parameter: str, published: str, flat: torch.Tensor) -> None:
    local = dtype_name(flat.dtype)
    if local != published and (published, local) not in _WIDENED:
        raise TransferError(
            f"{holder} holds {parameter} as {local}, which cannot keep every {published}",
            expected=f"{published}, or float32 for bfloat16",
            to_do=f"publish {parameter} as {local}, or load the engine with {published}",
        )
    assert flat.element_size() >= LANE_BYTES[published]


def _narrow(flat: torch.Tensor, copy: PartCopy, room: torch.Tensor, published: str) -> None:
    """Copy the upper halves of float32 elements; by their bits, for a conversion would make all NaNs one.

    The halves are seen where they lie (low first, as on every machine that runs this), and counted: that takes no
    memory, while a copy of them would take more than the weights themselves.
    """
    low, high = _halves(flat, copy.local)
    if int(torch.count_nonzero(low)):
        raise OtherForm(
            f"{copy.tensor} in memory has an element that is no {published}",
            expected="weights that were published and not changed since",
            to_do="bring the engine to a whole version",
        )
    room.view(torch.int16).copy_(high)


def _check_same(flat: torch.Tensor, copy: PartCopy, room: torch.Tensor) -> None:
    """Raises OtherForm if elements in memory are not those in `room`, bit by bit."""
    integers = _INTEGERS[room.element_size()]
    if flat.dtype == room.dtype:
        local = _view(flat.view(integers), copy.local)
    else:
        _, local = _halves(flat, copy.local)
    if not torch.equal(local.cpu(), room.view(integers)):
        raise OtherForm(
            f"{copy.tensor} in memory differs from another copy of the same weights",
            expected="copies that are equal",
            to_do="bring the engine to a whole version",
        )


def _halves(flat: torch.Tensor, view: View) -> tuple[torch.Tensor, torch.Tensor]:
    """The lower and the upper halves of float32 elements, where they lie."""
    halves, strides = flat.view(torch.int16), tuple(2 * stride for stride in view.strides)
    low, high = (_view(halves, View(2 * view.offset + half, view.sizes, strides)) for half in (0, 1))
    return low, high


def _view(flat: torch.Tensor, view: View) -> torch.Tensor:
    return flat.as_strided(view.sizes, view.strides, flat.storage_offset() + view.offset)
