"""The load client against an engine that answers well, badly, or not at all."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest
from fake_engine import DONE, FakeEngine, Writes, dying, event, hang, serving, streaming, stuck, writing

from rose.errors import DeadlineExceeded, EngineError
from rose.waits import WaitBoard
from rose.workload.load_client import LoadClient, LoadSettings
from rose.workload.load_record import LoadRecord, Outcome
from rose.workload.prompts import Prompts
from rose.workload.served_model import ServedModel, served_model
from rose.workload.trace import Trace, TraceRequest


def trace_of(*arrivals_s: float, tokens: int = 5) -> Trace:
    requests = tuple(TraceRequest(at_s, 3 + number, tokens) for number, at_s in enumerate(arrivals_s))
    return Trace("t", "a", requests, arrivals_s[-1])


class Replayed:
    """A finished replay."""

    def __init__(self, client: LoadClient, engine: FakeEngine, records: list[LoadRecord]) -> None:
        self.client = client
        self.engine = engine
        self.records = {record.index: record for record in records}
        assert len(self.records) == len(records)

    def outcomes(self) -> list[Outcome]:
        return [self.records[index].outcome for index in sorted(self.records)]


def client_of(url: str, trace: Trace, records: list[LoadRecord], **settings: Any) -> LoadClient:
    options: dict[str, Any] = {"url": url, "model": "tiny", "deadline_s": 30.0, **settings}
    return LoadClient(LoadSettings(**options), trace, Prompts(trace, 10, 90, seed=0), record=records.append)


def replay(trace: Trace, answer: Writes, *, status: int = 200, **settings: Any) -> Replayed:
    records: list[LoadRecord] = []

    async def run() -> Replayed:
        async with serving(FakeEngine(answer, status)) as engine:
            client = client_of(engine.url, trace, records, **settings)
            await asyncio.wait_for(client.run(), 60)
            return Replayed(client, engine, records)

    return asyncio.run(run())


def test_a_request_is_what_was_asked_for_and_every_token_is_timed() -> None:
    done = replay(trace_of(0.0, 0.1), streaming(first_s=0.05, gap_s=0.01))
    assert done.outcomes() == [Outcome.COMPLETED] * 2
    assert [one.request_id for one in done.engine.asked] == ["load-0", "load-1"]
    assert done.engine.asked[0].body == {
        "model": "tiny",
        "prompt": done.engine.asked[0].body["prompt"],
        "max_tokens": 5,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    assert [len(one.body["prompt"]) for one in done.engine.asked] == [3, 4]
    for record in done.records.values():
        assert record.tokens == record.asked_tokens == 5
        assert len(record.gaps_s) == 4
        assert record.sent_s is not None
        assert record.first_s is not None
        assert record.last_s is not None
        assert record.due_s <= record.sent_s < record.first_s < record.last_s <= record.ended_s
        assert sum(record.gaps_s) == pytest.approx(record.last_s - record.first_s)
        assert record.ttft_s is not None
        assert record.tpot_s is not None
        # The engine sleeps before the first token, and less between tokens: never shorter than it slept.
        assert record.ttft_s >= 0.05
        assert record.tpot_s >= 0.009
        assert record.detail == ""


def test_comments_and_other_line_ends_do_no_harm() -> None:
    crlf = event(5, finish="length").replace(b"\n", b"\r\n")
    done = replay(trace_of(0.0), writing(b": ping\n\n", crlf[:-1], crlf[-1:], b": ping\n\n", DONE))
    assert done.outcomes() == [Outcome.COMPLETED]


def test_several_tokens_in_one_event_count_as_many() -> None:
    done = replay(trace_of(0.0, tokens=6), streaming(gap_s=0.01, at_once=2))
    record = done.records[0]
    assert (record.outcome, record.tokens, len(record.gaps_s)) == (Outcome.COMPLETED, 6, 2)


def test_slow_answers_hold_back_no_request() -> None:
    """All four are in flight at once, though each is slower than all arrivals together."""
    peak = 0

    async def answer(response: Any, asked: Any) -> None:
        nonlocal peak
        everyone.append(asked)
        peak = max(peak, len(everyone))
        while len(everyone) < 4:
            await asyncio.sleep(0.005)
        await streaming()(response, asked)

    everyone: list[Any] = []
    done = replay(trace_of(0.0, 0.01, 0.02, 0.03), answer)
    assert peak == 4
    assert done.outcomes() == [Outcome.COMPLETED] * 4
    assert done.client.counts.sent == 4


BROKEN: list[tuple[str, Writes, int, str]] = [
    ("ends early", streaming(done=False), 5, "before its end marker"),
    ("ends at once", writing(), 0, "after 0 tokens"),
    ("falls short", streaming(short_by=2), 3, "3 of 5 tokens, then length"),
    ("runs over", writing(event(4), event(6), DONE), 4, "usage of 6 tokens after 4, of 5 at most"),
    ("goes back", writing(event(4), event(3), DONE), 4, "usage of 3 tokens after 4"),
    ("dies", dying([event(1), event(2)]), 2, "ClientPayloadError"),
    ("dies at once", dying([]), 0, "Error"),
    ("half an event", writing(event(1), event(2)[:20]), 1, "before its end marker"),
    ("no stream", writing(b"<html>busy</html>\n\n"), 0, "begins with b'<html>"),
    ("no JSON", writing(b"data: {\n\n"), 0, "not JSON"),
    ("no object", writing(b"data: 7\n\n"), 0, "not an object"),
    (
        "no usage",
        writing(b'data: {"choices":[{"text":"x","finish_reason":null}]}\n\n'),
        0,
        "without choices or running",
    ),
    ("wrong choices", writing(b'data: {"choices":[7],"usage":{"completion_tokens":1}}\n\n'), 0, "without choices"),
    ("wrong usage", writing(b'data: {"choices":[],"usage":{"completion_tokens":"1"}}\n\n'), 0, "usage of '1'"),
    ("fails", writing(event(1), b'data: {"error":{"message":"no memory"}}\n\n'), 1, "the engine failed: {'message'"),
    ("floods", writing(b"data: " + b"x" * 3_000_000), 0, "an event of more than"),
    ("goes on after its end", writing(event(5), DONE, event(5)), 5, "an event after the end"),
]


@pytest.mark.parametrize(("answer", "tokens", "why"), [one[1:] for one in BROKEN], ids=[one[0] for one in BROKEN])
def test_an_answer_that_is_none_is_recorded_with_its_tokens(answer: Writes, tokens: int, why: str) -> None:
    done = replay(trace_of(0.0, 0.05), answer)
    assert done.outcomes() == [Outcome.BROKEN] * 2
    record = done.records[0]
    assert why in record.detail
    assert record.tokens == tokens
    assert (record.first_s is not None) == (tokens > 0)
    assert len(record.detail) <= 300


def test_an_error_status_is_a_refusal() -> None:
    done = replay(trace_of(0.0), hang, status=500)
    assert done.outcomes() == [Outcome.REFUSED]
    assert done.records[0].detail == "status 500: out of order"


def test_a_redirection_is_not_followed() -> None:
    done = replay(trace_of(0.0), hang, status=307)
    assert done.outcomes() == [Outcome.REFUSED]
    assert len(done.engine.asked) == 1


def test_what_goes_wrong_beside_a_replay_comes_out() -> None:
    def beat(lag_s: float) -> None:
        raise ArithmeticError("beat")

    trace = trace_of(0.0, 0.2)

    async def run() -> None:
        async with serving(FakeEngine(streaming())) as engine:
            settings = LoadSettings(engine.url, "tiny")
            prompts = Prompts(trace, 10, 90, 0)
            await LoadClient(settings, trace, prompts, record=lambda record: None, beat=beat).run()

    with pytest.raises(ArithmeticError, match="beat"):
        asyncio.run(run())


def test_where_nobody_listens_every_request_is_broken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    records: list[LoadRecord] = []
    asyncio.run(client_of(f"http://127.0.0.1:{port}", trace_of(0.0, 0.0), records).run())
    assert [record.outcome for record in records] == [Outcome.BROKEN] * 2
    assert all("ClientConnectorError" in record.detail for record in records)


@pytest.mark.parametrize(("answer", "tokens"), [(hang, 0), (stuck([event(1), event(3)]), 3)], ids=["hangs", "sticks"])
def test_a_deadline_ends_a_request_and_keeps_what_came(answer: Writes, tokens: int) -> None:
    done = replay(trace_of(0.0, 0.01), answer, deadline_s=0.3)
    assert done.outcomes() == [Outcome.TIMED_OUT] * 2
    assert done.records[0].tokens == tokens
    assert done.records[0].ended_s >= 0.3
    assert done.engine.gone == 2


def test_the_cap_turns_into_refusals_that_never_reach_the_engine() -> None:
    done = replay(trace_of(0.0, 0.0, 0.05, 0.1), hang, in_flight_max=2, deadline_s=0.5)
    assert done.outcomes() == [Outcome.TIMED_OUT] * 2 + [Outcome.OVER_CAP] * 2
    assert len(done.engine.asked) == 2
    assert done.records[3].sent_s is None
    assert done.client.counts.refused == 2
    assert done.client._bodies == {}


def test_a_stop_cuts_what_is_in_flight() -> None:
    records: list[LoadRecord] = []

    async def run() -> LoadClient:
        async with serving(FakeEngine(stuck([event(2)]))) as engine:
            client = client_of(engine.url, trace_of(0.0, 0.0, 3000.0), records)
            running = asyncio.create_task(client.run())
            while engine.open < 2:
                await asyncio.sleep(0.01)
            await client.stop()
            await asyncio.wait_for(running, 30)
            await client.stop()
            return client

    client = asyncio.run(run())
    assert [record.outcome for record in records] == [Outcome.CUT] * 2
    assert client.counts.unsent == 1
    assert client.in_flight == 0


def test_a_client_that_stands_still_says_so() -> None:
    """Its own lag is on every request that was in flight or due meanwhile, and counted as late."""
    slept_s = 0.0

    async def answer(response: Any, asked: Any) -> None:
        nonlocal slept_s
        if asked.request_id == "load-0":
            # The engine is in the same process: all stand still until the second request is overdue.
            began = time.monotonic()
            time.sleep(1.2)
            slept_s = time.monotonic() - began
        await streaming()(response, asked)

    done = replay(trace_of(0.0, 1.0), answer)
    assert done.outcomes() == [Outcome.COMPLETED] * 2
    assert done.records[0].loop_lag_s >= slept_s - 0.05
    assert done.records[1].lag_s is not None
    assert done.records[1].lag_s >= 0.2
    assert done.client.counts.late == 1
    assert done.client.counts.lag_s == done.records[1].lag_s


def test_standing_still_is_seen_also_by_a_request_that_ends_at_once_after_it() -> None:
    slept_s = 0.0

    async def answer(response: Any, asked: Any) -> None:
        nonlocal slept_s
        await streaming()(response, asked)
        await response.write_eof()
        # All of the answer is there before the client gets to run again.
        began = time.monotonic()
        time.sleep(0.5)
        slept_s = time.monotonic() - began

    done = replay(trace_of(0.0, tokens=1), answer)
    assert done.outcomes() == [Outcome.COMPLETED]
    assert done.records[0].loop_lag_s >= slept_s - 0.05


def test_open_requests_are_named_waits() -> None:
    waits = WaitBoard()
    trace = trace_of(0.0)

    async def run() -> None:
        async with serving(FakeEngine(hang)) as engine:
            settings = LoadSettings(engine.url, "tiny", deadline_s=30.0)
            client = LoadClient(settings, trace, Prompts(trace, 10, 90, 0), record=lambda record: None, waits=waits)
            running = asyncio.create_task(client.run())
            while not engine.open:
                await asyncio.sleep(0.01)
            assert [(wait.what, wait.whom) for wait in waits.snapshot()] == [("answer to request 0", engine.url)]
            await client.stop()
            await running
            assert waits.snapshot() == ()

    asyncio.run(run())


def test_bodies_made_ahead_are_bounded_and_used_up() -> None:
    trace = trace_of(*[0.002 * number for number in range(150)], tokens=1)
    ahead: list[int] = []
    records: list[LoadRecord] = []

    def record(one: LoadRecord) -> None:
        records.append(one)
        ahead.append(len(client._bodies))

    async def run(engine: FakeEngine) -> None:
        async with serving(engine):
            nonlocal client
            client = LoadClient(LoadSettings(engine.url, "tiny"), trace, Prompts(trace, 10, 90, 0), record=record)
            await client.run()

    client: LoadClient
    engine = FakeEngine(streaming())
    asyncio.run(run(engine))
    assert [one.outcome for one in records] == [Outcome.COMPLETED] * 150
    assert [len(one.body["prompt"]) - 3 for one in engine.asked] == [
        int(one.request_id.removeprefix("load-")) for one in engine.asked
    ]
    assert max(ahead) <= 64
    assert ahead[-1] == 0


def ask_model(handler: FakeEngine | None, timeout_s: float = 0.3) -> ServedModel:
    async def run() -> ServedModel:
        if handler is None:
            return await served_model("http://127.0.0.1:1", timeout_s, WaitBoard())
        async with serving(handler) as engine:
            return await served_model(engine.url, timeout_s, WaitBoard())

    return asyncio.run(run())


def test_the_model_is_what_the_engine_says() -> None:
    assert ask_model(FakeEngine(hang), 10.0) == ServedModel("tiny", 512)
    assert ask_model(FakeEngine(hang, context=None), 10.0) == ServedModel("tiny", None)


def test_an_engine_that_is_not_there_in_time_is_named() -> None:
    with pytest.raises(DeadlineExceeded, match=r"127.0.0.1:1: no list of models after 0.3 s"):
        ask_model(None)


@pytest.mark.parametrize("path", ["/nowhere", "/v1/completions"])
def test_an_address_of_something_else_is_named(path: str) -> None:
    async def run() -> None:
        async with serving(FakeEngine(hang)) as engine:
            await served_model(engine.url + path, 10.0, WaitBoard())

    with pytest.raises(EngineError, match="expected an OpenAI list of models"):
        asyncio.run(run())


def test_an_address_that_is_none_is_named() -> None:
    with pytest.raises(EngineError, match="is no address"):
        asyncio.run(served_model("http://", 10.0, WaitBoard()))
