"""The guest's weights: fetched from the store over a link that breaks, then staged and committed on the guest alone.

Invariants
- At most one thing is under way, and each has a deadline: a fetch, a stage or a commit.
- What was severed leaves the old version whole. A failed commit leaves a guest that must be replaced: `poisoned`.
"""

from __future__ import annotations

from collections.abc import Callable

from rose.simulator.coserving.fleet import COMMIT_DEADLINE_S, STAGE_DEADLINE_S, Odds, Store
from rose.simulator.coserving.parts import PartsDriver
from rose.simulator.coserving.waits import WaitBooks
from rose.simulator.loading_engine import Answer, LoadingEngine
from rose.version_events import Commit, CommitFailed, Committed, Stage, Staged, StageFailed

BASE = -1
"""The version of a guest that was started from the base model: nobody's."""
FETCH_S = 0.1
FETCH_DEADLINE_S = 0.5
PAUSE_S = 0.1


class GuestFollower:
    """Brings one incarnation to the newest version and keeps it there. `stop` ends that."""

    def __init__(
        self,
        incarnation: str,
        store: Store,
        driver: PartsDriver,
        waits: WaitBooks,
        odds: Odds,
        severed: Callable[[], bool],
        poisoned: Callable[[], None],
    ) -> None:
        self.weights = LoadingEngine(
            "guest", incarnation, BASE, driver, lambda version: True, self._answered, odds.weights
        )
        self.runs = BASE
        self.skipped = self.cut = 0
        self._store = store
        self._driver = driver
        self._waits = waits
        self._severed = severed
        self._poisoned = poisoned
        self._order = 0
        self._wait = 0
        self._target = BASE
        self._stopped = False

    def follow(self) -> None:
        """Look what is newest, and fetch it unless the guest runs it."""
        if self._stopped:
            return
        newest = self._store.newest
        if newest == self.runs:
            self._driver.call(PAUSE_S, "", self.follow)
            return
        self.skipped += newest - self.runs - 1 if self.runs != BASE else 0
        self._target = newest
        self._wait = self._waits.begin(f"fetch of version {newest}", self._driver.now + FETCH_DEADLINE_S)
        took_s = FETCH_DEADLINE_S if self._severed() else FETCH_S * (0.5 + self._driver.random.random())
        self._driver.call(took_s, f"version {newest} is fetched or not", self._fetched)

    def stop(self) -> None:
        self._stopped = True
        self._waits.end(self._wait)

    def _fetched(self) -> None:
        self._waits.end(self._wait)
        if self._stopped:
            return
        if self._severed() or self._target not in self._store.stored:
            self.cut += 1
            self._again()
            return
        self._give(Stage("guest", self.weights.incarnation, self._target, self._new_order()), STAGE_DEADLINE_S)

    def _give(self, order: Stage | Commit, deadline_s: float) -> None:
        self._wait = self._waits.begin(f"the guest's answer to order {order.order}", self._driver.now + deadline_s)
        failed = StageFailed if isinstance(order, Stage) else CommitFailed
        late = failed("guest", order.version, order.order, "no answer in time")
        self.weights.order(order)
        self._driver.call(deadline_s, "", lambda: self._answered(self.weights, late))

    def _answered(self, weights: LoadingEngine, answer: Answer) -> None:
        if self._stopped or answer.order != self._order:
            return
        self._waits.end(self._wait)
        number = self._new_order()
        match answer:
            case Staged():
                self._give(Commit("guest", weights.incarnation, self._target, number), COMMIT_DEADLINE_S)
            case Committed():
                self.runs = answer.version
                self.follow()
            case CommitFailed():
                self.stop()
                self._poisoned()
            case _:
                self._again()

    def _again(self) -> None:
        self._driver.call(PAUSE_S, "", self.follow)

    def _new_order(self) -> int:
        self._order += 1
        return self._order
