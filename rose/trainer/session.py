"""The parts of one run, wired: warm process, engine, crew, leases, versions, rollout, loop.

Invariants
- Parts do not know their owner; they are put together here and nowhere else.
- Parts are ended in the reverse order of their start, however the session ends; the books are closed last, when every
  token page is final.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

from aiohttp import ClientSession

from rose.certificates import Certificates, read_certificates
from rose.config import Job
from rose.env.chat import ChatRenderer
from rose.env.daemon_threads import DaemonThreads
from rose.env.delayed import delayed
from rose.env.episodes import Episodes
from rose.errors import RoseError
from rose.logs import logger
from rose.machine import look
from rose.trainer.all_of import all_of
from rose.trainer.books import Books
from rose.trainer.crew import Crew, OpenCrew, open_crew
from rose.trainer.engine_versions import EngineVersions
from rose.trainer.evaluation import Evaluator
from rose.trainer.leasing import Leasing, new_token, open_leasing
from rose.trainer.loop import Parts, TrainingLoop
from rose.trainer.parity import ParityCheck, probe_prefixes
from rose.trainer.policy import load_tokenizer
from rose.trainer.probe_prompts import probe_prompts
from rose.trainer.recorder import Recorder
from rose.trainer.rollout import Rollout
from rose.trainer.sampler import SamplingSettings, TurnSampler
from rose.waits import WaitBoard
from rose_executor.engine_health import EngineHealth
from rose_executor.engine_launcher import OpenLauncher, open_launcher
from rose_executor.engine_process import EngineProcess
from rose_executor.engine_settings import EngineSettings
from rose_executor.fresh_probe import ProbeScores, probe_fresh
from rose_executor.launcher import Launcher
from rose_executor.supervisor import EngineSupervisor
from rose_executor.token_route import open_session
from rose_transfer.transport.tcp import TcpServer

log = logger("session")

ENGINE_ID = "engine-0"
LOAD_END_S = 60.0
START = "start of engine and ranks"
LEASE_WAIT_S = 3600.0
"""A group that has not begun waits for those before it, for a whole rollout if need be. That there is an engine at all
is for supervisor and scheduler to see to."""
LEASE_SPARE_S = 60.0
"""For what comes after a turn's last token: its final count, news of a death."""
CONCURRENCY_MAX = 1024
"""Trajectories under way at once, each with its environment; the scheduler decides which of them sample."""


class Session:
    """Runs one job once."""

    def __init__(
        self,
        job: Job,
        recorder: Recorder,
        books: Books,
        waits: WaitBoard,
        open_launcher: OpenLauncher = open_launcher,
        open_crew: OpenCrew = open_crew,
    ) -> None:
        self.job = job
        self.recorder = recorder
        self._books = books
        self._waits = waits
        self._open_launcher = open_launcher
        self._open_crew = open_crew
        self._engine_log = recorder.run.output / "engine.log"

    async def run(self) -> None:
        """Start everything, train, end everything. Raises the first error of any part."""
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._books.close)
            http = await stack.enter_async_context(open_session())
            token, certificates = new_token(), read_certificates(self.job.run.certificates)
            leasing_open = open_leasing(self.job, token, certificates, self.recorder, self._books, http, self._waits)
            with self.recorder.during(START):
                async with _loading(self.job, self._waits) as loading:
                    launcher, crew, leasing = await all_of(
                        self._launcher(stack),
                        stack.enter_async_context(self._open_crew(self.job, self.recorder, self._waits)),
                        stack.enter_async_context(leasing_open),
                    )
                    renderer = await loading
            supervisor = self._supervisor(launcher, http, leasing)
            stack.push_async_callback(supervisor.stop)
            engine_versions = self._engine_versions(supervisor, token, certificates)
            stack.push_async_callback(engine_versions.close)
            driving = self._drive(launcher, supervisor, engine_versions, leasing, crew, renderer)
            await crew.while_alive(driving)

    async def _launcher(self, stack: contextlib.AsyncExitStack) -> Launcher:
        opening = self._open_launcher(self._waits, self._engine_log, self.job.engine.start_timeout_s)
        launcher = await stack.enter_async_context(opening)
        self.recorder.part("warm process", "ready")
        return launcher

    def _engine_versions(
        self, supervisor: EngineSupervisor, token: str, certificates: Certificates | None
    ) -> EngineVersions:
        weights = self.job.weights
        tls = None if certificates is None else certificates.server_context
        serve = partial(TcpServer, token=token, waits=self._waits, port=weights.port, tls=tls)
        folder = self.recorder.run.runtime / "versions"
        return EngineVersions(folder, self.job.model.path, weights.keep, supervisor, self._waits, serve)

    def _supervisor(self, launcher: Launcher, http: ClientSession, leasing: Leasing) -> EngineSupervisor:
        engine = self.job.engine
        settings = EngineSettings(
            engine_id=ENGINE_ID,
            model_dir=self.job.model.path,
            runtime_dir=self.recorder.run.runtime,
            log_path=self._engine_log,
            dtype=engine.dtype,
            max_model_len=engine.max_model_len,
            max_num_seqs=engine.max_num_seqs,
            block_size=engine.block_size,
            kv_cache_bytes=int(engine.kv_cache_gib * 2**30),
            stream_interval=engine.stream_interval,
            port=engine.port,
            start_timeout_s=engine.start_timeout_s,
            async_scheduling=bool(look().gpus),
        )
        return EngineSupervisor(
            EngineProcess(settings, launcher, self._waits),
            EngineHealth(engine.restarts_max),
            http,
            self._waits,
            turn_timeout_s=self.job.rollout.turn_timeout_s,
            ready_timeout_s=2 * engine.start_timeout_s,
            told=lambda state, detail: self.recorder.part(ENGINE_ID, state, detail),
            restarts=lambda cause: self.recorder.restart(ENGINE_ID, cause),
            joins=leasing.joins,
        )

    async def _drive(
        self,
        launcher: Launcher,
        supervisor: EngineSupervisor,
        engine_versions: EngineVersions,
        leasing: Leasing,
        crew: Crew,
        renderer: ChatRenderer,
    ) -> None:
        """Run the loop beside the drivers it needs; whichever fails first ends them all."""
        try:
            async with asyncio.TaskGroup() as group:
                leases = group.create_task(leasing.run(engine_versions.serving), name="leases")
                group.create_task(engine_versions.run(), name="engine versions")
                leasing.lend(await engine_versions.open())
                await engine_versions.publish(0, await crew.actor.weights(), await crew.actor.answer())
                group.create_task(supervisor.run(engine_versions), name="supervisor")
                with self.recorder.during(START):
                    await supervisor.ready()
                episodes = delayed(crew.episodes, self.job.environment, self.job.run.seed, self._waits)
                rollout = self._rollout(leasing, episodes, renderer)
                await self._train(launcher, supervisor, engine_versions, crew, rollout)
                engine_versions.stop()
                await supervisor.stop()
                leases.cancel()
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors

    async def _train(
        self,
        launcher: Launcher,
        supervisor: EngineSupervisor,
        engine_versions: EngineVersions,
        crew: Crew,
        rollout: Rollout,
    ) -> None:
        async def score_fresh(version: Path, prefixes: list[list[int]]) -> ProbeScores:
            return await probe_fresh(
                launcher,
                version,
                prefixes,
                work_dir=self.recorder.run.runtime,
                log_path=self.recorder.run.output / "fresh-engine.log",
                waits=self._waits,
                dtype=self.job.engine.dtype,
                max_model_len=self.job.engine.max_model_len,
            )

        parity = ParityCheck(
            probe_prefixes(await probe_prompts(rollout, self.job.evaluation.first_seed)),
            self.job.weights.parity_tolerance,
            supervisor,
            engine_versions,
            score_fresh,
            self._books,
            self.recorder,
            self._waits,
        )
        parts = Parts(
            actor=crew.actor,
            reference=crew.reference,
            rollout=rollout,
            evaluator=Evaluator(rollout, self.job.evaluation),
            engine_versions=engine_versions,
            parity=parity,
            books=self._books,
            recorder=self.recorder,
            engine_id=ENGINE_ID,
        )
        try:
            await TrainingLoop(self.job, parts).run()
        finally:
            await parity.cancel()

    def _rollout(self, leasing: Leasing, episodes: Episodes, renderer: ChatRenderer) -> Rollout:
        job = self.job.rollout
        sampling = SamplingSettings(
            temperature=job.temperature,
            max_new_tokens=job.max_new_tokens,
            stop_token_ids=(renderer.end_of_turn_id,),
            attempts_max=self.job.engine.restarts_max + 1,
            lease_wait_s=LEASE_WAIT_S,
            lease_hold_s=job.turn_timeout_s + LEASE_SPARE_S,
        )
        return Rollout(
            TurnSampler(leasing.client, leasing.engines, self._books, sampling),
            episodes,
            renderer,
            self._books,
            context_tokens_max=self.job.engine.max_model_len,
            turns_max=self.job.environment.turns_max,
            concurrency=min(CONCURRENCY_MAX, max(self.job.engine.max_num_seqs, job.groups * job.group_size)),
        )


@contextlib.asynccontextmanager
async def _loading(job: Job, waits: WaitBoard) -> AsyncIterator[asyncio.Future[ChatRenderer]]:
    """Load the tokenizer on a thread. A failure waits for its end; a run that is stopped has nothing to lose and does
    not.

    The thread cannot be ended, and the interpreter's exit would be unsafe while it goes on.
    """
    loading = asyncio.get_running_loop().run_in_executor(DaemonThreads("load tokenizer"), _load_renderer, job)
    try:
        yield loading
    except Exception:
        with waits.waiting("end of its loading", "tokenizer", LOAD_END_S):
            await asyncio.wait([loading], timeout=LOAD_END_S)
        raise
    finally:
        loading.cancel()


def _load_renderer(job: Job) -> ChatRenderer:
    return ChatRenderer(load_tokenizer(job.model.path))


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of ours in a group, else the first of any kind."""
    leaves = list(_leaves(errors))
    return next((error for error in leaves if isinstance(error, RoseError)), leaves[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error
