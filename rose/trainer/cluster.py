"""The Ray cluster of a run: started on this machine, for this run alone, and ended with it.

Invariants
- Ray runs below a process of its own (`cluster_main`), which ends it all, however this one ends.
- Ray's files lie in the run's runtime folder and go with it.
- Neither the event loop nor signals wait for Ray, nor does the end of either.
- Whoever works with Ray hears of its death at once: Ray itself would wait for a minute, and then end this process.

Ray's servers listen on all interfaces, which it has no option against; who connects needs the token that Ray keeps in
the user's home.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from rose.env.daemon_threads import DaemonThreads
from rose.errors import ClusterError
from rose.logs import logger
from rose.waits import WaitBoard

log = logger("cluster")

END_S = 20.0
_LINK_PREFIX = "rose-ray-"


T = TypeVar("T")


class Cluster:
    """Ray (the module `ray`), running. `process` is the one that all of Ray is below."""

    def __init__(self, ray: Any, process: Process) -> None:
        self.ray = ray
        self._death = asyncio.ensure_future(_death(process))

    async def while_alive(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work returns. Raises ClusterError, and cancels the work, as soon as Ray is dead."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, self._death], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClusterError(
                    f"Ray is dead: {self._death.result()} was killed, crashed, or had no memory left",
                    to_do="run the job again; if it happens again, free memory",
                )
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait([task])

    def forget(self) -> None:
        """Ray is ended on purpose from here on."""
        self._death.cancel()


@contextlib.asynccontextmanager
async def local_cluster(runtime: Path, name: str, waits: WaitBoard, start_timeout_s: float) -> AsyncIterator[Cluster]:
    """Ray, running on this machine until the body ends. `name` is its namespace.

    Raises ClusterError if Ray is not installed, runs in this process already, or does not start.
    """
    ray = await _in_thread(_import_ray)
    with _short_name(runtime / "ray") as short:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "rose.trainer.cluster_main", str(short), name),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is for the run, which ends Ray in its turn
        )
        try:
            address = await waits.within(_address(process), "start", "Ray", start_timeout_s, boundary="cluster")
            connection = _in_thread(_connect, ray, address, name)
            await waits.within(connection, "connection", "Ray", start_timeout_s, boundary="cluster")
            _take_back_signals()
            cluster = Cluster(ray, process)
            try:
                yield cluster
            finally:
                cluster.forget()
                await _disconnect(ray, waits)
        finally:
            await _end(process, waits)


async def _in_thread(work: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(DaemonThreads("Ray"), work, *arguments)


async def _address(process: Process) -> str:
    """Raises ClusterError if there is none."""
    assert process.stdout is not None
    said = json.loads(await process.stdout.readline() or b'{"error": "its process died"}')
    if "error" in said:
        raise ClusterError(f"Ray does not start: {said['error']}", to_do="see `rose doctor`; free memory or disk")
    return str(said["address"])


async def _death(process: Process) -> str:
    """Who of Ray died, once somebody has."""
    assert process.stdout is not None
    said = json.loads(await process.stdout.readline() or b'{"died": "the process above it"}')
    return str(said["died"])


async def _disconnect(ray: Any, waits: WaitBoard) -> None:
    with waits.waiting("end of the connection", "Ray", END_S):
        _, late = await asyncio.wait([asyncio.ensure_future(_in_thread(ray.shutdown))], timeout=END_S)
    if late:
        log.warning("the connection to Ray does not end")


async def _end(process: Process, waits: WaitBoard) -> None:
    assert process.stdin is not None
    process.stdin.close()
    with waits.waiting("end", "Ray", END_S):
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            log.warning("Ray is ended by force")
            process.kill()
            await process.wait()


def _import_ray() -> Any:
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # is looked at when it is first imported
    try:
        import ray
        from ray._private import worker
    except ImportError as error:
        raise ClusterError(f"Ray cannot be imported: {error}", to_do="pip install 'ray>=2.60,<3'") from error
    if ray.is_initialized():
        raise ClusterError("this process has a Ray cluster already", to_do="run one job in a process")
    logging.getLogger("ray").setLevel(logging.ERROR)
    # It would print what it has to say of its processes into the terminal of the run.
    vars(worker)["print_to_stdstream"] = _to_log
    return ray


def _connect(ray: Any, address: str, name: str) -> None:
    try:
        ray.init(address=address, namespace=name, configure_logging=False, log_to_driver=False)
    except Exception as error:
        why = next(iter(str(error).splitlines()), "")[:300]
        raise ClusterError(f"Ray at {address} cannot be reached: {type(error).__name__}: {why}") from error


def _take_back_signals() -> None:
    """Ray's native code has taken SIGTERM, and would end this process by it: have Python's own handlers again."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def _to_log(said: dict[str, Any], ignore_prefix: bool) -> None:
    del ignore_prefix
    for line in said.get("lines", ()):
        log.warning("Ray says", of=str(said.get("pid", "")), line=str(line)[:1000])


@contextlib.contextmanager
def _short_name(folder: Path) -> Iterator[Path]:
    """A link to the folder with a name so short that Ray's sockets fit behind it."""
    folder.mkdir()
    base = Path(tempfile.gettempdir())
    for left in base.glob(f"{_LINK_PREFIX}*"):
        if left.is_symlink() and not left.exists():  # of a run that was killed
            with contextlib.suppress(OSError):
                left.unlink()
    link = base / f"{_LINK_PREFIX}{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        link.unlink()
    link.symlink_to(folder)
    try:
        yield link
    finally:
        link.unlink(missing_ok=True)
