"""Lakes where things go wrong by their seed, for worker processes to find by name. Not a test module."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any

from rose.env.contract import StepResult
from rose.env.frozen_lake import FrozenLake

HELD_OUT = 1_000_000_000


class Unruly(FrozenLake):
    """Tasks go wrong in turn: raising, hanging, flooding, and one that is well."""

    def reset(self, seed: int, episode_id: str) -> str:
        self._trouble = "none" if seed >= HELD_OUT else ("raise", "hang", "flood", "none")[seed % 4]
        if seed == HELD_OUT + 3:
            raise RuntimeError("a held-out task that never begins")
        return super().reset(seed, episode_id)

    def step(self, action: str) -> StepResult:
        match self._trouble:
            case "raise":
                raise RuntimeError("the lake is dry")
            case "hang":
                time.sleep(30)
            case "flood":
                return StepResult("x" * 10_000_000, 0.0, False, False)
        return super().step(action)


class Deadly(FrozenLake):
    """A first step at the first training task ends the whole process, once in a run: `mark` is a file that is not."""

    def __init__(self, mark: str, **params: Any) -> None:
        super().__init__(**params)
        self._mark = mark
        self._first = False

    def reset(self, seed: int, episode_id: str) -> str:
        self._first = seed == 0
        return super().reset(seed, episode_id)

    def step(self, action: str) -> StepResult:
        if self._first:
            with contextlib.suppress(FileExistsError), open(self._mark, "x"):
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class Words(str):
    """Text that only the worker can unpickle what it means."""

    def __reduce__(self) -> Any:
        raise TypeError("stays here")


class Told:
    """Does what its action says, and writes down when it is closed."""

    system_prompt = Words("do")

    def __init__(self, notes: str) -> None:
        self._notes = notes
        self._name = ""

    def reset(self, seed: int, episode_id: str) -> str:
        self._name = episode_id
        if seed == 13:
            raise RuntimeError("bad luck")
        return Words(f"{seed} of {os.getpid()}")

    def step(self, action: str) -> StepResult:
        if action == "raise":
            raise ZeroDivisionError("by what")
        if action == "hang":
            time.sleep(2.5)
        if action == "die":
            os._exit(3)
        return StepResult(Words(action), 0.5, action == "end", False, info={"lock": threading.Lock()})

    def close(self) -> None:
        with open(self._notes, "a") as file:
            file.write(f"{self._name}\n")
