"""A layout as text, and its fingerprint.

    {"format": 1, "holder": "engine-0 tp 1",
     "parameters": {name: [dtype, [shape]]}, "tensors": {name: [dtype, [shape]]},
     "pieces": [[parameter, [starts], [sizes], tensor, offset, [strides]], ...],
     "pads": [[tensor, [starts], [sizes]], ...]}

The text is canonical: names and pieces sorted, no spaces. The fingerprint is the SHA-256 of the text with an
empty holder, so ranks that hold the same in the same way share it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from rose.errors import TransferError
from rose_transfer.layout.box import AXES_MAX, Box
from rose_transfer.layout.layout import Layout, LocalTensor, Pad, Parameter, Piece

FORMAT = 1


def to_json(layout: Layout) -> str:
    return json.dumps(
        {
            "format": FORMAT,
            "holder": layout.holder,
            "parameters": {name: [value.dtype, value.shape] for name, value in layout.parameters.items()},
            "tensors": {name: [value.dtype, value.shape] for name, value in layout.tensors.items()},
            "pieces": [
                [piece.parameter, piece.box.starts, piece.box.sizes, piece.tensor, piece.offset, piece.strides]
                for piece in sorted(layout.pieces)
            ],
            "pads": [[pad.tensor, pad.box.starts, pad.box.sizes] for pad in sorted(layout.pads)],
        },
        sort_keys=True,
        separators=(",", ":"),
    )


def fingerprint(layout: Layout) -> str:
    """64 hex digits, equal for equal layouts whoever holds them."""
    return hashlib.sha256(to_json(dataclasses.replace(layout, holder="")).encode()).hexdigest()


def from_json(text: str) -> Layout:
    """The layout of a text. It is well-formed, not checked: see `check_source` and `check_destination`.

    Raises TransferError if the text is not one that `to_json` writes.
    """
    try:
        value: dict[str, Any] = json.loads(text)
        if value["format"] != FORMAT:
            raise ValueError(f"format {value['format']}, not {FORMAT}")
        return Layout(
            holder=_text(value["holder"]),
            parameters={name: Parameter(_numbers(v[1]), _text(v[0])) for name, v in value["parameters"].items()},
            tensors={name: LocalTensor(_numbers(v[1]), _text(v[0])) for name, v in value["tensors"].items()},
            pieces=tuple(
                Piece(_text(name), _box(starts, sizes), _text(tensor), _number(offset), _numbers(strides))
                for name, starts, sizes, tensor, offset, strides in value["pieces"]
            ),
            pads=tuple(Pad(_text(tensor), _box(starts, sizes)) for tensor, starts, sizes in value["pads"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise TransferError(
            f"this is not the text of a layout: {type(error).__name__}: {str(error)[:200]}",
            to_do="discover the layout again",
        ) from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"this {type(value).__name__} is not a string")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise TypeError(f"this {type(value).__name__} is not a whole number below 2^63")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > AXES_MAX:
        raise TypeError(f"this {type(values).__name__} is not a list of at most {AXES_MAX} numbers")
    return tuple(_number(value) for value in values)


def _box(starts: Any, sizes: Any) -> Box:
    box = Box(_numbers(starts), _numbers(sizes))
    if len(box.starts) != len(box.sizes):
        raise ValueError(f"a box with {len(box.starts)} starts and {len(box.sizes)} sizes")
    return box
