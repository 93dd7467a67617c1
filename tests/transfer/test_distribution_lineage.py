"""Another lineage takes the place of a relay's store whole or not at all, wherever a kill or damage strikes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from distribution_main import die_at
from distribution_tools import PATIENT, WATCH_S, Engine, free_port, line, offered, site, until
from store_tools import PACKING, Bits, first_weights, moved, same

from rose.errors import TransferError
from rose_transfer.codec import MalformedDelta
from rose_transfer.distribution import Fetched, Relay, lineage
from rose_transfer.store import NoRoom, Store
from rose_transfer.store.survey import verify

FIRST_OF_NEW = 2


def other_line(folder: Path) -> tuple[Store, dict[int, list[Bits]]]:
    """A lineage that begins from scratch, with two versions."""
    store = Store(folder, compress=True)
    history = {FIRST_OF_NEW: first_weights(99)}
    history[FIRST_OF_NEW + 1] = moved(history[FIRST_OF_NEW], 0.02, 99)
    store.publish(FIRST_OF_NEW, PACKING, history[FIRST_OF_NEW])
    store.publish(FIRST_OF_NEW + 1, PACKING, history[FIRST_OF_NEW + 1], base=FIRST_OF_NEW)
    return store, history


def fetched_from(store: Store) -> Fetched:
    assert store.newest is not None
    steps = tuple((step.manifest.key, step.backwards) for step in store.steps(None, store.newest))
    return Fetched(store.newest, store.fingerprint(store.newest), store.folder / "objects", steps, False, 0)


def switch(folder: Path, fetched: Fetched) -> None:
    """What a relay does with it, end to end."""
    lineage.take_in_anew(folder, fetched, bytes_max=None)
    lineage.replace(folder)
    lineage.remove_dropped(folder)


def is_killed(change: int, work: Callable[[], None]) -> bool:
    """Run it in another process, which dies before that change to the disk; False if it has done all by then."""
    child = os.fork()
    if child == 0:
        try:
            die_at(change)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Store]:
    lineage.settle(folder)
    assert {path.name for path in folder.iterdir()} == {lineage.STORE}, "no rest is left"
    with contextlib.closing(Store(folder / lineage.STORE)) as store:
        yield store


def test_killed_at_every_change_to_the_disk_one_lineage_is_there_whole(memory_path: Path) -> None:
    other, fresh = other_line(memory_path / "other")
    store, history = line(memory_path / "old", 2)
    store.close()
    old, new = 2, FIRST_OF_NEW + 1
    found: list[int] = []
    for change in range(1, 400):
        folder = memory_path / f"relay-{change}"
        shutil.copytree(memory_path / "old", folder / lineage.STORE)
        killed = is_killed(change, partial(switch, folder, fetched_from(other)))
        if change % 3 == 0 or not (folder / lineage.STORE).exists():
            # What goes on after a kill may be killed as well.
            is_killed(1 + change % 5, partial(lineage.settle, folder))
        with opened(folder) as kept:
            assert kept.newest in (old, new)
            expected = history if kept.newest == old else fresh
            assert all(same(list(kept.read(version)), expected[version]) for version in expected)
            assert kept.versions() == tuple(expected)
            assert verify(kept) == ()
            found.append(kept.newest)
        shutil.rmtree(folder)
        if not killed:
            break
    assert not killed, "every change was tried"
    assert found == sorted(found), "the old one until the new one is there, which then stays"
    assert set(found) == {old, new}
    other.close()


def test_a_lineage_that_is_damaged_or_has_no_room_leaves_what_is_there(memory_path: Path) -> None:
    other, _ = other_line(memory_path / "other")
    folder = memory_path / "relay"
    store, history = line(folder / lineage.STORE, 4)
    fetched = fetched_from(other)
    with pytest.raises(NoRoom):
        lineage.take_in_anew(folder, fetched, bytes_max=other.objects.used_bytes // 2)
    last = other.folder / "objects" / other.steps(2, 3)[0].manifest.buckets[-1].key
    spoil(last)
    with pytest.raises((TransferError, MalformedDelta)):
        lineage.take_in_anew(folder, fetched, bytes_max=None)
    assert {path.name for path in folder.iterdir()} == {lineage.STORE}
    store.close()
    with opened(folder) as kept:
        assert same(list(kept.read(4)), history[4])
    other.close()


def test_a_relay_serves_the_old_lineage_until_the_new_one_is_whole(memory_path: Path) -> None:
    """What is damaged between fetch and store is found, and what was served goes on being served."""

    async def check() -> None:
        store, history = line(memory_path / "store", 3)
        other, fresh = other_line(memory_path / "other")
        upstream = free_port()
        async with site(memory_path) as here:
            async with offered(here, store, port=upstream), here.relay(upstream, port=(own := free_port())) as relay:
                await offers(relay, 3)
            async with here.relay(upstream, port=own) as relay:
                real = relay._receiver.fetch
                tries: list[int] = []

                async def damaged(start: int | None, bits: str | None, goal: int, *, deadline_s: float) -> Fetched:
                    fetched = await real(start, bits, goal, deadline_s=deadline_s)
                    tries.append(goal)
                    if len(tries) < 3:
                        spoil(fetched.objects_folder / other.steps(2, 3)[0].manifest.buckets[-1].key)
                    return fetched

                relay._receiver.fetch = damaged  # type: ignore[method-assign]
                async with offered(here, other, port=upstream):
                    receiver, engine = here.receiver(own), Engine()
                    await until(lambda: len(tries) == 1)
                    await until(lambda: any("another attempt" in wait.what for wait in here.waits.snapshot()))
                    assert relay.store.holds(3, store.fingerprint(3))
                    await engine.move(receiver, 3)
                    assert engine.has(history[3])
                    await offers(relay, FIRST_OF_NEW + 1, other.fingerprint(FIRST_OF_NEW + 1))
                    await engine.move(receiver, FIRST_OF_NEW + 1)
                    assert engine.has(fresh[FIRST_OF_NEW + 1])
                    assert verify(relay.store) == ()
        store.close()
        other.close()

    asyncio.run(check())


def test_a_lineage_for_which_there_is_no_room_costs_the_old_one_nothing(
    memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        # All of the old ones take less than the new one, for zeros pack well.
        weights = [np.zeros_like(bucket) for bucket in first_weights(1)]
        store = Store(memory_path / "store", compress=True)
        store.publish(1, PACKING, weights)
        other, _ = other_line(memory_path / "other")
        limit = other.objects.used_bytes // 2
        upstream = free_port()
        async with site(memory_path) as here, here.relay(upstream, bytes_max=limit) as relay:
            async with offered(here, store, port=upstream) as (outlet, _):
                await offers(relay, 1)
                store.publish(2, PACKING, moved(weights, 0.001, 2), base=1)
                outlet.announce_newest()
                await offers(relay, 2)
            async with offered(here, other, port=upstream):
                await until(lambda: any("another attempt" in wait.what for wait in here.waits.snapshot()))
                assert relay.store.versions() == (1, 2)
                assert "another lineage is not taken in" in caplog.text
                assert "--disk-gb" in caplog.text
        store.close()
        other.close()

    asyncio.run(check())


@pytest.mark.parametrize("closed", [False, True], ids=["goes on serving", "is closed"])
def test_who_stops_following_while_a_lineage_is_replaced_has_one_whole(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    begun, go_on, replace = threading.Event(), threading.Event(), lineage.replace

    def slow(folder: Path) -> None:
        begun.set()
        assert go_on.wait(PATIENT)
        replace(folder)

    async def check() -> None:
        store, _ = line(memory_path / "relay" / lineage.STORE, 4)
        store.close()
        other, fresh = other_line(memory_path / "other")
        own = free_port()
        async with site(memory_path) as here, offered(here, other) as (_, port):
            relay = Relay(
                here.client(port), memory_path / "relay", waits=here.waits, serve=[here.serve(own)], watch_s=WATCH_S
            )
            async with relay:
                following = asyncio.create_task(relay.run())
                await until(begun.is_set)
                following.cancel()
                await asyncio.wait([following])
                if not closed:
                    go_on.set()
                    await offers(relay, FIRST_OF_NEW + 1)
                    engine = Engine()
                    await engine.move(here.receiver(own), FIRST_OF_NEW + 1)
                    assert engine.has(fresh[FIRST_OF_NEW + 1])
                else:
                    asyncio.get_running_loop().call_soon(go_on.set)
        with contextlib.closing(Store(memory_path / "relay" / lineage.STORE)) as kept:
            assert same(list(kept.read(FIRST_OF_NEW + 1)), fresh[FIRST_OF_NEW + 1])
        other.close()

    monkeypatch.setattr(lineage, "replace", slow)
    asyncio.run(check())


async def offers(relay: Relay, version: int, fingerprint: str = "") -> None:
    def is_offered() -> bool:
        newest = [getattr(server, "newest", None) for server in relay.servers]
        return any(one is not None and one.version == version and fingerprint in one.key for one in newest)

    await until(is_offered)


def spoil(path: Path) -> None:
    """Other bytes in a new file: where the old one is linked from elsewhere, it stays sound."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(bytes(data))
