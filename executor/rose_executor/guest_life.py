"""One incarnation of a guest: it is brought to the run's newest version, proven, and only then offered.

Invariants
- Nobody samples on it before it runs a version of the run, which what it starts from is not, and answers as that must.
- An incarnation that cannot be brought further, or that the scheduler does not take, is ended; the next begins anew.
- What was offered is withdrawn, however this ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from rose.errors import DeadlineExceeded, EngineError
from rose.logs import logger
from rose.waits import WaitBoard
from rose_executor.control_client import ControlClient
from rose_executor.lender import GuestNow, GuestOffer, Lender
from rose_executor.lending import Room
from rose_executor.supervisor import LiveEngine
from rose_executor.version_follower import Followed, VersionFollower, wanted_by
from rose_transfer.distribution import Offer, Receiver
from rose_transfer.transport.interface import ObjectClient

log = logger("guest")

_FIRST_VERSION_S = 60.0
_END_S = 30.0
_REPLACED = "the guest is replaced"

Prove = Callable[[LiveEngine, Receiver, Offer], Awaitable[None]]
"""Returns once an incarnation may be offered with the version that it runs; see `GuestProof.prove`."""
Receiving = Callable[[ControlClient], contextlib.AbstractAsyncContextManager[Receiver]]


@contextlib.asynccontextmanager
async def receiving(
    client: ObjectClient, folder: Path, waits: WaitBoard, control: ControlClient
) -> AsyncIterator[Receiver]:
    """A receiver for what the engine behind `control` needs. Raises as `wanted_by` and `Receiver`."""
    receiver = Receiver(client, folder, waits=waits, wanted=await wanted_by(control))
    try:
        yield receiver
    finally:
        await asyncio.to_thread(receiver.close)


class GuestLife:
    """`run` lives it. `followed` is the version that it runs, None before the first.

    `prove` stands before its first offer; no other version comes meanwhile. `now` says how many requests it may have,
    and which part of its cache is used; `told` hears of each new version and of the bytes that were fetched since the
    one before, for attempts that failed included.
    """

    def __init__(
        self,
        live: LiveEngine,
        receiving: Receiving,
        lender: Lender,
        waits: WaitBoard,
        *,
        publisher: str,
        counts_address: str,
        max_requests: int,
        prove: Prove,
        now: Callable[[], Room],
        told: Callable[[Followed, int], None],
    ) -> None:
        self.live = live
        self.followed: Followed | None = None
        self._receiving = receiving
        self._lender = lender
        self._waits = waits
        self._publisher = publisher
        self._counts_address = counts_address
        self._max_requests = max_requests
        self._prove = prove
        self._now = now
        self._told = told
        self._arrived = asyncio.Event()
        self._proven = asyncio.Event()
        self._fetched_bytes = 0
        self._leaving = asyncio.Event()
        self._left = asyncio.Event()
        self._end = "the executor ends"

    @property
    def proven(self) -> bool:
        """Whether it may be offered."""
        return self._proven.is_set()

    async def leave(self, why: str) -> None:
        """Return once it is offered to nobody, as far as the scheduler can be reached: then it may be ended.

        Raises DeadlineExceeded if that takes too long.
        """
        self._end = why
        self._leaving.set()
        await self._waits.within(
            self._left.wait(), "withdrawal of the guest", self.live.engine_id, _END_S, boundary="scheduler"
        )

    async def run(self) -> None:
        """Until the incarnation is dead.

        Raises what another one would not mend: Refused, TransferError, SchedulerError, ContractError.
        """
        try:
            await self._live()
        except (EngineError, DeadlineExceeded) as error:
            if not self.live.dead.is_set():
                log.error("the guest is replaced", incarnation=self.live.incarnation, why=str(error))
                self.live.kill(error.what)
        finally:
            self._left.set()
        if not self.live.dead.is_set():
            await self._waits.within(
                self.live.dead.wait(), "end of a guest", self.live.engine_id, _END_S, boundary="engine"
            )

    async def _live(self) -> None:
        async with self._receiving(self.live.control) as receiver:

            def applied(followed: Followed) -> None:
                fetched, self._fetched_bytes = receiver.received_bytes - self._fetched_bytes, receiver.received_bytes
                self.followed = followed
                self._told(followed, fetched)
                self._arrived.set()

            async def before_next(followed: Followed) -> None:
                if not self._proven.is_set():
                    await self._prove(self.live, receiver, Offer(followed.version, followed.fingerprint))
                    self._proven.set()

            follower = VersionFollower(
                self.live.control, receiver, waits=self._waits, applied=applied, before_next=before_next
            )
            tasks: list[asyncio.Task[object]] = [
                asyncio.create_task(follower.run(), name="version follower"),
                asyncio.create_task(self._offer(), name="offer"),
                asyncio.create_task(self.live.dead.wait(), name="death of the guest"),
                asyncio.create_task(self._leaving.wait(), name="leave of the guest"),
            ]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if self.live.dead.is_set():
                    self._end = "the guest is dead"
                if self.live.dead.is_set() or self._leaving.is_set():
                    return
                for task in done:
                    task.result()
            except (EngineError, DeadlineExceeded):
                self._end = _REPLACED
                raise
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _offer(self) -> None:
        while not self._arrived.is_set():
            # However long the publisher is away: the deadline is for whoever reads the status.
            with contextlib.suppress(DeadlineExceeded):
                await self._waits.within(
                    self._arrived.wait(),
                    "a version to sample with",
                    self._publisher,
                    _FIRST_VERSION_S,
                    boundary="transfer",
                )
        await self._proven.wait()  # whoever proves it says what that waits for
        offer = GuestOffer(
            self.live.engine_id,
            self.live.incarnation,
            self.live.base_url,
            self._counts_address,
            self._max_requests,
            self.live.page.version,
        )
        log.info("the guest is offered", incarnation=offer.incarnation, version=offer.weight_version)
        try:
            await self._lender.keep_offered(offer, self._state)
        except EngineError:
            self._end = _REPLACED
            raise
        finally:
            await self._lender.withdraw(offer, self._end)

    def _state(self) -> GuestNow:
        room, page = self._now(), self.live.page
        # 0 would say that it is unknown, and so no bound.
        kv_tokens = max(1, round(room.kv_fraction * page.kv_tokens)) if page.kv_tokens else 0
        return GuestNow(page.version, room.slots, room.kv_used_fraction, kv_tokens, page.token_s)
