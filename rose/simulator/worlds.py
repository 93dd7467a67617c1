"""The worlds there are, by the name that the command line and a replay command use."""

from __future__ import annotations

from collections.abc import Callable

from rose.simulator.coserving_world import CoservingWorld
from rose.simulator.distribution_world import DistributionWorld
from rose.simulator.ledger_world import LedgerWorld
from rose.simulator.link_world import LinkWorld
from rose.simulator.relay_world import RelayWorld
from rose.simulator.version_world import VersionWorld
from rose.simulator.world import World

WORLDS: dict[str, Callable[[int], World]] = {
    "ledger": LedgerWorld,
    "versions": VersionWorld,
    "links": LinkWorld,
    "distribution": DistributionWorld,
    "relay": RelayWorld,
    "coserving": CoservingWorld,
}
