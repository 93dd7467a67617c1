"""Damaged disks, full disks, silent peers, races and crowds: the right bits or a clear error, never a part."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from distribution_tools import PATIENT, Engine, line, offered, port_of, site
from store_tools import PACKING, moved

from rose.errors import DeadlineExceeded, TransferError
from rose_transfer.distribution import Receiver
from rose_transfer.store import NoRoom, Store
from rose_transfer.transport.interface import ObjectMissing

Damage = Callable[[Path], None]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def remove(path: Path) -> None:
    path.unlink()


def objects_of(store: Store, version: int, base: int | None) -> list[Path]:
    """The files of one way: its deltas, then its manifest, then the packing."""
    (found,) = (one for one in store.manifests() if (one.version, one.base) == (version, base))
    keys = [*(entry.key for entry in found.buckets), found.key, found.packing]
    return [store.folder / "objects" / key for key in keys]


@pytest.mark.parametrize("damage", [flip, halve, remove])
@pytest.mark.parametrize("which", range(4))
def test_a_damaged_delta_gives_way_to_the_dense_version(memory_path: Path, damage: Damage, which: int) -> None:
    async def check() -> None:
        store, history = line(memory_path / "store", 2)
        # Version 3 is there twice: in steps, and whole.
        store.publish(3, PACKING, moved(history[2], 0.02, 3), base=2)
        store.retire(1, 2)
        history[4] = moved(history[2], 0.02, 4)
        store.publish(4, PACKING, history[4], base=3)
        assert store.steps(3, 4)[0].manifest.base == 3
        async with site(memory_path) as here, offered(here, store) as (_, port):
            receiver, engine = here.receiver(port), Engine()
            await engine.move(receiver, 3)
            store._write_whole(4)
            damage(objects_of(store, 4, 3)[which])
            fetched = await engine.move(receiver, 4)
            assert engine.has(history[4])
            assert len(fetched.steps) == 1
        store.close()

    asyncio.run(check())


@pytest.mark.parametrize("damage", [flip, halve, remove])
def test_a_damaged_manifest_or_packing_is_mended_from_memory(memory_path: Path, damage: Damage) -> None:
    async def check() -> None:
        store, history = line(memory_path / "store", 1)
        async with site(memory_path) as here, offered(here, store) as (_, port):
            for path in objects_of(store, 1, None)[4:]:
                assert store.packing(1) == PACKING
                damage(path)
                engine = Engine()
                await engine.move(here.receiver(port), 1)
                assert engine.has(history[1])
        store.close()

    asyncio.run(check())


@pytest.mark.parametrize("damage", [flip, halve, remove])
def test_where_no_other_way_leads_there_is_an_error_and_nothing_changes(memory_path: Path, damage: Damage) -> None:
    async def check() -> None:
        store, history = line(memory_path / "store", 2)
        async with site(memory_path) as here, offered(here, store) as (_, port):
            receiver, engine = here.receiver(port), Engine()
            await engine.move(receiver, 1)
            damage(objects_of(store, 2, 1)[0])
            with pytest.raises(TransferError, match=r"version 2 could not be had in \d attempts.*no way leads"):
                await engine.move(receiver, 2)
            assert engine.has(history[1])
            history[3] = moved(history[2], 0.02, 3)
            store.publish(3, PACKING, history[3], base=2)
            await engine.move(receiver, 3)
            assert engine.has(history[3]), "the next version is there for everybody again"
        store.close()

    asyncio.run(check())


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", folder], capture_output=True)
    if made.returncode:
        pytest.skip(f"no disk can be mounted here: {made.stderr.decode()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True, capture_output=True)


def test_a_full_disk_is_an_error_and_with_room_the_rest_is_fetched(memory_path: Path) -> None:
    async def check(folder: Path) -> None:
        store, history = line(memory_path / "store", 1)
        async with site(memory_path) as here, offered(here, store) as (_, port):
            receiver = Receiver(here.client(port), folder / "receiver", waits=here.waits)
            with pytest.raises(NoRoom):
                await receiver.fetch(None, None, 1, deadline_s=PATIENT)
            subprocess.run(["mount", "-o", "remount,size=1M", folder], check=True, capture_output=True)
            engine = Engine()
            fetched = await engine.move(receiver, 1)
            assert engine.has(history[1])
            assert fetched.bytes_received < store.objects.used_bytes
        store.close()

    with small_disk(memory_path / "small", 3 * 4096 + 4096) as folder:
        asyncio.run(check(folder))


def test_a_server_that_says_nothing_costs_a_named_deadline(memory_path: Path) -> None:
    async def check() -> None:
        silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        async with site(memory_path) as here:
            receiver = here.receiver(silent.sockets[0].getsockname()[1])
            with pytest.raises(DeadlineExceeded, match="way-7-from-nothing"):
                await receiver.fetch(None, None, 7, deadline_s=0.5)
        silent.close()

    asyncio.run(check())


def test_peers_that_say_nothing_hold_nobody_up(memory_path: Path) -> None:
    async def check() -> None:
        store, history = line(memory_path / "store", 2)
        async with site(memory_path) as here, offered(here, store) as (_, port):
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            engine = Engine()
            await engine.move(here.receiver(port), 2)
            assert engine.has(history[2])
            for _, writer in silent:
                writer.close()
        store.close()

    asyncio.run(check())


def test_versions_are_retired_while_they_are_fetched(memory_path: Path) -> None:
    """Each receiver takes whatever is newest; what it is told is missing by then is retired, never half there."""

    async def check() -> None:
        store, history = line(memory_path / "store", 1)
        async with site(memory_path) as here, offered(here, store) as (outlet, port):
            receivers = [(here.receiver(port), Engine()) for _ in range(4)]

            async def follow(receiver: Receiver, engine: Engine) -> int:
                missed = 0
                async for offer in receiver.subscribe():
                    try:
                        await engine.move(receiver, offer.version)
                    except ObjectMissing:
                        missed += 1
                    else:
                        assert engine.has(history[offer.version])
                        if offer.version == 30:
                            return missed
                raise AssertionError("news do not end")

            following = [asyncio.create_task(follow(*one)) for one in receivers]
            for version in range(2, 31):
                history[version] = moved(history[version - 1], 0.02, version)
                await asyncio.to_thread(store.publish, version, PACKING, history[version], version - 1)
                outlet.announce_newest()
                await asyncio.to_thread(store.collect, 1)
            async with asyncio.timeout(PATIENT):
                await asyncio.gather(*following)
        store.close()

    asyncio.run(check())


def test_sixteen_start_at_once_twenty_times(memory_path: Path) -> None:
    async def check() -> None:
        store, history = line(memory_path / "store", 1)
        async with site(memory_path) as here, offered(here, store) as (outlet, port):
            served = here.counted[0]
            for number in range(2, 22):
                history[number] = moved(history[number - 1], 0.02, number)
                store.publish(number, PACKING, history[number], base=number - 1)
                outlet.announce_newest()
                store.collect(3)
                crowd = [(here.receiver(port), Engine()) for _ in range(16)]
                before = served.object_bytes
                fetched = await asyncio.gather(*(engine.move(receiver, number) for receiver, engine in crowd))
                assert all(engine.has(history[number]) for _, engine in crowd)
                # A link that stalls on a busy machine is given up, and its pieces are sent again.
                received = sum(one.bytes_received for one in fetched)
                assert received <= served.object_bytes - before <= 1.5 * received
                assert len({one.bytes_received for one in fetched}) == 1, "nobody gets more than another"
                await here.close()
            assert port == port_of(outlet)
        store.close()

    asyncio.run(check())
