"""The product's store, outlet and receivers, with an engine behind each, that do one act at a time.

Each act is over before the next begins, whatever threads work for it; so a seed decides all that comes of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from rose.errors import DeadlineExceeded, TransferError
from rose.simulator.small_model import PACKING, Bits, Engine
from rose.waits import WaitBoard
from rose_transfer.distribution import Receiver
from rose_transfer.distribution.outlet import MakeServer, Outlet
from rose_transfer.store import Store
from rose_transfer.transport.interface import ObjectClient

T = TypeVar("T")
WATCH_S = 0.6


class Transport(Protocol):
    """How receivers reach the server; one that is made again is found where the one before was."""

    @property
    def serve(self) -> MakeServer: ...

    def client(self) -> ObjectClient: ...


@dataclass(frozen=True, slots=True)
class Publish:
    """Version `version` in steps from `base`, None for all of it; `number` tells which weights."""

    version: int
    base: int | None
    number: int


@dataclass(frozen=True, slots=True)
class Collect:
    keep: int
    pinned: frozenset[int]


@dataclass(frozen=True, slots=True)
class Jump:
    """Bring an engine to a version; `anew`: ask for all of it and apply nothing."""

    engine: int
    goal: int
    anew: bool = False


@dataclass(frozen=True, slots=True)
class RestartServer:
    pass


@dataclass(frozen=True, slots=True)
class RestartReceiver:
    engine: int


@dataclass(frozen=True, slots=True)
class Published:
    number: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Jumped:
    """`refused` is the kind of error that left the engine where it was."""

    engine: int
    refused: str = ""


Act = Publish | Collect | Jump | RestartServer | RestartReceiver
Outcome = Published | Jumped


class Deployment:
    """`weights` gives what a number of `Publish` stands for."""

    def __init__(self, folder: Path, transport: Transport, engines: int, weights: Callable[[int], list[Bits]]) -> None:
        self._folder = folder
        self._transport = transport
        self._weights = weights
        self._waits = WaitBoard()
        self._runner = asyncio.Runner()
        self.store = Store(folder / "store", compress=True)
        self.engines = tuple(Engine() for _ in range(engines))
        self._outlet = Outlet(self.store, [transport.serve])
        self._run(self._outlet.open)
        self._clients: list[ObjectClient] = []
        self._receivers = [self._receiver(number) for number in range(engines)]

    def step(self, act: Act, now: float) -> Sequence[Outcome]:
        match act:
            case Publish(version, base, number):
                made = self.store.publish(version, PACKING, self._weights(number), base)
                self._outlet.announce_newest()
                return (Published(number, made.fingerprint),)
            case Collect(keep, pinned):
                for version in pinned:
                    self.store.pin(version)
                self.store.collect(keep)
                for version in pinned:
                    self.store.unpin(version)
            case Jump():
                return (self._jump(act),)
            case RestartServer():
                self._run(self._outlet.close)
                self.store.close()
                self.store = Store(self.store.folder, compress=True)
                self._outlet = Outlet(self.store, [self._transport.serve])
                self._run(self._outlet.open)
            case RestartReceiver(number):
                self._receivers[number].close()
                self._receivers[number] = self._receiver(number)
        return ()

    def close(self) -> None:
        for receiver in self._receivers:
            receiver.close()
        for client in self._clients:
            self._run(client.close)
        self._run(self._outlet.close)
        self._runner.close()
        self.store.close()

    def _jump(self, act: Jump) -> Jumped:
        receiver, engine = self._receivers[act.engine], self.engines[act.engine]
        try:
            if act.anew:
                self._run(lambda: receiver.fetch(None, None, act.goal, deadline_s=30.0))
            else:
                self._run(lambda: engine.move(receiver, act.goal))
        except (TransferError, DeadlineExceeded) as error:
            return Jumped(act.engine, type(error).__name__)
        return Jumped(act.engine)

    def _receiver(self, number: int) -> Receiver:
        async def made() -> Receiver:
            folder = self._folder / f"engine-{number}"
            self._clients.append(self._transport.client())
            return Receiver(self._clients[-1], folder, waits=self._waits, watch_s=WATCH_S)

        return self._run(made)

    def _run(self, work: Callable[[], Awaitable[T]]) -> T:
        async def done() -> T:
            return await work()

        return self._runner.run(done())
