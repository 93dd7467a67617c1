"""`rose profile` as a process: an engine is started, made to step, and what its steps cost is kept.

Invariants
- Whatever is wrong with the model, the machine or the folder is said before anything starts.
- What ends it early (Ctrl-C, an engine that dies) leaves no engine, and the profile that was there as it was.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rose.engine_limits import DTYPE_BYTES
from rose.errors import ConfigError
from rose.logs import open_log
from rose.machine import Machine, look
from rose.model_folder.folder import ModelFolder, read_model_folder
from rose.processes import two_stage_stop
from rose.runs import Run, open_service
from rose.status import StatusBoard
from rose.stop import Stop
from rose.waits import WaitBoard
from rose_executor.engine_launcher import open_launcher
from rose_executor.engine_process import EngineProcess
from rose_executor.engine_settings import EngineSettings
from rose_executor.profile_fit import HeldOut, fitted, held_out
from rose_executor.profile_key import ProfileKey, profile_key
from rose_executor.profile_plan import Grid, plan
from rose_executor.profile_run import Progress, record_steps
from rose_executor.profile_store import ProfileStore
from rose_executor.step_log import SeenStep
from rose_executor.step_profile import StepProfile

NAME = "profile"
_WARM_LOADS = 2
_STREAM_INTERVAL = 64
"""Hardly any of the processor for answers that nobody reads."""


@dataclass(frozen=True, slots=True)
class ProfileJob:
    """What is profiled, and how. `serving`: as a serving engine has the model, its weights packed as vLLM likes them.

    `out` gets an output folder with the logs and the steps; `store` is the folder of the profile.
    """

    model: Path
    store: Path
    out: Path
    serving: bool
    dtype: str
    max_model_len: int
    max_num_seqs: int
    block_size: int
    kv_cache_gib: float
    seconds: float
    seed: int
    start_timeout_s: float


@dataclass(frozen=True, slots=True)
class Profiled:
    """What came of it; `took_s` from start to end."""

    key: ProfileKey
    profile: StepProfile
    steps: list[SeenStep]
    error: HeldOut
    file: Path
    output: Path
    took_s: float


def run_profile(job: ProfileJob, starts: Callable[[], None], told: Callable[[Progress], None]) -> Profiled:
    """Do it. Main thread only. `starts` is called before the engine is, `told` hears how far it is then.

    Raises ConfigError for a wrong model or setting, ClusterError for what the machine lacks, EngineError or
    DeadlineExceeded for an engine that fails, KeyboardInterrupt after Ctrl-C.
    """
    began_s = time.monotonic()
    model, machine = read_model_folder(job.model), look()
    if job.max_model_len > model.context_tokens_max:
        raise ConfigError(
            f"--max-model-len {job.max_model_len}",
            expected=f"at most the {model.context_tokens_max} tokens of {job.model}",
            to_do="lower it",
        )
    waits, stop, store = WaitBoard(), Stop(), ProfileStore(job.store)
    store.prepare()
    with (
        open_service(NAME, job.out.absolute(), waits, {}) as run,
        two_stage_stop(stop.ask, run.close),
        open_log(run.output / "log.jsonl"),
        StatusBoard(run, waits) as status,
    ):
        settings = _settings(job, machine, run)
        key = profile_key(settings, machine)
        status.part(NAME, "profiling", f"{job.model} on {key.device}")
        starts()
        try:
            steps = asyncio.run(stop.cancels(_record(job, model, settings, run, waits, told)))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        profile = fitted(steps, job.seed)
        state = profile.state()
        assert state is not None
        file = store.keep(key, state)
        return Profiled(key, profile, steps, held_out(steps, job.seed), file, run.output, time.monotonic() - began_s)


def _settings(job: ProfileJob, machine: Machine, run: Run) -> EngineSettings:
    return EngineSettings(
        engine_id=NAME,
        model_dir=job.model.absolute(),
        runtime_dir=run.runtime,
        log_path=run.output / "engine.log",
        dtype=job.dtype,
        max_model_len=job.max_model_len,
        max_num_seqs=job.max_num_seqs,
        block_size=job.block_size,
        kv_cache_bytes=int(job.kv_cache_gib * 2**30),
        stream_interval=_STREAM_INTERVAL,
        start_timeout_s=job.start_timeout_s,
        async_scheduling=bool(machine.gpus),
        unpacked_weights=not job.serving,
        step_log=run.output / "steps.jsonl",
    )


async def _record(
    job: ProfileJob,
    model: ModelFolder,
    settings: EngineSettings,
    run: Run,
    waits: WaitBoard,
    told: Callable[[Progress], None],
) -> list[SeenStep]:
    kv_tokens = settings.kv_cache_bytes // (model.kv_values_per_token * DTYPE_BYTES[job.dtype])
    grid = Grid(job.max_num_seqs, job.max_model_len, kv_tokens, model.vocab_size)
    # Not of the same seed: what was asked once already is cached.
    warm, loads = plan(grid, job.seed + 1)[:_WARM_LOADS], plan(grid, job.seed)
    if not loads:
        raise ConfigError(
            f"--kv-cache-gib {job.kv_cache_gib:g} is too small for any sequence of {job.model}",
            to_do="give the engine more",
        )
    async with open_launcher(waits, run.output / "warm.log", job.start_timeout_s) as launcher:
        process = EngineProcess(settings, launcher, waits)
        return await record_steps(process, warm, loads, waits, seconds=job.seconds, told=told)
