"""How a version that was fetched gets into the store of a relay, and how another lineage takes that store's place.

    folder/store       what is served
    folder/anew        another lineage, while it is taken in
    folder/dropped     what it took the place of, until that is removed

Invariants
- Another lineage is taken in beside what is there, which moves away once the other one is whole, proven, flushed and
  closed. Where a kill leaves no `store` and an `anew`, the move goes on when the folder is opened again; any other
  rest is removed then.
- Objects are linked from where they arrived, so that two lineages at once take no more disk than both arrived in.

All functions work on the disk: call them from a thread. `folder` is held by its relay.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from rose_transfer.distribution.receiver import Fetched
from rose_transfer.store import Manifest, NoRoom, NoRoomForVersion, Objects, Store, manifest
from rose_transfer.store.files import disk_trouble, flush_folder
from rose_transfer.store.room import no_room_for, sizes_of
from rose_transfer.store.way_out import How, whole_sizes_max

STORE, ANEW, DROPPED = "store", "anew", "dropped"


def settle(folder: Path) -> None:
    """End what a kill has left half-way. No store in `folder` may be open. Raises TransferError if the disk fails."""
    if (folder / ANEW).exists() and not (folder / STORE).exists():
        _move(folder, ANEW, STORE)
    for rest in (ANEW, DROPPED):
        _remove(folder / rest)


def continues(store: Store, fetched: Fetched) -> bool:
    """Whether what is fetched can stand beside what is here, where a damaged disk may have lost parts."""
    newest = store.newest
    if newest is not None and fetched.version < newest:
        return False
    here = {version: store.fingerprint(version) for version in store.versions()}
    for found in _manifests(fetched):
        for version, whole in ((found.version, found.fingerprint), (found.base, found.base_fingerprint)):
            if version is not None and here.get(version, whole) != whole:
                return False
    return True


def take_in(store: Store, fetched: Fetched) -> None:
    """Raises NoRoomForVersion, or TransferError if an object turns out damaged: at that step the store stays."""
    found = _manifests(fetched)
    try:
        for step in found:
            _check_way_out(store, step, fetched)
            with store.receive(step):
                for needed in step.object_keys():
                    store.objects.adopt(fetched.objects_folder / needed)
    except NoRoomForVersion:
        raise
    except NoRoom as error:
        keys = {key for step in found for key in (step.key, *step.object_keys())}
        arrived = Objects(fetched.objects_folder)
        sizes = {key: arrived.size_bytes(key) or 0 for key in keys}
        raise no_room_for(fetched.version, sizes, store.objects) from error


def _check_way_out(store: Store, step: Manifest, fetched: Fetched) -> None:
    """Raises NoRoomForVersion if the newest version here has to be written whole before that step is taken in."""
    packing_bytes = Objects(fetched.objects_folder).size_bytes(step.packing) or 0
    sizes = sizes_of(step, packing_bytes)
    if store.how_to_store(step, sizes) is How.RENEWED:
        raise no_room_for(step.version, sizes, store.objects, renew_bytes=sum(whole_sizes_max(step).values()))


def take_in_anew(folder: Path, fetched: Fetched, *, bytes_max: int | None) -> None:
    """Take in what begins from nothing, whole, beside the store that is there. Raises as `take_in`; it is left then."""
    _remove(folder / ANEW)
    try:
        with contextlib.closing(Store(folder / ANEW, compress=True, bytes_max=bytes_max)) as anew:
            take_in(anew, fetched)
    except BaseException:
        _remove(folder / ANEW)
        raise
    with disk_trouble(f"{folder} cannot be flushed"):
        flush_folder(folder / ANEW)
        flush_folder(folder)


def replace(folder: Path) -> None:
    """Have the store that was taken in anew take the place of the one that is there, which must be closed.

    Raises TransferError if the disk fails; `settle` goes on from there, and so does this once it is taken in again.
    """
    if (folder / STORE).exists():
        _remove(folder / DROPPED)
        _move(folder, STORE, DROPPED)
    _move(folder, ANEW, STORE)


def remove_dropped(folder: Path) -> None:
    """Remove what another lineage took the place of. Raises TransferError if the disk fails."""
    _remove(folder / DROPPED)


def _move(folder: Path, name: str, to: str) -> None:
    with disk_trouble(f"{folder / name} cannot be moved"):
        os.rename(folder / name, folder / to)
        flush_folder(folder)


def _remove(path: Path) -> None:
    with disk_trouble(f"{path} cannot be removed"), contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def _manifests(fetched: Fetched) -> list[Manifest]:
    arrived = Objects(fetched.objects_folder)
    return [manifest.from_bytes(arrived.read(key)) for key, _ in fetched.steps]
