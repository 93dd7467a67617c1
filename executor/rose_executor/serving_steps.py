"""A serving engine's steps, as a stat logger hears of them, become the state on the board. Pure.

Invariants
- A step's duration is known only where it followed another with work left over: then the two reports are one step
  apart. After a pause the last known duration stays.
- Waiting requests are taken to leave in the order in which they came; how long the oldest waits is never told too
  long by more than a step, whoever was preempted in between.
"""

from __future__ import annotations

from collections import deque

from rose_executor.board_states import ServingState


class ServingSteps:
    """Counts from `now_s` of the monotonic clock; `kv_blocks_total` is the engine's whole KV cache."""

    def __init__(self, kv_blocks_total: int, now_s: float) -> None:
        self.state = ServingState(0, 0, 0, 0.0, now_s, 0.0, 0, 0, kv_blocks_total, 0.0)
        self._waiting_since_s: deque[float] = deque()

    def stepped(self, *, running: int, waiting: int, kv_usage: float, tokens: int, now_s: float) -> ServingState:
        """The engine has finished a step and left so many requests; `kv_usage` is a share of all blocks."""
        before = self.state
        busy = before.running + before.waiting > 0
        since_s = now_s - before.stepped_at_s
        step_s = since_s if busy else before.step_s
        self.state = ServingState(
            steps=before.steps + 1,
            running=running,
            waiting=waiting,
            oldest_waiting_at_s=self._oldest(waiting, now_s),
            stepped_at_s=now_s,
            step_s=step_s,
            step_tokens=tokens,
            kv_blocks_used=round(kv_usage * before.kv_blocks_total),
            kv_blocks_total=before.kv_blocks_total,
            busy_s=before.busy_s + min(step_s, since_s),
        )
        return self.state

    def _oldest(self, waiting: int, now_s: float) -> float:
        while len(self._waiting_since_s) > waiting:
            self._waiting_since_s.popleft()
        while len(self._waiting_since_s) < waiting:
            self._waiting_since_s.append(now_s)
        return self._waiting_since_s[0] if self._waiting_since_s else 0.0
