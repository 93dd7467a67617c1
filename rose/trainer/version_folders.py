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
        self._giving: set[asyncio.Future[None]] = set()
        self._making = asyncio.Lock()

    async def take(self, version: int) -> Snapshot:
        """The folder of a version. Raises TransferError if the version cannot be read, or the disk is full."""
        taking = asyncio.ensure_future(self._take(version))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            # A thread writes on all the same: what it makes has to be taken into account, and to go again.
            taking.add_done_callback(lambda taken: self._not_wanted(version, taken))
            raise

    def _not_wanted(self, version: int, taken: asyncio.Future[Snapshot]) -> None:
        if not taken.cancelled() and taken.exception() is None:
            giving = asyncio.ensure_future(self.give_back(version))
            self._giving.add(giving)
            giving.add_done_callback(self._giving.discard)

    async def _take(self, version: int) -> Snapshot:
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
