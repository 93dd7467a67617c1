"""The scheduler of a run: `rose scheduler` as a child process, at one port for as long as the run lives.

Invariants
- One that dies is started again at the same port, a bounded number of times; whoever speaks to it asks again by itself.
- It ends with the run, however the run ends: told to, by the kernel when the run is killed, or as a descendant. Only a
  run that is killed leaves its runtime folder, which the next one sweeps.
- Its log lies in the run's output folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from rose.errors import ClusterError
from rose.logs import logger
from rose.processes import at_forced_exit
from rose.runs import runtime_root
from rose.waits import WaitBoard
from rose_executor.launcher import SpawnedChild

log = logger("run scheduler")

NAME = "scheduler"
RESTARTS_MAX = 5
START_TIMEOUT_S = 60.0
_END_GRACE_S = 5.0
_LAST_WORDS_BYTES = 2000


class RunScheduler:
    """Made by `open_scheduler`. `run` must run for one that dies to be started again."""

    def __init__(
        self,
        process: Process,
        output: Path,
        token_file: Path,
        certificates: str,
        waits: WaitBoard,
        told: Callable[[str, str], None],
    ) -> None:
        self._process = process
        self._output = output
        self._token_file = token_file
        self._certificates = certificates
        self._waits = waits
        self._told = told
        self._restarts = 0
        self.address = ""

    async def ready(self) -> str:
        """Its address, once it answers for the first time. Raises ClusterError if it does not start."""
        self._told("starting", "")
        self.address = await self._serving()
        self._told("ready", self.address)
        return self.address

    async def run(self) -> None:
        """Start it again whenever it dies, until cancelled.

        Raises ClusterError or DeadlineExceeded if it cannot be, ClusterError if it died too often.
        """
        while True:
            code = await SpawnedChild(self._process).wait()
            why = f"it ended with code {code}{self._last_words()}"
            if self._restarts >= RESTARTS_MAX:
                raise ClusterError(
                    f"the run's scheduler is given up after {self._restarts} restarts: {why}",
                    to_do=f"see {_said(self._output)}",
                )
            self._restarts += 1
            log.warning("scheduler restarts", why=why, restarts=self._restarts)
            self._told("starting", f"restart {self._restarts}: {why}")
            port = int(self.address.rpartition(":")[2])
            spawned = _spawn(self._output, self._token_file, self._certificates, port)
            self._process = await self._waits.within(spawned, "process", NAME, START_TIMEOUT_S, boundary="cluster")
            try:
                await self._serving()
            except ClusterError as error:
                log.warning("scheduler does not come back", why=error.what)
                continue
            self._told("ready", f"{self.address}; restarts: {self._restarts}")

    async def end(self) -> None:
        """Tell it to end, and see it ended."""
        child = SpawnedChild(self._process)
        child.signal(signal.SIGTERM)
        try:
            with self._waits.waiting("end", NAME, _END_GRACE_S):
                async with asyncio.timeout(_END_GRACE_S):
                    await self._process.wait()
        except TimeoutError:
            log.warning("scheduler is ended by force")
            child.signal(signal.SIGKILL)
            await child.wait()
        self._told("ended", "")

    async def _serving(self) -> str:
        """The address in its first line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        said = await self._waits.within(line, "address", NAME, START_TIMEOUT_S, boundary="cluster")
        words = said.decode(errors="replace").split()
        if words[:2] != ["scheduler", "on"]:
            raise ClusterError(
                f"the run's scheduler does not start{self._last_words()}", to_do=f"see {_said(self._output)}"
            )
        return words[2].rstrip(";")

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            words = _said(self._output).read_bytes()[-_LAST_WORDS_BYTES:].decode(errors="replace").strip()
            return f": {words}" if words else ""
        return ""


@contextlib.asynccontextmanager
async def open_scheduler(
    output: Path,
    token_file: Path,
    certificates: str,
    port: int,
    waits: WaitBoard,
    told: Callable[[str, str], None],
) -> AsyncIterator[RunScheduler]:
    """Start a scheduler that logs below `output` and takes the token in `token_file`; port 0 is any free one.

    `certificates` is the folder of those that it shows, "" for none.

    `told` hears its state and a few words. Raises ClusterError or DeadlineExceeded if it cannot be started.
    """
    with at_forced_exit(lambda: _sweep(output)):
        spawned = _spawn(output, token_file, certificates, port)
        process = await waits.within(spawned, "process", NAME, START_TIMEOUT_S, boundary="cluster")
        made = RunScheduler(process, output, token_file, certificates, waits, told)
        try:
            yield made
        finally:
            await made.end()
            _sweep(output)


async def _spawn(output: Path, token_file: Path, certificates: str, port: int) -> Process:
    options = {"--token-file": token_file, "--port": port, "--name": NAME, "--out": output}
    if certificates:
        options["--certificates"] = certificates
    arguments = [str(word) for option in options.items() for word in option]
    module = ("-m", "rose_executor.child_main", str(os.getpid()), "rose.cli.main", "scheduler")
    try:
        with _said(output).open("ab") as said:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", *module, *arguments),
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=said,
                start_new_session=True,  # Ctrl-C is the run's to take
            )
    except OSError as error:
        raise ClusterError(
            f"the run's scheduler cannot be started: {error}", expected=f"a writable {output}"
        ) from error


def _said(output: Path) -> Path:
    """What it says besides its log: why it does not start."""
    return output / f"{NAME}.stderr"


def _sweep(output: Path) -> None:
    """Remove the runtime folders of schedulers that were killed; all are dead by now."""
    for folder in output.glob(f"{NAME}-*"):
        shutil.rmtree(runtime_root() / folder.name, ignore_errors=True)
