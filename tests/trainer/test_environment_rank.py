"""The far end of an environment worker, in this process."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from rose.config import EnvironmentConfig
from rose.errors import EnvironmentFailed
from rose.trainer.environment_rank import EnvironmentRank


class Episode:
    """One that begins; it notes its closes."""

    episode_id, system_prompt, first_observation, steps, step_s = "e", "do", "begin", 0, 0.0

    def __init__(self) -> None:
        self.closed = 0

    async def close(self) -> None:
        self.closed += 1


class Host:
    """Calls `last` at the very moment at which an episode has begun, and nobody knows it yet."""

    def __init__(self, last: Any) -> None:
        self.episode, self._last = Episode(), last

    async def open(self, seed: int, episode_id: str) -> Episode:
        asyncio.get_running_loop().call_soon(self._last)
        return self.episode

    async def close(self) -> None:
        pass


def test_an_episode_that_is_closed_in_the_moment_in_which_it_begins_is_closed() -> None:
    async def play() -> None:
        rank = EnvironmentRank(EnvironmentConfig(kind="frozen_lake"), list(sys.path))
        host = rank._host = Host(lambda: rank._close(7))  # type: ignore[assignment]
        with pytest.raises(EnvironmentFailed, match="closed"):
            await rank.open(7, 1, "e")
        await rank.close(7)
        await rank.end()
        assert host.episode.closed == 1
        assert (rank._opening, rank._episodes) == ({}, {})

    asyncio.run(play())
