"""Everything at once, drawn from a seed: publishing, retiring, damage, restarts, jumps to any version.

What must hold after each step: an engine has exactly the bits of the version that it says it has; a jump either ends
there, or raises a transfer's error and leaves the engine where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import pytest
from distribution_tools import PATIENT, Engine, Site, free_port, site
from store_tools import PACKING, Bits, first_weights, moved

from rose.errors import TransferError
from rose_transfer.distribution import Receiver
from rose_transfer.distribution.outlet import Outlet
from rose_transfer.store import Store

STEPS = 60


class World:
    """A store, its outlet on one port, and two engines."""

    def __init__(self, here: Site, seed: int) -> None:
        self.random = Random(seed)
        self.here = here
        self.port = free_port()
        self.store = Store(here.folder / "store", compress=True)
        self.outlet = Outlet(self.store, [here.serve(self.port)])
        # By fingerprint: a disk that loses the newest version has its number given out again.
        self.bits: dict[str, list[Bits]] = {}
        self.goals: list[int] = []
        self.receivers: list[Receiver] = [here.receiver(self.port, f"engine-{n}") for n in range(2)]
        self.engines = [Engine(), Engine()]
        self.jumps = self.failures = 0

    async def publish(self) -> None:
        newest = self.store.newest
        number = 0 if newest is None else newest
        before = first_weights(number) if newest is None else self.bits[self.store.fingerprint(newest)]
        bits = moved(before, self.random.choice((0.01, 0.2, 0.9)), len(self.bits))
        base = self.random.choice([*self.store.versions(), None])
        self.bits[self.store.publish(number + 1, PACKING, bits, base).fingerprint] = bits
        self.goals.append(number + 1)
        self.outlet.announce_newest()

    async def collect(self) -> None:
        versions = self.store.versions()
        self.store.collect(self.random.randint(1, 4), self.random.sample(versions, min(1, len(versions))))

    async def damage(self) -> None:
        objects = sorted((self.store.folder / "objects").iterdir())
        if not objects:
            return
        path = self.random.choice(objects)
        how = self.random.randrange(3)
        if how == 0:
            path.unlink()
        else:
            data = bytearray(path.read_bytes())
            data[self.random.randrange(len(data))] ^= 1
            path.write_bytes(bytes(data[: len(data) // how]))

    async def restart_server(self) -> None:
        await self.outlet.close()
        self.store.close()
        self.store = Store(self.store.folder, compress=True)
        self.outlet = Outlet(self.store, [self.here.serve(self.port)])
        await self.outlet.open()

    async def restart_receiver(self) -> None:
        number = self.random.randrange(2)
        self.receivers[number].close()
        self.receivers[number] = self.here.receiver(self.port, f"engine-{number}")

    async def jump(self) -> None:
        number = self.random.randrange(2)
        engine, goal = self.engines[number], self.random.choice(self.goals)
        self.jumps += 1
        try:
            await engine.move(self.receivers[number], goal, PATIENT)
        except TransferError:
            self.failures += 1

    def check(self) -> None:
        for engine in self.engines:
            if engine.fingerprint is not None:
                assert engine.has(self.bits[engine.fingerprint])

    async def run(self) -> None:
        acts: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self.publish, 4),
            (self.jump, 8),
            (self.collect, 2),
            (self.damage, 1),
            (self.restart_server, 1),
            (self.restart_receiver, 1),
        ]
        await self.outlet.open()
        await self.publish()
        for _ in range(STEPS):
            (act,) = self.random.choices([act for act, _ in acts], [weight for _, weight in acts])
            await act()
            self.check()
        # Whatever was damaged: once somebody has noticed, the next version is there for everybody.
        for receiver in self.receivers:
            with contextlib.suppress(TransferError):
                await receiver.fetch(None, None, self.store.newest or 0, deadline_s=PATIENT)
        await self.publish()
        await self.collect()
        for receiver, engine in zip(self.receivers, self.engines, strict=True):
            newest = self.store.newest
            assert newest is not None
            await engine.move(receiver, newest, PATIENT)
        self.check()
        await self.outlet.close()


@pytest.mark.parametrize("seed", range(8))
def test_an_engine_is_where_it_says_whatever_happens(memory_path: Path, seed: int) -> None:
    async def check() -> None:
        async with site(memory_path) as here:
            world = World(here, seed)
            await world.run()
            await here.close()
            assert world.jumps > world.failures, "most of what was asked for could be had"
            world.store.close()

    asyncio.run(check())
