"""The probe: what it tells of a serving engine, and that nothing ever comes of it for the engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from serving_server import ServingServer

from rose_executor import engine_env
from rose_executor.board import claim_quota
from rose_executor.launcher import Command

pytestmark = [pytest.mark.engine, pytest.mark.each_vllm]

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


def test_nothing_of_ours_hides_a_name_of_vllms(answers: dict[str, Any]) -> None:
    """But what is meant to: an attribute or a helper that hides one breaks an engine in mid-generation."""
    assert answers["clashes"] == [
        *("_free_request", "_update_request_with_output", "has_requests"),
        *("max_num_active_reqs", "max_num_scheduled_tokens"),
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


def test_where_no_board_can_be_had_it_says_so_once_and_goes_on_looking(answers: dict[str, Any]) -> None:
    said, theirs, taken = answers["no_board_to_be_had"]
    for (off, boardless, warned), why in zip(
        said,
        ("No such file or directory", "", "Is a directory", "is not a whole board", "has a live writer"),
        strict=True,
    ):
        assert (off, boardless) == ("", True)
        (words,) = warned
        assert words.startswith("ROSE's probe has no board to write on yet: ")
        assert why in words
    assert theirs == "not a board"
    assert taken[:3] == [3, 2, 3]  # it was another engine's, and that is gone


def test_whatever_goes_wrong_in_it_switches_it_off(answers: dict[str, Any]) -> None:
    why, state = answers["odd_statistics"]
    assert "has no attribute" in why
    assert state == "the serving half was never written"


@pytest.mark.parametrize("when", ["full_disk", "disk_that_fills"])
def test_a_full_disk_keeps_it_from_the_board_until_there_is_room_again(answers: dict[str, Any], when: str) -> None:
    off, boardless, warned, words, rare, tried_again, *then = answers[when]
    assert (off, warned) == ("", 1)
    assert boardless.endswith(f"{when} cannot be written: No space left on device")
    assert words == f"ROSE's probe has no board to write on yet: {boardless}"
    assert rare
    assert tried_again
    assert then == ["", "", [2, 3, 5, 0, 43, 25, 100], 1]  # with what it was told of all the while


def test_a_board_on_a_slow_file_system_is_left_to_itself(answers: dict[str, Any]) -> None:
    """Each write takes a tenth of a step there; where it is one in twenty-five the probe stays."""
    why, steps = answers["slow_file_system"]
    assert why == "its calls took 10% of the time of the engine's steps, allowed is at most 5%"
    assert steps <= 2 * 2.0 / 0.01 + 10
    assert answers["quick_file_system"] == ["", 2000]


@pytest.fixture(scope="module")
def serving(rig: Any) -> Iterator[ServingServer]:
    path = rig.folder / "serving-board"
    claim_quota(path).close()
    server = ServingServer(rig, path, {"VLLM_PLUGINS": "rose_probe", engine_env.SERVING_BOARD: str(path)})
    rig.run(server.start())
    yield server
    rig.run(server.kill())


def test_a_real_server_is_seen_at_work_in_line_and_idle(serving: ServingServer) -> None:
    async def run() -> None:
        assert await serving.seen(lambda state: state is not None and state.kv_blocks_total > 0)
        began_s = time.monotonic()
        work = asyncio.gather(*(serving.complete() for _ in range(8)))
        queue = await serving.seen(lambda state: state is not None and state.waiting > 0)
        assert queue is not None
        assert queue.running == 4
        assert (queue.arrivals, queue.unanswered) == (8, 4)
        assert 0 < queue.oldest_unanswered_at_s <= queue.stepped_at_s
        steady = await serving.seen(lambda state: state is not None and state.step_s > 0 and state.kv_blocks_used > 0)
        assert steady is not None
        assert steady.kv_blocks_used <= steady.kv_blocks_total
        assert await work == [60] * 8
        idle = await serving.seen(lambda state: state is not None and state.running + state.waiting == 0)
        assert idle is not None
        assert idle.steps >= 2 * 60
        assert steady.busy_s < idle.busy_s < time.monotonic() - began_s
        await asyncio.sleep(1.0)  # for a last step that computes nothing
        rest = await serving.seen(lambda _: True)
        await asyncio.sleep(1.0)  # twice as long as it takes to grow stale
        assert (await serving.seen(lambda _: True)) == rest

    serving.rig.run(run())


def test_harm_to_the_board_is_no_harm_to_the_server(serving: ServingServer) -> None:
    async def run() -> None:
        for harm in (lambda: os.truncate(serving.board, 0), serving.board.unlink):
            work = asyncio.gather(*(serving.complete(200) for _ in range(4)))
            await serving.seen(lambda state: state is not None and state.running > 0)
            harm()
            assert await work == [200] * 4
            claim_quota(serving.board).close()
            assert await serving.seen(lambda state: state is not None)

    serving.rig.run(run())


def test_a_server_that_is_killed_and_comes_back_has_its_half_again(serving: ServingServer) -> None:
    async def run() -> None:
        work = [asyncio.create_task(serving.complete(300)) for _ in range(4)]
        busy = await serving.seen(lambda state: state is not None and state.running > 0)
        assert busy is not None
        await serving.kill()
        await asyncio.gather(*work, return_exceptions=True)
        assert await serving.seen(lambda state: state is None) is None
        await serving.start()
        fresh = await serving.seen(lambda state: state is not None)
        assert fresh is not None
        # What the dead one owed its clients it owes nobody now.
        assert (fresh.steps, fresh.arrivals, fresh.idle) == (0, 0, True)
        assert await serving.complete(5) == 5
        assert await serving.seen(lambda state: state is not None and state.arrivals == 1)

    serving.rig.run(run())


def test_a_stopped_server_is_unknown(serving: ServingServer) -> None:
    async def run() -> None:
        assert serving.child is not None
        serving.child.signal(signal.SIGSTOP)
        try:
            assert await serving.seen(lambda state: state is None) is None
        finally:
            serving.child.signal(signal.SIGCONT)
        assert await serving.seen(lambda state: state is not None)
        assert await serving.complete(5) == 5

    serving.rig.run(run())
