"""A relay goes on, and offers what it has, whatever fails behind a version or is announced in place of one."""

from __future__ import annotations

import asyncio
from pathlib import Path

from distribution_tools import free_port, line, offered, port_of, site, until
from store_tools import PACKING, moved, same

from rose_transfer.distribution import Relay
from rose_transfer.store import Objects
from rose_transfer.transport.interface import Announcement
from rose_transfer.transport.tcp import TcpServer


async def has(relay: Relay, version: int) -> None:
    def offers_it() -> bool:
        (server,) = relay.servers
        assert isinstance(server, TcpServer)
        return server.newest is not None and server.newest.version == version

    await until(offers_it)


def test_a_version_is_offered_although_what_arrived_cannot_be_tidied_away(memory_path: Path) -> None:
    # A folder where a file belongs: to remove it fails every time.
    (memory_path / "relay" / "incoming" / "arriving" / ("0" * 64)).mkdir(parents=True)

    async def check() -> None:
        store, history = line(memory_path / "store", 1)
        async with site(memory_path) as here, offered(here, store) as (outlet, port), here.relay(port) as relay:
            await has(relay, 1)
            history[2] = moved(history[1], 0.02, 2)
            store.publish(2, PACKING, history[2], base=1)
            outlet.announce_newest()
            await has(relay, 2)
            assert same(list(relay.store.read(2)), history[2])
        store.close()

    asyncio.run(check())


def test_what_is_announced_and_is_no_version_is_passed_over(memory_path: Path) -> None:
    async def check() -> None:
        port = free_port()
        store, history = line(memory_path / "store", 1)
        (memory_path / "others").mkdir()
        async with site(memory_path) as here:
            other = here.serve(port)(Objects(memory_path / "others"))
            await other.start()
            other.announce(Announcement(7, "another-kind-of-server"))
            async with here.relay(port) as relay:
                asked = "version 8"
                await until(lambda: any(asked in wait.what for wait in here.waits.snapshot()))
                assert relay.store.versions() == ()
                await other.close()
                async with offered(here, store, port=port) as (outlet, _):
                    assert port_of(outlet) == port
                    await has(relay, 1)
                    assert same(list(relay.store.read(1)), history[1])
        store.close()

    asyncio.run(check())
