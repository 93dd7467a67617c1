"""Tokens that show what they were sampled from.

Invariants
- The next token is a function of every token before it and of the weights' version: one that was lost, doubled,
  changed or stamped with another version breaks the chain at that place, whoever did it.
"""

from __future__ import annotations

from collections.abc import Iterable

from rose.records import Trajectory
from rose.simulator.world import must

_MODULUS = (1 << 61) - 1
_STEP = 6_364_136_223_846_793_005
_VERSION = 2_654_435_761
_VOCABULARY = 1 << 40

EMPTY = 1
"""Where every chain begins."""


def absorbed(link: int, token: int) -> int:
    """The chain's link behind one more token."""
    return (link * _STEP + token + 1) % _MODULUS


def link_behind(token_ids: Iterable[int], link: int = EMPTY) -> int:
    """The chain's link behind a whole context."""
    for token in token_ids:
        link = (link * _STEP + token + 1) % _MODULUS
    return link


def sampled(link: int, version: int) -> int:
    """The token that weights of a version sample behind a link."""
    return (link + (version + 1) * _VERSION) % _VOCABULARY


def must_be_as_sampled(trajectory: Trajectory) -> None:
    """Raise ContractError unless all outputs follow from what stands before them and their version's weights."""
    for segment in trajectory.segments():
        link, at, output = EMPTY, 0, 0
        for start, end in segment.outputs:
            link = link_behind(segment.token_ids[at:start], link)
            for token in segment.token_ids[start:end]:
                expected = sampled(link, segment.versions[output])
                must(token == expected, "a token is not what was sampled there", (trajectory.trajectory_id, output))
                link, output = absorbed(link, token), output + 1
            at = end
