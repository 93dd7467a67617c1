"""How an executor speaks to a scheduler, and what it refuses to begin with."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest
from certificate_tools import make_authority
from run_tools import LONG_S, TOKEN, until
from service_tools import SchedulerProcess

from rose.certificates import read_certificates
from rose.cli.executor import open_lender
from rose.demo.serving_model import warm_start
from rose.errors import ClusterError, ConfigError, ContractError, EngineError, SchedulerError
from rose.metrics import SchedulerMetrics
from rose.waits import WaitBoard
from rose_executor.board import claim_quota
from rose_executor.executor_config import load_executor_config
from rose_executor.executor_program import run_executor
from rose_executor.lender import GuestNow, GuestOffer
from rose_executor.page_shelf import PageShelf
from rose_scheduler.client import SchedulerClient
from rose_scheduler.desk import Desk
from rose_scheduler.limits import Limits
from rose_scheduler.placement import Placement
from rose_scheduler.service import serve

GUEST = GuestOffer("lent", "a1", "http://here", "127.0.0.1:7", 16, 3)


def now() -> GuestNow:
    return GuestNow(3, 7, 0.25)


@asynccontextmanager
async def scheduler(port: int = 0) -> AsyncIterator[tuple[Desk, str]]:
    desk = Desk(Placement(Limits()), WaitBoard(), SchedulerMetrics())
    server, address = await serve(desk, port=port, token=TOKEN)
    try:
        yield desk, address
    finally:
        desk.close()
        await server.stop(None)


@asynccontextmanager
async def liar(answer: bytes) -> AsyncIterator[str]:
    """Whoever asks it anything gets these bytes."""

    async def answers(request: bytes, context: Any) -> bytes:
        return answer

    class Anything(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(answers)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Anything(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.mark.parametrize(
    ("answer", "boundary", "words"),
    [
        (b"", SchedulerError, "answers nonsense: 0 stands for no Standing"),
        (b"\x08\x63", SchedulerError, "answers nonsense: 99 stands for no Standing"),
        (b"\xff", SchedulerError, "answers nonsense: no message at all"),
        (b"\x08\x06", ContractError, "beat is malformed"),
    ],
)
def test_a_scheduler_that_answers_nonsense_is_named_and_a_withdrawal_from_it_raises_nothing(
    answer: bytes, boundary: type[Exception], words: str
) -> None:
    async def check() -> None:
        async with liar(answer) as address, open_lender(address, TOKEN, None, WaitBoard()) as lender:
            with pytest.raises(boundary, match=words):
                await lender.keep_offered(GUEST, now)
            await lender.withdraw(GUEST, "the end")

    asyncio.run(check())


def test_a_guest_is_offered_as_lent_through_a_restart_and_withdrawn() -> None:
    async def check() -> None:
        async with scheduler() as (desk, address), open_lender(address, TOKEN, None, WaitBoard()) as lender:
            offering = asyncio.create_task(lender.keep_offered(GUEST, now))
            # Its first beat comes after its registration, and nothing is in the lender's way before either.
            await until(lambda: any(engine.slots for engine in desk.core.engines) and lender.trouble == "")
            (engine,) = desk.core.engines
            assert (engine.engine_id, engine.kind, engine.address) == ("lent", "lent", "http://here")
            assert (engine.counts_address, engine.weight_version, engine.slots) == ("127.0.0.1:7", 3, 7)
            assert engine.kv_used_fraction == 0.25
            await lender.withdraw(GUEST, "enough")
            assert not list(desk.core.engines)
            with pytest.raises(EngineError, match="is not taken: over"):
                await asyncio.wait_for(offering, LONG_S)

    asyncio.run(check())


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "sched..example:7080"])
def test_a_scheduler_at_an_address_that_nobody_can_dial_is_trouble_and_no_more(address: str) -> None:
    async def check() -> None:
        async with open_lender(address, TOKEN, None, WaitBoard()) as lender:
            offering = asyncio.create_task(lender.keep_offered(GUEST, now))
            await until(lambda: lender.trouble or offering.done())
            assert f"scheduler {address}: not an engine's beat after 2 s" in (lender.trouble or "")
            offering.cancel()
            await asyncio.gather(offering, return_exceptions=True)

    asyncio.run(check())


def test_a_scheduler_that_is_away_is_trouble_and_no_more() -> None:
    async def check() -> None:
        async with scheduler() as (_, address):
            pass
        async with open_lender(address, TOKEN, None, WaitBoard()) as lender:
            assert lender.trouble is None  # a scheduler that was not asked yet is neither there nor away
            offering = asyncio.create_task(lender.keep_offered(GUEST, now))
            await until(lambda: lender.trouble)
            assert f"scheduler {address}: not an engine's beat after 2 s" in lender.trouble
            await lender.withdraw(GUEST, "nobody hears it")
            async with scheduler(int(address.rpartition(":")[2])) as (desk, _):
                await until(lambda: list(desk.core.engines) and lender.trouble == "")
                offering.cancel()
                await asyncio.gather(offering, return_exceptions=True)

    asyncio.run(check())


def test_a_scheduler_that_stands_still_or_is_killed_is_waited_for() -> None:
    async def check(folder: Path) -> None:
        async with (
            SchedulerProcess(folder) as process,
            open_lender(process.address, TOKEN, None, WaitBoard()) as lender,
            SchedulerClient(process.address, token=TOKEN, waits=WaitBoard(), timeout_s=LONG_S) as onlooker,
        ):
            offering = asyncio.create_task(lender.keep_offered(GUEST, now))

            async def offered() -> None:
                async with asyncio.timeout(LONG_S):
                    while [engine.slots for engine in (await onlooker.status()).engines] != [7]:
                        await asyncio.sleep(0.02)

            await offered()
            process.signal(signal.SIGSTOP)
            await until(lambda: lender.trouble)
            process.signal(signal.SIGCONT)
            await until(lambda: not lender.trouble)
            await process.end(signal.SIGKILL)
            await until(lambda: lender.trouble)
            await process.start()
            await until(lambda: not lender.trouble)
            await offered()
            assert not offering.done()
            offering.cancel()
            await asyncio.gather(offering, return_exceptions=True)

    with tempfile.TemporaryDirectory(prefix="rose-") as folder:  # short, because sockets lie in it
        asyncio.run(check(Path(folder)))


def test_certificates_that_do_not_fit_are_told_at_once(tmp_path: Path) -> None:
    own = read_certificates(str(make_authority(tmp_path).signs("own")))

    async def check() -> None:
        async with scheduler() as (_, address), open_lender(address, TOKEN, own, WaitBoard()) as lender:
            with pytest.raises(SchedulerError, match="speaks no TLS, and this side was given certificates"):
                await lender.keep_offered(GUEST, now)

    asyncio.run(check())


def test_a_wrong_token_is_told_at_once() -> None:
    async def check() -> None:
        async with scheduler() as (_, address), open_lender(address, "f" * 32, None, WaitBoard()) as lender:
            with pytest.raises(SchedulerError, match="the token is missing or wrong"):
                await lender.keep_offered(GUEST, now)

    asyncio.run(check())


class Setting:
    """The files of an executor in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = folder / "token"
        self.token.write_text(TOKEN)
        self.token.chmod(0o600)
        self.file = folder / "executor.toml"
        self.write()

    def write(self, weights: str = "127.0.0.1:9", cores: str = "[]") -> None:
        self.file.write_text(
            f'[executor]\nstate = "state"\nout = "runs"\ncores = {cores}\n[serving]\nboard = "board"\nttft_ms = 1\n'
            f'tpot_ms = 1\n[guest]\nmodel = "{warm_start()}"\n[join]\nscheduler = "127.0.0.1:9"\n'
            f'weights = "{weights}"\ntoken_file = "token"\n'
        )

    def run(self) -> bool:
        """It must not get as far as to lend."""

        def never(*_: object) -> NoReturn:
            raise AssertionError("it begins")

        return run_executor(load_executor_config(self.file, None, {}), open_lender, never)


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    with tempfile.TemporaryDirectory(prefix="rose-") as folder:  # short, because sockets would lie in it
        monkeypatch.setenv("ROSE_RUNTIME_DIR", f"{folder}/r")
        yield Setting(Path(folder))


def test_certificates_that_cannot_be_used_are_refused(setting: Setting) -> None:
    folder = make_authority(setting.folder / "authority").signs("own")
    (folder / "tls.key").chmod(0o644)
    setting.file.write_text(setting.file.read_text().replace("[serving]", 'certificates = "authority/own"\n[serving]'))
    with pytest.raises(ConfigError, match=r"authority/own/tls\.key: mode 0644"):
        setting.run()


def test_a_board_that_another_executor_has_is_refused(setting: Setting) -> None:
    with closing(claim_quota(setting.folder / "board")), pytest.raises(ClusterError, match="has a live writer"):
        setting.run()
    assert not list((setting.folder / "r").glob("executor-*"))


def test_a_state_that_another_executor_has_is_refused(setting: Setting) -> None:
    shelf = PageShelf(setting.folder / "state" / "pages", WaitBoard())
    with closing(shelf), pytest.raises(ClusterError, match="used by another executor"):
        setting.run()
    assert not (setting.folder / "board").exists()


def test_a_token_that_others_may_read_is_refused(setting: Setting) -> None:
    setting.token.chmod(0o644)
    with pytest.raises(ConfigError, match="mode 0644"):
        setting.run()


def test_an_address_that_is_none_is_refused(setting: Setting) -> None:
    setting.write(weights="127.0.0.1:0")
    with pytest.raises(ConfigError, match=r"join\.weights = .*: allowed is HOST:PORT"):
        setting.run()
    assert not (setting.folder / "runs").exists()


def test_a_model_that_is_none_is_refused_before_anything_starts(setting: Setting) -> None:
    setting.file.write_text(setting.file.read_text().replace(str(warm_start()), str(setting.folder / "none")))
    with pytest.raises(ConfigError, match="is not a model folder"):
        setting.run()
    assert not (setting.folder / "board").exists()


def test_cores_that_are_not_there_are_refused(setting: Setting) -> None:
    setting.write(cores="[100000]")
    with pytest.raises(ClusterError, match=r"cores \[100000\] cannot be used here"):
        setting.run()
