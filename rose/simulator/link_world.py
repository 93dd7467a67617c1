"""A world for the transport's sessions: fetches and watches, a server that dies or is full, links full of faults.

What must hold, beside what `linked_pair` checks: when faults have stopped every ask ends, a fetch with the whole
object or that there is none, a watch with what was announced.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random

from rose.driver.faults import FaultPlan
from rose.simulator.link_lines import FAULTS_UNTIL_S, Trouble
from rose.simulator.linked_pair import FIRST_WATCH, PIECE, LinkedPair
from rose.simulator.world import must
from rose_transfer.transport import client_events as client
from rose_transfer.transport.client_session import ClientSession
from rose_transfer.transport.interface import Announcement

QUIET_S = 40.0
FETCHES = 8
OBJECTS = {
    "empty": b"",
    "short": b"one piece",
    "even": Random(1).randbytes(4 * PIECE),
    "long": Random(2).randbytes(40 * PIECE + 17),
}
FOR_VERSION_2, FOR_VERSION_9 = FIRST_WATCH, FIRST_WATCH + 1


class LinkWorld:
    """One client and one server around their sessions."""

    def __init__(self, seed: int, session: type[ClientSession] = ClientSession) -> None:
        self._setup = Random(f"setup {seed}")
        trouble = Trouble(
            corrupt=self._setup.choice((0.0, 0.02, 0.1)),
            truncate=self._setup.choice((0.0, 0.02)),
            cut=self._setup.choice((0.0, 0.02, 0.1)),
            mute=self._setup.choice((0.0, 0.2)),
        )
        self._faults = FaultPlan.drawn(self._setup, FAULTS_UNTIL_S)
        self.pair = LinkedPair(seed, OBJECTS, faults=self._faults, trouble=trouble, session=session)

    def run(self) -> None:
        """Play to the end. Raises SimulationFailed."""
        driver = self.pair.driver
        for ask in range(1, FETCHES + 1):
            self._plan_fetch(ask)
        driver.call(FAULTS_UNTIL_S * self._setup.random(), f"cancel {FETCHES}", lambda: self.pair.cancel(FETCHES))
        driver.call(1.0, "watches", lambda: driver.feed(client.WatchAsked(FOR_VERSION_2, 2, 30.0)))
        driver.call(1.0, "", lambda: driver.feed(client.WatchAsked(FOR_VERSION_9, 9, 12.0)))
        for version in (1, 2):
            driver.call(2.0 * version, f"version {version}", partial(self.pair.server.announce, version))
        for _ in range(self._setup.randrange(4)):
            crowd = partial(self.pair.server.crowd, self._setup.randrange(1, 6), 2.0 * self._setup.random())
            driver.call(FAULTS_UNTIL_S * self._setup.random(), "others come", crowd)
        for at_s, down_s in self._faults.crashes(self._setup):
            driver.call(at_s, "server dies", partial(self.pair.server.crash, down_s))
        driver.call(QUIET_S, "all is quiet", self._check_quiet)
        driver.run(QUIET_S)

    def trace(self) -> Iterator[str]:
        return self.pair.driver.trace()

    def fingerprint(self) -> str:
        return self.pair.driver.fingerprint()

    def _plan_fetch(self, ask: int) -> None:
        key = self._setup.choice([*OBJECTS, "missing"])
        known = self._setup.random() < 0.5 and key in OBJECTS
        resume = min(len(OBJECTS.get(key, b"")), self._setup.choice((0, 0, 5, PIECE)))

        def fetch() -> None:
            self.pair.fetch(ask, key, resume_from=resume, size_known=known)

        self.pair.driver.call(self._setup.random() * FAULTS_UNTIL_S, f"fetch {ask} of {key}", fetch)

    def _check_quiet(self) -> None:
        self.pair.check_ended({*range(1, FETCHES + 1), FOR_VERSION_2, FOR_VERSION_9})
        told = self.pair.ended[FOR_VERSION_2]
        must(told == client.Told(FOR_VERSION_2, Announcement(2, "manifest-2")), "a watch ends as", told)
        told = self.pair.ended[FOR_VERSION_9]
        must(told == client.Told(FOR_VERSION_9, None), "a watch for what never comes ends as", told)
