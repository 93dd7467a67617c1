"""Episodes in a process of their own, next to others: the far side of `environment_worker`.

Invariants
- The environment is found in the worker as it is in the run: by the same name on the same path.
- An episode goes by the key that whoever opened it gave it, from the moment that it was asked for: so it can be
  closed whatever became of the opening.
- An episode that is over is closed here, without being told.
- What leaves are plain texts, numbers and errors of ours: objects of an environment's own stay where its modules are.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from rose.config import EnvironmentConfig
from rose.env.contract import StepResult, load_environment
from rose.env.host import EnvironmentHost, Episode, HostSettings
from rose.errors import EnvironmentFailed
from rose.logs import bound, logger
from rose.trainer.line import Answering
from rose.waits import WaitBoard

log = logger("environment")


def answering_environment(config: EnvironmentConfig, path: Sequence[str]) -> Answering:
    """An `EnvironmentRank` at the far end of a line."""
    return Answering(EnvironmentRank(config, path))


class EnvironmentRank:
    """Raises ConfigError if the environment is not found or refuses its parameters. `path` is the run's `sys.path`."""

    def __init__(self, config: EnvironmentConfig, path: Sequence[str]) -> None:
        sys.path[:] = path
        settings = HostSettings(config.reset_timeout_s, config.step_timeout_s)
        self._host = EnvironmentHost(load_environment(config.kind, config.params), WaitBoard(), settings)
        self._opening: dict[int, asyncio.Task[Episode]] = {}
        self._episodes: dict[int, Episode] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def open(self, key: int, seed: int, episode_id: str) -> tuple[str, str]:
        """Begin an episode: its system prompt and first observation. Raises EnvironmentFailed."""
        with bound(trajectory_id=episode_id):
            log.info("episode opens", seed=seed)
            opening = self._opening[key] = asyncio.ensure_future(self._host.open(seed, episode_id))
            try:
                episode = await opening
            except EnvironmentFailed as error:
                log.info("episode fails", why=error.what)
                raise
            finally:
                wanted = self._opening.pop(key, None)
            if wanted is None:
                self._end_episode(episode)
                raise EnvironmentFailed("an episode was closed in the moment in which it began")
            self._episodes[key] = episode
        return str.__str__(episode.system_prompt), str.__str__(episode.first_observation)

    async def step(self, key: int, action: str) -> StepResult:
        """Act in an episode that is open, without its `info`. Raises EnvironmentFailed."""
        episode = self._episodes.get(key)
        if episode is None:
            raise EnvironmentFailed("an episode was stepped after it was closed")
        with bound(trajectory_id=episode.episode_id):
            try:
                result = await episode.step(action)
            except EnvironmentFailed as error:
                log.info("episode fails", steps=episode.steps, why=error.what)
                raise
            if result.over:
                self._close(key)
        return StepResult(
            str.__str__(result.observation),
            float(result.reward),
            result.terminated,
            result.truncated,
            result.malformed,
            result.success,
        )

    async def close(self, key: int) -> None:
        """Have an episode closed, whatever state it is in; nothing happens the second time."""
        self._close(key)

    async def end(self) -> None:
        """Close what is open, then what async environments left running; each within the host's deadline."""
        for key in [*self._opening, *self._episodes]:
            self._close(key)
        if self._closing:
            await asyncio.wait(self._closing)
        await self._host.close()

    def _close(self, key: int) -> None:
        opening = self._opening.pop(key, None)
        if opening is not None:
            opening.cancel()
        episode = self._episodes.pop(key, None)
        if episode is not None:
            self._end_episode(episode)

    def _end_episode(self, episode: Episode) -> None:
        with bound(trajectory_id=episode.episode_id):
            log.info("episode closes", steps=episode.steps, step_s=round(episode.step_s, 3))
        closing = asyncio.ensure_future(episode.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
