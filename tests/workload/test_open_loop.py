"""The open loop in virtual time: what is sent when, whatever the answers do."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from rose.driver.core import After
from rose.driver.faults import FaultPlan
from rose.driver.virtual import VirtualDriver
from rose.errors import ContractError
from rose.workload.open_loop import (
    LATE_S,
    Begin,
    Cut,
    Due,
    Ended,
    Finish,
    LoopCounts,
    OpenLoop,
    Refuse,
    Send,
    Stop,
)


def test_requests_are_sent_when_they_are_due() -> None:
    loop = OpenLoop([0.0, 1.0, 1.0, 3.0], in_flight_max=10)
    assert loop.step(Begin(), 100.0) == [Send(0, 0.0), After(1.0, Due())]
    assert loop.step(Due(), 100.75) == [After(0.25, Due())]
    assert loop.step(Due(), 101.0) == [Send(1, 1.0), Send(2, 1.0), After(2.0, Due())]
    assert loop.step(Ended(1, 0.0), 102.0) == []
    assert loop.step(Due(), 103.0) == [Send(3, 3.0)]
    assert loop.step(Ended(3, 0.0), 103.5) == []
    assert loop.step(Ended(0, 0.0), 104.0) == []
    assert loop.step(Ended(2, 0.0), 109.0) == [Finish()]
    assert loop.counts == LoopCounts(sent=4, ended=4)


def test_nothing_is_due_before_the_beginning() -> None:
    loop = OpenLoop([0.0], in_flight_max=1)
    assert loop.step(Due(), 5.0) == []
    assert loop.step(Begin(), 6.0) == [Send(0, 0.0)]


def test_what_is_overdue_is_sent_at_once_and_lateness_is_counted() -> None:
    loop = OpenLoop([0.0, 1.0, 2.0], in_flight_max=10)
    loop.step(Begin(), 0.0)
    # The client slept: both are sent now, none is left out and none waits for its turn.
    assert loop.step(Due(), 5.0) == [Send(1, 1.0), Send(2, 2.0)]
    loop.step(Ended(0, LATE_S), 6.0)
    loop.step(Ended(1, 4.0), 6.0)
    loop.step(Ended(2, 3.0), 6.0)
    assert loop.counts == LoopCounts(sent=3, ended=3, late=2, lag_s=4.0)


def test_the_cap_refuses_and_never_holds_back() -> None:
    loop = OpenLoop([0.0, 0.0, 0.0, 1.0, 2.0], in_flight_max=2)
    assert loop.step(Begin(), 0.0) == [Send(0, 0.0), Send(1, 0.0), Refuse(2, 0.0), After(1.0, Due())]
    assert loop.step(Due(), 1.0) == [Refuse(3, 1.0), After(1.0, Due())]
    # Room does not bring back what was refused.
    assert loop.step(Ended(0, 0.0), 1.5) == []
    assert loop.step(Due(), 2.0) == [Send(4, 2.0)]
    assert loop.counts == LoopCounts(sent=3, refused=2, ended=1)


def test_a_loop_whose_last_request_is_refused_still_finishes() -> None:
    loop = OpenLoop([0.0, 1.0], in_flight_max=1)
    loop.step(Begin(), 0.0)
    assert loop.step(Due(), 1.0) == [Refuse(1, 1.0)]
    assert loop.step(Ended(0, 0.0), 2.0) == [Finish()]


def test_a_stop_cuts_what_is_in_flight_and_sends_no_more() -> None:
    loop = OpenLoop([0.0, 0.0, 1.0, 2.0], in_flight_max=10)
    loop.step(Begin(), 0.0)
    assert loop.step(Stop(), 0.5) == [Cut((0, 1))]
    assert loop.step(Stop(), 0.6) == []
    assert loop.step(Due(), 1.0) == []
    assert loop.step(Ended(1, 0.0), 1.0) == []
    assert not loop.finished
    assert loop.step(Ended(0, 0.0), 1.0) == [Finish()]
    assert loop.finished
    assert loop.step(Stop(), 2.0) == []
    assert loop.counts == LoopCounts(sent=2, ended=2, unsent=2)


def test_a_stop_with_nothing_in_flight_finishes_at_once() -> None:
    assert OpenLoop([1.0], in_flight_max=1).step(Stop(), 0.0) == [Finish()]


def test_events_that_cannot_be_are_refused() -> None:
    loop = OpenLoop([0.0], in_flight_max=1)
    loop.step(Begin(), 0.0)
    with pytest.raises(ContractError, match="begins once"):
        loop.step(Begin(), 1.0)
    with pytest.raises(ContractError, match="request 7 ended"):
        loop.step(Ended(7, 0.0), 1.0)
    loop.step(Ended(0, 0.0), 1.0)
    with pytest.raises(ContractError, match="request 0 ended"):
        loop.step(Ended(0, 0.0), 1.0)


class World:
    """An engine whose answers take any time, on the virtual clock; sometimes the replay is stopped."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.arrivals_s = sorted(random.choice((0.0, random.uniform(0, 20))) for _ in range(random.randint(1, 60)))
        self.cap = random.choice((1, 3, 1000))
        self.answer_s = random.choice((0.01, 1.0, 30.0))
        self.loop = OpenLoop(self.arrivals_s, self.cap)
        self.driver: VirtualDriver[Any, Any] = VirtualDriver(
            self.loop, self.perform, self.check, world="open loop", seed=seed, random=random, faults=FaultPlan()
        )
        self.due: dict[int, float] = {}
        self.open: set[int] = set()
        self.finished = 0
        self.driver.call(0.0, "begin", lambda: self.driver.feed(Begin()))
        self.stop_s = random.uniform(0, 25) if random.random() < 0.3 else None
        if self.stop_s is not None:
            self.driver.call(self.stop_s, "stop", lambda: self.driver.feed(Stop()))

    def perform(self, action: Any) -> Sequence[Any]:
        match action:
            case Send(index, due_s) | Refuse(index, due_s):
                assert index not in self.due
                assert self.driver.now == pytest.approx(due_s) == self.arrivals_s[index]
                self.due[index] = due_s
                if isinstance(action, Send):
                    self.open.add(index)
                    answer_s = self.random.expovariate(1 / self.answer_s)
                    self.driver.call(answer_s, f"answer {index}", lambda: self.end(index))
                else:
                    assert len(self.open) == self.cap
            case Cut(indices):
                for index in indices:
                    self.driver.call(0.0, f"cut {index}", lambda index=index: self.end(index))  # type: ignore[misc]
            case Finish():
                self.finished += 1
        return []

    def end(self, index: int) -> None:
        if index in self.open:
            self.open.remove(index)
            self.driver.feed(Ended(index, 0.0))

    def check(self) -> None:
        counts = self.loop.counts
        assert counts.sent + counts.refused == len(self.due)
        assert counts.sent - counts.ended == self.loop.in_flight == len(self.open) <= self.cap


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_every_request_goes_out_on_time_and_is_accounted_for(first: int) -> None:
    stopped = refused = 0
    for seed in range(first, first + 50):
        world = World(seed)
        world.driver.run(until_s=10_000)
        counts = world.loop.counts
        assert world.finished == 1
        assert counts.sent + counts.refused + counts.unsent == len(world.arrivals_s)
        assert counts.ended == counts.sent
        assert world.stop_s is not None or counts.unsent == 0
        stopped += counts.unsent > 0
        refused += counts.refused > 0
    assert stopped
    assert refused
