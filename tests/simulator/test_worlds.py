"""The product's cores hold in their worlds, the worlds do reach every corner, and a seed replays exactly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from rose.ledger import Account
from rose.simulator.ledger_world import LedgerWorld
from rose.simulator.relay_world import RelayWorld
from rose.simulator.version_world import VersionWorld
from rose.simulator.worlds import WORLDS
from rose.versions import EnginePhase, VersionState

SEEDS = range(400)
REPLAYED = {"distribution": 4, "relay": 4}
"""Seeds, 20 where nothing is said: a world with real folders takes ten times as long as others."""


def test_ledger_holds_and_every_account_is_reached() -> None:
    tokens: Counter[Account] = Counter()
    for seed in SEEDS:
        world = LedgerWorld(seed)
        world.run()
        tokens.update(world.ledger.accounts())
    assert tokens.pop(Account.IN_FLIGHT) == 0
    assert set(tokens) == set(Account) - {Account.IN_FLIGHT}
    assert min(tokens.values()) > 0


def test_versions_hold_and_every_phase_and_action_is_reached() -> None:
    phases: set[EnginePhase | None] = set()
    actions: Counter[str] = Counter()

    class Watched(VersionState):
        def step(self, event, now):  # type: ignore[no-untyped-def]
            asked = super().step(event, now)
            actions.update(type(action).__name__ for action in asked)
            phases.update(self.phase(f"engine-{n}") for n in range(4))
            return asked

    for seed in SEEDS:
        VersionWorld(seed, Watched(keep=2)).run()
    assert phases == {*EnginePhase, None}
    assert min(actions[name] for name in ("Stage", "Commit", "Replace", "Retire")) > 50


def test_relays_hold_whatever_happens_and_most_of_what_is_asked_for_can_be_had() -> None:
    jumps = refused = 0
    for seed in range(10, 16):
        world = RelayWorld(seed)
        world.run()
        jumps, refused = jumps + world.jumps, refused + world.refused
    assert jumps > 4 * refused


@pytest.mark.parametrize("name", WORLDS)
def test_a_seed_replays_exactly(name: str) -> None:
    for seed in range(REPLAYED.get(name, 20)):
        first, second = WORLDS[name](seed), WORLDS[name](seed)
        first.run()
        second.run()
        assert list(first.trace()) == list(second.trace())
        assert first.fingerprint() == second.fingerprint()


@pytest.mark.parametrize("name", WORLDS)
def test_seeds_differ(name: str) -> None:
    prints = set()
    seeds = REPLAYED.get(name, 20)
    for seed in range(seeds):
        world = WORLDS[name](seed)
        world.run()
        prints.add(world.fingerprint())
    assert len(prints) == seeds


@pytest.mark.parametrize("name", WORLDS)
def test_another_process_with_another_hash_seed_sees_the_same_trace(name: str) -> None:
    world = WORLDS[name](7)
    world.run()
    replay = subprocess.run(
        [sys.executable, "-m", "rose.simulator", name, "--seed", "7"],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert replay.stdout.splitlines() == [
        *"\n".join(world.trace()).splitlines(),
        f"{name}, seed 7: trace {world.fingerprint()}",
    ]
