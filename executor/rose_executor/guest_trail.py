"""A guest's steps, written down for whoever measures it: what it knew as it planned each, and what that did cost.

Invariants
- Without a file nothing is kept.
- Steps end in the order in which they were planned.
- A file that cannot be written any more costs what would have come after, and nothing else: a guest is there to work.
"""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path

from rose_executor.step_log import Plan, SeenStep, StepLogWriter
from rose_executor.step_shape import StepShape

_log = logging.getLogger("vllm.rose")


class GuestTrail:
    """Writes to `path`, if there is one. Raises OSError if that cannot be begun."""

    def __init__(self, path: Path | None) -> None:
        self._log = None if path is None else StepLogWriter(path)
        self._plans: deque[Plan] = deque()

    def planned(self, at_s: float, arrivals: int, kv_blocks_used: int, kv_blocks: int) -> None:
        """A step that computes something begins; see `Plan`."""
        if self._log is not None:
            self._plans.append(Plan(at_s, arrivals, kv_blocks_used, kv_blocks))

    def ended(self, shape: StepShape, seconds: float) -> None:
        """The oldest that has begun is over."""
        if self._log is None:
            return
        try:
            self._log.write(SeenStep(shape, seconds, self._plans.popleft()))
        except OSError as error:
            _log.warning("the guest's steps are written down no more: %s", error)
            self._log = None
