"""One engine over its incarnations: start, find, watch and end the processes behind an engine id.

Invariants
- Each start is a new incarnation with a new token page; the old page's reader stays readable.
- `start` either returns with an engine that answers on both its sockets, or leaves no process behind.
- When `wait_dead` has returned, no process of that incarnation runs any more.
- A guest is started with what its host says, and released by it before it is killed; if that takes too long, or fails
  in whatever way, it is killed all the same.
- A guest that was frozen may not die before it is thawed: a thaw that fails is told, and tried again while it lives,
  also after whoever waited for its end has given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import aiohttp

from rose.errors import ClusterError, DeadlineExceeded, EngineError
from rose.logs import logger
from rose.waits import WaitBoard
from rose_executor.child_log import ChildLog
from rose_executor.control_client import ControlClient
from rose_executor.engine_env import EngineEnv
from rose_executor.engine_settings import EngineSettings
from rose_executor.launcher import Child, Command, Launcher
from rose_executor.page_reader import PageReader
from rose_executor.page_writer import lacks_room
from rose_executor.partition_terms import GuestHost
from rose_executor.token_page import page_slots

log = logger("engine")

_POLL_S = 0.02
_HOSTED_TIMEOUT_S = 30.0
_RELEASE_TIMEOUT_S = 5.0
_KILL_TIMEOUT_S = 10.0
_THAW_AGAIN_S = 0.2
# vLLM's words, logged by an API server that then ends with code 0, as if it had been asked to.
_CORE_LOST = "engine core exited unexpectedly"


class EngineProcess:
    """Owns at most one live incarnation. `launcher` is a `WarmProcess` on CPU, a `SpawnLauncher` on GPU.

    `host` is what keeps a guest below its serving engine; None for an engine that is nobody's guest.
    """

    def __init__(
        self, settings: EngineSettings, launcher: Launcher, waits: WaitBoard, host: GuestHost | None = None
    ) -> None:
        self.settings = settings
        self._launcher = launcher
        self._waits = waits
        self._host = host
        self._killing: dict[Child, asyncio.Task[None]] = {}
        self._not_thawed = ""
        self._child: Child | None = None
        self._log = ChildLog(settings.log_path)
        self._control: ControlClient | None = None
        self._page: PageReader | None = None
        self._base_url = ""
        self._incarnation = ""

    async def start(
        self, version: int, snapshot_dir: Path | None = None, launched: Callable[[], None] | None = None
    ) -> None:
        """Start an incarnation that serves `snapshot_dir` (default: the model folder) as weight `version`.

        `launched` is called as soon as there is a process of it. Raises ConfigError or ClusterError before anything
        is started, LauncherDied if nothing can be started any more, EngineError if its host forbids it now, or with the
        last lines of the log if the engine dies on the way, DeadlineExceeded after `start_timeout_s`, or if its host is
        silent.
        """
        if self._child is not None and self._child.exit_code is None:
            raise EngineError(f"{self.settings.engine_id} is running already", to_do="stop it first")
        model_dir = snapshot_dir if snapshot_dir is not None else self.settings.model_dir
        self.settings.check(model_dir)
        await self._forget()
        self._incarnation = secrets.token_hex(8)
        self._log = ChildLog(self.settings.log_path)
        env = EngineEnv(
            engine_id=self.settings.engine_id,
            incarnation=self._incarnation,
            weight_version=version,
            control_socket=self.settings.control_socket,
            token_page=self.settings.token_page(self._incarnation),
            unpacked_weights=self.settings.unpacked_weights,
            board=self.settings.board,
            step_log=self.settings.step_log,
            step_profile=self.settings.step_profile,
        )
        hosted = {} if self._host is None else await self._hosted(self._host)
        self._child = await self._launcher.launch(
            Command(
                module="rose_executor.engine_main",
                arguments=tuple(self.settings.arguments(model_dir)),
                env={**env.variables(), **hosted},
                cwd=self.settings.runtime_dir,
                log_path=self.settings.log_path,
            )
        )
        try:
            if launched is not None:
                launched()
            await self._waits.within(
                self._until_ready(self._child, env.token_page),
                "engine start",
                self.settings.engine_id,
                self.settings.start_timeout_s,
                boundary="engine",
                to_do=f"see {self.settings.log_path}",
            )
        except BaseException:
            self.kill()
            await self._until_gone()
            # Nobody was told where it listens, so nothing can have been generated. A page that cannot be removed counts
            # nothing either, and why the start failed matters more.
            with contextlib.suppress(OSError):
                env.token_page.unlink(missing_ok=True)
            raise

    def lacks_room(self) -> str:
        """Why the token page of a next incarnation has no room, "" if it has. Waits for the disk; from any thread."""
        return lacks_room(self.settings.token_page("room"), page_slots(self.settings.max_num_seqs))

    @property
    def base_url(self) -> str:
        """`http://127.0.0.1:PORT` of the live incarnation."""
        return self._base_url

    @property
    def incarnation(self) -> str:
        """16 hex digits, new at every start; empty before the first."""
        return self._incarnation

    @property
    def pid(self) -> int:
        """Process and group id of the live or last incarnation's API server."""
        return self._started().pid

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.exit_code is None

    @property
    def control(self) -> ControlClient:
        """Raises EngineError before the first start."""
        if self._control is None:
            raise self._not_started()
        return self._control

    @property
    def page(self) -> PageReader:
        """The token page of the live or last incarnation. The caller discards it when its counts are settled.

        Raises EngineError before the first start.
        """
        if self._page is None:
            raise self._not_started()
        return self._page

    async def wait_dead(self) -> int:
        """Return the exit code once every process of this incarnation has ended. Watches, so no deadline."""
        return await self._started().wait()

    def death(self) -> str:
        """How the last incarnation ended, in words."""
        if _CORE_LOST not in self._log.text():
            return self._started().death()
        return f"its engine core died: {self._log.core_cause() or 'it was killed, or crashed without a word'}"

    async def stop(self, grace_s: float = 5.0) -> None:
        """End the live incarnation: politely, after `grace_s` by force. Its token page stays."""
        if self.alive:
            self._started().signal(signal.SIGTERM)
            with contextlib.suppress(DeadlineExceeded):
                await self._waits.within(
                    self.wait_dead(), "engine end", self.settings.engine_id, grace_s, boundary="engine"
                )
            self.kill()
            await self._until_gone()
        await self._forget()

    def kill(self) -> None:
        """SIGKILL the process group of the live incarnation, if there is one; a guest's as soon as it is released."""
        if not self.alive:
            return
        child = self._started()
        if self._host is None:
            child.signal(signal.SIGKILL)
        elif child not in self._killing:  # that of one before it may still wait for its release
            killing = asyncio.create_task(self._kill_guest(self._host, child), name="end of a guest")
            self._killing[child] = killing
            killing.add_done_callback(lambda _: self._killing.pop(child))

    async def _kill_guest(self, host: GuestHost, child: Child) -> None:
        try:
            await self._waits.within(
                asyncio.to_thread(host.release, child.pid),
                "release of a guest",
                self.settings.engine_id,
                _RELEASE_TIMEOUT_S,
                boundary="engine",
            )
        except Exception as error:  # noqa: BLE001 - whatever its host makes of it, it is killed
            log.error("the guest is killed without being released", engine_id=self.settings.engine_id, why=_why(error))
        finally:
            child.signal(signal.SIGKILL)
            await self._thaw_to_die(host, child)

    async def _thaw_to_die(self, host: GuestHost, child: Child) -> None:
        while why := self._thaw_trouble(host):
            if why != self._not_thawed:
                log.error("a guest that is killed cannot be thawed", engine_id=self.settings.engine_id, why=why)
            self._not_thawed = why
            with self._waits.waiting("thaw of a guest that is killed", self.settings.engine_id, _THAW_AGAIN_S):
                await asyncio.sleep(_THAW_AGAIN_S)
            if child.exit_code is not None:
                break
        self._not_thawed = ""

    def _thaw_trouble(self, host: GuestHost) -> str:
        try:
            host.thaw()
        except Exception as error:  # noqa: BLE001 - told, and tried again
            return _why(error)
        return ""

    async def _hosted(self, host: GuestHost) -> Mapping[str, str | None]:
        try:
            return await self._waits.within(
                asyncio.to_thread(host.guest_env),
                "leave to start a guest",
                self.settings.engine_id,
                _HOSTED_TIMEOUT_S,
                boundary="cluster",
            )
        except ClusterError as error:
            # Another start, a little later, may find it mended: a device recovers, the serving engine comes back.
            what = f"{self.settings.engine_id} may not be started now: {error.what}"
            raise EngineError(what, expected=error.expected, to_do=error.to_do) from error

    async def _until_ready(self, child: Child, page_path: Path) -> None:
        death = asyncio.ensure_future(child.wait())
        ready = asyncio.ensure_future(self._until_answering())
        try:
            await asyncio.wait({death, ready}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise EngineError(
                    f"{self.settings.engine_id} ended with code {death.result()} while starting"
                    f"{self._log.last_words()}",
                    to_do=f"see {self.settings.log_path}",
                )
            ready.result()
            self._page = PageReader(page_path)
        finally:
            death.cancel()
            ready.cancel()

    async def _until_answering(self) -> None:
        while not self.settings.control_socket.exists():
            await asyncio.sleep(_POLL_S)
        self._control = ControlClient(
            self.settings.control_socket, engine_id=self.settings.engine_id, waits=self._waits
        )
        while not (port := (await self._control.describe()).http_port):
            await asyncio.sleep(_POLL_S)
        self._base_url = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession() as session:
            while not await _healthy(session, self._base_url):
                await asyncio.sleep(_POLL_S)

    async def _until_gone(self) -> None:
        try:
            await self._waits.within(
                self.wait_dead(), "engine end", self.settings.engine_id, _KILL_TIMEOUT_S, boundary="engine"
            )
        except DeadlineExceeded as late:
            if not self._not_thawed:
                raise
            raise DeadlineExceeded(
                f"{late.what}; it cannot be thawed to die: {self._not_thawed}", boundary="cluster"
            ) from late

    async def _forget(self) -> None:
        if self._control is not None:
            await self._control.close()
        socket = self.settings.control_socket
        try:
            socket.unlink(missing_ok=True)
        except OSError as error:
            raise ClusterError(
                f"the socket {socket} cannot be removed: {error.strerror}", expected="a folder that may be written to"
            ) from error

    def _started(self) -> Child:
        if self._child is None:
            raise self._not_started()
        return self._child

    def _not_started(self) -> EngineError:
        return EngineError(f"{self.settings.engine_id} was never started")


async def _healthy(session: aiohttp.ClientSession, base_url: str) -> bool:
    try:
        async with session.get(f"{base_url}/health") as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        # Who waits for it has a deadline, which may be longer than a question's own.
        return False


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
