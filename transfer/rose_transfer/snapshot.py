"""A weight version as a folder: whole, immutable, checked.

Invariants
- A version folder appears complete or not at all: it is written beside, flushed to disk, then renamed.
- A version number is published once; its folder is never written again.
- It is a complete Hugging Face model folder, so an engine can start from it as well as load it in place.
- What a reader gets has been compared with the manifest's checksums, in memory that no one else can write.

Weights are rounded from float32 masters to bfloat16 (nearest even), so that an engine that loads them in
float32 computes with exactly what was published.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rose.errors import ConfigError, TransferError
from rose_transfer.tensor_file import (
    TensorEntry,
    header_bytes,
    plan_bf16,
    read_entries,
    read_tensors,
    write_tensors,
)

MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
LAYOUT = 1
# The files of a model folder that are not weights; engines and tokenizers read them, ROSE only carries them.
_CARRIED_SUFFIXES = (".json", ".jinja", ".txt", ".model")
_NOT_CARRIED = (MANIFEST, "model.safetensors.index.json")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One published version. `fingerprint` is a SHA-256 over every tensor's name, shape, dtype and bytes."""

    version: int
    path: Path
    fingerprint: str
    bytes: int


def version_folder(root: Path, version: int) -> Path:
    return root / f"v{version:06d}"


def model_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a model folder.

    Raises ConfigError if the folder has no `config.json` or no readable safetensors file.
    """
    if not (model_dir / "config.json").is_file():
        raise ConfigError(
            f"{model_dir} is not a model folder",
            expected="a Hugging Face folder with config.json and safetensors files",
            to_do="check the path of the model",
        )
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for file in sorted(model_dir.glob("*.safetensors")):
            shapes |= {entry.name: entry.shape for entry in read_entries(file)}
    except TransferError as error:
        raise ConfigError(error.what, expected=error.expected, to_do="fetch the model again") from error
    if not shapes:
        raise ConfigError(f"{model_dir} has no safetensors file", expected="weights as *.safetensors")
    return shapes


def publish(root: Path, version: int, state_dict: Mapping[str, torch.Tensor], base_dir: Path) -> Snapshot:
    """Write `state_dict` as version `version` under `root`, with the other model files of `base_dir`.

    The tensors of the base folder are written, in their shapes; an extra one in `state_dict` must be another
    name for one of them (a tied head). Blocks for the whole write: call it from a thread.

    Raises TransferError if a tensor is missing or wrong, if the version exists already, or if the disk is
    full; nothing of it is left then.
    """
    shapes = model_shapes(base_dir)
    _check_tensors(state_dict, shapes)
    folder = version_folder(root, version)
    if folder.exists():
        raise TransferError(f"version {version} is already published in {root}", expected="a new version number")
    entries = plan_bf16(shapes)
    carried = [file for file in sorted(base_dir.iterdir()) if _is_carried(file)]
    needed = len(header_bytes(entries)) + entries[-1].end + sum(file.stat().st_size for file in carried)
    draft = root / f".{folder.name}.draft"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        if shutil.disk_usage(root).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        draft.mkdir()
        snapshot = _write_folder(draft, version, entries, state_dict, carried)
        draft.rename(folder)
        _flush(root)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise _write_failed(error, root, version, needed) from error
    return Snapshot(version, folder, snapshot.fingerprint, snapshot.bytes)


def verify(path: Path) -> Snapshot:
    """Compare a version folder with its manifest, every byte of every tensor.

    Raises TransferError at the first difference.
    """
    snapshot, tensors = open_verified(path)
    for _ in tensors:
        pass
    return snapshot


def open_verified(path: Path) -> tuple[Snapshot, Iterator[tuple[str, torch.Tensor]]]:
    """A version's description, and its tensors one by one, each checked before it is handed out.

    Raises TransferError if manifest and file disagree, and while iterating if a checksum fails.
    """
    manifest = _read_manifest(path)
    entries = read_entries(path / WEIGHTS)
    described = {name: (value["dtype"], tuple(value["shape"])) for name, value in manifest["tensors"].items()}
    found = {entry.name: (entry.dtype, entry.shape) for entry in entries}
    if described != found:
        different = sorted(name for name in described.keys() | found.keys() if described.get(name) != found.get(name))
        raise TransferError(
            f"{path}: the manifest and the weights disagree about {', '.join(different[:4])}",
            to_do="publish the version again",
        )
    checksums = {name: value["sha256"] for name, value in manifest["tensors"].items()}
    if _fingerprint(entries, checksums) != manifest["fingerprint"]:
        raise TransferError(f"{path}: the manifest does not match its own fingerprint")
    size = sum(file.stat().st_size for file in path.iterdir())
    snapshot = Snapshot(manifest["version"], path, manifest["fingerprint"], size)
    return snapshot, read_tensors(path / WEIGHTS, entries, checksums)


def retire(path: Path) -> None:
    """Remove a version folder. The name goes first, so nobody can open a folder that is half gone."""
    leaving = path.with_name(f".{path.name}.leaving")
    try:
        path.rename(leaving)
    except FileNotFoundError:
        return
    shutil.rmtree(leaving)


def _is_carried(file: Path) -> bool:
    return file.is_file() and file.suffix in _CARRIED_SUFFIXES and file.name not in _NOT_CARRIED


def _check_tensors(state_dict: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
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


def _write_folder(
    folder: Path,
    version: int,
    entries: tuple[TensorEntry, ...],
    state_dict: Mapping[str, torch.Tensor],
    carried: list[Path],
) -> Snapshot:
    with (folder / WEIGHTS).open("xb") as file:
        checksums = write_tensors(file, entries, state_dict)
        file.flush()
        os.fsync(file.fileno())
    for source in carried:
        shutil.copyfile(source, folder / source.name)
        _flush(folder / source.name)
    fingerprint = _fingerprint(entries, checksums)
    manifest = {
        "layout": LAYOUT,
        "version": version,
        "fingerprint": fingerprint,
        "tensors": {
            entry.name: {"dtype": entry.dtype, "shape": entry.shape, "sha256": checksums[entry.name]}
            for entry in entries
        },
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    _flush(folder / MANIFEST)
    _flush(folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    return Snapshot(version, folder, fingerprint, size)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_bytes())
        if manifest["layout"] != LAYOUT:
            raise ValueError(f"layout {manifest['layout']}, not {LAYOUT}")
        if not isinstance(manifest["version"], int) or not isinstance(manifest["tensors"], dict):
            raise ValueError("version or tensors are of the wrong kind")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TransferError(
            f"{path} is not a published version: {error}", expected=f"a folder with a {MANIFEST}"
        ) from error
    return manifest


def _fingerprint(entries: tuple[TensorEntry, ...], checksums: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for entry in sorted(entries, key=lambda entry: entry.name):
        digest.update(f"{entry.name} {entry.dtype} {entry.shape} {checksums[entry.name]}\n".encode())
    return digest.hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_failed(error: OSError, root: Path, version: int, needed: int) -> TransferError:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return TransferError(f"cannot write version {version} to {root}: {error}")
    free = shutil.disk_usage(root).free
    return TransferError(
        f"no room for version {version} in {root}: {needed} bytes needed, {free} free",
        to_do="free some space, or keep fewer versions",
    )
