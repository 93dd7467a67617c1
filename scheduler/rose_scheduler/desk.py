"""The driver of the placement core inside the service: steps it, tells askers their answers, books what happened.

Invariants
- It decides nothing. Events are stepped at once, in the order of arrival, in one event loop.
- Who asks for a lease is told its one answer; who stops asking before that is reported to the core. Of several that
  ask for the same lease the last one is told, the earlier ones that they were superseded.
- If the core raises, `failed` says so and the service ends: nothing goes on with half a step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from rose.driver.core import After
from rose.logs import logger
from rose.metrics import SchedulerMetrics
from rose.waits import WaitBoard
from rose_scheduler.events import (
    Cancelled,
    EndAnswered,
    EndVerdict,
    EngineAnswered,
    EngineBeat,
    EngineGone,
    EngineOffered,
    Expire,
    Grant,
    Health,
    HealthChanged,
    LeaseAsked,
    LeaseEnded,
    OverAnswered,
    PlacementAction,
    PlacementEvent,
    Reason,
    Refuse,
    TrajectoryOver,
)
from rose_scheduler.placement import Placement

log = logger("scheduler")

Answer = Grant | Refuse | Expire


class Desk:
    """One core in one event loop; make it there."""

    def __init__(self, core: Placement, waits: WaitBoard, metrics: SchedulerMetrics) -> None:
        self.core = core
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closed = asyncio.Event()
        self._waits = waits
        self._metrics = metrics
        self._askers: dict[str, asyncio.Future[Answer]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Tell all who wait to ask again later, whoever is there then."""
        self._ring_no_more()
        for lease_id in self._askers:
            self._answer(self._closed(lease_id))
        self.closed.set()

    async def ask(self, event: LeaseAsked) -> Answer:
        """The answer, as soon as there is one: at the latest at the deadline."""
        if self.closed.is_set():
            return self._closed(event.lease_id)
        asked_s = time.monotonic()
        answer = self._join(event)
        if not answer.done():
            log.info("lease waits", **_ids(event))
            whom = f"engines for {event.trajectory_id}"
            with self._waits.waiting("a place for a turn", whom, max(0.0, event.deadline_s - asked_s)):
                await self._answered(event.lease_id, answer)
        self._leave(event.lease_id, answer)
        self._told(event, answer.result(), time.monotonic() - asked_s)
        return answer.result()

    def engine(self, event: EngineOffered | EngineBeat | EngineGone) -> EngineAnswered:
        """Take news of an engine."""
        return next(one for one in self._feed(event) if isinstance(one, EngineAnswered))

    def end(self, event: LeaseEnded) -> EndAnswered:
        """Take the report of a turn's end."""
        answer = next(one for one in self._feed(event) if isinstance(one, EndAnswered))
        self._metrics.ended.labels(answer.verdict).inc()
        if answer.verdict is EndVerdict.ENDED:
            self._metrics.tokens.inc(event.tokens)
        ids = {"trajectory_id": answer.trajectory_id, "lease_id": event.lease_id}
        log.info("lease ended", outcome=event.outcome, tokens=event.tokens, verdict=answer.verdict, **ids)
        return answer

    def over(self, event: TrajectoryOver) -> OverAnswered:
        """Take the news that a trajectory takes no more turns."""
        answer = next(one for one in self._feed(event) if isinstance(one, OverAnswered))
        log.info("trajectory over", verdict=answer.verdict, trajectory_id=event.trajectory_id)
        return answer

    def show(self) -> None:
        """Set what is shown of the state as it is now."""
        core, metrics = self.core, self._metrics
        metrics.waiting.set(len(core.line))
        metrics.held.set(len(core.leases) - len(core.line))
        for kind, entries in core.remembered().items():
            metrics.remembered.labels(kind).set(entries)
        metrics.open_waits.set(len(self._waits.snapshot()))
        for health in Health:
            metrics.engines.labels(health).set(sum(engine.health is health for engine in core.engines))

    def _join(self, event: LeaseAsked) -> asyncio.Future[Answer]:
        """Ask the core; the answer may be there at once."""
        earlier = self._askers.get(event.lease_id)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._askers[event.lease_id] = answer
        self._feed(event)
        if earlier is None or earlier.done():
            return answer
        if answer.done() and isinstance(answer.result(), Refuse):
            self._askers[event.lease_id] = earlier  # whose question still stands
        else:
            earlier.set_result(Refuse(event.lease_id, Reason.SUPERSEDED, "it was asked for again by a later call"))
        return answer

    async def _answered(self, lease_id: str, answer: asyncio.Future[Answer]) -> None:
        try:
            await answer
        except asyncio.CancelledError:
            if self._leave(lease_id, answer):
                self._feed(Cancelled(lease_id))
            raise

    def _leave(self, lease_id: str, answer: asyncio.Future[Answer]) -> bool:
        """Whether this asker was the last one for its lease."""
        last = self._askers.get(lease_id) is answer
        if last:
            del self._askers[lease_id]
        return last

    def _feed(self, event: PlacementEvent) -> Sequence[PlacementAction]:
        try:
            actions = self.core.step(event, time.monotonic())
        except Exception as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise
        for action in actions:
            self._perform(action)
        return actions

    def _perform(self, action: PlacementAction) -> None:
        match action:
            case After():
                self._ring_no_more()  # the core listens to its newest timer alone
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(action.delay_s, self._feed, action.event)
            case Grant() | Refuse():
                self._answer(action)
            case Expire():
                self._answer(action)
                self._metrics.lapsed.labels(action.lapse).inc()
                ids = {"trajectory_id": action.trajectory_id, "lease_id": action.lease_id}
                log.info("lease lapsed", lapse=action.lapse, what=action.what, **ids)
            case HealthChanged():
                ids = {"engine_id": action.engine_id, "incarnation": action.incarnation}
                say = log.warning if action.health in (Health.STALE, Health.DEAD) else log.info
                say(f"engine is {action.health}", why=action.why, **ids)

    def _ring_no_more(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _closed(self, lease_id: str) -> Refuse:
        return Refuse(lease_id, Reason.CLOSING, "the scheduler is being ended", self.core.limits.retry_after_s)

    def _answer(self, answer: Answer) -> None:
        asker = self._askers.get(answer.lease_id)
        if asker is not None and not asker.done():
            asker.set_result(answer)

    def _told(self, event: LeaseAsked, answer: Answer, waited_s: float) -> None:
        ids = _ids(event)
        match answer:
            case Grant():
                engine = self.core.engines.live(answer.engine_id, answer.incarnation)
                kind = "gone" if engine is None else str(engine.kind)
                self._metrics.granted.labels(kind, str(answer.affine).lower()).inc()
                self._metrics.wait_seconds.observe(waited_s)
                if event.turn > 0 and not answer.affine:
                    self._metrics.moved_tokens.inc(event.context_tokens)
                log.info("lease granted", engine_id=answer.engine_id, affine=answer.affine, **ids)
            case Refuse():
                self._metrics.refused.labels(answer.reason).inc()
                log.info("lease refused", reason=answer.reason, what=answer.what, **ids)


def _ids(event: LeaseAsked) -> dict[str, str | int]:
    """By which a trajectory is followed through the logs of all processes."""
    return {
        "trajectory_id": event.trajectory_id,
        "group_id": event.group_id,
        "lease_id": event.lease_id,
        "turn": event.turn,
    }
