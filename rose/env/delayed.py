"""Episodes of any environment whose answers come as late as a tool's would.

Invariants
- A delay comes before its call: one that is cancelled meanwhile leaves nothing done and nothing to undo.
- Delays are no part of the environment's own deadlines; each is on the wait board, until the moment it ends.
- A step that times out is the last of its episode: its result is truncated, as if the task had a limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from rose.config import EnvironmentConfig
from rose.env.contract import StepResult
from rose.env.episodes import Episodes, OpenEpisode
from rose.env.latency import PRESETS, Latency, LatencySampler
from rose.waits import WaitBoard

Sleep = Callable[[float], Awaitable[object]]
"""Waits for so many seconds, on whatever clock."""


def delayed(episodes: Episodes, job: EnvironmentConfig, seed: int, board: WaitBoard) -> Episodes:
    """The episodes with the latency that the job asks for; themselves if it asks for none."""
    if job.latency == "none":
        return episodes
    return DelayedEpisodes(episodes, LatencySampler(PRESETS[job.latency], seed, job.latency_scale), board)


class DelayedEpisodes:
    """Opens the episodes of `episodes`, each answer as late as `sampler` says, by the clock of `sleep`."""

    def __init__(
        self, episodes: Episodes, sampler: LatencySampler, board: WaitBoard, sleep: Sleep = asyncio.sleep
    ) -> None:
        self.sampler = sampler
        self._episodes = episodes
        self._board = board
        self._sleep = sleep

    async def open(self, seed: int, episode_id: str) -> OpenEpisode:
        await self.wait(self.sampler.reset(seed, episode_id), episode_id)
        return _DelayedEpisode(self, await self._episodes.open(seed, episode_id), seed, episode_id)

    async def wait(self, latency: Latency, episode_id: str) -> None:
        """Let the latency pass."""
        with self._board.waiting("tool answer", f"environment {episode_id}", latency.seconds):
            await self._sleep(latency.seconds)


class _DelayedEpisode:
    """One episode; its turns count from 0."""

    def __init__(self, owner: DelayedEpisodes, episode: OpenEpisode, seed: int, episode_id: str) -> None:
        self.system_prompt = episode.system_prompt
        self.first_observation = episode.first_observation
        self.close = episode.close
        self._owner = owner
        self._episode = episode
        self._seed = seed
        self._episode_id = episode_id
        self._turn = 0

    async def step(self, action: str) -> StepResult:
        latency = self._owner.sampler.step(self._seed, self._episode_id, self._turn)
        self._turn += 1
        await self._owner.wait(latency, self._episode_id)
        result = await self._episode.step(action)
        return replace(result, truncated=True) if latency.timed_out and not result.over else result
