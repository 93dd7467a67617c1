"""A receiver ends with the bits that were published, fetches nothing else, and nothing twice."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from distribution_tools import PATIENT, Engine, free_port, line, offered, site, until
from store_tools import PACKING, first_weights, moved
from transport_tools import TOKEN, fetched

from rose.errors import ContractError, TransferError
from rose.waits import WaitBoard
from rose_transfer.distribution import Offer, Receiver, shelf
from rose_transfer.distribution.outlet import Outlet
from rose_transfer.distribution.way import WayAsk
from rose_transfer.store import BucketId, Objects, Packing, Store, manifest
from rose_transfer.transport.interface import ObjectMissing, Refused
from rose_transfer.transport.landing import MemoryLanding
from rose_transfer.transport.shared_memory import SharedMemoryClient, SharedMemoryServer
from rose_transfer.transport.tcp import TcpClient, TcpServer


def test_from_nothing_then_onwards_then_back(memory_path: Path) -> None:
    async def check() -> None:
        store, history = line(memory_path / "store", 5)
        async with site(memory_path) as here, offered(here, store) as (_, port):
            receiver, engine = here.receiver(port), Engine()
            for goal, steps in ((2, 2), (3, 1), (5, 1), (1, 1), (5, 1), (5, 0)):
                fetched = await engine.move(receiver, goal)
                assert engine.has(history[goal])
                assert (fetched.version, fetched.fingerprint) == (goal, store.fingerprint(goal))
                assert len(fetched.steps) == steps
                assert fetched.start_known or goal == 2
        store.close()

    asyncio.run(check())


def test_nothing_but_what_the_wanted_buckets_need(memory_path: Path) -> None:
    wanted = {BucketId("all", 1), BucketId("all", 3)}
    asked: list[Packing] = []

    def of_this_rank(packing: Packing) -> set[BucketId]:
        asked.append(packing)
        return wanted

    async def check() -> None:
        store, history = line(memory_path / "store", 2)
        async with site(memory_path) as here, offered(here, store) as (_, port):
            receiver, engine = here.receiver(port, wanted=of_this_rank), Engine(lambda _: wanted)
            fetched = await receiver.fetch(None, None, 2, deadline_s=PATIENT)
            engine.apply(fetched)
            assert {bucket: bits.tobytes() for bucket, bits in engine.bits.items()} == {
                bucket: history[2][bucket.index].tobytes() for bucket in wanted
            }
            objects = Objects(fetched.objects_folder)
            expected: set[str] = set()
            for key, _ in fetched.steps:
                found = manifest.from_bytes(objects.read(key))
                expected |= {key, found.packing, *(e.key for e in found.buckets if e.bucket_id in wanted)}
            assert set(objects.known()) == expected
            assert fetched.bytes_received == objects.used_bytes
            await engine.move(receiver, 1)
        assert asked == [PACKING], "asked once for each packing"
        store.close()

    asyncio.run(check())


def test_what_is_there_is_not_fetched_again(memory_path: Path) -> None:
    async def check() -> None:
        store, _ = line(memory_path / "store", 3)
        async with site(memory_path) as here, offered(here, store) as (_, port):
            receiver = here.receiver(port, "one")
            first = await receiver.fetch(None, None, 3, deadline_s=PATIENT)
            again = await receiver.fetch(None, None, 3, deadline_s=PATIENT)
            receiver.close()
            with pytest.raises(ContractError, match="let go"):
                await receiver.fetch(None, None, 3, deadline_s=PATIENT)
            receiver = here.receiver(port, "one")
            restarted = await receiver.fetch(None, None, 3, deadline_s=PATIENT)
            assert first.bytes_received > 0
            assert (again.bytes_received, restarted.bytes_received) == (0, 0)
            assert here.counted[0].object_bytes == first.bytes_received
            receiver.forget(keep=[first])
            assert (await receiver.fetch(None, None, 3, deadline_s=PATIENT)).bytes_received == 0
            receiver.forget()
            assert {path.name for path in first.objects_folder.iterdir()} == {store.packing_key(3)}
            packing_bytes = store.objects.size_bytes(store.packing_key(3)) or 0
            anew = await receiver.fetch(None, None, 3, deadline_s=PATIENT)
            assert anew.bytes_received == first.bytes_received - packing_bytes
        store.close()

    asyncio.run(check())


def test_other_bits_under_the_number_one_holds_are_never_gone_on_from(memory_path: Path) -> None:
    async def check() -> None:
        store, history = line(memory_path / "store", 3)
        async with site(memory_path) as here, offered(here, store) as (_, port):
            receiver, engine = here.receiver(port), Engine(version=2, fingerprint="0" * 64)
            fetched = await engine.move(receiver, 3)
            assert not fetched.start_known
            assert engine.has(history[3])
        store.close()

    asyncio.run(check())


def test_a_retired_version_is_missing_and_a_start_that_was_retired_begins_anew(memory_path: Path) -> None:
    async def check() -> None:
        store, history = line(memory_path / "store", 6)
        async with site(memory_path) as here, offered(here, store) as (_, port):
            receiver, engine = here.receiver(port), Engine()
            await engine.move(receiver, 2)
            store.collect(2)
            with pytest.raises(ObjectMissing, match="version 4 is not kept upstream"):
                await receiver.fetch(None, None, 4, deadline_s=PATIENT)
            assert not (await engine.move(receiver, 6)).start_known
            assert engine.has(history[6])
        store.close()

    asyncio.run(check())


def test_news_skip_what_was_overtaken_and_come_once(memory_path: Path) -> None:
    async def check() -> None:
        store, history = line(memory_path / "store", 2)
        async with site(memory_path) as here, offered(here, store) as (outlet, port):
            news = here.receiver(port).subscribe()
            assert await anext(news) == Offer(2, store.fingerprint(2))
            for version in (3, 4):
                history[version] = moved(history[version - 1], 0.1, version)
                store.publish(version, PACKING, history[version], base=version - 1)
                outlet.announce_newest()
                outlet.announce_newest()
            await until(lambda: here.waits.snapshot() == ())
            assert await anext(news) == Offer(4, store.fingerprint(4))
            waiting = asyncio.ensure_future(anext(news))
            await until(lambda: any("version 5" in wait.what for wait in here.waits.snapshot()))
            waiting.cancel()
            await asyncio.wait([waiting])
        store.close()

    asyncio.run(check())


def test_news_outlast_a_server_and_tell_of_another_lineage(memory_path: Path) -> None:
    async def check() -> None:
        store, _ = line(memory_path / "store", 4)
        async with site(memory_path) as here:
            async with offered(here, store) as (_, port):
                receiver = here.receiver(port)
                news = receiver.subscribe(after=Offer(3, store.fingerprint(3)))
                assert (await anext(news)).version == 4
            store.close()
            other = Store(memory_path / "other")
            other.publish(1, PACKING, first_weights(99))
            waiting = asyncio.ensure_future(anext(news))
            async with offered(here, other, port=port):
                assert await waiting == Offer(1, other.fingerprint(1))
            other.close()

    asyncio.run(check())


def test_a_wrong_token_ends_news_and_fetches(memory_path: Path) -> None:
    async def check() -> None:
        store, _ = line(memory_path / "store", 1)
        async with site(memory_path) as here, offered(here, store) as (_, port):
            client = here.client(port, token="another token of the tests")
            receiver = Receiver(client, memory_path / "receiver", waits=here.waits)
            with pytest.raises(Refused):
                await anext(receiver.subscribe())
            with pytest.raises(Refused):
                await receiver.fetch(None, None, 1, deadline_s=PATIENT)
        store.close()

    asyncio.run(check())


def test_one_receiver_at_a_time_in_a_folder(memory_path: Path) -> None:
    async def check() -> None:
        async with site(memory_path) as here:
            first = here.receiver(free_port(), "one")
            with pytest.raises(TransferError, match=rf"this process fetches into .*one already: process {os.getpid()}"):
                here.receiver(free_port(), "one")
            first.close()
            here.receiver(free_port(), "one")

    asyncio.run(check())


def test_the_folder_of_a_receiver_is_held_across_processes_and_freed_by_a_kill(memory_path: Path) -> None:
    ready, tell = os.pipe()
    holder = os.fork()
    if holder == 0:
        try:
            Receiver(TcpClient("127.0.0.1", 9, token=TOKEN, waits=WaitBoard()), memory_path, waits=WaitBoard())
            os.write(tell, b"held")
            signal.pause()
        finally:
            os._exit(1)

    async def check() -> None:
        async with site(memory_path.parent) as here:
            with pytest.raises(TransferError, match=f"process {holder}"):
                Receiver(here.client(9), memory_path, waits=here.waits)
            os.kill(holder, signal.SIGKILL)
            os.waitpid(holder, 0)
            Receiver(here.client(9), memory_path, waits=here.waits).close()

    assert os.read(ready, 4) == b"held"
    os.close(ready)
    os.close(tell)
    asyncio.run(check())


def test_one_fetch_at_a_time(memory_path: Path) -> None:
    async def check() -> None:
        store, _ = line(memory_path / "store", 1)
        async with site(memory_path) as here, offered(here, store) as (_, port):
            receiver = here.receiver(port)
            both = await asyncio.gather(
                *(receiver.fetch(None, None, 1, deadline_s=PATIENT) for _ in range(2)), return_exceptions=True
            )
            assert isinstance(both[1], ContractError)
            assert not isinstance(both[0], BaseException)
            fetching = asyncio.create_task(receiver.fetch(None, None, 1, deadline_s=PATIENT))
            await asyncio.sleep(0)
            with pytest.raises(ContractError, match="closed while it fetches"):
                receiver.close()
            await fetching
        store.close()

    asyncio.run(check())


def test_what_cannot_be_asked_for_is_the_caller_s_fault_and_told_at_once(memory_path: Path) -> None:
    async def check() -> None:
        store, _ = line(memory_path / "store", 3)
        bits = store.fingerprint(2)
        async with site(memory_path) as here, offered(here, store) as (_, port):
            receiver = here.receiver(port)
            for start, whole, goal, told in (
                (2, None, 3, "from version 2 with fingerprint None"),
                (None, bits, 3, "from version None with fingerprint"),
                (2, bits[:-1], 3, "64 hex digits"),
                (2, bits, "3", "whole numbers"),
                (2, bits, 3.0, "whole numbers"),
                (2, bits, True, "whole numbers"),
                (2, bits, -1, "whole numbers"),
                (-1, bits, 3, "whole numbers"),
            ):
                with pytest.raises(ContractError, match=told):
                    await receiver.fetch(start, whole, goal, deadline_s=PATIENT)  # type: ignore[arg-type]
            fetched = await receiver.fetch(np.int64(2), bits, np.int64(3), deadline_s=PATIENT)  # type: ignore[arg-type]
            assert (fetched.version, fetched.start_known) == (3, True)
        store.close()

    asyncio.run(check())


@pytest.mark.parametrize("named", ["all/0", BucketId("all", 99), ("all", 0)])
def test_what_is_wanted_is_of_the_packing(memory_path: Path, named: object) -> None:
    def wanted(_: Packing) -> set[BucketId]:
        return {BucketId("all", 0), named}  # type: ignore[arg-type]

    async def check() -> None:
        store, _ = line(memory_path / "store", 1)
        async with site(memory_path) as here, offered(here, store) as (_, port):
            receiver = here.receiver(port, wanted=wanted)
            with pytest.raises(ContractError, match="a bucket is wanted that is not in the packing") as found:
                await receiver.fetch(None, None, 1, deadline_s=PATIENT)
            assert repr(named) in str(found.value)
        store.close()

    asyncio.run(check())


def test_what_a_cancelled_fetch_still_does_on_disk_ends_before_the_next_one_looks(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would take away, or keep as whole, the file that the next one writes to."""
    held_up, go_on = threading.Event(), threading.Event()
    hash_of = shelf._hash_of

    def slow(path: Path) -> str | None:
        found = hash_of(path)
        if path.parent.name == "arriving" and not go_on.is_set():
            held_up.set()
            assert go_on.wait(PATIENT)
        return found

    monkeypatch.setattr(shelf, "_hash_of", slow)

    async def check() -> None:
        store, history = line(memory_path / "store", 1)
        async with site(memory_path) as here, offered(here, store) as (_, port):
            receiver, engine = here.receiver(port), Engine()
            first = asyncio.create_task(receiver.fetch(None, None, 1, deadline_s=PATIENT))
            await until(held_up.is_set)
            first.cancel()
            await asyncio.wait([first])
            second = asyncio.create_task(engine.move(receiver, 1))
            await until(lambda: any("end of reading" in wait.what for wait in here.waits.snapshot()))
            go_on.set()
            await second
            assert engine.has(history[1])
            (step,) = store.steps(None, 1)
            sizes = [store.objects.size_bytes(key) for key in (step.manifest.key, *step.manifest.object_keys())]
            assert here.counted[0].object_bytes == sum(size or 0 for size in sizes), "nothing was fetched twice"
        store.close()

    asyncio.run(check())


def test_an_answer_larger_than_any_way_is_not_believed(memory_path: Path) -> None:
    class Endless:
        size_bytes = 2**50

        def read_at(self, offset: int, length: int) -> bytes:
            return bytes(length)

        def close(self) -> None:
            pass

    class Source:
        def has(self, key: str) -> bool:
            return True

        def open(self, key: str) -> Endless:
            return Endless()

    async def check() -> None:
        async with site(memory_path) as here:
            server = TcpServer(Source(), token=TOKEN, waits=here.waits)
            await server.start()
            with pytest.raises(TransferError, match=f"{2**50} bytes"):
                await here.receiver(server.port).fetch(None, None, 1, deadline_s=PATIENT)
            await server.close()

    asyncio.run(check())


def test_on_one_host_objects_are_handed_over_as_files(memory_path: Path) -> None:
    async def check() -> None:
        store, history = line(memory_path / "store", 3)
        spool, socket_path, waits = memory_path / "spool", memory_path / "transfer.sock", WaitBoard()
        spool.mkdir()
        serve = partial(SharedMemoryServer, token=TOKEN, waits=waits, socket_path=socket_path, spool=spool)
        outlet = Outlet(store, [serve])
        await outlet.open()
        client = SharedMemoryClient(socket_path, token=TOKEN, waits=waits)
        receiver, engine = Receiver(client, memory_path / "engine", waits=waits), Engine()
        for goal in (1, 3, 2):
            await engine.move(receiver, goal)
            assert engine.has(history[goal])
        assert all(path.name.startswith("way-") for path in spool.iterdir()), "only ways had to be written down"
        for number in range(300):
            await client.fetch(WayAsk(3, None, None, f"{number:032x}").key, MemoryLanding(), deadline_s=PATIENT)
        assert len(list(spool.iterdir())) == 256, "and of those the oldest go"
        await client.close()
        await outlet.close()
        store.close()

    asyncio.run(check())


def test_ways_that_take_long_to_make_hold_up_no_object(memory_path: Path) -> None:
    async def check() -> None:
        store, history = line(memory_path / "store", 4)
        async with site(memory_path) as here, offered(here, store) as (_, port):
            crowd = [(here.receiver(port), Engine()) for _ in range(6)]
            await asyncio.gather(*(engine.move(receiver, 1) for receiver, engine in crowd))
            with store._writing:  # as somebody who publishes for long
                behind = [asyncio.ensure_future(engine.move(receiver, 4)) for receiver, engine in crowd]
                await until(lambda: sum("to be made" in wait.what for wait in here.waits.snapshot()) == len(crowd))
                key = store.packing_key(4)
                assert await fetched(here.client(port), key) == PACKING.to_bytes()
                assert not any(one.done() for one in behind)
            assert [len((await one).steps) for one in behind] == [1] * len(crowd), "merged once, for all"
            assert all(engine.has(history[4]) for _, engine in crowd)
        store.close()

    asyncio.run(check())
