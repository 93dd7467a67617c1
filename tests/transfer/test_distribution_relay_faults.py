"""A relay goes on, and offers what it has, whatever fails behind a version or is announced in place of one."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from distribution_tools import WATCH_S, free_port, line, offered, port_of, site, until
from store_tools import PACKING, moved, same

from rose_transfer.distribution import Fetched, Relay, Relayed, attempts
from rose_transfer.distribution.subscription import Subscription
from rose_transfer.store import Objects
from rose_transfer.transport.interface import Announcement
from rose_transfer.transport.tcp import TcpServer


async def has(relay: Relay, version: int) -> None:
    def offers_it() -> bool:
        (server,) = relay.servers
        assert isinstance(server, TcpServer)
        return server.newest is not None and server.newest.version == version

    await until(offers_it)


def test_a_version_is_offered_although_what_arrived_cannot_be_tidied_away(memory_path: Path) -> None:
    # A folder where a file belongs: to remove it fails every time.
    (memory_path / "relay" / "incoming" / "arriving" / ("0" * 64)).mkdir(parents=True)

    async def check() -> None:
        store, history = line(memory_path / "store", 1)
        async with site(memory_path) as here, offered(here, store) as (outlet, port), here.relay(port) as relay:
            await has(relay, 1)
            history[2] = moved(history[1], 0.02, 2)
            store.publish(2, PACKING, history[2], base=1)
            outlet.announce_newest()
            await has(relay, 2)
            assert same(list(relay.store.read(2)), history[2])
        store.close()

    asyncio.run(check())


def test_what_is_announced_and_is_no_version_is_passed_over(memory_path: Path) -> None:
    async def check() -> None:
        port = free_port()
        store, history = line(memory_path / "store", 1)
        (memory_path / "others").mkdir()
        async with site(memory_path) as here:
            other = here.serve(port)(Objects(memory_path / "others"))
            await other.start()
            other.announce(Announcement(7, "another-kind-of-server"))
            async with here.relay(port) as relay:
                asked = "version 8"
                await until(lambda: any(asked in wait.what for wait in here.waits.snapshot()))
                assert relay.store.versions() == ()
                await other.close()
                async with offered(here, store, port=port) as (outlet, _):
                    assert port_of(outlet) == port
                    await has(relay, 1)
                    assert same(list(relay.store.read(1)), history[1])
        store.close()

    asyncio.run(check())


def test_each_version_is_told_of_once_whatever_fails_behind_it(memory_path: Path) -> None:
    """The second step is damaged once: the first one's version is there by then, is offered, and is told of."""

    async def check() -> None:
        store, history = line(memory_path / "store", 2)
        told: list[Relayed] = []
        async with site(memory_path) as here, offered(here, store) as (outlet, port):
            relay = Relay(
                here.client(port),
                memory_path / "relay",
                waits=here.waits,
                serve=[here.serve()],
                on_version=told.append,
                watch_s=WATCH_S,
            )
            real = relay._receiver.fetch
            damaged: list[Path] = []

            async def fetch(start: int | None, bits: str | None, goal: int, *, deadline_s: float) -> Fetched:
                fetched = await real(start, bits, goal, deadline_s=deadline_s)
                if not damaged:
                    damaged.append(fetched.objects_folder / store.steps(1, 2)[0].manifest.buckets[0].key)
                    damaged[0].write_bytes(b"damaged")
                return fetched

            relay._receiver.fetch = fetch  # type: ignore[method-assign]
            async with relay:
                following = asyncio.create_task(relay.run())
                await has(relay, 2)
                history[3] = moved(history[2], 0.02, 3)
                store.publish(3, PACKING, history[3], base=2)
                outlet.announce_newest()
                await has(relay, 3)
                await until(lambda: len(told) == 3)
                following.cancel()
                await asyncio.wait([following])
            assert [one.version for one in told] == [1, 2, 3]
            assert sum(one.bytes_received for one in told) == here.counted[0].object_bytes
            assert all(one.seconds > 0 for one in told)
        store.close()

    asyncio.run(check())


def test_a_number_that_no_version_can_have_is_refused(memory_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        port = free_port()
        store, history = line(memory_path / "store", 1)
        (memory_path / "others").mkdir()
        async with site(memory_path) as here:
            other = here.serve(port)(Objects(memory_path / "others"))
            await other.start()
            told = Announcement(1, f"version-{2**64 - 1}-{'0' * 64}")
            object.__setattr__(told, "version", 2**64 - 1)
            other.announce(told)
            async with here.relay(port) as relay:
                await until(lambda: "NEWS frame that means nothing" in caplog.text)
                assert relay.store.versions() == ()
                await other.close()
                async with offered(here, store, port=port):
                    await has(relay, 1)
                    assert same(list(relay.store.read(1)), history[1])
        store.close()

    asyncio.run(check())


@pytest.mark.parametrize("others", [0, 1, 2])
def test_a_relay_that_follows_itself_says_so_once(
    memory_path: Path, others: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        ports = [free_port() for _ in range(others + 1)]
        async with AsyncExitStack() as stack:
            here = await stack.enter_async_context(site(memory_path))
            for number, port in enumerate(ports):
                upstream = ports[(number + 1) % len(ports)]
                await stack.enter_async_context(here.relay(upstream, f"relay-{number}", port=port))
            await until(lambda: caplog.text.count("this relay follows itself") == len(ports))
            assert caplog.text.count(f"relays_between={others}") == len(ports)
            # One more round could say it again.
            asked = [len(one.made) for one in here.counted]
            await until(lambda: all(len(one.made) > before for one, before in zip(here.counted, asked, strict=True)))
            assert caplog.text.count("this relay follows itself") == len(ports)

    with caplog.at_level(logging.WARNING):
        asyncio.run(check())


def test_a_relay_of_relays_does_not_follow_itself(memory_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        store, _ = line(memory_path / "store", 1)
        async with (
            site(memory_path) as here,
            offered(here, store) as (_, port),
            here.relay(port, "near") as near,
            here.relay(port_of(near), "far") as far,
        ):
            await until(lambda: len(far._above.relays()) == 2)
            assert far._above.relays()[1:] == near._above.relays()
        store.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(check())
    assert "follows itself" not in caplog.text


def test_a_relay_asks_ever_less_often_what_has_not_changed(memory_path: Path) -> None:
    async def check() -> None:
        store, _ = line(memory_path / "store", 1)
        async with (
            site(memory_path) as here,
            offered(here, store) as (_, port),
            Relay(here.client(port), memory_path / "relay", waits=here.waits, serve=[]) as relay,
        ):
            asked = []
            for _ in range(40):
                before = len(here.counted[0].made)
                await relay._above.look_up()
                # A text is asked for in one piece or more, or not at all.
                asked.append(len(here.counted[0].made) > before)
            assert [turn for turn, did in enumerate(asked) if did] == [0, 2, 6, 14, 30]
        store.close()

    asyncio.run(check())


def test_an_upstream_that_is_away_is_told_of_at_once_and_when_it_answers(
    memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Though the questions after the first one are held for longer than this test may take."""

    async def check() -> None:
        port = free_port()
        store, _ = line(memory_path / "store", 1)
        async with site(memory_path) as here:
            news = Subscription(here.client(port), watch_s=3600.0).offers(None)
            waiting = asyncio.ensure_future(anext(news))
            await until(lambda: "no answer about new weights" in caplog.text)
            assert f":{port}" in caplog.text
            async with offered(here, store, port=port):
                assert (await waiting).version == 1
            assert "answers again" in caplog.text
        store.close()

    with caplog.at_level(logging.INFO):
        asyncio.run(check())


def test_where_there_is_no_room_a_relay_tries_ever_less_often_and_says_it_once(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attempts, "_PAUSE_S", 0.05)
    monkeypatch.setattr(attempts, "_PAUSE_S_MAX", 0.4)
    pauses: dict[float, float] = {}

    async def check() -> None:
        store, _ = line(memory_path / "store", 1)
        async with (
            site(memory_path) as here,
            offered(here, store) as (_, port),
            here.relay(port, bytes_max=store.objects.used_bytes // 2) as relay,
        ):

            def paused(times: int) -> bool:
                pausing = [wait for wait in here.waits.snapshot() if "another attempt at version 1" in wait.what]
                pauses.update({wait.since_s: round(wait.deadline_s - wait.since_s, 3) for wait in pausing})
                return len(pauses) == times

            await until(lambda: paused(6))
            assert relay.store.versions() == ()
        store.close()

    asyncio.run(check())
    assert list(pauses.values()) == [0.05, 0.1, 0.2, 0.4, 0.4, 0.4]
    assert caplog.text.count("a version cannot be had yet") == 1
    assert "--disk-gb" in caplog.text


def test_another_version_ends_the_pause_before_the_next_attempt(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is longer than this test may take."""
    monkeypatch.setattr(attempts, "_PAUSE_S", 3600.0)

    async def check() -> None:
        store, history = line(memory_path / "store", 1)
        async with (
            site(memory_path) as here,
            offered(here, store) as (outlet, port),
            here.relay(port, bytes_max=store.objects.used_bytes // 2),
        ):
            for version in (1, 2, 3):
                asked = f"another attempt at version {version}"
                await until(lambda asked=asked: any(asked in wait.what for wait in here.waits.snapshot()))
                history[version + 1] = moved(history[version], 0.02, version + 1)
                store.publish(version + 1, PACKING, history[version + 1], base=version)
                outlet.announce_newest()
        store.close()

    asyncio.run(check())
