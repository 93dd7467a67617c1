"""A real engine's lives: started, found, lost, started again, and never left over."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
from pathlib import Path
from typing import Any

import psutil
import pytest

from rose.errors import ClusterError, ConfigError, DeadlineExceeded, EngineError
from rose.records import VersionSpan
from rose_executor.page_reader import PageReader
from rose_executor.token_route import EngineLost

pytestmark = pytest.mark.engine

DEADLINE_S = 30.0


def session_processes(engine: Any) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _session(process.pid) == engine.pid]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


async def stream_until(rig: Any, tokens: int, request_id: str, **options: Any) -> asyncio.Task[Any]:
    """A long answer under way, with at least `tokens` received."""
    enough = asyncio.Event()
    received = 0

    def count(ids: tuple[int, ...]) -> None:
        nonlocal received
        received += len(ids)
        if received >= tokens:
            enough.set()

    route = rig.route(**options)
    task = asyncio.create_task(
        route.generate(request_id, [5, 6, 7], max_tokens=480, temperature=0.0, stop_token_ids=(), on_tokens=count)
    )
    await asyncio.wait_for(enough.wait(), DEADLINE_S)
    return task


def test_the_engine_describes_itself(rig: Any) -> None:
    described = rig.run(rig.engine.control.describe())
    assert described.engine_id == "engine-0"
    assert described.incarnation == rig.engine.incarnation == rig.engine.page.incarnation
    assert described.pid == rig.engine.pid
    assert rig.engine.base_url == f"http://127.0.0.1:{described.http_port}"
    assert (described.weight_version, described.paused, described.poisoned) == (0, False, "")


def test_nothing_but_the_token_routes_listens_and_the_socket_is_private(rig: Any) -> None:
    mode = rig.engine.settings.control_socket.stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600
    listening = {
        connection.laddr.ip
        for process in session_processes(rig.engine)
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}

    async def development_routes() -> set[int]:
        statuses = set()
        for path in ("pause", "resume", "reset_prefix_cache", "collective_rpc", "update_weights"):
            async with rig.session.post(f"{rig.engine.base_url}/{path}", json={}) as response:
                statuses.add(response.status)
        return statuses

    assert rig.run(development_routes()) == {404}


def test_the_page_counts_exactly_what_was_sampled(rig: Any) -> None:
    async def run() -> None:
        route, page = rig.route(), rig.engine.page
        before = page.total()
        outputs = await asyncio.gather(
            *(
                route.generate(f"count-{i}", [3, 4, i + 2], max_tokens=7 + i, temperature=1.0, stop_token_ids=[9])
                for i in range(24)
            )
        )
        assert page.total() - before == sum(len(output.output_ids) for output in outputs)
        for i, output in enumerate(outputs):
            count = page.request(f"count-{i}")
            assert (count.tokens, count.finished) == (len(output.output_ids), True)
            assert output.versions == (VersionSpan(0, 0, count.tokens),)
        assert page.steps > 0
        assert page.kv_tokens > 0
        assert page.kv_tokens % rig.engine.settings.block_size == 0

    rig.run(run())


@pytest.mark.each_vllm
def test_a_cancelled_answer_is_aborted_and_its_count_final(rig: Any) -> None:
    async def run() -> None:
        task = await stream_until(rig, 4, "cancelled")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(DEADLINE_S):
            while not rig.engine.page.request("cancelled").finished:
                await asyncio.sleep(0.01)
        assert 4 <= rig.engine.page.request("cancelled").tokens < 480

    rig.run(run())


def test_log_probs_are_of_the_distribution_that_was_sampled_from(rig: Any) -> None:
    """At temperature 2 the reported values are those at temperature 1, halved and normalised again."""

    async def top(request_id: str, temperature: float) -> dict[int, float]:
        output = await rig.route().generate(
            request_id, [5, 6, 7], max_tokens=1, temperature=temperature, stop_token_ids=(), top_logprobs=20
        )
        return dict(output.top[0])

    flat, sharp = rig.run(top("hot", 2.0)), rig.run(top("cold", 1.0))
    common = sorted(flat.keys() & sharp.keys())
    first = common[0]
    for token in common[1:]:
        assert flat[token] - flat[first] == pytest.approx((sharp[token] - sharp[first]) / 2, abs=1e-4)


def test_a_prompt_longer_than_the_context_is_refused_without_harm(rig: Any) -> None:
    async def run(prompt: list[int]) -> Any:
        return await rig.route().generate(
            f"long-{len(prompt)}", prompt, max_tokens=4, temperature=1.0, stop_token_ids=()
        )

    with pytest.raises(EngineError, match="refused") as caught:
        rig.run(run([5] * 600))
    assert not isinstance(caught.value, EngineLost)
    assert len(rig.run(run([5] * 500)).output_ids) == 4


def test_paused_answers_wait_and_go_on(rig: Any) -> None:
    async def run() -> None:
        task = await stream_until(rig, 4, "paused")
        await rig.engine.control.pause()
        assert (await rig.engine.control.describe()).paused
        steps = rig.engine.page.steps
        await asyncio.sleep(0.1)
        assert rig.engine.page.steps == steps
        assert not task.done()
        await rig.engine.control.resume()
        output = await asyncio.wait_for(task, DEADLINE_S)
        assert len(output.output_ids) == 480

    rig.run(run())


@pytest.mark.parametrize("victim", ["group", "api server", "engine core"])
def test_a_killed_engine_loses_the_stream_but_no_token_and_comes_back(fresh_rig: Any, victim: str) -> None:
    rig = fresh_rig

    async def run() -> None:
        engine, page = rig.engine, rig.engine.page
        processes = session_processes(engine)
        assert {page.pid, engine.pid} <= {process.pid for process in processes}
        task = await stream_until(rig, 8, "killed")
        if victim == "group":
            engine.kill()
        else:
            os.kill(engine.pid if victim == "api server" else page.pid, signal.SIGKILL)
        with pytest.raises(EngineLost) as caught:
            await asyncio.wait_for(task, DEADLINE_S)
        await asyncio.wait_for(engine.wait_dead(), DEADLINE_S)
        assert engine.death().startswith("its engine core died: " if victim == "engine core" else "ended with code -9")
        assert not engine.alive
        assert not any(process.is_running() for process in processes)
        partial, count = caught.value.partial, page.request("killed")
        assert 8 <= len(partial.output_ids) <= count.tokens
        assert (count.first_version, count.last_version) == (0, 0)
        total = page.total()

        await engine.start(0)
        assert engine.page.incarnation != page.incarnation
        assert (engine.page.total(), page.total()) == (0, total)
        again = await rig.route().generate("killed", [5, 6, 7], max_tokens=480, temperature=0.0, stop_token_ids=())
        assert again.output_ids[: len(partial.output_ids)] == partial.output_ids
        page.discard()
        assert PageReader(engine.page.path).total() == 480

    rig.run(run())


def test_stopping_leaves_no_process_and_no_socket_and_the_page_stays(rig: Any) -> None:
    async def run() -> None:
        engine = rig.new_engine("engine-stop")
        await engine.start(5)
        processes = session_processes(engine)
        assert (await engine.control.describe()).weight_version == engine.page.version == 5
        with pytest.raises(EngineError, match="running already"):
            await engine.start(5)
        await engine.stop()
        assert not any(process.is_running() for process in processes)
        assert not engine.settings.control_socket.exists()
        assert engine.page.total() == 0
        engine.page.discard()
        await engine.stop()

    rig.run(run())


def test_a_taken_port_is_named_before_anything_is_started(rig: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        engine = rig.new_engine("engine-port", port=port)
        with pytest.raises(ClusterError, match=f"port {port} of engine-port"):
            rig.run(engine.start(0))
    assert not engine.alive


def test_a_chosen_port_is_used(rig: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    engine = rig.new_engine("engine-chosen", port=port)
    rig.run(engine.start(0))
    assert engine.base_url == f"http://127.0.0.1:{port}"
    rig.run(engine.stop())
    engine.page.discard()


def test_what_is_no_model_is_refused_before_anything_is_started(rig: Any, tmp_path: Path) -> None:
    engine = rig.new_engine("engine-none")
    with pytest.raises(ConfigError, match="is not a model folder"):
        rig.run(engine.start(0, tmp_path))
    with pytest.raises(EngineError, match="never started"):
        engine.pid  # noqa: B018 - the property itself is under test


def test_a_runtime_directory_too_long_for_a_socket_is_refused(rig: Any, tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    with pytest.raises(ConfigError, match="too long for a socket"):
        rig.run(rig.new_engine("engine-long", runtime_dir=folder).start(0))
    with pytest.raises(ConfigError, match="does not exist"):
        rig.run(rig.new_engine("engine-long", runtime_dir=tmp_path / "no").start(0))


def test_an_engine_that_dies_while_starting_shows_its_log(rig: Any) -> None:
    engine = rig.new_engine("engine-dies", block_size=16)
    with pytest.raises(
        EngineError, match=r"(?s)engine-dies ended with code 1 while starting: .*block size.*last lines of its log:"
    ):
        rig.run(engine.start(0))
    assert not engine.alive
    assert not list(rig.folder.glob("engine-dies*.page"))


def test_an_engine_that_takes_too_long_is_ended(rig: Any) -> None:
    engine = rig.new_engine("engine-late", start_timeout_s=0.3)
    with pytest.raises(DeadlineExceeded, match=r"engine-late: no engine start after 0\.3 s"):
        rig.run(engine.start(0))
    assert not engine.alive
    assert session_processes(engine) == []
    assert rig.waits.snapshot() == ()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_engine_spawned_plainly_is_the_same(rig: Any) -> None:
    """The way of GPU machines: every process of the engine imports for itself."""

    async def run() -> None:
        from rose_executor.engine_process import EngineProcess
        from rose_executor.launcher import SpawnLauncher
        from rose_executor.token_route import TokenRoute

        settings = rig.new_engine("engine-spawned", start_timeout_s=300.0).settings
        engine = EngineProcess(settings, SpawnLauncher(), rig.waits)
        await engine.start(2)
        processes = session_processes(engine)
        assert {engine.pid, engine.page.pid} <= {process.pid for process in processes}
        route = TokenRoute(engine.base_url, rig.session)
        output = await route.generate("r", [5], max_tokens=3, temperature=1.0, stop_token_ids=())
        assert output.versions == (VersionSpan(2, 0, 3),)
        assert engine.page.total() == 3
        os.kill(engine.pid, signal.SIGKILL)
        assert await asyncio.wait_for(engine.wait_dead(), DEADLINE_S) == -signal.SIGKILL
        async with asyncio.timeout(DEADLINE_S):
            while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
                await asyncio.sleep(0.01)
        engine.page.discard()

    rig.run(run())
