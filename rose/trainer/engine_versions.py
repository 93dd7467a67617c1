"""Stores the versions of a run and sees its engines brought to them: the driver of the version state.

The run's own engine reads the store itself; engines that are lent fetch from the server that offers it.

Invariants
- Whoever fetches what is retired meanwhile is told so, and takes the next; what is retired here waits for nobody.
- A version is announced only when it is whole in the store; it leaves the store only when the state retires it.
- An order to an engine is always answered: by the engine, or by a failure when its deadline is over.
- An engine goes to a version from the one that it runs, in deltas; where it finds that it runs something else, it
  begins anew.
- An engine that starts loads the newest published version from a folder, pinned until it has joined.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from rose.driver.real import RealDriver
from rose.errors import EngineError, RoseError, TransferError
from rose.logs import logger
from rose.trainer.version_folders import VersionFolders
from rose.version_events import (
    Commit,
    CommitFailed,
    Committed,
    CommitUndone,
    EngineJoined,
    EngineLost,
    Pinned,
    Published,
    Replace,
    Retire,
    Stage,
    Staged,
    StageFailed,
    Unpinned,
    VersionAction,
    VersionEvent,
)
from rose.versions import EnginePhase, VersionState
from rose.waits import WaitBoard
from rose_executor.supervisor import EngineSupervisor, LiveEngine
from rose_transfer.distribution.known_answer import KnownAnswer
from rose_transfer.distribution.offer import Offer
from rose_transfer.distribution.outlet import Outlet
from rose_transfer.distribution.told_answers import ToldAnswers
from rose_transfer.layout.checkpoint import model_shapes
from rose_transfer.layout.layout import Parameter
from rose_transfer.snapshot import Snapshot, check_tensors
from rose_transfer.store import Store
from rose_transfer.store.buckets import pack
from rose_transfer.store.packing import pack_whole
from rose_transfer.transport.interface import ObjectSource
from rose_transfer.transport.tcp import LOOPBACK, TcpServer

log = logger("engine versions")
PUBLISHED_DTYPE = "bfloat16"
STORE_TIMEOUT_S = 600.0
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Applied:
    """How a version reached an engine: `apply_s` from the order to the answer, `pause_ms` without sampling.

    `pause_ms` is None if the engine did not swap but was started from this version.
    """

    apply_s: float
    pause_ms: float | None


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """A version in the store: `update_bytes` lead to it from the one before, of `model_bytes` in all."""

    version: int
    fingerprint: str
    update_bytes: int
    model_bytes: int


class _Observed:
    """The version state, and an event that tells when it has taken a step."""

    def __init__(self, state: VersionState) -> None:
        self.state = state
        self.stepped = asyncio.Event()

    def step(self, event: VersionEvent, now: float) -> tuple[VersionAction, ...]:
        actions = self.state.step(event, now)
        self.stepped.set()
        return actions


class EngineVersions:
    """One store of versions in `folder`, one supervised engine. `run` must run for anything else to happen.

    What is published are the tensors of the model folder `base_dir`, in bfloat16. `serve` makes the server that offers
    them to lent engines. Raises TransferError if another process publishes there.
    """

    def __init__(
        self,
        folder: Path,
        base_dir: Path,
        keep: int,
        supervisor: EngineSupervisor,
        waits: WaitBoard,
        serve: Callable[[ObjectSource], TcpServer],
    ) -> None:
        self._shapes = model_shapes(base_dir)
        self._store = Store(folder / "store")
        self._answers = ToldAnswers()
        self._outlet = Outlet(self._store, [serve], answers=self._answers.text)
        self._folders = VersionFolders(folder / "folders", self._store, base_dir)
        self._announced = -1
        self._packing = pack_whole({name: Parameter(shape, PUBLISHED_DTYPE) for name, shape in self._shapes.items()})
        self._supervisor = supervisor
        self._waits = waits
        self._core = _Observed(VersionState(keep=keep))
        self._driver: RealDriver[VersionEvent, VersionAction] = RealDriver(
            self._core, self._perform, name="versions", waits=waits
        )
        self._starting: dict[str, Snapshot] = {}
        self._pauses_ms: dict[int, float] = {}
        self._begins_anew: set[str] = set()

    async def run(self) -> None:
        """Drive the version state until `stop`. Raises what broke it."""
        await self._driver.run()

    def stop(self) -> None:
        self._driver.stop()

    async def open(self) -> str:
        """Start the server; its address. Raises ClusterError if that cannot be bound."""
        await self._outlet.open()
        (server,) = self._outlet.servers
        assert isinstance(server, TcpServer)
        return f"{LOOPBACK}:{server.port}"

    async def close(self) -> None:
        """Let go of the store, in which nothing is written any more. What is stored stays."""
        await self._outlet.close()
        self._store.close()

    def serving(self, engine_id: str) -> int | None:
        """The version that an engine samples with, None if it must not sample now."""
        state = self._core.state
        return state.engine_version(engine_id) if state.may_serve(engine_id) else None

    async def _in_thread(self, what: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        thread = asyncio.to_thread(work, *args, **kwargs)
        return await self._waits.within(thread, what, "weight store", STORE_TIMEOUT_S, boundary="transfer")

    @contextlib.asynccontextmanager
    async def held(self, version: int, by: str) -> AsyncIterator[Snapshot]:
        """The folder of a kept version, kept while the body runs whatever is published meanwhile."""
        await self._driver.send(Pinned(version, by))
        try:
            folder = await self._folders.take(version)
            try:
                yield folder
            finally:
                await self._folders.give_back(version)
        finally:
            await self._driver.send(Unpinned(version, by))

    async def publish(self, version: int, state: Mapping[str, torch.Tensor], answer: KnownAnswer) -> PublishedVersion:
        """Store `state` (HF names, float32 or bf16 tensors, rounded to bf16) whole, then announce it.

        `answer` is told to whoever asks what engines with this version must answer.

        Raises TransferError if a tensor is missing, wrong or not finite, or it cannot be written; earlier versions are
        untouched.
        """
        made = await self._in_thread(f"stored version {version}", self._store_version, version, state)
        self._answers.tell(Offer(version, made.fingerprint), answer)
        self._outlet.announce_newest()
        await self._driver.send(Published(version, made.fingerprint))
        self._announced = version
        return made

    def _store_version(self, version: int, state: Mapping[str, torch.Tensor]) -> PublishedVersion:
        check_tensors(state, self._shapes)
        stored = self._store.publish(version, self._packing, pack(self._packing, state), self._store.newest)
        return PublishedVersion(version, stored.fingerprint, stored.encoded_bytes, stored.dense_bytes)

    async def applied(self, engine_id: str, version: int, timeout_s: float) -> Applied:
        """Wait until the engine samples with `version` or a later one.

        Raises TransferError if the engine keeps refusing it, DeadlineExceeded if nothing happens.
        """
        start_s = time.monotonic()
        await self._waits.within(
            self._until_serving(engine_id, version),
            f"version {version}",
            engine_id,
            timeout_s,
            boundary="transfer",
            to_do="see the engine's log",
        )
        return Applied(time.monotonic() - start_s, self._pauses_ms.get(version))

    async def starting(self, engine_id: str, lost_incarnation: str | None) -> Snapshot:
        """What a (re)starting engine loads; pinned until `joined`."""
        newest = self._announced
        before = self._starting.get(engine_id)
        if before is None or before.version != newest:
            await self._driver.send(Pinned(newest, f"start of {engine_id}"))
            self._starting[engine_id] = await self._folders.take(newest)
            if before is not None:
                await self._started_from(engine_id, before.version)
        if lost_incarnation is not None:
            await self._driver.send(EngineLost(engine_id, lost_incarnation))
        return self._starting[engine_id]

    async def joined(self, engine_id: str, incarnation: str, version: int) -> None:
        """The engine is up with `version`."""
        await self._driver.send(EngineJoined(engine_id, incarnation, version))
        del self._starting[engine_id]
        self._begins_anew.discard(engine_id)
        await self._started_from(engine_id, version)

    async def _started_from(self, engine_id: str, version: int) -> None:
        await self._folders.give_back(version)
        await self._driver.send(Unpinned(version, f"start of {engine_id}"))

    async def _until_serving(self, engine_id: str, version: int) -> None:
        state = self._core.state
        while not (state.may_serve(engine_id) and (state.engine_version(engine_id) or 0) >= version):
            if state.phase(engine_id) is EnginePhase.LAGGING:
                raise TransferError(
                    f"{engine_id} does not take version {version}: {state.trouble().get(engine_id, '')}",
                    expected="a version whose objects are sound, and an engine that can be updated in place",
                )
            self._core.stepped.clear()
            await self._core.stepped.wait()

    async def _perform(self, action: VersionAction) -> Sequence[VersionEvent]:
        match action:
            case Stage():
                return [await self._stage(action)]
            case Commit():
                return [await self._commit(action)]
            case Replace():
                log.error("engine is replaced", engine_id=action.engine_id, version=action.version, why=action.why)
                await self._supervisor.replace(action.incarnation, action.why)
            case Retire():
                await self._in_thread(f"end of version {action.version}", self._store.retire, action.version)
                self._answers.keep_only(self._store.versions())
        return []

    async def _stage(self, order: Stage) -> VersionEvent:
        try:
            engine = await self._ordered(order.incarnation)
            start = None if order.engine_id in self._begins_anew else self._core.state.engine_version(order.engine_id)
            steps = await self._in_thread(f"way to version {order.version}", self._store.delta, start, order.version)
            way = [(step.manifest.key, step.backwards) for step in steps]
            await engine.control.stage(order.version, self._store.folder / "objects", way)
        except RoseError as error:
            if isinstance(error, TransferError):
                self._begins_anew.add(order.engine_id)
            return StageFailed(order.engine_id, order.version, order.order, str(error))
        return Staged(order.engine_id, order.version, order.order)

    async def _commit(self, order: Commit) -> VersionEvent:
        try:
            engine = await self._ordered(order.incarnation)
            committed = await engine.control.commit(order.version)
        except TransferError as error:
            self._begins_anew.add(order.engine_id)
            return CommitUndone(order.engine_id, order.version, order.order, str(error))
        except RoseError as error:
            return CommitFailed(order.engine_id, order.version, order.order, str(error))
        self._begins_anew.discard(order.engine_id)
        self._pauses_ms[order.version] = committed.pause_ms
        return Committed(order.engine_id, order.version, order.order)

    async def _ordered(self, incarnation: str) -> LiveEngine:
        """The incarnation that an order is for. Its successor started from a whole version."""
        engine = await self._supervisor.ready()
        if engine.incarnation != incarnation:
            raise EngineError(f"incarnation {incarnation} of {engine.engine_id} has ended")
        return engine
