"""The store's own objects travel: over TCP piece by piece, and on one host as the files they are."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from random import Random

import pytest
from transport_tools import PIECE, fetched, shared_pair, tcp_pair

from rose_transfer.store.objects import Objects
from rose_transfer.transport.interface import ObjectMissing, ObjectSource
from rose_transfer.transport.landing import MemoryLanding

CONTENT = Random(3).randbytes(9 * PIECE + 1)


def new_store(folder: Path) -> Objects:
    folder.mkdir()
    return Objects(folder)


def test_an_object_of_a_store_reaches_another_store(tmp_path: Path) -> None:
    async def check() -> None:
        here, there = new_store(tmp_path / "here"), new_store(tmp_path / "there")
        source: ObjectSource = here
        key = here.put(CONTENT)
        async with tcp_pair(source) as pair:
            assert there.put(await fetched(pair.connect(), key)) == key
            here.remove(key)
            with pytest.raises(ObjectMissing):
                await pair.connect().fetch("0" * 64, MemoryLanding(), deadline_s=10)
        assert there.read(key) == CONTENT

    asyncio.run(check())


def test_an_object_of_a_store_is_lent_as_the_file_it_is() -> None:
    async def check() -> None:
        with tempfile.TemporaryDirectory(prefix="rose-") as name:
            objects = new_store(Path(name) / "objects")
            key = objects.put(CONTENT)
            async with shared_pair(objects, Path(name)) as pair:
                assert await pair.connect().borrow(key, deadline_s=10) == CONTENT
                assert list((Path(name) / "spool").iterdir()) == [], "nothing was copied"

    asyncio.run(check())
