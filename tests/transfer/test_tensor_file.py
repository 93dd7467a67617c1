"""The file format agrees with safetensors' own reader and writer, for any shapes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rose.errors import TransferError
from rose_transfer.tensor_file import plan_bf16, read_entries, read_tensors, write_tensors

shapes = st.dictionaries(
    st.text("abc.", min_size=1, max_size=6), st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5
)


@given(shapes, st.integers(0, 2**16))
def test_safetensors_reads_what_is_written(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, tuple[int, ...]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    path = tmp_path_factory.mktemp("file") / "t.safetensors"
    entries = plan_bf16(shapes)
    with path.open("wb") as file:
        checksums = write_tensors(file, entries, tensors)
    theirs = load_file(path)
    ours = dict(read_tensors(path, read_entries(path), checksums))
    assert theirs.keys() == ours.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(theirs[name], tensor.to(torch.bfloat16))
        assert torch.equal(ours[name], theirs[name])
    assert sorted(read_entries(path), key=lambda e: (e.start, e.name)) == sorted(
        entries, key=lambda e: (e.start, e.name)
    )


def test_reads_what_safetensors_writes_in_each_dtype(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5).to(torch.bfloat16), "c": torch.randn(2).to(torch.float16)}
    save_file(tensors, tmp_path / "t.safetensors")
    entries = read_entries(tmp_path / "t.safetensors")
    checksums = {n: hashlib.sha256(t.view(torch.uint8).numpy().tobytes()).hexdigest() for n, t in tensors.items()}
    for name, tensor in read_tensors(tmp_path / "t.safetensors", entries, checksums):
        assert torch.equal(tensor, tensors[name])


def test_rounds_to_nearest_even(tmp_path: Path) -> None:
    # 1 + 2^-8 lies half-way between two neighbours in bfloat16, and the even one is 1.
    tensors = {"a": torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-12])}
    with (tmp_path / "t").open("wb") as file:
        write_tensors(file, plan_bf16({"a": (3,)}), tensors)
    assert load_file(tmp_path / "t")["a"].tolist() == [1.0, 1.015625, 1.0078125]


def test_an_unknown_dtype_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, dtype=torch.int64)}, tmp_path / "t")
    with pytest.raises(TransferError, match="a has dtype I64"):
        read_entries(tmp_path / "t")


@given(st.integers(0, 2**32))
def test_any_flipped_byte_is_noticed(tmp_path_factory: pytest.TempPathFactory, at: int) -> None:
    path = tmp_path_factory.mktemp("file") / "t"
    with path.open("wb") as file:
        checksums = write_tensors(
            file, plan_bf16({"a": (3, 5), "b": (7,)}), {"a": torch.ones(3, 5), "b": torch.ones(7)}
        )
    expected = read_entries(path)
    data = bytearray(path.read_bytes())
    at %= len(data)
    data[at] ^= 0xFF
    path.write_bytes(data)
    try:
        entries = read_entries(path)
        tensors = dict(read_tensors(path, entries, checksums))
    except (TransferError, KeyError):
        return
    assert entries == expected
    assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in tensors.values())
