"""The executor on a serving core: looks at the board, lends its guest, counts the guest's tokens for the run.

Invariants, checked at every look and at every step that the guest begins
- Where serving is unknown, or has long been late at every look, the quota on the board is shut after the look; it is
  always fresh.
- A guest begins no step without a fresh quota that is open, none larger than that, and none that costs more than the
  slack of that very moment; so a dead executor's guest stops when its last quota is stale.
- Only a deaf guest is ever frozen. None is lent while serving is unknown, it is frozen, or slack has long been gone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from rose.simulator.coserving.board import SimulatedBoard
from rose.simulator.coserving.engine import RolloutEngine
from rose.simulator.coserving.fleet import BEAT_S, LOAD_S, START_DEADLINE_S, Odds, Store, health_part
from rose.simulator.coserving.follower import BASE, GuestFollower
from rose.simulator.coserving.guest_engine import LIMITS, GuestEngine
from rose.simulator.coserving.parts import Parts, PartsDriver, To
from rose.simulator.coserving.scheduler_host import CALL_S, SchedulerHost
from rose.simulator.coserving.shared_core import SharedCore
from rose.simulator.coserving.waits import WaitBooks
from rose.simulator.sampling_engine import PageSlot
from rose.simulator.world import must
from rose_executor.board import GUEST, QUOTA, SERVING
from rose_executor.board_states import ServingState
from rose_executor.engine_health import Died, EngineHealth, HealthAction, Ready, Start, Wanted
from rose_executor.guest_rules import OBEY_S, PATIENCE_S, Freeze, GuestRules, Looked, Write
from rose_executor.kv_budget import FixedBlocks, KvShare
from rose_executor.lending import SHUT_S, lent
from rose_executor.slack import SURPRISE, SlackPolicy
from rose_scheduler.events import EngineKind, EngineOffered

LOOK_S = 0.025
RESTARTS_MAX = 6
_NEW_TOKENS = 8
"""What a guest of which no step was seen yet may try, and what it may try again."""

Counted = tuple[bool, PageSlot | None]
"""Whether the incarnation lives, and what its page says of a request."""


class LendingExecutor:
    """One machine's; `engines` are all its guests, the dead ones too, whose pages stay.

    `make_rules` makes the rules of each of its lives; `severed` says whether its link to the run is cut.
    """

    def __init__(
        self,
        parts: Parts,
        driver: PartsDriver,
        board: SimulatedBoard,
        core: SharedCore,
        policy: SlackPolicy,
        make_rules: Callable[[SlackPolicy, KvShare], GuestRules],
        store: Store,
        host: SchedulerHost,
        waits: WaitBooks,
        odds: Odds,
        severed: Callable[[], bool],
        made: Callable[[RolloutEngine, int], None],
    ) -> None:
        self.up = False
        self.closing = False
        self.lives = self.guests = self.freezes = 0
        self.guest: GuestEngine | None = None
        self.follower: GuestFollower | None = None
        self.engines: dict[str, GuestEngine] = {}
        self._parts = parts
        self._driver = driver
        self._followers: list[GuestFollower] = []
        self._board = board
        self._core = core
        self._policy = policy
        self._make_rules = make_rules
        self._store = store
        self._host = host
        self._waits = waits
        self._odds = odds
        self._severed = severed
        self._made = made
        self._rules = make_rules(policy, FixedBlocks(LIMITS.kv_blocks))
        self._seen: Looked | None = None
        self._shut_s: float | None = None
        self._tight_s: float | None = None
        self._beside = (0, 0.0)

    @property
    def rules_part(self) -> str:
        return f"rules of executor {self.lives}"

    @property
    def cut(self) -> int:
        """Fetches that came to nothing, of all guests."""
        return sum(follower.cut for follower in self._followers)

    @property
    def skipped(self) -> int:
        """Versions that no guest ever asked for, because a newer one was there."""
        return sum(follower.skipped for follower in self._followers)

    @property
    def part(self) -> str:
        return health_part(f"guest of executor {self.lives}")

    def start(self) -> None:
        """A process that knows nothing but the pages in its state folder; a guest left over is ended first."""
        self.up = True
        self.lives += 1
        self._end_guest()
        self._parts.put(self.part, EngineHealth(RESTARTS_MAX, backoff_s=0.1))
        self._rules = self._make_rules(self._policy, FixedBlocks(LIMITS.kv_blocks))
        self._parts.put(self.rules_part, self._rules)
        self._shut_s = self._tight_s = self._seen = None
        self._look(self.lives)
        self._driver.feed(To(self.part, Wanted()))

    def kill(self, orphan_s: float) -> None:
        """SIGKILL. Its guest lives on for `orphan_s` at most."""
        if not self.up:
            return
        self.up = False
        self._parts.drop(self.part)
        self._parts.drop(self.rules_part)
        if self.follower is not None:
            self.follower.stop()
        orphan = self.guest
        if orphan is not None:
            self._driver.call(orphan_s, "the orphaned guest ends", orphan.crash)

    def crash_guest(self) -> None:
        """The guest dies, if it lives; a running executor notices at once."""
        guest = self.guest
        if guest is not None and guest.alive:
            self._end_guest()
            if self.up:
                self._host.withdraw(_offer(guest), "it died")
                self._driver.feed(To(self.part, Died("killed")))

    def counts(self, incarnation: str, request_id: str) -> Counted | None:
        """What the counts service answers; None if nobody answers."""
        page = self.engines[incarnation].page
        return (page.writer_alive, page.slots.get(request_id)) if self.up else None

    def perform_health(self, action: HealthAction) -> None:
        if isinstance(action, Start):
            self.guests += 1
            wait = self._waits.begin("the guest's start", self._driver.now + START_DEADLINE_S)
            faulty = self._driver.now < self._driver.faults.until_s and self._driver.random.random() < self._odds.start
            came = partial(self._started, self.lives, wait, faulty)
            self._driver.call(LOAD_S * (0.5 + self._driver.random.random()), "the guest has started", came)

    def perform_rules(self, action: Write | Freeze) -> None:
        match action:
            case Write(quota):
                self._board.write(QUOTA, quota, self._driver.now)
            case Freeze():
                self._freeze()

    def guest_begins(self, guest: GuestEngine, tokens: int, cost_s: float) -> None:
        """Hold a step that the guest begins against the quota on the board, and against what serving can lose now."""
        now = self._driver.now
        if guest.deaf:
            shut_s = now - (now if self._shut_s is None or not self.up else self._shut_s)
            patience_s = OBEY_S + 2 * (LOOK_S + self._driver.faults.late_s) + cost_s
            must(shut_s < patience_s, "a deaf guest computes behind a shut gate, and nobody stops it", shut_s)
            return
        quota, serving = self._board.read(QUOTA, now).state, self._board.read(SERVING, now).state
        age_s = now - self._board.written_s(QUOTA)
        must(quota is not None and age_s < QUOTA.stale_after_s, "a guest computes on a stale quota", age_s)
        must(serving is not None, "a guest computes though serving is unknown", now)
        assert quota is not None
        assert serving is not None
        must(quota.gate_open and tokens <= quota.tokens_per_step, "a guest computes more than it may", quota)
        step, computed_s = self._beside if self._beside[0] == serving.steps else (serving.steps, 0.0)
        slack_s = self._own_slack_s(serving, computed_s)
        seen = (tokens, cost_s, slack_s, serving)
        tries = tokens <= _NEW_TOKENS and (serving.idle or not guest.computed_steps)
        must(cost_s * self._policy.interference < slack_s or tries, "a guest's step is above slack", seen)
        self._beside = step, computed_s + cost_s

    def _look(self, life: int) -> None:
        if not self.up or life != self.lives or self.closing:
            return
        now = self._driver.now
        serving = self._board.read(SERVING, now)
        tight = self._own_slack_s(serving.state, 0.0) <= 0
        self._tight_s = (now if self._tight_s is None else self._tight_s) if tight else None
        self._seen = Looked(serving, self._board.read(GUEST, now))
        self._driver.feed(To(self.rules_part, self._seen))
        quota = self._board.read(QUOTA, now).state
        must(quota is not None, "a quota is not renewed", now - self._board.written_s(QUOTA))
        assert quota is not None
        long_tight = self._tight_s is not None and now - self._tight_s > PATIENCE_S
        must(not (long_tight and quota.gate_open), "the gate is open though nothing is left", serving)
        must(serving.state is not None or not quota.gate_open, "the gate is open though serving is unknown", serving)
        if quota.gate_open:
            self._shut_s = None
            if self.guest is not None:
                self.guest.kick()
        elif self._shut_s is None:
            self._shut_s = now
        late_s = self._driver.faults.lateness_s(self._driver.random, now)
        self._driver.call(LOOK_S + late_s, "", lambda: self._look(life))

    def _own_slack_s(self, serving: ServingState | None, computed_s: float) -> float:
        """By how much serving could be late now and be on time: the world's own sum."""
        if serving is None:
            return 0.0
        now, slo, slack_s = self._driver.now, self._policy.slo, math.inf
        if serving.decoding:
            slack_s = slo.tpot_s - serving.next_step_s - self._policy.interference * computed_s
            slack_s = min(slack_s, serving.stepped_at_s + slo.tpot_s - now)
        if serving.unanswered:
            slack_s = min(slack_s, serving.oldest_unanswered_at_s + slo.ttft_s - serving.first_token_s - now)
        return max(0.0, SURPRISE * slo.ttft_s if slack_s == math.inf else slack_s)

    def _freeze(self) -> None:
        """Who does not obey is stopped, and replaced a moment later."""
        guest = self.guest
        assert guest is not None
        must(guest.deaf, "an obedient guest is frozen", guest.incarnation)
        self.freezes += 1
        guest.freeze()
        self._driver.call(0.05, f"{guest.incarnation} is replaced", partial(self._replace, guest))

    def _replace(self, guest: GuestEngine) -> None:
        if self.up and guest is self.guest:
            self.crash_guest()
            self._rules.replaced()
            self._shut_s = None  # for the next guest the gate counts as shut from now on

    def _started(self, life: int, wait: int, faulty: bool) -> None:
        self._waits.end(wait)
        if not self.up or life != self.lives:
            return
        if faulty:
            self._driver.feed(To(self.part, Died("it did not come up")))
            return
        incarnation = f"guest.{self.guests}"
        self.follower = GuestFollower(
            incarnation, self._store, self._driver, self._waits, self._odds, self._severed, self.crash_guest
        )
        self._followers.append(self.follower)
        guest = GuestEngine(
            "guest",
            incarnation,
            self.follower.weights,
            self._driver,
            self._made,
            self._odds.stream,
            core=self._core,
            board=self._board,
            begins=self.guest_begins,
        )
        self.guest = self.engines[incarnation] = guest
        self._driver.feed(To(self.part, Ready()))
        self.follower.follow()
        self._beat(guest, self.follower)

    def _end_guest(self) -> None:
        if self.follower is not None:
            self.follower.stop()
        if self.guest is not None:
            self.guest.crash()

    def _beat(self, guest: GuestEngine, follower: GuestFollower) -> None:
        if not self.up or not guest.alive or guest is not self.guest or self.closing:
            return
        version = follower.runs
        slots = lent(self._seen, "", self._rules, (), LIMITS.active_seqs, self._driver.now).slots
        unknown = self._seen is None or self._seen.serving.state is None
        tight_s = 0.0 if self._tight_s is None else self._driver.now - self._tight_s
        must(not slots or not (unknown or guest.frozen or tight_s > 2 * SHUT_S), "lent without slack", (slots, tight_s))
        if version != BASE and not self._severed():
            self._driver.call(CALL_S, "", partial(self._host.beat, _offer(guest), version, slots))
        self._driver.call(BEAT_S, "", lambda: self._beat(guest, follower))


def _offer(guest: GuestEngine) -> EngineOffered:
    return EngineOffered(
        "guest",
        guest.incarnation,
        EngineKind.LENT,
        f"at {guest.incarnation}",
        LIMITS.active_seqs,
        guest.version,
        "the executor",
    )
