"""One way to a version, brought to live weights: staged beside them, committed at once, taken back if that fails.

Invariants
- `stage` writes nothing. It reads and checks every object of the way, and compares the live weights, all of them, with
  the version that the way begins at: what can be wrong is found while the engine generates.
- `commit` leaves the new version, or the old one and RolledBack, or raises something else: then the weights are mixed
  and must not be used.
- Each run of tiles is journaled when it has been changed. To take an update back undoes the journal in reverse order,
  each tile against its check; a way that overwrites cannot be undone, and is taken back only before its first write.
  Neither can a run that was left half-written: it is known to have begun.

Memory: encoded deltas up to `DELTA_BYTES_MAX`, beyond that they are read again from disk at commit, one by one; and
the room for copies, at most one bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rose.errors import TransferError
from rose_transfer.codec import Delta, WrongBase
from rose_transfer.live.live_weights import LiveWeights
from rose_transfer.store.manifest import BucketEntry
from rose_transfer.store.reader import Step, delta_of

DELTA_BYTES_MAX = 64 * 2**20
ReadObject = Callable[[str], bytes]


class RolledBack(TransferError):
    """The update failed, and the weights are those of the old version again, every bit of them."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Step number `step` of the way, for the bucket at `place`."""

    step: int
    place: int
    first: int


class LiveUpdate:
    """The way `steps` to one version for `weights`; `read_object` gives the bytes of an object by its key.

    Used by one thread at a time: first `stage`, then `commit`, then perhaps `roll_back`.
    """

    def __init__(self, weights: LiveWeights, steps: Sequence[Step], read_object: ReadObject) -> None:
        self._weights = weights
        self._steps = tuple(steps)
        self._read_object = read_object
        self._deltas: dict[tuple[int, int], Delta] = {}
        self._journal: list[_Entry] = []
        self._begun: _Entry | None = None
        self._staged = False
        self.encoded_bytes = 0

    def stage(self, given_up: Callable[[], bool] = lambda: False) -> None:
        """See the invariants. Ends with TransferError soon after `given_up` says so.

        Raises WrongBase if the live weights are not those that the way begins at, LostObject or MalformedDelta if an
        object is not what its manifest says, TransferError if the steps do not follow each other.
        """
        held_bytes = 0
        for place in self._weights.places:
            if given_up():
                raise TransferError("the stage was given up for another one")
            current = self._weights.hash_of(place) if self._needs_base else None
            for number, step in enumerate(self._steps):
                entry = step.manifest.buckets[place]
                self._check_link(number, entry, current)
                delta = self._load(number, place)
                self.encoded_bytes += entry.encoded_bytes
                if held_bytes + entry.encoded_bytes <= DELTA_BYTES_MAX:
                    self._deltas[number, place] = delta
                    held_bytes += entry.encoded_bytes
                current = entry.before if step.backwards else entry.after
        self._staged = True

    def commit(self) -> None:
        """Change the weights. Raises RolledBack if they are the old ones again, or what made that impossible."""
        if not self._staged:
            raise TransferError("nothing is staged to commit")
        try:
            for number, step in enumerate(self._steps):
                for place in self._weights.places:
                    self._apply(number, place, backwards=step.backwards)
        except Exception as error:
            self.roll_back()
            raise RolledBack(f"the update failed and was taken back: {error}") from error

    def roll_back(self) -> None:
        """Undo what `commit` did, all of it or as far as it got. Raises TransferError if that cannot be undone."""
        if self._begun is not None:
            raise TransferError("weights were left half-written", to_do="start the engine from a whole version")
        while self._journal:
            entry = self._journal[-1]
            step = self._steps[entry.step]
            delta = self._delta(entry.step, entry.place)
            if delta.mode == "overwrite":
                raise TransferError(
                    "weights that were overwritten cannot be taken back", to_do="start the engine from a whole version"
                )
            self._weights.apply_run(entry.place, entry.first, delta, backwards=not step.backwards)
            self._journal.pop()

    def close(self) -> None:
        """Give back the memory that the update took. It can neither be committed nor taken back any more."""
        self._deltas.clear()
        self._journal.clear()
        self._begun = None
        self._staged = False
        self._weights.free_scratch()

    @property
    def _needs_base(self) -> bool:
        return bool(self._steps) and self._steps[0].manifest.base is not None

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

    def _apply(self, number: int, place: int, *, backwards: bool) -> None:
        delta = self._delta(number, place)
        for first in self._weights.runs(place):
            self._begun = _Entry(number, place, first)
            try:
                self._weights.apply_run(place, first, delta, backwards=backwards)
            except WrongBase:
                self._begun = None
                raise
            self._journal.append(self._begun)
            self._begun = None

    def _delta(self, number: int, place: int) -> Delta:
        kept = self._deltas.get((number, place))
        return self._load(number, place) if kept is None else kept

    def _load(self, number: int, place: int) -> Delta:
        manifest = self._steps[number].manifest
        entry = manifest.buckets[place]
        return delta_of(manifest, entry, self._read_object(entry.key))
