"""A serving engine whose user asks for it gives the memory back that it does not use, and answers as before."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rose.errors import ConfigError
from rose_executor.board import SERVING_KV, BoardReader, claim_quota
from rose_executor.board_states import ServingKv
from rose_executor.engine_env import SERVING_BOARD, SERVING_KV_SPARE, serving_kv_spare
from rose_executor.guest_memory import host_memory
from rose_executor.launcher import Child, Command

MIB = 2**20
CACHE, BLOCK = 128 * MIB, 16 * 2**10
SPARE = 0.125
PROMPTS = ["abcdefgh" * 30, "zyxwvu" * 40, "mnop" * 60]


class Serving:
    """A plain vLLM server, as a user would start it."""

    def __init__(self, rig: Any, board: Path) -> None:
        self.rig, self.board = rig, board
        self.url = ""
        self.child: Child | None = None
        self.reader = BoardReader(board)

    async def start(self, spare: float | None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        arguments = (
            *("--model", str(self.rig.model), "--served-model-name", "serving", "--enforce-eager"),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "512"),
            *("--max-num-seqs", "16", "--block-size", "32", "--kv-cache-memory-bytes", str(CACHE)),
        )
        env = {"VLLM_PLUGINS": "rose", SERVING_BOARD: str(self.board)}
        if spare is not None:
            env[SERVING_KV_SPARE] = str(spare)
        log = self.rig.folder / "serving-kv.log"
        self.child = await self.rig.warm.launch(
            Command("rose_executor.engine_main", arguments, log, self.rig.folder, env)
        )
        self.url = f"http://127.0.0.1:{port}"
        async with asyncio.timeout(90):
            while not await self._healthy():
                assert self.child.exit_code is None, log.read_text()[-3000:]
                await asyncio.sleep(0.05)

    async def _healthy(self) -> bool:
        try:
            async with self.rig.session.get(f"{self.url}/health") as response:
                return bool(response.status == 200)
        except aiohttp.ClientConnectionError:
            return False

    async def complete(self, prompt: str, tokens: int) -> str:
        body = {"model": "serving", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        async with self.rig.session.post(f"{self.url}/v1/completions", json=body) as response:
            return str((await response.json())["choices"][0]["text"])

    def resident_bytes(self) -> int:
        assert self.child is not None
        return host_memory(self.child.pid).resident_bytes

    def told(self) -> ServingKv | None:
        return self.reader.read_of_living(SERVING_KV, time.monotonic()).state

    async def falls_to(self, most_bytes: float) -> None:
        async with asyncio.timeout(60):
            while (told := self.told()) is None or told.resident_bytes > most_bytes:
                await asyncio.sleep(0.02)

    async def burst(self) -> None:
        """Of requests whose prefixes would fill a third of the cache."""
        await asyncio.gather(*(self.complete(f"{index:03d}" * 130, 90) for index in range(160)))

    async def end(self) -> None:
        assert self.child is not None
        self.child.signal(signal.SIGKILL)
        await asyncio.wait_for(self.child.wait(), 20)


def board(rig: Any) -> Path:
    path: Path = rig.folder / "serving-kv-board"
    claim_quota(path).close()
    return path


@pytest.fixture(scope="module")
def serving(rig: Any) -> Iterator[Serving]:
    server = Serving(rig, board(rig))
    rig.run(server.start(SPARE))
    yield server
    rig.run(server.end())


@pytest.mark.engine
def test_what_a_burst_took_goes_back_when_it_is_over_and_no_answer_changes(serving: Serving) -> None:
    async def run() -> None:
        before = [await serving.complete(prompt, 40) for prompt in PROMPTS]
        await serving.falls_to(SPARE * CACHE)
        await serving.burst()
        await serving.falls_to(SPARE * CACHE)
        told = serving.told()
        assert told is not None
        assert told.total_bytes == (CACHE // BLOCK - 1) * BLOCK
        assert told.spare_bytes == pytest.approx(SPARE * CACHE, rel=0.01)
        assert [await serving.complete(prompt, 40) for prompt in PROMPTS] == before

    serving.rig.run(run())


@pytest.mark.engine
def test_it_is_smaller_than_one_whose_user_did_not_ask_by_the_kernels_books(serving: Serving) -> None:
    other = Serving(serving.rig, serving.board)

    async def run() -> None:
        await other.start(None)
        for server in (serving, other):
            await server.burst()
        await serving.falls_to(SPARE * CACHE)
        assert serving.resident_bytes() < other.resident_bytes() - 0.6 * CACHE

    try:
        serving.rig.run(run())
    finally:
        serving.rig.run(other.end())


@pytest.mark.engine
def test_a_killed_engine_holds_nothing_that_anybody_believes(serving: Serving) -> None:
    """The file's last test."""
    assert serving.told() is not None
    serving.rig.run(serving.end())
    deadline = time.monotonic() + 20
    while serving.told() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("text", "spare"), [("0", 0.0), ("0.25", 0.25), ("1", 1.0), ("", None)])
def test_a_share_is_read(text: str, spare: float | None) -> None:
    assert serving_kv_spare({SERVING_KV_SPARE: text}) == spare


@pytest.mark.parametrize("text", ["10%", "-0.1", "1.5", "nan"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="ROSE_SERVING_KV_SPARE"):
        serving_kv_spare({SERVING_KV_SPARE: text})


def test_without_it_nothing_goes_back() -> None:
    assert serving_kv_spare({}) is None
