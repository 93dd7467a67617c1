"""One way to a version, brought to live weights: staged beside them, committed at once, taken back if that fails.

Invariants
- `stage` writes nothing. It reads and checks every object of the way, and compares the live weights, all of them, with
  the version that the way begins at: what can be wrong is found while the engine generates.
- `commit` needs no object any more, nor memory that the stage has not had: what it applies is staged (see `staged`).
- `commit` leaves the new version, or the old one and RolledBack, or Mixed weights that must not be used. These are had
  where a disk dies for good in the middle of a commit that was too long for memory, where memory itself fails, and
  where what cannot be had again was overwritten. Another update that begins anew brings them to a version.
- Each run of tiles is journaled when it has been changed. To take an update back undoes the journal in reverse order,
  each tile against its check. A run that was left half-written cannot be undone: it is known to have begun.
- The journal is always the first part of the way, so a second `commit` goes on behind it. What that finds done it does
  not check tile by tile, so it compares the whole version in the end.
- A way that begins anew is staged in steps from the weights that are there, so it can be taken back like any other;
  but where these are no weights of the published form, they are overwritten, and cannot be had again.

Memory: deltas of up to 64 MiB, or, where there are more, one of them at a time; and the room for copies, at most one
bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path

from rose.errors import TransferError
from rose_transfer.codec import Delta, WrongBase, bucket_hash
from rose_transfer.live.live_weights import Bits, LiveWeights, OtherForm
from rose_transfer.live.rebased import rebased
from rose_transfer.live.staged import StagedDeltas
from rose_transfer.store.manifest import BucketEntry
from rose_transfer.store.reader import Step, delta_of

ReadObject = Callable[[str], bytes]


_ANEW = "compute nothing with them; bring a whole version, by a way from nothing, or start the engine anew"
_HALF_WRITTEN = "weights were left half-written"


class RolledBack(TransferError):
    """The update failed, and the weights are those of the old version again, every bit of them."""


class Mixed(TransferError):
    """The update failed half-way and cannot be taken back: the weights are those of no version."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A run, by its first tile, of the bucket at `place`, changed by step number `step` of the way."""

    step: int
    place: int
    first: int


class LiveUpdate:
    """The way `steps` to one version for `weights`; `read_object` gives the bytes of an object by its key.

    What is too long for memory is staged on the disk of `folder`. Used by one thread at a time: first `stage`, then
    `commit`, then perhaps `roll_back`.
    """

    def __init__(self, weights: LiveWeights, steps: Sequence[Step], read_object: ReadObject, folder: Path) -> None:
        self._weights = weights
        self._steps = tuple(steps)
        self._read_object = read_object
        self._folder = folder
        self._deltas: StagedDeltas | None = None
        self._journal: list[_Entry] = []
        self._begun: _Entry | None = None
        self._is_staged = False
        self.encoded_bytes = 0

    @property
    def begins_anew(self) -> bool:
        """Whether it does not matter what the weights are now."""
        return bool(self._steps) and self._steps[0].manifest.base is None

    def stage(self, given_up: Callable[[], bool] = lambda: False) -> None:
        """See the invariants. Ends with TransferError soon after `given_up` says so.

        Raises WrongBase if the live weights are not those that the way begins at, LostObject or MalformedDelta if an
        object is not what its manifest says, NoRoom, TransferError if the steps do not follow each other or the disk
        fails.
        """
        self._deltas = StagedDeltas(self._folder)
        for place in self._weights.places:
            if given_up():
                raise TransferError("the stage was given up for another one")
            held = self._held(place)
            current = None if self.begins_anew or held is None else bucket_hash(held)
            for number, step in enumerate(self._steps):
                entry = step.manifest.buckets[place]
                self._check_link(number, entry, current)
                self._stage_step(number, place, held)
                current = entry.before if step.backwards else entry.after
        self._deltas.seal()
        self._is_staged = True

    def commit(self) -> None:
        """Change the weights, or as much of them as an earlier attempt that could not be taken back has left.

        Raises RolledBack if they are the old ones again, or Mixed; Moved, before anything is written, if they lie
        elsewhere than where they were staged for.
        """
        if not self._is_staged:
            raise TransferError("nothing is staged to commit")
        self._weights.check_place()
        if self._begun is not None:
            raise Mixed(f"the update cannot go on: {_HALF_WRITTEN}", to_do=_ANEW)
        done = frozenset(self._journal)
        try:
            for number, step in enumerate(self._steps):
                for place in self._weights.places:
                    self._apply(number, place, done, backwards=step.backwards)
            self._weights.check_place()
        except Exception as error:
            try:
                self.roll_back()
            except Mixed as mixed:
                raise Mixed(f"the update failed: {error}; {mixed.what}", to_do=mixed.to_do) from error
            raise RolledBack(f"the update failed and was taken back: {error}") from error
        if done:
            self._check_goal()

    def roll_back(self) -> None:
        """Undo what `commit` did, all of it or as far as it got. Raises Mixed; another attempt goes on from there."""
        try:
            self._undo()
        except Exception as error:
            what = error.what if isinstance(error, TransferError) else repr(error)
            raise Mixed(f"the weights are mixed, for the update cannot be taken back: {what}", to_do=_ANEW) from error

    def _undo(self) -> None:
        self._weights.check_place()
        if self._begun is not None:
            raise TransferError(_HALF_WRITTEN)
        delta, read = None, None
        while self._journal:
            entry = self._journal[-1]
            if delta is None or read != (entry.step, entry.place):
                delta = None  # one at a time in memory
                delta, read = self._delta(entry.step, entry.place), (entry.step, entry.place)
            if delta.mode == "overwrite":
                raise TransferError("weights that were none of the published form were overwritten")
            self._change(entry, delta, backwards=not self._steps[entry.step].backwards)
            self._journal.pop()

    def close(self) -> None:
        """Give back the memory that the update took. It can neither be committed nor taken back any more."""
        if self._deltas is not None:
            self._deltas.close()
            self._deltas = None
        self._journal.clear()
        self._begun = None
        self._is_staged = False
        self._weights.free_scratch()

    def _held(self, place: int) -> Bits | None:
        """A bucket as it is in memory, until the next call; None where it may be anything, and is."""
        try:
            return self._weights.bits_of(place)
        except OtherForm:
            if self.begins_anew:
                return None
            raise

    def _check_link(self, number: int, entry: BucketEntry, current: int | None) -> None:
        step = self._steps[number]
        wanted = entry.after if step.backwards else entry.before
        if step.manifest.base is None:
            if number or step.backwards:
                raise TransferError("a way begins anew in its middle", expected="a version from nothing first")
            return
        if current != wanted:
            where = "in memory" if number == 0 else "after the step before"
            raise WrongBase(
                f"bucket {entry.bucket_id} {where} has hash {current or 0:016x}",
                expected=f"{wanted:016x}, where the way begins",
                to_do="go by a way from nothing",
            )

    def _stage_step(self, number: int, place: int, held: Bits | None) -> None:
        manifest = self._steps[number].manifest
        entry = manifest.buckets[place]
        assert self._deltas is not None
        self._deltas.make_room(entry.encoded_bytes)
        delta = delta_of(manifest, entry, self._read_object(entry.key))
        if manifest.base is None and held is not None:
            self._deltas.put((number, place), *rebased(delta, held))
        else:
            self._deltas.put((number, place), delta, [delta.streams])
        self.encoded_bytes += entry.encoded_bytes

    def _apply(self, number: int, place: int, done: Container[_Entry], *, backwards: bool) -> None:
        entries = [_Entry(number, place, first) for first in self._weights.runs(place)]
        left = [entry for entry in entries if entry not in done]
        if not left:
            return
        delta = self._delta(number, place)
        for entry in left:
            self._change(entry, delta, backwards=backwards)
            self._journal.append(entry)

    def _check_goal(self) -> None:
        """Raises Mixed where something else than this update has changed the weights between its attempts."""
        last = self._steps[-1]
        for place in self._weights.places:
            entry = last.manifest.buckets[place]
            try:
                is_goal = bucket_hash(self._weights.bits_of(place)) == (entry.before if last.backwards else entry.after)
            except OtherForm:
                is_goal = False
            if not is_goal:
                raise Mixed(f"bucket {entry.bucket_id} was changed by others while weights were mixed", to_do=_ANEW)

    def _change(self, entry: _Entry, delta: Delta, *, backwards: bool) -> None:
        def writing() -> None:
            self._begun = entry

        try:
            self._weights.apply_run(entry.place, entry.first, delta, backwards=backwards, writing=writing)
        except WrongBase:
            self._begun = None
            raise
        self._begun = None

    def _delta(self, number: int, place: int) -> Delta:
        assert self._deltas is not None
        return self._deltas.get((number, place))
