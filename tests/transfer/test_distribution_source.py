"""What whoever has the token can make a server's store do is bounded, and what is answered is right all the same."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from distribution_tools import PATIENT, line, until
from store_tools import PACKING, Bits, follow, moved, same

from rose.errors import TransferError
from rose_transfer.distribution import source, way
from rose_transfer.distribution.source import StoreSource
from rose_transfer.distribution.way import WayAsk
from rose_transfer.store import Manifest, Step, Store, manifest

NONCES = count()


def ask(store: Store, start: int | None, goal: int, *, checked: bool = False) -> WayAsk:
    held = None if start is None else store.fingerprint(start)
    return WayAsk(goal, start, held, f"{next(NONCES):032x}", checked)


async def answer(served: StoreSource, asked: WayAsk) -> tuple[tuple[str, bool], ...]:
    await served.prepare(asked.key)
    made = served.open(asked.key)
    found = way.from_bytes(bytes(made.read_at(0, made.size_bytes)))
    way.check_answer(found, asked)
    return found.steps


def leads(store: Store, named: tuple[tuple[str, bool], ...], held: list[Bits], start: int) -> list[Bits]:
    steps = [Step(manifest.from_bytes(store.objects.read(key)), backwards) for key, backwards in named]
    return follow(store, tuple(steps), held, store.fingerprint(start))


def counted(store: Store, name: str, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the method of the store is called with from now on."""
    calls: list[object] = []
    real: Callable[..., object] = getattr(store, name)

    def call(*arguments: object) -> object:
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(store, name, call)
    return calls


def test_each_pair_of_versions_is_merged_once_and_only_so_many(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, history = line(memory_path, 8)
    merges, most = counted(store, "_merge", monkeypatch), 5
    monkeypatch.setattr(source, "_MERGES_MAX", most)

    async def ask_for_all() -> None:
        served = StoreSource(store)
        pairs = [(start, goal) for start in history for goal in history if start != goal]
        for _ in range(2):
            for start, goal in pairs:
                named = await answer(served, ask(store, start, goal))
                assert same(leads(store, named, history[start], start), history[goal])
        assert len(merges) == most
        history[9] = moved(history[8], 0.1, 9)
        store.publish(9, PACKING, history[9], base=8)
        assert len(await answer(served, ask(store, 5, 9))) == 1, "the next version may be merged for again"
        assert len(merges) == most + 1
        served.close()

    asyncio.run(ask_for_all())
    store.close()


def test_what_cannot_be_merged_is_not_tried_again_for_everybody(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, history = line(memory_path, 4)
    store.close()
    full = Store(memory_path, compress=True, bytes_max=store.objects.used_bytes)
    merges = counted(full, "_merge", monkeypatch)

    async def check() -> None:
        served = StoreSource(full)
        for _ in range(3):
            named = await answer(served, ask(full, 1, 4))
            assert same(leads(full, named, history[1], 1), history[4])
            assert len(named) == 3
        assert len(merges) == 1
        served.close()

    asyncio.run(check())
    full.close()


def test_one_way_at_a_time_is_checked_once_for_all_who_wait(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = line(memory_path, 3)
    begun, go_on, at_once, most = threading.Semaphore(0), threading.Event(), 0, 0
    real = store.load

    def slow(found: Manifest, entry: object) -> object:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        begun.release()
        assert go_on.wait(PATIENT)
        at_once -= 1
        return real(found, entry)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "load", slow)

    async def check() -> None:
        served = StoreSource(store)
        read = counted_reads(served, monkeypatch)
        first = asyncio.create_task(answer(served, ask(store, None, 1, checked=True)))
        assert await asyncio.to_thread(begun.acquire, timeout=PATIENT)
        crowd = [asyncio.create_task(answer(served, ask(store, start, 1, checked=True))) for start in [None, 3] * 8]
        await until(lambda: len(served._checks) == 2)
        assert len(await answer(served, ask(store, 1, 2))) == 1, "who asks for no check does not wait"
        crowd[0].cancel()
        await asyncio.wait([crowd[0]])
        go_on.set()
        answers = await asyncio.gather(first, *crowd[1:])
        assert {one[0] for one in answers[1::2]} == {answers[1][0]}
        # The one that had begun, then one for all who came later, for each start.
        assert len(read) == 1 + 1 + len(answers[1])
        assert most == 1
        served.close()

    asyncio.run(check())
    store.close()


def counted_reads(served: StoreSource, monkeypatch: pytest.MonkeyPatch) -> list[Manifest]:
    """The manifests all of whose objects are read."""
    found: list[Manifest] = []
    real = served._read_all

    def read_all(one: Manifest) -> None:
        found.append(one)
        real(one)

    monkeypatch.setattr(served, "_read_all", read_all)
    return found


def test_what_goes_wrong_in_a_check_is_told_to_all_who_wait(memory_path: Path) -> None:
    store, _ = line(memory_path, 1)
    (found,) = store.manifests()
    (memory_path / "objects" / found.buckets[0].key).unlink()

    async def check() -> None:
        served = StoreSource(store)
        asked = [answer(served, ask(store, None, 1, checked=True)) for _ in range(3)]
        ended = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(one, TransferError) and "no way leads" in str(one) for one in ended)
        served.close()

    asyncio.run(check())
    store.close()
