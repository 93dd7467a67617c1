"""`rose scheduler` as people run it: a process that is killed, started again, followed and ended."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import textwrap
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from service_tools import LONG_S, TOKEN, SchedulerProcess, offered, turn, until
from typer.testing import CliRunner

from rose import toml
from rose.access import read_token
from rose.cli.app import app
from rose.errors import ConfigError, DeadlineExceeded
from rose.runs import list_runs
from rose.status import read_status
from rose.waits import WaitBoard
from rose_scheduler.client import EngineState, SchedulerClient, Turn
from rose_scheduler.config import SchedulerConfig, load_config


def state() -> EngineState:
    return EngineState(0, 2, 0.0)


def with_process(folder: Path, body: Callable[[SchedulerProcess, SchedulerClient], Awaitable[None]]) -> None:
    async def check() -> None:
        async with (
            SchedulerProcess(folder) as process,
            SchedulerClient(process.address, token=TOKEN, waits=WaitBoard(), timeout_s=LONG_S) as client,
        ):
            await body(process, client)

    asyncio.run(check())


def test_clients_and_engines_outlast_a_scheduler_that_is_killed(short_path: Path) -> None:
    async def body(process: SchedulerProcess, client: SchedulerClient) -> None:
        engine = asyncio.create_task(client.keep_offered(offered(most=2), state, every_s=0.05))
        served: list[int] = []
        go_on = asyncio.Event()

        async def one(number: int) -> None:
            async with client.lease(turn(number), wait_s=LONG_S, hold_s=LONG_S) as lease:
                served.append(number)
                await go_on.wait()
                lease.tokens = 1

        leases = [asyncio.create_task(one(number)) for number in range(8)]
        await until(lambda: len(served) == 2)
        assert await process.end(signal.SIGKILL) == -signal.SIGKILL
        await process.start()
        assert len(list_runs(short_path / "runtime")) == 1  # what the dead one left is swept away
        await until(lambda: len(served) == 4)  # two hold what the dead one granted, two what the new one did
        go_on.set()
        await asyncio.gather(*leases)
        assert sorted(served) == list(range(8))
        status = await client.status()
        assert (status.held, status.waiting, len(status.engines)) == (0, 0, 1)
        engine.cancel()
        # Each run names its own: the killed one granted two, the other the rest; two ends were of the killed one's.
        lines = [json.loads(line) for line in process.log().splitlines()]
        assert sum(line["event"] == "lease granted" for line in lines) == 8
        verdicts = [line["verdict"] for line in lines if line["event"] == "lease ended"]
        assert (verdicts.count("unknown"), verdicts.count("ended")) == (2, 6)

    with_process(short_path, body)


def test_one_that_stands_still_is_told_at_the_deadline_and_loses_no_place(short_path: Path) -> None:
    async def body(process: SchedulerProcess, client: SchedulerClient) -> None:
        engine = asyncio.create_task(client.keep_offered(offered(most=2), state, every_s=0.05))
        async with client.lease(turn(), wait_s=LONG_S, hold_s=LONG_S):
            process.signal(signal.SIGSTOP)
            with pytest.raises(DeadlineExceeded, match=r"not a lease after 0\.1 s"):
                async with client.lease(turn(1), wait_s=0.1, hold_s=LONG_S):
                    pass
            process.signal(signal.SIGCONT)
        async with client.lease(turn(2), wait_s=LONG_S, hold_s=LONG_S):
            pass
        # What it granted to nobody when it went on is given back.
        async with asyncio.timeout(LONG_S):
            while (await client.status()).held:
                await asyncio.sleep(0.01)
        engine.cancel()

    with_process(short_path, body)


def test_a_client_that_is_killed_leaves_the_line(short_path: Path) -> None:
    asker = (
        "import asyncio; from service_tools import *\n"
        "async def ask(address):\n"
        "    async with SchedulerClient(address, token=TOKEN, waits=WaitBoard()) as client:\n"
        "        async with client.lease(turn(), wait_s=LONG_S, hold_s=LONG_S): pass\n"
        "asyncio.run(ask(sys.argv[1]))"
    )

    async def body(process: SchedulerProcess, client: SchedulerClient) -> None:
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        killed = await asyncio.create_subprocess_exec(
            sys.executable, "-c", asker, process.address, env={**os.environ, "PYTHONPATH": path}
        )
        await waiting(client, 1)
        killed.kill()
        await killed.wait()
        await waiting(client, 0)

    with_process(short_path, body)


async def waiting(client: SchedulerClient, number: int) -> None:
    async with asyncio.timeout(LONG_S):
        while (await client.status()).waiting != number:
            await asyncio.sleep(0.01)


def test_the_readme_s_example_works(short_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "scheduler" / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)

    async def stream(address: str, token: str) -> int:
        assert address == "http://at-e"
        assert token
        return 12

    async def body(process: SchedulerProcess, client: SchedulerClient) -> None:
        await client.offer(offered(version=6))
        await client.beat(offered(version=6), EngineState(6, 1, 0.0))
        here = {"127.0.0.1:7080": process.address, 'Path("token")': f'Path("{short_path}/token")'}
        example = code
        for there, address in here.items():
            assert there in example
            example = example.replace(there, address)
        names = {"SchedulerClient": SchedulerClient, "read_token": read_token, "Path": Path, "Turn": Turn}
        scope: dict[str, Any] = {**names, "waits": WaitBoard(), "stream": stream}
        exec(f"async def example():\n{textwrap.indent(example, '    ')}", scope)
        await scope["example"]()
        assert (await client.why("trajectory-7")).history[-1].what == "done, 12 tokens"

    with_process(short_path, body)


def test_one_trajectory_is_followed_through_the_log_the_page_and_the_metrics(short_path: Path) -> None:
    async def body(process: SchedulerProcess, client: SchedulerClient) -> None:
        await client.offer(offered())
        await client.beat(offered(), state())
        async with client.lease(turn(7), wait_s=LONG_S, hold_s=LONG_S) as lease:
            asking = asyncio.create_task(ask(client, 8))
            (found,) = list_runs(short_path / "runtime")

            def shown() -> dict[str, Any]:
                page = read_status(found, 0.0).page
                return {} if page is None else page.facts | {wait.what: wait.whom for wait in page.waits}

            await until(lambda: shown().get("leases waiting") == 1)
            assert shown()["address"] == process.address
            assert shown()["leases held"] == 1
            assert shown()["a place for a turn"] == "engines for trajectory-8"
            with urllib.request.urlopen(str(shown()["metrics"])) as reply:
                metrics = reply.read().decode()
            assert 'rose_scheduler_leases_granted_total{affine="false",kind="lent"} 1.0' in metrics
            assert "rose_scheduler_leases_waiting 1.0" in metrics
        await asking
        lines = [json.loads(line) for line in process.log().splitlines()]

        def followed(trajectory: str) -> list[str]:
            return [line["event"] for line in lines if line.get("trajectory_id") == trajectory]

        assert followed("trajectory-7") == ["lease granted", "lease ended"]
        assert followed("trajectory-8") == ["lease waits", "lease granted", "lease ended"]
        assert len({line["lease_id"] for line in lines if line.get("trajectory_id") == "trajectory-7"}) == 1
        assert lease.token not in process.log()
        assert TOKEN not in process.log()

    with_process(short_path, body)


async def ask(client: SchedulerClient, number: int) -> None:
    async with client.lease(turn(number), wait_s=LONG_S, hold_s=LONG_S):
        pass


def test_it_ends_on_sigterm_also_while_clients_wait_and_leaves_only_its_log(short_path: Path) -> None:
    async def body(process: SchedulerProcess, client: SchedulerClient) -> None:
        asking = asyncio.create_task(ask(client, 1))
        await waiting(client, 1)
        assert await process.end(signal.SIGTERM) == 0
        assert "error" not in process.log()
        assert list_runs(short_path / "runtime") == []
        said = await process.start()
        assert said.startswith(f"scheduler on {process.address}; metrics on http://127.0.0.1:")
        await client.offer(offered())
        await client.beat(offered(), state())
        await asking
        assert await process.end(signal.SIGINT) == 130

    with_process(short_path, body)


def test_the_file_s_keys_stand_unless_a_flag_says_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "scheduler.toml"
    file.write_text('[scheduler]\ntoken_file = "token"\nport = 7\n[limits]\nwaiting = 3\n')
    config = load_config(file, {"port": None, "name": "mine", "out": tmp_path})
    assert (config.scheduler.port, config.scheduler.name) == (7, "mine")
    assert config.scheduler.token_file == tmp_path / "token"
    assert config.limits.limits().waiting == 3
    assert load_config(file, {"port": 8}).scheduler.port == 8
    assert load_config(None, {"token_file": Path("t")}).scheduler.token_file == Path("t")


def test_the_help_shows_every_key_with_its_default() -> None:
    shown = CliRunner().invoke(app, ["scheduler", "--help"]).output
    text = shown[shown.index("[scheduler]") : shown.index("Examples:")]
    given = SchedulerConfig.model_validate(toml.loads("\n".join(line.strip() for line in text.splitlines())))
    default = SchedulerConfig.model_validate({"scheduler": {"token_file": "token"}})
    assert given == default
    assert given.scheduler.model_fields_set == set(type(given.scheduler).model_fields)
    assert given.limits.model_fields_set == set(type(given.limits).model_fields)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[scheduler]\n", "scheduler.token_file: missing"),
        ('[scheduler]\ntoken_file = "t"\nport = 70000\n', "scheduler.port = 70000"),
        ('[scheduler]\ntoken_file = "t"\nports = 7\n', "did you mean scheduler.port?"),
        ("scheduler = 3\n", "scheduler"),
        ('[scheduler]\ntoken_file = "t"\n[limits]\ndead_after_s = 1.0\n', "allowed is below limits.dead_after_s"),
        ('[scheduler]\ntoken_file = "t"\n[limits]\nwaiting = 0\n', "limits.waiting = 0"),
        ("[scheduler\n", "Expected ']'"),
        ("\udcff", "line 1 is not UTF-8"),
    ],
)
def test_a_wrong_file_is_told_with_its_key(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "scheduler.toml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        load_config(file, {})
    assert said in str(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (TOKEN, 0o644, "mode 0644"),
        (TOKEN, 0o640, "chmod 600"),
        ("short", 0o600, "a token of 5 characters"),
        ("two words of a token", 0o600, "without space"),
        ("ünprintable in a header", 0o600, "cannot be read"),
        (None, 0o600, "cannot be read"),
    ],
)
def test_a_token_that_is_no_secret_is_refused(tmp_path: Path, text: str | None, mode: int, said: str) -> None:
    file = tmp_path / "token"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        read_token(file)
    assert said in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_a_token_file_that_never_ends_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "long").write_text("x" * 5000)
    for file in (Path("/dev/zero"), tmp_path / "pipe", tmp_path, tmp_path / "long"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_token(file)


def test_a_file_of_settings_that_never_ends_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="no regular file"):
        load_config(Path("/dev/zero"), {})


def test_a_token_is_read_without_the_white_space_around_it(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f" {TOKEN}\n")
    file.chmod(0o600)
    assert read_token(file) == TOKEN
