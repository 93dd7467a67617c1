"""The load of the demo: the same part again and again, whatever happens to its clients."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import astuple
from pathlib import Path

import pytest
from fake_engine import FakeEngine, serving, streaming

from rose.demo import load
from rose.demo.cores import Placing, split_cores
from rose.demo.load import LoadClients, LoadPlan
from rose.errors import ClusterError
from rose.waits import WaitBoard
from rose.workload.scaling import Scaling

DEADLINE_S = 120.0
SCALING_OPTIONS = (
    *("--spread-s", "--window-s", "--start-s", "--rate-rps", "--keep-s", "--prompt-scale", "--output-scale"),
    *("--context", "--seed"),
)
"""Of the load's client, in the order of the fields of `Scaling`."""
TRACE = "arrival_s,prompt_tokens,output_tokens\n0,20,4\n0.05,30,3\n"


def clients(engine: FakeEngine, folder: Path, said: list[str]) -> LoadClients:
    trace = folder / "trace.csv"
    trace.write_text(TRACE)
    placing = Placing(split_cores({0, 1}), yields=False)
    placing.with_load = lambda pid: None  # type: ignore[method-assign]
    return LoadClients(
        LoadPlan(str(trace), Scaling(prompt_scale=0.5), "5:384"),
        1.0,
        engine.url,
        folder,
        placing,
        WaitBoard(),
        told=lambda state, detail: said.append(f"{state} {detail}"),
        at=said.append,
    )


def test_every_replay_is_the_same_requests_and_says_where_it_is_scraped(tmp_path: Path) -> None:
    said: list[str] = []

    async def run() -> LoadClients:
        async with serving(FakeEngine(streaming(gap_s=0.001))) as engine:
            found = clients(engine, tmp_path, said)
            alone = await asyncio.wait_for(found.alone(), DEADLINE_S)
            assert [record.tokens for record in sorted(alone.records, key=lambda one: one.index)] == [4, 3]
            again = asyncio.create_task(found.again())
            async with asyncio.timeout(DEADLINE_S):
                while len(found.files) < 2:
                    await asyncio.sleep(0.02)
            again.cancel()
            await asyncio.gather(again, return_exceptions=True)
            await found.stop()
            prompts = [asked.body["prompt"] for asked in engine.asked]
            assert len({str(prompt) for prompt in prompts}) == len(prompts) > 3
            assert {len(prompt) for prompt in prompts} == {10, 15}
            return found

    found = asyncio.run(run())
    assert [replay.end is not None for replay in found.replays()][:1] == [True]
    assert said[0] == "starting alone"
    assert said[1].startswith("http://127.0.0.1:")
    assert said[2:4] == ["replaying alone", "ended alone"]


def test_a_client_that_is_killed_costs_its_own_last_records_and_too_many_deaths_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "DEATHS_MAX", 1)
    said: list[str] = []

    async def run() -> LoadClients:
        async with serving(FakeEngine(streaming(gap_s=30.0))) as engine:
            found = clients(engine, tmp_path, said)
            again = asyncio.create_task(found.again())
            async with asyncio.timeout(DEADLINE_S):
                while not again.done():
                    if found._client is not None and said and said[-1].startswith("replaying"):
                        said.append("killed")
                        found._client.send(signal.SIGKILL)
                    await asyncio.sleep(0.02)
            with pytest.raises(ClusterError, match=r"died 2 times; the last was killed by SIGKILL"):
                again.result()
            return found

    found = asyncio.run(run())
    assert [replay.end for replay in found.replays()] == [None, None]
    assert all(replay.head["requests"] == 2 for replay in found.replays())


def test_a_client_that_hangs_is_ended_and_counts_as_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "DEATHS_MAX", 0)
    monkeypatch.setattr(load, "MARGIN_S", 2.0)

    async def run() -> None:
        async with serving(FakeEngine(streaming(gap_s=3600.0))) as engine:
            found = clients(engine, tmp_path, [])
            with pytest.raises(
                ClusterError, match=r"died 1 times; the last hung: load: no end of the replay after 3 s"
            ):
                await asyncio.wait_for(found.again(), DEADLINE_S)
            assert found._client is not None
            assert found._client.exit_code is not None

    asyncio.run(run())


def test_without_its_first_replay_there_is_no_demo(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(FakeEngine(streaming(), context=None)) as engine:
            found = clients(engine, tmp_path, [])
            (tmp_path / "alone.jsonl").write_text("in the way")
            with pytest.raises(ClusterError, match="load client ended with 2"):
                await asyncio.wait_for(found.alone(), DEADLINE_S)

    asyncio.run(run())


def test_what_the_plan_leaves_out_is_left_out_of_the_command_line(tmp_path: Path) -> None:
    plan = LoadPlan("azure_2023_conv", Scaling(window_s=60.0, output_scale=0.125), "5:9")
    arguments = plan.arguments("http://x", tmp_path / "r", 0)
    assert "--rate-rps" not in arguments
    assert arguments[arguments.index("--window-s") + 1] == "60.0"
    assert arguments[arguments.index("--output-scale") + 1] == "0.125"


def test_what_the_plan_says_is_what_its_client_is_told(tmp_path: Path) -> None:
    whole = Scaling(9.0, 60.0, 5.0, 2.0, 30.0, 0.5, 0.125, 512, 3)
    assert None not in astuple(whole)
    arguments = LoadPlan("azure_2023_conv", whole, "5:9").arguments("http://x", tmp_path / "r", 0)
    told = [float(arguments[arguments.index(option) + 1]) for option in SCALING_OPTIONS]
    assert told == list(astuple(whole))
