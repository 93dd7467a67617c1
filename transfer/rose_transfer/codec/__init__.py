"""Bit-exact deltas between two versions of a bucket of weights. `delta` is the way in; `streams` says what they are."""

from rose_transfer.codec.delta import (
    Delta,
    bucket_hash,
    compose,
    encode,
    from_wire,
    overwrite,
    overwrite_changed,
    tile_hashes,
)
from rose_transfer.codec.streams import BUCKET_BYTES_MAX, TILE_ELEMENTS, MalformedDelta, WrongBase

__all__ = [
    "BUCKET_BYTES_MAX",
    "TILE_ELEMENTS",
    "Delta",
    "MalformedDelta",
    "WrongBase",
    "bucket_hash",
    "compose",
    "encode",
    "from_wire",
    "overwrite",
    "overwrite_changed",
    "tile_hashes",
]
