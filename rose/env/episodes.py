"""What a rollout plays: episodes that are opened, stepped and closed, however their environment is run."""

from __future__ import annotations

from typing import Protocol

from rose.env.contract import StepResult


class OpenEpisode(Protocol):
    """An episode that has begun. Calls must not overlap; after a failure only `close` may follow."""

    @property
    def system_prompt(self) -> str: ...

    @property
    def first_observation(self) -> str: ...

    async def step(self, action: str) -> StepResult:
        """Act. Raises EnvironmentFailed."""
        ...

    async def close(self) -> None:
        """Never raises, and does nothing the second time."""
        ...


class Episodes(Protocol):
    """Where episodes come from."""

    async def open(self, seed: int, episode_id: str) -> OpenEpisode:
        """Begin an episode of task `seed`. Raises EnvironmentFailed."""
        ...
