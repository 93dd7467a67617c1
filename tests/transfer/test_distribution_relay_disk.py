"""A disk that others fill costs a relay as few of its old versions as make room for what arrives, and none in vain."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from distribution_tools import Site, line, offered, port_of, site, until
from store_tools import PACKING, Bits, changed, first_weights, moved, same

from rose_transfer.distribution import Relay, attempts
from rose_transfer.distribution.outlet import Outlet
from rose_transfer.store import Store
from rose_transfer.store.survey import verify

VERSIONS = 6
BLOCK_BYTES = 4096


class Usage(NamedTuple):
    total: int
    used: int
    free: int


class Disk:
    """Has room for `size_bytes` of what lies in `folder`: what an arrival reserves beyond that is refused by `full`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self.size_bytes = 2**40
        self.full = errno.ENOSPC
        self._really_reserve = os.posix_fallocate
        monkeypatch.setattr(shutil, "disk_usage", lambda path: self.usage())
        monkeypatch.setattr(os, "posix_fallocate", self._reserve)

    def usage(self) -> Usage:
        files = [file.lstat() for file in self._folder.rglob("*") if file.is_file()]
        used = sum({found.st_ino: found.st_blocks * 512 for found in files}.values())
        return Usage(self.size_bytes, used, max(0, self.size_bytes - used))

    def leave(self, free_bytes: int) -> None:
        """Others take all the rest."""
        self.size_bytes = self.usage().used + free_bytes

    def _reserve(self, descriptor: int, offset: int, length: int) -> None:
        reserved = os.fstat(descriptor).st_blocks * 512
        if length - reserved > self.usage().free:
            raise OSError(self.full, os.strerror(self.full))
        self._really_reserve(descriptor, offset, length)


@pytest.fixture(autouse=True)
def quick_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_PAUSE_S", 0.02)
    monkeypatch.setattr(attempts, "_PAUSE_S_MAX", 0.02)


def publish_whole(store: Store, outlet: Outlet, history: dict[int, list[Bits]]) -> int:
    version = (store.newest or 0) + 1
    history[version] = first_weights(version)
    store.publish(version, PACKING, history[version])
    outlet.announce_newest()
    return version


async def has(relay: Relay, version: int) -> None:
    await until(lambda: relay.store.newest == version and not relay._receiver._fetching)


async def refused_often(here: Site, version: int, times: int) -> None:
    """So many attempts at the version have failed."""
    pauses: set[float] = set()

    def counted() -> bool:
        waiting = [wait for wait in here.waits.snapshot() if f"another attempt at version {version}" in wait.what]
        pauses.update(wait.since_s for wait in waiting)
        return len(pauses) >= times

    await until(counted)


@pytest.mark.parametrize("full", [errno.ENOSPC, errno.EDQUOT], ids=["a full disk", "a quota"])
def test_as_few_of_the_oldest_go_as_make_room_for_what_arrives(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, full: int
) -> None:
    """Each version is whole, and what a version takes is what its going makes free."""

    async def check() -> None:
        disk = Disk(memory_path / "relay", monkeypatch)
        disk.full = full
        store, history = line(memory_path / "store", 1)
        async with (
            site(memory_path) as here,
            offered(here, store) as (outlet, port),
            here.relay(port, keep=100) as relay,
        ):
            await has(relay, 1)
            while publish_whole(store, outlet, history) < VERSIONS:
                await has(relay, store.newest or 0)
            await has(relay, VERSIONS)
            await asyncio.sleep(0)
            disk.leave(0)
            publish_whole(store, outlet, history)
            await has(relay, VERSIONS + 1)
            kept = relay.store.versions()
            assert VERSIONS - 2 <= len(kept) <= VERSIONS, kept
            assert kept == tuple(range(VERSIONS + 2 - len(kept), VERSIONS + 2)), "the oldest went"
            assert same(list(relay.store.read(VERSIONS + 1)), history[VERSIONS + 1])
            assert verify(relay.store) == ()
        store.close()

    asyncio.run(check())
    assert caplog.text.count("the disk is full: the oldest versions go") == 1


def test_none_goes_where_that_makes_no_room(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All that the older versions are made of leads to the newest one too."""

    async def check() -> None:
        disk = Disk(memory_path / "relay", monkeypatch)
        store, history = line(memory_path / "store", 1)
        async with (
            site(memory_path) as here,
            offered(here, store) as (outlet, port),
            here.relay(port, keep=100) as relay,
        ):
            await has(relay, 1)
            for version in range(2, VERSIONS + 1):
                history[version] = moved(history[version - 1], 0.02, version)
                store.publish(version, PACKING, history[version], base=version - 1)
                outlet.announce_newest()
                await has(relay, version)
            disk.leave(0)
            version = publish_whole(store, outlet, history)
            await refused_often(here, version, 5)
            assert relay.store.versions() == tuple(range(1, VERSIONS + 1))
            assert all(same(list(relay.store.read(number)), history[number]) for number in relay.store.versions())
            assert port_of(relay)
            disk.leave(2**30)
            await has(relay, version)
            assert relay.store.versions() == tuple(range(1, version + 1))
        store.close()

    asyncio.run(check())
    assert "versions go" not in caplog.text
    assert caplog.text.count("a version cannot be had yet") == 1


def test_none_goes_for_less_than_the_whole_version_takes(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one old version takes would be room for an object of the new one, and for no more."""

    async def check() -> None:
        disk = Disk(memory_path / "relay", monkeypatch)
        store, history = line(memory_path / "store", 1)
        async with (
            site(memory_path) as here,
            offered(here, store) as (outlet, port),
            here.relay(port, keep=100) as relay,
        ):
            await has(relay, 1)
            await has(relay, publish_whole(store, outlet, history))
            disk.leave(2 * BLOCK_BYTES)
            version = publish_whole(store, outlet, history)
            await refused_often(here, version, 3)
            assert relay.store.versions() == (1, 2)
        store.close()

    asyncio.run(check())


@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_a_relay_at_its_limit_goes_on_in_steps(memory_path: Path, share: float) -> None:
    """From an upstream that has room for all, and so makes nothing but steps."""

    async def check() -> None:
        store, history = line(memory_path / "store", 1)
        rng = np.random.default_rng(1)
        # Of a model as small as this one, what describes it takes as much as a bucket.
        limit = int(3.6 * sum(bits.nbytes for bits in history[1]))
        async with (
            site(memory_path) as here,
            offered(here, store) as (outlet, port),
            here.relay(port, keep=100, bytes_max=limit) as relay,
        ):
            await has(relay, 1)
            for version in range(2, 14):
                history[version] = changed(history[version - 1], share, rng)
                store.publish(version, PACKING, history[version], base=version - 1)
                outlet.announce_newest()
                await has(relay, version)
                assert relay.store.objects.used_bytes <= limit
            assert same(list(relay.store.read(13)), history[13])
            assert verify(relay.store) == ()
        store.close()

    asyncio.run(check())


def test_a_folder_that_is_taken_away_is_not_told_as_a_full_disk(
    memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        store, history = line(memory_path / "store", 1)
        async with site(memory_path) as here, offered(here, store) as (outlet, port), here.relay(port) as relay:
            await has(relay, 1)
            # Not removed piece by piece: the relay tidies up in it meanwhile.
            (memory_path / "relay" / "incoming").rename(memory_path / "taken away")
            await refused_often(here, publish_whole(store, outlet, history), 2)
            assert relay.store.versions() == (1,)
        store.close()

    asyncio.run(check())
    (told,) = (line for line in caplog.text.splitlines() if "a version cannot be had yet" in line)
    assert "look whether its folder was removed" in told
    assert "no room" not in told
    assert "rose weights verify" not in told
