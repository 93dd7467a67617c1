"""Short words for what happens to a placement core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from rose.driver.core import After
from rose_scheduler.events import (
    EngineBeat,
    EngineGone,
    EngineKind,
    EngineOffered,
    LeaseAsked,
    LeaseEnded,
    LeaseOutcome,
    PlacementAction,
    PlacementEvent,
    Tick,
    TrajectoryOver,
)
from rose_scheduler.limits import Limits
from rose_scheduler.placement import Placement

T = TypeVar("T")


class Story:
    """A core, the time, and the answers without timers."""

    def __init__(self, **limits: float) -> None:
        self.core = Placement(Limits(**limits))  # type: ignore[arg-type]
        self.now = 100.0

    def feed(self, event: PlacementEvent) -> tuple[PlacementAction, ...]:
        return tuple(action for action in self.core.step(event, self.now) if not isinstance(action, After))

    def later(self, seconds: float) -> tuple[PlacementAction, ...]:
        self.now += seconds
        return self.feed(Tick(-1))

    def offer(
        self, engine: str = "e", incarnation: str = "1", version: int = 0, most: int = 2, **changes: str
    ) -> tuple[PlacementAction, ...]:
        kind, counts = EngineKind(changes.get("kind", "dedicated")), changes.get("counts", "")
        return self.feed(
            EngineOffered(engine, incarnation, kind, changes.get("address", f"at-{engine}"), most, version, counts)
        )

    def beat(
        self,
        engine: str = "e",
        incarnation: str = "1",
        version: int = 0,
        slots: int = 99,
        kv: float = 0.0,
        tokens: int = 0,
        token_s: float = 0.0,
    ) -> tuple[PlacementAction, ...]:
        return self.feed(EngineBeat(engine, incarnation, version, slots, kv, tokens, token_s))

    def join(self, engine: str = "e", **facts: int) -> None:
        self.offer(engine, **facts)  # type: ignore[arg-type]
        self.beat(engine, version=facts.get("version", 0))

    def over(self, trajectory: str) -> tuple[PlacementAction, ...]:
        return self.feed(TrajectoryOver(trajectory))

    def gone(self, engine: str = "e", incarnation: str = "1") -> tuple[PlacementAction, ...]:
        return self.feed(EngineGone(engine, incarnation, "told to go"))

    def ask(
        self,
        lease: str,
        trajectory: str = "",
        group: str = "g",
        *,
        version: int = 0,
        wait_s: float = 10.0,
        hold_s: float = 60.0,
        turn: int = 1,
        avoid: tuple[str, ...] = (),
        context: int = 100,
        size: int = 1,
        evaluation: bool = False,
    ) -> tuple[PlacementAction, ...]:
        return self.feed(
            LeaseAsked(
                lease,
                trajectory or f"t-{lease}",
                group,
                turn,
                context,
                version,
                self.now + wait_s,
                hold_s,
                f"token {lease}",
                avoid,
                size,
                evaluation,
            )
        )

    def end(
        self, lease: str, outcome: LeaseOutcome = LeaseOutcome.DONE, tokens: int = 7
    ) -> tuple[PlacementAction, ...]:
        return self.feed(LeaseEnded(lease, outcome, tokens))


def only(kind: type[T], actions: Sequence[object]) -> T:
    """The one action of a kind."""
    (found,) = (action for action in actions if isinstance(action, kind))
    return found


def all_of(kind: type[T], actions: Sequence[object]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]
