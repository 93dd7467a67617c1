"""Real processes are killed between two changes to their disks, and started again: all end with the right bits."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
from distribution_main import GOAL, start, weights
from distribution_tools import free_port_pair, line
from store_tools import same

from rose_transfer.distribution import lineage
from rose_transfer.store import Store

RANDOM = Random(3)


class Process:
    """A process that was started, and what it says."""

    def __init__(self, role: str, folder: Path, port: int, die_at: int) -> None:
        self._id, reading = start(role, folder, port, die_at)
        self._said = os.fdopen(reading)
        self.status: int | None = None

    def lines(self) -> Iterator[list[str]]:
        """What it says, in words, until it ends."""
        return (said.split() for said in self._said)

    def hear(self, *words: str) -> list[str]:
        """The first line that begins so."""
        for said in self.lines():
            if tuple(said[: len(words)]) == words:
                return said
        raise AssertionError(f"the process ended with {self.end()} and never said {words}")

    def end(self, *, kill: bool = False) -> int:
        """Wait until it has ended. Its exit status, or the signal that killed it, negative."""
        if self.status is None:
            if kill:
                os.kill(self._id, signal.SIGKILL)
            self.status = os.waitstatus_to_exitcode(os.waitpid(self._id, 0)[1])
            self._said.close()
        return self.status


@contextmanager
def process(role: str, folder: Path, port: int, die_at: int = 0) -> Iterator[Process]:
    started = Process(role, folder, port, die_at)
    try:
        yield started
    finally:
        started.end(kill=True)


def receive(folder: Path, port: int) -> int:
    """A receiver ends well. The bytes that it still had to fetch."""
    with process("receiver", folder, port) as receiver:
        said = receiver.hear("has")
        assert receiver.end() == 0
    return int(said[2])


def is_killed(role: str, folder: Path, port: int, die_at: int) -> bool:
    """Run it until it kills itself, or has made fewer changes than that when it has what it is to have."""
    with process(role, folder, port, die_at) as started:
        for said in started.lines():
            if said == ["offers", str(GOAL)]:
                return False
        return started.end() == -signal.SIGKILL


@pytest.mark.parametrize("die_at", sorted(RANDOM.sample(range(1, 120), 3)))
def test_a_publisher_is_killed(memory_path: Path, die_at: int) -> None:
    port = free_port_pair()
    assert is_killed("publisher", memory_path / "store", port, die_at)
    with process("publisher", memory_path / "store", port) as publisher:
        publisher.hear("offers", str(GOAL))
        receive(memory_path / "receiver", port)


@pytest.mark.parametrize("die_at", sorted(RANDOM.sample(range(1, 60), 3)))
def test_a_relay_is_killed(memory_path: Path, die_at: int) -> None:
    port = free_port_pair()
    with process("publisher", memory_path / "store", port) as publisher:
        publisher.hear("offers", str(GOAL))
        assert is_killed("relay", memory_path / "relay", port, die_at)
        with process("relay", memory_path / "relay", port):
            receive(memory_path / "receiver", port + 1)


@pytest.mark.parametrize("die_at", sorted(RANDOM.sample(range(20, 120), 6)))
def test_a_relay_is_killed_while_another_lineage_takes_the_place_of_its_own(memory_path: Path, die_at: int) -> None:
    port, folder = free_port_pair(), memory_path / "relay"
    store, history = line(folder / lineage.STORE, 2)
    store.close()
    with process("publisher", memory_path / "store", port) as publisher:
        publisher.hear("offers", str(GOAL))
        is_killed("relay", folder, port, die_at)
        lineage.settle(folder)
        with contextlib.closing(Store(folder / lineage.STORE)) as kept:
            assert kept.versions() in ((1, 2), (GOAL - 1, GOAL), (GOAL,))
            expected = history if kept.newest == 2 else weights()
            assert all(same(list(kept.read(version)), expected[version]) for version in kept.versions())
        with process("relay", folder, port):
            receive(memory_path / "receiver", port + 1)


@pytest.mark.parametrize("die_at", sorted(RANDOM.sample(range(1, 40), 3)))
def test_a_receiver_is_killed(memory_path: Path, die_at: int) -> None:
    port = free_port_pair()
    with process("publisher", memory_path / "store", port) as publisher:
        publisher.hear("offers", str(GOAL))
        whole = receive(memory_path / "clean", port)
        assert is_killed("receiver", memory_path / "receiver", port, die_at)
        assert receive(memory_path / "receiver", port) <= whole
