"""The executor's guest in all its lives: started below serving, supervised, put to sleep and woken, lent.

    supervisor  start, death, restart ── one GuestLife after another: follow, then offer
    sleeper     looks twice a second ── asleep, awake ──▶ the quota; gone, started ──▶ supervisor

Invariants
- What starts processes is placed below serving before it has done anything, and so is each guest.
- A guest that is about to end is offered to nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import aiohttp
import psutil

from rose.errors import ClusterError, DeadlineExceeded
from rose.logs import logger
from rose.machine import memory_available_bytes
from rose.waits import WaitBoard
from rose_executor.agent_figures import AgentFigures
from rose_executor.base_model import BaseModel
from rose_executor.engine_health import EngineHealth
from rose_executor.engine_process import EngineProcess
from rose_executor.engine_settings import EngineSettings
from rose_executor.guest_life import GuestLife, Receiving
from rose_executor.guest_proof import GuestProof
from rose_executor.guest_sleeper import GuestSleeper
from rose_executor.guest_stopped import stopped_processes
from rose_executor.guest_watch import GuestWatch
from rose_executor.kept_guest import KeptGuest
from rose_executor.launcher import Launcher
from rose_executor.lender import Lender
from rose_executor.lending import Lent, Room, lent
from rose_executor.meters import OpenSeconds
from rose_executor.page_shelf import PageShelf
from rose_executor.partitioner import Partitioner, Role
from rose_executor.supervisor import EngineSupervisor
from rose_executor.token_route import open_session
from rose_executor.version_follower import Followed

log = logger("executor")

_READY_S = 600.0

OpenPlaced = Callable[[Callable[[int], None]], AbstractAsyncContextManager[Launcher]]
"""Opens what starts guests; it tells the pid of each process at its birth."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The run that is lent to: how its weights are received and its scheduler is spoken to; `publisher` is a name."""

    receiving: Receiving
    lender: Lender
    publisher: str
    counts_address: str


class GuestKeeper:
    """`run` it. Everything that it is made of is its owner's to close, when `run` has returned.

    `keep_free_bytes` of the host's memory shall stay free, whatever becomes of the guest; 0: any.
    """

    def __init__(
        self,
        settings: EngineSettings,
        health: EngineHealth,
        watch: GuestWatch,
        partitioner: Partitioner,
        shelf: PageShelf,
        figures: AgentFigures,
        waits: WaitBoard,
        open_launcher: OpenPlaced,
        keep_free_bytes: int = 0,
    ) -> None:
        self._settings = settings
        self._health = health
        self._watch = watch
        self._partitioner = partitioner
        self._shelf = shelf
        self._figures = figures
        self._waits = waits
        self._open_launcher = open_launcher
        self._keep_free_bytes = keep_free_bytes
        self._gate = OpenSeconds()
        self._proof = GuestProof(
            settings.dtype,
            settings.max_model_len,
            waits,
            open_s=self.open_s,
            told_wrong=figures.answered_wrongly,
            set_apart=shelf.set_apart,
        )
        self.process: EngineProcess | None = None
        self.life: GuestLife | None = None
        self._supervisor: EngineSupervisor | None = None
        self._sleeper: GuestSleeper | None = None
        self._stopped: tuple[int, ...] = ()
        self._unwatched = ""

    def alive(self, incarnation: str) -> bool:
        """Whether an incarnation may still generate."""
        process = self.process
        if process is None or not incarnation or process.incarnation != incarnation:
            return False
        if self.life is not None and self.life.live.incarnation == incarnation:
            return not self.life.live.dead.is_set()
        return process.alive

    async def run(self, joined: Joined) -> None:
        async with contextlib.AsyncExitStack() as stack:
            launcher = await stack.enter_async_context(self._open_launcher(self._place))
            http = await stack.enter_async_context(open_session())
            self.process = EngineProcess(self._settings, launcher, self._waits, self._partitioner)
            supervisor = self._supervisor = self._supervised(self.process, http)
            stack.push_async_callback(supervisor.stop)
            stack.callback(self._thaw)
            sleeper = self._sleeper = self._sleeps(self.process, supervisor)
            self._figures.presence = sleeper.presence
            tasks = [
                asyncio.create_task(supervisor.run(BaseModel(self._settings.model_dir)), name="supervisor"),
                asyncio.create_task(self._live(supervisor, joined), name="lives"),
                asyncio.create_task(sleeper.run(), name="sleeper"),
            ]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                # The offer first: nobody is sent to a guest that is about to end.
                for task in reversed(tasks):
                    await ended(task)

    def end_if_frozen(self) -> None:
        """A guest that did not obey is replaced. It is thawed only to die."""
        why = self._watch.rules.frozen
        if not why or self.process is None or self._supervisor is None:
            return
        log.error("the guest is ended", why=why)
        if self.life is not None:
            self.life.live.kill(why)
        else:
            self.process.kill()
        self._watch.rules.replaced()

    def renew_watchdog(self) -> None:
        """One that has died is replaced. Where none can be had the guest goes on without, and each look tries again."""
        try:
            renewed = self._partitioner.renew_watchdog()
        except ClusterError as error:
            if str(error) != self._unwatched:
                log.error("nothing would end the guest after this process", why=str(error))
            self._unwatched = str(error)
            return
        if renewed:
            log.warning("the guest's watchdog had died, and there is another now")
            self._unwatched = ""

    def lent(self) -> Lent:
        """How many requests the guest may have now."""
        watch = self._watch
        return lent(
            watch.seen, watch.trouble, watch.rules, self._stopped, self._settings.max_num_seqs, time.monotonic()
        )

    async def look_for_stopped(self) -> None:
        """See whether somebody else has stopped it: not our own brake, which is lent to nobody anyway."""
        process = self.process
        alive = process is not None and process.alive and not self._watch.rules.frozen
        stopped = await asyncio.to_thread(stopped_processes, process.pid) if process is not None and alive else ()
        if stopped and not self._stopped:
            log.warning("the guest was stopped by somebody else: it is lent no more until it goes on", pids=stopped)
        elif self._stopped and not stopped:
            log.info("the guest is no longer stopped", pids=self._stopped)
        self._stopped = stopped

    def show(self) -> None:
        """How its proof and its health are, on the status page."""
        self._figures.show_guest(self._proof.words, self._health.words(time.monotonic()))

    def open_s(self) -> float:
        """For how long guests might compute until now."""
        guest = None if self._watch.seen is None else self._watch.seen.guest.state
        rules = self._watch.rules
        gate_open = rules.might_compute
        return self._gate.saw(None if guest is None else guest.open_s, gate_open, time.monotonic())

    def _sleeps(self, process: EngineProcess, supervisor: EngineSupervisor) -> GuestSleeper:
        settings = self._settings
        return GuestSleeper(
            self._watch.rules.kv,
            KeptGuest(process, supervisor, self._shelf, lambda: self.life),
            -(-settings.max_model_len // settings.block_size),
            self._keep_free_bytes,
            memory_available_bytes,
        )

    def _told(self, state: str, detail: str) -> None:
        self._figures.engine(state, detail)
        if self._sleeper is not None:
            self._sleeper.process(state)

    def _supervised(self, process: EngineProcess, http: aiohttp.ClientSession) -> EngineSupervisor:
        return EngineSupervisor(
            process,
            self._health,
            http,
            self._waits,
            turn_timeout_s=_READY_S,
            ready_timeout_s=_READY_S,
            told=self._told,
            restarts=self._restarted,
            joins=lambda live: None,
        )

    async def _live(self, supervisor: EngineSupervisor, joined: Joined) -> None:
        while True:
            try:
                live = await supervisor.ready()
            except DeadlineExceeded:
                continue  # its supervisor says when it is given up
            self.life = GuestLife(
                live,
                joined.receiving,
                joined.lender,
                self._waits,
                publisher=joined.publisher,
                counts_address=joined.counts_address,
                max_requests=self._settings.max_num_seqs,
                prove=self._proof.prove,
                now=self._now,
                told=self._followed,
            )
            self._shelf.page(live.incarnation)
            try:
                await self.life.run()
            finally:
                self.life = None

    def _now(self) -> Room:
        guest = None if self._watch.seen is None else self._watch.seen.guest.state
        quota, slots = self._watch.rules.quota, self.lent().slots
        if guest is None or quota is None:
            return Room(slots, 0.0, 0.0)
        total = max(1, guest.kv_blocks_total)
        return Room(slots, min(1.0, guest.kv_blocks_used / total), min(1.0, quota.kv_blocks / total))

    def _followed(self, followed: Followed, fetched_bytes: int) -> None:
        self._figures.followed(followed, fetched_bytes)
        # A new version is the end of a step of the run: what the guest may hold is planned anew.
        self._watch.rules.kv.step_ended(time.monotonic())

    def _restarted(self, cause: str) -> None:
        log.warning("the guest is started anew", why=cause)
        self._figures.restarted()

    def _place(self, pid: int) -> None:
        try:
            self._partitioner.place(pid, Role.GUEST)
        except ClusterError:
            if psutil.pid_exists(pid):
                raise
            # It died at once; who waits for it will hear so.

    def _thaw(self) -> None:
        """So that a frozen guest can end when it is asked to; one that stays frozen is killed, which thaws again."""
        try:
            self._partitioner.thaw()
        except ClusterError as error:
            log.error("the guest cannot be thawed", why=str(error))


async def ended(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it has tidied up; what it raises now comes after what ended it."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
