"""What a user of the weight transfer backend `rose` tells it, and the fetch that follows from it.

It comes as JSON, or from whatever a program has read: what is of another kind is refused before anybody is asked.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from rose.address import host_and_port
from rose.certificates import read_certificates
from rose.errors import ConfigError, TransferError
from rose.version_number import version_number
from rose.waits import WaitBoard
from rose_transfer.distribution import Fetched, Offer, Receiver
from rose_transfer.store import BucketId, Packing
from rose_transfer.transport.access import read_token
from rose_transfer.transport.tcp import TcpClient

Needs = Callable[[Packing], tuple[BucketId, ...]]


@dataclass
class RoseInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where weights come from, and where they are put.

    `address` (HOST:PORT) is that of a publisher or a relay, `token_file` has its token. With `certificates`, a folder
    of them (see `rose.tls_identity`), it is spoken to by TLS both ways. `folder` is for this engine alone, as long as
    it runs.

    Raises ConfigError if one of them is no text, or no path.
    """

    address: str
    token_file: str
    folder: str
    certificates: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.address, str):
            raise ConfigError(f"address={self.address!r} is no address", expected="HOST:PORT")
        self.token_file = _path("token_file", self.token_file)
        self.folder = _path("folder", self.folder)
        self.certificates = None if self.certificates is None else _path("certificates", self.certificates)


@dataclass
class RoseUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version to bring the engine to, and how long fetching it may take.

    Raises TransferError if that is no number of a version, or no time that ends.
    """

    version: int
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        self.version = version_number(self.version)
        timeout_s: object = self.timeout_s
        is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
        if not is_number or not 0 < self.timeout_s <= sys.float_info.max:
            raise TransferError(
                f"timeout_s={timeout_s!r} is no time to fetch in", expected="seconds, above 0, that end"
            )


def check(info: RoseInitInfo) -> None:
    """Raises ConfigError if address, token or certificate cannot be used."""
    host_and_port(info.address)
    read_token(Path(info.token_file))
    read_certificates(info.certificates or "")


def fetch(info: RoseInitInfo, wanted: RoseUpdateInfo, held: Offer | None, folder: Path, needs: Needs) -> Fetched:
    """What leads from the version held to the wanted one, into `folder`. Raises as `Receiver.fetch`, and `check`.

    In an event loop of its own: the one of this thread, if there is one, is vLLM's.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, _fetch(info, wanted, held, folder, needs)).result()


async def _fetch(info: RoseInitInfo, wanted: RoseUpdateInfo, held: Offer | None, folder: Path, needs: Needs) -> Fetched:
    waits = WaitBoard()
    certificates = read_certificates(info.certificates or "")
    tls = None if certificates is None else certificates.client_context
    token = read_token(Path(info.token_file))
    client = TcpClient(*host_and_port(info.address), token=token, waits=waits, tls=tls)
    try:
        receiver = Receiver(client, folder, waits=waits, wanted=needs)
        number, bits = (None, None) if held is None else (held.version, held.fingerprint)
        try:
            return await receiver.fetch(number, bits, wanted.version, deadline_s=wanted.timeout_s)
        finally:
            receiver.close()
    finally:
        await client.close()


def _path(name: str, given: object) -> str:
    path = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(path, str) or not path or "\0" in path:
        raise ConfigError(f"{name}={given!r} is no path", expected="a path, as text")
    return path
