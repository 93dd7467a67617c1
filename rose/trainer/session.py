"""The parts of one run, wired: warm process, engine, publisher, rollout, loop.

Invariants
- Parts do not know their owner; they are put together here and nowhere else.
- Parts are ended in the reverse order of their start, however the session ends; the books are closed last, when every
  token page is final.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from aiohttp import ClientSession

from rose.config import Job
from rose.env.chat import ChatRenderer
from rose.env.contract import load_environment
from rose.env.host import EnvironmentHost, HostSettings
from rose.errors import RoseError
from rose.trainer.books import Books
from rose.trainer.evaluation import Evaluator
from rose.trainer.loop import Parts, TrainingLoop
from rose.trainer.optimizer import OptimizerSettings, WarmUpAdamW
from rose.trainer.parity import ParityCheck, probe_prefixes
from rose.trainer.policy import Policy, load_policy, load_tokenizer
from rose.trainer.publisher import Publisher
from rose.trainer.recorder import Recorder
from rose.trainer.rollout import Rollout
from rose.trainer.sampler import SamplingSettings, TurnSampler
from rose.waits import WaitBoard
from rose_executor.engine_health import EngineHealth
from rose_executor.engine_process import EngineProcess
from rose_executor.engine_settings import EngineSettings
from rose_executor.fresh_probe import ProbeScores, probe_fresh
from rose_executor.supervisor import EngineSupervisor
from rose_executor.token_route import open_session
from rose_executor.warm_process import WarmProcess

ENGINE_ID = "engine-0"
PROBE_TASKS = 8
START = "start of engine and policy"


class Session:
    """Runs one job once."""

    def __init__(self, job: Job, recorder: Recorder, books: Books, waits: WaitBoard) -> None:
        self.job = job
        self.recorder = recorder
        self._books = books
        self._waits = waits
        self._engine_log = recorder.run.output / "engine.log"

    async def run(self) -> None:
        """Start everything, train, end everything. Raises the first error of any part."""
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._books.close)
            with self.recorder.during(START):
                warm_start = asyncio.create_task(self._start_warm())
                stack.push_async_callback(_end_warm, warm_start)
                policy, renderer = await asyncio.to_thread(_load_policy, self.job)
                warm = await warm_start
            http = await stack.enter_async_context(open_session())
            supervisor = self._supervisor(warm, http)
            stack.push_async_callback(supervisor.stop)
            await self._drive(warm, supervisor, policy, renderer)

    async def _start_warm(self) -> WarmProcess:
        timeout_s = self.job.engine.start_timeout_s
        return await WarmProcess.start(self._waits, log_path=self._engine_log, timeout_s=timeout_s)

    def _supervisor(self, warm: WarmProcess, http: ClientSession) -> EngineSupervisor:
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
        )
        return EngineSupervisor(
            EngineProcess(settings, warm, self._waits),
            EngineHealth(engine.restarts_max),
            http,
            self._waits,
            silence_s=self.job.rollout.turn_timeout_s,
            ready_timeout_s=2 * engine.start_timeout_s,
            told=lambda state, detail: self.recorder.part(ENGINE_ID, state, detail),
            restarts=lambda cause: self.recorder.restart(ENGINE_ID, cause),
            joins=self._books.watch,
        )

    async def _drive(
        self, warm: WarmProcess, supervisor: EngineSupervisor, policy: Policy, renderer: ChatRenderer
    ) -> None:
        """Run the loop beside the two drivers it needs; whichever fails first ends all three."""
        versions = self.recorder.run.runtime / "versions"
        publisher = Publisher(versions, self.job.model.path, self.job.weights.keep, supervisor, self._waits)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(publisher.run(), name="publisher")
                await publisher.publish(0, policy.weights())
                group.create_task(supervisor.run(publisher), name="supervisor")
                with self.recorder.during(START):
                    await supervisor.ready()
                await self._train(warm, supervisor, publisher, policy, renderer)
                publisher.stop()
                await supervisor.stop()
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors

    async def _train(
        self,
        warm: WarmProcess,
        supervisor: EngineSupervisor,
        publisher: Publisher,
        policy: Policy,
        renderer: ChatRenderer,
    ) -> None:
        host = self._host()
        rollout = self._rollout(supervisor, host, renderer)
        optimizer = OptimizerSettings(self.job.train.learning_rate, warm_up_updates=self.job.train.warmup_steps)

        async def score_fresh(version: Path, prefixes: list[list[int]]) -> ProbeScores:
            return await probe_fresh(
                warm,
                version,
                prefixes,
                work_dir=self.recorder.run.runtime,
                log_path=self.recorder.run.output / "fresh-engine.log",
                waits=self._waits,
                dtype=self.job.engine.dtype,
                max_model_len=self.job.engine.max_model_len,
            )

        parity = ParityCheck(
            probe_prefixes(await self._probe_prompts(host, renderer)),
            self.job.weights.parity_tolerance,
            supervisor,
            publisher,
            score_fresh,
            self._books,
            self.recorder,
        )
        parts = Parts(
            policy=policy,
            optimizer=WarmUpAdamW(policy.parameters(), optimizer),
            rollout=rollout,
            evaluator=Evaluator(rollout, self.job.evaluation),
            publisher=publisher,
            parity=parity,
            books=self._books,
            recorder=self.recorder,
            engine_id=ENGINE_ID,
        )
        try:
            await TrainingLoop(self.job, parts).run()
        finally:
            await parity.cancel()

    def _host(self) -> EnvironmentHost:
        environment = self.job.environment
        settings = HostSettings(call_timeout_s=environment.step_timeout_s)
        return EnvironmentHost(load_environment(environment.kind, environment.params), self._waits, settings)

    def _rollout(self, supervisor: EngineSupervisor, host: EnvironmentHost, renderer: ChatRenderer) -> Rollout:
        sampling = SamplingSettings(
            temperature=self.job.rollout.temperature,
            max_new_tokens=self.job.rollout.max_new_tokens,
            stop_token_ids=(renderer.end_of_turn_id,),
            attempts_max=self.job.engine.restarts_max + 1,
        )
        return Rollout(
            TurnSampler(supervisor, self._books, sampling),
            host,
            renderer,
            self._books,
            context_tokens_max=self.job.engine.max_model_len,
            turns_max=self.job.environment.turns_max,
            concurrency=self.job.engine.max_num_seqs,
        )

    async def _probe_prompts(self, host: EnvironmentHost, renderer: ChatRenderer) -> list[tuple[int, ...]]:
        """First prompts of a few held-out tasks."""
        prompts = []
        for index in range(PROBE_TASKS):
            episode = await host.open(self.job.evaluation.first_seed + index, f"probe-{index}")
            prompts.append(renderer.open(episode.system_prompt, episode.first_observation)[1].ids)
            await episode.close()
        return prompts


async def _end_warm(start: asyncio.Task[WarmProcess]) -> None:
    start.cancel()
    (result,) = await asyncio.gather(start, return_exceptions=True)
    if isinstance(result, WarmProcess):
        await result.close()


def _load_policy(job: Job) -> tuple[Policy, ChatRenderer]:
    torch.set_num_threads(job.train.threads)
    torch.manual_seed(job.run.seed)
    return load_policy(job.model.path), ChatRenderer(load_tokenizer(job.model.path))


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
