"""The probe: what it tells of a serving engine, and that nothing ever comes of it for the engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rose_executor import engine_env
from rose_executor.board import SERVING, BoardReader, claim_quota
from rose_executor.board_states import ServingState
from rose_executor.launcher import Child, Command

pytestmark = pytest.mark.engine

BUSY = [1, 2, 3, 1, 4, 43, 25, 100]


@pytest.fixture(scope="module")
def answers(rig: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `inside_vllm_main` says."""
    folder = tmp_path_factory.mktemp("inside")

    async def ask() -> None:
        child = await rig.warm.launch(Command("inside_vllm_main", (str(folder / "answers"),), folder / "log", folder))
        assert await asyncio.wait_for(child.wait(), 90) == 0, (folder / "log").read_text()[-3000:]

    rig.run(ask())
    said: dict[str, Any] = json.loads((folder / "answers").read_text())
    return said


def test_vllm_has_what_is_relied_on_and_nothing_of_ours_hides_its_names(answers: dict[str, Any]) -> None:
    """But what is meant to: an attribute or a helper that hides one breaks an engine in mid-generation."""
    assert answers["broken"] == []
    assert answers["clashes"] == [
        *("_free_request", "_update_request_with_output", "max_num_active_reqs", "max_num_scheduled_tokens"),
        *("reset_prefix_cache", "schedule", "update_from_output"),
    ]


def test_without_a_board_to_write_on_it_does_nothing(answers: dict[str, Any]) -> None:
    assert answers["inert"] == ["no board is named", False, 1]
    assert answers["second_engine"] == ["a board is for one device", "the serving half was never written"]


def test_it_tells_each_step_and_goes_on_to_while_the_engine_idles(answers: dict[str, Any]) -> None:
    assert answers["tells"] == ["", [0, 0, 0, 0, 0, 0, 0, 100], BUSY, True]


def test_an_arrival_stands_on_the_board_before_its_request_is_handled(answers: dict[str, Any]) -> None:
    nobody = [2, 1, True]  # another one: the board hears of an end with the next beat
    assert answers["hears_of_arrivals"] == [
        "",
        [[1, 1, True], [2, 1, True], nobody, nobody, nobody, [3, 1, True]],
        [3, 0, True],
    ]


def test_a_board_that_comes_late_or_is_made_anew_is_found(answers: dict[str, Any]) -> None:
    assert answers["finds_a_late_board"] == ["", False, BUSY, BUSY]


def test_whatever_goes_wrong_in_it_switches_it_off(answers: dict[str, Any]) -> None:
    why, state = answers["odd_statistics"]
    assert "has no attribute" in why
    assert state == "the serving half was never written"
    assert answers["broken_file_system"] == ["[Errno 28] No space left on device", None]


class Serving:
    """A plain vLLM server with our probe, as a user would start it."""

    def __init__(self, rig: Any, board: Path) -> None:
        self.rig, self.board = rig, board
        self.url = ""
        self.child: Child | None = None

    async def start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        arguments = (
            *("--model", str(self.rig.model), "--served-model-name", "serving", "--enforce-eager"),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "512"),
            *("--max-num-seqs", "4", "--block-size", "32", "--kv-cache-memory-bytes", str(16 * 2**20)),
        )
        folder = self.rig.folder
        env = {"VLLM_PLUGINS": "rose_probe", engine_env.SERVING_BOARD: str(self.board)}
        command = Command("rose_executor.engine_main", arguments, folder / "serving.log", folder, env)
        self.child = await self.rig.warm.launch(command)
        self.url = f"http://127.0.0.1:{port}"
        async with asyncio.timeout(90):
            while not await self._healthy():
                assert self.child.exit_code is None, (folder / "serving.log").read_text()[-3000:]
                await asyncio.sleep(0.05)

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


@pytest.fixture(scope="module")
def serving(rig: Any) -> Iterator[Serving]:
    path = rig.folder / "serving-board"
    claim_quota(path).close()
    server = Serving(rig, path)
    rig.run(server.start())
    yield server
    assert server.child is not None
    server.child.signal(signal.SIGKILL)
    rig.run(asyncio.wait_for(server.child.wait(), 20))


async def seen(serving: Serving, what: Callable[[ServingState | None], bool]) -> ServingState | None:
    """The state, as soon as it is such."""
    async with asyncio.timeout(30):
        while True:
            reader = BoardReader(serving.board)
            state = reader.read(SERVING, time.monotonic()).state
            reader.close()
            if what(state):
                return state
            await asyncio.sleep(0.002)


def test_a_real_server_is_seen_at_work_in_line_and_idle(serving: Serving) -> None:
    async def run() -> None:
        assert await seen(serving, lambda state: state is not None and state.kv_blocks_total > 0)
        began_s = time.monotonic()
        work = asyncio.gather(*(serving.complete() for _ in range(8)))
        queue = await seen(serving, lambda state: state is not None and state.waiting > 0)
        assert queue is not None
        assert queue.running == 4
        assert (queue.arrivals, queue.unanswered) == (8, 4)
        assert 0 < queue.oldest_unanswered_at_s <= queue.stepped_at_s
        steady = await seen(serving, lambda state: state is not None and state.step_s > 0 and state.kv_blocks_used > 0)
        assert steady is not None
        assert steady.kv_blocks_used <= steady.kv_blocks_total
        assert await work == [60] * 8
        idle = await seen(serving, lambda state: state is not None and state.running + state.waiting == 0)
        assert idle is not None
        assert idle.steps >= 2 * 60
        assert steady.busy_s < idle.busy_s < time.monotonic() - began_s
        await asyncio.sleep(1.0)  # for a last step that computes nothing
        rest = await seen(serving, lambda _: True)
        await asyncio.sleep(1.0)  # twice as long as it takes to grow stale
        assert (await seen(serving, lambda _: True)) == rest

    serving.rig.run(run())


def test_harm_to_the_board_is_no_harm_to_the_server(serving: Serving) -> None:
    async def run() -> None:
        for harm in (lambda: os.truncate(serving.board, 0), serving.board.unlink):
            work = asyncio.gather(*(serving.complete(200) for _ in range(4)))
            await seen(serving, lambda state: state is not None and state.running > 0)
            harm()
            assert await work == [200] * 4
            claim_quota(serving.board).close()
            assert await seen(serving, lambda state: state is not None)

    serving.rig.run(run())


def test_a_stopped_server_is_unknown(serving: Serving) -> None:
    async def run() -> None:
        assert serving.child is not None
        serving.child.signal(signal.SIGSTOP)
        try:
            assert await seen(serving, lambda state: state is None) is None
        finally:
            serving.child.signal(signal.SIGCONT)
        assert await seen(serving, lambda state: state is not None)
        assert await serving.complete(5) == 5

    serving.rig.run(run())
