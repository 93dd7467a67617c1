"""A relay: follows a publisher or another relay, keeps its versions, and serves them to those near by.

    folder/store        what it has and serves, see `store`
    folder/incoming     what is on its way, see `receiver`

Invariants
- A version is offered once it is whole and proven here, whatever fails afterwards. Until then, and while the upstream
  is away or announces nonsense, what was there before goes on being served.
- The slow link carries each version once: whole when the relay begins, in deltas from then on, in one merged delta
  after it fell behind. Who joins here is served from here.
- What has arrived survives a kill, so a relay goes on from there.
- One lineage at a time: if the upstream does not know the bits that are here, because a trainer began from scratch or
  because they are too old, it all is dropped as soon as the new version has arrived, and the log says so.
- Where a damaged disk has lost the newest version, it is fetched whole again, within `watch_s` after it was noticed.
- If the disk is full, versions before the newest go first; if that does not help, the relay stays where it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from rose.errors import DeadlineExceeded, TransferError
from rose.waits import WaitBoard
from rose_transfer.distribution.offer import Offer
from rose_transfer.distribution.outlet import MakeServer, Outlet
from rose_transfer.distribution.receiver import Fetched, Receiver
from rose_transfer.distribution.subscription import log, next_offer
from rose_transfer.store import Manifest, NoRoom, Objects, Store, chain, manifest
from rose_transfer.transport.interface import ObjectClient, ObjectServer, Refused

P = ParamSpec("P")
T = TypeVar("T")
_FETCH_S = 3600.0
_STORE_S = 3600.0
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Relayed:
    """A version that is offered now, the payload that was received for it, and how long that took."""

    version: int
    bytes_received: int
    seconds: float


class Relay:
    """The relay of `folder`, while used as an asynchronous context manager: it serves what it has; `run` follows.

    `client` is connected to the upstream, and stays the caller's to close. The last `keep` versions stay; the objects
    of the store take at most `bytes_max` bytes of disk, at least three times the model, None for no limit; what is on
    its way takes some more. `on_version` is told of every new version. See `Receiver` for `watch_s`. From one event
    loop.

    Raises TransferError if another process writes in the folder.
    """

    def __init__(
        self,
        client: ObjectClient,
        folder: Path,
        *,
        waits: WaitBoard,
        serve: Sequence[MakeServer],
        keep: int = 16,
        bytes_max: int | None = None,
        on_version: Callable[[Relayed], None] | None = None,
        watch_s: float = 15.0,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1")
        self.store = Store(folder / "store", compress=True, bytes_max=bytes_max)
        self._client = client
        self._receiver = Receiver(client, folder / "incoming", waits=waits, beside=self.store.objects, watch_s=watch_s)
        self._outlet = Outlet(self.store, serve)
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="rose-relay")
        self._waits = waits
        self._keep = keep
        self._on_version = on_version
        self._watch_s = watch_s

    async def __aenter__(self) -> Relay:
        try:
            await self._outlet.open()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    @property
    def servers(self) -> tuple[ObjectServer, ...]:
        """Those that `serve` made, in its order, once entered."""
        return self._outlet.servers

    async def run(self) -> None:
        """Follow the upstream until cancelled.

        Raises Refused if it does not accept the token, TransferError once the client was closed.
        """
        while True:
            # Also the version that is whole here although something failed after its mark was written.
            self._outlet.announce_newest()
            offer = await next_offer(self._client, self._held(), self._watch_s)
            if offer is None or self._has(offer):
                continue
            try:
                await self._follow(offer)
            except Refused:
                raise
            except (TransferError, DeadlineExceeded) as error:
                log.warning("a version is not relayed yet", version=offer.version, why=str(error))
                with self._waits.waiting(f"another attempt at version {offer.version}", "the upstream", _RETRY_S):
                    await asyncio.sleep(_RETRY_S)

    def _has(self, offer: Offer) -> bool:
        """Whether nothing is to be done: the offer is newest here, or an older one, of an upstream that is behind."""
        return self._held() is not None and self.store.holds(offer.version, offer.fingerprint)

    def _held(self) -> Offer | None:
        """The newest version, None if there is none or the disk has lost it."""
        newest = self.store.newest
        if newest is None or chain.find_route(self.store.links(), None, newest) is None:
            return None
        return Offer(newest, self.store.fingerprint(newest))

    async def _follow(self, offer: Offer) -> None:
        began_s = time.monotonic()
        try:
            received_bytes = await self._bring(offer)
        except NoRoom as error:
            older = self.store.versions()[:-1]
            if not older:
                raise
            log.warning("no room: older versions go", versions=older, why=str(error))
            await self._in_thread(self.store.retire, *older)
            received_bytes = await self._bring(offer)
        self._outlet.announce_newest()
        if self._on_version is not None:
            self._on_version(Relayed(offer.version, received_bytes, time.monotonic() - began_s))
        await self._in_thread(self.store.collect, self._keep)

    async def _bring(self, offer: Offer) -> int:
        """Have the version in the store, and say how many bytes were received for it."""
        held = self._held()
        start, bits = (None, None) if held is None else (held.version, held.fingerprint)
        fetched = await self._receiver.fetch(start, bits, offer.version, deadline_s=_FETCH_S)
        known, received_bytes = fetched.start_known, fetched.bytes_received
        if any(backwards for _, backwards in fetched.steps):
            # A way back leads over versions that are not here.
            fetched = await self._receiver.fetch(None, None, offer.version, deadline_s=_FETCH_S)
            received_bytes += fetched.bytes_received
        if (held is None or known) and await self._in_thread(self._continues, fetched):
            await self._in_thread(self._take_in, fetched)
        else:
            await self._begin_anew(fetched)
        try:
            await self._in_thread(self._receiver.forget)
        except (TransferError, DeadlineExceeded) as error:
            # It goes with what the next version leaves.
            log.warning("what arrived is not tidied away", version=offer.version, why=str(error))
        return received_bytes

    async def _begin_anew(self, fetched: Fetched) -> None:
        log.warning(
            "the upstream does not know what is here: another lineage, or too old; all of it is dropped",
            here=self.store.newest,
            new=fetched.version,
        )
        await self._outlet.close()
        try:
            await self._in_thread(self.store.clear)
            await self._in_thread(self._take_in, fetched)
        finally:
            await self._outlet.open()

    def _continues(self, fetched: Fetched) -> bool:
        """In a thread. Whether what is fetched can stand beside what is here, where a damaged disk has lost parts."""
        newest = self.store.newest
        if newest is not None and fetched.version < newest:
            return False
        here = {version: self.store.fingerprint(version) for version in self.store.versions()}
        for found in _manifests(fetched):
            for version, whole in ((found.version, found.fingerprint), (found.base, found.base_fingerprint)):
                if version is not None and here.get(version, whole) != whole:
                    return False
        return True

    def _take_in(self, fetched: Fetched) -> None:
        """In a thread. Raises NoRoom, or TransferError if an object turns out damaged; the store is as it was then."""
        for found in _manifests(fetched):
            with self.store.receive(found):
                for needed in found.object_keys():
                    self.store.objects.adopt(fetched.objects_folder / needed)

    async def _in_thread(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        working = asyncio.get_running_loop().run_in_executor(self._disk, partial(work, *arguments, **named))
        return await self._waits.within(
            working, "end of reading or writing", "the weight store", _STORE_S, boundary="transfer"
        )

    async def _close(self) -> None:
        try:
            await self._outlet.close()
        finally:
            # What is being written ends first: another process may open the store as soon as it is closed.
            await asyncio.to_thread(self._disk.shutdown)
            self.store.close()


def _manifests(fetched: Fetched) -> list[Manifest]:
    arrived = Objects(fetched.objects_folder)
    return [manifest.from_bytes(arrived.read(key)) for key, _ in fetched.steps]
