"""Work on the buckets of a version, a few at once: while one waits for the disk, others are encoded.

Invariants
- Buckets are taken one by one by who calls, and no more than AT_ONCE are taken and not done with: that is the memory.
- When `at_once` returns or raises, nothing that it began goes on.
- Threads stay from one version to the next: each keeps room for the codec, and memory that a thread freed is not soon
  used by another one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

AT_ONCE = 3
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def bucket_threads() -> ThreadPoolExecutor:
    """Those that `at_once` works in; the caller shuts them down."""
    return ThreadPoolExecutor(AT_ONCE, thread_name_prefix="rose-bucket")


def at_once(
    threads: ThreadPoolExecutor, work: Callable[[int, _Item], _Result], items: Iterable[_Item]
) -> list[_Result]:
    """What `work(place, item)` gives for each of `items`, in their order.

    After an error no more is taken; of several the one of the earliest item is raised.
    """
    room = threading.Semaphore(AT_ONCE)
    failed = threading.Event()
    begun: list[Future[_Result]] = []

    def one(place: int, handed: list[_Item]) -> _Result:
        try:
            return work(place, handed.pop())
        except BaseException:
            failed.set()
            raise
        finally:
            room.release()

    taken = iter(items)
    try:
        while room.acquire() and not failed.is_set():
            try:
                # An item has no name here, and is handed over: else it would stay while the next one is made.
                begun.append(threads.submit(one, len(begun), [next(taken)]))
            except StopIteration:
                break
    finally:
        wait(begun)
    return [done.result() for done in begun]
