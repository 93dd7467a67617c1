"""Who computes where in the demo.

Invariants
- The serving engine and its guest have one core, everything else has the others.
- Beside the load client runs only what gives way to it: it must measure the engine, never its own neighbours.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rose.errors import ClusterError
from rose_executor.partition_terms import Role
from rose_executor.partition_threads import ThreadPartitioner
from rose_executor.partitioner import Partition, pick_partitioner


@dataclass(frozen=True, slots=True)
class Cores:
    """`serving` has one core, `others` at least one."""

    serving: frozenset[int]
    others: frozenset[int]


def split_cores(usable: Collection[int]) -> Cores:
    """The first core to serving, the rest to everything else. Raises ClusterError if there is but one."""
    first, *others = sorted(usable)
    if not others:
        raise ClusterError(
            "one core is too few for a serving engine beside a trainer",
            expected="two cores or more",
            to_do="run it where this process may use two (taskset, docker --cpus), or train alone: rose run JOB.toml",
        )
    return Cores(frozenset({first}), frozenset(others))


class Placing:
    """Puts processes where they belong. `yields` is False where nothing has to give way to the load client.

    Control groups are inherited by whatever a process starts. Where there are none, the kernel's idle class is.
    """

    def __init__(self, cores: Cores, *, yields: bool = True) -> None:
        """Raises ClusterError if the kernel refuses what it said it has."""
        self.cores = cores
        self._on_serving = ThreadPartitioner(cores.serving, "")
        self._on_others = ThreadPartitioner(cores.others, "")
        self._behind = pick_partitioner(cores.others) if yields else None

    def describe(self) -> Partition | None:
        """By what the load client is protected; None if by nothing."""
        return None if self._behind is None else self._behind.describe()

    def with_serving(self, pid: int) -> None:
        """On the serving engine's core, at no one's cost but its neighbours'. Raises ClusterError."""
        self._on_serving.place(pid, Role.SERVING)

    def with_load(self, pid: int) -> None:
        """On the other cores. Raises ClusterError."""
        self._on_others.place(pid, Role.SERVING)

    def behind_load(self, pid: int) -> None:
        """On the other cores, when the load client does not want them. Raises ClusterError."""
        if self._behind is None:
            self.with_load(pid)
        else:
            self._behind.place(pid, Role.GUEST)

    def close(self) -> None:
        """After what was placed has ended."""
        if self._behind is not None:
            self._behind.close()
