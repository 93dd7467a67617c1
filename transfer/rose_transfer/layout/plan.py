"""What must move from which source to where, so that one destination becomes whole.

Invariants
- Every element that the destination holds comes from exactly one source, and nothing else is written: a plan
  that does not pass `verify` is never returned.
- The same layouts give the same plan. Among replicas the one that was asked for least so far sends, but before all
  others the one that is `near`.
- A plan fits every destination with the same layout: make it once for each of those.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rose.errors import TransferError
from rose_transfer.layout.box import subtract_all
from rose_transfer.layout.layout import Layout, Piece, check_destination, check_written
from rose_transfer.layout.sources import Sources


@dataclass(frozen=True, slots=True)
class Segment:
    """One box of one parameter: where it lies at `holder`, and where it goes."""

    holder: str
    source: Piece
    destination: Piece


@dataclass(frozen=True, slots=True)
class Plan:
    """All segments that make the destination whole, in the order of its parameters."""

    destination: str
    segments: tuple[Segment, ...]


def plan(sources: Sources, destination: Layout, near: str | None = None) -> Plan:
    """Find a source for every element of `destination`; holder `near` sends whatever it holds.

    Raises TransferError that names the tensor and the holders if the destination is faulty, the two sides
    disagree about a parameter, or no source holds an element that the destination needs.
    """
    sources.check_agreement(destination)
    check_destination(destination)
    asked = [-1 if holder == near else 0 for holder in sources.holders]
    segments: list[Segment] = []
    for piece in sorted(destination.pieces):
        segments += _fill(sources, destination.holder, piece, asked)
    made = Plan(destination.holder, tuple(segments))
    verify(made, sources, destination)
    return made


def verify(made: Plan, sources: Sources, destination: Layout) -> None:
    """Prove a plan, wherever it came from, against the layouts on both sides.

    Raises TransferError if a segment is not part of what its holder holds, or if the destination would be
    left with an element unwritten, written twice, or with padding overwritten.
    """
    wanted = destination.by_parameter()
    places = {holder: place for place, holder in enumerate(sources.holders)}
    for segment in made.segments:
        source, goal = segment.source, segment.destination
        if source.box != goal.box or source.parameter != goal.parameter:
            raise TransferError(
                f"{destination.holder}: {source.parameter}{source.box} would become {goal.parameter}{goal.box}",
                expected="the same box on both sides",
            )
        touching = sources.touching(source.parameter, source.box)
        held = (piece for place, piece in touching if place == places.get(segment.holder))
        _check_part(source, held, segment.holder)
        _check_part(goal, wanted.get(goal.parameter, []), destination.holder)
    check_written(destination, (segment.destination for segment in made.segments))


def _fill(sources: Sources, destination: str, piece: Piece, asked: list[int]) -> list[Segment]:
    """Find sources for one piece; `asked` counts elements per source and goes up, but for one that is near (-1)."""
    segments: list[Segment] = []
    missing = [piece.box]
    candidates = sources.touching(piece.parameter, piece.box)
    for place, held in sorted(candidates, key=lambda candidate: (asked[candidate[0]], candidate)):
        found = [common for box in missing if (common := box.intersect(held.box)) is not None]
        if not found:
            continue
        segments += [Segment(sources.holders[place], held.part(box), piece.part(box)) for box in found]
        if asked[place] >= 0:
            asked[place] += sum(box.elements for box in found)
        missing = subtract_all(missing, [held.box])
        if not missing:
            return segments
    raise sources.nobody_holds(piece.parameter, missing[0], destination, piece.tensor)


def _check_part(part: Piece, held: Iterable[Piece], holder: str) -> None:
    for piece in held:
        if piece.box.intersect(part.box) == part.box and piece.part(part.box) == part:
            return
    raise TransferError(
        f"{part.parameter}{part.box} is not at offset {part.offset} of {part.tensor} at {holder}",
        expected="a plan made from these layouts",
        to_do="plan again",
    )
