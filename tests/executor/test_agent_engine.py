"""A real guest under an executor: lent with a version of the run, counted in all its lives, gone with its owner."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from certificate_tools import make_authority
from prometheus_client import CollectorRegistry
from run_tools import LONG_S, TOKEN, IdleServing, LendingRun, lending_run, lifted_guests, until

from rose.certificates import Certificates, read_certificates
from rose.cli.executor import open_lender
from rose.errors import ContractError
from rose.metrics import ExecutorMetrics
from rose.processes import family
from rose.runs import open_service
from rose.slo import Slo
from rose.status import StatusBoard
from rose.waits import WaitBoard
from rose_executor.agent import Agent
from rose_executor.agent_figures import AgentFigures
from rose_executor.board import QUOTA, BoardReader, claim_quota
from rose_executor.counts_client import CountsClient
from rose_executor.counts_service import serve_counts
from rose_executor.engine_health import EngineHealth
from rose_executor.engine_launcher import Midwife
from rose_executor.engine_settings import EngineSettings
from rose_executor.guest_keeper import GuestKeeper, Joined
from rose_executor.guest_life import receiving
from rose_executor.guest_rules import GuestRules
from rose_executor.guest_watch import GuestWatch
from rose_executor.kv_budget import FixedBlocks, KvShare
from rose_executor.launcher import Child, Command, Launcher
from rose_executor.page_shelf import PageShelf
from rose_executor.partition_terms import Role
from rose_executor.partition_threads import ThreadPartitioner
from rose_executor.slack import SlackPolicy
from rose_executor.tiers import FIXED_SPLIT, tier_now
from rose_executor.token_route import TokenRoute, open_session
from rose_transfer.transport.tcp import TcpClient

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True, scope="module")
def _guests_get_a_core() -> Iterator[None]:
    with lifted_guests():
        yield


SLO = Slo(ttft_s=0.5, tpot_s=0.06)
KV_BYTES = 32 * 2**20
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


@dataclass
class Executor:
    """An agent in this process, with everything real but its own process."""

    agent: Agent
    registry: CollectorRegistry
    status: StatusBoard
    serving: IdleServing
    counts: CountsClient
    pids: list[int]
    freeze: Callable[[], None]
    running: asyncio.Task[None]

    def sample(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"rose_executor_{name}", labels)

    def part(self, name: str) -> tuple[str, str]:
        found = [(part.state, part.detail) for part in self.status.page().parts if part.name == name]
        return found[0] if found else ("", "")


class Even(ThreadPartitioner):
    """Holds a guest as ever, but does not lower it: a busy machine would keep it, and the test, waiting for minutes."""

    def __init__(self) -> None:
        super().__init__((), "a test")

    def place(self, pid: int, role: Role) -> None:
        self._guests.add(psutil.Process(pid))


class Spoiling:
    """Starts engines whose weights go bad after they were checked, in the order of `how`; then sound ones."""

    def __init__(self, launcher: Launcher, how: list[str]) -> None:
        self._launcher = launcher
        self._how = how

    async def launch(self, command: Command) -> Child:
        if self._how:
            env = {**command.env, "ROSE_TEST_SPOIL": self._how.pop(0)}
            command = replace(command, module="spoilt_engine_main", env=env)
        return await self._launcher.launch(command)


@asynccontextmanager
async def executor(
    rig: Any,
    run: LendingRun,
    folder: Path,
    *,
    spoilt: Sequence[str] = (),
    silent: bool = False,
    kv: KvShare | None = None,
    keep_free_bytes: int = 0,
) -> AsyncIterator[Executor]:
    """`rig` lends its warm process, so that nobody waits for another. Guests are `spoilt` one after the other.

    `kv` is the guest's share of the memory, of which it has `KV_BYTES` at most; None is a fixed split.
    """
    waits, metrics, board = WaitBoard(), ExecutorMetrics(), folder / "board"
    pids: list[int] = []

    @asynccontextmanager
    async def forked(born: Callable[[int], None]) -> AsyncIterator[Launcher]:
        def told(pid: int) -> None:
            pids.append(pid)
            born(pid)

        yield Midwife(Spoiling(rig.warm, list(spoilt)), told)

    def frozen() -> None:
        watch.rules.frozen = "the test says so"
        partitioner.freeze()

    host, port = run.weights.split(":")
    share = FixedBlocks(2**31) if kv is None else kv
    with (
        open_service("executor", folder / "runs", waits, {}) as service,
        StatusBoard(service, waits) as status,
        closing(PageShelf(folder / "state", waits)) as shelf,
        closing(Even()) as partitioner,
        closing(GuestWatch(board, GuestRules(SlackPolicy(SLO, 256, 16), share), partitioner)) as watch,
    ):
        settings = EngineSettings(
            "lent",
            rig.model,
            rig.folder,
            folder / "guest.log",
            max_model_len=256,
            max_num_seqs=16,
            kv_cache_bytes=KV_BYTES,
            board=board,
            page_dir=shelf.folder,
        )
        tier_of = partial(tier_now, partition=partitioner.describe(), memory=FIXED_SPLIT)
        figures = AgentFigures(metrics, status, waits, SLO, tier_of, lambda: "")
        health = EngineHealth(3)
        guest = GuestKeeper(settings, health, watch, partitioner, shelf, figures, waits, forked, keep_free_bytes)
        agent = Agent(guest, watch, shelf, figures)
        server, address = await serve_counts(shelf, agent.alive, port=0, token=TOKEN)
        client = TcpClient(host, int(port), token=TOKEN, waits=waits)
        counts = CountsClient(address, token=TOKEN, waits=waits, timeout_s=LONG_S)
        serving = IdleServing(board, silent)
        async with open_lender(run.scheduler, TOKEN, None, waits) as lender:
            joined = Joined(partial(receiving, client, folder / "weights", waits), lender, "publisher", address)
            serves = asyncio.create_task(serving.run())
            running = asyncio.create_task(agent.run(joined))
            try:
                yield Executor(agent, metrics.registry, status, serving, counts, pids, frozen, running)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                serves.cancel()
                await counts.close()
                await client.close()
                await server.stop(None)


async def sample_on(lease: Any, request_id: str, tokens: int) -> int:
    """Sample a turn on a leased engine; how many tokens came."""
    async with open_session() as session:
        route = TokenRoute(lease.address, session, engine_id=lease.engine_id)
        output = await route.generate(
            request_id, PROMPT, max_tokens=tokens, temperature=1.0, stop_token_ids=(), top_logprobs=0
        )
    lease.tokens = len(output.output_ids)
    assert {span.version for span in output.versions} == {lease.weight_version}
    return len(output.output_ids)


def test_a_guest_is_lent_with_a_version_counted_in_all_its_lives_and_withdrawn(rig: Any, tmp_path: Path) -> None:
    async def check() -> None:
        async with lending_run(tmp_path, rig.model) as run, executor(rig, run, tmp_path) as here:
            await until(lambda: here.part("guest")[0] == "waits for weights")
            assert not list(run.desk.core.engines)
            assert here.sample("slots_open") == 0
            run.answers = True
            await run.publish(0)
            await until(lambda: run.engines)
            # Its own question's tokens are in none of the counts below.
            await until(lambda: here.part("known answer")[0] == "proven")
            assert here.part("known answer")[1].startswith("version 0, at the guest's start: ")
            assert here.part("known answer")[1].endswith("of 0.01 allowed, over 8 tokens")
            await run.publish(1)
            async with run.lease(min_version=1) as lease:
                assert (lease.engine_id, lease.weight_version) == ("lent", 1)
                assert await sample_on(lease, "first", 20) == 20
            first = lease.incarnation
            counts = await here.counts.counts(first, ["first"])
            assert (counts.known, counts.alive, counts.total_tokens) == (True, True, 20)
            assert counts.requests["first"].tokens == 20
            assert counts.requests["first"].first_version == 1
            await figures_are_shown(here)
            os.killpg(here.pids[0], signal.SIGKILL)
            await until(lambda: run.engines and run.engines[0].incarnation != first)
            async with run.lease(min_version=1) as lease:
                assert lease.incarnation != first
                assert await sample_on(lease, "second", 15) == 15
            dead = await here.counts.counts(first, ["first"])
            assert (dead.known, dead.alive, dead.total_tokens) == (True, False, 20)
            assert (await here.counts.counts(lease.incarnation, ["first", "second"])).total_tokens == 15
            await until(lambda: here.sample("guest_tokens") == 35)
            assert here.sample("guest_restarts_total") == 1
            await silence_shuts(here, run)
            await stopped_is_not_lent(here, run)
            here.freeze()
            await until(lambda: run.engines and run.engines[0].incarnation != lease.incarnation)
            assert not (await here.counts.counts(lease.incarnation)).alive
            assert here.sample("guest_restarts_total") == 2
            here.running.cancel()
            await asyncio.gather(here.running, return_exceptions=True)
            await until(lambda: not run.engines)
            assert not psutil.pid_exists(here.pids[-1])

    rig.run(check())


def test_a_guest_whose_weights_are_spoilt_after_they_were_checked_is_never_offered(rig: Any, tmp_path: Path) -> None:
    async def check() -> None:
        async with lending_run(tmp_path, rig.model) as run:
            run.answers = True
            await run.publish(0)
            offered: list[str] = []
            spoilt = ["rolled", "a tenth off", "nan"]
            async with executor(rig, run, tmp_path, spoilt=spoilt) as here:
                said = set[str]()
                while not here.running.done():
                    offered += [engine.incarnation for engine in run.desk.core.engines]
                    said.add(" ".join(here.part("known answer")))
                    await asyncio.sleep(0.02)
                with pytest.raises(ContractError, match="so did 3 guests in a row"):
                    here.running.result()
            assert offered == []
            for number in (1, 2):
                (wrong,) = (each for each in said if each.endswith(f"{number} in a row"))
                assert "nats apart at most, of 0.01 allowed" in wrong
            assert here.sample("wrong_answers_total") == 3
            assert here.sample("guest_restarts_total") == 2

    rig.run(check())


def test_a_guest_whose_gate_is_shut_is_asked_until_it_opens(rig: Any, tmp_path: Path) -> None:
    async def check() -> None:
        async with lending_run(tmp_path, rig.model) as run, executor(rig, run, tmp_path, silent=True) as here:
            run.answers = True
            await run.publish(0)
            await until(lambda: here.part("known answer") == ("asks", "version 0"))
            await until(lambda: "answer to the known question" in {wait.what for wait in here.status.page().waits})
            await asyncio.sleep(1.0)  # for which nothing is computed
            await run.publish(1)
            assert here.part("known answer") == ("asks", "version 0")
            assert not run.engines
            here.serving.silent = False
            await until(lambda: run.engines)
            await until(lambda: here.part("known answer")[0] == "proven")
            async with run.lease(min_version=1) as lease:
                assert await sample_on(lease, "first", 5) == 5
            assert here.sample("wrong_answers_total") == 0

    rig.run(check())


async def figures_are_shown(here: Executor) -> None:
    await until(lambda: here.sample("guest_tokens") == 20)
    assert 0 < here.sample("slots_open") <= 16  # a guest that is slow, for whatever reason, is given less
    assert here.sample("weight_version") == 1
    assert here.sample("fetched_bytes_total") > 0
    assert here.sample("pause_seconds_count") == 2
    # A guest that has just been seen again has no share of a second yet.
    await until(lambda: 0 < here.sample("gate_open_ratio") <= 1)
    assert here.sample("slo_seconds", what="tpot") == 0.06
    assert here.part("follower") == ("following", "version 1")
    assert here.part("serving")[0] == "idle"
    tier, words = here.part("tier")
    assert tier == "board"
    assert "reaction is one step coarser" in words
    assert "partition none (idle scheduling class): no control groups" in words
    assert [here.sample("tier", tier=name) for name in ("unseen", "observe", "board", "full")] == [0, 0, 1, 0]
    assert here.part("scheduler") == ("reached", "")


async def silence_shuts(here: Executor, run: LendingRun) -> None:
    """A serving engine that is seen no more gets no guest beside it."""
    here.serving.silent = True
    await until(lambda: not run.engines)
    await until(lambda: here.part("guest")[0] == "held back")
    await until(lambda: here.sample("tier", tier="unseen") == 1)
    assert "the serving engine cannot be seen: the serving half is" in here.part("guest")[1]
    assert here.sample("compute_ratio", who="serving") is None
    here.serving.silent = False
    await until(lambda: run.engines)


async def stopped_is_not_lent(here: Executor, run: LendingRun) -> None:
    """A guest that somebody stops, whole or only its engine core, is offered again once it goes on."""
    members = [one.pid for one in family(here.pids[-1])]
    for stopped in (members, members[-1:]):
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        await until(lambda: not run.engines)
        await until(lambda: here.part("guest")[0] == "held back")
        words = here.part("guest")[1]
        assert "the guest stands still: somebody has stopped" in words
        assert all(str(pid) in words for pid in stopped)
        assert here.sample("slots_open") == 0
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: run.engines)
        async with run.lease(min_version=1) as lease:
            assert await sample_on(lease, f"after {len(stopped)} went on", 5) == 5
    assert here.sample("guest_restarts_total") == 1


class ExecutorProcess:
    """`rose executor` as a process of its own, beside an idle serving engine."""

    def __init__(self, folder: Path, model: Path, join: Path, certificates: Path) -> None:
        self._folder = folder
        self._join = join
        self.board = folder / "board"
        self._started: list[asyncio.subprocess.Process] = []
        self.config = folder / "executor.toml"
        self.config.write_text(
            f'[executor]\nstate = "state"\ncertificates = "{certificates}"\n'
            '[serving]\nboard = "board"\nttft_ms = 500.0\ntpot_ms = 60.0\n'
            f'[guest]\nmodel = "{model}"\nmax_model_len = 256\nmax_num_seqs = 8\nkv_cache_gib = 0.0625\n'
        )

    async def start(self) -> tuple[asyncio.subprocess.Process, str, str]:
        """The process, the address of its counts and that of its metrics."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rose.cli.main", "executor", "--config", self.config, "--join", self._join),
            stdout=asyncio.subprocess.PIPE,
            cwd=self._folder,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "ROSE_RUNTIME_DIR": str(self._folder / "runtime"),
            },
        )
        self._started.append(process)
        assert process.stdout is not None
        async with asyncio.timeout(LONG_S):
            said = (await process.stdout.readline()).decode().split()
        assert said[:3] == ["executor:", "counts", "on"], said
        return process, said[3].rstrip(";"), said[-1]

    async def end(self) -> None:
        """Whatever became of the test: one that is left over would take a core from all others."""
        for process in self._started:
            if process.returncode is None:
                process.kill()
                await process.wait()


def test_a_killed_executor_takes_its_guest_along_and_the_next_takes_over(tiny_model: Path) -> None:
    async def check(folder: Path) -> None:
        authority = make_authority(folder / "authority")
        own = read_certificates(str(authority.signs("run")))
        async with lending_run(folder, tiny_model, own) as run:
            await run.publish(0)
            executor = ExecutorProcess(folder, tiny_model, run.join_file(), authority.signs("executor"))
            serves = asyncio.create_task(IdleServing(executor.board).run())
            try:
                process, counts_address, _ = await executor.start()
                async with run.lease() as lease:
                    assert lease.counts_address == counts_address
                    assert await sample_on(lease, "r", 12) == 12
                below = family(process.pid)[1:]
                assert len(below) >= 2  # the warm process and the guest
                process.kill()
                await process.wait()
                await until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in below))
                with closing(BoardReader(executor.board)) as board:
                    await until(lambda: board.read(QUOTA, time.monotonic()).state is None)
                await the_next(executor, lease.incarnation, own)
            finally:
                await executor.end()
                serves.cancel()

    with tempfile.TemporaryDirectory(prefix="rose-") as folder:  # short, because it holds sockets
        asyncio.run(check(Path(folder)))


async def the_next(executor: ExecutorProcess, lost: str, own: Certificates | None) -> None:
    """It answers for the dead guest at once, says that it is well, and ends when asked to, though just starting."""
    process, counts_address, metrics_url = await executor.start()
    client = CountsClient(counts_address, token=TOKEN, waits=WaitBoard(), timeout_s=LONG_S, certificates=own)
    counts = await client.counts(lost, ["r"])
    await client.close()
    assert (counts.known, counts.alive, counts.requests["r"].tokens) == (True, False, 12)
    health = await asyncio.to_thread(
        urllib.request.urlopen, metrics_url.replace("/metrics", "/healthz"), timeout=LONG_S
    )
    with health:
        assert health.read() == b"ok\n"
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(LONG_S):
        assert await process.wait() == 0
    claim_quota(executor.board).close()
