"""What a model folder's files hold, read off their headers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rose.errors import TransferError
from rose_transfer.layout.checkpoint import checkpoint_parameters
from rose_transfer.layout.layout import Parameter


def test_the_parameters_of_a_folder_are_those_of_its_files(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2, 3, dtype=torch.bfloat16), "norm": torch.zeros(3)}, tmp_path / "one.safetensors")
    save_file({"scalar": torch.zeros((), dtype=torch.float16)}, tmp_path / "two.safetensors")
    assert checkpoint_parameters(tmp_path) == {
        "w": Parameter((2, 3), "bfloat16"),
        "norm": Parameter((3,), "float32"),
        "scalar": Parameter((), "float16"),
    }
    save_file({"w": torch.zeros(1)}, tmp_path / "three.safetensors")
    with pytest.raises(TransferError, match="holds w twice"):
        checkpoint_parameters(tmp_path)
    with pytest.raises(TransferError, match="has no safetensors file"):
        checkpoint_parameters(tmp_path / "none")


def test_an_unknown_dtype_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, dtype=torch.int64)}, tmp_path / "t.safetensors")
    with pytest.raises(TransferError, match="a has dtype I64"):
        checkpoint_parameters(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 60, -1])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "t.safetensors"
    save_file({"a": torch.zeros(20)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(TransferError, match="not a whole safetensors file"):
        checkpoint_parameters(tmp_path)
