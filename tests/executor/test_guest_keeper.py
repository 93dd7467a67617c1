"""What the keeper of a guest passes on, to the rules of its watch and to the log, and what it takes for whose stop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rose.errors import ClusterError
from rose.slo import Slo
from rose.waits import WaitBoard
from rose_executor import guest_keeper
from rose_executor.board_states import GuestState, Reading, ServingState
from rose_executor.engine_health import EngineHealth
from rose_executor.engine_settings import EngineSettings
from rose_executor.guest_keeper import GuestKeeper
from rose_executor.guest_rules import OBEY_S, Freeze, GuestRules, Looked
from rose_executor.kv_budget import FixedBlocks
from rose_executor.slack import SlackPolicy
from rose_executor.version_follower import Followed


class Steps(FixedBlocks):
    """Notes when a step of the run ended."""

    def __init__(self) -> None:
        super().__init__(2**31)
        self.ended_s: list[float] = []

    def step_ended(self, now: float) -> None:
        self.ended_s.append(now)


class Floor:
    """A partitioner whose watchdog is as the test says: alive, dead, or not to be had."""

    def __init__(self) -> None:
        self.watchdog = "alive"

    def renew_watchdog(self) -> bool:
        if self.watchdog not in ("alive", "dead"):
            raise ClusterError(self.watchdog)
        was, self.watchdog = self.watchdog, "alive"
        return was == "dead"


class Scene:
    """A keeper without an engine, over rules of its own."""

    def __init__(self) -> None:
        self.kv, self.floor = Steps(), Floor()
        self.rules = GuestRules(SlackPolicy(Slo(ttft_s=0.4, tpot_s=0.05), 256, 16), self.kv)
        self.followed: list[tuple[Followed, int]] = []
        watch: Any = SimpleNamespace(rules=self.rules, seen=None, trouble="")
        figures: Any = SimpleNamespace(
            followed=lambda followed, fetched: self.followed.append((followed, fetched)), answered_wrongly=None
        )
        shelf: Any = SimpleNamespace(set_apart=None)
        floor: Any = self.floor
        launcher: Any = None
        self.killed: list[str] = []
        self.keeper = GuestKeeper(
            EngineSettings("lent", Path("model"), Path("run"), Path("log")),
            EngineHealth(1),
            watch,
            floor,
            shelf,
            figures,
            WaitBoard(),
            launcher,
        )
        process: Any = SimpleNamespace(alive=True, pid=7, incarnation="a1", kill=lambda: self.killed.append("process"))
        supervisor: Any = object()
        self.keeper.process, self.keeper._supervisor = process, supervisor

    def freeze(self) -> float:
        """Its guest goes on computing behind a shut gate; when that was seen."""
        now_s = 10.0
        for after_s, steps in ((0.0, 1), (OBEY_S, 1), (OBEY_S + 0.1, 9)):
            looked = Looked(Reading[ServingState](None), Reading(GuestState(computed_steps=steps)))
            actions = self.rules.step(looked, now_s + after_s)
        assert any(isinstance(action, Freeze) for action in actions)
        return now_s + OBEY_S + 0.1


def test_a_new_version_is_told_to_the_figures_and_as_the_end_of_a_step_of_the_run() -> None:
    scene = Scene()
    followed: Any = SimpleNamespace(version=3)
    scene.keeper._followed(followed, 99)
    assert scene.followed == [(followed, 99)]
    assert len(scene.kv.ended_s) == 1


@pytest.mark.parametrize("lives", [False, True], ids=["no life", "a life"])
def test_a_frozen_guest_is_ended_once_and_the_next_one_is_judged_anew(lives: bool) -> None:
    scene = Scene()
    scene.keeper.end_if_frozen()
    assert scene.killed == []
    frozen_s = scene.freeze()
    if lives:
        life: Any = SimpleNamespace(live=SimpleNamespace(kill=scene.killed.append))
        scene.keeper.life = life
    why = scene.rules.frozen
    scene.keeper.end_if_frozen()
    scene.keeper.end_if_frozen()
    assert scene.killed == [why if lives else "process"]
    assert scene.rules.frozen == ""
    looked = Looked(Reading[ServingState](None), Reading(GuestState(computed_steps=1)))
    assert not any(isinstance(action, Freeze) for action in scene.rules.step(looked, frozen_s + OBEY_S))


def test_a_guest_that_somebody_stopped_is_lent_to_nobody_and_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene()
    stopped = [(8,), (8,), ()]
    monkeypatch.setattr(guest_keeper, "stopped_processes", lambda pid: stopped.pop(0))

    async def body() -> list[tuple[int, ...]]:
        seen = []
        for _ in range(3):
            await scene.keeper.look_for_stopped()
            seen.append(scene.keeper._stopped)
        return seen

    assert asyncio.run(body()) == [(8,), (8,), ()]
    assert sum("stopped by somebody else" in line for line in caplog.messages) == 1


def test_our_own_brake_is_nobody_elses_stop(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    monkeypatch.setattr(guest_keeper, "stopped_processes", lambda pid: (pid,))
    scene.freeze()
    asyncio.run(scene.keeper.look_for_stopped())
    assert scene.keeper._stopped == ()
    assert not any("somebody else" in line for line in caplog.messages)


def test_a_watchdog_that_died_is_replaced_and_told_and_one_that_cannot_be_had_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene()
    for state in ("alive", "dead", "no process can be started", "no process can be started", "dead", "alive"):
        scene.floor.watchdog = state
        scene.keeper.renew_watchdog()
    told = [line for line in caplog.messages if "watchdog had died" in line or "nothing would end" in line]
    assert ["no process can be started" in line for line in told] == [False, True, False]
