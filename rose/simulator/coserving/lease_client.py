"""How a trajectory comes to its leases, as the scheduler's client does it.

Invariants
- A question is asked until it is answered or its deadline is over, always under the same id, through restarts of the
  scheduler. An answer that nobody waits for any more is given back.
- Each question ends in one of two ways, once: granted, or failed with a cause.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rose.simulator.coserving.parts import PartsDriver
from rose.simulator.coserving.scheduler_host import CALL_S, Answer, SchedulerHost
from rose.simulator.coserving.waits import WaitBooks
from rose.simulator.world import must
from rose_scheduler.events import Expire, Grant, LeaseAsked, LeaseOutcome, Reason, Refuse

WAIT_S = 0.8
GRACE_S = 0.1
HOLD_S = 2.0
_AGAIN_S = 0.1


class LeaseClient:
    """One trajectory's. `granted` is told the grant and the least version that was asked for, `failed` why not."""

    def __init__(
        self,
        trajectory_id: str,
        group_id: str,
        driver: PartsDriver,
        host: SchedulerHost,
        waits: WaitBooks,
        granted: Callable[[Grant, int], None],
        failed: Callable[[str], None],
    ) -> None:
        self._trajectory_id = trajectory_id
        self._group_id = group_id
        self._driver = driver
        self._host = host
        self._waits = waits
        self._granted = granted
        self._failed = failed
        self._asked = 0
        self._asking = ""
        self._grant: Grant | None = None

    def ask(self, min_version: int, turn: int, context_tokens: int, avoid: tuple[str, ...]) -> None:
        """Ask for a place for a turn. Only when no other question is open."""
        self._asked += 1
        lease_id = self._asking = f"{self._trajectory_id}/{self._asked}"
        until_s = self._driver.now + WAIT_S
        wait = self._waits.begin(f"lease {lease_id}", until_s + GRACE_S)
        event = LeaseAsked(
            lease_id,
            self._trajectory_id,
            self._group_id,
            turn,
            context_tokens,
            min_version,
            until_s,
            HOLD_S,
            f"token of {lease_id}",
            avoid,
        )
        self._question(event, wait)
        self._driver.call(WAIT_S + GRACE_S, "", partial(self._late, event, wait))

    def end(self, grant: Grant, outcome: LeaseOutcome, tokens: int) -> None:
        """Tell the scheduler; if it is away, once more, and then the lease ends with its term."""
        end = partial(self._host.end, grant.lease_id, outcome, tokens)
        if self._host.up:
            end()
        else:
            self._driver.call(_AGAIN_S, "", end)

    def _question(self, event: LeaseAsked, wait: int) -> None:
        if self._asking != event.lease_id or self._driver.now + _AGAIN_S > event.deadline_s:
            return  # past its deadline nobody asks: `_late` has the last word
        ask = partial(self._host.ask, event, partial(self._answered, event, wait))
        self._driver.call(CALL_S, "", ask)
        if self._driver.faults.duplicated(self._driver.random, self._driver.now):
            self._driver.call(CALL_S + _AGAIN_S / 2, f"{event.lease_id} is asked again", ask)

    def _late(self, event: LeaseAsked, wait: int) -> None:
        """The client's own deadline, for a scheduler that does not answer at all."""
        if self._asking == event.lease_id:
            self._asking = ""
            self._waits.end(wait)
            self._host.cancel(event.lease_id)
            self._failed("no lease in time: the scheduler is away")

    def _answered(self, event: LeaseAsked, wait: int, answer: Answer) -> None:
        if self._asking != event.lease_id:
            if isinstance(answer, Grant) and answer != self._grant:
                self._host.end(event.lease_id, LeaseOutcome.ABANDONED, 0)
            return
        match answer:
            case None:
                self._driver.call(_AGAIN_S, "", partial(self._question, event, wait))
                return
            case Refuse(retry_after_s=float(pause_s)):
                self._driver.call(pause_s, "", partial(self._question, event, wait))
                return
        self._asking = ""
        self._waits.end(wait)
        match answer:
            case Grant():
                self._grant = answer
                self._granted(answer, event.min_version)
            case Refuse(reason=Reason.ENDED):
                self.ask(event.min_version, event.turn, event.context_tokens, event.avoid)
            case Refuse():
                must(False, "a sound question is refused", answer)
            case Expire():
                self._failed(f"no lease: {answer.what}")
