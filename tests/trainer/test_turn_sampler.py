"""A turn survives its engine: what arrived is kept, what was made is booked, and no engine is asked for ever."""

from __future__ import annotations

import asyncio

import pytest
from stand_ins import END, Answer, Lost, Refused, Script, ScriptedScheduler, ScriptedSupervisor, in_turn

from rose.errors import EngineError
from rose.ledger import Account
from rose.records import Finish, RequestPart, VersionSpan
from rose.trainer.books import Books
from rose.trainer.sampler import SampledTurn, SamplingSettings, TurnSampler, vouched
from rose_executor.token_page import RequestCount
from rose_scheduler.client import Turn
from rose_scheduler.events import LeaseOutcome

PROMPT = [10, 11]


class Bench:
    """One trajectory on scripted engines."""

    def __init__(self, books: Books, script: Script, attempts_max: int = 3, max_new_tokens: int = 6) -> None:
        self.books = books
        self.supervisor = ScriptedSupervisor(script, books.watch)
        settings = SamplingSettings(1.0, max_new_tokens, (END,), attempts_max, lease_wait_s=5.0, lease_hold_s=5.0)
        self.scheduler = ScriptedScheduler(self.supervisor)
        self._sampler = TurnSampler(self.scheduler, self.scheduler, books, settings)  # type: ignore[arg-type]
        books.open_trajectory("t")

    def sample(self, trajectory_id: str = "t", *, last: bool = False) -> SampledTurn:
        asked = Turn(trajectory_id, "g", 0, len(PROMPT))
        return asyncio.run(self._sampler.sample(asked, list(PROMPT), last=last))

    def over(self, trajectory_id: str) -> None:
        asyncio.run(self._sampler.over(trajectory_id))

    def account(self, account: Account) -> int:
        """Tokens in an account once the trajectory is trained."""
        self.books.settle("t", Account.TRAINED)
        self.books.read_pages()
        assert self.books.ledger.balanced(), self.books.ledger.violations()
        return self.books.ledger.accounts()[account]


def test_an_answer_is_passed_on_as_it_was_sampled(books: Books) -> None:
    bench = Bench(books, in_turn(Answer((5, 6, END), version=4)))
    turn = bench.sample()
    assert turn.output_ids == [5, 6, END]
    assert turn.logprobs == [-0.5] * 3
    assert turn.versions == [VersionSpan(4, 0, 3)]
    assert turn.requests == [RequestPart("engine-0", "t.0.0", 3)]
    assert turn.finish is Finish.STOP
    assert bench.account(Account.TRAINED) == 3


def test_a_prefix_is_kept_for_the_next_turn_and_forgotten_after_the_last(books: Books) -> None:
    bench = Bench(books, in_turn(*[Answer((END,))] * 4))
    books.open_trajectory("u")
    bench.sample("t")
    bench.sample("u")
    bench.over("t")
    bench.sample("u", last=True)
    bench.over("u")
    bench.over("u")
    books.open_trajectory("v")
    bench.sample("v")
    said = [(asked.keep.name, asked.keep.forget) for asked in bench.supervisor.asked]
    assert said == [("t", ()), ("u", ()), ("", ("t",)), ("v", ("u",))]
    assert all(asked.keep.seconds > 60 for asked in bench.supervisor.asked)


def test_a_lost_turn_goes_on_behind_its_tokens(books: Books) -> None:
    bench = Bench(books, in_turn(Lost((5, 6), generated=4), Answer((7, END))))
    turn = bench.sample()
    assert turn.output_ids == [5, 6, 7, END]
    assert [part.tokens for part in turn.requests] == [2, 2]
    first, second = bench.supervisor.asked
    assert (first.token_ids, first.max_tokens) == ((10, 11), 6)
    assert (second.token_ids, second.max_tokens) == ((10, 11, 5, 6), 4)
    assert first.incarnation != second.incarnation
    assert first.request_id != second.request_id
    assert bench.account(Account.UNRECEIVED) == 2


def test_spans_of_one_version_merge_and_of_two_do_not(books: Books) -> None:
    bench = Bench(books, in_turn(Lost((5,), 1, 3), Lost((6,), 1, 3), Answer((7, END), 4)))
    assert bench.sample().versions == [VersionSpan(3, 0, 2), VersionSpan(4, 2, 4)]


def test_an_engine_lost_before_its_first_token_costs_only_the_attempt(books: Books) -> None:
    bench = Bench(books, in_turn(Lost((), generated=0), Answer((END,))))
    turn = bench.sample()
    assert turn.output_ids == [END]
    assert turn.versions == [VersionSpan(0, 0, 1)]


@pytest.mark.parametrize(("ids", "finish"), [((5, END), Finish.STOP), ((5, 6, 7), Finish.LENGTH)])
def test_a_turn_that_was_complete_when_its_engine_died_is_not_asked_for_again(
    books: Books, ids: tuple[int, ...], finish: Finish
) -> None:
    bench = Bench(books, in_turn(Lost(ids, len(ids))), max_new_tokens=3)
    turn = bench.sample()
    assert (turn.output_ids, turn.finish) == (list(ids), finish)


def test_an_answer_that_the_engine_cut_off_goes_on_like_a_lost_one(books: Books) -> None:
    # An engine that shuts down ends its streams in order, with what it has.
    bench = Bench(books, in_turn(Answer((5, 6), finish=Finish.ABORT), Answer((7, END))))
    turn = bench.sample()
    assert (turn.output_ids, turn.finish) == ([5, 6, 7, END], Finish.STOP)
    assert bench.supervisor.asked[1].token_ids == (10, 11, 5, 6)
    cut, done = bench.scheduler.ended
    assert (cut.outcome, cut.tokens, done.outcome, done.tokens) == (LeaseOutcome.CUT, 2, None, 2)
    assert bench.account(Account.TRAINED) == 4


def test_attempts_are_bounded_and_every_one_is_booked(books: Books) -> None:
    bench = Bench(books, lambda asked: Lost((5,), generated=2), attempts_max=3)
    with pytest.raises(EngineError, match="lost 3 times"):
        bench.sample()
    assert len(bench.supervisor.asked) == 3
    assert bench.account(Account.UNRECEIVED) == 3


def test_tokens_of_which_nobody_knows_the_version_are_thrown_away_but_counted(books: Books) -> None:
    bench = Bench(books, in_turn(Lost((5, 6), generated=3, version=None), Answer((7, END), 1)))
    turn = bench.sample()
    assert (turn.output_ids, turn.versions) == ([7, END], [VersionSpan(1, 0, 2)])
    assert bench.supervisor.asked[1].token_ids == (10, 11)
    assert bench.account(Account.UNRECEIVED) == 3
    assert books.ledger.accounts()[Account.TRAINED] == 2


@pytest.mark.parametrize(
    ("count", "versions"),
    [
        (RequestCount(2, 7, 7, False), (VersionSpan(7, 0, 2),)),
        (RequestCount(5, 7, 7, True), (VersionSpan(7, 0, 2),)),
        (RequestCount(3, 7, 8, True), None),
        (RequestCount(1, 7, 7, True), None),
        (RequestCount(0, None, None, True), None),
        (None, None),
    ],
)
def test_a_count_vouches_for_what_arrived_if_all_is_of_one_version(
    count: RequestCount | None, versions: tuple[VersionSpan, ...] | None
) -> None:
    assert vouched(count, 2) == versions
    assert vouched(count, 0) == ()


def test_a_refused_request_is_not_repeated_and_waits_for_no_count(books: Books) -> None:
    bench = Bench(books, in_turn(Refused()))
    with pytest.raises(EngineError, match="refused"):
        bench.sample()
    assert len(bench.supervisor.asked) == 1
    assert bench.account(Account.UNRECEIVED) == 0


def test_a_refusal_after_a_loss_keeps_the_count_of_both(books: Books) -> None:
    bench = Bench(books, in_turn(Lost((5,), generated=4), Refused()))
    with pytest.raises(EngineError, match="refused"):
        bench.sample()
    assert bench.account(Account.UNRECEIVED) == 3
