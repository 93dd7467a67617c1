"""A relay has what its upstream had, serves it on, and takes each byte across the slow link once."""

from __future__ import annotations

import asyncio
import shutil
import threading
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from distribution_tools import Engine, free_port, line, offered, port_of, site, until
from store_tools import PACKING, Bits, first_weights, moved, same

from rose.errors import TransferError
from rose.waits import WaitBoard
from rose_transfer.distribution import Offer, Relay
from rose_transfer.distribution.outlet import Outlet
from rose_transfer.store import Store
from rose_transfer.store.survey import verify
from rose_transfer.transport.interface import Refused
from rose_transfer.transport.tcp import TcpServer


def publish_on(store: Store, outlet: Outlet, history: dict[int, list[Bits]], upto: int) -> None:
    assert store.newest is not None
    for version in range(store.newest + 1, upto + 1):
        history[version] = moved(history[version - 1], 0.02, version)
        store.publish(version, PACKING, history[version], base=version - 1)
        outlet.announce_newest()


async def has(relay: Relay, version: int) -> None:
    def offers_it() -> bool:
        (server,) = relay.servers or (None,)
        assert server is None or isinstance(server, TcpServer)
        return server is not None and server.newest is not None and server.newest.version == version

    await until(offers_it)


def test_dense_once_then_deltas_then_joiners_cost_the_upstream_nothing(memory_path: Path) -> None:
    async def check() -> None:
        store, history = line(memory_path / "store", 1)
        async with site(memory_path) as here, offered(here, store) as (outlet, port), here.relay(port) as relay:
            await has(relay, 1)
            dense = here.counted[0].object_bytes
            for version in (2, 3, 4):
                before = here.counted[0].object_bytes
                publish_on(store, outlet, history, version)
                await has(relay, version)
                assert here.counted[0].object_bytes - before < dense / 5
                assert same(list(relay.store.read(version)), history[version])
            crossed = here.counted[0].object_bytes
            engines = [Engine() for _ in range(3)]
            for engine in engines:
                await engine.move(here.receiver(port_of(relay)), 4)
                assert engine.has(history[4])
            await engines[0].move(here.receiver(port_of(relay)), 2)
            assert engines[0].has(history[2])
            assert here.counted[0].object_bytes == crossed
            assert verify(relay.store) == ()
        store.close()

    asyncio.run(check())


@pytest.mark.parametrize("engines", [1, 8])
def test_the_slow_link_carries_the_same_however_many_are_behind_it(memory_path: Path, engines: int) -> None:
    """One figure for both: what the publisher sends is what the store holds of these versions, to the byte."""

    async def check() -> None:
        store, history = line(memory_path / "store", 1)
        async with site(memory_path) as here, offered(here, store) as (outlet, port), here.relay(port) as relay:
            await has(relay, 1)
            behind = [(here.receiver(port_of(relay)), Engine()) for _ in range(engines)]
            for version in range(1, 5):
                publish_on(store, outlet, history, version)
                await has(relay, version)
                await asyncio.gather(*(engine.move(receiver, version) for receiver, engine in behind))
                assert all(engine.has(history[version]) for _, engine in behind)
            found = [step.manifest for version in range(1, 5) for step in store.steps(version - 1 or None, version)]
            sizes = {key: store.objects.size_bytes(key) for one in found for key in (one.key, *one.object_keys())}
            assert here.counted[0].object_bytes == sum(size or 0 for size in sizes.values())
        store.close()

    asyncio.run(check())


def test_a_relay_that_fell_behind_takes_one_merged_delta(memory_path: Path) -> None:
    async def check() -> None:
        store, history = line(memory_path / "store", 1)
        async with site(memory_path) as here, offered(here, store) as (outlet, port):
            async with here.relay(port) as relay:
                await has(relay, 1)
            publish_on(store, outlet, history, 7)
            async with here.relay(port) as relay:
                assert relay.store.newest == 1, "it goes on from what it has"
                await has(relay, 7)
                assert relay.store.versions() == (1, 7)
                assert [found.base for found in relay.store.manifests()] == [None, 1]
                assert same(list(relay.store.read(7)), history[7])
        store.close()

    asyncio.run(check())


def test_a_relay_of_a_relay(memory_path: Path) -> None:
    async def check() -> None:
        store, history = line(memory_path / "store", 2)
        async with (
            site(memory_path) as here,
            offered(here, store) as (outlet, port),
            here.relay(port, "near") as near,
            here.relay(port_of(near), "far") as far,
        ):
            publish_on(store, outlet, history, 5)
            await has(far, 5)
            engine = Engine()
            await engine.move(here.receiver(port_of(far)), 5)
            assert engine.has(history[5])
        store.close()

    asyncio.run(check())


def test_without_its_upstream_a_relay_goes_on_serving_and_says_whom_it_waits_for(memory_path: Path) -> None:
    async def check() -> None:
        store, history = line(memory_path / "store", 3)
        async with site(memory_path) as here:
            async with offered(here, store) as (_, port), here.relay(port, port=(own := free_port())) as relay:
                await has(relay, 3)
            async with here.relay(port, port=own) as relay:
                engine = Engine()
                await engine.move(here.receiver(own), 3)
                assert engine.has(history[3])
                await until(lambda: any(str(port) in wait.whom for wait in here.waits.snapshot()))
                async with offered(here, store, port=port) as (outlet, _):
                    publish_on(store, outlet, history, 4)
                    await has(relay, 4)
        store.close()

    asyncio.run(check())


def test_another_lineage_replaces_the_old_one_whole(memory_path: Path) -> None:
    async def check(first_of_new: int) -> None:
        store, _ = line(memory_path / "store", 3)
        other = Store(memory_path / "other")
        fresh = {first_of_new: first_weights(99)}
        other.publish(first_of_new, PACKING, fresh[first_of_new])
        async with site(memory_path) as here:
            async with offered(here, store) as (_, port), here.relay(port, port=(own := free_port())) as relay:
                await has(relay, 3)
                receiver, engine = here.receiver(own), Engine()
                await engine.move(receiver, 3)
                news = receiver.subscribe(after=Offer(3, store.fingerprint(3)))
            async with offered(here, other, port=port) as (outlet, _), here.relay(port, port=own) as relay:
                assert await anext(news) == Offer(first_of_new, other.fingerprint(first_of_new))
                assert relay.store.versions() == (first_of_new,), "nothing of the old one is left"
                await engine.move(receiver, first_of_new)
                assert engine.has(fresh[first_of_new])
                publish_on(other, outlet, fresh, first_of_new + 1)
                await has(relay, first_of_new + 1)
                assert same(list(relay.store.read(first_of_new + 1)), fresh[first_of_new + 1])
        store.close()
        other.close()

    for number in (1, 3, 8):
        for folder in ("store", "other", "relay"):
            shutil.rmtree(memory_path / folder, ignore_errors=True)
        asyncio.run(check(number))


def test_a_relay_retires_by_its_own_rule(memory_path: Path) -> None:
    async def check() -> None:
        store, history = line(memory_path / "store", 1)
        async with site(memory_path) as here, offered(here, store) as (outlet, port), here.relay(port, keep=2) as relay:
            for version in range(1, 7):
                publish_on(store, outlet, history, version)
                await has(relay, version)
            await until(lambda: relay.store.versions() == (5, 6))
            assert same(list(relay.store.read(5)), history[5])
            assert store.versions() == tuple(range(1, 7))
        store.close()

    asyncio.run(check())


def test_where_there_is_no_room_old_versions_go_first(memory_path: Path) -> None:
    async def check() -> None:
        store, history = line(memory_path / "store", 1)
        dense = store.objects.used_bytes
        async with (
            site(memory_path) as here,
            offered(here, store) as (outlet, port),
            here.relay(port, keep=100, bytes_max=3 * dense) as relay,
        ):
            for version in range(2, 16):
                history[version] = moved(history[version - 1], 0.3, version)
                store.publish(version, PACKING, history[version], base=version - 1)
                store.collect(2)
                outlet.announce_newest()
                await has(relay, version)
                assert relay.store.objects.used_bytes <= 3 * dense
            assert len(relay.store.versions()) < 15
            assert same(list(relay.store.read(15)), history[15])
        store.close()

    asyncio.run(check())


def test_where_there_is_no_room_at_all_a_relay_stays_where_it_is(memory_path: Path) -> None:
    async def check() -> None:
        store, history = line(memory_path / "store", 1)
        async with site(memory_path) as here, offered(here, store) as (outlet, port):
            async with here.relay(port) as relay:
                for version in (2, 3):
                    publish_on(store, outlet, history, version)
                    await has(relay, version)
                used = relay.store.objects.used_bytes
            async with here.relay(port, bytes_max=used + 500) as relay:
                history[4] = first_weights(4)
                store.publish(4, PACKING, history[4])
                outlet.announce_newest()
                await until(lambda: any("another attempt at version 4" in w.what for w in here.waits.snapshot()))
                assert relay.store.versions() == (1, 2, 3), "none goes in vain"
                engine = Engine()
                await engine.move(here.receiver(port_of(relay)), 1)
                assert engine.has(history[1])
            async with here.relay(port) as relay:
                await has(relay, 4)
        store.close()

    asyncio.run(check())


def test_a_version_that_the_disk_has_lost_is_fetched_again(memory_path: Path) -> None:
    async def check() -> None:
        store, history = line(memory_path / "store", 2)
        async with site(memory_path) as here, offered(here, store) as (_, port), here.relay(port) as relay:
            await has(relay, 2)
            for found in relay.store.manifests():
                for entry in found.buckets:
                    _spoil(relay.store.folder / "objects" / entry.key)
            receiver, engine = here.receiver(port_of(relay)), Engine()
            with pytest.raises(TransferError, match="no way leads to version 2"):
                await engine.move(receiver, 2)
            await until(lambda: any(link.base is None for link in relay.store.links()))
            await engine.move(receiver, 2)
            assert engine.has(history[2])
        store.close()

    asyncio.run(check())


def _spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_two_relays_in_one_folder(memory_path: Path) -> None:
    async def check() -> None:
        store, _ = line(memory_path / "store", 1)
        async with site(memory_path) as here, offered(here, store) as (_, port), here.relay(port):
            with pytest.raises(TransferError, match=r"this process relays in .*: process"):
                Relay(here.client(port), memory_path / "relay", waits=here.waits, serve=[])
        store.close()

    asyncio.run(check())


def test_the_end_of_a_relay_and_of_a_receiver_waits_for_their_disks_by_name(memory_path: Path) -> None:
    async def check() -> None:
        store, _ = line(memory_path / "store", 1)
        slow = threading.Event()
        async with site(memory_path) as here, offered(here, store) as (_, port):
            async with AsyncExitStack() as entered:
                relay = await entered.enter_async_context(here.relay(port))
                await has(relay, 1)
                closing = entered.pop_all()
            relay._disk.submit(slow.wait)
            ending = asyncio.create_task(closing.aclose())
            await until(lambda: _waits_for_disk(here.waits, "the weight store"))
            slow.set()
            await ending

            slow.clear()
            receiver = here.receiver(port)
            receiver._shelf.disk("0" * 64).submit(slow.wait)
            letting_go = asyncio.create_task(asyncio.to_thread(receiver.close))
            await until(lambda: _waits_for_disk(here.waits, "this host"))
            slow.set()
            await letting_go
            assert not _waits_for_disk(here.waits, "this host")
        store.close()

    asyncio.run(check())


def _waits_for_disk(waits: WaitBoard, whom: str) -> bool:
    return ("end of reading or writing", whom) in {(wait.what, wait.whom) for wait in waits.snapshot()}


def test_a_version_that_was_not_made_from_the_newest_one(memory_path: Path) -> None:
    """The cheapest way onwards leads back first, over a version that the relay never had."""

    async def check() -> None:
        store, history = line(memory_path / "store", 2, share=0.02)
        async with site(memory_path) as here, offered(here, store) as (outlet, port):
            async with here.relay(port) as relay:
                await has(relay, 2)
            history[3] = moved(history[1], 0.02, 3)
            store.publish(3, PACKING, history[3], base=1)
            assert [step.backwards for step in store.steps(2, 3)] == [True, False]
            outlet.announce_newest()
            async with here.relay(port) as relay:
                await has(relay, 3)
                assert same(list(relay.store.read(3)), history[3])
        store.close()

    asyncio.run(check())


def test_a_token_that_is_not_accepted_ends_a_relay(memory_path: Path) -> None:
    async def check() -> None:
        store, _ = line(memory_path / "store", 1)
        async with site(memory_path) as here, offered(here, store) as (_, port):
            client = here.client(port, token="another token of the tests")
            async with Relay(client, memory_path / "relay", waits=here.waits, serve=[]) as relay:
                with pytest.raises(Refused):
                    await relay.run()
        store.close()

    asyncio.run(check())


def test_a_version_that_the_upstream_cannot_give_is_passed_over(memory_path: Path) -> None:
    async def check() -> None:
        store, history = line(memory_path / "store", 1)
        async with site(memory_path) as here, offered(here, store) as (outlet, port), here.relay(port) as relay:
            await has(relay, 1)
            history[2] = moved(history[1], 0.02, 2)
            made = store.publish(2, PACKING, history[2], base=1)
            _spoil(store.folder / "objects" / made.buckets[0].key)
            outlet.announce_newest()
            await until(lambda: any("another attempt at version 2" in wait.what for wait in here.waits.snapshot()))
            assert relay.store.versions() == (1,), "what was there is there"
            publish_on(store, outlet, history, 3)
            await has(relay, 3)
            assert same(list(relay.store.read(3)), history[3])
        store.close()

    asyncio.run(check())


@pytest.mark.parametrize("first_of_new", [1, 2, 3])
def test_another_lineage_after_the_disk_has_lost_the_newest_version(memory_path: Path, first_of_new: int) -> None:
    async def check() -> None:
        store, _ = line(memory_path / "store", 3)
        store.retire(2)
        async with site(memory_path) as here, offered(here, store) as (outlet, port):
            async with here.relay(port, port=free_port()) as relay:
                await has(relay, 3)
                assert relay.store.versions() == (1, 3)
            await outlet.close()
            store.clear()
            fresh = {first_of_new: first_weights(99)}
            store.publish(first_of_new, PACKING, fresh[first_of_new])
            publish_on(store, outlet, fresh, first_of_new + 1)
            async with offered(here, store) as (_, again), here.relay(again, port=free_port()) as relay:
                for found in relay.store.manifests():
                    relay.store.leave_out(found, "a test says so")
                newest = first_of_new + 1
                await until(lambda: relay.store.holds(newest, store.fingerprint(newest)))
                await has(relay, newest)
                assert same(list(relay.store.read(first_of_new + 1)), fresh[first_of_new + 1])
                assert all(relay.store.fingerprint(one) == store.fingerprint(one) for one in relay.store.versions())
        store.close()

    asyncio.run(check())
