"""A small transfer that is broken at every frame: whoever is left, or comes back, ends with the right bits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from distribution_tools import CLIENT, PATIENT, Engine, Site, free_port, line, offered, port_of, site, until
from frame_proxy import HOLD, FrameProxy, Meddle
from store_tools import Bits, same
from transport_tools import PIECE

from rose_transfer.distribution import Relay
from rose_transfer.distribution.outlet import Outlet
from rose_transfer.store import Store

GOAL = 3
UNDER_WAY = CLIENT.streams * CLIENT.window * PIECE
"""Payload that may be under way when something dies, and that is fetched again."""


@pytest.fixture
def made(memory_path: Path) -> tuple[Store, dict[int, list[Bits]]]:
    return line(memory_path / "store", GOAL)


async def transfer(folder: Path, store: Store, expected: list[Bits], meddle: Meddle) -> tuple[int, int]:
    """One fetch through a proxy that meddles. How many frames came by, and object bytes that were served."""
    async with site(folder) as here, offered(here, store) as (_, port), FrameProxy(port, meddle) as proxy:
        engine = Engine()
        await engine.move(here.receiver(proxy.port), GOAL)
        assert engine.has(expected)
        await here.close()
        return proxy.frames, here.counted[0].object_bytes


def clean_transfer(memory_path: Path, store: Store, expected: list[Bits]) -> tuple[int, int]:
    frames, served_bytes = asyncio.run(transfer(memory_path / "clean", store, expected, lambda _, frame: frame))
    assert frames > 30
    return frames, served_bytes


def _cut(_: bytes) -> bytes | None:
    return None


def _spoil(frame: bytes) -> bytes:
    changed = bytearray(frame)
    changed[-1] ^= 0x10
    return bytes(changed)


@pytest.mark.parametrize(
    ("every", "change"),
    [(1, _cut), (1, _spoil), (2, lambda frame: frame * 2), (5, lambda _: HOLD), (9, lambda frame: frame[:-1])],
    ids=["cut", "corrupted", "repeated", "late", "truncated"],
)
def test_a_frame_that_is_lost_or_changed(
    memory_path: Path,
    made: tuple[Store, dict[int, list[Bits]]],
    every: int,
    change: Callable[[bytes], bytes | None],
) -> None:
    store, history = made
    frames, clean_bytes = clean_transfer(memory_path, store, history[GOAL])
    for number in range(0, frames, every):

        def meddle(at: int, frame: bytes, number: int = number) -> bytes | None:
            return change(frame) if at == number else frame

        _, served_bytes = asyncio.run(transfer(memory_path / f"at-{number}", store, history[GOAL], meddle))
        assert served_bytes <= clean_bytes + UNDER_WAY


class Boundary:
    """Passes frames on, and at one of them says so and cuts every connection there, until it is healed."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._healed = False
        self.reached = asyncio.Event()

    def heal(self) -> None:
        self._healed = True

    def __call__(self, at: int, frame: bytes) -> bytes | None:
        if at >= self._number and not self.reached.is_set():
            self.reached.set()
        return None if self.reached.is_set() and not self._healed else frame


def test_a_receiver_dies_at_every_frame(memory_path: Path, made: tuple[Store, dict[int, list[Bits]]]) -> None:
    store, history = made
    frames, clean_bytes = clean_transfer(memory_path, store, history[GOAL])

    async def check(here: Site, outlet: Outlet, number: int) -> None:
        boundary, name = Boundary(number), f"receiver-at-{number}"
        served = here.counted[0]
        before = served.object_bytes
        async with FrameProxy(port_of(outlet), boundary) as proxy:
            receiver = here.receiver(proxy.port, name)
            fetch = asyncio.ensure_future(receiver.fetch(None, None, GOAL, deadline_s=PATIENT))
            await boundary.reached.wait()
            fetch.cancel()
            await asyncio.wait([fetch])
            receiver.close()
        engine = Engine()
        await engine.move(here.receiver(port_of(outlet), name), GOAL)
        assert engine.has(history[GOAL])
        assert served.object_bytes - before <= clean_bytes + UNDER_WAY

    async def all_frames() -> None:
        async with site(memory_path) as here, offered(here, store) as (outlet, _):
            for number in range(frames - 2):
                await check(here, outlet, number)

    asyncio.run(all_frames())


def test_a_publisher_dies_at_every_frame_and_comes_back(
    memory_path: Path, made: tuple[Store, dict[int, list[Bits]]]
) -> None:
    store, history = made
    frames, clean_bytes = clean_transfer(memory_path, store, history[GOAL])
    store.close()

    async def check(number: int) -> None:
        boundary, engine, port = Boundary(number), Engine(), free_port()
        async with site(memory_path) as here, FrameProxy(port, boundary) as proxy:
            first = Store(store.folder, compress=True)
            async with offered(here, first, port=port):
                receiver = here.receiver(proxy.port, f"receiver-at-{number}")
                fetch = asyncio.ensure_future(receiver.fetch(None, None, GOAL, deadline_s=PATIENT))
                await boundary.reached.wait()
                first.close()
            back = Store(store.folder, compress=True)
            boundary.heal()
            async with offered(here, back, port=port):
                engine.apply(await fetch)
            back.close()
            assert engine.has(history[GOAL])
            assert sum(counted.object_bytes for counted in here.counted) <= clean_bytes + UNDER_WAY

    for number in range(frames - 2):
        asyncio.run(check(number))


def test_a_relay_dies_at_every_frame_and_goes_on(memory_path: Path, made: tuple[Store, dict[int, list[Bits]]]) -> None:
    store, history = made

    async def follow(here: Site, port: int, name: str) -> Relay:
        async with here.relay(port, name) as relay:
            await until(lambda: relay.store.newest == GOAL)
            return relay

    async def clean() -> tuple[int, int]:
        async with (
            site(memory_path) as here,
            offered(here, store) as (_, port),
            FrameProxy(port, lambda _, frame: frame) as proxy,
        ):
            await follow(here, proxy.port, "clean-relay")
            return proxy.frames, here.counted[0].object_bytes

    async def check(number: int, clean_bytes: int) -> None:
        async with site(memory_path) as here, offered(here, store) as (_, port):
            boundary, name = Boundary(number), f"relay-at-{number}"
            async with FrameProxy(port, boundary) as proxy, here.relay(proxy.port, name):
                await boundary.reached.wait()
            relay = await follow(here, port, name)
            assert same(list(relay.store.read(GOAL)), history[GOAL])
            assert here.counted[0].object_bytes <= clean_bytes + UNDER_WAY

    frames, clean_bytes = asyncio.run(clean())
    for number in range(frames - 2):
        asyncio.run(check(number, clean_bytes))
