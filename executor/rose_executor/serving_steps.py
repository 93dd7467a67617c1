"""A serving engine's steps and arrivals become the state on the board. Pure.

Invariants
- A step's duration is known only where it followed another with work left over, so that the two reports are one step
  apart, or where a request was seen to arrive at the idle engine. Else the last known duration stays.
- Requests are taken to get their first tokens in the order in which they came, since nobody tells whose came.
- A request that nobody saw arrive is seen after the step that took it in, and counts from then; one that was seen,
  from its arrival.
- What is expected of a step is learnt from the steps seen, those beside a guest included: that errs on the side of
  the serving engine.
"""

from __future__ import annotations

import math
from collections import deque

from rose_executor.board_states import ServingState
from rose_executor.step_profile import StepProfile
from rose_executor.step_sampling import StepSampling
from rose_executor.step_shape import StepShape

_CONTEXT_TOKENS = 1024
"""A context that has grown by less makes no step longer that matters."""
_PROMPT_FADES = 0.98
"""Of the longest recent prompt, with each later one: the last fifty or so decide."""


class ServingSteps:
    """Counts from `now_s` of the monotonic clock; the engine's KV cache is `kv_blocks_total` of `block_tokens` each.

    `profile` is what its steps are known to cost, if that is known.
    """

    def __init__(
        self, kv_blocks_total: int, now_s: float, block_tokens: int = 16, profile: StepProfile | None = None
    ) -> None:
        self.state = ServingState(stepped_at_s=now_s, kv_blocks_total=kv_blocks_total)
        self._block_tokens = block_tokens
        self._profile = StepProfile() if profile is None else profile
        self._sampling = StepSampling()
        self._expectations = (0.0, 0.0)
        self._expected_of: tuple[int, ...] = ()
        self._prompt_tokens = 0.0
        self._arrived: dict[int, float] = {}
        self._unseen: deque[float] = deque()
        self._answered = self._left_early = 0

    def arrived(self, request: int, now_s: float) -> ServingState:
        """A request is there, under a number of its own; the engine has not taken it in yet."""
        self._arrived[request] = now_s
        return self._told(came=1)

    def left(self, request: int) -> ServingState:
        """It is over, however it ended."""
        if self._arrived.pop(request, None) is not None:
            # Perhaps with all its tokens, before the report of the step in which it got the first of them.
            self._left_early += 1
            return self._told()
        return self.state

    def stepped(
        self,
        *,
        running: int,
        waiting: int,
        kv_usage: float,
        tokens: int,
        prompt_tokens: int,
        first_tokens: int,
        finished: int,
        now_s: float,
    ) -> ServingState:
        """The engine has finished a step and left so many requests; `kv_usage` is a share of all blocks.

        `tokens` were computed, `prompt_tokens` of them read; `first_tokens` and `finished` are requests that got their
        first token in it, or ended.
        """
        before = self.state
        since_s = now_s - before.stepped_at_s
        began_s = (
            before.stepped_at_s if before.running + before.waiting > 0 else next(iter(self._arrived.values()), None)
        )
        step_s = before.step_s if began_s is None else now_s - began_s
        if began_s is not None and self._sampling.takes(self._profile.steps, step_s):
            context_tokens = before.kv_blocks_used * self._block_tokens
            self._profile.saw(StepShape(tokens, max(1, running + finished), context_tokens), step_s, now_s)
        self._read(prompt_tokens, first_tokens)
        self._answer(running + waiting, first_tokens, finished, now_s)
        kv_blocks_used = round(kv_usage * before.kv_blocks_total)
        count, oldest_s = self._owed()
        first_token_s, next_step_s = self._expected(count, kv_blocks_used)
        # Made at once, because it is the dearest part of a step's report.
        self.state = ServingState(
            steps=before.steps + 1,
            arrivals=before.arrivals,
            running=running,
            waiting=waiting,
            decoding=self._answered,
            unanswered=count,
            oldest_unanswered_at_s=oldest_s,
            stepped_at_s=now_s,
            step_s=step_s,
            step_tokens=tokens,
            next_step_s=next_step_s,
            first_token_s=first_token_s,
            kv_blocks_used=kv_blocks_used,
            kv_blocks_total=before.kv_blocks_total,
            busy_s=before.busy_s + min(step_s, since_s),
        )
        return self.state

    def _read(self, prompt_tokens: int, first_tokens: int) -> None:
        if first_tokens:
            self._prompt_tokens = max(prompt_tokens / first_tokens, self._prompt_tokens * _PROMPT_FADES)

    def _answer(self, present: int, first_tokens: int, finished: int, now_s: float) -> None:
        """Keep the books of who has its first token: `_answered` of those present, and the oldest that have none."""
        self._answered = max(0, min(present, self._answered + first_tokens - finished))
        for _ in range(min(first_tokens - self._left_early, len(self._arrived))):
            del self._arrived[next(iter(self._arrived))]
        self._left_early = 0
        unanswered = present - self._answered
        for _ in range(min(first_tokens, len(self._unseen))):
            self._unseen.popleft()
        while len(self._unseen) > unanswered:
            self._unseen.popleft()
        while len(self._unseen) < unanswered:
            self._unseen.append(now_s)

    def _told(self, came: int = 0) -> ServingState:
        """The state between two steps, as the books say now."""
        count, oldest_s = self._owed()
        first_token_s, next_step_s = self._expected(count, self.state.kv_blocks_used)
        self.state = self.state._replace(
            arrivals=self.state.arrivals + came,
            unanswered=count,
            oldest_unanswered_at_s=oldest_s,
            first_token_s=first_token_s,
            next_step_s=next_step_s,
        )
        return self.state

    def _owed(self) -> tuple[int, float]:
        """How many are unanswered, and since when the oldest: whoever knows of more, or an older one, is believed."""
        count = max(len(self._arrived), len(self._unseen))
        oldest_s = min(next(iter(self._arrived.values()), math.inf), next(iter(self._unseen), math.inf))
        return count, oldest_s if count else 0.0

    def _expected(self, unanswered: int, kv_blocks_used: int) -> tuple[float, float]:
        """What a first token and the next step are expected to take: asked of the profile when much has changed."""
        prompt = round(self._prompt_tokens)
        behind = kv_blocks_used * self._block_tokens
        of = (self._profile.steps, prompt, self._answered, min(1, unanswered), behind // _CONTEXT_TOKENS)
        if of != self._expected_of:
            tokens, seqs = self._answered + (prompt if unanswered else 0), self._answered + min(1, unanswered)
            first_token_s = self._seconds(StepShape(prompt, 1, behind))
            self._expectations = first_token_s, self._seconds(StepShape(tokens, seqs, behind))
            self._expected_of = of
        return self._expectations

    def _seconds(self, shape: StepShape) -> float:
        return self._profile.seconds(shape) if shape.tokens else 0.0
