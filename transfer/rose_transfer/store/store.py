"""The store of one who publishes versions, or passes them on: the only writer of its folder.

Invariants
- A version appears whole or not at all, and its bits never change. Death at any point leaves the versions before it
  and what nobody refers to, which is removed and counted when the store is opened again.
- A number is published once, and numbers only rise.
- One thread writes at a time; reading and `steps` wait for none.

Memory: the bits of the version published last stay, one model's size, to encode the next one against; and the few
buckets that are worked on at once (see `at_once`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rose.errors import TransferError
from rose.version_number import version_number
from rose_transfer.codec import bucket_hash
from rose_transfer.store import chain
from rose_transfer.store.at_once import at_once, bucket_threads
from rose_transfer.store.files import NoRoom
from rose_transfer.store.held import Held
from rose_transfer.store.keeping import StoreKeeper
from rose_transfer.store.manifest import BucketEntry, Manifest
from rose_transfer.store.packing import Packing
from rose_transfer.store.reader import Bits, Step, log
from rose_transfer.store.room import NewObjects, no_room_for, sizes_of
from rose_transfer.store.way_out import How, whole_sizes_max


class Store(StoreKeeper):
    """Opens `folder` for writing; `compress` writes deltas in zstd, for slow links.

    Objects together take at most `bytes_max` bytes, None for as many as the disk has.

    Raises TransferError if another process writes there, or the folder is of another role (see `roles`).
    """

    def __init__(self, folder: Path, *, compress: bool = False, bytes_max: int | None = None) -> None:
        self._threads = bucket_threads()
        super().__init__(folder, compress=compress, bytes_max=bytes_max)

    def publish(self, version: int, packing: Packing, buckets: Iterable[Bits], base: int | None = None) -> Manifest:
        """Store `buckets`, those of `packing` in its order, as `version`: in steps from `base` where that can be had.

        Without a base, or if that is not kept, is damaged or is packed in another way, everything is written.
        Buckets are taken one by one, a few ahead. Blocks for the whole write: call it from a thread.

        Raises TransferError if the number is not a new highest one below 2^63 or the packing holds nothing,
        NoRoomForVersion if disk or limit are too small, ValueError if the buckets are not those of the packing; nothing
        of the version is left then.
        """
        version = version_number(version)
        check_weights(version, packing)
        with self._alone():
            if self.newest is not None and version <= self.newest:
                raise TransferError(f"version {version} comes after {self.newest}", expected="numbers that rise")
            held = self._take_held(base, packing)
            new = NewObjects(self.objects)
            try:
                steps = self._write_buckets(version, packing, buckets, held, new)
                published, new = self._with_way_out(steps, held, new)
                self._write_names(published, new)
            except BaseException:
                self._remove_unneeded()
                raise
            held.version = version
            self._held = held
            return published

    def delta(self, start: int | None, goal: int) -> tuple[Step, ...]:
        """As `steps`, but deltas in a row are merged first, and the merged ones kept for the next who asks."""
        steps = self.steps(start, goal)
        if len(steps) < 2 and (start is None or not _anew(steps)):
            return steps
        with self._alone():
            onwards = None if start is None else chain.find_route(self.links(), start, goal)
            self._merge_all(chain.runs(onwards or ()))
            if _anew(self.steps(start, goal)):
                self._merge_all(chain.runs(chain.find_route(self.links(), None, goal) or ()))
            return self.steps(start, goal)

    @contextmanager
    def receive(self, incoming: Manifest) -> Iterator[tuple[str, ...]]:
        """Take over a version, or one more way to it, from another store.

        Yields the keys of the objects that it names and that are missing here. Put them into `objects` within; when
        that ends without an error, all are checked and the version is there. Its bits are those of its fingerprint:
        whether that is the one that was published is for the caller to know.

        Raises TransferError if an object is missing or another one than the manifest says, if the base is not here, or
        if base or version are here with other bits; nothing of it is left then. What cannot be tidied away once the
        version is there is only logged.
        """
        with self._alone():
            self._incoming = (*self._incoming, incoming)
        try:
            yield tuple(sorted(key for key in incoming.object_keys() if not self.objects.has(key)))
            with self._alone():
                self._take_over(incoming)
        except BaseException:
            self._received(incoming)
            raise
        try:
            self._received(incoming)
        except TransferError as error:
            log.warning("what nobody needs stays until the next version", version=incoming.version, why=str(error))

    def close(self) -> None:
        """As in `StoreWriter`, once what is being written is."""
        with self._writing:
            super().close()
        self._threads.shutdown()

    def clear(self) -> None:
        """Remove every version: what comes next is of another lineage, whose numbers may be lower."""
        with self._alone():
            self._held = None
            self._pinned.clear()
            self._remove_marks(*self.versions())
            self._remove_unneeded()

    def _take_over(self, incoming: Manifest) -> None:
        ends = {incoming.version: incoming.fingerprint}
        if incoming.base is not None and incoming.base_fingerprint is not None:
            if incoming.base not in self._marks:
                raise TransferError(f"version {incoming.base} is not here to go on from", to_do="fetch it first")
            ends[incoming.base] = incoming.base_fingerprint
        for number, whole in ends.items():
            here = self._marks.get(number, whole)
            if here != whole:
                raise TransferError(f"version {number} is here with other bits", expected=f"fingerprint {here}")
        described = [(bucket.bucket_id, bucket.dense_bytes) for bucket in self.read_packing(incoming.packing).buckets]
        if described != [(entry.bucket_id, entry.dense_bytes) for entry in incoming.buckets]:
            raise TransferError(f"the manifest of version {incoming.version} names other buckets than its packing")
        for entry in incoming.buckets:
            self.load(incoming, entry)
        self._write_manifest(incoming)
        self._write_mark(incoming.version, incoming.fingerprint)

    def _received(self, incoming: Manifest) -> None:
        """Remove what no version needs, `incoming` being one or not."""
        with self._alone():
            waiting = list(self._incoming)
            waiting.remove(incoming)
            self._incoming = tuple(waiting)
            self._remove_unneeded()

    def _take_held(self, base: int | None, packing: Packing) -> Held:
        """The bits of `base`, which the caller then changes; without buckets if there are none to go on from."""
        held, self._held = self._held, None
        nothing = Held(-1, packing)
        if base is None:
            return nothing
        try:
            if self.packing(base) != packing:
                log.warning("the model is packed in another way than before, and written whole", base=base)
                return nothing
            if held is not None and held.version == base:
                return held
            # To hold two models at once may be more than there is memory for.
            held = None
            buckets = dict(enumerate(self.read(base)))
        except TransferError as error:
            log.warning("the base cannot be had, and the version is written whole", base=base, why=str(error))
            return nothing
        return Held(base, packing, buckets, {place: bucket_hash(bits) for place, bits in buckets.items()})

    def _write_buckets(
        self, version: int, packing: Packing, buckets: Iterable[Bits], held: Held, new: NewObjects
    ) -> Manifest:
        """Put all `new` objects of a version, or count them where there is no room; `held` has its bits then."""
        base = held.version if held.buckets else None
        key = new.put(packing.to_bytes())

        def write(place: int, given: Bits) -> BucketEntry:
            if place >= len(packing.buckets):
                raise ValueError(f"more buckets than the {len(packing.buckets)} of the packing")
            delta = held.advance(place, given)
            return self._store_delta(packing.buckets[place], delta, delta.before, new.put)

        entries = at_once(self._threads, write, buckets)
        if len(entries) < len(packing.buckets):
            raise ValueError(f"{len(entries)} buckets, not the {len(packing.buckets)} of the packing")
        return Manifest(version, base, "overwrite" if base is None else "steps", key, tuple(entries))

    def _with_way_out(self, made: Manifest, held: Held, new: NewObjects) -> tuple[Manifest, NewObjects]:
        """The version that `held` has, whose `new` objects were put, or the same one whole: see `way_out`.

        Raises NoRoomForVersion if the newest one has to be written whole first.
        """
        needed = sizes_of(made, new.sizes[made.packing])
        how = self.how_to_store(made, needed)
        if how is How.STEPS:
            return made, new
        self._remove_unneeded()
        if how is How.RENEWED:
            whole_bytes = sum(whole_sizes_max(made).values())
            raise no_room_for(made.version, needed, self.objects, renew_bytes=whole_bytes)
        log.warning("no room for more deltas: a version is written whole", version=made.version)
        new = NewObjects(self.objects)
        key = new.put(held.packing.to_bytes())
        buckets = map(held.buckets.__getitem__, range(len(held.packing.buckets)))
        return self._whole(made.version, held.packing, key, buckets, new.put), new

    def _write_names(self, made: Manifest, new: NewObjects) -> None:
        """Have the version there whose objects `new` has put. Raises NoRoomForVersion."""
        try:
            new.check()
            self._write_manifest(made)
            self._write_mark(made.version, made.fingerprint)
        except NoRoom as error:
            self._remove_unneeded()
            needed = sizes_of(made, new.sizes[made.packing])
            raise no_room_for(made.version, needed, self.objects) from error


def check_weights(version: int, packing: Packing) -> None:
    """Raises TransferError if there is nothing in `packing`: engines would take that for a model."""
    if not packing.buckets:
        raise TransferError(
            f"version {version} would hold no weights",
            expected="at least one element of a parameter",
            to_do="look at the state dict, and at what is to be published of it",
        )


def _anew(steps: tuple[Step, ...]) -> bool:
    return bool(steps) and steps[0].manifest.base is None
