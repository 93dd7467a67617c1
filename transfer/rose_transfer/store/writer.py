"""What changes a store's folder: written in an order that survives death at any point, removed in the reverse one.

Invariants
- Objects, then the manifest that names them, then the mark of the version, each flushed before the next is written.
- A mark goes before the manifests that lead to its version, those before their objects.
- One process at a time writes, held by a lock that ends with it. In one that it forked the store is closed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from rose_transfer.store import chain, manifest
from rose_transfer.store.files import disk_trouble, files_in, flush_folder, remove_drafts, write_whole
from rose_transfer.store.manifest import Manifest
from rose_transfer.store.objects import Objects
from rose_transfer.store.reader import Ends, StoreReader, link_name, log, mark_name
from rose_transfer.store.roles import Role, hold_alone, is_held


@dataclass(frozen=True, slots=True)
class Recovered:
    """What was removed when a store was opened: the rests of a writer that died, and what the disk has lost."""

    drafts: int = 0
    manifests: int = 0
    versions: int = 0
    objects: int = 0


class StoreWriter(StoreReader):
    """The store in `folder`, which is made if need be; `recovered` says what had to be removed.

    Raises TransferError if another process writes there, or the folder is of another role (see `roles`).
    """

    def __init__(self, folder: Path, bytes_max: int | None) -> None:
        self._lock = hold_alone(folder, Role.STORE)
        # Held while the file of a way and what is known of it change together: readers leave ways out meanwhile.
        self._linking = threading.Lock()
        self._incoming: tuple[Manifest, ...] = ()
        try:
            with disk_trouble(f"{folder} cannot be made a weight store"):
                for name in ("objects", "links", "versions"):
                    (folder / name).mkdir(exist_ok=True)
            super().__init__(folder)
            self.objects = Objects(folder / "objects", bytes_max)
            self.recovered = self._recover()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another process write. What is stored stays."""
        with self._linking:
            if not self.closed:
                os.close(self._lock)
                self._lock = -1

    @property
    def closed(self) -> bool:
        return not is_held(self._lock)

    def leave_out(self, damaged: Manifest, why: str) -> None:
        with self._linking:
            if self.has_way(damaged):
                super().leave_out(damaged, why)
                # Once this store is closed the folder may be another's.
                if not self.closed:
                    self._unlink_manifest(damaged.version, damaged.base)

    def _write_manifest(self, made: Manifest) -> None:
        """The objects that it names are there already, and are flushed first."""
        key = self.objects.put(made.to_bytes())
        self.objects.flush()
        with self._linking:
            _write(self._links_folder, link_name(made.version, made.base), key.encode())
            self._change_manifests(made)

    def _write_mark(self, version: int, fingerprint: str) -> None:
        _write(self._versions_folder, mark_name(version), manifest.mark_bytes(version, fingerprint))
        with self._guard:
            self._marks = {**self._marks, version: fingerprint}

    def _remove_marks(self, *versions: int) -> None:
        with disk_trouble(f"versions cannot be removed from {self.folder}"):
            for version in versions:
                (self._versions_folder / mark_name(version)).unlink(missing_ok=True)
            flush_folder(self._versions_folder)
        with self._guard:
            self._marks = {version: whole for version, whole in self._marks.items() if version not in versions}

    def _remove_unneeded(self) -> tuple[int, int]:
        """Remove the ways that no kept version needs, then the objects of none; how many of each there were."""
        needed = self._needed(self.versions())
        unneeded = [ends for ends in self._manifests if ends not in needed]
        self._change_manifests(without=unneeded)
        for version, base in unneeded:
            self._unlink_manifest(version, base)
        with disk_trouble(f"manifests cannot be removed from {self.folder}"):
            flush_folder(self._links_folder)
        return len(unneeded), self._remove_unreferenced()

    def _remove_unreferenced(self) -> int:
        used = self._objects_of(self._manifests)
        unused = [key for key in self.objects.known() if key not in used]
        for key in unused:
            self.objects.remove(key)
        return len(unused)

    def _needed(self, kept: Collection[int]) -> set[Ends]:
        """The ways that `kept` versions need."""
        return {(link.version, link.base) for link in chain.needed(self.links(), kept)}

    def _objects_of(self, ways: Iterable[Ends]) -> set[str]:
        """The keys of all objects of these ways, and of those that are arriving."""
        manifests = self._manifests
        needing = (*(manifests[ends] for ends in ways if ends in manifests), *self._incoming)
        return {key for found in needing for key in (found.key, *found.object_keys())}

    def _unlink_manifest(self, version: int, base: int | None) -> None:
        with disk_trouble(f"manifests cannot be removed from {self.folder}"):
            (self._links_folder / link_name(version, base)).unlink(missing_ok=True)

    def _recover(self) -> Recovered:
        """Remove what no version is made of, and the versions that can no longer be read."""
        folders = (self.folder / "objects", self._links_folder, self._versions_folder)
        drafts = sum(remove_drafts(folder) for folder in folders)
        links = self.links()
        lost = [version for version in self.versions() if chain.find_route(links, None, version) is None]
        self._remove_marks(*lost)
        spoiled = _remove_others(self._versions_folder, {mark_name(version) for version in self._marks})
        stray = _remove_others(self._links_folder, {link_name(*ends) for ends in self._manifests})
        self.not_counted = {}
        unneeded, objects = self._remove_unneeded()
        found = Recovered(drafts, stray + unneeded, len(lost) + spoiled, objects)
        if found != Recovered():
            log.warning("removed what was half-done or spoiled", folder=str(self.folder), removed=str(found))
        return found


def _write(folder: Path, name: str, data: bytes) -> None:
    with disk_trouble(f"{folder / name} cannot be written"):
        write_whole(folder / name, data)
        try:
            flush_folder(folder)
        except BaseException:
            # Who is told that it failed must not find it there.
            (folder / name).unlink(missing_ok=True)
            raise


def _remove_others(folder: Path, names: Collection[str]) -> int:
    others = [name for name, _ in files_in(folder) if name not in names]
    for name in others:
        (folder / name).unlink(missing_ok=True)
    return len(others)
