"""Processes that tests kill: a publisher, a relay, a receiver, each on the weights of `store_tools`.

They are forked, since to import everything anew takes longer than all that they do.
"""

from __future__ import annotations

import asyncio
import os
import signal
import traceback
from pathlib import Path

from distribution_tools import PATIENT, WATCH_S, Engine
from store_tools import PACKING, Bits, first_weights, moved
from transport_tools import QUICK_CLIENT, QUICK_SERVER, TOKEN

from rose.waits import WaitBoard
from rose_transfer.distribution import MakeServer, Receiver, Relay
from rose_transfer.distribution.outlet import Outlet
from rose_transfer.store import Store
from rose_transfer.transport.interface import ObjectSource
from rose_transfer.transport.tcp import TcpClient, TcpServer

GOAL = 4
CHANGES = ("rename", "link", "unlink", "truncate", "ftruncate", "fsync", "write", "mkdir")


OUT = 1
_write = os.write


def say(line: str) -> None:
    _write(OUT, f"{line}\n".encode())


def weights() -> dict[int, list[Bits]]:
    """What the versions hold, in every process."""
    history = {1: first_weights(1)}
    for version in range(2, GOAL + 1):
        history[version] = moved(history[version - 1], 0.02, version)
    return history


def die_at(change: int) -> None:
    """Kill this process before that change to the disk."""
    count = 0

    def watched(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: object, **options: object) -> object:
            nonlocal count
            count += 1
            if count == change:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        setattr(os, name, call)

    for name in CHANGES:
        watched(name)


def serve(port: int) -> MakeServer:
    def make(source: ObjectSource) -> TcpServer:
        return TcpServer(source, token=TOKEN, waits=WaitBoard(), port=port, limits=QUICK_SERVER)

    return make


def client(port: int) -> TcpClient:
    return TcpClient("127.0.0.1", port, token=TOKEN, waits=WaitBoard(), limits=QUICK_CLIENT)


async def publisher(folder: Path, port: int) -> None:
    store = Store(folder, compress=True)
    outlet = Outlet(store, [serve(port)])
    await outlet.open()
    say(f"offers {store.newest}")
    history = weights()
    for version in range((store.newest or 0) + 1, GOAL + 1):
        store.publish(version, PACKING, history[version], base=store.newest)
        outlet.announce_newest()
        store.collect(2)
        say(f"offers {version}")
        await asyncio.sleep(0.02)
    await asyncio.sleep(PATIENT)


async def relay(folder: Path, port: int) -> None:
    made = Relay(
        client(port),
        folder,
        waits=WaitBoard(),
        serve=[serve(port + 1)],
        on_version=lambda relayed: say(f"offers {relayed.version}"),
        watch_s=WATCH_S,
    )
    async with made:
        say(f"offers {made.store.newest}")
        async with asyncio.timeout(PATIENT):
            await made.run()


async def receiver(folder: Path, port: int) -> None:
    source = client(port)
    made, engine = Receiver(source, folder, waits=WaitBoard(), watch_s=WATCH_S), Engine()
    async for offer in made.subscribe():
        if offer.version == GOAL:
            break
    fetched = await made.fetch(None, None, GOAL, deadline_s=PATIENT)
    engine.apply(fetched)
    assert engine.has(weights()[GOAL])
    say(f"has {engine.version} {fetched.bytes_received}")
    made.forget()
    await source.close()


ROLES = {"publisher": publisher, "relay": relay, "receiver": receiver}


def start(role: str, folder: Path, port: int, change: int) -> tuple[int, int]:
    """Process id, and the descriptor to read what it says from. With `change` it dies before that change."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    status = 1
    try:
        os.dup2(writing, OUT)
        if change:
            die_at(change)
        asyncio.run(ROLES[role](folder, port))
        status = 0
    except BaseException:  # noqa: BLE001 - the forked process ends here, whatever it was
        traceback.print_exc()
    finally:
        os._exit(status)
    return 0, 0
