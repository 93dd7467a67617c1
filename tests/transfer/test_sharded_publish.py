"""Ranks that each hold a part publish what one would that holds everything, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import sharded_worlds as worlds
import torch
from sharded_worlds import PACKING, in_world, weights

from rose_transfer.layout.layout import Parameter
from rose_transfer.store import Store, StoreReader
from rose_transfer.store.buckets import pack, state_parameters
from rose_transfer.store.packing import pack_whole
from rose_transfer.store.survey import verify


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def whole_keys(folder: Path, versions: int, *, compress: bool = False) -> list[str]:
    """The manifests of the same versions published from whole state dicts."""
    store = Store(folder, compress=compress)
    keys = [
        store.publish(version, PACKING, pack(PACKING, weights(version)), base=store.newest).key
        for version in range(1, versions + 1)
    ]
    store.close()
    return keys


def check(folder: Path, versions: int) -> None:
    """The versions are there whole, and hold the weights."""
    store = StoreReader(folder)
    assert verify(store) == ()
    assert store.versions() == tuple(range(1, versions + 1))
    for version in store.versions():
        for found, wanted in zip(store.read(version), pack(PACKING, weights(version)), strict=True):
            assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("compress", [False, True], ids=["raw", "zstd"])
def test_fsdp_over_tensor_parallel_with_float32_masters(folder: Path, tmp_path: Path, compress: bool) -> None:
    answers = in_world(4, worlds.fsdp_over_tp, folder, 3, compress)
    assert answers == [whole_keys(tmp_path / "whole", 3, compress=compress)] * 4
    check(folder, 3)


def test_pipeline_stages_with_uneven_and_empty_shards(folder: Path, tmp_path: Path) -> None:
    answers = in_world(4, worlds.pipeline_stages, folder, 2)
    assert answers == [whole_keys(tmp_path / "whole", 2)] * 4
    check(folder, 2)


def test_who_starts_anew_goes_on_in_steps_from_what_the_store_has(folder: Path) -> None:
    assert in_world(2, worlds.rows, folder, [1, 2], PACKING) == [[None, 1]] * 2
    assert in_world(3, worlds.rows, folder, [3, 4], PACKING) == [[2, 3]] * 3
    check(folder, 4)


def test_a_base_that_cannot_be_read_is_not_gone_on_from(folder: Path) -> None:
    in_world(2, worlds.rows, folder, [1], PACKING)
    damaged = min(file for file in (folder / "objects").iterdir() if file.read_bytes()[:4] == b"RDLT")
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    assert in_world(2, worlds.rows, folder, [2, 3], PACKING) == [[None, 2]] * 2
    store = StoreReader(folder)
    assert [bits.tobytes() for bits in store.read(3)] == [bits.tobytes() for bits in pack(PACKING, weights(3))]


def test_another_packing_begins_anew(folder: Path) -> None:
    in_world(2, worlds.rows, folder, [1], PACKING)
    assert in_world(2, worlds.rows, folder, [2, 3], worlds.COARSE) == [[None, 2]] * 2


def test_shards_may_change_between_versions(folder: Path, tmp_path: Path) -> None:
    assert in_world(3, worlds.other_shards_each_time, folder) == [[None, 1, 2]] * 3
    whole_keys(tmp_path / "whole", 3)
    ours, theirs = (StoreReader(one).manifests() for one in (folder, tmp_path / "whole"))
    assert ours == theirs


def test_bits_are_kept_and_a_second_name_is_left_out(folder: Path, tmp_path: Path) -> None:
    """NaN payloads, negative zeros and subnormals in weights that need no rounding."""
    generator = torch.Generator().manual_seed(4)
    patterns = torch.randint(-(2**15), 2**15, (40, 3), generator=generator, dtype=torch.int16)
    whole = {"w": patterns.view(torch.bfloat16), "half": patterns.flip(0).contiguous().view(torch.float16)}
    packing = pack_whole(state_parameters(whole), bucket_bytes=64)
    store = Store(tmp_path / "whole")
    key = store.publish(1, packing, pack(packing, whole)).key
    store.close()
    assert in_world(2, worlds.same_dtype, folder, packing, whole) == [key] * 2


def test_a_trainer_publishes_under_other_names_than_its_own(folder: Path, tmp_path: Path) -> None:
    stack = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(6))
    whole = {f"{index}.weight": part.T.contiguous() for index, part in enumerate(stack)}
    packing = pack_whole({name: Parameter((3, 4), "bfloat16") for name in whole}, bucket_bytes=32)
    store = Store(tmp_path / "whole")
    key = store.publish(1, packing, pack(packing, whole)).key
    store.close()
    assert in_world(2, worlds.stacked_experts, folder, packing, stack) == [key] * 2


def test_only_the_first_rank_has_the_store_and_others_have_no_part(folder: Path) -> None:
    first, second = in_world(2, worlds.who_has_a_store, folder)
    assert first == ["rank 0, and no other, has the store; this is rank 0", "made"]
    assert second == [
        "rank 0, and no other, has the store; this is rank 1",
        "this process is not in the group that publishes",
    ]


def test_engines_hear_of_what_ranks_published_together(folder: Path) -> None:
    heard, _ = in_world(2, worlds.served, folder, 3)
    for version, (told, bits) in enumerate(heard, start=1):
        assert told == version
        assert bits == [wanted.tobytes() for wanted in pack(PACKING, weights(version))]
    assert StoreReader(folder).versions() == (2, 3)
