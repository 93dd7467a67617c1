"""The two engines of `coserving`, with stop-watches in them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from bench.coserving_costs import PROBE_COSTS
from bench.coserving_sharing import GUEST_KV_BYTES, GUEST_SEQS, SERVING_KV_BYTES
from rose.demo.board_watch import make_board
from rose.demo.child import Program
from rose.demo.cores import Placing
from rose.demo.serving_engine import ServingEngine, ServingSettings, start_serving
from rose.demo.serving_model import ServingShape, make_serving_model, warm_start
from rose.waits import WaitBoard
from rose_executor.engine_env import SERVING_KV_SPARE
from rose_executor.engine_settings import EngineSettings

CONTEXT_TOKENS = 1024
SERVING_SEQS = 32
SERVING_SPARE = 0.1


class _GuestSettings(EngineSettings):
    """A guest with a stop-watch in its scheduler."""

    def _scheduler(self) -> str:
        return "bench.coserving_timed_scheduler.TimedQuotaScheduler"


class _ServingSettings(ServingSettings):
    """A serving engine with a stop-watch around its probe, that gives back memory which it does not use."""

    def program(self, port: int) -> Program:
        program = ServingSettings.program(self, port)
        env = {
            **program.env,
            "VLLM_PLUGINS": "rose,rose_probe",
            SERVING_KV_SPARE: str(SERVING_SPARE),
            PROBE_COSTS: str(probe_costs(self.folder)),
        }
        return replace(program, module="bench.coserving_probed_main", env=env)


def probe_costs(folder: Path) -> Path:
    return folder / "probe-costs.json"


def guest_settings(folder: Path) -> EngineSettings:
    return _GuestSettings(
        "guest",
        warm_start(),
        runtime_dir=folder,
        log_path=folder / "guest.log",
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=GUEST_SEQS,
        kv_cache_bytes=GUEST_KV_BYTES,
        board=folder / "board",
        step_log=folder / "steps.jsonl",
        start_timeout_s=600.0,
    )


async def started_serving(folder: Path, placing: Placing, waits: WaitBoard) -> ServingEngine:
    """Raises EngineError or DeadlineExceeded if it does not answer."""
    model = await asyncio.to_thread(make_serving_model, folder / "serving-model", ServingShape())
    settings = _ServingSettings(model, folder, folder / "serving.log", CONTEXT_TOKENS, SERVING_SEQS, SERVING_KV_BYTES)
    make_board(settings.board)
    return await start_serving(settings, placing, waits)
