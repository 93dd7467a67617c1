"""The scheduler of a run: it comes back when it dies, tells why when it cannot, and leaves nothing."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from certificate_tools import make_authority
from service_tools import LONG_S, TOKEN, offered, turn, until

from rose.certificates import read_certificates
from rose.errors import ClusterError, SchedulerError
from rose.processes import family
from rose.trainer import run_scheduler
from rose.trainer.leasing import write_secret
from rose.trainer.run_scheduler import RunScheduler, open_scheduler
from rose.waits import WaitBoard
from rose_scheduler.client import EngineState, SchedulerClient

pytestmark = pytest.mark.timeout(120)


class Bench:
    """A run's folders, and the scheduler in them."""

    def __init__(self, folder: Path) -> None:
        self.output, self.runtime = folder / "out", folder / "rt"
        self.output.mkdir()
        self.token_file = folder / "token"
        write_secret(self.token_file, TOKEN)
        self.waits, self.told = WaitBoard(), list[tuple[str, str]]()

    def run(self, body: Callable[[RunScheduler], Awaitable[None]], certificates: str = "") -> None:
        async def whole() -> None:
            told = lambda *words: self.told.append(words)  # noqa: E731
            async with asyncio.timeout(LONG_S):
                opening = open_scheduler(self.output, self.token_file, certificates, 0, self.waits, told)
                async with opening as scheduler:
                    await scheduler.ready()
                    await body(scheduler)
            assert self.waits.snapshot() == ()

        asyncio.run(whole())

    def processes(self) -> list[psutil.Process]:
        found = []
        for child in family(os.getpid())[1:]:
            if "rose.cli.main" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        return found

    def kill(self) -> None:
        """The scheduler itself, which its guards notice."""
        scheduler = max(self.processes(), key=lambda process: process.create_time())
        scheduler.kill()

    def left(self) -> list[str]:
        return [path.name for path in self.runtime.iterdir() if path.name != ".lock"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="rose-") as name:  # short, because it holds unix sockets
        monkeypatch.setenv("ROSE_RUNTIME_DIR", str(Path(name) / "rt"))
        yield Bench(Path(name))


def test_one_that_is_killed_comes_back_at_its_address_and_whoever_waits_gets_a_lease(bench: Bench) -> None:
    async def body(scheduler: RunScheduler) -> None:
        keeping = asyncio.create_task(scheduler.run())
        async with SchedulerClient(scheduler.address, token=TOKEN, waits=bench.waits, timeout_s=LONG_S) as client:
            asking = asyncio.create_task(leased(client))
            await until(lambda: any(wait.what == "a lease" for wait in bench.waits.snapshot()))
            bench.kill()
            await until(lambda: ("ready", f"{scheduler.address}; restarts: 1") in bench.told)
            engine = offered()
            await client.offer(engine)
            await client.beat(engine, EngineState(0, 1, 0.0))
            assert await asking == "e"
        keeping.cancel()

    bench.run(body)
    assert bench.processes() == []
    assert bench.left() == []
    assert [state for state, _ in bench.told] == ["starting", "ready", "starting", "ready", "ended"]
    assert len(list(bench.output.glob("scheduler-*/log.jsonl"))) == 2


def test_it_speaks_tls_where_the_run_has_certificates_after_a_restart_too(bench: Bench, tmp_path: Path) -> None:
    authority = make_authority(tmp_path)
    mine = authority.signs("mine")
    own = read_certificates(str(mine))

    async def body(scheduler: RunScheduler) -> None:
        keeping = asyncio.create_task(scheduler.run())
        calling = partial(SchedulerClient, scheduler.address, token=TOKEN, waits=bench.waits, timeout_s=LONG_S)
        async with calling(certificates=own) as client:
            await client.status()
            bench.kill()
            await until(lambda: ("ready", f"{scheduler.address}; restarts: 1") in bench.told)
            await client.status()
        async with calling() as plain:
            with pytest.raises(SchedulerError, match=r"asks for certificates \(TLS\)"):
                await plain.status()
        keeping.cancel()

    bench.run(body, str(mine))


async def leased(client: SchedulerClient) -> str:
    async with client.lease(turn(), wait_s=LONG_S, hold_s=LONG_S) as lease:
        return lease.engine_id


def test_one_that_dies_again_and_again_is_given_up_with_the_cause(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_scheduler, "RESTARTS_MAX", 0)

    async def body(scheduler: RunScheduler) -> None:
        bench.kill()
        with pytest.raises(ClusterError, match="given up after 0 restarts: it ended with code -9"):
            await scheduler.run()

    bench.run(body)
    assert bench.left() == []


def test_one_that_cannot_start_says_why_and_leaves_nothing(bench: Bench) -> None:
    bench.token_file.chmod(0o644)

    async def body(scheduler: RunScheduler) -> None:
        raise AssertionError("it started")

    with pytest.raises(ClusterError, match=r"does not start: config: .*token: mode 0644"):
        bench.run(body)
    assert bench.processes() == []
    assert bench.told[-1] == ("ended", "")


def test_a_secret_is_its_owner_s_alone_and_is_not_written_twice(tmp_path: Path) -> None:
    write_secret(tmp_path / "secret", "words")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "secret").read_text() == "words"
    with pytest.raises(ClusterError, match="cannot be written"):
        write_secret(tmp_path / "nowhere" / "secret", "words")
