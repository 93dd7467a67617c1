"""One trajectory: reads streams, resumes what broke with the tokens it has, steps its environment.

Invariants
- A trajectory ends once, with an outcome and a cause, whatever its engines, its environment or the scheduler do.
- Tokens that arrived are kept: after a broken stream the next engine is given them as context.
- Every wait is on the books, with the deadline at which it is really given up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from rose.records import Finish, Outcome, Purpose, RequestPart, Trajectory, Turn, VersionSpan
from rose.simulator.coserving.engine import Request, RolloutEngine, Sampled
from rose.simulator.coserving.executor import LendingExecutor
from rose.simulator.coserving.lease_client import HOLD_S, LeaseClient
from rose.simulator.coserving.parts import PartsDriver
from rose.simulator.coserving.scheduler_host import SchedulerHost
from rose.simulator.coserving.token_books import TokenBooks
from rose.simulator.coserving.waits import WaitBooks
from rose.simulator.sampling_engine import Page
from rose.simulator.world import must
from rose_scheduler.events import Grant, LeaseOutcome

STALL_S = 0.5
COUNT_WAIT_S = 0.3
ENVIRONMENT_DEADLINE_S = 0.4
ATTEMPTS_MAX = 4
_POLL_S = 0.05


@dataclass(slots=True)
class Surroundings:
    """What all trajectories share. `find` gives an incarnation, dead or alive; `acted` hears each action's version."""

    driver: PartsDriver
    host: SchedulerHost
    executor: LendingExecutor
    books: TokenBooks
    waits: WaitBooks
    find: Callable[[str], RolloutEngine]
    min_version: Callable[[], int]
    acted: Callable[[int], None]


@dataclass(slots=True)
class _Attempt:
    """One request on one lease. `news` counts what came of it."""

    grant: Grant
    engine: RolloutEngine
    request: Request
    min_version: int
    received: list[Sampled] = field(default_factory=list)
    news: int = 0
    counting: bool = False


class Player:
    """Plays one trajectory of `turns` turns; `ended` hears of its end, once."""

    def __init__(
        self,
        trajectory_id: str,
        group_id: str,
        purpose: Purpose,
        turns: int,
        around: Surroundings,
        ended: Callable[[Player], None],
    ) -> None:
        self.trajectory_id = trajectory_id
        self.group_id = group_id
        self.purpose = purpose
        self.outcome: Outcome | None = None
        self.failure = ""
        self.resumed = 0
        self.avoided = 0
        self._turns_left = turns
        self._around = around
        self._driver = around.driver
        self._ended = ended
        self._context: list[int] = []
        self._turns: list[Turn] = []
        self._delta: list[int] = []
        self._kept: list[Sampled] = []
        self._parts: list[RequestPart] = []
        self._avoid: list[str] = []
        self._wanted = self._requests = self._attempts = 0
        self._attempt: _Attempt | None = None
        self._leases = LeaseClient(
            trajectory_id, group_id, around.driver, around.host, around.waits, self._request, self._no_lease
        )

    def begin(self) -> None:
        self._around.books.open(self.trajectory_id)
        self._environment()

    def trajectory(self) -> Trajectory:
        """What came of it; a reward is drawn from its tokens."""
        assert self.outcome is not None
        return Trajectory(
            trajectory_id=self.trajectory_id,
            group_id=self.group_id,
            task_seed=0,
            purpose=self.purpose,
            turns=tuple(self._turns),
            reward=float(sum(self._context) % 2),
            success=True,
            outcome=self.outcome,
            failure=self.failure,
        )

    # The environment

    def _environment(self) -> None:
        """It is reset or takes a step: it answers, raises, or hangs until it is cut."""
        random, now = self._driver.random, self._driver.now
        wait = self._around.waits.begin(f"{self.trajectory_id}'s environment", now + ENVIRONMENT_DEADLINE_S)
        luck = random.random() if now < self._driver.faults.until_s else 0.0
        if luck < 0.94:
            self._driver.call(random.random() * 0.15, "", partial(self._observed, wait))
            return
        delay_s, why = (0.02, "raised") if luck < 0.97 else (ENVIRONMENT_DEADLINE_S, "hung")
        what = f"{self.trajectory_id}: its environment {why}"
        self._driver.call(delay_s, what, partial(self._environment_failed, wait, why))

    def _environment_failed(self, wait: int, why: str) -> None:
        self._around.waits.end(wait)
        self._end(Outcome.ENVIRONMENT_FAILED, f"the environment {why}")

    def _observed(self, wait: int) -> None:
        self._around.waits.end(wait)
        random = self._driver.random
        if not self._turns_left:
            truncated = random.random() < 0.1
            self._end(Outcome.TRUNCATED if truncated else Outcome.COMPLETED, "context full" if truncated else "")
            return
        self._turns_left -= 1
        self._delta = [random.randrange(1000) for _ in range(random.randint(2, 8))]
        self._context.extend(self._delta)
        self._kept, self._parts, self._avoid, self._attempts = [], [], [], 0
        self._wanted = random.randint(2, 14)
        self._ask()

    def _ask(self) -> None:
        self._leases.ask(self._around.min_version(), len(self._turns), len(self._context), tuple(self._avoid))

    def _no_lease(self, why: str) -> None:
        self._end(Outcome.ABORTED, why)

    # A request

    def _request(self, grant: Grant, min_version: int) -> None:
        self.avoided += bool(self._avoid)
        must(grant.incarnation not in self._avoid, "a turn is sent where it was lost", grant)
        engine = self._around.find(grant.incarnation)
        self._requests += 1
        request_id = f"{self.trajectory_id}.{self._requests}"
        context = [*self._context, *(token for token, _ in self._kept)]
        request = Request(request_id, context, self._wanted - len(self._kept), self._part, self._broken)
        attempt = self._attempt = _Attempt(grant, engine, request, min_version)
        self._around.books.start_request(request_id, self.trajectory_id, engine.page)
        engine.submit(request)
        wait = self._around.waits.begin(f"stream {request_id}", self._driver.now + HOLD_S)
        self._watch(attempt, -1, self._driver.now + HOLD_S, wait)

    def _watch(self, attempt: _Attempt, seen: int, until_s: float, wait: int) -> None:
        """Let a stream go that has stood still for too long, or that the lease does not cover any more."""
        if self._attempt is not attempt or attempt.counting:
            self._around.waits.end(wait)
            return
        left_s = until_s - self._driver.now
        if left_s > 1e-9 and attempt.news != seen:
            self._driver.call(min(STALL_S, left_s), "", partial(self._watch, attempt, attempt.news, until_s, wait))
            return
        self._around.waits.end(wait)
        attempt.engine.hang_up(attempt.request)
        attempt.request.whole = False
        self._broken(attempt.request)

    def _reading(self, request: Request) -> _Attempt | None:
        """The attempt that reads this request's stream, if that is still so."""
        attempt = self._attempt
        return attempt if attempt is not None and attempt.request is request and not attempt.counting else None

    def _part(self, request: Request, tokens: list[Sampled], last: bool) -> None:
        attempt = self._reading(request)
        if attempt is None:
            return
        attempt.news += 1
        attempt.received.extend(tokens)
        if last:
            self._attempt = None
            self._around.books.end_request(request.request_id, len(attempt.received), None)
            self._lease_over(attempt, LeaseOutcome.DONE)
            self._keep(attempt)
            self._turn_done()

    def _broken(self, request: Request) -> None:
        """The stream is over without an end: wait for the engine's own count, then go on elsewhere."""
        attempt = self._reading(request)
        if attempt is None:
            return
        attempt.counting = True
        self._lease_over(attempt, LeaseOutcome.FAILED)
        until_s = self._driver.now + COUNT_WAIT_S
        wait = self._around.waits.begin(f"count of {request.request_id}", until_s + _POLL_S)
        self._count(attempt, until_s, wait)

    def _count(self, attempt: _Attempt, until_s: float, wait: int) -> None:
        generated = self._final_count(attempt.engine.page, attempt.request.request_id)
        if generated is None and self._driver.now < until_s:
            self._driver.call(_POLL_S, "", partial(self._count, attempt, until_s, wait))
            return
        self._around.waits.end(wait)
        self._attempt = None
        if generated is None:
            self._end(Outcome.ABORTED, "nobody can tell what the engine has counted")
            return
        self._around.books.end_request(attempt.request.request_id, len(attempt.received), generated)
        self._keep(attempt)
        self._attempts += 1
        if attempt.grant.counts_address:
            self._avoid.append(attempt.grant.incarnation)
        if len(self._kept) == self._wanted:
            self._turn_done()
        elif self._attempts == ATTEMPTS_MAX:
            self._end(Outcome.ABORTED, f"the turn was lost {ATTEMPTS_MAX} times")
        else:
            self.resumed += bool(self._kept)
            self._ask()

    def _final_count(self, page: Page, request_id: str) -> int | None:
        """What the engine made for a request, None as long as that may change or nobody answers."""
        counted = (page.writer_alive, page.slots.get(request_id))
        if page.engine_id == "guest":
            answer = self._around.executor.counts(page.incarnation, request_id)
            if answer is None:
                return None
            counted = answer
        alive, slot = counted
        if alive and (slot is None or not slot.finished):
            return None
        return 0 if slot is None else slot.generated

    def _lease_over(self, attempt: _Attempt, outcome: LeaseOutcome) -> None:
        self._leases.end(attempt.grant, outcome, len(attempt.received))

    def _keep(self, attempt: _Attempt) -> None:
        for _, version in attempt.received:
            must(version >= attempt.min_version, "a token is older than was asked for", (attempt.grant, version))
        self._kept.extend(attempt.received)
        self._parts.append(RequestPart(attempt.engine.engine_id, attempt.request.request_id, len(attempt.received)))

    def _turn_done(self) -> None:
        outputs = tuple(token for token, _ in self._kept)
        versions = _spans([version for _, version in self._kept])
        self._turns.append(
            Turn(
                context_ids=tuple(self._delta),
                output_ids=outputs,
                logprobs=(0.0,) * len(outputs),
                versions=versions,
                finish=Finish.STOP,
                requests=tuple(self._parts),
            )
        )
        self._context.extend(outputs)
        self._around.acted(self._kept[-1][1])
        self._environment()

    def _end(self, outcome: Outcome, failure: str) -> None:
        must(self.outcome is None, "a trajectory ends twice", (self.trajectory_id, outcome, failure))
        self.outcome, self.failure = outcome, failure
        self._ended(self)


def _spans(versions: list[int]) -> tuple[VersionSpan, ...]:
    """The versions of a turn's outputs as spans."""
    spans: list[VersionSpan] = []
    for at, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, at + 1)
        else:
            spans.append(VersionSpan(version, at, at + 1))
    return tuple(spans)
