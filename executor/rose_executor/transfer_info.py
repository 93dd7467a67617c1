"""What a user of the weight transfer backend `rose` tells it, and the fetch that follows from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from rose.waits import WaitBoard
from rose_transfer.distribution import Fetched, Offer, Receiver
from rose_transfer.store import BucketId, Packing
from rose_transfer.transport.access import client_tls, host_and_port, read_token
from rose_transfer.transport.tcp import TcpClient

Needs = Callable[[Packing], tuple[BucketId, ...]]


@dataclass
class RoseInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where weights come from, and where they are put.

    `address` (HOST:PORT) is that of a publisher or a relay, `token_file` has its token; with `ca_file` (PEM) it is
    spoken to by TLS and trusted by that authority alone. `folder` is for this engine alone, as long as it runs.
    """

    address: str
    token_file: str
    folder: str
    ca_file: str | None = None


@dataclass
class RoseUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version to bring the engine to, and how long fetching it may take."""

    version: int
    timeout_s: float = 600.0


def check(info: RoseInitInfo) -> None:
    """Raises ConfigError if address, token or certificate cannot be used."""
    host_and_port(info.address)
    read_token(Path(info.token_file))
    if info.ca_file is not None:
        client_tls(Path(info.ca_file))


def fetch(info: RoseInitInfo, wanted: RoseUpdateInfo, held: Offer | None, folder: Path, needs: Needs) -> Fetched:
    """What leads from the version held to the wanted one, into `folder`. Raises as `Receiver.fetch`, and `check`.

    In an event loop of its own: the one of this thread, if there is one, is vLLM's.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, _fetch(info, wanted, held, folder, needs)).result()


async def _fetch(info: RoseInitInfo, wanted: RoseUpdateInfo, held: Offer | None, folder: Path, needs: Needs) -> Fetched:
    waits = WaitBoard()
    trusted = None if info.ca_file is None else client_tls(Path(info.ca_file))
    token = read_token(Path(info.token_file))
    client = TcpClient(*host_and_port(info.address), token=token, waits=waits, tls=trusted)
    try:
        receiver = Receiver(client, folder, waits=waits, wanted=needs)
        number, bits = (None, None) if held is None else (held.version, held.fingerprint)
        try:
            return await receiver.fetch(number, bits, wanted.version, deadline_s=wanted.timeout_s)
        finally:
            receiver.close()
    finally:
        await client.close()
