"""The executor's process around its agent: what is still answered when it is asked to end."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rose.errors import EngineError
from rose.machine import look
from rose.waits import WaitBoard
from rose_executor import executor_program, guest_plan
from rose_executor.board import GUEST, SERVING, SERVING_KV, BoardReader, HalfWriter
from rose_executor.board_states import GuestState, ServingKv, ServingState
from rose_executor.counts_client import Counts, CountsClient
from rose_executor.executor_config import load_executor_config
from rose_executor.executor_program import run_executor
from rose_executor.guest_watch import GuestWatch
from rose_executor.page_shelf import PageShelf
from rose_executor.page_writer import PageWriter
from rose_executor.profile_keeper import ProfileKeeper
from rose_executor.step_shape import StepShape

TOKEN = "0123456789abcdef" * 2
LIFE = "a1" * 8
LONG_S = 60.0


class Guarding:
    """An agent whose guest samples to its last moment."""

    def __init__(self, guest: Any, watch: GuestWatch, shelf: PageShelf, figures: Any) -> None:
        self._page = PageWriter(shelf.folder / f"guest.{LIFE}.page", incarnation=LIFE, slots=4)
        self._lives = True

    def alive(self, incarnation: str) -> bool:
        return self._lives

    def unhealthy(self) -> str:
        return ""

    async def run(self, joined: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self._page.add("r", 3)
            self._lives = False


@asynccontextmanager
async def no_lender(*_: object) -> AsyncIterator[Any]:
    yield None


async def listen(address: str, heard: list[Counts]) -> None:
    """Ask as a run does, until the engine is dead; after the first answer the executor is asked to end."""
    client = CountsClient(address, token=TOKEN, waits=WaitBoard(), timeout_s=LONG_S)
    while not heard or heard[-1].alive:
        heard.append(await client.counts(LIFE, ["r"]))
        if len(heard) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.5)
    await client.close()


def test_a_run_hears_the_last_counts_of_a_guest_whose_executor_is_asked_to_end(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="rose-") as root:  # short, because sockets lie in it
        monkeypatch.setenv("ROSE_RUNTIME_DIR", root)
        _hears_the_last_counts(tmp_path, tiny_model, monkeypatch)


class Page(BaseHTTPRequestHandler):
    """A stock serving engine's, which has nothing to do."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n")

    def log_message(self, *_: object) -> None:
        pass


async def end_when_seen(board: Path, seen: list[ServingState]) -> None:
    with closing(BoardReader(board)) as reader:
        while (state := reader.read(SERVING, time.monotonic()).state) is None:
            await asyncio.sleep(0.01)
    seen.append(state)
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_stock_serving_engine_is_looked_at_if_its_page_is_named(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_program, "Agent", Guarding)
    seen: list[ServingState] = []
    looking: list[asyncio.Task[None]] = []

    def ready(*_: str) -> None:
        looking.append(asyncio.get_running_loop().create_task(end_when_seen(tmp_path / "board", seen)))

    with tempfile.TemporaryDirectory(prefix="rose-") as root, HTTPServer(("127.0.0.1", 0), Page) as server:
        monkeypatch.setenv("ROSE_RUNTIME_DIR", root)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        file = written(tmp_path, tiny_model, f'metrics = "http://127.0.0.1:{server.server_port}/metrics"')
        assert run_executor(load_executor_config(file, None, {"out": tmp_path / "runs"}), no_lender, ready)
        server.shutdown()
    assert [(state.idle, state.looked_at_s > 0) for state in seen] == [(True, True)]
    with closing(BoardReader(tmp_path / "board")) as reader:  # the half is free again
        assert reader.read(SERVING, time.monotonic() + 10).state is None
    HalfWriter(tmp_path / "board", SERVING).close()


class Asking(Guarding):
    """Beside a serving engine that gives memory back; it asks for the tier as its guest says more and more."""

    def __init__(self, guest: Any, watch: GuestWatch, shelf: PageShelf, figures: Any) -> None:
        super().__init__(guest, watch, shelf, figures)
        self._watch, self._board, self._tier_of = watch, guest._settings.board, figures._tier_of

    async def run(self, joined: object) -> None:
        serving = ServingState(steps=1, arrivals=1)
        kv, guest = HalfWriter(self._board, SERVING_KV), HalfWriter(self._board, GUEST)
        kv.write(ServingKv(total_bytes=2**30))
        TIERS.clear()
        for state in (None, GuestState(), GuestState(kv_gives_back=True)):
            if state is not None:
                guest.write(state)
            self._watch.look()
            TIERS.append(self._tier_of(serving).words)
        kv.close()
        guest.close()
        os.kill(os.getpid(), signal.SIGTERM)
        await super().run(joined)


TIERS: list[str] = []


def test_the_guest_itself_says_whether_its_memory_goes_back(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_program, "Agent", Asking)
    with tempfile.TemporaryDirectory(prefix="rose-") as root:
        monkeypatch.setenv("ROSE_RUNTIME_DIR", root)
        file = written(tmp_path, tiny_model, more="[memory]\npool_gib = 1.5\nserving_gib = 1.0\n")
        assert run_executor(load_executor_config(file, None, {"out": tmp_path / "runs"}), no_lender, lambda *_: None)
    untold, kept, given = TIERS
    assert "KV memory fixed split, until the guest says" in untold
    assert "KV memory fixed split, because the guest gives none back" in kept
    assert "fixed split" not in given


@pytest.mark.parametrize(("pool_gib", "warned"), [(1.2, True), (2.0, False)])
def test_a_pool_that_may_never_have_room_for_the_guest_is_told_at_the_start(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, pool_gib: float, warned: bool
) -> None:
    monkeypatch.setattr(executor_program, "Agent", Asking)
    with tempfile.TemporaryDirectory(prefix="rose-") as root:
        monkeypatch.setenv("ROSE_RUNTIME_DIR", root)
        file = written(tmp_path, tiny_model, more=f"[memory]\npool_gib = {pool_gib}\nserving_gib = 1.0\n")
        assert run_executor(load_executor_config(file, None, {"out": tmp_path / "runs"}), no_lender, lambda *_: None)
    (log,) = (tmp_path / "runs").glob("*/log.jsonl")
    assert ("the pool may never have room for the guest" in log.read_text()) is warned


def test_a_keeper_of_profiles_that_fails_ends_the_executor_with_the_cause(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(keeper: ProfileKeeper) -> None:
        raise EngineError("what was learnt is not to be had")

    monkeypatch.setattr(executor_program, "Agent", Guarding)
    monkeypatch.setattr(ProfileKeeper, "run", fails)
    with tempfile.TemporaryDirectory(prefix="rose-") as root:
        monkeypatch.setenv("ROSE_RUNTIME_DIR", root)
        config = load_executor_config(written(tmp_path, tiny_model), None, {"out": tmp_path / "runs"})
        with pytest.raises(EngineError, match="not to be had"):
            run_executor(config, no_lender, lambda *_: None)


def test_what_keeps_a_profile_from_the_disk_is_what_the_status_shows(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Troubled(Guarding):
        def __init__(self, guest: Any, watch: GuestWatch, shelf: PageShelf, figures: Any) -> None:
            super().__init__(guest, watch, shelf, figures)
            told.append(figures._unkept())
            keepers[0].trouble = "no space left"
            told.append(figures._unkept())

        async def run(self, joined: object) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            await super().run(joined)

    class Known(ProfileKeeper):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            keepers.append(self)

    told: list[str] = []
    keepers: list[ProfileKeeper] = []
    monkeypatch.setattr(executor_program, "Agent", Troubled)
    monkeypatch.setattr(guest_plan, "ProfileKeeper", Known)
    with tempfile.TemporaryDirectory(prefix="rose-") as root:
        monkeypatch.setenv("ROSE_RUNTIME_DIR", root)
        config = load_executor_config(written(tmp_path, tiny_model), None, {"out": tmp_path / "runs"})
        assert run_executor(config, no_lender, lambda *_: None)
    assert told == ["", "no space left"]


def test_what_was_learnt_last_is_kept_at_the_end(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Learning(Guarding):
        def __init__(self, guest: Any, watch: GuestWatch, shelf: PageShelf, figures: Any) -> None:
            super().__init__(guest, watch, shelf, figures)
            self._profile = watch.profile

        async def run(self, joined: object) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                await super().run(joined)
            finally:
                for at in range(40):
                    self._profile.saw(StepShape(8, 1), 0.01, float(at))
                learnt.append(self._profile.steps)

    learnt: list[int] = []
    monkeypatch.setattr(executor_program, "Agent", Learning)
    with tempfile.TemporaryDirectory(prefix="rose-") as root:
        monkeypatch.setenv("ROSE_RUNTIME_DIR", root)
        file = written(tmp_path, tiny_model)
        file.write_text(file.read_text().replace("[executor]", f'[executor]\nprofiles = "{tmp_path / "profiles"}"'))
        config = load_executor_config(file, None, {"out": tmp_path / "runs"})
        assert run_executor(config, no_lender, lambda *_: None)
        run: Any = SimpleNamespace(runtime=Path(root), output=tmp_path)
        plan = guest_plan.plan_guest(config, run, tmp_path, look())
    assert learnt[0] > 0
    assert (plan.profiled, plan.profile.steps) == (True, learnt[0])


def written(folder: Path, model: Path, serving: str = "", more: str = "") -> Path:
    """An executor's file, with a line for [serving], and more sections."""
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    file = folder / "executor.toml"
    file.write_text(
        f'[executor]\nstate = "state"\n[join]\nscheduler = "127.0.0.1:1"\nweights = "127.0.0.1:1"\n'
        f'token_file = "token"\n[serving]\nboard = "board"\nttft_ms = 500.0\ntpot_ms = 60.0\n{serving}\n'
        f'[guest]\nmodel = "{model}"\n{more}'
    )
    return file


def _hears_the_last_counts(folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_program, "Agent", Guarding)
    file = written(folder, tiny_model)
    heard: list[Counts] = []
    listening: list[asyncio.Task[None]] = []

    def ready(counts_address: str, _: str) -> None:
        listening.append(asyncio.get_running_loop().create_task(listen(counts_address, heard)))

    assert run_executor(load_executor_config(file, None, {"out": folder / "runs"}), no_lender, ready)
    assert (heard[0].alive, heard[0].total_tokens) == (True, 0)
    assert (heard[-1].alive, heard[-1].total_tokens, heard[-1].requests["r"].tokens) == (False, 3, 3)
