"""Ways and offers: one text for each, which is read back or refused; a way that does not chain up is refused."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_tools import publish_line

from rose.errors import TransferError
from rose_transfer.distribution import Offer
from rose_transfer.distribution.offer import offer_of
from rose_transfer.distribution.way import Way, WayAsk, ask_of, check_answer, check_steps, from_bytes
from rose_transfer.store import Store
from rose_transfer.store.canonical import MalformedRecord
from rose_transfer.transport.interface import Announcement, is_key

NUMBERS = st.integers(0, 2**63 - 1)
KEYS = st.text("0123456789abcdef", min_size=64, max_size=64)
NONCES = st.text("0123456789abcdef", min_size=32, max_size=32)
WAYS = st.builds(
    Way,
    NUMBERS,
    KEYS,
    st.none() | NUMBERS,
    st.lists(st.tuples(KEYS, st.booleans()), max_size=4, unique_by=lambda step: step[0]).map(tuple),
)
HELD = st.just((None, None)) | st.tuples(NUMBERS, KEYS)
ASKS = st.builds(
    lambda goal, held, nonce, checked: WayAsk(goal, *held, nonce, checked), NUMBERS, HELD, NONCES, st.booleans()
)


@given(WAYS)
def test_a_way_is_read_back(way: Way) -> None:
    assert from_bytes(way.to_bytes()) == way


@given(WAYS, st.data())
def test_a_changed_text_is_another_way_or_none(way: Way, data: st.DataObject) -> None:
    text = bytearray(way.to_bytes())
    text[data.draw(st.integers(0, len(text) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(MalformedRecord):
        assert from_bytes(bytes(text)).to_bytes() == bytes(text)


@given(st.binary(max_size=200))
def test_noise_is_no_way(noise: bytes) -> None:
    with pytest.raises(MalformedRecord):
        from_bytes(noise)


@given(ASKS)
def test_a_question_is_a_key_and_is_read_back(ask: WayAsk) -> None:
    assert is_key(ask.key)
    assert ask_of(ask.key) == ask


@given(st.text(max_size=60) | KEYS)
def test_other_keys_ask_nothing(key: str) -> None:
    assert ask_of(key) is None


@given(NUMBERS, KEYS)
def test_an_offer_is_announced_and_read_back(version: int, fingerprint: str) -> None:
    offer = Offer(version, fingerprint)
    assert offer_of(offer.announcement) == offer


@pytest.mark.parametrize(
    "key", ["manifest", f"version-8-{'0' * 64}", f"version-07-{'0' * 64}", f"version-7-{'0' * 63}"]
)
def test_other_announcements_are_no_offers(key: str) -> None:
    with pytest.raises(TransferError, match="is announced as"):
        offer_of(Announcement(7, key))


def test_an_answer_to_another_question_is_refused() -> None:
    ask = WayAsk(7, 5, "a" * 64, "0" * 32)
    for way in (Way(7, "b" * 64, 5, ()), Way(7, "b" * 64, None, ())):
        check_answer(way, ask)
    for way in (Way(8, "b" * 64, 5, ()), Way(7, "b" * 64, 4, ())):
        with pytest.raises(MalformedRecord):
            check_answer(way, ask)


def test_only_a_way_that_chains_up_is_whole(memory_path: Path) -> None:
    store = Store(memory_path / "store")
    publish_line(store, 4)
    link = {(found.version, found.base): (found.key, found) for found in store.manifests()}
    bits = {version: store.fingerprint(version) for version in store.versions()}

    def check(start: int | None, held: str | None, goal: int, *hops: tuple[tuple[int, int | None], bool]) -> None:
        steps = tuple((link[ends][0], backwards) for ends, backwards in hops)
        check_steps(Way(goal, bits[goal], start, steps), held, [link[ends][1] for ends, _ in hops])

    whole, second, third = (1, None), (2, 1), (3, 2)
    check(None, None, 2, (whole, False), (second, False))
    check(3, bits[3], 2, (whole, False), (second, False))
    check(1, bits[1], 3, (second, False), (third, False))
    check(3, bits[3], 1, (third, True), (second, True))
    check(3, bits[3], 3)
    for wrong in (
        (None, None, 3, (whole, False), (second, False)),  # does not get there
        (None, None, 3, (whole, False), (third, False)),  # a link is missing
        (None, None, 2, (second, False)),  # from nothing
        (1, bits[2], 3, (second, False), (third, False)),  # from other bits
        (1, bits[1], 3, (third, False), (second, False)),  # out of order
        (1, bits[1], 2, (second, True)),  # the wrong way round
        (1, bits[1], 1, (whole, True)),  # back from nothing
        (3, bits[2], 3),
    ):
        with pytest.raises(MalformedRecord):
            check(*wrong)
    with pytest.raises(MalformedRecord, match="comes by version 1 twice"):
        check(1, bits[1], 3, (second, False), (second, True), (second, False), (third, False))
    store.close()
