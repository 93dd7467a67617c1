"""From the owners to the store and, for owners that lack a base, back.

The rank with the store asks the owners for one object after the other and keeps none in memory. Whatever goes wrong at
its disk, it takes what the owners send to the end and tells them then.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

import numpy as np

from rose.logs import logger
from rose_transfer.sharded.making import Made, Team, Trouble
from rose_transfer.sharded.owned import OwnedBuckets
from rose_transfer.sharded.pieces import Bits
from rose_transfer.sharded.ranks import LostRank
from rose_transfer.store.manifest import BucketEntry, Manifest
from rose_transfer.store.store import Store

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
    """Have every owner hold the bits that the store has of version `base`; False if they cannot be read there.

    Raises LostRank.
    """
    owned.forget()
    trouble = Trouble()
    for index, owner in enumerate(team.routes.owners):
        bucket = team.packing.buckets[index]
        if store is not None:
            bits: Bits = np.zeros(bucket.elements, dtype=f"<u{bucket.lane}")
            with trouble:
                bits = bits if trouble else store.read_bucket(base, index)
            if owner == WRITER:
                owned.put(index, bits)
            else:
                team.ranks.send(bits.view(np.uint8), owner)
        elif owner == team.ranks.rank:
            owned.put(index, team.ranks.receive(bucket.dense_bytes, WRITER).view(f"<u{bucket.lane}"))
    if trouble:
        log.warning("the base cannot be had, and the version is written whole", base=base, why=str(trouble))
    return not team.ranks.tell(b"lost" if trouble else b"")[WRITER]


def _write(team: Team, manifest: Manifest, made: Mapping[int, Made], store: Store) -> None:
    try:
        with store.receive(manifest) as missing:
            wanted = _first_of_each(manifest, missing)
            team.ranks.tell(json.dumps(wanted).encode())
            _take_in(team, manifest, wanted, made, store, with_packing=manifest.packing in missing)
    except LostRank:
        raise
    except Exception as error:
        team.ranks.tell_trouble(error)
        raise
    team.ranks.tell(b"")


def _first_of_each(manifest: Manifest, missing: Collection[str]) -> list[int]:
    """The buckets to ask for: one for each object, of which two may be the same."""
    first: dict[str, int] = {}
    for index, entry in enumerate(manifest.buckets):
        if entry.key in missing:
            first.setdefault(entry.key, index)
    return list(first.values())


def _take_in(
    team: Team, manifest: Manifest, wanted: list[int], made: Mapping[int, Made], store: Store, *, with_packing: bool
) -> None:
    trouble = Trouble()
    if with_packing:
        with trouble:
            store.objects.put(team.packing.to_bytes())
    for index in wanted:
        owner = team.routes.owners[index]
        if owner == WRITER:
            wire = made[index].wire
        else:
            wire = team.ranks.receive(manifest.buckets[index].encoded_bytes, owner).tobytes()
        if not trouble:
            with trouble:
                store.objects.put(wire)
    trouble.raise_first()
