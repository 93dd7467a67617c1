"""The trainer's end of the link: has the old and the new version in memory, and sends the difference."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import transfer_gloo, transfer_model
from bench.codec_versions import Bits
from bench.transfer_methods import GLOO, METHODS, OURS, MadeObjects, key_of
from bench.transfer_process import serve
from rose.waits import WaitBoard
from rose_transfer.codec import bucket_hash
from rose_transfer.store.store import Store
from rose_transfer.transport.interface import Announcement
from rose_transfer.transport.tcp import TcpServer


class Sender:
    """Answers the bench; times are `time.monotonic()`, which all processes of a machine share."""

    def __init__(self, buckets: int) -> None:
        self._store = Store(Path(tempfile.mkdtemp()), compress=True)
        self._packing = transfer_model.packing(buckets)
        self._old: list[Bits] = []
        self._new: list[Bits] = []
        self._made = MadeObjects()
        self._version = 1

    async def open(self, address: str, token: str) -> tuple[int, int]:
        """Ports of the store's server and of that of the methods re-made."""
        self._old = transfer_model.first_version(len(self._packing.buckets))
        await asyncio.to_thread(self._store.publish, self._version, self._packing, self._old)
        waits = WaitBoard()
        self._server = TcpServer(self._store.objects, token=token, waits=waits, host=address)
        self._made_server = TcpServer(self._made, token=token, waits=waits, host=address)
        await self._server.start()
        await self._made_server.start()
        return self._server.port, self._made_server.port

    async def join(self, address: str, port: int) -> None:
        await asyncio.to_thread(transfer_gloo.join, address, port, 0)

    async def change(self, share: float, seed: int) -> dict[str, Any]:
        """Make the new version, of which `hashes` are those of its buckets."""
        self._new = []
        self._new = transfer_model.next_version(self._old, share, seed)
        changed = sum(int((new != old).sum()) for new, old in zip(self._new, self._old, strict=True))
        return {"changed": changed, "hashes": [bucket_hash(bits) for bits in self._new]}

    async def expect(self, side: str, round_number: int) -> int:
        """Called before the receiver gets ready; the version that it is to wait for."""
        if side in METHODS:
            self._made.expect([key_of(side, round_number, bucket) for bucket in range(len(self._packing.buckets))])
        return self._version + 1

    async def send(self, side: str, round_number: int) -> dict[str, float]:
        """Send the new version; returns once this end has nothing more to make."""
        began_s = time.monotonic()
        sent_bytes = 0
        if side == OURS:
            sent_bytes = await self._publish(self._new)
        elif side == GLOO:
            await asyncio.to_thread(transfer_gloo.broadcast, self._new)
        else:
            loop = asyncio.get_running_loop()
            sent_bytes = await asyncio.to_thread(self._make, side, round_number, loop)
        return {"began_s": began_s, "busy_s": time.monotonic() - began_s, "sent_bytes": sent_bytes}

    async def back(self) -> None:
        """The store goes on from the old version again, if it has got another."""
        if self._version % 2 == 0:
            await self._publish(self._old, announced=False)

    async def close(self) -> None:
        transfer_gloo.leave()
        await self._server.close()
        await self._made_server.close()
        self._store.close()

    async def _publish(self, buckets: list[Bits], announced: bool = True) -> int:
        version = self._version + 1
        published = await asyncio.to_thread(self._store.publish, version, self._packing, buckets, self._version)
        if announced:
            self._server.announce(Announcement(version, published.key))
        self._version = version
        return published.encoded_bytes

    def _make(self, side: str, round_number: int, loop: asyncio.AbstractEventLoop) -> int:
        sent_bytes = 0
        for bucket, (old, new) in enumerate(zip(self._old, self._new, strict=True)):
            data = METHODS[side].encode(old, new)
            loop.call_soon_threadsafe(self._made.put, key_of(side, round_number, bucket), data)
            sent_bytes += len(data)
        return sent_bytes


if __name__ == "__main__":
    serve(Sender(int(sys.argv[2])))
