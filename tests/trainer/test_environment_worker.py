"""Workers that do not start: what becomes of the episodes that would have been theirs. Without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from rose.config import EnvironmentConfig
from rose.errors import ClusterError, EnvironmentFailed
from rose.trainer import environment_worker
from rose.trainer.environment_worker import EnvironmentWorker
from rose.trainer.rank import Rank
from rose.trainer.remote_episodes import RemoteEpisodes
from rose.waits import WaitBoard


class Stillborn:
    """A rank that cannot be started."""

    ended = False

    async def start(self, make: Callable[..., object], *arguments: object, timeout_s: float) -> int:
        raise ClusterError("no memory left")

    def kill(self) -> None:
        self.ended = True


class Busy:
    """A worker that lives, and has more episodes than others."""

    def __init__(self) -> None:
        self.fit, self.episodes = True, 3

    async def ready(self, whom: str) -> Any:
        return None

    async def call(self, *_: Any, **__: Any) -> tuple[str, str]:
        return ("do", "begin")


def test_episodes_go_past_a_worker_that_does_not_start_until_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_worker, "TRY_AGAIN_S", 60.0)
    made: list[Stillborn] = []
    said: list[tuple[str, str]] = []

    def make() -> Rank:
        made.append(Stillborn())
        return cast(Rank, made[-1])

    async def play() -> None:
        config = EnvironmentConfig(kind="frozen_lake")
        dead = EnvironmentWorker("environment-0", make, config, WaitBoard(), lambda *one: said.append(one), 60.0)
        busy = Busy()
        episodes = RemoteEpisodes([dead, cast(Any, busy)], reset_timeout_s=60.0, step_timeout_s=60.0)
        with pytest.raises(EnvironmentFailed, match="environment-0 does not start: no memory left"):
            await episodes.open(1, "e1")
        for number in range(5):
            await episodes.open(number, f"e{number}")
        assert (busy.episodes, dead.episodes, len(made)) == (8, 0, 1)
        monkeypatch.setattr(environment_worker, "TRY_AGAIN_S", 0.0)
        with pytest.raises(EnvironmentFailed):
            await episodes.open(7, "e7")
        busy.fit = False
        monkeypatch.setattr(environment_worker, "TRY_AGAIN_S", 60.0)
        with pytest.raises(EnvironmentFailed):  # one that may be dead is better than none
            await episodes.open(8, "e8")
        assert len(made) == 3

    asyncio.run(play())
