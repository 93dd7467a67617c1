"""Whether boxes share an element, in time that follows how many they are.

Boxes are parted where no box of a group reaches over an edge, along one axis after the other: slices of slices, as
ranks and buckets cut an array, fall apart in a few passes. What does not is compared in pairs, along a sweep.

Any 20 boxes are told apart, and any number of slices of slices. What is refused interlocks in large numbers, which no
layout of a real model does.
"""

from __future__ import annotations

from collections.abc import Sequence

from rose.errors import TransferError
from rose_transfer.layout.box import Box

LOOKS_PER_BOX = 32
"""Ranks that share an array, and buckets that cut their shares, take a look or two for each axis."""
_LOOKS_AT_FEW = 2048


def are_disjoint(boxes: Sequence[Box]) -> bool:
    """Whether no element is held by two of `boxes`, which have the same axes.

    Raises TransferError if that takes more than `LOOKS_PER_BOX` looks for each of them.
    """
    held = [box for box in boxes if box.elements]
    axes = len(held[0].starts) if held else 0
    if axes == 0:
        return len(held) < 2
    looks = _Looks(len(held))
    # A group was not parted along the last `whole` axes; `axis` comes next.
    waiting = [(held, 0, 0)]
    while waiting:
        group, axis, whole = waiting.pop()
        if len(group) < 2:
            continue
        if whole == axes:
            if not _apart(group, looks):
                return False
            continue
        looks.take(len(group))
        parts = _parted(group, axis)
        whole = whole + 1 if len(parts) == 1 else 0
        waiting += ((part, (axis + 1) % axes, whole) for part in parts)
    return True


class _Looks:
    """What may still be looked at."""

    def __init__(self, boxes: int) -> None:
        self._boxes = boxes
        self._left = LOOKS_PER_BOX * boxes + _LOOKS_AT_FEW

    def take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise TransferError(
                f"{self._boxes} boxes interlock so that telling whether they overlap takes more than "
                f"{LOOKS_PER_BOX} looks for each",
                expected="slices of slices, as ranks and buckets cut an array",
            )


def _parted(group: list[Box], axis: int) -> list[list[Box]]:
    """The group where boxes can be told apart by an edge along one axis, in order."""
    parts: list[list[Box]] = []
    reach = -1
    for box in sorted(group, key=lambda box: box.starts[axis]):
        start = box.starts[axis]
        if start >= reach:
            parts.append([])
        parts[-1].append(box)
        reach = max(reach, start + box.sizes[axis])
    return parts


def _apart(group: list[Box], looks: _Looks) -> bool:
    """Whether each box shares nothing with those before it that reach as far along the first axis."""
    reaching: list[Box] = []
    for box in sorted(group):
        looks.take(len(reaching) + 1)
        reaching = [one for one in reaching if one.starts[0] + one.sizes[0] > box.starts[0]]
        for one in reaching:
            if one.meets(box):
                return False
        reaching.append(box)
    return True
