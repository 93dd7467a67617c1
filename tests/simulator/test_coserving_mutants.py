"""The co-serving world must be able to fail: each bug planted in a core, or in what the world does around one, shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from rose.driver.virtual import SimulationFailed
from rose.ledger import EngineCounted, LedgerEvent, RequestEnded, TokenLedger
from rose.simulator.coserving import executor, guest_engine, player
from rose.simulator.coserving.board import SimulatedBoard
from rose.simulator.coserving.follower import GuestFollower
from rose.simulator.coserving.player import Player
from rose.simulator.coserving_world import Cores, CoservingWorld
from rose.trainer.alarm import FormatAlarm, MalformedAlarm
from rose.version_events import Committed, CommitFailed, Pinned, VersionAction, VersionEvent
from rose.versions import VersionState
from rose_executor import slack
from rose_executor.board import QUOTA, Half, S
from rose_executor.board_states import Reading, ServingState
from rose_executor.engine_health import EngineHealth
from rose_executor.guest_rules import Freeze, GuestRules, Looked, Write
from rose_executor.slack import SlackAdmission, SlackPolicy
from rose_executor.step_profile import StepProfile
from rose_scheduler.engines import Engine, Engines
from rose_scheduler.events import Expire, Lapse, PlacementAction, PlacementEvent
from rose_scheduler.leases import Lease, Leases
from rose_scheduler.placement import Placement
from rose_scheduler.trajectories import Trajectory

SEEDS = 400


def first_failure(world: Callable[[int], CoservingWorld], name: str) -> SimulationFailed:
    for seed in range(SEEDS):
        try:
            world(seed).run()
        except SimulationFailed as failure:
            return failure
    pytest.fail(f"{name} survived {SEEDS} seeds")


# Serving first


class LeavesTheGateOpen(GuestRules):
    def step(self, event: Looked, now: float) -> Sequence[Write | Freeze]:
        return [
            Write(replace(action.quota, tokens_per_step=8, active_seqs=8, gate_open=True))
            if isinstance(action, Write)
            else action
            for action in super().step(event, now)
        ]


class TakesTheUnknownForWhatItWas(GuestRules):
    _last: Looked | None = None

    def step(self, event: Looked, now: float) -> Sequence[Write | Freeze]:
        if event.serving.state is None and self._last is not None:
            event = Looked(self._last.serving, event.guest)
        self._last = event
        return super().step(event, now)


class RenewsNothing(GuestRules):
    def step(self, event: Looked, now: float) -> Sequence[Write | Freeze]:
        before = self._written
        return [a for a in super().step(event, now) if not (isinstance(a, Write) and a.quota == before)]


class FreezesNobody(GuestRules):
    def step(self, event: Looked, now: float) -> Sequence[Write | Freeze]:
        return [action for action in super().step(event, now) if not isinstance(action, Freeze)]


class FreezesWhoeverIsShutOut(GuestRules):
    def step(self, event: Looked, now: float) -> Sequence[Write | Freeze]:
        actions = super().step(event, now)
        shut = self._shut_at_s is not None and now - self._shut_at_s > 0.3
        return [*actions, Freeze("it was shut out")] if shut and event.guest.state is not None else actions


RULES = [
    LeavesTheGateOpen,
    TakesTheUnknownForWhatItWas,
    RenewsNothing,
    FreezesNobody,
    FreezesWhoeverIsShutOut,
]


@pytest.mark.parametrize("rules", RULES)
def test_rules_that_break_a_promise(rules: type[GuestRules]) -> None:
    first_failure(lambda seed: CoservingWorld(seed, Cores(rules=rules)), rules.__name__)
