"""One rank of an engine, and how to be it for a while without its peers.

vLLM's layers ask module-level groups for sizes and ranks while a model is built. `emulated` puts stand-ins
there that know numbers only: no process group, no socket, no device. Whatever asks them for more fails at
once, by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rose.errors import TransferError


@dataclass(frozen=True, slots=True)
class EngineRank:
    """A place in an engine of `pp_size` stages of `tp_size` ranks.

    With `expert_parallel` each rank of a stage owns whole experts instead of slices of all.
    Raises TransferError if the place does not exist.
    """

    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        if not (0 <= self.tp_rank < self.tp_size and 0 <= self.pp_rank < self.pp_size):
            raise TransferError(f"there is no {self}", expected="ranks from 0 to below their sizes")

    def __str__(self) -> str:
        experts = ", expert parallel" if self.expert_parallel else ""
        return f"tp {self.tp_rank}/{self.tp_size} pp {self.pp_rank}/{self.pp_size}{experts}"


class _Members:
    """What is asked of a torch process group while a model is built."""

    def __init__(self, size: int, rank: int) -> None:
        self._size = size
        self._rank = rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class _StandIn:
    """The numbers of a vLLM `GroupCoordinator`; ranks count within the group."""

    def __init__(self, name: str, size: int = 1, rank: int = 0) -> None:
        self.unique_name = f"emulated {name}"
        self.ranks = list(range(size))
        self.world_size = size
        self.rank = self.rank_in_group = self.local_rank = rank
        self.first_rank, self.last_rank = 0, size - 1
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.device_group = self.cpu_group = _Members(size, rank)


@contextmanager
def emulated(rank: EngineRank) -> Iterator[None]:
    """Let this process be `rank` of an engine as far as building and loading a model can tell."""
    from vllm.distributed import parallel_state

    place = rank.pp_rank * rank.tp_size + rank.tp_rank
    groups = {
        "_WORLD": _StandIn("world", rank.tp_size * rank.pp_size, place),
        "_TP": _StandIn("tp", rank.tp_size, rank.tp_rank),
        "_EP": _StandIn("ep", rank.tp_size, rank.tp_rank),
        "_PP": _StandIn("pp", rank.pp_size, rank.pp_rank),
        "_DP": _StandIn("dp"),
        "_DCP": _StandIn("dcp"),
        "_PCP": _StandIn("pcp"),
    }
    before = {name: getattr(parallel_state, name) for name in groups}
    try:
        for name, group in groups.items():
            setattr(parallel_state, name, group)
        yield
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)
