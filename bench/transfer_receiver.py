"""The engine's end of the link: holds the old version in memory, and brings it to the new one."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from bench import transfer_gloo, transfer_model
from bench.transfer_methods import GLOO, METHODS, OURS, key_of
from bench.transfer_process import serve
from rose.errors import TransferError
from rose.waits import WaitBoard
from rose_transfer.codec import bucket_hash, from_wire
from rose_transfer.store import manifest
from rose_transfer.store.manifest import BucketEntry
from rose_transfer.store.objects import object_key
from rose_transfer.transport.landing import MemoryLanding
from rose_transfer.transport.tcp import TcpClient

DEADLINE_S = 120.0
FETCHES = 3
"""Buckets under way at a time: one that is sent, one that is asked for, and one that is about to be complete."""


class Receiver:
    """Answers the bench; times are `time.monotonic()`, which all processes of a machine share."""

    def __init__(self, buckets: int) -> None:
        self._old = transfer_model.first_version(buckets)
        self._target = [bits.copy() for bits in self._old]
        self._old_hashes = [bucket_hash(bits) for bits in self._old]
        self._hashes = list(self._old_hashes)
        self._worker = ThreadPoolExecutor(1)
        self._busy_s = 0.0
        self._received: asyncio.Task[float] | None = None

    async def open(self, address: str, ports: tuple[int, int], token: str) -> None:
        waits = WaitBoard()
        self._client = TcpClient(address, ports[0], token=token, waits=waits)
        self._made_client = TcpClient(address, ports[1], token=token, waits=waits)

    async def join(self, address: str, port: int) -> None:
        await asyncio.to_thread(transfer_gloo.join, address, port, 1)

    async def receive(self, side: str, round_number: int, version: int) -> None:
        """Begin to wait for what will be sent."""
        self._busy_s = 0.0
        receiving: Awaitable[None]
        if side == OURS:
            receiving = self._follow(version)
        elif side == GLOO:
            receiving = asyncio.to_thread(transfer_gloo.broadcast, self._target)
        else:
            receiving = self._pull(side, round_number)
        self._received = asyncio.create_task(_ended(receiving))
        # It has asked, over links that are up, before the sender begins: as in a run, where it asked long ago.
        await asyncio.sleep(0.3)

    async def finish(self) -> dict[str, float]:
        assert self._received is not None, "nothing is being received"
        ended_s = await self._received
        return {"ended_s": ended_s, "busy_s": self._busy_s}

    async def hashes(self) -> list[int]:
        """Those of the bits that are here, read anew."""
        return [bucket_hash(bits) for bits in self._target]

    async def back(self) -> None:
        """To the old version."""
        for target, old in zip(self._target, self._old, strict=True):
            np.copyto(target, old)
        self._hashes = list(self._old_hashes)

    async def close(self) -> None:
        transfer_gloo.leave()
        await self._client.close()
        await self._made_client.close()

    async def _follow(self, version: int) -> None:
        """Ours: what is announced, by its manifest, every object held against its key."""
        newest = await self._client.watch(version, deadline_s=DEADLINE_S)
        if newest is None:
            raise TransferError(f"version {version} was not announced")
        landing = MemoryLanding()
        await self._client.fetch(newest.key, landing, deadline_s=DEADLINE_S)
        told = manifest.from_bytes(_held_to(newest.key, landing.bytes_view).tobytes())
        turns = asyncio.Semaphore(FETCHES)

        async def one(bucket: int, entry: BucketEntry) -> None:
            landing = MemoryLanding()
            async with turns:
                await self._client.fetch(entry.key, landing, size_bytes=entry.encoded_bytes, deadline_s=DEADLINE_S)
            await self._work(lambda: self._apply(bucket, entry, landing.bytes_view))

        async with asyncio.TaskGroup() as group:
            for bucket, entry in enumerate(told.buckets):
                group.create_task(one(bucket, entry))

    def _apply(self, bucket: int, entry: BucketEntry, data: memoryview) -> None:
        delta = from_wire(_held_to(entry.key, data))
        self._hashes[bucket] = delta.apply(self._target[bucket], self._hashes[bucket])
        if self._hashes[bucket] != entry.after:
            raise TransferError(f"bucket {bucket} has not the hash that the manifest says")

    async def _pull(self, side: str, round_number: int) -> None:
        """A method re-made: each bucket as soon as it is there."""
        turns = asyncio.Semaphore(FETCHES)
        decode = METHODS[side].decode

        async def one(bucket: int) -> None:
            target = self._target[bucket]
            landing = MemoryLanding() if decode else MemoryLanding(target.view(np.uint8).data)
            async with turns:
                await self._made_client.fetch(key_of(side, round_number, bucket), landing, deadline_s=DEADLINE_S)
            if decode:
                await self._work(lambda: decode(landing.bytes_view, target))

        async with asyncio.TaskGroup() as group:
            for bucket in range(len(self._target)):
                group.create_task(one(bucket))

    async def _work(self, work: Callable[[], None]) -> None:
        def timed() -> None:
            began_s = time.monotonic()
            work()
            self._busy_s += time.monotonic() - began_s

        await asyncio.get_running_loop().run_in_executor(self._worker, timed)


async def _ended(receiving: Awaitable[None]) -> float:
    await receiving
    return time.monotonic()


def _held_to(key: str, data: memoryview) -> memoryview:
    if object_key(data) != key:
        raise TransferError(f"object {key[:12]} has other bytes than its key says")
    return data


if __name__ == "__main__":
    serve(Receiver(int(sys.argv[2])))
