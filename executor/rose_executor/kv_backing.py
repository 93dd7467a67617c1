"""What gives the memory of a guest's keys and values back: one interface, and the choice of what this engine has.

    pool of the engine's scheduler      memory on      backing
    kvcached's `ElasticBlockPool`       GPU            `kvcached`: its limit follows the quota
    vLLM's `BlockPool`                  CPU            `madvise`: pages of free blocks go back to the kernel
    anything else                                      `fixed split`: named so, and nothing goes back

Invariants
- Whatever the backing, the quota is kept in the step that takes it: how many blocks may be *used* is the scheduler's
  own matter. A backing decides only how much *memory* stands behind the blocks that are not used.
- What is chosen says its name and what it costs, in the engine's log. It never pretends to be more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

Tell = Callable[..., list[Any]]
"""`EngineCore.collective_rpc`: runs a function in every worker, and returns what each says."""


@dataclass(frozen=True, slots=True)
class Backing:
    """A backing's `name`, what `goes_back` and when, and what it `costs`."""

    name: str
    goes_back: str
    costs: str

    @classmethod
    def fixed(cls, why: str) -> Backing:
        return cls(
            "fixed split",
            f"nothing: {why}",
            "the whole cache stays the guest's: serving has what is left, and a cut frees blocks but no memory",
        )

    def words(self) -> dict[str, str]:
        return asdict(self)


class KvBacking(Protocol):
    """Of one block pool. All calls come from the thread that schedules."""

    off: str
    """Why nothing goes back, "" while it does."""

    def attach(self, tell: Tell) -> None:
        """The engine has loaded; no step is under way. Nothing goes back before."""
        ...

    def describe(self) -> Backing: ...

    @property
    def holds(self) -> bool:
        """Whether there is memory that could go back if nothing were used."""
        ...

    @property
    def resident_blocks(self) -> int:
        """How many blocks there is memory behind, at most: all of them where nothing goes back."""
        ...

    def free_blocks(self) -> int:
        """Blocks that nobody uses."""
        ...

    def available_blocks(self) -> int:
        """Those of them that the pool can hand out now."""
        ...

    def settled(self, resident_max: int) -> bool:
        """Whether nothing is left to do for at most so many blocks to have memory, and those in use."""
        ...

    def keep_within(self, resident_max: int) -> None:
        """At the top of a step: do a bounded part of that."""
        ...

    def scheduled(self) -> None:
        """A step that computes something was scheduled."""
        ...

    def ended(self) -> None:
        """The oldest of those is over."""
        ...


def pick_kv_backing(pool: Any) -> KvBacking:
    """What fits this pool; whether it works is known once it is attached."""
    if type(pool).__name__ == "ElasticBlockPool":
        from kvcached.control import set_instance_memory_limit

        from rose_executor.kv_kvcached import KvcachedPages

        return KvcachedPages(pool, set_instance_memory_limit)
    from rose_executor.kv_pages import KvPages

    return KvPages(pool)
