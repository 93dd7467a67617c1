"""Random engines, askers, silence, repeats and restarts: what holds whatever happens."""

from __future__ import annotations

from collections import Counter

from placement_world import runs

SEEDS = 1000


def test_no_promise_is_broken_in_any_of_a_thousand_worlds() -> None:
    seen: Counter[str] = Counter()
    for world in runs(SEEDS):
        seen.update(world.counts)
    # The worlds are of use only if all of this happens in them, and often.
    assert min(seen.values()) > SEEDS / 4, seen
    assert seen["granted"] > 10 * SEEDS
