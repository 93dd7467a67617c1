"""Successive pages of a serving engine become the state on the board, where no probe of ours tells of its steps. Pure.

    figure of the state         from the page
    waiting, unanswered         requests that wait; one that was not there before is taken to have come as early as can
                                be: right after the last look
    running, decoding           requests that run
    next_step_s, step_s         the mean time between a request's tokens since the last look; that of its whole life
                                where it idles, or one slow moment would keep a guest away all night
    first_token_s               the mean time to a first token since the last look: what a request waited is in it, so
                                it errs on the side of the serving engine
    busy_s                      its steps since the last look, each of that length; never more than the time itself

Invariants
- Else what a look does not tell stays as it was told last; what was never told is 0. A figure that makes no sense
  tells nothing.
- An engine that was started anew counts from nought again: whatever has become less since the last look began anew,
  and so did everything beside it.
- A state is as old as the question for its page (`looked_at_s`). Between two looks nothing is seen, and nobody claims
  otherwise: see `slack`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from rose_executor.board_states import ServingState
from rose_executor.serving_page import PageFigures, Sum

_STEP_S_MAX = 3600.0
"""A mean above that is no time that any step takes."""
_NOTHING = Sum(0.0, 0.0)


class ObservedServing:
    """One serving engine, in all its lives."""

    def __init__(self) -> None:
        self.state = ServingState()
        self._before: Mapping[str, Sum] = {}
        self._waiting: deque[float] = deque()

    def saw(self, page: PageFigures, asked_at_s: float) -> ServingState:
        """A page that was asked for at `asked_at_s` of the monotonic clock."""
        before = self.state
        grown = self._grown(page)
        idles = not (page.running or page.waiting or grown["token_s"].count)
        step_s = _mean(page.token_s or _NOTHING, 0.0) if idles else _mean(grown["token_s"], before.next_step_s)
        steps = round(grown["steps"].count)
        since_s = max(0.0, asked_at_s - before.looked_at_s) if before.looked_at_s else 0.0
        self._queue(page.waiting, round(grown["first_token_s"].count), before.looked_at_s or asked_at_s)
        # Without the null block, which is never anybody's.
        blocks = max(0, (page.kv_blocks or 1) - 1) if page.kv_usage is not None else 0
        self.state = before._replace(
            steps=before.steps + steps,
            running=page.running,
            waiting=page.waiting,
            decoding=page.running,
            unanswered=page.waiting,
            oldest_unanswered_at_s=self._waiting[0] if self._waiting else 0.0,
            stepped_at_s=asked_at_s if steps else before.stepped_at_s,
            looked_at_s=asked_at_s,
            step_s=step_s,
            step_tokens=round(grown["steps"].total / steps) if steps else before.step_tokens,
            next_step_s=step_s,
            first_token_s=_mean(grown["first_token_s"], before.first_token_s),
            kv_blocks_used=round((page.kv_usage or 0.0) * blocks),
            kv_blocks_total=blocks,
            busy_s=before.busy_s + min(since_s, steps * step_s),
        )
        return self.state

    def _grown(self, page: PageFigures) -> dict[str, Sum]:
        """What each sum has grown by since the last look, or since its engine began."""
        now = {
            "steps": page.steps or _NOTHING,
            "token_s": page.token_s or _NOTHING,
            "first_token_s": page.first_token_s or _NOTHING,
        }
        before = self._before
        if any(now[name].total < was.total or now[name].count < was.count for name, was in before.items()):
            before = {}
        self._before = now
        return {name: _less(figure, before.get(name, _NOTHING)) for name, figure in now.items()}

    def _queue(self, waiting: int, answered: int, came_at_s: float) -> None:
        """Who waits since when: the oldest are answered first, and whoever is new came after the last look."""
        for _ in range(min(answered, len(self._waiting))):
            self._waiting.popleft()
        while len(self._waiting) > waiting:
            self._waiting.popleft()
        self._waiting.extend([came_at_s] * (waiting - len(self._waiting)))


def _less(now: Sum, before: Sum) -> Sum:
    return Sum(now.total - before.total, now.count - before.count)


def _mean(grown: Sum, otherwise: float) -> float:
    mean = grown.total / grown.count if grown.count else 0.0
    return mean if 0 < mean <= _STEP_S_MAX else otherwise
