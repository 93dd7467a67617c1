"""The bytes of a delta: fixed, and read without believing them."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash
import zstandard

from bench.codec_fuzz import fuzz
from rose_transfer.codec import TILE_ELEMENTS, MalformedDelta, bucket_hash, encode, from_wire, overwrite
from rose_transfer.codec.kernels import Kernels
from rose_transfer.codec.native import native_kernels
from rose_transfer.codec.numpy_kernels import NumpyKernels
from rose_transfer.codec.streams import BYTE, DENSE, GAP8, GAP16, NIBBLE, WHOLE

ALL: tuple[Kernels, ...] = (NumpyKernels(), *native_kernels())
EVERY_KERNEL = pytest.mark.parametrize("kernels", ALL, ids=[kernels.name for kernels in ALL])

ELEMENTS = 100


def sealed(header: bytes, *parts: bytes) -> bytes:
    """A wire with the right checksum."""
    return b"".join((header, struct.pack("<Q", xxhash.xxh3_64_intdigest(header + b"".join(parts))), *parts))


def wire(
    *,
    shape: int = 1,
    index: bytes = b"\x05",
    values: bytes = b"\x02",
    escape: bytes = b"",
    index_bytes: int | None = None,
    escapes: int | None = None,
    check: int = 0,
    elements: int = ELEMENTS,
    lane: int = 2,
    mode: int = 0,
    layout: int = 1,
    filler: int = 0,
    before: int = 0,
    after: int | None = None,
) -> bytes:
    """A delta of one tile, written by hand; as it stands, element 5 moves up by one."""
    rows = struct.pack(
        "<IIIQ",
        shape,
        len(index) if index_bytes is None else index_bytes,
        len(escape) // lane if escapes is None else escapes,
        check,
    )
    parts = (rows, index, values, escape)
    after = (before + check) % 2**64 if after is None else after
    sizes = (len(index), len(values), len(escape), *map(len, parts))
    return sealed(
        struct.pack("<4sBBBBQQQ7II", b"RDLT", layout, lane, mode, 0, elements, before, after, *sizes, filler), *parts
    )


def shape(count: int, index: int, value: int) -> int:
    return count | index << 20 | value << 24


def test_the_layout_is_the_documented_one() -> None:
    old = np.zeros(ELEMENTS, dtype=np.uint16)
    new = old.copy()
    new[5] = 1
    check = (bucket_hash(new) - bucket_hash(old)) % 2**64
    assert encode(old, new, 77).to_wire() == wire(before=77, check=check)


@EVERY_KERNEL
def test_a_delta_written_by_hand_is_read(kernels: Kernels) -> None:
    assert from_wire(wire(), kernels=kernels).coded == 1


@EVERY_KERNEL
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"layout": 2}, "layout 2"),
        ({"lane": 3}, "a lane, a mode or a filler"),
        ({"mode": 2}, "a lane, a mode or a filler"),
        ({"filler": 1}, "a lane, a mode or a filler"),
        ({"elements": 0}, "a bucket of 0 elements"),
        ({"elements": 2**25 + 1}, "a bucket of 33554433 elements"),
        ({"elements": 2**63}, "a bucket of"),
        ({"mode": 1, "before": 1}, "an overwrite with a hash before"),
        ({"after": 1}, "do not lead from the hash before"),
        ({"index": b"", "shape": 0, "values": b"", "elements": TILE_ELEMENTS + 1}, "cannot be decompressed"),
        ({"shape": shape(101, GAP8, NIBBLE)}, "more elements coded than there are"),
        ({"shape": shape(1, 4, NIBBLE)}, "unknown code"),
        ({"shape": shape(1, GAP8, 3)}, "unknown code"),
        ({"index_bytes": 2}, "the index stream has 1 bytes"),
        ({"values": b"\x02\x02"}, "the value stream has 2 bytes"),
        ({"escapes": 1}, "the escape stream has 0 bytes"),
        ({"escapes": 2**31}, "the escape stream has 0 bytes"),
        ({"index": b"\x01\x01"}, "positions|size"),
        ({"index": b"", "index_bytes": 0}, "positions|size"),
        ({"index": b"\x64"}, "positions are not"),
        ({"index": b"\xff"}, "size"),
        ({"index": b"\xff\x00"}, "positions are not"),
        ({"index": b"\x05\xff"}, "size"),
        ({"shape": shape(1, GAP16, NIBBLE)}, "size"),
        ({"shape": shape(1, GAP16, NIBBLE), "index": b"\x64\x00"}, "positions are not"),
        ({"shape": shape(1, 2, NIBBLE), "index": bytes(12)}, "size"),
        ({"shape": shape(1, 2, NIBBLE), "index": bytes(13)}, "positions are not"),
        ({"shape": shape(1, 2, NIBBLE), "index": bytes(12) + b"\x10"}, "positions are not"),
        ({"shape": shape(1, DENSE, NIBBLE), "index": b""}, "size"),
        ({"shape": shape(100, DENSE, NIBBLE), "index": b"\x00", "values": bytes(50)}, "size"),
        ({"values": b"\x00"}, "no encoder writes"),
        ({"values": b"\x12"}, "no encoder writes"),
        ({"values": b"\x0f"}, "no encoder writes"),
        ({"escape": b"\x01\x00"}, "no encoder writes"),
        ({"values": b"\x0f", "escape": b"\x07\x00"}, "no encoder writes"),
        ({"shape": shape(1, GAP8, BYTE), "values": b"\xff", "escape": b"\x7f\x00"}, "no encoder writes"),
        ({"shape": shape(1, GAP8, WHOLE), "values": b"\x00\x00"}, "no encoder writes"),
        ({"shape": shape(1, GAP8, WHOLE), "values": b"\x01\x00", "escape": b"\x00\x01"}, "no encoder writes"),
        ({"mode": 1}, "codes do not fit"),
        ({"mode": 1, "shape": shape(1, GAP8, WHOLE), "values": b"\x01\x00", "check": 5}, "check does not hold"),
    ],
)
def test_what_is_refused(kernels: Kernels, damage: dict[str, int | bytes], words: str) -> None:
    with pytest.raises(MalformedDelta, match=words):
        from_wire(wire(**damage), kernels=kernels)  # type: ignore[arg-type]


@EVERY_KERNEL
@pytest.mark.parametrize(
    "same",
    [
        {"index": b"\x63"},
        {"shape": shape(1, GAP16, NIBBLE), "index": b"\x63\x00"},
        {"shape": shape(1, 2, NIBBLE), "index": bytes(12) + b"\x08"},
        {"values": b"\x0f", "escape": b"\x08\x00"},
        {"shape": shape(1, GAP8, BYTE), "values": b"\xff", "escape": b"\x80\x00"},
        {"shape": shape(100, DENSE, NIBBLE), "index": b"", "values": bytes(50)},
    ],
)
def test_what_is_just_right_is_read(kernels: Kernels, same: dict[str, int | bytes]) -> None:
    """The neighbours of what is refused above."""
    from_wire(wire(**same), kernels=kernels)  # type: ignore[arg-type]


def some_wire(*, compress: bool) -> bytes:
    rng = np.random.default_rng(0)
    old = rng.integers(0, 65536, 2000, dtype=np.uint16)
    new = old.copy()
    new[rng.integers(0, old.size, 300)] += np.uint16(1)
    return encode(old, new, bucket_hash(old)).to_wire(compress=compress)


@pytest.mark.parametrize("compress", [False, True])
def test_no_byte_can_be_lost_or_changed(compress: bool) -> None:
    sound = some_wire(compress=compress)
    from_wire(sound)
    for size in range(len(sound)):
        with pytest.raises(MalformedDelta):
            from_wire(sound[:size])
    with pytest.raises(MalformedDelta):
        from_wire(sound + b"\x00")
    for at in range(len(sound)):
        damaged = bytearray(sound)
        damaged[at] ^= 0x10
        with pytest.raises(MalformedDelta):
            from_wire(damaged)


def test_compression_is_left_out_where_it_does_not_pay() -> None:
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 65536, 5000, dtype=np.uint16)
    whole = overwrite(noise, bucket_hash(noise))
    assert len(whole.to_wire(compress=True)) <= len(whole.to_wire())
    target = np.zeros_like(noise)
    from_wire(whole.to_wire(compress=True)).apply(target, 0)
    assert np.array_equal(target, noise)


def test_a_stream_that_would_grow_is_never_expanded() -> None:
    """A small frame of 16 MiB, announced as what it is, as more and as less."""
    bomb = zstandard.ZstdCompressor().compress(bytes(2**24))
    rows = struct.pack("<IIIQ", 1, 1, 0, 0)
    for told in (2**24, 2**32 - 1):
        sizes = (told, 1, 0, len(rows), len(bomb), 1, 0)
        header = struct.pack("<4sBBBBQQQ7II", b"RDLT", 1, 2, 0, 0, ELEMENTS, 0, 0, *sizes, 0)
        with pytest.raises(MalformedDelta, match=f"streams of {told + 1} bytes"):
            from_wire(sealed(header, rows, bomb, b"\x02"))
    sizes = (8000, 1, 0, len(rows), len(bomb), 1, 0)
    header = struct.pack("<4sBBBBQQQ7II", b"RDLT", 1, 2, 0, 0, ELEMENTS, 0, 0, *sizes, 0)
    with pytest.raises(MalformedDelta, match="a compressed stream holds 16777216 bytes"):
        from_wire(sealed(header, rows, bomb, b"\x02"))


@pytest.mark.parametrize("kernels", native_kernels(), ids=lambda kernels: kernels.name)
def test_random_damage_is_refused_or_harmless(kernels: Kernels) -> None:
    verdicts = fuzz(3000, seed=11, kernels=kernels)
    assert verdicts["accepted"] > 20
    assert len(verdicts) > 15
