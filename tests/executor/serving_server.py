"""A plain vLLM server as a user would start it, and what a board says of it."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from rose_executor.board import SERVING, BoardReader
from rose_executor.board_states import ServingState
from rose_executor.launcher import Child, Command


class ServingServer:
    """Starts from the rig's warm process, with `env` besides, and may be started again on its old port."""

    def __init__(self, rig: Any, board: Path, env: Mapping[str, str]) -> None:
        self.rig, self.board = rig, board
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self.child: Child | None = None
        self._env = env

    async def start(self) -> None:
        arguments = (
            *("--model", str(self.rig.model), "--served-model-name", "serving", "--enforce-eager"),
            *("--host", "127.0.0.1", "--port", str(self._port), "--dtype", "float32", "--max-model-len", "512"),
            *("--max-num-seqs", "4", "--block-size", "32", "--kv-cache-memory-bytes", str(16 * 2**20)),
        )
        folder, log = self.rig.folder, self.rig.folder / f"{self.board.name}.log"
        command = Command("rose_executor.engine_main", arguments, log, folder, dict(self._env))
        self.child = await self.rig.warm.launch(command)
        async with asyncio.timeout(90):
            while not await self._healthy():
                assert self.child.exit_code is None, log.read_text()[-3000:]
                await asyncio.sleep(0.05)

    async def kill(self) -> None:
        assert self.child is not None
        self.child.signal(signal.SIGKILL)
        await asyncio.wait_for(self.child.wait(), 20)

    async def _healthy(self) -> bool:
        try:
            async with self.rig.session.get(f"{self.url}/health") as response:
                return bool(response.status == 200)
        except aiohttp.ClientConnectionError:
            return False

    async def complete(self, tokens: int = 60) -> int:
        """One completion; how many tokens came of it."""
        body = {"model": "serving", "prompt": "abcdefgh", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        async with self.rig.session.post(f"{self.url}/v1/completions", json=body) as response:
            answer = await response.json()
        return int(answer["usage"]["completion_tokens"])

    async def seen(self, what: Callable[[ServingState | None], bool]) -> ServingState | None:
        """The state on the board, as soon as it is such."""
        async with asyncio.timeout(30):
            while True:
                reader = BoardReader(self.board)
                state = reader.read(SERVING, time.monotonic()).state
                reader.close()
                if what(state):
                    return state
                await asyncio.sleep(0.002)
