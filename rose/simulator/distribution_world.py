"""A world for the distribution of versions: publishing, retiring, damage, restarts, jumps to any version.

What must hold, by the world's own books
- After each act an engine has exactly the bits of the version that it says it has.
- A jump ends there, or is refused by name and leaves the engine where it was.
- Whatever was damaged: once somebody has noticed, the next version is there for everybody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from random import Random

from rose.driver.faults import FaultPlan
from rose.driver.virtual import VirtualDriver
from rose.simulator.deployment import (
    Act,
    Collect,
    Deployment,
    Jump,
    Jumped,
    Outcome,
    Publish,
    Published,
    RestartReceiver,
    RestartServer,
    Transport,
)
from rose.simulator.small_model import Bits, first_weights, moved
from rose.simulator.switchboard import Switchboard
from rose.simulator.world import must, world_folder

ACTS = 60
ENGINES = 2
SHARES = (0.01, 0.2, 0.9)


class DistributionWorld:
    """`transport` is how engines reach the store."""

    def __init__(self, seed: int, transport: Transport | None = None) -> None:
        self.random = Random(seed)
        self._seed = seed
        self._transport = transport or Switchboard()
        self._weights: list[list[Bits]] = []
        # By fingerprint: a disk that loses the newest version has its number given out again.
        self._published: dict[str, int] = {}
        self._goals: list[int] = []
        self._before: list[str | None] = [None] * ENGINES
        self.jumps = self.refused = 0
        self._deployment: Deployment
        self.driver: VirtualDriver[Act, Outcome]

    def run(self) -> None:
        """Play to the end. Raises SimulationFailed."""
        with world_folder() as folder:
            self._folder = folder
            self._deployment = Deployment(self._folder, self._transport, ENGINES, self._weights.__getitem__)
            self.driver = VirtualDriver(
                self._deployment,
                self._perform,
                self._check,
                world="distribution",
                seed=self._seed,
                random=self.random,
                faults=FaultPlan(),
            )
            try:
                self._play()
            finally:
                self._deployment.close()

    def trace(self) -> Iterator[str]:
        return self.driver.trace()

    def fingerprint(self) -> str:
        return self.driver.fingerprint()

    def _play(self) -> None:
        acts = (self._publish, self._jump, self._collect, self._damage, self._restart_server, self._restart_receiver)
        self.driver.call(0.0, "", self._publish)
        for at in range(1, ACTS + 1):
            (act,) = self.random.choices(acts, (4, 8, 2, 1, 1, 1))
            self.driver.call(at, "", act)
        for number in range(ENGINES):
            self.driver.call(ACTS + 1, "", partial(self._look_again, number))
        self.driver.call(ACTS + 2, "", self._publish)
        self.driver.call(ACTS + 3, "", self._collect)
        self.driver.call(ACTS + 4, "", self._all_to_the_newest)
        self.driver.run(ACTS + 5)

    # What happens

    def _publish(self) -> None:
        store = self._deployment.store
        newest, number = store.newest, len(self._weights)
        before = None if newest is None else self._weights[self._published[store.fingerprint(newest)]]
        share = self.random.choice(SHARES)
        self._weights.append(first_weights(number) if before is None else moved(before, share, number))
        version = (newest or 0) + 1
        self._goals.append(version)
        self.driver.feed(Publish(version, self.random.choice([*store.versions(), None]), number))

    def _collect(self) -> None:
        versions = self._deployment.store.versions()
        keep = self.random.randint(1, 4)
        self.driver.feed(Collect(keep, frozenset(self.random.sample(versions, min(1, len(versions))))))

    def _damage(self) -> None:
        objects = sorted((self._folder / "store" / "objects").iterdir())
        if not objects:
            return
        path, how = self.random.choice(objects), self.random.randrange(3)
        if how == 0:
            path.unlink()
        else:
            data = bytearray(path.read_bytes())
            data[self.random.randrange(len(data))] ^= 1
            path.write_bytes(bytes(data[: len(data) // how]))
        what = ("lost", "changed", "cut and changed")[how]
        self.driver.call(0.0, f"object {path.name[:12]} is {what}", lambda: None)

    def _restart_server(self) -> None:
        self.driver.feed(RestartServer())

    def _restart_receiver(self) -> None:
        self.driver.feed(RestartReceiver(self.random.randrange(ENGINES)))

    def _jump(self) -> None:
        self.driver.feed(Jump(self.random.randrange(ENGINES), self.random.choice(self._goals)))

    def _look_again(self, number: int) -> None:
        self.driver.feed(Jump(number, self._deployment.store.newest or 0, anew=True))

    def _all_to_the_newest(self) -> None:
        newest = self._deployment.store.newest
        must(newest is not None, "nothing is published", newest)
        for number in range(ENGINES):
            self.driver.feed(Jump(number, newest or 0))
            engine = self._deployment.engines[number]
            must(engine.version == newest, "an engine does not get to the newest version", engine.version)

    # What came of it

    def _perform(self, outcome: Outcome) -> Sequence[Act]:
        match outcome:
            case Published(number, fingerprint):
                self._published[fingerprint] = number
            case Jumped(engine, refused):
                self.jumps += 1
                self.refused += refused != ""
                held = self._deployment.engines[engine].fingerprint
                must(not refused or held == self._before[engine], "a refused jump moved an engine", held)
                self._before[engine] = held
        return ()

    def _check(self) -> None:
        for engine in self._deployment.engines:
            if engine.fingerprint is not None:
                bits = self._weights[self._published[engine.fingerprint]]
                must(engine.has(bits), "an engine has other bits than it says", engine.version)
