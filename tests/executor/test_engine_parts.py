"""The small parts around an engine: its environment, its request ids, its log, its settings, its contract."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import EngineError
from rose_executor import vllm_contract, vllm_plugin, vllm_reliances
from rose_executor.engine_env import BOARD, SERVING_BOARD, SERVING_KV_SPARE, EngineEnv, serving_board
from rose_executor.engine_process import _healthy
from rose_executor.engine_settings import EngineSettings
from rose_executor.launcher import changed
from rose_executor.request_id import external_request_id
from rose_executor.vllm_plugin import register

LONG_S = 60.0
ENV = EngineEnv("engine-0", "00ff" * 4, 5, Path("/run/engine-0.sock"), Path("/run/page"), unpacked_weights=False)


@given(st.text(min_size=1), st.text("0123456789abcdef", min_size=8, max_size=8))
def test_the_clients_request_id_is_found_in_vllms(request_id: str, suffix: str) -> None:
    assert external_request_id(f"generate-tokens-{request_id}-{suffix}") == request_id


@pytest.mark.parametrize("other", ["abc", "generate-tokens-abc", "a-0123456g", ""])
def test_an_id_that_vllm_did_not_make_stays(other: str) -> None:
    assert external_request_id(other) == other


def test_an_engine_reads_what_its_owner_set() -> None:
    inherited = {"HOME": "/root", "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "40"}
    environ = changed(inherited, ENV.variables())
    assert EngineEnv.read(environ) == ENV
    assert environ["HOME"] == "/root"
    assert "VLLM_SERVER_DEV_MODE" not in environ
    assert "VLLM_CPU_KVCACHE_SPACE" not in environ


def test_the_plugin_only_offers_its_backend_in_a_vllm_that_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    offered: list[str] = []
    monkeypatch.setattr("rose_executor.transfer_plugin.register", lambda: offered.append("rose"))
    monkeypatch.setattr("rose_executor.vllm_plugin.die_with_parent", lambda pid: pytest.fail("touched the process"))
    monkeypatch.setattr(vllm_contract, "check", lambda: pytest.fail("looked at vLLM"))
    assert EngineEnv.read() is None
    register()
    assert offered == ["rose"]


@pytest.mark.parametrize(("spare", "why"), [("a lot", "ROSE_SERVING_KV_SPARE is 'a lot'"), ("0.1", "kv_serving")])
def test_a_serving_engine_starts_also_where_its_memory_cannot_go_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, spare: str, why: str
) -> None:
    monkeypatch.setattr("rose_executor.transfer_plugin.register", lambda: None)
    monkeypatch.setenv(SERVING_KV_SPARE, spare)
    # As where a name that it imports from vLLM is gone.
    monkeypatch.setitem(sys.modules, "rose_executor.kv_serving", None)
    monkeypatch.delattr("rose_executor.kv_serving", raising=False)
    with caplog.at_level(logging.WARNING):
        register()
    (line,) = caplog.messages
    assert line.startswith("ROSE gives no memory back, serving goes on: ")
    assert why in line


@pytest.mark.parametrize(
    ("env", "looked_at"),
    [
        (ENV, [vllm_reliances.ENGINE]),
        (replace(ENV, step_log=Path("/run/steps")), [vllm_reliances.ENGINE, vllm_reliances.RECORDER]),
        (replace(ENV, board=Path("/run/board")), [vllm_reliances.ENGINE, vllm_reliances.QUOTA]),
        (
            replace(ENV, board=Path("/run/board"), step_log=Path("/run/steps")),
            [vllm_reliances.ENGINE, vllm_reliances.QUOTA],
        ),
    ],
)
def test_an_engine_looks_at_the_names_that_its_scheduler_relies_on(
    monkeypatch: pytest.MonkeyPatch, env: EngineEnv, looked_at: list[tuple[vllm_reliances.Reliance, ...]]
) -> None:
    seen = []

    def nothing(*_: object) -> None:
        pass

    def look(relied_on: tuple[vllm_reliances.Reliance, ...] = vllm_reliances.ENGINE) -> None:
        seen.append(relied_on)

    monkeypatch.setattr(EngineEnv, "read", lambda: env)
    monkeypatch.setattr(vllm_contract, "check", look)
    for name in ("die_with_parent", "forked_children_die_with_parent", "_add_engine_core_methods"):
        monkeypatch.setattr(vllm_plugin, name, nothing)
    monkeypatch.setattr(vllm_plugin, "_begin_without_pages", nothing)
    monkeypatch.setattr("rose_executor.transfer_plugin.register", nothing)
    monkeypatch.setattr("rose_executor.vllm_030.level_engine", nothing)
    register()
    assert seen == looked_at


def test_a_guest_is_told_its_board_and_no_other_engine_inherits_one() -> None:
    guest = replace(ENV, board=Path("/run/board"))
    assert EngineEnv.read(changed({}, guest.variables())) == guest
    inherited = {BOARD: "/run/board", SERVING_BOARD: "/run/board"}
    environ = changed(inherited, ENV.variables())
    assert EngineEnv.read(environ) == ENV
    assert serving_board(environ) is None
    assert serving_board(inherited) == Path("/run/board")


def test_a_changed_environment_leaves_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_TEST", "1")
    assert "ROSE_TEST" not in changed(os.environ, {"ROSE_TEST": None, "OTHER": "2"})
    assert os.environ["ROSE_TEST"] == "1"


def test_what_vllm_lacks_is_named() -> None:
    relied_on = (
        ("json", "loads", ("s",)),
        ("json", "__name__", ()),
        ("json", "loads", ("s", "no_such_parameter")),
        ("json", "JSONDecoder.no_such_method", ()),
        ("json", "JSONDecoder.strict", ()),  # which `__init__` assigns
        ("rose_executor.engine_settings", "EngineSettings.model_dir", ()),  # a field
        ("http.cookiejar", "DefaultCookiePolicy._blocked_domains", ()),  # assigned by another method
        ("http.cookiejar", "request_host.get_full_url", ()),  # which the function asks of its argument
        ("no_such_module", "x", ()),
    )
    missing = vllm_contract.broken(relied_on)
    assert len(missing) == 3
    for name, text in zip(("no_such_parameter", "no_such_method", "no_such_module"), missing, strict=True):
        assert name in text


def test_a_vllm_that_moved_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_contract, "broken", lambda relied_on: ["vllm.x.y: gone"])
    with pytest.raises(EngineError, match=r"vllm\.x\.y: gone; expected vLLM 0\.32 or 0\.30"):
        vllm_contract.check()


def test_the_command_line_follows_the_settings(tmp_path: Path) -> None:
    settings = EngineSettings("engine-0", tmp_path, tmp_path, tmp_path / "log", max_num_seqs=7, stream_interval=3)
    arguments = list(settings.arguments(tmp_path / "v000001"))
    values = dict(zip(arguments[::2], arguments[1::2], strict=False))
    assert values["--model"] == str(tmp_path / "v000001")
    assert values["--host"] == "127.0.0.1"
    assert values["--max-num-seqs"] == "7"
    assert values["--stream-interval"] == "3"
    assert values["--scheduler-cls"].endswith(".CountingScheduler")
    gpu = EngineSettings("engine-0", tmp_path, tmp_path, tmp_path / "log", async_scheduling=True)
    assert any(argument.endswith(".CountingAsyncScheduler") for argument in gpu.arguments(tmp_path))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_guest_has_the_scheduler_that_keeps_a_quota(tmp_path: Path, asynchronous: bool) -> None:
    guest = EngineSettings(
        "guest", tmp_path, tmp_path, tmp_path / "log", board=tmp_path / "board", async_scheduling=asynchronous
    )
    name = "QuotaAsyncScheduler" if asynchronous else "QuotaScheduler"
    assert f"rose_executor.quota_scheduler.{name}" in guest.arguments(tmp_path)


def test_a_server_that_does_not_answer_for_minutes_is_not_healthy_yet() -> None:
    async def check() -> bool:
        async with await asyncio.start_server(lambda reader, writer: asyncio.sleep(LONG_S), "127.0.0.1", 0) as silent:
            address = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
            # Five minutes, where nobody says otherwise: beneath a busy serving engine a guest may take longer.
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.2)) as session:
                return await _healthy(session, address)

    assert not asyncio.run(check())
