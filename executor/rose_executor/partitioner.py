"""How a guest and a serving engine share processor cores: one interface, and the choice of what this machine has.

Invariants
- The serving engine is pinned at most; it is never put into a group of ours, so nothing of ours can hold it back.
- The normal state lets the guest have what serving leaves; freezing is the brake for an emergency.
- What is chosen says its name and what it costs. It never pretends to be more.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from rose.cgroup import own_groups
from rose.errors import ClusterError
from rose_executor.partition_groups import GroupPartitioner, v1_groups, v2_groups
from rose_executor.partition_terms import Partition, Role
from rose_executor.partition_threads import ThreadPartitioner

__all__ = ["Partition", "Partitioner", "Role", "pick_partitioner"]


class Partitioner(Protocol):
    """One serving engine and one guest on the same cores."""

    def place(self, pid: int, role: Role) -> None:
        """Put a process with all its threads and descendants where its role belongs.

        What they start later follows them. Raises ClusterError if the kernel refuses.
        """
        ...

    def freeze(self) -> None:
        """Stop every process of the guest, those that it starts meanwhile included. Raises ClusterError."""
        ...

    def thaw(self) -> None:
        """Let them go on. Raises ClusterError."""
        ...

    def describe(self) -> Partition: ...

    def close(self) -> None:
        """Remove what was made. What a guest that still runs holds stays, and the next start removes it."""
        ...


def pick_partitioner(cores: Collection[int] = (), root: Path = Path("/")) -> Partitioner:
    """The strongest that works here, both engines pinned to `cores`, or to none where that is empty.

    What an executor left that is gone is removed first. Raises ClusterError if there are no such cores.
    """
    groups = own_groups(root)
    refusals = []
    for found in (v2_groups(groups), v1_groups(groups)):
        if found is None:
            continue
        try:
            return GroupPartitioner(found, cores)
        except ClusterError as error:
            refusals.append(error.what)
    return ThreadPartitioner(cores, "; ".join(refusals) or "no control group with a processor controller")
