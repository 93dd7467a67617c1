"""A serving engine and a guest on one core, as the product sets them up, and the phases' ways to share it.

The serving engine is a plain vLLM with the product's probe; the guest, its scheduler, the board, the watch and the
partitioner are the product's. What is not: the quota of a phase without admission (`FixedQuota`), and that the bench
may put the guest beside the serving engine instead of below it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.coserving_phases import SHARE, Phase, Place
from bench.registry import BenchFailed
from rose.cgroup import own_groups
from rose.demo.board_watch import make_board
from rose.demo.child import DemoChild, Program, start_child
from rose.demo.cores import Placing, split_cores
from rose.demo.load import LoadPlan
from rose.demo.serving_engine import ServingEngine, ServingSettings, start_serving
from rose.demo.serving_model import ServingShape, make_serving_model, warm_start
from rose.errors import RoseError
from rose.machine import look
from rose.slo import Slo
from rose.waits import WaitBoard
from rose.workload.record_file import Replay, read_replay
from rose_executor.board_states import Quota
from rose_executor.engine_launcher import open_launcher
from rose_executor.engine_process import EngineProcess
from rose_executor.engine_settings import EngineSettings
from rose_executor.guest_rules import Freeze, GuestRules, Looked, Write
from rose_executor.guest_watch import GuestWatch
from rose_executor.partitioner import Partitioner, Role, pick_partitioner
from rose_executor.slack import SlackPolicy

GUEST_SEQS = 64
GUEST_KV_BYTES = 256 * 2**20
SERVING_KV_BYTES = 256 * 2**20
PREFILL_TOKENS = 512
CONTEXT_TOKENS = 1024
_BLOCKS_MAX = 2**31
_REPLAY_S = 180.0


class FixedQuota:
    """What stands for the product's rules where a phase has no admission: the same open quota, renewed at each look."""

    def step(self, event: Looked, now: float) -> Sequence[Write | Freeze]:
        return [Write(Quota(_BLOCKS_MAX, PREFILL_TOKENS + GUEST_SEQS, GUEST_SEQS, gate_open=True))]


class ShutGate:
    """While the guest has no work."""

    def step(self, event: Looked, now: float) -> Sequence[Write | Freeze]:
        return [Write(Quota(_BLOCKS_MAX, 0, GUEST_SEQS, gate_open=False))]


@dataclass(slots=True)
class Rig:
    """Both engines, warm. `slo` is what admission keeps to, once it is known."""

    folder: Path
    serving: ServingEngine
    guest: EngineProcess
    watch: GuestWatch
    partitioner: Partitioner
    placing: Placing
    waits: WaitBoard
    slo: Slo | None = None
    _replays: int = 0

    async def replay(self, load: LoadPlan) -> Replay:
        """One part of a trace from a client on the other cores. Raises BenchFailed if it does not come to its end."""
        self._replays += 1
        path = self.folder / f"replay-{self._replays}.jsonl"
        arguments = load.arguments(self.serving.url, path, self._replays)
        program = Program("load", "rose.workload.load_main", arguments, self.folder / "load.log")
        client = await start_child(program, self.placing.with_load, self.waits)
        try:
            await self.waits.within(client.wait(), "end of a replay", "load client", _REPLAY_S, boundary="cluster")
            self._check(client)
            return read_replay(path)
        finally:
            await client.stop(0.0)

    def arrange(self, phase: Phase) -> None:
        """Share the core as the phase says. Raises ClusterError if the kernel refuses."""
        self.watch.rules = self._rules(phase)
        # self.partitioner.set_share(SHARE if phase.place is Place.CAPPED else None)
        if phase.place is Place.BELOW:
            self.partitioner.place(self.guest.pid, Role.GUEST)
        elif phase.place is Place.BESIDE:
            _like_any_other(self.guest.pid)

    def _rules(self, phase: Phase) -> GuestRules:
        if not phase.guest:
            return ShutGate()  # type: ignore[return-value]
        if not phase.admits:
            return FixedQuota()  # type: ignore[return-value]
        assert self.slo is not None
        below = phase.place is Place.BELOW
        policy = SlackPolicy(
            self.slo,
            tokens_max=PREFILL_TOKENS + GUEST_SEQS,
            seqs_max=GUEST_SEQS,
            interference=self.partitioner.describe().interference if below else 1.0,
        )
        return GuestRules(policy, _BLOCKS_MAX, move_after_s=2.0)

    def _check(self, client: DemoChild) -> None:
        if client.exit_code != 0:
            raise BenchFailed(f"the load client {client.death()}")
        if self.serving.child.exit_code is not None:
            raise BenchFailed(f"the serving engine {self.serving.child.death()}")
        if not self.guest.alive:
            raise BenchFailed(f"the guest: {self.guest.death()}")


@contextlib.asynccontextmanager
async def open_rig() -> AsyncIterator[Rig]:
    """Raises BenchFailed where a core cannot be shared as the phases need it; RoseError if an engine does not start."""
    if look().gpus:
        raise BenchFailed("this bench shares a processor core, and here is a GPU", to_do="use a machine without one")
    folder = Path(tempfile.mkdtemp(prefix="rose-coserving-"))
    waits = WaitBoard()
    try:
        async with contextlib.AsyncExitStack() as stack:
            cores = split_cores(os.sched_getaffinity(0))
            placing = Placing(cores, yields=False)
            stack.callback(placing.close)
            placing.with_load(os.getpid())
            partitioner = stack.enter_context(contextlib.closing(pick_partitioner(cores.serving)))
            serving = await _serving(folder, placing, waits)
            stack.push_async_callback(serving.child.stop, 5.0)
            board = folder / "board"
            watch = stack.enter_context(contextlib.closing(GuestWatch(board, ShutGate(), partitioner)))  # type: ignore[arg-type]
            launcher = await stack.enter_async_context(
                open_launcher(waits, folder / "warm.log", 600.0, lambda pid: partitioner.place(pid, Role.GUEST))
            )
            guest = EngineProcess(_guest_settings(folder, board), launcher, waits)
            stack.push_async_callback(guest.stop)
            watching = asyncio.create_task(watch.run())
            stack.callback(watching.cancel)
            await guest.start(0)
            yield Rig(folder, serving, guest, watch, partitioner, placing, waits)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _serving(folder: Path, placing: Placing, waits: WaitBoard) -> ServingEngine:
    model = await asyncio.to_thread(make_serving_model, folder / "serving-model", ServingShape())
    settings = ServingSettings(
        model, folder, folder / "serving.log", CONTEXT_TOKENS, seqs_max=32, kv_cache_bytes=SERVING_KV_BYTES
    )
    make_board(settings.board)
    return await start_serving(settings, placing, waits)


def _guest_settings(folder: Path, board: Path) -> EngineSettings:
    return EngineSettings(
        "guest",
        warm_start(),
        runtime_dir=folder,
        log_path=folder / "guest.log",
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=GUEST_SEQS,
        kv_cache_bytes=GUEST_KV_BYTES,
        board=board,
        start_timeout_s=600.0,
    )


def _like_any_other(pid: int) -> None:
    """Take a process and its descendants out of the partitioner's group, into the one that this process is in."""
    groups = own_groups()
    parent = groups.v1.get("cpu", groups.v2)
    if parent is None:
        raise BenchFailed("no control group to put a guest beside serving", to_do="run it as root on cgroup v1 or v2")
    leader = psutil.Process(pid)
    try:
        for member in [leader, *leader.children(recursive=True)]:
            (parent / "cgroup.procs").write_text(str(member.pid), encoding="ascii")
    except OSError as error:
        raise RoseError(f"process {pid} cannot be put into {parent}: {error}") from error
