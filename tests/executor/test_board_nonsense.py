"""A board on which somebody writes who is no engine of ours: well-formed halves with figures that no engine has.

What reads them goes on: the gate may be shut by it, but the executor never ends, and what it writes is valid.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_agent import SLO, NoScheduler, Scene

from rose_executor import board_halves
from rose_executor.board import GUEST, QUOTA, SERVING, SERVING_KV, BoardReader, Half, header
from rose_executor.board_states import Given, GuestState, Quota, Reading, ServingKv, ServingState
from rose_executor.guest_admission import GuestAdmission
from rose_executor.kv_budget import KvBudget
from rose_executor.kv_policy import KvPolicy, KvPool
from rose_executor.slack import slack_s

LIMITS = Quota(kv_blocks=100, tokens_per_step=512, active_seqs=16, gate_open=True)
ASKING = LIMITS._replace(ttft_s=SLO.ttft_s, tpot_s=SLO.tpot_s)
POOL = KvPool(pool_bytes=100 * 2**20, serving_bytes=80 * 2**20, guest_bytes=50 * 2**20)
DECODING = ServingState(steps=3, running=1, decoding=1, next_step_s=0.001)

counts = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 40)
seconds = st.floats(width=64) | st.floats(-1, 1)


def any_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    """A state with whatever fits into the bytes of its half."""
    by_type = {int: counts, float: seconds, bool: st.booleans()}
    return st.builds(kind, **{name: by_type[column] for name, column in get_type_hints(kind).items()})


def forged(half: Half[Any], state: Any, number: int = 1) -> bytes:
    """A bank whose checksum is right, that no writer of ours would write."""
    form = board_halves._FORMS[half.name]
    written_at_ns = time.monotonic_ns()
    body = form.body.pack(number, written_at_ns, *state)
    return body + board_halves._CHECKSUM.pack(board_halves._checksum(body, half))


def reading(half: Half[Any], state: Any) -> Reading[Any]:
    page = bytearray(board_halves.BOARD_BYTES)
    page[: len(header())] = header()
    bank = forged(half, state)
    page[half.offset : half.offset + len(bank)] = bank
    return board_halves.decode(bytes(page), half, time.monotonic(), header())


@contextmanager
def scene() -> Iterator[Scene]:
    with tempfile.TemporaryDirectory() as name:
        made = Scene(Path(name), Path(name), None)  # type: ignore[arg-type]  # nobody is started
        made.watch.rules.kv = KvBudget(KvPolicy(POOL))
        yield made
        made.watch.close()
        made.shelf.close()


@settings(deadline=None)
@given(st.lists(st.tuples(any_of(ServingState), any_of(GuestState), any_of(ServingKv)), min_size=1, max_size=4))
def test_whatever_is_on_the_board_the_executor_goes_on(
    looks: list[tuple[ServingState, GuestState, ServingKv]],
) -> None:
    with scene() as made:
        board = os.open(made.watch._path, os.O_RDWR)
        made.floor.freeze = lambda: None  # type: ignore[method-assign]
        for number, states in enumerate(looks, start=1):
            for half, state in zip((SERVING, GUEST, SERVING_KV), states, strict=True):
                bank = forged(half, state, number)
                os.pwrite(board, bank, half.offset + len(bank) * (number % 2))
            assert made.watch.look(), made.watch.trouble
            made.agent._figures.show(made.watch, None, made.agent._guest.lent(), NoScheduler(), 0)  # type: ignore[arg-type]
            assert 0 <= made.agent._guest.lent().slots <= 256
            seen = made.watch.seen
            assert seen is not None
            kv, serving_kv = KvBudget(KvPolicy(POOL)), reading(SERVING_KV, states[2]).state
            assert kv.blocks(seen.serving.state, serving_kv, seen.guest.state, 1.0) >= 0
        os.close(board)
        quota = BoardReader(made.watch._path).read(QUOTA, time.monotonic())
        assert quota.state is not None, quota.why


@settings(deadline=None)
@given(any_of(ServingState), any_of(Quota))
def test_whatever_is_on_the_board_the_guest_goes_on_within_its_limits(serving: ServingState, quota: Quota) -> None:
    made = GuestAdmission(LIMITS, 10.0)
    given_quota = reading(QUOTA, quota)
    made.look(Given(given_quota.state, 7, reading(SERVING, serving).state), 10.0)
    assert 0 <= made.allowed.tokens_per_step <= LIMITS.tokens_per_step
    assert 0 <= made.seqs_kept <= LIMITS.active_seqs
    assert 0 <= made.quota.kv_blocks <= LIMITS.kv_blocks
    assert math.isfinite(made.slack_s)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["next_step_s", "first_token_s", "stepped_at_s", "oldest_unanswered_at_s"])
def test_a_time_that_is_no_number_never_opens_the_gate(name: str, broken: float) -> None:
    seen = reading(SERVING, DECODING._replace(unanswered=1, **{name: broken}))
    assert seen.state is None
    assert seen.why == "the serving half says what no engine would"
    assert slack_s(seen.state, SLO, time.monotonic()) == 0


@pytest.mark.parametrize(
    ("half", "state"),
    [
        (SERVING, DECODING._replace(running=-1)),
        (GUEST, GuestState(preemptions=-1)),
        (SERVING_KV, ServingKv(resident_bytes=-1)),
    ],
)
def test_less_than_nothing_is_no_state(half: Half[Any], state: Any) -> None:
    assert reading(half, state).state is None
