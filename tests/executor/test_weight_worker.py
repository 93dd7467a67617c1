"""A worker stages beside its live weights, and nobody waits for a stage that was given up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rose.errors import TransferError
from rose_executor.weight_worker import WeightWorker

LONG_S = 30


class Update:
    """Stages until it is let go, or given up; `closed` tells the order of ends."""

    encoded_bytes = 7
    begins_anew = False

    def __init__(self, version: int, go: threading.Event, ended: list[int]) -> None:
        self.version, self._go, self._ended = version, go, ended
        self.begun = threading.Event()
        self.trouble: Exception | None = None

    def stage(self, given_up: Callable[[], bool]) -> None:
        self.begun.set()
        while not self._go.wait(0.001):
            if given_up():
                raise TransferError("given up")

    def commit(self) -> None:
        if self.trouble is not None:
            raise self.trouble

    def roll_back(self) -> None:
        if self.trouble is not None:
            raise self.trouble

    def close(self) -> None:
        self._ended.append(self.version)


class Model:
    def __init__(self) -> None:
        self.go = threading.Event()
        self.made: list[Update] = []
        self.ended: list[int] = []

    def update(self, version: int, objects: Path, way: Any) -> Update:
        self.made.append(Update(version, self.go, self.ended))
        return self.made[-1]


@pytest.fixture
def worker() -> WeightWorker:
    made = WeightWorker()
    made.rose_model = Model()  # type: ignore[assignment]
    return made


def staged(worker: WeightWorker) -> dict[str, Any]:
    stage = worker.rose_stage_now
    assert stage is not None
    assert stage.thread is not None
    stage.thread.join(LONG_S)
    answer = worker.rose_staged()
    assert answer is not None
    return answer


def test_a_second_stage_begins_at_once_and_the_first_ends_before_it_reads(worker: WeightWorker) -> None:
    model: Any = worker.rose_model
    worker.rose_stage(1, "objects", [])
    while not model.made:
        pass
    assert model.made[0].begun.wait(LONG_S)
    assert worker.rose_staged() is None
    worker.rose_stage(2, "objects", [("key", False)])
    model.go.set()
    assert staged(worker)["version"] == 2
    assert [update.version for update in model.made] == [1, 2]
    assert model.ended[0] == 1
    assert worker.rose_apply(1) == "version 1 is not staged"
    assert worker.rose_apply(2) == ""
    worker.rose_settled()
    assert model.ended[-1] == 2


def test_trouble_is_an_answer_and_never_raised(worker: WeightWorker) -> None:
    model: Any = worker.rose_model
    model.go.set()
    assert worker.rose_undo() == ""
    assert "nothing is staged" in (worker.rose_staged() or {})["error"]
    worker.rose_stage(3, "objects", [])
    assert staged(worker)["error"] == ""
    for trouble, said in ((TransferError("tile 3"), "transfer: tile 3"), (MemoryError("none"), "MemoryError: none")):
        model.made[-1].trouble = trouble
        assert worker.rose_apply(3) == said
        assert worker.rose_undo() == said
