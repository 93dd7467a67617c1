"""What a version answers to a question, as the trainer itself computes it: text that travels beside the version. Pure.

    {"layout": 1, "likely": [[[token, cost], ...], ...], "output": [token, ...], "question": [token, ...]}

It is asked for as an object under `answer-<version>-<fingerprint>`. `output` is the greedy continuation of `question`;
`likely` has, for each of its tokens, the most likely ones at that place, most likely first, then by number. A cost is a
log-prob in millionths of a nat, without its sign.

Checksums say that the weights are those that were published. This says what they are good for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rose_transfer.distribution.offer import Offer
from rose_transfer.store import canonical

LAYOUT = 1
TOKENS_MAX = 1024
LIKELY_MAX = 64
TEXT = canonical.Kind("known answer", bytes_max=2**20, values_max=2**18)
_PER_NAT = 1e6
_ASK = re.compile("answer-(?:0|[1-9][0-9]{0,18})-[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """`likely[i]` are log-probs in nats by token, after the question and the first i tokens of `output`.

    Raises ValueError unless there is a question, and as many places as tokens of output, none of them empty.
    """

    question: tuple[int, ...]
    output: tuple[int, ...]
    likely: tuple[Mapping[int, float], ...]

    def __post_init__(self) -> None:
        if not self.question or not self.output or len(self.output) != len(self.likely) or not all(self.likely):
            raise ValueError("a known answer without a question, or with places that nothing is known of")
        if max(len(self.question), len(self.output)) > TOKENS_MAX or max(map(len, self.likely)) > LIKELY_MAX:
            raise ValueError(f"a known answer of more than {TOKENS_MAX} tokens, or {LIKELY_MAX} at a place")

    @property
    def tokens(self) -> int:
        """How long a sequence it takes to be asked, and to answer."""
        return len(self.question) + len(self.output)


def ask_key(offer: Offer) -> str:
    """The key of the answer of a version."""
    return f"answer-{offer.version}-{offer.fingerprint}"


def is_ask(key: str) -> bool:
    return _ASK.fullmatch(key) is not None


def to_bytes(answer: KnownAnswer) -> bytes:
    """The text described above. Raises ValueError for a log-prob that is none."""
    return canonical.dump(_value(answer.question, answer.output, [_costs(place) for place in answer.likely]), TEXT)


def from_bytes(data: bytes) -> KnownAnswer:
    """The answer of a text. Raises MalformedRecord unless the text is one that `to_bytes` writes."""
    with canonical.reading(TEXT):
        value = canonical.load(data, TEXT, likely=_place)
        question, output, likely = value["question"], value["output"], value["likely"]
        canonical.check(_value(question, output, likely), data, TEXT)
        return KnownAnswer(
            canonical.numbers(question, TOKENS_MAX),
            canonical.numbers(output, TOKENS_MAX),
            tuple({token: -cost / _PER_NAT for token, cost in place} for place in likely),
        )


def _value(question: Sequence[int], output: Sequence[int], likely: Sequence[Any]) -> dict[str, object]:
    return {"layout": LAYOUT, "likely": likely, "output": list(output), "question": list(question)}


def _costs(place: Mapping[int, float]) -> list[tuple[int, int]]:
    """A log-prob is at most 0, but for rounding."""
    costs = [(token, max(0, round(-logprob * _PER_NAT))) for token, logprob in place.items()]
    return sorted(costs, key=_by_cost)


def _place(value: Any) -> list[tuple[int, int]]:
    pairs = [(canonical.number(token), canonical.number(cost)) for token, cost in value]
    if len(dict(pairs)) != len(pairs) or sorted(pairs, key=_by_cost) != pairs:
        raise ValueError("a token stands twice at one place, or not at its own")
    return pairs


def _by_cost(pair: tuple[int, int]) -> tuple[int, int]:
    token, cost = pair
    return cost, token
