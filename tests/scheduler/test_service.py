"""The service over a real channel: what it answers, to whom, and what it survives."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import grpc
import pytest
from service_tools import LONG_S, TOKEN, Site, free_port, offered, site, turn, until
from stream_tools import late_front

from rose.access import credentials
from rose.errors import ClusterError, ContractError, DeadlineExceeded, EngineError, SchedulerError
from rose.metrics import SchedulerMetrics
from rose.peer_channel import CONNECT_S
from rose.proto.v1 import scheduler_pb2 as wire
from rose.waits import WaitBoard
from rose_scheduler.client import EngineState, LeaseRefused, SchedulerClient
from rose_scheduler.desk import Desk
from rose_scheduler.events import LeaseOutcome, Reason, Standing
from rose_scheduler.limits import Limits
from rose_scheduler.placement import Placement
from rose_scheduler.service import MESSAGE_BYTES_MAX, serve

LEASE = {
    "lease_id": "l",
    "trajectory_id": "t",
    "group_id": "g",
    "turn": 1,
    "context_tokens": 9,
    "wait_ms": 60_000.0,
    "hold_ms": 60_000.0,
}
ENGINE = {"engine_id": "e", "incarnation": "1"}
OFFER = {
    **ENGINE,
    "kind": wire.ENGINE_KIND_LENT,
    "address": "http://there",
    "max_requests": 1,
    "weight_version": 0,
    "counts_address": "there:7000",
}
BEAT = {**ENGINE, "weight_version": 0, "slots_open": 1, "kv_used_fraction": 0.5}


def test_a_turn_gets_a_place_and_gives_it_back() -> None:
    async def check() -> None:
        async with site() as here:
            engine = offered(most=1, version=3)
            assert await here.client.beat(engine, EngineState(3, 1, 0.0)) is Standing.UNKNOWN
            assert await here.client.offer(engine) is Standing.KNOWN
            assert await here.client.beat(engine, EngineState(3, 1, 0.25)) is Standing.KNOWN
            async with here.client.lease(turn(min_version=3), wait_s=LONG_S, hold_s=LONG_S) as lease:
                assert (lease.engine_id, lease.address, lease.weight_version) == ("e", "http://at-e", 3)
                assert lease.counts_address == "counts-of-e:1"
                assert len(lease.token) >= 16
                status = await here.client.status()
                assert (status.held, status.waiting, status.engines[0].leases) == (1, 0, 1)
                assert (status.engines[0].health, status.engines[0].kv_used_fraction) == ("healthy", 0.25)
                why = await here.client.why("trajectory-0")
                assert (why.stand, why.waits_for, why.lease_id) == ("running", "the end of turn 1 on e", lease.lease_id)
                lease.tokens = 5
            async with here.client.lease(turn(min_version=3), wait_s=LONG_S, hold_s=LONG_S) as again:
                assert again.affine
                assert again.token != lease.token
            assert [one.what for one in (await here.client.why("trajectory-0")).history][:3] == [
                "asked for turn 1",
                "granted",
                "done, 5 tokens",
            ]
            assert here.sample("tokens_total") == 5
            assert not (await here.client.why("nobody")).known
            assert await here.client.withdraw(engine, "done with it") is Standing.OVER

    asyncio.run(check())


@pytest.mark.parametrize(
    ("raised", "outcome"),
    [(EngineError("died"), "failed"), (ValueError("ours"), "abandoned"), (asyncio.CancelledError(), "abandoned")],
)
def test_a_turn_that_breaks_off_is_reported_as_what_it_was(raised: BaseException, outcome: str) -> None:
    async def check() -> None:
        async with site() as here:
            await here.joined()
            with pytest.raises(type(raised)):
                async with here.client.lease(turn(), wait_s=LONG_S, hold_s=LONG_S):
                    raise raised
            assert (await here.client.why("trajectory-0")).history[-1].what == f"{outcome}, 0 tokens"
            async with here.client.lease(turn(1), wait_s=LONG_S, hold_s=LONG_S) as lease:
                lease.outcome = LeaseOutcome.CUT
            assert (await here.client.why("trajectory-1")).history[-1].what == "cut, 0 tokens"

    asyncio.run(check())


def test_nobody_is_heard_without_the_token() -> None:
    async def check() -> None:
        async with site() as here:
            for metadata in (None, credentials(TOKEN[:-1]), credentials(TOKEN + "0"), (("authorization", TOKEN),)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await here.stub.RegisterEngine(
                        wire.RegisterEngineRequest(**OFFER), timeout=LONG_S, metadata=metadata
                    )
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                silent = here.stub.Leases(metadata=metadata)  # and need not even be asked what it wants
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async with asyncio.timeout(LONG_S):
                        await silent.read()
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert len(here.desk.core.engines) == 0
            async with SchedulerClient(here.address, token="f" * 32, waits=here.waits) as stranger:
                with pytest.raises(SchedulerError, match="token is missing or wrong"):
                    await stranger.status()
                with pytest.raises(SchedulerError, match="token is missing or wrong"):
                    async with stranger.lease(turn(), wait_s=LONG_S, hold_s=LONG_S):
                        pass

    asyncio.run(check())


MALFORMED = [
    (wire.AskLeaseRequest, LEASE, change)
    for change in (
        {"lease_id": ""},
        {"lease_id": "x" * 257},
        {"trajectory_id": "a\nb"},
        {"group_id": "\x00"},
        {"wait_ms": float("nan")},
        {"wait_ms": float("inf")},
        {"wait_ms": -1.0},
        {"hold_ms": 0.0},
        {"hold_ms": 1e12},
        {"min_version": 2**64 - 1},
        {"avoid": ["a"] * 17},
        {"avoid": ["a", ""]},
        {"group_size": 2**31},
    )
]
MALFORMED += [
    (wire.RegisterEngineRequest, OFFER, change)
    for change in (
        *({"engine_id": ""}, {"kind": 0}, {"kind": 77}, {"address": ""}, {"max_requests": 0}),
        {"counts_address": ""},
        *({"counts_address": no_address} for no_address in ("counts", "127.0.0.1:99999", "sched..example:7080")),
        *({"address": no_url} for no_url in ("there:8000", "http://127.0.0.1:99999", "http://a..b:8000")),
    )
]
MALFORMED += [(wire.RegisterEngineRequest, OFFER, {"max_requests": 2**32 - 1})]
MALFORMED += [
    (wire.BeatRequest, BEAT, change)
    for change in (
        {"kv_used_fraction": float("nan")},
        {"kv_used_fraction": 1.5},
        {"weight_version": 2**63},
        {"token_ms": -1.0},
        {"kv_tokens": 2**60},
    )
]
MALFORMED += [
    (wire.EndLeaseRequest, {"lease_id": "l", "outcome": 1, "tokens": 1}, change)
    for change in ({"outcome": 0}, {"outcome": 99}, {"tokens": 2**63}, {"lease_id": ""})
]
MALFORMED += [(wire.EndTrajectoryRequest, {"trajectory_id": "t"}, {"trajectory_id": ""})]
MALFORMED += [(wire.WithdrawEngineRequest, {**ENGINE, "why": "so"}, {"why": ""})]


def verdict(reply: object) -> object:
    if isinstance(reply, wire.AskLeaseReply):
        return reply.refusal.reason == wire.LEASE_REASON_MALFORMED
    if isinstance(reply, wire.EndLeaseReply):
        return reply.verdict == wire.END_VERDICT_MALFORMED
    assert isinstance(reply, wire.EngineReply)
    return reply.standing == wire.ENGINE_STANDING_MALFORMED


def test_what_is_malformed_is_refused_by_name_and_changes_nothing() -> None:
    async def check() -> None:
        async with site() as here:
            for message, sound, change in MALFORMED:
                (field,) = change
                reply = await here.say(message(**{**sound, **change}))
                assert verdict(reply), (change, reply)
                said = reply.refusal.what if message is wire.AskLeaseRequest else reply.what
                assert field in said or "stands for no" in said
            assert (len(here.desk.core.engines), len(here.desk.core.leases)) == (0, 0)
            await still_works(here)

    asyncio.run(check())


def test_bytes_that_are_no_message_end_their_call_and_nothing_else() -> None:
    async def check() -> None:
        async with site() as here:
            for sent in (
                b"\xff" * 64,
                b"\x0a\xff\xff\xff\xff\x0f",
                b"\x0a\x02\x0a\x7f",
                b"\x0a" * (MESSAGE_BYTES_MAX + 1),
            ):
                stream = here.channel.stream_stream("/rose.v1.Scheduler/Leases")(metadata=credentials(TOKEN))
                assert await stream.read() == b""  # the greeting
                await stream.write(sent)
                with pytest.raises(grpc.aio.AioRpcError):
                    await stream.read()
            for method in ("Beat", "Why", "Nonsense"):
                for sent in (b"\xff" * 64, b"\x0a\xff\xff\xff\xff\x0f"):
                    call = here.channel.unary_unary(f"/rose.v1.Scheduler/{method}")
                    with pytest.raises(grpc.aio.AioRpcError):
                        await call(sent, timeout=LONG_S, metadata=credentials(TOKEN))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await here.say(wire.WhyRequest(some_id="x" * MESSAGE_BYTES_MAX))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            host, _, port = here.address.partition(":")
            for sent in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100_000):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(sent)
                with suppress(ConnectionError):  # it hangs up
                    async with asyncio.timeout(LONG_S):
                        await reader.read()
                writer.close()
            await still_works(here)

    asyncio.run(check())


async def still_works(here: Site) -> None:
    await here.joined("sound")
    async with here.client.lease(turn(), wait_s=LONG_S, hold_s=LONG_S) as lease:
        assert lease.engine_id == "sound"


def test_a_client_that_asks_no_longer_leaves_the_line() -> None:
    async def check() -> None:
        async with site() as here:

            async def wait_for_it(number: int) -> None:
                async with here.client.lease(turn(number), wait_s=LONG_S, hold_s=LONG_S):
                    await asyncio.sleep(LONG_S)

            waiting = [asyncio.create_task(wait_for_it(number)) for number in range(5)]
            await until(lambda: len(here.desk.core.line) == 5)
            assert sum(wait.what == "a place for a turn" for wait in here.waits.snapshot()) == 5
            for task in waiting:
                task.cancel()
            await until(lambda: len(here.desk.core.line) == 0)
            assert len(here.desk.core.leases) == 0
            await until(lambda: here.waits.snapshot() == ())
            await still_works(here)

    asyncio.run(check())


def test_what_a_vanished_client_held_goes_to_the_next_when_its_term_is_over() -> None:
    async def check() -> None:
        async with site() as here:
            await here.joined(most=1)
            reply = await here.say(wire.AskLeaseRequest(**{**LEASE, "hold_ms": 50.0}))
            assert reply.grant.engine_id == "e"
            async with here.client.lease(turn(), wait_s=LONG_S, hold_s=LONG_S):
                late = await here.say(wire.EndLeaseRequest(lease_id="l", outcome=1, tokens=1))
                assert late.verdict == wire.END_VERDICT_LATE
                assert (await here.client.status()).held == 1
            assert here.sample("leases_lapsed_total", lapse="not ended") == 1
            assert here.sample("leases_ended_total", verdict="late") == 1

    asyncio.run(check())


def test_an_end_that_is_told_twice_counts_once() -> None:
    async def check() -> None:
        async with site() as here:
            await here.joined()
            await here.say(wire.AskLeaseRequest(**LEASE))
            end = wire.EndLeaseRequest(lease_id="l", outcome=1, tokens=7)
            verdicts = [(await here.say(end)).verdict for _ in range(3)]
            assert verdicts == [wire.END_VERDICT_ENDED, wire.END_VERDICT_DUPLICATE, wire.END_VERDICT_DUPLICATE]
            unknown = await here.say(wire.EndLeaseRequest(lease_id="never", outcome=1, tokens=7))
            assert unknown.verdict == wire.END_VERDICT_UNKNOWN
            assert here.sample("tokens_total") == 7
            assert here.sample("leases_ended_total", verdict="duplicate") == 2

    asyncio.run(check())


def test_the_end_of_a_trajectory_is_taken_once_and_makes_room_for_its_group() -> None:
    async def check() -> None:
        async with site() as here:
            await here.joined()
            async with here.client.lease(replace(turn(), group_size=4), wait_s=LONG_S, hold_s=LONG_S):
                pass
            await here.client.over("trajectory-0")
            again = [await here.say(wire.EndTrajectoryRequest(trajectory_id=name)) for name in ("trajectory-0", "none")]
            assert [reply.verdict for reply in again] == [wire.END_VERDICT_DUPLICATE, wire.END_VERDICT_UNKNOWN]
            trajectory = here.desk.core.trajectories.find("trajectory-0")
            assert trajectory is not None
            assert trajectory.group.completion == 0.25

    asyncio.run(check())


def test_an_engine_says_how_much_it_holds_and_what_a_token_costs() -> None:
    async def check() -> None:
        async with site() as here:
            await here.joined()
            await here.client.beat(offered(), EngineState(0, 1, 0.0, 4096, 0.0125))
            (engine,) = here.desk.core.engines
            assert (engine.pool.capacity_tokens, engine.token_s) == (4096, 0.0125)

    asyncio.run(check())


def test_of_several_calls_for_one_lease_the_last_gets_it_and_a_conflict_takes_nothing() -> None:
    async def check() -> None:
        async with site() as here:
            first = asyncio.create_task(here.say(wire.AskLeaseRequest(**LEASE)))
            await until(lambda: len(here.desk.core.line) == 1)
            other = await here.say(wire.AskLeaseRequest(**{**LEASE, "trajectory_id": "u"}))
            assert other.refusal.reason == wire.LEASE_REASON_CONFLICT
            second = asyncio.create_task(here.say(wire.AskLeaseRequest(**LEASE)))
            assert (await first).refusal.reason == wire.LEASE_REASON_SUPERSEDED
            await here.joined()
            granted = (await second).grant
            assert granted.engine_id == "e"
            again = await here.say(wire.AskLeaseRequest(**LEASE))
            assert again.grant.token == granted.token
            assert len(here.desk.core.leases) == 1

    asyncio.run(check())


def test_a_call_that_breaks_off_after_it_was_repeated_takes_nothing_away() -> None:
    async def check() -> None:
        async with site() as here:
            breaking = here.another_stream()
            first = asyncio.create_task(breaking.ask(wire.AskLeaseRequest(**LEASE), LONG_S))
            await until(lambda: len(here.desk.core.line) == 1)
            second = asyncio.create_task(here.say(wire.AskLeaseRequest(**LEASE)))
            await first
            breaking.close()
            await here.joined()
            assert (await second).grant.engine_id == "e"

    asyncio.run(check())


def test_no_place_in_time_says_what_was_missing() -> None:
    async def check() -> None:
        async with site() as here:
            await here.joined(most=1, version=4)
            with pytest.raises(DeadlineExceeded, match="1 at version 4") as caught:
                async with here.client.lease(turn(min_version=5), wait_s=0.05, hold_s=1.0):
                    pass
            assert caught.value.boundary == "scheduler"
            assert here.sample("leases_lapsed_total", lapse="not placed") == 1
            with pytest.raises(LeaseRefused) as refused:
                async with here.client.lease(turn(0, group=1), wait_s=LONG_S, hold_s=1.0):
                    pass
            assert refused.value.reason is Reason.CONFLICT

    asyncio.run(check())


def test_an_engine_that_comes_again_under_another_incarnation_ends_the_older_one() -> None:
    async def check() -> None:
        async with site() as here:

            def state() -> EngineState:
                return EngineState(0, 1, 0.0)

            old = asyncio.create_task(here.client.keep_offered(offered(), state, every_s=0.01))
            async with here.client.lease(turn(), wait_s=LONG_S, hold_s=LONG_S) as lease:
                assert lease.incarnation == "1"
                new = asyncio.create_task(here.client.keep_offered(offered(incarnation="2"), state, every_s=0.01))
                with pytest.raises(SchedulerError, match="incarnation 1, is not taken: over"):
                    await old
                async with here.client.lease(turn(1), wait_s=LONG_S, hold_s=LONG_S) as other:
                    assert other.incarnation == "2"
            assert here.sample("leases_lapsed_total", lapse="engine lost") == 1
            assert here.sample("leases_ended_total", verdict="late") == 1
            new.cancel()

    asyncio.run(check())


def test_an_engine_without_traffic_says_why_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rose")

    def said(text: str) -> list[str]:
        return [str(record.msg) for record in caplog.records if text in str(record.msg)]

    async def check() -> None:
        async with site(engines=1) as here:
            await here.joined("first")
            task = asyncio.create_task(
                here.client.keep_offered(offered("second"), lambda: EngineState(0, 1, 0.0), every_s=0.01)
            )
            await until(lambda: len(said("engine gets no traffic")) > 0)
            await asyncio.sleep(0.05)
            await here.client.withdraw(offered("first"), "make room")
            await until(lambda: len(said("engine is offered again")) > 0)
            (line,) = said("engine gets no traffic")
            assert "the scheduler's answer is: full" in line
            task.cancel()

    asyncio.run(check())


def test_an_engine_takes_turns_as_soon_as_it_is_offered() -> None:
    async def check() -> None:
        async with site() as here:
            keeping = here.client.keep_offered(offered(version=3), lambda: EngineState(4, 1, 0.0), every_s=LONG_S)
            task = asyncio.create_task(keeping)
            async with here.client.lease(turn(min_version=4), wait_s=LONG_S, hold_s=LONG_S) as lease:
                assert lease.weight_version == 4
            task.cancel()

    asyncio.run(check())


def test_a_lease_that_is_over_before_its_asker_heard_of_it_is_asked_for_under_another_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = iter(("l", "m"))
    monkeypatch.setattr("rose_scheduler.client._new_lease_id", lambda: next(ids))

    async def check() -> None:
        async with site() as here:
            await here.joined()
            await here.say(wire.AskLeaseRequest(**LEASE))
            await here.say(wire.EndLeaseRequest(lease_id="l", outcome=1, tokens=0))
            async with here.client.lease(turn(), wait_s=LONG_S, hold_s=LONG_S) as lease:
                assert lease.lease_id == "m"

    asyncio.run(check())


def test_an_engine_that_falls_silent_gets_no_traffic_until_it_beats_again() -> None:
    async def check() -> None:
        async with site(beat_deadline_s=0.05, dead_after_s=LONG_S) as here:
            await here.joined()
            await until(lambda: [engine.health for engine in here.desk.core.engines] == ["stale"])
            asking = asyncio.create_task(here.say(wire.AskLeaseRequest(**LEASE)))
            await until(lambda: len(here.desk.core.line) == 1)
            assert "1 stale" in (await here.client.why("t")).waits_for
            await here.client.beat(offered(), EngineState(0, 1, 0.0))
            assert (await asking).grant.engine_id == "e"
            here.desk.show()
            assert here.sample("engines", health="healthy") + here.sample("engines", health="stale") == 1

    asyncio.run(check())


def test_two_thousand_at_once_are_all_served_in_turn_and_never_more_than_the_slots() -> None:
    """More than may wait, so many are refused at first and come again."""
    asked, engines, slots = 2000, 4, 8

    async def check() -> None:
        held: Counter[str] = Counter()
        most: Counter[str] = Counter()
        async with site(waiting=500, retry_after_s=0.1) as here:

            async def one(number: int) -> None:
                async with here.client.lease(turn(number, group=number // 8), wait_s=LONG_S, hold_s=LONG_S) as lease:
                    held[lease.engine_id] += 1
                    most[lease.engine_id] = max(most[lease.engine_id], held[lease.engine_id])
                    await asyncio.sleep(0)
                    held[lease.engine_id] -= 1

            leases = [asyncio.create_task(one(number)) for number in range(asked)]
            await until(lambda: here.sample("leases_refused_total", reason="full") > 0)
            assert len(here.desk.core.line) == 500
            for number in range(engines):
                await here.joined(f"e{number}", most=slots)
            await asyncio.gather(*leases)
            assert len(most) == engines
            assert max(most.values()) <= slots
            assert here.sample("leases_ended_total", verdict="ended") == asked
            assert (len(here.desk.core.leases), len(here.desk.core.line)) == (0, 0)
            assert here.waits.snapshot() == ()

    asyncio.run(check())


def test_a_line_that_stays_full_is_told_at_the_deadline() -> None:
    async def check() -> None:
        async with site(waiting=1, retry_after_s=0.02) as here:
            first = asyncio.create_task(here.say(wire.AskLeaseRequest(**LEASE | {"context_tokens": 99})))
            await until(lambda: len(here.desk.core.line) == 1)
            with pytest.raises(DeadlineExceeded, match="1 leases wait already"):
                async with here.client.lease(turn(), wait_s=0.2, hold_s=1.0):
                    pass
            first.cancel()

    asyncio.run(check())


def test_a_core_that_raises_ends_the_service() -> None:
    async def check() -> None:
        async with site() as here:

            def broken(*_: object) -> None:
                raise ContractError("a rule does not hold")

            here.desk.core.step = broken  # type: ignore[method-assign, assignment]
            with pytest.raises(grpc.aio.AioRpcError):
                await here.say(wire.AskLeaseRequest(**LEASE))
            with pytest.raises(ContractError, match="a rule does not hold"):
                await here.desk.failed

    asyncio.run(check())


def test_a_port_is_not_shared_with_another_scheduler() -> None:
    async def check() -> None:
        async with site() as here:
            with pytest.raises(ClusterError, match="expected a free port"):
                await serve(here.desk, port=int(here.address.rpartition(":")[2]), token=TOKEN)

    asyncio.run(check())


def test_a_scheduler_that_is_not_there_is_told_by_name_at_the_deadline() -> None:
    async def check() -> None:
        waits = WaitBoard()
        async with SchedulerClient("127.0.0.1:1", token=TOKEN, waits=waits, timeout_s=0.1) as client:
            asking = asyncio.create_task(client.status())
            await until(lambda: len(waits.snapshot()) == 1)
            assert (waits.snapshot()[0].what, waits.snapshot()[0].whom) == ("a status", "scheduler 127.0.0.1:1")
            with pytest.raises(DeadlineExceeded, match=r"scheduler 127\.0\.0\.1:1: not a status after 0\.1 s"):
                await asking
            with pytest.raises(ContractError, match="a time that ends"):
                SchedulerClient("127.0.0.1:1", token=TOKEN, waits=waits, timeout_s=float("inf"))

    asyncio.run(check())


def test_a_scheduler_that_is_slow_to_take_a_connection_is_waited_for() -> None:
    """As one is on a busy machine, or behind a long way."""

    async def check() -> None:
        async with (
            site() as here,
            late_front(here.address, late_s=0.5) as address,
            SchedulerClient(address, token=TOKEN, waits=WaitBoard(), timeout_s=10.0) as client,
        ):
            assert await client.offer(offered()) is Standing.KNOWN

    asyncio.run(check())


def test_a_scheduler_that_comes_up_is_found_sooner_than_an_attempt_may_take() -> None:
    async def check() -> None:
        port, waits = free_port(), WaitBoard()
        desk = Desk(Placement(Limits()), waits, SchedulerMetrics())
        async with SchedulerClient(f"127.0.0.1:{port}", token=TOKEN, waits=waits, timeout_s=LONG_S) as client:
            offering = asyncio.create_task(client.offer(offered()))
            await asyncio.sleep(0.5)
            server, _ = await serve(desk, port=port, token=TOKEN)
            try:
                assert await asyncio.wait_for(offering, CONNECT_S) is Standing.KNOWN
            finally:
                desk.close()
                await server.stop(None)

    asyncio.run(check())


def test_closing_a_client_ends_its_calls_by_name() -> None:
    async def check() -> None:
        async with site() as here:
            client = SchedulerClient(here.address, token=TOKEN, waits=here.waits)

            async def wait_for_it() -> None:
                async with client.lease(turn(), wait_s=LONG_S, hold_s=LONG_S):
                    pass

            waiting = asyncio.create_task(wait_for_it())
            await until(lambda: len(here.desk.core.line) == 1)
            await client.close()
            with pytest.raises(SchedulerError, match="not a lease: the client was closed"):
                await waiting
            with pytest.raises(ContractError, match="is closed"):
                await client.status()
            await until(lambda: len(here.desk.core.line) == 0)

    asyncio.run(check())


def test_an_end_that_cannot_be_told_is_logged_and_spoils_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with site() as here:
            await here.joined()
            client = SchedulerClient(here.address, token=TOKEN, waits=here.waits, timeout_s=0.05)
            async with client.lease(turn(), wait_s=LONG_S, hold_s=LONG_S) as lease:
                await here.server.stop(None)
            await client.close()
            lines = [str(record.msg) for record in caplog.records]
            (line,) = [line for line in lines if "the end of a lease could not be told" in line]
            assert lease.lease_id in line

    asyncio.run(check())


def test_the_end_of_a_trajectory_that_cannot_be_told_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with site() as here:
            client = SchedulerClient(here.address, token=TOKEN, waits=here.waits, timeout_s=0.05)
            await here.server.stop(None)
            await client.over("t-lost")
            await client.close()
            lines = [str(record.msg) for record in caplog.records]
            (line,) = [line for line in lines if "the end of a trajectory could not be told" in line]
            assert "t-lost" in line

    asyncio.run(check())
