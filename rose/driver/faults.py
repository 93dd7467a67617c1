"""How bad a simulated world is: what happens to messages and how often a component dies.

Invariants
- A plan holds no state; every draw comes from the random source of the caller, so a seed decides everything.
- From `until_s` on the world is calm: no fault of any kind, only the plain latency of a link.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Chances are per message, in [0, 1]; `crashes_per_s` is per component. Times in seconds.

    A late message is `late_s` × [0, 1) later than its link's latency; a reordered one may also overtake or
    be overtaken, where others on the same link keep their order.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    late: float = 0.0
    late_s: float = 0.0
    crashes_per_s: float = 0.0
    down_s: float = 0.0
    until_s: float = 0.0

    @classmethod
    def drawn(cls, random: Random, until_s: float) -> FaultPlan:
        """A plan in which each kind of fault is absent, rare or common: together they find more than all at once."""

        def chance(common: float) -> float:
            return random.choice((0.0, common / 5, common))

        return cls(
            drop=chance(0.2),
            duplicate=chance(0.2),
            reorder=chance(0.5),
            late=chance(0.3),
            late_s=random.choice((0.1, 2.0)),
            crashes_per_s=chance(0.5),
            down_s=random.choice((0.05, 1.0)),
            until_s=until_s,
        )

    def dropped(self, random: Random, now: float) -> bool:
        """Whether a message sent now is lost."""
        return now < self.until_s and random.random() < self.drop

    def duplicated(self, random: Random, now: float) -> bool:
        """Whether a message sent now arrives twice."""
        return now < self.until_s and random.random() < self.duplicate

    def reordered(self, random: Random, now: float) -> bool:
        """Whether a message sent now leaves the order of its link."""
        return now < self.until_s and random.random() < self.reorder

    def lateness_s(self, random: Random, now: float) -> float:
        """Seconds by which a message sent now is later than the latency of its link."""
        if now >= self.until_s or random.random() >= self.late:
            return 0.0
        return self.late_s * random.random()

    def crashes(self, random: Random) -> list[tuple[float, float]]:
        """(time of death, seconds until it is started again) of one component, in order."""
        if self.crashes_per_s <= 0:
            return []
        crashes = []
        at_s = random.expovariate(self.crashes_per_s)
        while at_s < self.until_s:
            down_s = self.down_s * random.random()
            crashes.append((at_s, down_s))
            at_s += down_s + random.expovariate(self.crashes_per_s)
        return crashes
