"""The safetensors file format, written and read tensor by tensor with a checksum of each.

Invariants
- Nothing is held twice: a tensor is rounded, hashed and written before the next one is touched.
- A tensor is only ever handed out after its bytes, already in private memory, matched their checksum.

Format: 8 bytes little-endian header length, a JSON header of `dtype`, `shape` and `data_offsets` per tensor,
then the raw little-endian data. Source: the safetensors format description.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from rose.errors import TransferError

_DTYPES: Mapping[str, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_HEADER_BYTES_MAX = 100 * 2**20


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in a file; `start` and `end` are byte offsets behind the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]


def plan_bf16(shapes: Mapping[str, tuple[int, ...]]) -> tuple[TensorEntry, ...]:
    """Lay tensors out one behind the other, in the order given, as bfloat16."""
    entries: list[TensorEntry] = []
    at = 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        entries.append(TensorEntry(name, "BF16", shape, at, at + size))
        at += size
    return tuple(entries)


def header_bytes(entries: Iterable[TensorEntry]) -> bytes:
    """Length prefix and JSON header, padded so that the data begins at a multiple of 8."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for entry in entries:
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (entry.start, entry.end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_tensors(
    file: BinaryIO, entries: tuple[TensorEntry, ...], tensors: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """Write all entries, rounded to nearest even, and return the SHA-256 of each tensor's bytes by name."""
    file.write(header_bytes(entries))
    checksums: dict[str, str] = {}
    for entry in entries:
        rounded = tensors[entry.name].detach().to(device="cpu", dtype=entry.torch_dtype).contiguous()
        data = rounded.reshape(-1).view(torch.uint8).numpy().data
        checksums[entry.name] = hashlib.sha256(data).hexdigest()
        file.write(data)
    return checksums


def read_entries(path: Path) -> tuple[TensorEntry, ...]:
    """The tensors of a file, in the order of their data.

    Raises TransferError if it cannot be read, or is not such a file or shorter than its header says.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return _parse_header(file, size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TransferError(
            f"{path} is not a whole safetensors file: {error}", to_do="publish or copy the folder again"
        ) from error


def read_tensors(
    path: Path, entries: Iterable[TensorEntry], checksums: Mapping[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors whose bytes have their checksum; raises TransferError at the first that has not."""
    try:
        with path.open("rb") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
            for entry in entries:
                data = bytearray(entry.end - entry.start)
                file.seek(begin + entry.start)
                if file.readinto(data) != len(data):
                    raise TransferError(f"{path}: {entry.name} is cut short", to_do="publish the version again")
                if hashlib.sha256(data).hexdigest() != checksums[entry.name]:
                    raise TransferError(
                        f"{path}: the bytes of {entry.name} do not match their checksum",
                        to_do="publish the version again",
                    )
                yield entry.name, _as_tensor(data, entry)
    except OSError as error:
        raise TransferError(f"cannot read {path}: {error}") from error


def _as_tensor(data: bytearray, entry: TensorEntry) -> torch.Tensor:
    if not data:
        return torch.empty(entry.shape, dtype=entry.torch_dtype)
    return torch.frombuffer(data, dtype=entry.torch_dtype).view(entry.shape)


def _parse_header(file: BinaryIO, size: int) -> tuple[TensorEntry, ...]:
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(size - 8, _HEADER_BYTES_MAX):
        raise ValueError(f"its header would be {length} of {size} bytes")
    header = json.loads(file.read(length))
    entries: list[TensorEntry] = []
    for name, value in header.items():
        if name == "__metadata__":
            continue
        start, end = value["data_offsets"]
        entry = TensorEntry(name, value["dtype"], tuple(value["shape"]), start, end)
        if entry.dtype not in _DTYPES:
            raise ValueError(f"{name} has dtype {entry.dtype}, not one of {', '.join(_DTYPES)}")
        if end - start != torch.Size(entry.shape).numel() * entry.torch_dtype.itemsize:
            raise ValueError(f"{name} of shape {entry.shape} has {end - start} bytes")
        entries.append(entry)
    entries.sort(key=lambda entry: entry.start)
    at = 0
    for entry in entries:
        if entry.start != at:
            raise ValueError(f"the data of {entry.name} begins at {entry.start}, not {at}")
        at = entry.end
    if 8 + length + at != size:
        raise ValueError(f"{size} bytes, of which the header explains {8 + length + at}")
    return tuple(entries)
