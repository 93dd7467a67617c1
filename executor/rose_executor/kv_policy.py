"""How many bytes of keys and values a guest may hold beside a serving engine: watermark, cut, freeze. Pure.

One *pool* of memory is for both engines' keys and values. Part of it, the *headroom*, is left free when the guest's
budget is planned: it takes the first of a burst while the guest gives its pages back. The *watermark* is how far into
the headroom serving may come.

    event                                           budget
    serving used + budget beyond the watermark      CUT: halved, as often as it takes; FREEZE for freeze_s
    a step of the RL run ends                       the freeze ends; planned anew
    a freeze ends, or a plan is freeze_s old        planned anew
    serving unknown                                 never grows; from unknown_s on no more than serving can never need
    anything else                                   as it was

A plan is what the headroom leaves beside the *peak* of serving's use in the last `window_s`. It only lets the budget
grow; less comes by cuts alone. So a burst that was seen once cannot cut what was planned while it is remembered,
however often it comes again: the budget does not swing with serving's use.

Invariants
- After each look the budget and what serving was seen to use are beyond the watermark together only if the budget is 0.
- The budget never grows while frozen, nor while serving is unknown, and never beyond the guest's own cache.
- It follows: serving and guest together never hold more than the pool, as long as serving's use grows by no more than
  `reserve_bytes` from one look until the guest has followed the next: two looks apart (the age of what serving said
  included), the guest's step under way, and giving the pages back. A serving engine that grows faster than that, or
  whose cache is larger than the pool, is not promised anything.

Source of the three states: ROSE's burst handling; planning from a peak and cutting to what fits at once are ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rose.errors import ConfigError

_PEAKS = 32
"""The window of the peak has so many spans: what is remembered is bounded, and forgotten a span at a time."""


@dataclass(frozen=True, slots=True)
class KvPool:
    """The memory that is shared out. `serving_bytes` and `guest_bytes` are the engines' whole caches.

    `headroom` is a share of the pool, `watermark` a share of the headroom.
    """

    pool_bytes: int
    serving_bytes: int
    guest_bytes: int
    headroom: float = 0.2
    watermark: float = 0.5
    freeze_s: float = 30.0
    window_s: float = 60.0
    unknown_s: float = 1.0

    def __post_init__(self) -> None:
        shares = 0 < self.headroom < 1 and 0 < self.watermark < 1
        if not shares or min(self.pool_bytes, self.serving_bytes, self.guest_bytes, self.window_s) <= 0:
            raise ConfigError(
                f"no memory can be shared out by {self}",
                expected="sizes above 0, headroom and watermark between 0 and 1",
            )
        if min(self.freeze_s, self.unknown_s) < 0:
            raise ConfigError(f"no time is below 0: {self}")

    @property
    def headroom_bytes(self) -> int:
        return round(self.headroom * self.pool_bytes)

    @property
    def reserve_bytes(self) -> int:
        """What lies between watermark and pool: for serving to grow into while a cut is carried out."""
        return self.headroom_bytes - round(self.watermark * self.headroom_bytes)

    def most_bytes(self, serving_bytes: int) -> int:
        """The most that is ever planned while serving holds so much."""
        return min(self.guest_bytes, max(0, self.pool_bytes - self.headroom_bytes - serving_bytes))

    @property
    def sure_bytes(self) -> int:
        """What serving can never need."""
        return min(self.guest_bytes, max(0, self.pool_bytes - self.serving_bytes))


@dataclass(frozen=True, slots=True)
class ServingUses:
    """A look at the serving engine: bytes of keys and values whose pages it holds, None where that is unknown."""

    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class StepBoundary:
    """The RL run has ended a step: its guests have come to a new version."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The budget is less now, and frozen; `why` in words."""

    budget_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Grow:
    """The budget is more now."""

    budget_bytes: int


@dataclass(slots=True)
class _Peak:
    """The most that was used in the last `window_s`, to within a span of it, rather too long than too short."""

    window_s: float
    _spans: deque[tuple[float, int]]

    def saw(self, used_bytes: int, now: float) -> None:
        span_s = self.window_s / _PEAKS
        if not self._spans or now - self._spans[-1][0] >= span_s:
            self._spans.append((now, used_bytes))
        elif used_bytes > self._spans[-1][1]:
            self._spans[-1] = self._spans[-1][0], used_bytes
        while now - self._spans[0][0] > self.window_s + span_s:
            self._spans.popleft()

    def bytes(self) -> int:
        return max((used for _, used in self._spans), default=0)


class KvPolicy:
    """One guest beside one serving engine.

    `budget_bytes` begins at 0, and is first planned when serving is first seen. `cuts` and `grows` count;
    `turns` how often the budget grew after a cut or was cut after it had grown: its oscillations.
    """

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool
        self.budget_bytes = 0
        self.cuts = self.grows = self.turns = 0
        self._peak = _Peak(pool.window_s, deque())
        self._plan_at_s: float | None = None
        self._frozen_until_s: float | None = None
        self._unknown_since_s: float | None = None
        self._last: type[Cut] | type[Grow] | None = None

    def frozen(self, now: float) -> bool:
        """Whether the budget may not grow because of a cut."""
        return self._frozen_until_s is not None and now < self._frozen_until_s

    def step(self, event: ServingUses | StepBoundary, now: float) -> Sequence[Cut | Grow]:
        """What becomes of the budget at `now` of the monotonic clock."""
        if isinstance(event, StepBoundary):
            self._plan_at_s = self._frozen_until_s = None
            return ()
        if event.used_bytes is None:
            return self._blind(now)
        self._unknown_since_s = None
        self._peak.saw(event.used_bytes, now)
        beyond_bytes = self.pool.pool_bytes - self.pool.reserve_bytes - event.used_bytes
        if self.budget_bytes > max(0, beyond_bytes):
            return self._cut(max(0, beyond_bytes), f"serving uses {event.used_bytes} bytes", now)
        if self._plan_at_s is None or now >= self._plan_at_s:
            return self._plan(now)
        return ()

    def _blind(self, now: float) -> Sequence[Cut]:
        if self._unknown_since_s is None:
            self._unknown_since_s = now
        unknown_s = now - self._unknown_since_s
        if unknown_s < self.pool.unknown_s or self.budget_bytes <= self.pool.sure_bytes:
            return ()
        return self._cut(self.pool.sure_bytes, f"what serving uses is unknown for {unknown_s:.1f} s", now)

    def _cut(self, most_bytes: int, why: str, now: float) -> Sequence[Cut]:
        """Halve the budget until it is at most so much; the freeze begins anew with each cut."""
        while self.budget_bytes > most_bytes:
            self.budget_bytes //= 2
        self._plan_at_s = self._frozen_until_s = now + self.pool.freeze_s
        self.cuts += 1
        self._turned(Cut)
        return (Cut(self.budget_bytes, why),)

    def _plan(self, now: float) -> Sequence[Grow]:
        self._plan_at_s = now + self.pool.freeze_s
        planned_bytes = self.pool.most_bytes(self._peak.bytes())
        if planned_bytes <= self.budget_bytes:
            return ()
        self.budget_bytes = planned_bytes
        self.grows += 1
        self._turned(Grow)
        return (Grow(planned_bytes),)

    def _turned(self, direction: type[Cut] | type[Grow]) -> None:
        self.turns += self._last is not None and self._last is not direction
        self._last = direction


def in_blocks(budget_bytes: int, guest_bytes: int, guest_blocks: int) -> int:
    """What a budget is in blocks of a guest whose cache has so many bytes and blocks: rounded down, never above all."""
    if guest_bytes <= 0:
        return 0
    return min(guest_blocks, max(0, budget_bytes) * guest_blocks // guest_bytes)


def in_bytes(blocks: int, blocks_total: int, cache_bytes: int) -> int:
    """What so many blocks of a cache are in bytes, rounded up."""
    return 0 if blocks_total <= 0 else -(-blocks * cache_bytes // blocks_total)
