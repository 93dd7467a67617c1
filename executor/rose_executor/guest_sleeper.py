"""Puts the guest to sleep, wakes it, ends it and starts it again, as `guest_presence` decides: the driver of that.

Invariants
- It decides nothing; what a state costs it measures, and tells.
- What is taken from a guest is taken before the end of what it was asked is waited for.
- Asleep is what the quota says: a shut gate, and no block. On CPU the guest's pages then go back by themselves, and
  waking it is a quota again. On GPU that gives back what kvcached can unmap, and no weights: they would go by a level
  of vLLM's sleep, which nothing here asks for. There a guest asleep is measured by what its processes hold of the
  host's memory alone, so the way to the GPU's memory for weights is `END`.
- How long waking takes is how long the guest needs to generate a token, asked for as any request is.
- Where there is no budget that could change (a fixed split) the guest stays active; likewise before anybody knows
  what a block of it takes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from rose.errors import ClusterError, DeadlineExceeded, EngineError
from rose.logs import logger
from rose_executor.guest_memory import host_memory
from rose_executor.guest_presence import Died, GuestPresence, Move, Presence, PresenceRules, Residue, Room, Up
from rose_executor.kv_budget import KvShare, MemoryFigures

log = logger("guest")

LOOK_S = 0.5


class Guest(Protocol):
    """What is put to sleep: one guest in all its lives."""

    @property
    def pid(self) -> int | None:
        """Of its first process, None while there is none."""
        ...

    async def computes(self) -> bool:
        """Return once it has generated a token; False where it cannot be asked now.

        Raises EngineError, and DeadlineExceeded if no token comes.
        """
        ...

    async def end(self, why: str) -> None:
        """What was lent of it is taken back first. Returns as soon as its end is ordered."""
        ...

    async def start(self) -> None:
        """Returns as soon as that is ordered."""
        ...


class GuestSleeper:
    """`run` it. `need_blocks` is what the longest request takes.

    `keep_free_bytes` of the host's memory shall stay free, of which `memory_left` says how much is now; 0: any.
    """

    def __init__(
        self,
        kv: KvShare,
        guest: Guest,
        need_blocks: int,
        keep_free_bytes: int,
        memory_left: Callable[[], int],
        *,
        rules: PresenceRules | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.presence = GuestPresence(PresenceRules() if rules is None else rules, now())
        self._kv = kv
        self._guest = guest
        self._need_blocks = need_blocks
        self._keep_free_bytes = keep_free_bytes
        self._memory_left = memory_left
        self._now = now
        self._question: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until cancelled. Raises what the guest's supervisor raises when it takes no orders any more."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(LOOK_S)
        finally:
            if self._question is not None:
                self._question.cancel()
            await _over(self._question)

    def process(self, state: str) -> None:
        """The guest's process has come into another state, as its supervisor says."""
        if state == "ready":
            self.presence.step(Up(), self._now())
        elif state == "dead":
            self.presence.step(Died(), self._now())

    async def look(self) -> None:
        """Measure, and do what is to be done."""
        figures, need_bytes = self._kv.figures(self._now()), self._kv.need_bytes(self._need_blocks)
        if figures is None or need_bytes is None:
            return
        held_bytes, spare_bytes = await asyncio.to_thread(self._measure, self._guest.pid)
        now_s = self._now()
        if held_bytes is not None:
            self.presence.step(Residue(held_bytes), now_s)
        room = room_for(self.presence.state, figures, need_bytes, held_bytes, spare_bytes)
        for move in self.presence.step(room, now_s):
            await self._do(move)

    def _measure(self, pid: int | None) -> tuple[int | None, int | None]:
        """What the guest holds, None where nobody can or need know; what may still be taken, None for no limit."""
        held_bytes = None
        if pid is not None and (self._keep_free_bytes or self.presence.state is Presence.ASLEEP):
            held_bytes = _held_bytes(pid)
        if not self._keep_free_bytes:
            return held_bytes, None
        return held_bytes, self._memory_left() - self._keep_free_bytes

    async def _do(self, move: Move) -> None:
        log.info("the guest's presence changes", move=move.value, why=self.presence.why)
        question, self._question = self._question, None
        if question is not None:
            question.cancel()
        try:
            await self._moved(move)
        finally:
            await _over(question)

    async def _moved(self, move: Move) -> None:
        match move:
            case Move.SLEEP:
                self._kv.presence = Presence.ASLEEP
            case Move.WAKE:
                self._kv.presence = Presence.ACTIVE
                self._question = asyncio.create_task(self._until_it_computes(), name="waking of the guest")
            case Move.END:
                self._kv.presence = Presence.GONE
                await self._guest.end(self.presence.why)
            case Move.START:
                await self._guest.start()
                self._kv.presence = Presence.ACTIVE

    async def _until_it_computes(self) -> None:
        try:
            if await self._guest.computes():
                self.presence.step(Up(), self._now())
        except (EngineError, ClusterError, DeadlineExceeded) as error:
            log.warning("how long the guest takes to wake was not measured", why=str(error))


async def _over(question: asyncio.Task[None] | None) -> None:
    if question is not None:
        await asyncio.gather(question, return_exceptions=True)


def room_for(
    state: Presence, figures: MemoryFigures, need_bytes: int, held_bytes: int | None, spare_bytes: int | None
) -> Room:
    """What a guest in this state may have of its budget, and of the host's memory if that has to stay free.

    Both what it holds and `spare_bytes`, which is below 0 where too much is taken, are there for it. Pure.
    """
    if spare_bytes is None:
        return Room(figures.budget_bytes, need_bytes)
    kv_bytes = figures.held_bytes if state is Presence.ACTIVE else 0
    return Room(
        min(figures.budget_bytes, max(0, kv_bytes + spare_bytes)), need_bytes, max(0, (held_bytes or 0) + spare_bytes)
    )


def _held_bytes(pid: int) -> int | None:
    """Of the host's memory; None if it has ended meanwhile."""
    try:
        memory = host_memory(pid)
    except ClusterError:
        return None
    return memory.resident_bytes if memory.own_bytes is None else memory.own_bytes
