"""The store of one who publishes versions, or passes them on: the only writer of its folder.

Invariants
- A version appears whole or not at all, and its bits never change. Death at any point leaves the versions before it
  and what nobody refers to, which is removed and counted when the store is opened again.
- A number is published once, and numbers only rise.
- Nothing that leads to a kept version is removed before what takes its place is on disk.
- One thread writes at a time; reading and `steps` wait for none.

Memory: the bits of the version published last stay, one model's size, to encode the next one against; and the few
buckets that are worked on at once (see `at_once`).
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rose.errors import TransferError
from rose_transfer.codec import Delta, MalformedDelta, bucket_hash, compose, overwrite
from rose_transfer.store import chain
from rose_transfer.store.at_once import at_once, bucket_threads
from rose_transfer.store.chain import Route
from rose_transfer.store.held import Held
from rose_transfer.store.manifest import RAW, ZSTD, BucketEntry, Manifest
from rose_transfer.store.objects import LostObject
from rose_transfer.store.packing import Bucket, Packing
from rose_transfer.store.reader import Bits, Step, log
from rose_transfer.store.writer import StoreWriter


class Store(StoreWriter):
    """Opens `folder` for writing; `compress` writes deltas in zstd, for slow links.

    Objects together take at most `bytes_max` bytes, None for as many as the disk has.

    Raises TransferError if another process writes there.
    """

    def __init__(self, folder: Path, *, compress: bool = False, bytes_max: int | None = None) -> None:
        self._level = ZSTD if compress else RAW
        self._held: Held | None = None
        self._writing = threading.Lock()
        self._threads = bucket_threads()
        super().__init__(folder, bytes_max)

    def publish(self, version: int, packing: Packing, buckets: Iterable[Bits], base: int | None = None) -> Manifest:
        """Store `buckets`, those of `packing` in its order, as `version`: in steps from `base` where that can be had.

        Without a base, or if that is not kept, is damaged or is packed in another way, everything is written.
        Buckets are taken one by one, a few ahead. Blocks for the whole write: call it from a thread.

        Raises TransferError if the number is not a new highest one below 2^63 or the packing holds nothing, NoRoom if
        disk or limit are too small, ValueError if the buckets are not those of the packing; nothing of the version is
        left then.
        """
        version = _number(version)
        check_weights(version, packing)
        with self._alone():
            if self.newest is not None and version <= self.newest:
                raise TransferError(f"version {version} comes after {self.newest}", expected="numbers that rise")
            held = self._take_held(base, packing)
            try:
                published = self._write_version(version, packing, buckets, held)
                self._write_mark(version, published.fingerprint)
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

    def collect(self, keep: int, pinned: Collection[int] = ()) -> tuple[int, ...]:
        """Retire all versions but the last `keep` and those pinned, and say which; then compact what is left."""
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1")
        versions = self.versions()
        kept = chain.kept_versions(versions, keep, pinned)
        leaving = tuple(version for version in versions if version not in kept)
        self.retire(*leaving)
        return leaving

    def retire(self, *versions: int) -> None:
        """Remove versions, then everything that no other one needs, having compacted the ways between these.

        Raises ValueError if the newest one is among them: its number must not be given out again.
        """
        if self.newest in versions:
            raise ValueError(f"version {self.newest} is the newest, and stays")
        with self._alone():
            self._remove_marks(*versions)
            self._remove_unneeded()
            newest = self.newest
            if newest is not None and chain.anchor_due(self.links(), newest):
                self._write_whole(newest)
            self._merge_all(chain.mergeable(self.links(), self.versions()))
            self._remove_unneeded()

    def close(self) -> None:
        """As in `StoreWriter`, once what is being written is."""
        with self._writing:
            super().close()
        self._threads.shutdown()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Write, alone. Raises TransferError if the store was closed: the folder may be another's by now."""
        with self._writing:
            if self.closed:
                raise TransferError(f"the store in {self.folder} was closed", to_do="open it again")
            yield

    def clear(self) -> None:
        """Remove every version: what comes next is of another lineage, whose numbers may be lower."""
        with self._alone():
            self._held = None
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

    def _write_version(self, version: int, packing: Packing, buckets: Iterable[Bits], held: Held) -> Manifest:
        """All of a version but its mark; `held` has its bits then."""
        base = held.version if held.buckets else None
        key = self.objects.put(packing.to_bytes())

        def write(place: int, given: Bits) -> BucketEntry:
            if place >= len(packing.buckets):
                raise ValueError(f"more buckets than the {len(packing.buckets)} of the packing")
            delta = held.advance(place, given)
            return self._store_delta(packing.buckets[place], delta, delta.before)

        entries = at_once(self._threads, write, buckets)
        if len(entries) < len(packing.buckets):
            raise ValueError(f"{len(entries)} buckets, not the {len(packing.buckets)} of the packing")
        made = Manifest(version, base, "overwrite" if base is None else "steps", key, tuple(entries))
        self._write_manifest(made)
        return made

    def _store_delta(self, bucket: Bucket, delta: Delta, before: int) -> BucketEntry:
        """`before` is the hash of what the delta leads from, also where it does not ask for that."""
        if (delta.elements, delta.lane) != (bucket.elements, bucket.lane):
            raise ValueError(
                f"bucket {bucket.bucket_id} has {delta.elements} elements of {delta.lane} bytes, "
                f"not {bucket.elements} of {bucket.lane}"
            )
        wire = delta.to_wire(compress=self._level == ZSTD)
        key = self.objects.put(wire)
        return BucketEntry(bucket.bucket_id, key, self._level, len(wire), bucket.dense_bytes, before, delta.after)

    def _write_whole(self, version: int) -> None:
        """Store a version without a base, where there is room."""
        try:
            # What is in memory is right, also where the disk has lost what led there.
            held = self._held if self._held is not None and self._held.version == version else None
            packing = self.packing(version) if held is None else held.packing
            buckets = self.read(version) if held is None else map(held.buckets.__getitem__, range(len(packing.buckets)))
            key = self.objects.put(packing.to_bytes())
            entries = tuple(
                self._store_delta(bucket, overwrite(bits, bucket_hash(bits)), 0)
                for bucket, bits in zip(packing.buckets, buckets, strict=True)
            )
            self._write_manifest(Manifest(version, None, "overwrite", key, entries))
        except TransferError as error:
            log.warning("a version is not written whole", version=version, why=str(error))
            self._remove_unreferenced()

    def _merge_all(self, routes: Iterable[Route]) -> None:
        """Make one link of each route, all of whose hops have one direction and one mode, where there is room."""
        for route in routes:
            first, last = (route[-1], route[0]) if route[0].backwards else (route[0], route[-1])
            if (last.link.version, first.link.base) not in self._manifests:
                try:
                    self._merge(route)
                except TransferError as error:
                    log.warning("deltas are not merged", links=len(route), why=str(error))
                    self._remove_unreferenced()

    def _merge(self, route: Route) -> None:
        """Store the deltas of a route as one. Where one is damaged, its way is left out and nothing is stored."""
        hops = reversed(route) if route[0].backwards else route
        made = [self._manifests[hop.link.version, hop.link.base] for hop in hops]
        entries: list[BucketEntry] = []
        for index, bucket in enumerate(self.read_packing(made[0].packing).buckets):
            merged: Delta | None = None
            for found in made:
                try:
                    delta = self.load(found, found.buckets[index])
                except (LostObject, MalformedDelta) as error:
                    self.leave_out(found, str(error))
                    self._remove_unreferenced()
                    return
                merged = delta if merged is None else compose(merged, delta)
            assert merged is not None
            entries.append(self._store_delta(bucket, merged, made[0].buckets[index].before))
        first, last = made[0], made[-1]
        self._write_manifest(Manifest(last.version, first.base, first.mode, first.packing, tuple(entries)))


def check_weights(version: int, packing: Packing) -> None:
    """Raises TransferError if there is nothing in `packing`: engines would take that for a model."""
    if not packing.buckets:
        raise TransferError(
            f"version {version} would hold no weights",
            expected="at least one element of a parameter",
            to_do="look at the state dict, and at what is to be published of it",
        )


def _number(version: int) -> int:
    """The number of a version, which trainers also count in integers of their libraries."""
    try:
        number = operator.index(version)
    except TypeError:
        number = -1
    if not 0 <= number < 2**63:
        raise TransferError(f"{version!r} is no number of a version", expected="an integer from 0 to below 2^63")
    return number


def _anew(steps: tuple[Step, ...]) -> bool:
    return bool(steps) and steps[0].manifest.base is None
