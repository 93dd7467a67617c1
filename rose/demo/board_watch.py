"""How busy the serving engine is, whoever else looks: read from the board that its probe writes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import NoReturn

from rose_executor.board import SERVING, BoardReader, claim_quota

_EVERY_S = 2.0


def make_board(path: Path) -> None:
    """For the probe to write on. Raises ClusterError if it cannot be made."""
    claim_quota(path).close()


async def watch_board(path: Path, seen: list[tuple[float, float]]) -> NoReturn:
    """Append moments, and the share of the time before each in which serving computed, until cancelled."""
    reader = BoardReader(path)
    try:
        before: tuple[float, float] | None = None
        while True:
            now_s = time.monotonic()
            state = reader.read(SERVING, now_s).state
            if state is not None:
                if before is not None:
                    share = (state.busy_s - before[1]) / (now_s - before[0])
                    seen.append((time.time(), min(1.0, max(0.0, share))))
                before = now_s, state.busy_s
            await asyncio.sleep(_EVERY_S)
    finally:
        reader.close()
