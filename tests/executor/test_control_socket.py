"""The control socket over a real channel, in front of an engine core that is made up."""

from __future__ import annotations

import asyncio
import re
import stat
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from rose.errors import ConfigError, ContractError, DeadlineExceeded, EngineError, TransferError
from rose.waits import WaitBoard
from rose_executor import control_client
from rose_executor.control_client import ControlClient
from rose_executor.control_server import end_with_core, fail, serve
from rose_executor.engine_env import EngineEnv
from rose_transfer.layout.layout import Layout, LocalTensor, Parameter
from rose_transfer.layout.layout_json import from_json, to_json


class Core:
    """Answers utility calls from a table; a value that is an exception is raised, a callable is called."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._answers = {"rose_loaded": None, **answers}

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        self.calls.append((method, *args))
        answer = self._answers[method]
        if isinstance(answer, Exception):
            raise answer
        return await answer() if callable(answer) else answer


def staged(error: str = "", **changes: Any) -> dict[str, Any]:
    return {"version": 7, "bytes": 40, "verify_ms": 1.5, "error": error, **changes}


def with_socket(
    folder: Path, core: Core, body: Callable[[ControlClient], Awaitable[Any]], timeout_s: float = 10.0
) -> WaitBoard:
    waits = WaitBoard()
    env = EngineEnv("engine-0", "00ff" * 4, 5, folder / "engine-0.sock", folder / "engine-0.page")

    async def run() -> None:
        server = await serve(env, core, "0.32.0")
        try:
            async with ControlClient(env.control_socket, engine_id="engine-0", waits=waits, timeout_s=timeout_s) as it:
                await body(it)
        finally:
            await server.stop(None)

    asyncio.run(run())
    return waits


def test_the_socket_is_private_and_the_version_named_before_it_opens(tmp_path: Path) -> None:
    core = Core(rose_describe={"paused": True, "poisoned": "broke", "version": 5})

    async def body(control: ControlClient) -> None:
        assert core.calls == [("rose_loaded", 5)]
        assert [file.name for file in tmp_path.iterdir()] == ["engine-0.sock"]
        assert stat.S_IMODE((tmp_path / "engine-0.sock").stat().st_mode) == 0o600
        described = await control.describe()
        assert (described.engine_id, described.incarnation, described.vllm_version) == (
            "engine-0",
            "00ff" * 4,
            "0.32.0",
        )
        assert (described.weight_version, described.paused, described.poisoned) == (5, True, "broke")

    with_socket(tmp_path, core, body)


def test_an_engine_that_is_slow_to_take_a_connection_is_waited_for(tmp_path: Path) -> None:
    """As one is on a busy machine, just after its socket has appeared."""

    async def body(control: ControlClient) -> None:
        async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(0.3)
            behind = await asyncio.open_unix_connection(tmp_path / "engine-0.sock")
            await asyncio.gather(passed_on(reader, behind[1]), passed_on(behind[0], writer))

        async def passed_on(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
            while data := await source.read(65_536):
                to.write(data)
            to.close()

        async with await asyncio.start_unix_server(late, tmp_path / "late.sock") as front:
            async with ControlClient(tmp_path / "late.sock", engine_id="engine-0", waits=WaitBoard()) as it:
                assert (await it.describe()).weight_version == 5
            front.close()

    with_socket(tmp_path, Core(rose_describe={"paused": False, "poisoned": "", "version": 5}), body)


def test_layouts_are_read_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout("engine-0", {"a": Parameter((4,), "bfloat16")}, {"a": LocalTensor((4,), "bfloat16")}, ())
    read_in: list[str] = []

    def noted(text: str) -> Layout:
        read_in.append(threading.current_thread().name)
        return from_json(text)

    monkeypatch.setattr(control_client, "from_json", noted)

    async def body(control: ControlClient) -> None:
        assert await control.layouts() == (layout, layout)

    with_socket(tmp_path, Core(rose_layouts=[{"layout": to_json(layout), "error": ""}] * 2), body)
    assert len(read_in) == 2
    assert threading.main_thread().name not in read_in


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda text: text.replace('"bfloat16",[4]', '"bfloat16",[' + "9" * 400 + "]", 1), "below 2^63"),
        (lambda text: text.replace('"bfloat16",[4]', '"bfloat16",[' + "1," * 8 + "1]", 1), "at most 8 numbers"),
        (lambda text: text.replace('"pads":[]', '"pads":' + "[" * 100_000), "RecursionError"),
        (lambda text: text.replace('"engine-0"', str(list(range(100_000)))), "not a string"),
    ],
)
def test_a_layout_without_bounds_is_refused_in_a_short_line(spoil: Callable[[str], str], says: str) -> None:
    text = to_json(Layout("engine-0", {"a": Parameter((4,), "bfloat16")}, {}, ()))
    assert spoil(text) != text
    with pytest.raises(TransferError, match=re.escape(says)) as told:
        from_json(spoil(text))
    assert len(str(told.value)) < 400


def test_staging_waits_for_every_worker(tmp_path: Path) -> None:
    answers = iter([[None, None], [staged(), None], [staged(), staged(verify_ms=9.0)]])

    async def next_answer() -> Any:
        return next(answers)

    core = Core(rose_stage=None, rose_staged=next_answer)

    async def body(control: ControlClient) -> None:
        reply = await control.stage(7, Path("/somewhere"), [("a1", False), ("b2", True)])
        assert (reply.encoded_bytes, reply.verify_ms) == (80, 9.0)
        way = [("a1", False), ("b2", True)]
        assert core.calls[1:] == [("rose_stage", 7, "/somewhere", way), *[("rose_staged",)] * 3]

    with_socket(tmp_path, core, body)


def test_a_worker_that_refuses_is_a_transfer_error(tmp_path: Path) -> None:
    async def body(control: ControlClient) -> None:
        with pytest.raises(TransferError, match="version 7 is refused: no such tensor"):
            await control.stage(7, Path("/somewhere"), [])

    with_socket(tmp_path, Core(rose_stage=None, rose_staged=[staged(), staged("no such tensor")]), body)


def test_committing_pausing_and_resuming_reach_the_core(tmp_path: Path) -> None:
    done = {"undone": "", "pause_ms": 3.0, "drain_ms": 0.5, "load_ms": 2.0}
    core = Core(rose_commit=done, pause_scheduler=None, rose_resume=None)

    async def body(control: ControlClient) -> None:
        committed = await control.commit(7)
        await control.commit(7, keep_kv=True)
        assert (committed.pause_ms, committed.load_ms) == (3.0, 2.0)
        await control.pause()
        await control.resume()
        commits = [("rose_commit", 7, False), ("rose_commit", 7, True)]
        assert core.calls[1:] == [*commits, ("pause_scheduler", "keep", False), ("rose_resume",)]

    with_socket(tmp_path, core, body)


def test_a_commit_that_was_taken_back_is_a_transfer_error(tmp_path: Path) -> None:
    async def body(control: ControlClient) -> None:
        with pytest.raises(TransferError, match="version 7 was taken back: tile 3"):
            await control.commit(7)

    undone = {"undone": "tile 3", "pause_ms": 3.0, "drain_ms": 0.5, "load_ms": 2.0}
    with_socket(tmp_path, Core(rose_commit=undone), body)


def test_a_failure_in_the_core_arrives_with_its_text(tmp_path: Path) -> None:
    core = Core(rose_commit=Exception("Call to rose_commit method failed: version 7 is not staged"))

    async def body(control: ControlClient) -> None:
        with pytest.raises(EngineError, match="version 7 is not staged"):
            await control.commit(7)

    with_socket(tmp_path, core, body)


def test_an_engine_that_does_not_answer_runs_into_the_deadline(tmp_path: Path) -> None:
    async def never() -> Any:
        await asyncio.sleep(60)

    async def body(control: ControlClient) -> None:
        with pytest.raises(DeadlineExceeded, match="engine-0: no description"):
            await control.describe()

    assert with_socket(tmp_path, Core(rose_describe=never), body, timeout_s=0.1).snapshot() == ()


@pytest.mark.parametrize("version", [-1, 2**63, 2**64, 1.5, "7", None])
def test_what_is_no_version_does_not_reach_the_engine(tmp_path: Path, version: Any) -> None:
    """A missing one would arrive as version 0."""
    core = Core()

    async def body(control: ControlClient) -> None:
        for call in (
            control.stage(version, tmp_path, []),
            control.apply(version, tmp_path, []),
            control.commit(version),
        ):
            with pytest.raises(TransferError, match="is no number of a version"):
                await call

    with_socket(tmp_path, core, body)
    assert core.calls == [("rose_loaded", 5)]


@pytest.mark.parametrize(
    ("objects", "way", "keep_kv", "says"),
    [
        (None, [], False, "no folder of objects"),
        (Path("/some\udcffwhere"), [], False, "no folder of objects"),
        (Path("/somewhere"), None, False, "is no way"),
        (Path("/somewhere"), ["a1"], False, "is no way"),
        (Path("/somewhere"), [(3, False)], False, "is no way"),
        (Path("/somewhere"), [("a1", "back")], False, "is no way"),
        (Path("/somewhere"), [("a1", False)], "yes", "keep_kv='yes'"),
    ],
)
def test_what_makes_no_sense_to_an_engine_is_refused_in_words(
    tmp_path: Path, objects: Any, way: Any, keep_kv: Any, says: str
) -> None:
    async def body(control: ControlClient) -> None:
        with pytest.raises(TransferError, match=says):
            await control.apply(7, objects, way, keep_kv=keep_kv)

    with_socket(tmp_path, Core(rose_stage=None, rose_staged=[staged()]), body)


def test_a_folder_is_named_as_the_engine_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core(rose_stage=None, rose_staged=[staged()])
    monkeypatch.chdir(tmp_path)

    async def body(control: ControlClient) -> None:
        await control.stage(7, Path("objects"), [])

    with_socket(tmp_path, core, body)
    assert core.calls[1] == ("rose_stage", 7, str(tmp_path / "objects"), [])


@pytest.mark.parametrize("timeout_s", [-1.0, 0.0, float("nan"), float("inf")])
def test_a_deadline_that_is_none_is_refused(tmp_path: Path, timeout_s: float) -> None:
    with pytest.raises(ContractError, match="a time that ends"):
        ControlClient(tmp_path / "x.sock", engine_id="engine-0", waits=WaitBoard(), timeout_s=timeout_s)


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long for a Unix socket"):
        ControlClient(tmp_path / ("x" * 100), engine_id="engine-0", waits=WaitBoard())


def test_any_path_names_its_socket() -> None:
    with tempfile.TemporaryDirectory(prefix="a%41 ü?#") as name:
        with_socket(Path(name), Core(rose_resume=None), lambda control: control.resume())


def test_closing_ends_a_call_that_is_under_way_and_refuses_the_next(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def never() -> Any:
        asked.set()
        await asyncio.sleep(60)

    async def body(control: ControlClient) -> None:
        describing = asyncio.create_task(control.describe())
        await asked.wait()
        await control.close()
        with pytest.raises(EngineError, match="the control client was closed"):
            await describing
        with pytest.raises(ContractError, match="is closed"):
            await control.describe()

    with_socket(tmp_path, Core(rose_describe=never), body)


def test_waits_are_named_for_the_engine(tmp_path: Path) -> None:
    answered = asyncio.Event()

    async def describe() -> Any:
        await answered.wait()
        return {"paused": False, "poisoned": "", "version": 5}

    async def body(control: ControlClient) -> None:
        asking = asyncio.create_task(control.describe())
        await asyncio.sleep(0.02)
        board = control._waits.snapshot()
        assert [(wait.what, wait.whom) for wait in board] == [("description", "engine-0")]
        answered.set()
        await asking

    with_socket(tmp_path, Core(rose_describe=describe), body)


def test_nobody_there_is_an_engine_error(tmp_path: Path) -> None:
    async def run() -> None:
        async with ControlClient(tmp_path / "none.sock", engine_id="engine-0", waits=WaitBoard()) as control:
            await control.describe()

    with pytest.raises(EngineError, match="engine-0: no description: unavailable"):
        asyncio.run(run())


def test_an_error_travels_whole(tmp_path: Path) -> None:
    sent = ConfigError("what", expected="expected", to_do="to do")

    async def describe() -> Any:
        return None

    class Refusing:
        """A servicer's context is all that `fail` needs."""

        async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any) -> None:
            self.failure = dict(trailing_metadata)

    async def run() -> Any:
        context = Refusing()
        with pytest.raises(ConfigError):
            await fail(context, sent)
        control = ControlClient(tmp_path / "x.sock", engine_id="engine-0", waits=WaitBoard())
        metadata = grpc.aio.Metadata(*context.failure.items())
        error = grpc.aio.AioRpcError(grpc.StatusCode.FAILED_PRECONDITION, grpc.aio.Metadata(), metadata)
        received = control._translated("thing", error, 10.0)
        await control.close()
        return received

    received = asyncio.run(run())
    assert type(received) is ConfigError
    assert (received.what, received.expected, received.to_do) == ("what", "expected", "to do")


def test_a_socket_that_cannot_be_opened_says_where(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot open the control socket"):
        with_socket(tmp_path / "no", Core(), lambda control: control.describe())


def test_the_server_ends_with_its_core(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[int] = []
    monkeypatch.setattr("rose_executor.control_server.signal.raise_signal", raised.append)
    looks = iter([False, False, True])

    class Client:
        @property
        def errored(self) -> bool:
            assert not raised
            return next(looks)

    asyncio.run(end_with_core(Client()))
    assert raised == [15]
