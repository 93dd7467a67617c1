"""What a trainer publishes is what receivers get: rounded, tied names once, cut for those who hold it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from distribution_tools import PATIENT, Engine, port_of, site, until

from rose.errors import TransferError
from rose_transfer.distribution import Offer, WeightPublisher
from rose_transfer.distribution.known_answer import KnownAnswer
from rose_transfer.layout.box import Box
from rose_transfer.layout.layout import Layout, LocalTensor, Parameter, Piece
from rose_transfer.store import BucketId, NoRoom, Packing, Store
from rose_transfer.store.buckets import unpack
from rose_transfer.store.survey import verify
from rose_transfer.transport.tcp import TcpServer

PARAMETERS = {"embed": Parameter((16, 8), "bfloat16"), "router": Parameter((4, 8), "float32")}


def weights(seed: int) -> dict[str, torch.Tensor]:
    """float32 masters with a tied head."""
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(value.shape, generator=generator) for name, value in PARAMETERS.items()}
    return {**made, "head": made["embed"]}


def rank(number: int, of: int) -> Layout:
    """The rows of the embedding that one of `of` ranks holds, and the whole router."""
    rows = 16 // of
    box = Box((number * rows, 0), (rows, 8))
    return Layout(
        f"engine tp {number} of {of}",
        PARAMETERS,
        {"embed": LocalTensor((rows, 8), "bfloat16"), "router": LocalTensor((4, 8), "float32")},
        (
            Piece("embed", box, "embed", 0, (8, 1)),
            Piece("router", Box.whole((4, 8)), "router", 0, (8, 1)),
        ),
    )


def held_by(layout: Layout) -> Callable[[Packing], set[BucketId]]:
    def wanted(packing: Packing) -> set[BucketId]:
        return {
            bucket.bucket_id
            for bucket in packing.buckets
            for region in bucket.regions
            for piece in layout.pieces
            if piece.parameter == region.parameter and piece.box.intersect(region.box)
        }

    return wanted


def tensors(engine: Engine, packing: Packing) -> dict[str, torch.Tensor]:
    return unpack(packing, [engine.bits[bucket.bucket_id] for bucket in packing.buckets])


def test_a_state_dict_arrives_rounded_and_tied_names_once(memory_path: Path) -> None:
    async def check() -> None:
        async with site(memory_path) as here:
            publisher = WeightPublisher(
                memory_path / "store", waits=here.waits, parameters=PARAMETERS, serve=[here.serve()]
            )
            async with publisher:
                receiver, engine = here.receiver(port_of(publisher)), Engine()
                news = receiver.subscribe()
                for version in (3, 4):
                    state = weights(version)
                    await publisher.publish(version, state)
                    assert (await anext(news)).version == version
                    await engine.move(receiver, version)
                    arrived = tensors(engine, publisher.store.packing(version))
                    assert set(arrived) == {"embed", "router"}
                    assert torch.equal(arrived["embed"], state["embed"].to(torch.bfloat16))
                    assert torch.equal(arrived["router"], state["router"])

    asyncio.run(check())


def test_what_a_version_answers_is_told_while_it_is_kept(memory_path: Path) -> None:
    async def check() -> None:
        async with site(memory_path) as here:
            publisher = WeightPublisher(memory_path / "store", waits=here.waits, serve=[here.serve()], keep=1)
            async with publisher:
                answers = {version: KnownAnswer((1,), (version,), ({version: -0.5},)) for version in (1, 2)}
                offers = {}
                for version, answer in answers.items():
                    manifest = await publisher.publish(version, weights(version), answer)
                    offers[version] = Offer(version, manifest.fingerprint)
                third = await publisher.publish(3, weights(3))
                await publisher._retired()
                receiver = here.receiver(port_of(publisher))
                for offer in (*offers.values(), Offer(3, third.fingerprint)):
                    assert await receiver.answer(offer, deadline_s=PATIENT) is None  # gone, gone, and never told
                fourth = await publisher.publish(4, weights(4), answers[1])
                offer = Offer(4, fourth.fingerprint)
                assert await receiver.answer(offer, deadline_s=PATIENT) == answers[1]

    asyncio.run(check())


def test_without_anything_said_a_state_dict_is_published_as_it_is(memory_path: Path) -> None:
    async def check() -> None:
        async with site(memory_path) as here, WeightPublisher(memory_path / "store", waits=here.waits) as publisher:
            state = weights(1)
            await publisher.publish(1, state)
            parameters = publisher.store.packing(1).parameters
            assert {name: value.dtype for name, value in parameters.items()} == {
                "embed": "float32",
                "router": "float32",
            }

    asyncio.run(check())


def test_each_rank_fetches_its_share_and_more_ranks_may_come(memory_path: Path) -> None:
    async def check() -> None:
        async with site(memory_path) as here:
            two = [rank(number, 2) for number in range(2)]
            publisher = WeightPublisher(memory_path / "store", waits=here.waits, receivers=two, serve=[here.serve()])
            async with publisher:
                port = port_of(publisher)
                await publisher.publish(1, weights(1))
                assert len(publisher.store.packing(1).buckets) == 3, "two shards, and what both hold"
                receivers = {layout.holder: here.receiver(port, wanted=held_by(layout)) for layout in two}
                engines = {layout.holder: Engine(held_by(layout)) for layout in two}
                for layout in two:
                    await engines[layout.holder].move(receivers[layout.holder], 1)
                    assert sum(bits.size for bits in engines[layout.holder].bits.values()) == layout.elements
                publisher.add_receivers([rank(number, 4) for number in range(4)])
                await publisher.publish(2, weights(2))
                assert len(publisher.store.packing(2).buckets) == 5
                for layout in two:
                    await engines[layout.holder].move(receivers[layout.holder], 2)
                    assert sum(bits.size for bits in engines[layout.holder].bits.values()) == layout.elements
                await publisher.publish(3, weights(3))
                assert publisher.store.steps(2, 3)[0].manifest.base == 2, "packed as before, so in steps again"

    asyncio.run(check())


def test_old_versions_are_retired_but_those_that_are_pinned(memory_path: Path) -> None:
    async def check() -> None:
        async with site(memory_path) as here:
            async with WeightPublisher(memory_path / "store", waits=here.waits, keep=2) as publisher:
                for version in range(1, 6):
                    await publisher.publish(version, weights(version))
                    if version == 2:
                        await publisher.pin(2)
                with pytest.raises(TransferError, match="version 1 is not in"):
                    await publisher.pin(1)
                assert publisher.store.versions() == (2, 4, 5)
                publisher.unpin(2)
                await publisher.publish(6, weights(6))
            assert publisher.store.versions() == (5, 6)

    asyncio.run(check())


def new_weights(seed: int) -> dict[str, torch.Tensor]:
    """So many and so random that what else is in a store takes little beside them."""
    return {"embed": torch.randn((256, 256), generator=torch.Generator().manual_seed(seed)).bfloat16()}


def test_where_there_is_no_room_the_oldest_versions_go_first(
    memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each version has nothing of the one before, so each takes as much as the model."""
    dense = 256 * 256 * 2

    async def check() -> None:
        async with (
            site(memory_path) as here,
            WeightPublisher(
                memory_path / "store", waits=here.waits, serve=[here.serve()], bytes_max=6 * dense
            ) as publisher,
        ):
            for version in range(1, 13):
                await publisher.publish(version, new_weights(version))
                if version == 2:
                    await publisher.pin(2)
                assert publisher.newest == version
                packing, bits = publisher.store.packing(version), publisher.store.read(version)
                assert torch.equal(unpack(packing, bits)["embed"], new_weights(version)["embed"])
            kept = publisher.store.versions()
            assert kept[0] == 2, "what is pinned stays"
            assert len(kept) > 2, "no more go than need be"
            larger = {"embed": torch.randn((256 * 7, 256)).bfloat16()}
            with pytest.raises(NoRoom, match="no room for version 13"):
                await publisher.publish(13, larger)
            assert publisher.store.versions() == kept, "nothing goes for what has no room alone"
            assert verify(publisher.store) == ()

    with caplog.at_level(logging.WARNING):
        asyncio.run(check())
    assert "no room: the oldest versions go" in caplog.text


def test_where_no_version_may_go_what_to_do_is_said_and_then_done(memory_path: Path) -> None:
    dense = 256 * 256 * 2

    async def check() -> None:
        async with (
            site(memory_path) as here,
            WeightPublisher(memory_path / "store", waits=here.waits, bytes_max=5 * dense) as publisher,
        ):

            async def fill() -> None:
                for version in range(1, 9):
                    await publisher.publish(version, new_weights(version))
                    await publisher.pin(version)

            with pytest.raises(NoRoom, match="unpin versions") as found:
                await fill()
            assert "bytes_max" in str(found.value)
            kept = publisher.store.versions()
            assert kept == tuple(range(1, len(kept) + 1)), "nothing went"
            for version in kept:
                publisher.unpin(version)
            await publisher.publish(len(kept) + 1, new_weights(len(kept) + 1))
            assert verify(publisher.store) == ()

    asyncio.run(check())


def test_a_publisher_goes_on_from_what_is_there_and_alone(memory_path: Path) -> None:
    async def check() -> None:
        async with site(memory_path) as here:
            folder = memory_path / "store"
            async with WeightPublisher(folder, waits=here.waits) as publisher:
                await publisher.publish(1, weights(1))
                with pytest.raises(TransferError, match="this process writes to"):
                    WeightPublisher(folder, waits=here.waits)
            async with WeightPublisher(folder, waits=here.waits, serve=[here.serve()]) as publisher:
                news = here.receiver(port_of(publisher)).subscribe()
                assert (await anext(news)).version == 1
                assert (await publisher.publish(2, weights(2))).base == 1
                with pytest.raises(TransferError, match="numbers that rise"):
                    await publisher.publish(2, weights(3))
                assert (await anext(news)).version == 2

    asyncio.run(check())


def test_what_cannot_be_published_is_not_offered(memory_path: Path) -> None:
    async def check() -> None:
        async with site(memory_path) as here:
            publisher = WeightPublisher(
                memory_path / "store", waits=here.waits, parameters=PARAMETERS, serve=[here.serve()]
            )
            async with publisher:
                await publisher.publish(1, weights(1))
                with pytest.raises(TransferError, match="the new weights have no router"):
                    await publisher.publish(2, {"embed": weights(2)["embed"]})
                receiver, engine = here.receiver(port_of(publisher)), Engine()
                assert (await anext(receiver.subscribe())).version == 1
                await engine.move(receiver, 1, PATIENT)
                assert (await publisher.publish(2, weights(2))).base == 1

    asyncio.run(check())


@pytest.mark.parametrize("state", [{}, {"embed": torch.empty((0, 8))}], ids=["no tensors", "no elements"])
def test_a_model_without_weights_is_not_published(
    memory_path: Path, state: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with site(memory_path) as here:
            publisher = WeightPublisher(memory_path / "store", waits=here.waits, serve=[here.serve()])
            async with publisher:
                await publisher.publish(5, weights(5))
                with pytest.raises(TransferError, match=r"version 6 would hold no weights; expected .*element.*; look"):
                    await publisher.publish(6, state)
                whole_or_nothing(publisher, 5)
                assert (await publisher.publish(6, weights(6))).base == 5
            for nothing in ({"parameters": {}}, {"receivers": [Layout("engine", PARAMETERS, {}, ())]}):
                async with WeightPublisher(memory_path / "other", waits=here.waits, **nothing) as publisher:  # type: ignore[arg-type]
                    with pytest.raises(TransferError, match="version 1 would hold no weights"):
                        await publisher.publish(1, weights(1))

    with caplog.at_level(logging.WARNING):
        asyncio.run(check())
    assert "packed anew" not in caplog.text


def test_tensors_that_are_no_weights_are_refused_with_what_helps(memory_path: Path) -> None:
    """A counter of batches, as batch normalisation has one in its state dict."""

    async def check() -> None:
        async with site(memory_path) as here:
            state = {**weights(1), "norm.batches": torch.tensor(3)}
            async with WeightPublisher(memory_path / "store", waits=here.waits) as publisher:
                with pytest.raises(TransferError, match=r"norm\.batches has dtype int64.*`parameters=`"):
                    await publisher.publish(1, state)
                assert publisher.newest is None
            async with WeightPublisher(memory_path / "store", waits=here.waits, parameters=PARAMETERS) as publisher:
                await publisher.publish(1, state)
                assert publisher.store.packing(1).parameters == PARAMETERS
            counted = {**PARAMETERS, "norm.batches": Parameter((), "int64")}
            whole = {name: LocalTensor(value.shape, value.dtype) for name, value in counted.items()}
            pieces = tuple(
                Piece(name, Box.whole(value.shape), name, 0, (8, 1)[: len(value.shape)])
                for name, value in counted.items()
            )
            engine = Layout("engine", counted, whole, pieces)
            for one in ({"parameters": counted}, {"receivers": [engine]}):
                async with WeightPublisher(memory_path / "other", waits=here.waits, **one) as publisher:  # type: ignore[arg-type]
                    with pytest.raises(TransferError, match=r"norm\.batches has dtype int64"):
                        await publisher.publish(1, state)

    asyncio.run(check())


def test_one_version_is_offered_on_every_transport(memory_path: Path) -> None:
    async def check() -> None:
        async with site(memory_path) as here:
            publisher = WeightPublisher(memory_path / "store", waits=here.waits, serve=[here.serve(), here.serve()])
            async with publisher:
                await publisher.publish(1, weights(1))
                for server in publisher.servers:
                    assert isinstance(server, TcpServer)
                    receiver, engine = here.receiver(server.port), Engine()
                    assert (await anext(receiver.subscribe())).version == 1
                    await engine.move(receiver, 1)
                    assert torch.equal(tensors(engine, publisher.store.packing(1))["router"], weights(1)["router"])

    asyncio.run(check())


class HeldUp:
    """A state dict whose tensor stops whoever packs it, in the thread, until it is let go on."""

    def __init__(self, version: int) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.state: dict[str, torch.Tensor] = weights(version)
        self.state["router"] = Gated(self.state["router"], self)

    def stop(self) -> None:
        self.reached.set()
        assert self.go_on.wait(PATIENT)


class Gated(torch.Tensor):
    """Stops where it is copied from."""

    gate: HeldUp

    @staticmethod
    def __new__(cls, data: torch.Tensor, gate: HeldUp) -> Gated:
        made = torch.Tensor._make_subclass(cls, data)
        made.gate = gate
        return made

    def detach(self) -> torch.Tensor:
        self.gate.stop()
        return self.as_subclass(torch.Tensor).detach()


def whole_or_nothing(publisher: WeightPublisher, version: int) -> None:
    """What is on disk is offered, and nothing else is there."""
    (server,) = publisher.servers
    assert isinstance(server, TcpServer)
    assert server.newest is not None
    assert server.newest.version == publisher.newest == publisher.store.newest == version
    assert verify(publisher.store) == ()
    named = {key for found in publisher.store.manifests() for key in (found.key, *found.object_keys())}
    assert set(publisher.store.objects.known()) == named


@pytest.mark.parametrize("times", [1, 2])
def test_a_publish_that_is_cancelled_while_it_packs_leaves_nothing(memory_path: Path, times: int) -> None:
    """However often it is cancelled, and though the weights change as soon as it has raised."""

    async def check() -> None:
        async with (
            site(memory_path) as here,
            WeightPublisher(memory_path / "store", waits=here.waits, serve=[here.serve()]) as publisher,
        ):
            await publisher.publish(1, weights(1))
            held_up = HeldUp(2)
            publishing = asyncio.create_task(publisher.publish(2, held_up.state))
            await until(held_up.reached.is_set)
            for _ in range(times):
                publishing.cancel()
                await asyncio.sleep(0)
            if times == 1:
                await until(lambda: any("to be given up" in wait.what for wait in here.waits.snapshot()))
                assert not publishing.done(), "the weights are still being read"
                held_up.go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await publishing
            if times == 1:
                whole_or_nothing(publisher, 1)
            following = asyncio.create_task(publisher.publish(2, weights(3)))
            held_up.go_on.set()
            assert (await following).base == 1
            receiver, engine = here.receiver(port_of(publisher)), Engine()
            await engine.move(receiver, 2)
            assert torch.equal(tensors(engine, publisher.store.packing(2))["router"], weights(3)["router"])
            await publisher.offer()
            whole_or_nothing(publisher, 2)

    asyncio.run(check())


def test_a_publish_that_is_cancelled_once_all_is_packed_is_offered(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        async with (
            site(memory_path) as here,
            WeightPublisher(memory_path / "store", waits=here.waits, serve=[here.serve()]) as publisher,
        ):
            await publisher.publish(1, weights(1))
            reached, go_on = threading.Event(), threading.Event()
            write_mark = publisher.store._write_mark

            def slow(version: int, fingerprint: str) -> None:
                reached.set()
                assert go_on.wait(PATIENT)
                write_mark(version, fingerprint)

            monkeypatch.setattr(publisher.store, "_write_mark", slow)
            publishing = asyncio.create_task(publisher.publish(2, weights(2)))
            await until(reached.is_set)
            publishing.cancel()
            await until(lambda: any("to be given up" in wait.what for wait in here.waits.snapshot()))
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await publishing
            assert publisher.newest == 2
            await publisher.publish(3, weights(3))
            await publisher.offer()
            whole_or_nothing(publisher, 3)
            assert publisher.store.versions() == (1, 2, 3)

    asyncio.run(check())


def test_a_publish_that_is_cancelled_before_it_begins_or_after_its_end_is_no_trouble(memory_path: Path) -> None:
    async def check() -> None:
        async with (
            site(memory_path) as here,
            WeightPublisher(memory_path / "store", waits=here.waits, serve=[here.serve()]) as publisher,
        ):
            await publisher.publish(1, weights(1))
            for turns in range(12):
                newest = publisher.newest
                publishing = asyncio.create_task(publisher.publish(2 + turns, weights(2)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                publishing.cancel()
                await asyncio.wait([publishing])
                assert publisher.newest in (newest, 2 + turns)
                await publisher.offer()
                assert publisher.newest is not None
                whole_or_nothing(publisher, publisher.newest)
            both = await asyncio.gather(*(publisher.publish(number, weights(number)) for number in (20, 21)))
            assert [made.version for made in both] == [20, 21]

    asyncio.run(check())


def test_a_publisher_that_is_closed_while_it_publishes_ends_with_the_version_whole(memory_path: Path) -> None:
    async def check() -> None:
        async with site(memory_path) as here:
            async with WeightPublisher(memory_path / "store", waits=here.waits, serve=[here.serve()]) as publisher:
                held_up = HeldUp(1)
                publishing = asyncio.create_task(publisher.publish(1, held_up.state))
                await until(held_up.reached.is_set)
                held_up.go_on.set()
            assert (await publishing).version == 1
            Store(memory_path / "store").close()

    asyncio.run(check())
