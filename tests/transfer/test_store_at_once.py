"""A few buckets are worked on at once, never more, and all work has ended when `at_once` has."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rose_transfer.store.at_once import AT_ONCE, at_once, bucket_threads


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with bucket_threads() as made:
        yield made


def test_results_come_in_the_order_of_the_items(threads: ThreadPoolExecutor) -> None:
    first_may_end = threading.Event()

    def work(place: int, item: str) -> str:
        if place == 0:
            assert first_may_end.wait(30)
        elif place == AT_ONCE + 1:
            first_may_end.set()
        return f"{place}{item}"

    assert at_once(threads, work, "abcdefg") == ["0a", "1b", "2c", "3d", "4e", "5f", "6g"]
    assert at_once(threads, work, "") == []


def test_as_many_work_at_once_as_may_and_no_more_are_in_memory(threads: ThreadPoolExecutor) -> None:
    together = threading.Barrier(AT_ONCE, timeout=30)
    alive: weakref.WeakSet[np.ndarray[tuple[int], np.dtype[np.uint8]]] = weakref.WeakSet()
    most = 0

    class Weights(np.ndarray[tuple[int], np.dtype[np.uint8]]):
        __hash__ = object.__hash__

    def made(number: int) -> Weights:
        nonlocal most
        item = np.zeros(number + 1, np.uint8).view(Weights)
        alive.add(item)
        most = max(most, len(alive))
        return item

    def work(place: int, item: Weights) -> int:
        together.wait()
        return item.size

    def items() -> Iterator[Weights]:
        for number in range(4 * AT_ONCE):
            yield made(number)

    assert at_once(threads, work, items()) == list(range(1, 4 * AT_ONCE + 1))
    assert most == AT_ONCE


def test_after_an_error_no_more_is_taken_and_what_was_begun_has_ended(threads: ThreadPoolExecutor) -> None:
    taken: list[int] = []
    ended: list[int] = []
    failing = threading.Event()

    def items() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    def work(place: int, item: int) -> None:
        if item == 1:
            failing.set()
            raise ValueError("the disk fails")
        assert failing.wait(30)
        ended.append(item)

    with pytest.raises(ValueError, match="the disk fails"):
        at_once(threads, work, items())
    assert len(taken) < 100
    assert sorted(ended) == [number for number in taken if number != 1]


def test_an_error_of_the_items_waits_for_what_was_begun(threads: ThreadPoolExecutor) -> None:
    ended: list[int] = []
    failing = threading.Event()

    def items() -> Iterator[int]:
        yield 0
        failing.set()
        raise ValueError("a parameter is missing")

    def work(place: int, item: int) -> None:
        assert failing.wait(30)
        ended.append(item)

    with pytest.raises(ValueError, match="a parameter is missing"):
        at_once(threads, work, items())
    assert ended == [0]
