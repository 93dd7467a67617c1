"""An engine far from its trainer is kept at the newest version, over a relay, and never between two."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rose.errors import DeadlineExceeded, EngineError, TransferError
from rose.waits import WaitBoard
from rose_executor.control_client import Committed, EngineDescription
from rose_executor.fresh_probe import compare, probe_fresh, probe_live
from rose_executor.version_follower import ATTEMPTS, NOT_STAGED, Followed, VersionFollower, wanted_by
from rose_transfer import snapshot
from rose_transfer.distribution import Fetched, Offer, Receiver, Relay, WeightPublisher, attempts
from rose_transfer.snapshot import WEIGHTS
from rose_transfer.store import BucketId, NoRoom, Packing
from rose_transfer.transport.interface import ObjectMissing, Refused
from rose_transfer.transport.tcp import TcpClient, TcpServer

pytestmark = pytest.mark.engine

TOKEN = "a token of the test's own"
PREFIXES = [[(3 + 7 * i + 5 * j) % 90 for j in range(10 + 9 * i)] for i in range(4)]
Weights = dict[str, torch.Tensor]


def client(publisher: Any, waits: WaitBoard) -> TcpClient:
    return TcpClient("127.0.0.1", publisher.servers[0].port, token=TOKEN, waits=waits)


def updated(masters: Weights, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in masters.items()}


def test_an_engine_behind_a_relay_follows_its_trainer(fresh_rig: Any, tmp_path: Path) -> None:
    """The engine begins with other weights than the publisher's first, follows, and computes as a fresh one."""
    rig = fresh_rig
    masters = {name: tensor.float() for name, tensor in load_file(rig.model / WEIGHTS).items()}
    serve = [partial(TcpServer, token=TOKEN, waits=rig.waits)]
    followed: asyncio.Queue[Followed] = asyncio.Queue()

    async def prove(version: int, weights: Weights) -> None:
        news = await asyncio.wait_for(followed.get(), 60)
        assert news.version == version == rig.engine.page.version
        folder = snapshot.write(tmp_path / "folders", version, weights, rig.model)
        fresh = await probe_fresh(
            rig.warm,
            folder.path,
            PREFIXES,
            work_dir=rig.folder,
            log_path=rig.folder / "probe.log",
            waits=rig.waits,
            max_model_len=512,
        )
        live = await probe_live(rig.route(), PREFIXES, request_prefix=f"v{version}")
        assert compare(live, fresh) <= 1e-4

    async def run() -> None:
        control = rig.engine.control
        layouts = await control.layouts()
        folder = tmp_path / "publisher"
        async with WeightPublisher(folder, waits=rig.waits, receivers=layouts, serve=serve) as publisher:
            upstream = client(publisher, rig.waits)
            async with Relay(upstream, tmp_path / "relay", waits=rig.waits, serve=serve) as relay:
                near = client(relay, rig.waits)
                receiver = Receiver(near, tmp_path / "engine", waits=rig.waits, wanted=await wanted_by(control))
                follower = VersionFollower(control, receiver, waits=rig.waits, applied=followed.put_nowait)
                tasks = [asyncio.create_task(relay.run()), asyncio.create_task(follower.run())]
                try:
                    for version in (1, 2, 5):
                        weights = updated(masters, version)
                        await publisher.publish(version, weights)
                        await prove(version, weights)
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
                    await near.close()
            await upstream.close()

    rig.run(run())


class Over(Exception):
    """A script has nothing more to offer."""


class ScriptedReceiver:
    """Offers one version until it was fetched or is gone, then the next; `fetch` notes where it was asked to begin."""

    def __init__(self, offers: list[Offer], trouble: list[Exception | None] | None = None) -> None:
        self._offers = offers
        self._trouble = trouble or []
        self.starts: list[tuple[int | None, str | None, int]] = []
        self.forgotten = 0
        self.forget_trouble: TransferError | None = None
        self.overtaken = asyncio.Event()

    def overtake(self) -> None:
        """Offer the next version instead of the one that is offered now."""
        self._offers = self._offers[1:]
        self.overtaken.set()

    async def subscribe(self, after: Offer | None = None) -> AsyncIterator[Offer]:
        if not self._offers:
            raise Over
        if self._offers[0] == after:
            await self.overtaken.wait()
        yield self._offers[0]

    async def fetch(self, start: int | None, start_fingerprint: str | None, goal: int, *, deadline_s: float) -> Fetched:
        self.starts.append((start, start_fingerprint, goal))
        error = self._trouble.pop(0) if self._trouble else None
        if error is None or isinstance(error, ObjectMissing):
            self._offers = [offer for offer in self._offers if offer.version > goal]
        if error is not None:
            raise error
        return Fetched(goal, f"bits of {goal}", Path("objects"), (("key", False),), True, 10)

    def forget(self) -> None:
        self.forgotten += 1
        if self.forget_trouble is not None:
            raise self.forget_trouble


class ScriptedEngine:
    """Takes what it is given, but for the first errors in `stage` and `commit`; is `poisoned` from the beginning."""

    def __init__(
        self, stage: list[Exception] | None = None, commit: list[Exception] | None = None, *, poisoned: str = ""
    ) -> None:
        self._stage, self._commit, self._poisoned = stage or [], commit or [], poisoned
        self.runs: list[int] = []

    async def describe(self) -> EngineDescription:
        return EngineDescription("engine-0", "1", 1, 8000, 0, False, self._poisoned, "0")

    async def apply(self, version: int, objects: Path, way: object, *, keep_kv: bool) -> Committed:
        for troubles in (self._stage, self._commit):
            if troubles:
                raise troubles.pop(0)
        self.runs.append(version)
        return Committed(2.0, 1.0)


def offer(version: int) -> Offer:
    return Offer(version, f"bits of {version}")


def follow(engine: ScriptedEngine, receiver: ScriptedReceiver, runs: Offer | None = None) -> VersionFollower:
    follower = VersionFollower(engine, receiver, waits=WaitBoard(), runs=runs)  # type: ignore[arg-type]
    with suppress(Over):
        asyncio.run(follower.run())
    return follower


def test_each_version_is_fetched_from_the_one_before() -> None:
    engine, receiver = ScriptedEngine(), ScriptedReceiver([offer(5), offer(7)])
    follower = follow(engine, receiver, runs=offer(4))
    assert receiver.starts == [(4, "bits of 4", 5), (5, "bits of 5", 7)]
    assert engine.runs == [5, 7]
    assert follower.runs == offer(7)
    assert receiver.forgotten == 2


def test_a_disk_that_does_not_forget_is_no_refusal() -> None:
    engine, receiver = ScriptedEngine(), ScriptedReceiver([offer(5), offer(6)])
    receiver.forget_trouble = TransferError("the disk")
    assert follow(engine, receiver, runs=offer(4)).runs == offer(6)
    assert engine.runs == [5, 6]
    assert receiver.starts == [(4, "bits of 4", 5), (5, "bits of 5", 6)]


@pytest.mark.parametrize(
    "engine",
    [
        lambda: ScriptedEngine(stage=[TransferError("other weights than those")]),
        lambda: ScriptedEngine(commit=[TransferError("taken back")]),
    ],
    ids=["stage", "commit"],
)
def test_what_the_engine_refuses_is_tried_again_from_nothing(engine: Callable[[], ScriptedEngine]) -> None:
    made, receiver = engine(), ScriptedReceiver([offer(5), offer(6)])
    follow(made, receiver, runs=offer(4))
    assert receiver.starts == [(4, "bits of 4", 5), (None, None, 5), (5, "bits of 5", 6)]
    assert made.runs == [5, 6]


def test_an_engine_whose_weights_are_mixed_is_healed_by_a_version_that_begins_anew() -> None:
    engine = ScriptedEngine(commit=[EngineError("half-way")] * (ATTEMPTS - 1), poisoned="version 5 failed half-way")
    receiver = ScriptedReceiver([offer(5), offer(6)])
    follow(engine, receiver, runs=offer(4))
    assert receiver.starts == [(4, "bits of 4", 5), *[(None, None, 5)] * (ATTEMPTS - 1), (5, "bits of 5", 6)]
    assert engine.runs == [5, 6]


def test_a_follower_whose_stage_is_gone_says_that_it_is_not_alone() -> None:
    engine = ScriptedEngine(commit=[EngineError(f"version 5 {NOT_STAGED}: nothing is staged")])
    with pytest.raises(EngineError, match="nothing is staged") as caught:
        follow(engine, ScriptedReceiver([offer(5), offer(6)]), runs=offer(4))
    assert "somebody else brings versions to this engine" in caught.value.what
    assert "end the other" in caught.value.to_do


def test_an_engine_that_is_lost_is_no_sign_of_others() -> None:
    with pytest.raises(EngineError) as caught:
        follow(ScriptedEngine(commit=[EngineError("gone")]), ScriptedReceiver([offer(5)]), runs=offer(4))
    assert caught.value.what == "gone"
    assert caught.value.__cause__ is None


def test_a_version_that_is_always_refused_is_left_for_the_next() -> None:
    engine = ScriptedEngine(stage=[TransferError("damaged")] * ATTEMPTS)
    receiver = ScriptedReceiver([offer(5), offer(6)])
    assert follow(engine, receiver, runs=offer(4)).runs == offer(6)
    assert engine.runs == [6]


def test_what_cannot_be_fetched_is_tried_until_it_can_or_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_PAUSE_S", 0.001)
    monkeypatch.setattr(attempts, "_PAUSE_S_MAX", 0.002)
    passing = [NoRoom("the disk is full"), DeadlineExceeded("no object", boundary="transfer"), TransferError("damaged")]
    receiver = ScriptedReceiver(
        [offer(5), offer(6)], [*passing * 2, ObjectMissing("version 5 is gone"), *passing, None]
    )
    engine = ScriptedEngine()
    follow(engine, receiver, runs=offer(4))
    assert receiver.starts == [(4, "bits of 4", 5)] * 7 + [(4, "bits of 4", 6)] * 4
    assert engine.runs == [6]


def test_what_cannot_be_fetched_is_tried_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses are those of a relay."""
    pauses_s: list[float] = []

    class Noting(WaitBoard):
        async def within(self, awaitable: Any, what: str, whom: str, timeout_s: float, **named: Any) -> Any:
            pauses_s.append(timeout_s)
            assert (what, whom) == ("another attempt at version 5", "the upstream")
            return await super().within(awaitable, what, whom, 0.001, **named)

    receiver = ScriptedReceiver([offer(5)], [NoRoom("the disk is full")] * 8)
    follower = VersionFollower(ScriptedEngine(), receiver, waits=Noting())  # type: ignore[arg-type]
    with suppress(Over):
        asyncio.run(follower.run())
    assert pauses_s == [1, 2, 4, 8, 16, 32, 64, 64]
    assert follower.runs == offer(5)


def test_a_version_that_is_offered_meanwhile_is_fetched_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_PAUSE_S", 3600.0)
    engine, receiver = ScriptedEngine(), ScriptedReceiver([offer(5), offer(6)], [TransferError("the link is slow")])
    follower = VersionFollower(engine, receiver, waits=WaitBoard(), runs=offer(4))  # type: ignore[arg-type]

    async def check() -> None:
        following = asyncio.create_task(follower.run())
        while not receiver.starts:
            await asyncio.sleep(0)
        receiver.overtake()
        with pytest.raises(Over):
            await asyncio.wait_for(following, 20)

    asyncio.run(check())
    assert receiver.starts == [(4, "bits of 4", 5), (4, "bits of 4", 6)]
    assert engine.runs == [6]


@pytest.mark.parametrize("fits", [True, False], ids=["damaged upstream", "does not fit"])
def test_a_version_that_can_never_be_had_is_asked_for_once_and_left_for_a_newer_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fits: bool
) -> None:
    """Version 2 lies damaged at a real publisher, or its layout fits nobody; there is 3 while the follower pauses."""
    monkeypatch.setattr(attempts, "_PAUSE_S", 3600.0)
    waits, engine = WaitBoard(), ScriptedEngine()
    applied: asyncio.Queue[Followed] = asyncio.Queue()
    serve = [partial(TcpServer, token=TOKEN, waits=waits)]
    packings: list[Packing] = []

    def wanted(packing: Packing) -> frozenset[BucketId]:
        packings.append(packing)
        if not fits and len(packings) > 1 and "late" not in packing.parameters:
            raise TransferError("this model has another layout")
        return frozenset(bucket.bucket_id for bucket in packing.buckets)

    async def check() -> None:
        weights = {"w": torch.arange(4096.0)}
        async with WeightPublisher(tmp_path / "publisher", waits=waits, serve=serve) as publisher:
            near = client(publisher, waits)
            receiver = Receiver(near, tmp_path / "engine", waits=waits, wanted=wanted)
            follower = VersionFollower(engine, receiver, waits=waits, applied=applied.put_nowait)  # type: ignore[arg-type]
            await publisher.publish(1, weights)
            following = asyncio.create_task(follower.run())
            assert (await asyncio.wait_for(applied.get(), 20)).version == 1
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            published = await publisher.publish(2, {"w": weights["w"] + 1} | ({} if fits else {"other": weights["w"]}))
            for entry in published.buckets if fits else ():
                path = publisher.store.objects.folder / entry.key
                path.write_bytes(path.read_bytes()[:-1])
            following = asyncio.create_task(follower.run())
            try:
                async with asyncio.timeout(20):
                    while not any(wait.what == "another attempt at version 2" for wait in waits.snapshot()):
                        await asyncio.sleep(0.01)
                assert len(packings) == (1 if fits else 2)
                await publisher.publish(3, {"w": weights["w"] + 2, "late": weights["w"]})
                assert (await asyncio.wait_for(applied.get(), 20)).version == 3
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                await asyncio.to_thread(receiver.close)
                await near.close()

    asyncio.run(check())
    assert engine.runs == [1, 3]


@pytest.mark.parametrize(
    ("engine", "receiver", "kind"),
    [
        (ScriptedEngine(commit=[EngineError("it died")]), ScriptedReceiver([offer(5)]), EngineError),
        (
            ScriptedEngine(commit=[EngineError("half-way")] * ATTEMPTS, poisoned="half-way"),
            ScriptedReceiver([offer(5)]),
            EngineError,
        ),
        (
            ScriptedEngine(stage=[DeadlineExceeded("no answer", boundary="engine")]),
            ScriptedReceiver([offer(5)]),
            EngineError,
        ),
        (ScriptedEngine(), ScriptedReceiver([offer(5)], [Refused("the token is wrong")]), Refused),
    ],
    ids=["dead", "poisoned", "silent", "token"],
)
def test_what_cannot_be_mended_here_ends_the_following(
    engine: ScriptedEngine, receiver: ScriptedReceiver, kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        follow(engine, receiver)
    assert engine.runs == []
