"""Runs the same core on a seeded virtual clock, inside a simulated world.

Invariants
- Only the seed decides what happens: one heap of happenings, ties broken by the order of scheduling, one
  random source, no real clock, no iteration over unordered sets.
- Time jumps to the next happening; nothing ever sleeps.
- The world's invariants are checked after every happening.
- Whatever goes wrong comes out as one SimulationFailed that names the seed and the command that replays it.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

from rose.driver.core import After, Core
from rose.driver.faults import FaultPlan
from rose.errors import ContractError

E = TypeVar("E")
A = TypeVar("A")

TAIL_LINES = 25
HAPPENINGS_MAX = 200_000


class SimulationFailed(ContractError):
    """A core or its world broke an invariant. `tail` holds the last lines of the trace."""

    def __init__(self, world: str, seed: int, why: str, tail: Sequence[str]) -> None:
        self.world = world
        self.seed = seed
        self.why = why
        self.tail = tuple(tail)
        self.command = f"./dev python -m rose.simulator {world} --seed {seed}"
        super().__init__(f"{world}, seed {seed}: {why}", to_do=f"replay it with: {self.command}")

    def __str__(self) -> str:
        return "\n".join((*self.tail, ContractError.__str__(self)))


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the trace: an event that the core took and what it asked for, or a happening in the world."""

    at_s: float
    what: object
    actions: Sequence[object] = ()

    def __str__(self) -> str:
        asked = "".join(f"\n{'':12}→ {action!r}" for action in self.actions)
        what = self.what if isinstance(self.what, str) else repr(self.what)
        return f"{self.at_s:11.6f} {what}{asked}"


class VirtualDriver(Generic[E, A]):
    """Feeds one core on a virtual clock.

    `perform` does one action in the world, at once, and returns the events that came of it, which are fed
    next; what takes time it schedules with `call`, `send` or `after`. `check` raises ContractError if an
    invariant of the world does not hold. `random` is the world's only source of chance.
    """

    def __init__(
        self,
        core: Core[E, A | After[E]],
        perform: Callable[[A], Sequence[E]],
        check: Callable[[], None],
        *,
        world: str,
        seed: int,
        random: Random,
        faults: FaultPlan,
    ) -> None:
        self.now = 0.0
        self.random = random
        self.faults = faults
        self._core = core
        self._perform = perform
        self._check = check
        self._world = world
        self._seed = seed
        self._heap: list[tuple[float, int, str, Callable[[], None]]] = []
        self._scheduled = 0
        self._link_clear_s: dict[str, float] = {}
        self._trace: list[Step] = []
        self._stepping = False

    def feed(self, event: E) -> None:
        """Step the core now. Only from a happening, never from `perform`, which returns its events instead."""
        if self._stepping:
            raise ContractError("an event was fed while the core's actions were being performed")
        self._stepping = True
        actions = self._core.step(event, self.now)
        self._trace.append(Step(self.now, event, actions))
        for action in actions:
            if isinstance(action, After):
                self.after(action.delay_s, action.event)
            else:
                for follow_up in self._perform(action):
                    self.after(0.0, follow_up)
        self._stepping = False

    def after(self, delay_s: float, event: E) -> None:
        """Feed an event `delay_s` from now, without fail."""
        self._schedule(self.now + delay_s, "", lambda: self.feed(event))

    def call(self, delay_s: float, what: str, happening: Callable[[], None]) -> None:
        """Let something happen in the world `delay_s` from now, without fail; `what` is its line in the trace."""
        self._schedule(self.now + delay_s, what, happening)

    def send(self, link: str, what: str, latency_s: float, arrival: Callable[[], None]) -> None:
        """Send a message over a link that keeps order, subject to the faults: it arrives 0, 1 or 2 times."""
        if self.faults.dropped(self.random, self.now):
            self._trace.append(Step(self.now, f"lost: {what}"))
            return
        for _ in range(2 if self.faults.duplicated(self.random, self.now) else 1):
            at_s = self.now + latency_s + self.faults.lateness_s(self.random, self.now)
            if not self.faults.reordered(self.random, self.now):
                at_s = max(at_s, self._link_clear_s.get(link, 0.0))
                self._link_clear_s[link] = at_s
            self._schedule(at_s, what, arrival)

    def run(self, until_s: float) -> None:
        """Let everything up to `until_s` happen.

        Raises SimulationFailed if the core, the world or a check raises, or if it never comes to rest.
        """
        while self._heap and self._heap[0][0] <= until_s:
            at_s, number, what, happening = heapq.heappop(self._heap)
            self.now = at_s
            if what:
                self._trace.append(Step(at_s, what))
            try:
                happening()
                self._check()
            except Exception as error:
                raise self.failed(error.what if isinstance(error, ContractError) else repr(error)) from error
            if number > HAPPENINGS_MAX:
                raise self.failed(f"still busy after {HAPPENINGS_MAX} happenings")
        self.now = max(self.now, until_s)

    def failed(self, why: str) -> SimulationFailed:
        """The error for an invariant that does not hold now."""
        return SimulationFailed(self._world, self._seed, why, [str(step) for step in self._trace[-TAIL_LINES:]])

    def trace(self) -> Iterator[str]:
        """Every event, action and happening so far, a line or more each."""
        return (str(step) for step in self._trace)

    def steps(self) -> int:
        """Lines in the trace."""
        return len(self._trace)

    def fingerprint(self) -> str:
        """Hash of the trace: equal for equal seeds and equal code, in any process."""
        digest = hashlib.sha256()
        for line in self.trace():
            digest.update(line.encode())
            digest.update(b"\n")
        return digest.hexdigest()

    def _schedule(self, at_s: float, what: str, happening: Callable[[], None]) -> None:
        self._scheduled += 1
        heapq.heappush(self._heap, (at_s, self._scheduled, what, happening))
