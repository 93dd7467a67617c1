"""What a world is: built from a seed, run once, checked at every happening.

Invariants
- A world drives the product's own core, never a model of it; only what surrounds the core is simulated.
- What a world checks against comes from its own books, never from the core.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from rose.errors import ContractError


class World(Protocol):
    """One seeded run."""

    def run(self) -> None:
        """Run until all is quiet. Raises rose.driver.virtual.SimulationFailed if an invariant does not hold."""
        ...

    def trace(self) -> Iterator[str]:
        """Lines of everything that happened."""
        ...

    def fingerprint(self) -> str:
        """Hash of the trace."""
        ...


@contextlib.contextmanager
def world_folder() -> Iterator[Path]:
    """A folder for a world's disks, in memory where there is room for one; gone with the world."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="rose-world-", dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


def must(holds: bool, what: str, seen: object) -> None:
    """Raise ContractError, naming `what` is wrong and what was `seen`, unless it holds."""
    if not holds:
        raise ContractError(f"{what}: {seen}")
