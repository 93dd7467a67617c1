"""The transfer bench: its parts and projections, and its two ends on a small model, with all real parts."""

from __future__ import annotations

import asyncio
import tempfile
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import transfer, transfer_model, transfer_replicas, transfer_wan_ends
from bench.codec_peers import PEERS, Peer
from bench.codec_versions import trained, weights
from bench.smollm import halving
from bench.transfer_methods import DENSE, METHODS, OURS, MadeObjects
from bench.transfer_projection import Costs, Point, Work, error, fitted, touched
from bench.transfer_receiver import Receiver
from bench.transfer_sender import Sender
from bench.transfer_wan_ends import PublisherEnd, ReceiversEnd, RelayEnd
from rose_transfer.layout.holdings import shard_classes
from rose_transfer.layout.layout import Parameter, check_destination
from rose_transfer.store.packing import pack_regions
from rose_transfer.transport.interface import ObjectMissing
from rose_transfer.transport.tcp import LOOPBACK

TOKEN = "a token of the tests"


@pytest.mark.parametrize("peer", PEERS, ids=[peer.name for peer in PEERS])
@pytest.mark.parametrize("share", [0.0, 0.00002, 0.01, 0.6])
def test_every_peers_method_is_exact(peer: Peer, share: float) -> None:
    rng = np.random.default_rng(1)
    old = weights(200_000, rng)
    new = trained(old, share, rng)
    if share == 0.00002:
        new[-1] += 1  # farther from the one before than 16 bits reach
    target = old.copy()
    peer.decode(peer.encode(old, new), target)
    assert np.array_equal(target, new)


def test_both_ends_bring_the_new_bits_by_every_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo aside, which needs a process for each end. The store goes back and forth between the two versions."""
    monkeypatch.setattr(transfer_model, "ELEMENTS", 70_000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def check() -> None:
        sender, receiver = Sender(3), Receiver(3)
        await receiver.open(LOOPBACK, await sender.open(LOOPBACK, TOKEN), TOKEN)
        for number, side in enumerate((OURS, *METHODS, OURS)):
            made = await sender.change(0.01, number)
            await receiver.receive(side, number, await sender.expect(side, number))
            sent = await sender.send(side, number)
            received = await receiver.finish()
            assert await receiver.hashes() == made["hashes"], side
            assert received["ended_s"] >= sent["began_s"]
            assert (sent["sent_bytes"] < 3 * 140_000) == (side != DENSE)
            await sender.back()
            await receiver.back()
        await receiver.close()
        await sender.close()

    asyncio.run(check())


def test_objects_that_are_being_made_are_waited_for_and_others_are_missing() -> None:
    async def check() -> None:
        made = MadeObjects()
        made.expect(["one"])
        asked = asyncio.create_task(made.prepare("one"))
        await asyncio.sleep(0)
        assert not asked.done()
        made.put("one", b"bytes")
        await asked
        assert made.has("one")
        assert bytes(made.open("one").read_at(1, 3)) == b"yte"
        with pytest.raises(ObjectMissing):
            await made.prepare("two")
        made.expect(["two"])
        assert not made.has("one")

    asyncio.run(check())


def test_a_relay_feeds_two_replicas_of_four_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"matrix": Parameter((256, 512), "bfloat16"), "norm": Parameter((512,), "bfloat16")}
    monkeypatch.setattr(transfer_replicas, "PARAMETERS", small)
    monkeypatch.setattr(transfer_wan_ends, "PARAMETERS", small)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def check() -> None:
        publisher, relay, receivers = PublisherEnd(), RelayEnd(), ReceiversEnd()
        port = await publisher.open(LOOPBACK, TOKEN, 2)
        await receivers.open(await relay.open(LOOPBACK, port, TOKEN), TOKEN, 2)
        joined = await receivers.fetch(1)
        encoded = await publisher.publish(2)
        received = await receivers.fetch(2)
        await receivers.close()
        await relay.close()
        await publisher.close()
        assert len(received) == 2 * transfer_replicas.TP
        assert all(0 < one < encoded + 4000 for one in received), "no rank is sent what others hold"
        assert max(received) < min(joined) / 3

    asyncio.run(check())


def test_ranks_hold_the_model_once_and_buckets_are_told_apart() -> None:
    layouts = [transfer_replicas.rank_layout(replica, rank) for replica in range(2) for rank in range(4)]
    for layout in layouts:
        check_destination(layout)
    classes = shard_classes(layouts)
    elements = sum(int(np.prod(one.shape)) for one in transfer_replicas.PARAMETERS.values())
    assert sum(one.elements for one in classes) == elements
    packing = pack_regions(
        transfer_replicas.PARAMETERS, {str(number): one.regions for number, one in enumerate(classes)}
    )
    held = [transfer_replicas.buckets_of(layout, packing) for layout in layouts[:4]]
    assert set().union(*held) == {bucket.bucket_id for bucket in packing.buckets}
    assert len(set.intersection(*map(set, held))) == 1, "the norms"


def point(buckets: int, density: float, costs: Costs) -> Point:
    """What `costs` say of it."""
    size = buckets * 64e6
    changed = density * size
    told = costs.seconds(size, changed, buckets, RATE, (1.0, 1.0))
    sent = 0.04 * density**-0.5 * changed
    publish, apply = costs.publish.seconds(size, changed), costs.apply.seconds(size, changed)
    return Point(size, changed, sent, buckets, told, publish, apply)


RATE = 1e8
SENT = tuple((density, 0.04 * density**-0.5) for density in (1e-3, 1e-2))
TRUE = Costs(Work(0.02, 2e-10, 6e-8), Work(0.001, 0.0, 4e-8), 0.01, SENT)


def test_a_projection_finds_what_the_points_were_made_of() -> None:
    """Also the bytes of a density between those of the points, and what costs time whatever is sent."""
    made = fitted([point(buckets, density, TRUE) for buckets in (1, 8) for density in (1e-3, 1e-2)], RATE)
    for buckets, density in ((4, 3e-3), (8, 5e-3), (250, 3e-3)):
        assert error(made, point(buckets, density, TRUE), RATE) < 1e-6
    assert (made.publish.fixed_s, made.wait_s) == pytest.approx((0.02, 0.01))
    assert made.apply.per_byte == pytest.approx(0.0, abs=1e-14)


@pytest.mark.parametrize("share", [1e-4, 0.01, 0.1, 1.0])
def test_touched_is_what_random_changes_touch(share: float) -> None:
    changed = np.random.default_rng(1).random((50_000, 64)) < share
    told = touched(changed.size * 2, float(changed.sum()))
    assert told == pytest.approx(int(changed.any(axis=1).sum()), rel=0.05)


def test_a_projection_says_how_far_it_is_off() -> None:
    made = fitted([point(buckets, density, TRUE) for buckets in (1, 8) for density in (1e-3, 1e-2)], RATE)
    held_out = point(4, 3e-3, TRUE)
    assert error(made, replace(held_out, seconds=held_out.seconds / 1.25), RATE) == pytest.approx(0.25)


def test_no_cost_is_below_nothing() -> None:
    """A larger model that took less time, say: its bytes cost nothing then."""
    points = [point(buckets, density, TRUE) for buckets in (1, 8) for density in (1e-3, 1e-2)]
    made = fitted([replace(one, publish_s=1 / one.buckets, seconds=one.seconds + 9) for one in points], RATE)
    terms = (*(getattr(made.publish, name) for name in ("fixed_s", "per_byte", "per_touched")), made.wait_s)
    assert min(terms) >= 0
    assert made.publish.fixed_s > 0


@pytest.mark.parametrize("points", [[(1, 1e-3), (1, 1e-2)], [(1, 1e-3), (8, 1e-3)]])
def test_points_that_tell_too_little_are_refused(points: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="do not tell"):
        fitted([point(buckets, density, TRUE) for buckets, density in points], RATE)


def test_a_projection_divides_work_but_neither_the_link_nor_what_is_fixed() -> None:
    one, eight, narrow = (
        TRUE.seconds(16e9, 80e6, 256, rate, (cores, cores)) for rate, cores in ((1e10, 1), (1e10, 8), (1e6, 8))
    )
    assert 6.5 < one / eight < 8
    assert eight > TRUE.publish.fixed_s + TRUE.wait_s
    assert narrow == pytest.approx(SENT_PER_CHANGED * 80e6 / 1e6, rel=0.05)


SENT_PER_CHANGED = 0.04 * 5e-3**-0.5


def test_halving_is_found_where_it_was_put() -> None:
    rng = np.random.default_rng(3)
    old = weights(1_500_000, rng)
    chance = 0.4 * 0.5 ** np.clip((old >> 7 & 0xFF).astype(np.int64) - 117, 0, 20)
    new = np.where(rng.random(old.size) < chance, old + 1, old).astype(np.uint16)
    assert halving(old, new) == pytest.approx(0.5, abs=0.05)
    assert np.isnan(halving(old, old))


def test_every_headline_figure_is_measured_or_left_out_with_a_reason() -> None:
    parser = ArgumentParser()
    transfer.BENCH.add_arguments(parser)
    everything = parser.parse_args([])
    assert everything.only == tuple(transfer.PARTS)
    codec_alone = transfer.left_out(parser.parse_args(["--only", "codec"]))
    assert set(codec_alone) | set(transfer.PARTS["codec"].headline) == set(transfer.BENCH.headline)
    assert not set(codec_alone) & set(transfer.PARTS["codec"].headline)
    assert codec_alone["vs_dense"] == "left out with --only codec"
    assert {target.figure for target in transfer.BENCH.targets} <= set(transfer.BENCH.headline)


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    transfer.BENCH.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--only", "link,disk"])
    assert "no part disk; there are link, wan, codec, smollm" in capsys.readouterr().err
