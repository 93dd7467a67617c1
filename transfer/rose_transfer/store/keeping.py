"""The store of one who decides which versions stay, and how one gets from each of them to any other.

Invariants
- Nothing that leads to a kept version is removed before what takes its place is on disk.
- Versions go for a new one only where that makes room for it: as few of the oldest as that takes. Pinned ones and the
  newest one stay.
- Shorter ways are made where there is room, and are no reason for a version to go; but the newest one is written whole
  before the room for that is gone, see `way_out`.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rose.errors import TransferError
from rose_transfer.codec import Delta, MalformedDelta, bucket_hash, compose, overwrite
from rose_transfer.store import chain
from rose_transfer.store.chain import Route
from rose_transfer.store.files import Bytes
from rose_transfer.store.held import Held
from rose_transfer.store.manifest import RAW, ZSTD, BucketEntry, Manifest
from rose_transfer.store.objects import LostObject
from rose_transfer.store.packing import Bucket, Packing
from rose_transfer.store.reader import Bits, log
from rose_transfer.store.way_out import How, Rooms, how_to_store, whole_sizes_max
from rose_transfer.store.writer import StoreWriter


class StoreKeeper(StoreWriter):
    """Opens `folder` as `Store` does, which this is a part of."""

    def __init__(self, folder: Path, *, compress: bool, bytes_max: int | None) -> None:
        self._level = ZSTD if compress else RAW
        self._held: Held | None = None
        self._writing = threading.Lock()
        self._pinned: set[int] = set()
        super().__init__(folder, bytes_max)

    def pin(self, version: int) -> None:
        """Keep a version until `unpin`, or until the store is closed. Raises TransferError if it is not kept now."""
        with self._guard:
            self.fingerprint(version)
            self._pinned.add(version)

    def unpin(self, version: int) -> None:
        """Let a version go when its turn comes."""
        with self._guard:
            self._pinned.discard(version)

    def collect(self, keep: int) -> tuple[int, ...]:
        """Retire all versions but the last `keep` and those pinned, and say which; then compact what is left."""
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1")
        versions = self.versions()
        kept = chain.kept_versions(versions, keep, tuple(self._pinned))
        return self.retire(*(version for version in versions if version not in kept))

    def retire(self, *versions: int) -> tuple[int, ...]:
        """Remove versions but those that are pinned, then all that no other one needs, having compacted the ways.

        Returns those that went. Raises ValueError if the newest one is among them: its number must not be given out
        again.
        """
        if self.newest in versions:
            raise ValueError(f"version {self.newest} is the newest, and stays")
        with self._alone():
            gone = self._let_go(versions)
            self._remove_unneeded()
            self._compact(self.versions())
            self._remove_unneeded()
            return gone

    def make_room(self, needed: Mapping[str, int], *, renew: bool = False) -> bool:
        """Retire what it takes for a version to have room whose objects, by key, have these bytes.

        With `renew`, write the newest version whole before, and retire what that takes. Whether there is room now that
        was not there; nothing was given up if not.
        """
        with self._alone():
            if not self.objects.would_fit((), needed) or (renew and not self._renew(needed)):
                return False
            if renew and self.objects.would_fit(self.objects.known(), needed):
                return True
            before_bytes = self.objects.used_bytes
            leaving = self._leaving_for(needed, at_least=1)
            if leaving is None:
                # Shorter ways between the others may be all that was missing.
                may_go = self._may_go()
                self._compact([version for version in self.versions() if version not in may_go])
                leaving = self._leaving_for(needed, at_least=0)
            if leaving:
                log.warning("no room: the oldest versions go", versions=leaving, needed_bytes=sum(needed.values()))
            self._let_go(leaving or ())
            self._remove_unneeded()
            # Now, for the new version may take the room that merging takes. What is merged is kept if it is smaller.
            self._merge_all(chain.mergeable(self.links(), self.versions()))
            self._remove_unneeded()
            return leaving is not None and self.objects.used_bytes < before_bytes

    def make_disk_room(self, needed_bytes: int, *, by_quota: bool = False) -> bool:
        """Retire what it takes for the disk to have that much free, outside of the store too.

        With `by_quota`, what goes has to free all of it, for what the disk has free is not ours. Whether there is room
        now; nothing was given up if not.
        """
        with self._alone():
            free_bytes = 0 if by_quota else self.objects.disk_free_bytes()
            may_go, known = self._may_go(), set(self.objects.known())

            def fits(count: int) -> bool:
                staying = self._objects_of(self._needed(set(self.versions()) - set(may_go[:count])))
                return free_bytes + self.objects.freed_bytes(known - staying) >= needed_bytes

            count = bisect_left(range(len(may_go) + 1), True, key=fits)
            if count > len(may_go):
                return False
            if count:
                log.warning("the disk is full: the oldest versions go", versions=may_go[:count], bytes=needed_bytes)
            self._let_go(may_go[:count])
            self._remove_unneeded()
            return True

    def how_to_store(self, made: Manifest, sizes: Mapping[str, int]) -> How:
        """How the version of `made` is to be stored, whose objects have these sizes: see `way_out`."""
        newest = self.newest
        if made.base is None or newest is None:
            return How.STEPS
        room_bytes, block_bytes = self.objects.room_bytes()
        packing_bytes = sizes[made.packing]
        way = chain.find_route(self.links(), None, newest)

        def written(objects: Mapping[str, int]) -> int:
            # The mark and the file of the way are no objects, and take a block each.
            return sum(objects.values()) + (len(objects) + 2) * block_bytes

        rooms = Rooms(
            newest=self.objects.bytes_of(self._objects_of(self._needed({newest})) - {made.packing}),
            way=0 if way is None else chain.route_bytes(way),
            whole=written(whole_sizes_max(made)),
            room=room_bytes - packing_bytes,
        )
        return how_to_store(written(sizes) - packing_bytes, rooms)

    def _renew(self, needed: Mapping[str, int]) -> bool:
        """Write the newest version whole, if that makes room for `needed`, and retire what it takes. Whether it was."""
        newest = self.newest
        made = next((found for found in self._manifests.values() if found.version == newest), None)
        if newest is None or made is None or (newest, None) in self._manifests:
            return False
        whole, pinned = whole_sizes_max(made), self._pinned - {newest}
        # From what is pinned one goes on to the newest version by the way that there is.
        staying = self._objects_of(self._needed({newest, *pinned})) if pinned else set[str]()
        leaving = self._leaving_for(whole, at_least=0)
        if leaving is None or not self.objects.would_fit(staying, {**whole, **needed}):
            return False
        if leaving:
            log.warning("no room: the oldest versions go", versions=leaving, to_write_whole=newest)
        self._let_go(leaving)
        self._remove_unneeded()
        self._write_whole(newest)
        self._remove_unneeded()
        return (newest, None) in self._manifests

    def _may_go(self) -> tuple[int, ...]:
        """The versions that a new one may take the place of, oldest first."""
        return tuple(version for version in self.versions()[:-1] if version not in self._pinned)

    def _leaving_for(self, needed: Mapping[str, int], at_least: int) -> tuple[int, ...] | None:
        """The fewest that have to go for objects of these bytes to have room, None if that is never so."""
        may_go = self._may_go()

        def fits(count: int) -> bool:
            staying = set(self.versions()) - set(may_go[:count])
            return self.objects.would_fit(self._objects_of(self._needed(staying)), needed)

        counts = range(at_least, len(may_go) + 1)
        place = bisect_left(counts, True, key=fits)
        return may_go[: counts[place]] if place < len(counts) else None

    def _let_go(self, versions: Iterable[int]) -> tuple[int, ...]:
        """Remove the marks of those that nobody has pinned by now, and say which they were."""
        with self._guard:
            going = {version: whole for version, whole in self._marks.items() if version in set(versions)}
            going = {version: whole for version, whole in going.items() if version not in self._pinned}
            self._marks = {version: whole for version, whole in self._marks.items() if version not in going}
        try:
            self._remove_marks(*going)
        except BaseException:
            with self._guard:
                self._marks = {**self._marks, **going}
            raise
        return tuple(sorted(going))

    def _compact(self, kept: Collection[int]) -> None:
        """Make the ways to and between `kept` versions shorter, where there is room."""
        newest = self.newest
        if newest is not None and chain.anchor_due(self.links(), newest):
            self._write_whole(newest)
        self._merge_all(chain.mergeable(self.links(), kept))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Write, alone. Raises TransferError if the store was closed: the folder may be another's by now."""
        with self._writing:
            if self.closed:
                raise TransferError(f"the store in {self.folder} was closed", to_do="open it again")
            yield

    def _store_delta(self, bucket: Bucket, delta: Delta, before: int, put: Callable[[Bytes], str]) -> BucketEntry:
        """`before` is the hash of what the delta leads from, also where it does not ask for that."""
        if (delta.elements, delta.lane) != (bucket.elements, bucket.lane):
            raise ValueError(
                f"bucket {bucket.bucket_id} has {delta.elements} elements of {delta.lane} bytes, "
                f"not {bucket.elements} of {bucket.lane}"
            )
        wire = delta.to_wire(compress=self._level == ZSTD)
        key = put(wire)
        return BucketEntry(bucket.bucket_id, key, self._level, len(wire), bucket.dense_bytes, before, delta.after)

    def _write_whole(self, version: int) -> None:
        """Store a version without a base, where there is room."""
        try:
            # What is in memory is right, also where the disk has lost what led there.
            held = self._held if self._held is not None and self._held.version == version else None
            packing = self.packing(version) if held is None else held.packing
            buckets = self.read(version) if held is None else map(held.buckets.__getitem__, range(len(packing.buckets)))
            key = self.objects.put(packing.to_bytes())
            self._write_manifest(self._whole(version, packing, key, buckets, self.objects.put))
        except TransferError as error:
            log.warning("a version is not written whole", version=version, why=str(error))
            self._remove_unreferenced()

    def _whole(
        self, version: int, packing: Packing, key: str, buckets: Iterable[Bits], put: Callable[[Bytes], str]
    ) -> Manifest:
        """That of a version without a base, all of whose deltas are `put`; its packing has that key."""
        entries = tuple(
            self._store_delta(bucket, overwrite(bits, bucket_hash(bits)), 0, put)
            for bucket, bits in zip(packing.buckets, buckets, strict=True)
        )
        return Manifest(version, None, "overwrite", key, entries)

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
            entries.append(self._store_delta(bucket, merged, made[0].buckets[index].before, self.objects.put))
        first, last = made[0], made[-1]
        self._write_manifest(Manifest(last.version, first.base, first.mode, first.packing, tuple(entries)))
