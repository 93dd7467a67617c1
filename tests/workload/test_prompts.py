from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import ConfigError
from rose.workload.prompts import Prompts
from rose.workload.scaling import with_lengths
from rose.workload.trace import Trace, TraceRequest


def shared(one: list[int], other: list[int]) -> int:
    """How many tokens two prompts begin with in common."""
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


def prompts_of(*requests: TraceRequest, block_tokens: float = 0.0, scale: float = 1.0, seed: int = 0) -> Prompts:
    trace = Trace("t", "a", requests, 0.0, block_tokens=block_tokens)
    return Prompts(with_lengths(trace, scale, 1.0), 1000, 1_000_000, seed)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=5), st.integers(0, 2**40))
def test_prompts_have_their_lengths_and_range(lengths: list[int], seed: int) -> None:
    prompts = prompts_of(*(TraceRequest(0.0, length, 1) for length in lengths), seed=seed)
    for index, length in enumerate(lengths):
        ids = prompts.token_ids(index)
        assert len(ids) == length
        assert all(1000 <= one < 1_000_000 for one in ids)


def test_the_same_seed_gives_the_same_prompts_in_any_order() -> None:
    requests = [TraceRequest(0.0, 50, 1) for _ in range(3)]
    first = prompts_of(*requests)
    again = prompts_of(*requests)
    other = prompts_of(*requests, seed=1)
    assert [first.token_ids(index) for index in (0, 1, 2)] == [again.token_ids(index) for index in (2, 1, 0)][::-1]
    assert first.token_ids(0) != other.token_ids(0)
    assert shared(first.token_ids(0), first.token_ids(1)) == 0


def test_prefixes_are_shared_as_far_as_the_hashes_say() -> None:
    prompts = prompts_of(
        TraceRequest(0.0, 40, 1, (7, 8, 9)),
        TraceRequest(0.0, 60, 1, (7, 8, 10, 11)),
        TraceRequest(0.0, 20, 1, (7, 8)),
        TraceRequest(0.0, 40, 1, (-1, 8, 9)),
        TraceRequest(0.0, 40, 1),
        block_tokens=16,
    )
    ids = [prompts.token_ids(index) for index in range(5)]
    assert [len(one) for one in ids] == [40, 60, 20, 40, 40]
    assert shared(ids[0], ids[1]) == 32
    assert shared(ids[0], ids[2]) == 20
    assert shared(ids[0], ids[3]) == 0
    assert shared(ids[0], ids[4]) == 0


@given(st.integers(0, 30), st.sampled_from([1.0, 1 / 4, 1 / 7, 1 / 16, 1 / 32]))
def test_shared_prefixes_scale_with_the_prompts(common: int, scale: float) -> None:
    """Also where a block becomes less than a token."""
    blocks = tuple(range(32))
    other = (*blocks[:common], *(100 + block for block in blocks[common:]))
    prompts = prompts_of(
        TraceRequest(0.0, 512, 1, blocks), TraceRequest(0.0, 512, 1, other), block_tokens=16, scale=scale
    )
    assert shared(prompts.token_ids(0), prompts.token_ids(1)) == pytest.approx(common * 16 * scale, abs=1)


def test_a_range_without_ids_is_refused() -> None:
    trace = Trace("t", "a", (TraceRequest(0.0, 1, 1),), 0.0)
    for low, high in ((5, 5), (-1, 5)):
        with pytest.raises(ConfigError, match="token ids from"):
            Prompts(trace, low, high, 0)
