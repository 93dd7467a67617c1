"""What a version is known to answer: its text, and its way to whoever runs the version, also over a relay."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from distribution_tools import PATIENT, free_port, line, port_of, site, until
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.errors import TransferError
from rose_transfer.distribution import Offer, above, known_answer
from rose_transfer.distribution.known_answer import KnownAnswer
from rose_transfer.distribution.outlet import Outlet
from rose_transfer.store.canonical import MalformedRecord

TOKENS = st.integers(0, 2**31)
PLACES = st.dictionaries(TOKENS, st.floats(-1e4, 0), min_size=1, max_size=20)
ANSWERS = st.integers(1, 8).flatmap(
    lambda count: st.builds(
        KnownAnswer,
        st.lists(TOKENS, min_size=1, max_size=50).map(tuple),
        st.lists(TOKENS, min_size=count, max_size=count).map(tuple),
        st.lists(PLACES, min_size=count, max_size=count).map(tuple),
    )
)
ANSWER = KnownAnswer((5, 6, 7), (8, 9), ({8: -0.25, 3: -2.0}, {9: -0.5, 1: -3.125}))


@settings(derandomize=True)
@given(ANSWERS)
def test_a_text_reads_back_within_a_millionth_of_a_nat(answer: KnownAnswer) -> None:
    data = known_answer.to_bytes(answer)
    again = known_answer.from_bytes(data)
    assert (again.question, again.output) == (answer.question, answer.output)
    for found, meant in zip(again.likely, answer.likely, strict=True):
        assert found.keys() == meant.keys()
        assert all(abs(found[token] - meant[token]) <= 1e-6 for token in meant)
    assert known_answer.to_bytes(again) == data


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b'{"layout":1,"likely":[],"output":[],"question":[1]}',
        b'{"layout":1,"likely":[[[1,2]]],"output":[1],"question":[]}',
        b'{"layout":1,"likely":[[[1,2]],[[1,2]]],"output":[1],"question":[1]}',
        b'{"layout":1,"likely":[[]],"output":[1],"question":[1]}',
        b'{"layout":1,"likely":[[[1,2],[1,3]]],"output":[1],"question":[1]}',
        b'{"layout":1,"likely":[[[1,3],[2,2]]],"output":[1],"question":[1]}',
        b'{"layout":1,"likely":[[[1,-2]]],"output":[1],"question":[1]}',
        b'{"layout":1,"likely":[[[1,0.5]]],"output":[1],"question":[1]}',
        b'{"layout":1,"likely":[[[1,2,3]]],"output":[1],"question":[1]}',
        b'{"layout":2,"likely":[[[1,2]]],"output":[1],"question":[1]}',
        b'{"layout":1,"likely":[[[1,2]]],"output":[1],"question":[1],"x":1}',
        b'{"layout":1, "likely":[[[1,2]]],"output":[1],"question":[1]}',
    ],
)
def test_what_is_no_answer_is_refused(text: bytes) -> None:
    with pytest.raises(MalformedRecord):
        known_answer.from_bytes(text)


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
def test_what_is_no_log_prob_is_not_written(logprob: float) -> None:
    with pytest.raises((ValueError, OverflowError)):
        known_answer.to_bytes(KnownAnswer((1,), (1,), ({1: logprob},)))


def test_only_its_own_key_asks_for_it() -> None:
    assert known_answer.is_ask(known_answer.ask_key(Offer(7, "ab" * 32)))
    assert not known_answer.is_ask("answer-07-" + "ab" * 32)
    assert not known_answer.is_ask("way-7-from-nothing-" + "ab" * 16)


def test_it_comes_with_its_version_over_a_relay_and_none_is_told_where_there_is_none(memory_path: Path) -> None:
    async def check() -> None:
        store, _ = line(memory_path / "store", 1)
        offer = Offer(1, store.fingerprint(1))
        known = {known_answer.ask_key(offer): known_answer.to_bytes(ANSWER)}

        async def answers(key: str) -> bytes | None:
            return known.get(key)

        async with site(memory_path) as here:
            outlet = Outlet(store, [here.serve(0)], answers=answers)
            await outlet.open()
            async with here.relay(port_of(outlet)) as below:
                await until(lambda: below.store.newest == 1)
                for port in (port_of(outlet), port_of(below)):
                    receiver = here.receiver(port)
                    assert await receiver.answer(offer, deadline_s=PATIENT) == ANSWER
                    assert await receiver.answer(Offer(1, "0" * 64), deadline_s=PATIENT) is None
            await outlet.close()
        store.close()

    asyncio.run(check())


def test_a_relay_that_follows_itself_asks_itself_once(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(above, "_ANSWER_S", 0.3)

    async def check() -> None:
        port = free_port()
        async with site(memory_path) as here, here.relay(port, port=port):
            with pytest.raises(TransferError, match="not heard of"):
                await here.receiver(port).answer(Offer(1, "0" * 64), deadline_s=PATIENT)

    asyncio.run(check())


def test_a_store_without_answers_tells_none(memory_path: Path) -> None:
    async def check() -> None:
        store, _ = line(memory_path / "store", 1)
        async with site(memory_path) as here:
            outlet = Outlet(store, [here.serve(0)])
            await outlet.open()
            receiver = here.receiver(port_of(outlet))
            assert await receiver.answer(Offer(1, store.fingerprint(1)), deadline_s=PATIENT) is None
            await outlet.close()
        store.close()

    asyncio.run(check())
