"""Work, and what must not fail meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def under_watch(work: Coroutine[Any, Any, T], *beside: Coroutine[Any, Any, object]) -> T:
    """The result of `work`; what runs beside it may end before, and ends with it.

    The first error of any is raised as it is. Nothing of it runs on then.
    """
    main = asyncio.ensure_future(work)
    tasks = [main, *(asyncio.ensure_future(one) for one in beside)]
    pending = set(tasks)
    try:
        while not main.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        return main.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
