"""Versions of a model on disk: shared between them bucket by bucket, and reached from one another by deltas.

Follow a version: `buckets` packs tensors into flat buckets as `packing` says, `Store.publish` encodes them against the
version before and writes `objects`, then a `manifest` that names them, then a mark that the version is there. Whoever
holds another version, or none, asks `Store.delta` which objects lead to it; `chain` is what decides that,
`keeping` which versions stay.
"""

from rose_transfer.store.chain import Hop, Link
from rose_transfer.store.files import NoRoom
from rose_transfer.store.manifest import BucketEntry, Manifest
from rose_transfer.store.objects import LostObject, Objects, OpenObject, object_key
from rose_transfer.store.packing import Bucket, BucketId, Packing
from rose_transfer.store.reader import Step, StoreReader
from rose_transfer.store.room import NoRoomForVersion
from rose_transfer.store.store import Store

__all__ = [
    "Bucket",
    "BucketEntry",
    "BucketId",
    "Hop",
    "Link",
    "LostObject",
    "Manifest",
    "NoRoom",
    "NoRoomForVersion",
    "Objects",
    "OpenObject",
    "Packing",
    "Step",
    "Store",
    "StoreReader",
    "object_key",
]
