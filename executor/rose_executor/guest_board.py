"""A guest's side of the board: what it may do, what serving does, and what it says of itself.

Invariants
- Once it is open nothing here raises; a board that was made anew is followed.
- What somebody has made of the board's file that is no board is written to for `_REOPEN_S` more at most.
- A quota or a serving state that is torn, stale or missing is None: whoever reads it has none.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from rose.errors import RoseError
from rose_executor.board import GUEST, QUOTA, SERVING, BoardReader, HalfWriter
from rose_executor.board_states import Given, GuestState

_REOPEN_S = 0.2


class GuestBoard:
    """Raises ClusterError if the board cannot be opened, or its guest's half has a live writer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = HalfWriter(path, GUEST)
        self._reader = BoardReader(path)
        self._look_again_s = 0.0
        self._whole = True

    def look(self, now_s: float) -> Given:
        """At `now_s` of the monotonic clock."""
        page = self._reader.page()
        quota = self._reader.said(QUOTA, page, now_s)
        if quota.state is None:
            if now_s >= self._look_again_s:
                self._look_again_s = now_s + _REOPEN_S
                self._follow()
            return Given(None, 0, None)
        self._whole = True
        return Given(quota.state, quota.number, self._reader.said(SERVING, page, now_s).state)

    def report(self, state: GuestState) -> None:
        """A board that cannot be written keeps the gate shut soon enough: its quota cannot be renewed either."""
        if not self._whole:
            return
        with contextlib.suppress(OSError, RoseError):
            self._writer.write(state)

    def _follow(self) -> None:
        self._whole = self._writer.whole()
        if not self._reader.replaced():
            return
        with contextlib.suppress(RoseError):
            # Locked before it is read: of a file that is no board, or another guest's, nothing stays open.
            writer = HalfWriter(self._path, GUEST)
            try:
                reader = BoardReader(self._path)
            except BaseException:
                writer.close()
                raise
            self._reader.close()
            self._writer.close()
            self._reader, self._writer, self._whole = reader, writer, True
