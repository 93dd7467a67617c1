"""What a transport serves of a store: its objects as they are, and ways, made when they are asked for.

Invariants
- A way is made once under its key, and what was answered is kept for a while, so that a fetch that was cut goes on.
- Making one (deltas may have to be merged first) holds up neither the loop nor the readers of other objects.
- What whoever has the token can make the store do is bounded: one pair of versions is merged at a time, each once and
  at most `_MERGES_MAX` from one publishing to the next; one way at a time is checked, once for all who wait for it.
  What is over that gets the deltas as they are.
- Objects that a way named may be gone a moment later: versions are retired while they are fetched. Who is told so
  asks again. What is open by then stays readable.
- A checked way leads over objects that were all read since it was asked for. What turns out damaged is left out of the
  store's ways for good.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from rose.errors import TransferError
from rose_transfer.codec import MalformedDelta
from rose_transfer.distribution import ancestry, known_answer
from rose_transfer.distribution.way import Way, WayAsk, ask_of
from rose_transfer.store import LostObject, Manifest, Step, Store
from rose_transfer.transport.interface import ReadableObject

_TEXTS_KEPT = 256
_MAKERS = 4
_MERGES_MAX = 64
Answers = Callable[[str], Awaitable[bytes | None]]
"""The text of a known answer, by the key that asks for it; None if there is none. Raises TransferError."""


async def no_answers(key: str) -> bytes | None:
    """Of a store whose versions nobody has asked anything."""
    return None


class StoreSource:
    """The objects of `store`, and ways between its versions, until `close`.

    `relays` says which relays are passed on the way here, see `ancestry`; `answers` what versions are known to answer.
    """

    def __init__(
        self, store: Store, relays: Callable[[], Sequence[str]] = tuple, answers: Answers = no_answers
    ) -> None:
        self._store = store
        self._relays = relays
        self._answers = answers
        self._makers = ThreadPoolExecutor(_MAKERS, thread_name_prefix="rose-way")
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="rose-check")
        # Changed in the server's loop only; its readers look keys up.
        self._texts: OrderedDict[str, bytes] = OrderedDict()
        # The checks that have not begun, by start and goal; the guard is held for moments only.
        self._guard = threading.Lock()
        self._checks: dict[tuple[int | None, int], asyncio.Future[Way | None]] = {}
        self._merging = threading.Lock()
        self._merged: set[tuple[int | None, int]] = set()
        self._merged_for: int | None = None

    async def prepare(self, key: str) -> None:
        """Make the way that `key` asks for, if it does and its goal is kept. Raises TransferError if that is lost."""
        if key in self._texts:
            return
        text = await self._made(key)
        if text is not None:
            self._texts[key] = text
            while len(self._texts) > _TEXTS_KEPT:
                self._texts.popitem(last=False)

    def has(self, key: str) -> bool:
        return key in self._texts or self._store.objects.has(key)

    def open(self, key: str) -> ReadableObject:
        """Raises LostObject if there is none, or TransferError."""
        data = self._texts.get(key)
        return self._store.objects.open(key) if data is None else _Text(data)

    def close(self) -> None:
        """Make no ways any more."""
        for threads in (self._makers, self._checker):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _made(self, key: str) -> bytes | None:
        if ancestry.is_ask(key):
            return ancestry.to_bytes(self._relays())
        return await (self._answers(key) if known_answer.is_ask(key) else self._way_text(key))

    async def _way_text(self, key: str) -> bytes | None:
        ask = ask_of(key)
        if ask is None:
            return None
        loop = asyncio.get_running_loop()
        start, goal = await loop.run_in_executor(self._makers, self._known_start, ask), ask.goal
        if not ask.checked:
            way = await loop.run_in_executor(self._makers, self._way, start, goal, self._steps)
            return None if way is None else way.to_bytes()
        with self._guard:
            checking = self._checks.get((start, goal))
            if checking is None:
                checking = loop.run_in_executor(self._checker, self._check, start, goal)
                checking.add_done_callback(_heed)
                self._checks[start, goal] = checking
        way = await asyncio.shield(checking)
        return None if way is None else way.to_bytes()

    def _known_start(self, ask: WayAsk) -> int | None:
        """In a thread."""
        known = ask.start is not None and self._store.holds(ask.start, ask.start_fingerprint or "")
        return ask.start if known else None

    def _check(self, start: int | None, goal: int) -> Way | None:
        """In the checker's thread: whoever asks from now on has the objects read again."""
        with self._guard:
            del self._checks[start, goal]
        return self._way(start, goal, self._sound_steps)

    def _way(self, start: int | None, goal: int, steps: Callable[[int | None, int], tuple[Step, ...]]) -> Way | None:
        """In a thread. None if the goal is not kept, or no longer."""
        try:
            fingerprint = self._store.fingerprint(goal)
            named = tuple((step.manifest.key, step.backwards) for step in steps(start, goal))
        except TransferError:
            if goal in self._store.versions():
                raise
            return None
        return Way(goal, fingerprint, start, named)

    def _steps(self, start: int | None, goal: int) -> tuple[Step, ...]:
        """What leads to `goal`, merged if that is not too much asked."""
        steps = self._store.steps(start, goal)
        if len(steps) < 2 and (start is None or not steps or steps[0].manifest.base is not None):
            return steps
        with self._merging:
            if self._store.newest != self._merged_for:
                self._merged_for, self._merged = self._store.newest, set()
            if (start, goal) in self._merged or len(self._merged) >= _MERGES_MAX:
                return self._store.steps(start, goal)
            self._merged.add((start, goal))
            return self._store.delta(start, goal)

    def _sound_steps(self, start: int | None, goal: int) -> tuple[Step, ...]:
        while True:
            steps = self._steps(start, goal)
            for step in steps:
                try:
                    self._read_all(step.manifest)
                except (LostObject, MalformedDelta) as error:
                    self._store.leave_out(step.manifest, str(error))
                    break
            else:
                return steps

    def _read_all(self, manifest: Manifest) -> None:
        """Raises LostObject or MalformedDelta for what is damaged, having mended what is in memory as well."""
        objects = self._store.objects
        objects.put(manifest.to_bytes())
        try:
            objects.read(manifest.packing)
        except LostObject:
            objects.put(self._store.read_packing(manifest.packing).to_bytes())
        for entry in manifest.buckets:
            self._store.load(manifest, entry)


def _heed(ended: asyncio.Future[Way | None]) -> None:
    """What went wrong is raised where somebody waits for it; where all have left, it is no news."""
    if not ended.cancelled():
        ended.exception()


class _Text:
    """A made object, readable in parts."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def size_bytes(self) -> int:
        return len(self._data)

    def read_at(self, offset: int, length: int) -> bytes:
        return self._data[offset : offset + length]

    def close(self) -> None:
        """Nothing is open."""
