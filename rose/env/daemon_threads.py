"""An executor whose work holds up neither an event loop's end nor the interpreter's exit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class DaemonThreads(ThreadPoolExecutor):
    """A daemon thread called `name` for every piece of work. A pool, since event loops take nothing else."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 -- it is the answer, as in any executor
                future.set_exception(error)

        threading.Thread(target=work, name=self._name, daemon=True).start()
        return future
