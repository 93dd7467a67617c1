"""The co-serving world must be able to fail: each bug planted in a core, or in what is done around one, shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from rose.driver.virtual import SimulationFailed
from rose.errors import ContractError
from rose.ledger import EngineCounted, LedgerEvent, RequestEnded, TokenLedger
from rose.simulator.coserving import executor, player
from rose.simulator.coserving.board import SimulatedBoard
from rose.simulator.coserving.follower import GuestFollower
from rose.simulator.coserving.player import Player
from rose.simulator.coserving_world import Cores, CoservingWorld
from rose.slo import Slo
from rose.trainer.alarm import FormatAlarm, MalformedAlarm
from rose.version_events import Commit, CommitFailed, Committed, VersionAction, VersionEvent
from rose.versions import EnginePhase, VersionState
from rose_executor import guest_admission, slack
from rose_executor.board import QUOTA, Half, S
from rose_executor.board_states import Given, Reading, ServingState
from rose_executor.engine_health import EngineHealth
from rose_executor.guest_admission import GuestAdmission, Pending
from rose_executor.guest_rules import Freeze, GuestRules, Looked, Write
from rose_executor.lending import Lent
from rose_executor.slack import SlackAdmission
from rose_executor.step_profile import StepProfile
from rose_scheduler.engines import Engine, Engines
from rose_scheduler.events import Grant, Health, Lapse, LeaseAsked, PlacementAction, PlacementEvent
from rose_scheduler.leases import Lease, Leases
from rose_scheduler.placement import Placement

SEEDS = 400


def first_failure(world: Callable[[int], CoservingWorld], name: str) -> SimulationFailed:
    for seed in range(SEEDS):
        try:
            world(seed).run()
        except SimulationFailed as failure:
            if not isinstance(failure.__cause__, ContractError | None):
                raise  # a bug of the planted code's own, which proves nothing of the world
            return failure
    pytest.fail(f"{name} survived {SEEDS} seeds")


# Serving first


class LeavesTheGateOpen(GuestRules):
    def step(self, event: Looked, now: float) -> Sequence[Write | Freeze]:
        return [
            Write(action.quota._replace(tokens_per_step=8, active_seqs=8, gate_open=True))
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
    _last: Write | None = None

    def step(self, event: Looked, now: float) -> Sequence[Write | Freeze]:
        actions = [action for action in super().step(event, now) if action != self._last]
        self._last = next((action for action in actions if isinstance(action, Write)), self._last)
        return actions


class FreezesNobody(GuestRules):
    def step(self, event: Looked, now: float) -> Sequence[Write | Freeze]:
        return [action for action in super().step(event, now) if not isinstance(action, Freeze)]


class FreezesWhoeverIsShutOut(GuestRules):
    _open_s = 0.0

    def step(self, event: Looked, now: float) -> Sequence[Write | Freeze]:
        actions = super().step(event, now)
        if event.guest.state is None or any(isinstance(a, Write) and a.quota.gate_open for a in actions):
            self._open_s = now
        return [*actions, Freeze("it was shut out")] if now - self._open_s > 0.3 else actions


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


def _counts_no_wait(patch: pytest.MonkeyPatch) -> None:
    """Slack from the step's own duration alone: a step that hangs, and who waits, are overlooked."""
    real = slack.slack_s

    def blind(serving: ServingState | None, slo: Slo, now_s: float, **computed: float) -> float:
        seen = None if serving is None else serving._replace(unanswered=0, stepped_at_s=now_s)
        return real(seen, slo, now_s, **computed)

    patch.setattr(slack, "slack_s", blind)


def _forgets_what_it_has_computed(patch: pytest.MonkeyPatch) -> None:
    """Many small steps beside one of serving: each is within the slack, all together are not."""
    patch.setattr(SlackAdmission, "computed", lambda self, seconds: None)


def _asks_for_slack_seldom(patch: pytest.MonkeyPatch) -> None:
    """Three times a second: what it acts on is over."""
    real = GuestAdmission.look

    def look(self: GuestAdmission, given: Given, now_s: float, *pending: Pending) -> None:
        if now_s - self._looked_at_s > 0.3 or given.quota is None:
            real(self, given, now_s, *pending)

    patch.setattr(GuestAdmission, "look", look)


def _takes_steps_for_cheap(patch: pytest.MonkeyPatch) -> None:
    real = StepProfile.tokens_within
    patch.setattr(StepProfile, "tokens_within", lambda self, seconds, *rest: real(self, 8 * seconds, *rest))


def _lends_whatever_happens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(executor, "lent", lambda seen, trouble, rules, stopped, slots_max, now_s: Lent(slots_max, ""))


def _trusts_a_stale_quota(patch: pytest.MonkeyPatch) -> None:
    real = SimulatedBoard.read

    def read(self: SimulatedBoard, half: Half[S], now: float) -> Reading[S]:
        return real(self, half, self.written_s(half) if half.name == QUOTA.name else now)

    patch.setattr(SimulatedBoard, "read", read)


def _computes_behind_the_gate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(guest_admission, "computes", lambda quota: quota.tokens_per_step > 0)


def _takes_more_than_its_quota(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(guest_admission, "within", lambda quota, limits: limits._replace(gate_open=quota.gate_open))


@pytest.mark.parametrize(
    "plant",
    [
        _counts_no_wait,
        _forgets_what_it_has_computed,
        _asks_for_slack_seldom,
        _takes_steps_for_cheap,
        _lends_whatever_happens,
        _trusts_a_stale_quota,
        _computes_behind_the_gate,
        _takes_more_than_its_quota,
    ],
)
def test_a_guest_that_costs_serving_too_much(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    first_failure(CoservingWorld, plant.__name__)


# Leases


class TakesAnyVersion(Placement):
    def step(self, event: PlacementEvent, now: float) -> tuple[PlacementAction, ...]:
        return super().step(replace(event, min_version=0) if isinstance(event, LeaseAsked) else event, now)


class GrantsAnew(Placement):
    """A question that comes again gets a term of its own."""

    def step(self, event: PlacementEvent, now: float) -> tuple[PlacementAction, ...]:
        return tuple(
            replace(action, until_s=now + 2.0) if isinstance(action, Grant) else action
            for action in super().step(event, now)
        )


class KeepsLostLeases(Placement):
    """An engine's death is nobody's business."""

    def _lost(self, engine: Engine, now: float) -> Iterator[PlacementAction]:
        return iter(())


class ExpiresHeldLeasesAtOnce(Placement):
    def step(self, event: PlacementEvent, now: float) -> tuple[PlacementAction, ...]:
        actions = list(super().step(event, now))
        for lease in [lease for lease in self.leases._open.values() if lease.grant and now - lease.granted_s > 0.3]:
            actions.extend(self._expire(lease, Lapse.NOT_ENDED, now))
        return tuple(actions)


@pytest.mark.parametrize("placement", [TakesAnyVersion, GrantsAnew, KeepsLostLeases, ExpiresHeldLeasesAtOnce])
def test_leases_that_should_not_be(placement: type[Placement]) -> None:
    first_failure(lambda seed: CoservingWorld(seed, Cores(placement=placement)), placement.__name__)


def _gives_more_than_there_is_room_for(patch: pytest.MonkeyPatch) -> None:
    def has_room(self: Engine) -> bool:
        return self.health is Health.HEALTHY and len(self.leases) < 2 * self.slots

    patch.setattr(Engine, "has_room", property(has_room))


def _never_finds_an_engine_silent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engines, "silent", lambda self, now: iter(()))
    patch.setattr(Engines, "next_silence_s", lambda self: None)


def _serves_nobody_in_line(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Placement, "_fill", lambda self, engine, now: iter(()))


def _never_ends_a_wait(patch: pytest.MonkeyPatch) -> None:
    def overdue(self: Leases, now: float) -> Iterator[Lease]:
        return iter(())

    patch.setattr(Leases, "overdue", overdue)
    patch.setattr(Leases, "next_s", lambda self: None)


@pytest.mark.parametrize(
    "plant",
    [_gives_more_than_there_is_room_for, _never_finds_an_engine_silent, _never_ends_a_wait, _serves_nobody_in_line],
)
def test_a_scheduler_that_forgets_its_limits(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    first_failure(CoservingWorld, plant.__name__)


# Versions, engines, tokens


class TrustsAFailedCommit(VersionState):
    def step(self, event: VersionEvent, now: float) -> tuple[VersionAction, ...]:
        if isinstance(event, CommitFailed):
            event = Committed(event.engine_id, event.version, event.order)
        return super().step(event, now)


class ServesWhileCommitting(VersionState):
    def may_serve(self, engine_id: str) -> bool:
        return self.engine_version(engine_id) is not None


class WaitsForEverybody(VersionState):
    """No engine changes its version while another is not as far."""

    def step(self, event: VersionEvent, now: float) -> tuple[VersionAction, ...]:
        actions = super().step(event, now)
        behind = any(engine.phase is EnginePhase.STAGING for engine in self._engines.values())
        return tuple(action for action in actions if not (behind and isinstance(action, Commit)))


@pytest.mark.parametrize("versions", [TrustsAFailedCommit, ServesWhileCommitting, WaitsForEverybody])
def test_versions_that_lie(versions: type[VersionState]) -> None:
    first_failure(lambda seed: CoservingWorld(seed, Cores(versions=versions)), versions.__name__)


class ForgetsUnreceived(TokenLedger):
    def step(self, event: LedgerEvent, now: float) -> tuple[()]:
        if isinstance(event, RequestEnded):
            event = RequestEnded(event.request_id, None)
        return super().step(event, now)


class KeepsOnlyTheLastIncarnation(TokenLedger):
    def _engine_counted(self, event: EngineCounted) -> None:
        self._generated = {key: n for key, n in self._generated.items() if key[0] != event.engine_id}
        super()._engine_counted(event)


@pytest.mark.parametrize("ledger", [ForgetsUnreceived, KeepsOnlyTheLastIncarnation])
def test_a_ledger_that_forgets(ledger: type[TokenLedger]) -> None:
    first_failure(lambda seed: CoservingWorld(seed, Cores(ledger=ledger)), ledger.__name__)


class NeverAlarmed(MalformedAlarm):
    def step(self, version: int, actions: int, malformed: int) -> FormatAlarm | None:
        return None


def test_an_alarm_that_is_never_raised() -> None:
    first_failure(lambda seed: CoservingWorld(seed, Cores(alarm=NeverAlarmed)), "NeverAlarmed")


def _starts_without_end(patch: pytest.MonkeyPatch) -> None:
    real = EngineHealth.step

    def step(self: EngineHealth, event: object, now: float) -> object:
        self.restarts = 0
        return real(self, event, now)  # type: ignore[arg-type]

    patch.setattr(EngineHealth, "step", step)


def _loses_tokens_on_resume(patch: pytest.MonkeyPatch) -> None:
    real = Player._keep

    def keep(self: Player, attempt: player._Attempt) -> None:
        real(self, attempt)
        if len(self._kept) < self._wanted:
            del self._kept[-1:]

    patch.setattr(Player, "_keep", keep)


def _resumes_without_what_it_has(patch: pytest.MonkeyPatch) -> None:
    class Forgetful(player.Request):
        def __init__(self, request_id: str, context: list[int], *rest: object) -> None:
            super().__init__(request_id, context[:-1] if ".1" not in request_id else context, *rest)  # type: ignore[arg-type]

    patch.setattr(player, "Request", Forgetful)


def _stamps_all_with_the_last_version(patch: pytest.MonkeyPatch) -> None:
    real = player._spans
    patch.setattr(player, "_spans", lambda versions: real([versions[-1]] * len(versions)))


def _counts_too_early(patch: pytest.MonkeyPatch) -> None:
    def count(self: Player, page: object, request_id: str) -> int:
        slot = page.slots.get(request_id)  # type: ignore[attr-defined]
        return 0 if slot is None else int(slot.generated)

    patch.setattr(Player, "_final_count", count)


def _lends_before_it_follows(patch: pytest.MonkeyPatch) -> None:
    """The guest is offered with the newest version from its start on, whatever it runs."""
    patch.setattr(executor, "BASE", -2)
    runs = property(lambda self: self._store.newest, lambda self, version: None)
    patch.setattr(GuestFollower, "runs", runs, raising=False)


@pytest.mark.parametrize(
    "plant",
    [
        _starts_without_end,
        _loses_tokens_on_resume,
        _resumes_without_what_it_has,
        _stamps_all_with_the_last_version,
        _counts_too_early,
        _lends_before_it_follows,
    ],
)
def test_what_is_done_around_the_cores(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    first_failure(CoservingWorld, plant.__name__)


def test_a_failure_names_the_command_that_replays_it() -> None:
    failure = first_failure(lambda seed: CoservingWorld(seed, Cores(ledger=ForgetsUnreceived)), "it")
    assert failure.command == f"./dev python -m rose.simulator coserving --seed {failure.seed}"
