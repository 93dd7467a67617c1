"""A half of the board as a serving engine writes it: wherever the board is, whenever it comes.

Invariants
- A board that is not there yet, is another's, or was made anew is looked for once in `LOOK_AGAIN_S`; one that takes
  nothing, such as one on a full disk, is let go and tried again after `WRITE_AGAIN_S`. Nothing of that raises.
- What cannot be written is not written later: the next state is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic

from rose.errors import ClusterError
from rose_executor.board import Half, HalfWriter, S

LOOK_AGAIN_S = 1.0
WRITE_AGAIN_S = 5.0


class KeptHalf(Generic[S]):
    """`boardless` says why there is no board to write on just now, "" while there is. `told` hears of new causes."""

    def __init__(self, path: Path, half: Half[S], told: Callable[[str], None]) -> None:
        self.boardless = ""
        self._path = path
        self._half: Half[S] = half
        self._told = told
        self._writer: HalfWriter[S] | None = None
        self._look_again_s = 0.0

    def look(self, now_s: float) -> bool:
        """Have a whole board to write on, or none for now; whether it is one that was just found.

        Cheap where it is not yet time to look.
        """
        if now_s < self._look_again_s:
            return False
        self._look_again_s = now_s + LOOK_AGAIN_S
        try:
            if self._writer is not None and self._writer.whole():
                return False
            self.close()
            self._writer = HalfWriter(self._path, self._half)
        except (ClusterError, OSError) as error:
            self._without(str(error))
            return False
        return True

    def write(self, state: S, now_s: float) -> bool:
        """Whether it stands on a board now. Raises ContractError for a value that no board holds."""
        if self._writer is None:
            return False
        try:
            self._writer.write(state)
        except OSError as error:
            self._look_again_s = now_s + WRITE_AGAIN_S
            self._without(f"{self._path} cannot be written: {error.strerror}")
            return False
        self.boardless = ""
        return True

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _without(self, why: str) -> None:
        self.close()
        if why != self.boardless:
            self.boardless = why
            self._told(why)
