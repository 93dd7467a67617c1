"""`python tests/transfer/soak_main.py SECONDS`: a publisher, a relay and receivers for long, on links that break.

Versions are published one after another; all links are cut every few seconds, the relay and one of the receivers are
started anew now and then. Every version that arrives is compared, bit by bit. Prints a sample of this process's memory,
descriptors and threads every ten seconds, as JSON lines.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import psutil
from distribution_tools import Engine, Site, free_port, offered, site
from frame_proxy import FrameProxy
from store_tools import Bits, first_weights, moved

from rose.errors import DeadlineExceeded, TransferError
from rose_transfer.distribution import Receiver
from rose_transfer.distribution.outlet import Outlet
from rose_transfer.layout.layout import Parameter
from rose_transfer.store import Store
from rose_transfer.store.packing import pack_whole

PACKING = pack_whole({f"layer.{n}": Parameter((512, 256), "bfloat16") for n in range(8)}, bucket_bytes=2**18)
RECEIVERS = 3
KEPT = 64
"""Versions whose bits are remembered here to compare with."""
SAMPLE_S = 10.0


@dataclass(frozen=True)
class Sample:
    """At `seconds` from the start: resident memory, open descriptors, threads; versions published and applied, cuts."""

    seconds: float
    resident_bytes: int
    descriptors: int
    threads: int
    published: int
    applied: int
    cuts: int
    restarts: int


class Soak:
    """The world of the soak."""

    def __init__(self, folder: Path, seconds: float, seed: int) -> None:
        self._folder = folder
        self._until_s = time.monotonic() + seconds
        self._random = Random(seed)
        self._history: dict[int, list[Bits]] = {1: first_weights(seed, PACKING)}
        self._broken = False
        self._applied = 0
        self._cuts = 0
        self._restarts = 0
        self._engines = [Engine() for _ in range(RECEIVERS)]

    async def run(self, sampled: Callable[[Sample], None]) -> None:
        """Raises AssertionError for a wrong bit, and whatever a part raises that it should not."""
        store = Store(self._folder / "store", compress=True)
        store.publish(1, PACKING, self._history[1])
        relay_port = free_port()
        async with (
            site(self._folder) as here,
            offered(here, store) as (outlet, port),
            FrameProxy(port, self._pass) as far,
            FrameProxy(relay_port, self._pass) as near,
        ):
            async with asyncio.TaskGroup() as group:
                group.create_task(self._publish(store, outlet))
                group.create_task(self._relay(here, far.port, relay_port))
                group.create_task(self._break_links())
                for number in range(RECEIVERS):
                    upstream = port if number == 0 else near.port
                    group.create_task(self._receive(here, upstream, number, restarts=number == 1))
                group.create_task(self._sample(here, sampled))
            await here.close()
        store.close()

    @property
    def _over(self) -> bool:
        return time.monotonic() >= self._until_s

    def _pass(self, _: int, frame: bytes) -> bytes | None:
        return None if self._broken else frame

    async def _publish(self, store: Store, outlet: Outlet) -> None:
        version = 1
        while not self._over:
            version += 1
            self._history[version] = moved(self._history[version - 1], 0.02, version)
            self._history.pop(version - KEPT, None)
            await asyncio.to_thread(store.publish, version, PACKING, self._history[version], version - 1)
            outlet.announce_newest()
            await asyncio.to_thread(store.collect, 4)
            await asyncio.sleep(0.2)

    async def _relay(self, here: Site, upstream: int, port: int) -> None:
        while not self._over:
            async with here.relay(upstream, port=port):
                await self._while(self._random.uniform(20, 40))
            self._restarts += 1

    async def _break_links(self) -> None:
        while not self._over:
            await self._while(self._random.uniform(1, 5))
            self._broken = True
            await asyncio.sleep(0.3)
            self._broken = False
            self._cuts += 1

    async def _receive(self, here: Site, upstream: int, number: int, *, restarts: bool) -> None:
        engine = self._engines[number]
        while not self._over:
            client = here.client(upstream)
            receiver = Receiver(client, self._folder / f"engine-{number}", waits=here.waits, watch_s=2.0)
            following = asyncio.create_task(self._follow(receiver, engine))
            await asyncio.wait([following], timeout=self._left(15.0 if restarts else 1e9))
            following.cancel()
            await asyncio.wait([following])
            if not following.cancelled():
                following.result()
            receiver.close()
            await here.end(client)
            self._restarts += restarts

    async def _follow(self, receiver: Receiver, engine: Engine) -> None:
        async for offer in receiver.subscribe():
            try:
                await engine.move(receiver, offer.version, 20.0)
            except (TransferError, DeadlineExceeded):
                # Retired meanwhile, or away for too long: the newest comes next.
                continue
            expected = self._history.get(offer.version)
            assert expected is None or engine.has(expected)
            self._applied += 1

    async def _sample(self, here: Site, sampled: Callable[[Sample], None]) -> None:
        began_s, process = time.monotonic(), psutil.Process()
        while not self._over:
            await self._while(SAMPLE_S)
            for counted in here.counted:
                counted.made.clear()
            gc.collect()
            sampled(
                Sample(
                    seconds=round(time.monotonic() - began_s, 1),
                    resident_bytes=process.memory_info().rss,
                    descriptors=process.num_fds(),
                    threads=process.num_threads(),
                    published=max(self._history),
                    applied=self._applied,
                    cuts=self._cuts,
                    restarts=self._restarts,
                )
            )

    async def _while(self, seconds: float) -> None:
        await asyncio.sleep(self._left(seconds))

    def _left(self, seconds: float) -> float:
        return max(0.0, min(seconds, self._until_s - time.monotonic()))


def soak(seconds: float, sampled: Callable[[Sample], None], seed: int = 1) -> None:
    """Soak for so long; see `Soak.run`."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rose-soak-") as folder:
        asyncio.run(Soak(Path(folder), seconds, seed).run(sampled))


if __name__ == "__main__":
    soak(float(sys.argv[1]), lambda sample: print(json.dumps(asdict(sample)), flush=True))
