"""One rank of the trainer: an object in a process of its own, and how others call it.

Invariants
- Every call has a deadline and a name, and ends in what the method returned, the error of ours that it raised, or an
  error that says that the rank is dead. Calls are begun in order, and by default made one at a time.
- A rank that has died stays dead: what it held (a policy, an optimiser) would be another one's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rose.errors import ClusterError, RoseError
from rose.logs import open_log
from rose.waits import WaitBoard


class Rank:
    """A process of `ray`, which is running. `logs` is the file that it logs to, as others may.

    `death` is how it ended, once it has. With `at_once` above 1 the methods of its object are coroutines, and so many
    may be under way.
    """

    def __init__(self, ray: Any, name: str, waits: WaitBoard, *, logs: Path, at_once: int = 1) -> None:
        self.name = name
        self.death: ClusterError | None = None
        self._ray = ray
        self._waits = waits
        host = _Host if at_once == 1 else _AsyncHost
        self._actor = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=at_once)(host).remote(logs)

    async def start(self, make: Callable[..., Any], *arguments: Any, timeout_s: float) -> int:
        """Make the object whose methods `call` names, in the rank's process; the process's id. Raises as `call`."""
        return int(await self._answer("make", make, arguments, what="start", whom=self.name, timeout_s=timeout_s))

    async def call(self, method: str, *arguments: Any, what: str, timeout_s: float, whom: str = "") -> Any:
        """Call a method of the object and wait for what it returns; `whom` it is waited on, if not simply this rank.

        Raises what it raised if that is an error of ours, ClusterError if the rank is dead or raised anything else,
        DeadlineExceeded if it does not answer in time.
        """
        return await self._answer("call", method, arguments, what=what, whom=whom or self.name, timeout_s=timeout_s)

    def post(self, method: str, *arguments: Any) -> None:
        """Call a method of the object without waiting for it, nor for anything that it raises."""
        self._actor.call.remote(method, arguments)

    def kill(self) -> None:
        """End the process at once, whatever it does."""
        self.death = self.death or ClusterError(f"{self.name} is dead: it was ended", to_do="see the log")
        self._ray.kill(self._actor, no_restart=True)

    async def _answer(self, of_host: str, *arguments: Any, what: str, whom: str, timeout_s: float) -> Any:
        answer = asyncio.wrap_future(getattr(self._actor, of_host).remote(*arguments).future())
        errors = self._ray.exceptions
        try:
            return await self._waits.within(answer, what, whom, timeout_s, boundary="cluster")
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RoseError):
                raise cause from None
            raise ClusterError(f"{self.name}: {type(cause).__name__}: {cause}", to_do="see the log") from error
        except errors.RayActorError as error:
            self.death = self.death or ClusterError(
                f"{self.name} is dead: its process was killed, crashed, or had no memory left",
                to_do=f"see the log; Ray says: {_exit_detail(error)}",
            )
            raise ClusterError(self.death.what, to_do=self.death.to_do) from error
        except errors.RayError as error:
            raise ClusterError(f"{self.name} cannot be reached: {type(error).__name__}: {error}") from error


class _Host:
    """In the rank's process."""

    def __init__(self, logs: Path) -> None:
        self._log = open_log(logs)
        self._made: Any = None

    def make(self, make: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
        self._made = make(*arguments)
        return os.getpid()

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self._made, method)(*arguments)


class _AsyncHost:
    """The same, for an object whose methods are coroutines."""

    def __init__(self, logs: Path) -> None:
        self._log = open_log(logs)
        self._made: Any = None

    async def make(self, make: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
        self._made = make(*arguments)
        return os.getpid()

    async def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return await getattr(self._made, method)(*arguments)


def _exit_detail(error: Exception) -> str:
    """Of the many lines that Ray has for a death, the one about the process's end."""
    _, _, detail = " ".join(str(error).split()).partition("Worker exit detail: ")
    return detail.split(". ")[0][:200] or "nothing"
