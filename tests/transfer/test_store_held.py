"""What is held follows the versions to the bit, however many elements change, and so do the buckets packed for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from store_tools import PACKING, first_weights, moved, same

from rose_transfer.codec import bucket_hash
from rose_transfer.layout.layout import Parameter
from rose_transfer.store import Store
from rose_transfer.store.buckets import pack
from rose_transfer.store.held import Held
from rose_transfer.store.packing import pack_whole


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.04, 0.5, 1.0])
def test_what_is_held_has_the_new_bits_and_their_hashes(share: float) -> None:
    held = Held(1, PACKING)
    weights = first_weights(1)
    for version in range(3):
        weights = moved(weights, share, version)
        deltas = [held.advance(place, bits) for place, bits in enumerate(weights)]
        assert all(delta.mode == ("overwrite" if version == 0 else "steps") for delta in deltas)
        assert same([held.buckets[place] for place in range(len(weights))], weights)
        assert held.hashes == {place: bucket_hash(bits) for place, bits in enumerate(weights)}


def test_what_is_held_is_nobody_elses(tmp_path: Path) -> None:
    store = Store(tmp_path)
    weights = first_weights(1)
    published = [bits.copy() for bits in weights]
    store.publish(1, PACKING, weights)
    for version, share in ((2, 0.02), (3, 0.9)):
        for bits in weights:
            bits += 1
        new = moved(published, share, version)
        store.publish(version, PACKING, new, base=version - 1)
        published = [bits.copy() for bits in new]
        weights = new
        assert same(list(store.read(version)), published)


@pytest.mark.parametrize("kind", ["as published", "of another dtype", "of another order"])
def test_a_bucket_has_the_bits_of_its_tensors_in_memory_of_its_own(kind: str) -> None:
    packing = pack_whole({"a": Parameter((4, 6), "bfloat16"), "b": Parameter((3,), "bfloat16")})
    whole = torch.randn(4, 6).to(torch.bfloat16)
    whole[0, 0] = -0.0
    given = {"as published": whole.clone(), "of another dtype": whole.float(), "of another order": whole.T.clone().T}
    state = {"a": given[kind], "b": torch.ones(3, dtype=torch.bfloat16)}
    (bits,) = pack(packing, state)
    given[kind].zero_()
    assert bits.tobytes()[:48] == whole.view(torch.int16).numpy().tobytes()
    assert bits[24:].tolist() == [0x3F80] * 3
