"""The load client's figures against the engine's own, from a real vLLM."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rose.waits import WaitBoard
from rose.workload.latencies import summarised
from rose.workload.load_client import LoadClient, LoadSettings
from rose.workload.load_record import LoadRecord, Outcome
from rose.workload.prompts import Prompts
from rose.workload.served_model import served_model
from rose.workload.trace import Trace, TraceRequest

pytestmark = pytest.mark.engine

OUTPUT_TOKENS = 41


async def engine_figures(url: str) -> dict[str, float]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
    return {sample.name.removeprefix("vllm:"): sample.value for family in families for sample in family.samples}


async def replayed(rig: Any, trace: Trace, seed: int) -> tuple[list[LoadRecord], dict[str, float]]:
    """Records, and by how much the engine's own figures grew meanwhile."""
    url = rig.engine.base_url
    model = await served_model(url, 30.0, WaitBoard())
    assert model.context_tokens == 512
    records: list[LoadRecord] = []
    client = LoadClient(LoadSettings(url, model.name), trace, Prompts(trace, 2, 90, seed), record=records.append)
    before = await engine_figures(url)
    await client.run()
    after = await engine_figures(url)
    while after["e2e_request_latency_seconds_count"] - before["e2e_request_latency_seconds_count"] < len(records):
        await asyncio.sleep(0.05)
        after = await engine_figures(url)
    return records, {name: after[name] - before.get(name, 0.0) for name in after}


def test_latencies_agree_with_the_engines_own(rig: Any) -> None:
    requests = tuple(TraceRequest(0.2 * number, 40 + number, OUTPUT_TOKENS) for number in range(10))
    records, engine = rig.run(replayed(rig, Trace("t", "a", requests, 2.0), seed=1))
    summary = summarised(records)
    assert summary.outcomes == {Outcome.COMPLETED: 10}
    assert engine["generation_tokens_total"] == summary.tokens == 10 * OUTPUT_TOKENS
    assert engine["prompt_tokens_total"] == sum(request.prompt_tokens for request in requests)
    assert summary.ttft is not None
    assert summary.tpot is not None
    # The engine's clock starts when it has read the request and stops before the answer is on the wire.
    assert 1.0 <= summary.ttft.mean / (engine["time_to_first_token_seconds_sum"] / 10) < 5.0
    per_token_s = engine["request_time_per_output_token_seconds_sum"] / 10
    assert 0.5 < summary.tpot.mean / per_token_s < 2.0
    for record in records:
        assert sum(record.gaps_s) == pytest.approx((OUTPUT_TOKENS - 1) * (record.tpot_s or 0.0))


def test_prefixes_that_a_trace_shares_hit_the_engines_cache(rig: Any) -> None:
    def trace(shared: int) -> Trace:
        blocks = [tuple(block if block < shared else 100 * number + block for block in range(8)) for number in range(4)]
        requests = tuple(TraceRequest(0.8 * number, 256, 4, blocks[number]) for number in range(4))
        return Trace("t", "a", requests, 3.0, block_tokens=32)

    _, apart = rig.run(replayed(rig, trace(0), seed=2))
    _, alike = rig.run(replayed(rig, trace(6), seed=3))
    assert apart["prefix_cache_hits_total"] == 0
    # The first computes what the other three find: six blocks of 32 tokens each.
    assert alike["prefix_cache_hits_total"] == 3 * 6 * 32
