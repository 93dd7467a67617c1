"""Does an engine answer as its version must? Its log-probs against those that the trainer told beside it. Pure.

Checksums prove which bits an engine holds, not what it makes of them: a kernel that is wrong on this machine, a layout
read in another order, keys and values that end up elsewhere, another precision than was asked for. So the engine
answers one question, from its prompt and then from its keys and values, and each token that either side thinks likely
must have about the same log-prob on both.

    difference   the largest one of a log-prob, in nats; infinite for what is no number
    places       tokens of the answer that were compared: from the first on which the two go different ways, their
                 contexts differ as well, and nothing can be said

A token that only one side names must not be likelier there than all that the other side names: else the other would
have named it too.

Tolerances. In float32 both sides compute the same from the same bits in another order: 6e-6 was measured on CPU with a
trained model of 3 layers, and one weight matrix that is off by a hundredth showed as 0.03 to 0.06. An engine that
computes in bfloat16 rounds each logit to 8 bits, which is up to 1/16 for logits from 16 to 32, and every layer before
it as well: 0.07 was measured. What is broken (rolled values, keys of zero, a wrong rotation) was off by 0.7 to 7.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rose_transfer.distribution.known_answer import KnownAnswer

TOLERANCE_NATS = {"float32": 0.01, "bfloat16": 0.5}
"""By the arithmetic of the engine."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """See above."""

    difference: float
    places: int
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        """In words."""
        return f"{self.difference:.2g} nats apart at most, of {self.tolerance:g} allowed, over {self.places} tokens"


def compare(
    answer: KnownAnswer, output: Sequence[int], likely: Sequence[Mapping[int, float]], dtype: str
) -> Comparison:
    """What an engine of `dtype` has put out, with the most likely tokens at each place, against what it must."""
    difference, places = 0.0, 0
    for expected, known, token, given in zip(answer.output, answer.likely, output, likely, strict=False):
        places += 1
        difference = max(difference, _apart(known, given))
        if token != expected:
            break
    if not places:
        difference = math.inf
    return Comparison(difference, places, TOLERANCE_NATS[dtype])


def _apart(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    if not one or not other or not all(map(math.isfinite, (*one.values(), *other.values()))):
        return math.inf
    return max(_excess(one, other), _excess(other, one))


def _excess(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """By how much a log-prob of `one` is from what `other` says of it; of what that does not name, above the least."""
    least = min(other.values())
    return max(abs(value - other[token]) if token in other else value - least for token, value in one.items())
