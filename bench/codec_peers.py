"""What others send for a sparse change, made again as they describe it, in the language they use: NumPy and zstd.

Each is a pair of functions: `encode(old, new)` gives the bytes, `decode(data, target)` changes the old bits in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import zstandard

from bench.codec_versions import Bits

Data = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Peer:
    """`name` is that of its figures; `method` says what it is and who does it."""

    name: str
    method: str
    encode: Callable[[Bits, Bits], bytes]
    decode: Callable[[Data, Bits], None]


def _encode_index32(old: Bits, new: Bits) -> bytes:
    at = np.flatnonzero(old != new)
    return at.astype(np.uint32).tobytes() + new[at].tobytes()


def _decode_index32(data: Data, target: Bits) -> None:
    count = len(data) // 6
    target[np.frombuffer(data, np.uint32, count)] = np.frombuffer(data, np.uint16, count, offset=4 * count)


def _encode_gap_xor(old: Bits, new: Bits) -> bytes:
    at = np.flatnonzero(old != new)
    gaps = np.diff(at, prepend=-1) - 1
    width = 4 if gaps.size and int(gaps.max()) > 0xFFFF else 2
    plain = bytes([width]) + gaps.astype(f"<u{width}").tobytes() + (new[at] ^ old[at]).tobytes()
    return zstandard.ZstdCompressor(level=1).compress(plain)


def _decode_gap_xor(data: Data, target: Bits) -> None:
    whole = zstandard.ZstdDecompressor().decompress(data)
    width = whole[0]
    count = (len(whole) - 1) // (width + 2)
    at = np.cumsum(np.frombuffer(whole, f"<u{width}", count, offset=1).astype(np.int64) + 1) - 1
    target[at] ^= np.frombuffer(whole, np.uint16, count, offset=1 + width * count)


def _encode_xor(old: Bits, new: Bits) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(np.bitwise_xor(old, new).data)


def _decode_xor(data: Data, target: Bits) -> None:
    target ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(data), np.uint16)


PEERS = (
    Peer("index32", "32-bit index and new bits (verl, vLLM, TRL)", _encode_index32, _decode_index32),
    Peer("gap_xor_zstd", "gaps of 16 (or 32) bits and XOR, zstd (NeMo-RL, PULSE)", _encode_gap_xor, _decode_gap_xor),
    Peer("xor_zstd", "XOR of everything, zstd (slime, SkyRL)", _encode_xor, _decode_xor),
)
