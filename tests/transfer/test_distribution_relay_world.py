"""A relay between a publisher and an engine, everything drawn from a seed: damage on both disks, restarts, lineages.

What must hold after each step: the engine has exactly the bits that its fingerprint stands for, and so has every
version that the relay says it keeps and can read. As long as training goes on, the engine gets to the newest version
in the end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

import pytest
from distribution_tools import PATIENT, Engine, Site, free_port, site
from store_tools import PACKING, Bits, first_weights, moved, same

from rose.errors import TransferError
from rose_transfer.distribution import Relay
from rose_transfer.distribution.outlet import Outlet
from rose_transfer.store import Store

STEPS = 30
VERSIONS_TO_HEAL = 40


class World:
    """A publisher and a relay, each on a port of its own, and an engine behind the relay."""

    def __init__(self, here: Site, seed: int) -> None:
        self.here = here
        self.random = Random(seed)
        self.ports = (free_port(), free_port())
        self.bits: dict[str, list[Bits]] = {}
        self.store = Store(here.folder / "store", compress=True)
        self.outlet = Outlet(self.store, [here.serve(self.ports[0])])
        self.relay: Relay | None = None
        self.relay_stack = AsyncExitStack()
        self.receiver = here.receiver(self.ports[1], "engine")
        self.engine = Engine()

    async def publish(self) -> None:
        newest = self.store.newest
        start = None if newest is None else self.bits.get(self.store.fingerprint(newest))
        bits = first_weights(len(self.bits)) if start is None else moved(start, 0.05, len(self.bits))
        made = await asyncio.to_thread(self.store.publish, (newest or 0) + 1, PACKING, bits, newest)
        self.bits[made.fingerprint] = bits
        self.outlet.announce_newest()
        await asyncio.to_thread(self.store.collect, self.random.randint(1, 4))

    async def begin_from_scratch(self) -> None:
        await self.outlet.close()
        self.store.clear()
        await self.outlet.open()
        await self.publish()

    async def restart_publisher(self) -> None:
        await self.outlet.close()
        self.store.close()
        self.store = Store(self.store.folder, compress=True)
        self.outlet = Outlet(self.store, [self.here.serve(self.ports[0])])
        await self.outlet.open()

    async def restart_relay(self) -> None:
        await self.relay_stack.aclose()
        relaying = self.here.relay(self.ports[0], port=self.ports[1], keep=self.random.randint(1, 4))
        self.relay = await self.relay_stack.enter_async_context(relaying)

    async def damage(self) -> None:
        folder = self.random.choice(("store", "relay/store"))
        objects = sorted((self.here.folder / folder / "objects").glob("[0-9a-f]*"))
        # What is written anew while this is drawn goes by another name.
        with contextlib.suppress(FileNotFoundError, IndexError):
            path = self.random.choice(objects)
            if self.random.random() < 0.5:
                path.unlink()
            else:
                spoiled = bytearray(path.read_bytes())
                spoiled[self.random.randrange(len(spoiled))] ^= 1
                path.unlink()
                path.write_bytes(bytes(spoiled))

    async def jump(self) -> None:
        assert self.relay is not None
        goals = self.relay.store.versions()
        if goals:
            with contextlib.suppress(TransferError):
                await self.engine.move(self.receiver, self.random.choice(goals), PATIENT)

    async def wait(self) -> None:
        await asyncio.sleep(self.random.uniform(0, 0.1))

    def check(self) -> None:
        if self.engine.fingerprint is not None:
            assert self.engine.has(self.bits[self.engine.fingerprint])
        assert self.relay is not None
        store = self.relay.store
        for version in store.versions():
            with contextlib.suppress(TransferError):
                whole = store.fingerprint(version)
                assert same(list(store.read(version)), self.bits[whole])

    async def heal(self) -> None:
        """Training goes on; in the end the engine has what was published last."""
        for _ in range(VERSIONS_TO_HEAL):
            await self.publish()
            await asyncio.sleep(0.2)
            assert self.relay is not None
            newest = self.store.newest
            if newest is not None and newest in self.relay.store.versions():
                with contextlib.suppress(TransferError):
                    await self.engine.move(self.receiver, newest, PATIENT)
                    if self.engine.fingerprint == self.store.fingerprint(newest):
                        return
        raise AssertionError("the engine never got to the newest version")

    async def run(self) -> None:
        acts: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self.publish, 5),
            (self.jump, 6),
            (self.wait, 6),
            (self.damage, 2),
            (self.restart_relay, 1),
            (self.restart_publisher, 1),
            (self.begin_from_scratch, 1),
        ]
        await self.outlet.open()
        await self.publish()
        await self.restart_relay()
        for _ in range(STEPS):
            (act,) = self.random.choices([act for act, _ in acts], [weight for _, weight in acts])
            await act()
            self.check()
        await self.heal()
        self.check()
        await self.relay_stack.aclose()
        await self.outlet.close()
        self.store.close()


@pytest.mark.parametrize("seed", [0, 1, 2, 43])
def test_a_relay_never_mixes_and_always_catches_up(memory_path: Path, seed: int) -> None:
    async def check() -> None:
        async with site(memory_path) as here:
            await World(here, seed).run()
            await here.close()

    asyncio.run(check())
