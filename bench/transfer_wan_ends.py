"""The three processes of the WAN part, `python -m bench.transfer_wan_ends FD ROLE`: publisher, relay, all receivers."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench.codec_versions import Bits, trained, weights
from bench.transfer_process import serve
from bench.transfer_replicas import PARAMETERS, TP, buckets_of, rank_layout
from rose.errors import TransferError
from rose.waits import WaitBoard
from rose_transfer.distribution import Receiver, Relay, WeightPublisher
from rose_transfer.transport.tcp import LOOPBACK, TcpClient, TcpServer

DEADLINE_S = 120.0
CHANGED = 0.01
WATCH_S = 15.0


class PublisherEnd:
    def __init__(self) -> None:
        self._opened = AsyncExitStack()
        self._folder = Path(tempfile.mkdtemp())
        self._rng = np.random.default_rng(4)
        self._weights: dict[str, Bits] = {}

    async def open(self, address: str, token: str, replicas: int) -> int:
        """Publish version 1; the port."""
        waits = WaitBoard()
        self._publisher = WeightPublisher(
            self._folder,
            waits=waits,
            receivers=[rank_layout(replica, rank) for replica in range(replicas) for rank in range(TP)],
            serve=[partial(TcpServer, token=token, waits=waits, host=address)],
        )
        await self._opened.enter_async_context(self._publisher)
        self._weights = {
            name: weights(int(np.prod(parameter.shape)), self._rng) for name, parameter in PARAMETERS.items()
        }
        await self._publish(1)
        server = self._publisher.servers[0]
        assert isinstance(server, TcpServer)
        return server.port

    async def publish(self, version: int) -> int:
        """1 % of the elements changed; bytes of the objects that lead there."""
        self._weights = {name: trained(bits, CHANGED, self._rng) for name, bits in self._weights.items()}
        return await self._publish(version)

    async def close(self) -> None:
        await self._opened.aclose()

    async def _publish(self, version: int) -> int:
        state = {
            name: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).reshape(PARAMETERS[name].shape)
            for name, bits in self._weights.items()
        }
        return (await self._publisher.publish(version, state)).encoded_bytes


class RelayEnd:
    def __init__(self) -> None:
        self._opened = AsyncExitStack()
        self._folder = Path(tempfile.mkdtemp())

    async def open(self, address: str, port: int, token: str) -> int:
        """The port on this side's loopback."""
        waits = WaitBoard()
        client = TcpClient(address, port, token=token, waits=waits)
        self._opened.push_async_callback(client.close)
        relay = Relay(
            client,
            self._folder,
            waits=waits,
            serve=[partial(TcpServer, token=token, waits=waits)],
            watch_s=WATCH_S,
        )
        await self._opened.enter_async_context(relay)
        self._running = asyncio.create_task(relay.run())
        server = relay.servers[0]
        assert isinstance(server, TcpServer)
        return server.port

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self._opened.aclose()


class ReceiversEnd:
    """The ranks of all replicas, each with a client and a folder of its own."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp())
        self._clients: list[TcpClient] = []
        self._receivers: list[Receiver] = []
        self._held: tuple[int | None, str | None] = (None, None)

    async def open(self, port: int, token: str, replicas: int) -> None:
        waits = WaitBoard()
        for replica in range(replicas):
            for rank in range(TP):
                client = TcpClient(LOOPBACK, port, token=token, waits=waits)
                folder = self._folder / f"{replica}-{rank}"
                wanted = partial(buckets_of, rank_layout(replica, rank))
                self._clients.append(client)
                self._receivers.append(Receiver(client, folder, waits=waits, wanted=wanted, watch_s=WATCH_S))

    async def fetch(self, version: int) -> list[int]:
        """Bytes that each rank has received for `version`, which all of them hold then."""
        fetched = await asyncio.gather(*(self._fetch(receiver, version) for receiver in self._receivers))
        fingerprints = {fingerprint for fingerprint, _ in fetched}
        if len(fingerprints) != 1:
            raise TransferError(f"ranks have different bits under version {version}")
        self._held = version, fingerprints.pop()
        return [received_bytes for _, received_bytes in fetched]

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        for receiver in self._receivers:
            receiver.close()

    async def _fetch(self, receiver: Receiver, version: int) -> tuple[str, int]:
        async with asyncio.timeout(DEADLINE_S):
            async for offer in receiver.subscribe():
                if offer.version == version:
                    break
        fetched = await receiver.fetch(*self._held, version, deadline_s=DEADLINE_S)
        await asyncio.to_thread(receiver.forget)
        return fetched.fingerprint, fetched.bytes_received


ROLES = {"publisher": PublisherEnd, "relay": RelayEnd, "receivers": ReceiversEnd}

if __name__ == "__main__":
    serve(ROLES[sys.argv[2]]())
