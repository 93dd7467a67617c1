"""The header of a safetensors file: which tensors it says it holds, and whether its bytes can be those.

Layout, as its format description has it: eight bytes with the length N of the header (little endian), N bytes of
JSON, then the tensors, one after the other without a gap. Nothing but the header is read.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rose.errors import ConfigError

HEADER_BYTES_MAX = 100_000_000
_EXPECTED = "a whole file in safetensors format"
_TO_DO = "fetch or save it once more"
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

Shape = tuple[int, ...]


def read_shapes(path: Path) -> dict[str, Shape]:
    """The shape of each tensor by name. `path` is a regular file.

    Raises ConfigError if it cannot be read, if it is cut short or too long, or if its header contradicts itself.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            length_bytes = int.from_bytes(file.read(8), "little")
            if size_bytes < 8 or length_bytes > min(HEADER_BYTES_MAX, size_bytes - 8):
                raise _wrong(path, f"{size_bytes} bytes, too few for the header that it announces")
            raw = file.read(length_bytes)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", expected=_EXPECTED, to_do="see who may read it") from None
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise _wrong(path, "its header is no JSON object")
    header.pop("__metadata__", None)
    _check_places(path, header, size_bytes - 8 - length_bytes)
    return {name: tuple(entry["shape"]) for name, entry in header.items()}


def _check_places(path: Path, header: dict[str, Any], data_bytes: int) -> None:
    places = sorted(_place(path, name, entry) for name, entry in header.items())
    end = 0
    for begin, stop in places:
        if begin != end:
            raise _wrong(path, f"its tensors overlap or leave a gap at byte {min(begin, end)}")
        end = stop
    if end != data_bytes:
        raise _wrong(path, f"{data_bytes} bytes of tensors, its header announces {end}")


def _place(path: Path, name: str, entry: object) -> tuple[int, int]:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if (
            dtype in _BITS
            and all(type(size) is int and size >= 0 for size in shape)
            and 8 * (end - begin) == _BITS[dtype] * math.prod(shape)
        ):
            return begin, end
    raise _wrong(path, f"what its header says of {name[:80]!r} does not fit together")


def _wrong(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path}: {why}", expected=_EXPECTED, to_do=_TO_DO)
