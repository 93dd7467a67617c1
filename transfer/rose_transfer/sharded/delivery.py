"""From the owners to the store and, for owners that lack a base, back.

The rank with the store asks the owners for one object after the other and keeps none in memory. Whatever goes wrong at
its disk, it takes what the owners send to the end and tells them then. The memory that bytes are received in is made
before anybody sends: who has none says so while the others still listen.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from rose.logs import logger
from rose_transfer.sharded.making import Made, Team, Trouble
from rose_transfer.sharded.owned import OwnedBuckets
from rose_transfer.sharded.pieces import Bits
from rose_transfer.sharded.ranks import LostRank
from rose_transfer.store.manifest import BucketEntry, Manifest
from rose_transfer.store.room import no_room_for, sizes_of
from rose_transfer.store.store import Store
from rose_transfer.store.way_out import How

log = logger("sharded publisher")
WRITER = 0
"""The rank that has the store."""


def tell_entries(team: Team, made: Mapping[int, Made]) -> tuple[BucketEntry, ...]:
    """The entries of all buckets, from their owners. Raises TransferError if an owner is in trouble, LostRank."""
    words = [
        [index, one.entry.key, one.entry.level, one.entry.encoded_bytes, one.entry.before, one.entry.after]
        for index, one in made.items()
    ]
    told = [entry for data in team.ranks.tell(json.dumps(words).encode()) for entry in json.loads(data)]
    entries: list[BucketEntry] = []
    for index, key, level, encoded_bytes, before, after in sorted(told):
        bucket = team.packing.buckets[index]
        entries.append(BucketEntry(bucket.bucket_id, key, level, encoded_bytes, bucket.dense_bytes, before, after))
    return tuple(entries)


def deliver(team: Team, manifest: Manifest, made: Mapping[int, Made], store: Store | None) -> None:
    """Bring what the owners made to the rank that has a `store`, which then has the version of `manifest`.

    Raises TransferError on every rank if it has not, LostRank.
    """
    if store is not None:
        _write(team, manifest, made, store)
        return
    for index in json.loads(team.ranks.tell(b"")[WRITER]):
        if team.routes.owners[index] == team.ranks.rank:
            team.ranks.send(np.frombuffer(made[index].wire, dtype=np.uint8).copy(), WRITER)
    team.ranks.tell(b"")


def restore(team: Team, base: int, owned: OwnedBuckets, store: Store | None) -> bool:
    """Have every owner hold the bits that the store has of version `base`; False if they cannot be read or held.

    Raises TransferError if a rank has no memory for them, LostRank.
    """
    owned.forget()
    with team.ranks.telling_trouble():
        largest = max((bucket.dense_bytes for bucket in team.packing.buckets), default=0)
        nothing = np.zeros(0 if store is None else largest, dtype=np.uint8)
        rooms = {} if store is not None else _rooms(team)
    team.ranks.tell(b"")
    trouble = Trouble()
    for index, owner in enumerate(team.routes.owners):
        bucket = team.packing.buckets[index]
        if store is not None:
            sent = nothing[: bucket.dense_bytes]
            with trouble:
                if not trouble:
                    bits = store.read_bucket(base, index)
                    sent = bits.view(np.uint8)
                    if owner == WRITER:
                        owned.put(index, bits)
            if owner != WRITER:
                team.ranks.send(sent, owner)
        elif owner == team.ranks.rank:
            team.ranks.receive(rooms[index].view(np.uint8), WRITER)
            with trouble:
                owned.put(index, rooms[index])
    if trouble:
        log.warning("the base cannot be had, and the version is written whole", base=base, why=str(trouble))
    return not any(team.ranks.tell(b"lost" if trouble else b""))


def _rooms(team: Team) -> dict[int, Bits]:
    """Memory for the bits of the buckets that this rank owns."""
    buckets = enumerate(team.packing.buckets)
    mine = [(index, bucket) for index, bucket in buckets if team.routes.owners[index] == team.ranks.rank]
    return {index: np.empty(bucket.elements, dtype=f"<u{bucket.lane}") for index, bucket in mine}


def _write(team: Team, manifest: Manifest, made: Mapping[int, Made], store: Store) -> None:
    try:
        _have_room(team, manifest, store)
        with store.receive(manifest) as missing:
            wanted = _first_of_each(manifest, missing)
            room = np.empty(max((manifest.buckets[index].encoded_bytes for index in wanted), default=0), np.uint8)
            team.ranks.tell(json.dumps(wanted).encode())
            trouble = Trouble()
            if manifest.packing in missing:
                with trouble:
                    store.objects.put(team.packing.to_bytes())
            for index in wanted:
                wire = _wire(team, manifest, made, index, room)
                if not trouble:
                    with trouble:
                        store.objects.put(wire)
            trouble.raise_first()
    except LostRank:
        raise
    except Exception as error:
        team.ranks.tell_trouble(error)
        raise
    team.ranks.tell(b"")


def _have_room(team: Team, manifest: Manifest, store: Store) -> None:
    """Let old versions go if need be, as a WeightPublisher does. Raises NoRoomForVersion if that is of no use."""
    packing_bytes = store.objects.size_bytes(manifest.packing) or len(team.packing.to_bytes())
    needed = sizes_of(manifest, packing_bytes)
    renew = store.how_to_store(manifest, needed) is How.RENEWED
    fits = not renew and store.objects.would_fit(store.objects.known(), needed)
    if not fits and not store.make_room(needed, renew=renew):
        raise no_room_for(manifest.version, needed, store.objects)


def _first_of_each(manifest: Manifest, missing: Collection[str]) -> list[int]:
    """The buckets to ask for: one for each object, of which two may be the same."""
    first: dict[str, int] = {}
    for index, entry in enumerate(manifest.buckets):
        if entry.key in missing:
            first.setdefault(entry.key, index)
    return list(first.values())


def _wire(
    team: Team, manifest: Manifest, made: Mapping[int, Made], index: int, room: NDArray[np.uint8]
) -> bytes | memoryview:
    """The delta of a bucket, in `room` if another rank sends it."""
    owner = team.routes.owners[index]
    if owner == WRITER:
        return made[index].wire
    received = room[: manifest.buckets[index].encoded_bytes]
    team.ranks.receive(received, owner)
    return received.data
