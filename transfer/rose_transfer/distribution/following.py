"""One attempt to follow a way: ask for it, then bring the manifests and all objects that it leads over.

Invariants
- A manifest is believed only under the hash of its key, a way only if its manifests chain up to its goal.
- What can be had is brought, also where another object is damaged or gone: the next attempt is for the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import ParamSpec, TypeVar

from rose.errors import TransferError
from rose.waits import WaitBoard
from rose_transfer.codec import BUCKET_BYTES_MAX
from rose_transfer.distribution.shelf import Shelf
from rose_transfer.distribution.way import Way, WayAsk, check_answer, check_steps
from rose_transfer.distribution.way import from_bytes as way_from_bytes
from rose_transfer.store import BucketId, Manifest, NoRoom, Packing, manifest, packing
from rose_transfer.store.canonical import TEXT_BYTES_MAX
from rose_transfer.transport.interface import ObjectClient, ObjectMissing, Refused
from rose_transfer.transport.landing import MemoryLanding

_AT_ONCE = 8
_OBJECT_BYTES_MAX = 2 * BUCKET_BYTES_MAX
_DISK_S = 300.0
Wanted = Callable[[Packing], Collection[BucketId]]
P = ParamSpec("P")
T = TypeVar("T")


class GoalMissing(ObjectMissing):
    """The version that was asked for is not kept upstream, or not any more: take the newest."""


class Following:
    """Brings to `shelf` what `client` has, until the loop's time is `until`. `received_bytes` counts payload.

    `chosen` remembers, by the key of a packing, which buckets are wanted of it; `packings` are those that were needed.
    """

    def __init__(
        self,
        client: ObjectClient,
        shelf: Shelf,
        *,
        waits: WaitBoard,
        wanted: Wanted | None,
        chosen: dict[str, frozenset[BucketId]],
        until: float,
    ) -> None:
        self._client = client
        self._shelf = shelf
        self._waits = waits
        self._wanted = wanted
        self._chosen = chosen
        self._until = until
        self.received_bytes = 0
        self.packings: set[str] = set()

    async def follow(self, ask: WayAsk) -> Way:
        """Have everything here that the answer leads over.

        Raises GoalMissing; ObjectMissing if an object has gone meanwhile; LostObject, MalformedRecord or another
        TransferError for what is damaged; NoRoom; Refused; DeadlineExceeded.
        """
        way = await self._ask(ask)
        await self._bring_all({key: None for key, _ in way.steps})
        manifests = [await self._manifest(key) for key, _ in way.steps]
        check_steps(way, ask.start_fingerprint, manifests)
        sizes: dict[str, int | None] = {}
        for found in manifests:
            sizes |= await self._wanted_sizes(found)
        await self._bring_all(sizes)
        return way

    async def _ask(self, ask: WayAsk) -> Way:
        landing = MemoryLanding(bytes_max=TEXT_BYTES_MAX)
        try:
            await self._client.fetch(ask.key, landing, deadline_s=self._left_s())
        except ObjectMissing as error:
            raise GoalMissing(
                f"version {ask.goal} is not kept upstream", expected="one that is", to_do="take the newest"
            ) from error
        way = way_from_bytes(bytes(landing.bytes_view))
        check_answer(way, ask)
        return way

    async def _manifest(self, key: str) -> Manifest:
        return manifest.from_bytes(await self._from_disk(key, self._shelf.objects.read, key))

    async def _wanted_sizes(self, found: Manifest) -> dict[str, int]:
        """Keys and sizes of the objects that are wanted of a manifest, whose packing is brought."""
        self.packings.add(found.packing)
        await self._bring(found.packing, None)
        entries = found.buckets
        if self._wanted is not None:
            chosen = await self._choose(found.packing, self._wanted)
            entries = tuple(entry for entry in entries if entry.bucket_id in chosen)
        return {entry.key: entry.encoded_bytes for entry in entries}

    async def _choose(self, key: str, wanted: Wanted) -> frozenset[BucketId]:
        if key not in self._chosen:
            described = packing.from_bytes(await self._from_disk(key, self._shelf.objects.read, key))
            self._chosen[key] = frozenset(wanted(described))
        return self._chosen[key]

    async def _bring_all(self, sizes: Mapping[str, int | None]) -> None:
        """Some at a time, in their order; a size saves a round trip where it is known."""
        waiting = iter(sizes.items())
        troubles: list[TransferError] = []

        async def work() -> None:
            for key, size_bytes in waiting:
                try:
                    await self._bring(key, size_bytes)
                except (NoRoom, Refused):
                    raise
                except TransferError as error:
                    troubles.append(error)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(_AT_ONCE):
                    group.create_task(work())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        if troubles:
            raise troubles[0]

    async def _bring(self, key: str, size_bytes: int | None) -> None:
        self._shelf.use(key)
        if await self._from_disk(key, self._shelf.has, key):
            return
        bytes_max = TEXT_BYTES_MAX if size_bytes is None else min(size_bytes, _OBJECT_BYTES_MAX)
        arrival = self._shelf.arrival(key, bytes_max)
        before = arrival.complete_bytes
        try:
            await self._client.fetch(key, arrival, size_bytes=size_bytes, resume_from=before, deadline_s=self._left_s())
        finally:
            self.received_bytes += arrival.complete_bytes - before
        await self._from_disk(key, arrival.finish)
        await self._from_disk(key, self._shelf.take, key)

    async def _from_disk(self, key: str, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """`work` on the object of `key`, after what was begun there before."""
        disk = self._shelf.disk(key)
        working = asyncio.get_running_loop().run_in_executor(disk, partial(work, *arguments, **named))
        return await self._waits.within(working, "end of reading or writing", "the disk", _DISK_S, boundary="transfer")

    def _left_s(self) -> float:
        return max(0.0, self._until - asyncio.get_running_loop().time())
