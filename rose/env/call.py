"""One call of foreign code, as whoever waits for it sees it.

What a call raises comes back as data, whatever it is: an exception such as StopIteration or SystemExit must end
neither a future's protocol nor an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

Answer = tuple[Any, BaseException | None]
"""What a call returned, or what it raised."""

Pending = asyncio.Future[Answer]
"""A call under way, for the event loop that waits for it. It is done when the call has ended, never before."""


def made(call: Callable[[], Any]) -> Answer:
    """Make a plain call."""
    try:
        return call(), None
    except BaseException as error:  # noqa: BLE001 -- foreign code: whatever it raises is its answer
        return None, error


async def awaited(call: Callable[[], Awaitable[Any]]) -> Answer:
    """Make an async call."""
    try:
        return await call(), None
    except BaseException as error:  # noqa: BLE001 -- foreign code: whatever it raises is its answer
        return None, error


def tell(waiter: asyncio.AbstractEventLoop, pending: Pending, answer: Answer) -> None:
    """Give the answer to whoever waits for it on the loop `waiter`. From any thread."""
    # A closed loop means that nobody is left to tell; what comes after this call (close) still matters.
    with contextlib.suppress(RuntimeError):
        waiter.call_soon_threadsafe(_set, pending, answer)


def _set(pending: Pending, answer: Answer) -> None:
    if not pending.done():
        pending.set_result(answer)
