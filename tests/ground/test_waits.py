"""Every wait is on the board while it lasts, and ends with a named error of the right boundary."""

from __future__ import annotations

import asyncio

import pytest

from rose.errors import DeadlineExceeded
from rose.waits import WaitBoard


def test_a_wait_is_on_the_board_only_while_it_lasts() -> None:
    board = WaitBoard()
    with board.waiting("engine start", "engine-0", 30):
        (wait,) = board.snapshot()
        assert (wait.what, wait.whom) == ("engine start", "engine-0")
        assert wait.deadline_s - wait.since_s == pytest.approx(30)
    assert board.snapshot() == ()


def test_a_wait_leaves_the_board_when_its_body_raises() -> None:
    board = WaitBoard()
    with pytest.raises(KeyError), board.waiting("step", "environment", 1):
        raise KeyError
    assert board.snapshot() == ()


def test_a_deadline_names_the_wait_and_the_boundary() -> None:
    board = WaitBoard()

    async def never() -> None:
        await board.within(asyncio.Event().wait(), "answer", "environment t-1", 0.01, boundary="environment")

    with pytest.raises(DeadlineExceeded, match=r"environment t-1: no answer after 0.01 s") as caught:
        asyncio.run(never())
    assert caught.value.boundary == "environment"
    assert board.snapshot() == ()


def test_a_timeout_raised_by_the_body_itself_is_not_taken_for_the_deadline() -> None:
    async def raises() -> None:
        raise TimeoutError("the body's own")

    with pytest.raises(TimeoutError, match="the body's own"):
        asyncio.run(WaitBoard().within(raises(), "answer", "x", 5, boundary="engine"))


def test_cancelling_a_wait_takes_it_off_the_board() -> None:
    board = WaitBoard()

    async def cancelled() -> None:
        task = asyncio.create_task(board.within(asyncio.Event().wait(), "answer", "x", 5, boundary="engine"))
        await asyncio.sleep(0)
        assert len(board.snapshot()) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert board.snapshot() == ()
