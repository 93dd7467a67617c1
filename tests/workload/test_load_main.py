"""The load client as a process: its file, its metrics, its signals, its ends."""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import typer
from fake_engine import FakeEngine, event, serving, streaming, stuck
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from rose.workload.load_main import main
from rose.workload.load_record import Outcome
from rose.workload.record_file import RecordReader, read_replay

TRACE = "arrival_s,prompt_tokens,output_tokens\n0,100,40\n0.5,200,80\n1,300,20\n"


@asynccontextmanager
async def started(
    url: str, trace: Path | str, records: Path, *options: str, file_bytes_max: int | None = None
) -> AsyncIterator[Process]:
    def limit() -> None:
        if file_bytes_max is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes_max, file_bytes_max))

    arguments = ["--url", url, "--trace", str(trace), "--records", str(records), *options]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rose.workload.load_main", *arguments, stdout=PIPE, stderr=PIPE, preexec_fn=limit
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ended(process: Process) -> tuple[int, str, str]:
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def run_whole(engine: FakeEngine, trace: Path | str, records: Path, *options: str) -> tuple[int, str, str]:
    async def run() -> tuple[int, str, str]:
        async with serving(engine), started(engine.url, trace, records, *options) as process:
            return await ended(process)

    return asyncio.run(run())


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def test_a_whole_replay(tmp_path: Path, trace: Path) -> None:
    engine = FakeEngine(streaming(gap_s=0.001), context=150)
    records = tmp_path / "records.jsonl"
    status, out, err = run_whole(engine, trace, records, "--output-scale", "0.25", "--token-ids", "5:7", "--rate-rps=6")
    assert (status, err) == (0, "")
    replay = read_replay(records)
    assert replay.end is not None
    assert replay.end["signal"] == 0
    assert (replay.end["sent"], replay.end["ended"], replay.end["lost"]) == (3, 3, 0)
    assert [record.outcome for record in replay.records] == [Outcome.COMPLETED] * 3
    prefix = replay.head["request_prefix"]
    asked = {one.request_id.removeprefix(f"{prefix}-"): one.body for one in engine.asked}
    # Scaled as asked for, then shortened to what the engine takes, and both are told.
    assert [len(asked[str(index)]["prompt"]) for index in range(3)] == [100, 130, 145]
    assert [asked[str(index)]["max_tokens"] for index in range(3)] == [10, 20, 5]
    assert {token for body in asked.values() for token in body["prompt"]} == {5, 6}
    assert replay.head["requests"] == 3
    assert replay.head["model"] == "tiny"
    assert [line.split()[0] for line in replay.head["history"]] == ["time", "prompts", "all"]
    for line in (*replay.head["history"], "3 requests: 3 completed; 0 not sent; 35 tokens"):
        assert line in out


def test_metrics_scrape_clean_while_it_runs_and_sigterm_ends_it(tmp_path: Path) -> None:
    engine = FakeEngine(stuck([event(1)]))
    records = tmp_path / "records.jsonl"

    async def run() -> tuple[dict[str, float], tuple[int, str, str]]:
        options = ("--window-s", "60", "--rate-rps", "40")
        async with serving(engine), started(engine.url, "azure_2023_conv", records, *options) as process:
            while len(engine.asked) < 3:
                await asyncio.sleep(0.01)
            reader = RecordReader(records)
            while not reader.replay.head:
                reader.read()
                await asyncio.sleep(0.01)
            samples: dict[str, float] = {}
            while samples.get("rose_load_in_flight", 0) < 3:
                samples = await scraped(reader.replay.head["metrics_url"])
                await asyncio.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            return samples, await ended(process)

    samples, (status, out, err) = asyncio.run(run())
    assert (status, err) == (0, "")
    assert samples["rose_open_waits"] >= 3
    assert samples["rose_load_records_lost"] == 0
    replay = read_replay(records)
    assert "CC-BY 4.0" in replay.head["attribution"]
    assert replay.head["attribution"] in out
    assert replay.end is not None
    assert replay.end["signal"] == signal.SIGTERM
    assert {record.outcome for record in replay.records} == {Outcome.CUT}
    assert replay.end["sent"] == replay.end["ended"] == len(replay.records) >= 3
    assert replay.end["unsent"] == replay.head["requests"] - replay.end["sent"]


async def scraped(url: str) -> dict[str, float]:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        families = text_string_to_metric_families(await answer.text())
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_an_engine_that_dies_in_mid_replay_ends_no_replay(tmp_path: Path, trace: Path) -> None:
    records = tmp_path / "records.jsonl"

    async def run() -> tuple[int, str, str]:
        engine = FakeEngine(stuck([event(1)]))
        async with serving(engine):
            starting = started(engine.url, trace, records, "--deadline-s", "30")
            process = await starting.__aenter__()
            while not engine.open:
                await asyncio.sleep(0.01)
        try:
            return await ended(process)
        finally:
            await starting.__aexit__(None, None, None)

    status, out, _ = asyncio.run(run())
    assert status == 0
    assert "3 requests: 3 broken" in out
    assert [record.tokens for record in read_replay(records).records if record.index == 0] == [1]


def test_records_that_found_no_room_are_told_and_the_replay_goes_on(tmp_path: Path, trace: Path) -> None:
    records = tmp_path / "records.jsonl"

    async def run() -> tuple[int, str, str]:
        engine = FakeEngine(streaming())
        async with serving(engine), started(engine.url, trace, records, file_bytes_max=1000) as process:
            return await ended(process)

    status, out, _ = asyncio.run(run())
    assert status == 1
    assert "3 requests: 3 completed" in out
    assert "records lost: [Errno 27] File too large" in out
    replay = read_replay(records)
    assert replay.head
    assert len(replay.records) < 3


def test_ctrl_c_ends_it_with_130(tmp_path: Path, trace: Path) -> None:
    engine = FakeEngine(stuck([event(1)]))

    async def run() -> tuple[int, str, str]:
        async with serving(engine), started(engine.url, trace, tmp_path / "records.jsonl") as process:
            while not engine.open:
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGINT)
            return await ended(process)

    assert asyncio.run(run())[0] == 130


def test_a_kill_leaves_what_had_ended(tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"

    async def run() -> None:
        async with serving(FakeEngine(streaming())) as engine:
            options = ("--rate-rps", "200", "--output-scale", "0.01")
            async with started(engine.url, "azure_2023_conv", records, *options) as process:
                reader = RecordReader(records)
                while len(reader.replay.records) < 50:
                    await asyncio.sleep(0.01)
                    if records.exists():
                        reader.read()
                process.kill()
                await process.wait()

    asyncio.run(run())
    replay = read_replay(records)
    assert len(replay.records) >= 50
    assert (replay.end, replay.unreadable) == (None, 0)


WRONG: list[tuple[list[str], int, str]] = [
    (["--trace", "none.csv"], 2, "config: none.csv: No such file or directory"),
    (["--token-ids", "9:3"], 2, "token ids '9:3'"),
    (["--token-ids", "a:b"], 2, "token ids 'a:b'"),
    (["--rate-rps", "0"], 2, "a rate of 0.0"),
    (["--window-s", "nan"], 2, "a window of nan"),
    (["--in-flight-max", "0"], 2, "Invalid value"),
    (["--ready-timeout-s", "0.2"], 1, "no list of models after 0.2 s"),
]


@pytest.mark.parametrize(("options", "expected", "why"), WRONG, ids=lambda one: str(one)[:40])
def test_nonsense_is_named_and_leaves_no_file(
    tmp_path: Path, trace: Path, options: list[str], expected: int, why: str
) -> None:
    records = tmp_path / "records.jsonl"
    app = typer.Typer()
    app.command()(main)
    given = ["--url", "http://127.0.0.1:1", "--trace", str(trace), "--records", str(records), *options]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == expected
    assert why in result.stderr
    assert not records.exists()


def test_a_port_that_is_none_is_named(tmp_path: Path, trace: Path) -> None:
    records = tmp_path / "records.jsonl"
    status, _, err = run_whole(FakeEngine(streaming()), trace, records, "--metrics-port", "99999")
    assert status == 1
    assert "port 99999 for metrics" in err
    assert "Traceback" not in err
    assert not records.exists()


def test_a_file_that_exists_is_not_touched(tmp_path: Path, trace: Path) -> None:
    records = tmp_path / "records.jsonl"
    records.write_text("precious")
    status, _, err = run_whole(FakeEngine(streaming()), trace, records)
    assert (status, records.read_text()) == (2, "precious")
    assert "exists" in err
