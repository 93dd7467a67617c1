"""What several ranks hold together: replicas, gaps, and the shard classes that cross a slow link once.

A region is a box of a parameter that the same ranks hold as a whole. Ranks that hold the same regions share
one stream, so the bytes sent do not grow with replicas: a column shard is one class of all replicas of its
rank, a norm or a router one class of all ranks, a key-value head that two ranks keep a class of those two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rose.errors import TransferError
from rose_transfer.layout.box import Box
from rose_transfer.layout.coverage import cover
from rose_transfer.layout.layout import Layout
from rose_transfer.layout.layout_json import fingerprint


@dataclass(frozen=True, slots=True, order=True)
class Region:
    parameter: str
    box: Box


@dataclass(frozen=True, slots=True)
class ShardClass:
    """`regions` are held by exactly these `holders`, and by each of them."""

    holders: tuple[str, ...]
    regions: tuple[Region, ...]

    @property
    def elements(self) -> int:
        """What one crossing of the link carries, however many holders there are."""
        return sum(region.box.elements for region in self.regions)


@dataclass(frozen=True, slots=True)
class Replication:
    """How often the least and the most replicated element of a parameter is held; (0, 0) if nothing is."""

    fewest: int
    most: int


def replication(layouts: Sequence[Layout]) -> dict[str, Replication]:
    """Replicas of each parameter that any of the layouts describes."""
    shapes = {name: value.shape for layout in layouts for name, value in layout.parameters.items()}
    boxes: dict[str, list[Box]] = {name: [] for name in shapes}
    for layout in layouts:
        for piece in layout.pieces:
            boxes[piece.parameter].append(piece.box)
    copies: dict[str, Replication] = {}
    for name, held in boxes.items():
        if all(box.sizes == shapes[name] for box in held):
            copies[name] = Replication(len(held), len(held))
        else:
            coverage = cover(shapes[name], held)
            copies[name] = Replication(coverage.fewest, coverage.most)
    return copies


def check_engine(layouts: Sequence[Layout]) -> tuple[str, ...]:
    """Whether the ranks of one engine hold every parameter whole, or not at all.

    Returns the parameters of which nothing is held, such as a head that is stored although it is tied.
    Raises TransferError that names a parameter of which only a part is held.
    """
    copies = replication(layouts)
    for name, found in copies.items():
        if found.fewest == 0 and found.most > 0:
            raise TransferError(
                f"{', '.join(layout.holder for layout in layouts)}: only a part of {name} is held",
                expected="every element of a parameter that the engine uses",
                to_do="look whether the layout of a rank is missing",
            )
    return tuple(name for name, found in copies.items() if found.most == 0)


def shard_classes(layouts: Sequence[Layout]) -> tuple[ShardClass, ...]:
    """Cut everything that any layout holds into classes; each element is in exactly one.

    Classes and regions come in a fixed order. A holder that keeps an element twice counts once; where several of one
    name hold different things, as ranks of different engines may, their fingerprints are part of their names.
    """
    held: dict[str, dict[Box, set[str]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for holder, layout in zip(_names(layouts), layouts, strict=True):
        for piece in layout.pieces:
            held.setdefault(piece.parameter, {}).setdefault(piece.box, set()).add(holder)
            shapes[piece.parameter] = layout.parameters[piece.parameter].shape
    regions: dict[tuple[str, ...], list[Region]] = {}
    for name, boxes in sorted(held.items()):
        for box, holders in sorted(_cut(shapes[name], boxes)):
            regions.setdefault(holders, []).append(Region(name, box))
    return tuple(ShardClass(holders, tuple(found)) for holders, found in sorted(regions.items()))


def _names(layouts: Sequence[Layout]) -> list[str]:
    """A name for each, the same one only for layouts that are equal."""
    of_name: dict[str, list[Layout]] = {}
    for layout in layouts:
        of_name.setdefault(layout.holder, []).append(layout)
    ambiguous = {name for name, of_one in of_name.items() if any(other != of_one[0] for other in of_one)}
    return [
        f"{layout.holder} {fingerprint(layout)}" if layout.holder in ambiguous else layout.holder for layout in layouts
    ]


def _cut(shape: tuple[int, ...], boxes: dict[Box, set[str]]) -> list[tuple[Box, tuple[str, ...]]]:
    """Disjoint boxes with their holders; cut only where boxes overlap without being equal."""
    if len(boxes) > 1:
        coverage = cover(shape, list(boxes))
        if coverage.most > 1:
            return [(cell, _holders_of(cell, boxes)) for cell in coverage.cells(coverage.counts > 0)]
    return [(box, tuple(sorted(holders))) for box, holders in boxes.items()]


def _holders_of(cell: Box, boxes: dict[Box, set[str]]) -> tuple[str, ...]:
    return tuple(sorted({holder for box, holders in boxes.items() if box.intersect(cell) for holder in holders}))
