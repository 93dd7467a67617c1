"""What a quota from the board comes to in one engine, and when its requests starve. Pure.

Invariants
- A quota never gives more than the engine has without one, whatever stands on the board; a negative figure is 0.
- Without a quota that can be trusted the gate is shut, and running requests keep the blocks that they have.
- Requests that no step takes although the gate is open are called starved within `STARVED_AFTER_S`.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose_executor.board_states import Quota

STARVED_AFTER_S = 0.5
_LEAST_INTERFERENCE = 0.01


def within(quota: Quota, limits: Quota) -> Quota:
    """The quota as far as an engine with these limits of its own can follow it."""

    def between(figure: int, most: int) -> int:
        return max(0, min(figure, most))

    return quota._replace(
        kv_blocks=between(quota.kv_blocks, limits.kv_blocks),
        tokens_per_step=between(quota.tokens_per_step, limits.tokens_per_step),
        active_seqs=between(quota.active_seqs, limits.active_seqs),
        gate_open=quota.gate_open and limits.gate_open,
        ttft_s=max(0.0, quota.ttft_s),
        tpot_s=max(0.0, quota.tpot_s),
        interference=min(1.0, max(_LEAST_INTERFERENCE, quota.interference)),
        move_after_s=max(0.0, quota.move_after_s),
    )


def shut(quota: Quota) -> Quota:
    """The same with the gate shut."""
    return quota._replace(gate_open=False)


def computes(quota: Quota) -> bool:
    """Whether a step may compute anything at all; where not, nobody starves: it is meant so."""
    return quota.gate_open and quota.tokens_per_step > 0 and quota.active_seqs > 0


@dataclass(slots=True)
class StarvedWatch:
    """Notices requests that get nothing.

    `since_s` is when they began to, once they are starved, and 0 while none are; `count` how often that began.
    """

    since_s: float = 0.0
    count: int = 0
    _unserved_s: float | None = None

    def stepped(self, *, wanted: bool, allowed: bool, scheduled_tokens: int, now_s: float) -> None:
        """One step: were there requests, might anything be computed, and how much was."""
        if not wanted or not allowed or scheduled_tokens:
            self._unserved_s, self.since_s = None, 0.0
            return
        if self._unserved_s is None:
            self._unserved_s = now_s
        if not self.since_s and now_s - self._unserved_s >= STARVED_AFTER_S:
            self.since_s = self._unserved_s
            self.count += 1
