"""Turns on engines that others lend: leased, counted by their executor, and survived whatever becomes of both."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from lent_tools import Executor, Fleet, Page, Still, fleet
from service_tools import until
from stand_ins import END, Answer, Lost, Silent

from rose.errors import ContractError
from rose.ledger import Account
from rose.records import Finish, VersionSpan
from rose.trainer import lent_engine
from rose.trainer.books import Books
from rose_executor.counts_client import Counts
from rose_executor.token_page import RequestCount
from rose_scheduler.client import EngineState, LeaseRefused, Turn
from rose_scheduler.events import EngineKind, EngineOffered


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second for what never comes; what does come takes far less."""
    for name in ("FINAL_TIMEOUT_S", "NEWS_TIMEOUT_S", "SETTLE_TIMEOUT_S"):
        monkeypatch.setattr(lent_engine, name, 0.5)


def on_fleet(books: Books, body: Callable[[Fleet], Awaitable[None]]) -> None:
    """Run a story with one open trajectory, and close the books after it."""

    async def whole() -> None:
        async with fleet(books) as made:
            books.open_trajectory("t")
            await body(made)
            if "t" in books._trajectories:
                books.settle("t", Account.TRAINED)
            await made.close()
            assert all(executor.closed or not executor.questions for executor in made.executors.values())

    asyncio.run(whole())


def accounts(books: Books, *, trained: int, unreceived: int = 0) -> None:
    assert (books.ledger.gap(), books.ledger.violations(), books.ledger.open_requests()) == (0, (), 0)
    found = {account.value: tokens for account, tokens in books.ledger.accounts().items() if tokens}
    expected = {"trained": trained, "unreceived": unreceived}
    assert found == {name: tokens for name, tokens in expected.items() if tokens}


def test_a_turn_on_a_lent_engine_is_counted_by_its_executor_and_its_lease_is_ended(books: Books) -> None:
    async def body(made: Fleet) -> None:
        await made.lend("guest", Answer((5, 6, END), version=4), version=4)
        turn = await made.sample(min_version=4)
        assert (turn.output_ids, turn.versions) == ([5, 6, END], [VersionSpan(4, 0, 3)])
        assert made.here.sample("tokens_total") == 3
        assert (await made.here.client.status()).held == 0
        assert made.told == [("guest", "lent", "http://guest")]

    on_fleet(books, body)
    accounts(books, trained=3)
    tally = books.tallies["guest"]
    assert (tally.lent, tally.received, tally.requests, tally.lost) == (True, 3, 1, 0)


def test_a_lent_engine_that_dies_at_a_token_loses_the_turn_to_another_which_goes_on_behind_it(books: Books) -> None:
    async def body(made: Fleet) -> None:
        await made.lend("guest", Lost((5, 6), generated=4))
        sampling = asyncio.create_task(made.sample())
        await until(lambda: made.guests["guest"].asked != [])
        other = await made.lend("other", Answer((7, END)))
        turn = await sampling
        assert (turn.output_ids, turn.finish) == ([5, 6, 7, END], Finish.STOP)
        assert other.asked == [(10, 11, 5, 6)]
        assert [part.engine_id for part in turn.requests] == ["guest", "other"]
        assert ("guest", "dead", "http://guest") in made.told

    on_fleet(books, body)
    accounts(books, trained=4, unreceived=2)
    assert books.tallies["guest"].lost == 1
    assert books.trusted() == ()


def test_a_turn_that_was_lost_takes_no_further_place_where_it_was_lost(books: Books) -> None:
    async def body(made: Fleet) -> None:
        guest = await made.lend("guest", Still((5, 6), generated=2), most=8)
        sampling = asyncio.create_task(made.sample())
        await until(lambda: len(made.here.desk.core.line) == 1)
        guest.page.counts["t.0.0"] = RequestCount(2, 0, 0, True)
        assert {engine.engine_id: len(engine.leases) for engine in made.here.desk.core.engines} == {"guest": 0}
        await made.lend("other", Answer((7, END)))
        assert (await sampling).output_ids == [5, 6, 7, END]
        assert made.here.sample("leases_granted_total", kind="lent", affine="false") == 2

    on_fleet(books, body)
    accounts(books, trained=4)


def test_no_turn_waits_for_a_dead_engine_that_the_scheduler_still_offers(books: Books) -> None:
    async def body(made: Fleet) -> None:
        await made.lend("guest", Lost((), generated=0), most=8)
        await made.lend("other", most=1)
        for number in range(3):
            await made.sample(number)
        assert len(made.guests["guest"].asked) <= 1

    on_fleet(books, body)
    accounts(books, trained=3)


def test_tokens_whose_executor_is_away_are_thrown_away_and_counted_when_it_is_back(books: Books) -> None:
    async def body(made: Fleet) -> None:
        guest = await made.lend("guest", Answer((END,)), Lost((5, 6), generated=4))
        await made.sample(0)
        guest.executor.away = True
        sampling = asyncio.create_task(made.sample(1))
        await until(lambda: len(guest.asked) == 2)
        await made.lend("other", Answer((7, END)))
        turn = await sampling
        assert turn.output_ids == [7, END]
        assert made.guests["other"].asked == [(10, 11)]
        guest.executor.away = False

    on_fleet(books, body)
    accounts(books, trained=3, unreceived=4)
    assert books.trusted() == ()


def test_what_was_not_counted_in_time_is_counted_before_the_page_forgets_it(books: Books) -> None:
    async def body(made: Fleet) -> None:
        guest = await made.lend("guest", Still((5, 6), generated=4))
        sampling = asyncio.create_task(made.sample(0))
        await until(lambda: guest.asked != [])
        guest.executor.away = True
        await made.lend("other", Answer((7, END)))
        await sampling
        lent = made.engines._lent["guest", "guest"]
        assert books.unsure(lent) == ("t.0.0",)
        guest.executor.away = False
        await until(lambda: lent.total_tokens() == 4)
        assert books.unsure(lent) == ("t.0.0",), "what is not finished may still grow"
        guest.page.counts["t.0.0"] = RequestCount(5, 0, 0, True)
        await until(lambda: books.unsure(lent) == ())
        guest.page.retired = guest.page.counts.pop("t.0.0").tokens

    on_fleet(books, body)
    accounts(books, trained=2, unreceived=5)
    assert books.trusted() == ()


def test_an_executor_that_never_comes_back_leaves_what_arrived_and_a_line_that_says_so(books: Books) -> None:
    async def body(made: Fleet) -> None:
        guest = await made.lend("guest", Lost((5, 6), generated=4))
        sampling = asyncio.create_task(made.sample())
        await until(lambda: guest.asked != [])
        guest.executor.away = True
        await made.lend("other", Answer((7, END)))
        assert (await sampling).output_ids == [7, END]

    on_fleet(books, body)
    accounts(books, trained=2, unreceived=2)
    (line,) = books.trusted()
    assert "guest" in line
    assert "2 tokens are booked without its last counts" in line
    assert "unavailable" in line


def test_an_executor_that_is_away_at_the_end_is_no_loss_if_all_was_counted(books: Books) -> None:
    async def body(made: Fleet) -> None:
        guest = await made.lend("guest", Answer((5, END)))
        await made.sample()
        lent = made.engines._lent["guest", "guest"]
        await until(lambda: lent.total_tokens() == 2)
        guest.executor.away = True

    on_fleet(books, body)
    accounts(books, trained=2)
    assert books.trusted() == ()


def test_an_engine_that_stands_still_keeps_no_turn_and_costs_no_token(books: Books) -> None:
    async def body(made: Fleet) -> None:
        guest = await made.lend("guest", Still((5, 6), generated=3))
        sampling = asyncio.create_task(made.sample())
        await until(lambda: guest.asked != [])
        other = await made.lend("other", Answer((7, END)))
        turn = await sampling
        assert (turn.output_ids, other.asked) == ([5, 6, 7, END], [(10, 11, 5, 6)])
        assert books.ledger.accounts()[Account.UNRECEIVED] == 1
        guest.page.counts["t.0.0"] = RequestCount(4, 0, 1, True)

    on_fleet(books, body)
    accounts(books, trained=4, unreceived=2)


def test_an_engine_whose_executor_does_not_answer_gets_no_turn(books: Books) -> None:
    async def body(made: Fleet) -> None:
        guest = await made.lend("guest", most=1)
        guest.executor.away = True
        sampling = asyncio.create_task(made.sample())
        await until(lambda: ("guest", "silent", "executor there: no counts: unavailable") in made.told)
        await made.lend("other", Answer((7, END)))
        assert (await sampling).output_ids == [7, END]
        assert guest.asked == []

    on_fleet(books, body)
    accounts(books, trained=2)


def test_an_incarnation_that_its_executor_does_not_know_gets_no_turn(books: Books) -> None:
    async def body(made: Fleet) -> None:
        guest = await made.lend("guest", most=1)
        guest.page.known = False
        sampling = asyncio.create_task(made.sample())
        await until(lambda: made.told != [])
        await made.lend("other", Answer((7, END)))
        assert (await sampling).output_ids == [7, END]
        assert guest.asked == []

    on_fleet(books, body)


def test_an_engine_that_lags_gets_no_turn(books: Books) -> None:
    async def body(made: Fleet) -> None:
        await made.lend("guest", version=3)
        sampling = asyncio.create_task(made.sample(min_version=4))
        await until(lambda: len(made.here.desk.core.line) == 1)
        await made.lend("other", Answer((7, END), version=4), version=4)
        assert (await sampling).requests[0].engine_id == "other"
        assert made.guests["guest"].asked == []

    on_fleet(books, body)


def test_an_engine_that_nobody_would_count_is_not_taken(books: Books) -> None:
    async def body(made: Fleet) -> None:
        offer = EngineOffered("stranger", "1", EngineKind.LENT, "http://stranger", 1, 0)
        with pytest.raises(ContractError, match="nobody could count"):
            await made.here.client.offer(offer)
        assert list((await made.here.client.status()).engines) == []

    on_fleet(books, body)


def test_a_refused_lease_is_an_error_of_the_scheduler_and_costs_no_request(books: Books) -> None:
    async def body(made: Fleet) -> None:
        await made.lend("guest")
        await made.sample(0)
        with pytest.raises(LeaseRefused):
            await made.sampler.sample(Turn("t", "another group", 1, 1), [10])
        assert len(made.guests["guest"].asked) == 1

    on_fleet(books, body)
    accounts(books, trained=1)


def test_those_who_wait_for_final_counts_share_their_questions(books: Books) -> None:
    async def body(made: Fleet) -> None:
        turns = 40
        guest = await made.lend("guest", *(Lost((5,), generated=1) for _ in range(turns)), most=turns)
        sampling = [asyncio.create_task(made.sample(number)) for number in range(turns)]
        await until(lambda: len(guest.asked) == turns)
        await made.lend("other", most=turns)
        assert {len((await each).output_ids) for each in sampling} == {2}
        assert guest.executor.questions < turns / 2

    on_fleet(books, body)
    accounts(books, trained=80)


def test_turns_that_a_stop_cuts_off_are_booked_with_the_executor_s_count(books: Books) -> None:
    async def body(made: Fleet) -> None:
        guest = await made.lend("guest", Silent(generated=7), Silent(generated=2))
        sampling = [asyncio.create_task(made.sample(number)) for number in range(2)]
        await until(lambda: len(guest.page.counts) == 2)
        for each in sampling:
            each.cancel()
        await asyncio.wait(sampling)
        closing = asyncio.create_task(made.engines.close())
        await asyncio.sleep(0.2)
        assert not closing.done(), "what is not finished may still grow"
        for request_id, count in guest.page.counts.items():
            guest.page.counts[request_id] = RequestCount(count.tokens + 1, 0, 0, True)
        await closing
        books.close()

    async def whole() -> None:
        async with fleet(books) as made:
            books.open_trajectory("t")
            await body(made)

    asyncio.run(whole())
    accounts(books, trained=0, unreceived=11)
    assert books.trusted() == ()


def test_an_engine_that_never_finishes_what_it_was_asked_is_booked_as_far_as_it_counted(books: Books) -> None:
    async def whole() -> None:
        async with fleet(books) as made:
            books.open_trajectory("t")
            guest = await made.lend("guest", Silent(generated=7))
            sampling = asyncio.create_task(made.sample())
            await until(lambda: len(guest.page.counts) == 1)
            sampling.cancel()
            await asyncio.wait([sampling])
            await made.close()

    asyncio.run(whole())
    accounts(books, trained=0, unreceived=7)
    (line,) = books.trusted()
    assert "has not finished" in line


def test_what_lent_engines_lose_is_no_attempt_of_the_run_s_own(books: Books) -> None:
    async def body(made: Fleet) -> None:
        made.sampler.settings = replace(made.sampler.settings, attempts_max=1)
        sampling = asyncio.create_task(made.sample())
        for name in ("guest", "neighbour"):
            guest = await made.lend(name, Lost((5,), generated=1), most=1)
            while not guest.asked:
                await asyncio.sleep(0.01)
        await made.lend("other", Answer((7, END)))
        turn = await sampling
        assert (turn.output_ids, turn.finish) == ([5, 5, 7, END], Finish.STOP)

    on_fleet(books, body)
    accounts(books, trained=4)


def test_a_dead_incarnation_is_asked_about_where_its_executor_has_come_up_again(books: Books) -> None:
    async def body(made: Fleet) -> None:
        guest = await made.lend("guest", Lost((5, 6), generated=4))
        sampling = asyncio.create_task(made.sample(0))
        await until(lambda: guest.asked != [])
        guest.executor.away = True
        anew = made.executors["anew:1"] = Executor({"guest": guest.page, "second": Page()})
        guest.engine_id, guest.executor = "second", anew
        offer = EngineOffered("guest", "second", EngineKind.LENT, "http://guest", 4, 0, "anew:1")
        await made.here.client.offer(offer)
        await made.here.client.beat(offer, EngineState(0, 4, 0.0))
        assert (await sampling).output_ids == [END]

    on_fleet(books, body)
    accounts(books, trained=1, unreceived=4)
    assert books.trusted() == ()


def test_no_question_outlives_the_end(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent_engine, "ASK_EVERY_S", 1000.0)

    async def never(*_: object) -> Counts:
        await asyncio.Event().wait()
        raise AssertionError

    async def body(made: Fleet) -> None:
        guest = await made.lend("guest", Answer((5, END)))
        await made.sample()
        monkeypatch.setattr(guest.executor, "counts", never)
        await made.engines.close()
        await asyncio.sleep(0)
        assert [task for task in asyncio.all_tasks() if task.get_coro().__name__ == "_ask_soon"] == []  # type: ignore[union-attr]

    on_fleet(books, body)
