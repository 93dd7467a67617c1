"""Everything that can send, checked and indexed once for any number of plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rose.errors import TransferError
from rose_transfer.layout.box import Box
from rose_transfer.layout.layout import Layout, Piece, check_source


@dataclass(frozen=True, slots=True)
class _Held:
    """All pieces of one parameter, each with its holder's place in the list of sources."""

    pieces: list[tuple[int, Piece]]
    places: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


class NotHeld(TransferError):
    """No sender holds `box` of `parameter`."""

    parameter: str
    box: Box


class Sources:
    """The layouts of all senders. Their pieces may overlap between senders: those are replicas.

    `checked` says that each of them passed `check_source` where it comes from, and spares to check it again.

    Raises TransferError that names the holder and the tensor if two senders have one name or one is faulty.
    """

    def __init__(self, layouts: Sequence[Layout], *, checked: bool = False) -> None:
        self.layouts = tuple(layouts)
        self.holders = tuple(layout.holder for layout in layouts)
        if len(set(self.holders)) != len(self.holders):
            raise TransferError(f"two senders have one name, among {self._names()}", expected="a name for each")
        pieces: dict[str, list[tuple[int, Piece]]] = {}
        for place, layout in enumerate(self.layouts):
            if not checked:
                check_source(layout)
            for piece in layout.pieces:
                pieces.setdefault(piece.parameter, []).append((place, piece))
        self._held = {name: _held(found) for name, found in pieces.items()}

    def touching(self, parameter: str, box: Box) -> list[tuple[int, Piece]]:
        """The pieces that hold some of `box`, with the places of their holders."""
        held = self._held.get(parameter)
        if held is None:
            return []
        begin = np.maximum(held.starts, np.array(box.starts, dtype=np.int64))
        end = np.minimum(held.ends, np.array(box.ends, dtype=np.int64))
        return [held.pieces[i] for i in np.flatnonzero((begin < end).all(axis=1))]

    def held_elements(self, parameter: str, box: Box) -> NDArray[np.int64]:
        """How many elements of `box` each sender holds, by place."""
        found = np.zeros(len(self.holders), dtype=np.int64)
        held = self._held.get(parameter)
        if held is not None:
            begin = np.maximum(held.starts, np.array(box.starts, dtype=np.int64))
            end = np.minimum(held.ends, np.array(box.ends, dtype=np.int64))
            np.add.at(found, held.places, np.maximum(end - begin, 0).prod(axis=1))
        return found

    def check_agreement(self, destination: Layout) -> None:
        """Raises TransferError if a sender describes a parameter that the destination needs in another way."""
        needed = {piece.parameter for piece in destination.pieces}
        for layout in self.layouts:
            for name in sorted(needed & layout.parameters.keys()):
                ours, theirs = destination.parameters.get(name), layout.parameters[name]
                if ours != theirs:
                    raise TransferError(
                        f"{name} is {theirs} at {layout.holder} and {ours} at {destination.holder}",
                        expected="one shape and dtype for a published parameter",
                    )

    def nobody_holds(self, parameter: str, box: Box, destination: str, tensor: str) -> NotHeld:
        error = NotHeld(
            f"no source holds {parameter}{box}, which {destination} needs for {tensor}",
            expected=f"it at one of {self._names()}",
        )
        error.parameter, error.box = parameter, box
        return error

    def who_holds(self, parameter: str) -> str:
        """In words, who holds some of a parameter and who nothing."""
        places = set() if parameter not in self._held else set(self._held[parameter].places.tolist())
        some = [holder for place, holder in enumerate(self.holders) if place in places]
        nothing = [holder for place, holder in enumerate(self.holders) if place not in places]
        words = [f"{_cut(some)} holds some of it" if some else "", f"{_cut(nothing)} nothing" if nothing else ""]
        return ", ".join(filter(None, words))

    def _names(self) -> str:
        return _cut(self.holders)


def _cut(names: Sequence[str]) -> str:
    """Names, cut short: there may be thousands."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _held(pieces: list[tuple[int, Piece]]) -> _Held:
    places = np.array([place for place, _ in pieces], dtype=np.int64)
    starts = np.array([piece.box.starts for _, piece in pieces], dtype=np.int64)
    sizes = np.array([piece.box.sizes for _, piece in pieces], dtype=np.int64)
    return _Held(pieces, places, starts, starts + sizes)
