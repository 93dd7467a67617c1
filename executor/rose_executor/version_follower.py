"""Keeps one live engine at the newest version that a publisher, or a relay in the engine's cluster, offers.

Invariants
- The engine runs one whole version, old or new: what is fetched is applied by its own stage and commit.
- A version is fetched while the engine generates; what was overtaken meanwhile is skipped.
- Where the engine turns out not to run what it is taken for, or an update was taken back or left weights mixed, the
  next attempt begins anew; a version that the engine refuses `ATTEMPTS` times is left, and the engine stays on its own,
  until another is offered. One that is still poisoned then has none, which ends the following.
- What cannot be fetched (a full disk, a slow link, damage, a model that does not fit) is tried ever less often until it
  can, or is gone, or another is offered.

    with closing(Receiver(client, folder, waits=waits, wanted=await wanted_by(control))) as receiver:
        await VersionFollower(control, receiver, waits=waits).run()
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import cast

from rose.errors import DeadlineExceeded, EngineError, TransferError
from rose.logs import logger
from rose.waits import WaitBoard
from rose_executor.control_client import ControlClient
from rose_transfer.distribution import Fetched, Offer, Receiver
from rose_transfer.distribution.attempts import Attempts
from rose_transfer.live import wanted_buckets
from rose_transfer.store import BucketId, Packing
from rose_transfer.transport.interface import ObjectMissing, Refused

log = logger("version follower")
ATTEMPTS = 3
NOT_STAGED = "is not staged and verified on every worker"
"""What an engine says to who commits what is not staged; `rose_commit` words it."""


@dataclass(frozen=True, slots=True)
class Followed:
    """The engine runs `version` now: `bytes_received` came for it, sampling stood still for `pause_ms`."""

    version: int
    fingerprint: str
    bytes_received: int
    pause_ms: float


async def wanted_by(control: ControlClient) -> Callable[[Packing], frozenset[BucketId]]:
    """Which buckets of a packing an engine needs, for its receiver.

    Raises TransferError if the engine cannot be updated in place.
    """
    layouts = await control.layouts()
    return lambda packing: wanted_buckets(packing, layouts)


class _News:
    """What `receiver` is offered, one question at a time."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    async def next(self, after: Offer | None) -> Offer:
        """The newest version as soon as it is another one than `after`. Raises as `Receiver.subscribe`."""
        offers = cast(AsyncGenerator[Offer, None], self._receiver.subscribe(after=after))
        async with aclosing(offers):
            return await anext(offers)


async def _at_once(followed: Followed) -> None:
    """Nothing is waited for."""


class VersionFollower:
    """`runs` is the version that the engine was started with, None if that is none of the publisher's.

    `applied` is told of each version that the engine runs. While `before_next` is awaited with it the engine stays on
    that version; what it raises ends the following. See `ControlClient.commit` for `keep_kv`.
    """

    def __init__(
        self,
        control: ControlClient,
        receiver: Receiver,
        *,
        waits: WaitBoard,
        runs: Offer | None = None,
        fetch_timeout_s: float = 600.0,
        keep_kv: bool = False,
        applied: Callable[[Followed], None] = lambda followed: None,
        before_next: Callable[[Followed], Awaitable[None]] = _at_once,
    ) -> None:
        self._control = control
        self._receiver = receiver
        self._news = _News(receiver)
        self._attempts = Attempts(self._news, waits)
        self._runs = runs
        self._fetch_timeout_s = fetch_timeout_s
        self._keep_kv = keep_kv
        self._applied = applied
        self._before_next = before_next
        self._trusted = True

    @property
    def runs(self) -> Offer | None:
        """What the engine runs, as far as is known."""
        return self._runs

    async def run(self) -> None:
        """Follow until cancelled.

        Raises EngineError when the engine is lost, or poisoned and no version heals it; Refused if the upstream and
        this side do not fit.
        """
        seen = self._runs
        while True:
            followed: Followed | None = None
            offer = await self._news.next(seen)
            try:
                followed = await self._take(offer)
            except Refused:
                raise
            except ObjectMissing as error:
                log.info("a version was overtaken", version=offer.version, why=error.what)
            except (TransferError, DeadlineExceeded) as error:
                await self._attempts.pause(offer, error)
                continue
            self._attempts.succeeded()
            seen = offer
            if followed is not None:
                await self._before_next(followed)

    async def _take(self, offer: Offer) -> Followed | None:
        """Fetch a version and let the engine have it; None if that refuses it.

        Raises as `Receiver.fetch`, or EngineError.
        """
        for attempt in range(1, ATTEMPTS + 1):
            fetched = await self._fetch(offer)
            try:
                return await self._apply(fetched)
            except DeadlineExceeded as error:
                raise EngineError(f"the engine does not answer: {error.what}") from error
            except TransferError as error:
                log.warning("a version was refused", version=offer.version, attempt=attempt, why=str(error))
            except EngineError as error:
                if attempt == ATTEMPTS or not await self._is_poisoned():
                    if NOT_STAGED in error.what:
                        raise _not_alone(error, offer.version) from error
                    raise
                log.warning("the weights are mixed; a version begins anew", version=offer.version, why=str(error))
        return None

    async def _is_poisoned(self) -> bool:
        """Whether the engine lives, and a version that begins anew would heal it."""
        with suppress(EngineError, DeadlineExceeded):
            return bool((await self._control.describe()).poisoned)
        return False

    async def _fetch(self, offer: Offer) -> Fetched:
        start = self._runs if self._trusted else None
        return await self._receiver.fetch(
            None if start is None else start.version,
            None if start is None else start.fingerprint,
            offer.version,
            deadline_s=self._fetch_timeout_s,
        )

    async def _apply(self, fetched: Fetched) -> Followed:
        pause_ms = 0.0
        if fetched.steps:
            self._trusted = False
            committed = await self._control.apply(
                fetched.version, fetched.objects_folder, fetched.steps, keep_kv=self._keep_kv
            )
            self._trusted, pause_ms = True, committed.pause_ms
        self._runs = Offer(fetched.version, fetched.fingerprint)
        followed = Followed(fetched.version, fetched.fingerprint, fetched.bytes_received, pause_ms)
        self._applied(followed)
        try:
            await asyncio.to_thread(self._receiver.forget)
        except TransferError as error:
            log.warning("what was applied is not removed yet", why=str(error))
        return followed


def _not_alone(error: EngineError, version: int) -> EngineError:
    """A follower commits only what the engine has just staged for it."""
    return EngineError(
        f"what was staged of version {version} is gone; most likely somebody else brings versions to this engine too: "
        f"{error.what}",
        expected="one follower, or one program that stages and commits, for each engine",
        to_do="end the other one",
    )
