"""Which requests of a guest are given back, because the quota keeps them from computing. Pure.

    request                                                              it is
    computed something in the last `move_after_s`                        kept
    did not, and the quota let none compute, or had set it back          given back, with its tokens
    did not, though the quota let others compute                         kept: it waits its turn
    is to be set back for the `SET_BACKS_MAX` + 1st time                 given back instead

Invariants
- Nobody is set back for ever: each time costs a whole context, and after some of them another engine is cheaper.
- Nothing is remembered of a request that is gone.
"""

from __future__ import annotations

from collections.abc import Collection

SET_BACKS_MAX = 3


class Stalled:
    """The requests of one engine, by id. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._progressed_at_s: dict[str, float] = {}
        self._set_backs: dict[str, int] = {}
        self._fed: set[str] = set()
        self._open_at_s = 0.0

    def may_set_back(self, request_id: str) -> bool:
        """Whether setting it back once more is still cheaper than giving it back."""
        return self._set_backs.get(request_id, 0) < SET_BACKS_MAX

    def set_back(self, request_id: str) -> None:
        self._set_backs[request_id] = self._set_backs.get(request_id, 0) + 1
        self._fed.discard(request_id)

    def stepped(self, computed: Collection[str], *, now_s: float) -> None:
        """A step was planned, in which these compute something."""
        if computed:
            self._progressed_at_s.update(dict.fromkeys(computed, now_s))
            self._fed.update(computed)
            self._open_at_s = now_s

    def due(self, present: Collection[str], move_after_s: float, now_s: float) -> list[str]:
        """Which of the requests that are there are given back now; 0 seconds: none ever."""
        self._forget_all_but(present)
        overdue = []
        for request_id in present:
            since_s = self._progressed_at_s.setdefault(request_id, now_s)
            if not move_after_s or now_s - since_s < move_after_s:
                continue
            none_computes = now_s - self._open_at_s >= move_after_s
            if none_computes or (request_id in self._set_backs and request_id not in self._fed):
                overdue.append(request_id)
        return overdue

    def _forget_all_but(self, present: Collection[str]) -> None:
        for request_id in [known for known in self._progressed_at_s if known not in present]:
            del self._progressed_at_s[request_id]
            self._set_backs.pop(request_id, None)
            self._fed.discard(request_id)
