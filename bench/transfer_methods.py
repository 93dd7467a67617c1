"""The sides of the transfer bench: how a changed bucket is sent by each.

Ours takes its own way, through store and manifest. The others are re-made on our transport: made bucket by bucket in
one thread while those before are being sent, and applied in one thread while those behind are being received. They
trust what the transport's checksums say, keep nothing on disk and prove nothing about the bits that they change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.codec_peers import PEERS, Data
from bench.codec_versions import Bits
from rose_transfer.transport.interface import ObjectMissing, ReadableObject

OURS = "rose"
DENSE = "dense"
GLOO = "gloo"


@dataclass(frozen=True, slots=True)
class Method:
    """`encode(old, new)` gives what is sent for a bucket; `decode(data, target)` changes the old bits in place.

    Without `decode`, what is sent lands in the target as it is.
    """

    encode: Callable[[Bits, Bits], Data]
    decode: Callable[[Data, Bits], None] | None


def _whole(old: Bits, new: Bits) -> memoryview:
    return new.view(np.uint8).data


METHODS = {DENSE: Method(_whole, None)} | {peer.name: Method(peer.encode, peer.decode) for peer in PEERS}
"""Everything that is re-made on our transport."""

ONCE = (DENSE, GLOO)
"""Those that send the same, however much has changed."""

PER_DENSITY = (OURS, *(peer.name for peer in PEERS))


def key_of(side: str, round_number: int, bucket: int) -> str:
    return f"{side}-{round_number}-{bucket}"


class MadeObjects:
    """A source of objects that are being made: who asks for one of those expected waits until it is there."""

    def __init__(self) -> None:
        self._made: dict[str, Data] = {}
        self._expected: dict[str, asyncio.Event] = {}

    def expect(self, keys: list[str]) -> None:
        """From now on these are waited for, and those before forgotten."""
        self._made = {}
        self._expected = {key: asyncio.Event() for key in keys}

    def put(self, key: str, data: Data) -> None:
        """Called in the server's loop."""
        self._made[key] = data
        self._expected[key].set()

    async def prepare(self, key: str) -> None:
        """The server sees to it that this does not last for ever."""
        if key not in self._expected:
            raise ObjectMissing(f"nobody makes {key}")
        await self._expected[key].wait()

    def has(self, key: str) -> bool:
        return key in self._made

    def open(self, key: str) -> ReadableObject:
        return MadeObject(self._made[key])


@dataclass(frozen=True, slots=True)
class MadeObject:
    data: Data

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def read_at(self, offset: int, length: int) -> memoryview:
        return memoryview(self.data)[offset : offset + length]

    def close(self) -> None:
        pass
