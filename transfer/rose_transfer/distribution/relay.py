"""A relay: follows a publisher or another relay, keeps its versions, and serves them to those near by.

    folder/store        what it has and serves, see `store`
    folder/incoming     what is on its way, see `receiver`
    folder/lock         held by the relay

How these change is in `lineage`; what else a relay asks of its upstream, in `above`.

Invariants
- A version is offered once it is whole and proven here, whatever fails afterwards. Until then, and while the upstream
  is away or announces nonsense, what was there before goes on being served.
- The slow link carries each version once: whole when the relay begins, in deltas from then on, in one merged delta
  after it fell behind. Who joins here is served from here.
- What has arrived survives a kill, so a relay goes on from there.
- One lineage at a time: if the upstream does not know the bits that are here, because a trainer began from scratch or
  because they are too old, all of it is served until the new version is whole and proven here, and then dropped. The
  log says so.
- `on_version` is told once of each version that is offered after another one, whatever failed before or behind it.
- Where a damaged disk has lost the newest version, it is fetched whole again, within `watch_s` after it was noticed.
- Where the store has no room for a version, or the disk is full before all of it has arrived, as few of the oldest go
  as make room for it, and none if none is made: the relay stays where it is. Another lineage for which there is no room
  costs the one that is here nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
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
from rose_transfer.distribution import lineage
from rose_transfer.distribution.above import Above
from rose_transfer.distribution.attempts import Attempts
from rose_transfer.distribution.following import DISK_END
from rose_transfer.distribution.offer import Offer
from rose_transfer.distribution.outlet import MakeServer, Outlet
from rose_transfer.distribution.receiver import Fetched, Receiver
from rose_transfer.distribution.subscription import Subscription, log
from rose_transfer.store import NoRoom, NoRoomForVersion, Store, chain
from rose_transfer.store.roles import Role, hold_alone
from rose_transfer.transport.interface import ObjectClient, ObjectServer, Refused

P = ParamSpec("P")
T = TypeVar("T")
INCOMING = "incoming"
_NAMES_BYTES = 2**14
"""What the store writes beside what has arrived: a manifest, a mark, the file of a way."""
_FETCH_S = 3600.0
_STORE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Relayed:
    """A version that is offered now, the payload that was received for it, and how long that took."""

    version: int
    bytes_received: int
    seconds: float


class Relay:
    """The relay of `folder`, while used as an asynchronous context manager: it serves what it has; `run` follows.

    `client` is connected to the upstream, and stays the caller's to close. The last `keep` versions stay; the objects
    of the store take at most `bytes_max` bytes of disk, at least three times the model, None for no limit. What is on
    its way takes more, which nothing limits: mostly one delta, but another lineage its whole size. `on_version` is
    told of every new version. See `Receiver` for `watch_s`. From one event loop.

    Raises TransferError if another relay uses the folder, or it is no relay's.
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
        self._folder = folder
        self._bytes_max = bytes_max
        with contextlib.ExitStack() as opened:
            self._lock = hold_alone(folder, Role.RELAY)
            opened.callback(os.close, self._lock)
            beside = folder / lineage.STORE / "objects"
            self._receiver = Receiver(client, folder / INCOMING, waits=waits, beside=beside, watch_s=watch_s)
            opened.callback(self._receiver.close)
            lineage.settle(folder)
            self.store = self._open_store()
            opened.pop_all()
        self._serve = tuple(serve)
        self._above = Above(client, watch_s)
        self._outlet = self._new_outlet()
        self._switching: asyncio.Task[None] | None = None
        self._told, self._told_bytes = self._newest(), 0
        self._began_s: float | None = None
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="rose-relay")
        self._waits = waits
        self._keep = keep
        self._on_version = on_version
        self._watch_s = watch_s
        self._news = Subscription(client, watch_s)
        self._attempts = Attempts(self._news, waits)

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
            self._offer()
            offer = await self._news.next(self._held())
            if offer is None:
                await self._above.look_up()
            if offer is None or self._has(offer):
                continue
            try:
                await self._follow(offer)
            except Refused:
                raise
            except (TransferError, DeadlineExceeded) as error:
                await self._attempts.pause(offer, error)
            else:
                self._attempts.succeeded()

    def _has(self, offer: Offer) -> bool:
        """Whether nothing is to be done: the offer is newest here, or an older one, of an upstream that is behind."""
        return self._held() is not None and self.store.holds(offer.version, offer.fingerprint)

    def _held(self) -> Offer | None:
        """The newest version, None if there is none or the disk has lost it."""
        newest = self._newest()
        lost = newest is not None and chain.find_route(self.store.links(), None, newest.version) is None
        return None if lost else newest

    def _newest(self) -> Offer | None:
        newest = self.store.newest
        return None if newest is None else Offer(newest, self.store.fingerprint(newest))

    async def _follow(self, offer: Offer) -> None:
        if self._began_s is None:
            self._began_s = time.monotonic()
        try:
            await self._bring(offer)
        except NoRoom as error:
            if not await self._in_thread(self._make_room, error):
                raise
            await self._bring(offer)
        self._offer()
        await self._in_thread(self.store.collect, self._keep)

    def _make_room(self, why: NoRoom) -> bool:
        """In a thread. Whether there is room that was not there."""
        if isinstance(why, NoRoomForVersion):
            return self.store.make_room(why.objects, renew=why.renew)
        if why.needed_bytes is None or not self._one_disk():
            return False
        return self.store.make_disk_room(why.needed_bytes + _NAMES_BYTES, by_quota=why.by_quota)

    def _one_disk(self) -> bool:
        """Whether what goes makes room for what arrives."""
        try:
            return len({os.stat(self._folder / name).st_dev for name in (INCOMING, lineage.STORE)}) == 1
        except OSError:
            return False

    def _offer(self) -> None:
        """Offer what is newest here, and tell of it if it is new."""
        self._outlet.announce_newest()
        newest = self._newest()
        if newest is None or newest == self._told:
            return
        received_bytes, now_s = self._receiver.received_bytes, time.monotonic()
        relayed = Relayed(newest.version, received_bytes - self._told_bytes, now_s - (self._began_s or now_s))
        self._told, self._told_bytes, self._began_s = newest, received_bytes, None
        if self._on_version is not None:
            self._on_version(relayed)

    async def _bring(self, offer: Offer) -> None:
        """Have the version in the store."""
        held = self._held()
        start, bits = (None, None) if held is None else (held.version, held.fingerprint)
        fetched = await self._receiver.fetch(start, bits, offer.version, deadline_s=_FETCH_S)
        known = fetched.start_known
        if any(backwards for _, backwards in fetched.steps):
            # A way back leads over versions that are not here.
            fetched = await self._receiver.fetch(None, None, offer.version, deadline_s=_FETCH_S)
        if (held is None or known) and await self._in_thread(lineage.continues, self.store, fetched):
            await self._in_thread(lineage.take_in, self.store, fetched)
        else:
            await self._begin_anew(fetched)
        try:
            await self._in_thread(lineage.remove_dropped, self._folder)
            await self._in_thread(self._receiver.forget)
        except (TransferError, DeadlineExceeded) as error:
            # It goes with what the next version leaves.
            log.warning("what arrived is not tidied away", version=offer.version, why=str(error))

    async def _begin_anew(self, fetched: Fetched) -> None:
        try:
            await self._in_thread(lineage.take_in_anew, self._folder, fetched, bytes_max=self._bytes_max)
        except NoRoom as error:
            # To retire versions that are here would make no room: the other lineage has a limit of its own.
            raise TransferError(f"another lineage is not taken in: {error.what}", to_do=error.to_do) from error
        log.warning(
            "the upstream does not know what is here: another lineage, or too old; all of it is dropped",
            here=self.store.newest,
            new=fetched.version,
        )
        # Whoever stops following meanwhile goes on serving, the one lineage or the other.
        self._switching = asyncio.create_task(self._switch())
        await asyncio.shield(self._switching)

    async def _switch(self) -> None:
        await self._outlet.close()
        try:
            await self._in_thread(self._replace_store)
        finally:
            self._outlet = self._new_outlet()
            await self._outlet.open()

    def _new_outlet(self) -> Outlet:
        return Outlet(self.store, self._serve, self._above.relays, self._above.answer)

    def _replace_store(self) -> None:
        """In a thread."""
        self.store.close()
        try:
            lineage.replace(self._folder)
        finally:
            self.store = self._open_store()

    def _open_store(self) -> Store:
        return Store(self._folder / lineage.STORE, compress=True, bytes_max=self._bytes_max)

    async def _in_thread(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        working = asyncio.get_running_loop().run_in_executor(self._disk, partial(work, *arguments, **named))
        return await self._waits.within(working, DISK_END, "the weight store", _STORE_S, boundary="transfer")

    async def _close(self) -> None:
        try:
            if self._switching is not None:
                with self._waits.waiting("change of lineage", "the weight store", _STORE_S):
                    await asyncio.wait([self._switching])
                if (trouble := self._switching.exception()) is not None:
                    log.warning("the new lineage did not take its place", why=str(trouble))
            await self._outlet.close()
        finally:
            # What is being written ends first: another process may use the folder as soon as it is free.
            await self._waits.within(
                asyncio.to_thread(self._free), DISK_END, "the weight store", _STORE_S, boundary="transfer"
            )

    def _free(self) -> None:
        self._disk.shutdown()
        self.store.close()
        self._receiver.close()
        os.close(self._lock)
