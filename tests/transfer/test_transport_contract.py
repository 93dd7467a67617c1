"""What every transport must do, on every transport."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from carried_tools import gloo_pair, nccl_pair, rdma_pair
from transport_tools import (
    OBJECTS,
    PIECE,
    QUICK_SERVER,
    Certificates,
    Folder,
    Memory,
    Pair,
    fetched,
    make_certificates,
    shared_pair,
    tcp_pair,
    until,
)

from rose.errors import ContractError, DeadlineExceeded, TransferError
from rose_transfer.transport.interface import Announcement, ObjectMissing, Refused
from rose_transfer.transport.landing import FileLanding, MemoryLanding

Opener = Callable[..., AbstractAsyncContextManager[Pair]]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Unix sockets have short paths."""
    with tempfile.TemporaryDirectory(prefix="rose-") as name:
        yield Path(name)


@pytest.fixture(
    params=[
        "tcp",
        "tls",
        "shared memory",
        "shared files",
        "rdma by tcp",
        "rdma by shared memory",
        "gloo",
        pytest.param("nccl", marks=pytest.mark.gpu),
    ]
)
def pair(request: pytest.FixtureRequest, short_folder: Path) -> Opener:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Pair]:
        match request.param:
            case "tcp":
                context = tcp_pair(Memory())
            case "tls":
                limits = replace(QUICK_SERVER, hello_s=5.0)
                context = tcp_pair(Memory(), tls=request.getfixturevalue("certificates"), limits=limits)
            case "rdma by tcp" | "rdma by shared memory":
                context = rdma_pair(Memory(), request.param.removeprefix("rdma by "))
            case "gloo":
                context = gloo_pair(Memory())
            case "nccl":
                context = nccl_pair(Memory())
            case "shared memory":
                context = shared_pair(Memory(), short_folder)
            case _:
                store = short_folder / "store"
                store.mkdir()
                for key, content in OBJECTS.items():
                    (store / key).write_bytes(content)
                context = shared_pair(Folder(store), short_folder)
        async with context as made:
            yield made

    return opened


def test_an_object_arrives_whole(pair: Opener) -> None:
    async def check() -> None:
        async with pair() as made:
            for key, content in OBJECTS.items():
                landing = MemoryLanding()
                size = await made.connect().fetch(key, landing, deadline_s=10)
                assert size == len(content) == landing.complete_bytes
                assert landing.bytes_view == content

    asyncio.run(check())


def test_an_object_arrives_in_a_file_of_its_size(pair: Opener, tmp_path: Path) -> None:
    async def check() -> None:
        async with pair() as made:
            for key, content in OBJECTS.items():
                (tmp_path / key).write_bytes(b"old and longer" * 20_000)
                await made.connect().fetch(key, FileLanding(tmp_path / key), deadline_s=10)
                assert (tmp_path / key).read_bytes() == content

    asyncio.run(check())


def test_a_fetch_resumes_behind_what_is_in_place(pair: Opener) -> None:
    async def check() -> None:
        async with pair() as made:
            content, client = OBJECTS["long"], made.connect()
            for at in (1, PIECE, len(content) - 1, len(content)):
                buffer = bytearray(b"#" * at + b"?" * (len(content) - at))
                await client.fetch("long", MemoryLanding(buffer), resume_from=at, deadline_s=10)
                assert buffer == b"#" * at + content[at:]
            with pytest.raises(TransferError, match="asked for offset"):
                await client.fetch("short", MemoryLanding(), resume_from=100, deadline_s=10)

    asyncio.run(check())


def test_many_fetches_at_once(pair: Opener) -> None:
    async def check() -> None:
        async with pair() as made:
            client = made.connect()
            keys = [*OBJECTS] * 6
            assert await asyncio.gather(*(fetched(client, key) for key in keys)) == [OBJECTS[key] for key in keys]

    asyncio.run(check())


def test_many_clients_at_once(pair: Opener, request: pytest.FixtureRequest) -> None:
    # Of two ranks in one process, NCCL lets one that is slow and is aborted crash the other.
    clients = 2 if "nccl" in request.node.callspec.id else 16

    async def check() -> None:
        async with pair() as made:
            came = await asyncio.gather(*(fetched(made.connect(), "long") for _ in range(clients)))
            assert came == [OBJECTS["long"]] * clients

    asyncio.run(check())


def test_a_missing_object_is_said_to_be_missing_and_others_still_come(pair: Opener) -> None:
    async def check() -> None:
        async with pair() as made:
            client = made.connect()
            with pytest.raises(ObjectMissing, match="nowhere"):
                await client.fetch("nowhere", MemoryLanding(), deadline_s=10)
            assert await fetched(client, "short") == OBJECTS["short"]

    asyncio.run(check())


def test_another_size_than_expected_is_an_error(pair: Opener) -> None:
    async def check() -> None:
        async with pair() as made:
            client = made.connect()
            for wrong in (len(OBJECTS["long"]) - 1, len(OBJECTS["long"]) + 1):
                with pytest.raises(TransferError, match="bytes"):
                    await client.fetch("long", MemoryLanding(), size_bytes=wrong, deadline_s=10)
            with pytest.raises(TransferError, match="buffer of 5"):
                await client.fetch("long", MemoryLanding(bytearray(5)), deadline_s=10)
            assert await client.fetch("long", MemoryLanding(), size_bytes=len(OBJECTS["long"]), deadline_s=10)

    asyncio.run(check())


def test_a_wrong_token_is_refused_on_every_request(pair: Opener) -> None:
    async def check() -> None:
        async with pair() as made:
            stranger = made.connect(token="some other token")
            with pytest.raises(Refused):
                await stranger.fetch("short", MemoryLanding(), deadline_s=10)
            with pytest.raises(Refused):
                await stranger.watch(0, deadline_s=10)

    asyncio.run(check())


def test_a_watcher_hears_of_news_and_is_told_when_there_is_none(pair: Opener) -> None:
    async def check() -> None:
        async with pair() as made:
            client = made.connect()
            assert await client.watch(0, deadline_s=0.6) is None
            watch = asyncio.ensure_future(client.watch(3, deadline_s=10))
            made.server.announce(Announcement(2, "m2"))
            assert await made.connect().watch(0, deadline_s=10) == Announcement(2, "m2")
            assert not watch.done()
            made.server.announce(Announcement(4, "m4"))
            assert await watch == Announcement(4, "m4")
            with pytest.raises(ContractError, match="rising"):
                made.server.announce(Announcement(4, "m4"))

    asyncio.run(check())


def test_closing_a_client_ends_what_it_waits_for(pair: Opener) -> None:
    async def check() -> None:
        async with pair() as made:
            client = made.connect()
            watch = asyncio.ensure_future(client.watch(3, deadline_s=10))
            await until(lambda: made.server.connections == 1)
            await client.close()
            with pytest.raises(TransferError, match="closed"):
                await watch
            with pytest.raises(ContractError, match="closed"):
                await client.watch(3, deadline_s=10)
            await until(lambda: made.server.connections == 0)

    asyncio.run(check())


def test_a_server_that_is_not_there_is_waited_for_until_the_deadline(pair: Opener) -> None:
    async def check() -> None:
        async with pair() as made:
            client = made.connect()
            await made.server.close()
            with pytest.raises(DeadlineExceeded) as caught:
                await client.fetch("short", MemoryLanding(), deadline_s=0.4)
            assert caught.value.boundary == "transfer"
            assert "last connection" in caught.value.to_do

    asyncio.run(check())


def test_shared_files_are_lent_without_a_copy(short_folder: Path) -> None:
    async def check() -> None:
        store = short_folder / "store"
        store.mkdir()
        (store / "long").write_bytes(OBJECTS["long"])
        async with shared_pair(Folder(store), short_folder) as made:
            view = await made.connect().borrow("long", deadline_s=10)
            assert view == OBJECTS["long"]
            assert view.readonly
            assert list((short_folder / "spool").iterdir()) == []
            (store / "long").unlink()
            assert view == OBJECTS["long"], "a lent file outlives its removal"

    asyncio.run(check())


def test_what_is_spooled_is_copied_once_whole_and_removed_at_the_end(short_folder: Path) -> None:
    async def check() -> None:
        memory = Memory()
        async with shared_pair(memory, short_folder) as made:
            for _ in range(3):
                assert await fetched(made.connect(), "long") == OBJECTS["long"]
            assert memory.read == [("long", 0)]
            assert os.listdir(short_folder / "spool") == ["long"]
            memory.broken.add("exact")
            with pytest.raises(TransferError, match="disk fails"):
                await made.connect().fetch("exact", MemoryLanding(), deadline_s=10)
            assert os.listdir(short_folder / "spool") == ["long"]
        assert os.listdir(short_folder / "spool") == []

    asyncio.run(check())
