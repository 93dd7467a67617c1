"""A weight version as a model folder, for whoever loads from disk: an engine that starts, a fresh one to compare with.

Invariants
- A folder appears complete or not at all: it is written beside, flushed to disk, then renamed. It is never written
  again.
- It is a complete Hugging Face model folder: the weights, and the other files of a base folder.

Weights are rounded to bfloat16 (nearest even), so that an engine that loads them in float32 computes with exactly what
was published.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from rose.errors import TransferError
from rose_transfer.full_disk import is_full
from rose_transfer.layout.checkpoint import model_shapes

WEIGHTS = "model.safetensors"
_BYTES = 2
"""Of an element of bfloat16."""
# The files of a model folder that are not weights; engines and tokenizers read them, ROSE only carries them.
_CARRIED_SUFFIXES = (".json", ".jinja", ".txt", ".model")
_NOT_CARRIED = ("model.safetensors.index.json",)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The folder of one version; `bytes` are those of all its files."""

    version: int
    path: Path
    bytes: int


def version_folder(root: Path, version: int) -> Path:
    return root / f"v{version:06d}"


def write(root: Path, version: int, state_dict: Mapping[str, torch.Tensor], base_dir: Path) -> Snapshot:
    """Write `state_dict` as version `version` under `root`, with the other model files of `base_dir`.

    The tensors of the base folder are written, in their shapes; an extra one in `state_dict` must be another
    name for one of them (a tied head). Blocks for the whole write: call it from a thread.

    Raises TransferError if a tensor is missing or wrong, if the version exists already, or if the disk is
    full; nothing of it is left then.
    """
    shapes = model_shapes(base_dir)
    check_tensors(state_dict, shapes)
    folder = version_folder(root, version)
    if folder.exists():
        raise TransferError(f"version {version} is there already in {root}", expected="a new version number")
    carried = [file for file in sorted(base_dir.iterdir()) if _is_carried(file)]
    needed = sum(_BYTES * math.prod(shape) for shape in shapes.values())
    needed += sum(file.stat().st_size for file in carried)
    draft = root / f".{folder.name}.draft"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        if shutil.disk_usage(root).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        draft.mkdir()
        written_bytes = _write_folder(draft, {name: state_dict[name] for name in shapes}, carried)
        draft.rename(folder)
        _flush(root)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise _write_failed(error, root, version, needed) from error
    return Snapshot(version, folder, written_bytes)


def check_tensors(state_dict: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Whether the tensors named in `shapes` can be published.

    Raises TransferError if one is missing, has another shape or a value that is not finite, or if `state_dict` has
    another one that is not just another name for one of them (a tied head).
    """
    for name, shape in shapes.items():
        if name not in state_dict:
            raise TransferError(f"the new weights have no {name}", expected="every tensor of the base model")
        if tuple(state_dict[name].shape) != shape:
            raise TransferError(
                f"{name} has shape {tuple(state_dict[name].shape)}", expected=f"{shape}, as in the base model"
            )
        if not torch.isfinite(state_dict[name]).all():
            raise TransferError(f"{name} holds values that are not finite", to_do="look at the last update")
    written = {state_dict[name].data_ptr() for name in shapes}
    for name in state_dict.keys() - shapes.keys():
        if state_dict[name].data_ptr() not in written:
            raise TransferError(
                f"the base model has no tensor {name}", expected="the base model's tensors, or other names for them"
            )


def remove(path: Path) -> None:
    """Remove a version folder. The name goes first, so nobody can open a folder that is half gone."""
    leaving = path.with_name(f".{path.name}.leaving")
    try:
        path.rename(leaving)
    except FileNotFoundError:
        return
    shutil.rmtree(leaving)


def _is_carried(file: Path) -> bool:
    return file.is_file() and file.suffix in _CARRIED_SUFFIXES and file.name not in _NOT_CARRIED


def _write_folder(folder: Path, state_dict: Mapping[str, torch.Tensor], carried: list[Path]) -> int:
    rounded = {
        name: tensor.detach().to(device="cpu", dtype=torch.bfloat16).contiguous() for name, tensor in state_dict.items()
    }
    try:
        save_file(rounded, folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:
        # The library tells the system's errors by their text alone.
        full = os.strerror(errno.ENOSPC) in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error
    _flush(folder / WEIGHTS)
    for source in carried:
        shutil.copyfile(source, folder / source.name)
        _flush(folder / source.name)
    _flush(folder)
    return sum(file.stat().st_size for file in folder.iterdir())


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_failed(error: OSError, root: Path, version: int, needed: int) -> TransferError:
    if not is_full(error):
        return TransferError(f"cannot write version {version} to {root}: {error}")
    free = shutil.disk_usage(root).free
    return TransferError(
        f"no room for version {version} in {root}: {needed} bytes needed, {free} free",
        to_do="free some space, or keep fewer versions",
    )
