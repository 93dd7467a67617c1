"""Stored versions as model folders, for those who load from disk: engines that start, fresh engines that are compared.

Invariants
- A folder is written whole, from objects that were checked, when the first one takes it, and removed when the last one
  has given it back.
- Whoever takes a version keeps it from being retired meanwhile: that is the caller's to see to.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from rose_transfer import snapshot
from rose_transfer.snapshot import Snapshot
from rose_transfer.store import Store
from rose_transfer.store.buckets import unpack


class VersionFolders:
    """Folders under `root` of versions in `store`; what is no weight comes from the model folder `base_dir`."""

    def __init__(self, root: Path, store: Store, base_dir: Path) -> None:
        self._root = root
        self._store = store
        self._base_dir = base_dir
        self._taken: dict[int, int] = {}
        self._made: dict[int, Snapshot] = {}
        self._making = asyncio.Lock()

    async def take(self, version: int) -> Snapshot:
        """The folder of a version. Raises TransferError if the version cannot be read, or the disk is full."""
        async with self._making:
            if version not in self._made:
                self._made[version] = await asyncio.to_thread(self._make, version)
            self._taken[version] = self._taken.get(version, 0) + 1
            return self._made[version]

    async def give_back(self, version: int) -> None:
        """One who took the folder is done with it."""
        async with self._making:
            self._taken[version] -= 1
            if not self._taken[version]:
                del self._taken[version]
                await asyncio.to_thread(snapshot.remove, self._made.pop(version).path)

    def _make(self, version: int) -> Snapshot:
        tensors = unpack(self._store.packing(version), self._store.read(version))
        return snapshot.write(self._root, version, tensors, self._base_dir)
