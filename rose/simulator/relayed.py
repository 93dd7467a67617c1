"""The product's store, its outlet, a relay that follows it, and an engine behind that, on virtual time.

    store ─ outlet ─▶ relay (follows by itself, as time passes) ─▶ receiver ─ engine

Each act is over before the next begins, but for what the relay does meanwhile: that takes virtual time, in the middle
of which the next act may fall. Threads are at rest between acts.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rose.errors import DeadlineExceeded, TransferError
from rose.simulator.deployment import Jumped, Outcome, Published
from rose.simulator.small_model import PACKING, Bits, Engine
from rose.simulator.switchboard import Switchboard
from rose.simulator.virtual_loop import VirtualLoop
from rose.waits import WaitBoard
from rose_transfer.distribution import Receiver, Relay
from rose_transfer.distribution.outlet import Outlet
from rose_transfer.store import Store
from rose_transfer.store.objects import is_key

WATCH_S = 2.0
LATENCY_S_MAX = 0.2
_SETTLE_S = 0.001


@dataclass(frozen=True, slots=True)
class Publish:
    """The next version, with the weights that `number` tells, of which the publisher keeps the last `keep`."""

    number: int
    keep: int


@dataclass(frozen=True, slots=True)
class BeginFromScratch:
    """The publisher drops all versions; the next one has number 1."""


@dataclass(frozen=True, slots=True)
class RestartPublisher:
    pass


@dataclass(frozen=True, slots=True)
class RestartRelay:
    keep: int


@dataclass(frozen=True, slots=True)
class Jump:
    """Bring the engine to a version that the relay has."""

    goal: int


@dataclass(frozen=True, slots=True)
class Wait:
    seconds: float


Act = Publish | BeginFromScratch | RestartPublisher | RestartRelay | Jump | Wait


class Relayed:
    """All of it in `folder`; `weights` gives what a number of `Publish` stands for, `seed` how long fetches take."""

    def __init__(self, folder: Path, seed: int, weights: Callable[[int], list[Bits]]) -> None:
        self.folder = folder
        self._weights = weights
        self._waits = WaitBoard()
        self._runner = asyncio.Runner(loop_factory=VirtualLoop)
        self._above, self._below = (Switchboard(partial(_latency_s, seed)) for _ in range(2))
        self.store = Store(folder / "store", compress=True)
        self.engine = Engine()
        self.relay: Relay
        self._relaying = AsyncExitStack()
        self._runner.run(self._open())

    def step(self, act: Act, now: float) -> Sequence[Outcome]:
        return self._runner.run(self._do(act))

    def close(self) -> None:
        self._runner.run(self._close())
        self._runner.close()

    async def _do(self, act: Act) -> Sequence[Outcome]:
        outcomes: Sequence[Outcome] = ()
        match act:
            case Publish(number, keep):
                outcomes = (self._publish(number, keep),)
            case BeginFromScratch():
                await self._outlet.close()
                self.store.clear()
                await self._outlet.open()
            case RestartPublisher():
                await self._outlet.close()
                self.store.close()
                self.store = Store(self.store.folder, compress=True)
                await self._open_outlet()
            case RestartRelay(keep):
                await self._relaying.aclose()
                await self._start_relay(keep)
            case Jump(goal):
                outcomes = (await self._jump(goal),)
            case Wait(seconds):
                await asyncio.sleep(seconds)
        await asyncio.sleep(_SETTLE_S)
        return outcomes

    def _publish(self, number: int, keep: int) -> Published:
        newest = self.store.newest
        made = self.store.publish((newest or 0) + 1, PACKING, self._weights(number), newest)
        self._outlet.announce_newest()
        self.store.collect(keep)
        return Published(number, made.fingerprint)

    async def _jump(self, goal: int) -> Jumped:
        try:
            await self.engine.move(self._receiver, goal)
        except (TransferError, DeadlineExceeded) as error:
            return Jumped(0, type(error).__name__)
        return Jumped(0)

    async def _open(self) -> None:
        await self._open_outlet()
        await self._start_relay(keep=2)
        self._receiver = Receiver(self._below.client(), self.folder / "engine", waits=self._waits, watch_s=WATCH_S)

    async def _open_outlet(self) -> None:
        self._outlet = Outlet(self.store, [self._above.serve])
        await self._outlet.open()

    async def _start_relay(self, keep: int) -> None:
        self.relay = Relay(
            self._above.client(),
            self.folder / "relay",
            waits=self._waits,
            serve=[self._below.serve],
            keep=keep,
            watch_s=WATCH_S,
        )
        await self._relaying.enter_async_context(self.relay)
        self._relaying.push_async_callback(self._end, asyncio.create_task(self.relay.run()))

    @staticmethod
    async def _end(following: asyncio.Task[None]) -> None:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following

    async def _close(self) -> None:
        await self._relaying.aclose()
        self._receiver.close()
        await self._outlet.close()
        self.store.close()


def _latency_s(seed: int, key: str) -> float:
    """Drawn for each object; those that are made have keys that are drawn, and no two runs the same."""
    return random.Random(f"{seed} {key}").uniform(0, LATENCY_S_MAX) if is_key(key) else LATENCY_S_MAX / 4
