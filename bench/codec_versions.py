"""Two versions of weights as training leaves them, made without training: for the codec and the transfer bench."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SPREAD = 0.03
"""Standard deviation of the weights, that of a large model's matrices."""

Bits = NDArray[np.uint16]


def weights(elements: int, rng: np.random.Generator) -> Bits:
    """Normally distributed bfloat16, as bits."""
    drawn = rng.standard_normal(elements, dtype=np.float32) * np.float32(SPREAD)
    bits: Bits = (drawn.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return bits


def trained(old: Bits, share: float, rng: np.random.Generator) -> Bits:
    """`share` of the elements moved up or down by a geometric number of steps (0.9 of them by one)."""
    new = old.copy()
    at = np.flatnonzero(rng.random(old.size, dtype=np.float32) < share)
    steps = rng.geometric(0.9, at.size).astype(np.int16) * rng.choice(np.array([-1, 1], np.int16), at.size)
    # Away from zero a step in the order of the numbers is one in their bits, up to its direction.
    new[at] += steps.view(np.uint16)
    return new
