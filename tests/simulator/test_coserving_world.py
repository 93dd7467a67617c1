"""The whole system holds in virtual time, over 2,000 seeds, and each part of the seeds reaches every corner."""

from __future__ import annotations

from collections import Counter

import pytest

from rose.ledger import Account
from rose.records import Outcome
from rose.simulator.coserving_world import CoservingWorld

PART = 500
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_the_whole_system_holds_and_every_corner_is_reached(part: int) -> None:
    outcomes: Counter[Outcome] = Counter()
    tokens: Counter[Account] = Counter()
    reached: Counter[str] = Counter()
    for seed in range(part * PART, (part + 1) * PART):
        world = CoservingWorld(seed)
        world.run()
        outcomes.update(world.training.outcomes)
        tokens.update(world.ledger.accounts())
        reached.update(_reached(world))
    assert set(outcomes) == set(Outcome)
    assert outcomes[Outcome.COMPLETED] > 0.5 * outcomes.total()
    assert tokens.pop(Account.IN_FLIGHT) == 0
    assert min(tokens.values()) > 0
    assert set(tokens) == set(Account) - {Account.IN_FLIGHT}
    assert [what for what, often in reached.items() if not often] == []


def _reached(world: CoservingWorld) -> dict[str, int]:
    """How often each fault, and what is done about it, came about in one run."""
    return {
        "tokens of the guest": world.guest_tokens,
        "resumed turns": sum(player.resumed for player in world.training.players),
        "turns that avoided where they were lost": sum(player.avoided for player in world.training.players),
        "serving's requests": world.serving.served,
        "second lives of the scheduler": world.host.lives - 1,
        "leases over by themselves": world.host.lapsed,
        "second lives of the executor": world.executor.lives - 1,
        "guests frozen": world.executor.freezes,
        "guests replaced": max(0, world.executor.guests - world.executor.lives),
        "transfers cut": world.executor.cut,
        "versions skipped": world.executor.skipped,
        "engines given up": len(world.fleet.given_up),
        "alarms": world.training.alarms,
        "counts nobody could tell": world.training.uncounted,
    }
