"""One way to one version, as text: which object to apply to which bucket.

    {"base": 6 or null, "buckets": [{"after", "before", "bucket": [shard class, index], "dense_bytes",
     "encoded_bytes", "level", "object"}, ...], "fingerprint", "layout": 1, "mode", "packing", "version": 7}

`packing` is the key of the object that says which parameters lie where; the buckets are that packing's, in its order.
`before` and `after` are hashes of buckets (see the codec) in 16 hex digits.

Invariants
- Without a base the objects hold everything ("overwrite"); with one they need its exact bits and lead back as well
  ("steps"), or they overwrite what changed and do not lead back.
- A fingerprint is the SHA-256 of the packing's key and all hashes: two versions with one fingerprint have the same bits
  under the same names, and a manifest cannot lead to one version here and to another there.

A version that is kept has, besides, a mark: {"fingerprint", "layout": 1, "version"}.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_args

from rose_transfer.codec import BUCKET_BYTES_MAX
from rose_transfer.codec.streams import Mode
from rose_transfer.store import canonical
from rose_transfer.store.chain import Link
from rose_transfer.store.objects import is_key, object_key
from rose_transfer.store.packing import BucketId

LAYOUT = 1
TEXT = canonical.Kind("manifest", bytes_max=16 * 2**20, values_max=2**19)
"""235 billion parameters for 8 ranks take 7,000 buckets, 2 MiB and 70,000 values: seven times that may come."""
MARK = canonical.Kind("mark of a version", bytes_max=4096, values_max=64)
RAW, ZSTD = range(2)
"""Codec levels: streams as they are, or in zstd frames where these are shorter."""
_HASHES = 2**64


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """The delta of one bucket, from the bits with hash `before` (0 without a base) to those with hash `after`."""

    bucket_id: BucketId
    key: str
    level: int
    encoded_bytes: int
    dense_bytes: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """How to get to `version` from `base`, or from nothing. Raises ValueError if the invariants do not hold."""

    version: int
    base: int | None
    mode: Mode
    packing: str
    buckets: tuple[BucketEntry, ...]

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode) or (self.base is None and self.mode != "overwrite"):
            raise ValueError(f"mode {self.mode} from base {self.base}")
        if self.base == self.version:
            raise ValueError(f"version {self.version} from itself")
        if not is_key(self.packing) or not all(is_key(entry.key) for entry in self.buckets):
            raise ValueError("a key is not 64 hex digits")
        if any(one.bucket_id >= other.bucket_id for one, other in pairwise(self.buckets)):
            raise ValueError("buckets are named twice, or not in their order")

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.packing, (entry.after for entry in self.buckets))

    @property
    def base_fingerprint(self) -> str | None:
        """That of the version this leads from, None without a base."""
        return None if self.base is None else fingerprint(self.packing, (entry.before for entry in self.buckets))

    @property
    def encoded_bytes(self) -> int:
        """Bytes of all objects, however many of them are the same."""
        return sum(entry.encoded_bytes for entry in self.buckets)

    @property
    def dense_bytes(self) -> int:
        return sum(entry.dense_bytes for entry in self.buckets)

    @property
    def link(self) -> Link:
        return Link(self.version, self.base, self.encoded_bytes, self.mode)

    @property
    def key(self) -> str:
        """The key of this text: a manifest is an object as well."""
        return object_key(self.to_bytes())

    def object_keys(self) -> set[str]:
        """Every object that this names, the packing included."""
        return {self.packing, *(entry.key for entry in self.buckets)}

    def to_bytes(self) -> bytes:
        """The text described above."""
        return canonical.dump(_value(self), TEXT)


def fingerprint(packing: str, hashes: Iterable[int]) -> str:
    """Identifies the bits of a version; 64 hex digits."""
    digest = hashlib.sha256(packing.encode())
    for value in hashes:
        digest.update(value.to_bytes(8, "little"))
    return digest.hexdigest()


def from_bytes(data: bytes) -> Manifest:
    """The manifest of a text. Raises MalformedRecord unless the text is one that `to_bytes` writes."""
    with canonical.reading(TEXT):
        value = canonical.load(data, TEXT, buckets=_entry)
        _check_layout(value)
        base = value["base"]
        manifest = Manifest(
            version=canonical.number(value["version"]),
            base=None if base is None else canonical.number(base),
            mode=canonical.text(value["mode"]),  # type: ignore[arg-type]
            packing=canonical.text(value["packing"]),
            buckets=tuple(value["buckets"]),
        )
        canonical.check(_value(manifest), data, TEXT)
    return manifest


def mark_bytes(version: int, fingerprint: str) -> bytes:
    """The mark of a version that is kept."""
    return canonical.dump(_mark_value(version, fingerprint), MARK)


def mark_from_bytes(data: bytes) -> tuple[int, str]:
    """(version, fingerprint) of a mark. Raises MalformedRecord."""
    with canonical.reading(MARK):
        value = canonical.load(data, MARK)
        _check_layout(value)
        version, whole = canonical.number(value["version"]), canonical.text(value["fingerprint"])
        canonical.check(_mark_value(version, whole), data, MARK)
    return version, whole


def _check_layout(value: dict[str, Any]) -> None:
    if value["layout"] != LAYOUT:
        raise ValueError(f"layout {value['layout']}, not {LAYOUT}")


def _mark_value(version: int, fingerprint: str) -> dict[str, Any]:
    return {"fingerprint": fingerprint, "layout": LAYOUT, "version": version}


def _value(manifest: Manifest) -> dict[str, Any]:
    return {
        "base": manifest.base,
        "buckets": map(_entry_value, manifest.buckets),
        "fingerprint": manifest.fingerprint,
        "layout": LAYOUT,
        "mode": manifest.mode,
        "packing": manifest.packing,
        "version": manifest.version,
    }


def _entry_value(entry: BucketEntry) -> dict[str, Any]:
    return {
        "after": f"{entry.after:016x}",
        "before": f"{entry.before:016x}",
        "bucket": [entry.bucket_id.shard_class, entry.bucket_id.index],
        "dense_bytes": entry.dense_bytes,
        "encoded_bytes": entry.encoded_bytes,
        "level": entry.level,
        "object": entry.key,
    }


def _entry(value: Any) -> BucketEntry:
    shard_class, index = value["bucket"]
    return BucketEntry(
        bucket_id=BucketId(canonical.text(shard_class), canonical.number(index)),
        key=canonical.text(value["object"]),
        level=canonical.number(value["level"], ZSTD + 1),
        encoded_bytes=canonical.number(value["encoded_bytes"], 2 * BUCKET_BYTES_MAX),
        dense_bytes=canonical.number(value["dense_bytes"], BUCKET_BYTES_MAX + 1),
        before=_hash(value["before"]),
        after=_hash(value["after"]),
    )


def _hash(value: Any) -> int:
    return canonical.number(int(canonical.text(value), 16), _HASHES)
