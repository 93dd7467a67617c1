"""Several things at once, none of which outlives the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar, overload

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")


@overload
async def all_of(one: Coroutine[Any, Any, T], two: Coroutine[Any, Any, U], /) -> tuple[T, U]: ...
@overload
async def all_of(
    one: Coroutine[Any, Any, T], two: Coroutine[Any, Any, U], three: Coroutine[Any, Any, V], /
) -> tuple[T, U, V]: ...
@overload
async def all_of(*work: Coroutine[Any, Any, T]) -> tuple[T, ...]: ...
async def all_of(*work: Coroutine[Any, Any, Any]) -> tuple[Any, ...]:
    """All results, in order. The first error cancels the rest, waits for their end, and is raised as it is."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
