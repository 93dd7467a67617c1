"""The token ledger: the two state tables of its docstring, and random histories against a plain model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rose.ledger import (
    NOT_FINAL,
    Account,
    EngineCounted,
    LedgerEvent,
    Opened,
    Received,
    RequestEnded,
    RequestStarted,
    Settled,
    TokenLedger,
)

FINAL = sorted(set(Account) - NOT_FINAL)


def ledger_after(*events: LedgerEvent, recent_settled: int = 4096) -> TokenLedger:
    ledger = TokenLedger(recent_settled)
    for event in events:
        assert ledger.step(event, 0.0) == ()
    return ledger


OPEN = (Opened("t"), RequestStarted("r", "t", "e"))


def test_a_turn_that_arrives_whole_is_balanced() -> None:
    ledger = ledger_after(
        *OPEN, Received("r", 3), Received("r", 4), RequestEnded("r", None), EngineCounted("e", "1", 7)
    )
    assert ledger.accounts()[Account.IN_FLIGHT] == 7
    assert (ledger.generated(), ledger.gap(), ledger.open_requests(), ledger.unsettled()) == (7, 0, 0, 1)
    assert ledger.balanced()
    ledger.step(Settled("t", Account.TRAINED), 0.0)
    assert {account: tokens for account, tokens in ledger.accounts().items() if tokens} == {Account.TRAINED: 7}
    assert ledger.unsettled() == 0
    assert ledger.balanced()


def test_a_broken_stream_leaves_the_rest_unreceived() -> None:
    ledger = ledger_after(*OPEN, Received("r", 3), RequestEnded("r", 10), EngineCounted("e", "1", 10))
    assert ledger.accounts()[Account.UNRECEIVED] == 7
    assert ledger.accounts()[Account.IN_FLIGHT] == 3
    assert ledger.balanced()


@pytest.mark.parametrize("account", FINAL)
def test_a_trajectory_settles_into_every_final_account(account: Account) -> None:
    ledger = ledger_after(*OPEN, Received("r", 5), RequestEnded("r", None), Settled("t", account))
    assert ledger.accounts()[account] == 5
    assert ledger.accounts()[Account.IN_FLIGHT] == 0
    assert ledger.violations() == ()


def test_the_gap_shows_tokens_that_a_stream_swallowed_silently() -> None:
    ledger = ledger_after(*OPEN, Received("r", 3), RequestEnded("r", None), EngineCounted("e", "1", 4))
    assert ledger.gap() == 1
    assert not ledger.balanced()


def test_the_gap_is_negative_while_the_page_is_older_than_the_stream() -> None:
    assert ledger_after(*OPEN, Received("r", 3), EngineCounted("e", "1", 1)).gap() == -2


def test_generated_adds_over_engines_and_incarnations_also_when_the_dead_one_is_read_last() -> None:
    ledger = ledger_after(
        EngineCounted("a", "1", 5), EngineCounted("a", "2", 3), EngineCounted("b", "1", 2), EngineCounted("a", "1", 9)
    )
    assert ledger.generated() == 9 + 3 + 2
    assert ledger.violations() == ()


def test_generated_comes_from_the_engines_alone() -> None:
    ledger = ledger_after(*OPEN, Received("r", 3), RequestEnded("r", 10), Settled("t", Account.STALE))
    assert ledger.generated() == 0
    assert ledger.gap() == -10


def test_an_open_request_is_never_balanced() -> None:
    assert not ledger_after(*OPEN).balanced()


def test_a_request_id_may_be_used_again_after_its_end() -> None:
    ledger = ledger_after(
        *OPEN, Received("r", 2), RequestEnded("r", 3), RequestStarted("r", "t", "e"), RequestEnded("r", 0)
    )
    assert ledger.violations() == ()
    assert ledger.accounts()[Account.UNRECEIVED] == 1


WHOLE = (*OPEN, Received("r", 2), RequestEnded("r", None))
REFUSED = [
    ((Opened("t"), Opened("t")), "opened twice"),
    ((*WHOLE, Settled("t", Account.STALE), Opened("t")), "opened twice"),
    ((RequestStarted("r", "t", "e"),), "started for trajectory t, which is not open"),
    ((Opened("t"), Settled("t", Account.STALE), RequestStarted("r", "t", "e")), "already settled as stale"),
    ((*OPEN, RequestStarted("r", "t", "e")), "while it is open"),
    ((Received("r", 1),), "which is not open"),
    ((*WHOLE, Received("r", 1)), "which is not open"),
    ((*WHOLE, Settled("t", Account.STALE), Received("r", 1)), "which is not open"),
    ((*OPEN, Received("r", -1)), "-1 tokens"),
    ((*WHOLE, RequestEnded("r", 2)), "ended, which is not open"),
    ((*OPEN, Received("r", 5), RequestEnded("r", 4)), "5 tokens received, but engine e counts 4"),
    ((Settled("t", Account.STALE),), "which is not open"),
    ((*WHOLE, Settled("t", Account.STALE), Settled("t", Account.TRAINED)), "already settled as stale"),
    ((*OPEN, Settled("t", Account.STALE)), "with 1 requests open"),
    ((*WHOLE, Settled("t", Account.IN_FLIGHT)), "not a final account"),
    ((*WHOLE, Settled("t", Account.UNRECEIVED)), "not a final account"),
    ((EngineCounted("e", "1", 5), EngineCounted("e", "1", 4)), "fell from 5 to 4"),
    ((EngineCounted("e", "1", -1),), "fell from 0 to -1"),
]


@pytest.mark.parametrize(("events", "why"), REFUSED)
def test_what_breaks_a_rule_is_recorded_and_moves_no_token(events: tuple[LedgerEvent, ...], why: str) -> None:
    before = ledger_after(*events[:-1])
    after = ledger_after(*events)
    assert before.violations() == ()
    assert len(after.violations()) == 1
    assert why in after.violations()[0]
    assert after.accounts() == before.accounts()
    assert after.generated() == before.generated()
    assert after.unsettled() == before.unsettled()
    assert not after.balanced()


def test_a_request_that_ends_with_too_low_a_count_is_closed() -> None:
    ledger = ledger_after(*OPEN, Received("r", 5), RequestEnded("r", 4))
    assert ledger.open_requests() == 0
    ledger.step(Settled("t", Account.ABORTED), 0.0)
    assert ledger.accounts()[Account.ABORTED] == 5


def test_settling_too_early_can_be_done_again_when_the_request_has_ended() -> None:
    ledger = ledger_after(*OPEN, Received("r", 5), Settled("t", Account.ABORTED), RequestEnded("r", None))
    ledger.step(Settled("t", Account.ABORTED), 0.0)
    assert ledger.accounts()[Account.ABORTED] == 5
    assert len(ledger.violations()) == 1


def test_only_the_recent_settled_trajectories_are_remembered() -> None:
    ledger = TokenLedger(recent_settled=2)
    for name in ("a", "b", "c"):
        ledger.step(Opened(name), 0.0)
        ledger.step(Settled(name, Account.TRAINED), 0.0)
    ledger.step(Settled("a", Account.TRAINED), 0.0)
    ledger.step(Settled("c", Account.TRAINED), 0.0)
    forgotten, remembered = ledger.violations()
    assert "not open" in forgotten
    assert "already settled as trained" in remembered


def test_memory_stays_bounded_over_many_trajectories_and_violations() -> None:
    ledger = TokenLedger(recent_settled=10)
    for n in range(500):
        for event in (Opened(f"{n}"), RequestStarted("r", f"{n}", "e"), Received("r", 1), RequestEnded("r", None)):
            ledger.step(event, 0.0)
        ledger.step(Settled(f"{n}", Account.TRAINED), 0.0)
        ledger.step(Received("gone", 1), 0.0)
    assert ledger.accounts()[Account.TRAINED] == 500
    assert len(ledger._settled) == 10
    assert not ledger._trajectories
    assert not ledger._requests
    assert len(ledger.violations()) == 101
    assert ledger.violations()[-1] == "and 400 more"


class Histories(RuleBasedStateMachine):
    """Any order of lawful events; the model is a list of tokens, each with its place."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = TokenLedger()
        self.opened = 0
        self.started = 0
        self.open: dict[str, list[str]] = {}
        self.requests: dict[str, str] = {}
        self.got: dict[str, int] = {}
        self.sampled: dict[str, int] = {}
        self.in_flight: dict[str, int] = {}
        self.final: dict[Account, int] = dict.fromkeys(Account, 0)
        self.page = 0

    def feed(self, event: LedgerEvent) -> None:
        self.ledger.step(event, 0.0)

    @rule()
    def open_one(self) -> None:
        name = f"t{self.opened}"
        self.opened += 1
        self.open[name] = []
        self.in_flight[name] = 0
        self.feed(Opened(name))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        trajectory = data.draw(st.sampled_from(sorted(self.open)))
        request = f"r{self.started}"
        self.started += 1
        self.open[trajectory].append(request)
        self.requests[request] = trajectory
        self.got[request] = self.sampled[request] = 0
        self.feed(RequestStarted(request, trajectory, "e"))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), sampled=st.integers(0, 9))
    def sample(self, data: st.DataObject, sampled: int) -> None:
        request = data.draw(st.sampled_from(sorted(self.requests)))
        self.sampled[request] += sampled
        self.page += sampled

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.requests)))
        tokens = data.draw(st.integers(0, self.sampled[request] - self.got[request]))
        self.got[request] += tokens
        self.in_flight[self.requests[request]] += tokens
        self.feed(Received(request, tokens))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.requests)))
        lost = self.sampled[request] - self.got[request]
        clean = lost == 0 and data.draw(st.booleans())
        self.final[Account.UNRECEIVED] += lost
        self.open[self.requests.pop(request)].remove(request)
        self.feed(RequestEnded(request, None if clean else self.sampled[request]))

    @precondition(lambda self: any(not requests for requests in self.open.values()))
    @rule(data=st.data(), account=st.sampled_from(FINAL))
    def settle(self, data: st.DataObject, account: Account) -> None:
        trajectory = data.draw(st.sampled_from(sorted(t for t, requests in self.open.items() if not requests)))
        del self.open[trajectory]
        self.final[account] += self.in_flight.pop(trajectory)
        self.feed(Settled(trajectory, account))

    @rule()
    def count(self) -> None:
        self.feed(EngineCounted("e", "1", self.page))
        assert self.ledger.generated() == self.page

    @invariant()
    def agrees_with_the_model(self) -> None:
        flying = sum(self.in_flight.values())
        assert self.ledger.accounts() == {**self.final, Account.IN_FLIGHT: flying}
        wire = sum(self.sampled[request] - self.got[request] for request in self.requests)
        assert sum(self.ledger.accounts().values()) + wire == self.page
        assert self.ledger.open_requests() == len(self.requests)
        assert self.ledger.unsettled() == len(self.open)
        assert self.ledger.violations() == ()

    def teardown(self) -> None:
        for request, trajectory in list(self.requests.items()):
            self.feed(RequestEnded(request, self.sampled[request]))
            self.open[trajectory].remove(request)
        for trajectory in self.open:
            self.feed(Settled(trajectory, Account.ABORTED))
        self.feed(EngineCounted("e", "1", self.page))
        assert self.ledger.balanced()
        assert self.ledger.accounts()[Account.IN_FLIGHT] == 0


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
