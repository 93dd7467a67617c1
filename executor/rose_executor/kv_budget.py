"""From what both engines say on the board to the KV blocks in the guest's quota. Pure.

Serving and guest have blocks of different sizes; what they share is memory. So uses become bytes, `kv_policy` decides
in bytes, and the budget becomes blocks of the guest.

Invariants
- A guest of which nobody knows yet how many blocks it has gets none: its first report changes that.
- An idle guest says nothing, and what it last said of its cache stays: one that is started again is like the one
  before.
- One that is asleep or gone gets none, whatever the budget.
- Serving is taken to hold its whole cache unless it gives memory back, and says so itself: then it holds what it says,
  or what it is about to use if that is more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from rose_executor.board_states import GuestState, ServingKv, ServingState
from rose_executor.guest_presence import Presence
from rose_executor.kv_policy import Cut, KvPolicy, ServingUses, StepBoundary, in_blocks, in_bytes


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """What has become of the budget since the executor started; `turns` are its oscillations.

    `cut_why` is why it was cut last, "" if it never was. `held_bytes` is what the guest last said that it holds: one
    that gives no memory back holds its whole cache. `gives_back` is whether it said that it does, None before it has
    said anything. `unfit` says why the pool can never have room for one request of the guest, "" where it can.
    """

    budget_bytes: int
    held_bytes: int
    frozen: bool
    cuts: int
    grows: int
    turns: int
    cut_why: str
    gives_back: bool | None
    unfit: str = ""


class KvShare(Protocol):
    """What a guest's quota says about memory. `presence` is set by whoever puts the guest to sleep or ends it."""

    presence: Presence

    def blocks(
        self, serving: ServingState | None, serving_kv: ServingKv | None, guest: GuestState | None, now: float
    ) -> int:
        """What the quota is to say at `now` of the monotonic clock; None is what cannot be seen.

        `serving_kv` is None also where serving gives nothing back.
        """
        ...

    def step_ended(self, now: float) -> None:
        """The RL run has ended a step: the guest has come to a new version."""
        ...

    def figures(self, now: float) -> MemoryFigures | None:
        """None where there is no budget that could change."""
        ...

    def need_bytes(self, blocks: int) -> int | None:
        """What so many blocks take, the whole cache at most; None where nobody knows, or no budget could change."""
        ...


class FixedBlocks:
    """A fixed split: the guest has so many blocks whatever serving does, its whole cache as a rule."""

    def __init__(self, blocks: int) -> None:
        self.presence = Presence.ACTIVE
        self._blocks = blocks

    def blocks(
        self, serving: ServingState | None, serving_kv: ServingKv | None, guest: GuestState | None, now: float
    ) -> int:
        return self._blocks if self.presence is Presence.ACTIVE else 0

    def step_ended(self, now: float) -> None:
        """Nothing is planned anew."""

    def figures(self, now: float) -> MemoryFigures | None:
        return None

    def need_bytes(self, blocks: int) -> int | None:
        return None


class KvBudget:
    """One guest beside one serving engine, both in one pool of memory.

    `request_bytes` are what the longest request of the guest takes, 0 where nobody knows.
    """

    def __init__(self, policy: KvPolicy, request_bytes: int = 0) -> None:
        self.presence = Presence.ACTIVE
        self._policy = policy
        self._request_bytes = min(request_bytes, policy.pool.guest_bytes)
        self._serving_gives_back = False
        self._guest_blocks = self._held_blocks = 0
        self._cut_why = ""
        self._gives_back: bool | None = None

    def blocks(
        self, serving: ServingState | None, serving_kv: ServingKv | None, guest: GuestState | None, now: float
    ) -> int:
        self._serving_gives_back = serving_kv is not None
        for change in self._policy.step(ServingUses(self._held(serving, serving_kv)), now):
            if isinstance(change, Cut):
                self._cut_why = change.why
        if guest is not None:
            self._guest_blocks, self._held_blocks = guest.kv_blocks_total, guest.kv_blocks_resident
            self._gives_back = guest.kv_gives_back
        if self.presence is not Presence.ACTIVE:
            return 0
        return in_blocks(self._policy.budget_bytes, self._policy.pool.guest_bytes, self._guest_blocks)

    def step_ended(self, now: float) -> None:
        self._policy.step(StepBoundary(), now)

    def figures(self, now: float) -> MemoryFigures:
        policy = self._policy
        held_bytes = in_bytes(self._held_blocks, self._guest_blocks, policy.pool.guest_bytes)
        frozen = policy.frozen(now)
        return MemoryFigures(
            policy.budget_bytes,
            held_bytes,
            frozen,
            policy.cuts,
            policy.grows,
            policy.turns,
            self._cut_why,
            self._gives_back,
            self._unfit(),
        )

    def _unfit(self) -> str:
        pool = self._policy.pool
        if pool.most_bytes(0) < self._request_bytes:
            return self._too_small(0, "the headroom")
        if self._serving_gives_back or pool.most_bytes(pool.serving_bytes) >= self._request_bytes:
            return ""
        kept = "the headroom and the whole cache of serving, which does not say that it gives memory back"
        words = self._too_small(pool.serving_bytes, kept)
        return f"{words}, or on CPU ROSE_SERVING_KV_SPARE=0.1 at the serving engine"

    def _too_small(self, serving_bytes: int, kept: str) -> str:
        pool = self._policy.pool
        least_bytes = (serving_bytes + self._request_bytes) / (1 - pool.headroom)
        least_gib = math.ceil(least_bytes / 2**30 * 100) / 100
        return (
            f"{pool.most_bytes(serving_bytes) / 2**20:.1f} MiB of the pool are left beside {kept}, and one request of "
            f"the guest takes {self._request_bytes / 2**20:.1f}: set memory.pool_gib to {least_gib:g} or more"
        )

    def need_bytes(self, blocks: int) -> int | None:
        if not self._guest_blocks:
            return None
        return in_bytes(min(blocks, self._guest_blocks), self._guest_blocks, self._policy.pool.guest_bytes)

    def _held(self, serving: ServingState | None, serving_kv: ServingKv | None) -> int | None:
        """The memory that serving holds, or is about to: its use is told sooner than the pages behind it."""
        if serving is None:
            return None
        if serving_kv is None:
            return self._policy.pool.serving_bytes
        used_bytes = in_bytes(serving.kv_blocks_used, serving.kv_blocks_total, serving_kv.total_bytes)
        return max(serving_kv.resident_bytes, min(serving_kv.total_bytes, used_bytes + serving_kv.spare_bytes))
