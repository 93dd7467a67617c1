"""One rank of the trainer: an object in a process of its own, and how others call it.

Invariants
- Every call has a deadline and a name, and ends in what the method returned, the error of ours that it raised, or an
  error that says that the rank is dead. Calls of one rank are made in order, one at a time.
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
    """A process of `cluster`, the running Ray. `logs` is the file that it logs to, as others may."""

    def __init__(self, cluster: Any, name: str, waits: WaitBoard, *, logs: Path) -> None:
        self.name = name
        self._ray = cluster
        self._waits = waits
        self._actor = cluster.remote(num_cpus=0, max_restarts=0)(_Host).options(name=name).remote(logs)

    async def start(self, make: Callable[..., Any], *arguments: Any, timeout_s: float) -> int:
        """Make the object whose methods `call` names, in the rank's process; the process's id. Raises as `call`."""
        return int(await self._answer("make", make, arguments, what="start", timeout_s=timeout_s))

    async def call(self, method: str, *arguments: Any, what: str, timeout_s: float) -> Any:
        """Call a method of the object and wait for what it returns.

        Raises what it raised if that is an error of ours, ClusterError if the rank is dead or raised anything else,
        DeadlineExceeded if it does not answer in time.
        """
        return await self._answer("call", method, arguments, what=what, timeout_s=timeout_s)

    def kill(self) -> None:
        """End the process at once, whatever it does."""
        self._ray.kill(self._actor, no_restart=True)

    async def _answer(self, of_host: str, *arguments: Any, what: str, timeout_s: float) -> Any:
        answer = asyncio.wrap_future(getattr(self._actor, of_host).remote(*arguments).future())
        errors = self._ray.exceptions
        try:
            return await self._waits.within(answer, what, self.name, timeout_s, boundary="cluster")
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RoseError):
                raise cause from None
            raise ClusterError(f"{self.name}: {type(cause).__name__}: {cause}", to_do="see the log") from error
        except errors.RayActorError as error:
            raise ClusterError(
                f"{self.name} is dead: its process was killed, crashed, or had no memory left",
                to_do=f"see the log; Ray says: {_exit_detail(error)}",
            ) from error
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


def _exit_detail(error: Exception) -> str:
    """Of the many lines that Ray has for a death, the one about the process's end."""
    _, _, detail = " ".join(str(error).split()).partition("Worker exit detail: ")
    return detail.split(". ")[0][:200] or "nothing"
