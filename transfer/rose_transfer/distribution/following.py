"""One attempt to follow a way: ask for it, then bring the manifests and all objects that it leads over.

Invariants
- A manifest is believed only under the hash of its key, a way only if its manifests chain up to its goal.
- What can be had is brought, also where another object is damaged or gone: the next attempt is for the rest.
- A way is followed by manifests only once these chain up; then all of them have one packing, and name at most
  `OBJECTS_MAX` objects that are wanted.
- Nothing takes longer than until the deadline, neither the other side nor this one. What a thread does on disk is ended
  behind it; what is wanted of a packing is asked once, however long that takes, and the next fetch gets the answer.
- Texts are parsed, and what is wanted is found, in threads, never in the event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import ParamSpec, TypeVar

from rose.errors import TransferError
from rose.waits import WaitBoard
from rose_transfer.codec import BUCKET_BYTES_MAX
from rose_transfer.distribution import way as ways
from rose_transfer.distribution.arrival import Arrival
from rose_transfer.distribution.shelf import Shelf
from rose_transfer.distribution.way import Way, WayAsk
from rose_transfer.store import BucketId, Manifest, NoRoom, Packing, manifest, packing
from rose_transfer.store.canonical import MalformedRecord
from rose_transfer.transport.interface import ObjectClient, ObjectMissing, Refused
from rose_transfer.transport.landing import MemoryLanding

OBJECTS_MAX = 2**20
"""16 steps of a model with 235 billion parameters name some 110,000."""
_AT_ONCE = 8
_TEXT_BYTES_MAX = max(manifest.TEXT.bytes_max, packing.TEXT.bytes_max)
_OBJECT_BYTES_MAX = 2 * BUCKET_BYTES_MAX
DISK_S = 300.0
DISK_END = "end of reading or writing"
HERE = "this host"
Wanted = Callable[[Packing], Collection[BucketId]]
Chosen = dict[str, Future[frozenset[BucketId]]]
P = ParamSpec("P")
T = TypeVar("T")


class GoalMissing(ObjectMissing):
    """The version that was asked for is not kept upstream, or not any more: take the newest."""


class Unfit(TransferError):
    """Whoever shall say what is wanted of a version cannot, for it does not fit: no other way to it would."""


class Following:
    """Brings to `shelf` what `client` has, until the loop's time is `until`. `received_bytes` counts payload.

    `wanted` is called in a thread. `chosen` has, by the key of a packing, what it answers; `packings` are those that
    were needed.
    """

    def __init__(
        self,
        client: ObjectClient,
        shelf: Shelf,
        *,
        waits: WaitBoard,
        wanted: Wanted | None,
        chosen: Chosen,
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

        Raises GoalMissing; Unfit, and whatever else `wanted` raises; ObjectMissing if an object has gone meanwhile;
        LostObject, MalformedRecord or another TransferError for what is damaged; NoRoom; Refused; DeadlineExceeded.
        """
        way = await self._ask(ask)
        await self._bring_all({key: None for key, _ in way.steps})
        if way.steps:
            first, _ = way.steps[0]
            manifests = await self._from_disk(first, self._manifests, way, ask.start_fingerprint)
            packed_as = manifests[0].packing
            self.packings.add(packed_as)
            await self._bring(packed_as, None)
            chosen = None if self._wanted is None else await self._choose(packed_as, self._wanted)
            await self._bring_all_or_tell(first, await self._from_disk(first, _sizes, manifests, chosen))
        else:
            ways.check_steps(way, ask.start_fingerprint, [])
        return way

    async def _ask(self, ask: WayAsk) -> Way:
        landing = MemoryLanding(bytes_max=ways.TEXT.bytes_max)
        try:
            await self._client.fetch(ask.key, landing, deadline_s=self._left_s())
        except ObjectMissing as error:
            raise GoalMissing(
                f"version {ask.goal} is not kept upstream", expected="one that is", to_do="take the newest"
            ) from error
        way = ways.from_bytes(bytes(landing.bytes_view))
        ways.check_answer(way, ask)
        return way

    def _manifests(self, way: Way, held: str | None) -> list[Manifest]:
        """In a thread. Those of the steps, which lead to the goal from the bits with fingerprint `held`."""
        found: list[Manifest] = []
        named = 0
        for key, _ in way.steps:
            found.append(manifest.from_bytes(self._shelf.objects.read(key)))
            named += len(found[-1].buckets)
            if named > OBJECTS_MAX:
                raise MalformedRecord(
                    f"the way to version {way.version} names more objects",
                    expected=f"at most {OBJECTS_MAX}",
                )
        ways.check_steps(way, held, found)
        return found

    async def _choose(self, key: str, wanted: Wanted) -> frozenset[BucketId]:
        """The buckets that are wanted of the packing in an object."""

        def choose() -> frozenset[BucketId]:
            packed = packing.from_bytes(self._shelf.objects.read(key))
            try:
                return frozenset(wanted(packed))
            except TransferError as error:
                raise Unfit(error.what, expected=error.expected, to_do=error.to_do) from error

        answer = self._chosen.get(key)
        if answer is None:
            answer = self._chosen[key] = _in_own_thread(choose)
        try:
            return await self._waits.within(
                asyncio.wrap_future(answer), "answer to what is wanted", HERE, self._left_s(), boundary="transfer"
            )
        finally:
            if answer.done() and answer.exception() is not None:
                self._chosen.pop(key, None)

    async def _bring_all_or_tell(self, first: str, sizes: Mapping[str, int | None]) -> None:
        """As `_bring_all`. NoRoom tells what all that is missing takes, for room for one of them is of no use."""
        try:
            await self._bring_all(sizes)
        except NoRoom as error:
            missing_bytes = await self._from_disk(first, self._shelf.missing_bytes, sizes)
            error.needed_bytes = max(missing_bytes, error.needed_bytes or 0)
            raise

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
        bytes_max = _TEXT_BYTES_MAX if size_bytes is None else min(size_bytes, _OBJECT_BYTES_MAX)
        arrival = await self._from_disk(key, self._missing, key, bytes_max)
        if arrival is None:
            return
        before = arrival.complete_bytes
        try:
            await self._client.fetch(key, arrival, size_bytes=size_bytes, resume_from=before, deadline_s=self._left_s())
        finally:
            self.received_bytes += arrival.complete_bytes - before
        await self._from_disk(key, arrival.finish)
        await self._from_disk(key, self._shelf.take, key)

    def _missing(self, key: str, bytes_max: int) -> Arrival | None:
        """In a thread. Where an object is to be fetched into, None if it is here."""
        return None if self._shelf.has(key) else self._shelf.arrival(key, bytes_max)

    async def _from_disk(self, key: str, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """`work` on the object of `key`, after what was begun there before."""
        disk = self._shelf.disk(key)
        working = asyncio.get_running_loop().run_in_executor(disk, partial(work, *arguments, **named))
        limit_s = min(DISK_S, self._left_s())
        return await self._waits.within(working, DISK_END, HERE, limit_s, boundary="transfer")

    def _left_s(self) -> float:
        return max(0.0, self._until - asyncio.get_running_loop().time())


def _sizes(manifests: Iterable[Manifest], wanted: Collection[BucketId] | None) -> dict[str, int | None]:
    """Keys and sizes of the objects of `wanted` buckets, None for all, in the order of their manifests."""
    return {
        entry.key: entry.encoded_bytes
        for found in manifests
        for entry in found.buckets
        if wanted is None or entry.bucket_id in wanted
    }


def _in_own_thread(work: Callable[[], T]) -> Future[T]:
    """What `work` returns or raises. It changes nothing, so neither who gave up waiting nor the process ends it."""
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:  # noqa: BLE001 -- whatever a caller's function raises is its answer
            answer.set_exception(error)

    threading.Thread(target=run, name="rose-wanted", daemon=True).start()
    return answer
