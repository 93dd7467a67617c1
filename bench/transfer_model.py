"""The model that is transferred, the same in both processes: full buckets of bfloat16, eight (512 MiB) where nothing
else is said."""

from __future__ import annotations

import numpy as np

from bench.codec_versions import Bits, trained, weights
from rose_transfer.codec import BUCKET_BYTES_MAX
from rose_transfer.layout.layout import Parameter
from rose_transfer.store.packing import Packing, pack_whole

BUCKETS = 8
ELEMENTS = BUCKET_BYTES_MAX // 2
MODEL_BYTES = BUCKETS * BUCKET_BYTES_MAX
_SEED = 20


def packing(buckets: int) -> Packing:
    """One parameter fills each bucket."""
    parameters = {f"layer{index}": Parameter((ELEMENTS,), "bfloat16") for index in range(buckets)}
    return pack_whole(parameters, bucket_bytes=2 * ELEMENTS)


def first_version(buckets: int) -> list[Bits]:
    return [weights(ELEMENTS, np.random.default_rng((_SEED, index))) for index in range(buckets)]


def next_version(old: list[Bits], share: float, seed: int) -> list[Bits]:
    """`share` of the elements changed as by training."""
    return [trained(bits, share, np.random.default_rng((seed, index))) for index, bits in enumerate(old)]
