"""Which engine keeps whose prefix, and which of these nobody will ask for again. Pure.

Invariants
- A trajectory's prefix counts as kept where its last turn was sent; where it was before that, it is to be forgotten.
- Bounded: of each incarnation the newest `NAMES_MAX` are told, of `INCARNATIONS_MAX` of them; what is not told any more
  is forgotten by the engine itself, in time.
"""

from __future__ import annotations

from collections import OrderedDict, deque

NAMES_MAX = 256
INCARNATIONS_MAX = 64


class LeftBehind:
    """Of the trajectories of one run."""

    def __init__(self) -> None:
        self._kept_on: dict[str, str] = {}
        self._to_forget: OrderedDict[str, deque[str]] = OrderedDict()

    def on(self, incarnation: str, trajectory_id: str) -> tuple[str, ...]:
        """A turn is sent there, and its prefix is kept ("" for nobody's). Returns whose that engine is to forget."""
        if trajectory_id:
            before = self._kept_on.get(trajectory_id)
            if before is not None and before != incarnation:
                self._forget(before, trajectory_id)
            self._kept_on[trajectory_id] = incarnation
        return tuple(name for name in self._to_forget.pop(incarnation, ()) if name != trajectory_id)

    def over(self, trajectory_id: str) -> None:
        """It takes no more turns."""
        incarnation = self._kept_on.pop(trajectory_id, None)
        if incarnation is not None:
            self._forget(incarnation, trajectory_id)

    def _forget(self, incarnation: str, trajectory_id: str) -> None:
        self._to_forget.setdefault(incarnation, deque(maxlen=NAMES_MAX)).append(trajectory_id)
        self._to_forget.move_to_end(incarnation)
        if len(self._to_forget) > INCARNATIONS_MAX:
            self._to_forget.popitem(last=False)
