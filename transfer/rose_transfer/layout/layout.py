"""A layout: what one rank holds of a model, as boxes of its parameters and where they lie in local memory.

Invariants of a layout that passed its check
- `check_destination`: every element of every local tensor is written by exactly one piece, or is declared
  padding that no piece touches. Padding always holds zero and is never addressed by a transfer.
- `check_source`: every piece lies inside its parameter and its local tensor, and no local element stands for
  two elements of the model. Local elements that stand for none (a framework's own padding) are allowed.
- The fingerprint does not depend on who holds the layout or in which order it was discovered.

Parameters are named, shaped and typed as in the published checkpoint; dtypes by torch's names ("bfloat16").
Local tensors are row-major; all offsets and strides count elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rose.errors import TransferError
from rose_transfer.layout.box import Box
from rose_transfer.layout.coverage import cover
from rose_transfer.layout.strided import View, view_boxes


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of the published checkpoint."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """One tensor in a rank's memory. Its dtype may be wider than the parameter's."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """`box` of `parameter`, not empty, lies in local `tensor` from `offset`, `strides[a]` apart along its axis a."""

    parameter: str
    box: Box
    tensor: str
    offset: int
    strides: tuple[int, ...]

    def part(self, box: Box) -> Piece:
        """The piece for a smaller box inside this one."""
        shifts = (new - old for new, old in zip(box.starts, self.box.starts, strict=True))
        offset = self.offset + sum(shift * stride for shift, stride in zip(shifts, self.strides, strict=True))
        return Piece(self.parameter, box, self.tensor, offset, self.strides)

    @property
    def view(self) -> View:
        """The elements of the local tensor, walked along the axes of the box."""
        return View(self.offset, self.box.sizes, self.strides)


@dataclass(frozen=True, slots=True, order=True)
class Pad:
    """Elements of a local tensor, in its own coordinates, that stand for no parameter and hold zero."""

    tensor: str
    box: Box


@dataclass(frozen=True, slots=True)
class Layout:
    """What `holder` ("trainer 3", "engine-0 tp 1") holds. `parameters` describes the whole model, held or not."""

    holder: str
    parameters: Mapping[str, Parameter]
    tensors: Mapping[str, LocalTensor]
    pieces: tuple[Piece, ...]
    pads: tuple[Pad, ...] = ()

    @property
    def elements(self) -> int:
        """Elements of the model held here, counted as often as they are held."""
        return sum(piece.box.elements for piece in self.pieces)

    def by_parameter(self) -> dict[str, list[Piece]]:
        """The pieces of each parameter that has any."""
        found: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault(piece.parameter, []).append(piece)
        return found


def check_destination(layout: Layout) -> None:
    """Whether a receiver can be made whole.

    Raises TransferError that names tensor and holder if an element is unwritten, written twice, or is padding.
    """
    check_written(layout, layout.pieces)


def check_written(layout: Layout, pieces: Iterable[Piece]) -> None:
    """`check_destination` for other pieces in the same local tensors: those of a plan, say."""
    written = _local_boxes(layout, pieces)
    pads = _pads(layout)
    for name, tensor in layout.tensors.items():
        boxes, padding = written.get(name, []), pads.get(name, [])
        if not padding and boxes == [Box.whole(tensor.shape)]:
            continue
        coverage = cover(tensor.shape, [*boxes, *padding])
        twice = coverage.first(coverage.counts > 1)
        if twice is not None:
            aliased = any(box.intersect(pad) for box in boxes for pad in padding if pad.intersect(twice))
            what = "is written although it is padding" if aliased else "is written more than once"
            raise TransferError(
                f"{layout.holder}: {name}{twice} {what}", expected="each element from exactly one piece"
            )
        unwritten = coverage.first(coverage.counts == 0)
        if unwritten is not None:
            raise TransferError(
                f"{layout.holder}: nothing is written to {name}{unwritten}",
                expected="every element of the tensor, or declared padding",
                to_do="find the parameter that belongs there in the checkpoint",
            )


def check_source(layout: Layout) -> None:
    """Raises TransferError that names tensor and holder if pieces lie outside or share elements."""
    held = _local_boxes(layout, layout.pieces)
    for name, boxes in held.items():
        if len(boxes) == 1:
            continue
        coverage = cover(layout.tensors[name].shape, boxes)
        twice = coverage.first(coverage.counts > 1)
        if twice is not None:
            raise TransferError(
                f"{layout.holder}: {name}{twice} stands for more than one element of the model",
                expected="one owner for each local element; publish tied tensors under one name",
            )


def _local_boxes(layout: Layout, pieces: Iterable[Piece]) -> dict[str, list[Box]]:
    """The boxes of each local tensor that pieces cover, in its own coordinates."""
    found: dict[str, list[Box]] = {}
    for piece in pieces:
        found.setdefault(piece.tensor, []).extend(_boxes_of(layout, piece))
    return found


def _boxes_of(layout: Layout, piece: Piece) -> list[Box]:
    parameter = layout.parameters.get(piece.parameter)
    tensor = layout.tensors.get(piece.tensor)
    if parameter is None or tensor is None:
        what = f"no such {'parameter' if parameter is None else 'tensor'}"
        raise TransferError(f"{_where(layout, piece)}: {what}")
    if not piece.box.within(parameter.shape) or piece.box.elements == 0:
        what = "lies outside" if piece.box.elements else "is empty"
        raise TransferError(f"{_where(layout, piece)} {what}", expected=f"elements of shape {parameter.shape}")
    try:
        return view_boxes(tensor.shape, piece.view)
    except TransferError as error:
        raise TransferError(f"{_where(layout, piece)}: {error.what}", expected=error.expected) from error


def _where(layout: Layout, piece: Piece) -> str:
    return f"{layout.holder}: {piece.parameter}{piece.box} in {piece.tensor}"


def _pads(layout: Layout) -> dict[str, list[Box]]:
    found: dict[str, list[Box]] = {}
    for pad in layout.pads:
        tensor = layout.tensors.get(pad.tensor)
        if tensor is None or not pad.box.within(tensor.shape):
            raise TransferError(f"{layout.holder}: padding {pad.tensor}{pad.box} lies outside its tensor")
        found.setdefault(pad.tensor, []).append(pad.box)
    return found
