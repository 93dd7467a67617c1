"""Environments that misbehave, each in one way. Not a test module: what the host's tests open."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from rose.env.contract import StepResult

QUIET = StepResult("seen", 0.0, False, False)


class Plain:
    """Well-behaved; records the threads that it ran on and how often it was closed."""

    system_prompt = "do"

    def __init__(self) -> None:
        self.threads = {threading.get_ident()}
        self.closed = 0

    def reset(self, seed: int, episode_id: str) -> Any:
        self.threads.add(threading.get_ident())
        return f"{seed}/{episode_id}"

    def step(self, action: str) -> Any:
        self.threads.add(threading.get_ident())
        return QUIET

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.closed += 1


class Answering(Plain):
    """Whose step does what it is told."""

    def __init__(self, step: Callable[[], Any]) -> None:
        super().__init__()
        self._step = step

    def step(self, action: str) -> Any:
        return self._step()


class Hanging(Plain):
    """Whose step hangs until `release` is set."""

    def __init__(self, release: threading.Event) -> None:
        super().__init__()
        self._release = release

    def step(self, action: str) -> Any:
        self._release.wait(10)
        return QUIET


class Async:
    """The async kind, whose step does what it is told."""

    system_prompt = ""

    def __init__(self, step: Callable[[], Any] = lambda: QUIET) -> None:
        self.closed = 0
        self._step = step

    async def reset(self, seed: int, episode_id: str) -> str:
        await asyncio.sleep(0)
        return "begin"

    async def step(self, action: str) -> Any:
        result = self._step()
        return await result if asyncio.iscoroutine(result) else result

    async def close(self) -> None:
        self.closed += 1
