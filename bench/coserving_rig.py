"""A serving engine and a guest on one core, as the product sets them up, and the phases' ways to share it.

The serving engine is a plain vLLM with the product's probe; the guest, its scheduler, the board, the watch and the
partitioner are the product's. What is not: the quota of a phase without admission, and that the bench may put the guest
beside the serving engine instead of below it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from bench.coserving_costs import STEP_COSTS, Costs, read_costs
from bench.coserving_engines import guest_settings, probe_costs, started_serving
from bench.coserving_phases import SHARE, Phase, Place
from bench.coserving_sharing import FixedQuota, rules_of
from bench.registry import BenchFailed
from bench.result import ROOT
from rose.cgroup import own_groups
from rose.demo.child import DemoChild, Program, start_child
from rose.demo.cores import Placing, split_cores
from rose.demo.load import LoadPlan
from rose.demo.serving_engine import ServingEngine
from rose.errors import ClusterError
from rose.machine import look
from rose.processes import family
from rose.slo import Slo
from rose.waits import WaitBoard
from rose.workload.record_file import Replay, read_replay
from rose_executor.board import SERVING, BoardReader
from rose_executor.board_states import ServingState
from rose_executor.engine_launcher import open_launcher
from rose_executor.engine_process import EngineProcess
from rose_executor.guest_watch import GuestWatch
from rose_executor.partitioner import Partitioner, Role, pick_partitioner

RL_STEP_S = 10.0
"""How often a version of a run ends a freeze; the demo's steps are about twice as long."""
_REPLAY_S = 180.0


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
    _arranged_at_s: float = 0.0

    @property
    def step_log(self) -> Path:
        assert self.guest.settings.step_log is not None
        return self.guest.settings.step_log

    def serving_state(self) -> ServingState:
        """Raises BenchFailed if the probe says nothing."""
        reader = BoardReader(self.folder / "board")
        try:
            reading = reader.read(SERVING, time.monotonic())
        finally:
            reader.close()
        if reading.state is None:
            raise BenchFailed(f"the serving engine cannot be seen: {reading.why}")
        return reading.state

    def costs(self) -> Costs:
        return read_costs(self.folder / "step-costs.json", probe_costs(self.folder))

    def memory(self) -> dict[str, float]:
        """What has become of the guest's budget in this phase; nothing where it has none."""
        now_s = time.monotonic()
        figures = self.watch.rules.kv.figures(now_s)
        if figures is None:
            return {}
        minutes = (now_s - self._arranged_at_s) / 60
        return {"oscillations_per_min": figures.turns / minutes, "kv_cuts": figures.cuts, "kv_grows": figures.grows}

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
        self.watch.rules = rules_of(phase, self.slo, self.partitioner.describe().interference)
        self._arranged_at_s = time.monotonic()
        self.partitioner.set_share(SHARE if phase.place is Place.CAPPED else None)
        if phase.place is Place.BESIDE:
            _like_any_other(self.guest.pid)
        else:
            self.partitioner.place(self.guest.pid, Role.GUEST)

    def _check(self, client: DemoChild) -> None:
        if client.exit_code != 0:
            raise BenchFailed(f"the load client {client.death()}")
        if self.serving.child.exit_code is not None:
            raise BenchFailed(f"the serving engine {self.serving.child.death()}")
        if not self.guest.alive:
            raise BenchFailed(f"the guest: {self.guest.death()}")
        if self.watch.trouble:
            raise BenchFailed(f"the watch: {self.watch.trouble}")


@contextlib.asynccontextmanager
async def open_rig() -> AsyncIterator[Rig]:
    """Raises BenchFailed where a core cannot be shared as the phases need it; RoseError if an engine does not start."""
    if look().gpus:
        raise BenchFailed("this bench shares a processor core, and here is a GPU", to_do="use a machine without one")
    folder = Path(tempfile.mkdtemp(prefix="rose-coserving-"))
    # For what is started from here: the bench is not installed with the package.
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ[STEP_COSTS] = str(folder / "step-costs.json")
    waits = WaitBoard()
    try:
        async with contextlib.AsyncExitStack() as stack:
            cores = split_cores(os.sched_getaffinity(0))
            placing = Placing(cores, yields=False)
            stack.callback(placing.close)
            placing.with_load(os.getpid())
            partitioner = stack.enter_context(contextlib.closing(pick_partitioner(cores.serving)))
            serving = await started_serving(folder, placing, waits)
            stack.push_async_callback(serving.child.stop, 5.0)
            watch = GuestWatch(folder / "board", FixedQuota(gate_open=False), partitioner)  # type: ignore[arg-type]
            stack.callback(watch.close)
            launcher = await stack.enter_async_context(
                open_launcher(waits, folder / "warm.log", 600.0, lambda pid: partitioner.place(pid, Role.GUEST))
            )
            guest = EngineProcess(guest_settings(folder), launcher, waits)
            stack.push_async_callback(guest.stop)
            for task in (asyncio.create_task(watch.run()), asyncio.create_task(_step_boundaries(watch))):
                stack.callback(task.cancel)
            await guest.start(0)
            yield Rig(folder, serving, guest, watch, partitioner, placing, waits)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _step_boundaries(watch: GuestWatch) -> None:
    while True:
        await asyncio.sleep(RL_STEP_S)
        watch.rules.kv.step_ended(time.monotonic())


def _like_any_other(pid: int) -> None:
    """Take a process and its descendants out of the partitioner's group, into the one that this process is in."""
    groups = own_groups()
    parent = groups.v1.get("cpu", groups.v2)
    if parent is None:
        raise BenchFailed("no control group to put a guest beside serving", to_do="run it as root on cgroup v1 or v2")
    try:
        for member in family(pid):
            (parent / "cgroup.procs").write_text(str(member.pid), encoding="ascii")
    except OSError as error:
        raise ClusterError(f"process {pid} cannot be put into {parent}: {error}") from error
