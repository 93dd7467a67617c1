"""A world for a relay between a publisher and an engine: damage on both disks, restarts, trainings that begin anew.

What must hold, by the world's own books
- After each act the engine has exactly the bits of the version that it says it has, and so has every version that the
  relay says it keeps and can read.
- A jump ends there, or is refused by name and leaves the engine where it was.
- As long as training goes on, the engine gets to the newest version in the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from random import Random

from rose.driver.faults import FaultPlan
from rose.driver.virtual import VirtualDriver
from rose.errors import TransferError
from rose.simulator.deployment import Jumped, Outcome, Published
from rose.simulator.relayed import (
    Act,
    BeginFromScratch,
    Jump,
    Publish,
    Relayed,
    RestartPublisher,
    RestartRelay,
    Wait,
)
from rose.simulator.small_model import Bits, first_weights, moved
from rose.simulator.world import must, world_folder

ACTS = 30
SHARE = 0.05
WAIT_S_MAX = 1.0
HEALING_VERSIONS = 20
HEALING_S = 100.0
"""Longer than the longest pause between two attempts of a relay."""


class RelayWorld:
    """One relay, all of whose chance comes from `seed`."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self._seed = seed
        self._weights: list[list[Bits]] = []
        # By fingerprint: another training gives numbers out again.
        self._published: dict[str, int] = {}
        self._before: str | None = None
        self.jumps = self.refused = 0
        self._relayed: Relayed
        self.driver: VirtualDriver[Act, Outcome]

    def run(self) -> None:
        """Play to the end. Raises SimulationFailed."""
        with world_folder() as folder:
            self._relayed = Relayed(folder, self._seed, self._weights.__getitem__)
            self.driver = VirtualDriver(
                self._relayed,
                self._perform,
                self._check,
                world="relay",
                seed=self._seed,
                random=self.random,
                faults=FaultPlan(),
            )
            try:
                self._play()
            finally:
                self._relayed.close()

    def trace(self) -> Iterator[str]:
        return self.driver.trace()

    def fingerprint(self) -> str:
        return self.driver.fingerprint()

    def _play(self) -> None:
        acts = (
            (self._publish, 5),
            (self._jump, 6),
            (self._wait, 6),
            (self._damage, 2),
            (self._restart_relay, 1),
            (self._restart_publisher, 1),
            (self._begin_from_scratch, 1),
        )
        self.driver.call(0.0, "", self._publish)
        for at in range(1, ACTS + 1):
            (act,) = self.random.choices([act for act, _ in acts], [weight for _, weight in acts])
            self.driver.call(at, "", act)
        self.driver.call(ACTS + 1, "", lambda: self._heal(HEALING_VERSIONS))
        self.driver.run(ACTS + HEALING_VERSIONS + 2)

    # What happens

    def _publish(self) -> None:
        store, number = self._relayed.store, len(self._weights)
        newest = store.newest
        before = None if newest is None else self._weights[self._published[store.fingerprint(newest)]]
        self._weights.append(first_weights(number) if before is None else moved(before, SHARE, number))
        self.driver.feed(Publish(number, self.random.randint(1, 4)))

    def _begin_from_scratch(self) -> None:
        self.driver.feed(BeginFromScratch())
        self.driver.call(0.0, "", self._publish)

    def _restart_publisher(self) -> None:
        self.driver.feed(RestartPublisher())

    def _restart_relay(self) -> None:
        self.driver.feed(RestartRelay(self.random.randint(1, 4)))

    def _damage(self) -> None:
        folder = self.random.choice(("store", "relay/store"))
        objects = sorted((self._relayed.folder / folder / "objects").glob("[0-9a-f]*"))
        if not objects:
            return
        path, spoils = self.random.choice(objects), self.random.random() < 0.5
        spoiled = bytearray(path.read_bytes())
        # Other files may be linked to it.
        path.unlink()
        if spoils:
            spoiled[self.random.randrange(len(spoiled))] ^= 1
            path.write_bytes(bytes(spoiled))
        self.driver.call(0.0, f"{folder}: object {path.name[:12]} is {'changed' if spoils else 'lost'}", lambda: None)

    def _jump(self) -> None:
        goals = self._relayed.relay.store.versions()
        if goals:
            self.driver.feed(Jump(self.random.choice(goals)))

    def _wait(self) -> None:
        self.driver.feed(Wait(self.random.uniform(0, WAIT_S_MAX)))

    def _heal(self, versions: int) -> None:
        """Training goes on, until the engine has what was published last, for so many versions at most."""
        must(versions > 0, "the engine never gets to the newest version", self._relayed.engine.version)
        self._publish()
        self.driver.feed(Wait(HEALING_S))
        newest = self._relayed.store.newest
        if newest is not None and newest in self._relayed.relay.store.versions():
            self.driver.feed(Jump(newest))
            if self._relayed.engine.fingerprint == self._relayed.store.fingerprint(newest):
                return
        self.driver.call(1.0, "", lambda: self._heal(versions - 1))

    # What came of it

    def _perform(self, outcome: Outcome) -> Sequence[Act]:
        match outcome:
            case Published(number, fingerprint):
                self._published[fingerprint] = number
            case Jumped(_, refused):
                self.jumps += 1
                self.refused += refused != ""
                held = self._relayed.engine.fingerprint
                must(not refused or held == self._before, "a refused jump moved the engine", held)
                self._before = held
        return ()

    def _check(self) -> None:
        engine, store = self._relayed.engine, self._relayed.relay.store
        if engine.fingerprint is not None:
            must(engine.has(self._bits(engine.fingerprint)), "the engine has other bits than it says", engine.version)
        for version in store.versions():
            with contextlib.suppress(TransferError):
                held = list(store.read(version))
                same = all(
                    mine.tobytes() == told.tobytes()
                    for mine, told in zip(held, self._bits(store.fingerprint(version)), strict=True)
                )
                must(same, "the relay has other bits than it says", version)

    def _bits(self, fingerprint: str) -> list[Bits]:
        return self._weights[self._published[fingerprint]]
