"""A delta as bytes, for the network and for disks.

All integers are little-endian.

    offset  bytes
     0       4    magic, "RDLT"
     4       1    layout, 1
     5       1    lane, 2 or 4: bytes per element
     6       1    mode, 0 steps or 1 overwrite
     7       1    0
     8       8    elements of the bucket
    16       8    hash of the bucket before; 0 in an overwrite, which does not ask
    24       8    hash of the bucket after
    32      12    bytes of the index, value and escape stream, 4 each
    44      16    bytes that the rows and the three streams take here, 4 each
    60       4    0
    64       8    XXH3-64 of the 64 bytes before and of everything behind this field
    72            rows (one array each of shape, index_bytes, escapes and check), index, values, escapes

Each of the four parts is a zstd frame if that is shorter, else it stands as it is: its size here tells which.

The reader believes nothing: sizes are bounded before anything is allocated, the checksum and the rows are compared,
and every tile is unpacked once, so that what `from_wire` returns can be applied without a further look.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from rose_transfer.codec.streams import (
    BUCKET_BYTES_MAX,
    LANES,
    MalformedDelta,
    Mode,
    Streams,
    check_rows,
    streams_bytes_max,
    tile_count,
)

LAYOUT = 1
HEADER = struct.Struct("<4sBBBBQQQ3I4I4x")
CHECKSUM = struct.Struct("<Q")
BODY_AT = HEADER.size + CHECKSUM.size
_MAGIC = b"RDLT"
_MODES: tuple[Mode, ...] = ("steps", "overwrite")
_ROW = (("shape", "<u4"), ("index_bytes", "<u4"), ("escapes", "<u4"), ("check", "<u8"))
_ROW_BYTES = 20
# There is hardly anything to match in these streams: looking less for it takes half the time and leaves less behind.
_COMPRESSION = zstandard.ZstdCompressionParameters.from_level(1, hash_log=6, min_match=7)


class _Zstd(threading.local):
    """Each thread's contexts: to set up new ones for every delta takes a tenth of the time of compressing it."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_COMPRESSION)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def pack(lane: int, elements: int, mode: Mode, before: int, after: int, streams: Streams, *, compress: bool) -> bytes:
    """The bytes described above; `compress` (zstd, level 1) pays on a link slower than about 5 Gb/s per core."""
    rows = b"".join(getattr(streams, name).astype(kind, copy=False).tobytes() for name, kind in _ROW)
    parts = [memoryview(rows), streams.index.data, streams.values.data, streams.escape.data]
    if compress:
        parts = [min(part, memoryview(_zstd.compressor.compress(part)), key=len) for part in parts]
    sizes = (streams.index.size, streams.values.size, streams.escape.size, *map(len, parts))
    header = HEADER.pack(_MAGIC, LAYOUT, lane, _MODES.index(mode), 0, elements, before, after, *sizes)
    digest = xxhash.xxh3_64(header)
    for part in parts:
        digest.update(part)
    return b"".join((header, CHECKSUM.pack(digest.intdigest()), *parts))


def unpack(data: memoryview) -> tuple[int, int, Mode, int, int, Streams]:
    """(lane, elements, mode, before, after, streams) of the bytes described above; the tiles are not yet unpacked.

    Raises MalformedDelta.
    """
    if len(data) < BODY_AT:
        raise MalformedDelta(f"{len(data)} bytes are no delta", expected=f"at least {BODY_AT}")
    magic, layout, lane, mode, zero, elements, before, after, *sizes = HEADER.unpack_from(data)
    if (magic, layout) != (_MAGIC, LAYOUT):
        raise MalformedDelta(
            f"these bytes begin with {magic!r}, layout {layout}", expected=f"{_MAGIC!r}, layout {LAYOUT}"
        )
    if lane not in LANES or mode >= len(_MODES) or zero or any(data[HEADER.size - 4 : HEADER.size]):
        raise MalformedDelta("the header holds a lane, a mode or a filler that does not exist")
    if not 0 < elements <= BUCKET_BYTES_MAX // lane:
        raise MalformedDelta(f"a bucket of {elements} elements", expected=f"1 to {BUCKET_BYTES_MAX // lane}")
    if BODY_AT + sum(sizes[3:]) != len(data):
        raise MalformedDelta(f"{len(data)} bytes", expected=f"{BODY_AT + sum(sizes[3:])}, as the header says")
    if sum(sizes[:3]) > streams_bytes_max(elements, lane):
        raise MalformedDelta(f"streams of {sum(sizes[:3])} bytes", expected="no more than the bucket itself")
    digest = xxhash.xxh3_64(data[: HEADER.size])
    digest.update(data[BODY_AT:])
    if CHECKSUM.unpack_from(data, HEADER.size) != (digest.intdigest(),):
        raise MalformedDelta("the checksum does not match", to_do="fetch the delta again")
    if mode == _MODES.index("overwrite") and before:
        raise MalformedDelta("an overwrite with a hash before", expected="0")
    streams = _read_streams(data[BODY_AT:], tile_count(elements), sizes)
    check_rows(streams, elements, lane)
    return lane, elements, _MODES[mode], before, after, streams


def _read_streams(body: memoryview, tiles: int, sizes: list[int]) -> Streams:
    parts: list[NDArray[np.uint8]] = []
    at = 0
    for whole, here in zip((tiles * _ROW_BYTES, *sizes[:3]), sizes[3:], strict=True):
        parts.append(_expand(body[at : at + here], whole))
        at += here
    columns: dict[str, NDArray[Any]] = {}
    at = 0
    for name, kind in _ROW:
        size = tiles * np.dtype(kind).itemsize
        columns[name] = np.frombuffer(parts[0][at : at + size].tobytes(), dtype=kind)
        at += size
    return Streams(**columns, index=parts[1], values=parts[2], escape=parts[3])


def _expand(part: memoryview, size: int) -> NDArray[np.uint8]:
    """`part` itself, or what its frame holds: exactly `size` bytes, and no more is ever allocated."""
    if len(part) == size:
        return np.frombuffer(part, dtype=np.uint8)
    if len(part) > size:
        raise MalformedDelta(f"a stream of {size} bytes takes {len(part)}")
    try:
        if (told := zstandard.frame_content_size(part)) != size:
            raise MalformedDelta(f"a compressed stream holds {told} bytes", expected=f"{size}, as the header says")
        whole = _zstd.decompressor.decompress(part, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise MalformedDelta(f"a stream cannot be decompressed: {error}") from error
    return np.frombuffer(whole, dtype=np.uint8)
