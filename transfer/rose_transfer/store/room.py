"""Whether a version has room, told before anything is given up for it."""

from __future__ import annotations

from collections.abc import Mapping

from rose_transfer.store.files import Bytes, NoRoom
from rose_transfer.store.manifest import Manifest
from rose_transfer.store.objects import Objects, object_key


class NoRoomForVersion(NoRoom):
    """`objects` has the bytes of all that the version is made of, by key.

    `renew` says that the newest version has to be written whole first, lest the next one have no room.
    """

    objects: Mapping[str, int] = {}
    renew: bool = False


def no_room_for(version: int, needed: Mapping[str, int], objects: Objects, *, renew_bytes: int = 0) -> NoRoomForVersion:
    """The error that a version which is made of `needed` has no room in `objects`.

    Nor has the version before it, which is to be written whole before, where that takes `renew_bytes`.
    """
    missing_bytes = renew_bytes + sum(size for key, size in needed.items() if not objects.has(key))
    before = "; the version before it is to be written whole first" if renew_bytes else ""
    error = NoRoomForVersion(
        f"no room for version {version} in {objects.folder}: "
        f"{missing_bytes} bytes needed, {objects.free_bytes()} free{before}",
        expected="room for three times the model, and for versions that are pinned",
        to_do="unpin versions, free some of the disk, or open the folder with a larger limit, `bytes_max` or "
        "`--disk-gb` of `rose relay`, and try it again",
    )
    error.objects, error.renew = dict(needed), renew_bytes > 0
    return error


class NewObjects:
    """Puts those of one version into `objects`: while there is room, and then goes on counting what they take.

    Safe to use from several threads. `sizes` has the bytes of all of them by key, written or not.
    """

    def __init__(self, objects: Objects) -> None:
        self.sizes: dict[str, int] = {}
        self._objects = objects
        self._trouble: NoRoom | None = None

    def put(self, data: Bytes) -> str:
        """The key of an object, put if there was room for all before it. Raises TransferError if the disk fails."""
        if self._trouble is None:
            try:
                key = self._objects.put(data)
            except NoRoom as error:
                self._trouble = error
                key = object_key(data)
        else:
            key = object_key(data)
        self.sizes[key] = len(data)
        return key

    def check(self) -> None:
        """Raises NoRoom if one of them was only counted."""
        if self._trouble is not None:
            raise self._trouble


def sizes_of(made: Manifest, packing_bytes: int) -> dict[str, int]:
    """The bytes of all that a version is made of, by key: deltas, packing and manifest."""
    text = made.to_bytes()
    deltas = {entry.key: entry.encoded_bytes for entry in made.buckets}
    return deltas | {made.packing: packing_bytes, object_key(text): len(text)}
