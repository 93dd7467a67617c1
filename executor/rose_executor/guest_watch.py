"""The executor's eye on its guest: look at the board, let `guest_rules` decide, do that.

Invariants
- It decides nothing. Each cut of the guest's memory is in the log, with its cause.
- A board that was cut short, emptied or removed is made whole again. As long as that fails no quota is renewed, so the
  guest's gate is shut: the failure is `trouble`, and the watch goes on trying. Whether it is whole is asked once per
  `HEARTBEAT_S`.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from rose.errors import RoseError
from rose.logs import logger
from rose_executor.board import GUEST, HEARTBEAT_S, SERVING, SERVING_KV, BoardReader, HalfWriter, claim_quota
from rose_executor.board_states import GuestState, Quota
from rose_executor.guest_rules import LOOK_S, Freeze, GuestRules, Looked, Write
from rose_executor.partitioner import Partitioner
from rose_executor.step_profile import StepProfile
from rose_executor.step_shape import StepShape

log = logger("guest watch")

_TRY_AGAIN_S = 0.2


class GuestWatch:
    """Makes the board and keeps it; `run` then watches. Raises ClusterError if the board cannot be had.

    `profile` learns what the guest's steps cost from those that it finds on the board: the next guest begins with that.
    The guest plans by a profile of its own, and says on the board how well that holds.
    `seen` is the last look, `trouble` what it failed at (board or brake), "" if at nothing. `looked_at_s`, of the
    monotonic clock, is when it last failed at nothing.
    """

    def __init__(
        self, path: Path, rules: GuestRules, partitioner: Partitioner, profile: StepProfile | None = None
    ) -> None:
        self.rules = rules
        self.profile = StepProfile() if profile is None else profile
        self.trouble = ""
        self.seen: Looked | None = None
        self.looked_at_s = time.monotonic()
        self._path = path
        self._partitioner = partitioner
        self._writer: HalfWriter[Quota] | None = claim_quota(path)
        self._reader = BoardReader(path)
        self._whole_at_s = 0.0
        self._guest_steps = self._cuts = 0

    async def run(self) -> None:
        """Watch until cancelled. Sleeping between two looks is no wait for anybody, so it has no deadline."""
        while True:
            await asyncio.sleep(LOOK_S if self.look() else _TRY_AGAIN_S)

    def look(self) -> bool:
        """Look once and act; whether there is a board to act on."""
        try:
            now_s = time.monotonic()
            writer = self._whole_board(now_s)
            read = self._reader.read
            serving_kv = self._reader.read_of_living(SERVING_KV, now_s)
            self.seen = Looked(read(SERVING, now_s), read(GUEST, now_s), serving_kv)
            self._learn(self.seen.guest.state, now_s)
            for action in self.rules.step(self.seen, now_s):
                match action:
                    case Write(quota):
                        writer.write(quota)
                    case Freeze():
                        self._partitioner.freeze()
            self._tell_cut(now_s)
        except (RoseError, OSError) as error:
            self.trouble = str(error)
            return False
        self.trouble = ""
        self.looked_at_s = now_s
        return True

    def close(self) -> None:
        """Give the board up: the guest shuts its gate as soon as the last quota is stale."""
        self._reader.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _learn(self, guest: GuestState | None, now_s: float) -> None:
        if guest is None or guest.computed_steps == self._guest_steps:
            return
        self._guest_steps = guest.computed_steps
        shape = StepShape(guest.step_tokens, guest.step_seqs, guest.step_context_tokens)
        self.profile.saw(shape, guest.step_s, now_s)

    def _tell_cut(self, now_s: float) -> None:
        memory = self.rules.kv.figures(now_s)
        if memory is not None and memory.cuts != self._cuts:
            self._cuts = memory.cuts
            log.info("the guest's memory is cut", budget_bytes=memory.budget_bytes, why=memory.cut_why)

    def _whole_board(self, now_s: float) -> HalfWriter[Quota]:
        if self._writer is not None:
            if now_s - self._whole_at_s < HEARTBEAT_S:
                return self._writer
            if self._writer.whole():
                self._whole_at_s = now_s
                return self._writer
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        writer = claim_quota(self._path)
        try:
            reader = BoardReader(self._path)
        except BaseException:
            # It may be gone again. A lock that nobody lets go of would keep this very process from the next attempt.
            writer.close()
            raise
        self._reader.close()
        self._reader, self._writer = reader, writer
        return writer
