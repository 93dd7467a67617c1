"""The operations of torch that move no element and change none: what they give are slices of what they are given.

Each counts elements in their logical order. `as_strided` does not, and is none of them: it shows what lies in memory,
which is another thing in a copy than in the original.
"""

from __future__ import annotations

from typing import Any, Final

import torch

_aten = torch.ops.aten
VIEWS: Final[frozenset[Any]] = frozenset(
    {
        _aten.alias.default,
        _aten.detach.default,
        _aten.permute.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.split.Tensor,
        _aten.split_with_sizes.default,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unbind.int,
        _aten.unsqueeze.default,
        _aten.view.default,
    }
)
