"""The worlds must be able to fail: each bug planted in a core here is caught within a few hundred seeds."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from rose.driver.virtual import SimulationFailed
from rose.errors import ContractError
from rose.ledger import (
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
from rose.simulator.distribution_world import DistributionWorld
from rose.simulator.ledger_world import LedgerWorld
from rose.simulator.link_world import LinkWorld
from rose.simulator.relay_world import RelayWorld
from rose.simulator.version_world import VersionWorld
from rose.simulator.world import World
from rose.version_events import (
    Commit,
    CommitFailed,
    Committed,
    CommitUndone,
    EngineJoined,
    EngineLost,
    Pinned,
    Retire,
    Stage,
    Staged,
    StageFailed,
    Unpinned,
    VersionAction,
    VersionEvent,
)
from rose.versions import VersionState
from rose_transfer.distribution import lineage, shelf
from rose_transfer.distribution.source import StoreSource
from rose_transfer.transport.client_events import (
    Cancelled,
    ClientEvent,
    Connect,
    Drop,
    Fetched,
    Grown,
    WatchAsked,
)
from rose_transfer.transport.client_session import ClientSession

SEEDS = 300


# Ledgers


class ForgetsUnreceived(TokenLedger):
    def step(self, event: LedgerEvent, now: float) -> tuple[()]:
        if isinstance(event, RequestEnded):
            event = RequestEnded(event.request_id, None)
        return super().step(event, now)


class CountsAllGeneratedAsUnreceived(TokenLedger):
    def _request_ended(self, event: RequestEnded) -> None:
        self._requests[event.request_id].received = 0
        super()._request_ended(event)


class KeepsOnlyTheLastIncarnation(TokenLedger):
    def _engine_counted(self, event: EngineCounted) -> None:
        self._generated = {key: n for key, n in self._generated.items() if key[0] != event.engine_id}
        super()._engine_counted(event)


class TakesGeneratedFromWhatArrived(TokenLedger):
    def generated(self) -> int:
        return sum(self._totals.values())


class SettlesTruncatedAsTrained(TokenLedger):
    def step(self, event: LedgerEvent, now: float) -> tuple[()]:
        if isinstance(event, Settled) and event.account is Account.TRUNCATED:
            event = Settled(event.trajectory_id, Account.TRAINED)
        return super().step(event, now)


class LeavesAbortedInFlight(TokenLedger):
    def step(self, event: LedgerEvent, now: float) -> tuple[()]:
        before = self._totals[Account.IN_FLIGHT]
        super().step(event, now)
        if isinstance(event, Settled) and event.account is Account.ABORTED:
            self._totals[Account.IN_FLIGHT] = before
        return ()


class BooksTwiceAfterReuse(TokenLedger):
    """Keeps what an earlier request of the same id received."""

    def __init__(self) -> None:
        super().__init__()
        self._earlier: dict[str, int] = {}

    def step(self, event: LedgerEvent, now: float) -> tuple[()]:
        if isinstance(event, RequestEnded):
            self._earlier[event.request_id] = self._requests[event.request_id].received
        super().step(event, now)
        if isinstance(event, RequestStarted):
            self._requests[event.request_id].received = self._earlier.get(event.request_id, 0)
        return ()


class ForgetsToOpen(TokenLedger):
    def step(self, event: LedgerEvent, now: float) -> tuple[()]:
        return () if isinstance(event, Opened) and event.trajectory_id == "t3" else super().step(event, now)


class DropsSingleTokens(TokenLedger):
    def step(self, event: LedgerEvent, now: float) -> tuple[()]:
        return () if isinstance(event, Received) and event.tokens == 1 else super().step(event, now)


LEDGERS = [
    ForgetsUnreceived,
    CountsAllGeneratedAsUnreceived,
    KeepsOnlyTheLastIncarnation,
    TakesGeneratedFromWhatArrived,
    SettlesTruncatedAsTrained,
    LeavesAbortedInFlight,
    BooksTwiceAfterReuse,
    ForgetsToOpen,
    DropsSingleTokens,
]


# Version states


class CommitsWithoutStaging(VersionState):
    def step(self, event: VersionEvent, now: float) -> tuple[VersionAction, ...]:
        actions: list[VersionAction] = []
        for action in super().step(event, now):
            if isinstance(action, Stage):
                staged = Staged(action.engine_id, action.version, action.order)
                actions.extend(super().step(staged, now))
            else:
                actions.append(action)
        return tuple(actions)


class TrustsAFailedCommit(VersionState):
    def step(self, event: VersionEvent, now: float) -> tuple[VersionAction, ...]:
        if isinstance(event, CommitFailed):
            event = Committed(event.engine_id, event.version, event.order)
        return super().step(event, now)


class TrustsAnUndoneCommit(VersionState):
    def step(self, event: VersionEvent, now: float) -> tuple[VersionAction, ...]:
        if isinstance(event, CommitUndone):
            event = Committed(event.engine_id, event.version, event.order)
        return super().step(event, now)


class DoesNotTryAgain(VersionState):
    def step(self, event: VersionEvent, now: float) -> tuple[VersionAction, ...]:
        return () if isinstance(event, CommitUndone) else super().step(event, now)


class ServesWhileCommitting(VersionState):
    def may_serve(self, engine_id: str) -> bool:
        return self.engine_version(engine_id) is not None


class AnswersNeedNoOrder(VersionState):
    """Takes any answer for the newest one: late and repeated ones too."""

    def step(self, event: VersionEvent, now: float) -> tuple[VersionAction, ...]:
        answers = Staged | StageFailed | Committed | CommitUndone | CommitFailed
        if isinstance(event, answers) and event.engine_id in self._engines:
            event = type(event)(**{**_fields(event), "order": self._engines[event.engine_id].order})
        return super().step(event, now)


class BelievesLateNews(VersionState):
    """Forgets which incarnations have ended."""

    def step(self, event: VersionEvent, now: float) -> tuple[VersionAction, ...]:
        self._ended.clear()
        return super().step(event, now)


class LosesTheNewForTheOld(VersionState):
    """A late report that an old incarnation is dead removes the new one."""

    def _lost(self, event: EngineLost) -> None:
        known = self._engines.get(event.engine_id)
        super()._lost(EngineLost(event.engine_id, known.incarnation) if known else event)


class RetiresPinned(VersionState):
    def step(self, event: VersionEvent, now: float) -> tuple[VersionAction, ...]:
        return () if isinstance(event, Pinned) else super().step(event, now)


class NeverUnpins(VersionState):
    def step(self, event: VersionEvent, now: float) -> tuple[VersionAction, ...]:
        return () if isinstance(event, Unpinned) else super().step(event, now)


class RetiresWhatRuns(VersionState):
    def _retire(self) -> tuple[Retire, ...]:
        running = {engine_id: engine.running for engine_id, engine in self._engines.items()}
        for engine in self._engines.values():
            engine.running = engine.target
        retired = super()._retire()
        for engine_id, version in running.items():
            self._engines[engine_id].running = version
        return retired


class KeepsOneTooFew(VersionState):
    def __init__(self) -> None:
        super().__init__(keep=1)


class StopsAfterOneFailure(VersionState):
    """An engine whose stage failed for good is not brought to later versions either."""

    def step(self, event: VersionEvent, now: float) -> tuple[VersionAction, ...]:
        lagging = set(self.trouble())
        return tuple(
            action
            for action in super().step(event, now)
            if not (isinstance(action, Stage) and action.engine_id in lagging)
        )


class LeavesPoisonedEngines(VersionState):
    def step(self, event: VersionEvent, now: float) -> tuple[VersionAction, ...]:
        return tuple(a for a in super().step(event, now) if isinstance(a, Stage | Commit | Retire))


class StartsFromTheWrongVersion(VersionState):
    """Takes a joined engine to run the newest version, whatever it loaded."""

    def _joined(self, event: EngineJoined) -> tuple[VersionAction, ...]:
        return super()._joined(EngineJoined(event.engine_id, event.incarnation, self._newest or 0))


STATES = [
    CommitsWithoutStaging,
    TrustsAFailedCommit,
    TrustsAnUndoneCommit,
    DoesNotTryAgain,
    ServesWhileCommitting,
    AnswersNeedNoOrder,
    BelievesLateNews,
    LosesTheNewForTheOld,
    RetiresPinned,
    NeverUnpins,
    RetiresWhatRuns,
    KeepsOneTooFew,
    StopsAfterOneFailure,
    LeavesPoisonedEngines,
    StartsFromTheWrongVersion,
]


# Client sessions


class Session(ClientSession):
    """Sees events and actions before the other side does."""

    def step(self, event: ClientEvent, now: float) -> Sequence[Any]:
        return [action for asked in super().step(event, now) for action in self.says(asked)]

    def says(self, action: Any) -> Sequence[Any]:
        return [action]


class CountsAByteTooMany(Session):
    def says(self, action: Any) -> Sequence[Any]:
        return [replace(action, complete_bytes=action.complete_bytes + 1)] if isinstance(action, Grown) else [action]


class EndsAFetchTwice(Session):
    def says(self, action: Any) -> Sequence[Any]:
        return [action, action] if isinstance(action, Fetched) else [action]


class NeverConnectsAgain(Session):
    def says(self, action: Any) -> Sequence[Any]:
        return [] if isinstance(action, Connect | Drop) and action.link > 3 else [action]


class GoesOnWithWhatIsCancelled(Session):
    def step(self, event: ClientEvent, now: float) -> Sequence[Any]:
        return () if isinstance(event, Cancelled) else super().step(event, now)


class TakesAnyNews(Session):
    def step(self, event: ClientEvent, now: float) -> Sequence[Any]:
        return super().step(replace(event, at_least=0) if isinstance(event, WatchAsked) else event, now)


class TakesAnEmptyAnswerForAWholeObject(Session):
    def says(self, action: Any) -> Sequence[Any]:
        return [replace(action, size_bytes=0)] if isinstance(action, Fetched) else [action]


SESSIONS = [
    CountsAByteTooMany,
    EndsAFetchTwice,
    NeverConnectsAgain,
    GoesOnWithWhatIsCancelled,
    TakesAnyNews,
    TakesAnEmptyAnswerForAWholeObject,
]


def _fields(event: object) -> dict[str, object]:
    return {name: getattr(event, name) for name in type(event).__slots__}  # type: ignore[attr-defined]


def _first_failure(world: Callable[[int], World], name: str) -> SimulationFailed:
    for seed in range(SEEDS):
        try:
            world(seed).run()
        except SimulationFailed as failure:
            if not isinstance(failure.__cause__, ContractError | None):
                raise  # a bug of the planted code's own, which proves nothing of the world
            return failure
    pytest.fail(f"{name} survived {SEEDS} seeds")


@pytest.mark.parametrize("core", LEDGERS)
def test_the_ledger_world_catches(core: type[TokenLedger]) -> None:
    assert "ledger, seed" in str(_first_failure(lambda seed: LedgerWorld(seed, core()), core.__name__))


@pytest.mark.parametrize("core", STATES)
def test_the_version_world_catches(core: type[VersionState]) -> None:
    assert "versions, seed" in str(_first_failure(lambda seed: VersionWorld(seed, core()), core.__name__))


@pytest.mark.parametrize("core", SESSIONS)
def test_the_link_world_catches(core: type[ClientSession]) -> None:
    assert "links, seed" in str(_first_failure(lambda seed: LinkWorld(seed, core), core.__name__))


def test_a_failure_carries_its_seed_its_tail_and_the_command_and_replays_to_the_same_lines() -> None:
    failure = _first_failure(lambda seed: LedgerWorld(seed, ForgetsUnreceived()), "it")
    assert failure.command == f"./dev python -m rose.simulator ledger --seed {failure.seed}"
    assert failure.command in str(failure)
    assert 5 < len(failure.tail) <= 25
    with pytest.raises(SimulationFailed) as again:
        LedgerWorld(failure.seed, ForgetsUnreceived()).run()
    assert str(again.value) == str(failure)
    assert re.search(r"RequestEnded\(request_id='t\d+\.\d+', generated=\d+\)", str(failure))


# Distribution


def _takes_whatever_arrives(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shelf, "_hash_of", lambda path: path.name)


def _never_looks_for_damage(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StoreSource, "_read_all", lambda self, manifest: None)


@pytest.mark.parametrize("plant", [_takes_whatever_arrives, _never_looks_for_damage])
def test_the_distribution_world_catches(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    assert "distribution, seed" in str(_first_failure(DistributionWorld, plant.__name__))


def _takes_another_training_for_the_same(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lineage, "continues", lambda store, fetched: True)


@pytest.mark.parametrize(
    "plant", [_takes_whatever_arrives, _never_looks_for_damage, _takes_another_training_for_the_same]
)
def test_the_relay_world_catches(monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    plant(monkeypatch)
    assert "relay, seed" in str(_first_failure(RelayWorld, plant.__name__))
