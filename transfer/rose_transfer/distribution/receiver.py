"""Fetches what leads from the weights one holds to those one wants, into a folder, and nothing else.

    objects/<key>      what was fetched: manifests, packings, deltas; each under the SHA-256 of its bytes
    arriving/<key>     what is under way, resumed where it was cut, also after a kill

    receiver = Receiver(client, folder, waits=waits, wanted=buckets_of_this_rank)       # alone in the folder
    async for offer in receiver.subscribe(after=held):                       # Offer(version, fingerprint), or None
        fetched = await receiver.fetch(held.version, held.fingerprint, offer.version, deadline_s=600)
        for key, backwards in fetched.steps:                                 # from_bytes(objects.read(key)).buckets …
            ...
        receiver.forget()                                                    # once it is applied
    receiver.close()

Invariants
- What `fetch` returns is whole: the steps lead from the very bits that were named, or from nothing, to the goal, and
  every object that they name for the wanted buckets is in the folder and has the hash of its key.
- No byte is fetched twice but those of a piece that was under way when its link, this process or the server died, and
  of an object whose hash was wrong.
- What a server cannot give sound is asked for again by another way, a bounded number of times; then there is an error
  and never a part.

Memory: a few pieces per stream, and the manifests; objects go to the disk as they come.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rose.errors import ContractError, TransferError
from rose.waits import WaitBoard
from rose_transfer.distribution import known_answer
from rose_transfer.distribution.following import (
    DISK_END,
    DISK_S,
    HERE,
    Chosen,
    Following,
    GoalMissing,
    Unfit,
    Wanted,
)
from rose_transfer.distribution.known_answer import KnownAnswer
from rose_transfer.distribution.offer import Offer
from rose_transfer.distribution.shelf import Shelf
from rose_transfer.distribution.subscription import Subscription, log
from rose_transfer.distribution.way import WayAsk, ask_of
from rose_transfer.store import BucketId, NoRoom, Packing, manifest
from rose_transfer.store.files import DiskTrouble
from rose_transfer.transport.interface import ObjectClient, ObjectMissing, Refused
from rose_transfer.transport.landing import MemoryLanding

_WAYS_MAX = 5
"""So often a way is asked for before a server that cannot give what it promises is given up."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What leads to `version`: `steps` are (key of a manifest, backwards), in order, all in `objects_folder`.

    If the first manifest has no base, what was held takes no part. `start_known` says whether the server knows the
    bits that were held; if not, they may be of another lineage. `bytes_received` counts payload that came now.
    """

    version: int
    fingerprint: str
    objects_folder: Path
    steps: tuple[tuple[str, bool], ...]
    start_known: bool
    bytes_received: int


class Receiver:
    """Pulls from what `client` is connected to into `folder`, which is its own until `close`. From one event loop.

    `wanted` names the buckets of a packing that are needed, None for all; it is called in a thread, and what it raises
    is raised by `fetch`, as is ContractError for what it names and the packing has not. What lies in the
    folder of objects `beside`, on the same disk, is linked and not fetched. A server may hold the question for news for
    `watch_s` seconds; so long it takes at most to notice a trainer that counts from the beginning again.
    `received_bytes` counts the payload of all fetches, those that failed included.

    Raises TransferError if the folder cannot be used, another receiver uses it, or it is no receiver's.
    """

    def __init__(
        self,
        client: ObjectClient,
        folder: Path,
        *,
        waits: WaitBoard,
        wanted: Wanted | None = None,
        beside: Path | None = None,
        watch_s: float = 15.0,
    ) -> None:
        self._client = client
        self._shelf = Shelf(folder, beside)
        self._waits = waits
        self._wanted = None if wanted is None else partial(_buckets, wanted)
        self._watch_s = watch_s
        self._fetching = False
        self.received_bytes = 0
        # Most versions are packed as the one before, and a packing is large.
        self._packings: frozenset[str] = frozenset()
        self._chosen: Chosen = {}

    def close(self) -> None:
        """Let another receiver use the folder, where everything stays. No fetch may be under way.

        What the disk does for a fetch that was given up is waited for: where it may be slow, call this from a thread.
        """
        if self._fetching:
            raise ContractError("a receiver is closed while it fetches", expected="the end of the fetch first")
        with self._waits.waiting(DISK_END, HERE, DISK_S):
            self._shelf.close()

    def subscribe(self, after: Offer | None = None) -> AsyncIterator[Offer]:
        """The newest version, whenever it is another one than `after` and than the last that was given.

        Skips what was overtaken, outlasts servers and links, and never ends by itself. A lower number than before, or
        the same with another fingerprint, is another lineage, or a server that has lost its newest ones. Raises
        Refused for a wrong token, TransferError once the client was closed.
        """
        return Subscription(self._client, self._watch_s).offers(after)

    async def fetch(self, start: int | None, start_fingerprint: str | None, goal: int, *, deadline_s: float) -> Fetched:
        """Fetch what leads from version `start` with these bits, or from nothing (None, None), to version `goal`.

        One at a time. Raises ObjectMissing if the goal is not kept upstream: take the newest. NoRoom, Refused,
        DeadlineExceeded, or TransferError if every way was damaged; what had arrived stays for the next attempt.
        ContractError where what is held or wanted cannot be asked for.
        """
        ask = WayAsk(goal, start, start_fingerprint, secrets.token_hex(16))
        if (start is None) != (start_fingerprint is None):
            raise ContractError(
                f"a fetch from version {start} with fingerprint {start_fingerprint}",
                expected="both of what is held, or None for both",
            )
        if ask_of(ask.key) != ask:
            raise ContractError(
                f"a fetch from version {start!r} with fingerprint {start_fingerprint!r} to version {goal!r}",
                expected="whole numbers from 0 to below 2^63, and 64 hex digits",
            )
        if self._fetching:
            raise ContractError("a fetch is under way", expected="one at a time for each receiver")
        if self._shelf.closed:
            raise ContractError("a fetch into a folder that was let go", expected="fetches before `close`")
        following = Following(
            self._client,
            self._shelf,
            waits=self._waits,
            wanted=self._wanted,
            chosen=self._chosen,
            until=asyncio.get_running_loop().time() + deadline_s,
        )
        self._fetching = True
        try:
            return await self._fetch(following, ask)
        finally:
            self._fetching = False
            self.received_bytes += following.received_bytes
            self._shelf.release()

    async def _fetch(self, following: Following, ask: WayAsk) -> Fetched:
        attempt = 0
        while True:
            attempt += 1
            try:
                way = await following.follow(ask)
            except (NoRoom, Refused, GoalMissing, Unfit):
                raise
            except TransferError as error:
                if attempt == _WAYS_MAX:
                    raise TransferError(
                        f"version {ask.goal} could not be had in {attempt} attempts; the last: {error.what}",
                        to_do=error.to_do
                        if isinstance(error, DiskTrouble)
                        else "look at the server's store with `rose weights verify`",
                    ) from error
                log.warning("what leads to new weights is asked for again", version=ask.goal, why=str(error))
                # What is missing once was retired meanwhile; anything else may be damage, and the server is to look.
                checked = ask.checked or attempt > 1 or not isinstance(error, ObjectMissing)
                ask = WayAsk(ask.goal, ask.start, ask.start_fingerprint, secrets.token_hex(16), checked)
            else:
                if following.packings:
                    self._packings = frozenset(following.packings)
                    self._chosen = {key: self._chosen[key] for key in self._packings & self._chosen.keys()}
                return Fetched(
                    version=way.version,
                    fingerprint=way.fingerprint,
                    objects_folder=self._shelf.objects_folder,
                    steps=way.steps,
                    start_known=way.start is not None,
                    bytes_received=following.received_bytes,
                )

    async def answer(self, offer: Offer, *, deadline_s: float) -> KnownAnswer | None:
        """What a version is known to answer; None if nobody upstream knows.

        Raises MalformedRecord, Refused, DeadlineExceeded, or TransferError once the client was closed.
        """
        landing = MemoryLanding(bytes_max=known_answer.TEXT.bytes_max)
        try:
            await self._client.fetch(known_answer.ask_key(offer), landing, deadline_s=deadline_s)
        except ObjectMissing:
            return None
        return known_answer.from_bytes(bytes(landing.bytes_view))

    def forget(self, keep: Iterable[Fetched] = ()) -> None:
        """Remove what was fetched, but for what `keep` is made of, the last packing and what is being fetched now.

        May be called from a thread; removing files takes milliseconds. Raises TransferError if the disk fails.
        """
        needed = set(self._packings)
        for kept in keep:
            for key, _ in kept.steps:
                needed |= {key, *manifest.from_bytes(self._shelf.objects.read(key)).object_keys()}
        self._shelf.keep_only(needed)


def _buckets(wanted: Wanted, packing: Packing) -> frozenset[BucketId]:
    """What is wanted of a packing. Raises ContractError if that is no bucket of it: nothing would come of it."""
    named = frozenset(wanted(packing))
    unknown = named.difference(bucket.bucket_id for bucket in packing.buckets)
    if unknown:
        raise ContractError(
            f"a bucket is wanted that is not in the packing: {next(iter(unknown))!r}",
            expected="ids of its buckets, as BucketId",
        )
    return named
