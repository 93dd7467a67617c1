"""A world for the token ledger: engines die, streams break, environments fail and hang, readers give up.

What must hold, by the world's own books
- At every happening: the sum of all accounts plus the tokens in transit is what the engines sampled,
  generated is what was read off their pages, and every account, the open requests and the unsettled
  trajectories are as the world knows them.
- When all is quiet: the ledger is balanced, nothing is in flight, and generated is what was sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from rose.driver.faults import FaultPlan
from rose.driver.virtual import VirtualDriver
from rose.ledger import (
    Account,
    EngineCounted,
    Opened,
    Received,
    RequestEnded,
    RequestStarted,
    Settled,
    TokenLedger,
)
from rose.simulator.sampling_engine import LedgerDriver, Page, SamplingEngine, Stream
from rose.simulator.world import must

FAULTS_UNTIL_S = 3.0
QUIET_S = 60.0
POLL_S = 0.05
COUNT_EVERY_S = 0.25
ENVIRONMENT_DEADLINE_S = 0.5
ATTEMPTS_MAX = 4


@dataclass(slots=True)
class _Episode:
    """A trajectory as the world plays it.

    `left` tokens of the turn are still wanted. `stream` is being read; `counting` says that the one before
    it broke and the engine's count is awaited; `over` that nothing more will be asked.
    """

    trajectory_id: str
    turns_left: int
    received: int = 0
    requests: int = 0
    attempts: int = 0
    left: int = 0
    stream: Stream | None = None
    stream_received: int = 0
    counting: bool = False
    over: bool = False
    settled: bool = False


class LedgerWorld:
    """One run of a few engines and a dozen trajectories around `ledger`."""

    def __init__(self, seed: int, ledger: TokenLedger | None = None) -> None:
        self.ledger = TokenLedger() if ledger is None else ledger
        self.random = Random(seed)
        plan = FaultPlan.drawn(self.random, FAULTS_UNTIL_S)
        # Streams are TCP: what a plan loses breaks the stream instead, and nothing is doubled or overtaken.
        in_order = replace(plan, drop=0.0, duplicate=0.0, reorder=0.0)
        self.driver: LedgerDriver = VirtualDriver(
            self.ledger, lambda _: (), self._check, world="ledger", seed=seed, random=self.random, faults=in_order
        )
        self._engines = [
            SamplingEngine(f"engine-{n}", self.driver, plan, self._sampled) for n in range(self.random.randint(1, 3))
        ]
        self._pages: list[Page] = [engine.page for engine in self._engines]
        self._crash_times = [plan.crashes(self.random) for _ in self._engines]
        self._in_transit = 0
        self._all_sampled = 0
        self._counted = 0
        self._open_requests = 0
        self._unsettled = 0
        self._accounts = dict.fromkeys(Account, 0)

    def run(self) -> None:
        """Play to the end. Raises SimulationFailed."""
        for engine, crashes in zip(self._engines, self._crash_times, strict=True):
            for at_s, down_s in crashes:
                self.driver.call(at_s, f"{engine.engine_id} dies", partial(self._crash, engine, down_s))
        for number in range(self.random.randint(4, 12)):
            episode = _Episode(f"t{number}", self.random.randint(1, 4))
            self.driver.call(self.random.random() * 2, "", partial(self._open, episode))
        self.driver.call(COUNT_EVERY_S, "", self._count_regularly)
        self.driver.call(QUIET_S, "all is quiet", self._check_quiet)
        self.driver.run(QUIET_S)

    def trace(self) -> Iterator[str]:
        return self.driver.trace()

    def fingerprint(self) -> str:
        return self.driver.fingerprint()

    # Engines

    def _sampled(self, tokens: int) -> None:
        self._all_sampled += tokens
        self._in_transit += tokens

    def _crash(self, engine: SamplingEngine, down_s: float) -> None:
        engine.crash()
        self.driver.call(down_s, f"{engine.engine_id} starts again", partial(self._start, engine))

    def _start(self, engine: SamplingEngine) -> None:
        engine.start()
        self._pages.append(engine.page)

    def _count_regularly(self) -> None:
        self._count_pages()
        if self._unsettled or self.driver.now < FAULTS_UNTIL_S:
            self.driver.call(COUNT_EVERY_S, "", self._count_regularly)

    def _count_pages(self) -> None:
        for page in self._pages:
            self._counted += page.total - page.read
            page.read = page.total
            self.driver.feed(EngineCounted(page.engine_id, page.incarnation, page.total))
        self._pages = [page for page in self._pages if page.writer_alive]

    # Turns

    def _open(self, episode: _Episode) -> None:
        self._unsettled += 1
        self.driver.feed(Opened(episode.trajectory_id))
        if self.random.random() < 0.2:
            give_up_s = self.random.random() * 2
            self.driver.call(give_up_s, f"{episode.trajectory_id} is given up", partial(self._give_up, episode))
        self._begin_turn(episode)

    def _begin_turn(self, episode: _Episode) -> None:
        episode.turns_left -= 1
        episode.attempts = 0
        episode.left = self.random.randint(1, 30)
        self._ask(episode)

    def _ask(self, episode: _Episode) -> None:
        """Send the turn, or what is left of it, to some engine that lives; wait for one if need be."""
        if episode.over:
            return
        alive = [engine for engine in self._engines if engine.alive]
        if not alive:
            self.driver.call(POLL_S, "", partial(self._ask, episode))
            return
        engine = self.random.choice(alive)
        request_id = self._request_id(episode, engine)
        stream = engine.request(
            request_id,
            episode.left,
            partial(self._part, episode),
            partial(self._stop_reading, episode),
        )
        episode.stream, episode.stream_received = stream, 0
        self._open_requests += 1
        self.driver.feed(RequestStarted(request_id, episode.trajectory_id, engine.engine_id))

    def _request_id(self, episode: _Episode, engine: SamplingEngine) -> str:
        """Mostly a new id; sometimes the last one again, on an incarnation that never saw it."""
        last = f"{episode.trajectory_id}.{episode.requests}"
        if episode.requests and last not in engine.page.slots and self.random.random() < 0.3:
            return last
        episode.requests += 1
        return f"{episode.trajectory_id}.{episode.requests}"

    def _part(self, episode: _Episode, stream: Stream, tokens: int, last: bool) -> None:
        if episode.stream is not stream:
            return
        self._in_transit -= tokens
        self._accounts[Account.IN_FLIGHT] += tokens
        episode.received += tokens
        episode.stream_received += tokens
        episode.left -= tokens
        self.driver.feed(Received(stream.request_id, tokens))
        if last:
            episode.stream = None
            self._open_requests -= 1
            self.driver.feed(RequestEnded(stream.request_id, None))
            self._act(episode)

    def _stop_reading(self, episode: _Episode, stream: Stream) -> None:
        """The stream broke or is given up: wait for the engine's own count."""
        if episode.stream is stream:
            episode.stream = None
            episode.counting = True
            self._await_count(episode, stream)

    def _await_count(self, episode: _Episode, stream: Stream) -> None:
        slot = stream.page.slots.get(stream.request_id)
        if stream.page.writer_alive and (slot is None or not slot.finished):
            self.driver.call(POLL_S, "", partial(self._await_count, episode, stream))
            return
        episode.counting = False
        generated = 0 if slot is None else slot.generated
        unreceived = generated - episode.stream_received
        self._in_transit -= unreceived
        self._accounts[Account.UNRECEIVED] += unreceived
        self._open_requests -= 1
        self.driver.feed(RequestEnded(stream.request_id, generated))
        episode.attempts += 1
        if episode.over:
            self._settle(episode, Account.TRUNCATED)
        elif episode.attempts == ATTEMPTS_MAX:
            self._settle(episode, Account.ABORTED)
        else:
            self._ask(episode)

    # Between and after turns

    def _act(self, episode: _Episode) -> None:
        """The environment takes its step: it answers, raises, or hangs until it is cut."""
        luck = self.random.random()
        if luck < 0.9:
            self.driver.call(self.random.random() * 0.2, "", partial(self._observe, episode))
            return
        delay_s, what = (0.05, "fails") if luck < 0.95 else (ENVIRONMENT_DEADLINE_S, "hangs and is cut")
        self.driver.call(
            delay_s,
            f"{episode.trajectory_id}: environment {what}",
            partial(self._settle, episode, Account.ENVIRONMENT_FAILED),
        )

    def _observe(self, episode: _Episode) -> None:
        if episode.over:
            return
        if episode.turns_left:
            self._begin_turn(episode)
            return
        episode.over = True
        account = self.random.choice((Account.TRAINED, Account.STALE, Account.ZERO_VARIANCE, Account.EVALUATION))
        self.driver.call(self.random.random(), "", partial(self._settle, episode, account))

    def _give_up(self, episode: _Episode) -> None:
        """A deadline of the whole trajectory, at any moment of its life."""
        if episode.over:
            return
        if episode.stream is None and not episode.counting:
            self._settle(episode, Account.TRUNCATED)
            return
        episode.over = True
        if episode.stream is not None:
            episode.stream.engine.close(episode.stream)
            self._stop_reading(episode, episode.stream)

    def _settle(self, episode: _Episode, account: Account) -> None:
        if episode.settled:
            return
        episode.over = episode.settled = True
        self._unsettled -= 1
        self._accounts[Account.IN_FLIGHT] -= episode.received
        self._accounts[account] += episode.received
        self.driver.feed(Settled(episode.trajectory_id, account))

    # What must hold

    def _check(self) -> None:
        ledger, accounts = self.ledger, self.ledger.accounts()
        must(not ledger.violations(), "the ledger complains", ledger.violations())
        in_accounts = sum(accounts.values())
        must(
            in_accounts + self._in_transit == self._all_sampled,
            "accounts, in transit, sampled are",
            (in_accounts, self._in_transit, self._all_sampled),
        )
        must(accounts == self._accounts, "accounts are, should be", (accounts, self._accounts))
        must(ledger.open_requests() == self._open_requests, "open requests should be", self._open_requests)
        must(ledger.unsettled() == self._unsettled, "unsettled trajectories should be", self._unsettled)
        must(ledger.generated() == self._counted, "generated, read off pages are", (ledger.generated(), self._counted))

    def _check_quiet(self) -> None:
        must(self._unsettled == 0 and self._in_transit == 0, "the world did not come to rest", self._in_transit)
        self._count_pages()
        ledger, sampled = self.ledger, self._all_sampled
        must(ledger.generated() == sampled, "generated, sampled are", (ledger.generated(), sampled))
        must(ledger.balanced(), "the ledger has a gap", ledger.gap())
