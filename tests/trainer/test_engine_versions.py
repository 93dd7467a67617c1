"""Publishing: a version is whole or absent, an engine is brought to it or replaced, and old ones go in time."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stand_ins import Answer, ScriptedSupervisor

from rose.address import host_and_port
from rose.errors import DeadlineExceeded, EngineError, TransferError
from rose.trainer.engine_versions import Applied, EngineVersions
from rose.trainer.policy import Weights, load_policy, rounded_bf16
from rose.waits import WaitBoard
from rose_transfer.distribution import Offer, Receiver, known_answer
from rose_transfer.distribution.known_answer import KnownAnswer
from rose_transfer.snapshot import WEIGHTS, Snapshot
from rose_transfer.store import Objects, StoreReader, manifest
from rose_transfer.store import files as store_files
from rose_transfer.store.buckets import unpack
from rose_transfer.transport.interface import ObjectMissing
from rose_transfer.transport.tcp import TcpClient, TcpServer

ENGINE = "engine-0"
TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def weights(shipped_model: Path) -> Weights:
    return rounded_bf16(load_policy(shipped_model).weights())


def an_answer(version: int) -> KnownAnswer:
    """Each version has another one."""
    return KnownAnswer((1, 2), (version,), ({version: -0.5},))


class Bench:
    """Versions that are driven beside a scripted supervisor."""

    def __init__(self, folder: Path, model: Path, weights: Weights, keep: int = 1) -> None:
        self.folder = folder / "versions"
        self._model, self._keep, self._weights = model, keep, weights

    def run(self, body: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            self.supervisor = ScriptedSupervisor(lambda asked: Answer(()))
            waits = WaitBoard()
            supervisor = self.supervisor
            serve = partial(TcpServer, token=TOKEN, waits=waits)
            self.engine_versions = EngineVersions(
                self.folder,
                self._model,
                self._keep,
                supervisor,  # type: ignore[arg-type]
                waits,
                serve,
            )
            async with asyncio.timeout(20), asyncio.TaskGroup() as group:
                group.create_task(self.engine_versions.run())
                await body()
                self.engine_versions.stop()
            await self.engine_versions.close()

        asyncio.run(whole())

    async def publish(self, version: int) -> None:
        """Each version differs from the one before."""
        weights = {name: tensor + version * 0.01 for name, tensor in self._weights.items()}
        await self.engine_versions.publish(version, weights, an_answer(version))

    async def start_engine(self, lost: str | None = None) -> int:
        """The version that the live incarnation starts from; it has joined with it."""
        loaded = await self.engine_versions.starting(ENGINE, lost)
        assert loaded.path.is_dir()
        await self.engine_versions.joined(ENGINE, self.supervisor.engines[-1].incarnation, loaded.version)
        return loaded.version

    async def applied(self, version: int, timeout_s: float = 5.0) -> Applied:
        return await self.engine_versions.applied(ENGINE, version, timeout_s)

    def kept(self) -> list[int]:
        return list(StoreReader(self.folder / "store").versions())

    def folders(self) -> list[str]:
        """Versions that lie about as model folders."""
        return sorted(folder.name for folder in (self.folder / "folders").iterdir())

    def read(self, version: int) -> Weights:
        store = StoreReader(self.folder / "store")
        return unpack(store.packing(version), store.read(version))


@pytest.fixture
def bench(tmp_path: Path, shipped_model: Path, weights: Weights) -> Bench:
    return Bench(tmp_path, shipped_model, weights)


async def settled() -> None:
    """Let queued events be stepped, and folders be removed."""
    for _ in range(20):
        await asyncio.sleep(0.005)


def test_a_version_reaches_the_engine_and_the_old_one_goes(bench: Bench) -> None:
    async def body() -> None:
        await bench.publish(0)
        assert await bench.start_engine() == 0
        await bench.publish(1)
        applied = await bench.applied(1)
        assert applied.pause_ms == 1.5
        assert bench.supervisor.control.committed == [1]
        await settled()
        assert bench.kept() == [1]
        assert bench.read(1).keys() <= bench._weights.keys()
        assert bench.folders() == []

    bench.run(body)


def test_a_version_that_the_engine_started_from_has_no_pause(bench: Bench) -> None:
    async def body() -> None:
        await bench.publish(0)
        await bench.start_engine()
        assert (await bench.applied(0)).pause_ms is None

    bench.run(body)


def test_a_refused_stage_is_repeated_and_then_succeeds(bench: Bench) -> None:
    async def body() -> None:
        await bench.publish(0)
        await bench.start_engine()
        bench.supervisor.control.stage_failures = [TransferError("a bit is wrong")] * 2
        await bench.publish(1)
        await bench.applied(1)
        assert len(bench.supervisor.control.staged) == 3

    bench.run(body)


def test_an_engine_goes_on_from_what_it_runs_and_begins_anew_where_it_runs_something_else(
    tmp_path: Path, shipped_model: Path, weights: Weights
) -> None:
    bench = Bench(tmp_path, shipped_model, weights, keep=9)

    async def body() -> None:
        await bench.publish(0)
        await bench.start_engine()
        await bench.publish(1)
        await bench.applied(1)
        control = bench.supervisor.control
        control.stage_failures = [TransferError("not the weights that the way begins at")]
        await bench.publish(2)
        await bench.applied(2)
        control.commit_failures = [TransferError("taken back")]
        await bench.publish(3)
        await bench.applied(3)
        assert [version for version, _, _ in control.staged] == [1, 2, 2, 3, 3]
        assert control.committed == [1, 2, 3, 3]
        assert bench.supervisor.replaced == []
        starts: list[int | None] = []
        for _, objects, way in control.staged:
            first = manifest.from_bytes(Objects(objects).read(way[0][0]))
            starts.append(first.base)
        assert starts == [0, 1, None, 2, None]

    bench.run(body)


def test_a_stage_that_is_always_refused_ends_with_its_reason_and_the_old_version_whole(bench: Bench) -> None:
    async def body() -> None:
        await bench.publish(0)
        await bench.start_engine()
        bench.supervisor.control.stage_failures = [TransferError("a bit is wrong")] * 99
        await bench.publish(1)
        with pytest.raises(TransferError, match="a bit is wrong"):
            await bench.applied(1)
        await settled()
        assert bench.supervisor.control.committed == []
        assert bench.supervisor.replaced == []
        assert bench.kept() == [0, 1]
        assert bench.read(0)

    bench.run(body)


def test_an_engine_whose_commit_failed_is_replaced_and_comes_back_with_the_new_version(bench: Bench) -> None:
    async def body() -> None:
        await bench.publish(0)
        await bench.start_engine()
        bench.supervisor.control.commit_failures = [DeadlineExceeded("no answer", boundary="engine")]
        await bench.publish(1)
        waiting = asyncio.create_task(bench.applied(1))
        await settled()
        ((incarnation, why),) = bench.supervisor.replaced
        assert "no answer" in why
        assert not waiting.done()
        bench.supervisor.die(bench.supervisor.engines[-1])
        assert await bench.start_engine(lost=incarnation) == 1
        assert (await waiting).pause_ms is None

    bench.run(body)


def test_an_engine_that_dies_while_it_is_brought_to_a_version_starts_from_it(bench: Bench) -> None:
    async def body() -> None:
        await bench.publish(0)
        await bench.start_engine()
        dead = bench.supervisor.engines[-1]
        bench.supervisor.control.stage_failures = [EngineError("gone")] * 9
        bench.supervisor.die(dead)
        await bench.publish(1)
        assert await bench.start_engine(lost=dead.incarnation) == 1
        await bench.applied(1)

    bench.run(body)


def test_the_version_that_an_engine_starts_from_is_kept_until_it_has_joined(bench: Bench) -> None:
    async def body() -> None:
        await bench.publish(0)
        loaded = await bench.engine_versions.starting(ENGINE, None)
        await bench.publish(1)
        await settled()
        assert bench.kept() == [0, 1]
        await bench.engine_versions.joined(ENGINE, bench.supervisor.engines[-1].incarnation, loaded.version)
        await bench.applied(1)
        await settled()
        assert bench.kept() == [1]

    bench.run(body)


def test_a_start_that_is_repeated_lets_go_of_what_it_would_have_loaded_before(bench: Bench) -> None:
    async def body() -> None:
        await bench.publish(0)
        await bench.engine_versions.starting(ENGINE, None)
        await bench.publish(1)
        assert await bench.start_engine() == 1
        await settled()
        assert bench.kept() == [1]

    bench.run(body)


def test_a_held_version_stays_while_it_is_held_also_after_an_error(bench: Bench) -> None:
    async def body() -> None:
        await bench.publish(0)
        await bench.start_engine()

        async def hold_and_fail() -> None:
            async with bench.engine_versions.held(0, "test") as held:
                await bench.publish(1)
                await bench.applied(1)
                await settled()
                assert bench.kept() == [0, 1]
                assert load_file(held.path / WEIGHTS).keys() == bench.read(0).keys()
                raise KeyError("the holder's own")

        with pytest.raises(KeyError, match="the holder's own"):
            await hold_and_fail()
        await settled()
        assert bench.kept() == [1]

    bench.run(body)


def test_a_version_that_cannot_be_written_leaves_no_trace_and_the_engine_on_the_old_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        await bench.publish(0)
        await bench.start_engine()
        with monkeypatch.context() as patch:
            patch.setattr(store_files.os, "write", full)
            with pytest.raises(TransferError, match="no room"):
                await bench.publish(1)
        assert bench.kept() == [0]
        await bench.publish(1)
        await bench.applied(1)

    bench.run(body)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_folder_whose_taker_was_cancelled_goes_again_and_can_be_taken(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        await bench.publish(0)
        folders = bench.engine_versions._folders
        going = asyncio.Event()
        loop, real = asyncio.get_running_loop(), folders._make

        def make(version: int) -> Snapshot:
            loop.call_soon_threadsafe(going.set)
            return real(version)

        monkeypatch.setattr(folders, "_make", make)
        taking = asyncio.create_task(folders.take(0))
        await going.wait()
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert (await folders.take(0)).path.is_dir()
        await folders.give_back(0)
        await settled()
        assert bench.folders() == []

    bench.run(body)


def test_versions_are_fetched_from_elsewhere_also_by_one_that_was_overtaken(bench: Bench) -> None:
    async def body() -> None:
        host, port = host_and_port(await bench.engine_versions.open())
        waits = WaitBoard()
        client = TcpClient(host, port, token=TOKEN, waits=waits)
        receiver = Receiver(client, bench.folder.with_name("there"), waits=waits)
        try:
            offers = receiver.subscribe()
            await bench.publish(0)
            await bench.start_engine()
            first = await anext(offers)
            assert first.version == 0
            held = await receiver.fetch(None, None, 0, deadline_s=10.0)
            assert await receiver.answer(first, deadline_s=10.0) == an_answer(0)
            for version in (1, 2):
                await bench.publish(version)
                await bench.applied(version)
            await settled()
            assert bench.kept() == [2]
            with pytest.raises(ObjectMissing):
                await receiver.fetch(0, held.fingerprint, 1, deadline_s=10.0)
            assert (await anext(receiver.subscribe(first))).version == 2
            fetched = await receiver.fetch(0, held.fingerprint, 2, deadline_s=10.0)
            assert fetched.fingerprint == StoreReader(bench.folder / "store").fingerprint(2)
            assert await receiver.answer(Offer(2, fetched.fingerprint), deadline_s=10.0) == an_answer(2)
            told = bench.engine_versions._answers
            assert await told.text(known_answer.ask_key(first)) is None  # it is kept no longer
        finally:
            receiver.close()
            await client.close()

    bench.run(body)


def test_weights_that_are_not_finite_are_never_published(bench: Bench) -> None:
    async def body() -> None:
        await bench.publish(0)
        name = next(iter(bench._weights))
        broken = {**bench._weights, name: torch.full_like(bench._weights[name], torch.nan)}
        with pytest.raises(TransferError, match="not finite"):
            await bench.engine_versions.publish(1, broken, an_answer(1))
        assert await bench.start_engine() == 0

    bench.run(body)


def test_waiting_for_a_version_has_a_deadline(bench: Bench) -> None:
    async def body() -> None:
        await bench.publish(0)
        with pytest.raises(DeadlineExceeded, match="no version 0"):
            await bench.applied(0, timeout_s=0.05)

    bench.run(body)
