"""The serving engine: the user's, so a plain vLLM, started as users start theirs.

All that it has of ours is the probe, which tells the board what it does.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from rose.demo.child import DemoChild, Program, start_child
from rose.demo.cores import Placing
from rose.errors import EngineError
from rose.waits import WaitBoard
from rose_executor.engine_env import IMPORT_ENV, SERVING_BOARD

NAME = "serving"
_START_S = 600.0
_POLL_S = 0.05
_HEALTH_S = 5.0
_WARM_PROMPTS = (20, 200, 400, 20, 200, 400)
_WARM_ANSWER = 12
_WARM_TOKEN = 100


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """`folder` holds what vLLM's processes put between them; its board is `board` in it."""

    model: Path
    folder: Path
    log_path: Path
    context_tokens: int
    seqs_max: int = 32
    kv_cache_bytes: int = 256 * 2**20

    @property
    def board(self) -> Path:
        return self.folder / "board"

    def program(self, port: int) -> Program:
        arguments = (
            *("--model", str(self.model), "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "float32", "--max-model-len", str(self.context_tokens), "--max-num-seqs", str(self.seqs_max)),
            *("--block-size", "32", "--kv-cache-memory-bytes", str(self.kv_cache_bytes)),
            *("--enforce-eager", "--disable-uvicorn-access-log"),
        )
        env: Mapping[str, str | None] = {
            **IMPORT_ENV,
            "VLLM_PLUGINS": "rose_probe",
            SERVING_BOARD: str(self.board),
            "TMPDIR": str(self.folder),
            "VLLM_API_KEY": None,
        }
        return Program(NAME, "rose_executor.engine_main", arguments, self.log_path, env)


@dataclass(frozen=True, slots=True)
class ServingEngine:
    """One that answers."""

    child: DemoChild
    url: str

    async def watch(self) -> None:
        """Raises EngineError when it ends: without it there is nothing to share."""
        await self.child.wait()
        raise EngineError(f"the serving engine {self.child.death()}", to_do="start the demo again")


async def start_serving(settings: ServingSettings, placing: Placing, waits: WaitBoard) -> ServingEngine:
    """Start it and wait until it is warm. Raises EngineError or DeadlineExceeded; nothing is left of it then."""
    port = free_port()
    child = await start_child(settings.program(port), placing.with_serving, waits)
    engine = ServingEngine(child, f"http://127.0.0.1:{port}")
    try:
        to_do = f"see {settings.log_path}"
        await waits.within(_until_healthy(engine), "start", NAME, _START_S, boundary="engine", to_do=to_do)
        await waits.within(_warm(engine.url), "first answers", NAME, _START_S, boundary="engine", to_do=to_do)
    except BaseException:
        await child.stop(0.0)
        raise
    return engine


async def _warm(url: str) -> None:
    """What the first requests pay for is nobody's latency. Raises EngineError if one is not answered."""
    # The caller's deadline is the only one.
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        for tokens in _WARM_PROMPTS:
            await answered(session, url, [_WARM_TOKEN] * tokens, _WARM_ANSWER)


async def answered(session: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int) -> None:
    """One request, to its last token. Raises EngineError if it is not answered."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            text = await response.text()
            if response.status != 200:
                raise EngineError(f"the serving engine answers with status {response.status}: {text[:300]}")
    except aiohttp.ClientError as error:
        raise EngineError(f"the serving engine does not answer: {error}") from error


def free_port() -> int:
    """A loopback port that nobody has just now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


async def _until_healthy(engine: ServingEngine) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_HEALTH_S)) as session:
        while not await _healthy(session, engine.url):
            if engine.child.exit_code is not None:
                raise EngineError(f"the serving engine {engine.child.death()}, while it started")
            await asyncio.sleep(_POLL_S)


async def _healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    except (aiohttp.ClientConnectionError, TimeoutError):
        return False
