"""A fetch ends by its deadline, whatever this host does, and the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distribution_tools import PATIENT, line, offered, site, until
from store_tools import PACKING

from rose.errors import DeadlineExceeded, TransferError
from rose_transfer.distribution import Receiver
from rose_transfer.store import BucketId, Packing, manifest, packing


def test_the_loop_goes_on_while_it_is_found_out_what_is_wanted(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever finds it out waits for the loop here, which must be free to answer; parsing is in threads as well."""
    answered = threading.Event()
    parsed_in: set[str] = set()
    for module in (manifest, packing):
        read = module.from_bytes

        def noted(data: bytes, read: Callable[[bytes], Any] = read) -> Any:
            parsed_in.add(threading.current_thread().name)
            return read(data)

        monkeypatch.setattr(module, "from_bytes", noted)

    def wanted(_: Packing) -> set[BucketId]:
        assert answered.wait(PATIENT)
        return {BucketId("all", 1)}

    async def check() -> None:
        store, _ = line(memory_path / "store", 2)
        async with site(memory_path) as here, offered(here, store) as (_, port):
            parsed_in.clear()
            fetching = asyncio.create_task(here.receiver(port, wanted=wanted).fetch(None, None, 2, deadline_s=PATIENT))
            await until(lambda: any("what is wanted" in wait.what for wait in here.waits.snapshot()))
            answered.set()
            await fetching
        store.close()
        assert parsed_in
        assert threading.main_thread().name not in parsed_in

    asyncio.run(check())


def test_what_is_wanted_may_take_longer_than_a_fetch_and_is_asked_once(memory_path: Path) -> None:
    go_on = threading.Event()
    asked: list[Packing] = []

    def slow(described: Packing) -> set[BucketId]:
        asked.append(described)
        assert go_on.wait(PATIENT)
        return {BucketId("all", 1)}

    async def check() -> None:
        store, _ = line(memory_path / "store", 2)
        async with site(memory_path) as here, offered(here, store) as (_, port):
            receiver = here.receiver(port, wanted=slow)
            fetching = asyncio.create_task(receiver.fetch(None, None, 2, deadline_s=0.5))
            with pytest.raises(DeadlineExceeded, match="what is wanted"):
                await fetching
            with pytest.raises(DeadlineExceeded, match="what is wanted"):
                await receiver.fetch(None, None, 2, deadline_s=0.5)
            go_on.set()
            fetched = await receiver.fetch(None, None, 2, deadline_s=PATIENT)
            assert len(fetched.steps) == 2
        store.close()
        assert asked == [PACKING]

    asyncio.run(check())


def test_what_could_not_be_told_is_raised_once_and_asked_again_by_the_next_fetch(memory_path: Path) -> None:
    troubles: list[Exception] = [TransferError("another model"), RuntimeError("a fault of the caller")]

    def wanted(_: Packing) -> set[BucketId]:
        if troubles:
            raise troubles.pop()
        return {BucketId("all", 1)}

    async def check() -> None:
        store, _ = line(memory_path / "store", 2)
        async with site(memory_path) as here, offered(here, store) as (_, port):
            receiver = here.receiver(port, wanted=wanted)
            with pytest.raises(RuntimeError, match="fault of the caller"):
                await receiver.fetch(None, None, 2, deadline_s=PATIENT)
            with pytest.raises(TransferError, match=r"^transfer: another model$"):
                await receiver.fetch(None, None, 2, deadline_s=PATIENT)
            assert (await receiver.fetch(None, None, 2, deadline_s=PATIENT)).version == 2
        store.close()

    asyncio.run(check())


def test_a_disk_that_does_not_answer_holds_a_fetch_no_longer_than_its_deadline(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    async def check() -> None:
        store, _ = line(memory_path / "store", 1)
        async with site(memory_path) as here, offered(here, store) as (_, port):
            receiver: Receiver = here.receiver(port)
            stuck = receiver._shelf.objects.read
            monkeypatch.setattr(receiver._shelf.objects, "read", lambda key: go_on.wait(PATIENT) and stuck(key))
            with pytest.raises(DeadlineExceeded, match="reading or writing"):
                await receiver.fetch(None, None, 1, deadline_s=0.5)
            assert not go_on.is_set()
            go_on.set()
            assert (await receiver.fetch(None, None, 1, deadline_s=PATIENT)).version == 1
        store.close()

    asyncio.run(check())
