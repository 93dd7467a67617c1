"""What the author of a trainer uses: publish weights as versions, and serve them to whoever has the token.

    layouts = [...]                                    # of the engines' ranks; none: everybody fetches everything
    serve = [partial(TcpServer, token=token, waits=waits, host="0.0.0.0", port=7070, tls=tls)]
    async with WeightPublisher(folder, waits=waits, receivers=layouts, serve=serve) as publisher:
        await publisher.publish(step, model.state_dict())

Invariants
- A version is announced only once it is whole on disk, and what was published keeps its bits. The state dict may
  change as soon as `publish` has returned or raised.
- A `publish` that is cancelled ends with the version announced, or with nothing of it left; `newest` says which.
- What several receivers hold alike is packed once, so the bytes that leave do not grow with replicas.
- The last `keep` versions and those that are pinned stay; others are retired after each publishing, in the background.
  Who holds a version that is retired fetches the next one whole.
- Where there is no room for a version, as few of the oldest go as make room for it, but none that is pinned and not the
  newest one. Where that makes no room either, none goes.

Memory: the bits of the version published last, one model's size in the published dtypes, and the three
buckets that are worked on at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch

from rose.errors import DeadlineExceeded, TransferError
from rose.logs import logger
from rose.waits import WaitBoard
from rose_transfer.distribution.known_answer import KnownAnswer
from rose_transfer.distribution.offer import Offer
from rose_transfer.distribution.outlet import MakeServer, Outlet
from rose_transfer.distribution.told_answers import ToldAnswers
from rose_transfer.layout.layout import Layout, Parameter
from rose_transfer.store import Manifest, NoRoomForVersion, Packing, Store
from rose_transfer.store.buckets import check_dtypes, pack, state_parameters
from rose_transfer.store.packing import pack_for, pack_whole
from rose_transfer.store.store import check_weights
from rose_transfer.transport.interface import ObjectServer

_WRITE_S = 3600.0
_GIVE_UP_S = 60.0
log = logger("weights")
T = TypeVar("T")


class WeightPublisher:
    """The publisher of `folder`, while used as an asynchronous context manager. From one event loop.

    `receivers` are the layouts of all ranks that will fetch (see `layout`): only what they hold is published, in
    their dtypes. Without any, `parameters` says which names, shapes and dtypes are published (see
    `layout.checkpoint`), None for those of the state dict as they are. `serve` makes the servers; `compress` writes
    deltas in zstd, for slow links; objects together take at most `bytes_max` bytes of disk, at least three times the
    model, None for no limit.

    Raises TransferError if another process publishes in the folder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        waits: WaitBoard,
        receivers: Iterable[Layout] = (),
        parameters: Mapping[str, Parameter] | None = None,
        serve: Sequence[MakeServer] = (),
        keep: int = 16,
        compress: bool = True,
        bytes_max: int | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1")
        self.store = Store(folder, compress=compress, bytes_max=bytes_max)
        self._answers = ToldAnswers()
        self._outlet = Outlet(self.store, serve, answers=self._answers.text)
        self._waits = waits
        self._layouts = tuple(receivers)
        self._parameters = parameters
        self._keep = keep
        self._packing: Packing | None = None
        # What that packing is of; None once it does not fit any more.
        self._packed_for: Mapping[str, Parameter] | None = None
        self._publishing: asyncio.Task[Manifest] | None = None
        self._retiring: asyncio.Task[None] | None = None

    async def __aenter__(self) -> WeightPublisher:
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

    @property
    def newest(self) -> int | None:
        """The version published last, by whichever process; None if there is none."""
        return self.store.newest

    async def publish(
        self, version: int, state_dict: Mapping[str, torch.Tensor], answer: KnownAnswer | None = None
    ) -> Manifest:
        """Store `state_dict` as `version` and offer it. Tensors of several names count once; others are rounded.

        `answer` is what an engine with these weights must answer: whoever lends one then asks it that first.

        Cancelled, it gives up at the next bucket, and ends once nothing of the version is left; where it had all of
        them by then, the version is offered.

        Raises TransferError if the number does not rise, there are no weights, a parameter is missing or has another
        shape or a dtype that is not published, or the disk fails (NoRoomForVersion if it is full); nothing of the
        version is left then.
        """
        await self._published_before()
        given_up = threading.Event()
        publishing = asyncio.create_task(self._write_and_offer(version, state_dict, answer, given_up))
        publishing.add_done_callback(_heed)
        self._publishing = publishing
        try:
            return await self._waits.within(
                asyncio.shield(publishing),
                f"version {version} on disk",
                "the weight store",
                _WRITE_S,
                boundary="transfer",
            )
        except (asyncio.CancelledError, DeadlineExceeded):
            given_up.set()
            with self._waits.waiting(f"version {version} to be given up", "the weight store", _GIVE_UP_S):
                await asyncio.wait([publishing], timeout=_GIVE_UP_S)
            raise

    async def offer(self) -> None:
        """Offer the newest version in `store`, which a `ShardedPublisher` has put there."""
        await self._retired()
        self._offer()

    def add_receivers(self, layouts: Iterable[Layout]) -> None:
        """Pack for these as well, from the next version on, which is written whole."""
        self._layouts = (*self._layouts, *layouts)
        self._packed_for = None

    async def pin(self, version: int) -> None:
        """Keep a version until `unpin`, however many follow. Raises TransferError if it is not kept any more."""
        await self._retired()
        self.store.pin(version)

    def unpin(self, version: int) -> None:
        """Let a version be retired; at the next publishing, if it is due."""
        self.store.unpin(version)

    def _offer(self) -> None:
        self._outlet.announce_newest()
        self._retiring = asyncio.create_task(self._retire())

    async def _write_and_offer(
        self,
        version: int,
        state_dict: Mapping[str, torch.Tensor],
        answer: KnownAnswer | None,
        given_up: threading.Event,
    ) -> Manifest:
        while True:
            try:
                manifest = await asyncio.to_thread(self._write, version, state_dict, given_up)
            except NoRoomForVersion as error:
                making = partial(self.store.make_room, error.objects, renew=error.renew)
                if given_up.is_set() or not await asyncio.to_thread(making):
                    raise
            else:
                if answer is not None:
                    self._answers.tell(Offer(version, manifest.fingerprint), answer)
                self._offer()
                return manifest

    def _write(self, version: int, state_dict: Mapping[str, torch.Tensor], given_up: threading.Event) -> Manifest:
        """In a thread."""
        packing = self._packing_for(version, state_dict)
        buckets = _unless(given_up, version, pack(packing, state_dict))
        return self.store.publish(version, packing, buckets, base=self.store.newest)

    def _packing_for(self, version: int, state_dict: Mapping[str, torch.Tensor]) -> Packing:
        parameters = self._published(state_dict)
        if self._packing is not None and self._packed_for == parameters:
            return self._packing
        packing = self._packed(parameters)
        check_weights(version, packing)
        if self._packing not in (None, packing):
            log.warning(
                "receivers or parameters have changed: the model is packed anew, and the next version written whole",
                dense_bytes=packing.dense_bytes,
            )
        self._packing, self._packed_for = packing, parameters
        return packing

    def _published(self, state_dict: Mapping[str, torch.Tensor]) -> Mapping[str, Parameter]:
        if self._layouts:
            return {name: value for layout in self._layouts for name, value in layout.parameters.items()}
        return state_parameters(state_dict) if self._parameters is None else self._parameters

    def _packed(self, parameters: Mapping[str, Parameter]) -> Packing:
        check_dtypes(parameters)
        return pack_for(self._layouts) if self._layouts else pack_whole(parameters)

    async def _retire(self) -> None:
        try:
            await asyncio.to_thread(self.store.collect, self._keep)
            self._answers.keep_only(self.store.versions())
        except TransferError as error:
            log.warning("old versions stay", why=str(error))

    async def _published_before(self) -> None:
        """Wait for a publishing that is under way, also one that was given up, and for what it retires."""
        await self._retired()
        while self._publishing is not None and not self._publishing.done():
            await self._waits.within(
                asyncio.wait([self._publishing]),
                "end of publishing another version",
                "the weight store",
                _WRITE_S,
                boundary="transfer",
            )
            await self._retired()

    async def _retired(self) -> None:
        """Wait for what is being retired. Raises what went wrong there that should not."""
        retiring = self._retiring
        if retiring is not None:
            await self._waits.within(
                asyncio.wait([retiring]),
                "end of retiring old versions",
                "the weight store",
                _WRITE_S,
                boundary="transfer",
            )
            self._retiring = None
            retiring.result()

    async def _close(self) -> None:
        try:
            await self._published_before()
            await self._outlet.close()
        finally:
            await asyncio.to_thread(self.store.close)


def _unless(given_up: threading.Event, version: int, buckets: Iterable[T]) -> Iterator[T]:
    """The buckets. Raises TransferError instead of the next one, or of their end, once they are given up."""
    for bucket in buckets:
        _go_on(given_up, version)
        yield bucket
    _go_on(given_up, version)


def _go_on(given_up: threading.Event, version: int) -> None:
    if given_up.is_set():
        raise TransferError(f"version {version} was given up while it was written", to_do="publish it again")


def _heed(ended: asyncio.Task[Manifest]) -> None:
    """What went wrong is raised where somebody waits for it; where all have given up, it is no news."""
    if not ended.cancelled():
        ended.exception()
