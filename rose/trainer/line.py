"""Many calls of one rank in few messages: a message between two processes costs more than a step of most environments.

Invariants
- Calls made in one turn of the event loop leave in one message; answers that are there at the same time come back in
  one. No answer waits for another.
- One message is always under way that asks for answers, as long as any is owed. A rank that does not even answer that
  is stuck as a whole.
- Every call ends in its answer, in what the rank raised, or in what became of the rank. Deadlines are the caller's.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from rose.errors import ClusterError, RoseError
from rose.trainer.rank import Rank

HOLD_S = 5.0
"""How long the rank keeps a message that asks for answers when there are none."""

Call = tuple[int, str, tuple[Any, ...]]
"""Number, method, arguments."""
Answered = tuple[int, Any, RoseError | None]
"""Number, what it returned, what it raised."""


class Line:
    """To the `Answering` object of a rank that has started; `patience_s` is the rank's for a message."""

    def __init__(self, rank: Rank, patience_s: float) -> None:
        self.rank = rank
        self._patience_s = patience_s
        self._numbers = itertools.count()
        self._leaving: list[Call] = []
        self._owed: dict[int, asyncio.Future[Any]] = {}
        self._asking: asyncio.Task[None] | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """What the method returns. Raises what it raised, or what became of the rank (see `Rank.call`)."""
        number = self.post(method, *arguments)
        answer = self._owed[number] = asyncio.get_running_loop().create_future()
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._ask())
        try:
            return await answer
        finally:
            del self._owed[number]

    def post(self, method: str, *arguments: Any) -> int:
        """Call a method without waiting for it; the number of the call."""
        number = next(self._numbers)
        if not self._leaving:
            asyncio.get_running_loop().call_soon(self._leave)
        self._leaving.append((number, method, arguments))
        return number

    async def close(self) -> None:
        """Ask for no more answers."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])

    def _leave(self) -> None:
        calls, self._leaving = self._leaving, []
        if self.rank.death is None:
            self.rank.post("take", calls)

    async def _ask(self) -> None:
        try:
            while self._owed:
                timeout_s = HOLD_S + self._patience_s
                answers = await self.rank.call("answers", HOLD_S, what="answers", timeout_s=timeout_s)
                for number, value, error in answers:
                    self._give(number, value, error)
        except RoseError as error:
            for number in tuple(self._owed):
                self._give(number, None, error)
        finally:
            self._asking = None

    def _give(self, number: int, value: Any, error: RoseError | None) -> None:
        answer = self._owed.get(number)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)


class Answering:
    """The far end: makes the calls of `made`, whose methods are coroutines, side by side."""

    def __init__(self, made: object) -> None:
        self._made = made
        self._running: set[asyncio.Task[None]] = set()
        self._done: list[Answered] = []
        self._some = asyncio.Event()

    async def take(self, calls: Sequence[Call]) -> None:
        """Begin these calls, in order."""
        for call in calls:
            running = asyncio.ensure_future(self._make(*call))
            self._running.add(running)
            running.add_done_callback(self._running.discard)

    async def answers(self, hold_s: float) -> list[Answered]:
        """Those that are there and have not been fetched; none if there are none for `hold_s` seconds."""
        try:
            async with asyncio.timeout(hold_s):
                await self._some.wait()
        except TimeoutError:
            return []
        self._some.clear()
        done, self._done = self._done, []
        return done

    async def _make(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            value, error = await getattr(self._made, method)(*arguments), None
        except RoseError as raised:
            value, error = None, raised
        except Exception as raised:  # noqa: BLE001 -- foreign, it may not even survive the way back
            value, error = None, ClusterError(f"{method}: {type(raised).__name__}: {raised}", to_do="see the log")
        self._done.append((number, value, error))
        self._some.set()
