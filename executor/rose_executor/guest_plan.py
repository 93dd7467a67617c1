"""What an executor's guest is, and by which rules it is watched, from its configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rose.engine_limits import DTYPE_BYTES
from rose.machine import Machine
from rose.model_folder.folder import read_model_folder
from rose.runs import Run
from rose_executor.engine_settings import EngineSettings
from rose_executor.executor_config import ExecutorConfig, GuestConfig
from rose_executor.guest_rules import GuestRules
from rose_executor.guest_watch import GuestWatch
from rose_executor.kv_budget import FixedBlocks, KvBudget, KvShare
from rose_executor.kv_policy import KvPolicy, KvPool
from rose_executor.partitioner import Partitioner
from rose_executor.profile_keeper import ProfileKeeper
from rose_executor.profile_key import profile_key
from rose_executor.profile_store import ProfileStore, default_folder
from rose_executor.slack import SlackPolicy
from rose_executor.step_profile import StepProfile

# The guest brings a quota within what it has: its cache is its share of memory.
_ALL_BLOCKS = 2**31
_PREFILL_TOKENS = 512
"""Of prompts, in one step: source arXiv 2605.06534 (ROSE). Beside them each running request may have a token."""


@dataclass(frozen=True, slots=True)
class GuestPlan:
    """`settings` of the guest; `profile` is what its steps are known to cost, which `keeper` keeps as it grows: of that
    the next guest begins with a copy.

    `profiled`: whether anything was known before the first one starts.
    """

    settings: EngineSettings
    profile: StepProfile
    keeper: ProfileKeeper
    profiled: bool


def plan_guest(config: ExecutorConfig, run: Run, page_dir: Path, machine: Machine) -> GuestPlan:
    """Raises ConfigError for a model that is none, or a damaged profile; ClusterError if there is no vLLM."""
    settings = _settings(config, run, page_dir, machine)
    store = ProfileStore(Path(config.executor.profiles) if config.executor.profiles else default_folder())
    key = profile_key(settings, machine)
    known = store.find(key)
    # Where there is none yet, the guest that is started next may find what was learnt of this one.
    settings = replace(settings, step_profile=store.path(key))
    profile = StepProfile() if known is None else known
    return GuestPlan(settings, profile, ProfileKeeper(store, key, profile), profiled=known is not None)


def open_watch(config: ExecutorConfig, partitioner: Partitioner, profile: StepProfile) -> GuestWatch:
    """Raises ClusterError if the board cannot be had, ConfigError for a model that is none."""
    policy = SlackPolicy(
        config.serving.slo,
        tokens_max=_PREFILL_TOKENS + config.guest.max_num_seqs,
        seqs_max=config.guest.max_num_seqs,
        interference=partitioner.describe().interference,
    )
    rules = GuestRules(policy, _share(config), config.guest.move_after_s)
    return GuestWatch(config.serving.board.absolute(), rules, partitioner, profile)


def _share(config: ExecutorConfig) -> KvShare:
    memory = config.memory
    if not memory.pool_gib:
        return FixedBlocks(_ALL_BLOCKS)
    pool = KvPool(
        pool_bytes=round(memory.pool_gib * 2**30),
        serving_bytes=round(memory.serving_gib * 2**30),
        guest_bytes=round(config.guest.kv_cache_gib * 2**30),
        headroom=memory.headroom,
        watermark=memory.watermark,
        freeze_s=memory.freeze_s,
    )
    return KvBudget(KvPolicy(pool), _request_bytes(config.guest))


def _request_bytes(guest: GuestConfig) -> int:
    """What the longest request takes, in whole blocks."""
    tokens = -(-guest.max_model_len // guest.block_size) * guest.block_size
    return tokens * read_model_folder(guest.model).kv_values_per_token * DTYPE_BYTES[guest.dtype]


def _settings(config: ExecutorConfig, run: Run, page_dir: Path, machine: Machine) -> EngineSettings:
    guest = config.guest
    return EngineSettings(
        engine_id=config.executor.name,
        model_dir=guest.model.absolute(),
        runtime_dir=run.runtime,
        log_path=run.output / "guest.log",
        dtype=guest.dtype,
        max_model_len=guest.max_model_len,
        max_num_seqs=guest.max_num_seqs,
        block_size=guest.block_size,
        kv_cache_bytes=int(guest.kv_cache_gib * 2**30),
        stream_interval=guest.stream_interval,
        port=guest.port,
        start_timeout_s=guest.start_timeout_s,
        async_scheduling=bool(machine.gpus),
        board=config.serving.board.absolute(),
        page_dir=page_dir,
    )
